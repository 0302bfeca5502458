"""The definition of MHLA, T x T, in as few lines as it takes: what every other form is tested against.

Quadratic in time and memory on purpose. All options, any dtype; inputs are expected to be checked (`mhla`
does). Letters: B batch, T query tokens, S key tokens, H query heads, G key/value heads, K key width, V value width, M
blocks.
"""

import torch

from .blocks import Blocks


def mhla_reference(
    q, k, v, mixing, *, blocks, key_blocks=None, causal=False, normalize=True, scale=None, q_den=None, k_den=None,
    key_mask=None, cu_seqlens=None, starts=None, unrounded=False,
):  # fmt: skip
    """o[t] = sum_s w[t, s] v[s], w[t, s] = mixing[block of t, block of s] * scale * <q[t], k[s]>   (paper eq. 5).

    With `normalize` the sum is divided by sum_s w[t, s], where q_den and k_den may take the place of q and k; 0/0 is 0.
    Shapes and options as in `mhla`. Computes in fp32, in fp64 if q, k or v is fp64; returns [B, T, H, V] in v's dtype,
    or with `unrounded` in that one.
    """
    dtype = torch.float64 if torch.float64 in (q.dtype, k.dtype, v.dtype) else torch.float32
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    heads = q.shape[2]
    with torch.autocast(q.device.type, enabled=False):
        query_block, key_block, visible = token_relations(
            q, k, blocks, key_blocks or blocks, causal, key_mask, cu_seqlens, starts
        )
        sees, seen = (visible.any(axis)[:, :, None, None] for axis in (2, 1))  # a gradient of 0 times NaN would be NaN
        q, q_den = (None if x is None else torch.where(sees, x, 0) for x in (q, q_den))
        k, v, k_den = (None if x is None else torch.where(seen, x, 0) for x in (k, v, k_den))
        m = mixing.to(dtype).expand(heads, *mixing.shape[-2:])
        m = m[:, query_block[:, :, None], key_block[:, None, :]].transpose(0, 1)  # [B, H, T, S]

        weight = torch.where(visible[:, None], m * scale * inner_products(q, k, dtype), 0)
        o = torch.einsum("bhts,bshv->bthv", weight, v.to(dtype).repeat_interleave(heads // v.shape[2], 2))
        if normalize == "official":
            pair = (q, k) if q_den is None else (q_den, k_den)
            o = divide_or_zero(o, official_denominator(*pair, mixing.to(dtype), blocks, scale))
        elif normalize:
            if q_den is not None:
                weight = torch.where(visible[:, None], m * scale * inner_products(q_den, k_den, dtype), 0)
            o = divide_or_zero(o, weight.sum(-1).transpose(1, 2))
        return o if unrounded else o.to(v.dtype)


def token_relations(q, k, blocks, key_blocks, causal, key_mask, cu_seqlens, starts):
    """Block of each query [B or 1, T], block of each key [B or 1, S], and which query sees which key [B, T, S]."""
    query_block, key_block = blocks.index(q.device)[None], key_blocks.index(q.device)[None]
    token, key_token = torch.arange(q.shape[1], device=q.device), torch.arange(k.shape[1], device=q.device)
    visible = torch.ones(q.shape[0], q.shape[1], k.shape[1], dtype=torch.bool, device=q.device)
    if causal:
        visible = visible & (token[:, None] >= key_token[None, :])
    if key_mask is not None:
        visible = visible & key_mask[:, None, :]
    if starts is not None:
        starts = starts.to(q.device)
        visible = visible & (key_token[None, :] >= starts[:, None])[:, None, :]
        query_block = key_block = (token[None, :] - starts[:, None]).clamp(min=0) // blocks.block_size
    if cu_seqlens is not None:
        edges = cu_seqlens.to(q.device, torch.int64)
        sequence = torch.searchsorted(edges, token, right=True) - 1
        visible = visible & (sequence[:, None] == sequence[None, :])
        query_block = key_block = ((token - edges[sequence]) // blocks.block_size)[None]
    return query_block, key_block, visible


def inner_products(q, k, dtype):
    """<q[t], k[s]> of each query head with its key head, [B, H, T, S]."""
    k = k.to(dtype).repeat_interleave(q.shape[2] // k.shape[2], 2)
    return torch.einsum("bthk,bshk->bhts", q.to(dtype), k)


def official_denominator(q, k, mixing, blocks, scale):
    """What the authors' vision code divides by: sum_b mixing[i, b] <q at the same slot of block b, z_b>, [B, T, H].

    It is not the paper's (which has q[t] itself in place of that other query); checkpoints of that code need it. In linear
    time, so it serves every form.
    """
    tokens = torch.argsort(blocks.index(q.device), stable=True).view(blocks.num_blocks, -1)  # [M, n], slot by slot
    z = k.to(mixing.dtype)[:, tokens].sum(2).repeat_interleave(q.shape[2] // k.shape[2], 2)  # [B, M, H, K]
    own = torch.einsum("bmnhk,bmhk->hbmn", q.to(mixing.dtype)[:, tokens], z)
    mixed = torch.einsum("him,hbmn->binh", mixing.expand(q.shape[2], *mixing.shape[-2:]), own).flatten(1, 2)
    return scale * mixed[:, torch.argsort(tokens.flatten())]


def divide_or_zero(numerator, denominator):
    """numerator [..., V] / denominator [...], and 0 where the denominator vanishes; finite in the backward pass too."""
    dead = denominator.abs() < torch.finfo(denominator.dtype).tiny
    quotient = numerator / torch.where(dead, 1, denominator)[..., None]
    return torch.where(dead[..., None], 0, quotient)


def without_row_scale(grad, mixing, causal):
    """A gradient of `mixing` [.., Mq, Mk] less its part along each row of it, for the normalized form.

    There the scale of a row cancels between numerator and denominator, so that part is 0; what arithmetic leaves of it is
    rounding of two large terms, often the largest error of the gradient. An orthogonal projection never adds to an error.
    """
    mixing = (mixing.tril() if causal else mixing).to(grad.dtype)
    largest = mixing.abs().amax(-1, keepdim=True)
    row = mixing / torch.where(largest == 0, 1, largest)
    along = (grad * row).sum(-1, keepdim=True) / row.square().sum(-1, keepdim=True).clamp(min=1)
    return grad - along * row


def local_reference(q, k, v, fq, fk, mixing, balance, form, *, key_mask=None, starts=None, cu_seqlens=None):
    """The definition of `local_attention`, T x T: softmax over near tokens, MHLA by `mixing` `[H, M, M]` over far ones.

    Arguments as there. Returns o `[B, T, H, V]` in fp32, fp64 if q is.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    tokens, heads = q.shape[1], q.shape[2]
    blocks = Blocks.sequence(tokens, form.block_size)
    causal = not form.both_ways
    query_block, key_block, visible = token_relations(q, k, blocks, blocks, causal, key_mask, cu_seqlens, starts)
    first = torch.zeros(1, dtype=torch.int64) if starts is None else starts
    position = (torch.arange(tokens, device=q.device) - first.to(q.device)[:, None]).clamp(min=0)
    if cu_seqlens is not None:
        position = position - cu_seqlens[torch.searchsorted(cu_seqlens, position[0], right=True) - 1]
    distance = query_block[:, :, None] - key_block[:, None, :]
    distance = distance if causal else distance.abs()
    near = (distance < form.lag) | (position < form.sinks)[:, None, :]
    near, far = (visible & near)[:, None], (visible & ~near)[:, None]
    q, k, fq, fk = (
        torch.where(visible.any(axis)[..., None, None], x, 0) for x, axis in ((q, 2), (k, 1), (fq, 2), (fk, 1))
    )
    m = mixing.to(dtype).expand(heads, *mixing.shape[-2:])
    m = m[:, query_block[:, :, None], key_block[:, None, :]].transpose(0, 1)
    score = inner_products(q, k, dtype) * form.scale
    features = m * inner_products(fq, fk, dtype)
    if balance is None:
        weight = torch.where(near, m * score, 0) + torch.where(far, features * form.scale, 0)
    else:
        largest = score.masked_fill(~near, float("-inf")).amax(-1, keepdim=True)
        balance = balance.to(dtype)[:, None, None]
        has_far = (far & (features != 0)).any(-1, keepdim=True)
        largest = torch.where(has_far, torch.maximum(largest, balance), largest)
        largest = largest.masked_fill(largest == float("-inf"), 0)
        weight = torch.where(near, torch.exp(score - largest), 0)
        weight = weight + torch.where(far & has_far, torch.exp(balance - largest) * features, 0)
    value = torch.where(visible.any(1)[..., None, None], v, 0).to(dtype).repeat_interleave(heads // v.shape[2], 2)
    o = torch.einsum("bhts,bshv->bthv", weight, value)
    return divide_or_zero(o, weight.sum(-1).transpose(1, 2)) if form.normalize else o
