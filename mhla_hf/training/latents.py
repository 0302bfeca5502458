"""Latents to train diffusion on: from a folder, a dataset, tensors at hand, or the teacher's own trajectories.

Every random choice about a sample comes from a generator of its own, seeded by (seed, stage, number of the sample).
"""

import hashlib
import itertools
from pathlib import Path

import numpy
import torch
from safetensors.torch import load_file
from torch.utils.data import ConcatDataset, StackDataset
from tqdm import tqdm

from ..checkpoints.load import wrap_errors
from ..data import Reader, check_data_path, identify_files, load_split, read_text_file
from .denoising import trajectory

# what may stand beside the latents, and which of a transformer's conditions it is
COLUMNS = {
    "class_labels": "class_labels",
    "label": "class_labels",
    "prompt_embeds": "encoder_hidden_states",
    "prompt_attention_mask": "encoder_attention_mask",
}


class Latents:
    """Latents and what they show, one sample a row.

    rows: number -> dict of `latents` `[C, (F,) h, w]`, and some of COLUMNS or a text `prompt`. identity: JSON-able.
    """

    def __init__(self, rows, name, identity):
        self.rows, self.name, self.identity = rows, name, identity
        if not len(rows):
            raise ValueError(f"data: {name!r} holds no samples")
        first = rows[0]
        if "latents" not in first:
            raise ValueError(f"data: {name!r} has no 'latents'; it has {', '.join(first)}")
        self.shape = tuple(torch.as_tensor(first["latents"]).shape)
        self.columns = tuple(key for key in (*COLUMNS, "prompt") if key in first)

    def describe(self):
        return {"kind": "latents", "samples": len(self.rows), "shape": list(self.shape), "source": self.identity}

    def sample(self, index):
        """(latents float32, dict of conditions or the prompt) of one sample."""
        row = self.rows[index]
        latents = torch.as_tensor(row["latents"]).float()
        known = {COLUMNS[key]: torch.as_tensor(row[key]) for key in self.columns if key in COLUMNS}
        return latents, known or row.get("prompt")


class LatentReader(Reader):
    """Batches of noised latents. Every epoch takes the samples in a new order."""

    def __init__(self, source, conditions, process, stage, key, state):
        super().__init__(key, state)
        self.source, self.conditions, self.process, self.stage = source, conditions, process, stage

    def take(self, count, rows):
        """The `rows` of the next `count` samples: dict of `[rows, ...]`."""
        made = [self._sample(self.next + row) for row in range(*rows.indices(count))]
        self.next += count
        noisy, times, given, targets = zip(*made, strict=True)
        return _batch(noisy, times, given, self.conditions) | {"target": torch.stack(targets)}

    def _sample(self, number):
        latents, given = self.source.sample(self.shuffled(number, len(self.source.rows)))
        generator = own_generator(*self.key, number)
        noise = torch.randn(latents.shape, generator=generator)
        usual = "logit-normal" if self.process.flow else "uniform"
        time = self.process.draw_time(generator, self.stage.timesteps or usual, self.stage.shift)
        if torch.rand((), generator=generator).item() < self.stage.drop_condition:
            given = None
        noisy, target = self.process.mix(latents, noise, time)
        return noisy, time, given, target


class TrajectoryReader(Reader):
    """Points of the teacher's own trajectories: one per row of the batch, whose points serve as many steps in random order.

    A process makes those of its own rows only, and after a stop the present ones again. teacher: (transformer, scheduler).
    shape: of the latents of one sample. bar: whether one is shown while trajectories are made.
    """

    def __init__(self, teacher, shape, conditions, stage, key, state, bar):
        super().__init__(key, state)
        self.teacher, self.shape, self.conditions, self.stage, self.bar = teacher, shape, conditions, stage, bar
        self.window = None

    def take(self, count, rows):
        """As `LatentReader.take`, without targets."""
        window, place = divmod(self.next, self.stage.sampling_steps)
        if window != self.window:
            numbers = [window * count + row for row in range(*rows.indices(count))]
            part = -(-len(numbers) // self.stage.grad_accum)  # a batch that is trained in parts may not fit at once
            parts = [numbers[first : first + part] for first in range(0, len(numbers), part)]
            self.trajectories = [made for numbers in parts for made in self._sample(numbers)]
            self.window = window
        self.next += 1
        made = []
        for number, points, wish in self.trajectories:
            chance = torch.rand((), generator=own_generator(*self.key, number, place)).item()
            made.append((*points[place], None if chance < self.stage.drop_condition else wish))
        return _batch(*zip(*made, strict=True), self.conditions)

    def _sample(self, numbers):
        """(number, [(latents, time) in random order], what is wished for) of one trajectory per number."""
        transformer, scheduler = self.teacher
        seen, steps, device = [], self.stage.sampling_steps, next(transformer.parameters()).device
        generators = [own_generator(*self.key, number) for number in numbers]
        noise = torch.stack([torch.randn(self.shape, generator=random) for random in generators])
        given = [self.conditions.draw(random) for random in generators]
        wished, nothing = (
            {key: value.to(device) for key, value in self.conditions.batch(rows).items()}
            for rows in (given, [None] * len(given))
        )
        own = [torch.Generator(device).manual_seed(random.initial_seed()) for random in generators]
        options = {"steps": steps, "guidance": self.stage.guidance, "generators": own}
        with tqdm(total=steps, desc="teacher's trajectories", leave=False, delay=2, disable=not self.bar) as bar:

            def keep(latents, time):
                seen.append((latents.cpu(), time))
                bar.update()

            trajectory(transformer, scheduler, noise.to(device), wished, nothing, each=keep, **options)
        made = []
        for row, (number, wish) in enumerate(zip(numbers, given, strict=True)):
            order = numpy.random.default_rng((*self.key, number)).permutation(len(seen))
            made.append((number, [(seen[step][0][row], seen[step][1]) for step in order], wish))
        return made


def _batch(noisy, times, given, conditions):
    return {"noisy": torch.stack(noisy), "times": torch.tensor(times)} | conditions.batch(given)


class Classes:
    """Class labels as conditions; no label is the class behind the last."""

    def __init__(self, count):
        self.count = count

    def draw(self, generator):
        """A random class."""
        return {"class_labels": torch.randint(self.count, (), generator=generator)}

    def batch(self, given):
        """Conditions of a batch from those of its rows, None where there is none."""
        labels = torch.tensor([self.count if row is None else int(row["class_labels"]) for row in given])
        if not 0 <= labels.min() <= labels.max() <= self.count:
            raise ValueError(f"data: gives classes {labels.tolist()}; the model knows 0 to {self.count - 1}")
        return {"class_labels": labels}


class Texts:
    """Texts as conditions, encoded by the pipeline when a batch needs them; no text is the pipeline's empty prompt.

    encode: texts -> (dict of `[B, ...]`, that of the empty prompt `[1, ...]`). prompts: what trajectories are sampled for.
    """

    def __init__(self, encode, prompts=()):
        self.encode, self.prompts, self.empty = encode, list(prompts), None

    def draw(self, generator):
        """A random prompt."""
        return self.prompts[int(torch.randint(len(self.prompts), (), generator=generator))]

    def batch(self, given):
        """Conditions of a batch: of texts, of dicts of tensors, and of None, the empty prompt."""
        texts = [row for row in given if isinstance(row, str)]
        if texts or (self.empty is None and any(row is None for row in given)):
            encoded, self.empty = self.encode(texts or [""])
        rows, numbers = [], itertools.count()
        for row in given:
            if row is None or isinstance(row, str):
                source, number = (self.empty, 0) if row is None else (encoded, next(numbers))
                row = {key: value[number] for key, value in source.items()}
            rows.append(row)
        keys = [key for key in rows[0] if all(key in row for row in rows)]
        return {key: torch.stack([row[key].cpu() for row in rows]) for key in keys}


def own_generator(*key):
    """A generator of random numbers for one sample: a function of whole numbers alone."""
    return torch.Generator().manual_seed(int(numpy.random.SeedSequence(key).generate_state(1, numpy.uint64)[0] >> 1))


def open_latents(data):
    """Latents from what a user calls data; ValueError, TypeError: one sentence.

    data: a folder of safetensors files, each with `latents` `[N, C, (F,) h, w]` as the model sees them (scaled) and beside
    them `class_labels` `[N]`, or `prompt_embeds` `[N, L, D]` and perhaps `prompt_attention_mask`; a dict of such tensors;
    the id of a dataset on the Hub ("id" or "id:configuration", split "train") or a Dataset of `datasets` with such columns,
    or with texts, `prompt`.
    """
    if isinstance(data, dict):
        data = {key: value.detach() for key, value in data.items()}
        hashes = {key: hashlib.sha256(value.numpy().tobytes()).hexdigest()[:16] for key, value in data.items()}
        return Latents(StackDataset(**data), "latents at hand", hashes)
    if isinstance(data, (str, Path)):
        path, name = check_data_path(data), str(data)
        if path.is_dir():
            return _open_folder(path, name)
        return Latents(load_split(name), name, name)
    if hasattr(data, "column_names") and hasattr(data, "__getitem__"):
        return Latents(data, "a dataset", getattr(data, "_fingerprint", None))
    raise TypeError(f"data: got {type(data).__name__}; expected a folder, a dataset, or a dict of tensors")


def _open_folder(path, name):
    """Safetensors files of `[N, ...]` tensors, which are mapped into memory and read where a row is asked for."""
    files, parts = sorted(path.rglob("*.safetensors")), []
    if not files:
        raise ValueError(f"data: the folder {name!r} holds no latents; expected .safetensors files")
    for file in files:
        with wrap_errors(f"data: {str(file)!r} cannot be read"):
            parts.append(StackDataset(**load_file(file)))
    return Latents(ConcatDataset(parts), name, identify_files(files))


def prompt_lines(path):
    """The lines of a text file that are not empty."""
    return [line.strip() for line in read_text_file(path).splitlines() if line.strip()]


def read_prompts(data):
    """The prompts in a text file, one a line, or in a list; None when `data` is something else."""
    if isinstance(data, (str, Path)) and Path(data).suffix.lower() == ".txt":
        if not (path := check_data_path(data)).is_file():
            raise ValueError(f"data: there is no file {str(data)!r}")
        data = prompt_lines(path)
    if not isinstance(data, (list, tuple)):
        return None
    if not data or any(not isinstance(prompt, str) for prompt in data):
        raise ValueError("data: expected prompts, at least one, each a text")
    return list(data)
