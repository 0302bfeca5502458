"""The rank, entropy, and mixing of attention: the paper's table 1 and figures 3b and 4b.

    python -m experiments.attention      ranks with random features, for softmax, plain linear attention, and MHLA (table 1)

`record_model` records the attention of image models for `python -m experiments.classifiers`. All singular values are
computed in fp64, so that ranks are measured and not derived.
"""

import contextlib
import copy
import dataclasses
import itertools
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from tqdm import tqdm

from mhla_hf.checkpoints.file_io import read_json
from mhla_hf.cli.main import script
from mhla_hf.nn.core import prepare_operands
from mhla_hf.nn.grid import GridMHLA, GridMixing
from mhla_hf.ops.api import mhla
from mhla_hf.ops.blocks import Blocks
from mhla_hf.plots import STYLE, drawing

from .rows import make_parser, markdown, write_record

FRAMED_STYLE = {**STYLE, "axes.spines.top": True, "axes.spines.right": True, "axes.edgecolor": "#c9ccd1"}
LENGTHS, WIDTHS, BLOCKS = (64, 128, 256, 512, 1024, 2048, 4096), (16, 32, 64, 72), 16  # of random features
KINDS = ("linear", "mhla", "start", "softmax")


@dataclasses.dataclass
class Attention:
    """One recorded call of an attention layer: q [B, T, H, K] and k [B, S, H, K], after the feature map and RoPE.

    `kind` is "softmax", "mhla", or "linear" (MHLA with uniform mixing). `options` are the keyword arguments of
    `scaled_dot_product_attention` or of `mhla`, whose "mixing" [H or 1, M, M] is among them.
    """

    kind: str
    q: torch.Tensor
    k: torch.Tensor
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def matrix(self, sample: int = 0, head: int = 0) -> torch.Tensor:
        """Return the weights by which one head multiplies the values, fp64 [T, S], by giving it unit vectors as values."""
        options = dict(self.options)
        q, k = (x[sample, :, head : head + 1].double()[None] for x in (self.q, self.k))
        units = torch.eye(k.shape[1], dtype=torch.float64)[None, :, None]
        if self.kind == "softmax":
            q, k, units = (x.transpose(1, 2) for x in (q, k, units))
            return F.scaled_dot_product_attention(q, k, units, **options)[0, 0]
        mixing = options.pop("mixing").double()
        for name in ("q_den", "k_den"):
            if options.get(name) is not None:
                options[name] = options[name][sample, :, head : head + 1].double()[None]
        if options.get("key_mask") is not None:
            options["key_mask"] = options["key_mask"][[sample]]
        mixing = mixing[[head if len(mixing) > 1 else 0]]
        o: Any = mhla(q, k, units, mixing, impl="reference", **options)
        return o[0, :, 0]


class SoftmaxRecorder(TorchFunctionMode):
    """Appends the calls of `scaled_dot_product_attention`, without masks, to `calls`."""

    def __init__(self, calls: list[Attention]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            q, k = (x.detach().transpose(1, 2).cpu() for x in args[:2])
            self.calls.append(Attention("softmax", q, k, {"scale": kwargs.get("scale")}))
        return func(*args, **kwargs)


@torch.no_grad()
def record_model(model: nn.Module, batch: Mapping[str, Any]) -> list[Attention]:
    """Run a model in eval mode, and return the calls of its attention layers. Its training mode is restored."""
    calls: list[Attention] = []

    def record_core(core: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = {**dict(zip("qkv", args, strict=False)), **kwargs}
        key_mask = inputs.get("key_mask")
        blocks = Blocks.grid(tuple(inputs["grid"]), core.settings.layout, prefix=core.prefix)
        q, k, v = (inputs[name] for name in "qkv")
        q, k, _, operands = prepare_operands(core, q, k, v, key_mask, inputs.get("rotate"))
        mixing = core.mixing(blocks.counts).detach().cpu()
        mixing = mixing.reshape(-1, *mixing.shape[-2:])
        options = {name: x.detach().cpu() if isinstance(x, torch.Tensor) else x for name, x in operands.items()}
        options = {**options, "key_mask": key_mask, "blocks": blocks, "mixing": mixing}
        options.pop("unrounded", None)
        first_block = mixing[..., :1]
        is_uniform = bool(((mixing - first_block).abs() <= 1e-6 * first_block.abs()).all())
        calls.append(Attention("linear" if is_uniform else "mhla", q.detach().cpu(), k.detach().cpu(), options))

    was_training = model.training
    with contextlib.ExitStack() as stack:
        stack.callback(model.train, was_training)
        for module in model.modules():
            if isinstance(module, GridMHLA):
                stack.enter_context(module.register_forward_pre_hook(record_core, with_kwargs=True))
        stack.enter_context(SoftmaxRecorder(calls))
        model.eval()(**batch)
    return calls


def count_rank(values: torch.Tensor, tolerance: float) -> int:
    """Count the singular values, given in descending order, that exceed `tolerance` times the largest one."""
    return int((values > tolerance * values[0]).sum()) if values[0] > 0 else 0


def effective_rank(values: torch.Tensor) -> float:
    """Return the effective rank (Roy and Vetterli 2007), exp(entropy of the singular values divided by their sum)."""
    return row_entropy(values).exp().item() if values[0] > 0 else 0.0


def row_entropy(rows: torch.Tensor) -> torch.Tensor:
    """Return the entropy in nats of each row of weights [..., S], divided by their sum; NaN for a row of zeros."""
    shares = rows.abs() / rows.abs().sum(-1, keepdim=True)
    return -torch.special.xlogy(shares, shares).sum(-1)


def bound_of(kind: str, tokens: int, width: int, sizes: Sequence[int]) -> int:
    """Return the largest rank of attention; of MHLA, the sum of min(n_b, d) over blocks (section 4.3, table 1)."""
    if kind in ("linear", "softmax"):
        return tokens if kind == "softmax" else min(tokens, width)
    return min(sum(sizes), sum(min(size, width) for size in sizes))


def measure_calls(calls: Sequence[Attention], tolerance: float | None = None) -> dict[str, Any]:
    """Measure rank (of singular values above `tolerance` times the largest) and entropy: means over samples and heads."""
    layers: list[dict[str, Any]] = []
    for call in calls:
        samples, tokens, heads, width = call.q.shape
        limit = tokens * torch.finfo(torch.float32).eps if tolerance is None else tolerance
        measures: dict[str, list[float]] = {}
        for sample, head in itertools.product(range(samples), range(heads)):
            matrix = call.matrix(sample, head)
            values = torch.linalg.svdvals(matrix)
            measures.setdefault("rank", []).append(count_rank(values, limit))
            measures.setdefault("effective_rank", []).append(effective_rank(values))
            measures.setdefault("entropy", []).append(row_entropy(matrix).mean().item())
            measures.setdefault("uniform_entropy", []).append((matrix != 0).sum(-1).double().log().mean().item())
        sizes = call.options["blocks"].sizes() if "blocks" in call.options else ()
        means: dict[str, Any] = {name: statistics.fmean(values) for name, values in measures.items()}
        bound = bound_of(call.kind, tokens, width, sizes)
        layers.append({"kind": call.kind, "tokens": tokens, "bound": bound, **means})
    names = ("rank", "effective_rank", "entropy")
    return {"layers": layers, "mean": {name: statistics.fmean(layer[name] for layer in layers) for name in names}}


@torch.no_grad()
def describe_mixing(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the "start" and "learned" mixing [M, M] of each MHLA layer, the means over heads, and its "layout"."""
    layers = {}
    for name, module in model.named_modules():
        if isinstance(module, GridMHLA):
            mixing: Any = module.mixing
            initial = copy.deepcopy(mixing)
            initial.weight.copy_(initial.initial_values()["weight"])
            start, learned = (x(x.layout).cpu().reshape(-1, *x.weight.shape[-2:]).mean(0) for x in (initial, mixing))
            layers[name.removesuffix(".mhla")] = {"start": start, "learned": learned, "layout": list(mixing.layout)}
    return layers


def plot_mixing(path: str | Path, layers: Mapping[str, dict[str, Any]]) -> None:
    """Plot initial and learned mixing from `describe_mixing`, each block's row at its place in the grid (figure 4b)."""
    with drawing(path, 2, len(layers), figsize=(2.5 * len(layers) + 0.9, 5.4), style=FRAMED_STYLE) as (figure, grid):
        for column, (name, layer) in zip(grid.T, layers.items(), strict=True):
            tiles = [tile_matrix(layer[key], layer["layout"]) for key in ("start", "learned")]
            top = max(tile.max().item() for tile in tiles)
            for axes, tile in zip(column, tiles, strict=True):
                axes.imshow(tile.numpy(), cmap="magma_r", vmin=0.0, vmax=top, interpolation="nearest")
                axes.set(xticks=[], yticks=[])
                for line, count in zip((axes.axhline, axes.axvline), layer["layout"], strict=True):
                    for i in range(1, count):
                        line(i * count - 0.5, color="white", linewidth=1.5)
            column[0].set_title(f"layer {re.findall(r'[0-9]+', name)[-1]}", loc="center")
        for row, label in zip(grid, ("start", "learned"), strict=True):
            row[0].set_ylabel(label, fontweight="bold")
        figure.suptitle("Which blocks each block reads", x=0.01, ha="left", fontweight="bold", fontsize=12)


def tile_matrix(matrix: torch.Tensor, layout: Sequence[int]) -> torch.Tensor:
    """Return mixing weights [M, M] as maps over the grid, one at the place of each query block, without a prefix block."""
    rows, columns = layout
    values = matrix[-rows * columns :, -rows * columns :]
    return values.reshape(rows, columns, rows, columns).transpose(1, 2).reshape(rows * rows, columns * columns)


def measure_random_rank(tokens: int, width: int, *, blocks: int = BLOCKS, seed: int = 0) -> dict[str, Any]:
    """Measure the ranks of attention with Gaussian q and k [N, d], at a tolerance of N times fp64's eps.

    "mhla" has a random mixing matrix, "start" the initial one of the paper.
    """
    generator = torch.Generator().manual_seed(seed)
    grid = Blocks.grid((tokens,), (blocks,))
    q, k = (torch.randn(1, tokens, 1, width, generator=generator, dtype=torch.float64) for _ in range(2))
    random_mixing = torch.rand(1, grid.num_blocks, grid.num_blocks, generator=generator, dtype=torch.float64)
    random_mixing = random_mixing / random_mixing.sum(-1, keepdim=True)
    start = GridMixing((grid.num_blocks,), form="direct").weight.detach()[None]
    mixings = {"linear": torch.full_like(random_mixing, 1.0 / grid.num_blocks), "mhla": random_mixing, "start": start}
    features = q.relu() + 1e-6, k.relu() + 1e-6
    calls = {kind: Attention("mhla", *features, {"mixing": x, "blocks": grid}) for kind, x in mixings.items()}
    calls["softmax"] = Attention("softmax", q, k)
    row: dict[str, Any] = {"tokens": tokens, "width": width, "blocks": grid.num_blocks, "seed": seed, "rank": {}}
    row |= {"tolerance": tokens * torch.finfo(torch.float64).eps, "bound": {}, "smallest": {}}
    for kind in KINDS:
        values = torch.linalg.svdvals(calls[kind].matrix())
        row["rank"][kind] = count_rank(values, row["tolerance"])
        row["bound"][kind] = bound_of(kind, tokens, width, grid.sizes())
        row["smallest"][kind] = (values[row["rank"][kind] - 1] / values[0]).item()
    return row


def study_random_rank(
    out: str | Path, lengths: Sequence[int] = LENGTHS, widths: Sequence[int] = WIDTHS
) -> dict[str, Any]:
    """Run `measure_random_rank` for the sizes that `out`/rank.json lacks, and write it."""
    path = Path(out, "rank.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = read_json(path) or {"rows": []}
    done = {(row["tokens"], row["width"]) for row in record["rows"]}
    missing = [size for size in itertools.product(lengths, widths) if size not in done]
    for tokens, width in tqdm(missing, desc="rank", unit="size"):
        rows = [*record["rows"], measure_random_rank(tokens, width)]
        rows.sort(key=lambda row: (row["tokens"], row["width"]))
        record = write_record(path, {"rows": rows}, "python -m experiments.attention")
    return record


def render_random_rank(record: Mapping[str, Any]) -> str:
    """Render the measured rank and the bound of table 1 of each kind of attention, for the most tokens."""
    lines = []
    most_tokens = max(row["tokens"] for row in record["rows"])
    for row in (row for row in record["rows"] if row["tokens"] == most_tokens):
        cells = [f"{row['rank'][kind]:,} of {row['bound'][kind]:,}" for kind in KINDS]
        lines.append([f"{row['tokens']:,}", str(row["width"]), str(row["blocks"]), *cells])
    kinds = ["plain linear", "MHLA, random mixing", "MHLA, locality start", "softmax"]
    return markdown(["N", "d", "blocks", *kinds], lines, left=0)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--out", default="out/rank", help="folder of rank.json (default: out/rank)")
    torch.set_num_threads(1)
    print(render_random_rank(study_random_rank(parser.parse_args(arguments).out)))


if __name__ == "__main__":
    script(main)
