"""Latents for training diffusion models, of a dataset or of trajectories that the teacher samples.

Every sample has its own generator, seeded with (seed, stage, number of the sample), whichever process reads it and wherever
a run was interrupted.
"""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy
import torch

from ...conversion.grid_fit import move
from ...data import Reader, check_data_path, read_text_file
from ..denoising import Conditions, NoiseProcess, sample_latents
from ..recipe import DiffusionStage

# Column of the data -> keyword argument of the transformer.
CONDITION_COLUMNS = {
    "class_labels": "class_labels",
    "label": "class_labels",
    "prompt_embeds": "encoder_hidden_states",
    "prompt_attention_mask": "encoder_attention_mask",
    "condition": "condition",  # channels that are appended to the latents
    "image_embeds": "encoder_hidden_states_image",
    "control": "control_hidden_states",
}
# What `drop_condition` removes from a sample. Images stay, as in classifier-free guidance.
DROPPED = ("prompt", "class_labels", "encoder_hidden_states", "encoder_attention_mask")

# Condition of one sample: tensors by argument of the transformer, and possibly a text, "prompt".
Condition = dict[str, Any]
Batch = dict[str, torch.Tensor]
Key = tuple[int, int]  # (seed, number of the stage)
ConditionEncoder: TypeAlias = "ClassConditions | TextConditions"  # draws conditions, and makes batches of them


class Latents:
    """A dataset of rows with `latents` [C, (F,) h, w] and either some of `CONDITION_COLUMNS` or a text `prompt`."""

    def __init__(self, rows: Any, name: str, identity: Any) -> None:
        self.rows, self.name, self.identity = rows, name, identity
        if not len(rows):
            raise ValueError(f"data: got {name!r}, which is empty, expected latents.")
        row = rows[0]
        if "latents" not in row:
            raise ValueError(f"data: got {name!r} with the columns {', '.join(row)}, expected 'latents' among them.")
        self.shape = tuple(torch.as_tensor(row["latents"]).shape)
        self.columns = tuple(column for column in (*CONDITION_COLUMNS, "prompt") if column in row)

    def describe(self) -> dict[str, Any]:
        return {"kind": "latents", "samples": len(self.rows), "shape": list(self.shape), "source": self.identity}

    def sample(self, index: int) -> tuple[torch.Tensor, Condition]:
        row = self.rows[index]
        latents = torch.as_tensor(row["latents"]).float()
        columns = (column for column in self.columns if column in CONDITION_COLUMNS)
        condition: Condition = {CONDITION_COLUMNS[column]: torch.as_tensor(row[column]) for column in columns}
        if "prompt" in row and "encoder_hidden_states" not in condition:
            condition["prompt"] = row["prompt"]
        return latents, condition


class LatentReader(Reader):
    """Reads batches of noisy latents. Every epoch reads all samples in a new random order."""

    def __init__(
        self, source: Latents, conditions: ConditionEncoder, process: NoiseProcess, stage: DiffusionStage, key: Key,
        state: dict[str, Any] | None,
    ) -> None:  # fmt: skip
        super().__init__(key, state)
        self.source, self.conditions, self.process, self.stage = source, conditions, process, stage

    def take(self, count: int, rows: slice = slice(None)) -> Batch:
        """Return "noisy" and "target", [R, C, (F,) h, w], "times" [R], and the conditions of the R rows."""
        samples = [self._make_sample(self.next + row) for row in range(*rows.indices(count))]
        self.next += count
        noisy, times, conditions, targets = zip(*samples, strict=True)
        batch = {"noisy": torch.stack(noisy), "times": torch.tensor(times), "target": torch.stack(targets)}
        return {**batch, **self.conditions.batch(conditions)}

    def _make_sample(self, number: int) -> tuple[torch.Tensor, float, Condition, torch.Tensor]:
        latents, condition = self.source.sample(self.shuffled(number, len(self.source.rows)))
        generator = make_generator(*self.key, number)
        noise = torch.randn(latents.shape, generator=generator)
        distribution = self.stage.timesteps or ("logit-normal" if self.process.is_flow else "uniform")
        time = self.process.draw_time(generator, distribution, self.stage.shift)
        if torch.rand((), generator=generator).item() < self.stage.drop_condition:
            condition = _without_text(condition)
        noisy, target = self.process.mix(latents, noise, time)
        return noisy, time, condition, target


def sample_points(
    transformer: Any, scheduler: Any, shape: tuple[int, ...], encoder: ConditionEncoder, stage: DiffusionStage,
    reader: Reader, numbers: Sequence[int],
) -> list[list[Batch]]:  # fmt: skip
    """Return a teacher's trajectory per number, for a `TrajectoryReader`: its steps in random order, as one-row batches."""
    device = next(transformer.parameters()).device
    generators = [make_generator(*reader.key, number) for number in numbers]
    noise = torch.stack([torch.randn(shape, generator=generator) for generator in generators])
    drawn: list[Condition] = [encoder.draw(generator) for generator in generators]
    guided, unguided = encoder.batch(drawn), encoder.batch([_without_text(condition) for condition in drawn])
    points: list[tuple[torch.Tensor, float]] = []
    sample_latents(
        transformer, scheduler, noise.to(device), *(move(conditions, device) for conditions in (guided, unguided)),
        steps=stage.sampling_steps, guidance=stage.guidance,
        generators=[torch.Generator(device).manual_seed(generator.initial_seed()) for generator in generators],
        on_step=lambda latents, time: points.append((latents.cpu(), time)),
    )  # fmt: skip
    trajectories = []
    for row, number in enumerate(numbers):
        trajectory = []
        for position, step in enumerate(numpy.random.default_rng((*reader.key, number)).permutation(len(points))):
            draw = torch.rand((), generator=make_generator(*reader.key, number, position)).item()
            conditions = unguided if draw < stage.drop_condition else guided
            latents, time = points[step]
            batch = {"noisy": latents, "times": torch.full((len(numbers),), time), **conditions}
            trajectory.append({name: value[row : row + 1] for name, value in batch.items()})
        trajectories.append(trajectory)
    return trajectories


def _without_text(condition: Condition) -> Condition:
    return {key: value for key, value in condition.items() if key not in DROPPED}


class ClassConditions:
    """Collates class labels. The label of an unconditional sample is `num_classes`."""

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes

    def draw(self, generator: torch.Generator) -> Condition:
        return {"class_labels": torch.randint(self.num_classes, (), generator=generator)}

    def batch(self, samples: Sequence[Condition]) -> Conditions:
        count = self.num_classes
        labels = torch.tensor([int(row.get("class_labels", count)) for row in samples])
        if not 0 <= labels.min() <= labels.max() <= count:
            raise ValueError(f"data: got the classes {labels.tolist()}, expected 0 to {count - 1}, as in the model.")
        return {"class_labels": labels}


class TextConditions:
    """Encodes texts by `encode`, which returns the conditions of B texts, [B, ...], and of the empty text, [1, ...]."""

    def __init__(self, encode: Callable[[list[str]], tuple[Conditions, Conditions]], prompts: Sequence[str]) -> None:
        self.encode, self.prompts = encode, prompts
        self.empty: Conditions | None = None  # conditions of the empty prompt, set by the first call of `encode`

    def draw(self, generator: torch.Generator) -> Condition:
        return {"prompt": self.prompts[int(torch.randint(len(self.prompts), (), generator=generator))]}

    def batch(self, samples: Sequence[Condition]) -> Conditions:
        """Return the conditions that all B samples have, [B, ...]. A sample without text gets those of the empty text."""
        texts = [sample["prompt"] for sample in samples if "prompt" in sample]
        encoded: Conditions = {}
        if texts or (self.empty is None and any("encoder_hidden_states" not in sample for sample in samples)):
            encoded, self.empty = self.encode(texts or [""])
        rows: list[Conditions] = []
        numbers = itertools.count()
        for sample in samples:
            row = dict(sample)
            if row.pop("prompt", None) is not None:
                number = next(numbers)
                row |= {key: value[number] for key, value in encoded.items()}
            elif "encoder_hidden_states" not in row:
                row |= {key: value[0] for key, value in (self.empty or {}).items()}
            rows.append(row)
        shared_keys = [key for key in rows[0] if all(key in row for row in rows)]
        return {key: torch.stack([row[key].cpu() for row in rows]) for key in shared_keys}


def make_generator(*key: int) -> torch.Generator:
    seed = numpy.random.SeedSequence(key).generate_state(1, numpy.uint64)[0]
    return torch.Generator().manual_seed(int(seed >> 1))


def read_prompt_lines(path: Path) -> list[str]:
    return [line.strip() for line in read_text_file(path).splitlines() if line.strip()]


def read_prompts(data: Any) -> list[str] | None:
    """Return the prompts in a list, or in a .txt file with one prompt per line; None if `data` is anything else."""
    if isinstance(data, (str, Path)) and Path(data).suffix.lower() == ".txt":
        path = check_data_path(data)
        if not path.is_file():
            raise ValueError(f"data: got {str(data)!r}, which does not exist, expected a file of prompts.")
        data = read_prompt_lines(path)
    if not isinstance(data, (list, tuple)):
        return None
    if not data or any(not isinstance(prompt, str) for prompt in data):
        raise ValueError(f"data: got {data!r:.80}, expected a nonempty list of strings, one per prompt.")
    return list(data)
