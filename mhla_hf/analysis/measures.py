"""Measure attention layers: rank, entropy, attention maps, and how far the mixing has moved in training.

For a causal layer, the rank is that of the lower left quarter of the attention matrix (queries in the second half of the
text, keys in the first half), because any triangular matrix with a nonzero diagonal has full rank.
"""

import copy
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from .attention import Attention, is_core, layer_of, record_attention

MAX_MAP_SIZE = 256  # rows and columns of an attention map

Calls = dict[str, list[Attention]]  # layer -> its recorded calls


def count_rank(values: torch.Tensor, tolerance: float) -> int:
    """Count the singular values, given in descending order, that exceed `tolerance` times the largest one."""
    return int((values > tolerance * values[0]).sum()) if values[0] > 0 else 0


def effective_rank(values: torch.Tensor) -> float:
    """Return the effective rank (Roy and Vetterli 2007), exp(entropy of the singular values divided by their sum)."""
    return row_entropy(values).exp().item() if values[0] > 0 else 0.0


def row_entropy(rows: torch.Tensor) -> torch.Tensor:
    """Return the entropy of each row in nats; NaN for a row of zeros.

    Args:
        rows: Rows of S weights, [..., S]. The absolute weights of each row are divided by their sum first.

    Returns:
        The entropies, [...].
    """
    weight = rows.abs()
    share = weight / weight.sum(-1, keepdim=True)
    return -torch.special.xlogy(share, share).sum(-1)


def rank_bound(sizes: Iterable[int], width: int) -> int:
    """Return min(N, sum over blocks of min(n_b, d)), the largest rank that MHLA can have (section 4.3, table 1).

    Args:
        sizes: Tokens per block, n_b. Their sum is N.
        width: Width of the keys, d.
    """
    sizes = list(sizes)
    return min(sum(sizes), sum(min(size, width) for size in sizes))


@torch.no_grad()
def record_model(model: nn.Module, batch: Mapping[str, Any], run: Callable[..., Any] | None = None) -> Calls:
    """Run a model in eval mode without gradients and record its attention. Its training mode is restored at the end.

    Args:
        model: The model whose layers are recorded.
        batch: Keyword arguments of `run`.
        run: Function that calls the model, e.g. its pipeline (default: the model itself).

    Returns:
        A dict from layer to its calls, in the order of the forward pass.

    Raises:
        ValueError: No layer is MHLA or calls torch's `scaled_dot_product_attention`, or the inputs cannot be recorded; see
            `record_attention`.
    """
    was_training = model.training
    model.eval()
    try:
        with record_attention(model) as calls:
            (run or model)(**batch)
    finally:
        model.train(was_training)
    if not calls:
        raise ValueError(
            f"model: got {type(model).__name__}, in which no attention was seen, expected MHLA layers, or softmax layers "
            'that call torch\'s scaled_dot_product_attention (load it with attn_implementation="sdpa").'
        )
    layers: Calls = {}
    for call in calls:
        layers.setdefault(call.layer, []).append(call)
    return layers


def measure_calls(layers: Calls, *, tolerance: float | None = None, progress: bool = False) -> dict[str, Any]:
    """Measure rank and entropy of every attention layer that `record_model` recorded.

    Args:
        layers: Layer -> its calls.
        tolerance: Singular values above this fraction of the largest count toward the rank (default: the number of rows or
            of columns, whichever is larger, times 1.2e-7, as in `torch.linalg.matrix_rank` for float32).
        progress: Whether to show a progress bar.

    Returns:
        A dict with "layers", a list of dicts in the order of the forward pass, and "mean", a dict with the means of
        "rank", "effective_rank" and "entropy" over layers. The keys of a layer are
            - "layer" (module), "kind" ("softmax", "linear", "mhla"), "tokens", "heads", "key_width" (d);
            - "part": the part of the matrix whose rank is measured, "whole" or "second half on first half";
            - "rank" (mean over samples and heads), "rank_min", "rank_max", "effective_rank";
            - "bound": the largest possible rank of that part (see `rank_bound` for MHLA); "tolerance";
            - "entropy": mean over rows, in nats; "uniform_entropy": the same for equal weights on the tokens that each row
              sees;
            - in layers that mix by decays, "far_share": the share of the weights outside the window (`Attention.far_share`).

    Raises:
        ValueError: The calls of a layer have different numbers of tokens, or a single one.
    """
    bar = tqdm(layers.items(), desc="layers", unit="layer", disable=not progress)
    measured = [_measure_layer(name, calls, tolerance) for name, calls in bar]
    means = {key: statistics.fmean(layer[key] for layer in measured) for key in ("rank", "effective_rank", "entropy")}
    return {"layers": measured, "mean": means}


def _measure_layer(name: str, calls: list[Attention], tolerance: float | None) -> dict[str, Any]:
    """Return the dict of one layer in "layers" of `measure_calls`."""
    first = calls[0]
    lengths = {call.q.shape[1] for call in calls}
    _, tokens, heads, width = first.q.shape
    causal = first.is_causal
    if len(lengths) > 1 or tokens == 1:
        raise ValueError(f"inputs: {name} got {sorted(lengths)} tokens, expected one number of at least 2.")
    half = tokens // 2 if causal else 0
    part = slice(half, None), slice(0, half or None)
    shape = tokens - half, half or tokens
    tolerance = max(shape) * torch.finfo(torch.float32).eps if tolerance is None else tolerance
    matrices = [(call, sample, head) for call in calls for sample in range(len(call.q)) for head in range(heads)]
    values = [_measure_matrix(call.matrix(sample, head), part, tolerance) for call, sample, head in matrices]
    ranks, effective_ranks, entropies, uniform_entropies = zip(*values, strict=True)
    bound = min(*shape, width) if first.kind == "linear" else min(shape)
    if first.kind == "mhla":
        index = first.options["blocks"].index()
        bound = min(rank_bound(torch.bincount(index[side]).tolist(), width) for side in part)
    measured = {
        "layer": name,
        "kind": first.kind,
        "tokens": tokens,
        "heads": heads,
        "key_width": width,
        "part": "second half on first half" if causal else "whole",
        "tolerance": tolerance,
        "bound": bound,
        "rank": statistics.fmean(ranks),
        "rank_min": min(ranks),
        "rank_max": max(ranks),
        "effective_rank": statistics.fmean(effective_ranks),
        "entropy": statistics.fmean(entropies),
        "uniform_entropy": statistics.fmean(uniform_entropies),
    }
    if "form" in first.options:
        measured["far_share"] = statistics.fmean(call.far_share(sample, head) for call, sample, head in matrices)
    return measured


def _measure_matrix(
    matrix: torch.Tensor, part: tuple[slice, slice], tolerance: float
) -> tuple[int, float, float, float]:
    """Measure one attention matrix.

    Args:
        matrix: Attention weights, fp64 [queries, keys].
        part: Slices of rows and columns to compute the ranks from.
        tolerance: See `count_rank`.

    Returns:
        Rank, effective rank, mean entropy of the rows in nats, and mean entropy of rows with equal weights on all tokens
        that each row sees. Rows of zeros are left out of the means.
    """
    values = torch.linalg.svdvals(matrix[part])
    nonzero_rows = matrix[(matrix != 0).any(-1)]
    uniform_entropy = (nonzero_rows != 0).sum(-1).double().log()
    entropy = row_entropy(nonzero_rows).mean().item()
    return count_rank(values, tolerance), effective_rank(values), entropy, uniform_entropy.mean().item()


def compute_attention_maps(layers: Calls) -> list[dict[str, Any]]:
    """Return the attention weights of each layer on the first sample, for plotting.

    Returns:
        A list of dicts with "layer", "kind", "scores" (mean over heads, fp32 [queries, keys], subsampled to at most 256
        rows and columns), and "map" (the weights of the grid's middle token, [rows, columns]; None for sequences and video).
    """
    maps = []
    for name, (call, *_) in layers.items():
        heads = call.q.shape[2]
        scores = torch.stack([call.matrix(0, head) for head in range(heads)]).sum(0) / heads
        step = math.ceil(max(scores.shape) / MAX_MAP_SIZE)
        entry = {"layer": name, "kind": call.kind, "scores": scores[::step, ::step].float(), "map": None}
        grid = call.grid or find_square_grid(call)
        if len(grid) == 2:
            prefix = scores.shape[1] - math.prod(grid)
            middle = prefix + (grid[0] // 2) * grid[1] + grid[1] // 2
            entry["map"] = scores[middle, prefix:].reshape(grid).float()
        maps.append(entry)
    return maps


def find_square_grid(call: Attention) -> tuple[int, ...]:
    """Return the square grid that a bidirectional layer's tokens form after at most 8 prefix tokens; () if there is none."""
    side = math.isqrt(call.q.shape[1])
    return (side, side) if side > 1 and call.q.shape[1] - side * side <= 8 and not call.is_causal else ()


@torch.no_grad()
def describe_mixing(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Describe how the mixing weights of each MHLA layer have changed since initialization.

    Returns:
        A dict from layer to a dict with "start" and "learned" (nested lists [M, M] for M blocks, the mean over heads),
        "layout" (blocks per axis of a grid, or None), and "moved" (half the L1 distance between the normalized rows, mean
        over rows: 0 for unchanged, 1 for disjoint).
    """
    layers = {}
    for name, module in model.named_modules():
        if is_core(module):
            mixing: Any = module.mixing
            initial = copy.deepcopy(mixing)
            for parameter, value in initial.initial_values().items():
                initial.get_parameter(parameter).copy_(value)
            start, learned = _mixing_matrix(initial), _mixing_matrix(mixing)
            start_shares, learned_shares = (
                matrix.abs() / matrix.abs().sum(-1, keepdim=True).clamp_min(1e-30) for matrix in (start, learned)
            )
            layout = getattr(mixing, "layout", None)
            layers[layer_of(name)] = {
                "start": _rounded_rows(start),
                "learned": _rounded_rows(learned),
                "layout": list(layout) if layout else None,
                "moved": 0.5 * (start_shares - learned_shares).abs().sum(-1).mean().item(),
            }
    return layers


def _rounded_rows(matrix: torch.Tensor) -> list[list[float]]:
    """Return the rows of a matrix as lists, rounded to 6 decimals."""
    return [[round(value, 6) for value in row] for row in matrix.tolist()]


def _mixing_matrix(mixing: Any) -> torch.Tensor:
    """Return the matrix of a mixing module, averaged over heads, fp32 [M, M] for M blocks; M is 32 for decays."""
    if hasattr(mixing, "num_decays"):
        matrix = mixing()[0].matrix(32)
    else:
        matrix = mixing(getattr(mixing, "layout", None) or mixing.weight.shape[-1])
    return matrix.float().cpu().reshape(-1, *matrix.shape[-2:]).mean(0)
