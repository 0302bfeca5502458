"""The quadratic form for short sequences without causality: no summaries, every weight once, and no softmax.

    out[t] = sum_s m[block of t, block of s] * (<a[t], b[s]> + r) * c[s]

with (a, b, c) = (q, k, v) for outputs, (g, v, k) for queries' gradients, and with m transposed (v, g, q) for keys' and
(k, q, g) for values'. Below some 260 (1 + K / n) keys, n a block's size, this moves less memory than summaries of every
block do, by the model of memory traffic that `use_quadratic` takes; the mixing's gradient always comes from summaries.
"""

from .triton_attend import invert_or_zero, load_scalars
from .triton_common import (
    as_argument,
    as_matrix,
    cast,
    constexpr,
    kernel,
    lanes_for,
    language_dtype,
    launch,
    load_features,
    load_tile,
    real_tokens_of,
    store_tile,
    tile_dot,
    tiles,
)
from .triton_configs import dot_precision, pass_config

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None
    tl = None

QUADRATIC_KEYS = 260
QUADRATIC_WIDEST = 128


@kernel
def block_of(token, index, size):
    """The block of each token: from a table, or of a sequence cut by `size`."""
    if index is not None:
        block = tl.load(index + token).to(tl.int64)
    else:
        block = token // size
    return block


@kernel
def quadratic_kernel(
    a, b, c, m, m_head, m_row, r, inv, out, mask_a, mask_b, index_a, index_b, size_a, size_b, tokens, columns, heads, group,
    reps, scale, eps, raw, X: constexpr, Y: constexpr, BX: constexpr, BY: constexpr, BT: constexpr, REVERSE: constexpr,
    DEN: constexpr, RANK: constexpr, MAPPED: constexpr, DOT: constexpr, PRECISION: constexpr,
):  # fmt: skip
    """BT of the `tokens` tokens of one head of `out`, one tile of Y; `columns` tokens on the other side.

    MAPPED: 1 if a and b are relu of what is read, plus eps; 2 if c is.
    """
    y_tiles: constexpr = (Y + BY - 1) // BY
    program = tl.program_id(0)
    token_tiles = tl.cdiv(tokens, BT)
    y_tile, tile, item = program % y_tiles, program // y_tiles % token_tiles, program // y_tiles // token_tiles
    head, row = (item % heads).to(tl.int64), (item // heads).to(tl.int64)
    x, y = tl.arange(0, BX), y_tile * BY + tl.arange(0, BY)
    token = (tile * BT + tl.arange(0, BT)).to(tl.int64)
    valid = token < tokens
    seen = real_tokens_of(mask_a, row, token, valid, tokens)
    left = load_features(a, row, token, head, seen, x, eps, X, MAPPED == 1, DOT)
    block = block_of(tl.minimum(token, tokens - 1), index_a, size_a)
    on_target = load_scalars(r, row, token, head, tokens, heads, valid) if RANK == 1 else 1.0
    value = tl.zeros((BT, BY), tl.float32)
    den = tl.zeros((BT,), tl.float32)
    for rep in range(reps):
        other = head * reps + rep if REVERSE else head // group
        weights = m + (other if REVERSE else head) * m_head
        for first in range(0, columns, BT):
            column = (first + tl.arange(0, BT)).to(tl.int64)
            inside = column < columns
            source = real_tokens_of(mask_b, row, column, inside, columns)
            right = load_features(b, row, column, other, source, x, eps, X, MAPPED == 1, DOT)
            third = load_features(c, row, column, other, source, y, eps, Y, MAPPED == 2, DOT)
            other_block = block_of(tl.minimum(column, columns - 1), index_b, size_b)
            weight = tile_dot(left, tl.trans(right), PRECISION)
            if RANK == 1:
                weight += on_target[:, None]
            if RANK == 2:
                weight += load_scalars(r, row, column, other, columns, heads * reps, inside)[None, :]
            if REVERSE:
                weight *= tl.load(weights + other_block[None, :] * m_row + block[:, None])
            else:
                weight *= tl.load(weights + block[:, None] * m_row + other_block[None, :])
            value += tile_dot(cast(weight, DOT), third, PRECISION)
            if DEN == 1:
                den += tl.sum(tl.where(source[None, :], weight, 0.0), 1)
    if DEN == 1:
        factor = invert_or_zero(den)
        if y_tile == 0:
            tl.store(inv + (row * tokens + token) * heads + head, factor, mask=valid)
        value *= factor[:, None]
    elif DEN == 2:
        value *= load_scalars(inv, row, token, head, tokens, heads, valid)[:, None]
    else:
        value *= scale
    if raw is not None:
        value = tl.where(load_tile(raw, row, token, head, valid, y, Y, tl.float32) > 0, value, 0.0)
    store_tile(out, row, token, head, valid, y, tl.where(seen[:, None], value, 0.0), Y)


def use_quadratic(keys, blocks, widths, causal):
    """Whether the quadratic form is the cheaper one for `keys` keys in `blocks` blocks."""
    return (
        not causal and max(widths) <= QUADRATIC_WIDEST and keys * keys < QUADRATIC_KEYS * (keys + max(widths) * blocks)
    )


def quadratic(
    a, b, c, out, mixing, cut, other_cut, dot, *, reverse=False, r=None, inv=None, shared=False, mask=None, scale=1.0,
    eps=None, raw=None,
):  # fmt: skip
    """Write out [B, T, H, Y] as at the top of the file; cut and other_cut are those of a's and of b's tokens.

    mixing fp32 [Mq, Mk] or [query heads, Mq, Mk]. reverse: out is for keys, the query heads are summed; mask then leaves
    tokens out of `out`, else out of b and c. r [B, T, query heads]: the rank-one term. inv [B, T, H] multiplies out, and
    with `shared` is computed from the weights, and written. eps: a number if those of a, b and c that are features
    are relu(x) + eps; raw [B, T, H, Y]: those that `out` is the gradient of.
    """
    batch, tokens, heads, width = a.shape
    config = pass_config("quadratic", width, out.shape[3], dot, a.device, mask)
    launch(
        quadratic_kernel,
        tiles(out.shape[3], config["BY"]) * tiles(tokens, config["BT"]) * heads * batch,
        a.device,
        as_argument(a),
        as_argument(b),
        as_argument(c),
        *as_matrix(mixing),
        r,
        inv,
        as_argument(out),
        mask if reverse else None,
        None if reverse else mask,
        cut.index,
        other_cut.index,
        cut.size,
        other_cut.size,
        tokens,
        b.shape[1],
        heads,
        max(1, heads // b.shape[2]),
        max(1, b.shape[2] // heads),
        scale,
        eps or 0.0,
        None if raw is None else as_argument(raw),
        X=width,
        Y=out.shape[3],
        BX=lanes_for(width),
        REVERSE=reverse,
        DEN=1 if shared else 0 if inv is None else 2,
        RANK=0 if r is None else 2 if reverse else 1,
        MAPPED=0 if eps is None else 1 if raw is None else 2,
        DOT=language_dtype(dot),
        PRECISION=dot_precision(dot),
        **config,
    )
