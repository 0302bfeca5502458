"""A softmax ViT trained on real digits, converted, and distilled from itself without a label, on one CPU core.

    python -m experiments.digits_vit --out out/digits_vit          all of it; what is finished is not run again
    python -m experiments.digits_vit --out out/try --seeds 1 --steps 20 --distill-steps 10

scikit-learn's 1,797 handwritten digits, 8 x 8 pixels enlarged to 32 x 32: 1,300 to train on, 497 to judge. The teacher is a
plain `ViTForImageClassification` of transformers, a class token and 8 x 8 patches. Students: MHLA (4 x 4 blocks of 2 x 2
patches, relu, normalized, locality start) and plain linear attention, which is MHLA with one block. Both learn each layer's
attention output first, and then the teacher's classes. Results: `digits_vit.json` and a table; the MHLA student of seed 0,
`MHLA-0`, has its scores and the teacher's beside it and a card, for

    mhla-hf card out/digits_vit/MHLA-0 --shelve model_cards/digits_vit --over-seeds out/digits_vit/digits_vit.json
"""

import argparse
import copy
import shlex
import statistics
import sys
from pathlib import Path

import torch
from PIL import Image
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessorPil

import mhla_hf
from mhla_hf.analysis.inputs import load_digits
from mhla_hf.checkpoints.file_io import atomic_folder, write_json
from mhla_hf.checkpoints.provenance import describe_run
from mhla_hf.cli import script
from mhla_hf.share.card import check_card, write_card
from mhla_hf.training.datasets.images import open_images, top1_accuracy
from mhla_hf.training.recipe import ImageStage

SIDE = 32
STUDENTS = {
    "MHLA": {},
    "plain linear": {"layout": [1, 1], "mixing_start": "uniform", "learn_mixing": False},
}
NORMAL = {"image_mean": [0.5], "image_std": [0.5]}
ABOUT = (
    "Made by `python -m experiments.digits_vit`, which shows on scikit-learn's handwritten digits how a softmax ViT is "
    "converted and distilled from itself without a label; too small to be useful."
)
LIMITS = ["It reads one handwritten digit at a time, gray, 32 x 32 pixels, enlarged from 8 x 8."]
COMMON = {"batch_size": 64, "shift": 3, "beta2": 0.99}


def softmax_vit(seed):
    """A ViT of 0.14 M parameters, with random weights."""
    torch.manual_seed(seed)
    config = ViTConfig(
        hidden_size=64, num_attention_heads=4, num_hidden_layers=4, intermediate_size=128, image_size=SIDE, patch_size=4,
        num_channels=1, num_labels=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return ViTForImageClassification(config)


def folder_of(name, seed):
    """The name of a student's folder."""
    return f"{name.replace(' ', '-')}-{seed}"


def run(out, seeds, steps, distill_steps, command):
    """Train the teacher and all students; whatever is finished is loaded. Returns the record that is written."""
    train, test = load_digits(SIDE)
    processor = ViTImageProcessorPil(size={"height": SIDE, "width": SIDE}, resample=3, **NORMAL)
    options = {"data": train, "test": test, "processor": processor, "command": command, "log_every": 25}

    def accuracy(model):
        return top1_accuracy(model, open_images(test), processor)

    stage = ImageStage(
        "train", "labels", steps, 1.5e-3, warmup=min(50, steps // 5), weight_decay=0.05, smoothing=0.05, **COMMON
    )
    teacher = mhla_hf.distill(softmax_vit(0), out=out / "teacher", stages=[stage], seed=0, **options)
    record = {"teacher": accuracy(teacher), "students": [], "steps": steps, "distill_steps": distill_steps}
    stages = [
        ImageStage("transfer", "transfer", max(1, distill_steps // 4), 3e-3, trainable="attention", warmup=5, **COMMON),
        ImageStage("distill", "logits", distill_steps, 1e-3, warmup=min(20, distill_steps // 4), **COMMON),
    ]
    for name, settings in STUDENTS.items():
        for seed in range(seeds):
            student = mhla_hf.convert(copy.deepcopy(teacher), **settings)
            row = {"attention": name, "seed": seed, "untrained": accuracy(student)}
            folder = out / folder_of(name, seed)
            mhla_hf.distill(student, teacher, out=folder, stages=stages, seed=seed, **options)
            record["students"].append(row | {"distilled": accuracy(student)})
            write_json(out / "digits_vit.json", record)
    facts = {"images": len(train[1]), "judged_on": len(test[1]), "parameters": teacher.num_parameters()}
    record |= facts | {"seeds": list(range(seeds)), **describe_run(command)}
    write_json(out / "digits_vit.json", record)
    make_card(out, test)
    return record


def make_card(out, test):
    """Scores of the teacher and both students of seed 0 by the package's own evaluation, and the MHLA student's card."""
    place = out / "test"
    if not place.exists():
        with atomic_folder(place) as aside:
            for number, (image, label) in enumerate(zip(*test, strict=True)):
                (aside / str(label.item())).mkdir(exist_ok=True)
                Image.fromarray(image[0].numpy()).save(aside / str(label.item()) / f"{number:03d}.png")
    folders = {"teacher": out / "teacher", **{name: out / folder_of(name, 0) for name in STUDENTS}}
    settings = {"name": "digits", "data": str(place)}
    mhla_hf.evaluate(folders, recipe="table_2_imagenet", settings=settings, progress=False)
    mine = folders.pop("MHLA")
    write_card(mine, name="digits-vit-mhla", license="apache-2.0", compared=folders, about=ABOUT, limits=LIMITS)
    check_card(mine)


def table(record) -> str:
    """The record in Markdown: means over the seeds with their standard errors, and shares of the teacher's accuracy."""
    lines = ["| model | converted, untrained | distilled without labels | of the teacher's |", "|---|---:|---:|---:|"]
    lines.append(f"| softmax teacher | | {record['teacher']:.4f} | 100 % |")
    for name in dict.fromkeys(row["attention"] for row in record["students"]):
        rows = [row for row in record["students"] if row["attention"] == name]
        before, after = ([row[key] for row in rows] for key in ("untrained", "distilled"))
        error = f" ± {statistics.stdev(after) / len(after) ** 0.5:.4f}" if len(after) > 1 else ""
        mean = statistics.mean(after)
        lines.append(
            f"| {name} | {statistics.mean(before):.4f} | {mean:.4f}{error} | {100 * mean / record['teacher']:.1f} % |"
        )
    return "\n".join(lines)


def main(arguments=None):
    """Run the script; returns the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/digits_vit"), help="folder to make or to go on in")
    parser.add_argument("--seeds", type=int, default=3, help="of each student (default: 3)")
    parser.add_argument("--steps", type=int, default=1600, help="of the teacher (default: 1600)")
    parser.add_argument(
        "--distill-steps", type=int, default=300, help="of each student, after a quarter as many of transfer"
    )
    arguments = sys.argv[1:] if arguments is None else arguments
    given = parser.parse_args(arguments)
    for name in ("seeds", "steps", "distill_steps"):
        if getattr(given, name) < 1:
            raise ValueError(f"{name}: got {getattr(given, name)}, expected at least 1.")
    torch.set_num_threads(1)
    given.out.mkdir(parents=True, exist_ok=True)
    record = run(**vars(given), command=shlex.join(["python", "-m", "experiments.digits_vit", *arguments]))
    print(table(record))
    return record


if __name__ == "__main__":
    script(main, "digits_vit")
