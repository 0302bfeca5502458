"""The attention of one new token per row inside its open block as one kernel; the rest of a step is `torch_decode.py`'s.

L is the width of the denominator's features, K where they are the numerator's.
"""

import torch

from ..blocks import Blocks
from ..state import MHLAState
from ..torch_decode import torch_step
from ..torch_operator import torch_mhla
from .check import known_fault
from .common import constexpr, invert_or_zero, load_state, load_tile
from .tuning import as_argument, as_matrix, in_rows, kernel, lanes_for, on_device, tiles, tl


@kernel
def load_query(q, row, head, lanes, WIDTH: constexpr):
    """The one token of q [B, 1, H, WIDTH] for a head, in fp32."""
    return tl.load(q[0] + row * q[1] + head * q[3] + lanes, mask=lanes < WIDTH, other=0.0).to(tl.float32)


@kernel
def decode_kernel(
    q, q_den, window_k, window_v, window_den, prefix, prefix_z, mixing, m_head, m_row, position, o, size, heads, group,
    scale, K: constexpr, V: constexpr, L: constexpr, BT: constexpr, BK: constexpr, BV: constexpr, BL: constexpr,
):  # fmt: skip
    """One row, one head, one tile of o [B, 1, H, V], for the token at `position` [B], which is in the window already."""
    v_tiles: constexpr = (V + BV - 1) // BV
    v_tile, item = tl.program_id(0) % v_tiles, (tl.program_id(0) // v_tiles).to(tl.int64)
    row, head = item // heads, item % heads
    source, place = head // group, tl.load(position + row)
    block, last = place // size, place % size
    k_lanes, v_lanes, l_lanes = tl.arange(0, BK), v_tile * BV + tl.arange(0, BV), tl.arange(0, BL)
    query = load_query(q, row, head, k_lanes, K)
    total = tl.sum(query[:, None] * load_state(prefix, item, k_lanes, v_lanes, K, V), 0)
    query_den, den = load_query(q_den, row, head, l_lanes, L), 0.0
    if prefix_z is not None:
        den += tl.sum(query_den * tl.load(prefix_z + item * L + l_lanes, mask=l_lanes < L, other=0.0), 0)
    own = tl.load(mixing + head * m_head + block * (m_row + 1))
    for first in range(0, last + 1, BT):
        slot = first + tl.arange(0, BT)
        valid, slot = slot <= last, block % 2 * size + slot.to(tl.int64)
        keys = load_tile(window_k, row, slot, source, valid, k_lanes, K).to(tl.float32)
        weight = tl.sum(keys * query[None, :], 1) * own
        total += tl.sum(load_tile(window_v, row, slot, source, valid, v_lanes, V).to(tl.float32) * weight[:, None], 0)
        if prefix_z is not None:
            keys = load_tile(window_den, row, slot, source, valid, l_lanes, L).to(tl.float32)
            den += tl.sum(tl.sum(keys * query_den[None, :], 1) * own, 0)
    if prefix_z is not None:
        total *= invert_or_zero(den)
    else:
        total *= scale
    tl.store(o + item * V + v_lanes, total, mask=v_lanes < V)


def attend_one(q, q_den, mixing, state, scale):
    """fp32 [B, 1, H, V]: what `attend_blocks` gives for one new token per row, which is in the state's window already."""
    (batch, _, heads, width), (groups, other) = q.shape, state.window_v.shape[2:]
    window_den = state.window_k if state.window_k_den is None else state.window_k_den
    q, q_den = in_rows(q), in_rows(q if q_den is None else q_den)
    o = torch.empty(batch, 1, heads, other, dtype=torch.float32, device=q.device)
    lanes, den_width = lanes_for(width), window_den.shape[3]
    tile = {"BT": 16, "BK": lanes, "BV": min(32 if lanes <= 128 else 16, lanes_for(other)), "BL": lanes_for(den_width)}
    with on_device(q):
        decode_kernel[(tiles(other, tile["BV"]) * heads * batch,)](
            *(as_argument(x) for x in (q, q_den, state.window_k, state.window_v, window_den)),
            *(state.prefix, state.prefix_z, *as_matrix(in_rows(mixing.float())), state.length.to(q.device), o),
            *(state.block_size, heads, heads // groups, scale, width, other, den_width),
            **tile,
            num_warps=8 if lanes > 128 else 4,
            enable_fp_fusion=True,
        )
    return o


def decode_kind(q, k, v, q_den, normalize):
    """What steps have in common that are checked once, as `small_step` takes it."""
    widths = q.shape[3], v.shape[3], 0 if q_den is None else q_den.shape[3]
    widths = (len([None] * width) for width in widths)  # a symbol becomes a number
    return q.device, q.dtype, v.dtype, *widths, normalize, not q.shape[2] <= k.shape[2]


@torch.compiler.assume_constant_result
def decode_fault(*kind) -> str | None:
    """`known_fault` of a `decode_kind`."""
    return known_fault(small_step, kind)


@torch.no_grad()
def small_step(device, dtype, value_dtype, width, value_width, den_width, normalize, grouped):
    """Outputs of steps with the kernel, over several blocks, and of PyTorch in fp64; always of the same inputs."""
    tokens, size, random, groups = 27, 8, torch.Generator().manual_seed(0), 1 if grouped else 2

    def numbers(heads, width, dtype=dtype):
        return torch.rand(1, tokens, heads, width, generator=random).to(device, dtype)

    inputs = [numbers(2, width), numbers(groups, width), numbers(groups, value_width, value_dtype) - 0.5]
    dens = [numbers(2, den_width), numbers(groups, den_width)] if den_width else []
    mixing, outputs = torch.rand(4, 4, generator=random).to(device), []
    options = {"dtype": torch.promote_types(dtype, value_dtype), "device": device, "normalize": normalize}
    state = MHLAState.empty(1, groups, 2, width, value_width, size, **options, den_dim=den_width or None)
    for token in zip(*(x.split(1, 1) for x in (*inputs, *dens)), strict=True):
        den = token[3:] or (None, None)
        outputs.append(torch_step(*token[:3], mixing, state, 1.0, *den, None, True, attend_one))
    exact = [x.double() for x in (*inputs, mixing)]
    dens = dict(zip(("q_den", "k_den"), (x.double() for x in dens), strict=False))
    options = {"blocks": Blocks.sequence(tokens, size), "causal": True, "normalize": normalize, "scale": 1.0}
    return [torch.cat(outputs, 1)], [torch_mhla(*exact, **dens, **options)]
