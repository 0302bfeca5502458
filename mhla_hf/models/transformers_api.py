"""Everything this package takes from transformers that is private or differs between releases.

Each entry degrades to "not there": a model type that a release lacks is absent, it does not break the import.
"""

import contextlib
import functools
import inspect
import re

import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import Cache
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

# The oldest and the newest release that the tests run on.
TESTED_TRANSFORMERS = ("5.19.0", "5.24.0")


def config_class_name(model_type: str) -> str | None:
    """The name of the configuration class of `model_type`, or None if this release of transformers lacks the type."""
    return CONFIG_MAPPING_NAMES.get(model_type)


def config_class_of(model_type: str) -> type | None:
    """The configuration class of `model_type`, or None if this release of transformers lacks the type."""
    try:
        return CONFIG_MAPPING[model_type]  # a lazy mapping, whose `get` finds only what was registered
    except KeyError:
        return None


def copy_weight_renames(base_type: str, model_type: str) -> None:
    """Let checkpoints of `model_type` load through the weight renames that transformers has for `base_type`."""
    renames = get_checkpoint_conversion_mapping(base_type)
    if renames is not None and get_checkpoint_conversion_mapping(model_type) is None:
        register_checkpoint_conversion_mapping(model_type, renames)


def with_layer_wildcard(name: str) -> str:
    """`model.layers.3.mlp` as tensor-parallel plans write it: `model.layers.*.mlp`."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def set_attention_function(config, name: str) -> None:
    """Select an attention function in `config` without the checks that transformers makes for its users."""
    config._attn_implementation_internal = name


def set_gradient_checkpointing(model: nn.Module, enabled: bool) -> None:
    """Recompute the layers of `model` in the backward pass, or no longer."""
    name = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"  # its name before 5.23
    if enabled:
        getattr(model, f"{name}_checkpointing_enable")({"use_reentrant": False})
    else:
        getattr(model, f"{name}_checkpointing_disable")()


@contextlib.contextmanager
def recomputed_layers(model: nn.Module):
    """Meanwhile decoder layers keep nothing but their inputs for the backward pass, in eval mode as in training."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    before = [vars(layer).get("forward") for layer in layers]
    for layer in layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    try:
        yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            del layer.forward
            if forward is not None:  # accelerate's
                layer.forward = forward


def cache_argument(model: nn.Module) -> str:
    """The name of the KV cache in calls and outputs of `model`: "cache" since transformers 5.24, else "past_key_values"."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def forward_cached(model: nn.Module, input_ids: torch.Tensor, cache: Cache | None = None, **kwargs) -> tuple:
    """One forward pass that continues `cache`, or starts one if it is None: the model's output and the cache after it."""
    name = cache_argument(model)
    output = model(input_ids=input_ids, **{name: cache}, use_cache=True, **kwargs)
    return output, getattr(output, name)


def find_cache(kwargs: dict) -> str | None:
    """The argument that holds a KV cache, by its type: its name differs between models and between releases."""
    return next((name for name, value in kwargs.items() if isinstance(value, Cache)), None)


def refuse_paged_cache(kwargs: dict) -> None:
    """Refuse the caches of transformers' continuous batching, which are no `Cache` and have no place for a state."""
    pages = kwargs.get("cache")
    if pages is not None and not isinstance(pages, Cache):
        raise ValueError(
            f"cache: got {type(pages).__name__}, expected a Cache of transformers: MHLA layers have no pages."
        )


def check_cache_arrived(query_length: int, key_length: int, kwargs: dict) -> None:
    """Refuse keys or caches that reach an MHLA attention function past the layer's own cache.

    Otherwise a release of transformers that hands caches on in a new way would decode without the past, in silence.
    """
    if query_length != key_length or find_cache(kwargs) is not None:
        tested = " to ".join(TESTED_TRANSFORMERS)
        raise ValueError(
            f"cache: got {key_length} keys for {query_length} queries in an MHLA layer, expected the layer's own cache: "
            f"this code was tested with transformers {tested}, got {transformers.__version__}."
        )
