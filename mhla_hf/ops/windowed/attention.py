"""Attention with a near and a far part under one normalizer: softmax over a window, MHLA by decays before it.

The near keys of a token t in block i are those of block i, of the `window - 1` blocks before it, and of the first `sinks`
tokens of the sequence. All other earlier tokens s, each in a block j, are far. With scores z_ts = scale * <q_t, k_s>,
features fq and fk of queries and keys, and a learned balance per head:

    o_t = (sum_near e^z_ts v_s + e^balance sum_far m[i, j] <fq_t, fk_s> v_s) / (the same with 1 for v_s)

The near part is a fused softmax, whose logsumexp merges it with the far part (`NearAndFar`).

Without a balance, this is MHLA by decays alone: near weights are m[i, i] * scale * <q_t, k_s>, with features as q and k.
"""

import itertools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..reference import divide_or_zero
from ..torch_layout import DifferentiableOnce, align_blocks, by_block, by_token, resize_tokens
from .decays import Decays, decayed_sums, two_way_sums
from .fused_softmax import causal_softmax, make_mask, no_key, softmax_backward, softmax_forward
from .inputs import WindowedInputs, WindowedOptions

PIECE_TOKENS = 2048  # tokens whose windows are gathered at a time, which bounds the memory


class SinkTokens(NamedTuple):
    """The S sinks that each of M blocks sees if sequences are packed; else M is 1, and all blocks of a row share them."""

    k: Tensor  # [B, M, S, G, D]
    v: Tensor  # [B, M, S, G, V]
    valid: Tensor  # bool [B, M, S], which are keys


class PastSums(NamedTuple):
    """Running sums [B, G, R, K, V + 1] for the queries of one block of each row, `block` int64 [B].

    They are the sums over j <= block - window of lambda^(block - j) S_j, with S_j from `block_summaries`.
    """

    sums: Tensor
    block: Tensor


@dataclass
class BlockRun:
    """M consecutive blocks of C tokens; the first token is at a block edge."""

    inputs: WindowedInputs  # of T <= M * C tokens; q_features may have only the last: nothing is far from the others
    k_features: Tensor  # [B, T, G, K], or only those of the first tokens: the others are far from no query
    block_index: Tensor  # int64 [B or 1, M], the index of each block in its sequence
    # bool [B, T], the tokens that are keys; None if all are, and the run is one sequence per row from its start
    valid: Tensor | None = None
    sequence_id: Tensor | None = None  # int64 [M], the sequence of each block if several are packed
    sink_tokens: SinkTokens | None = None  # from a state; None to take the first tokens of each sequence
    past: PastSums | None = None  # from a state; None if no tokens came before
    first_query_block: int = 0  # the first of the M blocks with queries; outputs of earlier ones are 0


def far_range(num_tokens: int, options: WindowedOptions) -> tuple[int, int]:
    """Return the first query of a sequence that has far keys, and the end of the keys that are far from some query."""
    size, window = options.block_size, options.window
    return min(window * size, num_tokens), max((num_tokens + size - 1) // size - window, 0) * size


def windowed_attention(inputs: WindowedInputs, k_features: Tensor) -> Tensor:
    """Attend to near tokens by softmax and to far tokens by MHLA; `attention.py` has the formula.

    With `options.both_ways`, queries see later tokens, too, and |i - j| replaces i - j.

    Args:
        inputs: The inputs. Without padding and packing, q_features may have only the queries of `far_range`.
        k_features: [B, T, G, K], keys of the far part or, together with such q_features, only those of `far_range`.

    Returns:
        [B, T, H, V] in v's dtype or, with `options.unrounded`, in at least fp32.

    Raises:
        ValueError: If both `starts` and `cu_seqlens` are given.
    """
    q, k, v, q_features, _, _, options, *padding = inputs
    aligned = align_blocks(q, options.block_size, *padding)
    q, k, v, q_features, k_features = aligned.tokens.move(q, k, v, q_features, k_features)
    inputs = inputs._replace(q=q, k=k, v=v, q_features=q_features)
    o, _ = attend_run(BlockRun(inputs, k_features, aligned.block[None], aligned.valid, aligned.sequence_id))
    return aligned.tokens.take_back(o)


def attend_run(run: BlockRun, end_block: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Compute the outputs [B, T, H, V] of a run and, if `end_block` [B] is given, the sums of `PastSums` at these blocks."""
    options, block_index, past = run.inputs.options, run.block_index, run.past
    run = with_valid(run)
    summaries = block_summaries(run)
    decays = run.inputs.decays.to(summaries.dtype)
    if options.both_ways:
        far_sums = two_way_sums(summaries.flatten(3), decays.log_rate, options.window)
    else:
        far_sums = decayed_sums(summaries.flatten(3), decays.log_rate, options.window, run.sequence_id)
    far_sums = far_sums.unflatten(4, summaries.shape[3:])  # [B, G, M, R, K, V + 1]
    if past is not None:
        # Blocks before `past.block` were complete then and hold no new token, so what they read does not matter.
        elapsed = (block_index - past.block[:, None]).clamp(min=0)[:, None, :, None]
        far_sums = far_sums + torch.exp(decays.log_rate[:, None] * elapsed)[..., None, None] * past.sums[:, :, None]
    o = attend_near_and_far(run, far_sums, decays)
    return o, None if end_block is None else advance(run, summaries, decays, end_block)


def with_valid(run: BlockRun) -> BlockRun:
    """Return the run with `valid` as bool [B, M * C], or with None if it needs no mask.

    Padding and bidirectional attention need one, and torch.compile does, for a single graph. So does a run within one window
    that has query features: these then get gradients of zero, because distributed training needs some from every process.
    """
    (valid, q, q_features), options = (run.valid, run.inputs.q, run.inputs.q_features), run.inputs.options
    num_blocks = run.block_index.shape[1]
    needs_none = not options.both_ways and (num_blocks > options.window or not q_features.shape[1])
    if valid is None and not torch.compiler.is_compiling() and needs_none:
        return run
    valid = q.new_ones(q.shape[:2], dtype=torch.bool) if valid is None else valid
    length = num_blocks * options.block_size
    exists = torch.arange(length, device=q.device) < q.shape[1]
    return replace(run, valid=resize_tokens(valid, length) & exists)


def attend_near_and_far(run: BlockRun, far_sums: Tensor, decays: Decays) -> Tensor:
    """Compute the outputs [B, T, H, V] of a run, whose blocks read the sums `far_sums` [B, G, M, R, K, V + 1]."""
    q, k, v, q_features, _, balance, options, *_ = run.inputs
    size, window, num_blocks = options.block_size, options.window, run.block_index.shape[1]
    num_tokens, num_kv_heads, dtype = q.shape[1], k.shape[2], v.dtype
    if decays.power is not None and q_features.shape[1]:
        scale = decays.length_scale(run.block_index, window).repeat_interleave(size, 1)  # [B or 1, M * C, H]
        scale = resize_tokens(scale, num_tokens)[:, num_tokens - q_features.shape[1] :]
        q_features = q_features * scale[..., None].to(q_features.dtype)
    first_far = (num_tokens - q_features.shape[1]) // size  # the block at which q_features begins
    q_features = resize_tokens(q_features, (num_blocks - first_far) * size)
    q, k, v = (resize_tokens(x, num_blocks * size) for x in (q, k, v))
    if run.valid is not None:
        k, v = (torch.where(run.valid[..., None, None], x, 0) for x in (k, v))
    outputs, first = [], run.first_query_block
    if first:
        outputs.append(far_sums.new_zeros(len(q), first * size, q.shape[2], v.shape[-1]))
    elif balance is not None and run.valid is None:
        first = min(window, num_blocks)
        outputs.append(causal_softmax(q[:, : first * size], k[:, : first * size], v[:, : first * size], options.scale))
    if torch.compiler.is_compiling():  # one piece, so that one graph serves all lengths
        borders = [0, num_blocks]
    else:
        borders = [*range(first, num_blocks, max(PIECE_TOKENS // size, 1)), num_blocks]
    all_sinks, mask = run.sink_tokens or find_sinks(run), None
    for begin, end in itertools.pairwise(borders):
        queries = by_block(q[:, begin * size : end * size], num_kv_heads, size)
        features = q_features[:, (begin - first_far) * size : (end - first_far) * size]
        far = read_far(by_block(features, num_kv_heads, size), far_sums[:, :, begin:end], decays.weight)
        if balance is None:
            keys, values = (by_block(x[:, begin * size : end * size], num_kv_heads, size) for x in (k, v))
            o = linear_attention(queries, keys, values, far, decays.weight, options)
        else:
            sinks = all_sinks
            if run.sequence_id is not None:
                sinks = SinkTokens(*(x[:, begin:end] for x in all_sinks))
            if mask is None or run.valid is not None or begin <= window:
                mask = window_mask(run, sinks.valid, begin, end)
            keys, values = (take_window(x, options, begin, end) for x in (k, v))
            sink_k, sink_v = (x.transpose(2, 3) for x in (sinks.k, sinks.v))
            shift = balance.to(far.dtype).view(num_kv_heads, -1, 1).expand(-1, -1, size).flatten(1)  # [G, (H / G) * C]
            o = NearAndFar.apply(queries, keys, values, sink_k, sink_v, far, shift, mask, size, options.scale)
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
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink_k: Tensor, sink_v: Tensor, far: Tensor, balance: Tensor,
        mask: Tensor, size: int, scale: float,
    ) -> Tensor:  # fmt: skip
        """Compute o [B * m, G, N, V] in far's dtype, for the N = (H / G) * C queries of each of m blocks.

        q is [B * m, G, N, D], far [B * m, G, N, V + 1], balance [G, N]; k and v are from `take_window`, sink_k and sink_v
        [B, m or 1, G, S, D or V], the mask is from `window_mask`.
        """
        window = gather_windows(k, sink_k, size, mask), gather_windows(v, sink_v, size, mask)
        near, lse = softmax_forward(q, *window, mask, scale)
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
        return *grads, None, None, None


def merge_near_and_far(
    near: Tensor, lse: Tensor, far: Tensor, balance: Tensor, mask_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Merge softmax over near keys [..., N, V] and its logsumexp [..., N] with the far part: o and total of `NearAndFar`."""
    total = torch.logaddexp(lse, far[..., -1].log() + balance)
    o = torch.exp(lse - total).masked_fill(no_key(lse, mask_dtype), 0)[..., None] * near
    return o + far_factor(far, balance, total) * far[..., :-1], total


def far_factor(far: Tensor, balance: Tensor, total: Tensor) -> Tensor:
    """Return the multiplier of the far part in an output, e^(balance - total) [..., N, 1], or 0 where nothing is far."""
    return torch.exp(balance - total).masked_fill(far[..., -1] == 0, 0)[..., None]


def take_window(x: Tensor, options: WindowedOptions, begin: int, end: int) -> Tensor:
    """Return the tokens in the windows of some blocks: [B, M * C, G, D] -> [B, G, tokens, D], with zeros beyond the run."""
    first = (begin - options.window + 1) * options.block_size
    last = (end + (options.window - 1 if options.both_ways else 0)) * options.block_size
    inside = x[:, max(first, 0) : last].transpose(1, 2)
    before = max(-first, 0)
    after = last - max(first, 0) - inside.shape[2]
    return F.pad(inside, (0, 0, before, after)) if before or after else inside


def gather_windows(x: Tensor, sinks: Tensor, size: int, mask: Tensor) -> Tensor:
    """Copy the sinks and the W blocks of x, from `take_window`, that each of m blocks sees: [B * m, G, S + W * C, D]."""
    window = x.unfold(2, mask.shape[-1] - sinks.shape[3], size).permute(0, 2, 1, 4, 3)  # [B, m, G, W * C, D]
    return torch.cat([sinks.expand(-1, window.shape[1], -1, -1, -1), window], 3).flatten(0, 1)


def scatter_windows(grad: Tensor, x: Tensor, sinks: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and sinks from that of `gather_windows`."""
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


def window_mask(run: BlockRun, sink_valid: Tensor, begin: int, end: int) -> Tensor:
    """Return the mask of blocks `begin` to `end` for `NearAndFar`, [B * m or 1, 1, N or 1, S + W * C]."""
    options, index, valid = run.inputs.options, run.block_index[:, begin:end], run.valid
    size, num_queries = options.block_size, run.inputs.q.shape[2] // run.inputs.k.shape[2] * options.block_size
    later = options.window - 1 if options.both_ways else 0
    place = torch.arange((options.window + later) * size, device=index.device) - (options.window - 1) * size
    query = torch.arange(num_queries, device=index.device)[:, None] % size
    seen = torch.ones_like(place, dtype=torch.bool)[None] if options.both_ways else place <= query  # [N or 1, W * C]
    seen = F.pad(seen, (sink_valid.shape[-1], 0), value=True)
    if valid is None and begin >= options.window:  # with full windows and all sinks
        return make_mask(seen, run.inputs.q.dtype)[None, None]
    if valid is None:
        valid = sink_valid.new_ones(len(sink_valid), run.block_index.shape[1] * size)
    is_key = take_window(valid[..., None, None], options, begin, end)[:, 0, :, 0].unfold(1, len(place), size)
    is_key = is_key & (index[..., None] * size + place >= 0)  # windows are shorter at the start of a sequence
    is_sink = sink_valid & (index >= options.window)[..., None]
    is_key = torch.cat([is_sink.expand(*is_key.shape[:2], -1), is_key], 2)
    return make_mask(is_key[:, :, None] & seen, run.inputs.q.dtype).flatten(0, 1)[:, None]


def linear_attention(q: Tensor, k: Tensor, v: Tensor, far: Tensor, weight: Tensor, options: WindowedOptions) -> Tensor:
    """Compute o [B * m, G, N, V] without a softmax: the causal sums within the block of a query, plus the far sums.

    N is (H / G) * C. q is [B * m, G, N, K], k and v are [B * m, G, C, ...], and far is [B * m, G, N, V + 1]. The sum over r
    of `weight` [H, R] weighs the query's own block.
    """
    q, k, v = (x.to(far.dtype) for x in (q, k, with_ones(v)))
    size = options.block_size
    earlier = torch.ones(size, size, dtype=torch.bool, device=q.device).tril().repeat(q.shape[2] // size, 1)
    near_weight = weight.sum(1).view(q.shape[1], -1, 1).expand(-1, -1, size).flatten(1)[..., None]
    o = options.scale * (torch.where(earlier, q @ k.mT, 0) * near_weight @ v + far)
    return divide_or_zero(o[..., :-1], o[..., -1]) if options.normalize else o[..., :-1]


def read_far(q_features: Tensor, far_sums: Tensor, weight: Tensor) -> Tensor:
    """Multiply features [B * m, G, N, K] by far sums [B, G, m, R, K, V + 1] with weights [H, R], to [B * m, G, N, V + 1]."""
    weight = weight.view(q_features.shape[1], -1, 1, weight.shape[1], 1)  # [G, H / G, 1, R, 1]
    # Multiplied by the weights, the features read all R sums in one product.
    features = q_features.to(far_sums.dtype).unflatten(2, (weight.shape[1], -1))[..., None, :] * weight
    return features.flatten(4).flatten(2, 3) @ far_sums.flatten(3, 4).transpose(1, 2).flatten(0, 1)


def advance(run: BlockRun, summaries: Tensor, decays: Decays, end_block: Tensor) -> Tensor:
    """Compute the sums of `PastSums` at `end_block` int64 [B]."""
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
    """Compute the summary of each block: the sum of k v^T over its keys (paper eq. 4), and that of k as last column.

    Sinks are left out. The result is [B, G, M, K, V + 1], in fp32 or, if an input is, in fp64.
    """
    options, index, v, k_features = run.inputs.options, run.block_index, run.inputs.v, run.k_features
    dtype = torch.promote_types(torch.promote_types(k_features.dtype, v.dtype), torch.float32)
    size, num_blocks = options.block_size, index.shape[1]
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


def find_sinks(run: BlockRun) -> SinkTokens:
    """Return the first `options.sinks` tokens of each row or, if several sequences are packed, of each block's sequence."""
    options, k, v = run.inputs.options, run.inputs.k, run.inputs.v
    valid = k.new_ones(k.shape[:2], dtype=torch.bool) if run.valid is None else run.valid
    if run.sequence_id is None:
        return SinkTokens(*(resize_tokens(x, options.sinks)[:, None] for x in (k, v, valid)))
    first = torch.searchsorted(run.sequence_id, run.sequence_id) * options.block_size
    token = (first[:, None] + torch.arange(options.sinks, device=k.device)).clamp(max=k.shape[1] - 1)
    return SinkTokens(k[:, token], v[:, token], valid[:, token])


def with_ones(v: Tensor) -> Tensor:
    """Append a column of ones to the values, [..., V] -> [..., V + 1], whose weighted sum is the sum of the weights."""
    return F.pad(v, (0, 1), value=1.0)
