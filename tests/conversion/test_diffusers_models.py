"""convert() for diffusers: what cannot work is refused in one sentence, and by then nothing has been touched."""

import inspect

import accelerate
import diffusers
import pytest
import torch
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel, WanPipeline, WanTransformer3DModel
from diffusers.hooks import apply_group_offloading
from tools.small_models import refused
from tools.tiny_pipelines import PIPELINES, image_vae, tiny_transformer

import mhla_hf
from mhla_hf.conversion.diffusers_models import CONVERTIBLE, REFUSED_TRANSFORMERS

CPU = torch.device("cpu")


def pipeline_of_a_unet():
    blocks = {"down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",), "block_out_channels": (4,)}
    return DDPMPipeline(UNet2DModel(sample_size=8, norm_num_groups=2, **blocks), DDPMScheduler())


def offloaded(offload, *arguments, **options):
    model = tiny_transformer("wan")
    offload(model, *arguments, **options)
    return mhla_hf.convert(model)


CONVERSION = {
    "two counts for a video": (lambda: mhla_hf.convert(tiny_transformer("wan"), layout=[4, 4]),
        "layout: got [4, 4], expected 3 counts"),
    "no transformer": (lambda: mhla_hf.convert(image_vae()), "model: got AutoencoderKL of diffusers."),
    "pipeline of a U-Net": (lambda: mhla_hf.convert(pipeline_of_a_unet()), "DDPMPipeline, which has no transformer"),
    "hooks of diffusers": (lambda: offloaded(apply_group_offloading, CPU, CPU, offload_type="leaf_level"),
        "model: got hooks of diffusers"),
    "offloaded weights": (lambda: offloaded(accelerate.cpu_offload, CPU), "model: got the offloaded weight"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "words"), CONVERSION.values(), ids=CONVERSION)
def test_conversion(make, words):
    with refused(words, kind=(ValueError, TypeError)):
        make()


def test_nothing_is_touched_before_all_is_checked():
    pipe = WanPipeline(**{**PIPELINES["wan"]().components, "transformer_2": mhla_hf.convert(tiny_transformer("wan"))})
    with pytest.raises(ValueError, match="which is an MHLA model already"):
        mhla_hf.convert(pipe)
    assert type(pipe.transformer) is WanTransformer3DModel
    assert not any(".mhla." in name for name, _ in pipe.transformer.named_parameters())


def test_every_other_transformer_is_refused_for_a_reason():
    refused_names = [name for names in REFUSED_TRANSFORMERS.values() for name in names.split()]
    names = {*dir(diffusers.models.transformers)} & {*dir(diffusers)}
    classes = [getattr(diffusers, name) for name in names if not name.startswith("_")]
    models = [one for one in classes if inspect.isclass(one) and issubclass(one, diffusers.ModelMixin)]
    assert sorted([*refused_names, *CONVERTIBLE]) == sorted(one.__name__ for one in models)
    model = diffusers.PRXTransformer2DModel(context_in_dim=8, hidden_size=24, num_heads=2, depth=1, axes_dim=[6, 6])
    with pytest.raises(ValueError, match="got PRXTransformer2DModel, which cannot be converted: tokens of text"):
        mhla_hf.convert(model)
