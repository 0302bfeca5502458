"""Transformers in which text and grid share one attention compute MHLA among the tokens of the grid: compared with their
stock code, as it is and around another attention."""

import contextlib
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from diffusers import FluxPipeline, StableDiffusion3Pipeline
from tools.ops_cases import distance
from tools.small_models import refused
from tools.tiny_bare_pipelines import bare
from tools.tiny_grid_pipelines import EDIT, kontext_pipeline
from tools.tiny_joint import JOINT_SIZES, PACKED, TEXT_LAST, VIDEOS, joint_size
from tools.tiny_pipelines import inputs, tiny_transformer

import mhla_hf
from mhla_hf.models.diffusion.inputs import find_self_attentions

SOFTMAX = F.scaled_dot_product_attention


def layout_of(family, sides):
    """The last two of three sides for images."""
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
def test_flux_kontext():
    """The pipeline, with an image of another size than the new one."""

    def sample(**settings):
        pipe = kontext_pipeline()
        if settings:
            mhla_hf.convert(pipe, layers="all", layout=[2, 2], **settings)
        options = {"num_inference_steps": 2, "output_type": "latent", "generator": torch.Generator().manual_seed(0)}
        return pipe(**EDIT, **options).images

    assert distance(sample(window=2), sample()) <= 1e-5 < distance(sample(window=1), sample())


@contextlib.contextmanager
def attention_inside(model, num_grid, text_last, attend):
    """Call `attend(q, k, v, bias, num_text)` for the queries of the grid in place of the softmax of all layers.

    All are [B, H, T, K] with the text first; the queries of the text have softmax.
    """
    active = []

    def choose(query, key, value, attn_mask=None, **options):
        o = SOFTMAX(query, key, value, attn_mask=attn_mask, **options)
        if not active:
            return o
        num_text = query.shape[2] - num_grid
        shift = num_text if text_last else 0
        q, k, v = (x.roll(shift, 2) for x in (query, key, value))
        bias = torch.zeros(len(q), num_text + 1)
        if attn_mask is not None:
            bias = attn_mask.roll(shift, -1)[:, 0, 0 if text_last else -1]  # the row of a token of the grid
            bias = bias.float().log() if bias.dtype == torch.bool else bias
        bias = bias[:, :num_text] - bias[:, -1:]
        o = torch.cat([o.roll(shift, 2)[:, :, :num_text], attend(q[:, :, num_text:], k, v, bias, num_text)], 2)
        return o.roll(-shift, 2)

    for attention in find_self_attentions(model):
        attention.register_forward_pre_hook(lambda *args: active.append(1))
        attention.register_forward_hook(lambda *args: active.clear())
    with mock.patch.object(F, "scaled_dot_product_attention", choose):
        yield


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

    def attend(q, k, v, bias, num_text):
        near = ((q @ k[:, :, :num_text].mT) * q.shape[-1] ** -0.5 + bias[:, None, None]).exp()
        q, far_k, far_v = q.relu() + 1e-6, k[:, :, num_text:].relu() + 1e-6, v[:, :, num_text:]
        factor = torch.tensor(0.3).exp()
        o = near @ v[:, :, :num_text] + factor * q @ (far_k.mT @ far_v)
        return o / (near.sum(-1, keepdim=True) + factor * q @ far_k.sum(-2, keepdim=True).mT)

    arguments = inputs(family, joint_size(family, frames, 5, 7), batch=2)
    softmax = stock(**arguments).sample
    num_grid = 35 * (frames if family in VIDEOS else 1)
    with attention_inside(stock, num_grid, family in TEXT_LAST, attend):
        expected = stock(**arguments).sample
    converted = model(**arguments).sample
    assert distance(converted, expected) <= 1e-5
    assert distance(converted, softmax) > 1e-3


@pytest.mark.parametrize(
    ("family", "pipeline_class", "encoder"),
    [
        ("flux", FluxPipeline, "image_encoder_pretrained_model_name_or_path"),
        ("sd3", StableDiffusion3Pipeline, "image_encoder_folder"),
    ],
)
def test_an_ip_adapter_is_an_error_when_it_is_loaded(family, pipeline_class, encoder):
    """One layer is MHLA: the softmax layers would take it, and sampling would fail."""
    pipe = bare(pipeline_class, family)
    mhla_hf.convert(pipe, layers=[1])
    processors = pipe.transformer.attn_processors
    weights = {"image_proj": {"w": torch.zeros(1)}, "ip_adapter": {"w": torch.zeros(1)}}
    with refused("model: got MHLA", "no IP-Adapter"):
        pipe.load_ip_adapter(weights, weight_name=None, **{encoder: None})
    assert all(found is processors[name] for name, found in pipe.transformer.attn_processors.items())
