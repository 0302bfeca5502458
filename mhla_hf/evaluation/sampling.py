"""Images and videos that a pipeline makes for a score: planned, seeded one by one, resumable, on several processes.

Every sample has its own seed and its own file, written aside and renamed; what is there is not made again. The batches are
cut from the plan, not from what is left, and the global generator is seeded per batch (DDPM draws from it), so a run that
was stopped gives the same files as one that was not, on any number of processes. With a launcher (`torchrun -m mhla_hf.cli
evaluate ...`) each process makes every n-th batch, and the first one computes and writes the scores.
"""

import contextlib
import dataclasses
import inspect
import json
import os
from pathlib import Path

import torch
from tqdm import tqdm

from ..checkpoints.files import file_aside, write_json
from ..checkpoints.load import choose_device, first_line, load_pipeline
from .records import hash_of
from .subjects import keep_scores, known_score

IDENTITY = "samples.json"


@dataclasses.dataclass(frozen=True)
class Processes:
    """rank: of this process, 0 the first. count: of all. state: accelerate's, None for one process."""

    rank: int = 0
    count: int = 1
    state: object = None

    @property
    def first(self):
        """Whether this process computes and writes the scores."""
        return self.rank == 0

    def share(self, items):
        """Every `count`-th of `items`, so that the shares of all processes are all of them."""
        return items[self.rank :: self.count]

    def same(self, thing):
        """The first process's `thing`, in all of them."""
        if self.state is None:
            return thing
        from accelerate.utils import broadcast_object_list

        return broadcast_object_list([thing])[0]

    def wait(self):
        """Until all processes are here."""
        if self.state is not None:
            self.state.wait_for_everyone()

    def device(self, asked):
        """The device of this process: the user's, else its own GPU, else the CPU."""
        if asked is not None or not torch.cuda.is_available():
            return asked
        return f"cuda:{int(os.environ.get('LOCAL_RANK', 0))}"


@contextlib.contextmanager
def joined_processes():
    """`Processes` as the launcher's environment says; without one, nothing of torch.distributed is touched."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Processes()
        return
    try:
        from accelerate import PartialState
    except ImportError as error:
        raise ImportError(
            "several processes need accelerate, which is missing: pip install 'mhla_hf[train]'"
        ) from error
    state = PartialState(cpu=not torch.cuda.is_available())
    yield Processes(state.process_index, state.num_processes, state)
    state.wait_for_everyone()


class PipelineJudge:
    """One pipeline under a protocol: which scores are known, the loaded pipeline, its samples, its records."""

    def __init__(self, subject, asked, protocol, processes):
        self.subject, self.asked, self.protocol, self.processes = subject, asked, protocol, processes
        self.seed = asked.seed or 0
        given = getattr(subject.source, "device", None) if subject.loaded else None
        self.device = choose_device(given or processes.device(asked.device))
        self.kept = processes.same(subject.known(asked) if processes.first else None)
        self._pipeline = None

    @property
    def pipeline(self):
        """Loaded when it is first needed; an object that was given stays where it is."""
        if self._pipeline is None:
            self._pipeline = self.subject.source
            if not self.subject.loaded:
                how = {"dtype": self.subject.dtype, "device": self.device, **self.subject.where(self.asked)}
                self._pipeline = load_pipeline(self.subject.source, **how)
        return self._pipeline

    @property
    def folder(self):
        """Where this model's samples lie."""
        return Path(self.protocol.samples) / self.subject.name.replace("/", "--")

    @property
    def identity(self):
        """What decides samples besides their plan and the pipeline's arguments."""
        return {"fingerprint": self.subject.fingerprint, "dtype": self.subject.dtype}

    def known(self, task, metric, task_hash):
        """Whether the score is there for the same weights, protocol, number, seed and precision."""
        return known_score(self.kept, self.subject, self.asked, task, metric, task_hash)

    def keep(self, task, scores, task_hash, started, beside=False):
        """Put scores into the model's file, as `keep_scores` does."""
        how = {"writes": self.processes.first, "beside": beside}
        self.kept = keep_scores(
            self.kept, self.subject, self.asked, task, scores, task_hash, started, self.device, **how
        )


@dataclasses.dataclass(frozen=True)
class Sample:
    """One file to make. name: of the file in the folder. condition: class label (int), prompt (str) or None. seed: int."""

    name: str
    condition: object
    seed: int


def seed_of_sample(seed, index):
    """The seed of sample `index` of a run with `seed`: different for every pair, below 2**63."""
    return (seed % 2**31) * 2**32 + index


def draw_labels(classes, count, seed):
    """`count` class labels below `classes`, drawn independently and uniformly, as ADM's and DiT's protocols do."""
    return torch.randint(classes, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def plan_hash(plan):
    """Of the files to make, their conditions and seeds."""
    return hash_of([dataclasses.astuple(sample) for sample in plan])


def read_prompts(path):
    """Prompts of a file: one per line, or JSON lines with "prompt". ValueError when there is none."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(
            f"prompts: {str(path)!r} is no file; expected one prompt per line, or JSON lines with 'prompt'"
        )
    if path.suffix == ".jsonl":
        prompts = [row["prompt"] for row in read_json_lines(path, "prompt")]
    else:
        prompts = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not prompts:
        raise ValueError(f"prompts: {str(path)!r} is empty; expected one prompt per line")
    return prompts


def read_json_lines(path, key):
    """The objects, each with a text under `key`, of a file of JSON lines; ValueError in one sentence."""
    try:
        rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not JSON lines: {first_line(error)}") from None
    for row in rows:
        if not isinstance(row, dict) or not isinstance(row.get(key), str):
            raise ValueError(f"{path} has the line {row!r:.80}; expected objects with {key!r}")
    return rows


def make_samples(pipeline, folder, plan, *, identity, sampling, batch_size, processes, progress, save, what):
    """Make the files of `plan` in `folder` that are not there.

    Args:
        pipeline: a diffusers pipeline; its output's `images` or `frames` are what `save` gets, one by one.
        folder: of the samples; holds `samples.json`, which says of what. plan: list of `Sample`.
        identity: dict of what decides the samples besides `sampling`, which are further arguments of the pipeline.
        processes: `Processes`. save: (sample, path) -> writes a file there. what: a word for the bar.

    Raises:
        ValueError: the folder holds samples of something else, or the pipeline does not take the plan's conditions.
    """
    folder = Path(folder)
    argument = {int: "class_labels", str: "prompt", type(None): None}[type(plan[0].condition)]
    if argument is not None and argument not in inspect.signature(pipeline.__call__).parameters:
        raise ValueError(f"model {type(pipeline).__name__} takes no {argument}; expected a pipeline for this recipe")
    if processes.first:
        claim_folder(folder, {**identity, "sampling": sampling})
    processes.wait()
    batches = [plan[start : start + batch_size] for start in range(0, len(plan), batch_size)]
    mine = [
        batch for batch in processes.share(batches) if not all((folder / sample.name).is_file() for sample in batch)
    ]
    bars = getattr(pipeline, "_progress_bar_config", {})
    pipeline.set_progress_bar_config(disable=True)
    try:
        with tqdm(total=sum(map(len, mine)), desc=what, disable=not (progress and processes.first)) as bar:
            for batch in mine:
                torch.manual_seed(batch[0].seed)
                given = {} if argument is None else {argument: [sample.condition for sample in batch]}
                generators = [torch.Generator().manual_seed(sample.seed) for sample in batch]
                made = pipeline(**given, generator=generators, **sampling)
                outputs = made.frames if hasattr(made, "frames") else made.images
                for sample, output in zip(batch, outputs, strict=True):
                    (folder / sample.name).parent.mkdir(parents=True, exist_ok=True)
                    with file_aside(folder / sample.name) as aside:
                        save(output, aside)
                bar.update(len(batch))
    finally:
        pipeline.set_progress_bar_config(**{"disable": False, **bars})
    processes.wait()


def claim_folder(folder, identity):
    """Make `folder` the place of samples of `identity` (a dict); ValueError when it is the place of others."""
    known = Path(folder) / IDENTITY
    if known.is_file():
        found = json.loads(known.read_text(encoding="utf-8"))
        wanted = json.loads(json.dumps(identity))
        for key in sorted({*found, *wanted}):
            if found.get(key) != wanted.get(key):
                raise ValueError(
                    f"samples: {str(folder)!r} holds samples with another {key} ({found.get(key)!r}, now "
                    f"{wanted.get(key)!r}); give another folder, or delete this one"
                )
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    if any(Path(folder).iterdir()):
        raise ValueError(
            f"samples: {str(folder)!r} is not empty and holds no {IDENTITY}; expected a new or an empty folder"
        )
    write_json(known, identity)
