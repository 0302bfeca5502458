"""The kernels that make tokens from states: outputs in the forward pass, dq, dk and dv in the backward pass.

With P the state that a tile of tokens sees (that of its block or, causal, of its chunk of 64 tokens), dS the gradient of the
summary it went into, A = tril(q k^T) and dA = tril(do v^T + r) of the tile itself, causal only:

    o = q P + m_ii A v    dq = do P^T + r z^T + m_ii dA k    dk = v dS^T + dz + m_ii dA^T q    dv = k dS + m_ii A^T do

o may be divided by the sum of weights, den. do is the gradient of the sum of weight times v and r that of den. Where o is
the quotient, what arrives is its gradient: do is that times inv = 1 / den, as it is read, and r = -<do, o>, from
`dq_kernel`. A program makes some lanes of one tile of tokens of one block.
"""

from .common import constexpr, dot, invert_or_zero, load_number, load_scaled, load_state, load_tile, store_tile, tile_of
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
    v_tile, row, head, block, state_place, states, token, valid, source = tile_of(
        v_tiles, key_mask, places, tokens, size, span, blocks, heads, BT, CAUSAL, CAUSAL
    )
    v_lanes = v_tile * BV + tl.arange(0, BV)
    index = (row * (heads // share) + head // share) * states + state_place
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


@tuned(token_tiles, "K", "V", "CAUSAL", "DOT")
def dq_kernel(
    q, k, v, do, o, inv, state, state_z, r, dm_own, dq, mixing, m_head, m_row, key_mask, places, tokens, size, span, blocks,
    heads, group, share, scale,
    K: constexpr, V: constexpr, CAUSAL: constexpr, DOT: constexpr, BT: constexpr, BK: constexpr, BV: constexpr,
):  # fmt: skip
    """dq [B, T, H, K]: BK lanes of one tile of tokens; r [B, T, H], if inv, o and state_z are there.

    And causal dm_own [B, H, M * chunks, K], whose sum over K is the gradient of m_ii from within a chunk: that of q (dA k).
    do and o [B, T, H, V], inv [B, T, H] as `forward_kernel` wrote it; the rest as there.
    """
    k_tiles: constexpr = (K + BK - 1) // BK
    k_tile, row, head, block, state_place, states, token, valid, source = tile_of(
        k_tiles, key_mask, places, tokens, size, span, blocks, heads, BT, CAUSAL, CAUSAL
    )
    k_lanes = k_tile * BK + tl.arange(0, BK)
    index = (row * (heads // share) + head // share) * states + state_place
    total = tl.zeros((BT, BK), tl.float32)
    dweight = tl.zeros((BT, BT), tl.float32)
    den_grad = tl.zeros((BT,), tl.float32)
    for first in range(0, V, BV):
        v_lanes = first + tl.arange(0, BV)
        grad = load_scaled(do, inv, row, token, head, tokens, heads, valid, v_lanes, V, DOT)
        if inv is not None:
            out = load_tile(o, row, token, head, valid, v_lanes, V).to(tl.float32)
            den_grad -= tl.sum(grad.to(tl.float32) * out, 1)
        total += dot(grad, tl.trans(load_state(state, index, k_lanes, v_lanes, K, V)), DOT)
        if CAUSAL:
            dweight += dot(grad, tl.trans(load_tile(v, row, token, head // group, source, v_lanes, V)), DOT)
    if inv is not None:
        z = tl.load(state_z + index * K + k_lanes, mask=k_lanes < K, other=0.0)
        total += den_grad[:, None] * z[None, :]
        dweight += den_grad[:, None]
        if k_tile == 0:
            tl.store(r + (row * tokens + token) * heads + head, den_grad, mask=valid)
    if CAUSAL:
        own = tl.load(mixing + head * m_head + block.to(tl.int64) * (m_row + 1))
        place = tl.arange(0, BT)
        dweight = tl.where(place[None, :] <= place[:, None], dweight, 0.0)
        from_own = dot(dweight, load_tile(k, row, token, head // group, source, k_lanes, K), DOT)
        total += from_own * own
        query = load_tile(q, row, token, head, valid, k_lanes, K).to(tl.float32)
        at = (row * heads + head) * states + state_place
        tl.store(dm_own + at * K + k_lanes, tl.sum(from_own * query, 0), mask=k_lanes < K)
    store_tile(dq, row, token, head, valid, k_lanes, total * scale, K)


@tuned(token_tiles, "K", "V", "CAUSAL", "DOT")
def dkdv_kernel(
    q, k, v, do, inv, r, dstate, dstate_z, dk, dv, mixing, m_head, m_row, key_mask, places, tokens, size, span, blocks,
    heads, group, scale,
    K: constexpr, V: constexpr, CAUSAL: constexpr, DOT: constexpr, BT: constexpr, BK: constexpr, BV: constexpr,
):  # fmt: skip
    """dk [B, T, G, K] and then dv [B, T, G, V] for one of `heads` key heads: BK and BV lanes of one tile of tokens.

    Causal: summed over the `group` query heads of the key head. dstate [B, G, M, K, V], dstate_z [B, G, M, K]: gradients of
    the summaries, causal ones of every chunk. The places are the keys'.
    """
    both: constexpr = max((K + BK - 1) // BK, (V + BV - 1) // BV)
    tile, row, head, block, state_place, states, token, valid, source = tile_of(
        both, key_mask, places, tokens, size, span, blocks, heads, BT, CAUSAL, True
    )
    k_lanes, v_lanes = tile * BK + tl.arange(0, BK), tile * BV + tl.arange(0, BV)
    index = (row * heads + head) * states + state_place
    diagonal = block.to(tl.int64) * (m_row + 1)
    sees = tl.arange(0, BT)[None, :] <= tl.arange(0, BT)[:, None]  # a query, in a row, sees a key, in a column

    total = tl.zeros((BT, BK), tl.float32)
    for first in range(0, V, BV):
        lanes = first + tl.arange(0, BV)
        value = load_tile(v, row, token, head, source, lanes, V)
        total += dot(value, tl.trans(load_state(dstate, index, k_lanes, lanes, K, V)), DOT)
    if r is not None:
        total += tl.load(dstate_z + index * K + k_lanes, mask=k_lanes < K, other=0.0)[None, :]
    if CAUSAL:
        for query_head in range(head * group, head * group + group):
            dweight = tl.zeros((BT, BT), tl.float32)
            for first in range(0, V, BV):
                lanes = first + tl.arange(0, BV)
                grad = load_scaled(do, inv, row, token, query_head, tokens, heads * group, valid, lanes, V, DOT)
                dweight += dot(grad, tl.trans(load_tile(v, row, token, head, source, lanes, V)), DOT)
            if r is not None:
                dweight += load_number(r, row, token, query_head, tokens, heads * group, valid)[:, None]
            dweight = tl.where(sees, dweight * tl.load(mixing + query_head * m_head + diagonal), 0.0)
            total += dot(tl.trans(dweight), load_tile(q, row, token, query_head, valid, k_lanes, K), DOT)
    store_tile(dk, row, token, head, valid, k_lanes, tl.where(source[:, None], total * scale, 0.0), K)

    total = tl.zeros((BT, BV), tl.float32)
    for first in range(0, K, BK):
        lanes = first + tl.arange(0, BK)
        key = load_tile(k, row, token, head, source, lanes, K)
        total += dot(key, load_state(dstate, index, lanes, v_lanes, K, V), DOT)
    if CAUSAL:
        for query_head in range(head * group, head * group + group):
            weight = tl.zeros((BT, BT), tl.float32)
            for first in range(0, K, BK):
                lanes = first + tl.arange(0, BK)
                query = load_tile(q, row, token, query_head, valid, lanes, K)
                weight += dot(query, tl.trans(load_tile(k, row, token, head, source, lanes, K)), DOT)
            weight = tl.where(sees, weight * tl.load(mixing + query_head * m_head + diagonal), 0.0)
            grad = load_scaled(do, inv, row, token, query_head, tokens, heads * group, valid, v_lanes, V, DOT)
            total += dot(tl.trans(weight), grad, DOT)
    store_tile(dv, row, token, head, valid, v_lanes, tl.where(source[:, None], total * scale, 0.0), V)
