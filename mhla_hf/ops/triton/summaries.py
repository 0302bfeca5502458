"""The kernel that sums over the tokens of a block: S = sum k v^T and z = sum k (paper eq. 4).

Each program accumulates one tile of the sum over a part of a block: a whole block, a chunk of a causal block, or, if few
long blocks would leave most of a GPU idle, a fraction. The gradients of mixed summaries are summaries of q and do.
"""

from functools import partial
from typing import no_type_check

import torch
from torch import Tensor

from .common import (
    KernelBlocks,
    block_range,
    cast,
    constexpr,
    dot,
    load_number,
    load_scaled,
    load_tile,
    program_of,
    tokens_from,
)
from .tuning import CHUNK, tl, token_tiles, triton, tuned, with_strides

MIN_PART_TOKENS = 256
ENOUGH_PROGRAMS = 384  # about three for each multiprocessor of the largest GPUs


@tuned(partial(token_tiles, max_lanes=64), "K", "V", "CAUSAL", "DOT")
@no_type_check
def summaries_kernel(
    k, v, v_factor, z_factor, key_mask, s, z, tables, num_tokens, block_size, span, num_parts, num_blocks, num_heads,
    heads_per_sum,
    K: constexpr, V: constexpr, CAUSAL: constexpr, DOT: constexpr, BT: constexpr, BK: constexpr, BV: constexpr,
):  # fmt: skip
    """Compute s [B, num_heads, M * parts, K, V] and z [B, num_heads, M * parts, K]; each program computes a tile of a part.

    span: Number of tokens in a part.
    heads_per_sum: Number of neighboring heads of k and v that are summed.
    """
    num_v_tiles: tl.constexpr = (V + BV - 1) // BV
    num_k_tiles: tl.constexpr = (K + BK - 1) // BK
    tile, part, block, head, row = program_of(num_v_tiles * num_k_tiles, num_parts, num_blocks, num_heads)
    k_lanes = tile // num_v_tiles * BK + tl.arange(0, BK)
    v_lanes = tile % num_v_tiles * BV + tl.arange(0, BV)
    low, high = block_range(block, row, tables, num_tokens, block_size)
    low, high = low + part * span, tl.minimum(high, low + part * span + span)
    total = tl.zeros((BK, BV), tl.float32)
    total_z = tl.zeros((BK,), tl.float32)
    num_sources = num_heads * heads_per_sum
    for member in range(heads_per_sum):
        source = head * heads_per_sum + member
        for first in range(low, high, BT):
            token, _, real = tokens_from(first, high, tables, key_mask, row, num_tokens, BT, True)
            key = load_tile(k, row, token, source, real, k_lanes, K)
            value = load_scaled(v, v_factor, row, token, source, num_tokens, num_sources, real, v_lanes, V, DOT)
            total += dot(tl.trans(key), value, DOT)
            if z is not None:
                weight = key.to(tl.float32)
                if z_factor is not None:
                    weight *= load_number(z_factor, row, token, source, num_tokens, num_sources, real)[:, None]
                total_z += tl.sum(weight, 0)
    start = (((row * num_heads + head) * num_blocks + block) * num_parts + part) * K
    inside = (k_lanes < K)[:, None] & (v_lanes < V)[None, :]
    tl.store(s + (start + k_lanes[:, None]) * V + v_lanes[None, :], cast(total, s.dtype.element_ty), mask=inside)
    if z is not None and tile % num_v_tiles == 0:
        tl.store(z + start + k_lanes, total_z, mask=k_lanes < K)


def summaries(
    k: Tensor, v: Tensor, blocks: KernelBlocks, dot_as: str, num_heads: int, causal: bool, with_z: bool, *,
    key_mask: Tensor | None = None, v_factor: Tensor | None = None, z_factor: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute the sums of k v^T and, `with_z`, of k over every block or, if causal, over every chunk.

    Neighboring heads are summed, so that `num_heads` are left: s is [B, num_heads, M or M * chunks, K, V], and z the same
    without V. v_factor [B, T, H] multiplies v, and z_factor [B, T, H] multiplies k in the sum of k.
    """
    batch, _, total_heads, key_width = k.shape
    value_width = v.shape[3]
    num_sums = blocks.num_blocks * num_heads * batch
    span = CHUNK if causal else part_span(blocks.span, num_sums)
    num_parts = triton.cdiv(blocks.span, span)
    shape = batch, num_heads, blocks.num_blocks * num_parts, key_width
    s_dtype = torch.bfloat16 if dot_as == "bf16" else torch.float32
    s = torch.empty(*shape, value_width, dtype=s_dtype, device=k.device)
    z = torch.empty(*shape, dtype=torch.float32, device=k.device) if with_z else None

    def grid(sizes: dict[str, int]) -> tuple[int]:
        lane_tiles = triton.cdiv(key_width, sizes["BK"]) * triton.cdiv(value_width, sizes["BV"])
        return (lane_tiles * num_parts * num_sums,)

    summaries_kernel[grid](
        k=with_strides(k),
        v=with_strides(v),
        v_factor=v_factor,
        z_factor=z_factor,
        key_mask=key_mask,
        s=s,
        z=z,
        **blocks.arguments(),
        span=span,
        num_parts=num_parts,
        num_heads=num_heads,
        heads_per_sum=total_heads // num_heads,
        K=key_width,
        V=value_width,
        CAUSAL=causal,
        DOT=dot_as,
    )
    if num_parts == 1 or causal:
        return s, z
    return sum_parts(s, num_parts), None if z is None else sum_parts(z, num_parts)


def part_span(span: int, num_sums: int) -> int:
    """Return the tokens per part: for about `ENOUGH_PROGRAMS` parts in all, but at least `MIN_PART_TOKENS` or a block."""
    num_parts = max(1, min(span // MIN_PART_TOKENS, triton.cdiv(ENOUGH_PROGRAMS, num_sums)))
    return triton.cdiv(triton.cdiv(span, num_parts), CHUNK) * CHUNK


def sum_parts(s: Tensor, num_parts: int) -> Tensor:
    """Sum the parts of each block: [B, G, M * parts, ...] -> [B, G, M, ...]."""
    return s.unflatten(2, (-1, num_parts)).sum(3)
