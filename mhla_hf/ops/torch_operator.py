"""MHLA in fast PyTorch: one autograd function for all options, with a hand-written backward pass that recomputes.

Only the inputs are saved for the backward pass, and in the normalized form the output and one number per token and head.
On the CPU, large heads are computed one by one as views of the caller's tensors: their summaries then stay in the cache, and
nothing is copied. Tokens of padded or packed batches are first moved to block edges, and the outputs are moved back.
"""

from typing import Any

import torch
from torch import Tensor

from .blocks import Blocks
from .inputs import MHLAInputs, MHLAOptions
from .reference import divide_or_zero, official_denominator, without_row_scale
from .torch_backward import blocked_backward
from .torch_forward import blocked_forward
from .torch_layout import DifferentiableOnce, MoveTokens, align_sequences, mixing_of_sequences, shift_to_start


def torch_mhla(inputs: MHLAInputs) -> Tensor:
    """Compute `mhla` in PyTorch: [B, T, H, V] in v's dtype or, if `unrounded`, in the dtype of the sums."""
    q, k, v, mixing, options, q_den, k_den, _, cu_seqlens, starts = inputs.without_masked_keys()
    blocks, normalize = options.blocks, options.normalize
    inverse = None
    if starts is not None:
        source, inverse = shift_to_start(starts.to(q.device), q.shape[1])
    if cu_seqlens is not None:
        assert blocks.block_size is not None  # causal blocks are those of a sequence
        source, inverse, block_index, sequence_id = align_sequences(cu_seqlens, q.shape[1], blocks.block_size)
        mixing = mixing_of_sequences(mixing, block_index, sequence_id)
        blocks = Blocks.sequence(source.shape[1], blocks.block_size)
        options = options._replace(blocks=blocks, key_blocks=blocks)
    if inverse is not None:
        q, k, v = (MoveTokens.apply(x, source, inverse) for x in (q, k, v))
        if q_den is not None:
            q_den, k_den = (MoveTokens.apply(x, source, inverse) for x in (q_den, k_den))
    if normalize is False or (normalize is True and q_den is None):
        o = BlockedAttention.apply(q, k, v, mixing, options)
    else:  # a denominator of other features, and the official one, take a pass of their own
        sum_dtype = torch.float64 if torch.float64 in (q.dtype, k.dtype, v.dtype) else torch.float32
        mixing = RowScaleFree.apply(mixing.to(sum_dtype), options.causal)
        options = options._replace(normalize=False, unrounded=True)
        num = BlockedAttention.apply(q, k, v, mixing, options)
        if q_den is not None and k_den is not None:
            q, k = q_den, k_den
        if normalize == "official":
            with torch.autocast(q.device.type, enabled=False):
                den = official_denominator(q, k, mixing, blocks, options.scale)
        else:
            den = BlockedAttention.apply(q, k, num.new_ones(*k.shape[:3], 1), mixing, options).squeeze(3)
        o = divide_or_zero(num, den)
        o = o if inputs.options.unrounded else o.to(v.dtype)
    return o if inverse is None else MoveTokens.apply(o, inverse, source)


class RowScaleFree(torch.autograd.Function):
    """Returns the mixing matrix unchanged, and its gradient by `without_row_scale`.

    Numerator and denominator must read the same copy in the dtype of the sums, because their gradients may nearly cancel.
    """

    @staticmethod
    def forward(ctx: Any, mixing: Tensor, causal: bool) -> Tensor:
        ctx.save_for_backward(mixing)
        ctx.causal = causal
        return mixing.view_as(mixing)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (mixing,) = ctx.saved_tensors
        return without_row_scale(grad, mixing, ctx.causal), None


class BlockedAttention(torch.autograd.Function):
    """Computes `blocked_forward`, with gradients from `blocked_backward` that cannot be differentiated again."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, options: MHLAOptions) -> Tensor:
        o, den = blocked_forward(q, k, v, mixing, options)
        ctx.options = options
        ctx.save_for_backward(q, k, v, mixing, None if den is None else o, den)
        return o

    @staticmethod
    def backward(ctx: Any, o_grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mixing, o, den = ctx.saved_tensors
        with torch.no_grad():
            grads = blocked_backward(o_grad, q, k, v, mixing, o, den, ctx.options)
        if torch.is_grad_enabled():  # create_graph=True: without this, the gradients would pass for constants
            grads = [DifferentiableOnce.apply(x, o_grad, q, k, v, mixing) for x in grads]
        return *grads, None
