"""Mixing by decays: a mixing matrix m[i, j] = sum_r w_r lambda_r^(i - j) that causal attention never materializes.

A query block reads earlier blocks through R running sums of their summaries. A scan computes these in time linear in the
number of blocks; with a mixing matrix, it would be quadratic.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

SCAN_GROUP = 8  # blocks per group of the two-level scan


@dataclass
class Decays:
    """R exponential decays per head, which define a mixing matrix m[i, j] = sum_r w_r lambda_r^(i - j)."""

    weight: Tensor  # [H, R], the weights w of the query heads
    log_rate: Tensor  # [G, R], log(lambda) of the KV heads, at most 0
    # [H]: the weights of a query block are divided by n^power, where n is the number of blocks that are far from it,
    # because the far part of a query grows with n, while the sum of a softmax hardly does.
    power: Tensor | None = None

    def to(self, dtype: torch.dtype) -> "Decays":
        power = None if self.power is None else self.power.to(dtype)
        return Decays(self.weight.to(dtype), self.log_rate.to(dtype), power)

    def matrix(self, num_blocks: int, window: int = 1, both_ways: bool = False) -> Tensor:
        """Return the matrix m [H, M, M], lower triangular unless `both_ways`; only `power` depends on `window`."""
        log_rate = self.log_rate.repeat_interleave(len(self.weight) // len(self.log_rate), 0)
        power = powers(log_rate, block_distances(num_blocks, log_rate).abs())  # [H, R, M, M]
        matrix = (self.weight[..., None, None] * power).sum(1)
        if not both_ways:
            matrix = matrix.tril()
        block = torch.arange(num_blocks, device=matrix.device)
        return matrix if self.power is None else matrix * self.length_scale(block, window).T[..., None]

    def length_scale(self, block: Tensor, window: int) -> Tensor:
        """Compute n^-power [..., H], where n >= 1 is the number of far blocks of each query block in `block` [...]."""
        assert self.power is not None
        num_far = (block - window + 1).clamp(min=1)
        return torch.exp(-self.power * num_far.to(self.power.dtype).log()[..., None])


def powers(log_rate: Tensor, distance: Tensor) -> Tensor:
    """Compute lambda^distance, [G, R, *distance.shape], from log_rate [G, R]."""
    return torch.exp(log_rate.view(*log_rate.shape, *[1] * distance.dim()) * distance)


def block_distances(count: int, like: Tensor) -> Tensor:
    """Return the distances i - j between `count` blocks, int [count, count], on the device of `like`."""
    block = torch.arange(count, device=like.device)
    return block[:, None] - block[None, :]


def two_way_sums(summaries: Tensor, log_rate: Tensor, window: int) -> Tensor:
    """Compute the sums over |i - j| >= window of lambda_r^|i - j| S_j, [B, G, M, X] -> [B, G, M, R, X], quadratic in M."""
    distance = block_distances(summaries.shape[2], summaries).abs()
    mixing = powers(log_rate, distance).masked_fill(distance < window, 0).transpose(1, 2)  # [G, M, R, M]
    return (mixing.flatten(1, 2) @ summaries).unflatten(2, (-1, log_rate.shape[1]))


def decayed_sums(summaries: Tensor, log_rate: Tensor, window: int = 1, sequence_id: Tensor | None = None) -> Tensor:
    """Compute the sums over j <= i - window of lambda_r^(i - j) S_j: [B, G, M, X] -> [B, G, M, R, X].

    One small matrix sums the blocks within each group of `SCAN_GROUP` blocks, and another the earlier groups. No sum crosses
    the borders of packed sequences (`sequence_id` [M]).
    """
    num_blocks, num_rates = summaries.shape[2], log_rate.shape[1]
    num_groups = (num_blocks + SCAN_GROUP - 1) // SCAN_GROUP + 1  # never 1, which torch.compile would specialize on
    offset = min(window - 1, num_blocks)
    padding = num_groups * SCAN_GROUP - num_blocks
    summaries = torch.nn.functional.pad(summaries[:, :, : num_blocks - offset], (0, 0, offset, padding))
    grouped = summaries.unflatten(2, (num_groups, SCAN_GROUP))  # index i holds S_{i - window + 1}

    in_group = torch.arange(SCAN_GROUP, device=summaries.device)
    distance = block_distances(SCAN_GROUP, summaries)
    within = powers(log_rate, (distance - 1).clamp(min=0)).masked_fill(distance < 1, 0)  # [G, R, i, j]
    within = within.permute(0, 2, 1, 3)[:, None]  # [G, 1, i, R, j]
    to_group_end = powers(log_rate, SCAN_GROUP - 1 - in_group)[:, None]  # [G, 1, R, j]
    group_distance = block_distances(num_groups, summaries)
    across = powers(log_rate, SCAN_GROUP * (group_distance - 1).clamp(min=0)).masked_fill(group_distance < 1, 0)
    from_group_start = powers(log_rate, in_group).transpose(1, 2)[:, None, ..., None]  # [G, 1, i, R, 1]
    if sequence_id is not None:
        # Zero every path from a summary to a block of another sequence. The padding values -1, -2, and -3 match nothing.
        pad = torch.nn.functional.pad
        reader = pad(sequence_id, (0, padding), value=-1).view(num_groups, SCAN_GROUP)
        source = pad(sequence_id[: num_blocks - offset], (offset, padding), value=-2).view(num_groups, SCAN_GROUP)
        last = source[:, -1]
        previous_last = torch.cat([last.new_full((1,), -3), last[:-1]])
        within = within.masked_fill(reader[:, :, None, None] != source[:, None, None, :], 0)
        to_group_end = to_group_end.masked_fill((source != last[:, None])[:, None], 0)
        across = across.masked_fill(previous_last[:, None] != last[None, :], 0)
        from_group_start = from_group_start.masked_fill((reader != previous_last[:, None])[..., None, None], 0)

    group_sums = (to_group_end @ grouped).permute(0, 1, 3, 2, 4)  # [B, G, R, groups, X]
    from_earlier = (across @ group_sums).permute(0, 1, 3, 2, 4)[:, :, :, None]  # [B, G, groups, 1, R, X]
    sums = (within.flatten(-3, -2) @ grouped).unflatten(3, (SCAN_GROUP, num_rates)) + from_group_start * from_earlier
    return sums.flatten(2, 3)[:, :, :num_blocks] * torch.exp(window * log_rate)[:, None, :, None]
