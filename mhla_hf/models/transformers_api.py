"""Wraps private APIs of transformers, and handles differences between its releases, some of which lack model types."""

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import Cache
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from .families import FAMILIES, Family

# The oldest and the newest release that the tests run on.
TESTED_TRANSFORMERS = ("5.19.0", "5.24.0")


def config_class_name(model_type: str) -> str | None:
    return CONFIG_MAPPING_NAMES.get(model_type)


def config_class_of(model_type: str) -> type | None:
    try:
        return CONFIG_MAPPING[model_type]  # `get` of this lazy mapping finds only what users registered
    except KeyError:
        return None


def class_names(family: Family) -> list[str]:
    """Return the names of a family's softmax model classes in this release of transformers."""
    mappings = [getattr(transformers, name)._model_mapping._model_mapping for name in family.kind.auto_classes]
    return [mapping[family.base] for mapping in mappings if family.base in mapping] + list(family.classes)


def family_of_class(name: str) -> Family | None:
    """Return the family of a model class, named with or without "MHLA" at its start."""
    return next((family for family in FAMILIES if name.removeprefix("MHLA") in class_names(family)), None)


def copy_weight_renames(base_type: str, model_type: str) -> None:
    renames = get_checkpoint_conversion_mapping(base_type)
    if renames is not None and get_checkpoint_conversion_mapping(model_type) is None:
        register_checkpoint_conversion_mapping(model_type, renames)


def set_attention_function(config: Any, name: str) -> None:
    """Select an attention function in a configuration, in place, without the checks of transformers."""
    config._attn_implementation_internal = name


def set_gradient_checkpointing(model: nn.Module, enabled: bool) -> None:
    name = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"  # before 5.23
    if enabled:
        getattr(model, f"{name}_checkpointing_enable")({"use_reentrant": False})
    else:
        getattr(model, f"{name}_checkpointing_disable")()


@contextlib.contextmanager
def recomputed_layers(model: nn.Module) -> Iterator[None]:
    """Within this context, recompute layers in the backward pass even in eval mode, where transformers does not."""
    layers: list[Any] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    previous_forwards = [vars(layer).get("forward") for layer in layers]
    for layer in layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    try:
        yield
    finally:
        for layer, forward in zip(layers, previous_forwards, strict=True):
            del layer.forward
            if forward is not None:  # accelerate sets one on the instance
                layer.forward = forward


def cache_argument(model: nn.Module) -> str:
    """Return the name of the KV cache in calls and outputs: "cache" since transformers 5.24, or "past_key_values"."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def forward_cached(model: nn.Module, input_ids: Tensor, cache: Cache | None = None, **kwargs: Any) -> tuple[Any, Any]:
    """Run one forward pass with a KV cache, None to start one; return the output and the cache after it."""
    name = cache_argument(model)
    output = model(input_ids=input_ids, **{name: cache}, use_cache=True, **kwargs)
    return output, getattr(output, name)


def find_cache(kwargs: dict[str, Any]) -> str | None:
    """Return the name of the argument that is a KV cache, which differs among releases; None if there is none."""
    return next((name for name, value in kwargs.items() if isinstance(value, Cache)), None)


def check_cache_arrived(query_length: int, key_length: int, kwargs: dict[str, Any]) -> None:
    """Raise ValueError if the base passes past keys or a KV cache, which MHLA would ignore; untested releases may do so."""
    if query_length != key_length or find_cache(kwargs) is not None:
        got = f"{key_length} keys for {query_length} queries, or a cache, from transformers {transformers.__version__}"
        tested = " to ".join(TESTED_TRANSFORMERS)
        raise ValueError(f"cache: got {got}, expected as many keys as queries and no cache; install one of {tested}.")
