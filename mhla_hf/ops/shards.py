"""MHLA of one shard of the tokens, where other processes hold the rest (context parallelism).

A query needs of far tokens only the summaries of their blocks: the shards' summaries are added up, once per layer, and
everything else stays where it is. Any contiguous shards will do; a block may lie in several.
"""

import torch

from .blocks import Blocks
from .reference import divide_or_zero
from .torch_forward import mix_blocks
from .torch_layout import gather_by_block


def sharded_mhla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mixing: torch.Tensor,
    *,
    blocks: Blocks,
    start: int,
    add_up,
    normalize: bool = True,
    q_den: torch.Tensor | None = None,
    k_den: torch.Tensor | None = None,
    unrounded: bool = False,
) -> torch.Tensor:
    """What `mhla` gives for tokens `start` to `start + T` of the row-major order, o `[B, T, H, V]` in v's dtype.

    Args:
        q, k, v, q_den, k_den: features of these tokens, `[B, T, H, K]`, as in `mhla`; as many key heads as query heads.
        mixing: `[M, M]` or `[H, M, M]`.
        blocks: the cut of all tokens.
        add_up: a differentiable function that adds a tensor of this shard to those of all others; called once.
        normalize: True or False.
        unrounded: o in the dtype of the sums, as in `mhla`.

    Raises:
        ValueError: one sentence; the shard is not a part of `blocks`, or normalize is "official".
    """
    tokens, heads = q.shape[1], q.shape[2]
    if not 0 <= start <= blocks.length - tokens:
        raise ValueError(f"start is {start} for {tokens} tokens; expected a part of the {blocks.length} tokens.")
    if normalize == "official":
        raise ValueError("normalize is 'official'; expected True or False where tokens are sharded.")
    exact = torch.float64 if torch.float64 in (q.dtype, k.dtype, v.dtype) else torch.float32
    block = blocks.index(q.device)[start : start + tokens]
    sizes = torch.bincount(block, minlength=blocks.num_blocks)
    order, inverse = gather_by_block(block, sizes, int(sizes.max()))

    def by_block(x):
        rows = torch.nn.functional.pad(x.to(exact).transpose(1, 2), (0, 0, 0, 1))  # the last row fills short blocks
        return rows.index_select(2, order).unflatten(2, (blocks.num_blocks, -1))  # [B, H, M, C, K]

    with torch.autocast(q.device.type, enabled=False):
        parts = by_block(k), by_block(v), by_block(k if k_den is None else k_den)
        summary = parts[0].mT @ parts[1]
        both = add_up(torch.cat([summary.flatten(3), parts[2].sum(3)], dim=3) if normalize else summary.flatten(3))
        width = summary.shape[3] * summary.shape[4]
        m = (mixing.to(exact) * q.shape[3] ** -0.5).expand(heads, *mixing.shape[-2:])
        o = by_block(q) @ mix_blocks_of_heads(m, both[..., :width].unflatten(3, summary.shape[3:]))
        if normalize:
            z = mix_blocks_of_heads(m, both[..., width:, None])
            o = divide_or_zero(o, (by_block(q if q_den is None else q_den) @ z).squeeze(4))
        o = o.flatten(2, 3).index_select(2, inverse).transpose(1, 2)
        return o if unrounded else o.to(v.dtype)


def mix_blocks_of_heads(m: torch.Tensor, summary: torch.Tensor) -> torch.Tensor:
    """`mix_blocks` for summaries `[B, H, M, K, V]` and one matrix per head."""
    mixed = mix_blocks(m.repeat(summary.shape[0], 1, 1), summary.flatten(0, 1))
    return mixed.unflatten(0, summary.shape[:2])
