"""Kernels on block summaries: mixing them (paper eq. 5) and the gradient of the mixing matrix.

Both are matrix products whose long axis is the flattened summary, bound by memory until there are some 370 blocks. The
mixing matrix stays fp32: next to bf16 summaries it is split into two bf16 parts, which removes the largest single rounding
error of the operator and costs arithmetic only. Gradients of the matrix are summed from partial results in a fixed order.
"""

import torch

from .triton_common import as_matrix, cast, constexpr, dot_kind, kernel, language_dtype, launch, tile_dot, tiles
from .triton_configs import dot_precision, pass_config

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None
    tl = None


@kernel
def mix_kernel(
    m,
    m_head,
    m_row,
    source,
    out,
    blocks,
    columns,
    parts,
    wide,
    heads,
    share,
    reps,
    TRANSPOSED: constexpr,
    TRIANGLE: constexpr,
    BM: constexpr,
    BN: constexpr,
    BX: constexpr,
    DOT: constexpr,
    PRECISION: constexpr,
):
    """out [B, heads, M, wide] = sum over j and reps of m[i, j // parts] source [B, heads // share * reps, columns, wide].

    m[j // parts, i] if TRANSPOSED. TRIANGLE 1 takes j < i only, 2 takes j > i only, 0 takes all.
    """
    program = tl.program_id(0)
    x_tiles, row_tiles = tl.cdiv(wide, BX), tl.cdiv(blocks, BM)
    x = program % x_tiles * BX + tl.arange(0, BX)
    row_tile = program // x_tiles % row_tiles
    item = (program // x_tiles // row_tiles).to(tl.int64)
    head, batch = item % heads, item // heads
    i = row_tile * BM + tl.arange(0, BM)
    begin, end = 0, columns
    if TRIANGLE == 1:
        end = tl.minimum(columns, (row_tile + 1) * BM)
    if TRIANGLE == 2:
        begin = row_tile * BM
    total = tl.zeros((BM, BX), tl.float32)
    for rep in range(reps):
        part = head // share * reps + rep
        weights = m + (head * reps + rep) * m_head
        start = source + (batch * (heads // share * reps) + part) * columns * wide
        for first in range(begin, end, BN):
            j = first + tl.arange(0, BN)
            inside = (i < blocks)[:, None] & (j < columns)[None, :]
            if TRIANGLE == 1:
                inside = inside & (j[None, :] < i[:, None])
            if TRIANGLE == 2:
                inside = inside & (j[None, :] > i[:, None])
            if TRANSPOSED:
                pointers = weights + (j // parts).to(tl.int64)[None, :] * m_row + i[:, None]
            else:
                pointers = weights + i[:, None].to(tl.int64) * m_row + (j // parts)[None, :]
            weight = tl.load(pointers, mask=inside, other=0.0)
            pointers = start + j[:, None].to(tl.int64) * wide + x[None, :]
            summary = tl.load(pointers, mask=(j < columns)[:, None] & (x < wide)[None, :], other=0.0)
            if DOT == tl.bfloat16:  # noqa: SIM300
                high = cast(weight, tl.bfloat16)
                total += tile_dot(cast(weight - high.to(tl.float32), tl.bfloat16), summary, PRECISION)
                total += tile_dot(high, summary, PRECISION)
            else:
                total += tile_dot(weight, summary, PRECISION)
    pointers = out + (item * blocks + i[:, None]) * wide + x[None, :]
    tl.store(pointers, cast(total, out.dtype.element_ty), mask=(i < blocks)[:, None] & (x < wide)[None, :])


@kernel
def mix_grads_kernel(
    grad,
    source,
    out,
    blocks,
    columns,
    wide,
    pairs,
    splits,
    matrices,
    heads,
    share,
    TRIANGLE: constexpr,
    BM: constexpr,
    BN: constexpr,
    BX: constexpr,
    PRECISION: constexpr,
):
    """out [splits, matrices, M, N]: <grad[i], source[j]>, summed over every splits-th of the pairs of a matrix.

    grad [B, heads, M, wide], source [B, heads // share, N, wide]. With one matrix the pairs are all rows and heads, else
    matrix h has the rows of head h.
    """
    program = tl.program_id(0)
    column_tiles, row_tiles = tl.cdiv(columns, BN), tl.cdiv(blocks, BM)
    j = program % column_tiles * BN + tl.arange(0, BN)
    i = program // column_tiles % row_tiles * BM + tl.arange(0, BM)
    item = program // column_tiles // row_tiles
    matrix, split = item % matrices, item // matrices
    total = tl.zeros((BM, BN), tl.float32)
    last_row = program // column_tiles % row_tiles * BM + BM - 1
    if TRIANGLE == 0 or program % column_tiles * BN < last_row:
        for pair in range(split, pairs, splits):
            if matrices == 1:
                batch, head = pair // heads, pair % heads
            else:
                batch, head = pair, matrix
            left = grad + (batch * heads + head).to(tl.int64) * blocks * wide
            right = source + (batch * (heads // share) + head // share).to(tl.int64) * columns * wide
            for first in range(0, wide, BX):
                x = first + tl.arange(0, BX)
                pointers = left + i[:, None].to(tl.int64) * wide + x[None, :]
                a = tl.load(pointers, mask=(i < blocks)[:, None] & (x < wide)[None, :], other=0.0)
                pointers = right + j[:, None].to(tl.int64) * wide + x[None, :]
                b = tl.load(pointers, mask=(j < columns)[:, None] & (x < wide)[None, :], other=0.0)
                total += tile_dot(a, tl.trans(b), PRECISION)
    if TRIANGLE == 1:
        total = tl.where(j[None, :] < i[:, None], total, 0.0)
    pointers = out + (item.to(tl.int64) * blocks + i[:, None]) * columns + j[None, :]
    tl.store(pointers, total, mask=(i < blocks)[:, None] & (j < columns)[None, :])


def mix(mixing, source, heads, *, triangle=0, transposed=False):
    """sum_j m_ij source_j, [B, heads, M, ...] in source's dtype, or with `transposed` the adjoint of that.

    mixing fp32 [Mq, Mk] or [H, Mq, Mk]; source [B, G, N, ...], or [B, G, N * parts, ...] if every summary is the sum of so
    many parts. heads: those of the result; there are as many as in source if all share the mixing. triangle 1 takes earlier
    blocks only.
    """
    batch, groups, columns = source.shape[:3]
    wide = source[0, 0, 0].numel()
    blocks, summed = mixing.shape[:-3:-1] if transposed else mixing.shape[-2:]
    out = torch.empty(batch, heads, blocks, *source.shape[3:], dtype=source.dtype, device=source.device)
    dot = dot_kind(source)
    config = pass_config("mix", blocks, wide, dot, source.device)
    launch(
        mix_kernel,
        tiles(wide, config["BX"]) * tiles(blocks, config["BM"]) * heads * batch,
        source.device,
        *as_matrix(mixing),
        source,
        out,
        blocks,
        columns,
        columns // summed,
        wide,
        heads,
        max(1, heads // groups),
        max(1, groups // heads),
        TRANSPOSED=transposed,
        TRIANGLE=2 * triangle if transposed else triangle,
        DOT=language_dtype(dot),
        PRECISION=dot_precision(dot),
        **config,
    )
    return out


def mix_grads(grad, source, shape, *, triangle=0):
    """Gradient of `mix`'s mixing of that shape, fp32; grad [B, heads, Mq, ...], in parts or not, source as there."""
    batch, heads, blocks = grad.shape[:3]
    groups, columns = source.shape[1:3]
    wide = source[0, 0, 0].numel()
    dot = dot_kind(source)
    config = pass_config("mix_grads", blocks, wide, dot, source.device)
    matrices, pairs = (heads, batch) if len(shape) == 3 else (1, batch * heads)
    grid = tiles(blocks, config["BM"]) * tiles(columns, config["BN"]) * matrices
    splits = max(1, min(pairs, 1024 // grid))
    out = torch.empty(splits, matrices, blocks, columns, dtype=torch.float32, device=grad.device)
    counts = (blocks, columns, wide, pairs, splits, matrices, heads, heads // groups)
    launch(
        mix_grads_kernel,
        grid * splits,
        grad.device,
        grad,
        source,
        out,
        *counts,
        TRIANGLE=triangle,
        PRECISION=dot_precision(dot),
        **config,
    )
    rows, summed = shape[-2:]
    return out.view(splits, matrices, rows, blocks // rows, summed, columns // summed).sum((0, 3, 5)).view(shape)
