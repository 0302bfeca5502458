"""Rank and entropy of every attention layer, attention maps, and what the mixing has become.

The rank of a causal layer is that of its lower left quarter (what the second half of the text reads in the first): a
triangle with a diagonal has full rank whatever the attention is.
"""

import copy
import math
import statistics

import torch
from tqdm import tqdm

from .attention import is_core, layer_of, recorded_attention

MAP_SIDE = 256


def count_rank(values: torch.Tensor, tolerance: float) -> int:
    """How many singular values are above `tolerance` times the largest."""
    return int((values > tolerance * values[0]).sum()) if values[0] > 0 else 0


def effective_rank(values: torch.Tensor) -> float:
    """exp of the entropy of the singular values' shares: 1 for rank one, N for N equal values (Roy and Vetterli 2007)."""
    return row_entropy(values).exp().item() if values[0] > 0 else 0.0


def row_entropy(rows: torch.Tensor) -> torch.Tensor:
    """Entropy in nats of each row of `[T, S]`, as shares of |weight|; NaN for a row without any weight."""
    weight = rows.abs()
    share = weight / weight.sum(-1, keepdim=True)
    return -torch.special.xlogy(share, share).sum(-1)


def rank_bound(sizes, width: int) -> int:
    """min(N, sum over blocks of min(n_b, d)): the largest rank MHLA can have (section 4.3, table 1)."""
    return min(sum(sizes), sum(min(size, width) for size in sizes))


@torch.no_grad()
def record_model(model, batch, run=None) -> dict:
    """layer -> its `Attention` calls in eval mode, in the order of the forward pass.

    batch: keyword arguments of `run`: what calls the model, such as the pipeline whose transformer it is; None: the model.
    ValueError: no layer was seen, which is what happens with attention that is neither MHLA nor torch's own function.
    """
    was_training = model.training
    model.eval()
    try:
        with recorded_attention(model) as calls:
            (run or model)(**batch)
    finally:
        model.train(was_training)
    if not calls:
        raise ValueError(
            f"model: no attention was seen in {type(model).__name__}; expected MHLA layers, or softmax layers that call "
            'torch\'s scaled_dot_product_attention (load it with attn_implementation="sdpa")'
        )
    layers = {}
    for call in calls:
        layers.setdefault(call.layer, []).append(call)
    return layers


def measure_calls(layers, *, tolerance=None, progress=False) -> dict:
    """Rank and entropy of every attention layer in what `record_model` gave.

    tolerance: singular values above this share of the largest count; None: max(T, S) * 1.2e-7, as of
    `torch.linalg.matrix_rank` for float32.

    Returns:
        dict: "layers", a list of dicts in the order of the forward pass: "layer" (module), "kind" ("softmax", "linear",
        "mhla"), "tokens", "heads", "key_width" (d), "part" ("whole", or of what on what), "rank" (mean over samples and
        heads), "rank_min", "rank_max", "effective_rank", "entropy" (nats, mean over rows), "uniform_entropy" (that of equal
        weights on what each row sees), "bound" (table 1: N, d or sum of min(n_b, d)), "tolerance", and with a local softmax
        "far_share", the weight outside of it. "mean": the means of rank, effective rank and entropy over layers.
    """
    bar = tqdm(layers.items(), desc="layers", unit="layer", disable=not progress)
    measured = [_measure_layer(name, calls, tolerance) for name, calls in bar]
    means = {key: statistics.fmean(layer[key] for layer in measured) for key in ("rank", "effective_rank", "entropy")}
    return {"layers": measured, "mean": means}


def _measure_layer(name, calls, tolerance):
    first, sizes = calls[0], {call.q.shape[1] for call in calls}
    (_, tokens, heads, width), causal = first.q.shape, first.is_causal
    if len(sizes) > 1 or tokens == 1:
        raise ValueError(f"inputs: {name} saw {sorted(sizes)} tokens, expected one number of at least 2")
    half = tokens // 2 if causal else 0
    part = slice(half, None), slice(0, half or None)
    shape = tokens - half, half or tokens
    tolerance = max(shape) * torch.finfo(torch.float32).eps if tolerance is None else tolerance
    places = [(call, sample, head) for call in calls for sample in range(len(call.q)) for head in range(heads)]
    found = [_measure_matrix(call.matrix(*place), part, tolerance) for call, *place in places]
    ranks, effective, entropies, uniform = zip(*found, strict=True)
    bound = min(*shape, width) if first.kind == "linear" else min(shape)
    if first.kind == "mhla":
        index = first.options["blocks"].index()
        bound = min(rank_bound(torch.bincount(index[side]).tolist(), width) for side in part)
    measured = {"layer": name, "kind": first.kind, "tokens": tokens, "heads": heads, "key_width": width}
    measured |= {"part": "second half on first half" if causal else "whole", "tolerance": tolerance, "bound": bound}
    measured |= {"rank": statistics.fmean(ranks), "rank_min": min(ranks), "rank_max": max(ranks)}
    means = {"effective_rank": effective, "entropy": entropies, "uniform_entropy": uniform}
    if "form" in first.options:
        means["far_share"] = [call.far_share(*place) for call, *place in places]
    return measured | {key: statistics.fmean(values) for key, values in means.items()}


def _measure_matrix(matrix, part, tolerance):
    """Rank and effective rank of the part, mean entropy of all rows, and that of equal weights."""
    values, live = torch.linalg.svdvals(matrix[part]), matrix[(matrix != 0).any(-1)]
    equal = (live != 0).sum(-1).double().log()
    return count_rank(values, tolerance), effective_rank(values), row_entropy(live).mean().item(), equal.mean().item()


def attention_maps(layers) -> list[dict]:
    """Of each layer's first sample: "scores" (the mean over heads, fp32 `[T, S]`, at most 256 a side, thinned out) and
    "map" (what the middle token of a grid reads, `[rows, columns]`; None for sequences and video)."""
    maps = []
    for name, (call, *_) in layers.items():
        heads = call.q.shape[2]
        scores = sum(call.matrix(0, head) for head in range(heads)) / heads
        step = math.ceil(max(scores.shape) / MAP_SIDE)
        entry = {"layer": name, "kind": call.kind, "scores": scores[::step, ::step].float(), "map": None}
        grid = call.grid or square_grid(call)
        if len(grid) == 2:
            prefix = scores.shape[1] - math.prod(grid)
            middle = prefix + (grid[0] // 2) * grid[1] + grid[1] // 2
            entry["map"] = scores[middle, prefix:].reshape(grid).float()
        maps.append(entry)
    return maps


def square_grid(call) -> tuple:
    """The square that the tokens of a bidirectional layer form after at most eight class and register tokens, or ()."""
    side = math.isqrt(call.q.shape[1])
    return (side, side) if side > 1 and call.q.shape[1] - side * side <= 8 and not call.is_causal else ()


@torch.no_grad()
def describe_mixing(model) -> dict[str, dict]:
    """layer -> "start" and "learned" mixing weights, nested lists `[M, M]`, the mean over heads where each has its own;
    "layout", blocks per axis of a grid or None; "moved": half the L1 distance of their rows as shares, mean over rows (0: as
    at the start, 1: nothing in common)."""
    found = {}
    for name, module in model.named_modules():
        if is_core(module):
            start = copy.deepcopy(module.mixing)
            for parameter, value in start.initial_values().items():
                start.get_parameter(parameter).copy_(value)
            both = [_weights(mixing) for mixing in (start, module.mixing)]
            shares = [m.abs() / m.abs().sum(-1, keepdim=True).clamp_min(1e-30) for m in both]
            start, learned = ([[round(x, 6) for x in row] for row in m.tolist()] for m in both)
            moved = 0.5 * (shares[0] - shares[1]).abs().sum(-1).mean().item()
            layout = getattr(module.mixing, "layout", None)
            layout = list(layout) if layout else None
            found[layer_of(name)] = {"start": start, "learned": learned, "layout": layout, "moved": moved}
    return found


def _weights(mixing):
    """The matrix of a mixing module, the mean over heads; that of decays for 32 blocks."""
    if hasattr(mixing, "num_decays"):
        matrix = mixing()[0].matrix(32)
    else:
        matrix = mixing(getattr(mixing, "layout", None) or mixing.weight.shape[-1])
    return matrix.float().cpu().reshape(-1, *matrix.shape[-2:]).mean(0)
