"""Continues an `MHLAState` by new tokens, for rows at different positions.

While no row leaves its open block, the one being filled (`step_within_block`, an ordinary decoding step), only the prefix
and the window are read, in constant time; the first step in a block also mixes the prefix from all summaries. Otherwise
(`step_across_blocks`), the open block and the new tokens are laid out by block, each row from its own block edge, and
computed as one batch. Summaries are computed when whole blocks close, so they do not depend on the division into steps.

Positions and block indices are int64 [B] on the CPU. "Open tokens" are lists with the keys, the values, and, if the
denominator has features of its own, the k_den of open blocks.
"""

import torch
from torch import Tensor

from .inputs import MHLAInputs
from .reference import divide_or_zero
from .state import MHLAState
from .torch_layout import TokenPlaces, take_tokens


def torch_step(inputs: MHLAInputs, state: MHLAState) -> Tensor:
    """Compute `mhla_step`, and update the state."""
    has_padding = inputs.starts is not None and bool(inputs.starts.any())
    longest = int((state.length % state.block_size).max()) + inputs.q.shape[1]
    step = step_across_blocks if has_padding or longest > state.block_size else step_within_block
    o = step(inputs, state)  # [B, T, H, V] in the dtype of the sums
    return o if inputs.options.unrounded else o.to(inputs.v.dtype)


def step_within_block(inputs: MHLAInputs, state: MHLAState) -> Tensor:
    """Compute the outputs [B, T, H, V] of T new tokens per row, which all fit into the open block, and update the state."""
    q, mixing, device = inputs.q, inputs.mixing, inputs.q.device
    sum_dtype, size, num_tokens = state.summaries.dtype, state.block_size, q.shape[1]
    block, offset = state.length // size, state.length % size
    rows = torch.nonzero(state.prefix_block != block).flatten()
    if len(rows):
        mixed, mixed_z = mix_closed_blocks(state, mixing, rows, block[rows, None])
        state.prefix[rows.to(device)] = mixed[:, :, 0]
        if mixed_z is not None and state.prefix_z is not None:
            state.prefix_z[rows.to(device)] = mixed_z[:, :, 0]
        state.prefix_block = block
    updates = window_updates(inputs, state)
    visible = None  # bool [..., T, C or fewer], which new token sees which open token
    shortest, longest = (int(length) for length in state.length.aminmax())
    if shortest == longest:  # the open tokens are a view of the window
        first = longest // size % 2 * size
        old, end = longest % size, first + longest % size + num_tokens
        for window, new in updates:
            window[:, first + old : end] = new
        open_tokens = [window[:, first:end] for window, _ in updates]
        if num_tokens > 1:
            visible = torch.ones(num_tokens, old + num_tokens, dtype=torch.bool, device=device).tril(old)
        diagonal = mixing[..., longest // size, longest // size].to(sum_dtype).reshape(1, -1, 1, 1, 1)
    else:  # open tokens are copies of the half of the window that holds each row's open block
        slots = torch.arange(size) + (block % 2 * size)[:, None]  # [B, C]
        place_in_block = torch.arange(num_tokens) + offset[:, None]  # [B, T]
        visible = (torch.arange(size) <= place_in_block[:, :, None]).to(device)[:, None, None]
        all_rows = torch.arange(len(block), device=device)[:, None]
        new_slots = slots.gather(1, place_in_block).to(device)
        for window, new in updates:
            window[all_rows, new_slots] = new.to(window.dtype)
        open_tokens = [window[all_rows, slots.to(device)] for window, _ in updates]
        diagonal = diagonal_weight(mixing, block[:, None], sum_dtype)
    queries = [heads_first(x, sum_dtype, num_tokens) for x in (q, inputs.q_den) if x is not None]
    tokens = [heads_first(x, sum_dtype, x.shape[1]) for x in open_tokens]
    prefix_z = None if state.prefix_z is None else state.prefix_z[:, :, None]
    prefix = state.prefix[:, :, None]
    o = attend_blocks(queries, tokens, prefix, prefix_z, visible, diagonal, inputs.options.scale)
    rows = torch.nonzero(offset + num_tokens == size).flatten()
    if len(rows):
        close_blocks(state, rows, block[rows], [x[rows.to(device)].to(sum_dtype) for x in open_tokens])
    state.length = state.length + num_tokens
    state.oldest = torch.maximum(state.oldest, (block - 1) * size)
    return o[:, :, 0].transpose(1, 2)


def step_across_blocks(inputs: MHLAInputs, state: MHLAState) -> Tensor:
    """Compute the outputs [B, T, H, V] of T new tokens per row, with zeros for padding, and update the state."""
    q, mixing, sum_dtype, size = inputs.q, inputs.mixing, state.summaries.dtype, state.block_size
    blocks, (source, inverse), open_tokens = append_tokens(inputs, state)
    prefix, prefix_z = mix_closed_blocks(state, mixing, torch.arange(len(q)), blocks)
    queries = [heads_first(take_tokens(x, source), sum_dtype, size) for x in (q, inputs.q_den) if x is not None]
    tokens = [heads_first(x, sum_dtype, size) for x in open_tokens]
    visible = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    diagonal = diagonal_weight(mixing, blocks, sum_dtype)
    o = attend_blocks(queries, tokens, prefix, prefix_z, visible, diagonal, inputs.options.scale)
    return take_tokens(o.flatten(2, 3).transpose(1, 2), inverse)


def append_tokens(inputs: MHLAInputs, state: MHLAState) -> tuple[Tensor, tuple[Tensor, Tensor], list[Tensor]]:
    """Write new tokens into a state, and store the summaries of the blocks that they fill.

    Returns the indices of n blocks per row from its open one on, int64 [B, n]; the gathers of `MoveTokens` that bring new
    tokens to these blocks; and the open tokens, [B, n * C, G, K or V or L].
    """
    before, size, num_tokens, device = state.length, state.block_size, inputs.k.shape[1], state.summaries.device
    padding = torch.zeros_like(before) if inputs.starts is None else inputs.starts.cpu()
    num_blocks = max(1, -(-int((before % size - padding).max() + num_tokens) // size))
    places = TokenPlaces(before, padding, num_tokens, 2 * size, 2 * size, 0, device)
    first = (before // size * size)[:, None]
    source = places.find(first + torch.arange(num_blocks * size))
    open_tokens = []
    for window, new in window_updates(inputs, state):
        tokens = torch.cat([window, new.to(window.dtype)], 1)
        open_tokens.append(take_tokens(tokens, source))
        places.write(window, tokens)
    by_block = [x.to(state.summaries.dtype).unflatten(1, (-1, size)).flatten(0, 1) for x in open_tokens]
    rows = torch.arange(len(before)).repeat_interleave(num_blocks)
    blocks = before[:, None] // size + torch.arange(num_blocks)
    # The last block may still be open; its summary is written again before it is read.
    close_blocks(state, rows, blocks.flatten(), by_block)
    state.length = before + num_tokens - padding
    last_block = (state.length - 1).clamp(min=0) // size
    state.oldest = torch.maximum(state.oldest, (last_block - 1) * size)
    return blocks, places.move_new(first, num_blocks * size), open_tokens


def window_updates(inputs: MHLAInputs, state: MHLAState) -> list[tuple[Tensor, Tensor]]:
    """Pair each window of the state (k, v, and k_den if it has one) with the new tokens to write into it."""
    pairs = ((state.window_k, inputs.k), (state.window_v, inputs.v), (state.window_k_den, inputs.k_den))
    return [(window, new) for window, new in pairs if window is not None and new is not None]


def attend_blocks(
    queries: list[Tensor], open_tokens: list[Tensor], prefix: Tensor, prefix_z: Tensor | None, visible: Tensor | None,
    diagonal: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    """Compute q P + m_ii tril(q k^T) v [B, H, n, T, V] for n blocks, normalized if there is `prefix_z`, else times `scale`.

    `queries` are q and, if the denominator has features of its own, q_den, [B, H, n, T, K or L]. Open tokens are
    [B, G, n, C, K or V or L], prefixes P [B, H, n, K, V] and [B, H, n, L] (None if not normalized), `visible` is bool
    [..., T, C] or None for all, and the diagonal m_ii [B, H or 1, n, 1, 1].
    """
    queries_per_kv = queries[0].shape[1] // open_tokens[0].shape[1]
    open_tokens = [x.repeat_interleave(queries_per_kv, 1) if queries_per_kv > 1 else x for x in open_tokens]

    def weigh(query: Tensor, key: Tensor) -> Tensor:
        weight = query @ key.mT
        return (weight if visible is None else torch.where(visible, weight, 0)) * diagonal

    query, weight = queries[0], weigh(queries[0], open_tokens[0])
    o = query @ prefix + weight @ open_tokens[1]
    if prefix_z is None:
        return o * scale
    if len(queries) == 2:
        query, weight = queries[1], weigh(queries[1], open_tokens[2])
    return divide_or_zero(o, (query @ prefix_z[..., None]).squeeze(-1) + weight.sum(-1))


def mix_closed_blocks(state: MHLAState, mixing: Tensor, rows: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor | None]:
    """Compute the prefixes that the `blocks` [R, n] of `rows` [R] read: [R, H, n, K, V] and, of z, [R, H, n, L] or None."""
    device, queries_per_kv = state.summaries.device, state.prefix.shape[1] // state.summaries.shape[1]
    num_closed = min(int(blocks.max()), mixing.shape[-1])
    is_earlier = (torch.arange(num_closed) < blocks[..., None]).to(device)
    weight = mixing[..., blocks.to(device).clamp(max=mixing.shape[-2] - 1), :num_closed].to(state.summaries.dtype)
    weight = torch.where(is_earlier, weight, 0)  # [H, R, n, N] or [R, n, N]
    weight = weight[:, None] if mixing.dim() == 2 else weight.transpose(0, 1)

    def mix(summaries: Tensor) -> Tensor:
        flat = summaries[rows.to(device), :, :num_closed].flatten(3)
        if weight.shape[1] == 1:  # shared by all heads: mix before repeating
            mixed = (weight @ flat).repeat_interleave(queries_per_kv, 1)
        else:
            mixed = weight @ flat.repeat_interleave(queries_per_kv, 1)
        return mixed.unflatten(-1, summaries.shape[3:])

    return mix(state.summaries), None if state.z is None else mix(state.z)


def diagonal_weight(mixing: Tensor, blocks: Tensor, sum_dtype: torch.dtype) -> Tensor:
    """Return the weight of each of `blocks` [B, n] for itself, [B, H or 1, n, 1, 1]; arbitrary beyond the matrix."""
    diagonal = mixing.diagonal(dim1=-2, dim2=-1).to(sum_dtype)
    weight = diagonal[..., blocks.to(mixing.device).clamp(max=diagonal.shape[-1] - 1)]
    weight = weight[:, None] if mixing.dim() == 2 else weight.transpose(0, 1)
    return weight[..., None, None]


def close_blocks(state: MHLAState, rows: Tensor, blocks: Tensor, open_tokens: list[Tensor]) -> None:
    """Compute the summaries of R blocks from their tokens [R, C, G, ...], and store them at `rows` and `blocks` [R]."""
    capacity, num_closed = state.summaries.shape[2], int(blocks.max()) + 1
    if num_closed > capacity:  # double it at least
        extra = max(num_closed, 2 * capacity) - capacity
        state.summaries = torch.nn.functional.pad(state.summaries, (0, 0, 0, 0, 0, extra))
        state.z = None if state.z is None else torch.nn.functional.pad(state.z, (0, 0, 0, extra))
    rows, blocks = rows.to(state.summaries.device), blocks.to(state.summaries.device)
    k, v, k_den = open_tokens[0], open_tokens[1], open_tokens[-1] if len(open_tokens) == 3 else open_tokens[0]
    state.summaries[rows, :, blocks] = k.permute(0, 2, 3, 1) @ v.transpose(1, 2)  # k v^T (paper eq. 4)
    if state.z is not None:
        state.z[rows, :, blocks] = k_den.sum(1)


def heads_first(x: Tensor, sum_dtype: torch.dtype, size: int) -> Tensor:
    """Move heads before tokens, in blocks of `size`: [B, n * C, H, K] -> [B, H, n, C, K]."""
    return x.to(sum_dtype).transpose(1, 2).unflatten(2, (-1, size))
