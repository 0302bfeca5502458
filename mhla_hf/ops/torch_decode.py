"""Continue an `MHLAState`: one new token, a few, or a whole chunk of a prompt, for rows that stand at different positions.

Two ways through. While no row leaves its open block (`step_within_block`, every ordinary decode step) only the prefix and
the window are read: constant time per token, and the prefix is mixed anew once per block. Otherwise (`step_across_blocks`)
the open block and the new tokens are laid out block by block, each row from its own block edge, and handled as one batch.
Each summary is computed from the whole block when it closes, so the numbers do not depend on how the tokens were cut into
steps. Positions (length, block, offset, counts) are int64 [B] on the CPU.
"""

import torch

from .reference import divide_or_zero
from .torch_layout import TokenLayout


def torch_step(q, k, v, mixing, state, scale, q_den, k_den, starts, unrounded=False, attend_one=None):
    """Output [B, T, H, V] of T new tokens; `state` changes in place. Inputs are checked by `mhla_step`, shapes as there.

    attend_one: takes the place of PyTorch's attention for a single token inside its block (`triton/decode.py`).
    """
    steps = q.shape[1]
    counts = own_tokens(state, steps, starts)
    if int(counts.min()) == steps and int((state.length % state.block_size).max()) + steps <= state.block_size:
        o = step_within_block(q, k, v, mixing, state, scale, q_den, k_den, attend_one if steps == 1 else None)
    else:
        o = step_across_blocks(q, k, v, mixing, state, scale, q_den, k_den, counts)
    return o if unrounded else o.to(v.dtype)


def own_tokens(state, steps, starts):
    """How many of `steps` tokens are each row's own, int64 [B]: those from `starts` on."""
    return torch.full_like(state.length, steps) if starts is None else steps - starts.cpu()


def step_within_block(q, k, v, mixing, state, scale, q_den, k_den, attend_one):
    """T new tokens of every row, all inside each row's open block."""
    exact, steps, size = state.summaries.dtype, q.shape[1], state.block_size
    block, offset = state.length // size, state.length % size
    stale = state.prefix_block != block
    if stale.any():
        rows = torch.nonzero(stale).flatten()
        refresh_prefix(state, mixing, rows, block[rows])
    entries = window_entries(state, k, v, k_den)
    shortest, longest = (int(place) for place in state.length.aminmax())
    if shortest == longest:
        opened, seen = write_together(state, entries, longest // size, longest % size, steps)
        own = mixing[..., longest // size, longest // size].to(exact).reshape(1, -1, 1, 1, 1)
    else:
        opened, seen = write_apart(state, entries, block, offset, steps)
        own = own_weight(mixing, block[:, None], exact)
    if attend_one is not None:
        o = attend_one(q, q_den, mixing, state, scale)
    else:
        query, query_den, *opened_heads = (None if x is None else by_head(x, exact) for x in (q, q_den, *opened))
        prefix, prefix_z = (None if x is None else x[:, :, None] for x in (state.prefix, state.prefix_z))
        o = attend_blocks(query, query_den, opened_heads, prefix, prefix_z, seen, own, scale)[:, :, 0].transpose(1, 2)
    closing = offset + steps == size
    if closing.any():
        rows = torch.nonzero(closing).flatten()
        push_summaries(state, rows, block[rows], [tokens[rows.to(q.device)].to(exact) for tokens in opened])
    state.length = state.length + steps
    state.oldest = torch.maximum(state.oldest, (block - 1) * size)
    return o


def write_together(state, entries, block, offset, steps):
    """Write new tokens of rows that all stand at one place; returns the open block's tokens so far, and who sees whom."""
    first = block % 2 * state.block_size
    for name, new in entries:
        getattr(state, name)[:, first + offset : first + offset + steps] = new
    opened = [getattr(state, name)[:, first : first + offset + steps] for name, _ in entries]
    if steps == 1:
        return opened, None
    return opened, torch.ones(steps, offset + steps, dtype=torch.bool, device=opened[0].device).tril(offset)


def write_apart(state, entries, block, offset, steps):
    """As `write_together`, for rows at places of their own; returns each row's whole half of the window."""
    device = state.window_k.device
    slots = torch.arange(state.block_size) + (block % 2 * state.block_size)[:, None]
    places = torch.arange(steps) + offset[:, None]
    seen = (torch.arange(state.block_size) <= places[:, :, None]).to(device)[:, None, None]
    rows, places, slots = (
        torch.arange(len(block), device=device)[:, None],
        slots.gather(1, places).to(device),
        slots.to(device),
    )
    for name, new in entries:
        window = getattr(state, name)
        window[rows, places] = new.to(window.dtype)
    return [getattr(state, name)[rows, slots] for name, _ in entries], seen


def step_across_blocks(q, k, v, mixing, state, scale, q_den, k_den, counts):
    """T new tokens, of which row b keeps the last counts[b]; any number of blocks may close."""
    exact, size = state.summaries.dtype, state.block_size
    layout, opened = append_tokens(k, v, k_den, state, counts)
    prefix, prefix_z = mixed_summaries(state, mixing, torch.arange(len(counts)), layout.blocks)
    query, query_den = (None if x is None else by_block(layout.place_queries(x), exact, size) for x in (q, q_den))
    opened = [by_block(tokens, exact, size) for tokens in opened]
    seen = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    own = own_weight(mixing, layout.blocks, exact)
    o = attend_blocks(query, query_den, opened, prefix, prefix_z, seen, own, scale)
    return layout.take_back(o.flatten(2, 3).transpose(1, 2))


def attend_blocks(query, query_den, opened, prefix, prefix_z, seen, own, scale):
    """q P + m_ii tril(q k^T) v for n blocks at once, divided by the same with ones for v if prefix_z is given.

    query [B, H, n, T, K] and query_den (None: the same); opened: k, v and perhaps k_den [B, G, n, C, K or V]; prefix
    [B, H, n, K, V]; prefix_z [B, H, n, K]; seen: which query sees which key, [T, C] at its end (None: all); own: m_ii,
    [B, H or 1, n, 1, 1].
    """
    group = query.shape[1] // opened[0].shape[1]
    key, value, *key_den = (x.repeat_interleave(group, 1) if group > 1 else x for x in opened)
    weight = own_part(query, key, seen, own)
    o = query @ prefix + weight @ value
    if prefix_z is None:
        return o * scale
    if query_den is not None:
        query, weight = query_den, own_part(query_den, key_den[0], seen, own)
    return divide_or_zero(o, (query @ prefix_z[..., None]).squeeze(-1) + weight.sum(-1))


def own_part(query, key, seen, own):
    """m_ii tril(q k^T)."""
    weight = query @ key.mT
    return (weight if seen is None else torch.where(seen, weight, 0)) * own


def mixed_summaries(state, mixing, rows, blocks):
    """Sum over closed blocks b < i of mixing[i, b] times summary b, for the query blocks i = blocks [R, n] of R `rows`.

    Returns the prefixes [R, H, n, K, V] and, where normalized, those of z [R, H, n, K]; else None.
    """
    exact, device = state.summaries.dtype, state.summaries.device
    heads, closed = state.prefix.shape[1], min(int(blocks.max()), mixing.shape[-1])
    summaries = state.summaries[rows.to(device), :, :closed]
    earlier = (torch.arange(closed) < blocks[..., None]).to(device)
    weight = mixing[..., blocks.to(device).clamp(max=mixing.shape[-2] - 1), :closed].to(exact)
    weight = torch.where(earlier, weight, 0)  # [H, R, n, N] or [R, n, N]
    weight = weight[:, None] if mixing.dim() == 2 else weight.transpose(0, 1)
    return tuple(
        None if s is None else mix_flat(weight, s, heads)
        for s in (summaries, None if state.z is None else state.z[rows.to(device), :, :closed])
    )


def mix_flat(weight, summaries, heads):
    """weight [R, H or 1, n, N] times summaries [R, G, N, ...] -> [R, H, n, ...]; query head h has key head h // (H // G)."""
    groups = summaries.shape[1]
    flat = summaries.flatten(3)
    if weight.shape[1] == 1:
        mixed = (weight @ flat).repeat_interleave(heads // groups, 1)
    else:
        mixed = weight @ flat.repeat_interleave(heads // groups, 1)
    return mixed.unflatten(-1, summaries.shape[3:])


def refresh_prefix(state, mixing, rows, blocks):
    """Mix the closed summaries anew for those `rows` whose open block, now `blocks`, has changed since the last time."""
    prefix, prefix_z = mixed_summaries(state, mixing, rows, blocks[:, None])
    state.prefix[rows.to(state.prefix.device)] = prefix[:, :, 0]
    if prefix_z is not None:
        state.prefix_z[rows.to(state.prefix.device)] = prefix_z[:, :, 0]
    state.prefix_block = state.prefix_block.index_copy(0, rows, blocks)


def own_weight(mixing, blocks, exact):
    """m_ii of the blocks [B, n], [B, H or 1, n, 1, 1]; blocks beyond the mixing (which hold no token) repeat its last."""
    diagonal = mixing.diagonal(dim1=-2, dim2=-1).to(exact)
    own = diagonal[..., blocks.to(mixing.device).clamp(max=diagonal.shape[-1] - 1)]
    own = own[:, None] if mixing.dim() == 2 else own.transpose(0, 1)
    return own[..., None, None]


def push_summaries(state, rows, blocks, opened):
    """Close the blocks `blocks` [R] of `rows`: opened holds their k, v and perhaps k_den, [R, C, G, K or V]."""
    state.reserve(int(blocks.max()) + 1)
    rows, blocks = rows.to(state.summaries.device), blocks.to(state.summaries.device)
    state.summaries[rows, :, blocks] = block_summary(opened[0], opened[1])
    if state.z is not None:
        state.z[rows, :, blocks] = opened[-1 if len(opened) == 3 else 0].sum(1)


def block_summary(k, v):
    """sum over the tokens of k v^T: [R, C, G, K], [R, C, G, V] -> [R, G, K, V] (paper eq. 4)."""
    return k.permute(0, 2, 3, 1) @ v.transpose(1, 2)


def append_tokens(k, v, k_den, state, counts):
    """Write new tokens, the last counts[b] of each row, into the state.

    Returns their `TokenLayout`, and k, v and perhaps k_den laid out by it, [B, n * C, G, K or V], with the open block's
    earlier tokens before and zeros behind them: padding may hold anything, and NaN would get through a weight of 0.
    """
    size, before, device = state.block_size, state.length, state.summaries.device
    first, room = before // size, max(1, -(-int((before % size + counts).max()) // size))
    layout = TokenLayout(before, counts, k.shape[1], first, room, size, 2 * size, device)
    opened, filled = [], layout.filled[..., None, None]
    for name, new in window_entries(state, k, v, k_den):
        window = getattr(state, name)
        opened.append(torch.where(filled, layout.place_keys(window, new), 0))
        layout.keep(window, opened[-1])
    cut = [tokens.to(state.summaries.dtype).unflatten(1, (-1, size)).flatten(0, 1) for tokens in opened]
    push_summaries(state, torch.arange(len(before)).repeat_interleave(room), layout.blocks.flatten(), cut)
    state.length = before + counts
    highest = (state.length - 1).clamp(min=0) // size
    state.oldest = torch.maximum(state.oldest, (highest - 1) * size)
    return layout, opened


def window_entries(state, k, v, k_den):
    """The window fields and the new tokens that belong into them."""
    entries = [("window_k", k), ("window_v", v)]
    if state.window_k_den is not None:
        entries.append(("window_k_den", k_den))
    return entries


def by_head(x, exact):
    """[B, T, H, K] -> [B, H, 1, T, K] in the exact dtype."""
    return x.to(exact).transpose(1, 2)[:, :, None]


def by_block(x, exact, size):
    """[B, n * C, H, K] -> [B, H, n, C, K] in the exact dtype."""
    return by_head(x, exact).squeeze(2).unflatten(2, (-1, size))
