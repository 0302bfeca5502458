"""One video spread over two processes, by diffusers' context parallelism: what one process gives alone."""

import datetime
import itertools

import pytest
import torch
from diffusers import ContextParallelConfig
from diffusers.hooks.context_parallel import PartitionAnythingSharder
from tiny_pipelines import inputs, tiny_transformer
from torch.distributed.device_mesh import init_device_mesh

import mhla_hf
from mhla_hf import Blocks
from mhla_hf.nn.grid import GridMixing
from mhla_hf.ops.api import mhla
from mhla_hf.ops.shards import sharded_mhla

SIZE = (3, 8, 10)  # 60 tokens


def make(**settings):
    """A converted model, wholly MHLA, of which every new parameter matters."""
    model = mhla_hf.convert(tiny_transformer("wan"), layers="all", **{"gate": True, **settings})
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".mhla." in name:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def train_step(model):
    """Output and gradients of one step."""
    output = model(**inputs("wan", SIZE, batch=2), return_dict=False)[0]
    output.square().mean().backward()
    return output.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def one_process(rank, port, folder):
    torch.set_num_threads(1)
    store = torch.distributed.TCPStore("127.0.0.1", port, 2, rank == 0, timeout=datetime.timedelta(seconds=60))
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.accelerator.device_count = lambda: 1  # diffusers divides by it, and a CPU is no accelerator
    counted, reduced = [], torch.distributed.all_reduce

    def count(tensor, *args, **kwargs):
        counted.append(tuple(tensor.shape))
        return reduced(tensor, *args, **kwargs)

    torch.distributed.all_reduce = count
    result = {}
    for name, settings in (("free", {}), ("normalised", {"normalize": True, "output_norm": False})):
        model = make(**settings)
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("ring", "ulysses"))
        model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=2, mesh=mesh))
        counted.clear()
        with torch.no_grad():
            output = model(**inputs("wan", SIZE, batch=2), return_dict=False)[0]
        assert len(counted) == 3, counted  # one per layer
        again, grads = train_step(model)
        assert torch.equal(output, again)
        result[name] = output, grads
    model = make(cpe=3)
    model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=2, mesh=mesh))
    with pytest.raises(ValueError, match="shard: got tokens of one process"):
        model(**inputs("wan", SIZE), return_dict=False)
    torch.save(result, f"{folder}/{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*all_gather_tensor. is deprecated:FutureWarning")  # by diffusers itself
def test_two_processes_give_what_one_gives(tmp_path):
    listener = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True)
    port = listener.port
    del listener
    arguments = (port, str(tmp_path))
    torch.multiprocessing.start_processes(one_process, arguments, nprocs=2, start_method="fork")
    parts = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for name, settings in (("free", {}), ("normalised", {"normalize": True, "output_norm": False})):
        output, grads = train_step(make(**settings))
        for rank in range(2):
            assert (parts[rank][name][0] - output).norm() <= 1e-5 * output.norm()
        for key, expected in grads.items():  # each process has the share of its tokens
            got = sum(part[name][1][key] for part in parts)
            assert (got - expected).norm() <= 1e-5 * expected.norm() + 1e-8, key


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("per_head", [True, False])
def test_any_contiguous_shards_add_up(normalize, per_head):
    grid, counts, cuts = (5, 7, 9), (3, 5, 4), (0, 11, 12, 200, 315)
    blocks = Blocks.grid(grid, counts)
    mixing = GridMixing(counts, 2 if per_head else None)
    with torch.no_grad():
        mixing.weight += torch.randn_like(mixing.weight)
    q, k, q_den, k_den = (torch.rand(2, 315, 2, 4, dtype=torch.float64) for _ in range(4))
    v = torch.randn(2, 315, 2, 3, dtype=torch.float64)
    den = {"q_den": q_den, "k_den": k_den} if normalize else {}
    m = mixing(counts).double().detach()
    expected = mhla(q, k, v, m, blocks=blocks, normalize=normalize, **den)
    spans = list(itertools.pairwise(cuts))

    def run(add_up):
        return [
            sharded_mhla(
                *(x[:, a:b] for x in (q, k, v)), m, blocks=blocks, start=a, add_up=add_up, normalize=normalize,
                **{name: x[:, a:b] for name, x in den.items()},
            )
            for a, b in spans
        ]  # fmt: skip

    summaries = []
    run(lambda x: summaries.append(x) or x)
    got = torch.cat(run(lambda x: sum(summaries)), 1)
    assert (got - expected).norm() <= 1e-12 * expected.norm()


def test_uneven_shards_begin_where_diffusers_cuts():
    assert [len(part) for part in torch.arange(61).tensor_split(2)] == [31, 30]
    assert "tensor_split" in PartitionAnythingSharder.shard_anything.__func__.__code__.co_names


@pytest.mark.parametrize(
    ("change", "words"),
    [({"start": 300}, "start is 300 for 16 tokens"), ({"normalize": "official"}, "normalize is 'official'")],
)
def test_bad_shards_are_one_sentence(change, words):
    x = torch.rand(1, 16, 1, 2)
    options = {"blocks": Blocks.grid((5, 7, 9), (3, 5, 4)), "start": 0, "add_up": lambda x: x, **change}
    with pytest.raises(ValueError) as error:
        sharded_mhla(x, x, x, torch.ones(60, 60), **options)
    assert words in str(error.value) and str(error.value).count(". ") == 0
