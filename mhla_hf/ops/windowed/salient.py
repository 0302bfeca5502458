"""Salient tokens: those that stay near after they have left the window, by the votes of later queries.

Every fourth query of a block votes for the tokens of the block that leaves the window second: with their softmax weights
over window and sinks, the largest among the query heads of a KV head. When a block leaves the window, each KV head keeps the
N tokens with the most votes among its own and those kept before; of equal ones the earlier. All others are far from then on.

Votes are final a block before they count. So while the queries of one block run, a decoder compares the tokens of the oldest
block in the window with the kept ones, one per step; the result is what the queries of the next block see.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..state import RowState
from .inputs import WindowedOptions

NEVER = float("-inf")  # the votes for what cannot be kept
# Votes are whole numbers of this part of a weight: their sum then does not depend on the order, and weights that saturate at
# 1 are equal rather than different by rounding. fp32 counts those of 256 queries.
VOTE_UNITS = 2.0**16
VOTE_EVERY = 4  # queries: votes then cost a quarter of what they cost if all vote


def voting_places(options: WindowedOptions) -> slice:
    """Return which queries of a block vote."""
    every = min(VOTE_EVERY, options.block_size)
    return slice(every - 1, None, every)


@dataclass
class SalientState(RowState):
    """The salient tokens of a decoder, for B rows: N + C slots per KV head, of which the next block can use N.

    Args:
        k, v, features: [B, G, N + C, ..], keys, values, and features of the keys for the far part.
        votes: [B, G, N + C], the votes for the token in each slot; -inf if the slot has none.
        position: int64 [B, G, N + C], the positions of the tokens; -1 if the slot has none.
        now: bool [B, G, N + C], the tokens that queries of the block of the last token see.
        next: bool [B, G, N + C], those that queries of the block after it see, as far as this is decided: N of them, empty
            slots included.
        cast: [B, G, C], the votes that the block of the last token has cast so far.
        final: [B, G, C], the votes for the tokens of the oldest block in the window.
        decided: int64 [B], the first position whose step has not yet compared a token. More than the number of tokens after
            a crop to an earlier block, whose tokens are all compared already.
        voted: int64 [B], the first position whose query has not yet voted; after a crop, votes of removed tokens count.
    """

    k: Tensor
    v: Tensor
    features: Tensor
    votes: Tensor
    position: Tensor
    now: Tensor
    next: Tensor
    cast: Tensor
    final: Tensor
    decided: Tensor
    voted: Tensor

    @staticmethod
    @torch.inference_mode(False)
    def empty(k: Tensor, v: Tensor, num_features: int, options: WindowedOptions) -> "SalientState":
        """Create a state without tokens, for k and v [B, T, G, ..] like these."""
        batch, _, num_kv_heads, _ = v.shape
        slots, dtype = options.salient + options.block_size, torch.promote_types(k.dtype, torch.float32)

        def make(*shape: int, dtype: torch.dtype) -> Tensor:
            return k.new_zeros(batch, *shape, dtype=dtype)

        is_next = make(num_kv_heads, slots, dtype=torch.bool)
        is_next[..., : options.salient] = True
        return SalientState(
            k=make(num_kv_heads, slots, k.shape[-1], dtype=k.dtype),
            v=make(num_kv_heads, slots, v.shape[-1], dtype=v.dtype),
            features=make(num_kv_heads, slots, num_features, dtype=k.dtype),
            votes=make(num_kv_heads, slots, dtype=dtype).fill_(NEVER),
            position=make(num_kv_heads, slots, dtype=torch.int64).fill_(-1),
            now=torch.zeros_like(is_next),
            next=is_next,
            cast=make(num_kv_heads, options.block_size, dtype=dtype),
            final=make(num_kv_heads, options.block_size, dtype=dtype),
            decided=make(dtype=torch.int64),
            voted=make(dtype=torch.int64),
        )

    def open_block(self, opens: Tensor) -> None:
        """Move the rows bool [B] whose next token is the first of a block on to that block, in place."""
        opens = opens[:, None, None]
        self.now.copy_(torch.where(opens, self.next, self.now))
        self.final.copy_(torch.where(opens, self.cast, self.final))
        self.cast.mul_(~opens)

    def forget_next(self, options: WindowedOptions) -> None:
        """Undo all decisions for the next block, in place: it sees what the block of the last token sees."""
        now = self.now & (self.position >= 0)
        num_empty = options.salient - now.sum(-1, keepdim=True)
        self.next.copy_(now | (~now & ((~now).cumsum(-1) <= num_empty)))
        self.position.masked_fill_(~now, -1)
        self.votes.masked_fill_(~now, NEVER)

    def seen_by(self, position: Tensor, options: WindowedOptions) -> Tensor:
        """Return which slots the query at `position` int64 [B] sees, bool [B, G, N + C].

        After a crop to an earlier block, some tokens are in its window again.
        """
        oldest = (position // options.block_size - options.window + 1) * options.block_size  # in the window
        return self.now & (self.position >= 0) & (self.position < oldest[:, None, None])

    def tokens_of(self, is_member: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return votes and slots [B, G, count] of the tokens in some slots, bool [B, G, N + C], the best first."""
        order = self.position.argsort(-1)  # of equal ones the earlier is better
        votes = self.votes.masked_fill(~is_member | (self.position < 0), NEVER).gather(-1, order)
        votes, slots = keep_best(votes, order)
        return votes[..., :count], slots[..., :count]


class SalientTokens(NamedTuple):
    """A choice for M blocks of a run. Tokens are numbered: first the slots of a state, if there is one, then the run's.

    Args:
        kept: int64 [B, G, M, N], the tokens that stay near the queries of each block; -1 for none.
        left: int64 [B, G, M, C], the tokens that become far at each block; -1 for none.
        tokens: int64 [B, G, M, N], the best tokens so far, from which the choice for the next block starts. They are `kept`,
            except for the block of a state's last token, which has decided something already.
        votes: [B, G, M, N], the votes for `tokens`.
    """

    kept: Tensor
    left: Tensor
    votes: Tensor
    tokens: Tensor


def cast_votes(q: Tensor, k: Tensor, lse: Tensor, is_vote: Tensor, scale: float) -> Tensor:
    """Sum the votes of some queries for some tokens.

    q is [.., H / G, T, D], k [.., S, D], and lse [.., H / G, T] that of window and sinks; `is_vote` bool [.., T, S] says
    which queries may vote for which tokens. Returns [.., S] in lse's dtype.
    """
    score = (q.to(lse.dtype) @ k.to(lse.dtype).mT.unsqueeze(-3)) * scale
    weight = torch.exp(score - lse[..., None]).amax(-3)
    return torch.where(is_vote, (weight * VOTE_UNITS).round(), 0).sum(-2)


def keep_best(votes: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Sort tokens [.., S] by their votes, the best first, ties as they are; tokens with `NEVER` as votes become -1."""
    votes, order = votes.sort(dim=-1, descending=True, stable=True)
    return votes, tokens.gather(-1, order).masked_fill(votes == NEVER, -1)


@torch.no_grad()
def choose_salient(
    votes: Tensor,
    block_index: Tensor,
    options: WindowedOptions,
    state: SalientState | None = None,
    before: Tensor | None = None,
) -> SalientTokens:
    """Choose salient tokens from their votes [B, G, M, C], `NEVER` for what is no candidate.

    `block_index` is [B or 1, M]; `before` int64 [B] is the number of tokens in the state, if there is one.
    """
    batch, num_kv_heads, num_blocks, size = votes.shape
    count, window = options.salient, options.window
    num_slots = 0 if state is None else state.position.shape[-1]
    numbers = num_slots + torch.arange(num_blocks * size, device=votes.device).view(num_blocks, size)
    best = votes.new_full((batch, num_kv_heads, count), NEVER)
    tokens = torch.full_like(best, -1, dtype=torch.int64)
    none = tokens.new_full((batch, num_kv_heads, size), -1)
    # The step of the block before that compares each token of the block that leaves, [B or 1, M, C].
    step = block_index[..., None] * size + torch.arange(-size, 0, device=votes.device)
    is_new = (block_index >= window)[..., None].expand_as(step)
    seen, last_block = tokens, None
    if state is not None and before is not None:
        best, tokens = state.tokens_of(state.next, count)
        seen = state.tokens_of(state.seen_by(before - 1, options), count)[1]
        is_new = is_new & (step >= torch.maximum(state.decided, before)[:, None, None])
        last_block = (before - 1).clamp(min=0) // size
    is_start = block_index == 0
    rows: list[tuple[Tensor, ...]] = []
    for block in range(num_blocks):
        left = none
        if block >= window:
            if state is None:
                best = best.masked_fill(is_start[:, block, None, None], NEVER)  # of packed sequences
            new = votes[:, :, block - window].masked_fill(~is_new[:, None, block], NEVER)
            both = torch.cat([tokens, numbers[block - window].expand_as(none)], -1)
            best, both = keep_best(torch.cat([best, new], -1), both)
            best, tokens, left = best[..., :count], both[..., :count], both[..., count:]
        kept = tokens
        if last_block is not None:
            kept = torch.where((block_index[:, block] <= last_block)[:, None, None], seen, tokens)
        rows.append((kept, left, best, tokens))
    return SalientTokens(*(torch.stack(x, 2) for x in zip(*rows, strict=True)))


class SalientEnd(NamedTuple):
    """What a decoder goes on with after a run, for the block of the last token of each row; see `SalientState`.

    Args:
        seen, next: int64 [B, G, N], the tokens that the queries of the block see, and those of the next block so far.
        left: int64 [B, G, C], the tokens that become far at the next block, as far as this is decided.
        cast, final: [B, G, C], votes.
    """

    seen: Tensor
    next: Tensor
    left: Tensor
    cast: Tensor
    final: Tensor


@torch.no_grad()
def finish_salient(
    choice: SalientTokens,
    votes: Tensor,
    is_candidate: Tensor,
    block_index: Tensor,
    end: Tensor,
    options: WindowedOptions,
    state: SalientState,
    before: Tensor,
) -> SalientEnd:
    """Return the state of a choice after `end` tokens int64 [B]; `votes` [B, G, M, C] and bool `is_candidate` [B, M, C]."""
    size, window, count = options.block_size, options.window, options.salient
    rows, num_slots = torch.arange(len(end), device=end.device), state.position.shape[-1]
    last_block = (end - 1).clamp(min=0) // size
    last = last_block - block_index[:, 0]  # the place of this block among those of the run

    def at(place: Tensor, x: Tensor) -> Tensor:  # zeros before the run
        return x.transpose(1, 2)[rows, place.clamp(min=0)] * (place >= 0).view(-1, *[1] * (x.dim() - 2))

    oldest = last - window + 1
    place = torch.arange(size, device=end.device)
    step = last_block[:, None] * size + place
    is_new = (step < end[:, None]) & (step >= torch.maximum(state.decided, before)[:, None]) & (oldest >= 0)[:, None]
    is_new = is_new & is_candidate.expand(len(end), -1, -1)[rows, oldest.clamp(min=0)]
    final = at(oldest, votes)
    new = final.masked_fill(~is_new[:, None], NEVER)
    tokens = (num_slots + oldest[:, None] * size + place)[:, None].expand(-1, votes.shape[1], -1)
    both = torch.cat([choice.votes.transpose(1, 2)[rows, last], new], -1)
    _, ordered = keep_best(both, torch.cat([choice.tokens.transpose(1, 2)[rows, last], tokens], -1))
    seen = choice.kept.transpose(1, 2)[rows, last]
    return SalientEnd(seen, ordered[..., :count], ordered[..., count:], at(oldest + 1, votes), final)


@torch.no_grad()
def write_salient(
    state: SalientState, after: SalientEnd, k: Tensor, v: Tensor, features: Tensor, position: Tensor, votes: Tensor
) -> None:
    """Put the tokens of `after` into the slots of a state, in place, from those of all tokens [B, G, T, ..]."""
    count, size = after.seen.shape[-1], after.left.shape[-1]
    is_same = (after.next[..., :, None] == after.seen[..., None, :]) & (after.next >= 0)[..., None]
    stays, is_fresh = is_same.any(-2), (after.next >= 0) & ~is_same.any(-1)
    order = (~is_fresh).to(torch.int8).sort(dim=-1, stable=True).indices[..., :size]
    fresh, is_fresh = after.next.gather(-1, order), is_fresh.gather(-1, order)
    if count < size:  # no more can be fresh than are kept
        fresh, is_fresh = (torch.nn.functional.pad(x, (0, size - count)) for x in (fresh, is_fresh))
    is_empty = after.seen < 0
    num_empty = (after.next < 0).sum(-1, keepdim=True)
    stays = stays | (is_empty & (is_empty.cumsum(-1) <= num_empty))
    tokens = torch.cat([after.seen, fresh.masked_fill(~is_fresh, -1)], -1)
    index = tokens.clamp(min=0)
    for held, x in ((state.k, k), (state.v, v), (state.features, features)):
        held.copy_(x.gather(2, index[..., None].expand(*index.shape, x.shape[-1])))
    state.position.copy_(position.gather(2, index).masked_fill(tokens < 0, -1))
    state.votes.copy_(votes.gather(2, index).masked_fill(tokens < 0, NEVER))
    state.now.copy_(torch.cat([~is_empty, torch.zeros_like(is_fresh)], -1))
    state.next.copy_(torch.cat([stays, is_fresh], -1))
    state.cast.copy_(after.cast)
    state.final.copy_(after.final)


@torch.no_grad()
def decide_one(
    state: SalientState,
    k: Tensor,
    v: Tensor,
    features: Tensor,
    votes: Tensor,
    position: Tensor,
    is_candidate: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compare one token per row with the kept ones, in place, and return what becomes far at the next block.

    k, v, and features are [B, G, ..], votes [B, G], position int64 [B], and `is_candidate` bool [B]. Returns features,
    values, and position of the token that leaves, [B, G, ..], and whether one does, bool [B, G].
    """
    worst_votes = state.votes.masked_fill(~state.next, float("inf"))
    worst = (worst_votes == worst_votes.amin(-1, keepdim=True)) & state.next
    worst = state.position.masked_fill(~worst, -2).argmax(-1, keepdim=True)  # of equal ones the last
    free = (~state.now & ~state.next).to(torch.int8).argmax(-1, keepdim=True)
    enters = is_candidate[:, None] & (votes > state.votes.gather(-1, worst)[..., 0])  # [B, G]

    def swap(held: Tensor, new: Tensor) -> Tensor:
        """Write a token into the free slot where it enters; return the token that leaves."""
        new = new.to(held.dtype)
        rest = [1] * (held.dim() - 3)
        shape = (*worst.shape, *held.shape[3:])
        pick = enters.view(*enters.shape, *rest)
        at_free, at_worst = (index.view(*index.shape, *rest).expand(shape) for index in (free, worst))
        leaves = torch.where(pick, held.gather(2, at_worst)[:, :, 0], new)
        held.scatter_(2, at_free, torch.where(pick, new, held.gather(2, at_free)[:, :, 0])[:, :, None])
        return leaves

    left = [swap(held, new) for held, new in ((state.features, features), (state.v, v))]
    swap(state.k, k)
    swap(state.votes, votes)
    left_position = swap(state.position, position[:, None].expand_as(votes))
    state.next.scatter_(2, worst, state.next.gather(2, worst) & ~enters[..., None])
    state.next.scatter_(2, free, state.next.gather(2, free) | enters[..., None])
    leaves = torch.where(enters, left_position >= 0, is_candidate[:, None])
    return left[0], left[1], left_position, leaves
