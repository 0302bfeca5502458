"""Calibrate tiny diffusion models, and compare their velocity with that of other starts, on one CPU core.

    python -m experiments.calibrate_grids --out out/grids

Three softmax models are trained by flow matching on scikit-learn's digits, in pixel space: a DiT with class labels; a
Stable Diffusion 3 that reads the class's name as text; and a Wan of digits that move and bounce, with the same texts. Each is
then converted in several ways, without any training of the base. The results are `calibrate_grids.json` and a table.
"""

import argparse
import functools
import itertools
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from diffusers import (
    DiTTransformer2DModel,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    WanTransformer3DModel,
)
from safetensors.torch import load_file, save_file

import mhla_hf
from mhla_hf.checkpoints.file_io import atomic_file, write_json
from mhla_hf.checkpoints.provenance import describe_run
from mhla_hf.cli import script
from mhla_hf.training.denoising import Conditions, NoiseProcess, predict, sample_latents

from .digits_dit import CLASSES, SIDE, digits

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
TEXT_WIDTH, TEXT_LENGTH = 32, 5
Size = tuple[int, ...]  # rows and columns, for video also frames, of latents


def text_conditions(labels: torch.Tensor, pooled: bool) -> Conditions:
    """Encode the names of classes: a fixed random vector for every letter.

    Args:
        labels: Classes, int64 [B].
        pooled: Whether to add the mean as "pooled_projections".

    Returns:
        "encoder_hidden_states" [B, TEXT_LENGTH, TEXT_WIDTH], zero after the end of a name.
    """
    table = torch.randn(1 + len(LETTERS), TEXT_WIDTH, generator=torch.Generator().manual_seed(0))
    table[0] = 0.0
    codes = torch.tensor([[1 + LETTERS.index(x) for x in name] + [0] * (TEXT_LENGTH - len(name)) for name in NAMES])
    text = table[codes[labels]]  # [B, TEXT_LENGTH, TEXT_WIDTH]
    return {"encoder_hidden_states": text, **({"pooled_projections": text.mean(1)} if pooled else {})}


def place_digits(images: torch.Tensor, size: Size, generator: torch.Generator) -> torch.Tensor:
    """Put each digit at a random place of a larger canvas; in videos, it moves straight and bounces off the edges.

    Args:
        images: [B, 1, 16, 16].
        size: Size of the canvas; for videos, its first number is that of frames.
        generator: Random number generator.

    Returns:
        [B, 1, *size].
    """
    *frames, height, width = size
    num_frames = frames[0] if frames else 1
    canvas = torch.full((len(images), 1, num_frames, height, width), -1.0)
    ranges = torch.tensor([height - SIDE + 1, width - SIDE + 1])
    start = torch.rand(len(images), 2, generator=generator) * ranges
    speed = 3.0 * torch.rand(len(images), 2, generator=generator) - 1.5
    for row, frame in itertools.product(range(len(images)), range(num_frames)):
        place = (start[row] + frame * speed[row]) % (2 * ranges)
        top, left = torch.minimum(place, 2 * ranges - place).long().clamp_max(ranges - 1).tolist()
        canvas[row, :, frame, top : top + SIDE, left : left + SIDE] = images[row]
    return canvas if frames else canvas[:, :, 0]


class Task(NamedTuple):
    """A model to train and to convert.

    Attributes:
        make: Returns the softmax model, with random weights.
        conditions: Returns the conditions of classes [B].
        sizes: Sizes of the latents that it is trained on; it is fitted on the first.
        batch: Samples per step.
        steps: Training steps.
    """

    make: Callable[[], Any]
    conditions: Callable[[torch.Tensor], Conditions]
    sizes: tuple[Size, ...]
    batch: int
    steps: int


def make_dit() -> DiTTransformer2DModel:
    """Return a DiT on pixels, with DiT's initial weights."""
    model = DiTTransformer2DModel(
        sample_size=SIDE, patch_size=2, in_channels=1, out_channels=1, num_layers=4, num_attention_heads=3,
        attention_head_dim=32, num_embeds_ada_norm=CLASSES, attention_bias=True,
    )  # fmt: skip
    mhla_hf.MHLADiTTransformer2DModel.initialize_weights(model)
    return model


def make_sd3() -> SD3Transformer2DModel:
    """Return a small Stable Diffusion 3 on pixels."""
    return SD3Transformer2DModel(
        sample_size=32, patch_size=2, in_channels=1, out_channels=1, num_layers=4, num_attention_heads=2,
        attention_head_dim=32, joint_attention_dim=TEXT_WIDTH, caption_projection_dim=64,
        pooled_projection_dim=TEXT_WIDTH, pos_embed_max_size=16, qk_norm="rms_norm",
    )  # fmt: skip


def make_wan() -> WanTransformer3DModel:
    """Return a small Wan on pixels."""
    return WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=32, in_channels=1, out_channels=1,
        text_dim=TEXT_WIDTH, freq_dim=64, ffn_dim=256, num_layers=4, rope_max_seq_len=64,
    )  # fmt: skip


TASKS = {
    "dit": Task(make_dit, lambda labels: {"class_labels": labels}, ((16, 16),), 16, 600),
    "sd3": Task(make_sd3, lambda labels: text_conditions(labels, True), ((16, 16), (24, 24)), 8, 600),
    "wan": Task(make_wan, lambda labels: text_conditions(labels, False), ((8, 16, 16), (16, 16, 16)), 2, 500),
}


@functools.cache
def training_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the images and labels to train on; see `digits`."""
    return digits()[:2]


def draw_batch(task: Task, size: Size, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw digits on canvases of one size, [B, 1, *size], and their classes [B]."""
    images, labels = training_digits()
    rows = torch.randint(len(images), (task.batch,), generator=generator)
    return place_digits(images[rows], size, generator), labels[rows]


def train(task: Task, path: Path) -> Any:
    """Train the softmax model of a task by flow matching, or load it.

    Args:
        task: The task.
        path: File of the weights, written if it does not exist.

    Returns:
        The model, in eval mode.
    """
    torch.manual_seed(0)
    model = task.make()
    if not path.exists():
        generator, process = torch.Generator().manual_seed(1), NoiseProcess(FlowMatchEulerDiscreteScheduler())
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.99), weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, task.steps, pct_start=0.1)
        averaged = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99)
        )
        for step in range(task.steps):
            clean, labels = draw_batch(task, task.sizes[step % len(task.sizes)], generator)
            times = [process.draw_time(generator, "logit-normal", None) for _ in labels]
            noise = torch.randn(clean.shape, generator=generator)
            noisy, target = (torch.stack(x) for x in zip(*map(process.mix, clean, noise, times), strict=True))
            loss = (predict(model, noisy, torch.tensor(times), task.conditions(labels)) - target).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            averaged.update_parameters(model)
            if not step % 50:
                print(f"{path.stem}, step {step}: loss {loss:.4f}", file=sys.stderr, flush=True)
        with atomic_file(path) as temporary_path:
            save_file({k: v.contiguous() for k, v in averaged.module.state_dict().items()}, temporary_path)
    model.load_state_dict(load_file(path))
    return model.eval()
