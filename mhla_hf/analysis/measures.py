"""analyze(): rank and entropy of every attention layer, attention maps, and what the mixing has become.

Unusual: models of every kind go through the same measures on the same inputs, so that they can stand side by side; what a
number means (tolerance, which part of the matrix) is in the record beside it.
"""

import math
import statistics

import torch
from tqdm import tqdm

from .matrices import Attention, mixing_matrices, recorded_attention
from .ranks import (
    block_sizes,
    count_rank,
    default_tolerance,
    effective_rank,
    random_projection,
    rank_bound,
    row_entropy,
)

ENTRIES_AT_ONCE = 1 << 24
MAP_SIDE = 256


@torch.no_grad()
def record_model(model, batches, run=None) -> list[list[Attention]]:
    """The attention calls of `model` in eval mode, per batch; batches: keyword arguments of `run`, by default of the model.

    run: what calls the model, such as the pipeline whose transformer it is.

    ValueError: no layer was seen, which is what happens with attention that is neither MHLA nor torch's own function.
    """
    was_training = model.training
    model.eval()
    try:
        calls = []
        for batch in batches:
            with recorded_attention(model) as found:
                (model if run is None else run)(**batch)
            calls.append(found)
    finally:
        model.train(was_training)
    if not calls or not calls[0]:
        raise ValueError(
            f"model: no attention was seen in {type(model).__name__}; expected MHLA layers, or softmax layers that call "
            'torch\'s scaled_dot_product_attention (load it with attn_implementation="sdpa")'
        )
    return calls


def measure_model(model, batches, *, tolerance=None, most=2048, progress=False) -> dict:
    """`measure_calls` of what `model` does on `batches` (dicts of its keyword arguments)."""
    return measure_calls(record_model(model, batches), tolerance=tolerance, most=most, progress=progress)


def measure_calls(calls, *, tolerance=None, most=2048, progress=False) -> dict:
    """Rank and entropy of every attention layer in what `record_model` gave.

    Args:
        tolerance: singular values above this share of the largest count. None: that of `torch.linalg.matrix_rank` for a
            float32 matrix of this size, max(T, S) * 1.2e-7.
        most: a rank above this is counted as `most`: larger matrices are multiplied by a random projection first, so that
            memory stays linear in T.

    Returns:
        dict: "layers", a list of dicts in the order of the forward pass: "layer" (module), "kind" ("softmax", "linear",
        "mhla"), "tokens", "heads", "key_width" (d), "samples", "part" (see `measures`), "rank" (mean over samples and
        heads), "rank_min", "rank_max", "effective_rank", "entropy" (nats, mean over rows), "uniform_entropy" (that of equal
        weights on what each row sees), "bound" (table 1: N, d or sum of min(n_b, d)), "tolerance"; MHLA layers also
        "blocks" and "mixing_rank" (of the part's mixing weights; the rank is at most d times that). "mean": the means of
        rank, effective rank and entropy over layers.
    """
    layers: dict[str, list[Attention]] = {}
    for batch in calls:
        for call in batch:
            layers.setdefault(call.layer, []).append(call)
    measured = [
        _measure_layer(name, own, tolerance, most)
        for name, own in tqdm(layers.items(), desc="layers", unit="layer", disable=not progress)
    ]
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
    projection = random_projection(shape[1], most) if shape[0] > most else None
    found = [
        _measure_head(call, sample, head, part, projection, tolerance)
        for call in calls
        for sample in range(call.samples)
        for head in range(call.heads)
    ]
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
        "bound": _bound(first, part, shape, width),
        "tolerance": tolerance,
    }
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


def _bound(call, part, shape, width):
    if call.kind == "softmax":
        return min(shape)
    if call.kind == "linear":
        return min(*shape, width)
    sides = (block_sizes(call.blocks, side.start or 0, side.stop) for side in part)
    return min(rank_bound(sizes, width) for sizes in sides)


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
        matrices = {
            name: [[round(x, 6) for x in row] for row in m.tolist()]
            for name, m in (("start", start), ("learned", learned))
        }
        found[layer] = matrices | {"layout": layout, "moved": moved}
    return found
