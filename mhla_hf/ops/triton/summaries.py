"""Sums over the tokens of a block: S = sum k v^T and z = sum k (paper eq. 4).

One program walks the tokens of one part of a block and keeps one tile of the sum. A part is a whole block, a chunk of a
causal block (`mix.py` says what becomes of those), or, where few long blocks would leave most of a GPU without work, as much
of a block as makes enough programs. The same kernel makes the gradients of mixed summaries, from q and do in the place of k
and v.
"""

import torch

from .common import block_range, cast, constexpr, dot, load_number, load_scaled, load_tile, program_of, tokens_from
from .tuning import CHUNK, as_argument, summary_tiles, tiles, tl, tuned

PART_TOKENS = 256
ENOUGH_PROGRAMS = 384  # some three for each multiprocessor of the largest GPUs


@tuned(summary_tiles, "K", "V", "CAUSAL", "DOT")
def summaries_kernel(
    k, v, inv, r, key_mask, s, z, places, tokens, size, span, parts, blocks, heads, group,
    K: constexpr, V: constexpr, CAUSAL: constexpr, DOT: constexpr, BT: constexpr, BK: constexpr, BV: constexpr,
):  # fmt: skip
    """s [B, heads, M * parts, K, V], z [.., K]: one tile of one part of `span` tokens, over `group` heads of k and v."""
    v_tiles: constexpr = (V + BV - 1) // BV
    tile, part, block, head, row = program_of(v_tiles * ((K + BK - 1) // BK), parts, blocks, heads)
    k_lanes, v_lanes = tile // v_tiles * BK + tl.arange(0, BK), tile % v_tiles * BV + tl.arange(0, BV)
    low, high = block_range(block, row, places, tokens, size)
    low, high = low + part * span, tl.minimum(high, low + part * span + span)
    total = tl.zeros((BK, BV), tl.float32)
    total_z = tl.zeros((BK,), tl.float32)
    for member in range(group):
        source = head * group + member
        for first in range(low, high, BT):
            token, _, valid = tokens_from(first, high, places, key_mask, row, tokens, BT, True)
            key = load_tile(k, row, token, source, valid, k_lanes, K)
            value = load_scaled(v, inv, row, token, source, tokens, heads * group, valid, v_lanes, V, DOT)
            total += dot(tl.trans(key), value, DOT)
            if z is not None:
                weight = key.to(tl.float32)
                if r is not None:
                    weight *= load_number(r, row, token, source, tokens, heads * group, valid)[:, None]
                total_z += tl.sum(weight, 0)
    start = (((row * heads + head) * blocks + block) * parts + part) * K
    inside = (k_lanes < K)[:, None] & (v_lanes < V)[None, :]
    tl.store(s + (start + k_lanes[:, None]) * V + v_lanes[None, :], cast(total, s.dtype.element_ty), mask=inside)
    if z is not None and tile % v_tiles == 0:
        tl.store(z + start + k_lanes, total_z, mask=k_lanes < K)


def summaries(k, v, cut, dot_as, *, heads, causal, with_z, key_mask=None, inv=None, r=None):
    """sum k v^T of every block, [B, heads, M, K, V] (bf16 if products are, else fp32), and sum k, fp32 [B, heads, M, K].

    k [B, T, H, K], v [B, T, H, V]; H // heads neighboring heads are added up. key_mask [B, T] leaves tokens out. inv [B, T,
    H] multiplies v, r [B, T, H] the k of the second sum, which is None unless with_z. causal: sums of every chunk.
    """
    batch, _, every, width, other = *k.shape, v.shape[3]
    count = cut.blocks * heads * batch
    span = CHUNK if causal else part_span(cut.span, count)
    parts = tiles(cut.span, span)
    shape = batch, heads, cut.blocks * parts, width
    s = torch.empty(*shape, other, dtype=torch.bfloat16 if dot_as == "bf16" else torch.float32, device=k.device)
    z = torch.empty(*shape, dtype=torch.float32, device=k.device) if with_z else None
    extent = cut.places, cut.tokens, cut.size, span, parts, cut.blocks
    summaries_kernel.launch(
        lambda sizes: (tiles(width, sizes["BK"]) * tiles(other, sizes["BV"]) * parts * count,),
        (as_argument(k), as_argument(v), inv, r, key_mask, s, z, *extent, heads, every // heads),
        {"K": width, "V": other, "CAUSAL": causal, "DOT": dot_as},
    )
    if parts == 1 or causal:
        return s, z
    return sum_parts(s, parts), None if z is None else sum_parts(z, parts)


def part_span(span, programs):
    """Tokens of a part, so that `programs` blocks of up to `span` tokens make enough programs of 256 tokens or more."""
    parts = max(1, min(span // PART_TOKENS, tiles(ENOUGH_PROGRAMS, programs)))
    return tiles(tiles(span, parts), CHUNK) * CHUNK


def sum_parts(s, parts):
    """Summaries of blocks, [B, G, M, ..], from those of their parts, [B, G, M * parts, ..]."""
    return s.unflatten(2, (-1, parts)).sum(3)
