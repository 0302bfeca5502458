"""Causal attention with a near and a far part under one normalizer: softmax over a window, MHLA by decays before it.

Let i = t // block_size be the block of token t. Its near keys are those of block i, of the `window - 1` blocks before it,
and of the first `sinks` tokens of the sequence. All other earlier tokens are far. Their weights are brought to the scale of
softmax weights by e^balance, a learned factor per head:

    o_t = (sum_near e^z_ts v_s + e^balance sum_far m[i, j] <fq_t, fk_s> v_s) / (the same with 1 for v_s)

with scores z_ts = scale * <q_t, k_s> and features fq and fk of queries and keys. The near part is a fused softmax, whose
logsumexp merges it with the far part (`NearAndFar`).

Without a balance the near part is linear, too: its weights are m[i, i] * scale * <q_t, k_s>, with features as q and k. This
is MHLA by decays and nothing else.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..reference import divide_or_zero
from ..torch_layout import DifferentiableOnce, align_blocks, by_block, by_token, resize_tokens
from .decays import Decays, block_distances, decayed_sums, powers
from .fused_softmax import make_mask, no_key, softmax_backward, softmax_forward
from .inputs import WindowedInputs, WindowedOptions

PIECE_TOKENS = 2048  # tokens whose windows are gathered at a time, which bounds the memory that the gather takes


class SinkTokens(NamedTuple):
    """S sinks: of each row, k and v [B, S, G, ..] and which are keys, bool [B, S]; of each packed block, [B, M, S, ..]."""

    k: Tensor
    v: Tensor
    valid: Tensor


class PastSums(NamedTuple):
    """Running sums [B, G, R, K, V + 1] that the queries of one block per row read; `block`, int [B], is that block.

    For each rate lambda this is the sum over blocks j <= block - window of lambda^(block - j) S_j (`block_summaries`)."""

    sums: Tensor
    block: Tensor


@dataclass
class BlockRun:
    """M consecutive blocks of C tokens; the first token is at a block edge.

    Args:
        inputs: The T tokens, T at most M * C. If q_features has fewer, it has the last ones; nothing is far from the others.
        k_features: [B, T, G, K], keys of the far part. If it has fewer tokens, they are the first ones; the others are far
            from no query.
        block_index: Int [B or 1, M], the index of each block in its sequence.
        valid: bool [B, T], the tokens that are keys; None if all are, and the run is one sequence per row from its start.
        sequence_id: Int [M], the sequence of each block if several are packed, else None.
        sink_tokens: Sinks from a state; None to take the first tokens of each sequence.
        past: Running sums from a state; None if no tokens came before.
        first_query_block: Index, among the M blocks, of the first one with queries; outputs of earlier blocks are 0.
    """

    inputs: WindowedInputs
    k_features: Tensor
    block_index: Tensor
    valid: Tensor | None = None
    sequence_id: Tensor | None = None
    sink_tokens: SinkTokens | None = None
    past: PastSums | None = None
    first_query_block: int = 0


def far_range(num_tokens: int, options: WindowedOptions) -> tuple[int, int]:
    """Return the first query of a sequence that can have far keys, and the end of the keys that are far from some query."""
    num_blocks = (num_tokens + options.block_size - 1) // options.block_size
    first_query = min(options.window * options.block_size, num_tokens)
    return first_query, max(num_blocks - options.window, 0) * options.block_size


def windowed_attention(inputs: WindowedInputs, k_features: Tensor) -> Tensor:
    """Attend to near tokens by softmax and to far tokens by MHLA; the top of this file has the formula.

    Args:
        inputs: The inputs. Without key_mask, starts, and cu_seqlens, q_features may begin at the first token of `far_range`.
        k_features: [B, T, G, K], keys of the far part; q_features that begin later may go with keys that end earlier.

    Returns:
        [B, T, H, V] in v's dtype or, with `options.unrounded`, in at least fp32.

    Raises:
        ValueError: If both `starts` and `cu_seqlens` are given.
    """
    q, k, v, q_features, _, _, options, *padding = inputs
    aligned = align_blocks(q, options.block_size, *padding)
    q, k, v, q_features, k_features = aligned.move(q, k, v, q_features, k_features)
    inputs = inputs._replace(q=q, k=k, v=v, q_features=q_features)
    o, _ = attend_run(BlockRun(inputs, k_features, aligned.block[None], aligned.valid, aligned.sequence_id))
    return aligned.take_back(o)


def two_way_attention(inputs: WindowedInputs, k_features: Tensor) -> Tensor:
    """Attend to near tokens by softmax and to far tokens by MHLA, to later tokens as to earlier ones.

    In the formula, |i - j| takes the place of i - j. The summaries of all blocks are mixed by one matrix per KV head and
    decay, at a cost that grows with the square of the number of blocks.

    Args:
        inputs: The inputs, without starts and cu_seqlens. The options have `both_ways` and no sinks.
        k_features: [B, T, G, K], keys of the far part.

    Returns:
        [B, T, H, V], as `windowed_attention` does.
    """
    q, options = inputs.q, inputs.options
    num_blocks = (q.shape[1] + options.block_size - 1) // options.block_size
    valid = q.new_ones(q.shape[:2], dtype=torch.bool) if inputs.key_mask is None else inputs.key_mask
    run = with_valid(BlockRun(inputs, k_features, torch.arange(num_blocks, device=q.device)[None], valid))
    summaries = block_summaries(run)
    decays = inputs.decays.to(summaries.dtype)
    distance = block_distances(num_blocks, summaries).abs()
    mixing = powers(decays.log_rate, distance).masked_fill(distance < options.window, 0).transpose(1, 2)  # [G, M, R, M]
    far_sums = mixing.flatten(1, 2) @ summaries.flatten(3)
    return attend_near_and_far(run, far_sums.view(*summaries.shape[:3], -1, *summaries.shape[3:]), decays)


def attend_run(run: BlockRun, end_block: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Compute the outputs [B, T, H, V] of a run and, if `end_block` int [B] is given, the sums that its queries read.

    The sums are those of `PastSums` at a block of each row.
    """
    options, block_index, past = run.inputs.options, run.block_index, run.past
    run = with_valid(run)
    summaries = block_summaries(run)
    decays = run.inputs.decays.to(summaries.dtype)
    far_sums = decayed_sums(summaries.flatten(3), decays.log_rate, options.window, run.sequence_id)
    far_sums = far_sums.unflatten(4, summaries.shape[3:])  # [B, G, M, R, K, V + 1]
    if past is not None:
        # Blocks before `past.block` were complete then and hold no new token, so what they read does not matter.
        elapsed = (block_index - past.block[:, None]).clamp(min=0)[:, None, :, None]
        far_sums = far_sums + torch.exp(decays.log_rate[:, None] * elapsed)[..., None, None] * past.sums[:, :, None]
    o = attend_near_and_far(run, far_sums, decays)
    return o, None if end_block is None else advance(run, summaries, decays, end_block)


def with_valid(run: BlockRun) -> BlockRun:
    """Return a run whose `valid`, if it needs one, is bool [B, M * C].

    torch.compile needs one for the sake of a single graph. So does a run within one window that has query features: these
    shall get gradients (of zero), as those of other processes do.
    """
    (valid, q, q_features), options = (run.valid, run.inputs.q, run.inputs.q_features), run.inputs.options
    num_blocks = run.block_index.shape[1]
    needs_none = num_blocks > options.window or not q_features.shape[1]
    if valid is None and not torch.compiler.is_compiling() and needs_none:
        return run
    valid = q.new_ones(q.shape[:2], dtype=torch.bool) if valid is None else valid
    length = num_blocks * options.block_size
    exists = torch.arange(length, device=q.device) < q.shape[1]
    return replace(run, valid=resize_tokens(valid, length) & exists)


class NearPiece(NamedTuple):
    """Softmax over window and sinks of the blocks from `begin` to `end`, with what its backward pass needs.

    See `NearAndFar` for the tensors.
    """

    begin: int
    end: int
    tensors: tuple[Tensor, ...]
    mask: Tensor
    near: Tensor
    lse: Tensor


def near_pieces(run: BlockRun) -> Iterator[NearPiece]:
    """Compute softmax over window and sinks for all blocks of a run with queries, some blocks at a time."""
    q, k, v, options = *run.inputs[:3], run.inputs.options
    size, window, num_blocks = options.block_size, options.window, run.block_index.shape[1]
    sinks = run.sink_tokens or find_sinks(run)
    q, k, v = (resize_tokens(x, num_blocks * size) for x in (q, k, v))
    if run.valid is not None:
        k, v = (torch.where(run.valid[..., None, None], x, 0) for x in (k, v))
    mask = None
    for begin, end in piece_borders(run):
        if mask is None or run.valid is not None or begin <= window:
            mask = window_mask(run, sinks.valid, begin, end)
        queries = by_block(q[:, begin * size : end * size], k.shape[2], size)
        keys, values = (take_window(x, options, begin, end) for x in (k, v))
        sink_k, sink_v = (sinks_of_blocks(x, begin, end) for x in (sinks.k, sinks.v))
        tensors = queries, keys, values, sink_k, sink_v
        with torch.no_grad():
            window_k, window_v = gather_windows(keys, sink_k, size, mask), gather_windows(values, sink_v, size, mask)
            near, lse = softmax_forward(queries, window_k, window_v, mask, options.scale)
        yield NearPiece(begin, end, tensors, mask, near, lse)


def piece_borders(run: BlockRun) -> Iterator[tuple[int, int]]:
    """Return the first block and the end of each piece of a run, in which the queries' windows are gathered at a time.

    Under torch.compile there is one piece, so that one graph serves all lengths.
    """
    options, num_blocks, first = run.inputs.options, run.block_index.shape[1], run.first_query_block
    if torch.compiler.is_compiling():
        return iter([(0, num_blocks)])
    if run.valid is None and run.inputs.balance is not None:
        first = min(options.window, num_blocks)
    borders = [*range(first, num_blocks, max(PIECE_TOKENS // options.block_size, 1)), num_blocks]
    return itertools.pairwise(borders)


def attend_near_and_far(run: BlockRun, far_sums: Tensor, decays: Decays) -> Tensor:
    """Return the outputs [B, T, H, V] of a `BlockRun`: softmax over the window, merged with the far part.

    `far_sums` [B, G, M, R, K, V + 1] are the sums of earlier blocks that each block reads.
    """
    q, k, v, q_features, _, balance, options, *_ = run.inputs
    size, window, num_blocks = options.block_size, options.window, run.block_index.shape[1]
    num_tokens, length, dtype = q.shape[1], num_blocks * size, v.dtype
    if decays.power is not None and q_features.shape[1]:
        scale = decays.length_scale(run.block_index, window).repeat_interleave(size, 1)  # [B or 1, M * C, H]
        scale = resize_tokens(scale, num_tokens)[:, num_tokens - q_features.shape[1] :]
        q_features = q_features * scale[..., None].to(q_features.dtype)
    first_far = (num_tokens - q_features.shape[1]) // size  # the block at which q_features begins
    q_features = resize_tokens(q_features, length - first_far * size)

    def far_of(begin: int, end: int) -> Tensor:
        features = q_features[:, (begin - first_far) * size : (end - first_far) * size]
        return read_far(by_block(features, k.shape[2], size), far_sums[:, :, begin:end], decays.weight)

    outputs, first = [], run.first_query_block
    if first:
        outputs.append(far_sums.new_zeros(len(q), first * size, q.shape[2], v.shape[-1]))
    if balance is None:
        q, k, v = (resize_tokens(x, length) for x in (q, k, v))
        if run.valid is not None:
            k, v = (torch.where(run.valid[..., None, None], x, 0) for x in (k, v))
        for begin, end in piece_borders(run):
            part = slice(begin * size, end * size)
            queries, keys, values = (by_block(x[:, part], k.shape[2], size) for x in (q, k, v))
            o = linear_attention(queries, keys, values, far_of(begin, end), decays.weight, options)
            outputs.append(by_token(o if options.unrounded else o.to(dtype), len(q), size))
        return resize_tokens(torch.cat(outputs, 1), num_tokens)
    if run.valid is None:
        # Nothing is far from the first `window` blocks: they are causal softmax.
        first = min(window, num_blocks)
        near_q, near_k, near_v = (resize_tokens(x, length)[:, : first * size].transpose(1, 2) for x in (q, k, v))
        o = F.scaled_dot_product_attention(near_q, near_k, near_v, is_causal=True, scale=options.scale, enable_gqa=True)
        outputs.append(o.transpose(1, 2))
    for piece in near_pieces(run):
        far = far_of(piece.begin, piece.end)
        shift = balance.to(far.dtype).view(k.shape[2], -1, 1).expand(-1, -1, size).flatten(1)  # [G, (H / G) * C]
        known = piece.near, piece.lse, piece.mask
        o = NearAndFar.apply(*piece.tensors, far, shift, *known, size, options.scale)
        outputs.append(by_token(o if options.unrounded else o.to(dtype), len(q), size))
    return resize_tokens(torch.cat(outputs, 1), num_tokens)


class NearAndFar(torch.autograd.Function):
    """Merges softmax over near keys with the far part, far = (numerator, denominator), under one normalizer.

    With o_near and lse of the near part:

        total = log(e^lse + e^balance den),   o = e^(lse - total) o_near + e^(balance - total) num

    The gradients of q, k, and v are those of the fused kernel, given o and total (`fused_softmax.py`).
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink_k: Tensor,
        sink_v: Tensor,
        far: Tensor,
        balance: Tensor,
        near: Tensor,
        lse: Tensor,
        mask: Tensor,
        size: int,
        scale: float,
    ) -> Tensor:
        """Compute o [B * m, G, N, V] in far's dtype, for the N = (H / G) * C queries of each of m blocks.

        q is [B * m, G, N, D], far [B * m, G, N, V + 1], balance [G, N]; k and v are from `take_window`, sink_k and sink_v
        from `sinks_of_blocks`, the mask is from `window_mask`; near and lse are their softmax.
        """
        o, total = merge_near_and_far(near, lse.to(far.dtype), far, balance, mask.dtype)
        ctx.save_for_backward(q, k, v, sink_k, sink_v, far, balance, mask, o, total)
        ctx.size, ctx.scale = size, scale
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sink_k, sink_v, far, balance, mask, o, total = ctx.saved_tensors
        size, scale = ctx.size, ctx.scale
        with torch.no_grad():
            do_seen = do.masked_fill(no_key(total, mask.dtype)[..., None], 0)
            factor = far_factor(far, balance, total)
            d_far = torch.cat([factor * do_seen, -factor * (do_seen * o).sum(-1, keepdim=True)], -1)
            d_balance = (far * d_far).sum((0, -1))
            grads: list[Tensor | None] = [*[None] * 5, d_far, d_balance]
            if any(ctx.needs_input_grad[:5]):
                window = gather_windows(k, sink_k, size, mask), gather_windows(v, sink_v, size, mask)
                dq, dk, dv = softmax_backward(do_seen.to(q.dtype), q, *window, o.to(q.dtype), total, mask, scale)
                dk, d_sink_k = scatter_windows(dk, k, sink_k, size)
                dv, d_sink_v = scatter_windows(dv, v, sink_v, size)
                grads[:5] = [dq, dk, dv, d_sink_k, d_sink_v]
        if torch.is_grad_enabled():  # create_graph=True: without this, the gradients would pass for constants
            inputs = (do, q, k, v, sink_k, sink_v, far, balance)
            grads = [None if x is None else DifferentiableOnce.apply(x, *inputs) for x in grads]
        return *grads, *[None] * 5


def merge_near_and_far(
    near: Tensor, lse: Tensor, far: Tensor, balance: Tensor, mask_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Merge softmax over near keys [.., N, V], with its logsumexp [.., N], with the far part; see `NearAndFar`.

    Returns the output and the logsumexp of both.
    """
    total = torch.logaddexp(lse, far[..., -1].log() + balance)
    o = torch.exp(lse - total).masked_fill(no_key(lse, mask_dtype), 0)[..., None] * near
    return o + far_factor(far, balance, total) * far[..., :-1], total


def far_factor(far: Tensor, balance: Tensor, total: Tensor) -> Tensor:
    """Return e^(balance - total), with which the far part enters an output, [.., N, 1]; 0 where nothing is far."""
    return torch.exp(balance - total).masked_fill(far[..., -1] == 0, 0)[..., None]


def take_window(x: Tensor, options: WindowedOptions, begin: int, end: int) -> Tensor:
    """Return the tokens that the queries of blocks `begin` to `end` see, [B, M * C, G, D] -> [B, G, tokens, D].

    Where the window reaches beyond the run, they are zeros.
    """
    first = (begin - options.window + 1) * options.block_size
    last = (end + (options.window - 1 if options.both_ways else 0)) * options.block_size
    inside = x[:, max(first, 0) : last].transpose(1, 2)
    before = max(-first, 0)
    after = last - max(first, 0) - inside.shape[2]
    return F.pad(inside, (0, 0, before, after)) if before or after else inside


def gather_windows(x: Tensor, sinks: Tensor, size: int, mask: Tensor) -> Tensor:
    """Copy the sinks and the window of each block: from `take_window` and `sinks_of_blocks` to [B * m, G, S + W * C, D]."""
    window = x.unfold(2, mask.shape[-1] - sinks.shape[3], size).permute(0, 2, 1, 4, 3)  # [B, m, G, W * C, D]
    return torch.cat([sinks.expand(-1, window.shape[1], -1, -1, -1), window], 3).flatten(0, 1)


def scatter_windows(grad: Tensor, x: Tensor, sinks: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and sinks, from that of what `gather_windows` made of them."""
    grad = grad.unflatten(0, (len(x), -1))
    num_blocks, sink_grad = grad.shape[1], grad[:, :, :, : sinks.shape[3]]
    if sinks.shape[1] == 1:
        sink_grad = sink_grad.sum(1, keepdim=True)
    blocks = grad[:, :, :, sinks.shape[3] :].unflatten(3, (-1, size))  # [B, m, G, W, C, D]
    out = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    out = out.unflatten(2, (-1, size))
    for distance in range(blocks.shape[3]):
        out[:, :, distance : distance + num_blocks] += blocks[:, :, :, distance].transpose(1, 2)
    return out.flatten(2, 3).to(x.dtype), sink_grad.to(sinks.dtype)


def sinks_of_blocks(x: Tensor, begin: int, end: int) -> Tensor:
    """Return the sinks of blocks `begin` to `end` [B, m or 1, G, S, D], from [B, S, G, D] or, if packed, [B, M, S, G, D]."""
    return (x[:, None] if x.dim() == 4 else x[:, begin:end]).transpose(2, 3)


def window_mask(run: BlockRun, sink_valid: Tensor, begin: int, end: int) -> Tensor:
    """Return what is added to the scores of blocks `begin` to `end`, [B * m or 1, 1, N or 1, S + W * C], for `NearAndFar`.

    Without `run.valid`, every block from the `window`-th on has a full window of keys and all sinks.
    """
    options, index, valid = run.inputs.options, run.block_index[:, begin:end], run.valid
    size, num_queries = options.block_size, run.inputs.q.shape[2] // run.inputs.k.shape[2] * options.block_size
    later = options.window - 1 if options.both_ways else 0
    place = torch.arange((options.window + later) * size, device=index.device) - (options.window - 1) * size
    query = torch.arange(num_queries, device=index.device)[:, None] % size
    seen = torch.ones_like(place, dtype=torch.bool)[None] if options.both_ways else place <= query  # [N or 1, W * C]
    seen = F.pad(seen, (sink_valid.shape[-1], 0), value=True)
    if valid is None and begin >= options.window:
        return make_mask(seen, run.inputs.q.dtype)[None, None]
    if valid is None:
        valid = sink_valid.new_ones(len(sink_valid), run.block_index.shape[1] * size)
    is_key = take_window(valid[..., None, None], options, begin, end)[:, 0, :, 0].unfold(1, len(place), size)
    is_key = is_key & (
        index[..., None] * size + place >= 0
    )  # a block near the start of its sequence has a shorter window
    is_sink = (sink_valid[:, None] if sink_valid.dim() == 2 else sink_valid[:, begin:end]) & (index >= options.window)[
        ..., None
    ]
    is_key = torch.cat([is_sink.expand(*is_key.shape[:2], -1), is_key], 2)
    return make_mask(is_key[:, :, None] & seen, run.inputs.q.dtype).flatten(0, 1)[:, None]


def linear_attention(q: Tensor, k: Tensor, v: Tensor, far: Tensor, weight: Tensor, options: WindowedOptions) -> Tensor:
    """Compute o [B * m, G, N, V] without a softmax, where the window is a query's own block. `weight` is [H, R]."""
    q, k, v = (x.to(far.dtype) for x in (q, k, with_ones(v)))
    size = options.block_size
    earlier = torch.ones(size, size, dtype=torch.bool, device=q.device).tril().repeat(q.shape[2] // size, 1)
    near_weight = weight.sum(1).view(q.shape[1], -1, 1).expand(-1, -1, size).flatten(1)[..., None]
    o = options.scale * (torch.where(earlier, q @ k.mT, 0) * near_weight @ v + far)
    return divide_or_zero(o[..., :-1], o[..., -1]) if options.normalize else o[..., :-1]


def read_far(q_features: Tensor, far_sums: Tensor, weight: Tensor) -> Tensor:
    """Apply features [B * m, G, N, K] to running sums [B, G, m, R, K, V + 1], and add up the rates R with weights [H, R].

    Returns [B * m, G, N, V + 1].
    """
    weight = weight.view(q_features.shape[1], -1, 1, weight.shape[1], 1)  # [G, H / G, 1, R, 1]
    # Multiplied by the weights, the features read all R sums in one product.
    features = q_features.to(far_sums.dtype).unflatten(2, (weight.shape[1], -1))[..., None, :] * weight
    return features.flatten(4).flatten(2, 3) @ far_sums.flatten(3, 4).transpose(1, 2).flatten(0, 1)


def advance(run: BlockRun, summaries: Tensor, decays: Decays, end_block: Tensor) -> Tensor:
    """Compute the running sums [B, G, R, K, V + 1] that the queries of block int [B] of each row read."""
    past, window, block_index = run.past, run.inputs.options.window, run.block_index
    log_rate = decays.log_rate.to(summaries.dtype)
    distance = end_block[:, None] - block_index
    weight = torch.exp(log_rate[None, ..., None] * distance.clamp(min=0)[:, None, None])
    enters = distance >= window
    if past is not None:
        enters = enters & (block_index > (past.block - window)[:, None])
    weight = torch.where(enters[:, None, None], weight, 0)  # [B, G, R, M]
    sums = (weight @ summaries.flatten(3)).unflatten(3, summaries.shape[3:])
    if past is None:
        return sums
    return sums + torch.exp(log_rate * (end_block - past.block)[:, None, None])[..., None, None] * past.sums


def block_summaries(run: BlockRun) -> Tensor:
    """Compute the summary of each block: the sum of k v^T over its keys, without sinks (paper eq. 4).

    [B, G, M, K, V + 1] in fp32, or in fp64 if an input is; the last column is the sum of k.
    """
    options, index, v, k_features = run.inputs.options, run.block_index, run.inputs.v, run.k_features
    size, num_blocks, dtype = options.block_size, index.shape[1], sum_dtype(run)
    count = num_blocks  # of blocks that k_features has
    if run.valid is None:
        count = (k_features.shape[1] + size - 1) // size
    position = index[:, :count, None] * size + torch.arange(size, device=index.device)
    is_far = (position >= options.sinks).flatten(1)
    k_features, v = (resize_tokens(x, count * size) for x in (k_features, v))
    if run.valid is not None:
        is_far = run.valid & is_far
        v = torch.where(run.valid[..., None, None], v, 0)
    k_features = torch.where(is_far[..., None, None], k_features, 0)
    k_features, v = (x.unflatten(1, (-1, size)).permute(0, 3, 1, 2, 4).to(dtype) for x in (k_features, with_ones(v)))
    return F.pad(k_features.mT @ v, (0, 0, 0, 0, 0, num_blocks - count))


def sum_dtype(run: BlockRun) -> torch.dtype:
    """Return the dtype of sums: fp32, or fp64 if an input is."""
    return torch.promote_types(torch.promote_types(run.k_features.dtype, run.inputs.v.dtype), torch.float32)


def find_sinks(run: BlockRun) -> SinkTokens:
    """Return the sinks: the first `options.sinks` tokens of each row or, for packed sequences, of each block's sequence."""
    options, k, v = run.inputs.options, run.inputs.k, run.inputs.v
    valid = k.new_ones(k.shape[:2], dtype=torch.bool) if run.valid is None else run.valid
    if run.sequence_id is None:
        return SinkTokens(*(resize_tokens(x, options.sinks) for x in (k, v, valid)))
    # The first token of each block's sequence.
    first = torch.searchsorted(run.sequence_id, run.sequence_id) * options.block_size
    token = (first[:, None] + torch.arange(options.sinks, device=k.device)).clamp(max=k.shape[1] - 1)
    return SinkTokens(k[:, token], v[:, token], valid[:, token])


def with_ones(v: Tensor) -> Tensor:
    """Append a column of ones to the values, [.., V] -> [.., V + 1], whose weighted sum is the sum of the weights."""
    return F.pad(v, (0, 1), value=1.0)
