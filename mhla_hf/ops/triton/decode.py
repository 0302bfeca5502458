"""One kernel for the attention of a single new token per row within its open block.

The rest of a decoding step is done in `torch_decode.py`. L is the width of the denominator's features, which is K if they
are the numerator's.
"""

from typing import Any, no_type_check

import torch

from ..blocks import Blocks
from ..state import MHLAState
from ..torch_decode import torch_step
from ..torch_operator import torch_mhla
from .check import Results, concrete, known_fault
from .common import constexpr, invert_or_zero, load_state, load_tile
from .tuning import contiguous_rows, kernel, mixing_arguments, next_lanes, num_tiles, on_device, tl, with_strides


@kernel
@no_type_check
def load_query(q, row, head, lanes, WIDTH: constexpr):
    """Load the only token of q [B, 1, H, WIDTH] for one head, in fp32."""
    pointer, row_stride, head_stride = q[0], q[1], q[3]
    return tl.load(pointer + row * row_stride + head * head_stride + lanes, mask=lanes < WIDTH, other=0.0).to(
        tl.float32
    )


@kernel
@no_type_check
def decode_kernel(
    q, q_den, window_k, window_v, window_den, prefix, prefix_z, mixing, mixing_head_stride, mixing_row_stride, position, o,
    block_size, num_heads, group, scale,
    K: constexpr, V: constexpr, L: constexpr, BT: constexpr, BK: constexpr, BV: constexpr, BL: constexpr,
):  # fmt: skip
    """Compute o [B, 1, H, V]: each program computes BV lanes of one row and head.

    Args:
        q, q_den, mixing, scale: As in `attend_one`.
        window_k, window_v, prefix, prefix_z: As in `MHLAState`. The new tokens are in the window already.
        window_den: The window of the keys that the denominator reads.
        position: int64 [B], the position of the new token of each row.
        group: Query heads per KV head.
    """
    num_v_tiles: tl.constexpr = (V + BV - 1) // BV
    v_tile = tl.program_id(0) % num_v_tiles
    item = (tl.program_id(0) // num_v_tiles).to(tl.int64)
    row, head = item // num_heads, item % num_heads
    kv_head, token = head // group, tl.load(position + row)
    block, last = token // block_size, token % block_size
    k_lanes = tl.arange(0, BK)
    v_lanes = v_tile * BV + tl.arange(0, BV)
    l_lanes = tl.arange(0, BL)
    query = load_query(q, row, head, k_lanes, K)
    total = tl.sum(query[:, None] * load_state(prefix, item, k_lanes, v_lanes, K, V), 0)
    query_den, den = load_query(q_den, row, head, l_lanes, L), 0.0
    if prefix_z is not None:
        den += tl.sum(query_den * tl.load(prefix_z + item * L + l_lanes, mask=l_lanes < L, other=0.0), 0)
    diagonal = tl.load(mixing + head * mixing_head_stride + block * (mixing_row_stride + 1))
    for first in range(0, last + 1, BT):
        slot = first + tl.arange(0, BT)
        valid = slot <= last
        slot = block % 2 * block_size + slot.to(tl.int64)
        keys = load_tile(window_k, row, slot, kv_head, valid, k_lanes, K).to(tl.float32)
        weight = tl.sum(keys * query[None, :], 1) * diagonal
        values = load_tile(window_v, row, slot, kv_head, valid, v_lanes, V).to(tl.float32)
        total += tl.sum(values * weight[:, None], 0)
        if prefix_z is not None:
            keys = load_tile(window_den, row, slot, kv_head, valid, l_lanes, L).to(tl.float32)
            den += tl.sum(tl.sum(keys * query_den[None, :], 1) * diagonal, 0)
    if prefix_z is not None:
        total *= invert_or_zero(den)
    else:
        total *= scale
    tl.store(o + item * V + v_lanes, total, mask=v_lanes < V)


def attend_one(
    q: torch.Tensor, q_den: torch.Tensor | None, mixing: torch.Tensor, state: MHLAState, scale: float
) -> torch.Tensor:
    """Compute the attention of one new token per row within its open block, as `attend_blocks` does.

    The new tokens must be in the window of the state already, and its prefix must be that of the open blocks.

    Args:
        q: [B, 1, H, K].
        q_den: [B, 1, H, L]; None if the denominator reads q.
        mixing: [Mq, Mk] or [H, Mq, Mk].
        state: The state; only read.
        scale: Multiplier of the outputs if not normalized.

    Returns:
        fp32 [B, 1, H, V].
    """
    batch, _, num_heads, key_width = q.shape
    num_kv_heads, value_width = state.window_v.shape[2:]
    window_den = state.window_k if state.window_k_den is None else state.window_k_den
    den_width = window_den.shape[3]
    o = torch.empty(batch, 1, num_heads, value_width, dtype=torch.float32, device=q.device)
    key_lanes = next_lanes(key_width)
    v_tile = min(32 if key_lanes <= 128 else 16, next_lanes(value_width))
    with on_device(q):
        decode_kernel[(num_tiles(value_width, v_tile) * num_heads * batch,)](
            q=with_strides(contiguous_rows(q)),
            q_den=with_strides(contiguous_rows(q if q_den is None else q_den)),
            window_k=with_strides(state.window_k),
            window_v=with_strides(state.window_v),
            window_den=with_strides(window_den),
            prefix=state.prefix,
            prefix_z=state.prefix_z,
            **mixing_arguments(contiguous_rows(mixing.float())),
            position=state.length.to(q.device),
            o=o,
            block_size=state.block_size,
            num_heads=num_heads,
            group=num_heads // num_kv_heads,
            scale=scale,
            K=key_width,
            V=value_width,
            L=den_width,
            BT=16,
            BK=key_lanes,
            BV=v_tile,
            BL=next_lanes(den_width),
            num_warps=8 if key_lanes > 128 else 4,
            enable_fp_fusion=True,
        )
    return o


def decode_kind(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_den: torch.Tensor | None, normalize: bool | str
) -> tuple:
    """Return the kind of a decoding step: its device, dtypes, widths and options, as the arguments of `small_step`.

    The kernel is verified once per kind (see `check.py`).
    """
    den_width = 0 if q_den is None else q_den.shape[3]
    widths = (concrete(q.shape[3]), concrete(v.shape[3]), concrete(den_width))
    grouped = not q.shape[2] <= k.shape[2]
    return q.device, q.dtype, v.dtype, *widths, normalize, grouped


@torch.compiler.assume_constant_result
def decode_fault(*kind: Any) -> str | None:
    """Return why the kernel cannot be trusted for a kind of decoding steps, or None if it can.

    Args:
        *kind: From `decode_kind`; several arguments for the reason given in `kernel_fault`.
    """
    return known_fault(small_step, kind)


@torch.no_grad()
def small_step(
    device: torch.device,
    dtype: torch.dtype,
    value_dtype: torch.dtype,
    width: int,
    value_width: int,
    den_width: int,
    normalize: bool,
    grouped: bool,
) -> Results:
    """Decode a short sequence over several blocks by the kernel, and compute it by PyTorch in fp64 (see `decode_kind`).

    The inputs are always the same, and the global random state does not change.

    Returns:
        The outputs of the kernel and of PyTorch.
    """
    num_tokens = 27
    size = 8
    num_heads = 2
    num_kv_heads = 1 if grouped else 2
    generator = torch.Generator().manual_seed(0)

    def random(num_heads: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.rand(1, num_tokens, num_heads, width, generator=generator).to(device, dtype)

    q, k = random(num_heads, width, dtype), random(num_kv_heads, width, dtype)
    v = random(num_kv_heads, value_width, value_dtype) - 0.5
    q_den = k_den = None
    if den_width:
        q_den = random(num_heads, den_width, dtype)
        k_den = random(num_kv_heads, den_width, dtype)
    mixing = torch.rand(4, 4, generator=generator).to(device)
    state = MHLAState.empty(
        batch=1,
        num_kv_heads=num_kv_heads,
        num_heads=num_heads,
        key_dim=width,
        value_dim=value_width,
        block_size=size,
        normalize=normalize,
        dtype=torch.promote_types(dtype, value_dtype),
        device=device,
        den_dim=den_width or None,
    )
    outputs = []
    for t in range(num_tokens):
        q_t, k_t, v_t = (x[:, t : t + 1] for x in (q, k, v))
        q_den_t, k_den_t = (None if x is None else x[:, t : t + 1] for x in (q_den, k_den))
        o = torch_step(
            q_t,
            k_t,
            v_t,
            mixing,
            state,
            scale=1.0,
            q_den=q_den_t,
            k_den=k_den_t,
            starts=None,
            unrounded=True,
            attend_one=attend_one,
        )
        outputs.append(o)
    exact = torch_mhla(
        q.double(),
        k.double(),
        v.double(),
        mixing.double(),
        q_den=None if q_den is None else q_den.double(),
        k_den=None if k_den is None else k_den.double(),
        blocks=Blocks.sequence(num_tokens, size),
        causal=True,
        normalize=normalize,
        scale=1.0,
    )
    return [torch.cat(outputs, 1)], [exact]
