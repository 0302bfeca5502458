"""Figures of the demo and of the README: held-out quality, and time and cache by length."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mhla_hf.plots import COLORS, drawing

MODEL_COLORS = ("teacher", "mhla", "linear", "control")


def plot_journey(path: Path, results: Mapping[str, Any], measured: Mapping[str, Any], bin_size: int) -> None:
    """Plot perplexity by position, a map of the heads, and cache and decoding time by length, of a real model. `results` is
    the content of the demo's results.json, `measured` that of the converted model's `config.mhla_measured`, and `bin_size`
    the positions per mean of the losses."""
    colors = dict(zip(results["models"], map(COLORS.__getitem__, MODEL_COLORS), strict=True))
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
        _draw_heads(heads, measured)


def _draw_heads(axes: Any, measured: Mapping[str, Any]) -> None:
    layers = sorted(measured["head_scores"], key=int)  # JSON sorts them as strings
    scores = [measured["head_scores"][layer] for layer in layers]
    num_heads = max(map(len, scores))
    values = [[layer[head] if head < len(layer) else math.nan for layer in scores] for head in range(num_heads)]
    image = axes.imshow(values, cmap="Blues", vmin=0, aspect="auto")
    axes.figure.colorbar(image, ax=axes, label="KL that MHLA would add")
    marks = [(index, head) for index, layer in enumerate(layers) for head in measured["softmax_heads"].get(layer, ())]
    if marks:
        axes.plot(*zip(*marks, strict=True), "s", color=COLORS["linear"], markersize=5)
    axes.set_xticks(range(0, len(scores), 5), layers[::5])
    axes.set_yticks(range(num_heads))
    axes.set(title="KV heads that keep softmax (marked)", xlabel="layer", ylabel="KV head")


def plot_gains(
    path: Path, time: Mapping[int, Sequence[float]], cache: Mapping[int, Sequence[float]],
    quality: Mapping[str, Mapping[str, float]], titles: Sequence[str],
) -> None:  # fmt: skip
    """Plot milliseconds of a token and bytes of the cache, (softmax, MHLA) by length, and perplexity by position. `quality`
    has the perplexities of each model, of softmax and MHLA first; `titles` are those of the three panels."""
    with drawing(path, 1, 3, figsize=(11.5, 3.8), width_ratios=(1, 1, 1.15)) as (_, ((left, middle, right),)):
        mebibytes = {length: [value / 2**20 for value in pair] for length, pair in cache.items()}
        for axes, values, title, unit in ((left, time, titles[0], "ms"), (middle, mebibytes, titles[1], "MiB")):
            for index, (name, label) in enumerate((("teacher", "softmax"), ("mhla", "MHLA"))):
                y = [pair[index] for pair in values.values()]
                axes.plot(list(values), y, color=COLORS[name], marker="o", label=label)
                axes.annotate(
                    f"{y[-1]:.3g} {unit}", (list(values)[-1], y[-1]), xytext=((-9, -3), (5, 9))[index],
                    textcoords="offset points", ha="right", color=COLORS[name], fontweight="bold",
                )  # fmt: skip
            _label_lengths(axes, values, title, unit)
        left.legend(loc="upper left")
        for name, (label, perplexities) in zip(MODEL_COLORS, quality.items(), strict=True):
            x, y = list(perplexities), list(perplexities.values())
            right.plot(x, y, color=COLORS[name], marker="o", label=label)
        right.grid(True)
        right.set(title=titles[2], xlabel="tokens in the context", ylabel="perplexity, lower is better", ylim=(0, None))
        right.legend(loc="lower right", fontsize=9)


def _label_lengths(axes: Any, lengths: Iterable[int], title: str, unit: str) -> None:
    """Set scales, ticks (1, 2, and 5 times the powers of ten), and labels of a panel with curves over context lengths."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(list(lengths), [f"{length:,}" for length in lengths])
    axes.minorticks_off()
    axes.yaxis.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axes.grid(True)
    axes.set(title=title, xlabel="tokens in the context", ylabel=f"{unit}, lower is better")
