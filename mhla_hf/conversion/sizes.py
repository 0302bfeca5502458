"""The size of the KV cache of a converted language model in bytes, counted without its weights."""

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from ..checkpoints.load import wrap_errors
from ..models.transformers_api import forward_cached
from ..nn.settings import MHLASettings
from ..ops.local_state import LocalState
from .teacher import mhla_layers, replaced_cores
from .transformers_models import convert_transformers_model

CACHE_LENGTHS = (2048, 8192, 32768, 131072)  # at which `compare_caches` reports


class LayerSizes(NamedTuple):
    """Sizes of the cache of one layer, for one sequence.

    Attributes:
        num_kv_heads: Number of KV heads.
        token_bytes: Bytes per token if all heads keep softmax.
        state_bytes: Bytes of the state if all heads are MHLA.
    """

    num_kv_heads: int
    token_bytes: int
    state_bytes: int


class CountingCore(nn.Module):
    """Computes the bytes of the state of a `DecayMHLA` in place of its outputs.

    Args:
        core: The `DecayMHLA`.

    Attributes:
        token_bytes: Bytes of keys and values per token, after a forward pass.
        state_bytes: Bytes of the state, after a forward pass.
    """

    def __init__(self, core: Any) -> None:
        super().__init__()
        self.core = core
        self.token_bytes = 0
        self.state_bytes = 0

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        cos_sin: torch.Tensor | None = None,
        **unused: Any,
    ) -> torch.Tensor:
        """Set `token_bytes` and `state_bytes`, and return zeros [B, T, H, V]. See `DecayMHLA.forward` for the arguments."""
        num_decays, num_features = self.core.mixing.num_decays, self.core.k_map.num_features
        self.token_bytes = (k[:, :1].numel() + v[:, :1].numel()) * v.element_size()
        cos_sin = None if cos_sin is None else cos_sin.to(v.dtype)
        self.state_bytes = LocalState.empty(
            k.to(v.dtype), v, num_decays, num_features, self.core.form, cos_sin
        ).nbytes()
        return v.new_zeros(*q.shape[:3], v.shape[3])


def sizes_of_layers(model: Any) -> dict[int, LayerSizes]:
    """Compute the sizes of the cache of each MHLA layer, by layer index.

    Args:
        model: A converted language model on the meta device. Its implementation of experts is set to "batched_mm".
    """
    ids = torch.zeros(1, 1, dtype=torch.long, device="meta")
    sizes: dict[int, LayerSizes] = {}
    model.set_experts_implementation("batched_mm")  # others read the number of tokens per expert, a value without data
    with replaced_cores(mhla_layers(model), CountingCore) as cores, torch.device("meta"), torch.no_grad():
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)  # with 4 axes, it is not searched for padding
        forward_cached(model.base_model, ids, attention_mask=mask, mhla_padding=(None, None))
    for index, attention in mhla_layers(model).items():
        counting = cores[index]
        token_bytes = counting.token_bytes
        if (latent_width := getattr(attention, "kv_lora_rank", None)) is not None:
            # Latent attention keeps one latent and one rotated key per token for all heads, not keys and values per head.
            token_bytes = (latent_width + attention.qk_rope_head_dim) * model.dtype.itemsize
        sizes[index] = LayerSizes(counting.core.num_kv_heads, token_bytes, counting.state_bytes)
    return sizes


def sizes_of_conversion(model: Any, settings: MHLASettings) -> dict[int, LayerSizes]:
    """Compute `sizes_of_layers` for a softmax language model as converted with these settings, without changing it."""
    with torch.device("meta"):
        config = copy.deepcopy(model.config)
        student = AutoModelForCausalLM.from_config(config, dtype=model.dtype).eval()
    return sizes_of_layers(convert_transformers_model(student, settings, None, {}))


class LayerCache(NamedTuple):
    """The cache of one layer for one sequence.

    Attributes:
        token_bytes: Bytes per token that is kept.
        max_tokens: Largest number of tokens that are kept; infinity if all are.
        fixed_bytes: Bytes that do not depend on the number of tokens.
    """

    token_bytes: int
    max_tokens: float
    fixed_bytes: int

    def bytes_at(self, tokens: int) -> int:
        """Return the size of the cache in bytes after `tokens` tokens."""
        return int(self.token_bytes * min(tokens, self.max_tokens)) + self.fixed_bytes


def cache_of_layers(model: Any) -> list[LayerCache]:
    """Measure the cache of each layer of a softmax model, by filling it with one token.

    Args:
        model: A softmax language model on the meta device. Its implementation of experts is set to "batched_mm".

    Raises:
        ValueError: The model cannot run on the meta device.
    """
    model.set_experts_implementation("batched_mm")  # others read the number of tokens per expert, a value without data
    ids = torch.zeros(1, 1, dtype=torch.long, device="meta")
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device="meta")  # with 4 axes, it is not searched for padding
    message = (
        f"model: got {model.config.model_type!r}, expected a model type whose cache can be counted without weights"
    )
    with wrap_errors(message), torch.device("meta"), torch.no_grad():
        _, cache = forward_cached(model.base_model, ids, attention_mask=mask)
    layers = []
    for layer in cache.layers:
        tensors = [x for x in (getattr(layer, "keys", None), getattr(layer, "values", None)) if x is not None]
        states = [*getattr(layer, "conv_states", {}).values(), *getattr(layer, "recurrent_states", {}).values()]
        window = getattr(layer, "sliding_window", None)
        max_tokens = math.inf if window is None else window - 1  # the newest token is not kept
        fixed_bytes = sum(x.nbytes for x in states if x is not None)
        layers.append(LayerCache(sum(x.nbytes for x in tensors), max_tokens, fixed_bytes))
    return layers


def cache_of_mhla(student: Any) -> dict[int, LayerCache]:
    """Compute the cache of each MHLA layer, by index: tokens of KV heads that keep softmax, and the state of the others.

    Args:
        student: A converted language model on the meta device (see `sizes_of_layers`).
    """
    caches = {}
    for index, size in sizes_of_layers(student).items():
        core: Any = mhla_layers(student)[index].mhla
        softmax_share = 0 if core.heads is None else core.heads.counts[True] / size.num_kv_heads
        caches[index] = LayerCache(
            round(softmax_share * size.token_bytes), math.inf, round((1 - softmax_share) * size.state_bytes)
        )
    return caches


def compare_caches(softmax: Sequence[LayerCache], mhla: Mapping[int, LayerCache], context: int) -> dict[str, Any]:
    """Compare the cache of a model before and after its conversion.

    Args:
        softmax: Cache of each layer before.
        mhla: Cache of each converted layer, by index.
        context: A number of tokens to report in addition to `CACHE_LENGTHS`.

    Returns:
        A dict with "rows", a list of {"tokens", "softmax", "mhla"} with the bytes before and after, and "smaller_from", the
        number of tokens from which the converted model's cache is smaller.
    """
    converted = [mhla.get(index, layer) for index, layer in enumerate(softmax)]
    rows = [
        {
            "tokens": tokens,
            "softmax": sum(layer.bytes_at(tokens) for layer in softmax),
            "mhla": sum(layer.bytes_at(tokens) for layer in converted),
        }
        for tokens in sorted({*CACHE_LENGTHS, context})
    ]
    saved_per_token = sum(softmax[index].token_bytes - layer.token_bytes for index, layer in mhla.items())
    smaller_from = sum(layer.fixed_bytes for layer in mhla.values()) // saved_per_token + 1
    return {"rows": rows, "smaller_from": smaller_from}
