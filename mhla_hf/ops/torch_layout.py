"""How the torch implementation looks at tokens: cut into blocks, one head or all at a time, padding moved away."""

import torch


class BlockCut:
    """Tokens of `blocks` as [M, C], C the size of the largest block; what is missing in the others is zeros.

    Blocks that are runs of tokens are looked at in place; others are gathered (`order`, back by `inverse`).
    """

    def __init__(self, blocks, device):
        self.count, self.length = blocks.num_blocks, blocks.length
        in_place = blocks.contiguous and (blocks.equal or blocks.block_size is not None)
        self.size = min(blocks.block_size, blocks.length) if blocks.block_size is not None else max(blocks.sizes())
        self.missing = self.count * self.size - self.length
        self.order = None
        if not in_place:
            block = blocks.index(device)
            # counted on the device: a copy from the host could not be recorded in a CUDA graph
            sizes = block.new_zeros(self.count).index_add(0, block, torch.ones_like(block))
            self.order, self.inverse = gather_by_block(block, sizes, self.size)

    def split(self, x):
        """[R, T, K] -> [R, M, C, K]."""
        if self.missing > 0:
            x = torch.nn.functional.pad(x, (0, 0, 0, self.missing if self.order is None else 1))
        if self.order is not None:
            x = x.index_select(1, self.order)
        return x.unflatten(1, (self.count, self.size))

    def merge(self, x):
        """[R, M, C, V] -> [R, T, V]."""
        x = x.flatten(1, 2)
        return x[:, : self.length] if self.order is None else x.index_select(1, self.inverse)


def gather_by_block(block, sizes, size):
    """Where tokens in blocks `block` [T] go when each block of `sizes` [M] gets `size` places, and where they come from.

    order [M * size]: the token of each place, T where there is none. inverse [T]: the place of each token.
    """
    length = block.shape[0]
    tokens = torch.argsort(block, stable=True)
    first = sizes.cumsum(0) - sizes
    shift = torch.arange(sizes.shape[0], device=block.device) * size - first
    place = torch.arange(length, device=block.device) + shift[block[tokens]]
    order = torch.full((sizes.shape[0] * size,), length, device=block.device).index_copy(0, place, tokens)
    return order, torch.empty_like(tokens).index_copy(0, tokens, place)


class Heads:
    """Some query heads: head `head` of row `row` of the batch as views, or all of all rows (row None) as copies.

    Tensors of the caller are [B, T, H or G, K]; here they are [R, T, K] in the exact dtype, R heads.
    """

    def __init__(self, row, head, batch, heads, exact):
        self.row, self.head, self.batch, self.heads, self.exact = row, head, batch, heads, exact

    @staticmethod
    def groups(q, exact, one_by_one):
        """All heads of q, one by one or at once."""
        batch, heads = q.shape[0], q.shape[2]
        if not one_by_one:
            return [Heads(None, None, batch, heads, exact)]
        return [Heads(row, head, batch, heads, exact) for row in range(batch) for head in range(heads)]

    def take(self, x):
        """[B, T, H or G, K] -> [R, T, K]; query head h has key head h // (H // G)."""
        group = self.heads // x.shape[2]
        if self.row is not None:
            return x[self.row, :, self.head // group][None].to(self.exact)
        x = x.to(self.exact).transpose(1, 2)
        return (x.repeat_interleave(group, 1) if group > 1 else x).flatten(0, 1)

    def give(self, x, out):
        """Write [R, T, K] to out [B, T, H or G, K]; query heads that share a key head are summed, into zeros."""
        group = self.heads // out.shape[2]
        if self.row is None:
            x = x.unflatten(0, (self.batch, self.heads))
            out.copy_((x.unflatten(1, (-1, group)).sum(2) if group > 1 else x).transpose(1, 2))
        elif group > 1:
            out[self.row, :, self.head // group] += x[0]
        else:
            out[self.row, :, self.head] = x[0]

    def take_mixing(self, mixing, scale):
        """[Mq, Mk] or [H, Mq, Mk] -> [R or 1, Mq, Mk], times scale."""
        mixing = mixing.to(self.exact) * scale
        if mixing.dim() == 2:
            return mixing[None]
        return mixing.repeat(self.batch, 1, 1) if self.row is None else mixing[self.head][None]

    def give_mixing(self, dm, out):
        """Add the gradients [R, Mq, Mk] to out [Mq, Mk] or [H, Mq, Mk]."""
        if out.dim() == 2:
            out += dm.sum(0)
        elif self.row is None:
            out += dm.unflatten(0, (self.batch, self.heads)).sum(0)
        else:
            out[self.head] += dm[0]


class MoveTokens(torch.autograd.Function):
    """y[b, p] = x[b, source[b, p]], zeros where source is -1.

    `back` says the same of the way back, so the gradient is a gather too.
    """

    @staticmethod
    def forward(ctx, x, source, back):
        ctx.save_for_backward(source, back)
        rows = torch.arange(x.shape[0], device=x.device)[:, None]
        return torch.where((source >= 0)[..., None, None], x[rows, source.clamp(min=0)], 0)

    @staticmethod
    def backward(ctx, g):
        source, back = ctx.saved_tensors
        return MoveTokens.apply(g, back, source), None, None


def shift_to_start(starts, tokens):
    """source and back [B, T] for `MoveTokens` that bring the first real token of each row to place 0."""
    place, starts = torch.arange(tokens, device=starts.device), starts[:, None]
    source, back = place + starts, place - starts
    return torch.where(source < tokens, source, -1), torch.where(back >= 0, back, -1)


def align_sequences(cu_seqlens, tokens, block_size, mixing):
    """source [1, M * C] and back [1, T] that bring every packed sequence to a block edge, and the mixing of those M blocks.

    M is the most that so many sequences can need. Blocks of different sequences weigh nothing for each other.
    """
    edges = cu_seqlens.long()
    counts = (edges.diff() + block_size - 1) // block_size
    last = counts.cumsum(0)
    first = last - counts
    token = torch.arange(tokens, device=edges.device)
    sequence = torch.searchsorted(edges, token, right=True) - 1
    back = first[sequence] * block_size + token - edges[sequence]
    room = (tokens + len(counts) * (block_size - 1)) // block_size
    source = torch.full((room * block_size,), -1, device=edges.device).index_copy(0, back, token)

    block = torch.arange(room, device=edges.device)
    sequence = torch.searchsorted(last, block, right=True)
    place = block - first[sequence.clamp(max=len(counts) - 1)]
    rows, columns = place.clamp(max=mixing.shape[-2] - 1), place.clamp(max=mixing.shape[-1] - 1)
    mixing = mixing[..., rows[:, None], columns[None, :]]
    return source[None], back[None], torch.where(sequence[:, None] == sequence[None, :], mixing, 0)
