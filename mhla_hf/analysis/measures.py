"""Rank and entropy of every attention layer, attention maps, and what the mixing has become.

Models of every kind go through the same measures on the same inputs, so that they can stand side by side. A rank is never
given without the tolerance it was counted at; `effective_rank` needs none. The rank of a causal layer is that of its lower
left quarter (what the second half of the text reads in the first): a triangle with a diagonal has full rank whatever the
attention is.
"""

import math
import statistics

import torch
from tqdm import tqdm

from ..ops.blocks import Blocks
from .attention import Attention, mixing_matrices, recorded_attention

ENTRIES_AT_ONCE = 1 << 24
MAP_SIDE = 256


def count_rank(values: torch.Tensor, tolerance: float) -> int:
    """How many singular values are above `tolerance` times the largest."""
    return int((values > tolerance * values[0]).sum()) if values[0] > 0 else 0


def effective_rank(values: torch.Tensor) -> float:
    """exp of the entropy of the singular values' shares: 1 for rank one, N for N equal values (Roy and Vetterli 2007)."""
    if values[0] <= 0:
        return 0.0
    share = values / values.sum()
    return math.exp(-torch.special.xlogy(share, share).sum().item())


def row_entropy(rows: torch.Tensor) -> torch.Tensor:
    """Entropy in nats of each row of `[T, S]`, as shares of |weight|; NaN for a row without any weight."""
    weight = rows.abs()
    share = weight / weight.sum(-1, keepdim=True)
    return -torch.special.xlogy(share, share).sum(-1)


def rank_bound(sizes, width: int) -> int:
    """min(N, sum over blocks of min(n_b, d)): the largest rank MHLA can have (section 4.3, table 1)."""
    return min(sum(sizes), sum(min(size, width) for size in sizes))


def block_sizes(blocks: Blocks, tokens: slice) -> list[int]:
    """How many of some tokens are in each block."""
    return torch.bincount(blocks.index()[tokens], minlength=blocks.num_blocks).tolist()


def default_tolerance(shape, dtype: torch.dtype) -> float:
    """The relative tolerance of `torch.linalg.matrix_rank` for a matrix of this shape and dtype."""
    return max(shape) * torch.finfo(dtype).eps


@torch.no_grad()
def record_model(model, batches, run=None) -> list[list[Attention]]:
    """The attention calls of `model` in eval mode, per batch.

    batches: keyword arguments of `run`: what calls the model, such as the pipeline whose transformer it is; None: the model.
    ValueError: no layer was seen, which is what happens with attention that is neither MHLA nor torch's own function.
    """
    was_training = model.training
    model.eval()
    try:
        calls = []
        for batch in batches:
            with recorded_attention(model) as found:
                (run or model)(**batch)
            calls.append(found)
    finally:
        model.train(was_training)
    if not calls or not calls[0]:
        raise ValueError(
            f"model: no attention was seen in {type(model).__name__}; expected MHLA layers, or softmax layers that call "
            'torch\'s scaled_dot_product_attention (load it with attn_implementation="sdpa")'
        )
    return calls


def measure_calls(calls, *, tolerance=None, most=2048, progress=False) -> dict:
    """Rank and entropy of every attention layer in what `record_model` gave.

    Args:
        tolerance: singular values above this share of the largest count. None: that of `torch.linalg.matrix_rank` for a
            float32 matrix of this size, max(T, S) * 1.2e-7.
        most: a rank above this is counted as `most`: larger matrices are multiplied by a random projection first, so that
            memory stays linear in T.

    Returns:
        dict: "layers", a list of dicts in the order of the forward pass: "layer" (module), "kind" ("softmax", "linear",
        "mhla"), "tokens", "heads", "key_width" (d), "samples", "part" ("whole", or of what on what), "rank" (mean over
        samples and heads), "rank_min", "rank_max", "effective_rank", "entropy" (nats, mean over rows), "uniform_entropy"
        (that of equal weights on what each row sees), "bound" (table 1: N, d or sum of min(n_b, d)), "tolerance"; MHLA
        layers also "blocks" and "mixing_rank" (of the part's mixing weights; the rank is at most d times that). "mean": the
        means of rank, effective rank and entropy over layers.
    """
    layers: dict[str, list[Attention]] = {}
    for call in (call for batch in calls for call in batch):
        layers.setdefault(call.layer, []).append(call)
    bar = tqdm(layers.items(), desc="layers", unit="layer", disable=not progress)
    measured = [_measure_layer(name, own, tolerance, most) for name, own in bar]
    means = {key: statistics.fmean(layer[key] for layer in measured) for key in ("rank", "effective_rank", "entropy")}
    return {"layers": measured, "mean": means}


def _measure_layer(name, calls, tolerance, most):
    first = calls[0]
    if any((call.q.shape[1:], call.k.shape[1:]) != (first.q.shape[1:], first.k.shape[1:]) for call in calls):
        raise ValueError(f"inputs: {name} saw different lengths; expected batches of one size")
    tokens, keys, width = first.q.shape[1], first.k.shape[1], first.q.shape[-1]
    part = (slice(tokens // 2, None), slice(0, keys // 2)) if is_causal(first) else (slice(None), slice(None))
    shape = len(range(tokens)[part[0]]), len(range(keys)[part[1]])
    if not all(shape):
        raise ValueError(f"inputs: {name} saw {tokens} token, expected at least 2 for a causal layer")
    tolerance = default_tolerance(shape, torch.float32) if tolerance is None else tolerance
    projection = None
    if min(shape) > most:  # a Gaussian matrix keeps a rank as far as its width
        random = torch.Generator().manual_seed(0)
        projection = torch.randn(shape[1], most, generator=random, dtype=torch.float64)
    heads = [(call, sample, head) for call in calls for sample in range(call.samples) for head in range(call.heads)]
    found = [_measure_head(*head, part, projection, tolerance) for head in heads]
    ranks, effective, entropies, uniform = zip(*found, strict=True)
    measured = {
        "layer": name,
        "kind": first.kind,
        "tokens": tokens,
        "heads": first.heads,
        "key_width": width,
        "samples": sum(call.samples for call in calls),
        "part": "whole" if shape == (tokens, keys) else "second half on first half",
        "rank": statistics.fmean(ranks),
        "rank_min": min(ranks),
        "rank_max": max(ranks),
        "effective_rank": statistics.fmean(effective),
        "entropy": statistics.fmean(entropies),
        "uniform_entropy": statistics.fmean(uniform),
        "bound": min(shape),
        "tolerance": tolerance,
    }
    if first.kind == "linear":
        measured["bound"] = min(*shape, width)
    elif first.kind == "mhla":
        measured["bound"] = min(rank_bound(block_sizes(first.blocks, side), width) for side in part)
    if first.mixing is not None:
        index = first.blocks.index()
        inner = first.mixing.double()[:, index[part[0]].unique()][:, :, index[part[1]].unique()]
        measured["blocks"] = first.blocks.num_blocks
        measured["mixing_rank"] = int(torch.linalg.matrix_rank(inner).max())
    return measured


def is_causal(call: Attention) -> bool:
    """Whether no token sees a later one, by the layer's nature or by its mask."""
    if call.causal or call.attn_mask is None:
        return call.causal
    return call.rows(0, 0).triu(1).abs().max().item() == 0.0


def _measure_head(call, sample, head, part, projection, tolerance):
    """Rank and effective rank of the part, mean entropy of all rows, and that of equal weights."""
    tokens, keys = call.q.shape[1], call.k.shape[1]
    step = max(1, ENTRIES_AT_ONCE // keys)
    kept, entropies, uniform = [], [], []
    first = part[0].start or 0
    for start in range(0, tokens, step):
        rows = call.rows(sample, head, slice(start, min(start + step, tokens)))
        own = row_entropy(rows)
        live = own.isfinite()
        entropies.append(own[live])
        uniform.append((rows != 0).sum(-1)[live].clamp_min(1).double().log())
        inner = rows[max(0, first - start) :, part[1]]
        kept.append(inner if projection is None else inner @ projection)
    values = torch.linalg.svdvals(torch.cat(kept))
    entropy, equal = torch.cat(entropies), torch.cat(uniform)
    if not len(entropy):
        raise ValueError(f"inputs: no token of sample {sample} sees anything in {call.layer}; expected tokens to see")
    return count_rank(values, tolerance), effective_rank(values), entropy.mean().item(), equal.mean().item()


def attention_maps(calls) -> list[dict]:
    """Of each layer's first sample: "scores" (the mean over heads, fp32 `[T, S]`, at most 256 a side, thinned out) and
    "map" (what the middle token of a grid reads, `[rows, columns]`; None for sequences and video)."""
    maps, first = [], {}
    for call in calls[0]:
        first.setdefault(call.layer, call)
    for call in first.values():
        scores = sum(call.rows(0, head) for head in range(call.heads)) / call.heads
        grid = call.grid or square_grid(call)
        step = math.ceil(max(scores.shape) / MAP_SIDE)
        entry = {"layer": call.layer, "kind": call.kind, "scores": scores[::step, ::step].float(), "map": None}
        if grid is not None and len(grid) == 2:
            prefix = scores.shape[1] - math.prod(grid)
            middle = prefix + (grid[0] // 2) * grid[1] + grid[1] // 2
            entry["map"] = scores[middle, prefix:].reshape(grid).float()
        maps.append(entry)
    return maps


def square_grid(call: Attention) -> tuple[int, int] | None:
    """The square that the tokens of a bidirectional layer form after at most eight class and register tokens."""
    tokens = call.q.shape[1]
    side = math.isqrt(tokens)
    return (side, side) if side > 1 and tokens - side * side <= 8 and not is_causal(call) else None


def describe_mixing(model) -> dict[str, dict]:
    """layer -> "start" and "learned" mixing weights, nested lists `[M, M]`; "layout", blocks per axis of a grid or None;
    "moved": half the L1 distance of their rows as shares, mean over rows (0: as at the start, 1: nothing in common)."""
    found = {}
    for layer, (start, learned, layout) in mixing_matrices(model).items():
        shares = [m.abs() / m.abs().sum(-1, keepdim=True).clamp_min(1e-30) for m in (start, learned)]
        moved = 0.5 * (shares[0] - shares[1]).abs().sum(-1).mean().item()
        lists = ([[round(x, 6) for x in row] for row in m.tolist()] for m in (start, learned))
        found[layer] = {**dict(zip(("start", "learned"), lists, strict=True)), "layout": layout, "moved": moved}
    return found
