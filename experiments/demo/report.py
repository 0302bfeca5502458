"""The demo's results over seeds: results.json, and the table in the terminal.

All numbers are read from the files next to the models (results.json, train.json). Standard errors are those over seeds, not
those of one task.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mhla_hf.checkpoints.provenance import describe_run
from mhla_hf.evaluation.records import Results
from mhla_hf.plots import render_rows
from mhla_hf.training.run_folder import RECORD

from ..rows import format_mean, over_seeds

LABELS = {"teacher": "softmax teacher", "control": "teacher, trained on", "linear": "plain linear", "mhla": "MHLA"}
LABELS["hybrid"] = "hybrid 1 in 4"
NEAR = 64  # tokens that a window of two blocks holds
ACC = "acc_back_"  # beginning of the metrics
COLUMNS = (  # measure, title, format
    ("bits_per_byte", "bits per byte ↓", "{:.4f}"),
    ("over_teacher_percent", "over teacher, % ↓", "{:+.2f}"),
    ("recall_far", f"recall beyond {NEAR} ↑", "{:.3f}"),
    ("transfer_loss", "transfer loss ↓", "{:.3f}"),
    ("kl", "KL, training ↓", "{:.4f}"),
    ("million_tokens_to_linear", "M tokens to linear's KL ↓", "{:.2f}"),
)

Curve = Sequence[Mapping[str, Any]]  # the history in a train.json


def collect(
    folders: Mapping[int, Mapping[str, Path]], bits: Mapping[int, Mapping[str, float]], description: Mapping[str, Any],
    command: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Compute the content of results.json from the folders of the models, the teacher's first, and bits per byte, by seed.
    `description` has further entries, which say which model was trained on which text."""
    by_seed = {seed: _measure(models, bits[seed]) for seed, models in folders.items()}
    models: dict[str, dict[str, Any]] = {}
    for model, measures in next(iter(by_seed.values())).items():
        values = {key: [measured[model].get(key) for measured in by_seed.values()] for key in measures}
        models[model] = {key: over_seeds(of_seeds) for key, of_seeds in values.items()}
    return {
        "seeds": list(folders),
        "models": models,
        "about": {
            "over_teacher_percent": "change of bits per byte against the same seed's teacher",
            "recall": "share of lookups whose value is the likeliest next token, by tokens back",
            "transfer_loss": "squared error of an MHLA layer's output over that of zero, on training text, per layer",
            "kl": "nats per token on training text at the end of the distillation",
            "million_tokens_to_linear": "training tokens, both stages, to the KL that plain linear attention ends with",
            "stderr": "standard error of the mean over seeds",
        },
        **description,
        **describe_run(command),
    }


def _measure(folders: Mapping[str, Path], bits: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    models: dict[str, dict[str, Any]] = {}
    curves: dict[str, list[dict[str, Any]]] = {}
    for model, folder in folders.items():
        scores = [x for x in Results.read(folder) if x.task.startswith("lookups_recall") and x.metric.startswith(ACC)]
        by_distance: dict[int, Any] = {int(x.metric.removeprefix(ACC)): x.value for x in scores}
        far = statistics.fmean(value for distance, value in by_distance.items() if distance > NEAR)
        recall = {f"recall_back_{distance}": by_distance[distance] for distance in sorted(by_distance)}
        models[model] = {"bits_per_byte": bits[model], "recall_far": far, **recall}
        record = Path(folder) / RECORD
        if record.exists():
            train = json.loads(record.read_text(encoding="utf-8"))
            models[model].update({key: train[key] for key in ("steps", "tokens", "seconds")})
            curves[model] = train["history"]
    teacher = next(iter(models.values()))["bits_per_byte"]
    for model, measures in models.items():
        measures["over_teacher_percent"] = 100 * (measures["bits_per_byte"] / teacher - 1)
        if model in ("teacher", "control"):
            continue
        config = json.loads((Path(folders[model]) / "config.json").read_text(encoding="utf-8"))
        measures["transfer_loss"] = final_loss(curves[model], 0) / len(config["mhla"]["layers"])
        measures["kl"] = final_loss(curves[model])
        tokens = tokens_to_loss(curves[model], final_loss(curves["linear"]))
        measures["million_tokens_to_linear"] = None if tokens is None else tokens / 1e6
    return models


def final_loss(curve: Curve, stage: int = -1) -> float:
    """Return the mean loss over the last five entries of a stage, by its index."""
    name = list(dict.fromkeys(entry["stage"] for entry in curve))[stage]
    return statistics.fmean([entry["loss"] for entry in curve if entry["stage"] == name][-5:])


def tokens_to_loss(curve: Curve, goal: float) -> int | None:
    """Return after how many training tokens the last stage's loss was first at most `goal`, as a mean of five entries."""
    last_stage = curve[-1]["stage"]
    entries = [entry for entry in curve if entry["stage"] == last_stage]
    for end in range(min(5, len(entries)), len(entries) + 1):
        window = entries[max(0, end - 5) : end]
        if statistics.fmean(entry["loss"] for entry in window) <= goal:
            return window[-1]["tokens"]
    return None


def render_report(results: Mapping[str, Any]) -> str:
    """Render the table of results.json for a terminal; "never" stands for a mean that does not exist."""
    rows = []
    for model, measures in results["models"].items():
        cells = [LABELS[model]]
        for key, _, spec in COLUMNS:
            values = measures[key]["values"] if key in measures else None
            cells.append("" if values is None else "never" if None in values else format_mean(values, spec))
        rows.append(cells)
    table = render_rows(["", *(title for _, title, _ in COLUMNS)], rows, left=1)
    num_seeds = len(results["seeds"])
    note = f"mean ± standard error over {num_seeds} seeds" if num_seeds > 1 else "one seed"
    return f"{table}\n\n{note}"
