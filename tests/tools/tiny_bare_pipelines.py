"""Tiny pipelines of joint-attention transformers without text encoders and autoencoders, for embeddings of prompts.

`BARE_PIPELINES[family]()` returns a softmax pipeline, and `BARE_ARGUMENTS[family]` what it is called with.
"""

import inspect
from functools import partial

import diffusers
import torch

from tools.tiny_pipelines import embedding, flow, tiny_transformer

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
