"""A decode step of one token per row as two kernels: attend and write the token into the window; close the block it ends.

Unlike the other forms this one keeps its positions on the device (`MHLAState.position`, see `pin_state`): every step starts
the same two kernels with the same addresses and waits for nothing, so that it can be replayed as a CUDA graph. A block
that does not end costs the second kernel one number to read; one that does is summed up and mixed with the earlier ones.
"""

import torch

from .torch_decode import refresh_prefix
from .triton_attend import invert_or_zero
from .triton_common import (
    as_argument,
    as_matrix,
    cast,
    constexpr,
    in_rows,
    kernel,
    lanes_for,
    launch,
    load_tile,
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


@kernel
def as_stored(x, window):
    """x as the window will hold it, in fp32."""
    return cast(x.to(tl.float32), window[0].dtype.element_ty).to(tl.float32)


@kernel
def decode_kernel(
    q, q_den, k, v, k_den, window_k, window_v, window_den, prefix, prefix_z, m, m_head, m_row, position, out, rows, size,
    heads, group, scale, X: constexpr, Y: constexpr, Z: constexpr, BX: constexpr, BY: constexpr, BZ: constexpr,
    BT: constexpr,
):  # fmt: skip
    """One row, one head, one tile of out [B, 1, H, Y]. position [2, B]: tokens before this one, and then with it."""
    y_tiles: constexpr = (Y + BY - 1) // BY
    program = tl.program_id(0)
    y_tile, item = program % y_tiles, (program // y_tiles).to(tl.int64)
    row, head = item // heads, item % heads
    source = head // group
    x, y, z = tl.arange(0, BX), y_tile * BY + tl.arange(0, BY), tl.arange(0, BZ)
    before = tl.load(position + row)
    block, count = before // size, before % size
    first = block % 2 * size
    query = tl.load(q[0] + row * q[1] + head * q[3] + x, mask=x < X, other=0.0).to(tl.float32)
    key = as_stored(tl.load(k[0] + row * k[1] + source * k[3] + x, mask=x < X, other=0.0), window_k)
    new = as_stored(tl.load(v[0] + row * v[1] + source * v[3] + y, mask=y < Y, other=0.0), window_v)
    factor = tl.load(m + head * m_head + block * (m_row + 1))
    pointers = prefix + (item * X + x[:, None]) * Y + y[None, :]
    tile = tl.load(pointers, mask=(x < X)[:, None] & (y < Y)[None, :], other=0.0)
    weight = tl.sum(query * key, 0) * factor
    value = tl.sum(query[:, None] * tile, 0) + weight * new
    den = weight
    query_den = query
    if prefix_z is not None:
        if q_den is not None:
            query_den = tl.load(q_den[0] + row * q_den[1] + head * q_den[3] + z, mask=z < Z, other=0.0).to(tl.float32)
            key_den = tl.load(k_den[0] + row * k_den[1] + source * k_den[3] + z, mask=z < Z, other=0.0)
            key_den = as_stored(key_den, window_den)
            den = tl.sum(query_den * key_den, 0) * factor
        den += tl.sum(query_den * tl.load(prefix_z + item * Z + z, mask=z < Z, other=0.0), 0)
    for start in range(0, count, BT):
        place = start + tl.arange(0, BT)
        valid = place < count
        slot = first + place.to(tl.int64)
        weights = tl.sum(load_tile(window_k, row, slot, source, valid, x, X, tl.float32) * query[None, :], 1) * factor
        value += tl.sum(load_tile(window_v, row, slot, source, valid, y, Y, tl.float32) * weights[:, None], 0)
        if prefix_z is not None:
            if q_den is not None:
                keys = load_tile(window_den, row, slot, source, valid, z, Z, tl.float32)
                weights = tl.sum(keys * query_den[None, :], 1) * factor
            den += tl.sum(weights, 0)
    if prefix_z is not None:
        value *= invert_or_zero(den)
    else:
        value *= scale
    tl.store(out + item * Y + y, cast(value, out.dtype.element_ty), mask=y < Y)
    if head % group == 0:
        place = row * window_v[1] + (first + count) * window_v[2] + source * window_v[3]
        tl.store(window_v[0] + place + y, cast(new, window_v[0].dtype.element_ty), mask=y < Y)
        if y_tile == 0:
            place = row * window_k[1] + (first + count) * window_k[2] + source * window_k[3]
            tl.store(window_k[0] + place + x, cast(key, window_k[0].dtype.element_ty), mask=x < X)
            if q_den is not None:
                place = row * window_den[1] + (first + count) * window_den[2] + source * window_den[3]
                tl.store(window_den[0] + place + z, cast(key_den, window_den[0].dtype.element_ty), mask=z < Z)
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
    window_k, window_v, window_den, summaries, z_sums, prefix, prefix_z, m, m_head, m_row, position, rows, size, capacity,
    limit, heads, groups, X: constexpr, Y: constexpr, Z: constexpr, BX: constexpr, BY: constexpr, BZ: constexpr,
    BT: constexpr, SHARED: constexpr, PRECISION: constexpr,
):  # fmt: skip
    """One row, one key head, one tile of its summary [X, Y]: where the row's block has just ended, that block's summary, and
    the prefix of the next one, whose row of the mixing is below `limit`. Always: the row's counter."""
    x_tiles: constexpr = (X + BX - 1) // BX
    y_tiles: constexpr = (Y + BY - 1) // BY
    program = tl.program_id(0)
    y_tile, x_tile = program % y_tiles, program // y_tiles % x_tiles
    item = (program // (x_tiles * y_tiles)).to(tl.int64)
    row, source = item // groups, item % groups
    seen = tl.load(position + rows + row)
    if (source == 0) & (x_tile == 0) & (y_tile == 0):
        tl.store(position + row, seen)
    closed = seen // size - 1
    if (seen % size == 0) & (closed < capacity):
        x, y, z = x_tile * BX + tl.arange(0, BX), y_tile * BY + tl.arange(0, BY), tl.arange(0, BZ)
        latest = tl.zeros((BX, BY), tl.float32)
        latest_z = tl.zeros((BZ,), tl.float32)
        for start in range(0, size, BT):
            place = start + tl.arange(0, BT)
            valid = place < size
            slot = closed % 2 * size + place.to(tl.int64)
            keys = load_tile(window_k, row, slot, source, valid, x, X, tl.float32)
            values = load_tile(window_v, row, slot, source, valid, y, Y, tl.float32)
            latest += tile_dot(tl.trans(keys), values, PRECISION)
            if z_sums is not None:
                latest_z += tl.sum(load_tile(window_den, row, slot, source, valid, z, Z, tl.float32), 0)
        inside = (x < X)[:, None] & (y < Y)[None, :]
        pointers = x[:, None] * Y + y[None, :]
        base = summaries + item * capacity * X * Y
        base_z = z_sums
        tl.store(base + closed * X * Y + pointers, latest, mask=inside)
        if z_sums is not None:
            base_z = z_sums + item * capacity * Z
            if (x_tile == 0) & (y_tile == 0):
                tl.store(base_z + closed * Z + z, latest_z, mask=z < Z)
        if closed + 1 < limit:
            group = heads // groups
            total = latest
            total_z = latest_z
            for member in range(0, group):
                head = source * group + member
                weights = m + head * m_head + (closed + 1) * m_row
                if not SHARED or member == 0:
                    total = mixed_with_earlier(latest, base, pointers, inside, weights, closed, X * Y)
                tl.store(prefix + (row * heads + head) * X * Y + pointers, total, mask=inside)
                if z_sums is not None:  # noqa: SIM102
                    if (x_tile == 0) & (y_tile == 0):
                        total_z = mixed_with_earlier(latest_z, base_z, z, z < Z, weights, closed, Z)
                        tl.store(prefix_z + (row * heads + head) * Z + z, total_z, mask=z < Z)


def pin_state(state, mixing, tokens):
    """Ready an `MHLAState` for steps of one token with impl="triton" that can be captured in a CUDA graph.

    Makes room for `tokens` tokens per row, mixes the prefix, and moves the positions to the device (`state.position`). From
    then on such steps change no address and read nothing back. Anything else that is done with the state (a step of
    several tokens, select, reorder, repeat, crop, to, reset) first calls `state.unpin()`, which asks the device how many
    tokens there are; a captured graph is then of no use any more. After graph replays the counters on the CPU
    (`state.length`) are behind until then. Beyond `tokens` tokens, or the rows of `mixing`, replays give wrong outputs.
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
    batch, _, heads, width = q.shape
    groups, other = k.shape[2], v.shape[3]
    size = state.block_size
    room = state.summaries.shape[2] * size
    if state.position is None or int(state.length.max()) >= room:
        pin_state(state, mixing, max(room, 2 * int(state.length.max()) + 1))
    weights = as_matrix(in_rows(mixing.float()))
    out = torch.empty(batch, 1, heads, other, dtype=torch.float32 if unrounded else v.dtype, device=q.device)
    window_den = state.window_k if state.window_k_den is None else state.window_k_den
    windows = [as_argument(x) for x in (state.window_k, state.window_v, window_den)]
    den_width = window_den.shape[3]
    lanes, den_lanes = lanes_for(width), lanes_for(den_width)
    tile = min(32 if lanes <= 128 else 16, lanes_for(other))
    launch(
        decode_kernel,
        tiles(other, tile) * heads * batch,
        q.device,
        as_argument(q),
        None if q_den is None else as_argument(q_den),
        as_argument(k),
        as_argument(v),
        None if k_den is None else as_argument(k_den),
        *windows,
        state.prefix,
        state.prefix_z,
        *weights,
        state.position,
        out,
        batch,
        size,
        heads,
        heads // groups,
        scale,
        X=width,
        Y=other,
        Z=den_width,
        BX=lanes,
        BY=tile,
        BZ=den_lanes,
        BT=16,
        num_warps=8 if lanes > 128 else 4,
    )
    close_tile = min(32, lanes), min(32, lanes_for(other))
    launch(
        close_kernel,
        tiles(width, close_tile[0]) * tiles(other, close_tile[1]) * groups * batch,
        q.device,
        *windows,
        state.summaries,
        state.z,
        state.prefix,
        state.prefix_z,
        *weights,
        state.position,
        batch,
        size,
        state.summaries.shape[2],
        min(mixing.shape[-2:]),
        heads,
        groups,
        X=width,
        Y=other,
        Z=den_width,
        BX=close_tile[0],
        BY=close_tile[1],
        BZ=den_lanes,
        BT=32 if den_lanes <= 128 else 16,
        SHARED=mixing.dim() == 2,
        PRECISION=dot_precision("fp32"),
        **pass_config("close", width, other, "fp32", q.device),
    )
    state.count_to(state.length + 1)
    return out
