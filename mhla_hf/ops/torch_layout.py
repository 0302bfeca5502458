"""Tensor layouts of the PyTorch implementation: tokens by block, heads in groups, padding moved aside."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .blocks import Blocks


class BlockCut:
    """Cuts tokens into M blocks, each padded with zeros to C tokens, the size of the largest block.

    Contiguous blocks of equal size are views, others are copies.
    """

    def __init__(self, blocks: Blocks, device: torch.device):
        self.count, self.length = blocks.num_blocks, blocks.length
        self.size = min(blocks.block_size, blocks.length) if blocks.block_size is not None else max(blocks.sizes())
        self.missing = self.count * self.size - self.length
        self.order: Tensor | None = None
        if not blocks.contiguous or (blocks.block_size is None and not blocks.equal):
            block = blocks.index(device)
            # Count on the device: a copy from the host could not be captured in a CUDA graph.
            sizes = block.new_zeros(self.count).index_add(0, block, torch.ones_like(block))
            self.order, self.inverse = gather_by_block(block, sizes, self.size)

    def split(self, x: Tensor) -> Tensor:
        """Cut tokens into blocks: [R, T, K] -> [R, M, C, K]."""
        if self.missing > 0:
            x = torch.nn.functional.pad(x, (0, 0, 0, self.missing if self.order is None else 1))
        if self.order is not None:
            x = x.index_select(1, self.order)
        return x.unflatten(1, (self.count, self.size))

    def merge(self, x: Tensor) -> Tensor:
        """Undo `split`: [R, M, C, V] -> [R, T, V]."""
        x = x.flatten(1, 2)
        return x[:, : self.length] if self.order is None else x.index_select(1, self.inverse)


def gather_by_block(block: Tensor, sizes: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Compute the gather that sorts tokens by `block` [T] and pads every block to C = `size` tokens, and its inverse.

    Returns the token at each place, int64 [M * C], or T where there is none; and the place of each token, int64 [T].
    """
    tokens = torch.argsort(block, stable=True)
    first = sizes.cumsum(0) - sizes
    shift = torch.arange(len(sizes), device=block.device) * size - first
    place = torch.arange(len(block), device=block.device) + shift[block[tokens]]
    order = torch.full((len(sizes) * size,), len(block), device=block.device).index_copy(0, place, tokens)
    return order, torch.empty_like(tokens).index_copy(0, tokens, place)


class Heads:
    """Selects batch rows and query heads, and flattens both axes into one: [B, T, H or G, K] -> [R, T, K] in `sum_dtype`."""

    def __init__(self, rows: slice, heads: slice, q: Tensor, sum_dtype: torch.dtype):
        self.rows, self.heads, self.sum_dtype = rows, heads, sum_dtype
        self.total_heads, self.num_heads, self.num_rows = q.shape[2], heads.stop - heads.start, len(q[rows])

    @staticmethod
    def groups(q: Tensor, sum_dtype: torch.dtype, one_by_one: bool) -> list["Heads"]:
        """Return selections that cover q [B, T, H, K]: one for each head of each row if `one_by_one`, else a single one."""
        if not one_by_one:
            return [Heads(slice(None), slice(0, q.shape[2]), q, sum_dtype)]
        rows, heads = ([slice(i, i + 1) for i in range(count)] for count in (q.shape[0], q.shape[2]))
        return [Heads(row, head, q, sum_dtype) for row in rows for head in heads]

    def select(self, x: Tensor) -> Tensor:
        """Return a view of x [B, T, H or G, K] with the selected rows and query heads, or the KV heads that these read."""
        queries_per_kv = self.total_heads // x.shape[2]
        return x[self.rows, :, self.heads.start // queries_per_kv : (self.heads.stop - 1) // queries_per_kv + 1]

    def take(self, x: Tensor) -> Tensor:
        """Return the selected heads, with KV heads repeated for their query heads: [B, T, H or G, K] -> [R, T, K]."""
        x = self.select(x).to(self.sum_dtype).transpose(1, 2)
        if x.shape[1] < self.num_heads:
            x = x.repeat_interleave(self.num_heads // x.shape[1], 1)
        return x.flatten(0, 1)

    def write(self, x: Tensor, out: Tensor) -> None:
        """Write x [R, T, K] to `out`; if `out` has KV heads, add to each the sum over its query heads."""
        target = self.select(out)
        x = x.unflatten(0, (self.num_rows, self.num_heads))
        if out.shape[2] == self.total_heads:
            target.copy_(x.transpose(1, 2))
        else:
            target.add_(x.unflatten(1, (target.shape[2], -1)).sum(2).transpose(1, 2))

    def take_mixing(self, mixing: Tensor, scale: float) -> Tensor:
        """Return the mixing of the selected heads times `scale`: [Mq, Mk] or [H, Mq, Mk] -> [R or 1, Mq, Mk]."""
        mixing = mixing.to(self.sum_dtype) * scale
        return mixing[None] if mixing.dim() == 2 else mixing[self.heads].repeat(self.num_rows, 1, 1)

    def add_mixing_grad(self, mixing_grad: Tensor, out: Tensor) -> None:
        """Add gradients [R, Mq, Mk] to `out` [Mq, Mk] or [H, Mq, Mk]."""
        if out.dim() == 2:
            out += mixing_grad.sum(0)
        else:
            out[self.heads] += mixing_grad.unflatten(0, (self.num_rows, self.num_heads)).sum(0)


def take_tokens(x: Tensor, source: Tensor) -> Tensor:
    """Gather tokens of x [B, T, ...]: y[b, p] = x[b, source[b, p]], or zeros where `source` [B or 1, P] is negative."""
    rows = torch.arange(len(x), device=x.device)[:, None]
    is_none = (source < 0).view(*source.shape, *[1] * (x.dim() - 2))
    return x[rows, source.clamp(min=0)].masked_fill(is_none, 0)


class MoveTokens(torch.autograd.Function):
    """Computes `take_tokens`. The gather `inverse` [B or 1, T] undoes it, so the backward pass is a gather, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(source, inverse)
        return take_tokens(x, source)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        source, inverse = ctx.saved_tensors
        return MoveTokens.apply(grad, inverse, source), None, None


class DifferentiableOnce(torch.autograd.Function):
    """Returns `grad`, computed from `sources`, unchanged; differentiating the result raises RuntimeError."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, *sources: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        raise RuntimeError(
            "create_graph: got True, expected False; for second derivatives, call mhla with impl='reference'."
        )


class TokenMove(NamedTuple):
    """The gathers of `MoveTokens`, or None if no token moves."""

    source: Tensor | None = None
    inverse: Tensor | None = None

    def move(self, *tensors: Tensor | None) -> tuple[Any, ...]:
        if self.source is None:
            return tensors
        return tuple(None if x is None else MoveTokens.apply(x, self.source, self.inverse) for x in tensors)

    def take_back(self, x: Tensor) -> Tensor:
        return x if self.source is None else MoveTokens.apply(x, self.inverse, self.source)


def align_sequences(cu_seqlens: Tensor, num_tokens: int, block_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gathers of `MoveTokens` with which each packed sequence begins at a block edge: [1, M * C] and [1, T].

    M is an upper bound of the number of blocks for any borders. Also returns the index of each block within its sequence and
    the index of that sequence, both int64 [M]; unused blocks at the end count as one more sequence.
    """
    borders = cu_seqlens.long()
    last_block = ((borders.diff() + block_size - 1) // block_size).cumsum(0)
    first_block = torch.nn.functional.pad(last_block, (1, 0))
    token = torch.arange(num_tokens, device=borders.device)
    token_sequence = torch.searchsorted(borders, token, right=True) - 1
    inverse = first_block[token_sequence] * block_size + token - borders[token_sequence]
    num_blocks = (num_tokens + (len(borders) - 1) * (block_size - 1)) // block_size
    source = torch.full((num_blocks * block_size,), -1, device=borders.device).index_copy(0, inverse, token)
    block = torch.arange(num_blocks, device=borders.device)
    sequence_id = torch.searchsorted(last_block, block, right=True)
    return source[None], inverse[None], block - first_block[sequence_id], sequence_id


class Alignment(NamedTuple):
    """How tokens move so that every sequence begins at a block edge; see `align_blocks`."""

    tokens: TokenMove
    block: Tensor  # int64 [M], the index of each block in its sequence
    valid: Tensor | None  # bool [B, places], which moved tokens are keys; None if all are
    sequence_id: Tensor | None = None  # int64 [M], the sequence of each block if several are packed


def align_blocks(
    q: Tensor, block_size: int, key_mask: Tensor | None, starts: Tensor | None, cu_seqlens: Tensor | None
) -> Alignment:
    """Align left-padded rows or packed sequences to blocks; q is [B, T, ...], the other arguments are as in `mhla`.

    Raises:
        ValueError: If both `starts` and `cu_seqlens` are given.
    """
    if starts is not None and cu_seqlens is not None:
        raise ValueError("starts: got a tensor along with cu_seqlens, expected None.")
    batch, num_tokens = q.shape[:2]
    block = torch.arange((num_tokens + block_size - 1) // block_size, device=q.device)
    sequence_id = None
    if cu_seqlens is not None:
        source, inverse, block, sequence_id = align_sequences(cu_seqlens, num_tokens, block_size)
    elif starts is not None:
        place, starts = torch.arange(num_tokens, device=q.device), starts.to(q.device)[:, None]
        source, inverse = place + starts, place - starts
        source = source.masked_fill(source >= num_tokens, -1)
    else:
        return Alignment(TokenMove(), block, key_mask)
    valid = (source >= 0).expand(batch, -1)
    if key_mask is not None:
        valid = valid & key_mask.gather(1, source.clamp(min=0).expand(batch, -1))
    return Alignment(TokenMove(source, inverse), block, valid, sequence_id)


def mixing_of_sequences(mixing: Tensor, block_index: Tensor, sequence_id: Tensor) -> Tensor:
    """Expand the mixing matrix of a sequence to the M blocks of `align_sequences`, with 0 between sequences."""
    rows = block_index.clamp(max=mixing.shape[-2] - 1)
    columns = block_index.clamp(max=mixing.shape[-1] - 1)
    return torch.where(sequence_id[:, None] == sequence_id, mixing[..., rows[:, None], columns], 0)


def ring_slot(position: Tensor, num_slots: int, sinks: int = 0) -> Tensor:
    """Return the slot of the token at `position`: the first `sinks` tokens have one each, the others share a ring."""
    return torch.where(position < sinks, position, sinks + position % (num_slots - sinks))


def resize_tokens(x: Tensor, count: int) -> Tensor:
    """Cut or pad x [B, T, ...] to `count` tokens, with zeros or, under torch.compile, with copies of the last token.

    Under torch.compile it always gathers, because `pad` would be compiled a second time for lengths that need no padding.
    """
    if torch.compiler.is_compiling():
        return x.index_select(1, torch.arange(count, device=x.device).clamp(max=x.shape[1] - 1))
    if x.shape[1] == count:
        return x
    return torch.nn.functional.pad(x, (*[0, 0] * (x.dim() - 2), 0, count - x.shape[1]))


def with_ones(v: Tensor) -> Tensor:
    """Append a column of ones to the values, [..., V] -> [..., V + 1], whose weighted sum is the sum of the weights."""
    return torch.nn.functional.pad(v, (0, 1), value=1.0)


def by_block(x: Tensor, num_kv_heads: int, size: int) -> Tensor:
    """Group tokens by block and heads by KV head: [B, m * C, H, D] -> [B * m, G, (H / G) * C, D]."""
    x = x.unflatten(2, (num_kv_heads, -1)).unflatten(1, (-1, size))
    return x.permute(0, 1, 3, 4, 2, 5).flatten(3, 4).flatten(0, 1)


def by_token(x: Tensor, batch: int, size: int) -> Tensor:
    """Undo `by_block`: [B * m, G, (H / G) * C, V] -> [B, m * C, H, V]."""
    return x.unflatten(2, (-1, size)).unflatten(0, (batch, -1)).permute(0, 1, 4, 2, 3, 5).flatten(3, 4).flatten(1, 2)


def slot_positions(count: Tensor, num_slots: int, sinks: int) -> Tensor:
    """Return the position of the token in each slot after `count` [N] tokens: int64 [N, num_slots], negative if empty."""
    slot = torch.arange(num_slots, device=count.device)
    last = count[:, None] - 1
    in_ring = last - (last - slot + sinks) % (num_slots - sinks)
    in_ring = torch.where(in_ring >= sinks, in_ring, -1)  # sinks have slots of their own
    return torch.where(slot < sinks, torch.where(slot <= last, slot, -1), in_ring)


def visible_slots(position: Tensor, num_slots: int, block_size: int, window: int, sinks: int) -> Tensor:
    """Return which slots hold the sinks and the window that the token at `position` [B] sees: bool [B, num_slots]."""
    slots = torch.arange(num_slots, device=position.device)
    age = (position[:, None] - slots + sinks) % (num_slots - sinks)  # of the tokens in the ring
    largest_age = torch.minimum(position % block_size + (window - 1) * block_size, position - sinks)
    return torch.where(slots < sinks, slots <= position[:, None], age <= largest_age[:, None])


class TokenPlaces:
    """Finds the tokens of given positions in a concatenation of the `num_held` tokens of a decoder state and T new ones.

    Each row has seen `before` [B] tokens; those that the state still holds are in the slots that `ring_slot` returns. The
    first `padding` [B] new tokens of a row are padding. Results are on `device`, positions may be on the CPU.
    """

    def __init__(
        self, before: Tensor, padding: Tensor, num_new: int, num_held: int, num_slots: int, sinks: int,
        device: torch.device,
    ):  # fmt: skip
        self.before, self.padding, self.num_new = before[:, None], padding[:, None], num_new
        self.num_held, self.num_slots, self.sinks, self.device = num_held, num_slots, sinks, device

    def find(self, position: Tensor) -> Tensor:
        """Return the places of the tokens at positions int64 [B, L], or -1 where there is none."""
        new = position - self.before + self.padding
        place = new + self.num_held
        if self.num_held:
            place = torch.where(position < self.before, ring_slot(position, self.num_slots, self.sinks), place)
        return place.masked_fill((position < 0) | (new >= self.num_new), -1).to(self.device)

    def move_new(self, first: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Compute the gathers of `MoveTokens` that bring new tokens to `count` positions, from `first` [B, 1] on."""
        column = torch.arange(self.num_new, device=first.device)
        inverse = (self.before - self.padding - first + column).masked_fill(column < self.padding, -1)
        source = first + torch.arange(count, device=first.device) - self.before + self.padding
        source = source.masked_fill((source < self.padding) | (source >= self.num_new), -1)
        return source.to(self.device), inverse.to(self.device)

    def write(self, held: Tensor, tokens: Tensor) -> None:
        """Write the new tokens, the last T of `tokens` [B, num_held + T, ...], into the slots of `held` [B, slots, ...]."""
        position = slot_positions(self.before[:, 0] + self.num_new - self.padding[:, 0], held.shape[1], self.sinks)
        is_new = (position >= self.before).to(self.device)
        values = take_tokens(tokens, self.find(position)).to(held.dtype)
        held.copy_(torch.where(is_new.view(*is_new.shape, *[1] * (held.dim() - 2)), values, held))
