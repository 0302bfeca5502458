"""mhla_hf: Multi-Head Linear Attention (arXiv 2601.07832) for the Hugging Face ecosystem.

Importing this registers the model types with transformers' Auto classes, without importing torch: names resolve on first
use, and the classes are registered when transformers' own tables are first read.
"""

import importlib

from ._register import register_on_import

__version__ = "0.1.0"

_PUBLIC = {
    "Blocks": "ops.blocks",
    "MHLAState": "ops.state",
    "mhla": "ops.api",
    "mhla_step": "ops.api",
    "MHLASettings": "nn.settings",
    "MHLADiTTransformer2DModel": "models.dit_transformer",
    "MHLAPixArtTransformer2DModel": "models.pixart_transformer",
    "MHLASanaTransformer2DModel": "models.sana_transformer",
    "MHLASanaVideoTransformer3DModel": "models.sana_video_transformer",
    "MHLASkyReelsV2Transformer3DModel": "models.wan_transformer",
    "MHLAWanTransformer3DModel": "models.wan_transformer",
    "MHLAWanVACETransformer3DModel": "models.wan_transformer",
    "MHLAConfig": "models.configuration",
    "MHLAForCausalLM": "models.language",
    "MHLAVisionConfig": "models.vision_configuration",
    "MHLAVisionModel": "models.vision",
    "MHLAForImageClassification": "models.vision",
    "analyze": "evidence.report",
    "convert": "patch",
    "distill": "training.loop",
    "evaluate": "scores.evaluation",
    "push": "hub.push",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str):
    if name in _PUBLIC:
        return getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)
    if name.startswith("MHLA") and name.endswith("Config"):
        return importlib.import_module(".models.configuration", __name__).overlay_config_named(name)
    if name.startswith("MHLA"):
        return getattr(importlib.import_module(".models.converted", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *_PUBLIC})


register_on_import()
