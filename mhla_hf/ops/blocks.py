"""Assigns the tokens of a sequence or grid to blocks.

Any length works, so callers never crop or pad: the last block of a sequence may be shorter, the first blocks on an axis of a
grid may have one more token. `Blocks` holds only integers, so it is hashable, and cheap to make on every call.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor


@dataclass(frozen=True)
class Blocks:
    """A partition of tokens into blocks (paper section 4.1: the M "heads" along the token dimension).

    Build it with `Blocks.sequence` or `Blocks.grid`. Tokens and blocks are both numbered in row-major order.

    Args:
        shape: Number of tokens along each of the 1 to 3 axes.
        counts: Number of blocks along each axis.
        block_size: Tokens per block of a sequence; the last block may be shorter. None for a grid, whose axes are split as
            by `numpy.array_split`: the first blocks get one extra token if the axis does not divide evenly.
        prefix: Number of tokens before the grid (class or register tokens), which form an extra block, block 0.
        others: Shapes of further grids, whose tokens come after those of the first. Each is split into the same `counts`
            of blocks, and block m has the tokens of block m of every grid.
    """

    shape: tuple[int, ...]
    counts: tuple[int, ...]
    block_size: int | None = None
    prefix: int = 0
    others: tuple[tuple[int, ...], ...] = ()

    @staticmethod
    def sequence(length: int, block_size: int) -> "Blocks":
        """Split a sequence of `length` tokens into blocks of `block_size`; the last block holds the remainder.

        Raises:
            ValueError: If an argument is no integer of at least 1.
        """
        check_int("length", length)
        check_int("block_size", block_size)
        return Blocks((length,), ((length + block_size - 1) // block_size,), block_size)

    @staticmethod
    def grid(
        shape: int | Sequence[int], counts: int | Sequence[int], *, prefix: int = 0,
        others: tuple[tuple[int, ...], ...] = (),
    ) -> "Blocks":  # fmt: skip
        """Split each axis of a grid into a fixed number of blocks.

        Args:
            shape: Number of tokens along each of the 1 to 3 axes.
            counts: Number of blocks along each axis; clamped to the fewest tokens that any of the grids has along that axis.
            prefix: Number of tokens before the grid, which form an extra block, block 0.
            others: Shapes of further grids, whose tokens come after those of the first, in the same blocks.

        Raises:
            ValueError: If an argument is invalid; the message names it.
        """
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        counts = (counts,) if isinstance(counts, int) else tuple(counts)
        if not 1 <= len(shape) <= 3:
            raise ValueError(f"shape: got {len(shape)} axes, expected 1, 2 or 3.")
        others = tuple(map(tuple, others))
        numbers = {"shape": shape, "counts": counts} | {f"others[{i}]": other for i, other in enumerate(others)}
        for name, values in numbers.items():
            if len(values) != len(shape):
                raise ValueError(f"{name}: got {len(values)} axes, expected {len(shape)} as in shape.")
            for axis, value in enumerate(values):
                check_int(f"{name}[{axis}]", value)
        check_int("prefix", prefix, 0)
        clamped = tuple(min(sizes) for sizes in zip(shape, counts, *others, strict=True))
        return Blocks(shape, clamped, prefix=prefix, others=others)

    @property
    def length(self) -> int:
        """Number of tokens T, prefix tokens included."""
        return math.prod(self.shape) + self.prefix + sum(map(math.prod, self.others))

    @property
    def num_blocks(self) -> int:
        """Number of blocks M, the prefix block included."""
        return math.prod(self.counts) + (self.prefix > 0)

    def axis_sizes(self, length: int, count: int) -> tuple[int, ...]:
        """Return the number of tokens of each of the `count` blocks along an axis of `length` tokens."""
        if self.block_size is not None:
            return (self.block_size,) * (count - 1) + (length - self.block_size * (count - 1),)
        size, remainder = length // count, length % count
        return (size + 1,) * remainder + (size,) * (count - remainder)

    def sizes(self) -> tuple[int, ...]:
        """Return the number of tokens in each of the M blocks."""
        axes = (map(self.axis_sizes, shape, self.counts) for shape in (self.shape, *self.others))
        grids = (map(math.prod, product(*sizes)) for sizes in axes)
        sizes = tuple(map(sum, zip(*grids, strict=True)))
        return (self.prefix, *sizes) if self.prefix else sizes

    @property
    def equal(self) -> bool:
        """Whether all blocks have the same number of tokens."""
        return len(set(self.sizes())) == 1

    @property
    def contiguous(self) -> bool:
        """Whether every block is a contiguous run of tokens, in the order of the blocks."""
        if self.others:
            return set(self.counts) == {1}
        return all(count == 1 or self.counts[:axis] == self.shape[:axis] for axis, count in enumerate(self.counts))

    def index(self, device: torch.device | str | None = None) -> Tensor:
        """Return the block of each token, int64 [T]."""
        block = torch.cat([self._index_grid(shape, device) for shape in (self.shape, *self.others)])
        return torch.cat([block.new_zeros(self.prefix), block + 1]) if self.prefix else block

    def _index_grid(self, shape: tuple[int, ...], device: torch.device | str | None) -> Tensor:
        block = torch.zeros(1, dtype=torch.int64, device=device)
        for length, count in zip(shape, self.counts, strict=True):
            position = torch.arange(length, device=device)
            if self.block_size is not None:
                block_on_axis = position // self.block_size
            else:
                size, remainder = length // count, length % count
                # The first term counts in blocks with one extra token, the second in those without one, which come later.
                block_on_axis = torch.maximum(position // (size + 1), (position - remainder) // size)
            block = (block[:, None] * count + block_on_axis).flatten()
        return block


def check_int(name: str, value: object, minimum: int = 1) -> None:
    """Raise ValueError, which names the argument `name`, unless `value` is an integer of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt) or value < minimum:
        raise ValueError(f"{name}: got {value!r}, expected an integer of at least {minimum}.")
