"""Train small classifiers of digits from scratch, with softmax, plain linear attention, and MHLA: `make demo-images`

    python -m experiments.classifiers --out out/images --seeds 5        finished runs are kept
    python -m experiments.classifiers --out out/try --seeds 1 --epochs 3

Only the attention differs. The results are accuracy, rank, and entropy over seeds, and whether claims hold: the 95 %
interval of the difference, paired by seed, is above zero, below, or neither.
"""

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import ViTImageProcessorPil

from mhla_hf.checkpoints.load import no_progress_bars
from mhla_hf.cli.main import script
from mhla_hf.evaluation.records import format_score
from mhla_hf.models.vision.vision_configuration import MHLAVisionConfig
from mhla_hf.models.vision.vision_model import MHLAForImageClassification
from mhla_hf.training.datasets.images import open_images, preprocess
from mhla_hf.training.loop import distill
from mhla_hf.training.run_folder import RECORD

from .attention import describe_mixing, measure_calls, plot_mixing, record_model
from .digits_vit import load_digits
from .rows import make_parser, markdown, over_seeds, parse_call, write_record

KINDS = {"softmax": "softmax", "plain linear": "linear", "MHLA": "mhla"}
MODEL: dict[str, Any] = {
    "qk_norm": False, "image_size": 16, "patch_size": 2, "hidden_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 3, "mlp_ratio": 2.0, "initializer_range": 0.08, "mhla": {"layout": [4, 4], "cpe": 0},
}  # fmt: skip
POSITIONS = 0.02  # standard deviation of the learned positions at the start
BATCH_SIZE = 64
ANALYZED_IMAGES = 8
MEASURES = ("accuracy", "rank", "effective_rank", "entropy")
CLAIMS = [  # higher, lower, measure
    ("MHLA", "plain linear", "accuracy"),
    ("MHLA", "softmax", "accuracy"),
    ("softmax", "plain linear", "accuracy"),
    ("softmax", "plain linear", "rank"),
    ("MHLA", "plain linear", "rank"),
    ("plain linear", "softmax", "entropy"),
    ("plain linear", "MHLA", "entropy"),
    ("softmax", "MHLA", "entropy"),
]
T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # Student's t, two-sided 95 %, by degrees of freedom


def folder_of(out: str | Path, name: str, seed: int) -> Path:
    return Path(out, f"{name.replace(' ', '-')}-{seed}")


def train(
    out: Path, seeds: int, epochs: int, command: str | None = None, progress: bool = True, **changes: Any
) -> None:
    """Train all models that `out` lacks; `changes` are those of `MODEL`."""
    digits, test = load_digits(MODEL["image_size"])
    steps_per_epoch = -(-len(digits[0]) // BATCH_SIZE)
    stage = {"name": "train", "loss": "labels", "batch_size": BATCH_SIZE, "lr": 1.5e-3, "shift": 2}
    for seed in range(seeds):
        for name, attention in KINDS.items():
            torch.manual_seed(seed)
            config = MHLAVisionConfig.preset("digits", **{**MODEL, **changes}, attention=attention)
            model = MHLAForImageClassification(config)
            torch.nn.init.trunc_normal_(model.get_parameter("model.positions.weight"), std=POSITIONS)
            with no_progress_bars():
                distill(
                    model, data=digits, test=test, out=folder_of(out, name, seed), seed=seed, command=command,
                    stages=[{**stage, "steps": steps_per_epoch * epochs}], log_every=steps_per_epoch, progress=progress,
                )  # fmt: skip


def collect(out: str | Path, seeds: int, command: str | None = None) -> dict[str, Any]:
    """Measure all models, draw the mixing into `out`, and return the content of results.json."""
    rows: dict[str, dict[str, Any]] = {}
    for name in KINDS:
        cells = []
        for seed in range(seeds):
            folder = folder_of(out, name, seed)
            record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
            with no_progress_bars():
                model = MHLAForImageClassification.from_pretrained(folder)
            images = open_images(load_digits(MODEL["image_size"])[1])
            processor = ViTImageProcessorPil.from_dict(model.config.preprocessing())
            pixels = preprocess(processor, [images.image(row, 1) for row in range(ANALYZED_IMAGES)])
            measured = measure_calls(record_model(model, {"pixel_values": pixels}))
            accuracy = record["history"][-1]["test_accuracy"]
            cells.append({**record, "accuracy": accuracy, **measured["mean"], **measured})
            if (name, seed) == ("MHLA", 0):
                plot_mixing(Path(out, "mixing.png"), describe_mixing(model))
        rows[name] = {key: over_seeds([cell[key] for cell in cells]) for key in (*MEASURES, "seconds")}
        rows[name]["layers"] = []
        for layers in zip(*(cell["layers"] for cell in cells), strict=True):
            keys = (*MEASURES[1:], "uniform_entropy")  # everything else is the same for all seeds
            means = {key: statistics.fmean(layer[key] for layer in layers) for key in keys}
            rows[name]["layers"].append({**layers[0], **means})
        rows[name]["parameters"] = cells[0]["parameters"]
    (train_images, _), (test_images, _) = load_digits(MODEL["image_size"])
    sizes = {"train": len(train_images), "test": len(test_images)}
    results = {"data": {"name": "scikit-learn digits", **sizes}, "seeds": list(range(seeds)), "rows": rows}
    results["claims"] = [judge_claim(rows, *claim) for claim in CLAIMS]
    return write_record(Path(out, "results.json"), results, command)


def judge_claim(rows: Mapping[str, Any], higher: str, lower: str, measure: str) -> dict[str, Any]:
    """Decide whether one row is above another on the same seeds, by Student's t."""
    pairs = zip(rows[higher][measure]["values"], rows[lower][measure]["values"], strict=True)
    difference = over_seeds([a - b for a, b in pairs])
    interval, verdict = None, "undecided"
    if difference["stderr"] is not None:
        freedom = len(difference["values"]) - 1
        margin = difference["stderr"] * (T95[freedom - 1] if freedom <= len(T95) else 2.0)
        interval = [difference["mean"] - margin, difference["mean"] + margin]
        verdict = "holds" if interval[0] > 0 else "does not hold" if interval[1] < 0 else "undecided"
    claim = {"higher": higher, "lower": lower, "measure": measure, "difference": difference["mean"]}
    return {**claim, "stderr": difference["stderr"], "interval": interval, "verdict": verdict}


def render_study(results: Mapping[str, Any]) -> str:
    lines = []
    decimals = {"accuracy": 3, "rank": 1, "effective_rank": 1, "entropy": 2}
    for row, values in results["rows"].items():
        bound = statistics.fmean(layer["bound"] for layer in values["layers"])
        uniform = statistics.fmean(layer["uniform_entropy"] for layer in values["layers"])
        cells = [format_score(values[key]["mean"], values[key]["stderr"], n) for key, n in decimals.items()]
        seconds = f"{values['seconds']['mean']:.0f}"
        lines.append([row, *cells[:2], f"{bound:.0f}", *cells[2:], f"{uniform:.2f}", seconds])
    header = ["", "test accuracy", "rank", "of", "effective rank", "entropy", "of", "seconds"]
    claims = []
    for claim in results["claims"]:
        spec = "+.3f" if claim["measure"] == "accuracy" else "+.2f"
        interval = "one seed" if claim["interval"] is None else " to ".join(format(x, spec) for x in claim["interval"])
        sentence = f"{claim['measure'].replace('_', ' ')}: {claim['higher']} above {claim['lower']}"
        claims.append([sentence, f"{claim['difference']:{spec}}", interval, claim["verdict"]])
    return f"{markdown(header, lines)}\n\n{markdown(['claim', 'difference', '95 % interval', ''], claims)}"


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = make_parser(__doc__, seeds=3)
    parser.add_argument("--out", type=Path, default=Path("out/images"), help="folder to create, or to go on in")
    parser.add_argument("--epochs", type=int, default=25, help="number of epochs (default: 25)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    args, command = parse_call(parser, "classifiers", arguments)
    torch.set_num_threads(args.threads)
    train(args.out, args.seeds, args.epochs, command)
    results = collect(args.out, args.seeds, command)
    print(f"{render_study(results)}\n\nThe results, as JSON and pictures, are in {args.out}.")
    return results


if __name__ == "__main__":
    script(main)
