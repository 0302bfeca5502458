"""The pictures of `analyze`, of the rank study and of the comparisons. Plain numbers in, one PNG out, aside and renamed.

Unusual: a mixing matrix over a grid is shown as that grid: each query block is a small map, in its own place, of what it
reads (figure 4b of the paper, for all blocks at once).
"""

import math

from ..plots import COLOURS, STYLE, pyplot, save_figure

KIND_COLOURS = {"softmax": COLOURS["teacher"], "linear": COLOURS["linear"], "mhla": COLOURS["mhla"]}
MORE_COLOURS = ("#2f9468", "#8e4fb0", "#c2445a", "#5f7d95", "#8a6d3b")
KIND_LABELS = {"softmax": "softmax", "linear": "plain linear", "mhla": "MHLA", "start": "MHLA, locality start"}
FRAMED = {**STYLE, "axes.spines.top": True, "axes.spines.right": True}
MOST_LAYERS = 6


def choose_colours(kinds: dict) -> dict:
    """label -> colour: the kind's own for the first of its kind, another for the next."""
    chosen, rest = {}, iter(MORE_COLOURS * len(kinds))
    for label, kind in kinds.items():
        own = KIND_COLOURS.get(kind)
        chosen[label] = own if own and own not in chosen.values() else next(rest)
    return chosen


def plot_layers(path, models, note=""):
    """Rank and entropy per layer, model beside model (figure 3b).

    Args:
        path: PNG to write.
        models: label -> "layers" of `measure_model`.
        note: one line below: what the inputs were.
    """
    plt = pyplot()
    kinds = {
        label: next((kind for kind in ("mhla", "linear") if kind in _kinds(ls)), "softmax")
        for label, ls in models.items()
    }
    colours = choose_colours(kinds)
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.1), layout="constrained")
        for label, layers in models.items():
            places = range(len(layers))
            for axes, key, limit in ((left, "rank", "bound"), (right, "entropy", "uniform_entropy")):
                mean = sum(layer[key] for layer in layers) / len(layers)
                name = f"{label}: mean {mean:.4g}"
                axes.plot(
                    places, [layer[key] for layer in layers], "o-", color=colours[label], markersize=5, label=name
                )
                axes.plot(
                    places, [layer[limit] for layer in layers], color=colours[label], linewidth=1, linestyle=(0, (2, 3))
                )
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


def _kinds(layers):
    return {layer["kind"] for layer in layers}


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
                axes.set_xticks([])
                axes.set_yticks([])
                if column >= len(chosen[label]) or chosen[label][column][1][key] is None:
                    axes.set_axis_off()
                    continue
                layer, entry = chosen[label][column]
                _image(axes, entry[key], power=0.5)
                if row == 0:
                    axes.set_title(f"layer {layer}", loc="center")
            what = "scores" if key == "scores" else "middle token"
            grid[row][0].set_ylabel(f"{label}\n{what}", fontweight="bold")
        save_figure(figure, path)


def plot_mixing(path, matrices, most=6, causal=True):
    """The mixing matrices at the start and as learned, one column per layer, on one scale.

    Args:
        path: PNG to write.
        matrices: layer index -> (start, learned), both `[M, M]` nested lists or arrays, rows = query blocks, rows
            summing to one (a mean over heads where each has its own).
        most: layers shown; more are thinned out evenly.
        causal: what is above the diagonal means nothing and is not shown.
    """
    plt = pyplot()
    layers = list(matrices)
    if len(layers) > most:
        layers = [layers[round(i * (len(layers) - 1) / (most - 1))] for i in range(most)]
    with plt.rc_context({**STYLE, "axes.spines.top": True, "axes.spines.right": True}):
        size = (2.35 * len(layers) + 1.5, 5.3)
        figure, grid = plt.subplots(2, len(layers), figsize=size, squeeze=False, layout="constrained")
        for column, layer in enumerate(layers):
            for row, matrix in enumerate(matrices[layer]):
                image = _heat(grid[row][column], matrix, causal)
                grid[row][column].set_title(f"layer {layer}" if row == 0 else "", loc="center")
        for row, label in enumerate(("start", "learned")):
            grid[row][0].set_ylabel("query block")
            grid[row][0].annotate(
                label,
                (0, 0.5),
                xycoords="axes fraction",
                xytext=(-46, 0),
                textcoords="offset points",
                rotation=90,
                va="center",
                ha="right",
                fontweight="bold",
                fontsize=11.5,
            )
        for axes in grid[1]:
            axes.set_xlabel("key block")
        bar = figure.colorbar(image, ax=grid, shrink=0.85, pad=0.015)
        bar.set_label("weight; rows sum to one", color="#40444c")
        bar.outline.set_visible(False)
        figure.suptitle("Which blocks each block reads", x=0.01, ha="left", fontweight="bold", fontsize=12.5)
        save_figure(figure, path)


def _heat(axes, matrix, causal):
    import numpy
    from matplotlib.colors import PowerNorm

    values = numpy.asarray(matrix, dtype=float)
    future = numpy.triu(numpy.full_like(values, causal, dtype=bool), 1)
    axes.set_facecolor("#f3f4f6")
    image = axes.imshow(
        numpy.ma.array(values, mask=future),
        cmap="magma_r",
        norm=PowerNorm(0.5, vmin=0.0, vmax=1.0),
        interpolation="nearest",
    )
    last = len(values) - 1
    ticks = sorted({0, last // 2, last})
    axes.set_xticks(ticks)
    axes.set_yticks(ticks)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.tick_params(length=0)
    return image


def plot_grid_mixing(path, matrices, layouts):
    """Mixing weights over a grid of blocks at the start and as learned: every query block a map in its own place.

    Args:
        path: PNG to write.
        matrices: layer -> (start, learned), `[M, M]` nested lists, rows = query blocks.
        layouts: layer -> (rows, columns) of blocks; M is their product, or one more (a block of prefix tokens, left out).
    """
    plt = pyplot()
    layers = thinned(matrices)
    with plt.rc_context(FRAMED):
        figure, grid = plt.subplots(
            2, len(layers), figsize=(2.5 * len(layers) + 0.9, 5.4), squeeze=False, layout="constrained"
        )
        for column, layer in enumerate(layers):
            pictures = [tiled(matrix, layouts[layer]) for matrix in matrices[layer]]
            top = max(picture.max() for picture in pictures)
            for row, picture in enumerate(pictures):
                axes = grid[row][column]
                _image(axes, picture, top=top)
                rows, columns = layouts[layer]
                for i in range(1, rows):
                    axes.axhline(i * rows - 0.5, color="white", linewidth=1.5)
                for i in range(1, columns):
                    axes.axvline(i * columns - 0.5, color="white", linewidth=1.5)
                axes.set_xticks([])
                axes.set_yticks([])
            grid[0][column].set_title(f"layer {layer}", loc="center")
        for row, label in enumerate(("start", "learned")):
            grid[row][0].set_ylabel(label, fontweight="bold")
        figure.suptitle("What each block reads: a small map per block, in its place", x=0.01, ha="left", fontsize=12)
        save_figure(figure, path)


def tiled(matrix, layout):
    """`[M, M]` as `[rows * rows, columns * columns]`: tile (i, j) is what query block (i, j) reads, over the grid."""
    import numpy

    rows, columns = layout
    values = numpy.asarray(matrix, dtype=float)
    values = values[-rows * columns :, -rows * columns :]
    return values.reshape(rows, columns, rows, columns).transpose(0, 2, 1, 3).reshape(rows * rows, columns * columns)


def _image(axes, values, power=1.0, top=None):
    import numpy
    from matplotlib.colors import PowerNorm

    values = numpy.asarray(values, dtype=float)
    norm = PowerNorm(power, vmin=0.0, vmax=top or float(values.max()) or 1.0)
    axes.imshow(values, cmap="magma_r", norm=norm, interpolation="nearest", aspect="equal")
    for side in axes.spines.values():
        side.set_color("#c9ccd1")
    axes.tick_params(length=0)
