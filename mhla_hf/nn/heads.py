"""Which KV heads of a layer keep softmax: one tensor of all heads is cut in two, and two outputs are joined in its order."""

from collections.abc import Sequence

import torch


class HeadSplit:
    """The KV heads of one layer, each softmax or MHLA; a query head goes with the KV head that it reads.

    Heads are cut as slices, not gathered by an index: nothing has to be on a device, and one run of heads is a view.

    Args:
        softmax_heads: KV heads that keep softmax.
        num_kv_heads: KV heads of the layer G.
    """

    def __init__(self, softmax_heads: Sequence[int], num_kv_heads: int):
        self.softmax_heads = sorted(softmax_heads)
        self.num_kv_heads = num_kv_heads
        self.counts = {True: len(self.softmax_heads), False: num_kv_heads - len(self.softmax_heads)}
        self.runs = []  # [first KV head, one past the last, whether they are softmax]
        for head in range(num_kv_heads):
            kept = head in self.softmax_heads
            if self.runs and self.runs[-1][2] == kept:
                self.runs[-1][1] = head + 1
            else:
                self.runs.append([head, head + 1, kept])

    def part(self, x: torch.Tensor, softmax: bool, dim: int) -> torch.Tensor:
        """The softmax heads, or else the MHLA heads, of `x`, which has the G KV heads or their query heads along `dim`."""
        share = x.shape[dim] // self.num_kv_heads
        parts = [x.narrow(dim, a * share, (b - a) * share) for a, b, kept in self.runs if kept == softmax]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def join(self, parts: dict[bool, torch.Tensor], dim: int) -> torch.Tensor:
        """All heads in their order along `dim`, from those of the softmax heads (True) and of the MHLA heads (False)."""
        pieces, begin = [], {True: 0, False: 0}
        for first, end, kept in self.runs:
            size = (end - first) * parts[kept].shape[dim] // self.counts[kept]
            pieces.append(parts[kept].narrow(dim, begin[kept], size))
            begin[kept] += size
        return torch.cat(pieces, dim)

    def of_rank(self, rank: int, size: int) -> "HeadSplit":
        """The heads of one of `size` tensor-parallel processes, which take them in order, renumbered from 0."""
        count = self.num_kv_heads // size
        return HeadSplit([head - rank * count for head in self.softmax_heads if head // count == rank], count)
