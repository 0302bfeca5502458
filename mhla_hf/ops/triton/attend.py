"""The kernels on tokens: outputs in the forward pass; dq, dk, and dv in the backward pass.

Let P be the state that a tile of tokens reads (that of its block or, if causal, of its chunk of 64 tokens), dS the gradient
of the summary that the tile contributes to, and, if causal, A = tril(q k^T) and dA = tril(do v^T + r) within the tile:

    o = q P + m_ii A v    dq = do P^T + r z^T + m_ii dA k    dk = v dS^T + dz + m_ii dA^T q    dv = k dS + m_ii A^T do

Here do is the gradient of the sum of weight * v, and r the gradient of den, the sum of the weights. If normalized, o is
divided by den: the kernels multiply the gradient of the quotient by inv = 1 / den as they read it, and `dq_kernel` computes
r = -<do, o>. Each program computes some lanes of one tile of tokens of one block.
"""

from typing import no_type_check

from .common import constexpr, dot, invert_or_zero, load_number, load_scaled, load_state, load_tile, store_tile, tile_of
from .tuning import tl, token_tiles, tuned


@tuned(token_tiles, "K", "V", "CAUSAL", "DOT")
@no_type_check
def forward_kernel(
    q, k, v, states, states_z, inv, o, mixing, mixing_head_stride, mixing_row_stride, key_mask, tables, num_tokens,
    block_size, span, num_blocks, num_heads, queries_per_kv, queries_per_state, scale,
    K: constexpr, V: constexpr, CAUSAL: constexpr, DOT: constexpr, BT: constexpr, BK: constexpr, BV: constexpr,
):  # fmt: skip
    """Compute o [B, T, H, V]: each program computes BV lanes of one tile of tokens.

    Without `states_z`, o is multiplied by `scale`; with it, divided by the sum of the weights, whose inverse goes to inv.
    states, states_z: [B, H or G, M, K, V] and [B, H or G, M, K] or, if causal, one for each chunk (see `mix_states`).
    """
    num_v_tiles: tl.constexpr = (V + BV - 1) // BV
    v_tile, row, head, block, state, num_states, token, valid, real = tile_of(
        num_v_tiles, key_mask, tables, num_tokens, block_size, span, num_blocks, num_heads, BT, CAUSAL, CAUSAL
    )
    kv_head = head // queries_per_kv
    v_lanes = v_tile * BV + tl.arange(0, BV)
    index = (row * (num_heads // queries_per_state) + head // queries_per_state) * num_states + state
    total = tl.zeros((BT, BV), tl.float32)
    weight = tl.zeros((BT, BT), tl.float32)
    den = tl.zeros((BT,), tl.float32)
    for first in range(0, K, BK):
        k_lanes = first + tl.arange(0, BK)
        query = load_tile(q, row, token, head, valid, k_lanes, K)
        total += dot(query, load_state(states, index, k_lanes, v_lanes, K, V), DOT)
        if states_z is not None:
            z = tl.load(states_z + index * K + k_lanes, mask=k_lanes < K, other=0.0)
            den += tl.sum(query.to(tl.float32) * z[None, :], 1)
        if CAUSAL:
            weight += dot(query, tl.trans(load_tile(k, row, token, kv_head, real, k_lanes, K)), DOT)
    if CAUSAL:
        diagonal = tl.load(mixing + head * mixing_head_stride + block.to(tl.int64) * (mixing_row_stride + 1))
        in_tile = tl.arange(0, BT)
        weight = tl.where(in_tile[None, :] <= in_tile[:, None], weight * diagonal, 0.0)
        total += dot(weight, load_tile(v, row, token, kv_head, real, v_lanes, V), DOT)
        den += tl.sum(weight, 1)
    if states_z is not None:
        inverse = invert_or_zero(den)
        total *= inverse[:, None]
        if v_tile == 0:
            tl.store(inv + (row * num_tokens + token) * num_heads + head, inverse, mask=valid)
    else:
        total *= scale
    store_tile(o, row, token, head, valid, v_lanes, total, V)


@tuned(token_tiles, "K", "V", "CAUSAL", "DOT")
@no_type_check
def dq_kernel(
    q, k, v, do, o, inv, states, states_z, r, diagonal_grad, dq, mixing, mixing_head_stride, mixing_row_stride, key_mask,
    tables, num_tokens, block_size, span, num_blocks, num_heads, queries_per_kv, queries_per_state, scale,
    K: constexpr, V: constexpr, CAUSAL: constexpr, DOT: constexpr, BT: constexpr, BK: constexpr, BV: constexpr,
):  # fmt: skip
    """Compute dq [B, T, H, K] and, if normalized, r [B, T, H]; each program computes BK lanes of one tile of tokens.

    If causal, also diagonal_grad [B, H, M * chunks, K], whose sum over K is the gradient of m_ii from within a chunk.
    """
    num_k_tiles: tl.constexpr = (K + BK - 1) // BK
    k_tile, row, head, block, state, num_states, token, valid, real = tile_of(
        num_k_tiles, key_mask, tables, num_tokens, block_size, span, num_blocks, num_heads, BT, CAUSAL, CAUSAL
    )
    kv_head = head // queries_per_kv
    k_lanes = k_tile * BK + tl.arange(0, BK)
    index = (row * (num_heads // queries_per_state) + head // queries_per_state) * num_states + state
    total = tl.zeros((BT, BK), tl.float32)
    dweight = tl.zeros((BT, BT), tl.float32)
    den_grad = tl.zeros((BT,), tl.float32)
    for first in range(0, V, BV):
        v_lanes = first + tl.arange(0, BV)
        grad = load_scaled(do, inv, row, token, head, num_tokens, num_heads, valid, v_lanes, V, DOT)
        if inv is not None:
            out = load_tile(o, row, token, head, valid, v_lanes, V).to(tl.float32)
            den_grad -= tl.sum(grad.to(tl.float32) * out, 1)
        total += dot(grad, tl.trans(load_state(states, index, k_lanes, v_lanes, K, V)), DOT)
        if CAUSAL:
            dweight += dot(grad, tl.trans(load_tile(v, row, token, kv_head, real, v_lanes, V)), DOT)
    if inv is not None:
        z = tl.load(states_z + index * K + k_lanes, mask=k_lanes < K, other=0.0)
        total += den_grad[:, None] * z[None, :]
        dweight += den_grad[:, None]
        if k_tile == 0:
            tl.store(r + (row * num_tokens + token) * num_heads + head, den_grad, mask=valid)
    if CAUSAL:
        diagonal = tl.load(mixing + head * mixing_head_stride + block.to(tl.int64) * (mixing_row_stride + 1))
        in_tile = tl.arange(0, BT)
        dweight = tl.where(in_tile[None, :] <= in_tile[:, None], dweight, 0.0)
        from_chunk = dot(dweight, load_tile(k, row, token, kv_head, real, k_lanes, K), DOT)
        total += from_chunk * diagonal
        query = load_tile(q, row, token, head, valid, k_lanes, K).to(tl.float32)
        chunk = (row * num_heads + head) * num_states + state
        tl.store(diagonal_grad + chunk * K + k_lanes, tl.sum(from_chunk * query, 0), mask=k_lanes < K)
    store_tile(dq, row, token, head, valid, k_lanes, total * scale, K)


@tuned(token_tiles, "K", "V", "CAUSAL", "DOT")
@no_type_check
def dkdv_kernel(
    q, k, v, do, inv, r, dstates, dstates_z, dk, dv, mixing, mixing_head_stride, mixing_row_stride, key_mask, tables,
    num_tokens, block_size, span, num_blocks, num_heads, queries_per_kv, scale,
    K: constexpr, V: constexpr, CAUSAL: constexpr, DOT: constexpr, BT: constexpr, BK: constexpr, BV: constexpr,
):  # fmt: skip
    """Compute dk [B, T, G, K] and dv [B, T, G, V]: each program computes BK and BV lanes of one tile of tokens.

    dstates, dstates_z: Gradients of the summaries, [B, G, M, K, V] and [B, G, M, K], one for each chunk if causal.
    num_heads: Number of KV heads, G.
    """
    num_tiles_of_both: tl.constexpr = max((K + BK - 1) // BK, (V + BV - 1) // BV)
    tile, row, head, block, state, num_states, token, valid, real = tile_of(
        num_tiles_of_both, key_mask, tables, num_tokens, block_size, span, num_blocks, num_heads, BT, CAUSAL, True
    )
    k_lanes = tile * BK + tl.arange(0, BK)
    v_lanes = tile * BV + tl.arange(0, BV)
    num_q_heads = num_heads * queries_per_kv
    index = (row * num_heads + head) * num_states + state
    diagonal_offset = block.to(tl.int64) * (mixing_row_stride + 1)
    visible = tl.arange(0, BT)[None, :] <= tl.arange(0, BT)[:, None]  # rows are queries, columns are keys

    total = tl.zeros((BT, BK), tl.float32)
    for first in range(0, V, BV):
        lanes = first + tl.arange(0, BV)
        value = load_tile(v, row, token, head, real, lanes, V)
        total += dot(value, tl.trans(load_state(dstates, index, k_lanes, lanes, K, V)), DOT)
    if r is not None:
        total += tl.load(dstates_z + index * K + k_lanes, mask=k_lanes < K, other=0.0)[None, :]
    if CAUSAL:
        for q_head in range(head * queries_per_kv, head * queries_per_kv + queries_per_kv):
            dweight = tl.zeros((BT, BT), tl.float32)
            for first in range(0, V, BV):
                lanes = first + tl.arange(0, BV)
                grad = load_scaled(do, inv, row, token, q_head, num_tokens, num_q_heads, valid, lanes, V, DOT)
                dweight += dot(grad, tl.trans(load_tile(v, row, token, head, real, lanes, V)), DOT)
            if r is not None:
                dweight += load_number(r, row, token, q_head, num_tokens, num_q_heads, valid)[:, None]
            diagonal = tl.load(mixing + q_head * mixing_head_stride + diagonal_offset)
            dweight = tl.where(visible, dweight * diagonal, 0.0)
            total += dot(tl.trans(dweight), load_tile(q, row, token, q_head, valid, k_lanes, K), DOT)
    store_tile(dk, row, token, head, valid, k_lanes, tl.where(real[:, None], total * scale, 0.0), K)

    total = tl.zeros((BT, BV), tl.float32)
    for first in range(0, K, BK):
        lanes = first + tl.arange(0, BK)
        key = load_tile(k, row, token, head, real, lanes, K)
        total += dot(key, load_state(dstates, index, lanes, v_lanes, K, V), DOT)
    if CAUSAL:
        for q_head in range(head * queries_per_kv, head * queries_per_kv + queries_per_kv):
            weight = tl.zeros((BT, BT), tl.float32)
            for first in range(0, K, BK):
                lanes = first + tl.arange(0, BK)
                query = load_tile(q, row, token, q_head, valid, lanes, K)
                weight += dot(query, tl.trans(load_tile(k, row, token, head, real, lanes, K)), DOT)
            diagonal = tl.load(mixing + q_head * mixing_head_stride + diagonal_offset)
            weight = tl.where(visible, weight * diagonal, 0.0)
            grad = load_scaled(do, inv, row, token, q_head, num_tokens, num_q_heads, valid, v_lanes, V, DOT)
            total += dot(tl.trans(weight), grad, DOT)
    store_tile(dv, row, token, head, valid, v_lanes, tl.where(real[:, None], total * scale, 0.0), V)
