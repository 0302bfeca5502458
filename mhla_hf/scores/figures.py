"""Scores as a picture: one panel per score with the models as points and their standard errors, and recall by depth.

Unusual: with a recipe that has the layout of a published table, its columns are the panels; otherwise every task and metric
is one, and more than can be read are refused rather than left out.
"""

import math

from ..plots import COLOURS, STYLE, pyplot, save_figure
from .results import paper_values

MOST = 24
EXTRA = ("#7b4fb3", "#b3454f", "#4f8fb3", "#6b7a2f", "#a0669a", "#33363d")
DEPTH = "_back_"


def plot_scores(path, models, columns=None):
    """Write a PNG of a comparison.

    path: of the PNG. models: dict name -> Results (or list of Result). columns: of a recipe, see `paper_rows`; None or
    empty: every task and metric. ValueError: there is nothing to draw, or more than 24 panels.
    """
    panels = _column_panels(models, columns) if columns else _panels(models)
    depths = _depths(models)
    if not panels and not depths:
        raise ValueError("plot: no score is there to draw; expected at least one")
    if len(panels) > MOST:
        raise ValueError(f"plot: {len(panels)} scores are too many for one figure; choose at most {MOST} by tasks")
    colours = colours_of(models)
    plt = pyplot()
    with plt.rc_context(STYLE):
        across = min(4, len(panels) + len(depths))
        down = math.ceil((len(panels) + len(depths)) / across)
        size = (3.4 * across + 0.8, max(1.1 + 0.34 * len(models), 2.2 if depths else 0) * down + 0.5)
        figure, grid = plt.subplots(down, across, figsize=size, squeeze=False, layout="constrained")
        axes = [cell for row in grid for cell in row]
        for cell, (title, values, better) in zip(axes, panels, strict=False):
            _draw_points(cell, title, values, better, colours)
        for cell, (title, curves) in zip(axes[len(panels) :], depths, strict=False):
            _draw_depth(cell, title, curves, colours)
        for cell in axes[len(panels) + len(depths) :]:
            cell.set_visible(False)
        save_figure(figure, path)


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
            if DEPTH not in record.metric and record.value is not None:
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


def _depths(models):
    """(title, model -> [(tokens back, value, error)]) for every task that was measured by depth."""
    found = {}
    for name, records in models.items():
        for record in records:
            metric, mark, back = record.metric.partition(DEPTH)
            if mark and back.isdecimal() and record.value is not None:
                curves = found.setdefault((record.task, metric), {})
                curves.setdefault(name, []).append((int(back), record.value, record.stderr or 0.0))
    return [(f"{task}\n{metric}, by depth", curves) for (task, metric), curves in found.items()]


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


def _draw_depth(axes, title, curves, colours):
    for name, points in curves.items():
        back, values, errors = zip(*sorted(points), strict=True)
        axes.errorbar(back, values, yerr=errors, color=colours[name], marker="o", markersize=4, capsize=2, label=name)
    axes.set_title(title, fontsize=9.5)
    axes.set(xlabel="tokens from the fact to the question", ylim=(-0.05, 1.05))
    axes.grid(True)
    axes.legend(fontsize=8)
