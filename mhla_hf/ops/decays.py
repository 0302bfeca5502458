"""Mixing by decays: m[i, j] = sum_r w_r lambda_r^(i - j), an MHLA mixing matrix that is never written out.

What a query block takes from the blocks before it is then R running summaries, however long the sequence; a scan over the
blocks computes them at a cost that grows with their number and not with its square.
"""

from dataclasses import dataclass

import torch

GROUP = 8  # blocks that one small matrix mixes; what lies before them arrives as one running summary


@dataclass
class Decays:
    """R decays: weight w `[H, R]` of the query heads, log_rate (log lambda, at most 0) `[G, R]` of the key/value heads.

    Query head h uses the rates of key/value head h // (H // G): the heads of a group share their running summaries.
    power: a `[H]` or None; with it all weights of a query block are divided by n^a, n being how many blocks are far from it.
    Sums over features grow with n, sums of a softmax hardly do.
    """

    weight: torch.Tensor
    log_rate: torch.Tensor
    power: torch.Tensor | None = None

    def to(self, dtype: torch.dtype) -> "Decays":
        """The same in another dtype."""
        return Decays(*(x if x is None else x.to(dtype) for x in (self.weight, self.log_rate, self.power)))

    def matrix(self, num_blocks: int, lag: int = 1, both_ways: bool = False) -> torch.Tensor:
        """The mixing matrix `[H, M, M]` that they stand for; lag: the first distance that is far.

        Lower triangular, or with `both_ways` symmetric, by the distance on either side.
        """
        log_rate = self.log_rate.repeat_interleave(len(self.weight) // len(self.log_rate), 0)
        power = powers(log_rate, block_distances(num_blocks, log_rate).abs())  # [H, R, M, M]
        matrix = (self.weight[..., None, None] * power).sum(1)
        matrix = matrix if both_ways else matrix.tril()
        block = torch.arange(num_blocks, device=matrix.device)
        return matrix if self.power is None else matrix * self.by_length(block, lag).T[..., None]

    def by_length(self, block: torch.Tensor, lag: int) -> torch.Tensor:
        """n^-a for query blocks of these numbers, int of any shape -> `[.., H]`."""
        return torch.exp(-self.power * (block - lag + 1).clamp(min=1).to(self.power.dtype).log()[..., None])


def spread(fq, weight):
    """w_r `[H, R]` times query features, so that one product with the R running summaries mixes and reads them.

    `[B, G, M, N, K]` -> `[B, G, M, N, R * K]`; N holds the query heads of a key/value head, then tokens.
    """
    weight = weight.view(fq.shape[1], 1, -1, 1, weight.shape[1], 1)
    fq = fq.unflatten(3, (weight.shape[2], -1))[..., None, :]
    return (fq * weight).flatten(5).flatten(3, 4)


def powers(log_rate: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
    """lambda^distance: `[G, R]` and distances of any shape -> `[G, R, *distance.shape]`."""
    return torch.exp(log_rate.view(*log_rate.shape, *[1] * distance.dim()) * distance)


def block_distances(count: int, like: torch.Tensor) -> torch.Tensor:
    """i - j, `[count, count]`."""
    block = torch.arange(count, device=like.device)
    return block[:, None] - block[None, :]


def decayed_sums(summaries, log_rate, lag: int = 1, sequence=None):
    """sum over j <= i - lag of lambda_r^(i - j) S_j, for every block i: `[B, G, M, X]` -> `[B, G, M, R, X]`.

    sequence: int `[M]`, which packed sequence a block belongs to; sums stay inside one. A scan of two levels: groups of
    `GROUP` blocks each by a matrix, and the groups' own sums, an eighth as many, by another.
    """
    count, rates = summaries.shape[2], log_rate.shape[1]
    groups = (count + GROUP - 1) // GROUP + 1  # never 1, for which torch.compile would make a graph of its own
    earlier, padding = min(lag - 1, count), groups * GROUP - count
    summaries = torch.nn.functional.pad(summaries[:, :, : count - earlier], (0, 0, earlier, padding))
    grouped = summaries.unflatten(2, (groups, GROUP))  # S_{i - lag + 1} stands at place i

    place, distance = torch.arange(GROUP, device=summaries.device), block_distances(GROUP, summaries)
    inner = powers(log_rate, (distance - 1).clamp(min=0)).masked_fill(distance < 1, 0)  # [G, R, i, j]
    inner = inner.permute(0, 2, 1, 3)[:, None]  # [G, 1, i, R, j]
    to_end = powers(log_rate, GROUP - 1 - place)[:, None]  # [G, 1, R, j]
    outer_distance = block_distances(groups, summaries)
    outer = powers(log_rate, GROUP * (outer_distance - 1).clamp(min=0)).masked_fill(outer_distance < 1, 0)
    from_start = powers(log_rate, place).transpose(1, 2)[:, None, ..., None]  # [G, 1, i, R, 1]
    if sequence is not None:
        own = torch.nn.functional.pad(sequence, (0, padding), value=-1).view(groups, GROUP)
        source = torch.nn.functional.pad(sequence[: count - earlier], (earlier, padding), value=-2).view(groups, GROUP)
        last = source[:, -1]
        before = torch.cat([last.new_full((1,), -3), last[:-1]])
        inner = inner.masked_fill(own[:, :, None, None] != source[:, None, None, :], 0)
        to_end = to_end.masked_fill((source != last[:, None])[:, None], 0)
        outer = outer.masked_fill(before[:, None] != last[None, :], 0)
        from_start = from_start.masked_fill((own != before[:, None])[..., None, None], 0)

    ends = (to_end @ grouped).permute(0, 1, 3, 2, 4)  # [B, G, R, groups, X]
    arriving = (outer @ ends).permute(0, 1, 3, 2, 4)[:, :, :, None]  # [B, G, groups, 1, R, X]
    sums = (inner.flatten(-3, -2) @ grouped).unflatten(3, (GROUP, rates)) + from_start * arriving
    return sums.flatten(2, 3)[:, :, :count] * torch.exp(lag * log_rate)[:, None, :, None]
