"""Which family a model is of: its record, and the MHLA classes that belong to it."""

import importlib
import sys

from ..models.families import DIFFUSION, Family, family_of_type
from ..models.transformers_api import config_class_of

OWN = ("mhla", "mhla_measured", "model_type", "architectures", "auto_map", "transformers_weights", "base_model_type")


def is_of_diffusers(model) -> bool:
    """Whether this is a pipeline or a model of diffusers, found out without importing it."""
    diffusers = sys.modules.get("diffusers")
    return diffusers is not None and isinstance(model, (diffusers.DiffusionPipeline, diffusers.ModelMixin))


def family_of(model) -> Family | None:
    """The record of a model, softmax or MHLA, a checkpoint's own classes included; None if there is none."""
    if is_of_diffusers(model):
        return next((found for cls in type(model).__mro__ if (found := transformer_family(cls)) is not None), None)
    config = getattr(model, "config", None)
    return family_of_type(getattr(config, "base_model_type", getattr(config, "model_type", None)))


def transformer_family(cls: type) -> Family | None:
    """The record of a class that is diffusers' own; None for any other."""
    family = next((family for family in DIFFUSION if cls.__name__ in family.classes), None)
    return family if family is not None and getattr(sys.modules["diffusers"], cls.__name__) is cls else None


def mhla_class(family: Family, base: type) -> type:
    """The MHLA class of `base`, one of the classes of `family`."""
    return getattr(importlib.import_module(f"..{family.entry}", __package__), f"MHLA{base.__name__}")


def softmax_config(config):
    """The configuration of the softmax model of transformers that a converted one with this configuration was made from."""
    values = {name: value for name, value in config.to_dict().items() if name not in OWN}
    return config_class_of(config.base_model_type)(**values)
