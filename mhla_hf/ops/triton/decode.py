"""A decode step of one token per row as two kernels: attend and write the token into the window; close the block it ends.

Unlike the other forms this one keeps its positions on the device (`MHLAState.position`, see `pin_state`): every step starts
the same two kernels with the same addresses and waits for nothing, so that it can be replayed as a CUDA graph. A block
that does not end costs the second kernel one number to read; one that does is summed up and mixed with the earlier ones.
L is the width of the denominator's features, K where they are the numerator's.
"""

import torch

from ..torch_decode import refresh_prefix
from .common import cast, constexpr, dot, invert_or_zero, load_state, load_tile
from .tuning import as_argument, as_matrix, dot_kind, in_rows, kernel, lanes_for, on_device, tiles, tl


@kernel
def load_row(x, row, head, lanes, WIDTH: constexpr):
    """The one token of x [B, 1, H, WIDTH] for a head, in fp32."""
    return tl.load(x[0] + row * x[1] + head * x[3] + lanes, mask=lanes < WIDTH, other=0.0).to(tl.float32)


@kernel
def as_stored(x, window):
    """x as the window will hold it, in fp32."""
    return cast(x, window[0].dtype.element_ty).to(tl.float32)


@kernel
def store_row(window, row, slot, head, lanes, x, WIDTH: constexpr):
    """Write a token into the window [B, 2C, G, WIDTH]."""
    pointers = window[0] + row * window[1] + slot * window[2] + head * window[3] + lanes
    tl.store(pointers, cast(x, window[0].dtype.element_ty), mask=lanes < WIDTH)


@kernel
def decode_kernel(
    q, q_den, k, v, k_den, window_k, window_v, window_den, prefix, prefix_z, mixing, m_head, m_row, position, o, rows, size,
    heads, group, scale, K: constexpr, V: constexpr, L: constexpr, BT: constexpr, BK: constexpr, BV: constexpr,
    BL: constexpr,
):  # fmt: skip
    """One row, one head, one tile of o [B, 1, H, V]. position [2, B]: tokens before this one, and then with it."""
    v_tiles: constexpr = (V + BV - 1) // BV
    v_tile, item = tl.program_id(0) % v_tiles, (tl.program_id(0) // v_tiles).to(tl.int64)
    row, head = item // heads, item % heads
    source = head // group
    k_lanes, v_lanes, l_lanes = tl.arange(0, BK), v_tile * BV + tl.arange(0, BV), tl.arange(0, BL)
    before = tl.load(position + row)
    block, count = before // size, before % size
    opened = block % 2 * size  # where the open block begins in the window
    query = load_row(q, row, head, k_lanes, K)
    key = as_stored(load_row(k, row, source, k_lanes, K), window_k)
    value = as_stored(load_row(v, row, source, v_lanes, V), window_v)
    own = tl.load(mixing + head * m_head + block * (m_row + 1))
    weight = tl.sum(query * key, 0) * own
    total = tl.sum(query[:, None] * load_state(prefix, item, k_lanes, v_lanes, K, V), 0) + weight * value
    den, query_den = weight, query
    if prefix_z is not None:
        if q_den is not None:
            query_den = load_row(q_den, row, head, l_lanes, L)
            key_den = as_stored(load_row(k_den, row, source, l_lanes, L), window_den)
            den = tl.sum(query_den * key_den, 0) * own
        den += tl.sum(query_den * tl.load(prefix_z + item * L + l_lanes, mask=l_lanes < L, other=0.0), 0)
    for first in range(0, count, BT):
        place = first + tl.arange(0, BT)
        valid, slot = place < count, opened + place.to(tl.int64)
        keys = load_tile(window_k, row, slot, source, valid, k_lanes, K).to(tl.float32)
        weights = tl.sum(keys * query[None, :], 1) * own
        values = load_tile(window_v, row, slot, source, valid, v_lanes, V).to(tl.float32)
        total += tl.sum(values * weights[:, None], 0)
        if prefix_z is not None:
            if q_den is not None:
                keys = load_tile(window_den, row, slot, source, valid, l_lanes, L).to(tl.float32)
                weights = tl.sum(keys * query_den[None, :], 1) * own
            den += tl.sum(weights, 0)
    if prefix_z is not None:
        total *= invert_or_zero(den)
    else:
        total *= scale
    tl.store(o + item * V + v_lanes, cast(total, o.dtype.element_ty), mask=v_lanes < V)
    if head % group == 0:
        store_row(window_v, row, opened + count, source, v_lanes, value, V)
        if v_tile == 0:
            store_row(window_k, row, opened + count, source, k_lanes, key, K)
            if q_den is not None:
                store_row(window_den, row, opened + count, source, l_lanes, key_den, L)
            if head == 0:
                tl.store(position + rows + row, before + 1)


@kernel
def mixed_with_earlier(latest, earlier, pointers, inside, weights, closed, stride):
    """sum over the `closed` summaries before of weight times summary, plus that of the latest; 0 beyond the mixing."""
    total = latest * tl.load(weights + closed)
    for block in range(0, closed):
        summary = tl.load(earlier + block * stride + pointers, mask=inside, other=0.0)
        total += summary * tl.load(weights + block)
    return total


@kernel
def close_kernel(
    window_k, window_v, window_den, summaries, z, prefix, prefix_z, mixing, m_head, m_row, position, rows, size, capacity,
    limit, heads, groups, K: constexpr, V: constexpr, L: constexpr, DOT: constexpr, BT: constexpr, BK: constexpr,
    BV: constexpr, BL: constexpr,
):  # fmt: skip
    """One row, one key head, one tile of its summary [K, V]: where the row's block has just ended, that block's summary, and
    the prefix of the next one, whose row of the mixing is below `limit`. Always: the row's counter."""
    k_tiles: constexpr = (K + BK - 1) // BK
    v_tiles: constexpr = (V + BV - 1) // BV
    program = tl.program_id(0)
    v_tile, k_tile = program % v_tiles, program // v_tiles % k_tiles
    item = (program // (k_tiles * v_tiles)).to(tl.int64)
    row, source = item // groups, item % groups
    seen = tl.load(position + rows + row)
    if (source == 0) & (k_tile == 0) & (v_tile == 0):
        tl.store(position + row, seen)
    closed = seen // size - 1
    if (seen % size == 0) & (closed < capacity):
        k_lanes, v_lanes = k_tile * BK + tl.arange(0, BK), v_tile * BV + tl.arange(0, BV)
        l_lanes = tl.arange(0, BL)
        latest, latest_z = tl.zeros((BK, BV), tl.float32), tl.zeros((BL,), tl.float32)
        for first in range(0, size, BT):
            place = first + tl.arange(0, BT)
            valid, slot = place < size, closed % 2 * size + place.to(tl.int64)
            keys = load_tile(window_k, row, slot, source, valid, k_lanes, K)
            values = load_tile(window_v, row, slot, source, valid, v_lanes, V)
            latest += dot(tl.trans(keys), values, DOT)
            if z is not None:
                latest_z += tl.sum(load_tile(window_den, row, slot, source, valid, l_lanes, L).to(tl.float32), 0)
        inside = (k_lanes < K)[:, None] & (v_lanes < V)[None, :]
        pointers = k_lanes[:, None] * V + v_lanes[None, :]
        first_tile = (k_tile == 0) & (v_tile == 0)
        base = summaries + item * capacity * K * V
        base_z = z
        tl.store(base + closed * K * V + pointers, latest, mask=inside)
        if z is not None:
            base_z = z + item * capacity * L
            if first_tile:
                tl.store(base_z + closed * L + l_lanes, latest_z, mask=l_lanes < L)
        if closed + 1 < limit:
            group = heads // groups
            for member in range(0, group):
                head = source * group + member
                weights = mixing + head * m_head + (closed + 1) * m_row
                total = mixed_with_earlier(latest, base, pointers, inside, weights, closed, K * V)
                tl.store(prefix + (row * heads + head) * K * V + pointers, total, mask=inside)
                if z is not None:  # noqa: SIM102
                    if first_tile:
                        total_z = mixed_with_earlier(latest_z, base_z, l_lanes, l_lanes < L, weights, closed, L)
                        tl.store(prefix_z + (row * heads + head) * L + l_lanes, total_z, mask=l_lanes < L)


def pin_state(state, mixing, tokens):
    """Ready an `MHLAState` for steps of one token with impl="triton" that can be captured in a CUDA graph.

    Makes room for `tokens` tokens per row, mixes the prefix, and moves the positions to the device (`state.position`). From
    then on such steps change no address and read nothing back. Anything else that is done with the state (a step of
    several tokens, select, repeat, crop) first calls `state.unpin()`, which asks the device how many tokens there are; a
    captured graph is then of no use any more. After graph replays the counters on the CPU (`state.length`) are behind
    until then. Beyond `tokens` tokens, or the rows of `mixing`, replays give wrong outputs.
    """
    state.unpin()
    block = state.length // state.block_size
    stale = torch.nonzero(state.prefix_block != block).flatten()
    if len(stale) > 0:
        refresh_prefix(state, mixing, stale, block[stale])
    state.reserve(-(-tokens // state.block_size))
    state.position = torch.stack((state.length, state.length)).to(state.summaries.device)


def triton_step(q, k, v, mixing, state, scale, q_den, k_den, unrounded=False):
    """Output [B, 1, H, V] of one new token per row; `state` changes in place, and is pinned if it was not."""
    (batch, _, heads, width), (groups, other) = q.shape, v.shape[2:]
    room = state.summaries.shape[2] * state.block_size
    if state.position is None or int(state.length.max()) >= room:
        pin_state(state, mixing, max(room, 2 * int(state.length.max()) + 1))
    dtype = torch.float32 if unrounded else v.dtype
    o = torch.empty(batch, 1, heads, other, dtype=dtype, device=q.device)
    window_den = state.window_k if state.window_k_den is None else state.window_k_den
    windows = [as_argument(x) for x in (state.window_k, state.window_v, window_den)]
    weights = as_matrix(in_rows(mixing.float()))
    widths = {"K": width, "V": other, "L": window_den.shape[3]}
    lanes, v_lanes, den_lanes = (lanes_for(x) for x in widths.values())
    with on_device(q):
        tile = {"BT": 16, "BK": lanes, "BV": min(32 if lanes <= 128 else 16, v_lanes), "BL": den_lanes}
        q_den, k_den = (x if x is None else as_argument(x) for x in (q_den, k_den))
        decode_kernel[(tiles(other, tile["BV"]) * heads * batch,)](
            *(as_argument(q), q_den, as_argument(k), as_argument(v), k_den, *windows, state.prefix, state.prefix_z),
            *(*weights, state.position, o, batch, state.block_size, heads, heads // groups, scale),
            **(widths | tile),
            num_warps=8 if lanes > 128 else 4,
            enable_fp_fusion=True,
        )
        tile = {"BT": 32 if den_lanes <= 128 else 16, "BK": min(32, lanes), "BV": min(32, v_lanes), "BL": den_lanes}
        close_kernel[(tiles(width, tile["BK"]) * tiles(other, tile["BV"]) * groups * batch,)](
            *(*windows, state.summaries, state.z, state.prefix, state.prefix_z, *weights, state.position, batch),
            *(state.block_size, state.summaries.shape[2], min(mixing.shape[-2:]), heads, groups),
            **(widths | tile),
            DOT=dot_kind(state.prefix),
            enable_fp_fusion=True,
        )
    state.count_to(state.length + 1)
    return o
