"""What the demo found, over seeds: results.json and the table in the terminal.

Every number is read from the files beside the models (results.json, train.json), none is passed along; the
spread is that over seeds, not the standard error of one task. Where MHLA loses, the same table says so.
"""

import json
import statistics
from pathlib import Path

from mhla_hf.checkpoints.provenance import describe_run
from mhla_hf.evaluation.records import Results, render_rows
from mhla_hf.training.run_folder import RECORD

from ..studies.report import over_seeds
from .figures import LABELS

NEAR = 64
BACK = "recall_back_"
COLUMNS = (
    ("bits_per_byte", "bits per byte ↓", "{:.4f}"),
    ("over_teacher_percent", "over teacher, % ↓", "{:+.2f}"),
    ("cloze", "cloze ↑", "{:.3f}"),
    ("recall_far", f"recall beyond {NEAR} ↑", "{:.3f}"),
    ("transfer_loss", "transfer loss ↓", "{:.3f}"),
    ("kl", "KL, training ↓", "{:.4f}"),
    ("million_tokens_to_linear", "M tokens to linear's KL ↓", "{:.2f}"),
)


def collect(folders, prefix, description, command=None):
    """The content of results.json.

    Args:
        folders: seed -> model -> folder, each with results.json and train.json; the first model is the teacher.
        prefix: of the task names. description: what was trained on what. command: the shell line that repeats it.

    Returns:
        dict: "models" -> model -> measure -> {"mean", "stderr" (over seeds; None for one), "values"}; circumstances.
    """
    per_seed = {seed: _measure(models, prefix) for seed, models in folders.items()}
    first = next(iter(per_seed.values()))
    models = {
        model: {
            measure: over_seeds([measured[model].get(measure) for measured in per_seed.values()])
            for measure in measures
        }
        for model, measures in first.items()
    }
    return {
        "seeds": list(folders),
        "models": models,
        "about": {
            "over_teacher_percent": "change of bits per byte against the same seed's teacher",
            "cloze": "share of right answers among four",
            "recall": "share of lookups whose value is the likeliest next token, by tokens back",
            "transfer_loss": "squared error of an MHLA layer's output over that of zero, on training text, per layer",
            "kl": "nats per token on training text at the end of the distillation",
            "million_tokens_to_linear": "training tokens, both stages, to the KL that plain linear attention ends with",
            "stderr": "standard error of the mean over seeds",
        },
        **description,
        **describe_run(command),
    }


def _measure(folders, prefix):
    """model -> measure -> number (or None), of one seed."""
    measured = {}
    for model, folder in folders.items():
        scores = Results.read(folder)
        measured[model] = {
            "bits_per_byte": _score(scores, f"{prefix}_bits_per_byte", "bits_per_byte"),
            "cloze": _score(scores, f"{prefix}_cloze", "acc"),
            **_recall(scores, f"{prefix}_recall"),
        }
        record = Path(folder) / RECORD
        if record.exists():
            train = json.loads(record.read_text(encoding="utf-8"))
            measured[model] |= {"steps": train["steps"], "tokens": train["tokens"], "seconds": train["seconds"]}
    linear = learning_curve(folders["linear"])
    goal = final_loss(linear)
    teacher = next(iter(measured.values()))["bits_per_byte"]
    for model, values in measured.items():
        values["over_teacher_percent"] = 100 * (values["bits_per_byte"] / teacher - 1)
        if model in ("teacher", "control"):
            continue
        curve = learning_curve(folders[model])
        values["transfer_loss"] = final_loss(curve, 0) / curve[0]["layers"]
        values["kl"] = final_loss(curve)
        reached = tokens_to_loss(curve, goal)
        values["million_tokens_to_linear"] = None if reached is None else reached / 1e6
    return measured


def _recall(scores, task):
    """By distance, and the mean over those beyond what a window of two blocks holds."""
    found = {
        int(record.metric.removeprefix("acc_back_")): record.value
        for record in scores
        if record.task == task and record.metric.startswith("acc_back_")
    }
    far = statistics.fmean(value for back, value in found.items() if back > NEAR)
    return {"recall_far": far} | {f"{BACK}{back}": value for back, value in sorted(found.items())}


def _score(scores, task, metric):
    record = scores.find(task, metric)
    if record is None or record.value is None:
        raise ValueError(f"results: there is no finite {metric} of {task} among the scores; evaluate the model again")
    return record.value


def learning_curve(folder):
    """The history of `folder`'s train.json, each entry with "layers", the number of converted layers."""
    train = json.loads((Path(folder) / RECORD).read_text(encoding="utf-8"))
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    return [entry | {"layers": len(config["mhla"]["layers"])} for entry in train["history"]]


def final_loss(curve, stage=-1):
    """Mean of the last five entries of a stage of `curve`, 0 the first and -1 the last."""
    name = list(dict.fromkeys(entry["stage"] for entry in curve))[stage]
    return statistics.fmean([entry["loss"] for entry in curve if entry["stage"] == name][-5:])


def tokens_to_loss(curve, goal):
    """Tokens seen when the last stage's loss, as a mean of five entries, first was at `goal` or below; None: never."""
    last = curve[-1]["stage"]
    entries = [entry for entry in curve if entry["stage"] == last]
    for end in range(min(5, len(entries)), len(entries) + 1):
        window = entries[max(0, end - 5) : end]
        if statistics.fmean(entry["loss"] for entry in window) <= goal:
            return window[-1]["tokens"]
    return None


def recall_by_distance(results, model):
    """{tokens back: share of the lookups answered}, the mean over the seeds."""
    measures = results["models"][model].items()
    return {int(key.removeprefix(BACK)): value["mean"] for key, value in measures if key.startswith(BACK)}


def render_report(results):
    """The table for a terminal, and how to read it."""
    rows = [
        [LABELS[model], *(_cell(measures.get(key), form) for key, _, form in COLUMNS)]
        for model, measures in results["models"].items()
    ]
    table, seeds = render_rows(["", *(title for _, title, _ in COLUMNS)], rows, left=1), len(results["seeds"])
    one = "one seed; --full --seeds 3 shows how much a seed changes"
    notes = [table, f"mean ± standard error over {seeds} seeds" if seeds > 1 else one]
    if results.get("text", "").endswith(", plain"):
        notes.append("recall: lookups in held-out text; the training text had none (--lookups adds them)")
    return "\n\n".join(notes)


def _cell(measure, form):
    if measure is None or measure["mean"] is None:
        return "" if measure is None else "never"
    error = measure["stderr"]
    return form.format(measure["mean"]) + ("" if error is None else " ± " + form.replace("+", "").format(error))
