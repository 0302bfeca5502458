"""Causal attention with a near and a far part under one normalizer: softmax over a window, MHLA by decays before it.

Let i = t // block_size be the block of token t. Its near keys are those of block i, of the `window - 1` blocks before
it, and of the first `sinks` tokens of the sequence. All other earlier tokens are far. Their weights are brought to the scale
of softmax weights by e^balance, a learned factor per head:

    o_t = (sum_near e^(z_ts - c) v_s + e^(balance - c) sum_far m[i, j] <fq_t, fk_s> v_s) / (the same with 1 for v_s)

with scores z_ts = scale * <q_t, k_s>, features fq and fk of queries and keys, and c the largest exponent, which cancels.
Without a balance the near part is linear, too: its weights are m[i, i] * scale * <q_t, k_s>, with features as q and k. This
is MHLA by decays and nothing else.

Everything is differentiable PyTorch without data-dependent control flow, so torch.compile makes one graph for all lengths.
With `options.impl` a Triton kernel may compute the attention within blocks.
"""

from dataclasses import dataclass, replace

import torch

from ..api import choose_implementation
from ..torch_layout import MoveTokens, align_sequences, shift_to_start
from .decays import Decays, block_distances, decayed_sums, powers
from .inputs import WindowedInputs, WindowedOptions
from .near_and_far import SinkTokens, WindowOperands, by_block_and_group, near_and_far, resize_tokens, with_ones
from .triton_attend import TRITON_WINDOWED, small_windowed_call

SEGMENT_TOKENS = 2048  # without gradients, a long sequence is computed this many tokens at a time


def windowed_attention(inputs: WindowedInputs, k_features: torch.Tensor) -> torch.Tensor:
    """Attend to near tokens by softmax and to far tokens by MHLA; the top of this file has the formula.

    Args:
        inputs: The inputs.
        k_features: [B, T, G, K], keys of the far part.

    Returns:
        [B, T, H, V] in the dtype of the sums (at least fp32); in v's dtype if the Triton kernel runs and not
        `options.unrounded`.

    Raises:
        ValueError: If both `starts` and `cu_seqlens` are given, or `options.impl` is "triton" and the kernel cannot run.
    """
    q, k, v, q_features, _, _, options, key_mask, starts, cu_seqlens = inputs
    num_tokens, size = q.shape[1], options.block_size
    valid = q.new_ones(q.shape[:2], dtype=torch.bool) if key_mask is None else key_mask
    inverse = block_index = sequence_id = None
    if starts is not None:
        if cu_seqlens is not None:
            raise ValueError("starts: got a tensor along with cu_seqlens, expected None.")
        source, inverse = shift_to_start(starts.to(q.device), num_tokens)
    if cu_seqlens is not None:
        source, inverse, block_index, sequence_id = align_sequences(cu_seqlens, num_tokens, size)
    if inverse is not None:
        q, k, v, q_features, k_features = (
            MoveTokens.apply(x, source, inverse) for x in (q, k, v, q_features, k_features)
        )
        rows = torch.arange(len(valid), device=q.device)[:, None]
        valid = (source >= 0) & valid[rows, source.clamp(min=0)]
    if block_index is None:
        block_index = torch.arange((q.shape[1] + size - 1) // size, device=q.device)
    inputs = inputs._replace(q=q, k=k, v=v, q_features=q_features)
    o, _ = attend_run(BlockRun(inputs, k_features, valid, block_index[None], sequence_id))
    return o if inverse is None else MoveTokens.apply(o, inverse, source)


def two_way_attention(inputs: WindowedInputs, k_features: torch.Tensor) -> torch.Tensor:
    """Attend to near tokens by softmax and to far tokens by MHLA, to later tokens as to earlier ones.

    In the formula, |i - j| takes the place of i - j. The summaries of all blocks are mixed by one matrix per KV head and
    decay, at a cost that grows with the square of the number of blocks.

    Args:
        inputs: The inputs, without starts and cu_seqlens. The options has `both_ways` and no sinks; its `impl` is ignored.
        k_features: [B, T, G, K], keys of the far part.

    Returns:
        [B, T, H, V] in the dtype of the sums (at least fp32).
    """
    q, v, options, key_mask = inputs.q, inputs.v, inputs.options, inputs.key_mask
    size, num_tokens = options.block_size, q.shape[1]
    num_blocks = (num_tokens + size - 1) // size
    block_index = torch.arange(num_blocks, device=q.device)[None]
    valid = q.new_ones(q.shape[:2], dtype=torch.bool) if key_mask is None else key_mask
    is_token = torch.arange(num_blocks * size, device=q.device) < num_tokens
    valid = resize_tokens(valid, num_blocks * size) & is_token
    summaries = block_summaries(k_features, v, valid, block_index, options)  # [B, G, M, K, V + 1]
    decays = inputs.decays.to(summaries.dtype)
    distance = block_distances(num_blocks, summaries).abs()
    mixing = powers(decays.log_rate, distance).masked_fill(distance < options.window, 0).transpose(1, 2)  # [G, M, R, M]
    far_sums = mixing.flatten(1, 2) @ summaries.flatten(3)
    far_sums = far_sums.view(*summaries.shape[:3], -1, *summaries.shape[3:])  # [B, G, M, R, K, V + 1]
    run = BlockRun(inputs, k_features, valid, block_index)
    return near_and_far(window_operands(run, inputs.q_features, far_sums, decays.weight), both_ways=True)


@dataclass
class PastSums:
    """Running sums of the far part, for the queries of one block of each row.

    Args:
        sums: [B, G, R, K, V + 1], for each rate lambda the sum over blocks j <= block - window of lambda^(block - j) S_j;
            S_j is the summary of block j (`block_summaries`).
        block: Int [B], index of the block whose queries read the sums.
    """

    sums: torch.Tensor
    block: torch.Tensor


@dataclass
class BlockRun:
    """M consecutive blocks of C tokens; the first token is at a block edge.

    Args:
        inputs: The T tokens, T at most M * C. Their padding is described by the other fields.
        k_features: [B, T, G, K], keys of the far part.
        valid: bool [B, T] or [B, M * C], the tokens that are keys.
        block_index: Int [B or 1, M], the index of each block in its sequence.
        sequence_id: Int [M], the sequence of each block if several are packed, else None.
        sink_tokens: Sinks from a state; None to take the first tokens of each sequence.
        past: Running sums from a state, for the sequence of the first block; None if no tokens came before.
    """

    inputs: WindowedInputs
    k_features: torch.Tensor
    valid: torch.Tensor
    block_index: torch.Tensor
    sequence_id: torch.Tensor | None = None
    sink_tokens: SinkTokens | None = None
    past: PastSums | None = None

    def segment(self, first: int, end: int, past: PastSums | None) -> "BlockRun":
        """Return blocks `first` to `end` (exclusive), with running sums `past`; not for packed sequences."""
        tokens = slice(first * self.inputs.options.block_size, end * self.inputs.options.block_size)
        q, k, v, q_features = (x[:, tokens] for x in self.inputs[:4])
        return replace(
            self,
            inputs=self.inputs._replace(q=q, k=k, v=v, q_features=q_features),
            k_features=self.k_features[:, tokens],
            valid=self.valid[:, tokens],
            block_index=self.block_index[:, first:end],
            past=past,
        )


def attend_run(run: BlockRun, end_block: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the outputs of consecutive blocks, and the running sums for a decoder state.

    If no gradient is needed, long sequences are computed in segments of `SEGMENT_TOKENS`, so that memory and the cost per
    token do not grow with their length.

    Args:
        run: The blocks.
        end_block: Int [B], index of the block in each row whose running sums are returned; None to return no sums.

    Returns:
        o: [B, T, H, V].
        sums: [B, G, R, K, V + 1], see `PastSums`. Without `end_block`, unspecified or None.

    Raises:
        ValueError: If `options.impl` is "triton" and the kernel cannot run.
    """
    q, k, v, q_features, decays, _, options, *_ = run.inputs
    block_index = run.block_index
    size, num_blocks = options.block_size, block_index.shape[1]
    if options.sinks and run.sink_tokens is None:
        run = replace(run, sink_tokens=find_sinks(k, v, run.valid, options, run.sequence_id))
    impl = choose_implementation(options.impl, small_windowed_call, q, k, v)
    exists = torch.arange(num_blocks * size, device=q.device) < q.shape[1]
    run = replace(run, valid=resize_tokens(run.valid, num_blocks * size) & exists)
    learned = (q, k, v, q_features, run.k_features, decays.weight)
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in learned)
    segment_blocks = max(SEGMENT_TOKENS // size, options.window)
    short = num_blocks <= 2 * segment_blocks
    if short or needs_grad or run.sequence_id is not None or torch.compiler.is_compiling():
        o, summaries = attend_segment(run, impl)
        if end_block is None:
            return o, None
        return o, advance(run.past, summaries, decays, options.window, block_index, end_block)

    outputs, past = [], run.past
    for first in range(0, num_blocks, segment_blocks):
        begin = max(first - options.window, 0)
        end = min(first + segment_blocks, num_blocks)
        segment = run.segment(begin, end, past)
        o, summaries = attend_segment(segment, impl)
        outputs.append(o[:, (first - begin) * size :])
        last = segment.block_index[:, -1]
        last = last if end_block is None else torch.minimum(last, end_block)
        past = PastSums(advance(past, summaries, decays, options.window, segment.block_index, last), last)
    return torch.cat(outputs, 1), None if past is None else past.sums


def advance(
    past: PastSums | None,
    summaries: torch.Tensor,
    decays: Decays,
    window: int,
    block_index: torch.Tensor,
    end_block: torch.Tensor,
) -> torch.Tensor:
    """Compute the running sums that the queries of a later block read.

    Args:
        past: The sums so far, which already contain the blocks up to `past.block - window`; None if there are none.
        summaries: [B, G, M, K, V + 1], the summaries of consecutive blocks.
        decays: The decays.
        window: Smallest distance between a block and the blocks in its running sums.
        block_index: Int [B or 1, M], the index of each block in `summaries`.
        end_block: Int [B], index of the block in each row whose running sums are returned.

    Returns:
        [B, G, R, K, V + 1].
    """
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


def attend_segment(run: BlockRun, impl: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the outputs of all blocks at once.

    Args:
        run: The blocks, with `valid` [B, M * C].
        impl: "torch" or "triton".

    Returns:
        The outputs, [B, T, H, V], and the summaries of the blocks, [B, G, M, K, V + 1].
    """
    inputs, block_index, past = run.inputs, run.block_index, run.past
    options, q_features = inputs.options, inputs.q_features
    summaries = block_summaries(run.k_features, inputs.v, run.valid, block_index, options)
    decays = inputs.decays.to(summaries.dtype)
    far_sums = decayed_sums(summaries.flatten(3), decays.log_rate, options.window, run.sequence_id)
    far_sums = far_sums.unflatten(4, summaries.shape[3:])  # [B, G, M, R, K, V + 1]
    if past is not None:
        # Blocks before `past.block` were complete then and hold no new token, so what they read does not matter.
        elapsed = (block_index - past.block[:, None]).clamp(min=0)[:, None, :, None]
        decay = torch.exp(decays.log_rate[:, None] * elapsed)  # [B, G, M, R]
        far_sums = far_sums + decay[..., None, None] * past.sums[:, :, None]
    if decays.power is not None:
        scale = decays.length_scale(block_index, options.window).repeat_interleave(
            options.block_size, 1
        )  # [B or 1, M * C, H]
        q_features = q_features * resize_tokens(scale, q_features.shape[1])[..., None].to(q_features.dtype)
    operands = window_operands(run, q_features, far_sums, decays.weight)
    return TRITON_WINDOWED(*operands) if impl == "triton" else near_and_far(operands), summaries


def window_operands(
    run: BlockRun, q_features: torch.Tensor, far_sums: torch.Tensor, weight: torch.Tensor
) -> WindowOperands:
    """Return the arguments of `near_and_far`: the blocks, and what their queries read of the far part."""
    q, k, v, _, _, balance, options, *_ = run.inputs
    sink_k, sink_v, sink_valid = run.sink_tokens or (None, None, None)
    return WindowOperands(
        q,
        k,
        v,
        q_features,
        far_sums,
        weight,
        balance,
        sink_k,
        sink_v,
        sink_valid,
        run.valid,
        run.block_index,
        options.block_size,
        options.window,
        options.scale,
        options.normalize,
        torch.float32 if options.unrounded else v.dtype,
    )


def block_summaries(
    k_features: torch.Tensor, v: torch.Tensor, valid: torch.Tensor, block_index: torch.Tensor, options: WindowedOptions
) -> torch.Tensor:
    """Compute the summary of each block: the sum of k v^T over its keys, without sinks (paper eq. 4).

    The last column of a summary is the sum of k.

    Args:
        k_features: [B, T, G, K].
        v: [B, T, G, V].
        valid: bool [B, M * C], the tokens that are keys.
        block_index: Int [B or 1, M].
        options: The options.

    Returns:
        [B, G, M, K, V + 1] in fp32, or in fp64 if an input is.
    """
    num_kv_heads = v.shape[2]
    sum_dtype = torch.float64 if torch.float64 in (k_features.dtype, v.dtype) else torch.float32
    k_features, v = (resize_tokens(x, valid.shape[1]) for x in (k_features, v))
    is_far = valid & ~is_sink(block_index, options)
    k_features = torch.where(is_far[..., None, None], k_features, 0)
    v = with_ones(torch.where(valid[..., None, None], v, 0))
    k_features, v = (by_block_and_group(x, num_kv_heads, options.block_size, sum_dtype) for x in (k_features, v))
    return k_features.mT @ v


def is_sink(block_index: torch.Tensor, options: WindowedOptions) -> torch.Tensor:
    """Return which tokens of the blocks `block_index` [B or 1, M] are sinks, and so never far: bool [B or 1, M * C]."""
    place_in_block = torch.arange(options.block_size, device=block_index.device)
    position = (block_index[:, :, None] * options.block_size + place_in_block).flatten(1)
    return position < options.sinks


def find_sinks(
    k: torch.Tensor, v: torch.Tensor, valid: torch.Tensor, options: WindowedOptions, sequence_id: torch.Tensor | None
) -> SinkTokens:
    """Return the sinks: the first `options.sinks` tokens of each row or, for packed sequences, of each block's sequence.

    Args:
        k: [B, T, G, D].
        v: [B, T, G, V].
        valid: bool [B, T], the tokens that are keys.
        options: The options.
        sequence_id: Int [M], the sequence of each block if several are packed, else None.
    """
    if sequence_id is None:
        return SinkTokens(k[:, : options.sinks], v[:, : options.sinks], valid[:, : options.sinks])
    first = torch.searchsorted(sequence_id, sequence_id) * options.block_size  # first token of the block's sequence
    token = (first[:, None] + torch.arange(options.sinks, device=k.device)).clamp(max=k.shape[1] - 1)
    return SinkTokens(k[:, token], v[:, token], valid[:, token])
