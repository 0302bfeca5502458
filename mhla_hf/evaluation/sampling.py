"""Images and videos that a pipeline makes for a score: planned, seeded one by one, resumable, on several processes.

Every sample has its own seed and its own file, written aside and renamed; what is there is not made again. The batches are
cut from the plan, not from what is left, and the global generator is seeded per batch (DDPM draws from it), so a run that
was stopped gives the same files as one that was not, on any number of processes. With a launcher (`torchrun -m mhla_hf.cli
evaluate ...`) each process makes every n-th batch, and the first one computes and writes the scores.
"""

import contextlib
import dataclasses
import functools
import inspect
import json
import subprocess
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from tqdm import tqdm

from ..checkpoints.files import file_aside, write_json
from ..checkpoints.load import choose_device, load_pipeline, one_sentence

IDENTITY = "samples.json"


@contextlib.contextmanager
def joined_processes():
    """accelerate's `PartialState`: alone, or with the others that the launcher started, who leave together."""
    state = PartialState(cpu=not torch.cuda.is_available())
    yield state
    state.wait_for_everyone()


@dataclasses.dataclass(frozen=True)
class Sample:
    """One file to make. name: of the file in the folder. condition: class label (int), prompt (str) or None. seed: int."""

    name: str
    condition: object
    seed: int


class PipelineJudge:
    """One pipeline under a protocol: the loaded pipeline, its samples, its scores."""

    def __init__(self, subject, asked, protocol, state):
        self.subject, self.asked, self.protocol, self.state = subject, asked, protocol, state
        self.seed, self.progress = asked.seed or 0, asked.progress and state.is_main_process
        given = getattr(subject.source, "device", None) if subject.loaded else None
        self.device = choose_device(given or asked.device or state.device)
        self.folder = Path(protocol.samples) / subject.name.replace("/", "--")  # where this model's samples lie
        subject.kept = broadcast_object_list([subject.kept if state.is_main_process else None])[0]

    @functools.cached_property
    def pipeline(self):
        """Loaded when it is first needed; an object that was given stays where it is."""
        if self.subject.loaded:
            return self.subject.source
        return load_pipeline(self.subject.source, dtype=self.subject.dtype, device=self.device, **self.subject.where)

    def make(self, folder, plan, identity, sampling, save, *, batch_size, what):
        """Make the files of `plan` (list of `Sample`) in `folder` that are not there.

        identity: dict of what decides the samples besides weights, precision and `sampling`, which are further arguments of
        the pipeline. save: (one of its images or frames, path) -> writes a file there. what: a word for the bar. ValueError:
        the folder holds samples of something else, or the pipeline does not take the plan's conditions.
        """
        pipeline, state = self.pipeline, self.state
        argument = {int: "class_labels", str: "prompt", type(None): None}[type(plan[0].condition)]
        if argument is not None and argument not in inspect.signature(pipeline.__call__).parameters:
            name = type(pipeline).__name__
            raise ValueError(f"model {name} takes no {argument}; expected a pipeline for this recipe")
        if state.is_main_process:
            about = {"fingerprint": self.subject.fingerprint, "dtype": self.subject.dtype, "sampling": sampling}
            claim_folder(folder, {**about, **identity})
        state.wait_for_everyone()
        batches = [plan[start : start + batch_size] for start in range(0, len(plan), batch_size)]
        mine = batches[state.process_index :: state.num_processes]
        mine = [batch for batch in mine if not all((folder / sample.name).is_file() for sample in batch)]
        bars = getattr(pipeline, "_progress_bar_config", {})
        pipeline.set_progress_bar_config(disable=True)
        try:
            for batch in tqdm(mine, desc=what, unit="batch", disable=not self.progress):
                torch.manual_seed(batch[0].seed)
                given = {} if argument is None else {argument: [sample.condition for sample in batch]}
                generators = [torch.Generator().manual_seed(sample.seed) for sample in batch]
                made = pipeline(**given, generator=generators, **sampling)
                outputs = made.frames if hasattr(made, "frames") else made.images
                for sample, output in zip(batch, outputs, strict=True):
                    (folder / sample.name).parent.mkdir(parents=True, exist_ok=True)
                    with file_aside(folder / sample.name) as aside:
                        save(output, aside)
        finally:
            pipeline.set_progress_bar_config(**{"disable": False, **bars})
        state.wait_for_everyone()


def run_program(command, about, **options):
    """stdout of another program; ValueError, which begins with `about`, with the last line of its complaint."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, **options)
    if done.returncode:
        raise ValueError(f"{about}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    return done.stdout


def claim_folder(folder, identity):
    """Make `folder` the place of samples of `identity` (a dict); ValueError when it is the place of others."""
    known = Path(folder) / IDENTITY
    if known.is_file():
        found, wanted = json.loads(known.read_text(encoding="utf-8")), json.loads(json.dumps(identity))
        if other := [key for key in sorted({*found, *wanted}) if found.get(key) != wanted.get(key)]:
            both = f"{found.get(other[0])!r}, now {wanted.get(other[0])!r}"
            raise ValueError(
                f"samples: {str(folder)!r} holds samples with another {other[0]} ({both}); give another folder, or delete "
                "this one"
            )
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    if any(Path(folder).iterdir()):
        raise ValueError(f"samples: {str(folder)!r} is not empty and holds no {IDENTITY}; expected an empty folder")
    write_json(known, identity)


def seed_of_sample(seed, index):
    """The seed of sample `index` of a run with `seed`: different for every pair, below 2**63."""
    return (seed % 2**31) * 2**32 + index


def read_prompts(path):
    """Prompts of a file: one per line, or JSON lines with "prompt". ValueError when there is none."""
    if Path(path).suffix == ".jsonl":
        prompts = [row["prompt"] for row in read_json_lines(path, "prompt")]
    else:
        with one_sentence(f"prompts: {str(path)!r} cannot be read"):
            prompts = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    if not prompts:
        raise ValueError(f"prompts: {str(path)!r} is empty; expected one prompt per line")
    return prompts


def read_json_lines(path, key):
    """The objects, each with something under `key`, of a file of JSON lines; ValueError in one sentence."""
    with one_sentence(f"{path} is not JSON lines with {key!r}"):
        rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
        _ = [row[key] for row in rows]
    return rows
