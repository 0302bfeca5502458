"""What cannot work with pipelines is refused in one sentence: the argument, what came, what was expected."""

import json

import accelerate
import pytest
import torch
from diffusers import (
    DDPMPipeline,
    DDPMScheduler,
    DiffusionPipeline,
    FluxTransformer2DModel,
    LTXVideoTransformer3DModel,
    SD3Transformer2DModel,
    UNet2DModel,
    WanPipeline,
    WanTransformer3DModel,
)
from diffusers.hooks import apply_group_offloading
from safetensors.torch import load_file, save_file
from tiny_pipelines import PIPELINES, WAN, image_vae, inputs, tiny_transformer

import mhla_hf
from mhla_hf import MHLADiTTransformer2DModel, MHLASettings, MHLAWanTransformer3DModel

CPU = torch.device("cpu")


def wan(**overrides):
    return tiny_transformer("wan", **overrides)


def converted(family="wan", **settings):
    return mhla_hf.convert(tiny_transformer(family), **settings)


def flux():
    sizes = {
        "num_layers": 1,
        "num_single_layers": 1,
        "attention_head_dim": 8,
        "num_attention_heads": 2,
        "in_channels": 4,
    }
    return FluxTransformer2DModel(joint_attention_dim=16, pooled_projection_dim=16, axes_dims_rope=(2, 2, 4), **sizes)


def stable_diffusion_3():
    sizes = {"num_layers": 1, "attention_head_dim": 8, "num_attention_heads": 2, "sample_size": 8}
    return SD3Transformer2DModel(joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=16, **sizes)


def ltx():
    sizes = {"num_layers": 1, "attention_head_dim": 8, "num_attention_heads": 2, "in_channels": 4, "out_channels": 4}
    return LTXVideoTransformer3DModel(cross_attention_dim=16, caption_channels=16, **sizes)


def unet():
    blocks = {"down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",), "block_out_channels": (4,)}
    return UNet2DModel(sample_size=8, norm_num_groups=2, layers_per_block=1, **blocks)


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
    "no layout": (lambda: mhla_hf.convert(wan(), MHLASettings()), "layout: got None, expected 3 counts"),
    "empty count": (lambda: converted(layout=[3, 0, 4]), "layout: got [3, 0, 4]"),
    "layer that is not there": (lambda: converted(layers=[1, 3]), "layers: got index 3"),
    "layer twice": (lambda: converted(layers=[1, 1]), "layers: got [1, 1]"),
    "layers by an unknown name": (lambda: converted(layers="1/2"), "layers: got '1/2'"),
    "two thirds of one": (lambda: mhla_hf.convert(wan(num_layers=1)), 'layers: got "2/3" for a model of 1 layer'),
    "unknown setting": (lambda: converted(blocks=3), "convert: got unknown setting 'blocks'"),
    "settings of another kind": (lambda: mhla_hf.convert(wan(), {"layout": [1, 1, 1]}), "settings: got dict"),
    "unknown map": (lambda: converted(feature_map="gelu"), "feature_map: got 'gelu'"),
    "unknown normaliser": (lambda: converted(normalize="formula"), "normalize: got 'formula'"),
    "unknown start": (lambda: converted(mixing_start="random"), "mixing_start: got 'random'"),
    "unknown order": (lambda: converted(rope="later"), "rope: got 'later'"),
    "even convolution": (lambda: converted("dit", cpe=2), "cpe: got 2"),
    "converted already": (lambda: mhla_hf.convert(converted()), "which is an MHLA model already"),
    "joint attention, Flux": (lambda: mhla_hf.convert(flux()), "whose attention joins text and image tokens"),
    "joint attention, SD3": (lambda: mhla_hf.convert(stable_diffusion_3()), "whose attention joins text and image"),
    "another transformer": (lambda: mhla_hf.convert(ltx()), "model: got LTXVideoTransformer3DModel; expected one of"),
    "a VAE": (lambda: mhla_hf.convert(image_vae()), "model: got AutoencoderKL; expected one of"),
    "a U-Net": (lambda: mhla_hf.convert(unet()), "model: got UNet2DModel; expected one of"),
    "pipeline of a U-Net": (
        lambda: mhla_hf.convert(DDPMPipeline(unet(), DDPMScheduler())),
        "model: got DDPMPipeline, which has no transformer",
    ),
    "a path": (lambda: mhla_hf.convert("Wan-AI/Wan2.1-T2V-1.3B-Diffusers"), "model: got str"),
    "a namesake": (
        lambda: mhla_hf.convert(type("WanTransformer3DModel", (WanTransformer3DModel,), {})(**WAN)),
        "expected that of diffusers",
    ),
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


def other_latents(model, *shape, **more):
    return lambda: model(**{**inputs("wan"), **more, "hidden_states": torch.zeros(shape)})


RUNNING = {
    "latents of another VAE": (
        other_latents(converted(), 1, 48, 3, 8, 10),
        "hidden_states: got latents [1, 48, 3, 8, 10]",
    ),
    "an image for a video": (other_latents(converted(), 1, 16, 8, 10), "expected [batch, 16, frames, height, width]"),
    "a video for an image": (
        lambda: converted("sana")(**{**inputs("sana"), "hidden_states": torch.zeros(1, 4, 3, 8, 8)}),
        "expected [batch, 4, height, width]",
    ),
    "not square": (
        lambda: converted("dit")(**inputs("dit", (8, 32))),
        "hidden_states: got latents of 8 by 32, expected a square",
    ),
    "a block alone": (
        lambda: converted().blocks[1].attn1(torch.zeros(1, 60, 24), None, None, None),
        "grid: got none, expected a call of the whole transformer",
    ),
    "a mask": (
        lambda: converted("pixart")(**inputs("pixart"), attention_mask=torch.ones(1, 64)),
        "attention_mask: got a tensor, expected None",
    ),
    "a causal mask": (
        lambda: mhla_hf.convert(tiny_transformer("skyreels", num_frame_per_block=3))(**inputs("skyreels")),
        "attention_mask: got a tensor, expected None",
    ),
    "cross-attention": (
        lambda: converted().blocks[1].attn1(torch.zeros(1, 60, 24), torch.zeros(1, 5, 24), None, None),
        "encoder_hidden_states: got a tensor, expected None",
    ),
    "official on unequal blocks": (
        lambda: converted("sana", normalize="official", layout=[3, 3])(**inputs("sana")),
        "normalize is 'official'; expected equal blocks",
    ),
    "unknown preset": (lambda: MHLADiTTransformer2DModel.from_preset("DiT-M/2"), "preset: got 'DiT-M/2'"),
    "preset without a patch": (lambda: MHLADiTTransformer2DModel.from_preset("DiT-S"), "preset: got 'DiT-S'"),
    "settings as a list": (lambda: MHLAWanTransformer3DModel(**WAN, mhla=[3, 5, 10]), "mhla: got list"),
    "newer format": (lambda: MHLAWanTransformer3DModel(**WAN, mhla={"format_version": 99}), "format_version: got 99"),
    "setting of another version": (
        lambda: MHLAWanTransformer3DModel(**WAN, mhla={"kappa": 1}),
        "unknown setting 'kappa'",
    ),
    "layers of a longer model": (lambda: MHLAWanTransformer3DModel(**WAN, mhla={"layers": [5]}), "layers: got index 5"),
}


@pytest.mark.parametrize("case", RUNNING)
def test_running(case):
    make, words = RUNNING[case]
    with pytest.raises((ValueError, TypeError)) as error:
        make()
    assert words in str(error.value) and str(error.value).count(". ") == 0, error.value


def change_config(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["mhla"] |= changes
    path.write_text(json.dumps(config))


def change_weights(folder, change):
    path = folder / "diffusion_pytorch_model.safetensors"
    state = load_file(path)
    change(state)
    save_file(state, path)


MIXING = "blocks.1.attn1.processor.mhla.mixing.weight"
QUERY = "blocks.0.attn1.to_q.weight"
DAMAGE = {
    "weights of fewer layers": (lambda folder: change_weights(folder, lambda s: s.pop(MIXING)), f"has no '{MIXING}'"),
    "layers that the weights lack": (lambda folder: change_config(folder, layers=[0, 1, 2]), "has no 'blocks.0.attn1"),
    "weights of more layers": (lambda folder: change_config(folder, layers=[1]), "has 'blocks.2.attn1.processor.mhla."),
    "layout of another M": (
        lambda folder: change_config(folder, layout=[3, 2, 2]),
        f"{MIXING} is [150, 150], expected",
    ),
    "NaN in the mixing": (
        lambda folder: change_weights(folder, lambda s: s[MIXING].fill_(float("nan"))),
        "got NaN or infinite values",
    ),
    "infinite norm": (
        lambda folder: change_weights(
            folder, lambda s: s["blocks.2.attn1.processor.mhla.norm.weight"].fill_(float("inf"))
        ),
        "blocks.2.attn1.processor.mhla.norm.weight: got NaN or infinite",
    ),
    "NaN in the convolution": (
        lambda folder: change_weights(
            folder, lambda s: s["blocks.2.attn1.processor.mhla.cpe.conv.bias"].fill_(float("nan"))
        ),
        "mhla.cpe.conv.bias: got NaN or infinite",
    ),
    "negative mixing": (
        lambda folder: change_config(folder, mixing_form="direct"),
        "got negative mixing weights, expected nonnegative ones",
    ),
    "cropped projection": (
        lambda folder: change_weights(folder, lambda s: s.update({QUERY: s[QUERY][:12].clone()})),
        f"{QUERY} is [12, 24], expected [24, 24]",
    ),
    "newer format": (lambda folder: change_config(folder, format_version=2), "format_version: got 2"),
    "unknown setting": (lambda folder: change_config(folder, tau=1), "unknown setting 'tau'"),
    "wrong axes": (lambda folder: change_config(folder, layout=[150]), "layout: got [150], expected 3 counts"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_checkpoints(case, tmp_path):
    change, words = DAMAGE[case]
    model = converted(cpe=3)
    model.save_pretrained(tmp_path)
    change(tmp_path)
    with pytest.raises(ValueError) as error:
        MHLAWanTransformer3DModel.from_pretrained(tmp_path)
    assert words in str(error.value) and str(error.value).count(". ") == 0, error.value


def cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


WEIGHTS = "diffusion_pytorch_model.safetensors"
HALF_A_FOLDER = {
    "empty": (lambda folder: [file.unlink() for file in folder.iterdir()], "no file named config.json"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "got config.json and no weights"),
    "half a file": (lambda folder: cut(folder / WEIGHTS, 9000), f"{WEIGHTS}', expected"),
    "no byte": (lambda folder: cut(folder / WEIGHTS, 0), f"{WEIGHTS}', expected"),
    "half a config": (lambda folder: cut(folder / "config.json", 30), "is not a valid JSON file"),
}


def check_half(folder, words):
    with pytest.raises(OSError) as error:
        MHLAWanTransformer3DModel.from_pretrained(folder)
    text = str(error.value)
    assert words in text and "expected config.json and all weights" in text and text.count(". ") == 0, text


@pytest.mark.parametrize("case", HALF_A_FOLDER)
def test_half_a_folder(case, tmp_path):
    change, words = HALF_A_FOLDER[case]
    converted().save_pretrained(tmp_path)
    change(tmp_path)
    check_half(tmp_path, words)


def test_a_shard_is_missing(tmp_path):
    converted().save_pretrained(tmp_path, max_shard_size="40KB")
    shard = sorted(tmp_path.glob("*-00002-of-*.safetensors"))[0]
    shard.unlink()
    check_half(tmp_path, shard.name)


def test_a_stock_checkpoint_is_not_an_mhla_model(tmp_path):
    wan().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has no 'blocks\.1\.attn1\.processor\.mhla\.mixing\.weight' \(4 missing\)"):
        MHLAWanTransformer3DModel.from_pretrained(tmp_path)


def test_a_file_where_the_folder_should_be(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="save_directory: got the file"):
        converted().save_pretrained(tmp_path / "file")


def test_remote_code_is_not_run_unasked(tmp_path):
    mhla_hf.convert(PIPELINES["dit"]()).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        DiffusionPipeline.from_pretrained(tmp_path)
