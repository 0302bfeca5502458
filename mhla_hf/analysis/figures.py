"""The pictures of `analyze`. Plain numbers in, one PNG out, aside and renamed.

A mixing matrix over a grid is shown as that grid: each query block is a small map, in its own place, of what it reads
(figure 4b of the paper, for all blocks at once).
"""

import math

from ..plots import COLORS, STYLE, pyplot, save_figure

KIND_COLORS = {"softmax": COLORS["teacher"], "linear": COLORS["linear"], "mhla": COLORS["mhla"]}
MORE_COLORS = ("#2f9468", "#8e4fb0", "#c2445a", "#5f7d95", "#8a6d3b")
FRAMED = {**STYLE, "axes.spines.top": True, "axes.spines.right": True}
MOST_LAYERS = 6


def choose_colors(kinds: dict) -> dict:
    """label -> color: the kind's own for the first of its kind, another for the next."""
    chosen, rest = {}, iter(MORE_COLORS * len(kinds))
    for label, kind in kinds.items():
        own = KIND_COLORS.get(kind)
        chosen[label] = own if own and own not in chosen.values() else next(rest)
    return chosen


def plot_layers(path, models, note=""):
    """Rank and entropy per layer, model beside model (figure 3b).

    models: label -> "layers" of `measure_calls`. note: one line below: what the inputs were.
    """
    plt = pyplot()
    kinds = {label: {layer["kind"] for layer in layers} for label, layers in models.items()}
    colors = choose_colors({
        label: next((kind for kind in ("mhla", "linear") if kind in own), "softmax") for label, own in kinds.items()
    })  # fmt: skip
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.1), layout="constrained")
        for label, layers in models.items():
            places = range(len(layers))
            for axes, key, limit in ((left, "rank", "bound"), (right, "entropy", "uniform_entropy")):
                values, color = [layer[key] for layer in layers], colors[label]
                name = f"{label}: mean {sum(values) / len(values):.4g}"
                axes.plot(places, values, "o-", color=color, markersize=5, label=name)
                axes.plot(places, [layer[limit] for layer in layers], color=color, linewidth=1, linestyle=(0, (2, 3)))
        most = max(len(layers) for layers in models.values())
        parts = {layer["part"] for layers in models.values() for layer in layers}
        where = "" if parts == {"whole"} else " (causal: of the second half of the text on the first)"
        left.set(title="Rank", xlabel="layer", ylim=(0, None))
        right.set(title="Entropy of a row, nats", xlabel="layer", ylim=(0, None))
        for axes in (left, right):
            axes.set_xticks(range(0, most, math.ceil(most / 16)))
            axes.grid(True)
            axes.legend(loc="best", fontsize=9)
        limits = f"dotted: the largest possible rank{where}, the entropy of equal weights"
        figure.supxlabel(f"{limits}; {note}" if note else limits, fontsize=8.5, color="#6b7079")
        save_figure(figure, path)


def thinned(items, most=MOST_LAYERS):
    """At most `most` of `items`, evenly, the first and the last among them."""
    items = list(items)
    if len(items) <= most:
        return items
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def plot_maps(path, models):
    """Attention scores of each layer, and below them what the middle token of the grid reads (figure 3a).

    models: label -> entries of `attention_maps`, of one input. Each picture has its own scale.
    """
    plt = pyplot()
    chosen = {label: thinned(enumerate(maps)) for label, maps in models.items()}
    columns = max(len(own) for own in chosen.values())
    lines = [(label, key) for key in ("scores", "map") for label, own in chosen.items() if own[0][1][key] is not None]
    with plt.rc_context(FRAMED):
        size = (2.1 * columns + 1.2, 2.15 * len(lines) + 0.4)
        figure, grid = plt.subplots(len(lines), columns, figsize=size, squeeze=False, layout="constrained")
        for row, (label, key) in enumerate(lines):
            for column, axes in enumerate(grid[row]):
                if column >= len(chosen[label]) or chosen[label][column][1][key] is None:
                    axes.set_axis_off()
                    continue
                layer, entry = chosen[label][column]
                _image(axes, entry[key].numpy(), power=0.5)
                if row == 0:
                    axes.set_title(f"layer {layer}", loc="center")
            what = "scores" if key == "scores" else "middle token"
            grid[row][0].set_ylabel(f"{label}\n{what}", fontweight="bold")
        save_figure(figure, path)


def plot_mixing(path, layers):
    """Mixing weights at the start and as learned, a column per layer; writes nothing where no layer has more than one block.

    layers: what `describe_mixing` gives, rows = query blocks. Over a grid every query block is a map in its own place; over
    a sequence what is above the diagonal means nothing and is not shown.
    """
    import numpy

    shown = thinned((name, layer) for name, layer in layers.items() if len(layer["learned"]) > 1)
    if not shown:
        return
    plt = pyplot()
    with plt.rc_context(FRAMED):
        size = (2.5 * len(shown) + 0.9, 5.4)
        figure, grid = plt.subplots(2, len(shown), figsize=size, squeeze=False, layout="constrained")
        for column, (name, layer) in enumerate(shown):
            pictures = [numpy.asarray(layer[key], dtype=float) for key in ("start", "learned")]
            tiles = layer["layout"] if layer["layout"] is not None and len(layer["layout"]) == 2 else None
            if tiles is not None:
                pictures = [tiled(picture, tiles) for picture in pictures]
            elif layer["layout"] is None:
                pictures = [numpy.ma.array(x, mask=numpy.triu(numpy.ones_like(x), 1)) for x in pictures]
            for axes, picture in zip(grid[:, column], pictures, strict=True):
                _image(axes, picture, power=1.0 if tiles else 0.5, top=max(x.max() for x in pictures))
                for line, side in ((axes.axhline, 0), (axes.axvline, 1)) if tiles else ():
                    for i in range(1, tiles[side]):
                        line(i * tiles[side] - 0.5, color="white", linewidth=1.5)
            number = next(part for part in reversed(name.split(".")) if part.isdigit())
            grid[0][column].set_title(f"layer {number}", loc="center")
        for row, label in enumerate(("start", "learned")):
            grid[row][0].set_ylabel(label, fontweight="bold")
        figure.suptitle("Which blocks each block reads", x=0.01, ha="left", fontweight="bold", fontsize=12)
        save_figure(figure, path)


def tiled(matrix, layout):
    """`[M, M]` as `[rows * rows, columns * columns]`: tile (i, j) is what query block (i, j) reads, over the grid; a block
    of prefix tokens before it is left out."""
    rows, columns = layout
    values = matrix[-rows * columns :, -rows * columns :]
    return values.reshape(rows, columns, rows, columns).transpose(0, 2, 1, 3).reshape(rows * rows, columns * columns)


def _image(axes, values, power=1.0, top=None):
    from matplotlib.colors import PowerNorm

    norm = PowerNorm(power, vmin=0.0, vmax=float(top or values.max()) or 1.0)
    axes.imshow(values, cmap="magma_r", norm=norm, interpolation="nearest", aspect="equal")
    axes.set_xticks([])
    axes.set_yticks([])
    for side in axes.spines.values():
        side.set_color("#c9ccd1")
    axes.tick_params(length=0)
