"""The definition of MHLA as a readable T x T computation, against which every other implementation is tested."""

import torch
from torch import Tensor

from .blocks import Blocks
from .inputs import MHLAInputs


def mhla_reference(inputs: MHLAInputs) -> Tensor:
    """Compute o[t] = sum_s w[t, s] v[s] with w[t, s] = mixing[b(t), b(s)] * scale * <q[t], k[s]> (paper eq. 5).

    With `normalize`, o is divided by sum_s w[t, s]; if "official", by `official_denominator`. For both, q_den and k_den
    replace q and k if given, and 0/0 is 0. Sums are in fp64 if q, k, or v is, else in fp32. Returns [B, T, H, V] in v's
    dtype (with `unrounded`, that of the sums).
    """
    q, k, v, mixing, options, q_den, k_den, key_mask, cu_seqlens, starts = inputs
    dtype = torch.float64 if torch.float64 in (q.dtype, k.dtype, v.dtype) else torch.float32
    scale, num_heads = options.scale, q.shape[2]
    with torch.autocast(q.device.type, enabled=False):
        query_block, key_block, visible = token_relations(
            q, k, options.blocks, options.key_blocks, options.causal, key_mask, cu_seqlens, starts
        )
        # Queries that see no key, and keys that no query sees, are set to 0: NaN there would turn gradients of 0 into NaN.
        sees_any, seen_by_any = visible.any(2)[..., None, None], visible.any(1)[..., None, None]
        q = torch.where(sees_any, q, 0)
        k, v = torch.where(seen_by_any, k, 0), torch.where(seen_by_any, v, 0)
        if q_den is not None and k_den is not None:
            q_den, k_den = torch.where(sees_any, q_den, 0), torch.where(seen_by_any, k_den, 0)
        mixing = mixing.to(dtype)  # cast once, so that its gradients, which may cancel, are summed in this dtype
        token_mixing = mixing.expand(num_heads, *mixing.shape[-2:])
        token_mixing = token_mixing[:, query_block[:, :, None], key_block[:, None, :]].transpose(0, 1)  # [B, H, T, S]

        weight = torch.where(visible[:, None], token_mixing * scale * inner_products(q, k, dtype), 0)  # [B, H, T, S]
        o = torch.einsum("bhts,bshv->bthv", weight, v.to(dtype).repeat_interleave(num_heads // v.shape[2], 2))
        if options.normalize == "official":
            query, key = (q, k) if q_den is None or k_den is None else (q_den, k_den)
            o = divide_or_zero(o, official_denominator(query, key, mixing, options.blocks, scale))
        elif options.normalize:
            if q_den is not None and k_den is not None:
                weight = torch.where(visible[:, None], token_mixing * scale * inner_products(q_den, k_den, dtype), 0)
            o = divide_or_zero(o, weight.sum(-1).transpose(1, 2))
        return o if options.unrounded else o.to(v.dtype)


def token_relations(
    q: Tensor, k: Tensor, blocks: Blocks, key_blocks: Blocks, causal: bool, key_mask: Tensor | None,
    cu_seqlens: Tensor | None, starts: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the blocks of queries [B or 1, T] and keys [B or 1, S], int64, and which query sees which key [B, T, S]."""
    query_block, key_block = blocks.index(q.device)[None], key_blocks.index(q.device)[None]
    token, key_token = torch.arange(q.shape[1], device=q.device), torch.arange(k.shape[1], device=q.device)
    visible = torch.ones(q.shape[0], q.shape[1], k.shape[1], dtype=torch.bool, device=q.device)
    if causal:
        visible = visible & (token[:, None] >= key_token[None, :])
    if key_mask is not None:
        visible = visible & key_mask[:, None, :]
    if starts is not None:
        assert blocks.block_size is not None  # causal blocks are those of a sequence
        starts = starts.to(q.device)
        visible = visible & (key_token[None, :] >= starts[:, None])[:, None, :]
        query_block = key_block = (token[None, :] - starts[:, None]).clamp(min=0) // blocks.block_size
    if cu_seqlens is not None:
        assert blocks.block_size is not None
        borders = cu_seqlens.to(q.device, torch.int64)
        sequence_id = torch.searchsorted(borders, token, right=True) - 1
        visible = visible & (sequence_id[:, None] == sequence_id[None, :])
        query_block = key_block = ((token - borders[sequence_id]) // blocks.block_size)[None]
    return query_block, key_block, visible


def inner_products(q: Tensor, k: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute <q[t], k[s]> in `dtype`: q [B, T, H, K], k [B, S, G, K] -> [B, H, T, S]."""
    k = k.to(dtype).repeat_interleave(q.shape[2] // k.shape[2], 2)
    return torch.einsum("bthk,bshk->bhts", q.to(dtype), k)


def official_denominator(q: Tensor, k: Tensor, mixing: Tensor, blocks: Blocks, scale: float) -> Tensor:
    """Compute the denominator of the authors' vision code, which their checkpoints need: [B, T, H].

    For a token of block i this is sum_b mixing[i, b] <q_b, z_b>, where z_b is the sum of the keys of block b, and q_b the
    query of block b at the token's index within its block; the paper has the token's own query instead. Masked keys must be
    zeros. It takes linear time, so every implementation uses it.
    """
    num_heads = q.shape[2]
    tokens = torch.argsort(blocks.index(q.device), stable=True).view(blocks.num_blocks, -1)  # [M, C], block by block
    z = k.to(mixing.dtype)[:, tokens].sum(2).repeat_interleave(num_heads // k.shape[2], 2)  # [B, M, H, K]
    per_block = torch.einsum("bmnhk,bmhk->hbmn", q.to(mixing.dtype)[:, tokens], z)  # [H, B, M, C]
    mixed = torch.einsum("him,hbmn->binh", mixing.expand(num_heads, *mixing.shape[-2:]), per_block).flatten(1, 2)
    return scale * mixed[:, torch.argsort(tokens.flatten())]


def divide_or_zero(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Divide [..., V] by [...], with 0 where |denominator| is below the smallest normal number; gradients stay finite."""
    vanishes = denominator.abs() < torch.finfo(denominator.dtype).tiny
    quotient = numerator / torch.where(vanishes, 1, denominator)[..., None]
    return torch.where(vanishes[..., None], 0, quotient)


def without_row_scale(grad: Tensor, mixing: Tensor, causal: bool) -> Tensor:
    """Remove from a gradient of `mixing` its component along each row of `mixing`, for the normalized form.

    The scale of a row cancels between numerator and denominator, so the exact component is 0. The computed one is a rounding
    error of two large terms, often the largest error of the gradient; an orthogonal projection removes it.
    """
    mixing = (mixing.tril() if causal else mixing).to(grad.dtype)
    largest = mixing.abs().amax(-1, keepdim=True)
    row = mixing / torch.where(largest == 0, 1, largest)
    component = (grad * row).sum(-1, keepdim=True) / row.square().sum(-1, keepdim=True).clamp(min=1)
    return grad - component * row
