"""MHLA of one shard of the tokens, where other processes hold the rest (context parallelism).

A query needs of far tokens only the summaries of their blocks: the shards' summaries are added up, once per layer, and
everything else stays where it is. Any contiguous shards will do; a block may lie in several.
"""

import torch

from .blocks import Blocks
from .reference import divide_or_zero
from .torch_forward import mix_blocks
from .torch_layout import Heads, gather_by_block


def sharded_mhla(
    q, k, v, mixing, *, blocks: Blocks, start: int, add_up, normalize=True, q_den=None, k_den=None, unrounded=False
) -> torch.Tensor:  # fmt: skip
    """What `mhla` gives for tokens `start` to `start + T` of the row-major order, o [B, T, H, V] in v's dtype.

    The tensors are of these tokens, all options as in `mhla`, but blocks: the cut of all tokens. add_up: a differentiable
    function that adds a tensor of this shard to those of all others; called once.

    ValueError, one sentence, if the shard is not a part of `blocks` or normalize is "official".
    """
    tokens = q.shape[1]
    if not 0 <= start <= blocks.length - tokens:
        raise ValueError(f"start is {start} for {tokens} tokens; expected a part of the {blocks.length} tokens.")
    if normalize == "official":
        raise ValueError("normalize is 'official'; expected True or False where tokens are sharded.")
    exact = torch.float64 if torch.float64 in (q.dtype, k.dtype, v.dtype) else torch.float32
    (heads,) = Heads.groups(q, exact, one_by_one=False)
    block = blocks.index(q.device)[start : start + tokens]
    sizes = torch.bincount(block, minlength=blocks.num_blocks)
    order, inverse = gather_by_block(block, sizes, int(sizes.max()))

    def by_block(x):
        x = torch.nn.functional.pad(heads.take(x), (0, 0, 0, 1))  # the last row fills short blocks
        return x.index_select(1, order).unflatten(1, (blocks.num_blocks, -1))  # [R, M, C, K]

    with torch.autocast(q.device.type, enabled=False):
        summary, m = by_block(k).mT @ by_block(v), heads.take_mixing(mixing, q.shape[3] ** -0.5)
        sums = summary.flatten(2)
        if normalize:
            sums = torch.cat([sums, by_block(k if k_den is None else k_den).sum(2)], 2)
        sums, z = add_up(sums).split([summary[0, 0].numel(), sums.shape[2] - summary[0, 0].numel()], 2)
        o = by_block(q) @ mix_blocks(m, sums.unflatten(2, summary.shape[2:]))
        if normalize:
            o = divide_or_zero(o, (by_block(q if q_den is None else q_den) @ mix_blocks(m, z[..., None])).squeeze(3))
        o = o.flatten(1, 2).index_select(1, inverse).unflatten(0, (len(q), -1)).transpose(1, 2)
        return o if unrounded else o.to(v.dtype)
