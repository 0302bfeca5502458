"""The demo's three figures: how the students learned, what the mixing became, how time grows with length.

Unusual: a model has one colour in all figures (softmax dark, plain linear ochre, MHLA blue, hybrid green). Every function
takes plain numbers and writes one PNG aside and renamed; matplotlib is imported where it is used, without a display.
"""

from .files import file_aside

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
