"""The kernel of a decode step: one new token of every row, from the mixed prefix and the open block's tokens so far.

It reads each of them once and writes nothing but the output; what a step does besides (writing the token into the window,
mixing the prefix anew once per block) is the same code for all implementations.
"""

import torch

from .triton_attend import invert_or_zero
from .triton_common import as_argument, constexpr, kernel, lanes_for, launch, load_tile, tiles

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None
    tl = None


@kernel
def decode_kernel(
    q, q_den, k, v, k_den, prefix, prefix_z, own, seen, out, heads, group, scale,
    X: constexpr, Y: constexpr, Z: constexpr, BX: constexpr, BY: constexpr, BZ: constexpr, BT: constexpr,
):  # fmt: skip
    """One row, one head, one tile of out [B, 1, H, Y]; seen: open tokens of each row; own: pointer, strides of row, head."""
    y_tiles: constexpr = (Y + BY - 1) // BY
    program = tl.program_id(0)
    item = (program // y_tiles).to(tl.int64)
    row, head = item // heads, item % heads
    x, y, z = tl.arange(0, BX), program % y_tiles * BY + tl.arange(0, BY), tl.arange(0, BZ)
    query = tl.load(q[0] + row * q[1] + head * q[3] + x, mask=x < X, other=0.0).to(tl.float32)
    pointers = prefix + (item * X + x[:, None]) * Y + y[None, :]
    tile = tl.load(pointers, mask=(x < X)[:, None] & (y < Y)[None, :], other=0.0)
    value = tl.sum(query[:, None] * tile, 0)
    if prefix_z is not None:
        query_den = query
        if q_den is not None:
            query_den = tl.load(q_den[0] + row * q_den[1] + head * q_den[3] + z, mask=z < Z, other=0.0).to(tl.float32)
        den = tl.sum(query_den * tl.load(prefix_z + item * Z + z, mask=z < Z, other=0.0), 0)
    factor = tl.load(own[0] + row * own[1] + head * own[2])
    count = tl.load(seen + row)
    for first in range(0, count, BT):
        place = first + tl.arange(0, BT)
        valid = place < count
        token = place.to(tl.int64)
        weight = tl.sum(load_tile(k, row, token, head // group, valid, x, X, tl.float32) * query[None, :], 1) * factor
        value += tl.sum(load_tile(v, row, token, head // group, valid, y, Y, tl.float32) * weight[:, None], 0)
        if prefix_z is not None:
            if k_den is not None:
                key = load_tile(k_den, row, token, head // group, valid, z, Z, tl.float32)
                weight = tl.sum(key * query_den[None, :], 1) * factor
            den += tl.sum(weight, 0)
    if prefix_z is not None:
        value *= invert_or_zero(den)
    else:
        value *= scale
    tl.store(out + item * Y + y, value.to(out.dtype.element_ty), mask=y < Y)


def triton_decode(q, q_den, opened, state, own, seen, scale, dtype):
    """Output [B, 1, H, V] in `dtype` of one token per row, already written into the window.

    opened: k, v and perhaps k_den of the open blocks, [B, n, G, K or V], the new token included; seen: how many of these
    each row sees, int64 [B]; own: m_ii, [B or 1, H or 1, 1, 1, 1]; the rest as in `mhla_step`.
    """
    batch, _, heads, width = q.shape
    k, v = opened[0], opened[1]
    k_den = opened[2] if len(opened) == 3 else None
    out = torch.empty(batch, 1, heads, v.shape[3], dtype=dtype, device=q.device)
    own = own.reshape(own.shape[:2]).float().expand(batch, heads)
    lanes = lanes_for(width)
    den_width = width if k_den is None else k_den.shape[3]
    tile = min(32 if lanes <= 128 else 16, lanes_for(v.shape[3]))
    launch(
        decode_kernel,
        tiles(v.shape[3], tile) * heads * batch,
        q.device,
        as_argument(q),
        None if q_den is None else as_argument(q_den),
        as_argument(k),
        as_argument(v),
        None if k_den is None else as_argument(k_den),
        state.prefix,
        state.prefix_z,
        (own, *own.stride()),
        seen.to(q.device),
        out,
        heads,
        heads // k.shape[2],
        scale,
        X=width,
        Y=v.shape[3],
        Z=den_width,
        BX=lanes,
        BY=tile,
        BZ=lanes_for(den_width),
        BT=16,
        num_warps=4,
    )
    return out
