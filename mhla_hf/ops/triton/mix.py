"""Products of the mixing matrix with block summaries (paper eq. 5), and the gradient of the mixing matrix.

Mixing is bound by memory up to about 370 blocks. The mixing matrix stays in fp32: next to bf16 summaries it is split into
two bf16 parts, which removes the largest single rounding error of the operator and costs arithmetic only.
"""

from typing import no_type_check

import torch
from torch import Tensor

from .common import cast, constexpr, dot
from .summaries import sum_parts
from .tuning import block_tiles, dot_kind, mixing_arguments, tl, triton, tuned


@tuned(block_tiles, "X", "DOT", "TRIANGLE")
@no_type_check
def mix_kernel(
    mixing, mixing_head_stride, mixing_row_stride, s, p, num_blocks, num_columns, num_heads,
    heads_per_source, sources_per_head,
    X: constexpr, TRANSPOSED: constexpr, TRIANGLE: constexpr, DOT: constexpr, BM: constexpr, BN: constexpr, BX: constexpr,
):  # fmt: skip
    """Compute p[i] = sum_j m[i, j] s[j] or, with TRANSPOSED, sum_j m[j, i] s[j]; each program computes a [BM, BX] tile.

    p, s: [B, num_heads, num_blocks, X] and [B, heads, num_columns, X].
    heads_per_source: Number of consecutive heads of p that read the same head of s; 1 if `sources_per_head` exceeds 1.
    sources_per_head: Number of consecutive heads of s and m that are summed for each head of p.
    TRIANGLE: 0 to sum over all j, 1 over j < i, 2 over j > i.
    """
    num_x_tiles: tl.constexpr = (X + BX - 1) // BX
    program = tl.program_id(0)
    num_row_tiles = tl.cdiv(num_blocks, BM)
    x = program % num_x_tiles * BX + tl.arange(0, BX)
    row_tile = program // num_x_tiles % num_row_tiles
    item = (program // num_x_tiles // num_row_tiles).to(tl.int64)
    head, batch = item % num_heads, item // num_heads
    i = row_tile * BM + tl.arange(0, BM)
    begin, end = 0, num_columns
    if TRIANGLE == 1:
        end = tl.minimum(num_columns, (row_tile + 1) * BM)
    if TRIANGLE == 2:
        begin = row_tile * BM
    total = tl.zeros((BM, BX), tl.float32)
    for member in range(sources_per_head):
        weights = mixing + (head * sources_per_head + member) * mixing_head_stride
        source_head = head // heads_per_source * sources_per_head + member
        source = s + (batch * (num_heads // heads_per_source * sources_per_head) + source_head) * num_columns * X
        for first in range(begin, end, BN):
            j = first + tl.arange(0, BN)
            inside = (i < num_blocks)[:, None] & (j < num_columns)[None, :]
            if TRIANGLE == 1:
                inside = inside & (j[None, :] < i[:, None])
            if TRIANGLE == 2:
                inside = inside & (j[None, :] > i[:, None])
            if TRANSPOSED:
                pointers = weights + j.to(tl.int64)[None, :] * mixing_row_stride + i[:, None]
            else:
                pointers = weights + i.to(tl.int64)[:, None] * mixing_row_stride + j[None, :]
            weight = tl.load(pointers, mask=inside, other=0.0)
            pointers = source + j[:, None].to(tl.int64) * X + x[None, :]
            summary = tl.load(pointers, mask=(j < num_columns)[:, None] & (x < X)[None, :], other=0.0)
            if DOT == "bf16":
                high = cast(weight, tl.bfloat16)
                total += dot(weight - high.to(tl.float32), summary, DOT)
                total += dot(high, summary, DOT)
            else:
                total += dot(weight, summary, DOT)
    pointers = p + (item * num_blocks + i[:, None]) * X + x[None, :]
    tl.store(pointers, cast(total, p.dtype.element_ty), mask=(i < num_blocks)[:, None] & (x < X)[None, :])


def mix(mixing: Tensor, s: Tensor, num_heads: int, *, causal: bool = False, transposed: bool = False) -> Tensor:
    """Compute sum_j m_ij s_j or, with `transposed`, sum_j m_ji s_j: [B, G, N, ...] -> [B, num_heads, M, ...].

    If `num_heads` is less than G, neighboring heads are summed. If causal, only j < i count (j > i with `transposed`).
    """
    batch, num_source_heads, num_columns = s.shape[:3]
    width = s[0, 0, 0].numel()
    num_blocks = mixing.shape[-1 if transposed else -2]
    p = torch.empty(batch, num_heads, num_blocks, *s.shape[3:], dtype=s.dtype, device=s.device)

    def grid(sizes: dict[str, int]) -> tuple[int]:
        return (triton.cdiv(width, sizes["BX"]) * triton.cdiv(num_blocks, sizes["BM"]) * num_heads * batch,)

    mix_kernel[grid](
        **mixing_arguments(mixing),
        s=s,
        p=p,
        num_blocks=num_blocks,
        num_columns=num_columns,
        num_heads=num_heads,
        heads_per_source=max(1, num_heads // num_source_heads),
        sources_per_head=max(1, num_source_heads // num_heads),
        X=width,
        TRANSPOSED=transposed,
        TRIANGLE=(2 if transposed else 1) if causal else 0,
        DOT=dot_kind(s),
    )
    return p


def mix_states(
    mixing: Tensor, s: Tensor, num_heads: int, num_chunks: int | None, *, transposed: bool = False
) -> Tensor:
    """Compute the state that the queries of each block or, if causal, of each of its `num_chunks` chunks read.

    A chunk reads the mixture of earlier blocks, and m_ii times the sum of the chunks before it in its own block; with
    `transposed`, later blocks and chunks. Both s and the result are [B, heads, blocks or blocks * num_chunks, ...].
    """
    if num_chunks is None or num_chunks == 1:
        return mix(mixing, s, num_heads, causal=num_chunks is not None, transposed=transposed)
    mixed = mix(mixing, sum_parts(s, num_chunks), num_heads, causal=True, transposed=transposed)
    running = running_sums(s, num_chunks, reverse=transposed)
    if num_heads > running.shape[1]:
        running = running.repeat_interleave(num_heads // running.shape[1], 1)
    diagonal = mixing.diagonal(dim1=-2, dim2=-1)
    running = running * diagonal.reshape(-1, diagonal.shape[-1], *[1] * (running.dim() - 3))
    if num_heads < running.shape[1]:
        running = running.unflatten(1, (num_heads, -1)).sum(2)
    return (mixed[:, :, :, None] + running).to(s.dtype).flatten(2, 3)


def mix_states_grads(p_grad: Tensor, s: Tensor, mixing_dim: int, num_chunks: int | None) -> Tensor:
    """Compute the gradient of the mixing matrix of `mix_states`, which has `mixing_dim` axes: fp32 [Mq, N] or [H, Mq, N]."""
    heads = 0 if mixing_dim == 3 else (0, 1)  # axes of [B, H, ...] to sum over
    by_block = (x if num_chunks in (None, 1) else sum_parts(x, num_chunks) for x in (p_grad, s))
    p_blocks, s_blocks = (x.flatten(3).float() for x in by_block)  # sums in bf16 would cost the gradient two digits
    products = p_blocks.unflatten(1, (s.shape[1], -1)) @ s_blocks[:, :, None].mT  # [B, G, heads // G, Mq, N]
    mixing_grad = products.flatten(1, 2).sum(heads)
    if num_chunks is None:
        return mixing_grad
    mixing_grad = mixing_grad.tril(-1)
    if num_chunks == 1:
        return mixing_grad
    running = running_sums(s, num_chunks).repeat_interleave(p_grad.shape[1] // s.shape[1], 1)
    diagonal_grad = (p_grad.view(running.shape) * running).flatten(3).sum(3)  # [B, heads, M]
    return mixing_grad + torch.diag_embed(diagonal_grad.sum(heads))


def running_sums(s: Tensor, num_chunks: int, reverse: bool = False) -> Tensor:
    """Sum the chunks of a block before each chunk or, if `reverse`, after it: [B, G, M * n, ...] -> [B, G, M, n, ...]."""
    s = s.unflatten(2, (-1, num_chunks)).float()
    s = s.flip(3) if reverse else s
    # A sum that excludes the chunk itself; subtracting it from an inclusive sum would cancel small values.
    before = torch.cat([torch.zeros_like(s[:, :, :, :1]), s[:, :, :, :-1].cumsum(3)], 3)
    return before.flip(3) if reverse else before
