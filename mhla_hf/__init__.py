"""mhla_hf: Multi-Head Linear Attention (arXiv 2601.07832) for the Hugging Face ecosystem.

Importing the package registers the most common model types with transformers' Auto classes, which imports torch and
transformers. The public names below are imported when they are first used. Under the console script `mhla-hf`, each command
registers the types itself (`cli.values.load_libraries`), so that `mhla-hf --help` imports neither torch nor transformers.
"""

import contextlib
import importlib
import sys

from .models.families import DIFFUSION, FAMILIES

__version__ = "0.1.0"

_PUBLIC = {  # name -> module that defines it
    "Blocks": "ops.blocks",
    "MHLAState": "ops.state",
    "mhla": "ops.api",
    "mhla_step": "ops.api",
    "MHLASettings": "nn.settings",
    "MHLAConfig": "models.language.configuration",
    "MHLAModel": "models.language.language_model",
    "MHLAForCausalLM": "models.language.language_model",
    "MHLAVisionConfig": "models.vision.vision_configuration",
    "MHLAVisionModel": "models.vision.vision_model",
    "MHLAForImageClassification": "models.vision.vision_model",
    "adapter_config": "training.adapters",
    "convert": "conversion",
    "distill": "training.loop",
    "evaluate": "evaluation.runner",
    "load_adapter": "training.adapters",
    "push": "hub.push",
    "save_adapter": "training.adapters",
    "use_mhla_in_steps": "sampling",
}

__all__ = sorted([*_PUBLIC, *(f"MHLA{name}" for family in DIFFUSION for name in family.classes)])


def __getattr__(name: str) -> object:
    """Import a public name, or an MHLA class of a model family, when it is first used."""
    if name in _PUBLIC:
        return getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)
    if name.startswith("MHLA"):
        transformers_api = importlib.import_module(".models.transformers_api", __name__)
        for family in FAMILIES:
            base_names = (*transformers_api.class_names(family), transformers_api.config_class_name(family.base))
            if name.removeprefix("MHLA") not in base_names:
                continue
            if family in DIFFUSION:
                with importlib.import_module(".checkpoints.load", __name__).require_extra(
                    name, "diffusers", "diffusers"
                ):
                    importlib.import_module("diffusers")
            with contextlib.suppress(AttributeError):  # the family has no model with this head
                return getattr(importlib.import_module(f".{family.kind.entry}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the names in this module, including the public ones that are not imported yet."""
    return sorted({*globals(), *__all__})


if "mhla_hf_command" not in sys.modules:  # under the console script, each command registers them
    importlib.import_module("._register", __name__).register()
