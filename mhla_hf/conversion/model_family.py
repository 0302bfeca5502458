"""The family that a model belongs to: its record in `models/families.py` and its MHLA classes."""

import importlib
import inspect
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..models.diffusion.inputs import read_grid
from ..models.families import DIFFUSION, DiffusionFamily, Family, family_of_type
from ..models.transformers_api import config_class_of
from ..nn.settings import FOREIGN_ENTRIES

# Fields of an MHLA model's configuration that its base's configuration does not have, or has other values for.
MHLA_FIELDS = ("mhla", "mhla_measured", "model_type", "architectures", "auto_map", *FOREIGN_ENTRIES, "base_model_type")
TRANSFORMERS = ("transformer", "transformer_2")  # of a pipeline; Wan 2.2 has one for high and one for low noise


def transformers_of(pipeline: Any) -> list[Any]:
    components = [getattr(pipeline, name, None) for name in TRANSFORMERS]
    return [component for component in components if component is not None]


def note_classes(model: Any) -> None:
    """Record the current classes of a pipeline's transformers in its config, from which model_index.json is written."""
    if hasattr(model, "components"):
        for name in TRANSFORMERS:
            if getattr(model, name, None) is not None:
                setattr(model, name, getattr(model, name))  # setting a component makes the pipeline record its class


def is_of_diffusers(model: Any) -> bool:
    """Return whether an object is a pipeline or model of diffusers, without importing diffusers."""
    diffusers = sys.modules.get("diffusers")
    return diffusers is not None and isinstance(model, (diffusers.DiffusionPipeline, diffusers.ModelMixin))


def family_of(model: Any) -> Family | None:
    """Return the family of a softmax or MHLA model, also if a checkpoint's source defines its class; None without one."""
    if is_of_diffusers(model):
        return next((family for cls in type(model).__mro__ if (family := transformer_family(cls)) is not None), None)
    config = getattr(model, "config", None)
    return family_of_type(getattr(config, "base_model_type", getattr(config, "model_type", None)))


def transformer_family(cls: type) -> DiffusionFamily | None:
    """Return the family of a class of diffusers; None if it has none, or if the class only shares the name of one."""
    family = next((family for family in DIFFUSION if cls.__name__ in family.classes), None)
    return family if family is not None and getattr(sys.modules["diffusers"], cls.__name__) is cls else None


def keep_new_images(
    transformer: Any, output: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> torch.Tensor:
    """Drop the tokens of images to edit from the output [B, T, C] of a transformer, as its pipeline does."""
    transformer = getattr(transformer, "_orig_mod", transformer)  # what `torch.compile` has wrapped
    family = family_of(transformer)
    if not isinstance(family, DiffusionFamily) or not family.kind.positions:
        return output
    arguments = inspect.signature(type(transformer).forward).bind(transformer, *args, **kwargs).arguments
    grid = read_grid(family.kind, transformer.config, arguments["hidden_states"], arguments)
    if not isinstance(grid[0], tuple):
        return output
    # In Qwen-Image-Layered, the last grid is the input image and all others are made from it.
    new = grid[:-1] if transformer.config.get("use_layer3d_rope") else grid[:1]
    return output[:, : sum(map(math.prod, new))]


def mhla_class(family: Family, base: type) -> Any:
    """Return the MHLA class of `base`, which is one of the classes of `family`."""
    return getattr(importlib.import_module(f"..{family.kind.entry}", __package__), f"MHLA{base.__name__}")


def softmax_config(config: Any) -> Any:
    """Create the base's configuration from `config`, that of a model converted from a softmax model of transformers."""
    values = {name: value for name, value in config.to_dict().items() if name not in MHLA_FIELDS}
    config_class: Any = config_class_of(config.base_model_type)
    return config_class(**values)
