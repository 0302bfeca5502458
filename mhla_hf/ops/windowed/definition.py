"""Windowed attention by definition: a T x T matrix of softmax and MHLA weights."""

import torch
from torch import Tensor

from ..blocks import Blocks
from ..reference import divide_or_zero, inner_products, token_relations
from .inputs import WindowedInputs, WindowedOptions
from .salient import VOTE_UNITS, voting_places


def windowed_reference(inputs: WindowedInputs, k_features: Tensor) -> Tensor:
    """Compute `windowed_attention` or `two_way_attention` by definition: a T x T matrix of softmax and MHLA weights.

    Returns:
        [B, T, H, V] in fp32, or in fp64 if q is.
    """
    q, k, v, q_features, decays, balance, options, key_mask, starts, cu_seqlens = inputs
    dtype = torch.promote_types(q.dtype, torch.float32)
    num_tokens, num_heads = q.shape[1], q.shape[2]
    blocks = Blocks.sequence(num_tokens, options.block_size)
    causal = not options.both_ways
    query_block, key_block, visible = token_relations(q, k, blocks, blocks, causal, key_mask, cu_seqlens, starts)
    first = torch.zeros(1, dtype=torch.int64) if starts is None else starts
    position = (torch.arange(num_tokens, device=q.device) - first.to(q.device)[:, None]).clamp(min=0)
    if cu_seqlens is not None:
        position = position - cu_seqlens[torch.searchsorted(cu_seqlens, position[0], right=True) - 1]
    block_distance = query_block[:, :, None] - key_block[:, None, :]
    if options.both_ways:
        block_distance = block_distance.abs()
    in_window_or_sink = (block_distance < options.window) | (position < options.sinks)[:, None, :]
    # Both are [B, 1, T, S].
    near = (visible & in_window_or_sink)[:, None]
    far = (visible & ~in_window_or_sink)[:, None]
    # Zero the tokens that take no part: a gradient of 0 times NaN would be NaN.
    sees_any = visible.any(2)[..., None, None]
    seen_by_any = visible.any(1)[..., None, None]
    q = torch.where(sees_any, q, 0)
    q_features = torch.where(sees_any, q_features, 0)
    k, k_features, v = (torch.where(seen_by_any, x, 0) for x in (k, k_features, v))
    mixing = decays.matrix(blocks.num_blocks, options.window, options.both_ways).to(dtype)  # [H, M, M]
    token_mixing = mixing[:, query_block[:, :, None], key_block[:, None, :]].transpose(0, 1)  # [B, H, T, S]
    score = inner_products(q, k, dtype) * options.scale
    if options.salient:
        salient = salient_tokens(score, near, far, block_distance, position, k.shape[2], options)
        near, far = near | salient, far & ~salient  # [B, H, T, S]
    far_weight = token_mixing * inner_products(q_features, k_features, dtype)
    if balance is None:
        weight = torch.where(near, token_mixing * score, 0) + torch.where(far, far_weight * options.scale, 0)
    else:
        largest = score.masked_fill(~near, float("-inf")).amax(-1, keepdim=True)
        balance = balance.to(dtype)[:, None, None]
        has_far = (far & (far_weight != 0)).any(-1, keepdim=True)
        largest = torch.where(has_far, torch.maximum(largest, balance), largest)
        largest = largest.masked_fill(largest == float("-inf"), 0)
        weight = torch.where(near, torch.exp(score - largest), 0)
        weight = weight + torch.where(far & has_far, torch.exp(balance - largest) * far_weight, 0)
    o = torch.einsum("bhts,bshv->bthv", weight, v.to(dtype).repeat_interleave(num_heads // v.shape[2], 2))
    return divide_or_zero(o, weight.sum(-1).transpose(1, 2)) if options.normalize else o


def salient_tokens(
    score: Tensor,
    near: Tensor,
    far: Tensor,
    block_distance: Tensor,
    position: Tensor,
    num_kv_heads: int,
    options: WindowedOptions,
) -> Tensor:
    """Return which far tokens stay near each query, bool [B, H, T, S]: those with the most votes per KV head (`salient.py`).

    score is [B, H, T, S], bool near and far [B, 1, T, S], block_distance [B, T, S], and position [B, T].
    """
    weight = score.masked_fill(~near, float("-inf")).softmax(-1).nan_to_num()  # a query that is padding sees no key
    places = torch.zeros(options.block_size, dtype=torch.bool, device=score.device)
    places[voting_places(options)] = True
    is_vote = (
        near & (block_distance == options.window - 2)[:, None] & places[position % options.block_size][:, None, :, None]
    )
    is_vote = is_vote & near.diagonal(dim1=2, dim2=3)[..., None]  # what is no key is no voter
    largest = torch.where(is_vote, weight, 0).unflatten(1, (num_kv_heads, -1)).amax(2)  # [B, G, T, S]
    votes = (largest * VOTE_UNITS).round().sum(2)  # [B, G, S]
    order = votes.argsort(descending=True, stable=True).argsort()  # the rank of each token among all
    is_better = (order[..., None, :] < order[..., None]).to(score.dtype)  # [B, G, S, S']
    rank = far.to(score.dtype) @ is_better.mT  # among the tokens that are far from a query, [B, G, T, S]
    return (far & (rank < options.salient)).repeat_interleave(score.shape[1] // num_kv_heads, 1)
