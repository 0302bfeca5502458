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
    """Query heads `heads` of rows `rows` of the batch, slices: views where that is a single head, else copies.

    Tensors of the caller are [B, T, H or G, K]; here they are [R, T, K] in the exact dtype, R heads of all those rows.
    """

    def __init__(self, rows, heads, q, exact):
        self.rows, self.heads, self.every, self.exact = rows, heads, q.shape[2], exact
        self.count, self.batch = heads.stop - heads.start, len(q[rows])

    @staticmethod
    def groups(q, exact, one_by_one):
        """All heads of q, one by one or at once."""
        batch, heads = q.shape[0], q.shape[2]
        if not one_by_one:
            return [Heads(slice(None), slice(0, heads), q, exact)]
        each = [slice(head, head + 1) for head in range(heads)]
        return [Heads(slice(row, row + 1), head, q, exact) for row in range(batch) for head in each]

    def part(self, x):
        """The heads of x [B, T, H or G, K] that these use; query head h has key head h // (H // G)."""
        group = self.every // x.shape[2]
        return x[self.rows, :, self.heads.start // group : (self.heads.stop - 1) // group + 1]

    def take(self, x):
        """[B, T, H or G, K] -> [R, T, K]."""
        x = self.part(x).to(self.exact).transpose(1, 2)
        return (x.repeat_interleave(self.count // x.shape[1], 1) if x.shape[1] < self.count else x).flatten(0, 1)

    def give(self, x, out):
        """Write [R, T, K] to out [B, T, H or G, K]; query heads that share a key head are summed, into zeros."""
        place, x = self.part(out), x.unflatten(0, (self.batch, self.count))
        if out.shape[2] == self.every:
            place.copy_(x.transpose(1, 2))
        else:
            place.add_(x.unflatten(1, (place.shape[2], -1)).sum(2).transpose(1, 2))

    def take_mixing(self, mixing, scale):
        """[Mq, Mk] or [H, Mq, Mk] -> [R or 1, Mq, Mk], times scale."""
        mixing = mixing.to(self.exact) * scale
        return mixing[None] if mixing.dim() == 2 else mixing[self.heads].repeat(self.batch, 1, 1)

    def give_mixing(self, dm, out):
        """Add the gradients [R, Mq, Mk] to out [Mq, Mk] or [H, Mq, Mk]."""
        if out.dim() == 2:
            out += dm.sum(0)
        else:
            out[self.heads] += dm.unflatten(0, (self.batch, self.count)).sum(0)


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


def align_sequences(cu_seqlens, tokens, size):
    """How packed sequences are brought to block edges: source [1, M * C] and back [1, T] for `MoveTokens`, and of each of
    those M blocks its place in its sequence and the sequence's number, int64 [M] (behind the last: a number of its own).

    M is the most that so many sequences can need.
    """
    edges = cu_seqlens.long()
    last = ((edges.diff() + size - 1) // size).cumsum(0)
    first = torch.nn.functional.pad(last, (1, 0))
    token = torch.arange(tokens, device=edges.device)
    sequence = torch.searchsorted(edges, token, right=True) - 1
    back = first[sequence] * size + token - edges[sequence]
    count = (tokens + (len(edges) - 1) * (size - 1)) // size
    source = torch.full((count * size,), -1, device=edges.device).index_copy(0, back, token)
    block = torch.arange(count, device=edges.device)
    sequence = torch.searchsorted(last, block, right=True)
    return source[None], back[None], block - first[sequence], sequence


def mixing_of_sequences(mixing, place, sequence):
    """The mixing [.., M, M] of blocks of `align_sequences`: those of different sequences weigh nothing for each other."""
    rows, columns = place.clamp(max=mixing.shape[-2] - 1), place.clamp(max=mixing.shape[-1] - 1)
    return torch.where(sequence[:, None] == sequence, mixing[..., rows[:, None], columns], 0)


def ring_slot(position, slots, sinks=0):
    """Which of `slots` the token at `position` is in: the first `sinks` have their own, the others share a ring."""
    return torch.where(position < sinks, position, sinks + position % (slots - sinks))


class TokenLayout:
    """New tokens behind those that are held, each row laid out from the edge of its block `first` on.

    before: int64 [B], tokens that a row has seen, in `slots` as `ring_slot` says (0: nothing is held). count: int64 [B], how
    many of the `steps` new tokens are a row's own, the last ones (padding is on the left). blocks: how many of them there
    are. All these may be on the CPU while tokens are on `device`.
    """

    def __init__(self, before, count, steps, first, blocks, size, slots, device, sinks=0):
        self.before, self.count, self.steps, self.first, self.size = before, count, steps, first * size, size
        self.slots, self.sinks, self.device = slots, sinks, device
        self.blocks = first[:, None] + torch.arange(blocks, device=first.device)  # [B, M]
        position = self.first[:, None] + torch.arange(blocks * size, device=first.device)
        token = (position - before[:, None] + (steps - count)[:, None]).clamp(min=0, max=steps - 1)
        source = token
        if slots:
            source = torch.where(position < before[:, None], ring_slot(position, slots, sinks), token + slots)
        self.token, self.source = token.to(device), source.to(device)
        self.filled = (position < (before + count)[:, None]).to(device)
        self.rows = torch.arange(len(before), device=device)[:, None]

    def place_keys(self, held, new):
        """What is held [B, slots, ..] and [B, T, ..] -> [B, M * C, ..]; anything where not `filled`."""
        return (torch.cat([held, new.to(held.dtype)], 1) if self.slots else new)[self.rows, self.source]

    def place_queries(self, q):
        """[B, T, ..] -> [B, M * C, ..]."""
        return q[self.rows, self.token]

    def take_back(self, o):
        """[B, M * C, ..] -> [B, T, ..], zeros for padding."""
        token = torch.arange(self.steps, device=self.before.device) - (self.steps - self.count)[:, None]
        place = (token + (self.before - self.first)[:, None]).clamp(min=0).to(self.device)
        real = (token >= 0).to(self.device)
        return torch.where(real.view(*real.shape, *[1] * (o.dim() - 2)), o[self.rows, place], 0)

    def keep(self, held, laid):
        """Write the last of the tokens laid out, [B, M * C, ..], into `held` [B, slots, ..], in place."""
        end, slots = (self.before + self.count - 1)[:, None], held.shape[1]
        slot = torch.arange(slots, device=end.device)
        last = end - (end - slot + self.sinks) % (slots - self.sinks)  # of each slot of the ring
        position = torch.where(slot < self.sinks, slot, last)
        new = (position >= torch.maximum(self.before, self.first)[:, None]) & (position <= end)
        new = (new & (ring_slot(position, slots, self.sinks) == slot)).to(self.device)
        values = laid[self.rows, (position - self.first[:, None]).clamp(0, laid.shape[1] - 1).to(self.device)]
        held.copy_(torch.where(new.view(*new.shape, *[1] * (held.dim() - 2)), values.to(held.dtype), held))
