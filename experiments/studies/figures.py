"""Figures of the studies: rank by number of tokens, accuracy by epoch, time by tokens and blocks."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mhla_hf.analysis.figures import PALETTE
from mhla_hf.plots import drawing

KIND_LABELS = {"softmax": "softmax", "linear": "plain linear", "mhla": "MHLA"}
KIND_MARKERS = {"softmax": "o", "linear": "s", "mhla": "D"}


def plot_random_rank(path: str | Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Plot the measured rank by N, one panel per width d, with the bounds of table 1 as dashed lines.

    Args:
        path: PNG to write.
        rows: "rows" of rank.json.
    """
    widths = sorted({row["width"] for row in rows})
    size = (3.4 * len(widths) + 0.8, 3.9)
    note = f"random features, {rows[0]['blocks']} blocks, fp64; points counted, dashed lines the bounds of table 1"
    with drawing(path, 1, len(widths), figsize=size, note=note, sharey=True) as (_, grid):
        for axes, width in zip(grid[0], widths, strict=True):
            width_rows = sorted((row for row in rows if row["width"] == width), key=lambda row: row["tokens"])
            lengths = [row["tokens"] for row in width_rows]
            for kind, color in zip(KIND_LABELS, PALETTE, strict=False):
                bounds = [row["bound"][kind] for row in width_rows]
                ranks = [row["rank"][kind] for row in width_rows]
                axes.plot(lengths, bounds, color=color, linewidth=1, linestyle=(0, (4, 3)))
                axes.plot(lengths, ranks, KIND_MARKERS[kind], color=color, markersize=6, label=KIND_LABELS[kind])
            axes.set_xscale("log", base=2)
            axes.set_yscale("log", base=2)
            axes.set_xticks(lengths[::2], [f"{n:,}" for n in lengths[::2]])
            axes.minorticks_off()
            axes.grid(True)
            axes.set(title=f"head width d = {width}", xlabel="tokens N")
        grid[0][0].set_ylabel("rank of the attention matrix")
        from matplotlib.ticker import FuncFormatter

        grid[0][0].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        grid[0][0].legend(loc="upper left")


def plot_accuracy(path: str | Path, curves: Mapping[str, Sequence[Mapping[str, Any]]], note: str = "") -> None:
    """Plot test accuracy by epoch, as mean over seeds with a band of one standard error.

    Args:
        path: PNG to write.
        curves: For each row of the study, "mean" and "stderr" of every epoch.
        note: Text below the figure.
    """
    with drawing(path, figsize=(7.4, 4.6), note=note) as (_, ((axes,),)):
        for (row, epochs), color in zip(curves.items(), itertools.cycle(PALETTE), strict=False):
            numbers = range(1, len(epochs) + 1)
            means = [epoch["mean"] for epoch in epochs]
            errors = [epoch["stderr"] or 0.0 for epoch in epochs]
            axes.plot(numbers, means, color=color, label=f"{row}: {means[-1]:.3f}")
            low, high = ([m + sign * e for m, e in zip(means, errors, strict=True)] for sign in (-1, 1))
            axes.fill_between(numbers, low, high, color=color, alpha=0.18, linewidth=0)
        axes.set(title="Test accuracy", xlabel="epoch", ylim=(0, 1))
        axes.grid(True)
        axes.legend(loc="lower right", fontsize=9)


def plot_scaling(path: str | Path, rows: Sequence[Mapping[str, Any]], note: str = "") -> None:
    """Plot the time of MHLA over that of plain linear attention by number of blocks, one line per number of tokens.

    Args:
        path: PNG to write.
        rows: "rows" of scaling.json.
        note: Text below the figure.
    """
    from matplotlib.ticker import FuncFormatter

    with drawing(path, figsize=(7, 4.3), note=note) as (_, ((axes,),)):
        for row, color in zip(rows, PALETTE[2:], strict=False):
            linear = next(cell["seconds"] for cell in row["mhla"] if cell["blocks"] == 1)
            blocks = [cell["blocks"] for cell in row["mhla"]]
            label = f"N = {row['tokens']:,} (softmax: {row['softmax'] / linear:.1f})"
            axes.plot(blocks, [cell["seconds"] / linear for cell in row["mhla"]], "o-", color=color, label=label)
            axes.axvline(row["tokens"] ** 0.5, color=color, linewidth=1, linestyle=(0, (2, 3)))
        counts = sorted({cell["blocks"] for row in rows for cell in row["mhla"]})
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.minorticks_off()
        axes.grid(True)
        axes.set(title="Forward and backward, times plain linear attention", xlabel="blocks M; dotted: M² = N")
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.legend(loc="upper left", fontsize=9)
