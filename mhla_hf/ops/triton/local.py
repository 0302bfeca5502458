"""Near and far attention of blocks (`near_and_far`) as one kernel: a tile of a block reads its window, the sinks and the
running sums where they lie, and divides once.

The operator is opaque to torch.compile, one call for all lengths. Its gradients are those of the PyTorch form.
"""

import torch

from ..decays import LocalForm
from ..torch_local import near_and_far
from .check import known_fault
from .common import constexpr, dot, invert_or_zero, load_tile, program_of, store_tile
from .register import registered_operator
from .tuning import CHUNK, as_argument, dot_kind, in_rows, kernel, on_device, tiles, tl, token_tiles, tuned

LOCAL_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor fq, Tensor mixed, Tensor weight, Tensor? balance, Tensor? sink_k, "
    "Tensor? sink_v, Tensor? there, Tensor valid, Tensor place, SymInt size, SymInt lag, float scale, bool normalize, "
    "ScalarType dtype) -> Tensor"
)


@kernel
def add_keys(
    largest, den, total, q, k, v, row, token, inside, head, key, real, source, sees, scale, own, v_lanes,
    K: constexpr, V: constexpr, SOFTMAX: constexpr, DOT: constexpr, BT: constexpr, BN: constexpr, BK: constexpr,
):  # fmt: skip
    """The largest score, the sum of weights and that of weight times value with BN more keys, each at a `key` token."""
    score = tl.zeros((BT, BN), tl.float32)
    for first in range(0, K, BK):
        lanes = first + tl.arange(0, BK)
        query = load_tile(q, row, token, head, inside, lanes, K)
        score += dot(query, tl.trans(load_tile(k, row, key, source, real, lanes, K)), DOT)
    score *= scale
    if SOFTMAX:
        score = tl.where(sees, score, float("-inf"))
        before, largest = largest, tl.maximum(largest, tl.max(score, 1))
        shift = tl.where(largest == float("-inf"), 0.0, largest)
        weight, kept = tl.exp(score - shift[:, None]), tl.exp(before - shift)
        den, total = den * kept, total * kept[:, None]
    else:
        weight = tl.where(sees, score * own, 0.0)
    den += tl.sum(weight, 1)
    total += dot(weight, load_tile(v, row, key, source, real, v_lanes, V), DOT)
    return largest, den, total


def local_tiles(constants):
    """What other kernels on causal tokens take."""
    return token_tiles({**constants, "CAUSAL": True})


@tuned(local_tiles, "K", "V", "F", "R", "DOT")
def local_kernel(
    q, k, v, fq, mixed, weight, balance, sink_k, sink_v, there, valid, place, o, tokens, size, blocks, heads, group, lag,
    sinks, sink_step, scale,
    K: constexpr, V: constexpr, F: constexpr, R: constexpr, NORMALIZE: constexpr, DOT: constexpr, BT: constexpr,
    BK: constexpr, BV: constexpr,
):  # fmt: skip
    """o [B, T, H, V]: BV lanes of one tile of queries. Arguments as in `near_and_far`; T is tokens.

    sink_k, sink_v, there: [B, S, G, ..] with sink_step 0, or S of each of M blocks, [B, M * S, G, ..], with sink_step S.
    """
    v_tiles: constexpr = (V + BV - 1) // BV
    v_tile, part, block, head, row = program_of(v_tiles, tl.cdiv(size, BT), blocks, heads)
    source, v_lanes = head // group, v_tile * BV + tl.arange(0, BV)
    begin, end = block * size + part * BT, tl.minimum(block * size + size, tokens)
    token = (begin + tl.arange(0, BT)).to(tl.int64)
    inside = token < end
    here = tl.load(place + row * blocks + block).to(tl.int32)

    state = ((row * (heads // group) + source) * blocks + block) * R
    total, den, own = tl.zeros((BT, BV), tl.float32), tl.zeros((BT,), tl.float32), 0.0
    for rate in range(0, R):
        own += tl.load(weight + head * R + rate)
    for first in range(0, F, BK):
        lanes = first + tl.arange(0, BK)
        mixture, z = tl.zeros((BK, BV), tl.float32), tl.zeros((BK,), tl.float32)
        for rate in range(0, R):
            share, running = tl.load(weight + head * R + rate), mixed + ((state + rate) * F + lanes) * (V + 1)
            known = (lanes < F)[:, None] & (v_lanes < V)[None, :]
            mixture += share * tl.load(running[:, None] + v_lanes[None, :], mask=known, other=0.0)
            z += share * tl.load(running + V, mask=lanes < F, other=0.0)
        features = load_tile(fq, row, token, head, inside, lanes, F)
        total += dot(features, mixture, DOT)
        den += tl.sum(features.to(tl.float32) * z[None, :], 1)

    largest = tl.full((BT,), float("-inf"), tl.float32)
    if balance is not None:
        largest = tl.where(den != 0, tl.load(balance + head), largest)
    else:
        total, den = total * scale, den * scale
    if sink_k is not None:
        for first in range(0, tl.where(here >= lag, sinks, 0), 16):
            slot = first + tl.arange(0, 16)
            key = (block * sink_step + slot).to(tl.int64)
            real = slot < sinks
            real = real & (tl.load(there + row * sinks + key, mask=real, other=0) != 0)
            largest, den, total = add_keys(
                largest, den, total, q, sink_k, sink_v, row, token, inside, head, key, real, source, real[None, :],
                scale, own, v_lanes, K, V, balance is not None, DOT, BT, 16, BK,
            )  # fmt: skip
    window = tl.minimum(tl.minimum(lag - 1, here), block)
    for first in range((block - window) * size, tl.minimum(begin + BT, end), BT):
        key = (first + tl.arange(0, BT)).to(tl.int64)
        real = key < end
        real = real & (tl.load(valid + row * blocks * size + key, mask=real, other=0) != 0)
        sees = real[None, :] & (key[None, :] <= token[:, None])
        largest, den, total = add_keys(
            largest, den, total, q, k, v, row, token, inside, head, key, real, source, sees, scale, own, v_lanes,
            K, V, balance is not None, DOT, BT, BT, BK,
        )  # fmt: skip
    if NORMALIZE:
        total *= invert_or_zero(den)[:, None]
    store_tile(o, row, token, head, inside, v_lanes, total, V)


def triton_near_and_far(q, k, v, fq, mixed, valid, weight, balance, sink, place, form):
    """`near_and_far` by the kernel, of values v [B, T, G, V]; o in v's dtype unless the form wants it unrounded."""
    dtype, sink = torch.float32 if form.unrounded else v.dtype, (None, None, None) if sink is None else sink
    options = form.block_size, form.lag, form.scale, form.normalize, dtype
    return TRITON_LOCAL(q, k, v, fq, mixed, weight, balance, *sink, valid, place, *options)


def local_forward(
    q, k, v, fq, mixed, weight, balance, sink_k, sink_v, there, valid, place, size, lag, scale, normalize, dtype
):
    """o [B, T, H, V] in `dtype`."""
    (batch, tokens, heads), (groups, width) = q.shape[:3], v.shape[2:]
    blocks, sinks, step = place.shape[1], 0, 0
    o = torch.empty(batch, tokens, heads, width, dtype=dtype, device=q.device)
    if sink_k is not None:
        sinks, packed = there.shape[-1], there.dim() == 3
        step = sinks * packed
        sink_k, sink_v = (x.flatten(1, 2) if packed else x for x in (sink_k, sink_v))
    constants = {"K": k.shape[3], "V": width, "F": fq.shape[3], "R": weight.shape[1], "DOT": dot_kind(q, k, v, fq)}

    def grid(sizes):
        return (tiles(width, sizes["BV"]) * tiles(size, sizes["BT"]) * blocks * heads * batch,)

    given = [x if x is None else as_argument(in_rows(x)) for x in (q, k, v, fq, sink_k, sink_v)]
    others = (mixed, weight, balance, there, valid, place.expand(batch, -1))
    others = [x if x is None else x.contiguous() for x in others]
    with on_device(q):
        arguments = (
            *given[:4],
            *others[:3],
            *given[4:],
            *others[3:],
            as_argument(o),
            *(tokens, size, blocks, heads, heads // groups, lag, sinks, step, scale),
        )
        local_kernel.launch(grid, arguments, {**constants, "NORMALIZE": normalize})
    return o


def local_forward_fake(
    q, k, v, fq, mixed, weight, balance, sink_k, sink_v, there, valid, place, size, lag, scale, normalize, dtype
):
    """The shape of `local_forward`."""
    return v.new_empty(*q.shape[:3], v.shape[3], dtype=dtype)


def keep_for_gradients(ctx, inputs, output):
    """What the backward pass reads: the inputs."""
    ctx.save_for_backward(*inputs[:12])
    ctx.options = inputs[12:16]


def local_gradients(ctx, do):
    """The autograd formula of `local_forward`: the PyTorch form again, and its gradients."""
    *inputs, there, valid, place = ctx.saved_tensors
    size, lag, scale, normalize = ctx.options
    form = LocalForm(size, lag, scale=scale, normalize=normalize)
    with torch.enable_grad(), torch.autocast(do.device.type, enabled=False):
        inputs = [
            None if x is None else x.view_as(x) for x in inputs
        ]  # sinks may be a part of k and v, which are apart here
        q, k, v, fq, mixed, weight, balance, sink_k, sink_v = inputs
        sink = None if sink_k is None else (sink_k, sink_v, there)
        o = near_and_far(q, k, v, fq, mixed, valid, weight, balance, sink, place, form)
    wanted = [x is not None and x.requires_grad for x in inputs]
    learned = [x for x, asked in zip(inputs, wanted, strict=True) if asked]
    found = iter(torch.autograd.grad(o, learned, do.to(o.dtype), create_graph=torch.is_grad_enabled()))
    return *(next(found) if asked else None for asked in wanted), *[None] * 8


TRITON_LOCAL = registered_operator(
    "local", LOCAL_SCHEMA, local_forward, local_forward_fake, local_gradients, keep_for_gradients
)


def local_kind(q, v, fq, decays, balance, form):
    """What calls have in common that are checked once, as `small_local_call` takes it."""
    size = min(form.block_size, CHUNK + CHUNK // 2)
    numbers = q.shape[3], v.shape[3], fq.shape[3], decays.weight.shape[1], size, form.lag, form.sinks
    numbers = (len([None] * x) for x in numbers)  # a symbol becomes a number
    options = not q.shape[2] <= v.shape[2], balance is not None, form.normalize, form.unrounded
    return q.device, q.dtype, v.dtype, *numbers, *options


@torch.compiler.assume_constant_result
def local_fault(*kind) -> str | None:
    """`known_fault` of a `local_kind`."""
    return known_fault(small_local_call, kind)


def small_local_call(
    device, dtype, value_dtype, width, value_width, features, rates, size, lag, sinks, grouped, softmax, normalize, unrounded
):  # fmt: skip
    """Outputs of the kernel and of PyTorch in fp64. The inputs are always the same, and no other random number is used."""
    form, random = (
        LocalForm(size, lag, sinks, width**-0.5, normalize, unrounded=unrounded),
        torch.Generator().manual_seed(0),
    )
    blocks, groups = lag + 2, 1 if grouped else 2

    def numbers(*shape, dtype=torch.float32):
        return torch.rand(shape, generator=random).to(device, dtype)

    q, k, fq = (numbers(1, blocks * size, n, w, dtype=dtype) for n, w in ((2, width), (groups, width), (2, features)))
    v = numbers(1, blocks * size, groups, value_width, dtype=value_dtype) - 0.5
    mixed, weight = numbers(1, groups, blocks, rates, features, value_width + 1), numbers(2, rates)
    mixed[:, :, :lag] = 0  # where nothing is far
    balance = numbers(2) if softmax else None
    valid = torch.arange(blocks * size, device=device)[None] % 5 != 4
    sink = (k[:, :sinks], v[:, :sinks], valid[:, :sinks]) if sinks else None
    rest = balance, sink, torch.arange(blocks, device=device)[None], form
    got = triton_near_and_far(q, k, v, fq, mixed, valid, weight, *rest)
    q, k, fq, mixed, weight = (x.double() for x in (q, k, fq, mixed, weight))
    return [got], [near_and_far(q, k, v, fq, mixed, valid, weight, *rest)]
