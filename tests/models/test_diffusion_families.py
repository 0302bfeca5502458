"""Transformers with attention of many forms compute MHLA: compared with their stock code around another attention."""

import contextlib
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.transformers import transformer_kandinsky
from tools.ops_cases import distance
from tools.small_models import shaken
from tools.tiny_grids import SIZES
from tools.tiny_joint import JOINT_SIZES
from tools.tiny_pipelines import inputs, tiny_transformer

import mhla_hf
from mhla_hf.models.diffusion.inputs import find_self_attentions, read_rotary
from mhla_hf.nn.grid import rotate_pairs

ALL = {**SIZES, **JOINT_SIZES}
SOFTMAX = F.scaled_dot_product_attention
PAPER = {"rope": "after", "normalize": False, "output_norm": True}


class FullPrecision:
    """The module `torch` for Kandinsky 5, which rounds rotated q and k to bf16 in any dtype."""

    bfloat16 = torch.float32

    def __getattr__(self, name):
        return getattr(torch, name)


@contextlib.contextmanager
def attention_inside(model, layers, attend):
    """Call `attend(layer, q, k, v)` in place of the softmax of some layers; all are [B, H, T, K], q and k rotated."""
    active = []

    def choose(query, key, value, *args, **options):
        return attend(active[-1], query, key, value) if active else SOFTMAX(query, key, value, *args, **options)

    for index in layers:
        attention = find_self_attentions(model)[index]
        attention.register_forward_pre_hook(lambda *args, index=index: active.append(index))
        attention.register_forward_hook(lambda *args: active.clear())
    with (
        mock.patch.object(F, "scaled_dot_product_attention", choose),
        mock.patch.object(transformer_kandinsky, "torch", FullPrecision()),
    ):
        yield


def latents_of(family, frames=3, rows=5, columns=7):
    """Size of the latents whose grid has this many tokens along each axis."""
    if family.startswith("ltx"):
        return frames, rows, columns
    size = (frames, 2 * rows, 2 * columns)
    return size[1:] if family == "hunyuan-dit" else size


@pytest.mark.parametrize("pairs", [2, 1])
def test_one_matrix_for_all_pairs_of_a_head(pairs):
    """As in a Kandinsky whose axes have so few channels that only one of them rotates."""
    angles, x = torch.randn(5, 1, pairs), torch.randn(2, 5, 3, 4)
    cos, sin = angles.cos(), angles.sin()
    matrices = torch.stack([cos, -sin, sin, cos], dim=-1).unflatten(-1, (2, 2))
    expected = (matrices @ x.unflatten(-1, (2, 2, 1))).flatten(-3)
    assert distance(rotate_pairs(x, *read_rotary("matrices", matrices, 3)), expected) <= 1e-6


def blocks_of(size, layout):
    """The block of each token, when each axis is cut as `numpy.array_split` cuts it: int64 [T]."""
    block = torch.zeros(1, dtype=torch.long)
    for side, count in zip(size, layout, strict=True):
        places = torch.cat(
            [torch.full((len(part),), i) for i, part in enumerate(torch.arange(side).tensor_split(count))]
        )
        block = (block[:, None] * count + places).flatten()
    return block


@torch.no_grad()
@pytest.mark.parametrize("frames", [3, 1])
@pytest.mark.parametrize("family", SIZES)
def test_the_paper_s_form_is_its_definition(family, frames):
    """T x T, features rotated, blocks of unequal sizes; a single frame has one block along time."""
    model, stock = tiny_transformer(family), tiny_transformer(family)
    axes = 2 if family in ("latte", "hunyuan-dit") else 3
    shaken(mhla_hf.convert(model, layout=[2, 2, 3][-axes:], **PAPER))
    layers = model.config.mhla["layers"]
    cores = [getattr(attention.processor, "mhla", None) for attention in find_self_attentions(model)]
    size, layout = ((frames, 5, 7), (min(2, frames), 2, 3)) if axes == 3 else ((5, 7), (2, 3))
    block = blocks_of(size, layout)

    def attend(index, q, k, v):
        mixing = cores[index].mixing.weight.softmax(-1)
        if layout[0] == 1:
            mixing = mixing.view(2, 6, 2, 6).mean((0, 2))
        o = (q @ k.mT) * mixing[block][:, block] @ v * q.shape[-1] ** -0.5
        return o * (o.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * cores[index].norm.weight

    for index in layers:
        attention = find_self_attentions(stock)[index]
        for names in (("norm_q", "query_norm", "to_q"), ("norm_k", "key_norm", "to_k")):
            last = next(part for part in (getattr(attention, name, None) for name in names) if part is not None)
            last.register_forward_hook(lambda module, args, output: output.relu() + 1e-6)
    arguments = inputs(family, latents_of(family, frames), batch=2)
    with attention_inside(stock, layers, attend):
        converted, expected = model(**arguments).sample, stock(**arguments).sample
    assert distance(converted, expected) <= 1e-5
    assert model.mhla_state.grid is None


@torch.no_grad()
@pytest.mark.parametrize("family", ALL)
def test_a_batch_is_its_samples_and_softmax_layers_are_stock(family):
    """As in classifier-free guidance: two texts and noises at once."""
    model, stock = tiny_transformer(family), tiny_transformer(family)
    shaken(mhla_hf.convert(model, layers=[2]))
    seen = {}
    for name, one in (("mhla", model), ("stock", stock)):
        for index in range(2):
            attention = find_self_attentions(one)[index]
            attention.register_forward_hook(lambda *args, key=(name, index): seen.__setitem__(key, args[-1]))
    arguments = inputs(family, batch=2)
    both, softmax = model(**arguments).sample, stock(**arguments).sample
    for index in range(2):
        outputs = [seen[name, index] for name in ("mhla", "stock")]
        assert all(
            torch.equal(*pair) for pair in zip(*(o if isinstance(o, tuple) else [o] for o in outputs), strict=True)
        )
    assert distance(both, softmax) > 1e-3
    for row in range(2):
        rows = {
            name: value[row : row + 1] if isinstance(value, torch.Tensor | list) and len(value) == 2 else value
            for name, value in arguments.items()
        }
        assert distance(model(**rows).sample, both[row : row + 1]) <= 1e-5


@pytest.mark.parametrize("family", [family for family in ALL if ALL[family][0]._supports_gradient_checkpointing])
def test_checkpointing_changes_no_gradient(family):
    gradients = []
    for checkpointed in (False, True):
        model = shaken(mhla_hf.convert(tiny_transformer(family), layers="all", gate=True, cpe=3)).train()
        if checkpointed:
            model.enable_gradient_checkpointing()
        arguments = inputs(family, batch=2)
        if family == "chroma":  # diffusers drops it from single blocks that are checkpointed
            del arguments["attention_mask"]
        model(**arguments).sample.square().mean().backward()
        gradients.append({name: value.grad for name, value in model.named_parameters()})
    for name, value in gradients[0].items():
        assert value is None or distance(gradients[1][name], value) <= 1e-5, name
        assert ".mhla." not in name or value.abs().max() > 0, name


@torch.no_grad()
@pytest.mark.parametrize("family", ALL)
def test_bf16_is_near(family, tmp_path):
    model = shaken(mhla_hf.convert(tiny_transformer(family), layers="all"))
    arguments = inputs(family)
    expected = model(**arguments).sample
    model.save_pretrained(tmp_path)
    half = type(model).from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    for name, value in half.named_parameters():
        if ".mhla." in name:
            assert value.dtype == (torch.float32 if ".mixing." in name else torch.bfloat16), name
    floats = {
        name: value.bfloat16() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in arguments.items()
    }
    output = half(**floats).sample
    assert output.dtype == torch.bfloat16 and distance(output.float(), expected) <= 0.1
