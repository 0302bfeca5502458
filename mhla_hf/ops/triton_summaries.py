"""Kernels that turn tokens into sums over a block: S = sum a b^T and z = sum a, and what the backward pass needs first.

One program walks the tokens of one block, in place, and keeps one tile of the sum; where few long blocks would leave most
of a GPU without work, one part of a block, and whoever mixes the summaries adds the parts up. The same kernel makes the
summaries of keys and values and the gradients of the mixed summaries, from queries and output gradients.
"""

import torch

from .triton_common import (
    as_argument,
    block_range,
    cast,
    constexpr,
    in_parts,
    kernel,
    lanes_for,
    language_dtype,
    launch,
    load_features,
    load_tile,
    real_tokens_of,
    tile_dot,
    tiles,
    token_at,
)
from .triton_configs import dot_precision, pass_config

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None
    tl = None


@kernel
def summaries_kernel(
    a,
    b,
    r,
    mask,
    out,
    out_z,
    edges,
    order,
    starts,
    tokens,
    size,
    blocks,
    parts,
    span,
    heads,
    reps,
    eps,
    X: constexpr,
    Y: constexpr,
    MAPPED: constexpr,
    BT: constexpr,
    BX: constexpr,
    BY: constexpr,
    DOT: constexpr,
    PRECISION: constexpr,
):
    """out [B, heads, M * parts, X, Y] = sum over tokens and `reps` heads of a b^T; out_z [.., X] = sum of a (times r).

    A part is `span` tokens of a block. a is relu(a) + eps if MAPPED.
    """
    x_tiles: constexpr = (X + BX - 1) // BX
    y_tiles: constexpr = (Y + BY - 1) // BY
    program = tl.program_id(0)
    y_tile, x_tile = program % y_tiles, program // y_tiles % x_tiles
    part, item = program // (x_tiles * y_tiles) % parts, program // (x_tiles * y_tiles) // parts
    block, head = item % blocks, item // blocks % heads
    row = (item // blocks // heads).to(tl.int64)
    x, y = x_tile * BX + tl.arange(0, BX), y_tile * BY + tl.arange(0, BY)
    low, high = block_range(block, row, edges, starts, tokens, size)
    low, high = low + part * span, tl.minimum(high, low + part * span + span)
    total = tl.zeros((BX, BY), tl.float32)
    total_z = tl.zeros((BX,), tl.float32)
    for rep in range(reps):
        source = (head * reps + rep).to(tl.int64)
        for first in range(low, high, BT):
            place = first + tl.arange(0, BT)
            valid = place < high
            token = token_at(place, valid, order)
            valid = real_tokens_of(mask, row, token, valid, tokens)
            left = load_features(a, row, token, source, valid, x, eps, X, MAPPED, DOT)
            right = load_tile(b, row, token, source, valid, y, Y, DOT)
            total += tile_dot(tl.trans(left), right, PRECISION)
            if out_z is not None:
                weight = left.to(tl.float32)
                if r is not None:
                    place_r = (row * tokens + token) * (heads * reps) + source
                    weight *= tl.load(r + place_r, mask=valid, other=0.0)[:, None]
                total_z += tl.sum(weight, 0)
    start = (((row * heads + head) * blocks + block) * parts + part).to(tl.int64) * X
    inside = (x < X)[:, None] & (y < Y)[None, :]
    tl.store(out + (start + x[:, None]) * Y + y[None, :], cast(total, out.dtype.element_ty), mask=inside)
    if out_z is not None and y_tile == 0:
        tl.store(out_z + start + x, total_z, mask=x < X)


@kernel
def prepare_kernel(g, o, inv, out, r, rows, tokens, heads, Y: constexpr, BT: constexpr, BY: constexpr):
    """out = g * inv [B, T, H, Y], and r = -sum(g * inv * o) [B, T, H], for the backward pass of the normalised form."""
    place = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    y = tl.arange(0, BY)
    inside = (place < rows)[:, None] & (y < Y)[None, :]
    head, token, row = place % heads, place // heads % tokens, place // heads // tokens
    pointers = g[0] + (row * g[1] + token * g[2] + head * g[3])[:, None] + y[None, :]
    grad = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    grad *= tl.load(inv + place, mask=place < rows, other=0.0)[:, None]
    grad = cast(grad, out.dtype.element_ty)
    tl.store(out + place[:, None] * Y + y[None, :], grad, mask=inside)
    value = tl.load(o + place[:, None] * Y + y[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(r + place, -tl.sum(grad.to(tl.float32) * value, 1), mask=place < rows)


def summaries(a, b, cut, dot, *, heads, mask=None, r=None, with_z=False, eps=None, split=False):
    """sum a b^T of every block, [B, heads, M, X, Y], and sum a, [B, heads, M, X] fp32 (None unless with_z).

    a [B, T, H, X], b [B, T, H, Y]; H // heads neighbouring heads are added up. mask [B, T] leaves tokens out; r [B, T, H]
    weighs those of the second sum. eps: a number if a is relu(a) + eps. The first is bf16 where products are, else fp32.
    split: long blocks may come in parts, [B, heads, M * parts, ..], which `mix` and `mix_grads` add up.
    """
    batch, _, every, width, other = *a.shape, b.shape[3]
    store = torch.bfloat16 if dot == "bf16" else torch.float32
    config = pass_config("summaries", width, other, dot, a.device, mask)
    programs = tiles(width, config["BX"]) * tiles(other, config["BY"]) * cut.blocks * heads * batch
    parts, span = in_parts(cut.span, programs) if split else (1, cut.span)
    out = torch.empty(batch, heads, cut.blocks * parts, width, other, dtype=store, device=a.device)
    out_z = (
        torch.empty(batch, heads, cut.blocks * parts, width, dtype=torch.float32, device=a.device) if with_z else None
    )
    launch(
        summaries_kernel,
        programs * parts,
        a.device,
        as_argument(a),
        as_argument(b),
        r,
        mask,
        out,
        out_z,
        *cut.place,
        cut.tokens,
        cut.size,
        cut.blocks,
        parts,
        span,
        heads,
        every // heads,
        eps or 0.0,
        X=width,
        Y=other,
        MAPPED=eps is not None,
        DOT=language_dtype(dot),
        PRECISION=dot_precision(dot),
        **config,
    )
    return out, out_z


def prepare(grad, o, inv, dtype):
    """grad / den [B, T, H, V] in `dtype` and -sum(grad / den * o) [B, T, H]; inv [B, T, H] is 1 / den, or 0."""
    batch, tokens, heads, width = o.shape
    out = torch.empty_like(o, dtype=dtype, memory_format=torch.contiguous_format)
    r = torch.empty(batch, tokens, heads, dtype=torch.float32, device=o.device)
    rows, lanes = batch * tokens * heads, lanes_for(width)
    rows_at_once = max(16, 2048 // lanes)
    arguments = (as_argument(grad), o, inv, out, r, rows, tokens, heads)
    sizes = {"Y": width, "BT": rows_at_once, "BY": lanes, "num_warps": 8}
    launch(prepare_kernel, tiles(rows, rows_at_once), o.device, *arguments, **sizes)
    return out, r
