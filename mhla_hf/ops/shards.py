"""MHLA of one shard of the tokens of a grid, where other processes hold the rest (context parallelism).

A query needs of far tokens only the mixed summary of its block. Each process mixes the summaries of its own tokens for the
blocks of all queries; these parts are added up where the queries are (a reduce-scatter), once per layer, and everything
else stays where it is. Tokens are in the order of their blocks, so that only the blocks at borders lie in several shards.
"""

from bisect import bisect_left, bisect_right
from itertools import accumulate, pairwise

import torch

from .blocks import Blocks
from .reference import divide_or_zero
from .torch_forward import mix_blocks
from .torch_layout import Heads, gather_by_block


def sharded_mhla(
    q, k, v, mixing, *, blocks: Blocks, rank: int, edges, add_up, normalize=True, q_den=None, k_den=None, unrounded=False
) -> torch.Tensor:  # fmt: skip
    """What `mhla` gives for tokens `edges[rank]` to `edges[rank + 1]` in the order of their blocks, o [B, T, H, V].

    The tensors are of these tokens, all options as in `mhla`, but blocks: the cut of all tokens. edges: where the shards of
    all processes begin in that order, and the end. add_up: a differentiable function, called once, that takes x [P * N, ..]
    and returns the sum over processes of part number `rank`, [N, ..] (`ReduceScatter`).

    ValueError, one sentence, if the tensors are not that shard or normalize is "official".
    """
    if q.shape[1] != edges[rank + 1] - edges[rank] or edges[-1] != blocks.length:
        what = f"expected shard {rank} of {blocks.length} tokens cut at {list(edges)}"
        raise ValueError(f"q: got {q.shape[1]} tokens, {what}.")
    if normalize == "official":
        raise ValueError("normalize is 'official'; expected True or False where tokens are sharded.")
    exact = torch.float64 if torch.float64 in (q.dtype, k.dtype, v.dtype) else torch.float32
    (heads,) = Heads.groups(q, exact, one_by_one=False)
    ends = list(accumulate(blocks.sizes()))
    wanted = [range(bisect_right(ends, first), bisect_left(ends, end) + 1) for first, end in pairwise(edges)]
    own, most = wanted[rank], max(map(len, wanted))
    rows = [
        number for part in wanted for number in (*part, *[0] * (most - len(part)))
    ]  # of all processes, equally many
    sizes = torch.tensor([edges[rank], *ends[own.start : own.stop - 1], edges[rank + 1]]).diff()
    order = gather_by_block(torch.arange(len(own)).repeat_interleave(sizes), sizes, int(sizes.max()))
    order, inverse = (x.to(q.device) for x in order)

    def by_block(x):
        x = torch.nn.functional.pad(heads.take(x), (0, 0, 0, 1))  # the last row fills short blocks
        return x.index_select(1, order).unflatten(1, (len(own), -1))  # [R, M, C, K]

    with torch.autocast(q.device.type, enabled=False):
        summary, m = by_block(k).mT @ by_block(v), heads.take_mixing(mixing, q.shape[3] ** -0.5)
        sums = summary.flatten(2)
        if normalize:
            sums = torch.cat([sums, by_block(k if k_den is None else k_den).sum(2)], 2)
        sums = mix_blocks(m[:, rows, own.start : own.stop], sums[..., None])[..., 0]
        sums = add_up(sums.transpose(0, 1)).transpose(0, 1)[:, : len(own)]
        sums, z = sums.split([summary[0, 0].numel(), sums.shape[2] - summary[0, 0].numel()], 2)
        o = by_block(q) @ sums.unflatten(2, summary.shape[2:])
        if normalize:
            o = divide_or_zero(o, (by_block(q if q_den is None else q_den) @ z[..., None]).squeeze(3))
        o = o.flatten(1, 2).index_select(1, inverse).unflatten(0, (len(q), -1)).transpose(1, 2)
        return o if unrounded else o.to(v.dtype)
