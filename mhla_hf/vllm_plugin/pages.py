"""Decoder states in the pages of a serving engine, as rows of one pool that requests take and return.

A page holds the state of some KV heads of one layer for one request, in as many bytes as a page of keys and values: `rank`,
`cast`, `k`, and `v` of a `SalientState`. Its `valid` follows from the request's position. Nothing is cropped, and a step
compares all tokens of a block with the salient ones when the block leaves the window, so no other part is needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

from ..nn.settings import MHLASettings
from ..ops.torch_layout import slot_positions
from ..ops.windowed.options import WindowedOptions
from ..ops.windowed.salient_decoding import (
    EagerStep,
    SalientState,
    attend_slots,
    choose_anew,
    continue_salient,
    count_step_votes,
    plan_eager_step,
)

# What a page has of a state, in this order in memory: wide types come first, where they are aligned.
PARTS = ("rank", "cast", "k", "v")
CHUNK_BYTES = 4 * 2**20  # of the pages that a step copies at a time: more would leave the processor's cache


@dataclass(frozen=True)
class PageLayout:
    """What a page holds: the state of U KV heads of one request."""

    heads: int  # U
    num_slots: int  # for the sinks and the ring of recent tokens
    # Shapes [U, ...] and dtypes by name, in their order in memory.
    parts: dict[str, tuple[tuple[int, ...], torch.dtype]]

    @staticmethod
    def of(settings: MHLASettings, heads: int, head_dim: int, dtype: torch.dtype) -> "PageLayout":
        """Lay out the state of `heads` KV heads of width `head_dim`, with keys and values of `dtype`."""
        options = WindowedOptions(settings.block_size, settings.window, settings.sinks, salient=settings.salient)
        token = torch.empty(1, 1, heads, head_dim, dtype=dtype, device="meta")
        state = SalientState.empty(token, token, options)
        held = state.tensors()
        parts = {name: (tuple(held[name].shape[1:]), held[name].dtype) for name in PARTS}
        return PageLayout(heads, state.valid.shape[1], parts)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(shape for shape, _ in self.parts.values())

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return tuple(dtype for _, dtype in self.parts.values())


class PagePool:
    """The memory of all pages, uint8 or int8 [rows, bytes]; each row begins with what `layout` describes."""

    def __init__(self, memory: torch.Tensor, layout: PageLayout):
        self.layout = layout
        self.parts: dict[str, torch.Tensor] = {}  # views of the memory by name, [rows, U, ...]
        offset = 0
        for name, (shape, dtype) in layout.parts.items():
            num_bytes = prod(shape) * dtype.itemsize
            self.parts[name] = memory[:, offset : offset + num_bytes].view(dtype).unflatten(1, shape)
            offset += num_bytes

    def take(self, pages: torch.Tensor, *names: str) -> list[torch.Tensor]:
        """Copy the named parts of N requests from their P pages each, int64 [N, P], as one tensor [N, G, ...] per name."""
        shape = (len(pages), pages.shape[1] * self.layout.heads)
        parts = [self.parts[name] for name in names]
        # Flat, because `index_select` copies whole rows of a 2-D tensor, which is faster.
        return [x.flatten(1).index_select(0, pages.flatten()).view(*shape, *x.shape[2:]) for x in parts]

    def put(self, pages: torch.Tensor, **parts: torch.Tensor) -> None:
        """Copy parts like those of `take` back to pages [N, P]."""
        for name, part in parts.items():
            rows = self.parts[name].flatten(1)
            rows.index_copy_(0, pages.flatten(), part.reshape(pages.numel(), -1).to(rows.dtype))

    def clear(self, pages: torch.Tensor) -> None:
        """Reset pages, int64 [N, P], to the state of requests without tokens, whatever the pages hold."""
        for name, part in self.parts.items():
            part[pages] = -1 if name == "rank" else 0  # as in `SalientState.empty`

    def write_token(self, pages: torch.Tensor, slot: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write keys [N, G, D] and values [N, G, V] of one token per request into slots int64 [N] of its pages [N, P]."""
        heads = (pages.shape[1], self.layout.heads)
        for name, new in (("k", k), ("v", v)):
            held = self.parts[name]
            held[pages, :, slot[:, None]] = new.unflatten(1, heads).to(held.dtype)


def attend_pages(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pages: torch.Tensor, mask: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `attend_slots` for n pages, int64 [n], of the pool's k and v [rows, U, S, D]; q is [n, U * H / G * D]."""
    return attend_slots(q.unflatten(1, (k.shape[1], -1, k.shape[3])), k[pages], v[pages], mask, scale)


def attend_copied_pages(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pages: torch.Tensor, mask: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `attend_pages` without a compiler, in chunks of `CHUNK_BYTES`, since indexing copies the pages."""
    size = max(1, CHUNK_BYTES // (k[0].nbytes + v[0].nbytes))
    parts = [
        attend_pages(q[first : first + size], k, v, pages[first : first + size], mask[first : first + size], scale)
        for first in range(0, len(q), size)
    ]
    return parts[0] if len(parts) == 1 else (torch.cat([o for o, _ in parts]), torch.cat([x for _, x in parts]))


compiled_attend_pages = torch.compile(attend_pages, dynamic=True)
WARM_UP_PAGES = (1, 11)  # 1 has a graph of its own; 11, no size of a model, gets the graph of all others


def warm_up(layout: PageLayout, options: WindowedOptions, queries_per_kv: int, device: torch.device) -> None:
    """Compile `attend_pages` for pages of a layout before the first batch."""
    num_bytes = sum(prod(shape) * dtype.itemsize for shape, dtype in layout.parts.values())
    pool = PagePool(torch.zeros(2 * WARM_UP_PAGES[-1], 2 * num_bytes, dtype=torch.int8, device=device), layout)
    heads, num_keys, width = layout.parts["k"][0]
    for count in WARM_UP_PAGES:
        q = pool.parts["k"].new_zeros(count, heads * queries_per_kv, width)
        mask = torch.zeros(count, 1, 1, num_keys, device=device)
        pages = torch.arange(count, device=device)[:, None]
        PagedAttention(pool, options, is_compiled=True).attend(q, pages, mask)


class DecodeBatch(NamedTuple):
    """One new token for each of the first N requests of vLLM's batch, as all layers of a model see it."""

    position: torch.Tensor  # int64 [N], of the token
    step: EagerStep
    first: Sequence[int]  # indices of requests that have no earlier token


@dataclass
class PagedAttention:
    """Softmax over window, sinks, and salient tokens of the MHLA heads of one layer, with states in pages."""

    pool: PagePool
    options: WindowedOptions
    is_compiled: bool = False  # whether torch.compile runs the steps of one token

    def plan(self, position: torch.Tensor) -> DecodeBatch:
        """Plan a step of one token per request, at int64 positions [N], which all layers share."""
        first = [row for row, token in enumerate(position.tolist()) if token <= 0]
        return DecodeBatch(position, plan_eager_step(position, self.pool.layout.num_slots, self.options), first)

    def decode(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pages: torch.Tensor, batch: DecodeBatch
    ) -> torch.Tensor:
        """Compute attention for one new token of each of N requests, and update their pages, int64 [N, P], in place.

        q is [N, H, D], k and v are [N, G, D]; returns o [N, H, V].
        """
        pool, step, count = self.pool, batch.step, len(q)
        if batch.first:
            pool.clear(pages[batch.first])
        pool.write_token(pages, step.slot, k, v)
        if step.opening is not None:
            chosen = self.read_state(pages[step.opening], batch.position[step.opening])
            choose_anew(chosen, torch.arange(len(step.opening), device=pages.device), self.options)
            pool.put(pages[step.opening], **{name: getattr(chosen, name) for name in pool.parts})
        o, score = self.attend(q, pages, step.mask)
        if step.voters is not None:
            voting = score.view(count, k.shape[1], -1, score.shape[-1])[step.voters]
            (cast,) = pool.take(pages[step.voters], "cast")
            pool.put(pages[step.voters], cast=cast + count_step_votes(voting, step, pool.layout.num_slots))
        return o.view(count, q.shape[1], -1)

    def attend(self, q: torch.Tensor, pages: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend from q [N, H, D] to pages int64 [N, P] under a mask [N, 1, 1, S]; see `attend_pages`, where n is N * P."""
        call = compiled_attend_pages if self.is_compiled else attend_copied_pages
        queries = q.reshape(pages.numel(), -1)
        mask = mask if pages.shape[1] == 1 else mask.repeat_interleave(pages.shape[1], 0)
        return call(queries, self.pool.parts["k"], self.pool.parts["v"], pages.flatten(), mask, self.options.scale)

    def read_state(self, pages: torch.Tensor, position: torch.Tensor) -> SalientState:
        """Copy the pages [N, P] of N requests, whose numbers of tokens are `position` [N], into a `SalientState`."""
        parts = dict(zip(self.pool.parts, self.pool.take(pages, *self.pool.parts), strict=True))
        return SalientState(
            block_size=self.options.block_size,
            position=position.clone(),
            furthest=torch.zeros_like(position),
            valid=slot_positions(position, self.pool.layout.num_slots, self.options.sinks) >= 0,
            final=torch.full_like(parts["cast"], -1),
            **parts,
        )

    def prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pages: torch.Tensor, start: int
    ) -> torch.Tensor:
        """Compute o [T, H, V] for T tokens, q [T, H, D], of a request from position `start` on; update its pages [1, P]."""
        q, k, v = q[None], k[None], v[None]
        position = torch.full((1,), start, device=pages.device)
        state = SalientState.empty(k, v, self.options) if start == 0 else self.read_state(pages, position)
        step = plan_eager_step(position, self.pool.layout.num_slots, self.options)  # used only if T is 1
        o = continue_salient(q, k, v, state, self.options, fresh=start == 0, plan=step)
        self.pool.put(pages, **{name: getattr(state, name) for name in self.pool.parts})
        return o[0]
