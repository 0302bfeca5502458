"""Causal attention of one shard of a sequence, where other processes hold the rest (sequence parallelism).

Shards are equal, in order, and whole blocks. What travels does not grow with the sequence: with decays R running summaries
from every process, and of a local softmax one block of keys and values from the left neighbor and the sinks from the first;
with a matrix the summaries of all blocks, which it mixes as it likes.
"""

import torch
import torch.distributed as dist

from .api import mhla
from .blocks import Blocks
from .exchange import AllGather, FromLeft
from .local import advance, attend_local, block_summaries
from .reference import divide_or_zero
from .torch_forward import mix_blocks
from .torch_layout import BlockCut, Heads


def whole_blocks(tokens: int, size: int) -> int:
    """How many blocks a shard is. ValueError if not a whole number of them."""
    if tokens % size:
        raise ValueError(f"q: got a shard of {tokens} tokens, expected whole blocks of {size}.")
    return tokens // size


def refuse_layout(**given) -> None:
    """ValueError for what shards cannot be together with."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name}: it came with a shard of a sequence, expected None.")


def gather(x: torch.Tensor, group) -> torch.Tensor:
    """x of every process, `[P, *x.shape]`."""
    return AllGather.apply(x[None], group)


def sharded_local_attention(
    q, k, v, fq, fk, decays, balance, form, *, group=None, key_mask=None, starts=None, cu_seqlens=None
):
    """`local_attention` of the tokens of this process's shard; shapes as there, T of the shard.

    ValueError: a shard that is no whole number of blocks, starts or cu_seqlens.
    """
    refuse_layout(starts=starts, cu_seqlens=cu_seqlens)
    count, back = whole_blocks(q.shape[1], form.block_size), form.lag - 1
    rank, device = dist.get_rank(group), q.device
    valid = q.new_ones(q.shape[:2], dtype=torch.bool) if key_mask is None else key_mask
    sink = None
    if form.sinks:
        sink = [gather(x[:, : form.sinks], group)[0] for x in (k, v, valid.to(torch.uint8))]
        sink = [*sink[:2], sink[2].bool()]
    if edge := back * form.block_size:
        halo = (FromLeft.apply(x[:, -edge:], group) for x in (k, v, fk, valid.to(torch.uint8)))
        k, v, fk, valid = (torch.cat([left.to(x.dtype), x], 1) for left, x in zip(halo, (k, v, fk, valid), strict=True))
        q, fq = (torch.cat([torch.zeros_like(x[:, :edge]), x], 1) for x in (q, fq))
    first = rank * count
    place = torch.arange(first - back, first + count, device=device)[None]
    opened = torch.full((len(q),), first, device=device)
    _, summaries = block_summaries(fk, v, valid, place, form)
    exact = decays.to(summaries.dtype)
    own = advance(None, summaries, exact, form.lag, place, None, opened + count)  # as the next process takes it on
    passed = (
        torch.arange(rank, device=device).flip(0) * count
    )  # blocks between the end of each earlier shard and this one
    decay = torch.exp(exact.log_rate * passed[:, None, None])[:, None, ..., None, None]
    carried = (gather(own, group)[:rank] * decay).sum(0)
    o, _ = attend_local(q, k, v, fq, fk, valid, decays, balance, form, place, sink=sink, carried=carried, opened=opened)
    return o[:, edge:]


def sharded_causal_mhla(
    q, k, v, mixing, *, block_size: int, group=None, normalize=True, q_den=None, k_den=None, starts=None, cu_seqlens=None,
    unrounded=False, impl="auto",
):  # fmt: skip
    """`mhla(..., causal=True)` of the tokens of this process's shard; mixing: of all blocks of all shards.

    ValueError: a shard that is no whole number of blocks, starts or cu_seqlens.
    """
    refuse_layout(starts=starts, cu_seqlens=cu_seqlens)
    count, rank = whole_blocks(q.shape[1], block_size), dist.get_rank(group)
    options = {"count": count, "rank": rank, "group": group, "impl": impl, "block_size": block_size}
    o = weigh_and_sum(q, k, v, mixing, **options)
    if normalize:
        ones = torch.ones_like(v[..., :1])
        k_den = k if k_den is None else k_den
        o = divide_or_zero(o, weigh_and_sum(q if q_den is None else q_den, k_den, ones, mixing, **options)[..., 0])
    return o if unrounded else o.to(v.dtype)


def weigh_and_sum(q, k, v, mixing, *, count, rank, group, impl, block_size):
    """The sum of weight times v over this and all earlier shards, [B, T, H, V] in fp32 at least."""
    first, end = rank * count, (rank + 1) * count
    blocks = Blocks.sequence(q.shape[1], block_size)
    own = mixing[..., first:end, first:end]
    o = mhla(q, k, v, own, blocks=blocks, causal=True, normalize=False, unrounded=True, impl=impl)
    (heads,) = Heads.groups(q, o.dtype, one_by_one=False)
    cut = BlockCut(blocks, q.device)
    with torch.autocast(q.device.type, enabled=False):
        summary = cut.split(heads.take(k)).mT @ cut.split(heads.take(v))  # [R, M, K, V]
        earlier = gather(summary, group)[:rank].transpose(0, 1).flatten(1, 2)
        m = heads.take_mixing(mixing, q.shape[3] ** -0.5)[:, first:end, :first]
        far = cut.merge(cut.split(heads.take(q)) @ mix_blocks(m, earlier))
    return o + far.unflatten(0, (len(q), -1)).transpose(1, 2)
