"""How the demo's students learned, what they cost on held-out text, and how time grows with length."""

import math

from mhla_hf.plots import COLORS, drawing

LABELS = {
    "teacher": "softmax teacher",
    "control": "teacher, trained on",
    "linear": "plain linear",
    "mhla": "MHLA",
    "hybrid": "hybrid 1 in 4",
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
    with drawing(path, 1, 3, figsize=(14.5, 4.2), width_ratios=(1, 1, 1.3)) as (_, ((left, middle, right),)):
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


def _curve(axes, name, entries, per_layer=False):
    losses = [entry["loss"] / (entry["layers"] if per_layer else 1) for entry in entries]
    axes.plot([entry["step"] for entry in entries], losses, color=COLORS[name], label=LABELS[name])


def _bars(axes, scores):
    names = list(scores)
    means = [sum(values) / len(values) for values in scores.values()]
    for place, (name, mean) in enumerate(zip(names, means, strict=True)):
        axes.bar(place, mean, color=COLORS[name], width=0.8, zorder=2)
        if len(scores[name]) > 1:
            axes.plot(
                [place] * len(scores[name]), scores[name], ".", color="white", markeredgecolor="#33363d", zorder=3
            )
        change = "" if place == 0 else f"\n{100 * (mean / means[0] - 1):+.2f} %".replace("-", "\N{MINUS SIGN}")
        axes.annotate(
            f"{mean:.3f}{change}", (place, 0), xycoords=("data", "axes fraction"), xytext=(0, 8),
            textcoords="offset points", ha="center", color="white", fontweight="bold", fontsize=9.5, zorder=4,
        )  # fmt: skip
    lowest, highest = min(map(min, scores.values())), max(map(max, scores.values()))
    room = max(highest - lowest, 0.01 * highest)
    axes.set_ylim(lowest - 1.3 * room, highest + 0.3 * room)
    axes.axhline(means[0], color=COLORS[names[0]], linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    axes.set_xticks(range(len(names)), [LABELS[name].replace(" ", "\n", 1) for name in names])
    axes.tick_params(axis="x", length=0)
    axes.set(title="Held-out text (axis does not start at 0)", ylabel="bits per byte, lower is better")


def plot_recall(path, found):
    """The share of lookups answered, by distance. found: model -> {tokens back: share}."""
    with drawing(path, 1, 1, figsize=(6.4, 4.2)) as (_, ((axes,),)):
        for name, by_distance in found.items():
            axes.plot(*zip(*by_distance.items(), strict=True), color=COLORS[name], marker="o", label=LABELS[name])
        axes.set(
            title="Held-out lookups", xlabel="tokens back", ylabel="answered, higher is better", ylim=(-0.03, 1.03)
        )
        axes.grid(True)
        axes.legend(loc="best")


def plot_speed(path, rows, converted, note):
    """Time against length, for the kinds of measurement in `rows` side by side.

    Args:
        path: PNG to write.
        rows: as `measure_speed` gives them: "what", "length" (tokens), "softmax_ms", "mhla_ms".
        converted: what the MHLA model is called.
        note: one line below the figure: the machine, and what was timed.
    """
    kinds = list(dict.fromkeys(row["what"] for row in rows))
    with drawing(path, 1, len(kinds), figsize=(5.6 * len(kinds), 4.3), note=note) as (_, grid):
        for axes, kind in zip(grid[0], kinds, strict=True):
            own = [row for row in rows if row["what"] == kind]
            lengths = [row["length"] for row in own]
            for name, key, label, marker in (("teacher", "softmax", "softmax", "o"), ("mhla", "mhla", converted, "D")):
                values = [row[f"{key}_ms"] for row in own]
                axes.plot(lengths, values, color=COLORS[name], marker=marker, markersize=5, label=label)
            last = own[-1]
            _mark_ratio(axes, last["length"], last["softmax_ms"], last["mhla_ms"])
            _by_length(axes, lengths, kind, "milliseconds")
            low, high = axes.get_ylim()
            axes.set_ylim(low / 1.6, high * 1.2)
        grid[0][0].legend(loc="upper left")


def plot_journey(path, results, measured, width):
    """Perplexity by position, the map of heads, and cache and decoding time by length, of the real model.

    Args:
        path: PNG to write.
        results: what the demo's results.json holds.
        measured: `config.mhla_measured` of the converted model.
        width: tokens of a bin of positions.
    """
    colors = dict(
        zip(results["models"], (COLORS[name] for name in ("teacher", "control", "linear", "mhla")), strict=True)
    )
    with drawing(path, 2, 2, figsize=(12, 7.6)) as (_, ((quality, heads), (cache, time))):
        for name, scores in results["models"].items():
            ends = [min(width * (place + 1), results["length"]) for place in range(len(scores["loss"]))]
            quality.plot(ends, [math.exp(x) for x in scores["loss"]], color=colors[name], marker="o", label=name)
            lengths = list(map(int, scores["cache"]))
            mebibytes = [size / 2**20 for size in scores["cache"].values()]
            cache.plot(lengths, mebibytes, color=colors[name], marker="o", label=name)
        quality.set(title="Held-out text", xlabel="up to this position", ylabel="perplexity, lower is better")
        quality.grid(True)
        quality.legend(loc="best")
        _by_length(cache, lengths, "Cache of one sequence, bf16", "MiB")
        lengths = list(map(int, results["decoding"]))
        for name in next(iter(results["decoding"].values()), ()):
            steps = [times[name] for times in results["decoding"].values()]
            time.plot(lengths, steps, color=colors[name], marker="o", label=name)
        _by_length(time, lengths, "One more token, fp32, not compiled", "milliseconds")
        _map_heads(heads, measured)


def _map_heads(axes, measured):
    """Gates of the KV heads, by layer, and a mark on those that keep softmax."""
    layers = sorted(measured["gates"], key=int)  # JSON sorts them as texts
    gates = [measured["gates"][layer] for layer in layers]
    groups = max(map(len, gates))
    values = [[gate[group] if group < len(gate) else math.nan for gate in gates] for group in range(groups)]
    axes.imshow(values, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    marks = [(place, head) for place, layer in enumerate(layers) for head in measured["softmax_heads"].get(layer, ())]
    if marks:
        axes.plot(*zip(*marks, strict=True), "s", color=COLORS["linear"], markersize=5)
    axes.set_xticks(range(0, len(gates), 5), layers[::5])
    axes.set_yticks(range(groups))
    axes.set(title="KV heads that keep softmax (marked)", xlabel="layer", ylabel="KV head")


def plot_gains(path, time, kept, quality, titles):
    """What a conversion gains with length, and what it keeps of quality.

    Args:
        path: PNG to write.
        time: {tokens in the context: milliseconds of the next token, (softmax, MHLA)}.
        kept: the same for the bytes of the cache.
        quality: {model: {place in a row: perplexity}}; the first is softmax, the second the converted model.
        titles: of the three panels.
    """
    with drawing(path, 1, 3, figsize=(11.5, 3.8), width_ratios=(1, 1, 1.15)) as (_, ((left, middle, right),)):
        mebibytes = {length: [value / 2**20 for value in pair] for length, pair in kept.items()}
        panels = (
            (left, time, titles[0], "ms"),
            (middle, mebibytes, titles[1], "MiB"),
        )
        for axes, values, title, unit in panels:
            for place, (name, label) in enumerate((("teacher", "softmax"), ("mhla", "converted"))):
                y = [pair[place] for pair in values.values()]
                axes.plot(list(values), y, color=COLORS[name], marker="o", label=label)
                axes.annotate(
                    f"{y[-1]:.3g} {unit}", (list(values)[-1], y[-1]), xytext=((-9, -3), (5, 9))[place],
                    textcoords="offset points", ha="right", color=COLORS[name], fontweight="bold",
                )  # fmt: skip
            _by_length(axes, values, title, unit)
        left.legend(loc="upper left")
        for name, (label, places) in zip(("teacher", "mhla", "linear"), quality.items(), strict=False):
            right.plot(list(places), list(places.values()), color=COLORS[name], marker="o", label=label)
        right.grid(True)
        right.set(title=titles[2], xlabel="tokens in the context", ylabel="perplexity, lower is better", ylim=(0, None))
        right.legend(loc="lower right", fontsize=9)


def _by_length(axes, lengths, title, unit):
    """What is written around curves over the length of the context."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(list(lengths), [f"{length:,}" for length in lengths])
    axes.minorticks_off()
    plain_ticks(axes.yaxis)
    axes.grid(True)
    axes.set(title=title, xlabel="tokens in the context", ylabel=f"{unit}, lower is better")


def _mark_ratio(axes, length, softmax, mhla):
    """A line between the two last points, with their ratio in words."""
    axes.plot([length, length], [softmax, mhla], color=COLORS["mhla"], linewidth=1, linestyle=(0, (2, 2)), zorder=1)
    axes.annotate(
        compare_times(softmax, mhla), (length, (softmax * mhla) ** 0.5), xytext=(9, 0), textcoords="offset points",
        ha="left", va="center", color=COLORS["mhla"], fontweight="bold", annotation_clip=False,
    )  # fmt: skip


def compare_times(softmax, mhla):
    """How much faster or slower MHLA is, or "as fast" within 5 %."""
    if max(softmax, mhla) <= 1.05 * min(softmax, mhla):
        return "as fast"
    return f"{softmax / mhla:.1f}x\nfaster" if softmax > mhla else f"{mhla / softmax:.1f}x\nslower"


def plain_ticks(axis, steps=(1.0, 2.0, 5.0)):
    """`steps` times the powers of ten, as plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_major_locator(LogLocator(10, subs=steps))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
