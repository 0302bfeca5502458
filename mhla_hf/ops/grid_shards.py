"""MHLA on a grid whose tokens are spread over several processes (context parallelism).

Each process mixes the summaries of its tokens for the blocks of all queries, and a reduce-scatter adds these parts up where
the queries are. Tokens are in the order of their blocks, so only the blocks at shard borders are split.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from .blocks import Blocks
from .reference import divide_or_zero
from .torch_layout import Heads, gather_by_block
from .torch_operator import mix_blocks


def sharded_mhla(
    q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, *, blocks: Blocks, rank: int,
    edges: Sequence[int], add_up: Callable[[Tensor], Tensor], normalize: bool | str = True,
    q_den: Tensor | None = None, k_den: Tensor | None = None, unrounded: bool = False,
) -> Tensor:  # fmt: skip
    """Compute the outputs of `mhla` for the tokens of one of P processes, which hold consecutive tokens in block order.

    Args:
        q, k, v, q_den, k_den, mixing, normalize, unrounded: As in `mhla`, with the T tokens of this process.
        blocks: The blocks of the tokens of all processes.
        rank, edges: Index of this process, and P + 1 edges: process p has the tokens `edges[p]` to `edges[p + 1] - 1`.
        add_up: Differentiable reduce-scatter, [P * N, ...] -> [N, ...], which all processes call.

    Returns:
        [B, T, H, V] in v's dtype or, with `unrounded`, in the dtype of the sums.

    Raises:
        ValueError: If q does not have the tokens of this process, or normalize is "official".
    """
    if q.shape[1] != edges[rank + 1] - edges[rank] or edges[-1] != blocks.length:
        expected = f"{edges[rank + 1] - edges[rank]} tokens for rank {rank}, and {blocks.length} as the last edge"
        raise ValueError(f"q: got {q.shape[1]} tokens with edges {list(edges)}, expected {expected}.")
    if normalize == "official":
        raise ValueError("normalize: got 'official', expected True or False for sharded tokens.")
    sum_dtype = torch.float64 if torch.float64 in (q.dtype, k.dtype, v.dtype) else torch.float32
    (heads,) = Heads.groups(q, sum_dtype, one_by_one=False)
    block_ends = list(accumulate(blocks.sizes()))
    # A reduce-scatter needs the same number of rows for every process, so shorter lists are filled up with row 0.
    blocks_of_ranks = [
        range(bisect_right(block_ends, first), bisect_left(block_ends, end) + 1) for first, end in pairwise(edges)
    ]
    largest = max(map(len, blocks_of_ranks))
    rows = [row for of_rank in blocks_of_ranks for row in (*of_rank, *[0] * (largest - len(of_rank)))]
    own_blocks = blocks_of_ranks[rank]
    sizes = torch.tensor([edges[rank], *block_ends[own_blocks.start : own_blocks.stop - 1], edges[rank + 1]]).diff()
    order, inverse = gather_by_block(torch.arange(len(own_blocks)).repeat_interleave(sizes), sizes, int(sizes.max()))
    order, inverse = order.to(q.device), inverse.to(q.device)

    def by_block(x: Tensor) -> Tensor:
        """Gather by block, [B, T, H or G, K] -> [B * H, M, C, K], with zeros at the end of short blocks."""
        x = torch.nn.functional.pad(heads.take(x), (0, 0, 0, 1))
        return x.index_select(1, order).unflatten(1, (len(own_blocks), -1))

    with torch.autocast(q.device.type, enabled=False):
        summary = by_block(k).mT @ by_block(v)
        m = heads.take_mixing(mixing, q.shape[3] ** -0.5)
        sums = summary.flatten(2)  # [B * H, M, K * V], with normalize [B * H, M, K * V + L]
        if normalize:
            sums = torch.cat([sums, by_block(k if k_den is None else k_den).sum(2)], 2)
        sums = mix_blocks(m[:, rows, own_blocks.start : own_blocks.stop], sums[..., None])[..., 0]
        sums = add_up(sums.transpose(0, 1)).transpose(0, 1)[:, : len(own_blocks)]
        summary_width = summary[0, 0].numel()
        mixed, z = sums.split([summary_width, sums.shape[2] - summary_width], 2)
        o = by_block(q) @ mixed.unflatten(2, summary.shape[2:])
        if normalize:
            o = divide_or_zero(o, (by_block(q if q_den is None else q_den) @ z[..., None]).squeeze(3))
        o = o.flatten(1, 2).index_select(1, inverse).unflatten(0, (len(q), -1)).transpose(1, 2)
        return o if unrounded else o.to(v.dtype)
