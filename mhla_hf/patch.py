"""convert(): a softmax model becomes an MHLA model, in place, its weights kept.

Everything is checked before anything is touched. What becomes what are two tables (`CONVERTIBLE_MODEL_TYPES` for language
models, `CONVERTIBLE_VISION_TYPES` for vision towers); how it happens is the same for every family of transformers, because
the classes are made from the base's own (`models/converted.py`). Pipelines and transformers of diffusers are
`patch_pipelines.py`'s.
"""

import copy
import importlib
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from .models.attention import install_mhla, softmax_attentions
from .models.configuration import (
    CONVERTIBLE_MODEL_TYPES,
    CONVERTIBLE_VISION_TYPES,
    OVERLAY_PREFIX,
    overlay_config_class,
)
from .models.converted import base_model_classes, overlay_model_class
from .models.grid_attention import grid_attentions, install_grid_mhla
from .nn.settings import MHLASettings

logger = logging.getLogger("mhla_hf")


def check_language(settings: MHLASettings) -> None:
    """What only a causal model refuses."""
    if settings.normalize == "official":
        raise ValueError('normalize: got "official", expected true or false for a language model.')
    if settings.layout is not None or settings.cpe:
        name = "cpe" if settings.layout is None else "layout"
        raise ValueError(f"{name}: got {getattr(settings, name)!r}, expected none for a language model.")


def check_tower(settings: MHLASettings) -> None:
    """What only a vision tower refuses."""
    if settings.layout is None or len(settings.layout) != 2:
        raise ValueError(f"layout: got {settings.layout!r}, expected blocks per row and column, such as [4, 4].")
    for name in ("block_size", "num_blocks"):
        if getattr(settings, name) != getattr(MHLASettings, name):
            raise ValueError(
                f"{name}: got {getattr(settings, name)}, expected none: a vision tower's blocks are its layout."
            )
    if settings.normalize == "official":
        raise ValueError(
            'normalize: got "official", expected true or false: class tokens have no place in the authors\' denominator.'
        )


@dataclass(frozen=True)
class Kind:
    """How one kind of transformers model becomes MHLA: defaults, its attention modules, what is put in, what is refused."""

    defaults: MHLASettings
    attentions: Callable
    install: Callable
    check: Callable


LANGUAGE_MODELS = Kind(MHLASettings(layers="2/3"), softmax_attentions, install_mhla, check_language)
VISION_TOWERS = Kind(MHLASettings(layout=[4, 4], feature_map="relu"), grid_attentions, install_grid_mhla, check_tower)


def convert(model, settings: MHLASettings | None = None, *, layers=None, **overrides):
    """Turn a pretrained softmax model, or a pipeline of one, into an MHLA model, in place, and return it.

    The base's weights stay as they are, under their names; each converted layer gains `mhla.*` in its attention
    (`attn1.processor.mhla.*` in transformers of diffusers). A converted model needs training before it is good again:
    `mhla_hf.distill`. Only Sana is the same at once: its attention is linear already, and its mixing starts uniform.

    Args:
        model: a causal language model of transformers (Llama, Mistral, Mixtral, Qwen2, Qwen3), a vision tower or classifier
            (ViT, DeiT, DINOv2 with and without registers, DINOv3, and the towers of CLIP and SigLIP), a transformer of
            diffusers (Wan, Sana, Sana Video, DiT, PixArt), or a pipeline with one (both of Wan 2.2's are converted). A tower
            inside a larger model, such as `CLIPModel.vision_model`, is saved by its own `save_pretrained`: the larger
            model's folder would load as softmax, with a warning of unexpected weights.
        settings: all choices at once. Default for language models: layers "2/3" (models without any softmax layer lose
            recall), blocks of 64, 32 of them, learnable Hedgehog-style feature map after RoPE, normalised. For vision
            towers: all layers, 4 x 4 blocks, relu, normalised. For diffusers: `mhla_defaults` of the MHLA class, such as
            `MHLAWanTransformer3DModel.mhla_defaults`.
        layers: "all", "2/3" (softmax stays in layers 0, 3, 6, ...) or a list of layer indices; wins over `settings`.
        **overrides: single fields of `MHLASettings`; they win over `settings`.

    Raises:
        TypeError, ValueError: one sentence; the model is then unchanged.
    """
    if is_of_diffusers(model):
        pipelines = importlib.import_module(".patch_pipelines", __package__)  # imports diffusers
        return pipelines.convert_diffusion(model, settings, layers, overrides)
    return convert_in_place(model, settings, layers, overrides)


def convert_in_place(model, settings: MHLASettings | None, layers, overrides: dict):
    """The work of `convert` for a model of transformers."""
    tower = getattr(getattr(model, "config", None), "model_type", None) in CONVERTIBLE_VISION_TYPES
    kind = VISION_TOWERS if tower else LANGUAGE_MODELS
    settings = chosen_settings(settings, kind.defaults, layers, overrides)
    base_type = convertible_type(model)
    if settings.rope == "after":
        raise ValueError(
            'rope: got "after", expected "before": a converted model\'s base rotates q and k before the map.'
        )
    kind.check(settings)
    config = model.config
    settings = replace(settings, layers=settings.resolve_layers(config.num_hidden_layers))
    attentions = kind.attentions(model)
    missing = [i for i in settings.layers if i not in attentions]
    if missing:
        raise ValueError(f"model: layer {missing[0]} of {type(model).__name__} has no attention that can become MHLA.")
    away = [i for i in settings.layers if hasattr(attentions[i], "_hf_hook") and attentions[i].q_proj.weight.is_meta]
    if away:
        raise ValueError(
            f"model: layer {away[0]} is offloaded, expected its weights on a device; load it without offloading."
        )
    check_what_is_lost(config, attentions, settings.layers)

    own = copy.deepcopy(config)
    own.__class__ = overlay_config_class(base_type)
    own.mhla = settings.to_dict()
    for module in model.modules():
        if getattr(module, "config", None) is config:
            module.config = own
    model.__class__ = overlay_model_class(base_type, type(model).__name__)
    own.architectures = [model.__class__.__name__]
    kind.install(model, settings)
    for index in settings.layers:
        match_device_and_dtype(attentions[index].mhla, attentions[index].q_proj.weight.device, model.dtype)
    return model


def chosen_settings(settings: MHLASettings | None, defaults: MHLASettings, layers, overrides: dict) -> MHLASettings:
    """The settings of one conversion: `defaults`, or `settings` in their place, then `overrides` and `layers`."""
    settings = defaults if settings is None else settings
    if not isinstance(settings, MHLASettings):
        raise TypeError(f"settings: got {type(settings).__name__}, expected MHLASettings.")
    known = settings.to_dict()
    unknown = sorted(set(overrides) - set(known))
    if unknown:
        raise TypeError(f"convert: got unknown setting {unknown[0]!r}, expected some of {sorted(known)}.")
    if layers is not None:
        overrides = {**overrides, "layers": layers}
    return replace(settings, **overrides)


def is_of_diffusers(model) -> bool:
    """Whether this is a pipeline or a model of diffusers, found out without importing it."""
    diffusers = sys.modules.get("diffusers")
    return diffusers is not None and isinstance(model, (diffusers.DiffusionPipeline, diffusers.ModelMixin))


def convertible_type(model) -> str:
    """The base's model type, or one sentence why this object cannot be converted."""
    config = getattr(model, "config", None)
    model_type = getattr(config, "model_type", None)
    if not isinstance(model, torch.nn.Module) or not isinstance(model_type, str):
        raise TypeError(
            f"model: got {type(model).__name__}, expected a language model or vision tower of transformers, or a pipeline."
        )
    if model_type.startswith(OVERLAY_PREFIX) or model_type == "mhla":
        raise ValueError(
            f"model: got {type(model).__name__}, which is an MHLA model already; expected a softmax model."
        )
    known = [*CONVERTIBLE_MODEL_TYPES, *CONVERTIBLE_VISION_TYPES]
    if model_type not in known:
        raise ValueError(f"model: got model type {model_type!r}, expected one of {known}.")
    expected = base_model_classes(model_type)
    if type(model) not in expected.values():
        raise ValueError(f"model: got {type(model).__name__}, expected {' or '.join(expected)}.")
    return model_type


def check_what_is_lost(config, attentions: dict, layers: list[int]) -> None:
    """Refuse what changes a base's softmax layers and MHLA layers cannot do; say once that its dropout is gone."""
    for index in layers:
        window = getattr(attentions[index], "sliding_window", getattr(config, "sliding_window", None))
        if window is not None:
            raise ValueError(
                f"sliding_window: layer {index} sees the last {window} tokens only, which MHLA layers cannot do; "
                "expected a base loaded with sliding_window=None, or layers without it."
            )
    if getattr(config, "is_causal", True) is False and config.model_type in CONVERTIBLE_MODEL_TYPES:
        raise ValueError("is_causal: the base's configuration says False, expected a causal language model.")
    for name in ("attention_dropout", "attention_probs_dropout_prob"):
        if getattr(config, name, 0.0):
            logger.warning("convert: %s=%s of the base does not apply to MHLA layers.", name, getattr(config, name))


def match_device_and_dtype(core: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Put a new core where its layer is; the mixing stays fp32."""
    core.to(device)
    for name, parameter in core.named_parameters():
        if not name.startswith("mixing."):
            parameter.data = parameter.data.to(dtype)
