"""A real DiT on real digits, on one CPU core: softmax, plain linear attention and MHLA from scratch, then converted.

    python -m experiments.digits_dit --out out/digits                        all of it; what is finished is not run again
    python -m experiments.digits_dit --out out/try --seeds 1 --steps 40 --distill-steps 10 --samples 20

scikit-learn's 1,797 handwritten digits, 8 x 8 pixels scaled to 16 x 16, are what `DiTTransformer2DModel` learns by flow
matching in pixel space: an 8 x 8 grid of tokens, MHLA in 4 x 4 blocks of 2 x 2. Then the trained softmax model is
converted and distilled, on the digits and on nothing but its own trajectories. Who judges: a small network trained here on
the same 1,300 digits, never shown a sample. The distance in that judge's features is a Fréchet distance, and not
FID, which means Inception's features. Results: `digits.json`, `digits.png` and a table. The model that was distilled on the
digits with seed 0 has its scores and the others' beside it and a card, for

    mhla-hf card out/digits/MHLA-distilled-on-the-digits-0/transformer --shelve model_cards/digits_dit \\
        --over-seeds out/digits/digits.json

It is the transformer that has them, not the pipeline: diffusers' `DiTPipeline` asks for a VAE, which pixels do not need, and
does not sample flow matching. That is why the scores are taken here and not by `mhla_hf.evaluate`.
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
from pathlib import Path

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
from mhla_hf.cli import script
from mhla_hf.evaluation.image_scores import Moments, frechet_distance, share_error
from mhla_hf.evaluation.subjects import find_subjects
from mhla_hf.plots import drawing
from mhla_hf.share.card import check_card, write_card
from mhla_hf.training.denoising import NoiseProcess, predict, trajectory
from mhla_hf.training.recipe import DiffusionStage

SIDE, CLASSES, HELD_OUT = 16, 10, 497
SAMPLING_STEPS = 25
SOFTMAX = "softmax"
MHLA = {"layout": (4, 4), "feature_map": "relu", "normalize": True}
FROM_SCRATCH = {
    SOFTMAX: None,
    "plain linear": {**MHLA, "mixing_start": "uniform", "learn_mixing": False},
    "MHLA": MHLA,
    "MHLA + CPE + gate": {**MHLA, "cpe": 3, "gate": True},
}
DISTILLED = {"MHLA, distilled on the digits": True, "MHLA, distilled without data": False}
CARD = "MHLA, distilled on the digits"
COMPARED = {
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


def digits():
    """(train images, train labels, held-out images, held-out labels): float32 `[N, 1, 16, 16]` from -1 to 1, int64."""
    known = load_digits()
    order = numpy.random.default_rng(0).permutation(len(known.images))
    images = torch.tensor(known.images[order], dtype=torch.float32)[:, None] / 8 - 1
    images = F.interpolate(images, size=(SIDE, SIDE), mode="bilinear")
    labels = torch.tensor(known.target[order])
    return images[:-HELD_OUT], labels[:-HELD_OUT], images[-HELD_OUT:], labels[-HELD_OUT:]


def folder_of(name, seed):
    """The name of a model's folder."""
    return "-".join(re.findall(r"[A-Za-z]+", name)) + f"-{seed}"


class Judge(nn.Module):
    """Two convolutions and two linear layers; `features` gives the 64 numbers before the classes."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64 * (SIDE // 4) ** 2, 64), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(64, CLASSES)

    def features(self, images):
        return self.body(images)

    def forward(self, images):
        return self.head(self.body(images))


def train_judge(out, epochs):
    """The judge, from its file or trained on the training digits, shifted by up to a pixel of the 8 x 8."""
    torch.manual_seed(0)
    judge, file = Judge(), out / "judge.safetensors"
    if not file.exists():
        images, labels, *_ = digits()
        steps = epochs * -(-len(images) // 64)
        optimizer = torch.optim.AdamW(judge.parameters(), 2e-3, weight_decay=0.05)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=max(steps, 2))
        for _ in tqdm(range(epochs), desc="judge", unit="epoch"):
            for part in torch.randperm(len(images)).split(64):
                shift = torch.randint(-2, 3, (2,)).tolist()
                batch = F.pad(images[part], (2, 2, 2, 2), value=-1.0)
                batch = batch[..., 2 + shift[0] : 2 + shift[0] + SIDE, 2 + shift[1] : 2 + shift[1] + SIDE]
                F.cross_entropy(judge(batch), labels[part]).backward()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
        with atomic_file(file) as aside:
            save_file(judge.state_dict(), aside)
    judge.load_state_dict(load_file(file))
    return judge.eval()


def pipeline(seed, settings, width):
    """A DiT on pixels, softmax or converted with `settings`, with the start of weights that DiT's paper has."""
    torch.manual_seed(seed)
    transformer = DiTTransformer2DModel(
        sample_size=SIDE, patch_size=2, in_channels=1, out_channels=1, num_layers=4, num_attention_heads=width // 32,
        attention_head_dim=32, num_embeds_ada_norm=CLASSES, attention_bias=True,
    )  # fmt: skip
    mhla_hf.MHLADiTTransformer2DModel.initialize_weights(transformer)
    pipe = DiTPipeline(transformer, None, FlowMatchEulerDiscreteScheduler())
    return pipe if settings is None else mhla_hf.convert(pipe, **settings)


def train(pipe, out, seed, steps, command):
    """From scratch on the digits: flow matching, with a moving average of the weights."""
    images, labels, *_ = digits()
    stage = DiffusionStage(
        "train", "denoising", steps, 2e-3, batch_size=32, warmup=min(100, steps // 5), beta2=0.99, ema=0.99
    )  # fmt: skip
    data = {"latents": images, "class_labels": labels}
    return mhla_hf.distill(pipe, out=out, data=data, stages=[stage], seed=seed, command=command)


def distill(teacher, out, seed, steps, with_data, command):
    """The trained softmax model converted, its attention outputs matched, then its velocity."""
    student = DiTPipeline(copy.deepcopy(teacher.transformer), None, teacher.scheduler)
    torch.manual_seed(seed)
    mhla_hf.convert(student, **MHLA)
    common = {"batch_size": 32, "warmup": steps // 20, "beta2": 0.99, "sampling_steps": SAMPLING_STEPS, "guidance": 1.0}
    stages = [
        DiffusionStage("transfer", "transfer", max(1, steps // 4), 1e-2, trainable="mhla", **common),
        DiffusionStage("match", "prediction", steps, 1e-3, lr_mhla=3e-3, ema=0.98, **common),
    ]
    images, labels, *_ = digits()
    data = {"latents": images, "class_labels": labels} if with_data else None
    return mhla_hf.distill(student, teacher, out=out, data=data, stages=stages, seed=seed, command=command)


@torch.no_grad()
def samples(pipe, file, count, seed):
    """`count` digits, as many of each class, without guidance: float32 `[N, 1, 16, 16]`, from their file or sampled."""
    if not file.exists():
        pipe.transformer.eval()
        noise = torch.randn(count, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(seed))
        made = []
        for part in tqdm(torch.arange(count).split(100), desc=f"samples of {file.parent.name}"):
            wish = {"class_labels": part % CLASSES}
            options = {"steps": SAMPLING_STEPS, "guidance": 1.0}
            made.append(trajectory(pipe.transformer, pipe.scheduler, noise[part], wish, None, **options))
        with atomic_file(file) as aside:
            save_file({"samples": torch.cat(made).clamp(-1, 1)}, aside)
    return load_file(file)["samples"]


@torch.no_grad()
def score(pipe, judge, images):
    """Percent of the samples that the judge takes for the wished digit, the distance of its features, the loss.

    With the standard errors, over samples and over digits, of what is a mean.
    """
    known = Moments.of(judge.features(digits()[2]))
    share = (judge(images).argmax(1) == torch.arange(len(images)) % CLASSES).double().mean().item()
    losses = held_out_losses(pipe)
    return {
        "accuracy": 100 * share,
        "accuracy_stderr": 100 * share_error(share, len(images)),
        "frechet": frechet_distance(Moments.of(judge.features(images)), known),
        "loss": losses.mean().item(),
        "loss_stderr": (losses.std() / math.sqrt(len(losses))).item(),
    }


def keep(row, folder, judge, count, seed, started, command):
    """A model's scores as the package keeps them, beside its transformer's weights; how it was trained goes with them."""
    place = folder / "transformer"
    shutil.copyfile(folder / "train.json", place / "train.json")
    scores = {
        "accuracy (digits judge)": (row["accuracy"] / 100, row["accuracy_stderr"] / 100, True, count),
        "Fréchet distance (digits judge)": (row["frechet"], None, False, count),
        "held-out loss": (row["loss"], row["loss_stderr"], False, HELD_OUT),
    }
    how = dict.fromkeys(("output", "limit", "revision", "trust_remote_code", "trust_scores", "force"))
    (subject,) = find_subjects(place, types.SimpleNamespace(dtype="auto", seed=seed, command=command, **how))
    task_hash = hash_json([fingerprint_model(judge), count, SAMPLING_STEPS])
    subject.keep("digits", scores, task_hash, started, "cpu")


@torch.no_grad()
def held_out_losses(pipe):
    """The flow-matching loss of each held-out digit, mean of two, with the same noise and times for every model."""
    pipe.transformer.eval()
    _, _, images, labels = digits()
    process, random, losses = NoiseProcess(pipe.scheduler), torch.Generator().manual_seed(0), []
    for part in torch.arange(len(images)).repeat(2).split(142):
        times = [process.draw_time(random, "logit-normal", None) for _ in part]
        noise = torch.randn(len(part), *images.shape[1:], generator=random)
        mixed = [process.mix(*given) for given in zip(images[part], noise, times, strict=True)]
        noisy, target = (torch.stack(values) for values in zip(*mixed, strict=True))
        said = predict(pipe.transformer, noisy, torch.tensor(times), {"class_labels": labels[part]})
        losses.append((said - target).square().mean((1, 2, 3)))
    return torch.cat(losses).view(2, -1).mean(0)


def run(given, command):
    """Everything that is not there yet; returns the results."""
    given.out.mkdir(parents=True, exist_ok=True)
    judge = train_judge(given.out, given.judge_epochs)
    rows = {name: [] for name in (*FROM_SCRATCH, *DISTILLED)}
    parameters, teachers = {}, {}
    runs = [(name, seed) for part in (FROM_SCRATCH, DISTILLED) for seed in range(given.seeds) for name in part]
    for name, seed in runs:
        folder, started = given.out / folder_of(name, seed), time.perf_counter()
        if name in FROM_SCRATCH:
            pipe = train(pipeline(seed, FROM_SCRATCH[name], given.width), folder, seed, given.steps, command)
        else:
            pipe = distill(teachers[seed], folder, seed, given.distill_steps, DISTILLED[name], command)
        if name == SOFTMAX:
            teachers[seed] = pipe
        parameters[name] = pipe.transformer.num_parameters()
        images = samples(pipe, folder / "samples.safetensors", given.samples, seed)
        rows[name].append(score(pipe, judge, images))
        keep(rows[name][-1], folder, judge, given.samples, seed, started, command)
        print(f"{name}, seed {seed}: {rows[name][-1]}", file=sys.stderr)
    images, _, held, wanted = digits()
    with torch.no_grad():
        right = (judge(held).argmax(1) == wanted).double().mean().item()
        apart = frechet_distance(*(Moments.of(judge.features(each)) for each in (images, held)))
    known = {"held_out_accuracy": 100 * right, "train_to_held_out_frechet": apart}
    sizes = {
        key: getattr(given, key) for key in ("steps", "distill_steps", "samples", "width", "judge_epochs", "threads")
    }
    found = {"judge": known, "parameters": parameters, "models": rows}
    return {"seeds": list(range(given.seeds)), **sizes, **found, **describe_run(command)}


def render(results):
    """The table: mean over the seeds, and lowest and highest."""
    lines = [f"{'':30}  {'accuracy, % (lowest to highest)':32}  {'Fréchet distance':24}  held-out loss"]
    for name, runs in results["models"].items():
        cells = []
        for key, places in (("accuracy", 2), ("frechet", 2), ("loss", 4)):
            values = [run[key] for run in runs]
            mean, least, most = (f"{value:.{places}f}" for value in (statistics.mean(values), min(values), max(values)))
            cells.append(f"{mean:>6} ({least} to {most})")
        lines.append(f"{name:30}  {cells[0]:32}  {cells[1]:24}  {cells[2]}")
    judge = results["judge"]
    lines.append(
        f"{'real digits, not trained on':30}  {judge['held_out_accuracy']:6.2f}{'':26}  "
        f"{judge['train_to_held_out_frechet']:6.2f}"
    )
    return "\n".join(line.rstrip() for line in lines)


def make_card(out):
    """The card of the model that was distilled on the digits with seed 0, beside its weights and scores."""
    mine, *others = (out / folder_of(name, 0) / "transformer" for name in (CARD, *COMPARED.values()))
    compared = dict(zip(COMPARED, others, strict=True))
    write_card(mine, name="digits-dit-mhla", license="apache-2.0", compared=compared, about=ABOUT, limits=LIMITS)
    check_card(mine)


def draw(results, folder, path):
    """Accuracy per seed, and the first samples of seed 0 of every model."""
    names = list(results["models"])
    with drawing(path, 1, 2, figsize=(13.0, 4.2), width_ratios=(1, 1.4)) as (_, ((left, right),)):
        for place, name in enumerate(names):
            values = [run["accuracy"] for run in results["models"][name]]
            color = COLORS.get(name, COLORS["MHLA"])
            left.plot(values, [place] * len(values), "o", color=color, alpha=0.7)
            left.plot([statistics.mean(values)], [place], "|", color=color, markersize=18)
        left.set(title="Samples that the judge reads as wished, %", xlabel="each seed, and their mean")
        left.set_yticks(range(len(names)), names)
        left.invert_yaxis()
        left.grid(True, axis="x")
        sheet = []
        for name in names:
            file = folder / folder_of(name, 0) / "samples.safetensors"
            sheet.append(torch.cat(list(load_file(file)["samples"][:20, 0]), dim=1))
        right.imshow(torch.cat(sheet).numpy(), cmap="gray_r", vmin=-1, vmax=1)
        right.set(title="The first twenty of seed 0: classes 0 to 9, twice")
        right.set_yticks([SIDE * (place + 0.5) for place in range(len(names))], names)
        right.set_xticks([])
        right.spines[:].set_visible(False)


def main(arguments=None):
    """Run the script; returns the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/digits"), help="folder to make or to go on in")
    parser.add_argument("--seeds", type=int, default=3, help="repeat everything with so many seeds (default: 3)")
    parser.add_argument("--steps", type=int, default=600, help="steps from scratch, of 32 digits (default: 600)")
    parser.add_argument("--distill-steps", type=int, default=150, help="steps of distillation (default: 150)")
    parser.add_argument("--samples", type=int, default=400, help="samples of each model (default: 400)")
    parser.add_argument("--width", type=int, default=96, help="hidden size, a multiple of 32 (default: 96)")
    parser.add_argument("--judge-epochs", type=int, default=30, help="epochs of the judge (default: 30)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    arguments = sys.argv[1:] if arguments is None else arguments
    given = parser.parse_args(arguments)
    counts = (given.width, given.seeds, given.steps, given.distill_steps, given.judge_epochs)
    if given.width % 32 or min(counts) < 1:
        parser.error("expected a width that is a multiple of 32, and seeds, steps and epochs of at least 1")
    if given.samples < 2 * CLASSES or given.samples % CLASSES:
        parser.error(f"--samples is {given.samples}; expected a multiple of {CLASSES}, at least {2 * CLASSES}")
    torch.set_num_threads(given.threads)
    results = run(given, shlex.join(["python", "-m", "experiments.digits_dit", *arguments]))
    write_json(given.out / "digits.json", results)
    draw(results, given.out, given.out / "digits.png")
    make_card(given.out)
    print(render(results))
    return results


if __name__ == "__main__":
    script(main, "digits_dit")
