"""Causal attention on a row of tokens that is spread over several processes (sequence parallelism).

A row is one sequence or several packed ones, each with its own blocks, and is cut between blocks. With decays, what the
processes exchange does not grow with the length of the row: R running sums of every process and, with a local softmax, one
block of keys and values of the left neighbor and the sinks of every process. With a mixing matrix it is the summaries of
all blocks, since the matrix may mix any of them.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F

from .api import mhla
from .blocks import Blocks
from .decays import Decays, LocalForm
from .exchange import AllGather, FromLeft
from .local import LocalInputs, PastSums, advance, attend_local, block_summaries, find_sinks
from .reference import divide_or_zero
from .torch_forward import mix_blocks
from .torch_layout import BlockCut, Heads, MoveTokens, mixing_of_sequences
from .torch_local import SinkTokens


class RowShards:
    """Divides a row of packed sequences among P processes, at block boundaries.

    The tokens are first divided equally. Each process then starts at the first block that begins in its part. The row has M
    blocks in all. All tensors are on the CPU.

    Args:
        cu_seqlens: Int [N + 1], the borders of the sequences of the row.
        block_size: Tokens per block, C.
        num_ranks: Number of processes, P.

    Attributes:
        num_sequences: Number of sequences, N.
        first_token: int64 [M + 1], the first token of each block, and the end of the row.
        block_index: int64 [M], the index of each block in its sequence.
        sequence_id: int64 [M], the sequence of each block.
        block_borders: int64 [P + 1], the first block of each process, and the end.
        token_borders: int64 [P + 1], the first token of each process, and the end.

    Raises:
        ValueError: The row has fewer than P * C tokens.
    """

    def __init__(self, cu_seqlens: torch.Tensor, block_size: int, num_ranks: int):
        borders = cu_seqlens.long().cpu()
        num_tokens = int(borders[-1])
        self.block_size = block_size
        self.num_sequences = len(borders) - 1
        if num_tokens < num_ranks * block_size:
            expected = f"at least {num_ranks * block_size}, a block of {block_size} for each of {num_ranks} processes"
            raise ValueError(f"input_ids: got {num_tokens} tokens, expected {expected}.")
        num_blocks = (borders.diff() + block_size - 1) // block_size  # of each sequence
        self.sequence_id = torch.arange(len(num_blocks)).repeat_interleave(num_blocks)
        first_block = num_blocks.cumsum(0) - num_blocks
        self.block_index = torch.arange(len(self.sequence_id)) - first_block[self.sequence_id]
        self.first_token = torch.cat([borders[self.sequence_id] + self.block_index * block_size, borders[-1:]])
        equal_parts = (torch.arange(num_ranks + 1) * num_tokens + num_ranks - 1) // num_ranks
        self.block_borders = torch.searchsorted(self.first_token, equal_parts)
        self.token_borders = self.first_token[self.block_borders]

    def slots(self, first: torch.Tensor | int, end: torch.Tensor | int) -> tuple[torch.Tensor, torch.Tensor]:
        """Lay out the tokens of blocks `first` to `end` (exclusive), C slots per block.

        Returns:
            token: int64 [(end - first) * C], index in the row of the token in each slot.
            exists: bool [(end - first) * C], False for slots beyond the last token of a block.
        """
        token = self.first_token[first:end, None] + torch.arange(self.block_size)
        return token.flatten(), (token < self.first_token[first + 1 : end + 1, None]).flatten()

    def mover(self, rank: int, device: torch.device) -> "BlockMover":
        """Return the `BlockMover` that aligns the tokens of process `rank` to blocks."""
        token, exists = self.slots(self.block_borders[rank], self.block_borders[rank + 1])
        if exists.all():
            return BlockMover(None, None)
        source = torch.where(exists, token - self.token_borders[rank], -1)[None].to(device)
        return BlockMover(source, exists.nonzero().T.to(device))


class BlockMover:
    """Moves T tokens to M blocks of C slots, so that each block begins at a multiple of C, and back.

    Args:
        source, inverse: int64 [1, M * C] and [1, T], see `MoveTokens`; None if the tokens need not move.
    """

    def __init__(self, source: torch.Tensor | None, inverse: torch.Tensor | None):
        self.source = source
        self.inverse = inverse

    def align(self, x: torch.Tensor) -> torch.Tensor:
        """Move tokens to block edges: [B, T, ..] -> [B, M * C, ..]."""
        return x if self.source is None else MoveTokens.apply(x, self.source, self.inverse)

    def take_back(self, o: torch.Tensor) -> torch.Tensor:
        """Undo `align`: [B, M * C, ..] -> [B, T, ..]."""
        return o if self.source is None else MoveTokens.apply(o, self.inverse, self.source)


def shards_of(
    cu_seqlens: torch.Tensor | None, block_size: int, group: "dist.ProcessGroup | None"
) -> tuple[RowShards, int]:
    """Return the `RowShards` of the row with these sequence borders, and the rank of this process in `group`.

    Raises:
        ValueError: If `cu_seqlens` is None.
    """
    if cu_seqlens is None:
        raise ValueError("cu_seqlens: got None with a shard of a row, expected the borders of the row's sequences.")
    return RowShards(cu_seqlens, block_size, dist.get_world_size(group)), dist.get_rank(group)


def check_no_padding(**padding: torch.Tensor | None) -> None:
    """Raise ValueError unless these arguments, which shards do not support, are all None."""
    for name, value in padding.items():
        if value is not None:
            raise ValueError(f"{name}: got a tensor with a shard of a sequence, expected None.")


def gather_shards(x: torch.Tensor, group: "dist.ProcessGroup | None") -> torch.Tensor:
    """Gather x, of the same shape everywhere, from all P processes: [P, *x.shape]; differentiable.

    This is a collective: every process of `group` must call it.
    """
    return AllGather.apply(x[None], group)


def gather_parts(x: torch.Tensor, borders: torch.Tensor, axis: int, group: "dist.ProcessGroup | None") -> torch.Tensor:
    """Gather x from all processes, concatenated along `axis`; differentiable.

    This is a collective: every process of `group` must call it.

    Args:
        x: The part of this process.
        borders: int64 [P + 1] on the CPU; process p has the elements from `borders[p]` to `borders[p + 1]` along `axis`.
        axis: The axis that is divided among the processes.
        group: The processes.
    """
    lengths = borders.diff().tolist()
    padded = F.pad(x, (*[0, 0] * (x.dim() - axis - 1), 0, max(lengths) - x.shape[axis]))
    parts = zip(gather_shards(padded, group), lengths, strict=True)
    return torch.cat([part.narrow(axis, 0, length) for part, length in parts], axis)


def sharded_local_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_features: torch.Tensor,
    k_features: torch.Tensor,
    decays: Decays,
    balance: torch.Tensor | None,
    form: LocalForm,
    *,
    group: "dist.ProcessGroup | None" = None,
    key_mask: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `local_attention` for the tokens of this process's shard.

    This is a collective: every process of `group` must call it. See `local_attention` for the other arguments, which
    contain the tokens of this shard only.

    Args:
        cu_seqlens: Int [N + 1], the borders of the sequences of the whole row; required.
        group: The processes; None is the default group.
        key_mask, starts: Must be None.

    Returns:
        [B, T, H, V] for the T tokens of the shard, as in `local_attention`.

    Raises:
        ValueError: If key_mask or starts is given, cu_seqlens is missing, a shard is shorter than the part of the window
            that the next one reads, or the row is too short (see `RowShards`).
    """
    check_no_padding(key_mask=key_mask, starts=starts)
    shards, rank = shards_of(cu_seqlens, form.block_size, group)
    blocks_back = form.lag - 1  # of the left neighbor, which the window reads
    shortest = min(shards.block_borders.diff()[:-1].tolist(), default=form.lag)
    if shortest < blocks_back:
        got = f"a process with {shortest} blocks of {form.block_size} tokens"
        expected = f"at least {blocks_back} in all but the last, for a window of {form.lag}"
        raise ValueError(f"cu_seqlens: got {got}, expected {expected}.")
    first = int(shards.block_borders[rank])
    end = int(shards.block_borders[rank + 1])
    mover = shards.mover(rank, q.device)
    q, k, v, q_features, k_features = (mover.align(x) for x in (q, k, v, q_features, k_features))
    tokens_back = blocks_back * form.block_size
    if tokens_back:
        k, v, k_features = (torch.cat([FromLeft.apply(x[:, -tokens_back:], group), x], 1) for x in (k, v, k_features))
        q, q_features = (torch.cat([torch.zeros_like(x[:, :tokens_back]), x], 1) for x in (q, q_features))
    exists = shards.slots(max(first - blocks_back, 0), end)[1]
    valid = F.pad(exists, (q.shape[1] - len(exists), 0)).expand(len(q), -1).to(q.device)
    block_index, sequence_id = (
        F.pad(x, (blocks_back, 0), value=-1)[first : end + blocks_back].to(q.device)
        for x in (shards.block_index, shards.sequence_id)
    )
    summaries = block_summaries(k_features, v, valid, block_index[None], form)
    past = carry_sums(summaries, decays, form.lag, shards, rank, block_index, sequence_id, group)
    sink_tokens = None
    if form.sinks:
        sink_tokens = shared_sinks(k, v, valid, form, shards, rank, sequence_id, group)
    inputs = LocalInputs(
        q, k, v, q_features, k_features, valid, decays, balance, form, block_index[None], sequence_id, sink_tokens, past
    )
    if shards.num_sequences == 1:  # a single sequence, which is then computed in segments if no gradient is needed
        inputs.sequence_id = None
        if sink_tokens is not None:
            inputs.sink_tokens = SinkTokens(*(x[:, -1] for x in sink_tokens))
    o, _ = attend_local(inputs)
    return mover.take_back(o[:, tokens_back:])


def carry_sums(
    summaries: torch.Tensor,
    decays: Decays,
    lag: int,
    shards: RowShards,
    rank: int,
    block_index: torch.Tensor,
    sequence_id: torch.Tensor,
    group: "dist.ProcessGroup | None",
) -> PastSums:
    """Compute the running sums at the start of this process's shard from the shards before it.

    This is a collective: every process of `group` must call it.

    Args:
        summaries: [B, G, M, K, V + 1], the summaries of M blocks: first the blocks of the left neighbor that the window
            reads, then the blocks of this shard.
        decays, lag: As in `advance`.
        shards, rank: The shards of the row, and the rank of this process.
        block_index, sequence_id: int64 [M], of the same blocks.
        group: The processes.

    Returns:
        The running sums of the shard's first block, over earlier blocks of its sequence.
    """
    decays = decays.to(summaries.dtype)
    first = shards.block_borders[rank]
    next_block = block_index[-1] + 1  # what the next shard begins with, if it continues the last sequence of this one
    entering = torch.where(sequence_id == sequence_id[-1], block_index, next_block)[None]  # other sequences never enter
    local_sums = advance(None, summaries, decays, lag, entering, next_block.expand(len(summaries)))
    first_index = shards.block_index[first]
    last_blocks = shards.block_borders[1 : rank + 1] - 1  # of every earlier shard
    elapsed = (first_index - shards.block_index[last_blocks] - 1).clamp(min=0)  # blocks between that shard and this one
    decay = torch.exp(decays.log_rate * elapsed.to(entering.device)[:, None, None])
    same_sequence = (shards.sequence_id[last_blocks] == shards.sequence_id[first]).to(entering.device)
    decay = torch.where(same_sequence[:, None, None], decay, 0)[:, None, ..., None, None]
    sums = (gather_shards(local_sums, group)[:rank] * decay).sum(0)
    return PastSums(sums, first_index.to(entering.device).expand(len(local_sums)))


def shared_sinks(
    k: torch.Tensor,
    v: torch.Tensor,
    valid: torch.Tensor,
    form: LocalForm,
    shards: RowShards,
    rank: int,
    sequence_id: torch.Tensor,
    group: "dist.ProcessGroup | None",
) -> SinkTokens:
    """Return the sink tokens (the first tokens of a sequence) that each block of this shard attends to.

    If the first sequence of the shard began in an earlier shard, its sinks come from the process of that shard. This is a
    collective: every process of `group` must call it.

    Args:
        k, v, valid, form, sequence_id: As in `find_sinks`, for the M blocks of `carry_sums`.
        shards, rank, group: As in `carry_sums`.

    Returns:
        The sinks of the sequence of each block, [B, M, S, G, ..].
    """
    first = shards.block_borders[rank]
    first_of_sequence = first - shards.block_index[first]
    begin_rank = int(torch.searchsorted(shards.block_borders, first_of_sequence, right=True)) - 1
    continues = (sequence_id == shards.sequence_id[first].to(k.device))[:, None, None, None] & (begin_rank < rank)
    sinks = []
    for local_sinks in find_sinks(k, v, valid, form, sequence_id)[:2]:
        received = gather_shards(local_sinks[:, -1], group)[begin_rank]  # of the last sequence there
        sinks.append(torch.where(continues, received[:, None], local_sinks))
    # Only blocks with a complete window before them read sinks, so all sinks of their sequence exist.
    return SinkTokens(sinks[0], sinks[1], torch.ones_like(sinks[0][..., 0, 0], dtype=torch.bool))


def sharded_causal_mhla(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mixing: Callable[[int], torch.Tensor], *, block_size: int,
    group: "dist.ProcessGroup | None" = None, normalize: bool = True, q_den: torch.Tensor | None = None,
    k_den: torch.Tensor | None = None, starts: torch.Tensor | None = None, cu_seqlens: torch.Tensor | None = None,
    unrounded: bool = False, impl: str = "auto",
) -> torch.Tensor:  # fmt: skip
    """Compute `mhla(..., causal=True)` for the tokens of this process's shard.

    This is a collective: every process of `group` must call it. See `mhla` for the other arguments, which contain the tokens
    of this shard only.

    Args:
        mixing: Function from a number of blocks n to a mixing matrix [n, n] or [H, n, n]. It is called with the number of
            blocks of the longest sequence.
        block_size: Tokens per block.
        group: The processes; None is the default group.
        starts: Must be None.
        cu_seqlens: Int [N + 1], the borders of the sequences of the whole row; required.

    Returns:
        [B, T, H, V] for the T tokens of the shard, as in `mhla`.

    Raises:
        ValueError: If starts is given, cu_seqlens is missing, or the row is too short (see `RowShards`).
    """
    check_no_padding(starts=starts)
    shards, rank = shards_of(cu_seqlens, block_size, group)
    mover = shards.mover(rank, q.device)
    q, k, v = (mover.align(x) for x in (q, k, v))
    block_index = shards.block_index.to(q.device)
    sequence_id = shards.sequence_id.to(q.device)
    matrix = mixing_of_sequences(mixing(int(shards.block_index.max()) + 1), block_index, sequence_id)
    o = sharded_sum(q, k, v, matrix, shards=shards, rank=rank, group=group, impl=impl)
    if normalize:
        ones = torch.ones_like(v[..., :1])
        q_den = q if q_den is None else mover.align(q_den)
        k_den = k if k_den is None else mover.align(k_den)
        den = sharded_sum(q_den, k_den, ones, matrix, shards=shards, rank=rank, group=group, impl=impl)
        o = divide_or_zero(o, den[..., 0])
    return mover.take_back(o if unrounded else o.to(v.dtype))


def sharded_sum(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mixing: torch.Tensor,
    *,
    shards: RowShards,
    rank: int,
    group: "dist.ProcessGroup | None",
    impl: str,
) -> torch.Tensor:
    """Compute the sum of weight * v over all keys of the row up to each query of this shard.

    This is a collective: every process of `group` must call it.

    Args:
        q: [B, M * C, H, K], queries of the M blocks of this shard, aligned by `BlockMover`.
        k: [B, M * C, G, K], keys.
        v: [B, M * C, G, V], values.
        mixing: [M', M'] or [H, M', M'], for all M' blocks of the row.
        shards, rank: The shards of the row, and the rank of this process.
        group: The processes.
        impl: As in `mhla`.

    Returns:
        [B, M * C, H, V] in fp32 or fp64.
    """
    first, end = shards.block_borders[rank : rank + 2].tolist()
    blocks = Blocks.sequence(q.shape[1], shards.block_size)
    local_mixing = mixing[..., first:end, first:end]
    o = mhla(q, k, v, local_mixing, blocks=blocks, causal=True, normalize=False, unrounded=True, impl=impl)
    assert isinstance(o, torch.Tensor)  # no state was asked for
    (heads,) = Heads.groups(q, o.dtype, one_by_one=False)
    cut = BlockCut(blocks, q.device)
    with torch.autocast(q.device.type, enabled=False):
        summary = cut.split(heads.take(k)).mT @ cut.split(heads.take(v))  # [R, M, K, V]
        earlier = gather_parts(summary, shards.block_borders, 1, group)[:, :first]
        m = heads.take_mixing(mixing, q.shape[3] ** -0.5)[:, first:end, :first]
        far = cut.merge(cut.split(heads.take(q)) @ mix_blocks(m, earlier))
    return o + far.unflatten(0, (len(q), -1)).transpose(1, 2)
