"""Tiny pipelines of the transformers in `tiny_grids.py` and `tiny_joint.py`, as `tiny_pipelines.py` has them of the others.

`GRID_PIPELINES[family]()` returns a softmax pipeline. That of `BARE_PIPELINES[family]()` has no text encoders and no
autoencoder, and is called with `BARE_ARGUMENTS[family]`.
"""

import inspect
from functools import partial

import diffusers
import torch
from diffusers.pipelines.ltx2 import LTX2TextConnectors
from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder
from PIL import Image
from transformers import BertConfig, BertModel, BertTokenizer

from tools.tiny_pipelines import LETTERS, embedding, flow, image_vae, of_parts, t5, tiny_transformer


def two_texts():
    """Return two text encoders of another kind, for pipelines that are called with embeddings of prompts (`CALLS`)."""
    return {**t5(), **{f"{name}_2": part for name, part in t5().items()}}


def ltx_vae():
    """Return an autoencoder that has an eighth of the width and of the frames, less one."""
    torch.manual_seed(2)
    widths = {"block_out_channels": (8,) * 4, "layers_per_block": (1,) * 5, "spatio_temporal_scaling": (1, 1, 1, 0)}
    widths |= {f"decoder_{name}": value for name, value in widths.items()}
    patches = {"patch_size": 1, "patch_size_t": 1, "latent_channels": 8}
    return diffusers.AutoencoderKLLTXVideo(**widths, **patches, decoder_inject_noise=(False,) * 5).eval()


def allegro_vae():
    """Return an autoencoder with an eighth of the width and a quarter of the frames."""
    torch.manual_seed(2)
    kind = {"block_out_channels": (4,) * 4, "layers_per_block": 1, "norm_num_groups": 2}
    blocks = {"down_block_types": ("AllegroDownBlock3D",) * 4, "up_block_types": ("AllegroUpBlock3D",) * 4}
    return diffusers.AutoencoderKLAllegro(**kind, **blocks, temporal_compression_ratio=4).eval()


def hunyuan_dit_pipeline() -> diffusers.HunyuanDiTPipeline:
    torch.manual_seed(1)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    second = {f"{name}_2": part for name, part in t5().items()}
    return diffusers.HunyuanDiTPipeline(
        vae=image_vae(4),
        text_encoder=BertModel(BertConfig(vocab_size=64, **sizes)).eval(),
        tokenizer=BertTokenizer(vocab={word: number for number, word in enumerate(words)}),
        transformer=tiny_transformer("hunyuan-dit", text_len=77, text_len_t5=256),
        scheduler=diffusers.DDIMScheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
        **second,
    )


def ltx2_pipeline() -> diffusers.LTX2Pipeline:
    """Return a pipeline with a text encoder of another kind, whose hidden states are as many numbers."""
    torch.manual_seed(2)
    widths = {"block_out_channels": (8,), "spatio_temporal_scaling": (True,), "layers_per_block": (1,)}
    widths |= {f"decoder_{name}": value for name, value in widths.items()} | {"decoder_layers_per_block": (1, 1)}
    plain = {"decoder_inject_noise": (False, False), "upsample_residual": (False,), "upsample_factor": (1,)}
    patches = {"patch_size": 1, "patch_size_t": 1, "latent_channels": 8, "downsample_type": ("spatial",)}
    video = diffusers.AutoencoderKLLTX2Video(**widths, **plain, **patches)
    small = {"base_channels": 4, "ch_mult": (1,), "num_res_blocks": 1, "attn_resolutions": None, "resolution": 32}
    audio = diffusers.AutoencoderKLLTX2Audio(**small, latent_channels=2, mel_bins=8, mid_block_add_attention=False)
    steps = {"upsample_kernel_sizes": [4, 4], "upsample_factors": [2, 2], "resnet_kernel_sizes": [3]}
    vocoder = LTX2Vocoder(in_channels=16, hidden_channels=8, resnet_dilations=[[1, 3, 5]], **steps)
    heads = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 1, "num_learnable_registers": None}
    connectors = {f"{stream}_connector_{name}": value for stream in ("video", "audio") for name, value in heads.items()}
    return diffusers.LTX2Pipeline(
        scheduler=flow(),
        vae=video.eval(),
        audio_vae=audio.eval(),
        **t5(),
        connectors=LTX2TextConnectors(caption_channels=32, text_proj_in_factor=2, **connectors).eval(),
        transformer=tiny_transformer("ltx2.3"),
        vocoder=vocoder.eval(),
    )


def kandinsky5_vae():
    torch.manual_seed(2)
    blocks = {"down_block_types": ("HunyuanVideoDownBlock3D",) * 4, "up_block_types": ("HunyuanVideoUpBlock3D",) * 4}
    widths = {"block_out_channels": (4,) * 4, "norm_num_groups": 2, "latent_channels": 4, "layers_per_block": 1}
    return diffusers.AutoencoderKLHunyuanVideo(**blocks, **widths, mid_block_add_attention=False).eval()


def flux_pipeline() -> diffusers.FluxPipeline:
    vae = image_vae()
    vae.register_to_config(shift_factor=0.0)
    transformer = tiny_transformer("flux", in_channels=16)
    return diffusers.FluxPipeline(**two_texts(), vae=vae, scheduler=flow(), transformer=transformer)


def kontext_pipeline() -> diffusers.FluxKontextPipeline:
    """Return a pipeline that edits an image, and is called with `EDIT`."""
    return diffusers.FluxKontextPipeline(**flux_pipeline().components)


EDIT = {
    "image": Image.linear_gradient("L").resize((80, 48)).convert("RGB"),
    **{"height": 64, "width": 96, "max_area": 64 * 96, "_auto_resize": False},
    **{"prompt_embeds": embedding(1, 6, 32), "pooled_prompt_embeds": embedding(1, 8)},
}
GRID_PIPELINES = {
    "ltx": of_parts(diffusers.LTXPipeline, "ltx", ltx_vae, t5),
    "ltx2": ltx2_pipeline,
    "kandinsky5": of_parts(diffusers.Kandinsky5T2VPipeline, "kandinsky5", kandinsky5_vae, two_texts),
    "allegro": of_parts(diffusers.AllegroPipeline, "allegro", allegro_vae, t5, diffusers.DDIMScheduler),
    "latte": of_parts(diffusers.LattePipeline, "latte", image_vae, t5, diffusers.DDIMScheduler),
    "hunyuan-dit": hunyuan_dit_pipeline,
    "flux": flux_pipeline,
    "aura-flow": of_parts(diffusers.AuraFlowPipeline, "aura-flow", image_vae, t5),
}
MOCHI = diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True)
COGVIDEOX = diffusers.CogVideoXDDIMScheduler(prediction_type="v_prediction")


def bare(pipeline_class, family, scheduler=None, **sizes):
    """Return a pipeline of which only the transformer and the scheduler are there."""
    parameters = inspect.signature(pipeline_class.__init__).parameters
    required = [name for name, value in parameters.items() if value.default is value.empty and name != "self"]
    parts = {"scheduler": scheduler or flow(), "transformer": tiny_transformer(family, **sizes)}
    return pipeline_class(**{**dict.fromkeys(required), **parts})


def texts(name="", *shape):
    """Return arguments for a prompt and the empty one, with ones for embeddings if there is no shape."""
    values = [embedding(1, *shape) if shape else torch.ones(1, 6, dtype=torch.bool) for _ in range(2)]
    return {f"{negative}{name}": value for negative, value in zip(("", "negative_"), values, strict=True)}


VIDEO = {"sample_height": 8, "sample_width": 10, "sample_frames": 9}
BARE_PIPELINES = {
    "sd3": partial(bare, diffusers.StableDiffusion3Pipeline, "sd3"),
    "qwen-image": partial(bare, diffusers.QwenImagePipeline, "qwen-image"),
    "chroma": partial(bare, diffusers.ChromaPipeline, "chroma"),
    "flux2": partial(bare, diffusers.Flux2Pipeline, "flux2"),
    "cogvideox": partial(bare, diffusers.CogVideoXPipeline, "cogvideox", COGVIDEOX, **VIDEO),
    "mochi": partial(bare, diffusers.MochiPipeline, "mochi", MOCHI),
    "hunyuan-video": partial(bare, diffusers.HunyuanVideoPipeline, "hunyuan-video", guidance_embeds=True),
}
EMBEDS = texts("prompt_embeds", 6, 32)
MASKS = texts("prompt_attention_mask")
IMAGE = {"height": 64, "width": 96, **EMBEDS}
BARE_ARGUMENTS = {
    "sd3": {**IMAGE, **texts("pooled_prompt_embeds", 8)},
    "qwen-image": {**IMAGE, **texts("prompt_embeds_mask"), "true_cfg_scale": 3.0},
    "chroma": {**IMAGE, **MASKS},
    "flux2": {"height": 64, "width": 96, "prompt_embeds": EMBEDS["prompt_embeds"]},
    "cogvideox": {**IMAGE, "width": 80, "num_frames": 9},
    "mochi": {**IMAGE, **MASKS, "num_frames": 13},
    "hunyuan-video": {
        **{name: {**IMAGE, **MASKS}[name] for name in ("height", "width", "prompt_embeds", "prompt_attention_mask")},
        **{"num_frames": 9, "pooled_prompt_embeds": embedding(1, 8)},
    },
}
