"""convert() for a language model or vision tower of transformers."""

import copy
import logging
from dataclasses import replace

import torch
import transformers

from ..models.attention import softmax_attentions
from ..models.converted import install_by_form
from ..models.families import LANGUAGE, VISION, Family, family_of_type
from ..models.grid_attention import grid_attentions, install_grid_mhla
from ..nn.core import check_causal
from ..nn.settings import MHLASettings
from .families import mhla_class
from .steps import chosen_settings, match_device_and_dtype

logger = logging.getLogger("mhla_hf")


def check_tower(settings: MHLASettings) -> None:
    """What only a vision tower refuses."""
    if settings.layout is None or len(settings.layout) != 2:
        raise ValueError(f"layout: got {settings.layout!r}, expected blocks per row and column, such as [4, 4].")
    if settings.normalize == "official":
        raise ValueError('normalize: got "official", whose denominator has no class tokens, expected true or false.')


def convert_in_place(model, settings: MHLASettings | None, layers, overrides: dict):
    """The work of `convert` for a model of transformers."""
    family = convertible_family(model)
    language = (softmax_attentions, install_by_form, check_causal)
    find, install, check = (grid_attentions, install_grid_mhla, check_tower) if family in VISION else language
    settings = chosen_settings(settings, MHLASettings(**family.defaults), layers, overrides)
    if settings.rope == "after":
        raise ValueError('rope: got "after", expected "before": the base rotates q and k before the map.')
    check(settings)
    config = model.config
    settings = replace(settings, layers=settings.resolve_layers(config.num_hidden_layers))
    attentions = find(model)
    for index in settings.layers:
        if hasattr(attentions[index], "_hf_hook") and attentions[index].q_proj.weight.is_meta:
            raise ValueError(f"model: layer {index} is offloaded, expected its weights on a device.")
    check_what_is_lost(config, attentions, settings.layers)

    model_class = mhla_class(family, type(model))
    own = copy.deepcopy(config)
    own.__class__ = model_class.config_class
    own.mhla = settings.to_dict()
    for module in model.modules():
        if getattr(module, "config", None) is config:
            module.config = own
    model.__class__ = model_class
    own.architectures = [model_class.__name__]
    install(model, settings)
    for index in settings.layers:
        match_device_and_dtype(attentions[index].mhla, attentions[index].q_proj.weight.device, model.dtype)
    return model


def convertible_family(model) -> Family:
    """The base's family, or one sentence why this object cannot be converted."""
    config = getattr(model, "config", None)
    model_type = getattr(config, "model_type", None)
    if not isinstance(model, torch.nn.Module) or not isinstance(model_type, str):
        what = "a language model or vision tower of transformers, or a pipeline"
        raise TypeError(f"model: got {type(model).__name__}, expected {what}.")
    if getattr(config, "mhla", None) is not None:
        raise ValueError(f"model: got {type(model).__name__}, which is an MHLA model already; expected a softmax one.")
    family = family_of_type(model_type)
    if family is None:
        known = [family.base for family in (*LANGUAGE, *VISION)]
        raise ValueError(f"model: got model type {model_type!r}, expected one of {known}.")
    if type(model) not in [getattr(transformers, name) for name in family.classes]:
        raise ValueError(f"model: got {type(model).__name__}, expected {' or '.join(family.classes)}.")
    return family


def check_what_is_lost(config, attentions: dict, layers: list[int]) -> None:
    """Refuse what changes a base's softmax layers and MHLA layers cannot do; say once that its dropout is gone."""
    for index in layers:
        window = getattr(attentions[index], "sliding_window", getattr(config, "sliding_window", None))
        if window is not None:
            what = "expected a base loaded with sliding_window=None, or other layers"
            raise ValueError(f"sliding_window: layer {index} sees the last {window} tokens, not MHLA; {what}.")
    if getattr(config, "is_causal", True) is False and family_of_type(config.model_type) in LANGUAGE:
        raise ValueError("is_causal: the base's configuration says False, expected a causal language model.")
    for name in ("attention_dropout", "attention_probs_dropout_prob"):
        if getattr(config, name, 0.0):
            logger.warning("convert: %s=%s of the base does not apply to MHLA layers.", name, getattr(config, name))
