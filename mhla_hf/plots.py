"""Draw figures in one style, and render tables and the report of a conversion as text."""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .checkpoints.file_io import PathLike, atomic_file
from .checkpoints.load import require_extra

COLORS = {"teacher": "#33363d", "control": "#8d929c", "linear": "#d08a1d", "mhla": "#2563c9", "hybrid": "#2f9468"}
PALETTE = (*COLORS.values(), "#7b4fb3", "#b3454f", "#4f8fb3", "#6b7a2f", "#a0669a")
STYLE: dict[str, Any] = {
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


def draw_heads(measured: Mapping[str, Any]) -> str:
    """Return a map of a conversion's KV heads, a line per head and a column per layer: "#" keeps softmax, "." is MHLA.

    `measured` is the model's `config.mhla_measured`. A space: the layer lacks this head, or has no scores.
    """
    scores = measured["head_scores"]
    softmax_heads = measured["softmax_heads"]
    layers = range(max(map(int, scores)) + 1)
    lines = ["layer " + "".join(str(layer % 10) for layer in layers)]
    for head in range(max(map(len, scores.values()))):
        has_head = {layer: head < len(scores.get(str(layer), ())) for layer in layers}
        marks = ("#" if head in softmax_heads.get(str(x), ()) else "." if has_head[x] else " " for x in layers)
        lines.append(f"KV {head:<3}{''.join(marks)}".rstrip())
    return "\n".join(lines)


def sort_numbers(by_number: Mapping[str, Any]) -> list[str]:
    """Return the keys, numbers as strings, sorted as numbers; saved configurations sort them as text."""
    return sorted(by_number, key=int)


def tabulate_curve(measured: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of a table of `measured["curve"]`: scores and cache sizes of the original and all choices."""
    lengths = sort_numbers(measured["cache_bytes"])
    rows = []
    for point in measured["curve"]:
        cells = [
            "*" * point.get("chosen", False) + str(point["heads"]),
            str(point.get("salient", "")),
            f"{point['kl']:.4f}",
        ]
        cells += [f"{math.exp(point['recall']):.3f}", f"{point['answers']:.3f}" if "answers" in point else ""]
        rows.append([*cells, *(f"{point['bytes'][length] / 2**20:,.1f}" for length in lengths)])
    sizes = [f"MiB at {int(length):,}" for length in lengths]
    return ["softmax heads", "salient tokens", "KL", "copies", "answers", *sizes], rows


def draw_curve(measured: Mapping[str, Any], path: PathLike) -> None:
    """Plot scores against cache size for each choice of softmax heads, with a line per number of salient tokens."""
    original, *points = measured["curve"]
    length = str(measured["context"])
    shown: dict[str, Callable[[Any], float]] = {"KL to the original, nats": lambda point: point["kl"]}
    shown["probability of a copied token"] = lambda point: math.exp(point["recall"])
    if "answers" in original:
        shown["probability of an answer"] = lambda point: point["answers"]
    with drawing(path, 1, len(shown), figsize=(4 * len(shown), 3.4)) as (_, axes):
        for axis, (title, value) in zip(axes[0], shown.items(), strict=True):
            for color, count in zip(PALETTE[2:], sorted({point["salient"] for point in points}), strict=False):
                line = [(p["bytes"][length] / 2**20, value(p)) for p in points if p["salient"] == count]
                axis.plot(*zip(*line, strict=True), marker="o", color=color, label=f"{count} salient tokens")
            chosen = next(point for point in points if point.get("chosen"))
            axis.plot(chosen["bytes"][length] / 2**20, value(chosen), "o", ms=12, mfc="none", mec=COLORS["teacher"])
            axis.axhline(value(original), color=COLORS["teacher"], linewidth=1, label="original")
            axis.set_title(title)
            axis.set_xlabel(f"MiB of cache at {int(length):,} tokens")
        axes[0, 0].legend()


def draw_scores(path: PathLike, models: Sequence[str], points: Mapping[str, Any], curves: Mapping[str, Any]) -> None:
    """Plot scores with a panel per title: `points`, {title: {model: (value, error or None)}}, and then `curves` of recall
    by depth or speed by length, {title: {model: [(position, value, error)]}}.
    """
    panels = [*points.items(), *curves.items()]
    colors = dict(zip(models, itertools.cycle(PALETTE), strict=False))
    num_columns, num_rows = min(4, len(panels)), math.ceil(len(panels) / 4)
    size = (3.4 * num_columns + 0.8, max(1.1 + 0.34 * len(colors), 2.2 if curves else 0) * num_rows + 0.5)
    with drawing(path, num_rows, num_columns, figsize=size) as (_, grid):
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        for axes, (title, values) in zip(grid.flat, panels, strict=False):
            (_draw_curves if title in curves else _draw_points)(axes, values, colors)
            axes.set_title(title, fontsize=9.5)
            if title in curves:
                axes.set_xlabel("tokens" if "by length" in title else "tokens from the fact to the question")


def _draw_points(axes: Any, values: Mapping[str, Any], colors: Mapping[str, str]) -> None:
    label: dict[str, Any] = {"xytext": (0, 6), "textcoords": "offset points", "ha": "center", "fontsize": 8}
    for name, (value, error) in values.items():
        row = list(colors).index(name)
        axes.errorbar(value, row, xerr=error, fmt="o", color=colors[name], markersize=6, capsize=3, linewidth=1.6)
        axes.annotate(f"{value:.4g}", (value, row), **label)
    axes.set_yticks(range(len(colors)), list(colors))
    axes.set_ylim(len(colors) - 0.4, -0.8)
    axes.grid(True, axis="x")
    axes.margins(x=0.2)


def _draw_curves(axes: Any, values: Mapping[str, Any], colors: Mapping[str, str]) -> None:
    for name, points in values.items():
        style = {"marker": "o", "markersize": 4, "capsize": 2, "color": colors[name], "label": name}
        positions, heights, errors = zip(*sorted(points), strict=True)
        axes.errorbar(positions, heights, yerr=errors, **style)
    axes.set_ylim(0, None)
    axes.grid(True)
    axes.legend(fontsize=8)


def render_report(measured: Mapping[str, Any]) -> str:
    """Render `config.mhla_measured` of a conversion with text: scores, cache sizes and, if heads were chosen, their map."""
    names = {"original": "original", "converted": "converted", "fitted": "fitted", "kept": "with softmax heads"}
    scores = {name: measured[key] for key, name in names.items() if key in measured}
    if "cosine" in measured["original"]:
        lengths = list(measured["original"]["cosine"])
        rows = [[name, *(f"{values['cosine'][length]:.4f}" for length in lengths)] for name, values in scores.items()]
        return render_rows(["held-out text", *(f"cosine, {length} tokens" for length in lengths)], rows)
    caches = []
    for tokens in sort_numbers(measured["cache_bytes"]):
        converted, softmax = (measured["cache_bytes"][tokens][name] / 2**20 for name in ("converted", "softmax"))
        caches.append(f"cache at {int(tokens):,} tokens: {converted:,.1f} MiB of {softmax:,.1f}")
    rows = []
    for name, values in scores.items():
        kl = f"{values['kl']:.4f}" if "kl" in values else "0"
        rows.append([name, kl, f"{values['perplexity']:.2f}", f"{values['recall']:.3f}"])
    table = render_rows(["held-out text", "KL", "perplexity", "recall"], rows)
    heads = []
    if "curve" in measured:
        choices = render_rows(*tabulate_curve(measured), left=1)
        heads = [choices, "* as converted", "KV heads that keep softmax (#):", draw_heads(measured)]
    return "\n".join([table, *caches, *heads])


def render_rows(header: Sequence[str], rows: Sequence[Sequence[str]], style: str = "text", left: int = 2) -> str:
    """Render a table of strings in `style` "text" or "markdown", with the first `left` columns aligned left."""
    if style not in ("text", "markdown"):
        raise ValueError(f'style: got {style!r}, expected "text" or "markdown".')
    if style == "markdown":
        escaped = [[cell.replace("|", "\\|") for cell in row] for row in [header, *rows]]
        ruler = ["---"] * left + ["---:"] * (len(header) - left)
        return "\n".join("| " + " | ".join(row) + " |" for row in [escaped[0], ruler, *escaped[1:]])
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    align: list[Any] = [str.ljust] * left + [str.rjust] * (len(header) - left)
    table = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "  ".join(justify(*cell) for justify, *cell in zip(align, row, widths, strict=True)).rstrip() for row in table
    )


@contextlib.contextmanager
def drawing(
    path: PathLike, rows: int = 1, columns: int = 1, *, figsize: tuple[float, float], style: dict[str, Any] = STYLE,
    **options: Any,
) -> Iterator[tuple[Any, Any]]:  # fmt: skip
    """Yield a matplotlib figure and its axes [rows, columns], then write `path` (PNG)."""
    with require_extra("a figure", "matplotlib", "eval"):
        from matplotlib import rc_context
        from matplotlib.figure import Figure

    with rc_context(style):
        figure = Figure(figsize=figsize, layout="constrained")
        yield figure, figure.subplots(rows, columns, squeeze=False, **options)
        with atomic_file(path) as temporary:
            figure.savefig(temporary, format="png")
