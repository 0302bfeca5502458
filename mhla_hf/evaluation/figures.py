"""Scores as a picture: one panel per score with the models as points and their standard errors; curves where a score was
taken at several places: recall by depth, speed and memory by length.
"""

import itertools
import math
from pathlib import Path

from ..plots import COLORS, drawing, require_matplotlib
from .records import ARROWS, paper_values
from .speed import TASK as SPEED

PALETTE = (*COLORS.values(), "#7b4fb3", "#b3454f", "#4f8fb3", "#6b7a2f", "#a0669a")


def plot_scores(path, models, columns=None):
    """Write a PNG of a comparison. Returns its path.

    path: of the PNG. models: dict name -> Results (or list of Result). columns: of a recipe, see `paper_rows`; they are the
    panels where any of them has a score, otherwise every task and metric is one. ValueError: there is nothing to draw.
    """
    every, curves = _scores(models)
    points = _column_scores(models, columns or {}) or every
    if not points and not curves:
        raise ValueError("plot: no score is there to draw; expected at least one")
    colors = dict(zip(models, itertools.cycle(PALETTE), strict=False))
    panels = [(_draw_points, *panel) for panel in points.items()] + [(_draw_curves, *panel) for panel in curves.items()]
    across, down = min(4, len(panels)), math.ceil(len(panels) / 4)
    size = (3.4 * across + 0.8, max(1.1 + 0.34 * len(colors), 2.2 if curves else 0) * down + 0.5)
    with drawing(path, down, across, figsize=size) as (_, grid):
        for cell, panel in itertools.zip_longest(grid.flat, panels):
            if panel is None:
                cell.set_visible(False)
            else:
                draw, title, values = panel
                draw(cell, title, values, colors)
                cell.set_title(title, fontsize=9.5)
    return Path(path)


def check_plot(path):
    """ValueError where no PNG can be written at `path`, ImportError without matplotlib: for before the long work."""
    require_matplotlib()
    if Path(path).is_dir() or not Path(path).parent.is_dir():
        raise ValueError(f"plot: {str(path)!r} cannot be written; expected the name of a PNG in a folder that is there")


def _scores(models):
    """title -> model -> (value, error) of the scores with one value, and title -> model -> [(place, value, error)]."""
    points, curves = {}, {}
    for name, record in ((name, record) for name, records in models.items() for record in records):
        score, mark, place = record.metric.rpartition("_" if record.task == SPEED else "_back_")
        if record.value is None:
            continue
        if mark and place.isdecimal():
            title = f"{record.task}\n{score}, by {'length ↓' if record.task == SPEED else 'depth'}"
            line = curves.setdefault(title, {}).setdefault(name, [])
            line.append((int(place), record.value, record.stderr or 0.0))
        else:
            shots = f", {record.shots} shots" if record.shots else ""
            title = f"{record.task}\n{record.metric}{shots}{ARROWS[record.higher_is_better]}"
            points.setdefault(title, {})[name] = (record.value, record.stderr)
    return points, curves


def _column_scores(models, columns):
    """The first of these for the columns of a recipe, without those of which no model has a score."""
    found = {}
    for name, records in models.items():
        for label, value in paper_values(records, columns).items():
            if value is not None:
                title = label + ARROWS[columns[label].get("higher_is_better", True)]
                found.setdefault(title, {})[name] = value
    return found


def _draw_points(axes, title, values, colors):
    for place, (name, color) in enumerate(colors.items()):
        if name in values:
            value, error = values[name]
            axes.errorbar(value, place, xerr=error, fmt="o", color=color, markersize=6, capsize=3, linewidth=1.6)
            how = {"xytext": (0, 6), "textcoords": "offset points", "ha": "center", "fontsize": 8}
            axes.annotate(f"{value:.4g}", (value, place), **how)
    axes.set_yticks(range(len(colors)), list(colors))
    axes.set_ylim(len(colors) - 0.4, -0.8)
    axes.grid(True, axis="x")
    axes.margins(x=0.2)


def _draw_curves(axes, title, lines, colors):
    for name, points in lines.items():
        places, values, errors = zip(*sorted(points), strict=True)
        look = {"marker": "o", "markersize": 4, "capsize": 2, "color": colors[name], "label": name}
        axes.errorbar(places, values, yerr=errors, **look)
    axes.set(xlabel="tokens" if title.startswith(SPEED) else "tokens from the fact to the question", ylim=(0, None))
    axes.grid(True)
    axes.legend(fontsize=8)
