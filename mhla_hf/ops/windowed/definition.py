"""Windowed attention by its definition, a T x T matrix of weights; every other implementation is tested against it."""

import torch
from torch import Tensor

from ..blocks import Blocks
from ..reference import divide_or_zero, inner_products, token_relations
from .options import WindowedOptions
from .salient import VOTE_UNITS, voting_places
from .two_way import FarPart


def two_way_reference(
    q: Tensor, k: Tensor, v: Tensor, far: FarPart, options: WindowedOptions, *, key_mask: Tensor | None = None,
    starts: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute `two_way_attention`: [B, T, H, V] in fp32, or in fp64 if q is fp64."""
    q_features, k_features, log_decay, balance = far
    dtype = torch.promote_types(q.dtype, torch.float32)
    num_tokens, queries_per_kv = q.shape[1], q.shape[2] // k.shape[2]
    blocks = Blocks.sequence(num_tokens, options.block_size)
    query_block, key_block, visible = token_relations(q, k, blocks, blocks, False, key_mask, None, starts)
    distance = (query_block[:, :, None] - key_block[:, None, :]).abs()
    near, is_far = ((visible & x)[:, None] for x in (distance < options.window, distance >= options.window))
    # Queries that see no key, and keys that no query sees, are set to 0: NaN there would turn gradients of 0 into NaN.
    q, q_features = (torch.where(visible.any(2)[..., None, None], x, 0) for x in (q, q_features))
    k, k_features, v = (torch.where(visible.any(1)[..., None, None], x, 0) for x in (k, k_features, v))
    mixing = torch.exp(log_decay.to(dtype)[:, None, None] * distance[:, None]).repeat_interleave(queries_per_kv, 1)
    score = (inner_products(q, k, dtype) * options.scale).masked_fill(~near, float("-inf"))
    far_weight = (mixing * inner_products(q_features, k_features, dtype)).masked_fill(~is_far, 0)
    largest = score.amax(-1, keepdim=True)
    balance = balance.to(dtype)[:, None, None]
    has_far = (far_weight != 0).any(-1, keepdim=True)
    largest = torch.where(has_far, torch.maximum(largest, balance), largest)
    largest = largest.masked_fill(largest == float("-inf"), 0)
    weight = (
        torch.exp(score - largest) + torch.exp((balance - largest).masked_fill(~has_far, float("-inf"))) * far_weight
    )
    o = torch.einsum("bhts,bshv->bthv", weight, v.to(dtype).repeat_interleave(queries_per_kv, 2))
    return divide_or_zero(o, weight.sum(-1).transpose(1, 2))


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
    """Compute `salient_attention`: [B, T, H, V] in fp32, or in fp64 if q is fp64."""
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
    is_voter = votes_at[position % options.block_size] & near.diagonal(dim1=1, dim2=2)  # padding does not vote
    is_vote = near & (distance == options.window - 1) & is_voter[:, :, None]
    weight = torch.where(is_vote[:, None], softmax(near[:, None, None]).amax(2), 0)  # [B, G, T, S]
    votes = (weight * VOTE_UNITS).round().sum(2)  # [B, G, S]
    order = votes.argsort(descending=True, stable=True).argsort()
    is_better = (order[..., None, :] < order[..., None]).to(score.dtype)  # [B, G, S, S']
    place = left[:, None].to(score.dtype) @ is_better.mT  # each key's rank among those that have left the window
    salient = left[:, None] & (place < options.salient)  # [B, G, T, S]
    weight = softmax((near[:, None] | salient)[:, :, None]).flatten(1, 2)
    return torch.einsum("bhts,bshv->bthv", weight, v.to(dtype).repeat_interleave(group, 2))
