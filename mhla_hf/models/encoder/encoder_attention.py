"""Replaces softmax attention with an MHLA core in the attention modules of transformers' text encoders.

As in language models, the base keeps its projections and RoPE, and converted modules select our attention function. The
model without its head passes the padding on to them (`pass_rows`).
"""

from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import AttentionInterface

from ...nn.core import softmax_attention, without_padding
from ...ops.namespace import NAMESPACE
from ..derived_classes import AttentionSwap, attention_sizes, is_attention

ENCODER_ATTENTION_NAME = f"mhla_encoder_{NAMESPACE}"


def mhla_encoder_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Compute the attention of an MHLA layer, [B, H, T, K] -> [B, T, H, V], as an attention function of transformers.

    The mask is ignored: `mhla_rows` (see `pass_rows`) has the padding without a T x T mask.
    """
    if kwargs.get("cu_seq_lens_q") is not None:
        expected = "None; an encoder with MHLA layers takes padded rows and an attention_mask"
        raise ValueError(f"cu_seq_lens_q: got packed sequences, expected {expected}.")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    starts, key_mask = kwargs.get("mhla_rows") or (None, None)
    scale, hidden_states = kwargs.get("scaling"), kwargs["mhla_hidden_states"]
    if encoder_softmax_is_exact(module.mhla, q.shape[1]):
        q, k, v = without_padding(key_mask, q.to(v.dtype), k.to(v.dtype), v)
        o = softmax_attention(q, k, v, scale, mask=None if key_mask is None else key_mask[:, None, None])
        o = module.mhla.finish_output(o, hidden_states, v.dtype)
    else:
        o = module.mhla(q, k, v, scale=scale, starts=starts, key_mask=key_mask, hidden_states=hidden_states)
    # Some bases call `view` on the output.
    return o.contiguous(), None


def encoder_softmax_is_exact(core: Any, num_tokens: int) -> bool:
    """Return whether softmax alone is the attention of T tokens: no token is far from another.

    It counts as not exact while the core learns: other processes may have gradients, so this one has to have some, of zero.
    """
    options = getattr(core, "options", None)  # only `TwoWayMHLA` has a window
    if options is None or torch.compiler.is_compiling():
        return False
    learns = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in core.parameters())
    return num_tokens <= options.window * options.block_size and not learns


AttentionInterface.register(ENCODER_ATTENTION_NAME, mhla_encoder_attention)


class MHLAEncoderMixer:
    """Passes the layer's input to `mhla_encoder_attention`; a mixin for attention classes with a child `mhla`."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(  # type: ignore[misc]
            hidden_states, *args, mhla_hidden_states=hidden_states, **kwargs
        )


def find_encoder_attentions(model: nn.Module) -> dict[int, Any]:
    """Return the attention modules of an encoder by layer index."""
    return dict(enumerate(filter(is_attention, model.modules())))


def pass_rows(
    body: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], names: tuple[str, ...]
) -> tuple[tuple[()], dict[str, Any]]:
    """Add `mhla_rows` to an encoder's arguments: each row's first real token, int64 [B], and which are real, bool [B, T].

    The first of the two is None if all rows begin with a real token. If rows are padded on the left and the caller passes no
    positions, they are counted from the first real token, so that padding does not change outputs.
    """
    kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
    mask = kwargs.get("attention_mask")
    if mask is None:
        return (), kwargs
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
        got = f"{mask.ndim} axes" if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ValueError(f"attention_mask: got {got}, expected [batch, length] for an encoder with MHLA layers.")
    is_real, length = mask.bool(), mask.shape[1]
    # A compiled graph cannot read the mask's values, and treats all rows as padded on the left.
    can_read = not torch.compiler.is_compiling()
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


# The cores depend on the source of the model: see `models/converted.py`.
ENCODER_SWAP = AttentionSwap(
    function_name=ENCODER_ATTENTION_NAME,
    mixin=MHLAEncoderMixer,
    find_attentions=find_encoder_attentions,
    core_sizes=attention_sizes,
    prepare=pass_rows,
)
