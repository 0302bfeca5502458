"""Calibrate tiny diffusion models, and compare their velocity with that of other starts, on one CPU core.

    python -m experiments.calibrate_grids --out out/grids

Three softmax models are trained by flow matching on scikit-learn's digits, in pixel space: a DiT with class labels, a
Stable Diffusion 3 that reads the class's name as text, and a Wan of digits that move, with the same texts. Each is then
converted in several ways. The results are `calibrate_grids.json` and a table of the velocity's error on trajectories.
"""

import copy
import functools
import itertools
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import numpy
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits

import mhla_hf
from mhla_hf.checkpoints.file_io import atomic_file, atomic_folder
from mhla_hf.cli.main import script
from mhla_hf.conversion.grid_fit import grid_layers, softmax_layers
from mhla_hf.nn.joint import JointMHLA
from mhla_hf.training.denoising import Conditions, NoiseProcess, predict, sample_latents

from .rows import describe_setup, format_range, make_parser, markdown, parse_call, write_record

SIDE, CLASSES, HELD_OUT = 16, 10, 497
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
TEXT_WIDTH, TEXT_LENGTH = 32, 5
TITLES = {"dit": "DiT", "sd3": "SD3", "wan": "Wan"}
VIDEO_SIDE = 12  # side of a digit in a video of 16 x 16 pixels
FRAMES_PER_VIDEO = 16
FIT_SAMPLING_STEPS, HELD_OUT_STEPS = 20, 8
OFF = -30.0  # balance at which MHLA has no weight
LOCALITY, SOFTMAX_PART = "locality (the default without samples)", "softmax part alone"
LINEAR_CALIBRATED = "plain linear attention, calibrated"
CALIBRATED, LAYER_KEPT = "calibrated", "calibrated, the best of four layers softmax"
HEADS_KEPT = "calibrated, 1/4 of heads softmax"
OWN_BLOCK, SALIENT = "calibrated, own block softmax, exp", "calibrated, own and 4 salient blocks softmax"
SALIENT_ALONE = "own and 4 salient blocks alone"
BOTH_KEPT = "calibrated, 1/4 of heads, own and 2 salient blocks softmax"
Size = tuple[int, ...]  # rows and columns, for video also frames, of latents
Point = tuple[torch.Tensor, torch.Tensor, Conditions]  # noisy latents, times, and conditions


@functools.cache
def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return training images, their labels, held-out images, and theirs: [N, 1, 16, 16] from -1 to 1, and int64 [N]."""
    data = load_digits()
    order = numpy.random.default_rng(0).permutation(len(data.images))
    images = torch.tensor(data.images[order], dtype=torch.float32)[:, None] / 8 - 1
    images = F.interpolate(images, size=(SIDE, SIDE), mode="bilinear")
    labels = torch.tensor(data.target[order])
    return images[:-HELD_OUT], labels[:-HELD_OUT], images[-HELD_OUT:], labels[-HELD_OUT:]


def text_conditions(labels: torch.Tensor, pooled: bool) -> Conditions:
    """Encode the names of classes [B], a fixed random vector for every letter; `pooled` adds "pooled_projections"."""
    table = torch.randn(1 + len(LETTERS), TEXT_WIDTH, generator=torch.Generator().manual_seed(0))
    table[0] = 0.0
    codes = torch.tensor([[1 + LETTERS.index(x) for x in name] + [0] * (TEXT_LENGTH - len(name)) for name in NAMES])
    text = table[codes[labels]]  # [B, TEXT_LENGTH, TEXT_WIDTH]
    return {"encoder_hidden_states": text, **({"pooled_projections": text.mean(1)} if pooled else {})}


def place_digits(images: torch.Tensor, size: Size, generator: torch.Generator) -> torch.Tensor:
    """Put each digit [B, 1, side, side] at a random place of a canvas [B, 1, *size]; in videos, it moves and bounces."""
    *frames, height, width = size
    side, num_frames = images.shape[-1], frames[0] if frames else 1
    canvas = torch.full((len(images), 1, num_frames, height, width), -1.0)
    ranges = torch.tensor([height - side + 1, width - side + 1])
    start = torch.rand(len(images), 2, generator=generator) * ranges
    speed = 3.0 * torch.rand(len(images), 2, generator=generator) - 1.5
    for row, frame in itertools.product(range(len(images)), range(num_frames)):
        place = (start[row] + frame * speed[row]) % (2 * ranges)
        top, left = torch.minimum(place, 2 * ranges - place).long().clamp_max(ranges - 1).tolist()
        canvas[row, :, frame, top : top + side, left : left + side] = images[row]
    return canvas if frames else canvas[:, :, 0]


def draw_digits(
    images: torch.Tensor, labels: torch.Tensor, size: Size, count: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw random digits on canvases [count, 1, *size], smaller in videos so that they can move; returns classes, too."""
    rows = torch.randint(len(images), (count,), generator=generator)
    side = VIDEO_SIDE if len(size) == 3 else SIDE
    return place_digits(F.interpolate(images[rows], size=side, mode="bilinear"), size, generator), labels[rows]


class Task(NamedTuple):
    make: Callable[[], Any]  # returns the softmax model, with random weights
    conditions: Callable[[torch.Tensor], Conditions]  # of classes [B]
    sizes: tuple[Size, ...]  # of the latents that it is trained on; it is fitted on the first
    batch: int
    steps: int
    fit_batch: int  # samples per trajectory to fit and to measure on
    frame_steps: int = 0  # earlier steps on single frames of videos, `FRAMES_PER_VIDEO` times as many per step


class Start(NamedTuple):
    settings: dict[str, Any]  # of `convert`
    learns: bool = False  # whether the MHLA layers are fitted
    keep: float = 0.0  # share of the heads that keep softmax
    tasks: tuple[str, ...] = ()  # that it is for; empty for all


WINDOW = {"windowed": True, "window": 1}
SALIENT_4 = {**WINDOW, "salient_blocks": 4}
LINEAR = {"mixing_start": "uniform", "learn_mixing": False}
STARTS = {
    LOCALITY: Start({}),
    SOFTMAX_PART: Start({}, tasks=("sd3",)),
    "plain linear attention": Start({**LINEAR, "normalize": True, "output_norm": False}, tasks=("dit", "wan")),
    LINEAR_CALIBRATED: Start(LINEAR, learns=True),
    CALIBRATED: Start({}, learns=True),
    HEADS_KEPT: Start({"salient_blocks": 0}, learns=True, keep=0.25),
    OWN_BLOCK: Start({**WINDOW, "feature_map": "exp"}, learns=True, tasks=("dit", "wan")),
    SALIENT: Start(SALIENT_4, learns=True),
    f"{SALIENT}, exp": Start({**SALIENT_4, "feature_map": "exp"}, learns=True, tasks=("dit", "wan")),
    SALIENT_ALONE: Start(SALIENT_4),
    BOTH_KEPT: Start({}, learns=True, keep=0.25),
    BOTH_KEPT.replace("2", "4"): Start(SALIENT_4, learns=True, keep=0.25),
}


def make_dit() -> diffusers.DiTTransformer2DModel:
    model = diffusers.DiTTransformer2DModel(
        sample_size=SIDE, patch_size=2, in_channels=1, out_channels=1, num_layers=4, num_attention_heads=3,
        attention_head_dim=32, num_embeds_ada_norm=CLASSES, attention_bias=True,
    )  # fmt: skip
    mhla_hf.MHLADiTTransformer2DModel.initialize_weights(model)
    return model


make_sd3 = functools.partial(
    diffusers.SD3Transformer2DModel, sample_size=32, patch_size=2, in_channels=1, out_channels=1, num_layers=4,
    num_attention_heads=2, attention_head_dim=32, joint_attention_dim=TEXT_WIDTH, caption_projection_dim=64,
    pooled_projection_dim=TEXT_WIDTH, pos_embed_max_size=16, qk_norm="rms_norm",
)  # fmt: skip


make_wan = functools.partial(
    diffusers.WanTransformer3DModel, patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=32, in_channels=1,
    out_channels=1, text_dim=TEXT_WIDTH, freq_dim=64, ffn_dim=256, num_layers=4, rope_max_seq_len=64,
)  # fmt: skip
WAN_SIZES: tuple[Size, ...] = ((8, 16, 16), (16, 16, 16))
TASKS = {
    "dit": Task(make_dit, lambda labels: {"class_labels": labels}, ((16, 16),), 16, 600, 4),
    "sd3": Task(make_sd3, lambda labels: text_conditions(labels, True), ((16, 16), (24, 24)), 16, 1600, 4),
    "wan": Task(make_wan, lambda labels: text_conditions(labels, False), WAN_SIZES, 2, 600, 1, frame_steps=1200),
}


def frame_size(size: Size) -> Size:
    """Return the size of an image as it is, and that of a video with one frame."""
    return size if len(size) == 2 else (1, *size[1:])


def optimize(parameters: Iterable[torch.Tensor], rate: float, steps: int, loss_of: Callable[[int], Any]) -> None:
    """Minimize the loss that `loss_of` returns for each step, in place."""
    parameters = list(parameters)
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps, pct_start=0.1)
    for step in range(steps):
        loss_of(step).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def train(task: Task, path: Path) -> Any:
    """Train the softmax model of a task by flow matching, or load its weights from `path`; it is in eval mode."""
    torch.manual_seed(0)
    model = task.make()
    if not path.exists():
        generator, process = torch.Generator().manual_seed(1), NoiseProcess(diffusers.FlowMatchEulerDiscreteScheduler())
        average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.99)
        averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=average)

        def loss_of(step: int) -> torch.Tensor:
            if step:
                averaged.update_parameters(model)
            size, count = task.sizes[step % len(task.sizes)], task.batch
            if step < task.frame_steps:
                size, count = frame_size(size), FRAMES_PER_VIDEO * count
            clean, labels = draw_digits(*digits()[:2], size, count, generator)
            times = [process.draw_time(generator, "logit-normal", None) for _ in labels]
            noise = torch.randn(clean.shape, generator=generator)
            noisy, target = (torch.stack(x) for x in zip(*map(process.mix, clean, noise, times), strict=True))
            loss = (predict(model, noisy, torch.tensor(times), task.conditions(labels)) - target).square().mean()
            return loss

        optimize(model.parameters(), 2e-3, task.frame_steps + task.steps, loss_of)
        averaged.update_parameters(model)
        with atomic_file(path) as temporary_path:
            save_file({k: v.contiguous() for k, v in averaged.module.state_dict().items()}, temporary_path)
    model.load_state_dict(load_file(path))
    return model.eval()


def trajectories(task: Task, model: Any, size: Size, batch: int, generator: torch.Generator, steps: int) -> list[Point]:
    """Sample random classes with a softmax model, without guidance, and return what it gets in each step."""
    conditions = task.conditions(torch.randint(CLASSES, (batch,), generator=generator))
    noise = torch.randn(batch, 1, *size, generator=generator)
    points: list[Point] = []

    def keep(noisy: torch.Tensor, time: float) -> None:
        points.append((noisy, torch.full((batch,), time), conditions))

    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    sample_latents(model, scheduler, noise, conditions, None, steps=steps, guidance=1.0, on_step=keep)
    return points


@torch.no_grad()
def velocity_error(student: Any, teacher: Any, points: Sequence[Point]) -> float:
    """Compute the squared error of a student's velocity, divided by the squared norm of the teacher's, over all points."""
    sums = torch.zeros(2)
    for point in points:
        expected = predict(teacher, *point)
        sums += torch.stack([(predict(student, *point) - expected).square().sum(), expected.square().sum()])
    return float(sums[0] / sums[1])


def convert_or_load(name: str, teacher: Any, row: str, seed: int, folder: Path) -> Any:
    """Convert a copy of a softmax model (a key of `TASKS`) with a key of `STARTS`; load it, if it was fitted earlier."""
    start, task = STARTS[row], TASKS[name]
    if not start.learns:
        return mhla_hf.convert(copy.deepcopy(teacher), layers="all", **start.settings)
    path = folder / "-".join([name, *re.findall(r"\w+", row), str(seed)])
    if not path.exists():
        student = copy.deepcopy(teacher)

        def sample(generator: torch.Generator) -> None:
            trajectories(task, student, task.sizes[0], task.fit_batch, generator, FIT_SAMPLING_STEPS)

        with atomic_folder(path) as temporary_path:
            student = mhla_hf.convert(
                student, samples=sample, keep=start.keep, seed=seed, progress=False, **start.settings
            )
            student.save_pretrained(temporary_path)
    return getattr(mhla_hf, f"MHLA{type(teacher).__name__}").from_pretrained(path).eval()


def held_out_points(task: Task, teacher: Any) -> dict[str, list[Point]]:
    """Return the points at which velocities are compared, by size; they are the same for all students and seeds."""
    points = {}
    for size in task.sizes:
        generator, name = torch.Generator().manual_seed(1000), "x".join(map(str, size))
        points[name] = trajectories(task, teacher, size, task.fit_batch, generator, HELD_OUT_STEPS)
    return points


def turn_mhla_off(student: Any) -> None:
    """Leave only the softmax part of joint layers, which reads the text and the own block, in place; others stay."""
    for holder in grid_layers(student).values():
        if isinstance(holder.mhla, JointMHLA):
            holder.mhla.mixing.balance.requires_grad_(False).fill_(OFF)


def measure(name: str, folder: Path, seeds: int) -> dict[str, Any]:
    """Convert the model of a task in all ways, and measure its velocity; "errors" are by start, size, and seed."""
    task = TASKS[name]
    teacher = train(task, folder / f"{name}.safetensors")
    held_out = held_out_points(task, teacher)
    errors: dict[str, dict[str, list[float]]] = {}
    reports: list[dict[str, Any]] = []

    def store(row: str, student: Any) -> None:
        by_size = errors.setdefault(row, {size: [] for size in held_out})
        for size, points in held_out.items():
            by_size[size].append(velocity_error(student, teacher, points))
        print(f"{name}, {row}: {by_size}", file=sys.stderr, flush=True)

    for row, start in STARTS.items():
        if start.tasks and name not in start.tasks:
            continue
        for seed in range(seeds if start.learns else 1):
            student = convert_or_load(name, teacher, row, seed, folder)
            if row in (SOFTMAX_PART, SALIENT_ALONE):
                turn_mhla_off(student)
            store(row, student)
            if row == BOTH_KEPT:
                reports.append(student.config.mhla_measured)
            if row == CALIBRATED:
                trials = {}
                for index, holder in grid_layers(student).items():
                    with softmax_layers({index: holder}):
                        trials[index] = velocity_error(student, teacher, next(iter(held_out.values())))
                best = min(trials, key=lambda index: trials[index])
                with softmax_layers({best: grid_layers(student)[best]}):
                    store(LAYER_KEPT, student)
    return {"errors": errors, "reports": reports, "parameters": teacher.num_parameters()}


def render_calibration(record: Mapping[str, Any]) -> str:
    """Render the table of errors: the mean over seeds of the fit, the lowest, and the highest."""
    tasks = record["tasks"]
    columns = [(name, size) for name, task in tasks.items() for size in next(iter(task["errors"].values()))]
    lines = []
    for row in dict.fromkeys(row for task in tasks.values() for row in task["errors"]):
        errors = [tasks[name]["errors"].get(row, {}).get(size) for name, size in columns]
        lines.append([row, *(format_range(values, "{:.4f}") if values else "-" for values in errors)])
    seconds = {name: statistics.mean(report["seconds"] for report in task["reports"]) for name, task in tasks.items()}
    fits = ", ".join(f"{TITLES[name]} {value:.0f} s" for name, value in seconds.items())
    table = markdown(["start", *(title_of(*column) for column in columns)], lines)
    return f"{table}\n\nA fit with its measurements took: {fits}. {describe_setup(record)}"


def title_of(name: str, size: str) -> str:
    return f"{TITLES[name]} {size.replace('x', ' x ')}"


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = make_parser(__doc__, seeds=3)
    parser.add_argument("--out", type=Path, default=Path("out/grids"), help="folder to create, or with trained models")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), help="models (default: all)")
    args, command = parse_call(parser, "calibrate_grids", arguments)
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    tasks = {name: measure(name, args.out, args.seeds) for name in args.tasks}
    results = {"tasks": tasks, "seeds": list(range(args.seeds)), "threads": 1}
    results = write_record(args.out / "calibrate_grids.json", results, command)
    print(render_calibration(results))
    return results


if __name__ == "__main__":
    script(main, "calibrate_grids")
