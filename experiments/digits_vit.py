"""Train a softmax ViT on real digits, convert it, and distill it from itself without labels, on one CPU core.

    python -m experiments.digits_vit --out out/digits_vit          everything; finished runs are kept
    python -m experiments.digits_vit --out out/try --seeds 1 --steps 20 --distill-steps 10

The data is scikit-learn's handwritten digits, enlarged to 32 x 32 pixels. The students have MHLA (4 x 4 blocks) or plain
linear attention, and learn each layer's attention output, then the teacher's logits. `MHLA-0` gets a card, for

    mhla-hf card out/digits_vit/MHLA-0 --shelve model_cards/digits_vit --over-seeds out/digits_vit/digits_vit.json
"""

import copy
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from sklearn import datasets
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessorPil

import mhla_hf
from mhla_hf.checkpoints.file_io import atomic_folder
from mhla_hf.cli.main import script
from mhla_hf.hub.card import check_card, write_card
from mhla_hf.training.datasets.images import open_images, top1_accuracy
from mhla_hf.training.recipe import ImageStage

from .rows import format_mean, make_parser, markdown, parse_call, write_record

Split = tuple[torch.Tensor, torch.Tensor]

SIDE = 32
HELD_OUT_DIGITS = 497
STUDENTS: dict[str, dict[str, Any]] = {
    "MHLA": {},
    "plain linear": {"layout": [1, 1], "mixing_start": "uniform", "learn_mixing": False},
}
ABOUT = (
    "Made by `python -m experiments.digits_vit`, which shows on scikit-learn's handwritten digits how a softmax ViT is "
    "converted and distilled from itself without a label; too small to be useful."
)
LIMITS = ["It reads one handwritten digit at a time, gray, 32 x 32 pixels, enlarged from 8 x 8."]
COMMON: dict[str, Any] = {"batch_size": 64, "shift": 3, "beta2": 0.99}


def load_digits(size: int) -> tuple[Split, Split]:
    """Load scikit-learn's 1,797 digits, enlarged to `size` x `size`: 1,300 to train on, and 497 to test on."""
    digits: Any = datasets.load_digits()
    images = torch.from_numpy(digits.images).float()[:, None]
    images = F.interpolate(images, size=(size, size), mode="bilinear", align_corners=False)
    images = (images * (255 / 16)).round().clamp(0, 255).to(torch.uint8)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train = order[:-HELD_OUT_DIGITS]
    test = order[-HELD_OUT_DIGITS:]
    labels = torch.from_numpy(digits.target).long()
    return (images[train], labels[train]), (images[test], labels[test])


def softmax_vit() -> ViTForImageClassification:
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=64, num_attention_heads=4, num_hidden_layers=4, intermediate_size=128, image_size=SIDE, patch_size=4,
        num_channels=1, num_labels=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return ViTForImageClassification(config)


def run(out: Path, seeds: int, steps: int, distill_steps: int, command: str) -> dict[str, Any]:
    """Train the teacher and all students, or load those that are finished, and return the content of `digits_vit.json`."""
    train, test = load_digits(SIDE)
    processor = ViTImageProcessorPil(
        size={"height": SIDE, "width": SIDE}, resample=3, image_mean=[0.5], image_std=[0.5]
    )
    options = {"data": train, "test": test, "processor": processor, "command": command, "log_every": 25}

    def accuracy(model: Any) -> float:
        return top1_accuracy(model, open_images(test), processor)

    warmup = min(50, steps // 5)
    stage = ImageStage("train", "labels", steps, 1.5e-3, warmup=warmup, weight_decay=0.05, smoothing=0.05, **COMMON)
    teacher = mhla_hf.distill(softmax_vit(), out=out / "teacher", stages=[stage], seed=0, **options)
    record: dict[str, Any] = {"steps": steps, "distill_steps": distill_steps}
    record |= {"teacher": accuracy(teacher), "students": [], "seeds": list(range(seeds))}
    stages = [
        ImageStage("transfer", "transfer", max(1, distill_steps // 4), 3e-3, trainable="attention", warmup=5, **COMMON),
        ImageStage("distill", "logits", distill_steps, 1e-3, warmup=min(20, distill_steps // 4), **COMMON),
    ]
    folders = {"teacher": out / "teacher"}
    for name, settings in STUDENTS.items():
        for seed in range(seeds):
            student = mhla_hf.convert(copy.deepcopy(teacher), **settings)
            row = {"attention": name, "seed": seed, "untrained": accuracy(student)}
            folder = out / f"{name.replace(' ', '-')}-{seed}"
            folders.setdefault(name, folder)
            mhla_hf.distill(student, teacher, out=folder, stages=stages, seed=seed, **options)
            row["distilled"] = accuracy(student)
            record["students"].append(row)
    record |= {"images": len(train[1]), "judged_on": len(test[1]), "parameters": teacher.num_parameters()}
    record = write_record(out / "digits_vit.json", record, command)
    if not (out / "test").exists():
        with atomic_folder(out / "test") as temporary_folder:
            for index, (image, label) in enumerate(zip(*test, strict=True)):
                class_folder = temporary_folder / str(label.item())
                class_folder.mkdir(exist_ok=True)
                Image.fromarray(image[0].numpy()).save(class_folder / f"{index:03d}.png")
    settings = {"name": "digits", "data": str(out / "test")}
    mhla_hf.evaluate(folders, recipe="table_2_imagenet", settings=settings, progress=False)
    card_folder = folders.pop("MHLA")
    write_card(card_folder, name="digits-vit-mhla", license="apache-2.0", compared=folders, about=ABOUT, limits=LIMITS)
    check_card(card_folder)
    return record


def render_digits(record: Mapping[str, Any]) -> str:
    """Render a record in Markdown: mean accuracies with standard errors over the seeds, and ratios to the teacher's."""
    lines = [["softmax teacher", "", f"{record['teacher']:.4f}", "100 %"]]
    for name in dict.fromkeys(row["attention"] for row in record["students"]):
        rows = [row for row in record["students"] if row["attention"] == name]
        untrained = statistics.fmean(row["untrained"] for row in rows)
        distilled = [row["distilled"] for row in rows]
        ratio = statistics.fmean(distilled) / record["teacher"]
        lines.append([name, f"{untrained:.4f}", format_mean(distilled, "{:.4f}"), f"{100 * ratio:.1f} %"])
    return markdown(["model", "converted, untrained", "distilled without labels", "of the teacher's"], lines)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = make_parser(__doc__, seeds=3)
    parser.add_argument("--out", type=Path, default=Path("out/digits_vit"), help="folder to create, or to resume")
    parser.add_argument("--steps", type=int, default=1600, help="steps of the teacher (default: 1600)")
    distill_help = "steps of each student, after a quarter as many of transfer (default: 300)"
    parser.add_argument("--distill-steps", type=int, default=300, help=distill_help)
    args, command = parse_call(parser, "digits_vit", arguments)
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    record = run(**vars(args), command=command)
    print(render_digits(record))
    return record


if __name__ == "__main__":
    script(main, "digits_vit")
