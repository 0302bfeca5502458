"""Decoder states in the pages of a serving engine, as rows of one pool that requests take and return.

A page holds the state of `heads` KV heads of one layer for one request, and is as large as a page of keys and values, so the
engine can hand out both from the same memory. What a page holds is a `WindowedState` without what the position of the
request tells: which slots are filled, and the cosines and sines of their rotation (`RotationTable`). Its ring has one block
less, because an engine never takes tokens back.
"""

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from ..nn.features import FeatureMap
from ..nn.settings import MHLASettings
from ..ops.api import choose_implementation
from ..ops.torch_layout import ring_slot
from ..ops.windowed.decays import Decays
from ..ops.windowed.decoding import KeyMap, WindowedState, continue_windowed, windowed_step
from ..ops.windowed.inputs import WindowedInputs, WindowedOptions
from ..ops.windowed.triton_step import PageTensors, page_step, small_page_call


@dataclass(frozen=True)
class PageLayout:
    """Shapes and dtypes of what a page holds: the state of U KV heads (`heads`) of one request.

    That is sums over F features for each of R decay rates, and a ring of S slots, sinks included, with keys of width D and
    values of width V.
    """

    heads: int
    num_rates: int
    num_features: int
    key_dim: int
    value_dim: int
    num_slots: int
    dtype: torch.dtype

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
        )

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Running sums [U, R, V + 1, F], pending summary [U, V + 1, F], keys [U, S, D], and values [U, S, V]."""
        sums = (self.value_dim + 1, self.num_features)
        slots = (self.heads, self.num_slots)
        return (
            (self.heads, self.num_rates, *sums),
            (self.heads, *sums),
            (*slots, self.key_dim),
            (*slots, self.value_dim),
        )

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes in the order of `shapes`; sums are at least fp32."""
        sum_dtype = torch.promote_types(self.dtype, torch.float32)
        return sum_dtype, sum_dtype, self.dtype, self.dtype


class RotationTable:
    """Cosines and sines of the rotation at every position, which all layers of a model share.

    Layers write those of the tokens that they see, so the table knows every position that a page holds.
    """

    def __init__(self, num_positions: int):
        self.num_positions = num_positions
        self.rows: torch.Tensor | None = None

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


class NoRotation:
    """Takes the place of a `RotationTable` in layers that have no rotation to undo."""

    def allocate(self, cos_sin: torch.Tensor) -> None:
        """Do nothing."""

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
        parts, offset = [], 0
        for shape, dtype in zip(layout.shapes, layout.dtypes, strict=True):
            num_bytes = prod(shape) * dtype.itemsize
            parts.append(memory[:, offset : offset + num_bytes].view(dtype).unflatten(1, shape))
            offset += num_bytes
        super().__init__(*parts)

    def gather(self, pages: torch.Tensor, position: torch.Tensor, options: WindowedOptions) -> WindowedState:
        """Copy the pages [N, P] of N requests, with `position` tokens [N] each, into a state with an empty `cos_sin`.

        The KV heads are in the order of the model's. A request without tokens may have been given pages that hold
        anything.
        """
        is_old = (position > 0).view(-1, 1, 1, 1)
        running = torch.where(is_old[..., None], self.running[pages].flatten(1, 2), 0)
        pending = torch.where(is_old, self.pending[pages].flatten(1, 2), 0)
        valid = slot_positions(position, self.layout.num_slots, options.sinks) >= 0
        # Weights of 0 would not remove NaN.
        k, v = (
            x[pages].flatten(1, 2).masked_fill_(~valid[:, None, :, None], 0).transpose(1, 2) for x in (self.k, self.v)
        )
        return WindowedState(
            block_size=options.block_size,
            k=k,
            v=v,
            valid=valid,
            cos_sin=k.new_zeros(*k.shape[:2], 1, 0),
            running=running,
            pending=pending,
            position=position.clone(),
            furthest=position,
        )

    def write_sums(self, pages: torch.Tensor, state: WindowedState) -> None:
        """Copy the sums of a state back to its pages."""
        heads = (pages.shape[1], self.layout.heads)
        self.running[pages] = state.running.unflatten(1, heads)
        self.pending[pages] = state.pending.unflatten(1, heads)

    def write_token(self, pages: torch.Tensor, slot: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write keys [N, G, D] and values [N, G, V] of one token per request into slots int64 [N] of its pages."""
        heads = (pages.shape[1], self.layout.heads)
        for held, new in ((self.k, k), (self.v, v)):
            held[pages, :, slot[:, None]] = new.unflatten(1, heads).to(held.dtype)

    def read_keys(self, pages: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        """Return the keys in slots int64 [N] of the pages of N requests, [N, G, D]."""
        return self.k[pages, :, slot[:, None]].flatten(1, 2)

    def write_tokens(self, pages: torch.Tensor, state: WindowedState) -> None:
        """Copy all keys and values of a state back to its pages."""
        heads = (pages.shape[1], self.layout.heads)
        for held, new in ((self.k, state.k), (self.v, state.v)):
            held[pages] = new.transpose(1, 2).unflatten(1, heads)


def slot_positions(count: torch.Tensor, num_slots: int, sinks: int) -> torch.Tensor:
    """Return which token is in each slot after `count` tokens [N]: int64 [N, S], negative if empty; inverts `ring_slot`."""
    slot = torch.arange(num_slots, device=count.device)
    last = count[:, None] - 1
    in_ring = last - (last - slot + sinks) % (num_slots - sinks)
    in_ring = torch.where(in_ring >= sinks, in_ring, -1)  # such tokens are in the slots of sinks
    return torch.where(slot < sinks, torch.where(slot <= last, slot, -1), in_ring)


@dataclass
class PagedAttention:
    """Attention of the MHLA heads of one layer, whose states are in pages; arguments as in `WindowedInputs`."""

    pool: PagePool
    table: Any
    map_keys: KeyMap
    decays: Decays
    balance: torch.Tensor | None
    options: WindowedOptions

    def decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        q_features: torch.Tensor,
        pages: torch.Tensor,
        position: torch.Tensor,
    ) -> torch.Tensor:
        """Attend by one token per request, and update the pages. Nothing is read on the host.

        q [N, H, D], k [N, G, D], v [N, G, V], q_features [N, H, F], and the new tokens' `position` [N] -> [N, H, V] in the
        dtype of the sums.
        """
        pool, options = self.pool, self.options
        # The step maps one old key, that of the token `window - 1` blocks before the new one.
        old_position = position - (options.window - 1) * options.block_size
        cos_sin = self.table.read(old_position)[:, None]
        if choose_implementation(options.impl, small_page_call, q[None], k[None], v[None]) == "triton":
            pool.write_token(pages, ring_slot(position, pool.layout.num_slots, options.sinks), k, v)
            old_k = pool.read_keys(pages, ring_slot(old_position.clamp(min=0), pool.layout.num_slots, options.sinks))
            k_features = self.map_keys(old_k[:, None], cos_sin.to(old_k.dtype))[:, 0]
            return page_step(q, q_features, k_features, pool, pages, position, self.decays, self.balance, options)
        state = pool.gather(pages, position, options)
        inputs = WindowedInputs(
            q[:, None], k[:, None], v[:, None], q_features[:, None], self.decays, self.balance, options
        )
        o = windowed_step(inputs, lambda old_k, _: self.map_keys(old_k, cos_sin.to(old_k.dtype)), state)
        pool.write_sums(pages, state)
        pool.write_token(pages, state.slot(position, options), k, v)
        return o[:, 0]

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
        position = torch.full((1,), start, device=q.device)
        state = pool.gather(pages, position, options)
        held = slot_positions(position, pool.layout.num_slots, options.sinks)
        state = replace(state, cos_sin=self.table.read(held).to(cos_sin.dtype), furthest=position.clone())
        inputs = WindowedInputs(q[None], k[None], v[None], q_features[None], self.decays, self.balance, options)
        o = continue_windowed(inputs, self.map_keys, state, fresh=start == 0, cos_sin=cos_sin[None])
        pool.write_sums(pages, state)
        pool.write_tokens(pages, state)
        return o[0]
