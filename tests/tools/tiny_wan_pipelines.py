"""Tiny Wan pipelines that are conditioned by images or have two transformers; see `tiny_pipelines.py`.

`WAN_PIPELINES[name]()` returns a softmax pipeline, and `WAN_DATA[name]` two rows of arguments to train it with.
"""

from types import SimpleNamespace

import torch
from diffusers import WanImageToVideoPipeline as ImageToVideo
from diffusers import WanPipeline, WanVACEPipeline, WanVideoToVideoPipeline
from diffusers.pipelines.wan import pipeline_wan_i2v, pipeline_wan_vace, pipeline_wan_video2video
from diffusers.utils import is_ftfy_available
from PIL import Image
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

from tools.tiny_pipelines import flow, tiny_transformer, umt5, wan_vae

if not is_ftfy_available():  # these pipelines fail without it on any prompt
    for module in (pipeline_wan_i2v, pipeline_wan_vace, pipeline_wan_video2video):
        module.ftfy = SimpleNamespace(fix_text=str)
SIZE = [9, 64, 80]
PROMPTS = ("a cat walks", "a dog")


def picture(seed: int) -> Image.Image:
    noise = torch.randint(256, (SIZE[1], SIZE[2], 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return Image.fromarray(noise.numpy())


def parts() -> dict:
    return {**umt5(), "vae": wan_vae(), "scheduler": flow()}


def clip() -> dict:
    """Return an encoder of images into 5 tokens."""
    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = CLIPVisionConfig(image_size=16, patch_size=8, projection_dim=16, **sizes)
    processor = CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    return {"image_encoder": CLIPVisionModel(config).eval(), "image_processor": processor}


def experts(pipeline_class: type = WanPipeline, **sizes) -> WanPipeline:
    """Return a pipeline of two transformers, for much noise and for little, as Wan 2.2 A14B."""
    pair = {name: tiny_transformer("wan", **sizes) for name in ("transformer", "transformer_2")}
    with torch.no_grad():
        for parameter in pair["transformer_2"].parameters():
            parameter.mul_(0.9)
    return pipeline_class(**parts(), **pair, boundary_ratio=0.8)


def single(pipeline_class: type, family: str = "wan", sizes=None, **options):
    return pipeline_class(**parts(), transformer=tiny_transformer(family, **(sizes or {})), **options)


WAN_PIPELINES = {
    "i2v": lambda: single(ImageToVideo, "wan-i2v", **clip()),  # Wan 2.1: the transformer reads the image, too
    "flf2v": lambda: single(ImageToVideo, "wan-i2v", {"pos_embed_seq_len": 10}, **clip()),  # of two images
    "vace": lambda: single(WanVACEPipeline, "wan-vace", {"vace_in_channels": 96}),
    "a14b": experts,
    "i2v-a14b": lambda: experts(ImageToVideo, in_channels=36),
    "v2v": lambda: single(WanVideoToVideoPipeline),
    "ti2v": lambda: single(ImageToVideo, expand_timesteps=True),  # Wan 2.2 5B: the first frame has no noise
}
IMAGES = [{"prompt": prompt, "image": picture(seed)} for seed, prompt in enumerate(PROMPTS)]
VIDEOS = [{"prompt": prompt, "video": [picture(seed)] * SIZE[0]} for seed, prompt in enumerate(PROMPTS)]
WAN_DATA = {
    "i2v": IMAGES, "flf2v": [{**row, "last_image": picture(2)} for row in IMAGES], "vace": VIDEOS,
    "a14b": list(PROMPTS), "i2v-a14b": IMAGES, "v2v": VIDEOS, "ti2v": IMAGES,
}  # fmt: skip
