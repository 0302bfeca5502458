"""Sequences shared by several processes, as `torchrun` starts them: what one process gives alone."""

import pytest
import torch
import torch.distributed as dist
from launched import fork
from small_models import converted_model, refused, scratch_model, softmax_model, tokens, twenty_steps
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import mhla_hf
from mhla_hf.training.sequence_parallel import find_mhla_cores, sequence_parallel, share_of_sequence

LOCAL = {"mixing_form": "decay", "local": "softmax"}


def sliding():
    base = softmax_model("qwen2", use_sliding_window=True, sliding_window=12, max_window_layers=1)
    return mhla_hf.convert(base, layers=[0], block_size=8, window=2)


MODELS = {
    "decays": lambda: converted_model(**LOCAL),
    "decays alone, hybrid": lambda: converted_model("qwen3", [0, 2], mixing_form="decay", num_decays=3),
    "sliding hybrid": sliding,
    "matrix": lambda: converted_model(num_blocks=16),
    "scratch": lambda: scratch_model(num_blocks=16),
    "scratch, normalized": lambda: scratch_model(normalize=True, output_norm=False, per_head=True),
}
TRAINED = {  # by number of processes: who shares a sequence
    2: {"decays": ["pairs"], "matrix": ["all"]},
    4: {name: ["all", "pairs"] for name in MODELS},
}
IDS = tokens(2, 128)
LENGTHS = {
    "borders of shards": [32, 32, 64],
    "one over all": [3, 120, 5],
    "single tokens": [1, 1, 30, 1, 31, 1, 1, 40, 1, 21],
    "many short": [7, 2, 9, 5, 1, 8, 3, 16, 4, 11, 8, 6, 17, 10, 12, 9],
}
for seed in range(3):
    inner = torch.randperm(126, generator=torch.Generator().manual_seed(seed))[: 2 + 3 * seed].sort().values + 1
    LENGTHS[f"random {seed}"] = torch.cat([torch.tensor([0]), inner, torch.tensor([127])]).diff().tolist()


def batches(count):
    """By name: whole rows, of a length that shares well and of one that does not, and packed ones; four processes
    share random ones, too."""
    found = {"even": {"input_ids": IDS}, "odd": {"input_ids": tokens(2, 107)}}
    for name, lengths in LENGTHS.items():
        if count == 2 and name.startswith("random"):
            continue
        places = torch.cat([torch.arange(n) for n in lengths])[None]
        found[name] = {"input_ids": tokens(1, sum(lengths), seed=len(lengths)), "position_ids": places}
    for batch in found.values():
        batch["labels"] = batch["input_ids"].masked_fill(batch.get("position_ids", torch.tensor(1)) == 0, -100)
    return found


def model_for(name, row):
    """In fp64 where fp32's own rounding shows, in one process too: 3e-5 behind the norm of a single token, and up to 1.7e-4
    after 20 steps."""
    return MODELS[name]().to(torch.float64 if row in LENGTHS or row == "trained" else torch.float32)


def results(model, batch):
    """Loss and all gradients."""
    output = model(**batch, use_cache=False)
    output.loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": output.logits.detach(), "loss": output.loss.detach(), **grads}


def alone(model, batch, lengths):
    """`results` of every sequence by itself, together."""
    total, logits, loss = int((batch["labels"][:, 1:] != -100).sum()), [], 0
    for ids in batch["input_ids"].split(lengths, 1):
        output = model(ids, labels=ids, num_items_in_batch=total, use_cache=False)
        logits, loss = [*logits, output.logits.detach()], loss + output.loss if ids.shape[1] > 1 else loss
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": torch.cat(logits, 1), "loss": loss.detach(), **grads}


def close(got, wanted, what):
    """Logits, loss and every gradient, relative."""
    assert got.keys() == wanted.keys()
    for key, value in wanted.items():
        assert (got[key] - value).norm() <= 1e-5 * value.norm() + 1e-7, (*what, key)


def batch_of_step(number):
    ids = tokens(4, 128, seed=number)
    return {"input_ids": ids, "labels": ids}


def trained(model, shards=None, by_fsdp=False):
    """Losses and weights of 20 steps: every sequence is shared by all processes, or by those of a group `shards`."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (*model.model.layers, model) if by_fsdp else ():
        fully_shard(part, mesh=mesh)
    rows = dist.get_world_size() // dist.get_world_size(shards)
    own = slice(dist.get_rank() // dist.get_world_size(shards), None, rows)

    def step(number):
        batch = {name: value[own] for name, value in batch_of_step(number).items()}
        loss = model(**share_of_sequence(batch, model, shards), use_cache=False).loss / rows
        (loss * mesh.size() if by_fsdp else loss).backward()  # FSDP averages over processes
        for x in (loss.detach(), *(() if by_fsdp else (p.grad for p in model.parameters() if p.grad is not None))):
            dist.all_reduce(x)
        return loss

    with sequence_parallel(model, shards):
        return twenty_steps(model, step)


def trained_alone(model):
    def step(number):
        loss = model(**batch_of_step(number), use_cache=False).loss
        loss.backward()
        return loss

    return twenty_steps(model, step)


def sent_bytes(model, batch):
    """Bytes that this process gives to collectives and neighbors in a forward and a backward pass."""
    counted, before = [], (dist.all_gather_into_tensor, dist.reduce_scatter_tensor, dist.P2POp)

    def counting(function, tensor_at):
        def call(*args, **kwargs):
            counted.append(args[tensor_at].nbytes if args[0] is not dist.irecv else 0)
            return function(*args, **kwargs)

        return call

    dist.all_gather_into_tensor, dist.reduce_scatter_tensor, dist.P2POp = map(counting, before, (1, 1, 1))
    with sequence_parallel(model):
        results(model, share_of_sequence(batch, model))
    dist.all_gather_into_tensor, dist.reduce_scatter_tensor, dist.P2POp = before
    return sum(counted)


def one_process(rank, count, folder):
    for name in MODELS:
        for row, batch in batches(count).items():
            model = model_for(name, row)
            with sequence_parallel(model):
                got = results(model, share_of_sequence(batch, model))
            torch.save(got, f"{folder}/{name} {row} {rank}.pt")
    pairs = init_device_mesh("cpu", (count // 2, 2), mesh_dim_names=("rows", "shards"))["shards"].get_group()
    for name, ways in TRAINED[count].items():
        for how in ways:
            shared = (pairs, True) if how == "pairs" else ()
            torch.save(trained(model_for(name, "trained"), *shared), f"{folder}/{how} {name} {rank}.pt")
    model = MODELS["decays"]()
    rows = [{"input_ids": tokens(1, length), "labels": tokens(1, length)} for length in (128, 256)]
    counts = [sent_bytes(model, batch) for batch in (*rows, batches(count)["many short"])]
    assert counts[0] == counts[1] == counts[2] > 0
    with refused("input_ids", f"got {8 * count - 1} tokens", f"at least {8 * count}"):
        share_of_sequence({"input_ids": IDS[:, : 8 * count - 1]}, model)
    for other in (IDS[:, : 100 + rank], IDS + rank):  # what each process reads for itself
        with refused("input_ids", f"got {list(other.shape)}", "expected the same batch"):
            share_of_sequence({"input_ids": other}, model)
    with refused("batch", "attention_mask", "no padding"):
        share_of_sequence({"input_ids": IDS, "attention_mask": IDS}, model)


def rotated_by_length(kind):
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 64}
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0, **(factors if kind == "longrope" else {})}
    return mhla_hf.convert(softmax_model(rope_parameters=rope), **LOCAL)


def balanced_experts():
    model = converted_model("mixtral", **LOCAL)
    model.config.output_router_logits = True
    return model


@pytest.mark.parametrize(
    "make, words",
    [
        (MODELS["decays"], ("use_cache", "expected False")),
        (MODELS["sliding hybrid"], ("use_cache", "expected False")),
        (MODELS["matrix"], ("use_cache", "expected False")),
        (lambda: rotated_by_length("dynamic"), ("rope_type", "'dynamic'")),
        (lambda: rotated_by_length("longrope"), ("rope_type", "'longrope'")),
        (balanced_experts, ("output_router_logits", "True")),
    ],
)
def test_what_shares_would_get_wrong(make, words):
    model = make()
    with refused(*words), sequence_parallel(model):
        model(IDS)
    assert all(not core._forward_pre_hooks and "attend" not in vars(core) for core in find_mhla_cores(model))


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_give_what_one_gives(count, tmp_path):
    fork(one_process, count, count, tmp_path)
    for name in MODELS:
        for row, batch in batches(count).items():
            parts = [torch.load(tmp_path / f"{name} {row} {rank}.pt") for rank in range(count)]
            got = {"logits": torch.cat([part.pop("logits") for part in parts], 1)}
            got |= {key: sum(part[key] for part in parts) for key in parts[0]}
            close(got, results(model_for(name, row), batch), (name, row))
            if row in LENGTHS and (count == 4 or row == "borders of shards"):
                close(got, alone(model_for(name, row), batch, LENGTHS[row]), (name, row))
    for name, ways in TRAINED[count].items():
        wanted = trained_alone(model_for(name, "trained"))
        for how in ways:
            close(torch.load(tmp_path / f"{how} {name} {count - 1}.pt"), wanted, (how, name))
