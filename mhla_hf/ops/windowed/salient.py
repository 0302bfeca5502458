"""Causal softmax over a window, sinks, and salient tokens: those of the past that a KV head attended to most.

A token of block b leaves the window when block b + window begins. In block b + window - 1, every `VOTE_EVERY`-th query votes
for the token: a vote is its weight in a softmax over window and sinks, the largest among the query heads that share the KV
head. Of all tokens that have left the window, the N = `options.salient` with the largest sums of votes stay visible; ties go
to the earlier. These sums are final, so a dropped token never comes back, and N slots suffice. The choice has no gradient.

Votes are rounded to multiples of 1 / VOTE_UNITS, so that their sum does not depend on the order. A token's rank is an int64
with its votes in the high bits and its inverted position in the low bits; larger is better, and -1 stands for no token.
"""

import itertools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..torch_layout import DifferentiableOnce, align_blocks, by_block, by_token, resize_tokens
from .fused_softmax import causal_softmax, make_mask, no_key, softmax_backward, softmax_forward
from .options import WindowedOptions

VOTE_UNITS = 2.0**16
VOTE_EVERY = 4  # the cost of votes is divided by this
POSITION_BITS = 32
PIECE_BLOCKS = 32  # number of blocks whose keys are gathered at a time, to bound the memory


def voting_places(options: WindowedOptions) -> slice:
    """Return the slice of a block's queries that vote."""
    every = min(VOTE_EVERY, options.block_size)
    return slice(every - 1, None, every)


def rank_tokens(votes: Tensor, position: Tensor, is_candidate: Tensor) -> Tensor:
    """Return the ranks of tokens, or -1 for those that cannot be salient, where `is_candidate` is False."""
    last = 2**POSITION_BITS - 1
    return ((votes.long() << POSITION_BITS) + (last - position)).masked_fill(~is_candidate, -1)


def position_of(rank: Tensor) -> Tensor:
    """Return the positions of the tokens with these ranks; arbitrary where a rank is -1."""
    last = 2**POSITION_BITS - 1
    return last - (rank & last)


def count_votes(score: Tensor, lse: Tensor, is_vote: Tensor) -> Tensor:
    """Sum the votes of T queries where `is_vote`: int32 [..., C]. Shapes: score [..., H / G, T, C], lse [..., H / G, T]."""
    weight = torch.exp(score - lse[..., None]).amax(-3)
    return torch.where(is_vote, (weight * VOTE_UNITS).round(), 0).sum(-2).to(torch.int32)


class KeyLists(NamedTuple):
    """Window and sinks of M blocks of queries, as places among P tokens. C is the block size, S the number of sinks."""

    k: Tensor  # [B, G, P, D], keys of the tokens
    v: Tensor  # [B, G, P, V], their values
    block: Tensor  # int64 [B or 1, M], the index of each block in its sequence
    near: Tensor  # int64 [B or 1, M, S + window * C], the places of sinks and window
    is_near: Tensor  # bool, same shape, which of these places hold keys
    is_full: bool  # whether the tokens are whole rows from position 0 on, without padding

    def rows(self, near: Tensor, num_kv_heads: int) -> Tensor:
        """Turn places [B or 1, G or 1, m, L] into rows of the flattened k and v, [B * m, G, L]."""
        batch = len(self.k)
        base = torch.arange(batch * num_kv_heads, device=near.device).view(batch, num_kv_heads, 1, 1) * self.k.shape[2]
        return (near + base).transpose(1, 2).flatten(0, 1)


class SalientStart(NamedTuple):
    """The votes and tokens of a state from which a run of new tokens continues."""

    block: Tensor  # int64 [B, 1], the newest block that the state has opened
    cast: Tensor  # int32 [B, G, C], the votes so far for the oldest block in the window of `block`
    rank: Tensor  # int64 [B, G, N + C], ranks of the tokens that can be salient
    place: Tensor  # int64, likewise, their places


class SalientTokens(NamedTuple):
    """The salient tokens of M blocks."""

    rank: Tensor  # int64 [B, G, M, N], their ranks
    place: Tensor  # int64, likewise, their places
    votes: Tensor  # int32 [B, G, M, C], cast by the queries of each block for the oldest block in their window


class ListedSoftmax(torch.autograd.Function):
    """Softmax over a list of keys for each block of queries. The backward pass gathers the keys again."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, mask: Tensor, scale: float) -> Tensor:
        """Compute o [n, G, T, V] of q [n, G, T, D], over rows int64 [n, G, L] of k [R, D] and v [R, V].

        The mask [n or 1, G or 1, T or 1, L] is from `make_mask`.
        """
        o, lse = softmax_forward(q, take_rows(k, rows), take_rows(v, rows), mask, scale)
        o = o.masked_fill(no_key(lse, mask.dtype)[..., None], 0)
        ctx.save_for_backward(q, k, v, rows, mask, o, lse)
        ctx.scale = scale
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, rows, mask, o, lse = ctx.saved_tensors
        with torch.no_grad():
            seen = do.masked_fill(no_key(lse, mask.dtype)[..., None], 0)
            dq, *grads = softmax_backward(seen, q, take_rows(k, rows), take_rows(v, rows), o, lse, mask, ctx.scale)
            dk, dv = (sum_rows(grad, rows, x) for x, grad in zip((k, v), grads, strict=True))
        if torch.is_grad_enabled():  # create_graph=True: without this, the gradients would pass for constants
            dq, dk, dv = (DifferentiableOnce.apply(x, do, q, k, v) for x in (dq, dk, dv))
        return dq, dk, dv, None, None, None


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Gather rows int64 [n, G, L] of x [R, D], to [n, G, L, D]."""
    return x.index_select(0, rows.flatten()).view(*rows.shape, x.shape[-1])


def sum_rows(grad: Tensor, rows: Tensor, x: Tensor) -> Tensor:
    """Compute the gradient of x from `grad`, the gradient of `take_rows(x, rows)`, with sums in at least fp32."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    total = torch.zeros(x.shape, dtype=dtype, device=x.device)
    return total.index_add_(0, rows.flatten(), grad.flatten(0, 2).to(dtype)).to(x.dtype)


def salient_attention(
    q: Tensor, k: Tensor, v: Tensor, options: WindowedOptions, *, starts: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute causal softmax attention to window, sinks, and salient tokens, as the docstring of this module defines them.

    Args:
        q: [B, T, H, D], rotated queries, in v's dtype.
        k: [B, T, G, D], rotated keys, in v's dtype.
        v: [B, T, G, V], values.
        options: The options; with `salient` of 0, window and sinks are all that a query sees.
        starts, cu_seqlens: As in `mhla`; at most one of them.

    Returns:
        [B, T, H, V] in v's dtype.

    Raises:
        ValueError: If both `starts` and `cu_seqlens` are given.
    """
    size, aligned = options.block_size, align_blocks(q, options.block_size, None, starts, cu_seqlens)
    q, k, v = aligned.tokens.move(q, k, v)
    block, num_tokens, length = aligned.block, q.shape[1], len(aligned.block) * size
    is_full = aligned.valid is None and not torch.compiler.is_compiling()
    valid = q.new_ones(1, num_tokens, dtype=torch.bool) if aligned.valid is None else aligned.valid
    valid = resize_tokens(valid, length) & (torch.arange(length, device=q.device) < num_tokens)
    q, k, v = (resize_tokens(x, length) for x in (q, k, v))
    if not is_full:
        k, v = (x.masked_fill(~valid[:, :, None, None], 0) for x in (k, v))
    keys = list_sequences(k, v, valid, block, options, is_full)
    with torch.no_grad():
        chosen = choose_salient(q, valid.expand(len(q), -1), keys, options)
    o = attend_to_lists(q, keys, chosen, options)
    return aligned.tokens.take_back(resize_tokens(o, num_tokens))


def list_sequences(
    k: Tensor, v: Tensor, valid: Tensor, block: Tensor, options: WindowedOptions, is_full: bool
) -> KeyLists:
    """List the keys of M blocks of k and v [B, M * C, G, ...] that no decoder state precedes; see `list_keys`."""
    size, device = options.block_size, k.device
    place = torch.arange((1 - options.window) * size, len(block) * size, device=device)[None]
    sinks = (torch.arange(len(block), device=device) - block)[:, None] * size
    sinks = sinks + torch.arange(options.sinks, device=device)  # [M, S]
    return list_keys(k, v, place, valid, sinks[None], block[None], options, is_full)


def list_keys(
    k: Tensor, v: Tensor, place: Tensor, valid: Tensor, sinks: Tensor, block: Tensor, options: WindowedOptions,
    is_full: bool,
) -> KeyLists:  # fmt: skip
    """List the keys of M blocks, `block` int64 [B or 1, M], among k and v [B, P, G, ...].

    `place` int64 [B or 1, (window - 1 + M) * C] has the places of the tokens from the first window on, `sinks` int64
    [B or 1, M or 1, S] the places of sinks; negative means no token. `valid` bool [B or 1, P] says which tokens are keys.
    """
    size, window = options.block_size, options.window
    batch, num_blocks = max(len(place), len(valid), len(block)), block.shape[1]
    windows = place.unfold(1, window * size, size)  # [B or 1, M, window * C]
    distance = torch.arange(window, device=place.device).repeat_interleave(size) - (window - 1)
    is_token = (block[..., None] + distance >= 0) & (windows >= 0)
    # While block 0 is in the window, the sinks are listed as part of the window.
    is_sink = (block >= window)[..., None] & (sinks >= 0)
    near, is_near = (
        torch.cat([x.expand(batch, num_blocks, -1) for x in parts], 2)
        for parts in ((sinks, windows), (is_sink, is_token))
    )
    near = near.clamp(min=0)
    is_near = is_near & valid.expand(batch, -1).gather(1, near.flatten(1)).view_as(near)
    return KeyLists(k.transpose(1, 2), v.transpose(1, 2), block, near, is_near, is_full)


def choose_salient(
    q: Tensor, is_voter: Tensor, keys: KeyLists, options: WindowedOptions, start: SalientStart | None = None
) -> SalientTokens:
    """Have queries q [B, M * C, H, D] vote, and choose the salient tokens of every block.

    Queries where `is_voter`, bool [B, M * C], is False do not vote. `start` has the votes and ranks of a state.
    """
    size, num_blocks, num_kv_heads = options.block_size, keys.block.shape[1], keys.k.shape[1]
    flat_k, first = keys.k.flatten(0, 2), min(options.window - 1, num_blocks) if keys.is_full else 0
    votes = torch.zeros(len(q), num_kv_heads, num_blocks, size, dtype=torch.int32, device=q.device)
    for begin, end in in_pieces(first, num_blocks) if options.salient else ():
        queries = by_block(q[:, begin * size : end * size], num_kv_heads, size)
        votes[:, :, begin:end] = cast_votes(queries, is_voter, flat_k, keys, options, begin, end)
    return choose_by_votes(votes, keys, options, start)


def attend_to_lists(q: Tensor, keys: KeyLists, chosen: SalientTokens, options: WindowedOptions) -> Tensor:
    """Compute the outputs [B, M * C, H, V] of queries q [B, M * C, H, D] over listed keys and chosen salient tokens."""
    size, window, num_blocks, num_kv_heads = options.block_size, options.window, keys.block.shape[1], keys.k.shape[1]
    # If `keys.is_full`, no token is dropped before block `first`, and each block from `full` on has N salient tokens.
    first = min(options.tokens_before_drop // size, num_blocks) if keys.is_full else 0
    full = min(window + -(-(options.salient + options.sinks) // size), num_blocks) if keys.is_full else num_blocks
    flat_k, flat_v = (x.flatten(0, 2) for x in (keys.k, keys.v))
    outputs = []
    if first:
        first_k, first_v = (x[:, :, : first * size].transpose(1, 2) for x in (keys.k, keys.v))
        outputs.append(causal_softmax(q[:, : first * size], first_k, first_v, options.scale))
    causal = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    causal = F.pad(causal, (options.sinks + (window - 1) * size, 0), value=True).repeat(q.shape[2] // num_kv_heads, 1)
    for begin, end in (*in_pieces(first, full), *in_pieces(full, num_blocks)):
        queries = by_block(q[:, begin * size : end * size], num_kv_heads, size)
        kept = chosen.place[:, :, begin:end]
        near = keys.near[:, None, begin:end].expand(len(q), num_kv_heads, -1, -1)
        rows = keys.rows(torch.cat([near, kept.clamp(min=0)], 3), num_kv_heads)
        if begin >= full:
            mask = make_mask(F.pad(causal, (0, options.salient), value=True)[None, None], q.dtype)
        else:
            # Salient tokens precede empty slots, so without padding all rows and heads fill the same slots.
            is_kept = (kept[:, :1] if keys.is_full else kept).transpose(1, 2)[..., None, :] >= 0
            is_near = (keys.is_near[:, begin:end, None, None] & causal).expand(len(q), -1, is_kept.shape[2], -1, -1)
            is_kept = is_kept.expand(*is_near.shape[:4], -1)
            mask = make_mask(torch.cat([is_near, is_kept], 4).flatten(0, 1), q.dtype)
        o = ListedSoftmax.apply(queries, flat_k, flat_v, rows, mask, options.scale)
        outputs.append(by_token(o, len(q), size))
    return torch.cat(outputs, 1)


def in_pieces(begin: int, end: int) -> list[tuple[int, int]]:
    """Cut a range of blocks into pieces of at most `PIECE_BLOCKS`."""
    return list(itertools.pairwise([*range(begin, end, PIECE_BLOCKS), end]))


def cast_votes(
    q: Tensor, is_voter: Tensor, flat_k: Tensor, keys: KeyLists, options: WindowedOptions, begin: int, end: int
) -> Tensor:
    """Return the votes int32 [B, G, m, C] of the queries q [B * m, G, (H / G) * C, D] of blocks `begin` to `end`."""
    size, num_kv_heads, voters = options.block_size, q.shape[1], voting_places(options)
    q = q.unflatten(2, (-1, size))[:, :, :, voters]  # [B * m, G, H / G, voters, D]
    is_voter = is_voter.unflatten(1, (-1, size))[:, begin:end, voters]
    batch, is_near = len(is_voter), keys.is_near[:, begin:end]
    k = take_rows(flat_k, keys.rows(keys.near[:, None, begin:end], num_kv_heads))
    place = torch.arange(size, device=q.device)
    earlier = place <= place[voters, None]
    seen = F.pad(earlier, (k.shape[2] - size, 0), value=True)
    mask = make_mask((is_near[:, :, None] & seen).repeat(1, 1, q.shape[2], 1).flatten(0, 1)[:, None], q.dtype)
    if len(is_near) < batch:
        mask = mask.repeat(batch, 1, 1, 1)
    q = q.flatten(2, 3)
    _, lse = softmax_forward(q, k, k, mask, options.scale)
    voted = slice(options.sinks, options.sinks + size)
    is_vote = is_voter[..., None] & is_near[:, :, None, voted]
    is_vote = is_vote & (keys.block >= options.window - 1)[:, begin:end, None, None]
    if options.window == 1:
        is_vote = is_vote & earlier
    is_vote = is_vote.expand(batch, -1, -1, -1).flatten(0, 1)[:, None]
    score = (q.to(lse.dtype) @ k[:, :, voted].to(lse.dtype).mT) * options.scale
    groups = (-1, is_vote.shape[2])  # of the query heads that share a KV head
    votes = count_votes(score.unflatten(2, groups), lse.unflatten(2, groups), is_vote)
    return votes.unflatten(0, (batch, -1)).transpose(1, 2)


def choose_by_votes(
    votes: Tensor, keys: KeyLists, options: WindowedOptions, start: SalientStart | None
) -> SalientTokens:
    """Choose the salient tokens of M blocks from their votes int32 [B, G, M, C] (see `SalientTokens`)."""
    (batch, num_kv_heads, num_blocks, size), count, window = votes.shape, options.salient, options.window
    block = keys.block.expand(batch, -1)
    position = (block[..., None] - window + 1) * size + torch.arange(size, device=votes.device)  # of tokens voted for
    voted = slice(options.sinks, options.sinks + size)
    is_candidate = keys.is_near[:, :, voted] & (position >= options.sinks)
    best = votes.new_full((batch, num_kv_heads, count), -1, dtype=torch.int64)
    place = best
    chosen = [(best, place)]
    if start is not None:
        votes = votes + torch.where(block == start.block, 1, 0)[:, None, :, None] * start.cast[:, :, None]
        # After a crop to an earlier block, some tokens of `start` are in the window of the first block.
        oldest = (block[:, :1] - window + 1) * size
        outside = start.rank.masked_fill(position_of(start.rank) >= oldest[:, None], -1)
        chosen = [best_tokens(outside, start.place, count)]
        best, place = best_tokens(start.rank, start.place, count)
    rank = rank_tokens(votes, position[:, None], is_candidate[:, None])
    for number in range(1, num_blocks):
        if number >= window or not keys.is_full:
            if start is not None:  # tokens that left in earlier blocks are in `start.rank`
                is_new = block[:, number] > start.block[:, 0]
            else:
                is_new = block[:, number] >= window
                best = best.masked_fill((block[:, number] == 0)[:, None, None], -1)  # a packed sequence begins
            new = rank[:, :, number - 1].masked_fill(~is_new[:, None, None], -1)
            new_place = keys.near[:, None, number - 1, voted].expand_as(new)
            best, place = best_tokens(torch.cat([best, new], 2), torch.cat([place, new_place], 2), count)
        chosen.append((best, place))
    best, place = (torch.stack(x, 2) for x in zip(*chosen, strict=True))
    return SalientTokens(best, place.masked_fill(best < 0, -1), votes)


def best_tokens(rank: Tensor, place: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` highest of the ranks [B, G, L], best first, and the places of their tokens, both [B, G, count]."""
    rank, order = rank.topk(count, -1)
    return rank, place.gather(-1, order)
