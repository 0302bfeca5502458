"""Which KV heads of a layer keep softmax, and which are MHLA."""

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class HeadSplit:
    """Splits tensors into the KV heads of a layer that keep softmax and those that are MHLA, and joins them again.

    Query heads go with the KV head that they read. `counts` are the numbers of KV heads that keep softmax (key True) and
    that are MHLA (key False). Runs of adjacent heads are sliced, not indexed, so that no index is copied to a device.
    """

    def __init__(self, softmax_heads: Sequence[int], num_kv_heads: int):
        self.softmax_heads = sorted(softmax_heads)
        self.num_kv_heads = num_kv_heads
        self.counts = {True: len(self.softmax_heads), False: num_kv_heads - len(self.softmax_heads)}
        self.runs: list[tuple[int, int, bool]] = []
        for is_softmax, run in itertools.groupby(range(num_kv_heads), self.softmax_heads.__contains__):
            heads = list(run)
            self.runs.append((heads[0], heads[-1] + 1, is_softmax))

    def part(self, x: Tensor, softmax: bool, dim: int) -> Tensor:
        """Return the softmax heads if `softmax`, else the MHLA heads, of a tensor with all KV or query heads along `dim`."""
        queries_per_kv = x.shape[dim] // self.num_kv_heads
        parts = [
            x.narrow(dim, first * queries_per_kv, (end - first) * queries_per_kv)
            for first, end, is_softmax in self.runs
            if is_softmax == softmax
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def join(self, parts: Mapping[bool, Tensor], dim: int) -> Tensor:
        """Join the softmax heads (key True) and the MHLA heads (key False) in their original order along `dim`."""
        pieces, begin = [], {True: 0, False: 0}
        for first, end, is_softmax in self.runs:
            size = (end - first) * parts[is_softmax].shape[dim] // self.counts[is_softmax]
            pieces.append(parts[is_softmax].narrow(dim, begin[is_softmax], size))
            begin[is_softmax] += size
        return torch.cat(pieces, dim)

    def of_rank(self, rank: int, size: int) -> "HeadSplit":
        """Return the split of the KV heads of process `rank`, renumbered from 0, under `size`-way tensor parallelism."""
        count = self.num_kv_heads // size
        return HeadSplit([head - rank * count for head in self.softmax_heads if head // count == rank], count)
