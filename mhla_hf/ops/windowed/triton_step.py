"""Two kernels for one new token per request whose decoder state (see `WindowedState`) is in the pages of a serving engine.

The first advances the sums in their pages, the second attends; neither copies a page. P is the number of pages of a request,
U = G / P the number of KV heads in a page, and S that of slots. A tensor of pages enters a kernel as a tuple (pointer,
stride of the page); a page is contiguous.
"""

from collections.abc import Mapping
from typing import Any, no_type_check

import torch
from torch import Tensor

from ..torch_layout import ring_slot
from ..triton.common import constexpr, invert_or_zero
from ..triton.tuning import kernel, next_lanes, num_tiles, on_device, tl
from .attention import windowed_attention
from .decays import Decays
from .inputs import WindowedInputs, WindowedOptions

SMALL_PAGES = WindowedOptions(4, scale=0.125, impl="torch")


@kernel
@no_type_check
def advance_kernel(
    running, pending, values, k_features, pages, position, log_rate,
    block_size, window, sinks, num_slots, num_kv_heads,
    R: constexpr, U: constexpr, V: constexpr, F: constexpr, BV: constexpr, BF: constexpr,
):  # fmt: skip
    """Advance the sums of a page by one token; each program updates BV rows of the sums of one request and KV head.

    k_features [N, G, F] are those of the token that enters the pending summary; log_rate is fp32 [G, R]. See `page_step` for
    the others.
    """
    num_v_tiles: tl.constexpr = (V + BV) // BV
    v_tile = tl.program_id(0) % num_v_tiles
    item = (tl.program_id(0) // num_v_tiles).to(tl.int64)
    row, head = item // num_kv_heads, item % num_kv_heads
    page, head_in_page = tl.load(pages + row * (num_kv_heads // U) + head // U), head % U
    token = tl.load(position + row)
    opens, old = token % block_size == 0, token - (window - 1) * block_size
    num_far_lanes, num_far_values = tl.where(old >= sinks, F, 0), tl.where(old >= sinks, V, 0)
    v_lanes, f_lanes = v_tile * BV + tl.arange(0, BV), tl.arange(0, BF)
    lanes = v_lanes[:, None] * F + f_lanes[None, :]
    inside = (v_lanes[:, None] <= V) & (f_lanes[None, :] < F)
    # Before the first token of a request, its pages hold the data of another.
    held = inside & (v_lanes[:, None] < tl.where(token > 0, V + 1, 0))
    pending_lanes = pending[0] + page * pending[1] + head_in_page * (V + 1) * F + lanes
    entering = tl.load(pending_lanes, mask=held, other=0.0)
    if opens:
        for r in tl.static_range(R):
            rate = tl.load(log_rate + head * R + r)
            running_lanes = running[0] + page * running[1] + (head_in_page * R + r) * (V + 1) * F + lanes
            total = tl.load(running_lanes, mask=held, other=0.0)
            tl.store(running_lanes, total * tl.exp(rate) + entering * tl.exp(rate * window), mask=inside)
    features = tl.load(k_features + item * F + f_lanes, mask=f_lanes < num_far_lanes, other=0.0).to(tl.float32)
    slot = tl.where(old < sinks, 0, sinks + old % (num_slots - sinks))
    value_lanes = values[0] + page * values[1] + (head_in_page * num_slots + slot) * V + v_lanes
    value = tl.load(value_lanes, mask=v_lanes < num_far_values, other=0.0).to(tl.float32)
    value = tl.where(v_lanes == V, 1.0, value)
    entering = tl.where(opens, 0.0, entering) + value[:, None] * features[None, :]
    tl.store(pending_lanes, entering, mask=inside)


@kernel
@no_type_check
def page_attention_kernel(
    q, q_features, running, keys, values, pages, position, weight, power, balance, o,
    block_size, window, sinks, num_slots, num_heads, num_kv_heads, scale,
    R: constexpr, U: constexpr, D: constexpr, V: constexpr, F: constexpr, NORMALIZE: constexpr,
    BT: constexpr, BD: constexpr, BV: constexpr, BF: constexpr,
):  # fmt: skip
    """Compute o [N, H, V], the attention of one new token per request; each program computes BV lanes of one query head.

    weight is fp32 [H, R], power and balance are fp32 [H] or None. See `page_step` for the others.
    """
    num_v_tiles: tl.constexpr = (V + BV - 1) // BV
    v_tile = tl.program_id(0) % num_v_tiles
    item = (tl.program_id(0) // num_v_tiles).to(tl.int64)
    row, head = item // num_heads, item % num_heads
    kv_head = head // (num_heads // num_kv_heads)
    page, head_in_page = tl.load(pages + row * (num_kv_heads // U) + kv_head // U), kv_head % U
    token = tl.load(position + row)
    block = token // block_size
    d_lanes, f_lanes = tl.arange(0, BD), tl.arange(0, BF)
    v_lanes = v_tile * BV + tl.arange(0, BV)
    query = tl.load(q + item * D + d_lanes, mask=d_lanes < D, other=0.0).to(tl.float32)
    features = tl.load(q_features + item * F + f_lanes, mask=f_lanes < F, other=0.0).to(tl.float32)
    if power is not None:
        num_far = tl.maximum(block - window + 1, 1).to(tl.float32)
        features *= tl.exp(-tl.load(power + head) * tl.log(num_far))

    far, far_den, total_weight = tl.zeros([BV], tl.float32), 0.0, 0.0
    for r in tl.static_range(R):
        sums = running[0] + page * running[1] + (head_in_page * R + r) * (V + 1) * F
        tile = sums + v_lanes[:, None] * F + f_lanes[None, :]
        inside = (v_lanes[:, None] < V) & (f_lanes[None, :] < F)
        w = tl.load(weight + head * R + r)
        far += w * tl.sum(tl.load(tile, mask=inside, other=0.0) * features[None, :], 1)
        far_den += w * tl.sum(tl.load(sums + V * F + f_lanes, mask=f_lanes < F, other=0.0) * features, 0)
        total_weight += w

    near, near_den, largest = tl.zeros([BV], tl.float32), 0.0, float("-inf")
    oldest_age, ring = token % block_size + (window - 1) * block_size, num_slots - sinks
    for first in range(0, num_slots, BT):
        slot = (first + tl.arange(0, BT)).to(tl.int64)
        age = (token - slot + sinks + ring) % ring
        visible = tl.where(slot < sinks, slot <= token, (age <= oldest_age) & (token - age >= sinks))
        visible &= slot < num_slots
        places = (head_in_page * num_slots + slot)[:, None]
        k_tile = keys[0] + page * keys[1] + places * D + d_lanes[None, :]
        key = tl.load(k_tile, mask=visible[:, None] & (d_lanes[None, :] < D), other=0.0).to(tl.float32)
        score = tl.sum(key * query[None, :], 1) * scale
        if balance is not None:
            score = tl.where(visible, score, float("-inf"))
            new_largest = tl.maximum(largest, tl.max(score, 0))
            # If no key is visible so far, the maximum is -inf, and -inf - -inf would be NaN.
            shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
            shrink = tl.exp(largest - shift)
            weights = tl.exp(score - shift)
            near, near_den, largest = near * shrink, near_den * shrink, new_largest
        else:
            weights = score * total_weight
        v_tile_lanes = values[0] + page * values[1] + places * V + v_lanes[None, :]
        value = tl.load(v_tile_lanes, mask=visible[:, None] & (v_lanes[None, :] < V), other=0.0).to(tl.float32)
        near += tl.sum(value * weights[:, None], 0)
        near_den += tl.sum(weights, 0)

    near_factor, far_factor = 1.0, scale
    if balance is not None:
        exponent = tl.where((token >= window * block_size) & (far_den != 0.0), tl.load(balance + head), float("-inf"))
        shift = tl.maximum(largest, exponent)
        shift = tl.where(shift == float("-inf"), 0.0, shift)
        near_factor, far_factor = tl.exp(largest - shift), tl.exp(exponent - shift)
    total = near * near_factor + far * far_factor
    if NORMALIZE:
        total *= invert_or_zero(near_den * near_factor + far_den * far_factor)
    tl.store(o + item * V + v_lanes, total, mask=v_lanes < V)


def page_step(
    q: Tensor, q_features: Tensor, k_features: Tensor, parts: Mapping[str, Tensor], pages: Tensor, position: Tensor,
    decays: Decays, balance: Tensor | None, options: WindowedOptions,
) -> Tensor:  # fmt: skip
    """Continue `windowed_attention` by one token per request, as `windowed_step` does, and update its pages in place.

    Args:
        q: [N, H, D], rotated queries of the new tokens; features if there is no balance.
        q_features: [N, H, F], their features for the far part.
        k_features: [N, G, F], the features of the key `options.window - 1` blocks before the new token; ignored if there is
            none.
        parts: What all pages hold, by the names of `WindowedState`: "running" [pages, U, R, V + 1, F], "pending"
            [pages, U, V + 1, F], "k" [pages, U, S, D], and "v" [pages, U, S, V], the new token included.
        pages: int64 [N, P], the pages of each request, with the KV heads in the model's order.
        position: int64 [N], the position of the new token; where it is 0, the sums in the pages are ignored. Rows of padding
            have position -1, and outputs 0.
        decays, balance, options: As in `WindowedInputs`.

    Returns:
        The outputs, fp32 [N, H, V].
    """
    batch, num_heads, key_width = q.shape
    _, heads_per_page, num_slots, value_width = parts["v"].shape
    num_rates, num_features = parts["running"].shape[2], parts["running"].shape[-1]
    num_kv_heads = pages.shape[1] * heads_per_page
    o = torch.empty(batch, num_heads, value_width, dtype=torch.float32, device=q.device)
    if not batch:
        return o
    decays = decays.to(torch.float32)
    feature_lanes = next_lanes(num_features)
    value_tile = min(32 if feature_lanes <= 128 else 16, next_lanes(value_width))
    running, pending, keys, values = ((parts[name], parts[name].stride(0)) for name in ("running", "pending", "k", "v"))
    shared: dict[str, Any] = {
        "running": running, "values": values, "pages": pages.contiguous(), "position": position,
        "block_size": options.block_size, "window": options.window, "sinks": options.sinks, "num_slots": num_slots,
        "num_kv_heads": num_kv_heads, "R": num_rates, "U": heads_per_page, "V": value_width, "F": num_features,
        "BV": value_tile, "BF": feature_lanes, "num_warps": 4, "enable_fp_fusion": True,
    }  # fmt: skip
    with on_device(q):
        advance_kernel[(batch * num_kv_heads * num_tiles(value_width + 1, value_tile),)](
            pending=pending, k_features=k_features.contiguous(), log_rate=decays.log_rate.contiguous(), **shared
        )
        page_attention_kernel[(batch * num_heads * num_tiles(value_width, value_tile),)](
            q=q.contiguous(),
            q_features=q_features.contiguous(),
            keys=keys,
            weight=decays.weight.contiguous(),
            power=None if decays.power is None else decays.power.contiguous(),
            balance=None if balance is None else balance.float().contiguous(),
            o=o,
            num_heads=num_heads,
            scale=options.scale,
            D=key_width,
            NORMALIZE=options.normalize,
            BT=16 if key_width > 128 else 32,
            BD=next_lanes(key_width),
            **shared,
        )
    return o


def small_page_call(
    device: torch.device, dtype: torch.dtype = torch.bfloat16, *, options: WindowedOptions = SMALL_PAGES,
    width: int = 64, num_features: int = 64, num_rates: int = 1, queries_per_kv: int = 2, heads_per_page: int = 1,
    has_power: bool = True,
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """Decode a short sequence in two pages by the kernels, and compute it by PyTorch in fp64; see `SmallCall`.

    `make gpu` does so with all kinds of options. Without sinks there is no softmax.
    """
    num_tokens, num_kv_heads = (options.window + 3) * options.block_size, 2 * heads_per_page
    num_heads = queries_per_kv * num_kv_heads
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.rand(shape, generator=generator).to(device, dtype)

    q = random(num_tokens, num_heads, width, dtype=dtype)
    k = random(num_tokens, num_kv_heads, width, dtype=dtype)
    v = random(num_tokens, num_kv_heads, width, dtype=dtype) - 0.5
    q_features = random(num_tokens, num_heads, num_features, dtype=dtype)
    # Without a softmax, the near part reads features, which are the keys.
    k_features = random(num_tokens, num_kv_heads, num_features, dtype=dtype) if options.sinks else k
    weight, log_rate = random(num_heads, num_rates), -random(num_kv_heads, num_rates)
    decays = Decays(weight, log_rate, random(num_heads) if has_power else None)
    balance = random(num_heads) if options.sinks else None
    num_slots = options.sinks + options.window * options.block_size

    def allocate(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.full((3, heads_per_page, *shape), torch.nan, dtype=dtype, device=device)

    parts = {
        "running": allocate(num_rates, width + 1, num_features, dtype=torch.float32),
        "pending": allocate(width + 1, num_features, dtype=torch.float32),
        "k": allocate(num_slots, width, dtype=dtype),
        "v": allocate(num_slots, width, dtype=dtype),
    }
    pages = torch.tensor([[2, 0]], device=device)
    outputs = []
    for t in range(num_tokens):
        position = torch.tensor([t], device=device)
        slot = ring_slot(position, num_slots, options.sinks)
        for held, new in ((parts["k"], k), (parts["v"], v)):
            held[pages, :, slot[:, None]] = new[None, t].unflatten(1, (2, heads_per_page))
        old = k_features[None, max(t - (options.window - 1) * options.block_size, 0)]
        outputs.append(
            page_step(q[None, t], q_features[None, t], old, parts, pages, position, decays, balance, options)
        )
    q, k, v, q_features, k_features = (x[None].double() for x in (q, k, v, q_features, k_features))
    inputs = WindowedInputs(q, k, v, q_features, decays.to(torch.float64), balance, options)
    exact = windowed_attention(inputs, k_features)
    return [torch.cat(outputs)], [exact[0]]
