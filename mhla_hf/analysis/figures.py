"""The pictures of `analyze`. Plain numbers in, one PNG out, aside and renamed."""

import itertools
import re

from ..plots import PALETTE, STYLE, drawing

FRAMED = {**STYLE, "axes.spines.top": True, "axes.spines.right": True, "axes.edgecolor": "#c9ccd1"}
MOST_LAYERS = 6


def plot_layers(path, models, note):
    """Rank and entropy per layer, model beside model (figure 3b).

    models: label -> "layers" of `measure_calls`. note: one line below: what the inputs were.
    """
    limits = (
        "dotted: the largest possible rank (causal: of the second half of the text on the first), the entropy of equal"
    )
    with drawing(path, 1, 2, figsize=(11, 4.1), note=f"{limits} weights; {note}") as (_, (both,)):
        measures = (("Rank", "rank", "bound"), ("Entropy of a row, nats", "entropy", "uniform_entropy"))
        for axes, (title, key, limit) in zip(both, measures, strict=True):
            for (label, layers), color in zip(models.items(), itertools.cycle(PALETTE), strict=False):
                values = [layer[key] for layer in layers]
                name = f"{label}: mean {sum(values) / len(values):.4g}"
                axes.plot(values, "o-", color=color, markersize=5, label=name)
                axes.plot([layer[limit] for layer in layers], color=color, linewidth=1, linestyle=(0, (2, 3)))
            axes.set(title=title, xlabel="layer", ylim=(0, None))
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.grid(True)
            axes.legend(loc="best", fontsize=9)


def thinned(items):
    """At most MOST_LAYERS of `items`, evenly, the first and the last among them."""
    items = list(items)
    most = min(MOST_LAYERS, len(items))
    return [items[round(i * (len(items) - 1) / max(1, most - 1))] for i in range(most)]


def plot_maps(path, models):
    """Attention scores of each layer, and below them what the middle token of the grid reads (figure 3a).

    models: label -> entries of `attention_maps`, of one input. Each picture has its own scale.
    """
    chosen = {label: thinned(enumerate(maps)) for label, maps in models.items()}
    columns = max(len(own) for own in chosen.values())
    lines = [(label, key) for key in ("scores", "map") for label, own in chosen.items() if own[0][1][key] is not None]
    size = (2.1 * columns + 1.2, 2.15 * len(lines) + 0.4)
    with drawing(path, len(lines), columns, figsize=size, style=FRAMED) as (_, grid):
        for axes in grid.flat:
            axes.set_axis_off()
        for row, (label, key) in zip(grid, lines, strict=True):
            for axes, (layer, entry) in zip(row, chosen[label], strict=False):
                if entry[key] is not None:
                    draw(axes, entry[key].numpy(), power=0.5)
                    axes.set_title(f"layer {layer}", loc="center")
            row[0].set_ylabel(f"{label}\n{'scores' if key == 'scores' else 'middle token'}", fontweight="bold")


def plot_mixing(path, layers):
    """Mixing weights at the start and as learned, a column per layer; writes nothing where no layer has more than one block.

    layers: what `describe_mixing` gives, rows = query blocks. Over a grid every query block is a map in its own place.
    """
    import numpy

    shown = thinned((name, layer) for name, layer in layers.items() if len(layer["learned"]) > 1)
    if not shown:
        return
    with drawing(path, 2, len(shown), figsize=(2.5 * len(shown) + 0.9, 5.4), style=FRAMED) as (figure, grid):
        for column, (name, layer) in zip(grid.T, shown, strict=True):
            tiles = layer["layout"] if len(layer["layout"] or ()) == 2 else None
            pictures = [numpy.asarray(layer[key], dtype=float) for key in ("start", "learned")]
            pictures = [tiled(picture, tiles) for picture in pictures] if tiles else pictures
            for axes, picture in zip(column, pictures, strict=True):
                draw(axes, picture, power=1.0 if tiles else 0.5, top=max(x.max() for x in pictures))
                for line, count in zip((axes.axhline, axes.axvline), tiles or (), strict=False):
                    for i in range(1, count):
                        line(i * count - 0.5, color="white", linewidth=1.5)
            column[0].set_title(f"layer {re.findall(r'[0-9]+', name)[-1]}", loc="center")
        for row, label in zip(grid, ("start", "learned"), strict=True):
            row[0].set_ylabel(label, fontweight="bold")
        figure.suptitle("Which blocks each block reads", x=0.01, ha="left", fontweight="bold", fontsize=12)


def tiled(matrix, layout):
    """`[M, M]` as `[rows * rows, columns * columns]`: tile (i, j) is what query block (i, j) reads, over the grid; a block
    of prefix tokens before it is left out."""
    rows, columns = layout
    values = matrix[-rows * columns :, -rows * columns :]
    return values.reshape(rows, columns, rows, columns).transpose(0, 2, 1, 3).reshape(rows * rows, columns * columns)


def draw(axes, values, power, top=None):
    """One matrix as a picture without ticks; power: of the scale of colors, which ends at `top`."""
    from matplotlib.colors import PowerNorm

    norm = PowerNorm(power, vmin=0.0, vmax=float(top or values.max()) or 1.0)
    axes.imshow(values, cmap="magma_r", norm=norm, interpolation="nearest", aspect="equal")
    axes.set_axis_on()
    axes.set(xticks=[], yticks=[])
