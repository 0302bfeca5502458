"""Which token is in which block: the geometry of MHLA, without any arithmetic on features.

A block is a property of positions, not of the memory order: tokens always arrive row-major, and `Blocks` says to
which block of the 1-D, 2-D or 3-D grid each belongs. Any size is legal; nothing is cropped or padded by the caller.
`Blocks` holds only integers, so it is hashable and free to build again for every call.
"""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Blocks:
    """A cut of `shape` tokens into blocks (paper section 4.1: the M "heads" along the token dimension).

    Build it with `Blocks.sequence` or `Blocks.grid`. shape: tokens per axis (1 to 3 axes). counts: blocks per axis.
    block_size: tokens per block of a cut sequence, whose last block may be shorter; None for a grid, whose axes are
    cut as `numpy.array_split` cuts them (the first blocks get one token more). prefix: tokens before the grid (class or
    register tokens), in a block of their own, which is block 0.
    """

    shape: tuple[int, ...]
    counts: tuple[int, ...]
    block_size: int | None = None
    prefix: int = 0

    @staticmethod
    def sequence(length: int, block_size: int) -> "Blocks":
        """`length` tokens in a row, `block_size` to a block. ValueError unless both are integers of at least 1."""
        check_positive_int("length", length)
        check_positive_int("block_size", block_size)
        return Blocks((length,), ((length + block_size - 1) // block_size,), block_size)

    @staticmethod
    def grid(
        shape: int | tuple[int, ...] | list[int], counts: int | tuple[int, ...] | list[int], *, prefix: int = 0
    ) -> "Blocks":
        """A grid of `shape` tokens (1, 2 or 3 axes) cut into `counts` blocks per axis; a count above its axis is
        clamped to it. `prefix` tokens before the grid are one block more.

        ValueError unless both have the same number of axes, all integers of at least 1, and prefix is at least 0.
        """
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        counts = (counts,) if isinstance(counts, int) else tuple(counts)
        if not 1 <= len(shape) <= 3:
            raise ValueError(f"shape has {len(shape)} axes; expected 1, 2 or 3.")
        if len(counts) != len(shape):
            raise ValueError(f"counts has {len(counts)} axes and shape {len(shape)}; expected the same number.")
        for axis, (size, count) in enumerate(zip(shape, counts, strict=True)):
            check_positive_int(f"shape[{axis}]", size)
            check_positive_int(f"counts[{axis}]", count)
        if isinstance(prefix, bool) or not isinstance(prefix, int) or prefix < 0:
            raise ValueError(f"prefix is {prefix!r}; expected an integer of at least 0.")
        return Blocks(shape, tuple(min(size, count) for size, count in zip(shape, counts, strict=True)), prefix=prefix)

    @property
    def length(self) -> int:
        """Number of tokens, T."""
        return math.prod(self.shape) + self.prefix

    @property
    def num_blocks(self) -> int:
        """Number of blocks, M."""
        return math.prod(self.counts) + (self.prefix > 0)

    def axis_sizes(self, axis: int) -> tuple[int, ...]:
        """Tokens in each block along one axis; they sum to `shape[axis]`."""
        length, count = self.shape[axis], self.counts[axis]
        if self.block_size is not None:
            return (self.block_size,) * (count - 1) + (length - self.block_size * (count - 1),)
        size, longer = length // count, length % count
        return (size + 1,) * longer + (size,) * (count - longer)

    def sizes(self) -> tuple[int, ...]:
        """Tokens in each of the M blocks, in block order."""
        sizes = (1,)
        for axis in range(len(self.shape)):
            sizes = tuple(outer * inner for outer in sizes for inner in self.axis_sizes(axis))
        return (self.prefix, *sizes) if self.prefix else sizes

    @property
    def equal(self) -> bool:
        """True when all blocks hold the same number of tokens."""
        grid = all(len(set(self.axis_sizes(axis))) == 1 for axis in range(len(self.shape)))
        return grid and self.prefix in (0, self.sizes()[-1])

    @property
    def contiguous(self) -> bool:
        """True when every block is one run of the row-major tokens, in order."""
        return all(count == 1 or self.counts[:axis] == self.shape[:axis] for axis, count in enumerate(self.counts))

    def index(self, device: torch.device | str | None = None) -> torch.Tensor:
        """Block of each token, row-major over both: int64 [T]."""
        block = torch.zeros(1, dtype=torch.int64, device=device)
        for axis, count in enumerate(self.counts):
            place = torch.arange(self.shape[axis], device=device)
            if self.block_size is not None:
                along = place // self.block_size
            else:
                size, longer = self.shape[axis] // count, self.shape[axis] % count
                along = torch.where(
                    place < longer * (size + 1), place // (size + 1), longer + (place - longer * (size + 1)) // size
                )
            block = (block[:, None] * count + along[None, :]).flatten()
        return torch.cat([block.new_zeros(self.prefix), block + 1]) if self.prefix else block


def check_positive_int(name: str, value) -> None:
    """ValueError in one sentence unless `value` is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt) or value < 1:
        raise ValueError(f"{name} is {value!r}; expected an integer of at least 1.")
