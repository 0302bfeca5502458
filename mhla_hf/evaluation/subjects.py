"""What is judged: folders, Hub ids and loaded objects, each checked, named and fingerprinted before anything is loaded.

A fingerprint covers what decides a model's numbers, so a score can be told from that of other weights. Scores are kept in
the model's results file; what is known there for exactly this question is not run again.

Of pipelines also the images and videos that they make for a score: every sample has its own seed and its own file, and what
is there is not made again. The batches are cut from the plan, not from what is left, and the global generator is seeded per
batch (DDPM draws from it), so a run that was stopped gives the same files as one that was not, on any number of processes.
"""

import contextlib
import dataclasses
import functools
import inspect
import logging
import os
import shlex
import time
from pathlib import Path

import torch
from huggingface_hub import HfApi
from tqdm import tqdm

from ..checkpoints.file_io import atomic_file, can_resume, write_json
from ..checkpoints.fingerprint import PIPELINE_INDEX, fingerprint_folder, fingerprint_model
from ..checkpoints.load import choose_device, load_pipeline, resolve_model_name, stored_dtype, wrap_errors
from ..checkpoints.provenance import describe_run
from .records import Result, Results, measured_here, note_measured, results_path

logger = logging.getLogger("mhla_hf")
VERSION = "1"  # of our own metrics: part of every task hash
IDENTITY = "samples.json"


@dataclasses.dataclass
class Subject:
    """One model to judge, and its scores.

    source: folder, Hub id or loaded object. target: its results file, or None to write none. asked: an `Asked`.
    """

    name: str
    source: object
    fingerprint: str
    dtype: str
    target: Path | None
    asked: object

    @property
    def loaded(self):
        """Whether `source` is an object in memory."""
        return not isinstance(self.source, (str, Path))

    @property
    def where(self):
        """The options by which `from_pretrained` finds it: of a Hub model the commit that its fingerprint names."""
        mark, _, commit = self.fingerprint.partition(":")
        return {"revision": commit if mark == "hub" else None, "trust_remote_code": self.asked.trust_remote_code}

    @functools.cached_property
    def kept(self):
        """`Results` of these weights that need no second run: what this machine measured, or all if scores are trusted."""
        found = Results() if self.target is None else Results.read(self.target).of(self.fingerprint)
        mine = measured_here(found)
        foreign = len(found) - len(mine)
        if mine and not self.asked.force:
            logger.info("%s: what %s holds is read from it, not run again", self.name, self.target)
        trusted = self.asked.trust_scores
        if foreign:
            said = "%s: %d scores in %s were not measured here and " + ("are read" if trusted else "do not count")
            logger.log(logging.WARNING if trusted else logging.INFO, said, self.name, foreign, self.target)
        return found if trusted else mine

    def knows(self, task, metric, task_hash):
        """Whether a score is kept for the same weights, protocol, number, seed and precision, and not to be run again."""
        wanted = (task, metric, task_hash, self.asked.limit, self.asked.seed or 0, self.dtype)
        known = ((r.task, r.metric, r.task_hash, r.limit, r.seed, r.dtype) for r in self.kept)
        return not self.asked.force and wanted in known

    def store(self, records, beside=False):
        """Keep records that were just measured, in the model's file too where it has one. beside: as in `Results.merge`."""
        self.kept.merge(records, beside)
        if self.target is not None:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            Results.read(self.target).of(self.fingerprint).merge(records, beside).write(self.target)
            note_measured(records)

    def facts(self, device, task=None):
        """The `Result` fields that do not depend on the numbers. task: the one of the recipe's to name in the command."""
        return {
            **describe_run(self.asked.command or command_of([self], task), device),
            "model": self.name if self.loaded else shown_path(self.source),
            "revision": self.where["revision"],
            "fingerprint": self.fingerprint,
            "dtype": self.dtype,
            "limit": self.asked.limit,
        }

    def keep(self, task, scores, task_hash, started, device, beside=False):
        """Keep scores of a metric of ours: metric -> (value, standard error, higher is better, samples).

        started: by time.perf_counter. beside: scores of other numbers of samples stay.
        """
        facts = self.facts(device) | {"task": task, "shots": 0, "task_version": VERSION, "task_hash": task_hash}
        facts |= {"seed": self.asked.seed or 0, "seconds": round(time.perf_counter() - started, 3)}
        names = ("value", "stderr", "higher_is_better", "samples")
        scores = {metric: dict(zip(names, score, strict=True)) for metric, score in scores.items()}
        self.store([Result(metric=metric, **score, **facts) for metric, score in scores.items()], beside)


def command_of(subjects, task=None):
    """The shell line that gives the scores of a recipe, or of one of its tasks, again."""
    asked, recipe = subjects[0].asked, subjects[0].asked.recipe
    models = [one.name if one.loaded else shown_path(one.source) for one in subjects]
    words = ["mhla-hf", "evaluate", *models, *(["--recipe", shown_path(recipe.name)] if recipe.name else [])]
    for name, value in recipe.changed.items():
        value = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else getattr(value, "name", value)
        words += ["--set", f"{name}={shown_path(value) if isinstance(value, str) else value}"]
    words += ["--tasks", task if task in recipe.tasks else ",".join(recipe.tasks)]
    for path in paths_of(asked.include_path):
        words += ["--include-path", shown_path(path)]
    if asked.data_files is not None:
        words += ["--data-files", shown_path(asked.data_files)]
    for name in ("num_fewshot", "limit", "batch_size", "seed", "dtype", "max_length", "revision"):
        if (value := getattr(asked, name)) is not None and (name, value) != ("dtype", "auto"):
            words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words + ["--trust-remote-code"] * asked.trust_remote_code)


def paths_of(given):
    """One path, or a list of paths, or None, as a list of texts."""
    return [str(path) for path in ([given] if isinstance(given, (str, Path)) else given or [])]


def find_subjects(models, asked, pipeline=False):
    """`models` of `evaluate` as a list of `Subject`. ValueError, TypeError: one sentence; nothing has been loaded then."""
    models, output = named_models(models), asked.output and Path(asked.output)
    files = dict.fromkeys(models, output)
    if output and output.suffix != ".json":
        files = {name: output / f"{name.replace('/', '--')}.json" for name in models}
    elif output and len(models) > 1:
        raise ValueError(f"output {str(output)!r} is one file for {len(models)} models; expected a folder")
    return [_subject(name, model, files[name], asked, pipeline) for name, model in models.items()]


def named_models(models):
    """name -> model: a folder's name, with that of the folder above before it where two are alike; an id; or a class's.

    models: one or a list of folders, ids and objects, or a dict. ValueError: none, or two of one name.
    """
    if not isinstance(models, dict):
        several = models if isinstance(models, (list, tuple)) else [models]
        parts = [(type(model).__name__,) for model in several]
        for place, model in enumerate(several):
            if isinstance(model, (str, Path)):
                parts[place] = Path(model).resolve().parts if Path(model).exists() else (str(model),)
        last = [part[-1] for part in parts]
        names = ["/".join(part[-2:]) if last.count(part[-1]) > 1 else part[-1] for part in parts]
        if alike := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"models: {alike[0]!r} is given twice; expected each once, or a dict of names and models")
        models = dict(zip(names, several, strict=True))
    if not models:
        raise ValueError("models is empty; expected at least one folder, Hub id or model")
    return {str(name): model for name, model in models.items()}


def _subject(name, model, target, asked, pipeline):
    dtype = asked.dtype
    if isinstance(model, (str, Path)):
        if not pipeline and (Path(model) / PIPELINE_INDEX).is_file():
            raise ValueError(f"model {str(model)!r} is a pipeline; expected a recipe for images or videos with it")
        source = resolve_model_name(model, pipeline=pipeline)
        if isinstance(source, Path):
            fingerprint, target = fingerprint_folder(source), target or results_path(source)
            if dtype == "auto":
                dtype = "float32" if pipeline else stored_dtype(source)
        else:
            with wrap_errors(f"model {source!r} is no folder here, and the Hub does not give it"):
                fingerprint = f"hub:{HfApi().model_info(source, revision=asked.revision).sha}"
    else:
        if not (hasattr(model, "components") if pipeline else isinstance(model, torch.nn.Module)):
            what = "diffusers pipeline" if pipeline else "model of transformers"
            raise TypeError(f"model {name!r} is {type(model).__name__}; expected a folder, a Hub id or a loaded {what}")
        fingerprint = fingerprint_model(model)
        dtype = str(model.dtype).removeprefix("torch.")
    if target is not None:
        check_writable(target)
        Results.read(target)
    return Subject(name, model, fingerprint, dtype, target, asked)


def check_writable(target):
    """ValueError when the file `target` cannot be written; nothing is made."""
    folder = target.parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK) or target.is_dir():
        raise ValueError(f"results cannot be written to {str(target)!r}; give another place as output")


def shown_path(path):
    """A path fit for records and cards: relative to the working folder, or the last part where it lies elsewhere."""
    path = Path(path)
    if not path.exists():
        return str(path)
    resolved, here = path.resolve(), Path.cwd().resolve()
    return str(resolved.relative_to(here)) if resolved.is_relative_to(here) else resolved.name


@contextlib.contextmanager
def joined_processes():
    """accelerate's `PartialState`: alone, or with the others that the launcher started, who leave together. Alone it is
    forgotten afterwards: processes forked later would take themselves for the only one."""
    from accelerate import PartialState

    fresh = not PartialState._shared_state
    state = PartialState(cpu=not torch.cuda.is_available())
    try:
        yield state
        state.wait_for_everyone()
    finally:
        if fresh and state.num_processes == 1:
            PartialState._reset_state()


def agree(subject, state):
    """Every process goes by the scores that the main process knows."""
    from accelerate.utils import broadcast_object_list

    subject.kept = broadcast_object_list([subject.kept if state.is_main_process else None])[0]


@dataclasses.dataclass(frozen=True)
class Sample:
    """One file to make. name: of the file in the folder. condition: class label (int), prompt (str) or None. seed: int."""

    name: str
    condition: object
    seed: int


def seed_of_sample(seed, index):
    """The seed of sample `index` of a run with `seed`: different for every pair, below 2**63."""
    return (seed % 2**31) * 2**32 + index


class PipelineJudge:
    """One pipeline under a protocol: the loaded pipeline, its samples, its scores."""

    def __init__(self, subject, asked, protocol, state):
        self.subject, self.asked, self.protocol, self.state = subject, asked, protocol, state
        self.seed, self.progress = asked.seed or 0, asked.progress and state.is_main_process
        given = getattr(subject.source, "device", None) if subject.loaded else None
        self.device = choose_device(given or asked.device or state.device)
        self.folder = Path(protocol.samples) / subject.name.replace("/", "--")  # where this model's samples lie
        agree(subject, state)

    @functools.cached_property
    def pipeline(self):
        """Loaded when it is first needed; an object that was given stays where it is."""
        if self.subject.loaded:
            return self.subject.source
        return load_pipeline(self.subject.source, dtype=self.subject.dtype, device=self.device, **self.subject.where)

    def make(self, folder, plan, identity, sampling, save, *, batch_size, what):
        """Make the files of `plan` (list of `Sample`) in `folder` that are not there.

        identity: dict of what decides the samples besides weights, precision and `sampling`, which are further arguments of
        the pipeline. save: (image or frames, path) -> writes a file there. what: a word for the bar. ValueError: the folder
        holds samples of something else, or the pipeline does not take the plan's conditions.
        """
        pipeline, state = self.pipeline, self.state
        argument = {int: "class_labels", str: "prompt", type(None): None}[type(plan[0].condition)]
        if argument is not None and argument not in inspect.signature(pipeline.__call__).parameters:
            raise ValueError(
                f"model {type(pipeline).__name__} takes no {argument}; expected a pipeline for this recipe"
            )
        if state.is_main_process:
            about = {"fingerprint": self.subject.fingerprint, "dtype": self.subject.dtype, "sampling": sampling}
            if not can_resume(folder, IDENTITY, about | identity, "samples"):
                folder.mkdir(parents=True, exist_ok=True)
                write_json(folder / IDENTITY, about | identity)
            logger.info("%s: %d in %s", what, len(plan), folder)
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
                    with atomic_file(folder / sample.name) as aside:
                        save(output, aside)
        finally:
            pipeline.set_progress_bar_config(**{"disable": False, **bars})
        state.wait_for_everyone()
