"""Tiny pipelines of the transformers in `tiny_grids.py` and `tiny_joint.py`, as `tiny_pipelines.py` has them of the others.

`GRID_PIPELINES[family]()` returns a softmax pipeline. That of `BARE_PIPELINES[family]()` has no text encoders and no
autoencoder.
"""

import inspect
from functools import partial

import diffusers
import torch
from diffusers.pipelines.ltx2 import LTX2TextConnectors
from PIL import Image

from tools.tiny_pipelines import embedding, flow, image_vae, of_parts, t5, tiny_transformer


def ltx_vae():
    """Return an autoencoder that has an eighth of the width and of the frames, less one."""
    torch.manual_seed(2)
    widths = {"block_out_channels": (8,) * 4, "layers_per_block": (1,) * 5, "spatio_temporal_scaling": (1, 1, 1, 0)}
    widths |= {f"decoder_{name}": value for name, value in widths.items()}
    patches = {"patch_size": 1, "patch_size_t": 1, "latent_channels": 8}
    return diffusers.AutoencoderKLLTXVideo(**widths, **patches, decoder_inject_noise=(False,) * 5).eval()


def flux_pipeline() -> diffusers.FluxPipeline:
    """Return a pipeline that is called with embeddings of prompts (`CALLS`): its text encoders are of another kind."""
    vae = image_vae()
    vae.register_to_config(shift_factor=0.0)
    parts = {"vae": vae, "scheduler": flow(), "transformer": tiny_transformer("flux", in_channels=16), **t5()}
    return diffusers.FluxPipeline(**parts, **{f"{name}_2": part for name, part in t5().items()})


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
    "latte": of_parts(diffusers.LattePipeline, "latte", image_vae, t5, diffusers.DDIMScheduler),
    "flux": flux_pipeline,
    "aura-flow": of_parts(diffusers.AuraFlowPipeline, "aura-flow", image_vae, t5),
}


def bare(pipeline_class, family, scheduler=None, parts=None, **sizes):
    """Return a pipeline of which only the transformer, the scheduler, and `parts` are there."""
    parameters = inspect.signature(pipeline_class.__init__).parameters
    required = [name for name, value in parameters.items() if value.default is value.empty and name != "self"]
    parts = {"scheduler": scheduler or flow(), "transformer": tiny_transformer(family, **sizes), **(parts or {})}
    return pipeline_class(**{**dict.fromkeys(required), **parts})


def ltx2_pipeline() -> diffusers.LTX2Pipeline:
    """Return a pipeline with what latents pass through besides the transformer."""
    torch.manual_seed(2)
    small = {"base_channels": 4, "ch_mult": (1,), "num_res_blocks": 1, "attn_resolutions": None, "resolution": 32}
    audio_vae = diffusers.AutoencoderKLLTX2Audio(**small, latent_channels=2, mel_bins=8, mid_block_add_attention=False)
    heads = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 1, "num_learnable_registers": None}
    connectors = {f"{stream}_connector_{name}": value for stream in ("video", "audio") for name, value in heads.items()}
    connectors = LTX2TextConnectors(caption_channels=32, text_proj_in_factor=1, **connectors).eval()
    parts = {"connectors": connectors, "vae": ltx_vae(), "audio_vae": audio_vae}
    return bare(diffusers.LTX2Pipeline, "ltx2.3", parts=parts)


MOCHI = diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True)
COGVIDEOX = diffusers.CogVideoXDDIMScheduler(prediction_type="v_prediction")
DDIM = diffusers.DDIMScheduler()
VIDEO = {"sample_height": 8, "sample_width": 10, "sample_frames": 9}
BARE_PIPELINES = {
    "ltx2": ltx2_pipeline,
    "kandinsky5": partial(bare, diffusers.Kandinsky5T2VPipeline, "kandinsky5"),
    "allegro": partial(bare, diffusers.AllegroPipeline, "allegro", DDIM),
    "hunyuan-dit": partial(bare, diffusers.HunyuanDiTPipeline, "hunyuan-dit", DDIM),
    "sd3": partial(bare, diffusers.StableDiffusion3Pipeline, "sd3"),
    "qwen-image": partial(bare, diffusers.QwenImagePipeline, "qwen-image"),
    "chroma": partial(bare, diffusers.ChromaPipeline, "chroma"),
    "flux2": partial(bare, diffusers.Flux2Pipeline, "flux2"),
    "cogvideox": partial(bare, diffusers.CogVideoXPipeline, "cogvideox", COGVIDEOX, **VIDEO),
    "mochi": partial(bare, diffusers.MochiPipeline, "mochi", MOCHI),
    "hunyuan-video": partial(bare, diffusers.HunyuanVideoPipeline, "hunyuan-video", guidance_embeds=True),
}
