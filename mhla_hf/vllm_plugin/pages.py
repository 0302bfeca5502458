"""Decoder states in the pages of a serving engine, as rows of one pool that requests take and return.

A page holds the state of `heads` KV heads of one layer for one request, and is as large as a page of keys and values, so the
engine can hand out both from the same memory. What a page holds is a `WindowedState` without what the position of the
request tells: which slots are filled, and the cosines and sines of their rotation (`RotationTable`). Its ring has one block
less, because an engine never takes tokens back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch

from ..nn.features import FeatureMap
from ..nn.settings import MHLASettings
from ..ops.api import choose_implementation
from ..ops.windowed.decays import Decays
from ..ops.windowed.decoding import (
    KeyMap,
    StepPlan,
    WindowedState,
    attend_token,
    continue_windowed,
    plan_step,
    windowed_step,
)
from ..ops.windowed.fused_softmax import make_mask
from ..ops.windowed.inputs import WindowedInputs, WindowedOptions
from ..ops.windowed.salient import NEVER, SalientState
from ..ops.windowed.triton_step import PageTensors, page_step, small_page_call

SALIENT_PARTS = ("votes", "cast", "final", "position", "k", "v", "features", "now", "next")  # of a `SalientState`


@dataclass(frozen=True)
class PageLayout:
    """Shapes and dtypes of what a page holds: the state of U KV heads (`heads`) of one request.

    That is sums over F features for each of R decay rates, and a ring of S slots, sinks included, with keys of width D and
    values of width V; and, with N salient tokens, what `SalientState` holds in N + C slots.
    """

    heads: int
    num_rates: int
    num_features: int
    key_dim: int
    value_dim: int
    num_slots: int
    dtype: torch.dtype
    salient: int
    block_size: int

    @staticmethod
    def of(settings: MHLASettings, heads: int, head_dim: int, dtype: torch.dtype) -> "PageLayout":
        is_windowed = settings.windowed
        num_features = FeatureMap(settings.feature_map, 0, head_dim).num_features
        num_blocks, sinks = (settings.window, settings.sinks) if is_windowed else (1, 0)
        return PageLayout(
            heads=heads,
            num_rates=settings.num_decays,
            num_features=num_features,
            key_dim=head_dim if is_windowed else num_features,
            value_dim=head_dim,
            num_slots=sinks + num_blocks * settings.block_size,
            dtype=dtype,
            salient=settings.salient if is_windowed else 0,
            block_size=settings.block_size,
        )

    @property
    def parts(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shapes [U, ..] and dtypes of the parts of a page, in their order in memory; sums are at least fp32."""
        sum_dtype = torch.promote_types(self.dtype, torch.float32)
        sums, slots = (self.value_dim + 1, self.num_features), (self.heads, self.num_slots)
        rates = (self.num_rates,) if self.salient else ()
        parts: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "running": ((self.heads, self.num_rates, *sums), sum_dtype),
            "pending": ((self.heads, *rates, *sums), sum_dtype),
            "k": ((*slots, self.key_dim), self.dtype),
            "v": ((*slots, self.value_dim), self.dtype),
        }
        if not self.salient:
            return parts
        slots, block = (self.heads, self.salient + self.block_size), (self.heads, self.block_size)
        salient: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "votes": (slots, sum_dtype),
            "cast": (block, sum_dtype),
            "final": (block, sum_dtype),
            "position": (slots, torch.int32),
            "k": ((*slots, self.key_dim), self.dtype),
            "v": ((*slots, self.value_dim), self.dtype),
            "features": ((*slots, self.num_features), self.dtype),
            "now": (slots, torch.bool),
            "next": (slots, torch.bool),
        }
        # Bytes of wide types come first, where they are aligned.
        by_width = {**parts, **{f"salient_{name}": part for name, part in salient.items()}}
        return dict(sorted(by_width.items(), key=lambda item: -item[1][1].itemsize))

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes in the order of `parts`."""
        return tuple(shape for shape, _ in self.parts.values())

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes in the order of `parts`."""
        return tuple(dtype for _, dtype in self.parts.values())


class RotationTable:
    """Cosines and sines of the rotation at every position, which all layers of a model share.

    Layers write those of the tokens that they see, so the table knows every position that a page holds. Layers also share
    the `plan` of a batch. Layers that have no rotation to undo use `without_rotation`.
    """

    def __init__(self, num_positions: int):
        self.num_positions = num_positions
        self.rows: torch.Tensor | None = None
        self.plan: Any = None
        self.without_rotation: RotationTable = NoRotation() if num_positions else self

    def allocate(self, cos_sin: torch.Tensor) -> None:
        """Allocate the table, unless it exists, for cosines and sines like cos_sin [.., 1, A]."""
        if self.rows is None:
            self.rows = cos_sin.new_zeros(self.num_positions + 1, *cos_sin.shape[1:])

    def write(self, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
        """Store cos_sin [N, 1, A] for int64 positions [N]. Position -1 stands for padding; its row is never read."""
        assert self.rows is not None
        self.rows[positions] = cos_sin

    def read(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the cosines and sines at int64 positions of any shape, [.., 1, A]; arbitrary at negative positions."""
        assert self.rows is not None
        return self.rows[positions.clamp(min=0)]


class NoRotation(RotationTable):
    """The table of layers that have no rotation to undo: cosines and sines of width 0."""

    def __init__(self) -> None:
        super().__init__(0)

    def write(self, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
        """Do nothing."""

    def read(self, positions: torch.Tensor) -> torch.Tensor:
        """Return an empty tensor [.., 1, 0] for positions of any shape."""
        return torch.zeros(*positions.shape, 1, 0, device=positions.device)


class PagePool(PageTensors):
    """The memory of all pages, as tensors with one row per page.

    A row of `memory`, uint8 or int8 [P, bytes] and contiguous in its last axis, begins with what `layout` describes.
    """

    def __init__(self, memory: torch.Tensor, layout: PageLayout):
        self.layout = layout
        self.parts: dict[str, torch.Tensor] = {}
        offset = 0
        for name, (shape, dtype) in layout.parts.items():
            num_bytes = prod(shape) * dtype.itemsize
            self.parts[name] = memory[:, offset : offset + num_bytes].view(dtype).unflatten(1, shape)
            offset += num_bytes
        super().__init__(*(self.parts[name] for name in ("running", "pending", "k", "v")))

    def take(self, pages: torch.Tensor, *names: str) -> list[torch.Tensor]:
        """Copy the named parts of pages [N, P] of N requests, with the KV heads in the order of the model's."""
        shape = (len(pages), pages.shape[1] * self.layout.heads)
        parts = [self.parts[name] for name in names]
        # PyTorch copies whole rows of 2-D tensors.
        return [x.flatten(1).index_select(0, pages.flatten()).view(*shape, *x.shape[2:]) for x in parts]

    def put(self, pages: torch.Tensor, **parts: torch.Tensor) -> None:
        """Copy parts like those of `take` back to pages [N, P]."""
        for name, part in parts.items():
            rows = self.parts[name].flatten(1)
            rows.index_copy_(0, pages.flatten(), part.reshape(-1, rows.shape[1]).to(rows.dtype))

    def clear(self, pages: torch.Tensor) -> None:
        """Fill pages int64 [N, P], which may hold anything, with the state of requests without tokens."""
        for part in self.parts.values():
            part[pages] = 0
        if count := self.layout.salient:  # as `SalientState.empty`
            self.parts["salient_votes"][pages] = NEVER
            self.parts["salient_position"][pages] = -1
            self.parts["salient_next"][..., :count][pages] = True

    def write_token(self, pages: torch.Tensor, slot: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write keys [N, G, D] and values [N, G, V] of one token per request into slots int64 [N] of its pages."""
        heads = (pages.shape[1], self.layout.heads)
        for held, new in ((self.k, k), (self.v, v)):
            held[pages, :, slot[:, None]] = new.unflatten(1, heads).to(held.dtype)

    def read_keys(self, pages: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        """Return the keys in slots int64 [N] of the pages of N requests, [N, G, D]."""
        return self.k[pages, :, slot[:, None]].flatten(1, 2)


def slot_positions(count: torch.Tensor, num_slots: int, sinks: int) -> torch.Tensor:
    """Return which token is in each slot after `count` tokens [N]: int64 [N, S], negative if empty; inverts `ring_slot`."""
    slot = torch.arange(num_slots, device=count.device)
    last = count[:, None] - 1
    in_ring = last - (last - slot + sinks) % (num_slots - sinks)
    in_ring = torch.where(in_ring >= sinks, in_ring, -1)  # such tokens are in the slots of sinks
    return torch.where(slot < sinks, torch.where(slot <= last, slot, -1), in_ring)


class DecodeBatch(NamedTuple):
    """One new token for each of N requests, as all layers of a model see it.

    Args:
        position: int64 [N], the position of the token.
        plan: What the step reads and writes.
        kernel_cos_sin: [N, 1, 1, A], for the Triton kernels: the rotation of the token that enters the pending summary. None
            if PyTorch computes the step; then the host knows the lists below, and the mask [N, 1, 1, S] is given.
        mask: See `make_mask`.
        first: Rows whose request has no earlier token.
        opening: Rows whose token is the first of a block, so that an earlier block leaves the window.
    """

    position: torch.Tensor
    plan: StepPlan
    kernel_cos_sin: torch.Tensor | None
    mask: torch.Tensor | None = None
    first: Sequence[int] = ()
    opening: Sequence[int] = ()


@dataclass
class PagedAttention:
    """Attention of the MHLA heads of one layer, whose states are in pages; arguments as in `WindowedInputs`."""

    pool: PagePool
    table: Any
    map_keys: KeyMap
    decays: Decays
    balance: torch.Tensor | None
    options: WindowedOptions

    def plan(self, position: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> DecodeBatch:
        """Plan a step for q [N, H, D] and k, v [N, G, ..] at int64 positions [N]; layers of the same kind can share it."""
        options = self.options
        size, window = options.block_size, options.window
        plan = plan_step(position, self.pool.layout.num_slots, options)
        impl = "torch" if options.salient else options.impl  # there is no kernel for salient tokens
        if choose_implementation(impl, small_page_call, q[None], k[None], v[None]) == "triton":
            return DecodeBatch(position, plan, self.table.read(position - (window - 1) * size)[:, None].to(k.dtype))
        mask, positions = make_mask(plan.visible[:, None, None], k.dtype), position.tolist()
        first = [row for row, token in enumerate(positions) if token <= 0]
        opening = [row for row, token in enumerate(positions) if token >= window * size and token % size == 0]
        return DecodeBatch(position, plan, None, mask, first, opening)

    def decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        q_features: torch.Tensor,
        pages: torch.Tensor,
        batch: DecodeBatch,
    ) -> torch.Tensor:
        """Attend by one token per request, and update the pages.

        q [N, H, D], k [N, G, D], v [N, G, V], q_features [N, H, F] -> [N, H, V] in the dtype of the sums.
        """
        pool, options, plan, position = self.pool, self.options, batch.plan, batch.position
        if batch.kernel_cos_sin is not None:
            pool.write_token(pages, plan.slot, k, v)
            old_k = pool.read_keys(pages, plan.old_slot)
            k_features = self.map_keys(old_k[:, None], batch.kernel_cos_sin)[:, 0]
            return page_step(q, q_features, k_features, pool, pages, position, self.decays, self.balance, options)
        if batch.first:
            pool.clear(pages[batch.first])
        if options.salient:
            state = self.read_state(pages, position)
            q, k, v, q_features = (x[:, None] for x in (q, k, v, q_features))
            inputs = WindowedInputs(q, k, v, q_features, self.decays, self.balance, options)
            o = windowed_step(inputs, self.map_keys, state, self.table.read(position)[:, None].to(k.dtype))
            self.write_state(pages, state)
            return o[:, 0]
        if batch.opening:
            self.open_block(pages[batch.opening], position[batch.opening])
        pool.write_token(pages, plan.slot, k, v)
        running, held_k, held_v = pool.take(pages, "running", "k", "v")
        assert batch.mask is not None  # without kernels, `plan` has made one
        inputs = WindowedInputs(q, k, v, q_features, self.decays, self.balance, options)
        return attend_token(q, q_features, held_k, held_v, running, batch.mask, plan.block, inputs)[0]

    def open_block(self, pages: torch.Tensor, position: torch.Tensor) -> None:
        """Move the sums in pages [N, P] on to the block that the tokens at `position` [N], not yet written, open.

        The block that leaves the window is summed here, all at once, so PyTorch's steps need no pending summary.
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
            block_size=self.options.block_size,
            k=k,
            v=v,
            valid=held >= 0,
            cos_sin=self.table.read(held).to(k.dtype),
            running=running,
            pending=pending,
            position=position.clone(),
            furthest=position.clone(),
            salient=self.read_salient(pages),
        )

    def read_salient(self, pages: torch.Tensor) -> SalientState | None:
        """Copy the salient tokens of N requests from their pages [N, P]; None if a page has none."""
        if not self.options.salient:
            return None
        parts = dict(zip(SALIENT_PARTS, self.pool.take(pages, *(f"salient_{x}" for x in SALIENT_PARTS)), strict=True))
        none = torch.zeros(len(pages), dtype=torch.int64, device=pages.device)  # nothing is taken back
        position = parts.pop("position").long()
        return SalientState(position=position, decided=none, voted=none, **parts)

    def write_state(self, pages: torch.Tensor, state: WindowedState) -> None:
        """Copy states of N requests back to their pages [N, P]."""
        parts = {"running": state.running, "pending": state.pending, "k": state.k, "v": state.v}
        if state.salient is not None:
            parts |= {f"salient_{name}": getattr(state.salient, name) for name in SALIENT_PARTS}
        self.pool.put(pages, **parts)

    def prefill(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        q_features: torch.Tensor,
        cos_sin: torch.Tensor,
        pages: torch.Tensor,
        start: int,
    ) -> torch.Tensor:
        """Attend by T new tokens of one request, the first at `start`, and update its pages [1, P].

        q, k, v, and q_features are as in `decode`, with T for N; cos_sin [T, 1, A] is of the new tokens.
        """
        pool, options = self.pool, self.options
        if start and len(q) == 1:
            return self.decode(q, k, v, q_features, pages, self.plan(torch.tensor([start], device=q.device), q, k, v))
        if start == 0:
            pool.clear(pages)
        state = self.read_state(pages, torch.full((1,), start, device=q.device))
        q, k, v, q_features, cos_sin = (x[None] for x in (q, k, v, q_features, cos_sin))
        inputs = WindowedInputs(q, k, v, q_features, self.decays, self.balance, options)
        o = continue_windowed(inputs, self.map_keys, state, fresh=start == 0, cos_sin=cos_sin)
        self.write_state(pages, state)
        return o[0]
