"""Scores as a picture: one panel per score with the models as points and their standard errors; curves where a score was
taken at several places: recall by depth, speed and memory by length.

Unusual: with a recipe that has the layout of a published table, its columns are the panels, where any of them has a score;
otherwise every task and metric is one, and what is more than can be read in one picture goes into further ones.
"""

import math
import os
from pathlib import Path

from ..plots import COLOURS, STYLE, pyplot, save_figure
from .records import paper_values
from .speed import TASK as SPEED

MOST = 24
EXTRA = ("#7b4fb3", "#b3454f", "#4f8fb3", "#6b7a2f", "#a0669a", "#33363d")
DEPTH = "_back_"


def plot_scores(path, models, columns=None):
    """Write a PNG of a comparison; where it has more than 24 panels, further ones: scores.png, scores-2.png. Returns all.

    path: of the PNG. models: dict name -> Results (or list of Result). columns: of a recipe, see `paper_rows`; every task
    and metric where it is None or empty, or none of its columns has a score: such as those of a part of VBench's
    dimensions. ValueError: there is nothing to draw.
    """
    path = Path(path)
    panels = _column_panels(models, columns or {}) or _panels(models)
    curves = _curves(models)
    if not panels and not curves:
        raise ValueError("plot: no score is there to draw; expected at least one")
    colours = colours_of(models)
    parts = [(_draw_points, panel) for panel in panels] + [(_draw_curves, curve) for curve in curves.items()]
    pages = [parts[start : start + MOST] for start in range(0, len(parts), MOST)]
    paths = [path, *(path.with_name(f"{path.stem}-{number}{path.suffix}") for number in range(2, len(pages) + 1))]
    for page, place in zip(pages, paths, strict=True):
        _draw_page(page, place, colours)
    return paths


def _draw_page(parts, path, colours):
    """One PNG. parts: (function that draws a panel, what it draws)."""
    plt = pyplot()
    with plt.rc_context(STYLE):
        across = min(4, len(parts))
        down = math.ceil(len(parts) / across)
        curves = any(draw is _draw_curves for draw, _ in parts)
        size = (3.4 * across + 0.8, max(1.1 + 0.34 * len(colours), 2.2 if curves else 0) * down + 0.5)
        figure, grid = plt.subplots(down, across, figsize=size, squeeze=False, layout="constrained")
        axes = [cell for row in grid for cell in row]
        for cell, (draw, part) in zip(axes, parts, strict=False):
            draw(cell, *part, colours)
        for cell in axes[len(parts) :]:
            cell.set_visible(False)
        save_figure(figure, path)


def check_plot(path):
    """ValueError where no PNG can be written at `path`, ImportError without matplotlib: for before the long work."""
    pyplot()
    path = Path(path)
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ValueError(f"plot: {str(path)!r} cannot be written; expected the name of a PNG in a folder that is there")


def colours_of(models):
    """A colour for each model: the ones of all our figures where a name says which it is, else others in order."""
    found, free = {}, list(EXTRA)
    for name in models:
        known = next((key for key in ("teacher", "linear", "hybrid", "mhla") if key in name.lower()), None)
        taken = known is None or COLOURS[known] in found.values()
        found[name] = free.pop(0) if taken and free else COLOURS[known] if not taken else EXTRA[-1]
    return found


def _panels(models):
    """(title, model -> (value, error), higher is better) for every task and metric."""
    found = {}
    for name, records in models.items():
        for record in records:
            if _place(record) is None and record.value is not None:
                key = (record.task, record.metric, record.shots)
                values = found.setdefault(key, (f"{record.task}\n{record.metric}", {}, record.higher_is_better))
                values[1][name] = (record.value, record.stderr)
    return list(found.values())


def _column_panels(models, columns):
    """The same for the columns of a recipe, without those of which no model has a score."""
    values = {name: paper_values(records, columns) for name, records in models.items()}
    panels = []
    for label, column in columns.items():
        there = {name: found[label] for name, found in values.items() if found.get(label)}
        if there:
            panels.append((label, there, column.get("higher_is_better", True)))
    return panels


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


def _draw_points(axes, title, values, better, colours):
    for place, (name, colour) in enumerate(colours.items()):
        if name in values:
            value, error = values[name]
            axes.errorbar(value, place, xerr=error, fmt="o", color=colour, markersize=6, capsize=3, linewidth=1.6)
            axes.annotate(
                f"{value:.4g}", (value, place), xytext=(0, 6), textcoords="offset points", ha="center", fontsize=8
            )
    arrow = {True: " ↑", False: " ↓", None: ""}[better]
    axes.set_title(title + arrow, fontsize=9.5)
    axes.set_yticks(range(len(colours)), list(colours))
    axes.set_ylim(len(colours) - 0.4, -0.8)
    axes.grid(True, axis="x")
    axes.tick_params(axis="y", length=0)
    axes.margins(x=0.2)


def _draw_curves(axes, title, curves, colours):
    task, score = title
    for name, points in curves.items():
        places, values, errors = zip(*sorted(points), strict=True)
        look = {"marker": "o", "markersize": 4, "capsize": 2, "color": colours[name], "label": name}
        axes.errorbar(places, values, yerr=errors, **look)
    axes.grid(True)
    axes.legend(fontsize=8)
    if task != SPEED:
        axes.set(xlabel="tokens from the fact to the question", ylim=(-0.05, 1.05))
        axes.set_title(f"{task}\n{score}, by depth", fontsize=9.5)
        return
    places = sorted({place for points in curves.values() for place, _, _ in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [str(place) for place in places], fontsize=8)
    axes.set(xlabel="tokens", ylim=(0, None))
    axes.set_title(f"{task}\n{score}, by length ↓", fontsize=9.5)
