"""MHLA in fast PyTorch: one `autograd.Function` for all forms, with a hand-written backward that recomputes what it needs.

Only the inputs are kept for the backward pass (and, where normalised, the output and one number per token and head). On the
CPU heads are taken one by one, as views of the caller's tensors: their summaries then stay in the cache and nothing is
copied. Elsewhere, for small heads and under torch.compile, all heads go at once. Padding (`starts`, `cu_seqlens`) is
moved out of the way before, and outputs are moved back.
"""

import torch

from .blocks import Blocks
from .reference import divide_or_zero, without_row_scale
from .torch_bidirectional import full_grads, full_sums, official_den, official_den_grads
from .torch_causal import causal_grads, causal_sums
from .torch_layout import BlockCut, Heads, MoveTokens, align_sequences, shift_to_start

HEAD_BY_HEAD_SIZE = 32768  # numbers in one head's q; measured: below, the calls cost more than the cache gives


def torch_mhla(
    q,
    k,
    v,
    mixing,
    *,
    blocks,
    key_blocks=None,
    causal=False,
    normalize=True,
    scale=None,
    q_den=None,
    k_den=None,
    key_mask=None,
    cu_seqlens=None,
    starts=None,
    unrounded=False,
):
    """o [B, T, H, V] in v's dtype (that of the sums if unrounded); arguments as in `mhla`, already checked."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if key_mask is not None:
        k, v, k_den = (None if x is None else torch.where(key_mask[:, :, None, None], x, 0) for x in (k, v, k_den))
    back = None
    if starts is not None:
        source, back = shift_to_start(starts.to(q.device), q.shape[1])
    if cu_seqlens is not None:
        source, back, mixing = align_sequences(cu_seqlens, q.shape[1], blocks.block_size, mixing)
        blocks = Blocks.sequence(source.shape[1], blocks.block_size)
    if back is not None:
        q, k, v, q_den, k_den = (
            None if x is None else MoveTokens.apply(x, source, back) for x in (q, k, v, q_den, k_den)
        )
    if causal:
        mixing = mixing[..., : blocks.num_blocks, : blocks.num_blocks]
    form = blocks, blocks if key_blocks is None else key_blocks, causal, normalize, scale, unrounded
    o = BlockedAttention.apply(q, k, v, mixing, q_den, k_den, form)
    return o if back is None else MoveTokens.apply(o, back, source)


class BlockedAttention(torch.autograd.Function):
    """num = sum of weight * v, divided by den = sum of weights where normalised; formulas in the files of the two forms."""

    @staticmethod
    def forward(ctx, q, k, v, mixing, q_den, k_den, form):
        work = HeadWork(q, k, v, form)
        o = v.new_empty(*q.shape[:3], v.shape[3], dtype=work.exact if work.unrounded else v.dtype)
        den = q.new_empty(*q.shape[:3], 1, dtype=work.exact) if work.normalize else None
        with torch.autocast(q.device.type, enabled=False):
            for heads in work.groups:
                parts = work.cut(heads, q, k, v)
                m = heads.take_mixing(mixing, work.scale)
                num, part_den = work.sums(*parts, m, work.normalize is True and q_den is None)
                if work.normalize:
                    if part_den is None:
                        part_den = work.separate_den(*work.den_parts(heads, parts, q_den, k_den), m)
                    num = divide_or_zero(num, part_den)
                    heads.give(work.rows.merge(part_den[..., None]), den)
                heads.give(work.rows.merge(num), o)
        ctx.form = form
        ctx.save_for_backward(q, k, v, mixing, q_den, k_den, *((o, den) if work.normalize else (None, None)))
        return o

    @staticmethod
    def backward(ctx, grad):
        with torch.no_grad():
            grads = BlockedAttention.gradients(ctx, grad)
        if torch.is_grad_enabled():  # create_graph=True: without this they would pass for constants
            grads = [None if x is None else DifferentiableOnce.apply(x, grad, *ctx.saved_tensors[:6]) for x in grads]
        return *grads, None

    @staticmethod
    def gradients(ctx, grad):
        """Gradients of q, k, v, mixing, q_den and k_den, None where there is no such input."""
        q, k, v, mixing, q_den, k_den, o, den = ctx.saved_tensors
        work = HeadWork(q, k, v, ctx.form)
        with torch.autocast(q.device.type, enabled=False):
            grads = [work.room_for(x, q.shape[2]) for x in (q, k, v, mixing, q_den, k_den)]
            for heads in work.groups:
                parts = work.cut(heads, q, k, v)
                m = heads.take_mixing(mixing, work.scale)
                g, r = heads.take(grad), None
                if work.normalize:
                    g = divide_or_zero(g, heads.take(den).squeeze(2))
                    r = work.rows.split(-(g * heads.take(o)).sum(2, keepdim=True)).squeeze(3)
                g = work.rows.split(g)
                shared = work.normalize is True and q_den is None
                dq, dk, dv, dm = work.grads(*parts, m, g, r if shared else None)
                if work.normalize and not shared:
                    dq_den, dk_den, dm_den = work.separate_den_grads(*work.den_parts(heads, parts, q_den, k_den), m, r)
                    dm = dm + dm_den
                    if q_den is None:
                        dq, dk = dq + dq_den, dk + dk_den
                    else:
                        heads.give(work.rows.merge(dq_den), grads[4])
                        heads.give(work.columns.merge(dk_den), grads[5])
                heads.give(work.rows.merge(dq), grads[0])
                heads.give(work.columns.merge(dk), grads[1])
                heads.give(work.columns.merge(dv), grads[2])
                heads.give_mixing(dm * work.scale, grads[3])
            if work.normalize:
                grads[3] = without_row_scale(grads[3], mixing, work.causal)
        inputs = (q, k, v, mixing, q_den, k_den)
        return [None if x is None else dx.to(x.dtype) for x, dx in zip(inputs, grads, strict=True)]


class DifferentiableOnce(torch.autograd.Function):
    """The first argument, a gradient that depends on the others; its own derivative is refused."""

    @staticmethod
    def forward(ctx, x, *sources):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("mhla is differentiable once; got a second derivative, expected impl='reference' for that.")


class HeadWork:
    """What forward and backward have in common: the form, the cut into blocks, the heads, and which formulas apply."""

    def __init__(self, q, k, v, form):
        blocks, key_blocks, self.causal, self.normalize, self.scale, self.unrounded = form
        self.exact = torch.float64 if torch.float64 in (q.dtype, k.dtype, v.dtype) else torch.float32
        self.rows = BlockCut(blocks, q.device)
        self.columns = self.rows if key_blocks == blocks else BlockCut(key_blocks, q.device)
        one_by_one = q.device.type == "cpu" and q.shape[1] * q.shape[3] >= HEAD_BY_HEAD_SIZE
        one_by_one = one_by_one and not torch.compiler.is_compiling()
        self.groups = Heads.groups(q, self.exact, one_by_one)
        self.sums = causal_sums if self.causal else full_sums
        self.grads = causal_grads if self.causal else full_grads

    def cut(self, heads, q, k, v):
        """q, k, v of some heads, by block."""
        return self.rows.split(heads.take(q)), self.columns.split(heads.take(k)), self.columns.split(heads.take(v))

    def den_parts(self, heads, parts, q_den, k_den):
        """The two features of the denominator of some heads, by block."""
        if q_den is None:
            return parts[:2]
        return self.rows.split(heads.take(q_den)), self.columns.split(heads.take(k_den))

    def separate_den(self, q_den, k_den, m):
        """A denominator that needs a pass of its own: the official one, or that of other features (the sum with v = 1)."""
        if self.normalize == "official":
            return official_den(q_den, k_den, m)
        return self.sums(q_den, k_den, torch.ones_like(k_den[..., :1]), m, False)[0].squeeze(3)

    def separate_den_grads(self, q_den, k_den, m, r):
        """Gradients of q_den, k_den and m for r, that of `separate_den`."""
        if self.normalize == "official":
            return official_den_grads(q_den, k_den, m, r)
        dq, dk, _, dm = self.grads(q_den, k_den, torch.ones_like(k_den[..., :1]), m, r[..., None], None)
        return dq, dk, dm

    def room_for(self, x, heads):
        """Where the gradient of an input goes; zeros where contributions of several heads are added up."""
        if x is None:
            return None
        added = x.dim() < 4 or x.shape[2] < heads
        return torch.zeros_like(x, dtype=self.exact) if added else torch.empty_like(x)
