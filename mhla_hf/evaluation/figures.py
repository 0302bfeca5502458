"""Scores as a picture: one panel per score with the models as points and their standard errors; curves where a score was
taken at several places: recall by depth, speed and memory by length.
"""

import itertools
import math
from pathlib import Path

from ..plots import COLORS, STYLE, pyplot, save_figure
from .records import paper_values
from .speed import TASK as SPEED

PALETTE = (*COLORS.values(), "#7b4fb3", "#b3454f", "#4f8fb3", "#6b7a2f", "#a0669a", "#33363d")
DEPTH = "_back_"


def plot_scores(path, models, columns=None):
    """Write a PNG of a comparison. Returns its path.

    path: of the PNG. models: dict name -> Results (or list of Result). columns: of a recipe, see `paper_rows`; they are the
    panels where any of them has a score, otherwise every task and metric is one. ValueError: there is nothing to draw.
    """
    curves = _curves(models)
    parts = [(_draw_points, panel) for panel in _column_panels(models, columns or {}) or _panels(models)]
    parts += [(_draw_curves, curve) for curve in curves.items()]
    if not parts:
        raise ValueError("plot: no score is there to draw; expected at least one")
    colors = dict(zip(models, itertools.cycle(PALETTE), strict=False))
    plt = pyplot()
    with plt.rc_context(STYLE):
        across = min(4, len(parts))
        down = math.ceil(len(parts) / across)
        size = (3.4 * across + 0.8, max(1.1 + 0.34 * len(colors), 2.2 if curves else 0) * down + 0.5)
        figure, grid = plt.subplots(down, across, figsize=size, squeeze=False, layout="constrained")
        for cell, (draw, part) in zip(grid.flat, parts, strict=False):
            draw(cell, *part, colors)
        for cell in grid.flat[len(parts) :]:
            cell.set_visible(False)
        save_figure(figure, path)
    return Path(path)


def check_plot(path):
    """ValueError where no PNG can be written at `path`, ImportError without matplotlib: for before the long work."""
    pyplot()
    if Path(path).is_dir() or not Path(path).parent.is_dir():
        raise ValueError(f"plot: {str(path)!r} cannot be written; expected the name of a PNG in a folder that is there")


def _panels(models):
    """(title, model -> (value, error), higher is better) for every task and metric that has one value."""
    found = {}
    for name, records in models.items():
        for record in records:
            if _place(record) is None and record.value is not None:
                key, title = (record.task, record.metric, record.shots), f"{record.task}\n{record.metric}"
                found.setdefault(key, (title, {}, record.higher_is_better))[1][name] = (record.value, record.stderr)
    return list(found.values())


def _column_panels(models, columns):
    """The same for the columns of a recipe, without those of which no model has a score."""
    values = {name: paper_values(records, columns) for name, records in models.items()}
    panels = [
        (label, {name: found[label] for name, found in values.items() if found.get(label)}, column)
        for label, column in columns.items()
    ]
    return [(label, there, column.get("higher_is_better", True)) for label, there, column in panels if there]


def _place(record):
    """(score, where it was taken) of a score that was taken at several depths or lengths, else None."""
    score, mark, place = record.metric.rpartition("_" if record.task == SPEED else DEPTH)
    return (score, int(place)) if mark and place.isdecimal() else None


def _curves(models):
    """(task, score) -> model -> [(place, value, error)] of the scores that were taken at several places."""
    found = {}
    for name, records in models.items():
        for record in records:
            if record.value is not None and (taken := _place(record)):
                curve = found.setdefault((record.task, taken[0]), {}).setdefault(name, [])
                curve.append((taken[1], record.value, record.stderr or 0.0))
    return found


def _draw_points(axes, title, values, better, colors):
    for place, (name, color) in enumerate(colors.items()):
        if name in values:
            value, error = values[name]
            axes.errorbar(value, place, xerr=error, fmt="o", color=color, markersize=6, capsize=3, linewidth=1.6)
            how = {"xytext": (0, 6), "textcoords": "offset points", "ha": "center", "fontsize": 8}
            axes.annotate(f"{value:.4g}", (value, place), **how)
    axes.set_title(title + {True: " ↑", False: " ↓", None: ""}[better], fontsize=9.5)
    axes.set_yticks(range(len(colors)), list(colors))
    axes.set_ylim(len(colors) - 0.4, -0.8)
    axes.grid(True, axis="x")
    axes.tick_params(axis="y", length=0)
    axes.margins(x=0.2)


def _draw_curves(axes, title, curves, colors):
    task, score = title
    for name, points in curves.items():
        places, values, errors = zip(*sorted(points), strict=True)
        look = {"marker": "o", "markersize": 4, "capsize": 2, "color": colors[name], "label": name}
        axes.errorbar(places, values, yerr=errors, **look)
    axes.grid(True)
    axes.legend(fontsize=8)
    if task == SPEED:
        places = sorted({place for points in curves.values() for place, _, _ in points})
        axes.set_xscale("log", base=2)
        axes.set_xticks(places, [str(place) for place in places], fontsize=8)
        axes.set(xlabel="tokens", ylim=(0, None))
    else:
        axes.set(xlabel="tokens from the fact to the question", ylim=(-0.05, 1.05))
    axes.set_title(f"{task}\n{score}, by length ↓" if task == SPEED else f"{task}\n{score}, by depth", fontsize=9.5)
