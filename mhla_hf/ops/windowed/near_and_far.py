"""Near and far attention of a run of blocks in PyTorch (`attention.py` has the formula).

The gradients of the Triton kernel are computed by this implementation, too.
"""

from typing import NamedTuple

import torch

from ..reference import divide_or_zero
from .decays import expand_query_features


class SinkTokens(NamedTuple):
    """Keys and values of S sink tokens: of each row or, if sequences are packed, of the sequence of each of M blocks.

    Args:
        k: [B, S, G, D] or [B, M, S, G, D].
        v: [B, S, G, V] or [B, M, S, G, V].
        valid: bool [B, S] or [B, M, S], which of them are keys.
    """

    k: torch.Tensor
    v: torch.Tensor
    valid: torch.Tensor


class WindowOperands(NamedTuple):
    """The arguments of `near_and_far`, and of the custom operator that computes it: M blocks of C tokens.

    Args:
        q: [B, T, H, D], T at most M * C.
        k: [B, T, G, D].
        v: [B, T, G, V].
        q_features: [B, T, H, K], features of the queries for the far part.
        far_sums: [B, G, M, R, K, V + 1], the running sums that each block reads. The last column is the sum of the keys.
        weight: [H, R], the weights of the running sums.
        balance: [H], as in `WindowedInputs`; None without a softmax.
        sink_k, sink_v, sink_valid: As in `SinkTokens`; None if there are no sinks.
        valid: bool [B, M * C], the tokens that are keys.
        block_index: Int [B or 1, M], the index of each block in its sequence.
        block_size, window, scale, normalize: As in `WindowedOptions`.
        dtype: Dtype of the outputs of the custom operator.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_features: torch.Tensor
    far_sums: torch.Tensor
    weight: torch.Tensor
    balance: torch.Tensor | None
    sink_k: torch.Tensor | None
    sink_v: torch.Tensor | None
    sink_valid: torch.Tensor | None
    valid: torch.Tensor
    block_index: torch.Tensor
    block_size: int
    window: int
    scale: float
    normalize: bool
    dtype: torch.dtype


def near_and_far(operands: WindowOperands, both_ways: bool = False) -> torch.Tensor:
    """Compute the outputs of M blocks of C tokens from their window, the sinks, and the running sums of far blocks.

    `TRITON_WINDOWED` does the same in one kernel.

    Returns:
        [B, T, H, V] in the dtype of `far_sums`.
    """
    q, k, v, q_features, far_sums, weight, balance, sink_k, sink_v, sink_valid, valid, block_index, *_ = operands
    num_tokens = q.shape[1]
    size = operands.block_size
    num_kv_heads = k.shape[2]
    sum_dtype = far_sums.dtype
    q, k, v, q_features = (resize_tokens(x, valid.shape[1]) for x in (q, k, v, q_features))
    k, v = (torch.where(valid[..., None, None], x, 0) for x in (k, v))
    q, k, v, q_features = (by_block_and_group(x, num_kv_heads, size, sum_dtype) for x in (q, k, v, q_features))
    k, v, visible = near_keys(k, v, valid.unflatten(1, (-1, size)), block_index, operands.window, both_ways)
    if sink_k is not None and sink_v is not None and sink_valid is not None:
        sink_tokens = SinkTokens(sink_k, sink_v, sink_valid)
        k, v, visible = with_sinks(k, v, visible, sink_tokens, block_index >= operands.window)
    share = weight.shape[0] // num_kv_heads  # query heads per KV head

    def per_query(x: torch.Tensor) -> torch.Tensor:
        """Repeat a number per head for its queries: [H] -> [G, 1, (H / G) * C, 1]."""
        return x.view(num_kv_heads, 1, share, 1, 1).expand(-1, -1, -1, size, 1).flatten(2, 3)

    far = expand_query_features(q_features, weight) @ far_sums.flatten(3, 4)
    visible = visible[:, None, :, None].expand(-1, -1, -1, share, -1, -1).flatten(3, 4)
    has_far = ((block_index >= operands.window) | both_ways)[:, None, :, None, None]
    total_weight = per_query(weight.sum(-1).to(sum_dtype))
    balance = None if balance is None else per_query(balance.to(sum_dtype))
    score = (q @ k.mT) * operands.scale
    o = combine(score, visible, v, far, total_weight, balance, has_far, operands.scale, operands.normalize)
    o = o.unflatten(3, (share, size)).permute(0, 2, 4, 1, 3, 5).flatten(3, 4).flatten(1, 2)
    return resize_tokens(o, num_tokens)


def resize_tokens(x: torch.Tensor, count: int) -> torch.Tensor:
    """Cut or pad x [B, T, ..] to `count` tokens, with zeros or, under torch.compile, with copies of the last token.

    Under torch.compile, padding by nothing would be a special case with a graph of its own; a gather has no special case.
    """
    if torch.compiler.is_compiling():
        return x.index_select(1, torch.arange(count, device=x.device).clamp(max=x.shape[1] - 1))
    if x.shape[1] == count:
        return x
    return torch.nn.functional.pad(x, (*[0, 0] * (x.dim() - 2), 0, count - x.shape[1]))


def by_block_and_group(x: torch.Tensor, num_kv_heads: int, size: int, sum_dtype: torch.dtype) -> torch.Tensor:
    """Group heads by KV head and tokens by block: [B, M * C, H, K] -> [B, G, M, (H / G) * C, K] in `sum_dtype`."""
    x = x.to(sum_dtype).unflatten(2, (num_kv_heads, -1)).unflatten(1, (-1, size))
    return x.permute(0, 3, 1, 4, 2, 5).flatten(3, 4)


def with_ones(v: torch.Tensor) -> torch.Tensor:
    """Append a column of ones to the values, [.., V] -> [.., V + 1], whose weighted sum is the sum of the weights."""
    return torch.nn.functional.pad(v, (0, 1), value=1.0)


def near_keys(
    k: torch.Tensor, v: torch.Tensor, valid: torch.Tensor, block_index: torch.Tensor, window: int, both_ways: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Collect the window of every block.

    Args:
        k: [B, G, M, C, D].
        v: [B, G, M, C, V].
        valid: bool [B, M, C], the tokens that are keys.
        block_index: Int [B or 1, M], the index of each block in its sequence.
        window, both_ways: As in `WindowedOptions`.

    Returns:
        k: [B, G, M, W * C, D], with W blocks: `window`, or `2 * window - 1` with `both_ways`.
        v: [B, G, M, W * C, V].
        visible: bool [B, M, C, W * C], which query sees which key.
    """
    keys = []
    values = []
    visible = []
    size = k.shape[3]
    all_pairs = torch.ones(size, size, dtype=torch.bool, device=k.device)
    for distance in reversed(range(1 - window if both_ways else 0, window)):
        keys.append(shift_blocks(k, distance, 2))
        values.append(shift_blocks(v, distance, 2))
        # A block at the start of its sequence has fewer than `window - 1` blocks before it.
        is_key = shift_blocks(valid, distance, 1) & (block_index >= distance)[..., None]
        sees_all = distance != 0 or both_ways
        visible.append(is_key[:, :, None] & (all_pairs if sees_all else all_pairs.tril()))
    return torch.cat(keys, 3), torch.cat(values, 3), torch.cat(torch.broadcast_tensors(*visible), 3)


def shift_blocks(x: torch.Tensor, distance: int, dim: int) -> torch.Tensor:
    """Shift x along `dim`, so that block i of the result is block i - `distance` of x, or zeros if there is none."""
    num_blocks = x.shape[dim]
    kept = max(num_blocks - abs(distance), 0)
    padding = (num_blocks - kept, 0) if distance >= 0 else (0, num_blocks - kept)
    x = x.narrow(dim, 0 if distance >= 0 else num_blocks - kept, kept)
    return torch.nn.functional.pad(x, (*[0, 0] * (x.dim() - dim - 1), *padding))


def with_sinks(
    near_k: torch.Tensor,
    near_v: torch.Tensor,
    visible: torch.Tensor,
    sink_tokens: SinkTokens,
    begins_later: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Add the sinks to the keys of every block, hidden from blocks whose window contains them.

    Args:
        near_k, near_v, visible: From `near_keys`.
        sink_tokens: The S sinks.
        begins_later: bool [B or 1, M], the blocks whose window begins after the sinks.

    Returns:
        near_k, near_v, and visible with S more keys, which come first.
    """
    k, v, valid = sink_tokens
    if k.dim() == 4:  # the same for all blocks
        k = k[:, None]
        v = v[:, None]
        valid = valid[:, None]
    k, v = (x.to(near_k.dtype).permute(0, 3, 1, 2, 4) for x in (k, v))  # [B, G, M or 1, S, ..]
    num_blocks = near_k.shape[2]
    k, v = (x.expand(-1, -1, num_blocks, -1, -1) for x in (k, v))
    is_key = valid & begins_later[..., None]
    is_key = is_key[:, :, None].expand(len(visible), num_blocks, visible.shape[2], -1)
    k, v = (torch.where(is_key[:, None, :, 0, :, None], x, 0) for x in (k, v))
    return torch.cat([k, near_k], 3), torch.cat([v, near_v], 3), torch.cat([is_key, visible], 3)


def combine(
    score: torch.Tensor,
    visible: torch.Tensor,
    v: torch.Tensor,
    far: torch.Tensor,
    total_weight: torch.Tensor,
    balance: torch.Tensor | None,
    has_far: torch.Tensor,
    scale: float,
    normalize: bool,
) -> torch.Tensor:
    """Combine the near and the far part into outputs.

    Args:
        score: [.., N, L], scaled scores of N queries and L near keys.
        visible: bool [.., N, L], which query sees which key.
        v: [.., L, V], values of the near keys.
        far: [.., N, V + 1], the far part: its sum of weight * value and, in the last column, of the weights.
        total_weight: [.., N, 1], the sum of the decays' weights. Without a softmax, the weight of a near key is its score
            times this sum.
        balance: [.., N, 1], as in `WindowedInputs`, for each query; None without a softmax.
        has_far: bool [.., 1, 1], whether a query has far blocks at all.
        scale, normalize: As in `WindowedOptions`.

    Returns:
        [.., N, V].
    """
    far_factor: torch.Tensor | float
    if balance is None:
        near = torch.where(visible, score, 0) * total_weight
        far_factor = scale
    else:
        near, far_factor = softmax_weights(score, visible, balance, has_far & (far[..., -1:] != 0))
    o, far = near @ v, far_factor * far
    if not normalize:
        return o + far[..., :-1]
    return divide_or_zero(o + far[..., :-1], near.sum(-1) + far[..., -1])


def softmax_weights(
    score: torch.Tensor, visible: torch.Tensor, balance: torch.Tensor, has_far: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute e^(score - c) of the near keys and e^(balance - c) of the far part, where c is the largest exponent.

    Subtracting c prevents overflow. It cancels in the outputs, so it needs no gradient.

    Args:
        score, visible, balance: As in `combine`.
        has_far: bool [.., N or 1, 1], whether a query has a far part.

    Returns:
        [.., N, L], with 0 where not visible, and [.., N, 1].
    """
    score = score.masked_fill(~visible, float("-inf"))
    largest = score.detach().amax(-1, keepdim=True)
    shift = torch.where(has_far, torch.maximum(largest, balance.detach()), largest)
    shift = shift.masked_fill(shift == float("-inf"), 0)
    return torch.exp(score - shift), torch.exp(torch.where(has_far, balance - shift, 0))
