"""convert() for diffusers: what cannot work is refused in one sentence, and by then nothing has been touched."""

import accelerate
import pytest
import torch
from diffusers import (
    DDPMPipeline,
    DDPMScheduler,
    UNet2DModel,
    WanPipeline,
    WanTransformer3DModel,
)
from diffusers.hooks import apply_group_offloading
from tiny_pipelines import PIPELINES, image_vae, tiny_transformer

import mhla_hf

CPU = torch.device("cpu")


def converted(family="wan", **settings):
    return mhla_hf.convert(tiny_transformer(family), **settings)


def unet():
    blocks = {"down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",), "block_out_channels": (4,)}
    return UNet2DModel(sample_size=8, norm_num_groups=2, layers_per_block=1, **blocks)


def hooked():
    model = tiny_transformer("wan")
    apply_group_offloading(model, CPU, CPU, offload_type="leaf_level")
    return model


def offloaded():
    model = tiny_transformer("wan")
    accelerate.cpu_offload(model, execution_device=CPU)
    return model


def two_transformers():
    pipe = PIPELINES["wan"]()
    return WanPipeline(**{**pipe.components, "transformer_2": converted()})


CONVERSION = {
    "two counts for a video": (lambda: converted(layout=[4, 4]), "layout: got [4, 4], expected 3 counts"),
    "three counts for an image": (lambda: converted("sana", layout=[3, 4, 4]), "layout: got [3, 4, 4], expected 2"),
    "no transformer": (lambda: mhla_hf.convert(image_vae()), "model: got AutoencoderKL of diffusers."),
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


@pytest.mark.parametrize(("make", "words"), CONVERSION.values(), ids=CONVERSION)
def test_conversion(make, words):
    with pytest.raises((ValueError, TypeError)) as error:
        make()
    assert words in str(error.value) and str(error.value).count(". ") == 0, error.value


def test_nothing_is_touched_before_all_is_checked():
    pipe = two_transformers()
    with pytest.raises(ValueError, match="already"):
        mhla_hf.convert(pipe)
    assert type(pipe.transformer) is WanTransformer3DModel
    assert not any(".mhla." in name for name, _ in pipe.transformer.named_parameters())
