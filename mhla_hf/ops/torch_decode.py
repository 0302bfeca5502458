"""Continues an `MHLAState` by one token, a few, or a whole chunk of a prompt, for rows at different positions.

There are two code paths. While no row leaves its open block (`step_within_block`, every ordinary decoding step), only the
prefix and the window are read: the time per token is constant, and the prefix is recomputed once per block. Otherwise
(`step_across_blocks`) the open block and the new tokens are laid out block by block, each row from its own block edge, and
computed as one batch. A summary is always computed from the whole block when the block closes, so the numbers do not depend
on how the tokens were divided into steps.

Positions and block indices are int64 [B] on the CPU. "Open tokens" are lists with the keys, the values, and, if the
denominator has features of its own, the k_den of open blocks.
"""

import torch

from .inputs import MHLAInputs
from .reference import divide_or_zero
from .state import MHLAState
from .torch_layout import TokenLayout


def torch_step(inputs: MHLAInputs, state: MHLAState) -> torch.Tensor:
    """Compute `mhla_step`, and update `state` in place.

    Returns:
        [B, T, H, V] in v's dtype or, if `unrounded`, in the dtype of the sums.
    """
    num_tokens = inputs.q.shape[1]
    num_new = count_real_tokens(state, num_tokens, inputs.starts)
    no_padding = int(num_new.min()) == num_tokens
    if no_padding and int((state.length % state.block_size).max()) + num_tokens <= state.block_size:
        o = step_within_block(inputs, state)
    else:
        o = step_across_blocks(inputs, state, num_new)
    return o if inputs.options.unrounded else o.to(inputs.v.dtype)


def count_real_tokens(state: MHLAState, num_tokens: int, starts: torch.Tensor | None) -> torch.Tensor:
    """Return the number of real tokens among `num_tokens` new ones in each row, int64 [B]: those from `starts` on."""
    return torch.full_like(state.length, num_tokens) if starts is None else num_tokens - starts.cpu()


def step_within_block(inputs: MHLAInputs, state: MHLAState) -> torch.Tensor:
    """Compute the outputs of T new tokens per row that fit into the open block of their row, and update `state` in place.

    Returns:
        [B, T, H, V] in the dtype of the sums.
    """
    q, mixing, q_den = inputs.q, inputs.mixing, inputs.q_den
    sum_dtype = state.summaries.dtype
    num_tokens = q.shape[1]
    size = state.block_size
    block, offset = state.length // size, state.length % size
    stale = state.prefix_block != block
    if stale.any():
        stale_rows = torch.nonzero(stale).flatten()
        refresh_prefix(state, mixing, stale_rows, block[stale_rows])
    updates = window_updates(inputs.k, inputs.v, inputs.k_den)
    shortest, longest = (int(length) for length in state.length.aminmax())
    if shortest == longest:
        open_tokens, visible = write_same_position(state, updates, longest // size, longest % size, num_tokens)
        diagonal = mixing[..., longest // size, longest // size].to(sum_dtype).reshape(1, -1, 1, 1, 1)
    else:
        open_tokens, visible = write_own_positions(state, updates, block, offset, num_tokens)
        diagonal = diagonal_weight(mixing, block[:, None], sum_dtype)
    query = heads_first(q, sum_dtype)
    query_den = None if q_den is None else heads_first(q_den, sum_dtype)
    tokens = [heads_first(x, sum_dtype) for x in open_tokens]
    prefix = state.prefix[:, :, None]
    prefix_z = None if state.prefix_z is None else state.prefix_z[:, :, None]
    o = attend_blocks(query, query_den, tokens, prefix, prefix_z, visible, diagonal, inputs.options.scale)
    o = o[:, :, 0].transpose(1, 2)
    closing = offset + num_tokens == size
    if closing.any():
        rows = torch.nonzero(closing).flatten()
        close_blocks(state, rows, block[rows], [x[rows.to(q.device)].to(sum_dtype) for x in open_tokens])
    state.length = state.length + num_tokens
    state.oldest = torch.maximum(state.oldest, (block - 1) * size)
    return o


def write_same_position(
    state: MHLAState, updates: list[tuple[str, torch.Tensor]], block: int, offset: int, num_tokens: int
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Write new tokens of rows that are all at the same position into the window.

    Args:
        state: The state, changed in place.
        updates: From `window_updates`.
        block: Index of the open block.
        offset: Number of tokens that the open block already has.
        num_tokens: Number of new tokens, T.

    Returns:
        open_tokens: Views of the window, [B, offset + T, G, K or V or L] each (see the top of this file).
        visible: bool [T, offset + T], which new token sees which open token; None if T is 1, because it sees all of them.
    """
    first = block % 2 * state.block_size
    for name, new in updates:
        getattr(state, name)[:, first + offset : first + offset + num_tokens] = new
    open_tokens = [getattr(state, name)[:, first : first + offset + num_tokens] for name, _ in updates]
    if num_tokens == 1:
        return open_tokens, None
    everything = torch.ones(num_tokens, offset + num_tokens, dtype=torch.bool, device=open_tokens[0].device)
    return open_tokens, everything.tril(offset)


def write_own_positions(
    state: MHLAState,
    updates: list[tuple[str, torch.Tensor]],
    block: torch.Tensor,
    offset: torch.Tensor,
    num_tokens: int,
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Write new tokens of rows that are at different positions into the window.

    Args:
        state, updates, num_tokens: As in `write_same_position`.
        block: int64 [B], index of the open block of each row.
        offset: int64 [B], number of tokens that the open block of each row already has.

    Returns:
        open_tokens: Copies of the half of the window that holds the open block of each row, [B, C, G, K or V or L] each,
            with C places per block.
        visible: bool [B, 1, 1, T, C], which new token sees which place of the open block.
    """
    device = state.window_k.device
    slots = torch.arange(state.block_size) + (block % 2 * state.block_size)[:, None]  # [B, C]
    place_in_block = torch.arange(num_tokens) + offset[:, None]  # [B, T]
    visible = (torch.arange(state.block_size) <= place_in_block[:, :, None]).to(device)[:, None, None]
    rows = torch.arange(len(block), device=device)[:, None]
    new_slots = slots.gather(1, place_in_block).to(device)
    slots = slots.to(device)
    for name, new in updates:
        window = getattr(state, name)
        window[rows, new_slots] = new.to(window.dtype)
    return [getattr(state, name)[rows, slots] for name, _ in updates], visible


def step_across_blocks(inputs: MHLAInputs, state: MHLAState, num_new: torch.Tensor) -> torch.Tensor:
    """Compute the outputs of T new tokens per row, which may fill any number of blocks, and update `state` in place.

    `num_new` int64 [B] is the number of real tokens in each row, which are the last ones.

    Returns:
        [B, T, H, V] in the dtype of the sums, with zeros for padding.
    """
    q, mixing, q_den = inputs.q, inputs.mixing, inputs.q_den
    sum_dtype, size = state.summaries.dtype, state.block_size
    layout, open_tokens = append_tokens(inputs.k, inputs.v, inputs.k_den, state, num_new)
    prefix, prefix_z = mixed_summaries(state, mixing, torch.arange(len(num_new)), layout.blocks)
    query = heads_then_blocks(layout.place_queries(q), sum_dtype, size)
    query_den = None if q_den is None else heads_then_blocks(layout.place_queries(q_den), sum_dtype, size)
    tokens = [heads_then_blocks(x, sum_dtype, size) for x in open_tokens]
    visible = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    diagonal = diagonal_weight(mixing, layout.blocks, sum_dtype)
    o = attend_blocks(query, query_den, tokens, prefix, prefix_z, visible, diagonal, inputs.options.scale)
    return layout.take_back(o.flatten(2, 3).transpose(1, 2))


def attend_blocks(
    query: torch.Tensor,
    query_den: torch.Tensor | None,
    open_tokens: list[torch.Tensor],
    prefix: torch.Tensor,
    prefix_z: torch.Tensor | None,
    visible: torch.Tensor | None,
    diagonal: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Compute q P + m_ii tril(q k^T) v for n blocks at once. If normalized, divide by the same sum with ones for v.

    Args:
        query: [B, H, n, T, K].
        query_den: [B, H, n, T, L], queries of the denominator; None if they are `query`.
        open_tokens: k, v, and perhaps k_den, [B, G, n, C, K or V or L].
        prefix: P, [B, H, n, K, V].
        prefix_z: [B, H, n, L], the prefix of the denominator; None if not normalized.
        visible: bool [.., T, C], which query sees which key; None if each sees all of them.
        diagonal: m_ii, [B, H or 1, n, 1, 1].
        scale: Multiplier of the outputs if not normalized.

    Returns:
        [B, H, n, T, V].
    """
    share = query.shape[1] // open_tokens[0].shape[1]
    open_tokens = [x.repeat_interleave(share, 1) if share > 1 else x for x in open_tokens]
    weight = open_block_weight(query, open_tokens[0], visible, diagonal)
    o = query @ prefix + weight @ open_tokens[1]
    if prefix_z is None:
        return o * scale
    if query_den is not None:
        query = query_den
        weight = open_block_weight(query_den, open_tokens[2], visible, diagonal)
    return divide_or_zero(o, (query @ prefix_z[..., None]).squeeze(-1) + weight.sum(-1))


def open_block_weight(
    query: torch.Tensor, key: torch.Tensor, visible: torch.Tensor | None, diagonal: torch.Tensor
) -> torch.Tensor:
    """Compute m_ii q k^T, 0 where not `visible`: [B, H, n, T, C]. See `attend_blocks` for the arguments."""
    weight = query @ key.mT
    return (weight if visible is None else torch.where(visible, weight, 0)) * diagonal


def mixed_summaries(
    state: MHLAState, mixing: torch.Tensor, rows: torch.Tensor, blocks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Mix closed blocks for query blocks: sum over b < i of mixing[i, b] times summary b.

    Args:
        state: The state.
        mixing: [Mq, Mk] or [H, Mq, Mk].
        rows: int64 [R], the rows of the state to read.
        blocks: int64 [R, n], the query blocks i of each row.

    Returns:
        prefix: [R, H, n, K, V].
        prefix_z: [R, H, n, L], the same for the sums of keys; None if not normalized.
    """
    sum_dtype = state.summaries.dtype
    device = state.summaries.device
    num_heads = state.prefix.shape[1]
    num_closed = min(int(blocks.max()), mixing.shape[-1])
    is_earlier = (torch.arange(num_closed) < blocks[..., None]).to(device)
    weight = mixing[..., blocks.to(device).clamp(max=mixing.shape[-2] - 1), :num_closed].to(sum_dtype)
    weight = torch.where(is_earlier, weight, 0)  # [H, R, n, N] or [R, n, N]
    weight = weight[:, None] if mixing.dim() == 2 else weight.transpose(0, 1)
    rows = rows.to(device)
    prefix = mix_grouped(weight, state.summaries[rows, :, :num_closed], num_heads)
    prefix_z = None if state.z is None else mix_grouped(weight, state.z[rows, :, :num_closed], num_heads)
    return prefix, prefix_z


def mix_grouped(weight: torch.Tensor, summaries: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Mix the summaries of KV heads for query heads: query head h reads KV head h // (H // G).

    Args:
        weight: [R, H or 1, n, N], the weights of N closed blocks for n query blocks.
        summaries: [R, G, N, ..], the summaries of the closed blocks.
        num_heads: Number of query heads, H.

    Returns:
        [R, H, n, ..].
    """
    share = num_heads // summaries.shape[1]
    flat = summaries.flatten(3)
    if weight.shape[1] == 1:  # shared by all heads: mix before repeating
        mixed = (weight @ flat).repeat_interleave(share, 1)
    else:
        mixed = weight @ flat.repeat_interleave(share, 1)
    return mixed.unflatten(-1, summaries.shape[3:])


def refresh_prefix(state: MHLAState, mixing: torch.Tensor, rows: torch.Tensor, blocks: torch.Tensor) -> None:
    """Recompute the prefix of some rows for their current open blocks, in place.

    Args:
        state: The state.
        mixing: [Mq, Mk] or [H, Mq, Mk].
        rows: int64 [R], the rows.
        blocks: int64 [R], index of the open block of each of them.
    """
    prefix, prefix_z = mixed_summaries(state, mixing, rows, blocks[:, None])
    state.prefix[rows.to(state.prefix.device)] = prefix[:, :, 0]
    if prefix_z is not None and state.prefix_z is not None:
        state.prefix_z[rows.to(state.prefix.device)] = prefix_z[:, :, 0]
    state.prefix_block = state.prefix_block.index_copy(0, rows, blocks)


def diagonal_weight(mixing: torch.Tensor, blocks: torch.Tensor, sum_dtype: torch.dtype) -> torch.Tensor:
    """Return the weight m_ii of each block i for itself.

    Args:
        mixing: [Mq, Mk] or [H, Mq, Mk].
        blocks: int64 [B, n]. Blocks beyond the mixing matrix hold no token, and get its last diagonal element.
        sum_dtype: Dtype of the result.

    Returns:
        [B, H or 1, n, 1, 1].
    """
    diagonal = mixing.diagonal(dim1=-2, dim2=-1).to(sum_dtype)
    weight = diagonal[..., blocks.to(mixing.device).clamp(max=diagonal.shape[-1] - 1)]
    weight = weight[:, None] if mixing.dim() == 2 else weight.transpose(0, 1)
    return weight[..., None, None]


def close_blocks(state: MHLAState, rows: torch.Tensor, blocks: torch.Tensor, open_tokens: list[torch.Tensor]) -> None:
    """Store the summaries of complete blocks in a state.

    Args:
        state: The state, changed in place; its capacity grows if necessary.
        rows: int64 [R], the row of each block.
        blocks: int64 [R], the index of each block.
        open_tokens: k, v, and perhaps k_den of each block, [R, C, G, K or V or L].
    """
    state.reserve(int(blocks.max()) + 1)
    rows = rows.to(state.summaries.device)
    blocks = blocks.to(state.summaries.device)
    state.summaries[rows, :, blocks] = block_summary(open_tokens[0], open_tokens[1])
    if state.z is not None:
        k_den = open_tokens[2] if len(open_tokens) == 3 else open_tokens[0]
        state.z[rows, :, blocks] = k_den.sum(1)


def block_summary(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Sum k v^T over the tokens of a block (paper eq. 4): [R, C, G, K] and [R, C, G, V] -> [R, G, K, V]."""
    return k.permute(0, 2, 3, 1) @ v.transpose(1, 2)


def append_tokens(
    k: torch.Tensor, v: torch.Tensor, k_den: torch.Tensor | None, state: MHLAState, num_new: torch.Tensor
) -> tuple[TokenLayout, list[torch.Tensor]]:
    """Write new tokens into a state, and store the summaries of the blocks that they fill.

    Args:
        k, v, k_den: The new tokens, as in `mhla_step`.
        state: The state, changed in place.
        num_new: int64 [B], number of real tokens in each row, which are the last ones.

    Returns:
        layout: The `TokenLayout` of the old and new tokens of n blocks, beginning with the open block.
        open_tokens: k, v, and perhaps k_den in this layout, [B, n * C, G, K or V or L]. Places without a token are zero,
            because NaN in padding would pass through a weight of 0.
    """
    size = state.block_size
    before = state.length
    device = state.summaries.device
    num_blocks = max(1, -(-int((before % size + num_new).max()) // size))
    layout = TokenLayout(before, num_new, k.shape[1], before // size, num_blocks, size, 2 * size, device)
    open_tokens, filled = [], layout.filled[..., None, None]
    for name, new in window_updates(k, v, k_den):
        window = getattr(state, name)
        laid_out = torch.where(filled, layout.place_keys(window, new), 0)
        layout.keep(window, laid_out)
        open_tokens.append(laid_out)
    by_block = [x.to(state.summaries.dtype).unflatten(1, (-1, size)).flatten(0, 1) for x in open_tokens]
    rows = torch.arange(len(before)).repeat_interleave(num_blocks)
    # The last block may still be open. Its summary is not read before the block closes and it is written again.
    close_blocks(state, rows, layout.blocks.flatten(), by_block)
    state.length = before + num_new
    last_block = (state.length - 1).clamp(min=0) // size
    state.oldest = torch.maximum(state.oldest, (last_block - 1) * size)
    return layout, open_tokens


def window_updates(k: torch.Tensor, v: torch.Tensor, k_den: torch.Tensor | None) -> list[tuple[str, torch.Tensor]]:
    """Pair the name of each window field of a state with the new tokens to write into it."""
    updates = [("window_k", k), ("window_v", v)]
    if k_den is not None:
        updates.append(("window_k_den", k_den))
    return updates


def heads_first(x: torch.Tensor, sum_dtype: torch.dtype) -> torch.Tensor:
    """Move heads before tokens, as a single block: [B, T, H, K] -> [B, H, 1, T, K] in `sum_dtype`."""
    return x.to(sum_dtype).transpose(1, 2)[:, :, None]


def heads_then_blocks(x: torch.Tensor, sum_dtype: torch.dtype, size: int) -> torch.Tensor:
    """Move heads before tokens, cut into blocks: [B, n * C, H, K] -> [B, H, n, C, K] in `sum_dtype`."""
    return heads_first(x, sum_dtype).squeeze(2).unflatten(2, (-1, size))
