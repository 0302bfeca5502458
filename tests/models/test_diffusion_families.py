"""Transformers with attention of many forms compute MHLA: compared with their stock code around another attention."""

import contextlib
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from diffusers import FluxPipeline, StableDiffusion3Pipeline
from diffusers.models.transformers import transformer_kandinsky
from tools.ops_cases import distance
from tools.small_models import refused, shaken
from tools.tiny_grid_pipelines import bare
from tools.tiny_grids import SIZES
from tools.tiny_joint import JOINT_SIZES, PACKED, TEXT_LAST, VIDEOS, joint_size
from tools.tiny_pipelines import inputs, tiny_transformer

import mhla_hf
from mhla_hf.models.diffusion.inputs import find_self_attentions
from mhla_hf.ops.blocks import Blocks

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
    """Call `attend(layer, q, k, v, mask)` in place of the softmax of some layers; [B, H, T, K], q and k rotated."""
    active = []

    def choose(query, key, value, mask=None, *args, attn_mask=None, **options):
        mask = attn_mask if mask is None else mask
        if active:
            return attend(active[-1], query, key, value, mask)
        return SOFTMAX(query, key, value, mask, *args, **options)

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
    block = Blocks.grid(size, layout).index()

    def attend(index, q, k, v, _):
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
        torch.testing.assert_close(seen["mhla", index], seen["stock", index], rtol=0, atol=0)
    assert distance(both, softmax) > 1e-3
    for row in range(2):
        by_row = [name for name, x in arguments.items() if isinstance(x, torch.Tensor | list) and len(x) == 2]
        alone = {**arguments, **{name: arguments[name][row : row + 1] for name in by_row}}
        assert distance(model(**alone).sample, both[row : row + 1]) <= 1e-5


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
    tensors = {name: x for name, x in arguments.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
    output = half(**{**arguments, **{name: x.bfloat16() for name, x in tensors.items()}}).sample
    assert output.dtype == torch.bfloat16 and distance(output.float(), expected) <= 0.1


def layout_of(family, sides):
    return sides if family in VIDEOS else sides[1:]


@torch.no_grad()
@pytest.mark.parametrize(("window", "layout"), [(1, [1, 1, 1]), (2, [2, 2, 2]), (3, [2, 2, 3])])
@pytest.mark.parametrize("family", JOINT_SIZES)
def test_all_blocks_near_is_stock(family, window, layout):
    """A batch of two texts, one of them padded if the family has masks, on an odd grid."""
    model, stock = tiny_transformer(family), tiny_transformer(family)
    mhla_hf.convert(model, layers="all", window=window, layout=layout_of(family, layout))
    arguments = inputs(family, joint_size(family, 3, 5, 7), batch=2)
    assert distance(model(**arguments).sample, stock(**arguments).sample) <= 1e-5
    assert model.mhla_state.grid is None


@torch.no_grad()
@pytest.mark.parametrize("family", PACKED)
def test_images_to_edit_share_the_blocks_of_the_new_image(family):
    """As in Flux Kontext and Qwen-Image-Edit: with all blocks near, as stock; without MHLA's far blocks, otherwise."""
    model, stock = tiny_transformer(family), tiny_transformer(family)
    mhla_hf.convert(model, layers="all", window=2, layout=[2, 2])
    arguments = inputs(family, [(5, 7), (4, 3), (2, 6)], batch=2)
    expected = stock(**arguments).sample
    assert expected.shape[1] == 59 and distance(model(**arguments).sample, expected) <= 1e-5
    local = mhla_hf.convert(tiny_transformer(family), layers="all", window=1, layout=[2, 2])
    assert distance(local(**arguments).sample, expected) > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("frames", [3, 1])
@pytest.mark.parametrize("family", JOINT_SIZES)
def test_one_block_is_linear_attention_beside_the_text(family, frames):
    """In O(T): (e^z v + e^b phi(q) (sum phi(k) v^T)) / (the same for 1), on q and k that the base normalized and rotated."""
    model, stock = tiny_transformer(family), tiny_transformer(family)
    settings = {"feature_map": "relu", "rope": "before", "windowed": False, "mixing_start": "uniform"}
    mhla_hf.convert(model, layers="all", layout=layout_of(family, [1, 1, 1]), **settings)
    for attention in find_self_attentions(model):
        attention.processor.mhla.mixing.balance.fill_(0.3)

    def attend(_, q, k, v, mask):
        num_text = q.shape[2] - num_grid
        shift = num_text if family in TEXT_LAST else 0
        of_text = SOFTMAX(q, k, v, mask).roll(shift, 2)[:, :, :num_text]
        q, k, v = (x.roll(shift, 2) for x in (q, k, v))
        bias = torch.zeros(len(q), num_text + 1)
        if mask is not None:
            bias = mask.roll(shift, -1)[:, 0, 0 if shift else -1]  # the row of a token of the grid
            bias = bias.float().log() if bias.dtype == torch.bool else bias
        bias = (bias[:, :num_text] - bias[:, -1:])[:, None, None]
        q, far_k, far_v = q[:, :, num_text:], k[:, :, num_text:].relu() + 1e-6, v[:, :, num_text:]
        near = ((q @ k[:, :, :num_text].mT) * q.shape[-1] ** -0.5 + bias).exp()
        far_q = torch.tensor(0.3).exp() * (q.relu() + 1e-6)
        o = near @ v[:, :, :num_text] + far_q @ (far_k.mT @ far_v)
        o = o / (near.sum(-1, keepdim=True) + far_q @ far_k.sum(-2, keepdim=True).mT)
        return torch.cat([of_text, o], 2).roll(-shift, 2)

    arguments = inputs(family, joint_size(family, frames, 5, 7), batch=2)
    softmax = stock(**arguments).sample
    num_grid = 35 * (frames if family in VIDEOS else 1)
    with attention_inside(stock, range(len(find_self_attentions(stock))), attend):
        expected = stock(**arguments).sample
    converted = model(**arguments).sample
    assert distance(converted, expected) <= 1e-5
    assert distance(converted, softmax) > 1e-3


@pytest.mark.parametrize(
    ("family", "encoder"), [("flux", "image_encoder_pretrained_model_name_or_path"), ("sd3", "image_encoder_folder")]
)
def test_an_ip_adapter_is_an_error_when_it_is_loaded(family, encoder):
    """One layer is MHLA: the softmax layers would take it, and sampling would fail."""
    pipe = bare({"flux": FluxPipeline, "sd3": StableDiffusion3Pipeline}[family], family)
    mhla_hf.convert(pipe, layers=[1])
    processors = pipe.transformer.attn_processors
    weights = {"image_proj": {"w": torch.zeros(1)}, "ip_adapter": {"w": torch.zeros(1)}}
    with refused("model: got MHLA", "no IP-Adapter"):
        pipe.load_ip_adapter(weights, weight_name=None, **{encoder: None})
    assert all(found is processors[name] for name, found in pipe.transformer.attn_processors.items())
