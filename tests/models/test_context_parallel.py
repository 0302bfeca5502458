"""One video spread over processes, by diffusers' context parallelism: what one process gives alone."""

import pytest
import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig
from tools.launched import fork
from tools.ops_cases import distance
from tools.small_models import refused, shaken, twenty_steps
from tools.tiny_pipelines import inputs, tiny_transformer
from torch.distributed.device_mesh import init_device_mesh

import mhla_hf

MODELS = {"normalized": {"normalize": True, "output_norm": False}, "hybrid": {"layers": [0, 2]}}
MODELS["heads"] = {"softmax_heads": {0: [0, 3], 1: [1, 2]}, "sizes": {"num_attention_heads": 4}}
SIZE, BLOCKS = (6, 12, 20), (3, 3, 5)  # 360 tokens in 45 blocks, no share of which ends with a frame or a block


def make(layers="all", layout=BLOCKS, family="wan", sizes=None, **settings):
    model = tiny_transformer(family, **(sizes or {}))
    return shaken(mhla_hf.convert(model, layers=layers, layout=layout, gate=True, **settings))


def parallel(model, count):
    mesh = init_device_mesh("cpu", (1, count), mesh_dim_names=("ring", "ulysses"))
    model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=count, mesh=mesh))
    return model


def results(model, name, sum_up=lambda parameters: None):
    """Outputs and gradients, and losses and weights of 20 steps of one model; each process has gradients of its tokens."""

    def step(number):
        model.zero_grad()
        output = model(**inputs("wan", SIZE, batch=2, seed=number), return_dict=False)[0]
        loss = output.square().mean()
        loss.backward()
        sum_up(list(model.parameters()))
        return loss

    step(0)
    grads = {f"grad of {name}": p.grad.clone() for name, p in model.named_parameters()}
    frames = torch.arange(6).repeat_interleave(60).expand(2, -1) * 100  # a time for each token, as some Wans have
    with torch.no_grad():
        given = inputs("wan", SIZE, batch=2)
        calls = given, {**given, "timestep": frames}
        outputs = {f"output {i}": model(**call, return_dict=False)[0] for i, call in enumerate(calls)}
    return outputs | grads | (twenty_steps(model, step) if name == "normalized" else {})


def one_process(rank, count, folder):
    torch.accelerator.device_count = lambda: 1  # diffusers divides by it, and a CPU is no accelerator
    for name, options in MODELS.items():
        if name != "normalized" and count == 4:
            with refused("ulysses_degree: got 4", "numbers of softmax heads in a layer, [2]"):
                parallel(make(**options), count)
            continue
        model = parallel(make(**options), count)
        if name == "hybrid":  # whose first block reads its tokens a second time in the backward pass
            model.train().enable_gradient_checkpointing()
        torch.save(results(model, name, sum_up), f"{folder}/{name} {rank}.pt")
    # The attention of the base needs a head per process, and the tiny models have two.
    for family, uses_base in [("wan-i2v", False), ("wan-chrono-edit", False), *[("wan", True)] * (count == 2)]:
        alone, shared = make(family=family), parallel(make(family=family), count)
        for model in (alone, shared):
            model.use_base_attention(uses_base)
        with torch.no_grad():
            outputs = [model(**inputs(family, SIZE), return_dict=False)[0] for model in (alone, shared)]
        assert distance(*outputs) <= 1e-5
    model = parallel(make(**MODELS["normalized"]), count)
    with refused("hidden_states", f"15 tokens for {count} processes", "ulysses_anything=True"):
        model(**inputs("wan", (1, 6, 10)), return_dict=False)
    with pytest.raises(ValueError, match="shard: got a part of the tokens"):
        parallel(make(cpe=3), count)(**inputs("wan", SIZE, batch=2), return_dict=False)
    with refused("cp_plan", "expected None"):
        make().enable_parallelism(config=None, cp_plan={})


def sum_up(parameters):
    for parameter in parameters:
        dist.all_reduce(parameter.grad)


@pytest.mark.filterwarnings("ignore:.*all_gather_tensor. is deprecated:FutureWarning")  # by diffusers itself
@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_give_what_one_gives(count, tmp_path):
    fork(one_process, count, count, tmp_path)
    for name in MODELS:
        expected = results(make(**MODELS[name]), name)
        for path in tmp_path.glob(f"{name} *.pt"):
            got = torch.load(path)
            for key, value in expected.items():
                assert (got[key] - value).norm() <= 1e-5 * value.norm() + 1e-8, (path.stem, key)
