"""The kernel of the forward pass that makes outputs from mixed summaries: o = q P + m_ii tril(q k^T) v, perhaps over a sum.

One program makes BV lanes of one tile of tokens of one block. Without causality only q P is there. P is the state that the
tile sees: that of its block or, causal, of its chunk of 64 tokens.
"""

from .common import (
    block_range,
    constexpr,
    dot,
    invert_or_zero,
    load_state,
    load_tile,
    program_of,
    real_keys,
    store_tile,
    tokens_from,
)
from .tuning import tl, token_tiles, tuned


@tuned(token_tiles, "K", "V", "CAUSAL", "DOT")
def forward_kernel(
    q, k, v, state, state_z, inv, o, mixing, m_head, m_row, key_mask, places, tokens, size, span, blocks, heads, group,
    share, scale,
    K: constexpr, V: constexpr, CAUSAL: constexpr, DOT: constexpr, BT: constexpr, BK: constexpr, BV: constexpr,
):  # fmt: skip
    """o [B, T, H, V]: BV lanes of one tile of tokens, times scale; or, if there is a state_z, divided by the sum of weights,
    one over which goes into inv [B, T, H].

    q, k, v as in `mhla`; state [B, H or G, M, K, V], state_z [B, H or G, M, K], causal ones of every chunk (`mix_states`);
    mixing fp32. `group` query heads share a key head, `share` a state.
    """
    v_tiles: constexpr = (V + BV - 1) // BV
    parts = tl.cdiv(span, BT)
    v_tile, part, block, head, row = program_of(v_tiles, parts, blocks, heads)
    low, high = block_range(block, row, places, tokens, size)
    token, valid = tokens_from(low + part * BT, high, places, BT)
    v_lanes = v_tile * BV + tl.arange(0, BV)
    index = (row * (heads // share) + head // share) * blocks + block
    if CAUSAL:
        index = index * parts + part
        source = real_keys(key_mask, row, token, valid, tokens)
    total = tl.zeros((BT, BV), tl.float32)
    weight = tl.zeros((BT, BT), tl.float32)
    den = tl.zeros((BT,), tl.float32)
    for first in range(0, K, BK):
        k_lanes = first + tl.arange(0, BK)
        query = load_tile(q, row, token, head, valid, k_lanes, K)
        total += dot(query, load_state(state, index, k_lanes, v_lanes, K, V), DOT)
        if state_z is not None:
            z = tl.load(state_z + index * K + k_lanes, mask=k_lanes < K, other=0.0)
            den += tl.sum(query.to(tl.float32) * z[None, :], 1)
        if CAUSAL:
            weight += dot(query, tl.trans(load_tile(k, row, token, head // group, source, k_lanes, K)), DOT)
    if CAUSAL:
        own = tl.load(mixing + head * m_head + block.to(tl.int64) * (m_row + 1))
        place = tl.arange(0, BT)
        weight = tl.where(place[None, :] <= place[:, None], weight * own, 0.0)
        total += dot(weight, load_tile(v, row, token, head // group, source, v_lanes, V), DOT)
        den += tl.sum(weight, 1)
    if state_z is not None:
        inverse = invert_or_zero(den)
        total *= inverse[:, None]
        if v_tile == 0:
            tl.store(inv + (row * tokens + token) * heads + head, inverse, mask=valid)
    else:
        total *= scale
    store_tile(o, row, token, head, valid, v_lanes, total, V)
