"""Causal attention of one shard of a row of tokens, where other processes hold the rest (sequence parallelism).

A row is one sequence or several packed ones, each with blocks of its own, and is cut between blocks. What travels does not
grow with the row: with decays R running summaries from every process, and of a local softmax one block of keys and values
from the left neighbor and one set of sinks from every process; with a matrix the summaries of all blocks, mixed as it likes.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from .api import mhla
from .blocks import Blocks
from .exchange import AllGather, FromLeft
from .local import advance, attend_local, block_summaries, find_sinks
from .reference import divide_or_zero
from .torch_forward import mix_blocks
from .torch_layout import BlockCut, Heads, MoveTokens, mixing_of_sequences


class RowShards:
    """How `count` processes share a row: each begins with the first block that begins in its equal part of the tokens.

    Of all M blocks: `first` [M + 1], the token that each begins with, and the row's end; `place` and `sequence` [M], its
    place in its sequence and the sequence's number. Of the processes: `block` and `token` [P + 1], the borders. All of this
    is on the CPU. ValueError: fewer tokens than a block for each process.
    """

    def __init__(self, cu_seqlens: torch.Tensor, size: int, count: int):
        edges = cu_seqlens.long().cpu()
        tokens, self.size = int(edges[-1]), size
        if tokens < count * size:
            what = f"expected at least {count * size}, a block of {size} for each of {count} processes"
            raise ValueError(f"input_ids: got {tokens} tokens, {what}.")
        blocks = (edges.diff() + size - 1) // size
        self.sequence = torch.arange(len(blocks)).repeat_interleave(blocks)
        self.place = torch.arange(len(self.sequence)) - (blocks.cumsum(0) - blocks)[self.sequence]
        self.first = torch.cat([edges[self.sequence] + self.place * size, edges[-1:]])
        self.block = torch.searchsorted(self.first, (torch.arange(count + 1) * tokens + count - 1) // count)
        self.token = self.first[self.block]

    def slots(self, first, end) -> tuple[torch.Tensor, torch.Tensor]:
        """The token of each slot of blocks `first` to `end`, int64 [M * C], and whether there is one, bool."""
        token = self.first[first:end, None] + torch.arange(self.size)
        return token.flatten(), (token < self.first[first + 1 : end + 1, None]).flatten()

    def align(self, rank: int, *tensors):
        """Tokens [B, T, ..] of process `rank` (or None) brought to block edges, [B, M * C, ..]; and the way back."""
        token, real = self.slots(self.block[rank], self.block[rank + 1])
        if real.all():
            return *tensors, lambda o: o
        source = torch.where(real, token - self.token[rank], -1)[None].to(tensors[0].device)
        back = real.nonzero().T.to(tensors[0].device)
        moved = (None if x is None else MoveTokens.apply(x, source, back) for x in tensors)
        return *moved, lambda o: MoveTokens.apply(o, back, source)


def shards_of(cu_seqlens, size: int, group) -> tuple[RowShards, int]:
    """The shards of the row with these borders, and the number of this process's own. ValueError: there are no borders."""
    if cu_seqlens is None:
        raise ValueError("cu_seqlens: got None with a shard of a row, expected the borders of the row's sequences.")
    return RowShards(cu_seqlens, size, dist.get_world_size(group)), dist.get_rank(group)


def refuse_layout(**given) -> None:
    """ValueError for what shards cannot be together with."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name}: it came with a shard of a sequence, expected None.")


def gather(x: torch.Tensor, group) -> torch.Tensor:
    """x of every process, `[P, *x.shape]`."""
    return AllGather.apply(x[None], group)


def gather_parts(x: torch.Tensor, borders: torch.Tensor, axis: int, group) -> torch.Tensor:
    """x of every process, one behind the other along `axis`, where process p has borders[p] to borders[p + 1]."""
    lengths = borders.diff().tolist()
    padded = F.pad(x, (*[0, 0] * (x.dim() - axis - 1), 0, max(lengths) - x.shape[axis]))
    return torch.cat([part.narrow(axis, 0, n) for part, n in zip(gather(padded, group), lengths, strict=True)], axis)


def sharded_local_attention(
    q, k, v, fq, fk, decays, balance, form, *, group=None, key_mask=None, starts=None, cu_seqlens=None
):
    """`local_attention` of the tokens of this process's shard; shapes as there, T of the shard and cu_seqlens of the row.

    ValueError: key_mask or starts; no cu_seqlens; shards shorter than what a window reads of their left neighbor.
    """
    refuse_layout(key_mask=key_mask, starts=starts)
    shards, rank = shards_of(cu_seqlens, form.block_size, group)
    if (shortest := min(shards.block.diff()[:-1].tolist(), default=form.lag)) < form.lag - 1:
        what = f"expected at least {form.lag - 1} in all but the last, for a window of {form.lag}"
        raise ValueError(f"cu_seqlens: got a process with {shortest} blocks of {form.block_size} tokens, {what}.")
    back, first, end, device = form.lag - 1, int(shards.block[rank]), int(shards.block[rank + 1]), q.device
    q, k, v, fq, fk, take_back = shards.align(rank, q, k, v, fq, fk)
    if edge := back * form.block_size:
        k, v, fk = (torch.cat([FromLeft.apply(x[:, -edge:], group), x], 1) for x in (k, v, fk))
        q, fq = (torch.cat([torch.zeros_like(x[:, :edge]), x], 1) for x in (q, fq))
    real = shards.slots(max(first - back, 0), end)[1]
    valid = F.pad(real, (q.shape[1] - len(real), 0)).expand(len(q), -1).to(device)
    place, sequence = (
        F.pad(x, (back, 0), value=-1)[first : end + back].to(device) for x in (shards.place, shards.sequence)
    )
    given = shards, rank, place, sequence, group
    carried, opened = carry_sums(block_summaries(fk, v, valid, place[None], form), decays, form.lag, *given)
    sink = shared_sinks(k, v, valid, form, *given) if form.sinks else None
    if len(cu_seqlens) == 2:  # without gradients a single sequence is then worked on in segments
        sequence, sink = None, sink and [x[:, -1] for x in sink]
    o, _ = attend_local(
        q, k, v, fq, fk, valid, decays, balance, form, place[None],
        sequence=sequence, sink=sink, carried=carried, opened=opened,
    )  # fmt: skip
    return take_back(o[:, edge:])


def carry_sums(summaries, decays, lag, shards, rank, place, sequence, group):
    """What the sequence of this shard's first block brings with it: its running sums, and as of which block, int [B]."""
    decays, first = decays.to(summaries.dtype), shards.block[rank]
    now = place[-1] + 1  # the block that the next shard begins with, if it goes on with the last sequence of this one
    own = torch.where(sequence == sequence[-1], place, now)[None]
    own = advance(None, summaries, decays, lag, own, None, now.expand(len(summaries)))
    opened, lasts = shards.place[first], shards.block[1 : rank + 1] - 1
    passed = (opened - shards.place[lasts] - 1).clamp(min=0)  # blocks between the ends of earlier shards and this one
    decay = torch.exp(decays.log_rate * passed.to(own.device)[:, None, None])
    same = (shards.sequence[lasts] == shards.sequence[first]).to(own.device)
    decay = torch.where(same[:, None, None], decay, 0)[:, None, ..., None, None]
    return (gather(own, group)[:rank] * decay).sum(0), opened.to(own.device).expand(len(own))


def shared_sinks(k, v, valid, form, shards, rank, place, sequence, group):
    """Sinks as `attend_local` takes them of packed sequences; of one that began in an earlier shard, those it had there."""
    first = shards.block[rank]
    begun = int(torch.searchsorted(shards.block, first - shards.place[first], right=True)) - 1
    went_on = (sequence == shards.sequence[first].to(k.device))[:, None, None, None] & (begun < rank)
    sinks = []
    for own in find_sinks(k, v, valid, form, sequence)[:2]:
        came = gather(own[:, -1], group)[begun]  # of the last sequence there
        sinks.append(torch.where(went_on, came[:, None], own))
    return *sinks, torch.ones_like(sinks[0][..., 0, 0], dtype=torch.bool)  # who reads sinks is behind a whole block


def sharded_causal_mhla(
    q, k, v, mixing, *, block_size: int, group=None, normalize=True, q_den=None, k_den=None, starts=None, cu_seqlens=None,
    unrounded=False, impl="auto",
):  # fmt: skip
    """`mhla(..., causal=True)` of the tokens of this process's shard, cu_seqlens of the row.

    mixing: a function that gives the matrix of so many blocks, the longest sequence's. ValueError: starts; no cu_seqlens.
    """
    refuse_layout(starts=starts)
    shards, rank = shards_of(cu_seqlens, block_size, group)
    q, k, v, q_den, k_den, take_back = shards.align(rank, q, k, v, q_den, k_den)
    place, sequence = shards.place.to(q.device), shards.sequence.to(q.device)
    mixing = mixing_of_sequences(mixing(int(shards.place.max()) + 1), place, sequence)
    options = {"shards": shards, "rank": rank, "group": group, "impl": impl}
    o = weigh_and_sum(q, k, v, mixing, **options)
    if normalize:
        ones = torch.ones_like(v[..., :1])
        k_den = k if k_den is None else k_den
        o = divide_or_zero(o, weigh_and_sum(q if q_den is None else q_den, k_den, ones, mixing, **options)[..., 0])
    return take_back(o if unrounded else o.to(v.dtype))


def weigh_and_sum(q, k, v, mixing, *, shards, rank, group, impl):
    """The sum of weight times v over this and all earlier shards, [B, M * C, H, V] in fp32 at least."""
    first, end = shards.block[rank : rank + 2].tolist()
    blocks = Blocks.sequence(q.shape[1], shards.size)
    own = mixing[..., first:end, first:end]
    o = mhla(q, k, v, own, blocks=blocks, causal=True, normalize=False, unrounded=True, impl=impl)
    (heads,) = Heads.groups(q, o.dtype, one_by_one=False)
    cut = BlockCut(blocks, q.device)
    with torch.autocast(q.device.type, enabled=False):
        summary = cut.split(heads.take(k)).mT @ cut.split(heads.take(v))  # [R, M, K, V]
        earlier = gather_parts(summary, shards.block, 1, group)[:, :first]
        m = heads.take_mixing(mixing, q.shape[3] ** -0.5)[:, first:end, :first]
        far = cut.merge(cut.split(heads.take(q)) @ mix_blocks(m, earlier))
    return o + far.unflatten(0, (len(q), -1)).transpose(1, 2)
