"""The decoder state of `salient.py`, whose size is constant.

A ring holds the window and one more block, so that `crop` can remove up to a block. Every row has its own position.

There are two functions for a single new token. `salient_step` always does the same work and reads no value on the host, so
one graph serves all steps: each compares one token of the block that has just left the window with the salient ones. On a
CPU without a graph, `eager_step` compares all tokens of a block when it leaves, and counts votes only if any are cast.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..state import RowState
from ..torch_layout import MoveTokens, TokenPlaces, resize_tokens, ring_slot, take_tokens, visible_slots
from .fused_softmax import causal_softmax
from .options import WindowedOptions
from .salient import (
    KeyLists,
    SalientStart,
    SalientTokens,
    attend_to_lists,
    choose_salient,
    count_votes,
    list_keys,
    list_sequences,
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
    place: Tensor  # int64 [B], the index of the new token in its block, and of the compared token in the block that has left
    is_compared: Tensor  # bool [B, 1], whether that token is compared with the salient ones in this step
    is_pending: Tensor  # bool [B, 1, C], which tokens that have left the window are neither kept nor dropped yet
    oldest: Tensor  # int64 [B, 1, 1], the first position in the window; after a crop, salient tokens may be in it again
    near: Tensor  # bool [B, S], the slots of sinks and window
    voted_slot: Tensor  # int64 [B, C], the slots of the first block of the window
    is_vote: Tensor  # bool [B, 1, 1, C], for which tokens of this block the new one votes


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
class SalientState(RowState):
    """The decoder state of B rows: S slots (sinks, and a ring of `window + 1` blocks) and N salient tokens per KV head.

    k and v have the S slots first, then the salient tokens. When a block leaves the window, its tokens stay in the ring
    until they have been compared with the salient ones; until then, the N tokens of highest rank among both are visible.
    """

    block_size: int  # tokens per block, C
    position: Tensor  # int64 [B], number of tokens that each row has seen
    furthest: Tensor  # int64 [B], the largest `position` of each row before a `crop`, or 0
    k: Tensor  # [B, G, S + N, D], keys
    v: Tensor  # [B, G, S + N, V], values
    valid: Tensor  # bool [B, S], the slots of sinks and ring that hold a token
    rank: Tensor  # int64 [B, G, N], the ranks of the salient tokens; -1 for an empty slot
    cast: Tensor  # int32 [B, G, C], the votes so far for the oldest block in the window of the last token
    final: Tensor  # int32 [B, G, C], the votes for the block that last left the window; -1 if not to be compared

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

    @torch.no_grad()
    def fill(self, k: Tensor, v: Tensor, sinks: int) -> None:
        """Write the sinks and the newest of T tokens per row into empty slots, and add T to `position`; keep the votes."""
        num_slots, token = self.valid.shape[1], torch.arange(k.shape[1], device=k.device)
        kept = torch.cat([token[:sinks], token[max(sinks, len(token) - num_slots + sinks) :]])
        slots = ring_slot(kept, num_slots, sinks)
        self.k[:, :, slots] = k[:, kept].transpose(1, 2)
        self.v[:, :, slots] = v[:, kept].transpose(1, 2)
        self.valid[:, slots] = True
        self.position.add_(len(token))

    def crop(self, count: int) -> None:
        """Remove the last `count` tokens of every row.

        Raises:
            ValueError: If a row has fewer than `count` tokens, or the ring has overwritten tokens that would be needed.
        """
        torch.maximum(self.furthest, self.position, out=self.furthest)
        behind = int((self.furthest - self.position).max()) + count
        if behind > self.block_size:
            reach = count - (behind - self.block_size)
            raise ValueError(f"count: got {count}, expected at most {reach}, the tokens that can still be removed.")
        shortest = int(self.position.min())
        if count > shortest:
            raise ValueError(f"count: got {count}, expected at most {shortest}, the length of the shortest row.")
        self.position.sub_(count)

    def start(self, options: WindowedOptions) -> SalientStart:
        """Return the votes so far, and the ranks and places of all tokens that can be salient."""
        size, reach, num_slots = self.block_size, options.window * self.block_size, self.valid.shape[1]
        last = torch.maximum(self.position, self.furthest)[:, None] - 1
        block = last.clamp(min=0) // size
        position = block * size - reach + torch.arange(size, device=last.device)  # of the tokens of `final`
        is_left = (position + reach > last)[:, None] & (self.final >= 0)  # and not compared yet
        rank = torch.cat([self.rank, rank_tokens(self.final.clamp(min=0), position[:, None], is_left)], 2)
        left = ring_slot(position.clamp(min=0), num_slots, options.sinks)[:, None].expand_as(self.final)
        held = num_slots + torch.arange(options.salient, device=last.device).expand_as(self.rank)
        return SalientStart(block, self.cast, rank, torch.cat([held, left], 2))


def continue_salient(
    q: Tensor, k: Tensor, v: Tensor, state: SalientState, options: WindowedOptions, *, starts: Tensor | None = None,
    fresh: bool = False, plan: "SalientStep | EagerStep | None" = None,
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
        plan = plan or plan_step(state, options, starts)
        if isinstance(plan, EagerStep):
            return eager_step(q, k, v, state, options, plan)
        return salient_step(q, k, v, state, options, plan)
    if fresh and starts is None and not torch.compiler.is_compiling():
        return start_salient(q, k, v, state, options)
    batch, num_tokens, size, window = *q.shape[:2], options.block_size, options.window
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
    k, v = (x.masked_fill(~is_key[:, :, None, None], 0) for x in (k, v))
    if not fresh:
        valid = torch.cat([state.valid, is_key.new_zeros(batch, options.salient), is_key], 1)
        k, v = (torch.cat([held.transpose(1, 2), x.to(held.dtype)], 1) for held, x in ((state.k, k), (state.v, v)))
    keys = list_keys(k, v, place, valid, sinks, block, options, is_full=False)
    source, inverse = places.move_new(first, num_blocks * size)
    position = first + torch.arange(num_blocks * size, device=q.device)
    is_voter = take_tokens(is_key, source) & (position >= state.furthest[:, None])
    q = MoveTokens.apply(q, source, inverse)
    with torch.no_grad():
        chosen = choose_salient(q, is_voter, keys, options, None if fresh else state.start(options))
    o = attend_to_lists(q, keys, chosen, options)
    with torch.no_grad():
        write_salient(state, chosen, keys, before + num_tokens - padding, options)
        for held, x in ((state.k, keys.k), (state.v, keys.v)):
            places.write(held[:, :, :num_slots].transpose(1, 2), x.transpose(1, 2))
        places.write(state.valid, valid)
        state.position.add_(num_tokens - padding)
    return MoveTokens.apply(o, inverse, source)


def start_salient(
    q: Tensor, k: Tensor, v: Tensor, state: SalientState, options: WindowedOptions, attends: bool = True
) -> Tensor:
    """Compute `continue_salient` without padding from an empty state; unless `attends`, only fill it, without outputs."""
    num_tokens, size, o = q.shape[1], options.block_size, v.new_empty(0)
    if attends and num_tokens <= options.tokens_before_drop:
        o, attends = causal_softmax(q, k, v, options.scale), False
    if num_tokens > (options.window - 1) * size:  # otherwise, no query has voted, and no token has left the window
        block = torch.arange((num_tokens + size - 1) // size, device=q.device)
        length = len(block) * size
        valid = torch.arange(length, device=q.device)[None] < num_tokens
        queries, keys_of_run, values_of_run = (resize_tokens(x, length) for x in (q, k, v))
        keys = list_sequences(keys_of_run, values_of_run, valid, block, options, is_full=True)
        with torch.no_grad():
            chosen = choose_salient(queries, valid.expand(len(q), -1), keys, options)
        if attends:
            o = resize_tokens(attend_to_lists(queries, keys, chosen, options), num_tokens)
        with torch.no_grad():
            write_salient(state, chosen, keys, state.position + num_tokens, options)
    state.fill(k, v, options.sinks)
    return o


def write_salient(
    state: SalientState, chosen: SalientTokens, keys: KeyLists, end: Tensor, options: WindowedOptions
) -> None:
    """Update the salient tokens and votes (not the position) of a state after new tokens, which end at `end` int64 [B]."""
    num_slots, rows, heads = state.valid.shape[1], *(torch.arange(n, device=end.device) for n in state.rank.shape[:2])
    done = torch.maximum(state.position, state.furthest)
    # Index of the last block among the new ones. Rows that only refill cropped positions keep their salient tokens.
    last = (torch.maximum(end, done) - 1).clamp(min=0) // options.block_size - keys.block[:, 0]
    last, grows = last.clamp(max=keys.block.shape[1] - 1), (end > done)[:, None, None]
    kept = chosen.place[rows, :, last].clamp(min=0)
    for held, x in ((state.k, keys.k), (state.v, keys.v)):
        salient = held[:, :, num_slots:]
        new = x[rows[:, None, None], heads[:, None], kept].to(held.dtype)
        salient.copy_(torch.where(grows[..., None], new, salient))
    state.rank.copy_(torch.where(grows, chosen.rank[rows, :, last], state.rank))
    state.cast.copy_(torch.where(grows, chosen.votes[rows, :, last], state.cast))
    state.final.masked_fill_(grows, -1)


@torch.no_grad()
def salient_step(
    q: Tensor, k: Tensor, v: Tensor, state: SalientState, options: WindowedOptions, plan: SalientStep
) -> Tensor:
    """Compute `continue_salient` for one token of every row.

    The computation does not depend on positions, so one compiled graph serves all steps. Rows whose token is padding
    (`starts` of 1 in `plan_step`) get zeros, and their position, votes, and salient tokens stay as they are.
    """
    num_slots, num_kv_heads, rows = state.valid.shape[1], k.shape[2], torch.arange(len(q), device=q.device)
    for held, new in ((state.k, k[:, 0]), (state.v, v[:, 0])):
        held[rows, :, plan.slot] = new.to(held.dtype)
    state.valid.copy_(plan.valid)
    near = plan.near[:, None].expand(-1, num_kv_heads, -1)
    seen = keep_best(state, near, options, plan) if options.salient else near
    mask = torch.zeros(seen.shape, device=q.device).masked_fill_(~seen, float("-inf"))[:, :, None]
    queries = q[:, 0].unflatten(1, (num_kv_heads, -1))
    o, score = attend_slots(queries, state.k, state.v, mask, options.scale)  # nan where nothing is seen

    if options.salient:
        lse = score[..., :num_slots].masked_fill(~plan.near[:, None, None], float("-inf")).logsumexp(-1)
        voted = plan.voted_slot[:, None, None].expand(-1, *score.shape[1:3], -1)
        state.cast.add_(count_votes(score.gather(3, voted)[..., None, :], lse[..., None], plan.is_vote))
    state.position.add_(plan.is_part)
    return o.masked_fill(~plan.is_part[:, None, None, None], 0).flatten(1, 2)[:, None].to(v.dtype)


def keep_best(state: SalientState, near: Tensor, options: WindowedOptions, plan: SalientStep) -> Tensor:
    """Compare one token that has left the window with the salient ones, in place, and return what the new token sees.

    `near` bool [B, G, S] says which slots hold its window and the sinks. The result, bool [B, G, S + N], has the slots of
    salient tokens, too.
    """
    num_slots, (batch, num_kv_heads, _) = state.valid.shape[1], state.rank.shape
    rows, heads = torch.arange(batch, device=near.device)[:, None], torch.arange(num_kv_heads, device=near.device)
    # At the first token of a block, the votes for the block that leaves the window are final.
    cast = state.cast.masked_fill(~plan.is_candidate, -1)
    state.final.copy_(torch.where(plan.opens, cast, state.final))
    state.cast.masked_fill_(plan.opens, 0)
    # One token of that block is compared with the worst salient token, and takes its slot if it is better.
    rank = rank_tokens(state.final.clamp(min=0), plan.left_position[:, None], state.final >= 0)
    worst, index = state.rank.min(-1)
    new_rank = rank[rows, heads, plan.place[:, None]]  # [B, G]
    enters = (new_rank > worst) & plan.is_compared
    state.rank.scatter_(2, index[..., None], torch.where(enters, new_rank, worst)[..., None])
    new_slot = plan.left_slot[rows, plan.place[:, None]]
    for held in (state.k, state.v):
        moved = torch.where(enters, new_slot, num_slots + index)  # else, the slot keeps its token
        held[rows, heads, num_slots + index] = held[rows, heads, moved]

    pending = rank.masked_fill(~plan.is_pending, -1)
    kept = state.rank.masked_fill(position_of(state.rank) >= plan.oldest, -1)
    threshold = torch.cat([kept, pending], 2).topk(options.salient, -1).values[..., -1:].clamp(min=0)
    left_slot = plan.left_slot[:, None].expand_as(pending)
    near = near.scatter(2, left_slot, near.gather(2, left_slot) | (pending >= threshold))
    return torch.cat([near, kept >= threshold], 2)


class EagerStep(NamedTuple):
    """What one new token per row reads and writes, for rows without padding that were not cropped."""

    slot: Tensor  # int64 [B], the slot of the new token
    mask: Tensor  # fp32 [B, 1, 1, S + N], 0 for the slots that it sees, else -inf
    opening: Tensor | None = None  # int64 [n], the rows in which a block leaves the window; None if there is none
    voters: Tensor | None = None  # int64 [n], the rows whose new token votes; None if there is none
    voted_slot: Tensor | None = None  # int64 [n, C], the slots of the block that they vote for; None without voters
    is_vote: Tensor | None = None  # bool [n, 1, 1, C], for which tokens of this block; None without voters


def plan_step(state: SalientState, options: WindowedOptions, starts: Tensor | None) -> SalientStep | EagerStep:
    """Plan a step of one token per row of a state; `starts` as in `continue_salient`."""
    position, furthest = state.position, state.furthest
    if not torch.compiler.is_compiling() and position.device.type == "cpu" and starts is None:
        # `salient_step` compares one token per step, so within a block some may be left to compare.
        is_pending = (state.final >= 0).any(2).any(1) & (position % options.block_size > 0)
        if not bool((is_pending | (furthest > position)).any()):
            return plan_eager_step(position, state.valid.shape[1], options)
    return plan_salient_step(position, furthest, state.valid, options, starts)


def plan_eager_step(position: Tensor, num_slots: int, options: WindowedOptions) -> EagerStep:
    """Plan a step from the number of tokens that each row has seen, int64 [B], and the number of slots S."""
    size, window, voting, device = options.block_size, options.window, voting_places(options), position.device
    place, block = position % size, position // size
    num_left = ((block - window + 1) * size - options.sinks)[:, None]  # tokens that have left the window
    is_kept = torch.arange(options.salient, device=device) < num_left
    seen = torch.cat([visible_slots(position, num_slots, size, window, options.sinks), is_kept], 1)
    mask = torch.zeros(seen.shape, device=device).masked_fill_(~seen, float("-inf"))[:, None, None]
    plan = EagerStep(ring_slot(position, num_slots, options.sinks), mask)
    opening = ((place == 0) & (block >= window)).nonzero()[:, 0]
    voters = ((place % voting.step == voting.start) & (block >= window - 1)).nonzero()[:, 0]
    if options.salient and len(opening):
        plan = plan._replace(opening=opening)
    if options.salient and len(voters):
        voted = ((block[voters] - window + 1) * size)[:, None] + torch.arange(size, device=device)
        is_vote = (voted <= position[voters, None])[:, None, None]
        voted_slot = ring_slot(voted, num_slots, options.sinks)
        plan = plan._replace(voters=voters, voted_slot=voted_slot, is_vote=is_vote)
    return plan


@torch.no_grad()
def eager_step(
    q: Tensor, k: Tensor, v: Tensor, state: SalientState, options: WindowedOptions, plan: EagerStep
) -> Tensor:
    """Compute `continue_salient` for one token of every row, if no token that left the window is still to be compared."""
    rows = torch.arange(len(q), device=q.device)
    for held, new in ((state.k, k[:, 0]), (state.v, v[:, 0])):
        held[rows, :, plan.slot] = new.to(held.dtype)
    state.valid[rows, plan.slot] = True
    if plan.opening is not None:
        choose_anew(state, plan.opening, options)
    o, score = attend_slots(q[:, 0].unflatten(1, (k.shape[2], -1)), state.k, state.v, plan.mask, options.scale)
    if plan.voters is not None:
        state.cast[plan.voters] += count_step_votes(score[plan.voters], plan, state.valid.shape[1])
    state.position.add_(1)
    return o.flatten(1, 2)[:, None].to(v.dtype)


def attend_slots(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Compute attention for one token per row, q [n, G, H / G, D], over k [n, G, L, D] and v [n, G, L, V].

    Returns o [n, G, H / G, V] in v's dtype, and the scores, mask added, [n, G, H / G, L] in at least fp32.
    """
    dtype = torch.promote_types(k.dtype, torch.float32)
    q, k = q.to(dtype), k.to(dtype)
    if torch.compiler.is_compiling():  # the compiler turns sums, unlike matrix products, into loops without copies
        score = (q[..., None, :] * k[:, :, None]).sum(-1) * scale + mask
        return (score.softmax(-1)[..., None] * v.to(dtype)[:, :, None]).sum(3).to(v.dtype), score
    score = (q @ k.mT).mul_(scale).add_(mask)
    return score.softmax(-1).to(v.dtype) @ v, score


def count_step_votes(score: Tensor, plan: EagerStep, num_slots: int) -> Tensor:
    """Count the votes int32 [n, G, C] of the voters of a step, from their scores [n, G, H / G, S + N]."""
    assert plan.voted_slot is not None and plan.is_vote is not None  # as there are voters
    near = score[..., :num_slots]
    voted = near.gather(3, plan.voted_slot[:, None, None].expand(-1, *score.shape[1:3], -1))
    return count_votes(voted[..., None, :], near.logsumexp(-1)[..., None], plan.is_vote)


def choose_anew(state: SalientState, rows: Tensor, options: WindowedOptions) -> None:
    """Choose salient tokens anew, in place, for `rows` [n], in which a block has just left the window."""
    num_slots, size, device = state.valid.shape[1], options.block_size, rows.device
    left = state.position[rows, None] - options.window * size + torch.arange(size, device=device)  # [n, C]
    left_rank = rank_tokens(state.cast[rows], left[:, None], (left >= options.sinks)[:, None])
    rank, index = torch.cat([state.rank[rows], left_rank], 2).topk(options.salient, -1)
    held = num_slots + torch.arange(options.salient, device=device).expand(len(rows), -1)
    slot = torch.cat([held, ring_slot(left, num_slots, options.sinks)], 1)[:, None].expand(-1, rank.shape[1], -1)
    slot = slot.gather(2, index)[..., None]
    for x in (state.k, state.v):
        x[rows, :, num_slots:] = x[rows].take_along_dim(slot, 2)
    state.rank[rows] = rank
    state.cast[rows], state.final[rows] = 0, -1
