"""The demo's three figures: how the students learned, what the mixing became, how time grows with length.

Unusual: a model has one colour in all figures (softmax dark, plain linear ochre, MHLA blue, hybrid green). Every function
takes plain numbers and writes one PNG aside and renamed; matplotlib is imported where it is used, without a display.
"""

from .checkpoints.files import file_aside

LABELS = {
    "teacher": "softmax teacher",
    "control": "teacher, trained on",
    "linear": "plain linear",
    "mhla": "MHLA",
    "hybrid": "hybrid 2/3",
}
COLOURS = {"teacher": "#33363d", "control": "#8d929c", "linear": "#d08a1d", "mhla": "#2563c9", "hybrid": "#2f9468"}
MARKERS = {"teacher": "o", "linear": "s", "mhla": "D"}
STYLE = {
    "font.size": 10.5,
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9aa0a8",
    "axes.labelcolor": "#40444c",
    "xtick.color": "#40444c",
    "ytick.color": "#40444c",
    "grid.color": "#e6e8eb",
    "lines.linewidth": 2.0,
    "legend.frameon": False,
    "figure.dpi": 150,
    "savefig.facecolor": "white",
}


def plot_loss(path, histories, scores):
    """What each student lost in both stages, and what it costs on held-out text.

    Args:
        path: PNG to write.
        histories: student -> the entries of its train.json ("stage", "step", "tokens", "loss", "layers": how many
            layers were converted; the transfer loss is a sum over them and is shown per layer). Stages in order:
            transfer, distillation.
        scores: model -> list of held-out bits per byte, one per seed; the first is the teacher.
    """
    plt = pyplot()
    with plt.rc_context(STYLE):
        figure, (left, middle, right) = plt.subplots(
            1, 3, figsize=(14.5, 4.2), layout="constrained", width_ratios=(1, 1, 1.3)
        )
        for name, entries in histories.items():
            stages = list(dict.fromkeys(entry["stage"] for entry in entries))
            _curve(left, name, [entry for entry in entries if entry["stage"] == stages[0]], per_layer=True)
            _curve(middle, name, [entry for entry in entries if entry["stage"] == stages[-1]])
        left.set(title="Stage 1: attention outputs", xlabel="step", ylabel="relative squared error, per layer")
        middle.set(title="Stage 2: next-token distribution", xlabel="step", ylabel="KL to the teacher, nats per token")
        middle.set_yscale("log")
        plain_ticks(middle.yaxis, (1.0, 1.5, 2.0, 3.0, 5.0, 7.0))
        for axes in (left, middle):
            axes.grid(True)
        left.legend(loc="best")
        _bars(right, scores)
        save_figure(figure, path)


def _curve(axes, name, entries, per_layer=False):
    share = [entry["layers"] if per_layer else 1 for entry in entries]
    axes.plot(
        [entry["step"] for entry in entries],
        [entry["loss"] / layers for entry, layers in zip(entries, share, strict=True)],
        color=COLOURS[name],
        label=LABELS[name],
    )


def _bars(axes, scores):
    names = list(scores)
    means = [sum(values) / len(values) for values in scores.values()]
    for place, (name, mean) in enumerate(zip(names, means, strict=True)):
        axes.bar(place, mean, color=COLOURS[name], width=0.8, zorder=2)
        if len(scores[name]) > 1:
            axes.plot(
                [place] * len(scores[name]), scores[name], ".", color="white", markeredgecolor="#33363d", zorder=3
            )
        change = "" if place == 0 else f"\n{100 * (mean / means[0] - 1):+.2f} %".replace("-", "\N{MINUS SIGN}")
        axes.annotate(
            f"{mean:.3f}{change}",
            (place, 0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 8),
            textcoords="offset points",
            ha="center",
            color="white",
            fontweight="bold",
            fontsize=9.5,
            zorder=4,
        )
    lowest, highest = min(map(min, scores.values())), max(map(max, scores.values()))
    room = max(highest - lowest, 0.01 * highest)
    axes.set_ylim(lowest - 1.3 * room, highest + 0.3 * room)
    axes.axhline(means[0], color=COLOURS[names[0]], linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    axes.set_xticks(
        range(len(names)),
        [
            LABELS[name].replace(", ", ",\n") if "," in LABELS[name] else LABELS[name].replace(" ", "\n", 1)
            for name in names
        ],
    )
    axes.tick_params(axis="x", length=0)
    axes.set(title="Held-out text (axis does not start at 0)", ylabel="bits per byte, lower is better")


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


def plot_speed(path, rows, note):
    """Time against length, for the kinds of measurement in `rows` side by side.

    Args:
        path: PNG to write.
        rows: of speed.json: "what", "length" (tokens), "softmax_ms", "mhla_ms", and "linear_ms" where that was timed.
        note: one line below the figure: the machine, and what was timed.
    """
    plt = pyplot()
    kinds = list(dict.fromkeys(row["what"] for row in rows))
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(1, len(kinds), figsize=(5.6 * len(kinds), 4.3), squeeze=False, layout="constrained")
        for axes, kind in zip(grid[0], kinds, strict=True):
            own = [row for row in rows if row["what"] == kind]
            lengths = [row["length"] for row in own]
            for name, key in (("teacher", "softmax_ms"), ("linear", "linear_ms"), ("mhla", "mhla_ms")):
                if key not in own[0]:
                    continue
                values = [row[key] for row in own]
                label = "softmax" if name == "teacher" else LABELS[name]
                axes.plot(lengths, values, color=COLOURS[name], marker=MARKERS[name], markersize=5, label=label)
            last = own[-1]
            _mark_ratio(axes, last["length"], last["softmax_ms"], last["mhla_ms"])
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
            axes.minorticks_off()
            low, high = axes.get_ylim()
            axes.set_ylim(low / 1.6, high * 1.2)
            plain_ticks(axes.yaxis)
            axes.grid(True)
            axes.set(title=kind, xlabel="tokens in the context", ylabel="milliseconds, lower is better")
        grid[0][0].legend(loc="upper left")
        figure.supxlabel(note, fontsize=8.5, color="#6b7079")
        save_figure(figure, path)


def plot_bars(path, rows, note):
    """Times of every competitor in every row, on a logarithmic axis; MHLA's in its colour.

    Args:
        path: PNG to write.
        rows: of a comparison: "case", "what", "ms" (competitor -> milliseconds).
        note: one line below the figure: the machine.
    """
    plt = pyplot()
    height = 0.9 + sum(0.45 + 0.22 * len(row["ms"]) for row in rows)
    with plt.rc_context({**STYLE, "axes.titlesize": 9.5}):
        figure, grid = plt.subplots(len(rows), 1, figsize=(9.0, max(height, 2.0)), squeeze=False, layout="constrained")
        for axes, row in zip(grid[:, 0], rows, strict=True):
            names = sorted(row["ms"], key=row["ms"].get, reverse=True)
            colours = [
                COLOURS[next((kind for kind in ("mhla", "linear") if name.startswith(kind)), "teacher")]
                for name in names
            ]
            bars = axes.barh(names, [row["ms"][name] for name in names], color=colours)
            axes.bar_label(bars, [f"{row['ms'][name]:.4g} ms" for name in names], padding=3, fontsize=8)
            axes.set_xscale("log")
            axes.tick_params(labelsize=8)
            axes.margins(x=0.12)
            axes.set_title(f"{row['case']}: {row['what']}")
        figure.supxlabel(note, fontsize=8.5, color="#6b7079")
        save_figure(figure, path)


def _mark_ratio(axes, length, softmax, mhla):
    """A line between the two last points, with their ratio in words."""
    axes.plot([length, length], [softmax, mhla], color=COLOURS["mhla"], linewidth=1, linestyle=(0, (2, 2)), zorder=1)
    faster = softmax >= mhla
    ratio = softmax / mhla if faster else mhla / softmax
    axes.annotate(
        f"{ratio:.1f}x\n{'faster' if faster else 'slower'}",
        (length, (softmax * mhla) ** 0.5),
        xytext=(9, 0),
        textcoords="offset points",
        ha="left",
        va="center",
        color=COLOURS["mhla"],
        fontweight="bold",
        annotation_clip=False,
    )


def plain_ticks(axis, steps=(1.0, 2.0, 5.0)):
    """`steps` times the powers of ten, as plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_major_locator(LogLocator(10, subs=steps))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))


def pyplot():
    """A stand-in for matplotlib.pyplot. ImportError with the exact install line where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("figures need matplotlib, which is missing: pip install 'mhla_hf[eval]'") from error
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    class Canvas:
        """What is used of pyplot, without its global state and without a display."""

        rc_context = staticmethod(matplotlib.rc_context)

        @staticmethod
        def subplots(*shape, figsize, layout, **options):
            figure = Figure(figsize=figsize, layout=layout)
            FigureCanvasAgg(figure)
            return figure, figure.subplots(*shape, **options)

    return Canvas


def save_figure(figure, path):
    """Write a figure as PNG, aside and renamed."""
    with file_aside(path) as aside:
        figure.savefig(aside, format="png")
