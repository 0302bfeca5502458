"""What a block of tokens sees near and far (`local.py`), in PyTorch: also what the kernel's gradients are computed by."""

from dataclasses import dataclass

import torch

from .decays import spread
from .reference import divide_or_zero


@dataclass(frozen=True)
class LocalForm:
    """What stays the same for all calls of a layer.

    block_size: tokens per block C. lag: blocks of the window, the open one included; the far part begins that many blocks
    back. sinks: first tokens that are always near (0 without a softmax). scale: of q k^T. normalize: divide by the weights.
    impl: "auto", "torch" or "triton", as in `mhla`; a single token behind a state is always torch.
    unrounded: o in the dtype of the sums; else the kernel writes it in v's.
    both_ways: later tokens are seen as earlier ones are; the window has `lag - 1` blocks on either side of the open one.
    """

    block_size: int
    lag: int = 2
    sinks: int = 4
    scale: float = 1.0
    normalize: bool = True
    impl: str = "auto"
    unrounded: bool = True
    both_ways: bool = False


def near_and_far(q, k, v, fq, mixed, valid, weight, balance, sink, place, form):
    """The outputs [B, T, H, V] of M blocks of C tokens, in mixed's dtype; `triton_near_and_far` is the same in one kernel.

    q [B, T, H, D], k [B, T, G, D], v [B, T, G, V], fq [B, T, H, K], T at most M * C. mixed: running sums
    [B, G, M, R, K, V + 1], to be weighed by weight [H, R]. valid: bool [B, M * C]. balance, sink, place: as in
    `attend_local`.
    """
    tokens, size, groups, exact = q.shape[1], form.block_size, k.shape[2], mixed.dtype
    q, k, v, fq = (resize_tokens(x, valid.shape[1]) for x in (q, k, v, fq))
    k, v = (torch.where(valid[..., None, None], x, 0) for x in (k, v))
    q, k, v, fq = (by_block_and_group(x, groups, size, exact) for x in (q, k, v, fq))
    k, v, seen = near_keys(k, v, valid.unflatten(1, (-1, size)), place, form)
    if sink is not None:
        k, v, seen = with_sinks(k, v, seen, sink, place, form, exact)
    share = weight.shape[0] // groups

    def of_each_query(x):
        return x.view(groups, 1, share, 1, 1).expand(-1, -1, -1, size, 1).flatten(2, 3)

    far = spread(fq, weight) @ mixed.flatten(3, 4)
    seen = seen[:, None, :, None].expand(-1, -1, -1, share, -1, -1).flatten(3, 4)
    has_far = ((place >= form.lag) | form.both_ways)[:, None, :, None, None]
    weight, balance = (x if x is None else of_each_query(x.to(exact)) for x in (weight.sum(-1), balance))
    o = combine((q @ k.mT) * form.scale, seen, v, far, weight, balance, has_far, form)
    o = o.unflatten(3, (share, size)).permute(0, 2, 4, 1, 3, 5).flatten(3, 4).flatten(1, 2)
    return resize_tokens(o, tokens)


def resize_tokens(x, count):
    """The first `count` of the tokens [B, T, ..], with more behind them where there are too few: zeros, or while compiling
    the last one again, for a graph in which padding by none is no case of its own."""
    if torch.compiler.is_compiling():
        return x.index_select(1, torch.arange(count, device=x.device).clamp(max=x.shape[1] - 1))
    if x.shape[1] == count:
        return x
    return torch.nn.functional.pad(x, (*[0, 0] * (x.dim() - 2), 0, count - x.shape[1]))


def by_block_and_group(x, groups, size, exact):
    """[B, T, H, K] -> [B, G, M, (H / G) * C, K] in the exact dtype, heads before tokens."""
    x = x.to(exact).unflatten(2, (groups, -1)).unflatten(1, (-1, size))
    return x.permute(0, 3, 1, 4, 2, 5).flatten(3, 4)


def with_ones(v):
    """A column of ones behind the values [.., V]: weights are then summed as values are."""
    return torch.nn.functional.pad(v, (0, 1), value=1.0)


def near_keys(k, v, valid, place, form):
    """The window of every block: k and v [B, G, M, W * C, ...], and who sees whom, bool [B, M, C, W * C].

    W: blocks of the window, `lag`, or `2 * lag - 1` if it goes both ways.
    """
    keys, values, seen = [], [], []
    size, lag = form.block_size, form.lag
    own = torch.ones(size, size, dtype=torch.bool, device=k.device)
    for back in reversed(range(1 - lag if form.both_ways else 0, lag)):
        keys.append(shift_blocks(k, back, 2))
        values.append(shift_blocks(v, back, 2))
        there = shift_blocks(valid, back, 1) & (place >= back)[..., None]
        seen.append(there[:, :, None] & (own if back or form.both_ways else own.tril()))
    return torch.cat(keys, 3), torch.cat(values, 3), torch.cat(torch.broadcast_tensors(*seen), 3)


def shift_blocks(x, back, dim):
    """What is `back` blocks before each block along `dim` of x, or after it if negative; zeros where nothing is."""
    count = x.shape[dim]
    kept = max(count - abs(back), 0)
    missing = (count - kept, 0) if back >= 0 else (0, count - kept)
    kept = x.narrow(dim, 0 if back >= 0 else count - kept, kept)
    return torch.nn.functional.pad(kept, (*[0, 0] * (x.dim() - dim - 1), *missing))


def with_sinks(near_k, near_v, seen, sink, place, form, exact):
    """The window and, where a block's window does not reach them, the sinks."""
    k, v, valid = (x if x.dim() == near else x[:, None] for x, near in zip(sink, (5, 5, 3), strict=True))
    k, v = (x.to(exact).permute(0, 3, 1, 2, 4) for x in (k, v))
    count = near_k.shape[2]
    k, v = (x.expand(-1, -1, count, -1, -1) for x in (k, v))
    there = (valid & (place >= form.lag)[..., None])[:, :, None].expand(len(seen), count, form.block_size, -1)
    k, v = (torch.where(there[:, None, :, 0, :, None], x, 0) for x in (k, v))
    return torch.cat([k, near_k], 3), torch.cat([v, near_v], 3), torch.cat([there, seen], 3)


def combine(score, seen, v, far, weight, balance, has_far, form):
    """The outputs [.., N, V] of N queries, from their scores [.., N, L] with near keys, of which some are `seen`.

    v [.., L, V]: near values. far [.., N, V + 1]: what the far part sums to; has_far: whether there is one. weight
    [.., N, 1]: the decays' weights in sum. balance [.., N, 1]: of the far part, in the unit of the softmax, or None.
    """
    if balance is None:
        near, unit = torch.where(seen, score, 0) * weight, form.scale
    else:
        near, unit = softmax_weights(score, seen, balance, has_far & (far[..., -1:] != 0))
    o, far = near @ v, unit * far
    if not form.normalize:
        return o + far[..., :-1]
    return divide_or_zero(o + far[..., :-1], near.sum(-1) + far[..., -1])


def softmax_weights(score, seen, balance, has_far):
    """e^score of the near keys and e^balance of the far part, both over one e^c, which no gradient sees."""
    score = score.masked_fill(~seen, float("-inf"))
    largest = score.detach().amax(-1, keepdim=True)
    shift = torch.where(has_far, torch.maximum(largest, balance.detach()), largest)
    shift = shift.masked_fill(shift == float("-inf"), 0)
    return torch.exp(score - shift), torch.exp(torch.where(has_far, balance - shift, 0))
