"""Tiny text encoders with random weights, of every model type that converts."""

import inspect

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import mhla_hf
from mhla_hf.models.derived_classes import base_classes, model_name
from mhla_hf.models.families import ENCODERS, family_of_type
from tools.small_models import shaken

PAD = 1
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 64, "initializer_range": 0.2, "pad_token_id": PAD, "num_key_value_heads": 2, "dim": 32,
    "hidden_dim": 48, "n_layers": 3, "n_heads": 4, "embedding_size": 32, "default_language": "en_XX", "num_labels": 2,
    **{f"{name}_token_id": 2 for name in ("bos", "eos", "cls", "sep", "mask")},
}  # fmt: skip
ENCODER_TYPES = [family.base for family in ENCODERS if base_classes(family)]  # of this release
SLIDING = [name for name in ("modernbert", "ultrabert") if name in ENCODER_TYPES]  # a sliding window in layer 1
SLIDING_SIZES = {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": 4}


def softmax_encoder(model_type: str, head: str = "Model", **overrides):
    """Return a softmax encoder in eval mode, without or with a head."""
    config_class = CONFIG_MAPPING[model_type]
    known = {*inspect.signature(config_class.__init__).parameters, *(config_class.attribute_map or {}), "num_labels"}
    family = family_of_type(model_type)
    sizes = {**SIZES, **(SLIDING_SIZES if model_type in SLIDING else {}), **overrides}
    torch.manual_seed(0)
    config = config_class(**{name: size for name, size in sizes.items() if name in known})
    return base_classes(family)[model_name(family) + head](config).eval()


def converted_encoder(model_type: str, head: str = "Model", layers="all", *, block_size=8, **settings):
    """Return a converted encoder whose new parameters are not at their initial values."""
    model = softmax_encoder(model_type, head)
    return shaken(mhla_hf.convert(model, layers=layers, block_size=block_size, **settings))
