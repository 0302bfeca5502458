"""Converted models: `MHLALlamaForCausalLM`, `MHLAQwen3ForCausalLM`, ..., and `MHLAViTForImageClassification`, ...

Unusual: none of these classes is written out. Each is made on first use from the base's own class, found by name in
transformers, so that a family costs one entry of `CONVERTIBLE_MODEL_TYPES` or `CONVERTIBLE_VISION_TYPES`. Weight names are
the base's plus `mhla.*` in each attention.
"""

import sys

import transformers
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from ..nn.settings import MHLASettings
from .attention import install_mhla, mixer_class
from .configuration import (
    CONVERTIBLE_MODEL_TYPES,
    CONVERTIBLE_VISION_TYPES,
    base_of_overlay_name,
    overlay_config_class,
    overlay_model_type,
)
from .grid_attention import grid_mixer_class, install_grid_mhla
from .pretrained import MHLAPreTrainedMixin


class MHLAHeadMixin(MHLAPreTrainedMixin):
    """Mixed into the base's class: builds the base, then turns the layers that `config.mhla` lists into MHLA."""

    source_entry = "models.converted"
    install = staticmethod(install_mhla)

    def __init__(self, config, *args, **kwargs):
        if getattr(config, "mhla", None) is None:
            raise ValueError(
                f"config: got {type(config).__name__} without `mhla`, expected an MHLA configuration; "
                "use mhla_hf.convert(model) on a softmax model."
            )
        super().__init__(config, *args, **kwargs)
        self.install(self, MHLASettings.from_dict(config.mhla))


class MHLATowerMixin(MHLAHeadMixin):
    """The same for a vision tower, with or without a classifier."""

    install = staticmethod(install_grid_mhla)
    auto_name = "AutoModel"
    _can_compile_fullgraph = True


class MHLATowerClassifierMixin(MHLATowerMixin):
    """The same for a classifier on a vision tower."""

    auto_name = "AutoModelForImageClassification"


_OVERLAY_MODELS = {}


def base_model_classes(base_model_type: str) -> dict[str, type]:
    """The softmax classes of a family by name: {"LlamaForCausalLM": ...} for "llama"."""
    if base_model_type in CONVERTIBLE_VISION_TYPES:
        return {name: getattr(transformers, name) for name in CONVERTIBLE_VISION_TYPES[base_model_type]}
    base = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[base_model_type]]
    return {base.__name__: base}


def overlay_model_class(base_model_type: str, base_name: str | None = None) -> type:
    """A class of a converted family, made once: `MHLALlamaForCausalLM` for "llama"; `base_name` where there are several."""
    classes = base_model_classes(base_model_type)
    base = classes[base_name] if base_name is not None else next(iter(classes.values()))
    if base not in _OVERLAY_MODELS:
        mixin = MHLAHeadMixin
        if base_model_type in CONVERTIBLE_VISION_TYPES:
            mixin = MHLATowerClassifierMixin if "ForImageClassification" in base.__name__ else MHLATowerMixin
        namespace = {
            "config_class": overlay_config_class(base_model_type),
            "__module__": __name__,
            "__doc__": f"`{base.__name__}` with MHLA in the layers that `config.mhla` lists.",
        }
        _OVERLAY_MODELS[base] = type(f"MHLA{base.__name__}", (mixin, base), namespace)
        renames = get_checkpoint_conversion_mapping(base_model_type)
        own_type = overlay_model_type(base_model_type)
        if renames is not None and get_checkpoint_conversion_mapping(own_type) is None:
            register_checkpoint_conversion_mapping(own_type, renames)
    return _OVERLAY_MODELS[base]


def overlay_attention_class(name: str) -> type | None:
    """The class of converted attention modules by its own name, such as "MHLAViTAttention"."""
    for model_type in (*CONVERTIBLE_MODEL_TYPES, *CONVERTIBLE_VISION_TYPES):
        prefix = CONFIG_MAPPING_NAMES[model_type].removesuffix("Config").removesuffix("Vision")
        if name == f"MHLA{prefix}Attention":
            base = next(iter(base_model_classes(model_type).values()))
            attention = getattr(sys.modules[base.__module__], name.removeprefix("MHLA"))
            return (grid_mixer_class if model_type in CONVERTIBLE_VISION_TYPES else mixer_class)(attention)
    return None


def __getattr__(name: str):
    if base_of_overlay_name(name, "Config") is not None:
        return overlay_config_class(base_of_overlay_name(name, "Config"))
    if base_of_overlay_name(name, "ForCausalLM") in CONVERTIBLE_MODEL_TYPES:
        return overlay_model_class(base_of_overlay_name(name, "ForCausalLM"))
    for base_model_type, names in CONVERTIBLE_VISION_TYPES.items():
        if name in [f"MHLA{base}" for base in names]:
            return overlay_model_class(base_model_type, name.removeprefix("MHLA"))
    attention = overlay_attention_class(name)
    if attention is not None:
        return attention
    raise AttributeError(
        f"module {__name__!r} has no attribute {name!r}; "
        f"converted families are {[*CONVERTIBLE_MODEL_TYPES, *CONVERTIBLE_VISION_TYPES]}."
    )
