"""Decoder states in the pages of a serving engine, as rows of one pool that requests take and return.

A page holds the state of some KV heads of one layer for one request, in as many bytes as a page of keys and values. It is a
`WindowedState` or a `SalientState` without what follows from the request's position: which slots are filled, and their
rotation (`RotationTable`). The ring of a `WindowedState` has one block less, as an engine never takes tokens back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch

from ..nn.features import FeatureMap
from ..nn.settings import MHLASettings
from ..ops.api import choose_implementation
from ..ops.torch_layout import slot_positions
from ..ops.windowed.decays import Decays
from ..ops.windowed.decoding import KeyMap, StepPlan, WindowedState, attend_token, continue_windowed, plan_step
from ..ops.windowed.fused_softmax import make_mask
from ..ops.windowed.inputs import WindowedInputs, WindowedOptions
from ..ops.windowed.salient_decoding import SalientState, SalientStep, continue_salient, plan_salient_step, salient_step
from ..ops.windowed.triton_step import page_step, small_page_call

# What a page has of a state, in this order in memory: wide types come first, where they are aligned.
PARTS = ("rank", "cast", "final", "running", "pending", "k", "v")
# Values of parts in a state without tokens, as in `SalientState.empty`; all other parts are 0.
EMPTY = {"rank": -1, "final": -1}


@dataclass(frozen=True)
class PageLayout:
    """What a page holds: the state of U KV heads of one request."""

    heads: int  # U
    num_slots: int  # of the ring, with sinks
    # Shapes [U, ...] and dtypes by name, in their order in memory.
    parts: dict[str, tuple[tuple[int, ...], torch.dtype]]

    @staticmethod
    def of(settings: MHLASettings, heads: int, head_dim: int, dtype: torch.dtype) -> "PageLayout":
        """Lay out the state of heads of this width in a model of this dtype; sums are at least fp32."""
        size, window, sinks = settings.block_size, settings.window, settings.sinks
        k = v = torch.empty(1, 1, heads, head_dim, dtype=dtype, device="meta")
        state: Any
        if settings.core == "salient":
            state = SalientState.empty(k, v, WindowedOptions(size, window, sinks, salient=settings.salient))
        else:
            num_features = FeatureMap(settings.feature_map, 0, head_dim).num_features
            if not settings.windowed:
                window, sinks, k = 1, 0, k.new_empty(1, 1, heads, num_features)
            options = WindowedOptions(size, window - 1, sinks)  # for a ring of one block less
            state = WindowedState.empty(k, v, settings.num_decays, num_features, options)
        held = {name: state.tensors()[name] for name in PARTS if name in state.tensors()}
        parts = {name: (tuple(x.shape[1:]), x.dtype) for name, x in held.items()}
        return PageLayout(heads, state.valid.shape[1], parts)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(shape for shape, _ in self.parts.values())

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return tuple(dtype for _, dtype in self.parts.values())


class RotationTable:
    """Cosines and sines of the rotary embedding by position, and the plan of a batch, which layers of a model share.

    The first layer writes those of a batch's new tokens, so the table has all positions that pages hold. Layers without a
    rotation to undo share another table, of width 0.
    """

    def __init__(self, num_positions: int):
        self.num_positions = num_positions
        self.rows: torch.Tensor | None = None
        self.plan: Any = None

    def allocate(self, cos_sin: torch.Tensor) -> None:
        """Allocate the table, unless it exists, for cosines and sines like cos_sin [..., 1, A]."""
        if self.rows is None:
            self.rows = cos_sin.new_zeros(self.num_positions + 1, *cos_sin.shape[1:])

    def write(self, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
        """Store cos_sin [N, 1, A] for int64 positions [N]. Position -1 stands for padding; its row is never read."""
        assert self.rows is not None
        self.rows[positions] = cos_sin

    def read(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the cosines and sines at int64 positions of any shape, [..., 1, A]; arbitrary at negative positions."""
        assert self.rows is not None
        return self.rows[positions.clamp(min=0)]


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
        # Of a 2-D tensor, PyTorch copies whole rows.
        return [x.flatten(1).index_select(0, pages.flatten()).view(*shape, *x.shape[2:]) for x in parts]

    def put(self, pages: torch.Tensor, **parts: torch.Tensor) -> None:
        """Copy parts like those of `take` back to pages [N, P]."""
        for name, part in parts.items():
            rows = self.parts[name].flatten(1)
            rows.index_copy_(0, pages.flatten(), part.reshape(-1, rows.shape[1]).to(rows.dtype))

    def put_state(self, pages: torch.Tensor, state: Any) -> None:
        """Copy the states of N requests, a `WindowedState` or a `SalientState`, to their pages [N, P]."""
        self.put(pages, **{name: getattr(state, name) for name in self.parts})

    def clear(self, pages: torch.Tensor) -> None:
        """Fill pages int64 [N, P], which may hold anything, with the state of requests without tokens."""
        for name, part in self.parts.items():
            part[pages] = EMPTY.get(name, 0)

    def write_token(self, pages: torch.Tensor, slot: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write keys [N, G, D] and values [N, G, V] of one token per request into slots int64 [N] of its pages."""
        heads = (pages.shape[1], self.layout.heads)
        for name, new in (("k", k), ("v", v)):
            held = self.parts[name]
            held[pages, :, slot[:, None]] = new.unflatten(1, heads).to(held.dtype)

    def put_slots(self, pages: torch.Tensor, slot: torch.Tensor, state: SalientState) -> None:
        """Copy the keys and values in one slot per head, int64 [N, G], of the states of N requests to their pages [N, P]."""
        index = slot[..., None, None]
        slot, head = slot.unflatten(1, (-1, self.layout.heads)), torch.arange(self.layout.heads, device=slot.device)
        for name in ("k", "v"):
            held = self.parts[name]
            new = getattr(state, name).take_along_dim(index, 2).unflatten(1, slot.shape[1:])[..., 0, :]
            held[pages[..., None], head, slot] = new

    def read_keys(self, pages: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        """Return the keys in slots int64 [N] of the pages of N requests, [N, G, D]."""
        return self.parts["k"][pages, :, slot[:, None]].flatten(1, 2)


class NewTokens(NamedTuple):
    """T new tokens, of one or of several requests, as a layer reads them."""

    q: torch.Tensor  # [T, H, D], features if the near part is linear
    k: torch.Tensor  # [T, G, D], likewise
    v: torch.Tensor  # [T, G, V]
    q_features: torch.Tensor  # [T, H, F], queries of the far part; F is 0 without one
    cos_sin: torch.Tensor  # [T, 1, A], the rotation that the far part undoes; A is 0 without one

    def part(self, tokens: slice) -> "NewTokens":
        return NewTokens(*(x[tokens] for x in self))


class DecodeBatch(NamedTuple):
    """One new token for each of N requests, as all layers of a model see it."""

    position: torch.Tensor  # int64 [N], of the token
    plan: StepPlan
    # For Triton: the rotation of the token that enters the pending summary, [N, 1, 1, A]. PyTorch reads the fields below.
    kernel_cos_sin: torch.Tensor | None
    mask: torch.Tensor | None = None  # [N, 1, 1, S], see `make_mask`
    first: Sequence[int] = ()  # indices of requests that have no earlier token
    opening: Sequence[int] = ()  # indices of requests whose token begins a block, so that another leaves the window


@dataclass
class PagedAttention:
    """Near and far attention of the MHLA heads of one layer, with states in pages; fields as in `WindowedInputs`."""

    pool: PagePool
    table: Any
    map_keys: KeyMap
    decays: Decays
    balance: torch.Tensor | None
    options: WindowedOptions

    def plan(self, position: torch.Tensor, tokens: NewTokens) -> DecodeBatch:
        """Plan a step of one token per request, at int64 positions [N], which layers of the same kind can share."""
        q, k, v, *_ = tokens
        options = self.options
        size, window = options.block_size, options.window
        plan = plan_step(position, self.pool.layout.num_slots, options)
        if choose_implementation(options.impl, small_page_call, q[None], k[None], v[None]) == "triton":
            return DecodeBatch(position, plan, self.table.read(position - (window - 1) * size)[:, None].to(k.dtype))
        mask, positions = make_mask(plan.visible[:, None, None], k.dtype), position.tolist()
        first = [row for row, token in enumerate(positions) if token <= 0]
        opening = [row for row, token in enumerate(positions) if token >= window * size and token % size == 0]
        return DecodeBatch(position, plan, None, mask, first, opening)

    def decode(self, tokens: NewTokens, pages: torch.Tensor, batch: DecodeBatch) -> torch.Tensor:
        """Attend by one token of each of N requests; return [N, H, V] in the dtype of the sums, and update pages [N, P]."""
        pool, options, plan, position = self.pool, self.options, batch.plan, batch.position
        q, k, v, q_features, _ = tokens
        if batch.kernel_cos_sin is not None:
            pool.write_token(pages, plan.slot, k, v)
            old_k = pool.read_keys(pages, plan.old_slot)
            k_features = self.map_keys(old_k[:, None], batch.kernel_cos_sin)[:, 0]
            return page_step(q, q_features, k_features, pool.parts, pages, position, self.decays, self.balance, options)
        if batch.first:
            pool.clear(pages[batch.first])
        if batch.opening:
            self.open_block(pages[batch.opening], position[batch.opening])
        pool.write_token(pages, plan.slot, k, v)
        running, held_k, held_v = pool.take(pages, "running", "k", "v")
        assert batch.mask is not None  # without kernels, `plan` has made one
        inputs = WindowedInputs(q, k, v, q_features, self.decays, self.balance, options)
        return attend_token(q, q_features, held_k, held_v, running, batch.mask, plan.block, inputs)

    def open_block(self, pages: torch.Tensor, position: torch.Tensor) -> None:
        """Add the block that leaves the window to the sums in pages [N, P], before tokens at `position` [N] open another.

        PyTorch sums this block at once, so its steps need no pending summary.
        """
        options, running = self.options, self.pool.take(pages, "running")[0]
        decay = torch.exp(self.decays.log_rate.to(running.dtype))[..., None, None]
        left = position // options.block_size - options.window
        entered = self.read_state(pages, position).summary(left, options.block_size, self.map_keys, options)
        self.pool.put(pages, running=decay * running + decay**options.window * entered[:, :, None])

    def read_state(self, pages: torch.Tensor, position: torch.Tensor) -> WindowedState:
        """Copy the pages [N, P] of N requests, with `position` tokens [N] each, into a state."""
        held = slot_positions(position, self.pool.layout.num_slots, self.options.sinks)
        running, pending, k, v = self.pool.take(pages, "running", "pending", "k", "v")
        return WindowedState(
            block_size=self.options.block_size, k=k, v=v, valid=held >= 0, cos_sin=self.table.read(held).to(k.dtype),
            running=running, pending=pending, position=position.clone(), furthest=position.clone(),
        )  # fmt: skip

    def prefill(self, tokens: NewTokens, pages: torch.Tensor, start: int) -> torch.Tensor:
        """Attend by T new tokens of one request, the first at `start`; return [T, H, V], and update the pages [1, P]."""
        pool, position = self.pool, torch.full((1,), start, device=pages.device)
        if start and len(tokens.q) == 1:
            return self.decode(tokens, pages, self.plan(position, tokens))
        if start == 0:
            pool.clear(pages)
        state = self.read_state(pages, position)
        q, k, v, q_features, cos_sin = (x[None] for x in tokens)
        inputs = WindowedInputs(q, k, v, q_features, self.decays, self.balance, self.options)
        o = continue_windowed(inputs, self.map_keys, state, fresh=start == 0, cos_sin=cos_sin)
        pool.put_state(pages, state)
        return o[0]


class SalientBatch(NamedTuple):
    """One new token for each of N requests, as all layers of salient heads see it."""

    position: torch.Tensor  # int64 [N], of the token
    valid: torch.Tensor  # bool [N, S], the slots that hold a token
    step: SalientStep
    first: Sequence[int]  # indices of requests that have no earlier token


@dataclass
class PagedSalientAttention:
    """Softmax over window, sinks, and salient tokens of some heads of one layer; methods as in `PagedAttention`."""

    pool: PagePool
    options: WindowedOptions

    def plan(self, position: torch.Tensor, tokens: NewTokens) -> SalientBatch:
        valid = slot_positions(position, self.pool.layout.num_slots, self.options.sinks) >= 0
        step = plan_salient_step(position, torch.zeros_like(position), valid, self.options)
        return SalientBatch(position, valid, step, [row for row, token in enumerate(position.tolist()) if token <= 0])

    def decode(self, tokens: NewTokens, pages: torch.Tensor, batch: SalientBatch) -> torch.Tensor:
        pool = self.pool
        if batch.first:
            pool.clear(pages[batch.first])
        state = self.read_state(pages, batch)
        q, k, v = (x[:, None] for x in tokens[:3])
        worst = state.rank.min(-1).indices  # the salient token that the step may replace
        o = salient_step(q, k, v, state, self.options, batch.step)
        pool.put(pages, rank=state.rank, cast=state.cast, final=state.final)
        for slot in (batch.step.slot[:, None].expand_as(worst), batch.valid.shape[1] + worst):
            pool.put_slots(pages, slot, state)
        return o[:, 0]

    def read_state(self, pages: torch.Tensor, batch: SalientBatch) -> SalientState:
        """Copy the pages [N, P] of N requests into a state."""
        return SalientState(
            block_size=self.options.block_size,
            position=batch.position.clone(),
            furthest=torch.zeros_like(batch.position),
            valid=batch.valid.clone(),
            **dict(zip(self.pool.parts, self.pool.take(pages, *self.pool.parts), strict=True)),
        )

    def prefill(self, tokens: NewTokens, pages: torch.Tensor, start: int) -> torch.Tensor:
        q, k, v = (x[None] for x in tokens[:3])
        if start == 0:
            state = SalientState.empty(k, v, self.options)
        else:
            state = self.read_state(pages, self.plan(torch.full((1,), start, device=pages.device), tokens))
        o = continue_salient(q, k, v, state, self.options, fresh=start == 0)
        self.pool.put_state(pages, state)
        return o[0]
