"""The size of the KV cache of a language model, softmax or converted, in bytes for one sequence, without its weights."""

import copy
import math
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from ..checkpoints.load import wrap_errors
from ..models.transformers_api import forward_cached
from ..nn.settings import MHLASettings
from .steps import Requested
from .teacher import mhla_layers, replaced_cores
from .transformers_models import convert_transformers_model


class LayerSizes(NamedTuple):
    """Sizes of a layer's cache: `token_bytes` per token with softmax in all KV heads, `state_bytes` with MHLA in all."""

    num_kv_heads: int
    token_bytes: int
    state_bytes: int

    def cache_bytes(self, share: float, tokens: int) -> int:
        """Compute the bytes after a number of tokens if a share of the KV heads keeps softmax."""
        return round(share * self.token_bytes * tokens + (1 - share) * self.state_bytes)


class CountingCore(nn.Module):
    """Stands in for the core of an MHLA layer: its forward pass returns zeros, and sets `sizes`."""

    def __init__(self, core: Any) -> None:
        super().__init__()
        self.core = core
        self.sizes = LayerSizes(core.num_kv_heads, 0, 0)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **unused: Any) -> torch.Tensor:
        token_bytes = (k[:, :1].numel() + v[:, :1].numel()) * v.element_size()
        state = self.core.new_state(k.to(v.dtype), v)
        self.sizes = LayerSizes(self.core.num_kv_heads, token_bytes, state.nbytes())
        return v.new_zeros(*q.shape[:3], v.shape[3])


def run_one_token(model: Any, **arguments: Any) -> Any:
    """Run the body of a model on the meta device over one token, and return its cache. Changes how it runs experts."""
    model.set_experts_implementation("batched_mm")  # other implementations read values, which are missing here
    ids = torch.zeros(1, 1, dtype=torch.long, device="meta")
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device="meta")  # with 4 axes, it is not searched for padding
    with torch.device("meta"), torch.no_grad():
        return forward_cached(model.base_model, ids, attention_mask=mask, **arguments)[1]


def sizes_of_layers(model: Any) -> dict[int, LayerSizes]:
    """Compute {layer index: `LayerSizes`} of the MHLA layers of a converted language model, which is on the meta device."""
    sizes: dict[int, LayerSizes] = {}
    with replaced_cores(mhla_layers(model), CountingCore) as cores:
        run_one_token(model, mhla_padding=(None, None))
    for index, attention in mhla_layers(model).items():
        sizes[index] = cores[index].sizes
        if (latent_width := getattr(attention, "kv_lora_rank", None)) is not None:
            # Latent attention keeps one latent and one rotated key per token for all heads, not keys and values per head.
            token_bytes = (latent_width + attention.qk_rope_head_dim) * model.dtype.itemsize
            sizes[index] = sizes[index]._replace(token_bytes=token_bytes)
    return sizes


def sizes_of_conversion(model: Any, settings: MHLASettings) -> dict[int, LayerSizes]:
    """Compute `sizes_of_layers` for a softmax language model as converted with these settings, without changing it."""
    with torch.device("meta"):
        student = AutoModelForCausalLM.from_config(copy.deepcopy(model.config), dtype=model.dtype).eval()
    return sizes_of_layers(convert_transformers_model(student, Requested(settings)))


def softmax_bytes(model: Any, tokens: int) -> list[int]:
    """Compute the bytes of each layer's cache after `tokens` tokens, for a softmax model on the meta device."""
    message = f"model: got {model.config.model_type!r}, expected one whose cache can be counted without weights"
    with wrap_errors(message):
        layers = run_one_token(model).layers
    sizes = []
    for layer in layers:
        tensors = [x for x in (getattr(layer, "keys", None), getattr(layer, "values", None)) if x is not None]
        states = [*getattr(layer, "conv_states", {}).values(), *getattr(layer, "recurrent_states", {}).values()]
        window = getattr(layer, "sliding_window", None)
        kept = min(tokens, math.inf if window is None else window - 1)  # the newest token is not kept
        sizes.append(sum(x.nbytes for x in tensors) * int(kept) + sum(x.nbytes for x in states if x is not None))
    return sizes


def mhla_bytes(student: Any, tokens: int, share: float | None = None) -> dict[int, int]:
    """Compute the bytes of each MHLA layer's cache after `tokens` tokens, for a converted model on the meta device.

    `share` is the share of a layer's KV heads that keeps softmax (default: each layer's own).
    """
    sizes = {}
    for index, layer in sizes_of_layers(student).items():
        heads: Any = mhla_layers(student)[index].mhla.heads
        kept = share if share is not None else 0 if heads is None else heads.counts[True] / layer.num_kv_heads
        sizes[index] = layer.cache_bytes(kept, tokens)
    return sizes
