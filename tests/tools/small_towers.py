"""Small vision towers of each family, and small from-scratch classifiers, with fixed random weights."""

import numpy
import torch
import transformers
from PIL import Image

import mhla_hf
from mhla_hf import MHLAForImageClassification, MHLAVisionConfig
from tools.small_models import shaken

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32,
    "patch_size": 4, "num_channels": 3, "initializer_range": 0.2,
}  # fmt: skip
TOWERS = {
    "ViTForImageClassification": ("ViTConfig", {"num_labels": 5}),
    "ViTModel": ("ViTConfig", {}),
    "DeiTForImageClassification": ("DeiTConfig", {"num_labels": 5}),
    "DeiTForImageClassificationWithTeacher": ("DeiTConfig", {"num_labels": 5}),
    "Dinov2ForImageClassification": ("Dinov2Config", {"num_labels": 5}),
    "Dinov2WithRegistersForImageClassification": ("Dinov2WithRegistersConfig", {"num_labels": 5}),
    "DINOv3ViTModel": ("DINOv3ViTConfig", {"num_register_tokens": 3}),
    "CLIPVisionModel": ("CLIPVisionConfig", {}),
    "CLIPVisionModelWithProjection": ("CLIPVisionConfig", {"projection_dim": 8}),
    "SiglipVisionModel": ("SiglipVisionConfig", {}),
}


def softmax_tower(name: str, **overrides):
    torch.manual_seed(7)
    config, extra = TOWERS[name]
    model = getattr(transformers, name)(getattr(transformers, config)(**{**SIZES, **extra, **overrides}))
    return model.eval()


def converted_tower(name: str, layers="all", **settings):
    """Return a converted tower whose new parameters are not at their initial values."""
    return shaken(mhla_hf.convert(softmax_tower(name), layers=layers, **settings))


def small_clip(whole=transformers.CLIPModel, **changes):
    """Return a model of texts and images in eval mode, which has a vision tower."""
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text, vision = {**small, "vocab_size": 20, **changes}, {**small, "image_size": 32}
    return whole(transformers.CLIPConfig(text_config=text, vision_config=vision)).eval()


def small_classifier(name: str = "digits", **overrides):
    """Return a from-scratch classifier in eval mode, whose MHLA parameters are not at their initial values."""
    torch.manual_seed(7)
    if name == "stages":
        stages = [
            {"hidden_size": 16, "depth": 1, "num_heads": 1, "layout": [4, 2]},
            {"hidden_size": 32, "depth": 2, "num_heads": 2, "layout": [2, 2]},
        ]
        settings = {"layers": [0, 1], **overrides.pop("mhla", {})}
        config = MHLAVisionConfig.preset("vlt-t", stages=stages, mhla=settings, num_labels=5, **overrides)
    else:
        small = {"num_hidden_layers": 2, "hidden_size": 24, "num_labels": 5, "initializer_range": 0.2}
        config = MHLAVisionConfig.preset(name, **{**small, **overrides})
    return shaken(MHLAForImageClassification(config).eval())


def images(batch: int = 2, height: int = 32, width: int = 32, channels: int = 3, seed: int = 0) -> torch.Tensor:
    """Return random images: `[batch, channels, height, width]`."""
    return torch.randn(batch, channels, height, width, generator=torch.Generator().manual_seed(seed))


def save_photos(root, classes, seed=0, growth=3):
    """Save noise in a folder per class, `classes` images each, which grow by `growth` pixels, and return `root`."""
    random = numpy.random.default_rng(seed)
    for name, count in classes.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels = random.integers(0, 256, (40 + growth * number, 48, 3), dtype=numpy.uint8)
            Image.fromarray(pixels).save(root / name / f"{number}.png")
    return root


def output_of(model, pixels, **arguments):
    """Return the logits of a tower or, if it has none, its last hidden state."""
    output = model(pixels, **arguments)
    return output.logits if hasattr(output, "logits") else output.last_hidden_state
