"""The decoder state of `salient.py`, whose size is constant.

The ring holds one block more than the window: each step compares one token of the block that has just left the window with
the kept ones, and `crop` can take back up to a block. Every step does the same work, and reads no value on the host. Every
row has its own position.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..state import RingState
from ..torch_layout import MoveTokens, TokenPlaces, resize_tokens, ring_slot, take_tokens, visible_slots
from .fused_softmax import causal_softmax
from .inputs import WindowedOptions
from .salient import (
    KeyLists,
    SalientStart,
    SalientTokens,
    attend_to_lists,
    count_votes,
    list_keys,
    position_of,
    rank_tokens,
    voting_places,
)


class SalientStep(NamedTuple):
    """What one new token per row reads and writes; it depends on positions and padding alone, so layers can share it."""

    slot: Tensor  # int64 [B], the slot of the new token
    is_part: Tensor  # bool [B], whether its row takes part
    valid: Tensor  # bool [B, S], the slots that hold a real token, the new one included
    opens: Tensor  # bool [B, 1, 1], whether it is the first of a block that no earlier token has opened
    left_position: Tensor  # int64 [B, C], the tokens of the block that has left the window
    left_slot: Tensor  # int64 [B, C], their slots
    is_candidate: Tensor  # bool [B, 1, C], which of them can be salient
    place: Tensor  # int64 [B], the place in its block of the new token, and of the token that is compared with the kept ones
    is_compared: Tensor  # bool [B, 1], whether there is such a token
    is_pending: Tensor  # bool [B, 1, C], which tokens that have left the window are neither kept nor dropped yet
    oldest: Tensor  # int64 [B, 1, 1], the first position in the window; after a crop, salient tokens may be in it again
    near: Tensor  # bool [B, S], the slots of sinks and window
    voted_slot: Tensor  # int64 [B, C], the slots of the first block of the window
    is_vote: Tensor  # bool [B, 1, 1, C], for which of its tokens the new one votes


@torch.no_grad()
def plan_salient_step(
    position: Tensor, furthest: Tensor, valid: Tensor, options: WindowedOptions, starts: Tensor | None = None
) -> SalientStep:  # fmt: skip
    """Plan a step of every row from the `position`, `furthest`, and `valid` of a `SalientState`."""
    size, reach, num_slots = options.block_size, options.window * options.block_size, valid.shape[1]
    rows = torch.arange(len(position), device=position.device)[:, None]
    tokens = torch.arange(size, device=position.device)
    place, first = position % size, position // size * size  # first token of the block
    is_part = torch.ones_like(position, dtype=torch.bool) if starts is None else starts.to(position.device) == 0
    slot = ring_slot(position, num_slots, options.sinks)
    valid = valid.scatter(1, slot[:, None], True)
    # Tokens fed anew after a crop neither open blocks, nor compare tokens, nor vote.
    is_ahead = is_part & (position >= furthest)
    last = torch.where(is_ahead, position, torch.maximum(position, furthest) - 1)[:, None]
    left_position = last.clamp(min=0) // size * size - reach + tokens
    left_slot = ring_slot(left_position.clamp(min=0), num_slots, options.sinks)
    oldest = first[:, None] + size - reach
    voted = oldest + tokens
    voted_slot = ring_slot(voted.clamp(min=0), num_slots, options.sinks)
    voting = voting_places(options)
    is_voter = is_ahead & (place % voting.step == voting.start)
    is_vote = (voted >= 0) & (voted <= position[:, None]) & valid[rows, voted_slot] & is_voter[:, None]
    return SalientStep(
        slot=slot,
        is_part=is_part,
        valid=valid,
        opens=(is_ahead & (place == 0))[:, None, None],
        left_position=left_position,
        left_slot=left_slot,
        is_candidate=((left_position >= options.sinks) & valid[rows, left_slot])[:, None],
        place=place,
        is_compared=is_ahead[:, None],
        is_pending=((left_position + reach > last) & (left_position < oldest))[:, None],
        oldest=oldest[..., None],
        near=visible_slots(position, num_slots, size, options.window, options.sinks) & valid,
        voted_slot=voted_slot,
        is_vote=is_vote[:, None, None],
    )


@dataclass
class SalientState(RingState):
    """The decoder state of B rows: sinks, a ring of `window + 1` blocks, and N salient tokens per KV head.

    The salient tokens come after the slots in k and v. Tokens of the block that left the window are in the ring, and visible
    if they are among the N best, until a step has compared them with the kept ones.
    """

    rank: Tensor  # int64 [B, G, N], the ranks of the salient tokens; -1 for an empty slot
    cast: Tensor  # int32 [B, G, C], the votes so far for the oldest block in the window of the last token
    final: Tensor  # int32 [B, G, C], likewise for the block that has left it; -1 for tokens that cannot be salient

    @staticmethod
    @torch.inference_mode(False)  # tensors made in inference mode could not be written outside of it
    def empty(k: Tensor, v: Tensor, options: WindowedOptions) -> "SalientState":
        """Create an empty state whose sizes, dtypes, and device are those of k and v [B, T, G, ...]."""
        batch, num_kv_heads = len(k), k.shape[2]
        num_slots = options.sinks + (options.window + 1) * options.block_size
        length, size, count = num_slots + options.salient, options.block_size, options.salient
        return SalientState(
            block_size=size,
            position=k.new_zeros(batch, dtype=torch.int64),
            furthest=k.new_zeros(batch, dtype=torch.int64),
            k=k.new_zeros(batch, num_kv_heads, length, k.shape[-1]),
            v=v.new_zeros(batch, num_kv_heads, length, v.shape[-1]),
            valid=k.new_zeros(batch, num_slots, dtype=torch.bool),
            rank=k.new_full((batch, num_kv_heads, count), -1, dtype=torch.int64),
            cast=k.new_zeros(batch, num_kv_heads, size, dtype=torch.int32),
            final=k.new_full((batch, num_kv_heads, size), -1, dtype=torch.int32),
        )

    def start(self, options: WindowedOptions) -> SalientStart:
        """Return the votes so far, and the ranks and places of all tokens that can be salient."""
        size, reach, num_slots = self.block_size, options.window * self.block_size, self.valid.shape[1]
        last = torch.maximum(self.position, self.furthest)[:, None] - 1
        block = last.clamp(min=0) // size
        position = block * size - reach + torch.arange(size, device=last.device)  # of the tokens of `final`
        is_left = (position + reach > last)[:, None] & (self.final >= 0)  # and not in a slot yet
        rank = torch.cat([self.rank, rank_tokens(self.final.clamp(min=0), position[:, None], is_left)], 2)
        left = ring_slot(position.clamp(min=0), num_slots, options.sinks)[:, None].expand_as(self.final)
        held = num_slots + torch.arange(options.salient, device=last.device).expand_as(self.rank)
        return SalientStart(block, self.cast, rank, torch.cat([held, left], 2))


def continue_salient(
    q: Tensor, k: Tensor, v: Tensor, state: SalientState, options: WindowedOptions, *, starts: Tensor | None = None,
    fresh: bool = False, plan: SalientStep | None = None,
) -> Tensor:  # fmt: skip
    """Compute `salient_attention` for T new tokens of every row from the state of earlier tokens, and update the state.

    Gradients flow among new tokens, but not through the state; a single token after earlier ones gets none.

    Args:
        q, k, v, options: As in `salient_attention`.
        state: The state; changed in place.
        starts: int64 [B], index of the first real token among the new ones of each row.
        fresh: Whether the state is empty, so that it need not be read.
        plan: The plan of the step of a single token, if another layer has made it already.

    Returns:
        [B, T, H, V] in v's dtype; zeros for padding.
    """
    if q.shape[1] == 1 and not fresh:
        plan = plan or plan_salient_step(state.position, state.furthest, state.valid, options, starts)
        return salient_step(q, k, v, state, options, plan)
    batch, num_tokens, size, window = *q.shape[:2], options.block_size, options.window
    is_full = fresh and starts is None and not torch.compiler.is_compiling()
    if is_full and num_tokens <= (window - 1) * size:  # no token has voted or left
        with torch.no_grad():
            state.fill(k, v, options.sinks)
        return causal_softmax(q, k, v, options.scale)
    num_slots, before = state.valid.shape[1], state.position.clone()
    padding = torch.zeros_like(before) if starts is None else starts.to(q.device)
    is_key = torch.arange(num_tokens, device=q.device) >= padding[:, None]
    # The run begins with the block of the last token of the state.
    first_block = (before - 1).clamp(min=0) // size
    num_blocks = (num_tokens + size - 1) // size + (0 if fresh else 1)
    block = first_block[:, None] + torch.arange(num_blocks, device=q.device)
    num_held = 0 if fresh else num_slots + options.salient
    places = TokenPlaces(before, padding, num_tokens, num_held, num_slots, options.sinks, q.device)
    first = first_block[:, None] * size
    place = places.find(first + torch.arange((1 - window) * size, num_blocks * size, device=q.device))
    sinks = places.find(torch.arange(options.sinks, device=q.device).expand(batch, -1))[:, None]
    valid = is_key
    if not is_full:
        k, v = (x.masked_fill(~is_key[:, :, None, None], 0) for x in (k, v))
    if not fresh:
        valid = torch.cat([state.valid, is_key.new_zeros(batch, options.salient), is_key], 1)
        k, v = (torch.cat([held.transpose(1, 2), x.to(held.dtype)], 1) for held, x in ((state.k, k), (state.v, v)))
    keys = list_keys(k, v, place, valid, sinks, block, options, is_full)
    source, inverse = places.move_new(first, num_blocks * size)
    is_voter = take_tokens(is_key, source)
    if is_full:
        q = resize_tokens(q, num_blocks * size)
    else:
        q = MoveTokens.apply(q, source, inverse)
        position = first + torch.arange(num_blocks * size, device=q.device)
        is_voter = is_voter & (position >= state.furthest[:, None])
    o, chosen = attend_to_lists(q, is_voter, keys, options, None if fresh else state.start(options))
    with torch.no_grad():
        write_salient(state, chosen, keys, valid, places, before + num_tokens - padding, options)
    return resize_tokens(o, num_tokens) if is_full else MoveTokens.apply(o, inverse, source)


def write_salient(
    state: SalientState, chosen: SalientTokens, keys: KeyLists, valid: Tensor, places: TokenPlaces, end: Tensor,
    options: WindowedOptions,
) -> None:  # fmt: skip
    """Write a run, whose keys are `valid` bool [B, P], into a state, which then has seen `end` int64 [B] tokens."""
    num_slots, rows, heads = state.valid.shape[1], *(torch.arange(n, device=end.device) for n in state.rank.shape[:2])
    done = torch.maximum(state.position, state.furthest)
    # Index in the run of the last block. Rows that only repeat positions from before a crop keep their choice.
    last = (torch.maximum(end, done) - 1).clamp(min=0) // options.block_size - keys.block[:, 0]
    last, grows = last.clamp(max=keys.block.shape[1] - 1), (end > done)[:, None, None]
    kept = chosen.place[rows, :, last].clamp(min=0)
    for held, x in ((state.k, keys.k), (state.v, keys.v)):
        places.write(held[:, :, :num_slots].transpose(1, 2), x.transpose(1, 2))
        salient = held[:, :, num_slots:]
        new = x[rows[:, None, None], heads[:, None], kept].to(held.dtype)
        salient.copy_(torch.where(grows[..., None], new, salient))
    places.write(state.valid, valid)
    state.rank.copy_(torch.where(grows, chosen.rank[rows, :, last], state.rank))
    state.cast.copy_(torch.where(grows, chosen.votes[rows, :, last], state.cast))
    state.final.masked_fill_(grows, -1)
    state.position.copy_(end)


@torch.no_grad()
def salient_step(
    q: Tensor, k: Tensor, v: Tensor, state: SalientState, options: WindowedOptions, plan: SalientStep
) -> Tensor:
    """Compute `continue_salient` for one token of every row.

    The computation does not depend on positions, so one compiled graph serves all steps. Rows with `starts` of 1 do not take
    part: they get zeros, and their position, votes, and salient tokens stay as they are.
    """
    num_slots, num_kv_heads = state.valid.shape[1], k.shape[2]
    rows, heads = torch.arange(len(q), device=q.device)[:, None], torch.arange(num_kv_heads, device=q.device)
    for held, new in ((state.k, k[:, 0]), (state.v, v[:, 0])):
        held[rows[:, 0], :, plan.slot] = new.to(held.dtype)
    state.valid.copy_(plan.valid)
    # At the first token of a block, the votes for the block that leaves the window are final.
    cast = state.cast.masked_fill(~plan.is_candidate, -1)
    state.final.copy_(torch.where(plan.opens, cast, state.final))
    state.cast.masked_fill_(plan.opens, 0)
    # One token of that block is compared with the worst of the kept ones, and moves into its slot if it is better.
    rank = rank_tokens(state.final.clamp(min=0), plan.left_position[:, None], state.final >= 0)
    worst, index = state.rank.min(-1)
    new_rank = rank[rows, heads, plan.place[:, None]]  # [B, G]
    enters = (new_rank > worst) & plan.is_compared
    state.rank.scatter_(2, index[..., None], torch.where(enters, new_rank, worst)[..., None])
    new_slot = plan.left_slot[rows, plan.place[:, None]]
    for held in (state.k, state.v):
        moved = torch.where(enters, new_slot, num_slots + index)  # or stay
        held[rows, heads, num_slots + index] = held[rows, heads, moved]

    pending = rank.masked_fill(~plan.is_pending, -1)
    kept = state.rank.masked_fill(position_of(state.rank) >= plan.oldest, -1)
    threshold = torch.cat([kept, pending], 2).topk(options.salient, -1).values[..., -1:].clamp(min=0)
    near = plan.near[:, None].expand(-1, num_kv_heads, -1)
    left_slot = plan.left_slot[:, None].expand_as(pending)
    near = near.scatter(2, left_slot, near.gather(2, left_slot) | (pending >= threshold))
    seen = torch.cat([near, kept >= threshold], 2)[:, :, None]

    dtype = torch.promote_types(state.k.dtype, torch.float32)
    queries = q[:, 0].unflatten(1, (num_kv_heads, -1)).to(dtype)
    score = (queries @ state.k.to(dtype).mT) * options.scale  # [B, G, H / G, S + N]
    weight = score.masked_fill(~seen, float("-inf")).softmax(-1).masked_fill(~seen, 0)  # nan where nothing is seen
    o = weight @ state.v.to(dtype)

    lse = score[..., :num_slots].masked_fill(~plan.near[:, None, None], float("-inf")).logsumexp(-1)
    voted = plan.voted_slot[:, None, None].expand(-1, *score.shape[1:3], -1)
    state.cast.add_(count_votes(score.gather(3, voted)[..., None, :], lse[..., None], plan.is_vote))
    state.position.add_(plan.is_part)
    return o.masked_fill(~plan.is_part[:, None, None, None], 0).flatten(1, 2)[:, None].to(v.dtype)
