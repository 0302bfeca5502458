"""convert(): a softmax model becomes an MHLA model, in place, its weights kept.

Everything is checked before anything is touched. What becomes what is one table (`CONVERTIBLE_MODEL_TYPES`); how it
happens is the same for every family, because the classes are made from the base's own (`models/converted.py`).
"""

import copy
import logging
from dataclasses import replace

import torch

from .models.attention import install_mhla, softmax_attentions
from .models.configuration import CONVERTIBLE_MODEL_TYPES, OVERLAY_PREFIX, overlay_config_class
from .models.converted import base_model_class, overlay_model_class
from .nn.settings import MHLASettings

logger = logging.getLogger("mhla_hf")


def convert(model, settings: MHLASettings | None = None, *, layers=None, **overrides):
    """Turn a pretrained softmax model into an MHLA model, in place, and return it.

    The base's weights stay as they are, under their names; each converted layer gains `self_attn.mhla.*`. A converted model
    needs training before it is good again: `mhla_hf.distill`.

    Args:
        model: a causal language model of transformers (Llama, Mistral, Mixtral, Qwen2, Qwen3).
        settings: all choices at once. Default for language models: layers "2/3" (models without any softmax layer lose
            recall), blocks of 64, 32 of them, learnable Hedgehog-style feature map after RoPE, normalised.
        layers: "all", "2/3" (softmax stays in layers 0, 3, 6, ...) or a list of layer indices; wins over `settings`.
        **overrides: single fields of `MHLASettings`; they win over `settings`.

    Raises:
        TypeError, ValueError: one sentence; the model is then unchanged.
    """
    settings = chosen_settings(settings, layers, overrides)
    base_type = convertible_type(model)
    if settings.rope == "after":
        raise ValueError(
            'rope: got "after", expected "before": a converted model\'s base rotates q and k before the map.'
        )
    if settings.normalize == "official":
        raise ValueError('normalize: got "official", expected true or false for a language model.')
    config = model.config
    settings = replace(settings, layers=settings.resolve_layers(config.num_hidden_layers))
    attentions = softmax_attentions(model)
    missing = [i for i in settings.layers if i not in attentions]
    if missing:
        raise ValueError(f"model: layer {missing[0]} of {type(model).__name__} has no attention that can become MHLA.")
    away = [i for i in settings.layers if hasattr(attentions[i], "_hf_hook") and attentions[i].o_proj.weight.is_meta]
    if away:
        raise ValueError(
            f"model: layer {away[0]} is offloaded, expected its weights on a device; load it without offloading."
        )
    warn_of_what_is_lost(config, attentions, settings.layers)

    own = copy.deepcopy(config)
    own.__class__ = overlay_config_class(base_type)
    own.mhla = settings.to_dict()
    for module in model.modules():
        if getattr(module, "config", None) is config:
            module.config = own
    model.__class__ = overlay_model_class(base_type)
    own.architectures = [model.__class__.__name__]
    install_mhla(model, settings)
    for index in settings.layers:
        match_device_and_dtype(attentions[index], model.dtype)
    return model


def chosen_settings(settings: MHLASettings | None, layers, overrides: dict) -> MHLASettings:
    """The settings of one conversion: defaults, then `settings`, then `overrides` and `layers`."""
    if settings is None:
        settings = MHLASettings(layers="2/3")
    if not isinstance(settings, MHLASettings):
        raise TypeError(f"settings: got {type(settings).__name__}, expected MHLASettings.")
    known = settings.to_dict()
    unknown = sorted(set(overrides) - set(known))
    if unknown:
        raise TypeError(f"convert: got unknown setting {unknown[0]!r}, expected some of {sorted(known)}.")
    if layers is not None:
        overrides = {**overrides, "layers": layers}
    return replace(settings, **overrides)


def convertible_type(model) -> str:
    """The base's model type, or one sentence why this object cannot be converted."""
    config = getattr(model, "config", None)
    model_type = getattr(config, "model_type", None)
    if not isinstance(model, torch.nn.Module) or not isinstance(model_type, str):
        raise TypeError(f"model: got {type(model).__name__}, expected a causal language model of transformers.")
    if model_type == "mhla" or model_type.startswith(OVERLAY_PREFIX):
        raise ValueError(
            f"model: got {type(model).__name__}, which is an MHLA model already; expected a softmax model."
        )
    if model_type not in CONVERTIBLE_MODEL_TYPES:
        raise ValueError(f"model: got model type {model_type!r}, expected one of {list(CONVERTIBLE_MODEL_TYPES)}.")
    expected = base_model_class(model_type)
    if type(model) is not expected:
        raise ValueError(f"model: got {type(model).__name__}, expected {expected.__name__}.")
    return model_type


def warn_of_what_is_lost(config, attentions: dict, layers: list[int]) -> None:
    """Say once what the base's softmax layers did that their MHLA successors do not."""
    windows = {getattr(attentions[i], "sliding_window", getattr(config, "sliding_window", None)) for i in layers} - {
        None
    }
    if windows:
        logger.warning(
            "convert: the base's layers see the last %s tokens only; as MHLA layers they see the whole context.",
            ", ".join(str(w) for w in sorted(windows)),
        )
    if getattr(config, "attention_dropout", 0.0):
        logger.warning(
            "convert: attention_dropout=%s of the base does not apply to MHLA layers.", config.attention_dropout
        )


def match_device_and_dtype(attention: torch.nn.Module, dtype: torch.dtype) -> None:
    """Put a new core where its layer is; the mixing stays fp32."""
    attention.mhla.to(attention.o_proj.weight.device)
    for name, parameter in attention.mhla.named_parameters():
        if not name.startswith("mixing."):
            parameter.data = parameter.data.to(dtype)
