"""What a study found: accuracy with standard errors over seeds, the paper's order judged pair by pair, rank and entropy.

Every number is read from the files in the cells' folders, and every claim is judged on the same seeds of both rows
(a paired difference with its 95 % interval), so that "holds", "does not hold" and "undecided" are said by a rule.
"""

import dataclasses
import json
import math
import statistics
import time
from pathlib import Path

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
    name, out, *, data=None, seeds=None, epochs=None, threads=1, progress=True, command=None, say=print
) -> dict:
    """Train what is missing of a study, then write results.json, table.md, accuracy.png, layers.png and mixing.png to `out`.

    Args:
        name: of a study of the package, or a YAML file. out: folder to make or to go on in.
        data: images instead of scikit-learn's digits: a folder (train/CLASS/..., test/CLASS/...) or the id of a data set.
        seeds, epochs: instead of the study's. threads: CPU threads of torch. progress: show bars.

    Returns:
        What results.json holds; "call" is this call's wall clock, pictures included, and how many cells it trained.

    Raises:
        ValueError, TypeError, ImportError: one sentence, before anything is trained. KeyboardInterrupt: on Ctrl-C; the same
        call goes on from there.
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


def collect_study(study: Study, out, *, data=None, command=None) -> dict:
    """The content of results.json, from the cells' own files."""
    rows = {}
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
        rows[row] |= {key: over_seeds([cell["mean"][key] for cell in cells]) for key in MEASURES[1:]}
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


def _cell(folder):
    record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    found = json.loads((folder / ANALYSIS).read_text(encoding="utf-8"))
    return {
        "accuracy": [entry["test_accuracy"] for entry in record["history"]],
        "seconds": record["seconds"],
        "parameters": record["parameters"],
        **found,
    }


def _mean_layer(layers):
    """One layer over the seeds: what is the same in all of them, and the means of what was measured."""
    keys = (*MEASURES[1:], "uniform_entropy")
    return dict(layers[0]) | {key: statistics.fmean(layer[key] for layer in layers) for key in keys}


def over_seeds(values) -> dict:
    """Mean, standard error of the mean (None for one seed), and the values; without a mean if one of them is None."""
    if None in values:
        return {"mean": None, "stderr": None, "values": values}
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "stderr": error, "values": list(values)}


def judge_claim(rows, higher, lower, measure="accuracy") -> dict:
    """Whether `higher` is above `lower`: the mean paired difference, its 95 % interval (Student's t), and the verdict."""
    pairs = zip(rows[higher][measure]["values"], rows[lower][measure]["values"], strict=True)
    difference = over_seeds([a - b for a, b in pairs])
    count = len(difference["values"])
    claim = {"higher": higher, "lower": lower, "measure": measure}
    claim |= {"difference": difference["mean"], "stderr": difference["stderr"]}
    if count < 2:
        return claim | {"interval": None, "verdict": "undecided"}
    reach = difference["stderr"] * (T95[count - 2] if count - 2 < len(T95) else 2.0)
    low, high = difference["mean"] - reach, difference["mean"] + reach
    verdict = "holds" if low > 0 else "does not hold" if high < 0 else "undecided"
    return claim | {"interval": [low, high], "verdict": verdict}


def render_study(results) -> str:
    """The tables in Markdown: accuracy, rank, entropy and seconds per row; then the claims."""
    lines = ["| | test accuracy | rank | of | effective rank | entropy | of | seconds |", "|---|" + "---:|" * 7]
    for row, found in results["rows"].items():
        bound = statistics.fmean(layer["bound"] for layer in found["layers"])
        equal = statistics.fmean(layer["uniform_entropy"] for layer in found["layers"])
        places = {"accuracy": 3, "rank": 1, "effective_rank": 1, "entropy": 2}
        shown = {key: format_score(found[key]["mean"], found[key]["stderr"], number) for key, number in places.items()}
        cells = [shown["accuracy"], shown["rank"], f"{bound:.0f}", shown["effective_rank"], shown["entropy"]]
        cells += [f"{equal:.2f}", f"{found['seconds']['mean']:.0f}"]
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    if results["claims"]:
        lines += ["", "| claim | difference | 95 % interval | |", "|---|---:|---:|---|"]
    for claim in results["claims"]:
        places = 3 if claim["measure"] == "accuracy" else 2
        numbers = [f"{value:+.{places}f}" for value in (claim["difference"], *(claim["interval"] or ()))]
        interval = "one seed" if claim["interval"] is None else f"{numbers[1]} to {numbers[2]}"
        words = f"{claim['measure'].replace('_', ' ')}: {claim['higher']} above {claim['lower']}"
        lines.append(f"| {words} | {numbers[0]} | {interval} | {claim['verdict']} |")
    return "\n".join(lines)


def draw_study(results, out):
    """accuracy.png, layers.png and, of seed 0 of the first row whose mixing learned, mixing.png."""
    out = Path(out)
    rows = results["rows"]
    data = results["data"]
    note = f"{data['name']}, {data['train']:,} to train, {data['test']:,} to test; {len(results['seeds'])} seeds"
    plot_accuracy(out / "accuracy.png", {row: found["by_epoch"] for row, found in rows.items()}, note)
    plot_layers(out / "layers.png", {row: found["layers"] for row, found in rows.items()}, note)
    for row in rows:
        mixing = _cell(folder_of(out, row, 0))["mixing"]
        if any(layer["moved"] > 0 for layer in mixing.values()):
            plot_mixing(out / "mixing.png", mixing)
            return
