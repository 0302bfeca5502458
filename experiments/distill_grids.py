"""Distill the tiny diffusion models of `calibrate_grids`, and let a judge read the digits that they draw, on one CPU core.

Each teacher is converted in several ways, and all parameters of each conversion learn the teacher's velocity on trajectories
that it samples. A small network that was trained on the digits judges whether samples show the requested one.
"""

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from diffusers import FlowMatchEulerDiscreteScheduler
from safetensors.torch import load_file, save_file
from torch import nn

from mhla_hf.checkpoints.file_io import atomic_file
from mhla_hf.cli.main import script
from mhla_hf.conversion.grid_fit import grid_layers
from mhla_hf.nn.core import Rotation, softmax_attention
from mhla_hf.nn.grid import GridMHLA
from mhla_hf.nn.joint import JointMHLA
from mhla_hf.ops.blocks import Blocks
from mhla_hf.training.denoising import Conditions, predict, sample_latents

from . import calibrate_grids as grids
from .calibrate_grids import CLASSES, TASKS, Size
from .rows import Row, add_rows, describe_setup, format_range, make_parser, markdown, parse_call

REAL, TEACHER, MHLA = "real digits, held out", "softmax, the teacher", "MHLA"
HEADS_KEPT, PLAIN, LOCAL = "MHLA, 1/4 of heads softmax", "plain linear attention", "local alone"
BOTH_KEPT = "MHLA, 1/4 of heads, own and 2 salient blocks softmax"
STUDENTS = (MHLA, HEADS_KEPT, BOTH_KEPT, PLAIN, LOCAL)
MODELS = (REAL, TEACHER, *STUDENTS)
LEARNING_RATE, SAMPLING_STEPS, JUDGE_STEPS = 1e-3, 10, 600


class Recipe(NamedTuple):
    """Sizes of the distillation of a task."""

    trajectories: int  # of the teacher to learn from
    batch: int  # points on them per step
    steps: int
    samples: int  # to judge, at each size


RECIPES = {"dit": Recipe(64, 16, 150, 400), "sd3": Recipe(64, 16, 150, 400), "wan": Recipe(16, 2, 150, 100)}
LONGER = {"wan": Recipe(64, 2, 600, 100)}  # for `MHLA` and `PLAIN`


def frames_of(canvases: torch.Tensor) -> torch.Tensor:
    """Return images [B, 1, h, w] as they are, and videos [B, 1, F, h, w] as images [B F, 1, h, w]."""
    return canvases if canvases.ndim == 4 else canvases.transpose(1, 2).flatten(0, 1)


@torch.no_grad()
def recognized_share(judge: nn.Module, canvases: torch.Tensor, labels: torch.Tensor) -> float:
    """Compute the share of canvases in which a judge recognizes the label; of videos, it averages log-probabilities."""
    log_probabilities = judge(frames_of(canvases.clamp(-1, 1))).log_softmax(-1)
    mean = log_probabilities.view(len(canvases), -1, CLASSES).mean(1)
    return float((mean.argmax(-1) == labels).double().mean())


class Pool(NamedTuple):
    """Points on trajectories of a teacher, N of each."""

    noisy: torch.Tensor
    times: torch.Tensor
    conditions: Conditions
    targets: torch.Tensor  # the teacher's velocities


def make_judge() -> nn.Module:
    """Return a classifier of canvases of any size."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveMaxPool2d(1), nn.Flatten(),
        nn.Linear(64, CLASSES),
    )  # fmt: skip


@functools.lru_cache(maxsize=1)
def prepare(name: str, recipe: Recipe, seed: int, folder: Path) -> tuple[Any, nn.Module, Pool]:
    """Return the teacher of a task, its judge, and what its students learn from; see `make_row` for the arguments."""
    folder.mkdir(parents=True, exist_ok=True)
    task = TASKS[name]
    teacher = grids.train(task, folder / f"{name}.safetensors")
    judge, path = make_judge(), folder / f"{name}-judge.safetensors"
    if not path.exists():
        generator = torch.Generator().manual_seed(0)
        optimizer = torch.optim.AdamW(judge.parameters(), 2e-3, weight_decay=0.05)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=JUDGE_STEPS)
        for step in range(JUDGE_STEPS):
            size = grids.frame_size(task.sizes[step % len(task.sizes)])
            canvases, labels = grids.draw_digits(*grids.digits()[:2], size, 64, generator)
            F.cross_entropy(judge(frames_of(canvases)), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        with atomic_file(path) as temporary_path:
            save_file(judge.state_dict(), temporary_path)
    judge.load_state_dict(load_file(path))
    judge.eval()
    generator = torch.Generator().manual_seed(2000 + seed)
    points = [
        point
        for _ in range(recipe.trajectories // recipe.batch)
        for point in grids.trajectories(task, teacher, task.sizes[0], recipe.batch, generator, SAMPLING_STEPS)
    ]
    with torch.no_grad():
        targets = torch.cat([predict(teacher, *point) for point in points])
    noisy, times = torch.cat([noisy for noisy, *_ in points]), torch.cat([times for _, times, _ in points])
    conditions = {key: torch.cat([values[key] for *_, values in points]) for key in points[0][2]}
    return teacher, judge, Pool(noisy, times, conditions, targets)


def distill(student: Any, pool: Pool, recipe: Recipe, seed: int) -> None:
    """Train all parameters of a student, in eval mode, to match the velocity of its teacher, in place."""
    generator = torch.Generator().manual_seed(seed)

    def loss_of(_: int) -> torch.Tensor:
        rows = torch.randint(len(pool.times), (recipe.batch,), generator=generator)
        conditions = {key: value[rows] for key, value in pool.conditions.items()}
        velocity = predict(student, pool.noisy[rows], pool.times[rows], conditions)
        return (velocity - pool.targets[rows]).square().mean()

    parameters = (parameter for parameter in student.parameters() if parameter.requires_grad)
    grids.optimize(parameters, LEARNING_RATE, recipe.steps, loss_of)


class BlockSoftmaxCore(nn.Module):
    """Computes softmax attention within each block of the grid, in place of the MHLA core of a layer without text."""

    def __init__(self, core: GridMHLA) -> None:
        super().__init__()
        self.layout = core.mixing.layout

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, grid: Size, rotate: Rotation | None, **_: Any
    ) -> torch.Tensor:
        """Attend. See `GridMHLA` for the arguments and the result."""
        index = Blocks.grid(tuple(grid), self.layout).index(q.device)
        q, k = (q, k) if rotate is None else rotate(q, k)
        return softmax_attention(q.to(v.dtype), k.to(v.dtype), v, mask=index[:, None] == index)


def make_student(task: str, teacher: Any, name: str, seed: int, folder: Path) -> Any:
    """Convert a teacher to one of `STUDENTS`, in eval mode; in `LOCAL`, tokens attend to their own block and the text."""
    starts = {PLAIN: grids.LINEAR_CALIBRATED, LOCAL: grids.LOCALITY}
    starts |= {HEADS_KEPT: grids.HEADS_KEPT, BOTH_KEPT: grids.BOTH_KEPT}
    student = grids.convert_or_load(task, teacher, starts.get(name, grids.CALIBRATED), seed, folder)
    if name == LOCAL:
        grids.turn_mhla_off(student)
        for holder in grid_layers(student).values():
            if not isinstance(holder.mhla, JointMHLA):  # which has a softmax of its own, over the block and the text
                holder.mhla = BlockSoftmaxCore(holder.mhla)
    return student


def make_row(job: Row, folder: Path) -> Row:
    """Distill one student, and let the judge read its samples, or those of the teacher, or real digits.

    "recognized" has the shares by size, and "errors" those of the velocity before and after the distillation.
    """
    task, seed, recipe = TASKS[job["task"]], job["seed"], Recipe(*(job[key] for key in Recipe._fields))
    teacher, judge, pool = prepare(job["task"], recipe, seed, folder)
    row: Row = {**job, "recognized": {}}
    model = teacher
    if job["model"] in STUDENTS:
        held_out = grids.held_out_points(task, teacher)
        model = make_student(job["task"], teacher, job["model"], seed, folder)
        row["errors"] = {key: [grids.velocity_error(model, teacher, points)] for key, points in held_out.items()}
        started = time.perf_counter()
        distill(model, pool, recipe, seed)
        row["seconds"] = round(time.perf_counter() - started, 1)
        for key, points in held_out.items():
            row["errors"][key].append(grids.velocity_error(model, teacher, points))
    for size in task.sizes:
        if job["model"] == REAL:
            generator = torch.Generator().manual_seed(4000 + seed)
            canvases, labels = grids.draw_digits(*grids.digits()[2:], size, grids.HELD_OUT, generator)
        else:
            noise = torch.randn(recipe.samples, 1, *size, generator=torch.Generator().manual_seed(3000 + seed))
            labels = torch.arange(recipe.samples) % CLASSES
            samples = []
            for part in torch.arange(len(labels)).split(20):
                scheduler, conditions = FlowMatchEulerDiscreteScheduler(), task.conditions(labels[part])
                options: dict[str, Any] = {"steps": SAMPLING_STEPS, "guidance": 1.0}
                samples.append(sample_latents(model, scheduler, noise[part], conditions, None, **options))
            canvases = torch.cat(samples)
        row["recognized"]["x".join(map(str, size))] = recognized_share(judge, canvases, labels)
    return row


def render_distilled(record: Mapping[str, Any]) -> str:
    """Render two tables by model and size: the recognized shares, and the errors before and after distillation."""
    columns = {(row["task"], size): None for row in record["rows"] for size in row["recognized"]}
    shortest = {name: min(row["steps"] for row in record["rows"] if row["task"] == name) for name, _ in columns}
    groups: dict[tuple[str, str], list[Row]] = {}  # rows of all seeds, by task and label
    for row in record["rows"]:
        times = row["steps"] // shortest[row["task"]]
        label = row["model"] if times == 1 else f"{row['model']}, {times} times the steps"
        groups.setdefault((row["task"], label), []).append(row)
    labels = list(dict.fromkeys(label for _, label in groups))

    def table(head: str, models: Sequence[str], make_cell: Callable[[Sequence[Row], str], str]) -> str:
        lines = []
        for model in models:
            by_column = [(groups.get((name, model), []), size) for name, size in columns]
            lines.append([model, *(make_cell(rows, size) if rows else "-" for rows, size in by_column)])
        return markdown([head, *(grids.title_of(*column) for column in columns)], lines)

    def share_cell(rows: Sequence[Row], size: str) -> str:
        return format_range([100 * row["recognized"][size] for row in rows], "{:.1f}")

    def error_cell(rows: Sequence[Row], size: str) -> str:
        before, after = (statistics.fmean(row["errors"][size][i] for row in rows) for i in (0, 1))
        return f"{before:.4f} → {after:.4f}"

    shares = table("recognized, %", labels, share_cell)
    errors = table("error", [label for label in labels if label not in (REAL, TEACHER)], error_cell)
    return "\n\n".join([shares, errors, describe_setup(record)])


def jobs_of(tasks: Sequence[str], seeds: int) -> list[Row]:
    """Return the jobs of `make_row`, in an order in which neighbors share what is costly."""
    kinds = [(RECIPES[name], name, model) for name in tasks for model in MODELS]
    longer = [(LONGER[name], name, model) for name in tasks if name in LONGER for model in (MHLA, PLAIN)]
    jobs = [*itertools.product(range(seeds), kinds), *itertools.product(range(seeds), longer)]
    return [{"task": name, "model": model, "seed": seed, **recipe._asdict()} for seed, (recipe, name, model) in jobs]


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = make_parser(__doc__, seeds=3)
    parser.add_argument("--out", type=Path, default=Path("docs/evidence/distill_grids.json"), help="record to extend")
    parser.add_argument("--folder", type=Path, default=Path("out/grids"), help="folder of the trained models")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), help="models (default: all)")
    args, command = parse_call(parser, "distill_grids", arguments)
    make = functools.partial(make_row, folder=args.folder)
    record = add_rows(args.out, make, jobs_of(args.tasks, args.seeds), command)
    print(render_distilled(record))
    return record


if __name__ == "__main__":
    script(main, "distill_grids")
