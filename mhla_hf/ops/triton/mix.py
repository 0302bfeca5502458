"""Products of the mixing matrix with block summaries (paper eq. 5), and the gradient of that matrix.

Mixing is a matrix product whose long axis is the flattened summary, bound by memory until there are some 370 blocks. The
mixing matrix stays fp32: next to bf16 summaries it is split into two bf16 parts, which removes the largest single rounding
error of the operator and costs arithmetic only.

Long causal blocks have a summary for each chunk of 64 tokens. What a chunk sees is the mixture of earlier blocks, and m_ii
times the sum of the chunks before it in its own block; the latter is elementwise, and left to PyTorch.
"""

import torch

from .common import cast, constexpr, dot
from .summaries import sum_parts
from .tuning import as_matrix, block_tiles, dot_kind, tiles, tl, tuned


@tuned(block_tiles, "X", "DOT", "TRIANGLE")
def mix_kernel(
    mixing, m_head, m_row, s, p, blocks, columns, heads, share, group,
    X: constexpr, TRANSPOSED: constexpr, TRIANGLE: constexpr, DOT: constexpr, BM: constexpr, BN: constexpr, BX: constexpr,
):  # fmt: skip
    """p [B, heads, M, X] = sum over j, and `group` heads of s and of mixing, of m[i, j] s [B, .., N, X], TRANSPOSED m[j, i].

    TRIANGLE 1 takes j < i only, 2 takes j > i only, 0 takes all. `share` heads of p share one of s.
    """
    x_tiles: constexpr = (X + BX - 1) // BX
    program = tl.program_id(0)
    row_tiles = tl.cdiv(blocks, BM)
    x = program % x_tiles * BX + tl.arange(0, BX)
    row_tile, item = program // x_tiles % row_tiles, (program // x_tiles // row_tiles).to(tl.int64)
    head, batch = item % heads, item // heads
    i = row_tile * BM + tl.arange(0, BM)
    begin, end = 0, columns
    if TRIANGLE == 1:
        end = tl.minimum(columns, (row_tile + 1) * BM)
    if TRIANGLE == 2:
        begin = row_tile * BM
    total = tl.zeros((BM, BX), tl.float32)
    for member in range(group):
        weights = mixing + (head * group + member) * m_head
        source = s + (batch * (heads // share * group) + head // share * group + member) * columns * X
        for first in range(begin, end, BN):
            j = first + tl.arange(0, BN)
            inside = (i < blocks)[:, None] & (j < columns)[None, :]
            if TRIANGLE == 1:
                inside = inside & (j[None, :] < i[:, None])
            if TRIANGLE == 2:
                inside = inside & (j[None, :] > i[:, None])
            if TRANSPOSED:
                pointers = weights + j.to(tl.int64)[None, :] * m_row + i[:, None]
            else:
                pointers = weights + i.to(tl.int64)[:, None] * m_row + j[None, :]
            weight = tl.load(pointers, mask=inside, other=0.0)
            pointers = source + j[:, None].to(tl.int64) * X + x[None, :]
            summary = tl.load(pointers, mask=(j < columns)[:, None] & (x < X)[None, :], other=0.0)
            if DOT == "bf16":
                high = cast(weight, tl.bfloat16)
                total += dot(weight - high.to(tl.float32), summary, DOT)
                total += dot(high, summary, DOT)
            else:
                total += dot(weight, summary, DOT)
    pointers = p + (item * blocks + i[:, None]) * X + x[None, :]
    tl.store(pointers, cast(total, p.dtype.element_ty), mask=(i < blocks)[:, None] & (x < X)[None, :])


def mix(mixing, s, heads, *, causal=False, transposed=False):
    """sum_j m_ij s_j, [B, heads, M, ...] in s's dtype, or with `transposed` the adjoint of that; causal: over j < i.

    mixing fp32 [Mq, Mk] or [H, Mq, Mk]; s [B, G, N, ...]. heads: those of the result, as many as in s if all share the
    mixing.
    """
    batch, groups, columns = s.shape[:3]
    width, blocks = s[0, 0, 0].numel(), mixing.shape[-1 if transposed else -2]
    p = torch.empty(batch, heads, blocks, *s.shape[3:], dtype=s.dtype, device=s.device)
    share, group = max(1, heads // groups), max(1, groups // heads)
    triangle = (2 if transposed else 1) if causal else 0
    mix_kernel.launch(
        lambda sizes: (tiles(width, sizes["BX"]) * tiles(blocks, sizes["BM"]) * heads * batch,),
        (*as_matrix(mixing), s, p, blocks, columns, heads, share, group),
        {"X": width, "TRANSPOSED": transposed, "TRIANGLE": triangle, "DOT": dot_kind(s)},
    )
    return p


def mix_grads(dp, s, shape, *, causal=False):
    """Gradient of `mix`'s mixing of that shape, fp32; dp [B, heads, Mq, ...] is that of its result. causal: j < i only."""
    groups = s.shape[1]
    dp, s = dp.flatten(3).float(), s.flatten(3).float()  # sums in bf16 would cost the gradient two digits
    pairs = dp.unflatten(1, (groups, -1)) @ s[:, :, None].mT  # [B, G, heads // G, Mq, N]
    dm = pairs.flatten(1, 2).sum(0 if len(shape) == 3 else (0, 1))
    return dm.tril(-1) if causal else dm


def mix_states(mixing, s, heads, chunks, *, transposed=False):
    """The state that queries of each block see, [B, heads, M, ..]; causal: of each chunk, [B, heads, M * chunks, ..].

    s [B, G, N, ..]: summaries of blocks, or causal of their chunks (so many to a block; None: not causal). A chunk sees the
    mixture of earlier blocks, and m_ii times the chunks before it in its own. transposed: the adjoint. The rest as in `mix`.
    """
    if chunks is None or chunks == 1:
        return mix(mixing, s, heads, causal=chunks is not None, transposed=transposed)
    mixed = mix(mixing, sum_parts(s, chunks), heads, causal=True, transposed=transposed)
    running = running_sums(s, chunks, reverse=transposed)
    if heads > running.shape[1]:
        running = running.repeat_interleave(heads // running.shape[1], 1)
    own = mixing.diagonal(dim1=-2, dim2=-1)
    running = running * own.reshape(-1, own.shape[-1], *[1] * (running.dim() - 3))
    if heads < running.shape[1]:
        running = running.unflatten(1, (heads, -1)).sum(2)
    return (mixed[:, :, :, None] + running).to(s.dtype).flatten(2, 3)


def mix_states_grads(dp, s, shape, chunks):
    """Gradient of `mix_states`' mixing of that shape, fp32; dp is that of its result."""
    if chunks is None or chunks == 1:
        return mix_grads(dp, s, shape, causal=chunks is not None)
    dm = mix_grads(sum_parts(dp, chunks), sum_parts(s, chunks), shape, causal=True)
    running = running_sums(s, chunks).repeat_interleave(dp.shape[1] // s.shape[1], 1)
    own = (dp.view(running.shape) * running).flatten(3).sum(3)  # [B, heads, M]
    return dm + torch.diag_embed(own.sum(0) if len(shape) == 3 else own.sum((0, 1)))


def running_sums(s, chunks, reverse=False):
    """For each chunk the sum of those before it in its block (reverse: behind it), fp32 [B, G, M, chunks, ..]."""
    s = s.unflatten(2, (-1, chunks)).float()
    s = s.flip(3) if reverse else s
    before = torch.cat([torch.zeros_like(s[:, :, :, :1]), s[:, :, :, :-1].cumsum(3)], 3)  # no difference: small sums
    return before.flip(3) if reverse else before
