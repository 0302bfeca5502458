"""The kernel that makes tokens from mixed summaries, in four roles: outputs, and gradients of queries, keys and values.
And a smaller one for outputs that an RMSNorm over each head follows.

All four roles are one formula. For the tokens t of a block with state P (its mixed summary or the gradient of its summary),

    out[t] = a[t] P + own * sum over the block's own tokens s of <a[t], b[s]> c[s]

where causal means s <= t for outputs (a, b, c = q, k, v) and for queries' gradients (g, v, k), s >= t for keys' (v, g, q)
and for values' (k, q, g); the second part is missing where nothing is causal. A long block is walked in chunks of 16 to 64
tokens with a running state, so the cost of a token does not grow with the block. A denominator, and the rank-one terms that
its gradient adds to <a, b>, are taken along. All of it is a sum over the lanes of a and b: where products are of fp32
numbers, which take more registers, and on some chips, wide heads are taken so many lanes at a time as `lanes_at_once` says,
each launch adding to what the last one left.
"""

import torch

from .triton_common import (
    PART_TOKENS,
    TILE_TOKENS,
    as_argument,
    as_matrix,
    block_range,
    cast,
    constexpr,
    kernel,
    lanes_for,
    language_dtype,
    launch,
    load_features,
    load_tile,
    real_tokens_of,
    state_dot,
    store_tile,
    tile_dot,
    tiles,
    token_at,
)
from .triton_configs import dot_precision, lanes_at_once, pass_config

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None
    tl = None


@kernel
def load_state(state, state_z, offset, x, y, X: constexpr, Y: constexpr, DEN: constexpr, RANK: constexpr):
    """P [BX, BY] of a block, and z over X (for a denominator) or over Y (for a rank-one term), else zeros."""
    inside = (x < X)[:, None] & (y < Y)[None, :]
    pointers = state[0] + offset * state[1] + x[:, None] * state[2] + y[None, :] * state[3]
    tile = tl.load(pointers, mask=inside, other=0.0)
    z_x = tl.zeros_like(x).to(tl.float32)
    z_y = tl.zeros_like(y).to(tl.float32)
    if DEN == 1:
        z_x = tl.load(state_z[0] + offset * state_z[1] + x, mask=x < X, other=0.0)
    if RANK > 0:
        z_y = tl.load(state_z[0] + offset * state_z[1] + y, mask=y < Y, other=0.0)
    return tile, z_x, z_y


@kernel
def load_scalars(x, row, token, head, tokens, heads, valid):
    """x [B, T, H] at some tokens of a head, zeros where not valid."""
    return tl.load(x + (row * tokens + token) * heads + head, mask=valid, other=0.0)


@kernel
def invert_or_zero(den):
    """1 / den, and 0 where den vanishes: 0/0 is 0 in this operator."""
    alive = tl.abs(den) >= 1.1754943508222875e-38
    return tl.where(alive, 1.0 / tl.where(alive, den, 1.0), 0.0)


@kernel
def own_weights_of(left, right, place, rank_one, RANK: constexpr, REVERSE: constexpr, PRECISION: constexpr):
    """<a[t], b[s]> plus the rank-one term, which is that of t (RANK 1) or of s (2); zeros for the tokens t does not see."""
    weight = tile_dot(left, tl.trans(right), PRECISION)
    if RANK == 1:
        weight += rank_one[:, None]
    if RANK == 2:
        weight += rank_one[None, :]
    if REVERSE:
        sees = place[None, :] >= place[:, None]
    else:
        sees = place[None, :] <= place[:, None]
    return tl.where(sees, weight, 0.0)


@kernel
def attend_kernel(
    a, b, c, state, state_z, m, m_head, m_row, r, inv, den_before, e, e_sums, out, mask_a, mask_b, edges, order, starts,
    tokens, size, blocks, heads, group, reps, share, span, parts, scale, shrink, eps, raw, X: constexpr, Y: constexpr,
    BX: constexpr, BY: constexpr, BT: constexpr, OWN: constexpr, MULTI: constexpr, REVERSE: constexpr, DEN: constexpr,
    RANK: constexpr, ADD: constexpr, MORE: constexpr, MAPPED: constexpr, DOT: constexpr, PRECISION: constexpr):  # fmt: skip
    """`span` tokens of one block, one head of `out` [B, T, heads, Y], one tile of Y; `attend` says what the rest is."""
    y_tiles: constexpr = (Y + BY - 1) // BY
    program = tl.program_id(0)
    y_tile, part, item = program % y_tiles, program // y_tiles % parts, program // y_tiles // parts
    block, head, row = item % blocks, (item // blocks % heads).to(tl.int64), (item // blocks // heads).to(tl.int64)
    x, y = tl.arange(0, BX), y_tile * BY + tl.arange(0, BY)
    offset = (row * (heads // share) + head // share) * blocks + block
    tile, z_x, z_y = load_state(state, state_z, offset, x, y, X, Y, DEN, RANK)
    low, high = block_range(block, row, edges, starts, tokens, size)
    low, high = low + part * span, tl.minimum(high, low + part * span + span)
    running = tl.zeros((BX, BY), tl.float32)
    running_z, e_sum = tl.zeros((BY,), tl.float32), tl.zeros((BY,), tl.float32)
    diagonal = block.to(tl.int64) * (m_row + 1) if OWN else 0
    own_weight = tl.load(m + head * m_head + diagonal) if OWN and not REVERSE else 1.0
    for step in range(0, tl.cdiv(high - low, BT)):
        chunk = tl.cdiv(high - low, BT) - 1 - step if REVERSE else step
        place = low + chunk * BT + tl.arange(0, BT)
        valid = place < high
        token = token_at(place, valid, order)
        seen = real_tokens_of(mask_a, row, token, valid, tokens)
        source = real_tokens_of(mask_b, row, token, valid, tokens)
        left = load_features(a, row, token, head, seen, x, eps, X, MAPPED, DOT)
        value = state_dot(left, tile, shrink, DOT, PRECISION)
        den = tl.sum(left.to(tl.float32) * z_x[None, :], 1) if DEN == 1 else 1.0
        on_target = (load_scalars(r, row, token, head, tokens, heads, valid) if RANK == 1 else
                     1.0 + tl.zeros((BT,), tl.float32))  # fmt: skip
        if RANK > 0:
            value += on_target[:, None] * z_y[None, :]
        if OWN:
            own = tl.zeros((BT, BY), tl.float32)
            if MULTI:
                own = state_dot(left, running, shrink, DOT, PRECISION)
                if RANK > 0:
                    own += on_target[:, None] * running_z[None, :]
            for rep in range(reps):
                other = head * reps + rep if REVERSE else head // group
                factor = tl.load(m + other * m_head + diagonal) if REVERSE else 1.0
                right = load_tile(b, row, token, other, source, x, X, DOT)
                third = load_tile(c, row, token, other, source, y, Y, DOT)
                on_source = 1.0 + tl.zeros((BT,), tl.float32)
                if RANK == 2:
                    on_source = load_scalars(r, row, token, other, tokens, heads * reps, valid)
                weight = own_weights_of(left, right, place, on_target * on_source, RANK, REVERSE, PRECISION)
                own += tile_dot(cast(weight, DOT), third, PRECISION) * factor
                if DEN == 1:
                    den += tl.sum(weight, 1) * own_weight
                if MULTI:
                    running += tile_dot(tl.trans(right), third, PRECISION) * factor
                    if DEN == 1:
                        z_x += tl.sum(right.to(tl.float32), 0) * own_weight
                    if RANK > 0:
                        running_z += tl.sum(third.to(tl.float32) * on_source[:, None], 0) * factor
            value += own * own_weight
            if e is not None:
                e_sum += tl.sum(own * load_tile(e, row, token, head, valid, y, Y, tl.float32), 0)
        if ADD:
            value += load_tile(out, row, token, head, valid, y, Y, tl.float32)
            if DEN == 1:
                den += load_scalars(den_before, row, token, head, tokens, heads, valid)
        if DEN == 1:
            factor_den = den if MORE else invert_or_zero(den)
            if y_tile == 0:
                tl.store(inv + (row * tokens + token) * heads + head, factor_den, mask=valid)
        if not MORE:
            if DEN == 1:
                value *= factor_den[:, None]
            elif DEN == 2:
                value *= load_scalars(inv, row, token, head, tokens, heads, valid)[:, None]
            else:
                value *= scale
        if raw is not None:
            value = tl.where(load_tile(raw, row, token, head, valid, y, Y, tl.float32) > 0, value, 0.0)
        store_tile(out, row, token, head, valid, y, tl.where(seen[:, None], value, 0.0), Y)
    if e is not None:
        tl.store(e_sums + item.to(tl.int64) * y_tiles + y_tile, tl.sum(e_sum, 0) * scale)


def attend(
    a,
    b,
    c,
    state,
    out,
    cut,
    dot,
    *,
    transposed=False,
    state_z=None,
    mixing=None,
    reverse=False,
    r=None,
    inv=None,
    e=None,
    mask=None,
    scale=1.0,
    eps=None,
    raw=None,
):
    """out [B, T, H, Y] as at the top of the file; returns <e[t], its own part without own>, [B, H, M] (None without e).

    a [B, T, H, X]; state [B, H or fewer, M, X, Y], or [.., Y, X] if transposed. mixing (causal only, else b and c are not
    read): fp32 [M, M] or [query heads, M, M], whose diagonal is `own`. reverse: s >= t, out is for keys, b and c of the
    query heads are summed; mask [B, T] then leaves tokens out of `out`, else out of b and c. r [B, T, query heads]: the
    rank-one term, with state_z over Y. inv [B, T, H]: multiplies out; with a state_z over X it is computed, and written.
    Without causality: eps, a number if a is relu(a) + eps; raw [B, T, H, Y], features of which that was made, where out is
    their gradient.
    """
    heads, width, other = *a.shape[2:], out.shape[3]
    den = 0 if inv is None else 1 if state_z is not None else 2
    kind = "attend" if mixing is None else "attend_long" if cut.size > TILE_TOKENS else "attend_own"
    step = lanes_at_once(kind + role_of(r, reverse, mixing), width, dot, a.device)
    target = out if width <= step or out.dtype == torch.float32 else torch.zeros_like(out, dtype=torch.float32)
    before, own_sums = None, []
    for first in range(0, width, step):
        lanes, more = min(step, width - first), first + step < width
        part = state.narrow(4 if transposed else 3, first, lanes)
        z = state_z.narrow(3, first, lanes) if den == 1 else state_z if first == 0 else None
        after = torch.empty_like(inv) if den == 1 and more else inv
        place = part, part.stride(2), *((1, width) if transposed else (other, 1))
        left, right = (None if x is None else x.narrow(3, first, lanes) for x in (a, None if mixing is None else b))
        own_sums.append(
            attend_lanes(
                left, right, c, place, z, heads // state.shape[1], target, cut, dot, kind, mixing=mixing,
                reverse=reverse, r=r if first == 0 else None, inv=after, before=before, den=den, e=e, mask=mask,
                scale=scale, add=first > 0, more=more, eps=eps, raw=None if more else raw,
            )
        )  # fmt: skip
        before = after
    if target is not out:
        out.copy_(target)
    return None if e is None else sum(own_sums)


def shrink_of(cut):
    """About one over the tokens of a block, a power of two: what keeps a block's sums within fp16."""
    return 2.0 ** -(max(1, cut.tokens // cut.blocks) - 1).bit_length()


def role_of(r, reverse, mixing):
    """What a causal kind ends with in gradients of a normalised output, whose tiles have entries of their own."""
    return "" if r is None or mixing is None else "_keys" if reverse else "_queries"


def attend_lanes(
    a, b, c, place, state_z, share, out, cut, dot, kind, *, mixing, reverse, r, inv, before, den, e, mask, scale, add,
    more, eps, raw,
):  # fmt: skip
    """`attend` for some lanes of a and b, of a state at `place` (pointer and strides of block, X and Y) that `share` heads
    share; `add`: to what the launch for the lanes before has left in out and `before`; `more`: for the next one."""
    batch, _, heads, width = a.shape
    other, own = out.shape[3], mixing is not None
    rank = 0 if r is None else 2 if reverse else 1
    config = pass_config(kind + role_of(r, reverse, mixing), width, other, dot, a.device, mask)
    y_tiles = tiles(other, config["BY"])
    span = cut.span if own else PART_TOKENS
    parts = tiles(cut.span, span)
    sources = b.shape[2] if own else heads
    e_sums = None if e is None else torch.empty(batch, heads, cut.blocks, y_tiles, dtype=torch.float32, device=a.device)
    launch(
        attend_kernel,
        y_tiles * parts * cut.blocks * heads * batch,
        a.device,
        as_argument(a),
        as_argument(b) if own else None,
        as_argument(c) if own else None,
        place,
        None if state_z is None else (state_z, state_z.stride(2)),
        *as_matrix(mixing),
        r,
        inv,
        before,
        None if e is None else as_argument(e),
        e_sums,
        as_argument(out),
        mask if reverse else None,
        None if reverse else mask,
        *cut.place,
        cut.tokens,
        cut.size,
        cut.blocks,
        heads,
        max(1, heads // sources),
        max(1, sources // heads),
        share,
        span,
        parts,
        scale,
        shrink_of(cut),
        eps or 0.0,
        None if raw is None else as_argument(raw),
        X=width,
        Y=other,
        BX=lanes_for(width),
        OWN=own,
        MULTI=own and cut.size > config["BT"],
        REVERSE=reverse,
        DEN=den,
        RANK=rank,
        ADD=add,
        MORE=more,
        MAPPED=eps is not None,
        DOT=language_dtype(dot),
        PRECISION=dot_precision(dot),
        **config,
    )
    return None if e is None else e_sums.sum(3)


@kernel
def normed_kernel(
    a, state, weight, out, edges, order, starts, tokens, size, blocks, heads, share, span, parts, scale, shrink, eps,
    norm_eps, X: constexpr, Y: constexpr, BX: constexpr, BY: constexpr, BT: constexpr, MAPPED: constexpr, DOT: constexpr,
    PRECISION: constexpr,
):  # fmt: skip
    """`span` tokens of one block, one head of `out` [B, T, heads, Y], whole rows of it; `attend_normed` says the rest."""
    program = tl.program_id(0)
    part, item = program % parts, program // parts
    block, head, row = item % blocks, (item // blocks % heads).to(tl.int64), (item // blocks // heads).to(tl.int64)
    x, y = tl.arange(0, BX), tl.arange(0, BY)
    offset = (row * (heads // share) + head // share) * blocks + block
    tile, _, _ = load_state(state, None, offset, x, y, X, Y, 0, 0)
    by = tl.load(weight + y, mask=y < Y, other=0.0).to(tl.float32)
    low, high = block_range(block, row, edges, starts, tokens, size)
    low, high = low + part * span, tl.minimum(high, low + part * span + span)
    for chunk in range(0, tl.cdiv(high - low, BT)):
        place = low + chunk * BT + tl.arange(0, BT)
        valid = place < high
        token = token_at(place, valid, order)
        left = load_features(a, row, token, head, valid, x, eps, X, MAPPED, DOT)
        value = state_dot(left, tile, shrink, DOT, PRECISION) * scale
        value *= tl.rsqrt(tl.sum(value * value, 1) / Y + norm_eps)[:, None]
        store_tile(out, row, token, head, valid, y, value * by[None, :], Y)


def holds_rows(width, other, dot):
    """Whether a tile of `attend_normed` holds whole rows of `other` lanes, for queries of `width`: its registers do."""
    return dot in ("bf16", "fp16") and max(width, other) <= 128


def attend_normed(a, state, out, cut, dot, weight, norm_eps, *, scale=1.0, eps=None):
    """out [B, T, H, Y] = RMSNorm over Y of a[t] P, times weight [Y]; without causality, and where `holds_rows` says so.

    a, state and eps as in `attend`; the norm is of numbers that were rounded by nothing yet, in fp32.
    """
    batch, _, heads, width = a.shape
    parts = tiles(cut.span, PART_TOKENS)
    launch(
        normed_kernel,
        parts * cut.blocks * heads * batch,
        a.device,
        as_argument(a),
        (state, state.stride(2), state.shape[4], 1),
        weight,
        as_argument(out),
        *cut.place,
        cut.tokens,
        cut.size,
        cut.blocks,
        heads,
        heads // state.shape[1],
        PART_TOKENS,
        parts,
        scale,
        shrink_of(cut),
        eps or 0.0,
        norm_eps,
        X=width,
        Y=out.shape[3],
        BX=lanes_for(width),
        MAPPED=eps is not None,
        DOT=language_dtype(dot),
        PRECISION=dot_precision(dot),
        **pass_config("normed", width, out.shape[3], dot, a.device),
    )
