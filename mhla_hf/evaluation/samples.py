"""Images and videos that a pipeline makes for a score: planned, seeded one by one, resumable, on several processes.

Every sample has its own seed and its own file, written aside and renamed; what is there is not made again. Unusual: the
batches are cut from the plan, not from what is left, and the global generator is seeded per batch (DDPM draws from it), so
that a run that was stopped gives the same files as one that was not, on any number of processes.
"""

import dataclasses
import hashlib
import inspect
import json
from pathlib import Path

import torch
from tqdm import tqdm

from ..checkpoints.files import file_aside, write_json
from ..checkpoints.load import (
    first_line,
)

IDENTITY = "samples.json"


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


def read_prompts(path):
    """Prompts of a file: one per line, or JSON lines with "prompt". ValueError when there is none."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(
            f"prompts: {str(path)!r} is no file; expected one prompt per line, or JSON lines with 'prompt'"
        )
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    try:
        prompts = [json.loads(line)["prompt"] for line in lines] if path.suffix == ".jsonl" else lines
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"prompts: {str(path)!r} has a line that is no JSON object with 'prompt'") from None
    if not prompts:
        raise ValueError(f"prompts: {str(path)!r} is empty; expected one prompt per line")
    return prompts


def read_json_lines(path):
    """The objects of a file of JSON lines; ValueError in one sentence."""
    try:
        return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not JSON lines: {first_line(error)}") from None


def check_conditions(pipeline, plan):
    """Whether the pipeline takes what the plan conditions on. Returns the argument's name, or None without any."""
    kinds = {type(sample.condition) for sample in plan}
    name = {int: "class_labels", str: "prompt", type(None): None}[kinds.pop()]
    if name is not None and name not in inspect.signature(pipeline.__call__).parameters:
        raise ValueError(f"model {type(pipeline).__name__} takes no {name}; expected a pipeline for this recipe")
    return name


def make_samples(pipeline, folder, plan, *, identity, sampling, batch_size, processes, progress, save, what):
    """Make the files of `plan` in `folder` that are not there.

    Args:
        pipeline: a diffusers pipeline; its output's `images` or `frames` are what `save` gets, one by one.
        folder: of the samples; holds `samples.json`, which says of what. plan: list of `Sample`.
        identity: dict of what decides the samples besides `sampling`, which are further arguments of the pipeline.
        processes: `Processes`. save: (sample, path) -> writes a file there. what: a word for the bar.

    Raises:
        ValueError: the folder holds samples of something else.
    """
    folder = Path(folder)
    argument = check_conditions(pipeline, plan)
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


def plan_hash(plan):
    """Of the files to make, their conditions and seeds."""
    return hash_of([dataclasses.astuple(sample) for sample in plan])


def hash_of(content):
    """First 16 hex digits of the sha256 of something that JSON can say."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]
