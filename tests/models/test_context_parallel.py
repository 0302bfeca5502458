"""One video spread over two processes, by diffusers' context parallelism: what one process gives alone."""

import datetime

import pytest
import torch
from diffusers import ContextParallelConfig
from ops_cases import distance
from small_models import shaken
from tiny_pipelines import inputs, tiny_transformer
from torch.distributed.device_mesh import init_device_mesh

import mhla_hf

SIZE = (3, 8, 10)  # 60 tokens


def make(**settings):
    """A converted model, wholly MHLA, of which every new parameter matters."""
    normalized = {"normalize": True, "output_norm": False}
    return shaken(mhla_hf.convert(tiny_transformer("wan"), layers="all", gate=True, **normalized, **settings))


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
    counted, scatter = [], torch.distributed.reduce_scatter_tensor

    def count(part, whole, **kwargs):
        counted.append(part.numel())
        return scatter(part, whole, **kwargs)

    torch.distributed.reduce_scatter_tensor = count
    model = make()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("ring", "ulysses"))
    model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=2, mesh=mesh))
    with torch.no_grad():
        output = model(**inputs("wan", SIZE, batch=2), return_dict=False)[0]
    assert len(counted) == 3, counted  # one per layer
    result = train_step(model)
    assert torch.equal(output, result[0])
    model = make(layout=(2, 2, 2))
    model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=2, mesh=mesh))
    with torch.no_grad():
        model(**inputs("wan", (4, 8, 10), batch=2), return_dict=False)
    heads, width = model.config.num_attention_heads, model.config.attention_head_dim
    assert counted[-1] == 2 * heads * 4 * width * (width + 1)  # of 4 of the 8 blocks: what an all-reduce sends, halved
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
    output, grads = train_step(make())
    assert all(distance(shown, output) <= 1e-5 for shown, _ in parts)
    for key, expected in grads.items():  # each process has the share of its tokens
        got = sum(shares[key] for _, shares in parts)
        assert (got - expected).norm() <= 1e-5 * expected.norm() + 1e-8, key
