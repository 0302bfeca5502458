"""The results of a study: accuracy, rank, and entropy with standard errors over seeds, and whether claims hold.

All numbers are read from the files in the cells' folders. A claim compares two rows on the same seeds: it holds, does
not hold, or is undecided, according to the 95 % interval of the paired difference.
"""

import dataclasses
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mhla_hf.analysis.figures import plot_layers, plot_mixing
from mhla_hf.checkpoints.file_io import write_json, write_text
from mhla_hf.checkpoints.provenance import describe_run
from mhla_hf.evaluation.records import format_score
from mhla_hf.training.run_folder import RECORD

from .figures import plot_accuracy
from .study import ANALYSIS, MEASURES, Study, folder_of, open_data, read_study, train_cells

T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # Student's t, two-sided 95 %, by degrees of freedom


def run_study(
    name: str | Path,
    out: str | Path,
    *,
    data: Any = None,
    seeds: int | None = None,
    epochs: int | None = None,
    threads: int = 1,
    progress: bool = True,
    command: str | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Train the missing cells of a study, and write results.json, table.md, accuracy.png, layers.png, and mixing.png.

    After an interruption, the same call resumes the study.

    Args:
        name: Name of a study, or a YAML file.
        out: Folder to create, or of a study to resume.
        data: Images instead of scikit-learn's digits: a folder (train/CLASS/..., test/CLASS/...) or the id of a
            dataset.
        seeds, epochs: Instead of the study's.
        threads: CPU threads.
        progress: Whether to show progress bars.
        command: Shell command, for the record.
        say: Called with a line for the log.

    Returns:
        The content of results.json; "call" has the seconds of this call and the number of cells that it trained.

    Raises:
        ValueError, TypeError, ImportError: An argument or the study is invalid; nothing was trained.
    """
    study = read_study(name, epochs=epochs, seeds=seeds)
    torch.set_num_threads(threads)
    started = time.perf_counter()
    trained = train_cells(study, out, data=data, progress=progress, command=command, say=say)
    results = collect_study(study, out, data=data, command=command)
    out = Path(out)
    write_text(out / "table.md", render_study(results) + "\n")
    draw_study(results, out)
    results["call"] = {"seconds": round(time.perf_counter() - started, 1), "trained": trained}
    write_json(out / "results.json", results)
    return results


def collect_study(study: Study, out: str | Path, *, data: Any = None, command: str | None = None) -> dict[str, Any]:
    """Compute the content of results.json, without "call", from the files of the cells; see `run_study`."""
    rows: dict[str, dict[str, Any]] = {}
    for row in study.rows:
        cells = [_cell(folder_of(out, row, seed)) for seed in range(study.seeds)]
        rows[row] = {
            "accuracy": over_seeds([cell["accuracy"][-1] for cell in cells]),
            "by_epoch": [
                over_seeds(list(values)) for values in zip(*(cell["accuracy"] for cell in cells), strict=True)
            ],
            "seconds": over_seeds([cell["seconds"] for cell in cells]),
            "parameters": cells[0]["parameters"],
            "layers": [_mean_layer(layers) for layers in zip(*(cell["layers"] for cell in cells), strict=True)],
            "mixing_moved": [
                over_seeds([layer["moved"] for layer in layers])
                for layers in zip(*(cell["mixing"].values() for cell in cells), strict=True)
            ],
        }
        for key in MEASURES[1:]:
            rows[row][key] = over_seeds([cell["mean"][key] for cell in cells])
    size = max(study.config(next(iter(study.rows))).image_sides())
    train, test, name = open_data(data, size)
    return {
        "study": dataclasses.asdict(study),
        "data": {"name": name, "train": len(train), "test": len(test)},
        "seeds": list(range(study.seeds)),
        "rows": rows,
        "claims": [judge_claim(rows, *claim) for claim in study.claims],
        **describe_run(command),
    }


def _cell(folder: Path) -> dict[str, Any]:
    """Read the accuracy per epoch, the seconds, the number of parameters, and the analysis of a cell."""
    record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    analysis = json.loads((folder / ANALYSIS).read_text(encoding="utf-8"))
    return {
        "accuracy": [entry["test_accuracy"] for entry in record["history"]],
        "seconds": record["seconds"],
        "parameters": record["parameters"],
        **analysis,
    }


def _mean_layer(layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Average the measures of one layer over the seeds; everything else is the same for all seeds."""
    mean = dict(layers[0])
    for key in (*MEASURES[1:], "uniform_entropy"):
        mean[key] = statistics.fmean(layer[key] for layer in layers)
    return mean


def over_seeds(values: Sequence[Any]) -> dict[str, Any]:
    """Return "mean", "stderr" (of the mean; None for one seed), and "values". If a value is None, so is the mean."""
    if None in values:
        return {"mean": None, "stderr": None, "values": values}
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "stderr": error, "values": list(values)}


def judge_claim(
    rows: Mapping[str, Mapping[str, Any]], higher: str, lower: str, measure: str = "accuracy"
) -> dict[str, Any]:
    """Decide whether one row is above another.

    Args:
        rows: "rows" of results.json.
        higher, lower: Names of rows.
        measure: What is compared, one of `MEASURES`.

    Returns:
        The arguments, "difference" (mean over pairs of the same seed), "stderr", "interval" (95 %, by Student's t;
        None for one seed), and "verdict" ("holds", "does not hold", or "undecided").
    """
    pairs = zip(rows[higher][measure]["values"], rows[lower][measure]["values"], strict=True)
    difference = over_seeds([a - b for a, b in pairs])
    num_pairs = len(difference["values"])
    claim = {
        "higher": higher,
        "lower": lower,
        "measure": measure,
        "difference": difference["mean"],
        "stderr": difference["stderr"],
        "interval": None,
        "verdict": "undecided",
    }
    if num_pairs < 2:
        return claim
    margin = difference["stderr"] * (T95[num_pairs - 2] if num_pairs - 2 < len(T95) else 2.0)
    low, high = difference["mean"] - margin, difference["mean"] + margin
    claim["interval"] = [low, high]
    if low > 0:
        claim["verdict"] = "holds"
    elif high < 0:
        claim["verdict"] = "does not hold"
    return claim


def render_study(results: Mapping[str, Any]) -> str:
    """Render the tables in Markdown: accuracy, rank, entropy, and seconds per row, and then the claims."""
    lines = ["| | test accuracy | rank | of | effective rank | entropy | of | seconds |", "|---|" + "---:|" * 7]
    decimals = {"accuracy": 3, "rank": 1, "effective_rank": 1, "entropy": 2}
    for row, values in results["rows"].items():
        rank_bound = statistics.fmean(layer["bound"] for layer in values["layers"])
        max_entropy = statistics.fmean(layer["uniform_entropy"] for layer in values["layers"])
        scores = {key: format_score(values[key]["mean"], values[key]["stderr"], n) for key, n in decimals.items()}
        cells = [
            scores["accuracy"],
            scores["rank"],
            f"{rank_bound:.0f}",
            scores["effective_rank"],
            scores["entropy"],
            f"{max_entropy:.2f}",
            f"{values['seconds']['mean']:.0f}",
        ]
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    if results["claims"]:
        lines += ["", "| claim | difference | 95 % interval | |", "|---|---:|---:|---|"]
    for claim in results["claims"]:
        spec = "+.3f" if claim["measure"] == "accuracy" else "+.2f"
        interval = "one seed" if claim["interval"] is None else " to ".join(format(x, spec) for x in claim["interval"])
        sentence = f"{claim['measure'].replace('_', ' ')}: {claim['higher']} above {claim['lower']}"
        lines.append(f"| {sentence} | {claim['difference']:{spec}} | {interval} | {claim['verdict']} |")
    return "\n".join(lines)


def draw_study(results: Mapping[str, Any], out: str | Path) -> None:
    """Draw accuracy.png, layers.png, and mixing.png, the mixing of seed 0 of the first row whose mixing was trained.

    Args:
        results: Content of results.json.
        out: Folder of the study.
    """
    out = Path(out)
    rows = results["rows"]
    data = results["data"]
    note = f"{data['name']}, {data['train']:,} to train, {data['test']:,} to test; {len(results['seeds'])} seeds"
    plot_accuracy(out / "accuracy.png", {row: values["by_epoch"] for row, values in rows.items()}, note)
    plot_layers(out / "layers.png", {row: values["layers"] for row, values in rows.items()}, note)
    for row in rows:
        mixing = _cell(folder_of(out, row, 0))["mixing"]
        if any(layer["moved"] > 0 for layer in mixing.values()):
            plot_mixing(out / "mixing.png", mixing)
            return
