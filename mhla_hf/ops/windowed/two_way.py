"""Attention of encoders with a near and a far part under one normalizer: softmax over a window, MHLA over all other tokens.

The near keys of a token t in block i are those of blocks i - window + 1 to i + window - 1. All other tokens s, each in a
block j, are far. With scores z_ts = scale * <q_t, k_s>, features fq and fk of queries and keys, and a learned decay and
balance per head:

    o_t = (sum_near e^z_ts v_s + e^balance sum_far decay^|i - j| <fq_t, fk_s> v_s) / (the same with 1 for v_s)

The near part is a fused softmax, whose logsumexp merges it with the far part (`NearAndFar`).
"""

import itertools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..torch_layout import DifferentiableOnce, align_blocks, by_block, by_token, resize_tokens, with_ones
from .fused_softmax import make_mask, no_key, softmax_backward, softmax_forward
from .options import WindowedOptions

PIECE_TOKENS = 2048  # tokens whose windows are gathered at a time, which bounds the memory


class FarPart(NamedTuple):
    """What the far part of a token's output is computed from."""

    q: Tensor  # [B, T, H, F], features of the queries
    k: Tensor  # [B, T, G, F], features of the keys
    log_decay: Tensor  # [G], log of the factor per block of distance, at most 0
    balance: Tensor  # [H], log of the factor on the far weights (e^balance in the formula above)


def distance_mixing(log_decay: Tensor, num_blocks: int, window: int = 1) -> Tensor:
    """Return the mixing matrix decay^|i - j| of each head in `log_decay` [G], with 0 within the window: [G, M, M]."""
    block = torch.arange(num_blocks, device=log_decay.device)
    distance = (block[:, None] - block).abs()
    return torch.exp(log_decay[:, None, None] * distance).masked_fill(distance < window, 0)


def two_way_attention(
    q: Tensor, k: Tensor, v: Tensor, far: FarPart, options: WindowedOptions, *, key_mask: Tensor | None = None,
    starts: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attend to near tokens by softmax and to far tokens by MHLA, before and after each token.

    Args:
        q, k, v: [B, T, H, D], [B, T, G, D], and [B, T, G, V].
        far: The features of q and k, and the decay and balance that weigh the far tokens.
        options: The options, with `sinks` and `salient` of 0.
        key_mask: bool [B, T], False for tokens that are no keys.
        starts: int64 [B], the first real token of each row, at which its blocks begin; None if rows begin with one.

    Returns:
        [B, T, H, V] in the dtype of the sums: fp32, or fp64 for fp64 inputs.
    """
    size, aligned = options.block_size, align_blocks(q, options.block_size, key_mask, starts, None)
    q, k, v, q_features, k_features = aligned.tokens.move(q, k, v, far.q, far.k)
    num_tokens, num_kv_heads, num_blocks = q.shape[1], k.shape[2], len(aligned.block)
    valid = q.new_ones(q.shape[:2], dtype=torch.bool) if aligned.valid is None else aligned.valid
    valid = resize_tokens(valid, num_blocks * size) & (torch.arange(num_blocks * size, device=q.device) < num_tokens)
    q, k, v, q_features, k_features = (resize_tokens(x, num_blocks * size) for x in (q, k, v, q_features, k_features))
    k, v, k_features = (torch.where(valid[..., None, None], x, 0) for x in (k, v, k_features))

    summaries = block_summaries(k_features, v, size)
    mixing = distance_mixing(far.log_decay.to(summaries.dtype), num_blocks, options.window)
    sums = (mixing @ summaries.flatten(3)).unflatten(3, summaries.shape[3:])  # [B, G, M, F, V + 1]
    balance = far.balance.to(sums.dtype).view(num_kv_heads, -1, 1).expand(-1, -1, size).flatten(1)
    if torch.compiler.is_compiling():  # one piece, so that one graph serves all lengths
        borders = [0, num_blocks]
    else:
        borders = [*range(0, num_blocks, max(PIECE_TOKENS // size, 1)), num_blocks]
    outputs = []
    for begin, end in itertools.pairwise(borders):
        piece = slice(begin * size, end * size)
        queries, features = (by_block(x[:, piece], num_kv_heads, size) for x in (q, q_features))
        far_sums = features.to(sums.dtype) @ sums[:, :, begin:end].transpose(1, 2).flatten(0, 1)
        is_key = take_window(valid[..., None, None], options, begin, end)[:, 0, :, 0]
        mask = make_mask(is_key.unfold(1, (2 * options.window - 1) * size, size).flatten(0, 1), q.dtype)[:, None, None]
        keys, values = (take_window(x, options, begin, end) for x in (k, v))
        o = NearAndFar.apply(queries, keys, values, far_sums, balance, mask, size, options.scale)
        outputs.append(by_token(o, len(q), size))
    return aligned.tokens.take_back(resize_tokens(torch.cat(outputs, 1), num_tokens))


class NearAndFar(torch.autograd.Function):
    """Merges softmax over near keys with the far part, far = (numerator, denominator), under one normalizer.

    With o_near and lse of the near part:

        total = log(e^lse + e^balance den),   o = e^(lse - total) o_near + e^(balance - total) num

    The gradients of q, k, and v are those of the fused kernel, given o and total (`fused_softmax.py`).
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, far: Tensor, balance: Tensor, mask: Tensor, size: int, scale: float
    ) -> Tensor:
        """Compute o [B * m, G, N, V] in far's dtype, for the N = (H / G) * C queries of each of m blocks.

        q is [B * m, G, N, D], far [B * m, G, N, V + 1], balance [G, N]; k and v are from `take_window`, and the mask is
        [B * m, 1, 1, W * C] for the W blocks of a window.
        """
        near, lse = softmax_forward(q, gather_windows(k, size, mask), gather_windows(v, size, mask), mask, scale)
        total = torch.logaddexp(lse.to(far.dtype), far_denominator(far).log() + balance)
        o = torch.exp(lse - total).masked_fill(no_key(lse, mask.dtype), 0)[..., None] * near
        o = o + far_factor(far, balance, total) * far[..., :-1]
        ctx.save_for_backward(q, k, v, far, balance, mask, o, total)
        ctx.size, ctx.scale = size, scale
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, far, balance, mask, o, total = ctx.saved_tensors
        with torch.no_grad():
            do_seen = do.masked_fill(no_key(total, mask.dtype)[..., None], 0)
            factor = far_factor(far, balance, total)
            d_far = torch.cat([factor * do_seen, -factor * (do_seen * o).sum(-1, keepdim=True)], -1)
            grads: list[Tensor | None] = [None, None, None, d_far, (far * d_far).sum((0, -1))]
            if any(ctx.needs_input_grad[:3]):
                keys, values = (gather_windows(x, ctx.size, mask) for x in (k, v))
                dq, dk, dv = softmax_backward(
                    do_seen.to(q.dtype), q, keys, values, o.to(q.dtype), total, mask, ctx.scale
                )
                grads[:3] = [dq, scatter_windows(dk, k, ctx.size), scatter_windows(dv, v, ctx.size)]
        if torch.is_grad_enabled():  # create_graph=True: without this, the gradients would pass for constants
            grads = [None if x is None else DifferentiableOnce.apply(x, do, q, k, v, far, balance) for x in grads]
        return *grads, None, None, None


def far_factor(far: Tensor, balance: Tensor, total: Tensor) -> Tensor:
    """Return the multiplier of the far part in an output, e^(balance - total) [..., N, 1], or 0 where nothing is far."""
    return torch.exp(balance - total).masked_fill(far_denominator(far) == 0, 0)[..., None]


def far_denominator(far: Tensor) -> Tensor:
    """Return the denominator of the far part, [..., N], with 0 for what is below the smallest normal number."""
    return far[..., -1].masked_fill(far[..., -1] < torch.finfo(far.dtype).tiny, 0)


def take_window(x: Tensor, options: WindowedOptions, begin: int, end: int) -> Tensor:
    """Return the tokens in the windows of blocks `begin` to `end` - 1, zero-padded: [B, M * C, G, D] -> [B, G, L, D]."""
    reach = options.window - 1
    first, last = (begin - reach) * options.block_size, (end + reach) * options.block_size
    inside = x[:, max(first, 0) : last].transpose(1, 2)
    before = max(-first, 0)
    after = last - max(first, 0) - inside.shape[2]
    return F.pad(inside, (0, 0, before, after)) if before or after else inside


def gather_windows(x: Tensor, size: int, mask: Tensor) -> Tensor:
    """Copy the W blocks of x, from `take_window`, that each of m blocks sees: [B * m, G, W * C, D]."""
    return x.unfold(2, mask.shape[-1], size).permute(0, 2, 1, 4, 3).flatten(0, 1)


def scatter_windows(grad: Tensor, x: Tensor, size: int) -> Tensor:
    """Return the gradient of x from `grad`, the gradient of `gather_windows(x, size, mask)`."""
    blocks = grad.unflatten(0, (len(x), -1)).unflatten(3, (-1, size))  # [B, m, G, W, C, D]
    out = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    out = out.unflatten(2, (-1, size))
    for distance in range(blocks.shape[3]):
        out[:, :, distance : distance + blocks.shape[1]] += blocks[:, :, :, distance].transpose(1, 2)
    return out.flatten(2, 3).to(x.dtype)


def block_summaries(k_features: Tensor, v: Tensor, size: int) -> Tensor:
    """Compute the summary of each block, [B, G, M, F, V + 1]: the sum of k v^T (paper eq. 4) and, as last column, of k.

    It is in fp32, or in fp64 if k_features or v is fp64.
    """
    dtype = torch.promote_types(torch.promote_types(k_features.dtype, v.dtype), torch.float32)
    k_features, v = (x.unflatten(1, (-1, size)).permute(0, 3, 1, 2, 4).to(dtype) for x in (k_features, with_ones(v)))
    return k_features.mT @ v
