"""Windowed attention by definition, against which every other form is tested: a T x T matrix of weights."""

import torch
from torch import Tensor

from ..blocks import Blocks
from ..reference import divide_or_zero, inner_products, token_relations
from .inputs import WindowedInputs, WindowedOptions
from .salient import VOTE_UNITS, voting_places


def windowed_reference(inputs: WindowedInputs, k_features: Tensor) -> Tensor:
    """Compute `windowed_attention`, [B, T, H, V] in fp32, or in fp64 if q is."""
    q, k, v, q_features, decays, balance, options, key_mask, starts, cu_seqlens = inputs
    dtype = torch.promote_types(q.dtype, torch.float32)
    num_tokens, num_heads = q.shape[1], q.shape[2]
    blocks = Blocks.sequence(num_tokens, options.block_size)
    padding = key_mask, cu_seqlens, starts
    query_block, key_block, visible = token_relations(q, k, blocks, blocks, not options.both_ways, *padding)
    block_distance = query_block[:, :, None] - key_block[:, None, :]
    if options.both_ways:
        block_distance = block_distance.abs()
    is_sink = token_positions(num_tokens, starts, cu_seqlens, q.device) < options.sinks
    in_window_or_sink = (block_distance < options.window) | is_sink[:, None, :]
    near, far = (visible & in_window_or_sink)[:, None], (visible & ~in_window_or_sink)[:, None]  # [B, 1, T, S]
    # Zero the tokens that take no part: a gradient of 0 times NaN would be NaN.
    q, q_features = (torch.where(visible.any(2)[..., None, None], x, 0) for x in (q, q_features))
    k, k_features, v = (torch.where(visible.any(1)[..., None, None], x, 0) for x in (k, k_features, v))
    mixing = decays.matrix(blocks.num_blocks, options.window, options.both_ways).to(dtype)  # [H, M, M]
    token_mixing = mixing[:, query_block[:, :, None], key_block[:, None, :]].transpose(0, 1)  # [B, H, T, S]
    score = inner_products(q, k, dtype) * options.scale
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


def token_positions(num_tokens: int, starts: Tensor | None, cu_seqlens: Tensor | None, device: torch.device) -> Tensor:
    """Return the position of each token in its sequence, int64 [B or 1, T]; 0 before a row's start."""
    position = torch.arange(num_tokens, device=device)[None]
    if starts is not None:
        position = position - starts.to(device)[:, None]
    if cu_seqlens is not None:
        position = position - cu_seqlens[torch.searchsorted(cu_seqlens, position[0], right=True) - 1]
    return position.clamp(min=0)


def salient_reference(
    q: Tensor, k: Tensor, v: Tensor, options: WindowedOptions, *, starts: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute `salient_attention`, [B, T, H, V] in fp32, or in fp64 if q is."""
    dtype, num_tokens, group = torch.promote_types(q.dtype, torch.float32), q.shape[1], q.shape[2] // k.shape[2]
    blocks = Blocks.sequence(num_tokens, options.block_size)
    query_block, key_block, visible = token_relations(q, k, blocks, blocks, True, None, cu_seqlens, starts)
    distance = query_block[:, :, None] - key_block[:, None, :]
    position = token_positions(num_tokens, starts, cu_seqlens, q.device)
    in_window_or_sink = (distance < options.window) | (position < options.sinks)[:, None, :]
    near, left = visible & in_window_or_sink, visible & ~in_window_or_sink  # [B, T, S]
    q = torch.where(visible.any(2)[..., None, None], q, 0)
    k, v = (torch.where(visible.any(1)[..., None, None], x, 0) for x in (k, v))
    score = (inner_products(q, k, dtype) * options.scale).unflatten(1, (-1, group))  # [B, G, H / G, T, S]

    def softmax(is_seen: Tensor) -> Tensor:
        return score.masked_fill(~is_seen, float("-inf")).softmax(-1).nan_to_num()  # padding sees no key

    votes_at = torch.zeros(options.block_size, dtype=torch.bool, device=q.device)
    votes_at[voting_places(options)] = True
    is_voter = votes_at[position % options.block_size] & near.diagonal(dim1=1, dim2=2)  # only keys vote
    is_vote = near & (distance == options.window - 1) & is_voter[:, :, None]
    weight = torch.where(is_vote[:, None], softmax(near[:, None, None]).amax(2), 0)  # [B, G, T, S]
    votes = (weight * VOTE_UNITS).round().sum(2)  # [B, G, S]
    order = votes.argsort(descending=True, stable=True).argsort()
    is_better = (order[..., None, :] < order[..., None]).to(score.dtype)  # [B, G, S, S']
    place = left[:, None].to(score.dtype) @ is_better.mT  # among the tokens that have left the window of a query
    salient = left[:, None] & (place < options.salient)  # [B, G, T, S]
    weight = softmax((near[:, None] | salient)[:, :, None]).flatten(1, 2)
    return torch.einsum("bhts,bshv->bthv", weight, v.to(dtype).repeat_interleave(group, 2))
