"""Near and far attention of a run of blocks (`near_and_far`) as one kernel.

Each program computes a tile of queries: it reads their window, the sinks, and the running sums where they lie, and divides
once. The operator is opaque to torch.compile, with one call for all lengths; its gradients are those of the PyTorch
implementation.
"""

from typing import Any, no_type_check

import torch

from ..triton.common import constexpr, dot, invert_or_zero, load_tile, program_of, store_tile
from ..triton.register import operator_schema, register_operator
from ..triton.tuning import (
    CHUNK,
    contiguous_rows,
    dot_kind,
    kernel,
    num_tiles,
    on_device,
    tl,
    token_tiles,
    tuned,
    with_strides,
)
from .near_and_far import WindowOperands, near_and_far


@kernel
@no_type_check
def add_keys(
    largest, den, total, q, k, v, row, token, inside, head, key_token, real, kv_head, visible, scale, total_weight, v_lanes,
    K: constexpr, V: constexpr, SOFTMAX: constexpr, DOT: constexpr, BT: constexpr, BN: constexpr, BK: constexpr,
):  # fmt: skip
    """Add BN near keys to the sums of a tile of queries.

    Args:
        largest, den, total: [BT], [BT] and [BT, BV], from the previous call, see Returns.
        q, k, v: As in `windowed_kernel`.
        row, head, token, inside: The batch row, the head, the tokens [BT], and which of them exist [BT], of the queries.
        key_token, real, kv_head: The tokens [BN], which of them are keys [BN], and the KV head, of the keys.
        visible: [BT or 1, BN], which query sees which key.
        scale: Multiplier of q k^T.
        total_weight: Without SOFTMAX, the weight of a key is score * total_weight.
        v_lanes: [BV], the lanes of v.

    Returns:
        The largest score so far, the sum of the weights, and the sum of weight * value, for each query.
    """
    score = tl.zeros((BT, BN), tl.float32)
    for first in range(0, K, BK):
        lanes = first + tl.arange(0, BK)
        query = load_tile(q, row, token, head, inside, lanes, K)
        score += dot(query, tl.trans(load_tile(k, row, key_token, kv_head, real, lanes, K)), DOT)
    score *= scale
    if SOFTMAX:
        score = tl.where(visible, score, float("-inf"))
        before, largest = largest, tl.maximum(largest, tl.max(score, 1))
        shift = tl.where(largest == float("-inf"), 0.0, largest)
        weight = tl.exp(score - shift[:, None])
        rescale = tl.exp(before - shift)
        den, total = den * rescale, total * rescale[:, None]
    else:
        weight = tl.where(visible, score * total_weight, 0.0)
    den += tl.sum(weight, 1)
    total += dot(weight, load_tile(v, row, key_token, kv_head, real, v_lanes, V), DOT)
    return largest, den, total


def windowed_tiles(constants: dict[str, Any]) -> list[dict[str, int]]:
    """List the tile sizes to try: the same as for other kernels on causal tokens (`token_tiles`)."""
    return token_tiles({**constants, "CAUSAL": True})


@tuned(windowed_tiles, "K", "V", "F", "R", "DOT")
@no_type_check
def windowed_kernel(
    q, k, v, q_features, far_sums, weight, balance, sink_k, sink_v, sink_valid, valid, block_index, o, num_tokens,
    block_size, num_blocks, num_heads, group, window, num_sinks, sink_stride, scale,
    K: constexpr, V: constexpr, F: constexpr, R: constexpr, NORMALIZE: constexpr, DOT: constexpr,
    BT: constexpr, BK: constexpr, BV: constexpr,
):  # fmt: skip
    """Compute o [B, T, H, V]: each program computes BV lanes of one tile of queries.

    Args:
        q, k, v, q_features, far_sums, weight, balance, valid, block_index: As in `WindowOperands`, where K is called F.
        sink_k, sink_v: [B, S, G, ..], the sinks of each row, or [B, M * S, G, ..], S sinks for each block. None if there are
            no sinks.
        sink_valid: bool [B, S] or [B, M * S], which of them are keys.
        sink_stride: S if each block has its own sinks, else 0.
        group: Query heads per KV head.
        window, scale: As in `WindowedOptions`.
    """
    num_v_tiles: tl.constexpr = (V + BV - 1) // BV
    v_tile, part, block, head, row = program_of(num_v_tiles, tl.cdiv(block_size, BT), num_blocks, num_heads)
    kv_head, v_lanes = head // group, v_tile * BV + tl.arange(0, BV)
    begin = block * block_size + part * BT
    end = tl.minimum(block * block_size + block_size, num_tokens)
    token = (begin + tl.arange(0, BT)).to(tl.int64)
    inside = token < end
    index = tl.load(block_index + row * num_blocks + block).to(tl.int32)

    # The far part: the running sums, mixed by the weights, are a state that queries read.
    state = ((row * (num_heads // group) + kv_head) * num_blocks + block) * R
    total = tl.zeros((BT, BV), tl.float32)
    den = tl.zeros((BT,), tl.float32)
    total_weight = 0.0
    for rate in range(0, R):
        total_weight += tl.load(weight + head * R + rate)
    for first in range(0, F, BK):
        lanes = first + tl.arange(0, BK)
        mixture = tl.zeros((BK, BV), tl.float32)
        z = tl.zeros((BK,), tl.float32)
        for rate in range(0, R):
            rate_weight = tl.load(weight + head * R + rate)
            sums = far_sums + ((state + rate) * F + lanes) * (V + 1)
            in_range = (lanes < F)[:, None] & (v_lanes < V)[None, :]
            mixture += rate_weight * tl.load(sums[:, None] + v_lanes[None, :], mask=in_range, other=0.0)
            z += rate_weight * tl.load(sums + V, mask=lanes < F, other=0.0)
        features = load_tile(q_features, row, token, head, inside, lanes, F)
        total += dot(features, mixture, DOT)
        den += tl.sum(features.to(tl.float32) * z[None, :], 1)

    # The near part: sinks, then the window.
    largest = tl.full((BT,), float("-inf"), tl.float32)
    if balance is not None:
        largest = tl.where(den != 0, tl.load(balance + head), largest)
    else:
        total, den = total * scale, den * scale
    if sink_k is not None:
        for first in range(0, tl.where(index >= window, num_sinks, 0), 16):
            slot = first + tl.arange(0, 16)
            key_token = (block * sink_stride + slot).to(tl.int64)
            real = slot < num_sinks
            real = real & (tl.load(sink_valid + row * num_sinks + key_token, mask=real, other=0) != 0)
            largest, den, total = add_keys(
                largest, den, total, q, sink_k, sink_v, row, token, inside, head, key_token, real, kv_head, real[None, :],
                scale, total_weight, v_lanes, K, V, balance is not None, DOT, BT, 16, BK,
            )  # fmt: skip
    blocks_back = tl.minimum(tl.minimum(window - 1, index), block)
    for first in range((block - blocks_back) * block_size, tl.minimum(begin + BT, end), BT):
        key_token = (first + tl.arange(0, BT)).to(tl.int64)
        real = key_token < end
        real = real & (tl.load(valid + row * num_blocks * block_size + key_token, mask=real, other=0) != 0)
        visible = real[None, :] & (key_token[None, :] <= token[:, None])
        largest, den, total = add_keys(
            largest, den, total, q, k, v, row, token, inside, head, key_token, real, kv_head, visible,
            scale, total_weight, v_lanes, K, V, balance is not None, DOT, BT, BT, BK,
        )  # fmt: skip
    if NORMALIZE:
        total *= invert_or_zero(den)[:, None]
    store_tile(o, row, token, head, inside, v_lanes, total, V)


def windowed_forward(*arguments: Any) -> torch.Tensor:
    """Implement `TRITON_WINDOWED`, with the arguments of `WindowOperands`, by launching `windowed_kernel`.

    Returns:
        [B, T, H, V] in `dtype`.
    """
    operands = WindowOperands(*arguments)
    q, k, v, q_features, far_sums, weight, balance, sink_k, sink_v, sink_valid, valid, block_index = operands[:12]
    block_size = operands.block_size
    batch, num_tokens, num_heads, key_width = q.shape
    num_kv_heads, value_width = v.shape[2:]
    num_blocks = block_index.shape[1]
    num_sinks = 0
    sink_stride = 0
    o = torch.empty(batch, num_tokens, num_heads, value_width, dtype=operands.dtype, device=q.device)
    if sink_k is not None and sink_v is not None and sink_valid is not None:
        num_sinks = sink_valid.shape[-1]
        if sink_valid.dim() == 3:  # sinks of each block
            sink_stride = num_sinks
            sink_k, sink_v = sink_k.flatten(1, 2), sink_v.flatten(1, 2)

    def grid(sizes: dict[str, int]) -> tuple[int]:
        tiles_per_block = num_tiles(value_width, sizes["BV"]) * num_tiles(block_size, sizes["BT"])
        return (tiles_per_block * num_blocks * num_heads * batch,)

    with on_device(q):
        windowed_kernel[grid](
            q=with_strides(contiguous_rows(q)),
            k=with_strides(contiguous_rows(k)),
            v=with_strides(contiguous_rows(v)),
            q_features=with_strides(contiguous_rows(q_features)),
            far_sums=far_sums.contiguous(),
            weight=weight.contiguous(),
            balance=None if balance is None else balance.contiguous(),
            sink_k=None if sink_k is None else with_strides(contiguous_rows(sink_k)),
            sink_v=None if sink_v is None else with_strides(contiguous_rows(sink_v)),
            sink_valid=None if sink_valid is None else sink_valid.contiguous(),
            valid=valid.contiguous(),
            block_index=block_index.expand(batch, -1).contiguous(),
            o=with_strides(o),
            num_tokens=num_tokens,
            block_size=block_size,
            num_blocks=num_blocks,
            num_heads=num_heads,
            group=num_heads // num_kv_heads,
            window=operands.window,
            num_sinks=num_sinks,
            sink_stride=sink_stride,
            scale=operands.scale,
            K=key_width,
            V=value_width,
            F=q_features.shape[3],
            R=weight.shape[1],
            NORMALIZE=operands.normalize,
            DOT=dot_kind(q, k, v, q_features),
        )
    return o


def windowed_forward_fake(*arguments: Any) -> torch.Tensor:
    """Return a tensor with the shape and dtype of `windowed_forward`, for tracing."""
    operands = WindowOperands(*arguments)
    return operands.v.new_empty(*operands.q.shape[:3], operands.v.shape[3], dtype=operands.dtype)


def save_for_windowed_backward(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    """Save the arguments of `windowed_forward` in `ctx` for the backward pass."""
    ctx.save_for_backward(*inputs[:12])
    ctx.options = inputs[12:]


def windowed_gradients(ctx: Any, do: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Autograd formula of `TRITON_WINDOWED`: compute the gradients of `windowed_forward` by differentiating `near_and_far`.

    Returns:
        One gradient per argument of `windowed_forward`; None for those that have none or need none.
    """
    with torch.enable_grad(), torch.autocast(do.device.type, enabled=False):
        # Views, because sinks may be a part of k and v, whose gradients are separate here.
        tensors: list[Any] = [None if x is None else x.view_as(x) for x in ctx.saved_tensors]
        o = near_and_far(WindowOperands(*tensors, *ctx.options))
    needed = [x for x in tensors if x is not None and x.requires_grad]
    grads = iter(torch.autograd.grad(o, needed, do.to(o.dtype), create_graph=torch.is_grad_enabled()))
    input_grads = [next(grads) if x is not None and x.requires_grad else None for x in tensors]
    return *input_grads, *[None for _ in ctx.options]


TRITON_WINDOWED = register_operator(
    "local",
    f"({operator_schema(WindowOperands)}) -> Tensor",
    windowed_forward,
    windowed_forward_fake,
    windowed_gradients,
    save_for_windowed_backward,
)


def small_windowed_call(device: torch.device) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Compute the output of a softmax window with sinks and a far part of two decays, for grouped heads; see `SmallCall`."""
    block_size, window, num_blocks = CHUNK + CHUNK // 2, 2, 4
    num_tokens = num_blocks * block_size
    generator = torch.Generator().manual_seed(0)
    q, q_features, k, v = (torch.rand(1, num_tokens, heads, 64, generator=generator) for heads in (2, 2, 1, 1))
    q, k, v, q_features = (x.to(device, torch.bfloat16) for x in (q, k, v - 0.5, q_features))
    far_sums = torch.rand(1, 1, num_blocks, 2, 64, 65, generator=generator).to(device)
    far_sums[:, :, :window] = 0  # blocks from which nothing is far
    weight = torch.rand(2, 2, generator=generator).to(device)
    valid = torch.arange(num_tokens, device=device)[None] % 5 != 4
    operands = WindowOperands(
        q,
        k,
        v,
        q_features,
        far_sums,
        weight,
        balance=weight[:, 0],
        sink_k=k[:, :4],
        sink_v=v[:, :4],
        sink_valid=valid[:, :4],
        valid=valid,
        block_index=torch.arange(num_blocks, device=device)[None],
        block_size=block_size,
        window=window,
        scale=0.125,
        normalize=True,
        dtype=torch.float32,
    )
    return [TRITON_WINDOWED(*operands)], [near_and_far(operands._replace(far_sums=far_sums.double()))]
