"""Replaces softmax attention with an MHLA core in transformers' text encoders, as `causal_attention.py` does in decoders."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

from ...nn.core import softmax_attention, without_padding
from ...ops.namespace import NAMESPACE
from ..derived_classes import AttentionSwap, attention_sizes, is_attention

ENCODER_ATTENTION_NAME = f"mhla_encoder_{NAMESPACE}"


def mhla_encoder_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Compute the attention of an MHLA layer, [B, H, T, K] -> [B, T, H, V], as an attention function of transformers."""
    if kwargs.get("cu_seq_lens_q") is not None:
        raise ValueError("cu_seq_lens_q: got packed sequences, expected padded rows and an attention_mask.")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    starts, key_mask = kwargs.get("mhla_rows") or (None, None)  # in place of the T x T mask
    scale, hidden_states = kwargs.get("scaling"), kwargs["mhla_hidden_states"]
    if encoder_softmax_is_exact(module.mhla, q.shape[1]):
        q, k, v = without_padding(key_mask, q.to(v.dtype), k.to(v.dtype), v)
        o = softmax_attention(q, k, v, scale, mask=None if key_mask is None else key_mask[:, None, None])
        o = module.mhla.finish_output(o, hidden_states, v.dtype)
    else:
        o = module.mhla(q, k, v, scale=scale, starts=starts, key_mask=key_mask, hidden_states=hidden_states)
    return o.contiguous(), None  # some bases call `view` on it


def encoder_softmax_is_exact(core: Any, num_tokens: int) -> bool:
    """Return whether plain softmax gives a core's output: every token is in the window, and no parameter of the core learns.

    While parameters learn, the core must run: in distributed training, every process needs gradients, even if all are zero.
    """
    options = getattr(core, "options", None)  # only `TwoWayMHLA` has a window
    if options is None or torch.compiler.is_compiling():
        return False
    learns = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in core.parameters())
    return num_tokens <= options.window * options.block_size and not learns


AttentionInterface.register(ENCODER_ATTENTION_NAME, mhla_encoder_attention)


class MHLAEncoderMixer:
    """Passes the layer's input to `mhla_encoder_attention`; a mixin for attention classes with a child `mhla`."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(  # type: ignore[misc]
            hidden_states, *args, mhla_hidden_states=hidden_states, **kwargs
        )


def find_encoder_attentions(model: nn.Module) -> dict[int, Any]:
    return dict(enumerate(filter(is_attention, model.modules())))


def pass_rows(
    body: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], names: tuple[str, ...]
) -> tuple[tuple[()], dict[str, Any]]:
    """Add `mhla_rows` if there is padding: the index of each row's first real token [B], and a mask of real ones [B, T].

    Instead of the indices, it has None if all rows begin with a real token; else positions, unless given, count from them.
    """
    kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
    mask = kwargs.get("attention_mask")
    if mask is None:
        return (), kwargs
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        got = f"{mask.ndim} axes" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"attention_mask: got {got}, expected [batch, length] for an encoder with MHLA layers.")
    is_real, length = mask.bool(), mask.shape[1]
    can_read = not torch.compiler.is_compiling()  # a compiled graph treats all rows as padded on the left
    if can_read and bool(is_real.all()):
        return (), kwargs
    if can_read and bool(is_real[:, 0].all()):
        return (), {**kwargs, "mhla_rows": (None, is_real)}
    starts = torch.where(is_real.any(1), is_real.int().argmax(1), length)
    if kwargs.get("position_ids") is None:
        positions = torch.arange(length, device=mask.device) - starts[:, None]
        kwargs["position_ids"] = positions.clamp_min(0) + first_position(body)
    return (), {**kwargs, "mhla_rows": (starts, is_real)}


def first_position(body: nn.Module) -> int:
    """Return the position id of the first token: 0, or `padding_idx + 1` in RoBERTa and models derived from it."""
    embeddings: Any = getattr(body, "embeddings", None)
    return embeddings.padding_idx + 1 if hasattr(embeddings, "create_position_ids_from_input_ids") else 0


# `models/converted.py` adds the cores.
ENCODER_SWAP = AttentionSwap(
    function_name=ENCODER_ATTENTION_NAME,
    mixin=MHLAEncoderMixer,
    find_attentions=find_encoder_attentions,
    core_sizes=attention_sizes,
    prepare=pass_rows,
)
