"""Plot the figures of `analyze` to PNG files."""

import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Any

from ..checkpoints.file_io import PathLike
from ..plots import PALETTE, STYLE, drawing

FRAMED_STYLE = {**STYLE, "axes.spines.top": True, "axes.spines.right": True, "axes.edgecolor": "#c9ccd1"}
MAX_LAYERS = 6  # in a figure of maps or mixing


def plot_layers(path: PathLike, models: Mapping[str, list[dict[str, Any]]], note: str) -> None:
    """Plot rank and entropy per layer, for all models in the same axes (like figure 3b of the paper).

    Args:
        path: PNG file to write.
        models: Label -> "layers" of `measure_calls`.
        note: A line of text below the plots, such as a description of the inputs.
    """
    limits = "dotted: the largest possible rank (causal: of the second half on the first), the entropy of equal weights"
    with drawing(path, 1, 2, figsize=(11, 4.1), note=f"{limits}; {note}") as (_, (row,)):
        measures = (("Rank", "rank", "bound"), ("Entropy of a row, nats", "entropy", "uniform_entropy"))
        for axes, (title, key, limit) in zip(row, measures, strict=True):
            for (label, layers), color in zip(models.items(), itertools.cycle(PALETTE), strict=False):
                values = [layer[key] for layer in layers]
                name = f"{label}: mean {sum(values) / len(values):.4g}"
                axes.plot(values, "o-", color=color, markersize=5, label=name)
                axes.plot([layer[limit] for layer in layers], color=color, linewidth=1, linestyle=(0, (2, 3)))
            axes.set(title=title, xlabel="layer", ylim=(0, None))
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.grid(True)
            axes.legend(loc="best", fontsize=9)


def pick_evenly(items: Iterable[Any]) -> list[Any]:
    """Return at most `MAX_LAYERS` evenly spaced items, including the first and the last."""
    items = list(items)
    count = min(MAX_LAYERS, len(items))
    return [items[round(i * (len(items) - 1) / max(1, count - 1))] for i in range(count)]


def plot_maps(path: PathLike, models: Mapping[str, list[dict[str, Any]]]) -> None:
    """Plot the attention weights of up to `MAX_LAYERS` layers per model (like figure 3a of the paper).

    If the tokens form a grid, the weights of the middle token are drawn as a map below. Each matrix has its own color scale.

    Args:
        path: PNG file to write.
        models: Label -> the result of `compute_attention_maps`, for the same input.
    """
    chosen = {label: pick_evenly(enumerate(maps)) for label, maps in models.items()}
    columns = max(len(layers) for layers in chosen.values())
    lines = [
        (label, key) for key in ("scores", "map") for label, layers in chosen.items() if layers[0][1][key] is not None
    ]
    size = (2.1 * columns + 1.2, 2.15 * len(lines) + 0.4)
    with drawing(path, len(lines), columns, figsize=size, style=FRAMED_STYLE) as (_, grid):
        for axes in grid.flat:
            axes.set_axis_off()
        for row, (label, key) in zip(grid, lines, strict=True):
            for axes, (layer, entry) in zip(row, chosen[label], strict=False):
                if entry[key] is not None:
                    draw_matrix(axes, entry[key].numpy(), power=0.5)
                    axes.set_title(f"layer {layer}", loc="center")
            row[0].set_ylabel(f"{label}\n{'scores' if key == 'scores' else 'middle token'}", fontweight="bold")


def plot_mixing(path: PathLike, layers: Mapping[str, dict[str, Any]]) -> None:
    """Plot the initial and the learned mixing weights, one column per layer; rows of a matrix are query blocks.

    With a 2-D layout, the weights of each query block are drawn as a map over the grid, at the position of the block.
    Nothing is written if no layer has more than one block.

    Args:
        path: PNG file to write.
        layers: The result of `describe_mixing`.
    """
    import numpy

    plotted = pick_evenly((name, layer) for name, layer in layers.items() if len(layer["learned"]) > 1)
    if not plotted:
        return
    figsize = (2.5 * len(plotted) + 0.9, 5.4)
    with drawing(path, 2, len(plotted), figsize=figsize, style=FRAMED_STYLE) as (figure, grid):
        for column, (name, layer) in zip(grid.T, plotted, strict=True):
            layout = layer["layout"] if len(layer["layout"] or ()) == 2 else None
            matrices = [numpy.asarray(layer[key], dtype=float) for key in ("start", "learned")]
            if layout:
                matrices = [tile_matrix(matrix, layout) for matrix in matrices]
            top = max(matrix.max() for matrix in matrices)
            for axes, matrix in zip(column, matrices, strict=True):
                draw_matrix(axes, matrix, power=1.0 if layout else 0.5, top=top)
                for line, count in zip((axes.axhline, axes.axvline), layout or (), strict=False):
                    for i in range(1, count):
                        line(i * count - 0.5, color="white", linewidth=1.5)
            column[0].set_title(f"layer {re.findall(r'[0-9]+', name)[-1]}", loc="center")
        for row, label in zip(grid, ("start", "learned"), strict=True):
            row[0].set_ylabel(label, fontweight="bold")
        figure.suptitle("Which blocks each block reads", x=0.01, ha="left", fontweight="bold", fontsize=12)


def tile_matrix(matrix: Any, layout: tuple[int, int]) -> Any:
    """Rearrange mixing weights into a grid of maps, one for each query block, at the position of the block.

    Args:
        matrix: NumPy array [M, M], for M blocks. If M is larger than rows * columns, the first blocks are those of prefix
            tokens before the grid, and are dropped.
        layout: Number of rows and columns of blocks.

    Returns:
        Array [rows * rows, columns * columns].
    """
    rows, columns = layout
    values = matrix[-rows * columns :, -rows * columns :]
    return values.reshape(rows, columns, rows, columns).transpose(0, 2, 1, 3).reshape(rows * rows, columns * columns)


def draw_matrix(axes: Any, values: Any, power: float, top: float | None = None) -> None:
    """Draw an array as an image without ticks.

    Args:
        axes: The matplotlib axes.
        values: Array [rows, columns] of nonnegative numbers.
        power: Exponent of the color scale; see `PowerNorm` of matplotlib.
        top: Value at the end of the scale, which begins at 0 (default: the largest value).
    """
    from matplotlib.colors import PowerNorm

    norm = PowerNorm(power, vmin=0.0, vmax=float(top or values.max()) or 1.0)
    axes.imshow(values, cmap="magma_r", norm=norm, interpolation="nearest", aspect="equal")
    axes.set_axis_on()
    axes.set(xticks=[], yticks=[])
