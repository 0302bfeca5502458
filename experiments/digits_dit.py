"""Train DiTs on real digits on one CPU core: with softmax, plain linear attention, or MHLA from scratch, and converted.

    python -m experiments.digits_dit --out out/digits                        everything; finished runs are kept
    python -m experiments.digits_dit --out out/try --seeds 1 --steps 40 --distill-steps 10 --samples 20

A `DiTTransformer2DModel` learns scikit-learn's 1,797 handwritten digits, 8 x 8 pixels enlarged to 16 x 16, by flow
matching in pixel space. It has an 8 x 8 grid of tokens, which MHLA divides into 4 x 4 blocks of 2 x 2. Then the
trained softmax model is converted and distilled, on the digits or only on its own trajectories. Samples are judged by
a small classifier, trained here on the same 1,300 digits and on no samples. The Fréchet distance is in that
classifier's features, so it is no FID, which uses those of Inception. The results are `digits.json`, `digits.png`, and
a table. The model that was distilled on the digits with seed 0 gets its scores, those of the others, and a card, for

    mhla-hf card out/digits/MHLA-distilled-on-the-digits-0/transformer --shelve model_cards/digits_dit \\
        --over-seeds out/digits/digits.json

They belong to the transformer, not to a pipeline, because diffusers' `DiTPipeline` needs a VAE and cannot sample flow
matching. For the same reason, the scores are computed here and not by `mhla_hf.evaluate`.
"""

import argparse
import copy
import math
import re
import shlex
import shutil
import statistics
import sys
import time
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from diffusers import DiTPipeline, DiTTransformer2DModel, FlowMatchEulerDiscreteScheduler
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits
from torch import nn
from tqdm import tqdm

import mhla_hf
from mhla_hf.checkpoints.file_io import atomic_file, write_json
from mhla_hf.checkpoints.fingerprint import fingerprint_model, hash_json
from mhla_hf.checkpoints.provenance import describe_run
from mhla_hf.cli.main import script
from mhla_hf.evaluation.image_scores import Moments, fraction_error, frechet_distance
from mhla_hf.evaluation.subjects import find_subjects
from mhla_hf.hub.card import check_card, write_card
from mhla_hf.plots import drawing
from mhla_hf.training.denoising import NoiseProcess, predict, sample_latents
from mhla_hf.training.recipe import DiffusionStage

SIDE, CLASSES, HELD_OUT = 16, 10, 497
SAMPLING_STEPS = 25
SOFTMAX = "softmax"
MHLA: dict[str, Any] = {"layout": (4, 4), "feature_map": "relu", "normalize": True}
FROM_SCRATCH: dict[str, dict[str, Any] | None] = {  # settings of `convert`; None: softmax
    SOFTMAX: None,
    "plain linear": {**MHLA, "mixing_start": "uniform", "learn_mixing": False},
    "MHLA": MHLA,
    "MHLA + CPE + gate": {**MHLA, "cpe": 3, "gate": True},
}
DISTILLED = {"MHLA, distilled on the digits": True, "MHLA, distilled without data": False}  # whether on data
CARD = "MHLA, distilled on the digits"  # the model that gets a card
COMPARED = {  # names on the card of the models that it is compared with
    "teacher": SOFTMAX,
    "plain linear, from scratch": "plain linear",
    "MHLA, from scratch": "MHLA",
    "MHLA + CPE + gate, from scratch": "MHLA + CPE + gate",
    "MHLA, distilled without data": "MHLA, distilled without data",
}
ABOUT = (
    "Made by `python -m experiments.digits_dit`, a small experiment on scikit-learn's handwritten digits, 16 x 16 pixels; "
    "too small to be useful. It learned flow matching in pixel space: there is no VAE, and the function `samples` of that "
    "script samples it, which diffusers' DiTPipeline does not."
)
LIMITS = [
    "The judge is a small network trained on the same digits as the models. A distance in its features is no FID, and "
    "compares only with those of the same judge.",
    "Sampled without guidance; the loss is that of flow matching on digits that no model was trained on.",
]
COLORS = {SOFTMAX: "#33363d", "plain linear": "#d08a1d", "MHLA": "#2563c9", "MHLA + CPE + gate": "#2f9468"}


def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Load the digits.

    Returns:
        Training images, their labels, held-out images, and their labels. Images are float32 `[N, 1, 16, 16]` from -1
        to 1, and labels int64 `[N]`.
    """
    data = load_digits()
    order = numpy.random.default_rng(0).permutation(len(data.images))
    images = torch.tensor(data.images[order], dtype=torch.float32)[:, None] / 8 - 1
    images = F.interpolate(images, size=(SIDE, SIDE), mode="bilinear")
    labels = torch.tensor(data.target[order])
    return images[:-HELD_OUT], labels[:-HELD_OUT], images[-HELD_OUT:], labels[-HELD_OUT:]


def folder_of(name: str, seed: int) -> str:
    """Return the name of a model's folder."""
    return "-".join(re.findall(r"[A-Za-z]+", name)) + f"-{seed}"


class Judge(nn.Module):
    """A classifier of digits with two convolutions and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64 * (SIDE // 4) ** 2, 64), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(64, CLASSES)

    def features(self, images: torch.Tensor) -> torch.Tensor:
        """Return the features before the last layer: `[N, 64]`."""
        return self.body(images)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits: `[N, 10]`."""
        return self.head(self.body(images))


def train_judge(out: Path, epochs: int) -> Judge:
    """Train the judge on the training digits, or load it from `out`.

    The digits are shifted by up to two pixels, which is one of their original 8 x 8 pixels.
    """
    torch.manual_seed(0)
    judge, path = Judge(), out / "judge.safetensors"
    if not path.exists():
        images, labels, *_ = digits()
        steps = epochs * -(-len(images) // 64)
        optimizer = torch.optim.AdamW(judge.parameters(), 2e-3, weight_decay=0.05)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=max(steps, 2))
        for _ in tqdm(range(epochs), desc="judge", unit="epoch"):
            for indices in torch.randperm(len(images)).split(64):
                top, left = (2 + shift for shift in torch.randint(-2, 3, (2,)).tolist())
                batch = F.pad(images[indices], (2, 2, 2, 2), value=-1.0)
                batch = batch[..., top : top + SIDE, left : left + SIDE]
                F.cross_entropy(judge(batch), labels[indices]).backward()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
        with atomic_file(path) as temporary_path:
            save_file(judge.state_dict(), temporary_path)
    judge.load_state_dict(load_file(path))
    return judge.eval()


def pipeline(seed: int, settings: Mapping[str, Any] | None, width: int) -> DiTPipeline:
    """Return a DiT on pixels without a VAE, with weights initialized as in DiT's paper.

    Args:
        seed: Seed of the weights.
        settings: Settings of `convert`; None: softmax.
        width: Hidden size.
    """
    torch.manual_seed(seed)
    transformer = DiTTransformer2DModel(
        sample_size=SIDE, patch_size=2, in_channels=1, out_channels=1, num_layers=4, num_attention_heads=width // 32,
        attention_head_dim=32, num_embeds_ada_norm=CLASSES, attention_bias=True,
    )  # fmt: skip
    mhla_hf.MHLADiTTransformer2DModel.initialize_weights(transformer)
    pipe = DiTPipeline(transformer, None, FlowMatchEulerDiscreteScheduler())
    return pipe if settings is None else mhla_hf.convert(pipe, **settings)


def train(pipe: DiTPipeline, out: Path, seed: int, steps: int, command: str) -> Any:
    """Train from scratch on the digits by flow matching, with a moving average of the weights."""
    images, labels, *_ = digits()
    stage = DiffusionStage(
        "train", "denoising", steps, 2e-3, batch_size=32, warmup=min(100, steps // 5), beta2=0.99, ema=0.99
    )  # fmt: skip
    data = {"latents": images, "class_labels": labels}
    return mhla_hf.distill(pipe, out=out, data=data, stages=[stage], seed=seed, command=command)


def distill(teacher: Any, out: Path, seed: int, steps: int, with_data: bool, command: str) -> Any:
    """Convert the trained softmax model, and match first its attention outputs and then its velocity.

    Args:
        teacher: Pipeline of the softmax model.
        out: Folder of the run.
        seed: Seed of the run.
        steps: Steps of the second stage; the first has a quarter as many.
        with_data: Whether it sees the digits, or only trajectories of the teacher.
        command: Shell command, for the record.
    """
    student = DiTPipeline(copy.deepcopy(teacher.transformer), None, teacher.scheduler)
    torch.manual_seed(seed)
    mhla_hf.convert(student, **MHLA)
    common: dict[str, Any] = {
        "batch_size": 32,
        "warmup": steps // 20,
        "beta2": 0.99,
        "sampling_steps": SAMPLING_STEPS,
        "guidance": 1.0,
    }
    stages = [
        DiffusionStage("transfer", "transfer", max(1, steps // 4), 1e-2, trainable="mhla", **common),
        DiffusionStage("match", "prediction", steps, 1e-3, lr_mhla=3e-3, ema=0.98, **common),
    ]
    images, labels, *_ = digits()
    data = {"latents": images, "class_labels": labels} if with_data else None
    return mhla_hf.distill(student, teacher, out=out, data=data, stages=stages, seed=seed, command=command)


@torch.no_grad()
def samples(pipe: Any, path: Path, count: int, seed: int) -> torch.Tensor:
    """Sample digits without guidance, or load them.

    Args:
        pipe: The model.
        path: File of the samples, written if it does not exist.
        count: Number of samples; the classes take turns.
        seed: Seed of the noise.

    Returns:
        float32 `[count, 1, 16, 16]`
    """
    if not path.exists():
        pipe.transformer.eval()
        noise = torch.randn(count, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(seed))
        images = []
        for indices in tqdm(torch.arange(count).split(100), desc=f"samples of {path.parent.name}"):
            conditions = {"class_labels": indices % CLASSES}
            batch = sample_latents(
                pipe.transformer, pipe.scheduler, noise[indices], conditions, None, steps=SAMPLING_STEPS, guidance=1.0
            )
            images.append(batch)
        with atomic_file(path) as temporary_path:
            save_file({"samples": torch.cat(images).clamp(-1, 1)}, temporary_path)
    return load_file(path)["samples"]


@torch.no_grad()
def score(pipe: Any, judge: Judge, images: torch.Tensor) -> dict[str, float]:
    """Score a model and its samples.

    Args:
        pipe: The model.
        judge: Classifier of digits.
        images: What `samples` returns.

    Returns:
        "accuracy" (percent of the samples that the judge assigns to their class), "frechet" (Fréchet distance to the
        held-out digits in the judge's features), "loss" (flow matching on the held-out digits), and the standard
        errors of accuracy and loss.
    """
    held_out_moments = Moments.of(judge.features(digits()[2]))
    accuracy = (judge(images).argmax(1) == torch.arange(len(images)) % CLASSES).double().mean().item()
    losses = held_out_losses(pipe)
    return {
        "accuracy": 100 * accuracy,
        "accuracy_stderr": 100 * fraction_error(accuracy, len(images)),
        "frechet": frechet_distance(Moments.of(judge.features(images)), held_out_moments),
        "loss": losses.mean().item(),
        "loss_stderr": (losses.std() / math.sqrt(len(losses))).item(),
    }


def store_scores(
    row: Mapping[str, float], folder: Path, judge: Judge, count: int, seed: int, started: float, command: str
) -> None:
    """Write a model's scores next to its weights, as `mhla_hf.evaluate` does, with the record of its training.

    Args:
        row: What `score` returns.
        folder: Folder of the pipeline.
        judge: Classifier that computed the scores.
        count: Number of samples.
        seed: Seed of the samples.
        started: `time.perf_counter()` when work on the model started.
        command: Shell command, for the record.
    """
    transformer_folder = folder / "transformer"
    shutil.copyfile(folder / "train.json", transformer_folder / "train.json")
    scores = {
        "accuracy (digits judge)": (row["accuracy"] / 100, row["accuracy_stderr"] / 100, True, count),
        "Fréchet distance (digits judge)": (row["frechet"], None, False, count),
        "held-out loss": (row["loss"], row["loss_stderr"], False, HELD_OUT),
    }
    unused = dict.fromkeys(("output", "limit", "revision", "trust_remote_code", "force"))
    options = types.SimpleNamespace(dtype="auto", seed=seed, command=command, **unused)
    (subject,) = find_subjects(transformer_folder, options)
    task_hash = hash_json([fingerprint_model(judge), count, SAMPLING_STEPS])
    subject.store_scores("digits", scores, task_hash, started, "cpu")


@torch.no_grad()
def held_out_losses(pipe: Any) -> torch.Tensor:
    """Return the flow-matching loss of each held-out digit, averaged over two draws of noise and time: `[N]`.

    All models get the same draws.
    """
    pipe.transformer.eval()
    _, _, images, labels = digits()
    process = NoiseProcess(pipe.scheduler)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for indices in torch.arange(len(images)).repeat(2).split(142):
        times = [process.draw_time(generator, "logit-normal", None) for _ in indices]
        noise = torch.randn(len(indices), *images.shape[1:], generator=generator)
        pairs = [process.mix(*inputs) for inputs in zip(images[indices], noise, times, strict=True)]
        noisy, target = (torch.stack(values) for values in zip(*pairs, strict=True))
        prediction = predict(pipe.transformer, noisy, torch.tensor(times), {"class_labels": labels[indices]})
        losses.append((prediction - target).square().mean((1, 2, 3)))
    return torch.cat(losses).view(2, -1).mean(0)


def run(args: argparse.Namespace, command: str) -> dict[str, Any]:
    """Train, sample, and score all models, except for what `args.out` has already.

    Args:
        args: Arguments of the script.
        command: Shell command, for the records.

    Returns:
        The content of `digits.json`.
    """
    args.out.mkdir(parents=True, exist_ok=True)
    judge = train_judge(args.out, args.judge_epochs)
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in (*FROM_SCRATCH, *DISTILLED)}
    parameters: dict[str, int] = {}
    teachers: dict[int, Any] = {}
    runs = [(name, seed) for group in (FROM_SCRATCH, DISTILLED) for seed in range(args.seeds) for name in group]
    for name, seed in runs:
        folder, started = args.out / folder_of(name, seed), time.perf_counter()
        if name in FROM_SCRATCH:
            pipe = train(pipeline(seed, FROM_SCRATCH[name], args.width), folder, seed, args.steps, command)
        else:
            pipe = distill(teachers[seed], folder, seed, args.distill_steps, DISTILLED[name], command)
        if name == SOFTMAX:
            teachers[seed] = pipe
        parameters[name] = pipe.transformer.num_parameters()
        images = samples(pipe, folder / "samples.safetensors", args.samples, seed)
        row = score(pipe, judge, images)
        rows[name].append(row)
        store_scores(row, folder, judge, args.samples, seed, started, command)
        print(f"{name}, seed {seed}: {row}", file=sys.stderr)
    train_images, _, held_out_images, held_out_labels = digits()
    with torch.no_grad():
        accuracy = (judge(held_out_images).argmax(1) == held_out_labels).double().mean().item()
        moments = [Moments.of(judge.features(images)) for images in (train_images, held_out_images)]
    sizes = ("steps", "distill_steps", "samples", "width", "judge_epochs", "threads")
    return {
        "seeds": list(range(args.seeds)),
        **{key: getattr(args, key) for key in sizes},
        "judge": {"held_out_accuracy": 100 * accuracy, "train_to_held_out_frechet": frechet_distance(*moments)},
        "parameters": parameters,
        "models": rows,
        **describe_run(command),
    }


def render(results: Mapping[str, Any]) -> str:
    """Render the table: mean over the seeds, lowest, and highest."""
    lines = [f"{'':30}  {'accuracy, % (lowest to highest)':32}  {'Fréchet distance':24}  held-out loss"]
    for name, runs in results["models"].items():
        cells = []
        for key, decimals in (("accuracy", 2), ("frechet", 2), ("loss", 4)):
            values = [run[key] for run in runs]
            mean = f"{statistics.mean(values):.{decimals}f}"
            cells.append(f"{mean:>6} ({min(values):.{decimals}f} to {max(values):.{decimals}f})")
        lines.append(f"{name:30}  {cells[0]:32}  {cells[1]:24}  {cells[2]}")
    judge = results["judge"]
    lines.append(
        f"{'real digits, not trained on':30}  {judge['held_out_accuracy']:6.2f}{'':26}  "
        f"{judge['train_to_held_out_frechet']:6.2f}"
    )
    return "\n".join(line.rstrip() for line in lines)


def make_card(out: Path) -> None:
    """Write the card of `CARD`, seed 0, next to its weights and scores."""
    folder = out / folder_of(CARD, 0) / "transformer"
    compared = {label: out / folder_of(name, 0) / "transformer" for label, name in COMPARED.items()}
    write_card(folder, name="digits-dit-mhla", license="apache-2.0", compared=compared, about=ABOUT, limits=LIMITS)
    check_card(folder)


def draw(results: Mapping[str, Any], folder: Path, path: Path) -> None:
    """Draw the accuracy of every seed, and the first samples of seed 0 of every model.

    Args:
        results: What `run` returns.
        folder: Folder of the models.
        path: PNG to write.
    """
    names = list(results["models"])
    with drawing(path, 1, 2, figsize=(13.0, 4.2), width_ratios=(1, 1.4)) as (_, ((left, right),)):
        for index, name in enumerate(names):
            values = [run["accuracy"] for run in results["models"][name]]
            color = COLORS.get(name, COLORS["MHLA"])
            left.plot(values, [index] * len(values), "o", color=color, alpha=0.7)
            left.plot([statistics.mean(values)], [index], "|", color=color, markersize=18)
        left.set(title="Samples that the judge assigns to their class, %", xlabel="each seed, and their mean")
        left.set_yticks(range(len(names)), names)
        left.invert_yaxis()
        left.grid(True, axis="x")
        sheet = []
        for name in names:
            images = load_file(folder / folder_of(name, 0) / "samples.safetensors")["samples"]
            sheet.append(torch.cat(list(images[:20, 0]), dim=1))
        right.imshow(torch.cat(sheet).numpy(), cmap="gray_r", vmin=-1, vmax=1)
        right.set(title="The first twenty of seed 0: classes 0 to 9, twice")
        right.set_yticks([SIDE * (index + 0.5) for index in range(len(names))], names)
        right.set_xticks([])
        right.spines[:].set_visible(False)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the script, and return the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/digits"), help="folder to create, or of a run to resume")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default: 3)")
    parser.add_argument("--steps", type=int, default=600, help="steps from scratch, of 32 digits each (default: 600)")
    parser.add_argument(
        "--distill-steps",
        type=int,
        default=150,
        help="steps of distillation, after a quarter as many of transfer (default: 150)",
    )
    parser.add_argument("--samples", type=int, default=400, help="samples per model (default: 400)")
    parser.add_argument("--width", type=int, default=96, help="hidden size, a multiple of 32 (default: 96)")
    parser.add_argument("--judge-epochs", type=int, default=30, help="epochs of the judge (default: 30)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    arguments = sys.argv[1:] if arguments is None else arguments
    args = parser.parse_args(arguments)
    for name in ("seeds", "steps", "distill_steps", "judge_epochs"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: got {getattr(args, name)}, expected at least 1.")
    if args.width < 32 or args.width % 32:
        parser.error(f"--width: got {args.width}, expected a multiple of 32.")
    if args.samples < 2 * CLASSES or args.samples % CLASSES:
        parser.error(f"--samples: got {args.samples}, expected a multiple of {CLASSES}, at least {2 * CLASSES}.")
    torch.set_num_threads(args.threads)
    results = run(args, shlex.join(["python", "-m", "experiments.digits_dit", *arguments]))
    write_json(args.out / "digits.json", results)
    draw(results, args.out, args.out / "digits.png")
    make_card(args.out)
    print(render(results))
    return results


if __name__ == "__main__":
    script(main, "digits_dit")
