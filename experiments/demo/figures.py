"""Figures of the demo and of the README: losses, held-out quality, recall, and time and cache by length."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mhla_hf.checkpoints.file_io import PathLike
from mhla_hf.plots import COLORS, drawing

LABELS = {
    "teacher": "softmax teacher",
    "control": "teacher, trained on",
    "linear": "plain linear",
    "mhla": "MHLA",
    "hybrid": "hybrid 1 in 4",
}


def plot_loss(
    path: PathLike, histories: Mapping[str, Sequence[Mapping[str, Any]]], scores: Mapping[str, Sequence[float]]
) -> None:
    """Plot the loss of each student in both stages, and the bits per byte of all models on held-out text.

    Args:
        path: PNG to write.
        histories: For each student, what `learning_curve` returns. The stages are transfer and distillation, in this order.
            The transfer loss is a sum over layers, and is plotted per layer.
        scores: For each model, held-out bits per byte of each seed. The first model is the teacher.
    """
    with drawing(path, 1, 3, figsize=(14.5, 4.2), width_ratios=(1, 1, 1.3)) as (_, ((left, middle, right),)):
        for name, entries in histories.items():
            stages = list(dict.fromkeys(entry["stage"] for entry in entries))
            _draw_curve(left, name, [entry for entry in entries if entry["stage"] == stages[0]], per_layer=True)
            _draw_curve(middle, name, [entry for entry in entries if entry["stage"] == stages[-1]])
        left.set(title="Stage 1: attention outputs", xlabel="step", ylabel="relative squared error, per layer")
        middle.set(title="Stage 2: next-token distribution", xlabel="step", ylabel="KL to the teacher, nats per token")
        middle.set_yscale("log")
        plain_ticks(middle.yaxis, (1.0, 1.5, 2.0, 3.0, 5.0, 7.0))
        for axes in (left, middle):
            axes.grid(True)
        left.legend(loc="best")
        _draw_bars(right, scores)


def _draw_curve(axes: Any, name: str, entries: Sequence[Mapping[str, Any]], per_layer: bool = False) -> None:
    """Draw the loss of a model by step."""
    losses = [entry["loss"] / (entry["layers"] if per_layer else 1) for entry in entries]
    axes.plot([entry["step"] for entry in entries], losses, color=COLORS[name], label=LABELS[name])


def _draw_bars(axes: Any, scores: Mapping[str, Sequence[float]]) -> None:
    """Draw a bar for each model, its mean over seeds, with a dot for each seed if there are several."""
    names = list(scores)
    means = [sum(values) / len(values) for values in scores.values()]
    for index, (name, mean) in enumerate(zip(names, means, strict=True)):
        axes.bar(index, mean, color=COLORS[name], width=0.8, zorder=2)
        if len(scores[name]) > 1:
            axes.plot(
                [index] * len(scores[name]), scores[name], ".", color="white", markeredgecolor="#33363d", zorder=3
            )
        change = "" if index == 0 else f"\n{100 * (mean / means[0] - 1):+.2f} %".replace("-", "\N{MINUS SIGN}")
        axes.annotate(
            f"{mean:.3f}{change}", (index, 0), xycoords=("data", "axes fraction"), xytext=(0, 8),
            textcoords="offset points", ha="center", color="white", fontweight="bold", fontsize=9.5, zorder=4,
        )  # fmt: skip
    lowest, highest = min(map(min, scores.values())), max(map(max, scores.values()))
    spread = max(highest - lowest, 0.01 * highest)
    axes.set_ylim(lowest - 1.3 * spread, highest + 0.3 * spread)
    axes.axhline(means[0], color=COLORS[names[0]], linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    axes.set_xticks(range(len(names)), [LABELS[name].replace(" ", "\n", 1) for name in names])
    axes.tick_params(axis="x", length=0)
    axes.set(title="Held-out text (axis does not start at 0)", ylabel="bits per byte, lower is better")


def plot_recall(path: PathLike, accuracies: Mapping[str, Mapping[int, float]]) -> None:
    """Plot the accuracy of lookups by distance.

    Args:
        path: PNG to write.
        accuracies: For each model, accuracy by distance in tokens.
    """
    with drawing(path, 1, 1, figsize=(6.4, 4.2)) as (_, ((axes,),)):
        for name, by_distance in accuracies.items():
            axes.plot(*zip(*by_distance.items(), strict=True), color=COLORS[name], marker="o", label=LABELS[name])
        axes.set(
            title="Held-out lookups", xlabel="tokens back", ylabel="answered, higher is better", ylim=(-0.03, 1.03)
        )
        axes.grid(True)
        axes.legend(loc="best")


def plot_speed(path: PathLike, rows: Sequence[Mapping[str, Any]], converted: str, note: str) -> None:
    """Plot time by length, with a panel for each kind of measurement.

    Args:
        path: PNG to write.
        rows: "rows" of `measure_speed`: "what" (kind of measurement), "length" (tokens), "softmax_ms", and "mhla_ms".
        converted: Label of the MHLA model.
        note: Text below the figure.
    """
    kinds = list(dict.fromkeys(row["what"] for row in rows))
    with drawing(path, 1, len(kinds), figsize=(5.6 * len(kinds), 4.3), note=note) as (_, grid):
        for axes, kind in zip(grid[0], kinds, strict=True):
            kind_rows = [row for row in rows if row["what"] == kind]
            lengths = [row["length"] for row in kind_rows]
            for name, key, label, marker in (("teacher", "softmax", "softmax", "o"), ("mhla", "mhla", converted, "D")):
                values = [row[f"{key}_ms"] for row in kind_rows]
                axes.plot(lengths, values, color=COLORS[name], marker=marker, markersize=5, label=label)
            last = kind_rows[-1]
            _mark_ratio(axes, last["length"], last["softmax_ms"], last["mhla_ms"])
            _label_lengths(axes, lengths, kind, "milliseconds")
            low, high = axes.get_ylim()
            axes.set_ylim(low / 1.6, high * 1.2)
        grid[0][0].legend(loc="upper left")


def plot_journey(path: PathLike, results: Mapping[str, Any], measured: Mapping[str, Any], bin_size: int) -> None:
    """Plot perplexity by position, a map of the heads, and cache and decoding time by length, of a real model.

    Args:
        path: PNG to write.
        results: Content of the demo's results.json.
        measured: `config.mhla_measured` of the converted model.
        bin_size: Positions per mean of the losses.
    """
    colors = dict(
        zip(results["models"], (COLORS[name] for name in ("teacher", "mhla", "linear", "control")), strict=True)
    )
    with drawing(path, 2, 2, figsize=(12, 7.6)) as (_, ((quality, heads), (cache, time))):
        for name, scores in results["models"].items():
            ends = [min(bin_size * (index + 1), results["length"]) for index in range(len(scores["loss"]))]
            quality.plot(ends, [math.exp(loss) for loss in scores["loss"]], color=colors[name], marker="o", label=name)
            lengths = list(map(int, scores["cache"]))
            mebibytes = [size / 2**20 for size in scores["cache"].values()]
            cache.plot(lengths, mebibytes, color=colors[name], marker="o", label=name)
        quality.set(title="Held-out text", xlabel="up to this position", ylabel="perplexity, lower is better")
        quality.grid(True)
        quality.legend(loc="best")
        _label_lengths(cache, lengths, "Cache of one sequence, bf16", "MiB")
        lengths = list(map(int, results["decoding"]))
        for name in next(iter(results["decoding"].values()), ()):
            steps = [times[name] for times in results["decoding"].values()]
            time.plot(lengths, steps, color=colors[name], marker="o", label=name)
        _label_lengths(time, lengths, "One more token, fp32, not compiled", "milliseconds")
        _draw_gates(heads, measured)


def _draw_gates(axes: Any, measured: Mapping[str, Any]) -> None:
    """Draw the gates of the KV heads by layer, and mark the heads that keep softmax."""
    layers = sorted(measured["gates"], key=int)  # JSON sorts them as strings
    gates = [measured["gates"][layer] for layer in layers]
    num_heads = max(map(len, gates))
    values = [[layer[head] if head < len(layer) else math.nan for layer in gates] for head in range(num_heads)]
    image = axes.imshow(values, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    axes.figure.colorbar(image, ax=axes, label="gate (1: softmax)")
    marks = [(index, head) for index, layer in enumerate(layers) for head in measured["softmax_heads"].get(layer, ())]
    if marks:
        axes.plot(*zip(*marks, strict=True), "s", color=COLORS["linear"], markersize=5)
    axes.set_xticks(range(0, len(gates), 5), layers[::5])
    axes.set_yticks(range(num_heads))
    axes.set(title="KV heads that keep softmax (marked)", xlabel="layer", ylabel="KV head")


def plot_gains(
    path: PathLike,
    time: Mapping[int, Sequence[float]],
    cache: Mapping[int, Sequence[float]],
    quality: Mapping[str, Mapping[str, float]],
    titles: Sequence[str],
) -> None:
    """Plot what a conversion gains with length, and what it keeps of quality.

    Args:
        path: PNG to write.
        time: Milliseconds of the next token, (softmax, MHLA), by the number of tokens in the context.
        cache: Bytes of the cache, (softmax, MHLA), by the number of tokens in the context.
        quality: For each model, perplexity by the range of positions. The first model is softmax, and the second MHLA.
        titles: Titles of the three panels.
    """
    with drawing(path, 1, 3, figsize=(11.5, 3.8), width_ratios=(1, 1, 1.15)) as (_, ((left, middle, right),)):
        mebibytes = {length: [value / 2**20 for value in pair] for length, pair in cache.items()}
        panels: tuple[tuple[Any, Mapping[int, Sequence[float]], str, str], ...] = (
            (left, time, titles[0], "ms"),
            (middle, mebibytes, titles[1], "MiB"),
        )
        for axes, values, title, unit in panels:
            for index, (name, label) in enumerate((("teacher", "softmax"), ("mhla", "MHLA"))):
                y = [pair[index] for pair in values.values()]
                axes.plot(list(values), y, color=COLORS[name], marker="o", label=label)
                axes.annotate(
                    f"{y[-1]:.3g} {unit}", (list(values)[-1], y[-1]), xytext=((-9, -3), (5, 9))[index],
                    textcoords="offset points", ha="right", color=COLORS[name], fontweight="bold",
                )  # fmt: skip
            _label_lengths(axes, values, title, unit)
        left.legend(loc="upper left")
        names = ("teacher", "mhla", "linear", "control")
        for name, (label, perplexities) in zip(names, quality.items(), strict=True):
            x, y = list(perplexities), list(perplexities.values())
            right.plot(x, y, color=COLORS[name], marker="o", label=label)
        right.grid(True)
        right.set(title=titles[2], xlabel="tokens in the context", ylabel="perplexity, lower is better", ylim=(0, None))
        right.legend(loc="lower right", fontsize=9)


def _label_lengths(axes: Any, lengths: Iterable[int], title: str, unit: str) -> None:
    """Set scales, ticks, and labels of a panel with curves over the number of tokens in the context."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(list(lengths), [f"{length:,}" for length in lengths])
    axes.minorticks_off()
    plain_ticks(axes.yaxis)
    axes.grid(True)
    axes.set(title=title, xlabel="tokens in the context", ylabel=f"{unit}, lower is better")


def _mark_ratio(axes: Any, length: int, softmax: float, mhla: float) -> None:
    """Draw a line between the last points of two curves, labeled with the ratio of their times."""
    axes.plot([length, length], [softmax, mhla], color=COLORS["mhla"], linewidth=1, linestyle=(0, (2, 2)), zorder=1)
    axes.annotate(
        compare_times(softmax, mhla), (length, (softmax * mhla) ** 0.5), xytext=(9, 0), textcoords="offset points",
        ha="left", va="center", color=COLORS["mhla"], fontweight="bold", annotation_clip=False,
    )  # fmt: skip


def compare_times(softmax: float, mhla: float) -> str:
    """Describe how much faster or slower MHLA is: "as fast" within 5 %."""
    if max(softmax, mhla) <= 1.05 * min(softmax, mhla):
        return "as fast"
    return f"{softmax / mhla:.1f}x\nfaster" if softmax > mhla else f"{mhla / softmax:.1f}x\nslower"


def plain_ticks(axis: Any, steps: Sequence[float] = (1.0, 2.0, 5.0)) -> None:
    """Set the ticks of an axis to `steps` times the powers of ten, written as plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_major_locator(LogLocator(10, subs=steps))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
