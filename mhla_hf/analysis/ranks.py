"""Rank and entropy of attention matrices, and the bounds of table 1.

Unusual: a rank is never given without the tolerance it was counted at; `effective_rank` needs none. The rank of a causal
matrix is that of its lower left quarter (what the second half of the text reads in the first), because a triangle with
a diagonal has full rank whatever the attention is.
"""

import math

import torch

from ..ops.blocks import Blocks


def random_projection(width: int, most: int, seed: int = 0) -> torch.Tensor | None:
    """A Gaussian `[width, most]`, fp64: what it multiplies keeps its rank as far as `most`. None where that is no less."""
    if width <= most:
        return None
    return torch.randn(width, most, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def count_rank(values: torch.Tensor, tolerance: float) -> int:
    """How many singular values are above `tolerance` times the largest."""
    return int((values > tolerance * values[0]).sum()) if values[0] > 0 else 0


def effective_rank(values: torch.Tensor) -> float:
    """exp of the entropy of the singular values' shares: 1 for rank one, N for N equal values (Roy and Vetterli 2007)."""
    if values[0] <= 0:
        return 0.0
    share = values / values.sum()
    return math.exp(-torch.special.xlogy(share, share).sum().item())


def row_entropy(rows: torch.Tensor) -> torch.Tensor:
    """Entropy in nats of each row of `[T, S]`, as shares of |weight|; NaN for a row without any weight."""
    weight = rows.abs()
    share = weight / weight.sum(-1, keepdim=True)
    return -torch.special.xlogy(share, share).sum(-1)


def rank_bound(sizes, width: int) -> int:
    """min(N, sum over blocks of min(n_b, d)): the largest rank MHLA can have (section 4.3, table 1)."""
    return min(sum(sizes), sum(min(size, width) for size in sizes))


def block_sizes(blocks: Blocks, first: int = 0, last: int | None = None) -> list[int]:
    """How many of the tokens `first` to `last` are in each block; blocks without any are left out."""
    counts = torch.bincount(blocks.index()[first:last], minlength=blocks.num_blocks)
    return [int(count) for count in counts if count]


def default_tolerance(shape, dtype: torch.dtype) -> float:
    """The relative tolerance of `torch.linalg.matrix_rank` for a matrix of this shape and dtype."""
    return max(shape) * torch.finfo(dtype).eps
