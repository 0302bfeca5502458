"""Latents to train diffusion on: from a folder, a dataset, tensors at hand, or the teacher's own trajectories.

Unusual: every random choice about a sample (noise, time, whether its condition is left out) comes from a generator of its
own, seeded by (seed, stage, number of the sample), so that a step is the same on one process and on many, and after a stop.
Without latents the teacher samples them: one trajectory per row of the batch, whose points, in random order, serve as many
steps; then come new ones. A process makes the trajectories of its own rows only.
"""

import hashlib
from pathlib import Path

import numpy
import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from .data import head_hash, hub_id, load_split, place_of
from .denoising import trajectory

LATENTS = "latents"
# what may stand beside the latents, and which of a transformer's conditions it is
COLUMNS = {
    "class_labels": "class_labels",
    "label": "class_labels",
    "prompt_embeds": "encoder_hidden_states",
    "prompt_attention_mask": "encoder_attention_mask",
}
PROMPT = "prompt"


class Latents:
    """Latents and what they show, one sample a row.

    table: has a length, and `row(i)` gives a dict of tensors: `latents` `[C, (F,) h, w]`, and some of COLUMNS or a text
    `prompt`.
    """

    def __init__(self, table, name, identity):
        self.table, self.name, self.identity = table, name, identity
        if not len(table):
            raise ValueError(f"data: {name!r} holds no samples")
        first = table.row(0)
        if LATENTS not in first:
            raise ValueError(f"data: {name!r} has no {LATENTS!r}; it has {', '.join(first)}")
        self.shape = tuple(first[LATENTS].shape)
        self.columns = tuple(key for key in (*COLUMNS, PROMPT) if key in first)

    def describe(self):
        """What identifies the data: kind, number, shape, and where they come from."""
        return {"kind": LATENTS, "samples": len(self.table), "shape": list(self.shape), "source": self.identity}

    def row(self, index):
        """Sample `index` (over any number of epochs' worth): (latents float32, dict of conditions or the prompt)."""
        row = self.table.row(index)
        latents = row[LATENTS].float()
        if tuple(latents.shape) != self.shape:
            raise ValueError(
                f"data: sample {index} of {self.name!r} has latents {list(latents.shape)}, and the first one "
                f"{list(self.shape)}; expected one size"
            )
        known = {COLUMNS[key]: row[key] for key in self.columns if key in COLUMNS}
        return latents, known or row.get(PROMPT)


class LatentReader:
    """Batches of noised latents. Every epoch takes the samples in a new order."""

    def __init__(self, source, conditions, process, stage, key, state):
        self.source, self.conditions, self.process, self.stage = source, conditions, process, stage
        self.key, self.next, self.epoch = key, state["next"] if state else 0, None

    def take(self, count, rows):
        """The next `count` samples, of which this process works on `rows`: dict of `[rows, ...]`."""
        made = [self._sample(self.next + row) for row in range(*rows.indices(count))]
        self.next += count
        noisy, times, targets, given = zip(*made, strict=True)
        batch = {"noisy": torch.stack(noisy), "times": torch.tensor(times, dtype=torch.float32)}
        return batch | self.conditions.batch(given) | {"target": torch.stack(targets)}

    def _sample(self, number):
        epoch, place = divmod(number, len(self.source.table))
        if epoch != self.epoch:
            self.order = numpy.random.default_rng((*self.key, epoch)).permutation(len(self.source.table))
            self.epoch = epoch
        latents, given = self.source.row(int(self.order[place]))
        generator = own_generator(*self.key, number)
        noise = torch.randn(latents.shape, generator=generator)
        time = self.process.draw_time(generator, self.stage.timesteps or self._usual(), self.stage.shift)
        if torch.rand((), generator=generator).item() < self.stage.drop_condition:
            given = None
        noisy, target = self.process.mix(latents, noise, time)
        return noisy, time, target, given

    def _usual(self):
        return "logit-normal" if self.process.flow else "uniform"

    def state(self):
        """What goes on here."""
        return {"next": self.next}

    def handover(self):
        """Nothing: the next stage's order is its own."""

    def close(self):
        """Nothing is held."""


class TrajectoryReader:
    """Points of the teacher's own trajectories.

    teacher: (transformer, scheduler). shape: of the latents of one sample. `bar` shows a bar while trajectories are made.
    """

    def __init__(self, teacher, shape, conditions, stage, key, state, bar):
        self.teacher, self.shape, self.conditions, self.stage, self.bar = teacher, shape, conditions, stage, bar
        self.key, self.next, self.window = key, state["next"] if state else 0, None

    def take(self, count, rows):
        """The next `count` points, one of each of `count` trajectories: dict of `[rows, ...]`."""
        window, place = divmod(self.next, self.stage.sampling_steps)
        if window != self.window:
            numbers = [window * count + row for row in range(*rows.indices(count))]
            part = -(-len(numbers) // self.stage.grad_accum)
            self.points, self.given = [], []
            steps = self.stage.sampling_steps * -(-len(numbers) // part)
            with tqdm(total=steps, desc="teacher's trajectories", leave=False, delay=2, disable=not self.bar) as bar:
                for first in range(0, len(numbers), part):
                    self._sample(numbers[first : first + part], bar)
            self.window = window
        self.next += 1
        noisy, times, given = [], [], []
        for (points, order, number), wish in zip(self.points, self.given, strict=True):
            seen, time = points[order[place]]
            noisy.append(seen)
            times.append(time)
            random = own_generator(*self.key, number, place)
            given.append(None if torch.rand((), generator=random).item() < self.stage.drop_condition else wish)
        batch = {"noisy": torch.stack(noisy), "times": torch.tensor(times, dtype=torch.float32)}
        return batch | self.conditions.batch(given)

    def _sample(self, numbers, bar):
        transformer, scheduler = self.teacher
        generators = [own_generator(*self.key, number) for number in numbers]
        noise = torch.stack([torch.randn(self.shape, generator=random) for random in generators])
        given = [self.conditions.draw(random) for random in generators]
        seen = []

        def keep(latents, time):
            seen.append((latents.cpu(), time))
            bar.update()

        device = next(transformer.parameters()).device
        wished, nothing = (
            {key: value.to(device) for key, value in self.conditions.batch(rows).items()}
            for rows in (given, [None] * len(given))
        )
        trajectory(
            transformer,
            scheduler,
            noise.to(device),
            wished,
            nothing,
            steps=self.stage.sampling_steps,
            guidance=self.stage.guidance,
            generators=[torch.Generator(device).manual_seed(random.initial_seed()) for random in generators],
            each=keep,
        )
        for row, number in enumerate(numbers):
            order = numpy.random.default_rng((*self.key, number)).permutation(len(seen))
            self.points.append(([(latents[row], time) for latents, time in seen], order, number))
        self.given += given

    def state(self):
        """What goes on here; the window's trajectories are made again."""
        return {"next": self.next}

    def handover(self):
        """Nothing: the next stage's trajectories are its own."""

    def close(self):
        """Nothing is held."""


class Classes:
    """Class labels as conditions; no label is the class behind the last."""

    def __init__(self, count):
        self.count = count

    def draw(self, generator):
        """A random class."""
        return {"class_labels": torch.randint(self.count, (), generator=generator)}

    def batch(self, given):
        """Conditions of a batch from those of its rows, None where there is none."""
        labels = [self.count if row is None else int(row["class_labels"]) for row in given]
        if bad := [label for label in labels if not 0 <= label <= self.count]:
            raise ValueError(f"data: gives class {bad[0]}; the model knows classes 0 to {self.count - 1}")
        return {"class_labels": torch.tensor(labels)}


class Texts:
    """Texts as conditions, encoded by the pipeline when a batch needs them; no text is the pipeline's empty prompt.

    encode: texts -> (dict of `[B, ...]`, that of the empty prompt `[1, ...]`), or None when there is no text encoder.
    prompts: what trajectories are sampled for.
    """

    def __init__(self, encode, prompts=()):
        self.encode, self.prompts, self.empty = encode, list(prompts), None

    def draw(self, generator):
        """A random prompt."""
        return self.prompts[int(torch.randint(len(self.prompts), (), generator=generator))]

    def batch(self, given):
        """Conditions of a batch: of texts, of dicts of tensors, and of None, the empty prompt."""
        texts = [row for row in given if isinstance(row, str)]
        encoded = {}
        if texts:
            encoded, self.empty = self.encode(texts)
        elif self.empty is None and any(row is None for row in given):
            self.empty = self.encode([""])[1]
        rows, place = [], 0
        for row in given:
            if isinstance(row, str):
                row = {key: value[place] for key, value in encoded.items()}
                place += 1
            elif row is None:
                row = {key: value[0] for key, value in self.empty.items()}
            rows.append(row)
        keys = [key for key in rows[0] if all(key in row for row in rows)]
        sizes = {tuple(row[key].shape) for key in keys for row in rows if key == keys[0]}
        if len(sizes) > 1:
            raise ValueError(f"data: gives texts encoded to {sorted(sizes)}; expected one length, the pipeline's own")
        return {key: torch.stack([row[key].cpu() for row in rows]) for key in keys}


def own_generator(*key):
    """A generator of random numbers for one sample: a function of whole numbers alone."""
    return torch.Generator().manual_seed(int(numpy.random.SeedSequence(key).generate_state(1, numpy.uint64)[0] >> 1))


class TensorTable:
    """Tensors at hand: dict of `[N, ...]`."""

    def __init__(self, tensors):
        self.tensors = tensors

    def __len__(self):
        return len(next(iter(self.tensors.values())))

    def row(self, index):
        return {key: value[index] for key, value in self.tensors.items()}


class DatasetTable:
    """A dataset of `datasets` with random access; numbers become tensors."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def row(self, index):
        row = self.dataset[index]
        known = {key: row[key] for key in (LATENTS, *COLUMNS, PROMPT) if key in row}
        return {key: value if key == PROMPT else torch.as_tensor(value) for key, value in known.items()} or row


class FileTable:
    """Safetensors files of `[N, ...]` tensors, read a row at a time."""

    def __init__(self, files):
        self.files, self.places = files, []
        for file in files:
            try:
                with safe_open(file, "pt") as stream:
                    shapes = {key: stream.get_slice(key).get_shape() for key in stream.keys()}  # noqa: SIM118
            except (SafetensorError, OSError) as error:
                raise ValueError(f"data: {str(file)!r} cannot be read ({' '.join(str(error).split())})") from None
            if not shapes or any(not shape or shape[0] != next(iter(shapes.values()))[0] for shape in shapes.values()):
                raise ValueError(f"data: {str(file)!r} holds {shapes}; expected tensors with as many rows each")
            self.places += [(file, row) for row in range(next(iter(shapes.values()))[0])]

    def __len__(self):
        return len(self.places)

    def row(self, index):
        file, row = self.places[index]
        with safe_open(file, "pt") as stream:
            return {key: stream.get_slice(key)[row] for key in stream.keys()}  # noqa: SIM118


def open_latents(data):
    """Latents from what a user calls data.

    Args:
        data: a folder of safetensors files, each with `latents` `[N, C, (F,) h, w]` as the model sees them (scaled) and
            beside them `class_labels` `[N]`, or `prompt_embeds` `[N, L, D]` and perhaps `prompt_attention_mask`; the id of
            a dataset on the Hub ("id" or "id:configuration", split "train") or a `datasets` Dataset with such columns, or a
            text column `prompt`; or a dict of such tensors.

    Raises:
        ValueError, TypeError: one sentence. ImportError: `datasets` is missing.
    """
    if isinstance(data, dict):
        lengths = {key: len(value) for key, value in data.items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"data: got tensors of {lengths} rows; expected as many rows each")
        hashes = {key: hashlib.sha256(value.detach().numpy().tobytes()).hexdigest()[:16] for key, value in data.items()}
        return Latents(TensorTable({key: value.detach() for key, value in data.items()}), "latents at hand", hashes)
    if isinstance(data, (str, Path)):
        path = place_of(data)
        if path.is_dir():
            files = sorted(path.rglob("*.safetensors"))
            if not files:
                raise ValueError(f"data: the folder {str(data)!r} holds no latents; expected .safetensors files")
            identity = [[str(file.relative_to(path)), file.stat().st_size, head_hash(file)] for file in files]
            return Latents(FileTable(files), str(data), identity)
        return Latents(DatasetTable(load_split(str(data), *hub_id(str(data)))), str(data), str(data))
    if hasattr(data, "column_names") and hasattr(data, "__getitem__"):
        return Latents(DatasetTable(data), "a dataset", getattr(data, "_fingerprint", None))
    raise TypeError(f"data: got {type(data).__name__}; expected a folder, a dataset, or a dict of tensors")


def read_prompts(data):
    """The prompts in a text file, one a line, or in a list; None when `data` is something else."""
    if isinstance(data, (str, Path)) and Path(data).suffix.lower() == ".txt":
        path = Path(data).expanduser()
        if not path.is_file():
            raise ValueError(f"data: there is no file {str(data)!r}")
        prompts = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    elif isinstance(data, (list, tuple)):
        prompts = list(data)
    else:
        return None
    if not prompts or any(not isinstance(prompt, str) for prompt in prompts):
        raise ValueError("data: expected prompts, at least one, each a text")
    return prompts
