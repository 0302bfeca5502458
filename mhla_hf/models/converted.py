"""Converted language models: `MHLALlamaForCausalLM`, `MHLAQwen3ForCausalLM`, ...

Unusual: none of these classes is written out. Each is made on first use from the base's own class, found by name in
transformers' tables, so that a family costs one entry of `CONVERTIBLE_MODEL_TYPES`. Weight names are the base's plus
`self_attn.mhla.*`.
"""

import sys

from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from ..nn.settings import MHLASettings
from .attention import install_mhla, mixer_class
from .configuration import (
    CONVERTIBLE_MODEL_TYPES,
    base_of_overlay_name,
    overlay_config_class,
    overlay_model_type,
)
from .pretrained import MHLAPreTrainedMixin


class MHLAHeadMixin(MHLAPreTrainedMixin):
    """Mixed into the base's causal LM class: builds the base, then turns the layers that `config.mhla` lists into MHLA."""

    source_entry = "models.converted"

    def __init__(self, config, *args, **kwargs):
        if getattr(config, "mhla", None) is None:
            raise ValueError(
                f"config: got {type(config).__name__} without `mhla`, expected an MHLA configuration; "
                "use mhla_hf.convert(model) on a softmax model."
            )
        super().__init__(config, *args, **kwargs)
        install_mhla(self, MHLASettings.from_dict(config.mhla))


_OVERLAY_MODELS = {}


def base_model_class(base_model_type: str) -> type:
    """The softmax causal LM class of a family: `LlamaForCausalLM` for "llama"."""
    return MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[base_model_type]]


def overlay_model_class(base_model_type: str) -> type:
    """The causal LM class of a converted family, made once: `MHLALlamaForCausalLM` for "llama"."""
    if base_model_type not in _OVERLAY_MODELS:
        config_class = overlay_config_class(base_model_type)
        base = base_model_class(base_model_type)
        namespace = {
            "config_class": config_class,
            "__module__": __name__,
            "__doc__": f"`{base.__name__}` with MHLA in the layers that `config.mhla` lists.",
        }
        _OVERLAY_MODELS[base_model_type] = type(f"MHLA{base.__name__}", (MHLAHeadMixin, base), namespace)
        renames = get_checkpoint_conversion_mapping(base_model_type)
        own_type = overlay_model_type(base_model_type)
        if renames is not None and get_checkpoint_conversion_mapping(own_type) is None:
            register_checkpoint_conversion_mapping(own_type, renames)
    return _OVERLAY_MODELS[base_model_type]


def __getattr__(name: str):
    for suffix in ("Config", "ForCausalLM", "Attention"):
        base_model_type = base_of_overlay_name(name, suffix)
        if base_model_type is None:
            continue
        if suffix == "Config":
            return overlay_config_class(base_model_type)
        if suffix == "ForCausalLM":
            return overlay_model_class(base_model_type)
        base_module = sys.modules[base_model_class(base_model_type).__module__]
        return mixer_class(getattr(base_module, name.removeprefix("MHLA")))
    raise AttributeError(
        f"module {__name__!r} has no attribute {name!r}; converted families are {list(CONVERTIBLE_MODEL_TYPES)}."
    )
