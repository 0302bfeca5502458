"""convert() for diffusers: what cannot work is refused in one sentence, and by then nothing has been touched."""

import accelerate
import pytest
import torch
from diffusers import (
    DDPMPipeline,
    DDPMScheduler,
    FluxTransformer2DModel,
    UNet2DModel,
    WanPipeline,
    WanTransformer3DModel,
)
from diffusers.hooks import apply_group_offloading
from tiny_pipelines import PIPELINES, image_vae, tiny_transformer

import mhla_hf

CPU = torch.device("cpu")


def wan(**overrides):
    return tiny_transformer("wan", **overrides)


def converted(family="wan", **settings):
    return mhla_hf.convert(tiny_transformer(family), **settings)


def unet():
    blocks = {"down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",), "block_out_channels": (4,)}
    return UNet2DModel(sample_size=8, norm_num_groups=2, layers_per_block=1, **blocks)


def flux():
    sizes = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 8, "num_attention_heads": 2}
    widths = {"in_channels": 4, "joint_attention_dim": 16, "pooled_projection_dim": 16, "axes_dims_rope": (2, 2, 4)}
    return FluxTransformer2DModel(**sizes, **widths)


def hooked():
    model = wan()
    apply_group_offloading(model, CPU, CPU, offload_type="leaf_level")
    return model


def offloaded():
    return accelerate.cpu_offload(wan(), execution_device=CPU) or wan()


def two_transformers():
    pipe = PIPELINES["wan"]()
    return WanPipeline(**{**pipe.components, "transformer_2": converted()})


CONVERSION = {
    "two counts for a video": (lambda: converted(layout=[4, 4]), "layout: got [4, 4], expected 3 counts"),
    "three counts for an image": (lambda: converted("sana", layout=[3, 4, 4]), "layout: got [3, 4, 4], expected 2"),
    "joint attention": (lambda: mhla_hf.convert(flux()), "whose attention joins text and image tokens"),
    "another transformer": (lambda: mhla_hf.convert(image_vae()), "model: got AutoencoderKL; expected one of"),
    "converted already": (lambda: mhla_hf.convert(converted()), "which is an MHLA model already"),
    "pipeline of a U-Net": (
        lambda: mhla_hf.convert(DDPMPipeline(unet(), DDPMScheduler())),
        "model: got DDPMPipeline, which has no transformer",
    ),
    "a path": (lambda: mhla_hf.convert("Wan-AI/Wan2.1-T2V-1.3B-Diffusers"), "model: got str"),
    "hooks of diffusers": (lambda: mhla_hf.convert(hooked()), "model: has hooks of diffusers"),
    "offloaded weights": (lambda: mhla_hf.convert(offloaded()), "is offloaded"),
    "second transformer": (lambda: mhla_hf.convert(two_transformers()), "which is an MHLA model already"),
}


@pytest.mark.parametrize("case", CONVERSION)
def test_conversion(case):
    make, words = CONVERSION[case]
    with pytest.raises((ValueError, TypeError)) as error:
        make()
    assert words in str(error.value) and str(error.value).count(". ") == 0, error.value


def test_nothing_is_touched_before_all_is_checked():
    pipe = two_transformers()
    with pytest.raises(ValueError, match="already"):
        mhla_hf.convert(pipe)
    assert type(pipe.transformer) is WanTransformer3DModel
    assert not any(".mhla." in name for name, _ in pipe.transformer.named_parameters())
