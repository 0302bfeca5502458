"""MHLA in fast PyTorch: one `autograd.Function` for all forms, with a hand-written backward that recomputes what it needs.

Only the inputs are kept for the backward pass (and, where normalized, the output and one number per token and head). On the
CPU heads are taken one by one, as views of the caller's tensors: their summaries then stay in the cache and nothing is
copied. Elsewhere, for small heads and under torch.compile, all heads go at once. Padding (`starts`, `cu_seqlens`) is
moved out of the way before, and outputs are moved back.
"""

import torch

from .blocks import Blocks
from .reference import divide_or_zero, official_denominator, without_row_scale
from .torch_backward import blocked_backward
from .torch_forward import blocked_forward
from .torch_layout import MoveTokens, align_sequences, mixing_of_sequences, shift_to_start


def torch_mhla(
    q, k, v, mixing, *, blocks, key_blocks=None, causal=False, normalize=True, scale=None, q_den=None, k_den=None,
    key_mask=None, cu_seqlens=None, starts=None, unrounded=False,
):  # fmt: skip
    """o [B, T, H, V] in v's dtype (that of the sums if unrounded); arguments as in `mhla`, already checked."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if key_mask is not None:
        k, v, k_den = (None if x is None else torch.where(key_mask[:, :, None, None], x, 0) for x in (k, v, k_den))
    back = None
    if starts is not None:
        source, back = shift_to_start(starts.to(q.device), q.shape[1])
    if cu_seqlens is not None:
        source, back, *places = align_sequences(cu_seqlens, q.shape[1], blocks.block_size)
        mixing, blocks = mixing_of_sequences(mixing, *places), Blocks.sequence(source.shape[1], blocks.block_size)
    if back is not None:
        q, k, v, q_den, k_den = (
            None if x is None else MoveTokens.apply(x, source, back) for x in (q, k, v, q_den, k_den)
        )
    if causal:
        mixing = mixing[..., : blocks.num_blocks, : blocks.num_blocks]
    key_blocks = blocks if key_blocks is None else key_blocks
    if normalize is False or (normalize is True and q_den is None):
        o = BlockedAttention.apply(q, k, v, mixing, (blocks, key_blocks, causal, normalize, scale, unrounded))
    else:  # a denominator of other features, or the official one, takes a pass of its own
        mixing, form = RowScaleFree.apply(mixing, causal), (blocks, key_blocks, causal, False, scale, True)
        num = BlockedAttention.apply(q, k, v, mixing, form)
        q, k = (q, k) if q_den is None else (q_den, k_den)
        if normalize == "official":
            with torch.autocast(q.device.type, enabled=False):
                den = official_denominator(q, k, mixing.to(num.dtype), blocks, scale)
        else:
            den = BlockedAttention.apply(q, k, num.new_ones(*k.shape[:3], 1), mixing, form).squeeze(3)
        o = divide_or_zero(num, den)
        o = o if unrounded else o.to(v.dtype)
    return o if back is None else MoveTokens.apply(o, back, source)


class RowScaleFree(torch.autograd.Function):
    """The mixing itself; of its gradient, the part that a denominator cancels is left out (`without_row_scale`)."""

    @staticmethod
    def forward(ctx, mixing, causal):
        ctx.save_for_backward(mixing)
        ctx.causal = causal
        return mixing.view_as(mixing)

    @staticmethod
    def backward(ctx, grad):
        (mixing,) = ctx.saved_tensors
        exact = grad.to(torch.promote_types(grad.dtype, torch.float32))
        return without_row_scale(exact, mixing, ctx.causal).to(grad.dtype), None


class BlockedAttention(torch.autograd.Function):
    """`blocked_forward`, differentiable once by `blocked_backward`."""

    @staticmethod
    def forward(ctx, q, k, v, mixing, form):
        o, den = blocked_forward(q, k, v, mixing, form)
        ctx.form = form
        ctx.save_for_backward(q, k, v, mixing, None if den is None else o, den)
        return o

    @staticmethod
    def backward(ctx, grad):
        with torch.no_grad():
            grads = blocked_backward(grad, *ctx.saved_tensors, ctx.form)
        if torch.is_grad_enabled():  # create_graph=True: without this they would pass for constants
            grads = [DifferentiableOnce.apply(x, grad, *ctx.saved_tensors[:4]) for x in grads]
        return *grads, None


class DifferentiableOnce(torch.autograd.Function):
    """The first argument, a gradient that depends on the others; its own derivative is refused."""

    @staticmethod
    def forward(ctx, x, *sources):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("mhla is differentiable once; got a second derivative, expected impl='reference' for that.")
