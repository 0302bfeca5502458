"""Queries and keys as they were before the rotary embedding, undone from what attention modules are given."""

import pytest
import torch
from tools import small_models
from tools.small_types import TYPES, small_model_of
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

import mhla_hf
from mhla_hf.models.language.causal_attention import find_causal_attentions
from mhla_hf.models.language.rotation import SCALED_AFTER, rotation_cos_sin, rotation_layout, unrotate

TOKENS, SHIFT = torch.arange(12)[None], 37
SIZES = {**small_models.SIZES, "num_hidden_layers": 2}


def scrambled(model):
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.rand_like(parameter), alpha=0.5)
    return model


@torch.no_grad()
def calls_at(model, position_ids):
    """For each MHLA layer: module, args and kwargs of the call, and q and k `[B, T, H, K]`, rotated.

    Each attention module sees hidden states of its own, whatever the layers below it make of the positions.
    """
    attentions = {i: x for i, x in find_causal_attentions(model).items() if hasattr(x, "mhla")}
    calls, noted, handles = [], [], []
    for index, attention in attentions.items():
        states = torch.randn(*position_ids.shape, 32, generator=torch.Generator().manual_seed(index)).to(model.dtype)

        def replace(module, args, kwargs, states=states):
            name = "hidden_states"
            own = kwargs.pop(name) if name in kwargs else args[0]
            args = tuple(states if x is own else x for x in (own, *args[len(args) and args[0] is own :]))
            kwargs |= {"attention_scaling": None} if "attention_scaling" in kwargs else {}  # of queries in Beam
            calls.append((module, args[1:], kwargs))
            return args, kwargs

        handles.append(attention.register_forward_pre_hook(replace, with_kwargs=True))
        handles.append(attention.mhla.register_forward_pre_hook(lambda _core, args: noted.append(args[:2])))
    model(input_ids=TOKENS + 1, position_ids=position_ids, use_cache=False)
    for handle in handles:
        handle.remove()
    assert [module for module, *_ in calls] == list(attentions.values())
    return [(*call, *pair) for call, pair in zip(calls, noted, strict=True)]


def converted(model):
    """Whose window is shorter than the prompt, or softmax would be exact."""
    return mhla_hf.convert(scrambled(model), layers="all", block_size=8, window=1)


def undone(module, args, kwargs, q, k):
    cos_sin, layout = rotation_cos_sin(module, kwargs), rotation_layout(module)
    return unrotate(q, cos_sin, layout), unrotate(k, cos_sin, layout)


def distance(x, y):
    return float(((x - y).abs().max() / y.abs().max()).detach())


def check(model, bound=1e-5):
    """q and k of every layer are undone to the same at two places, and differ before where the layer rotates them."""
    rotated_layers = []
    for near, far in zip(calls_at(model, TOKENS), calls_at(model, TOKENS + SHIFT), strict=True):
        module, _args, kwargs, *rotated = near
        cos_sin = rotation_cos_sin(module, kwargs)
        assert cos_sin is None or (cos_sin.shape[:3] == (1, 12, 1) and cos_sin.shape[3] <= rotated[0].shape[3])
        for here, there, x, y in zip(undone(*near), undone(*far), rotated, far[3:], strict=True):
            assert here.shape == x.shape and here.dtype == x.dtype
            assert distance(here, there) <= bound
            assert (distance(x, y) > 1e-2) == (cos_sin is not None)
        rotated_layers.append(cos_sin is not None)
    return rotated_layers


ROTATED = {"smollm3": [True] * 3 + [False], "exaone4": [False] * 2, "gpt2": [False] * 4}
ROTATED["granitemoehybrid"] = [False] * 2


@pytest.mark.parametrize("model_type", [one for one in TYPES if one not in SCALED_AFTER])
def test_queries_and_keys_of_every_type_forget_their_positions(model_type):
    rotated = check(converted(small_model_of(model_type)))
    assert rotated == ROTATED.get(model_type, rotated)


def test_the_scale_of_yarn_is_undone():
    rope = {"rope_type": "yarn", "factor": 8.0, "rope_theta": 10_000.0, "original_max_position_embeddings": 64}
    model = converted(LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=rope)))
    scale = model.model.rotary_emb.attention_scaling
    assert scale > 1.1
    assert check(model) == [True, True]
    for call in calls_at(model, TOKENS):
        for x, before in zip(call[3:], undone(*call), strict=True):
            assert distance(before[:, 0] * scale, x[:, 0]) <= 1e-6  # at position 0 nothing but the scale is applied


def test_dimensions_that_the_base_does_not_rotate_stay():
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
    half = converted(Phi3ForCausalLM(Phi3Config(**SIZES, rope_parameters=rope)))
    assert check(half) == [True, True]
    for model, kept in ((half, slice(4, None)), (converted(small_model_of("deepseek_v3")), slice(None, 8))):
        for call in calls_at(model, TOKENS + SHIFT):
            for x, before in zip(call[3:], undone(*call), strict=True):
                assert torch.equal(before[..., kept], x[..., kept]) and not torch.equal(before, x)


def test_rotations_that_cannot_be_undone_are_refused():
    attention = small_model_of("llama").model.layers[0].self_attn
    with pytest.raises(ValueError, match=r"rope: got 'near' for llama, expected 'before': its attention is not given"):
        rotation_cos_sin(attention, {"attention_mask": None})
    with pytest.raises(ValueError, match="rope: got 'near' for hunyuan_v1_dense, expected 'before': it scales"):
        mhla_hf.convert(small_model_of("hunyuan_v1_dense"), rope="near")
    assert mhla_hf.convert(small_model_of("hunyuan_v1_dense")).config.mhla["rope"] == "before"
