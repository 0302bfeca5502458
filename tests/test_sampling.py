"""MHLA in some steps of sampling, and the attention of the base in the others."""

import copy

import pytest
import torch
from tools.ops_cases import distance
from tools.small_models import shaken
from tools.tiny_grid_pipelines import BARE_PIPELINES, GRID_PIPELINES
from tools.tiny_pipelines import PIPELINES, TRANSFORMERS, generate, inputs, tiny_transformer

import mhla_hf
from mhla_hf.models.diffusion.inputs import find_self_attentions

SAMPLED = {**PIPELINES, **GRID_PIPELINES, **BARE_PIPELINES}
FAST = ("wan", "dit", "flux")
STEPS = 4
FUSED = ("pixart", "wan", "sd3")


def converted_pipeline(family):
    """A pipeline with MHLA in every layer, whose output is far from the base's."""
    pipe = mhla_hf.convert(SAMPLED[family](), layers="all", gate=True)
    shaken(pipe.transformer)
    return pipe


@torch.no_grad()
@pytest.mark.parametrize("family", TRANSFORMERS)
def test_base_attention_is_stock(family):
    """Also with fused projections, for which diffusers sets other processors."""
    model, stock = shaken(mhla_hf.convert(tiny_transformer(family), layers="all")), tiny_transformer(family)
    arguments = inputs(family)
    mhla, softmax = model(**arguments).sample, stock(**arguments).sample
    assert distance(mhla, softmax) > 1e-3
    model.use_base_attention()
    assert distance(model(**arguments).sample, softmax) <= 1e-6
    model.use_base_attention(False)
    assert torch.equal(model(**arguments).sample, mhla)
    model.use_base_attention()
    for change in ["fuse_qkv_projections", "unfuse_qkv_projections"] * (family in FUSED):
        getattr(model, change)()
        assert distance(model(**arguments).sample, softmax) <= 1e-6


@pytest.mark.parametrize(
    "family", [*FAST, *(pytest.param(one, marks=pytest.mark.slow) for one in SAMPLED if one not in FAST)]
)
def test_steps_at_both_ends(family):
    """None with MHLA is the stock pipeline, all are the converted one, and others begin as one and go on as the other."""
    pipe = converted_pipeline(family)
    stock = generate(SAMPLED[family](), num_inference_steps=STEPS)
    mhla = generate(pipe, num_inference_steps=STEPS)
    with mhla_hf.use_mhla_in_steps(pipe, end=0):
        assert distance(generate(pipe, num_inference_steps=STEPS), stock) <= 1e-6
    with mhla_hf.use_mhla_in_steps(pipe):
        assert torch.equal(generate(pipe, num_inference_steps=STEPS), mhla)
    with mhla_hf.use_mhla_in_steps(pipe, 1, -1):
        mixed = generate(pipe, num_inference_steps=STEPS)
    assert distance(mixed, stock) > 1e-4 and distance(mixed, mhla) > 1e-4
    assert torch.equal(generate(pipe, num_inference_steps=STEPS), mhla)
    assert not {"step", "set_timesteps", "set_begin_index"} & vars(pipe.scheduler).keys()


@pytest.mark.parametrize(("start", "end", "mhla"), [(1, None, [1, 2, 3]), (0, -1, [0, 1, 2])])
@pytest.mark.parametrize("family", ["wan", "flux"])
def test_which_steps_have_mhla(family, start, end, mhla):
    pipe = converted_pipeline(family)
    calls = []
    pipe.transformer.register_forward_pre_hook(lambda *args: calls.append(0))
    core = find_self_attentions(pipe.transformer)[0].processor.mhla
    core.register_forward_hook(lambda *args: calls.append(1))
    with mhla_hf.use_mhla_in_steps(pipe, start, end):
        generate(pipe, num_inference_steps=STEPS)
    passes = calls.count(0) // STEPS
    expected = [call for step in range(STEPS) for call in ([0, 1] if step in mhla else [0]) * passes]
    assert calls == expected
    with pytest.raises(ZeroDivisionError), mhla_hf.use_mhla_in_steps(pipe, start, end):
        with mhla_hf.use_mhla_in_steps(pipe, end=0):
            generate(pipe, num_inference_steps=STEPS)
        assert "step" in vars(pipe.scheduler)
        raise ZeroDivisionError
    assert not pipe.transformer.mhla_state.uses_base and "step" not in vars(pipe.scheduler)


def test_compiled_models_switch():
    model, eager = (shaken(mhla_hf.convert(tiny_transformer("wan"), layers="all")) for _ in range(2))
    torch._dynamo.reset()
    model.compile_repeated_blocks(fullgraph=True, backend="eager")
    for uses_base in (False, True, False):
        for one in (model, eager):
            one.use_base_attention(uses_base)
        with torch.no_grad():
            assert distance(model(**inputs("wan")).sample, eager(**inputs("wan")).sample) <= 1e-6


def test_a_copied_scheduler_holds_no_transformer_and_a_stock_pipeline_has_nothing_to_switch():
    expected = "expected one with a scheduler and a converted transformer"
    with pytest.raises(ValueError, match=expected), mhla_hf.use_mhla_in_steps(PIPELINES["wan"]()):
        pass
    pipe = converted_pipeline("wan")
    with mhla_hf.use_mhla_in_steps(pipe, start=1):
        scheduler = copy.deepcopy(pipe.scheduler)
        assert scheduler.step.func.__self__.transformers == []
        assert pipe.scheduler.step.func.__self__.transformers == [pipe.transformer]
