"""Models to evaluate (folders, Hub ids and loaded objects), checked, named and fingerprinted before they are loaded.

For pipelines, this module also generates the images and videos that are scored. Each sample has its own seed, and each
batch seeds the global generator, from which DDPM draws. Batches are cut from the whole plan, not from the missing samples,
so an interrupted run makes the same files as any other, on any number of processes.
"""

import contextlib
import dataclasses
import inspect
import logging
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from huggingface_hub import HfApi
from tqdm import tqdm

from ..checkpoints.file_io import atomic_file, can_resume, check_writable, resolve_model_name, wrap_errors, write_json
from ..checkpoints.fingerprint import PIPELINE_INDEX, fingerprint_folder, fingerprint_model, hash_json
from ..checkpoints.load import choose_device, load_config, load_pipeline, read_stored_dtype
from ..checkpoints.provenance import describe_run
from .records import Result, Results, results_path

logger = logging.getLogger("mhla_hf")
VERSION = "1"  # of our own metrics; stored with each score, and part of its task hash
IDENTITY = "samples.json"


@dataclasses.dataclass
class Subject:
    """One model to evaluate, and its scores."""

    name: str
    source: Any
    fingerprint: str
    dtype: str  # of the parameters; may be "auto" for a model on the Hub
    target: Path | None  # its results file
    kept: Results  # the stored scores of these weights
    args: Any

    @property
    def loaded(self) -> bool:
        return not isinstance(self.source, (str, Path))

    @property
    def load_options(self) -> dict[str, Any]:
        """Arguments for loading the model; the revision of a Hub model is the commit in its fingerprint."""
        origin, _, commit = self.fingerprint.partition(":")
        return {"revision": commit if origin == "hub" else None, "trust_remote_code": self.args.trust_remote_code}

    def load(self, loader: Callable[..., tuple[Any, Any]], device: Any = None) -> tuple[Any, Any]:
        """Load the model and its tokenizer or image processor by `loader`; for a loaded model, return it and None."""
        if self.loaded:
            return self.source, None
        return loader(self.source, dtype=self.args.dtype, device=device or self.args.device, **self.load_options)

    def knows(self, **fields: Any) -> bool:
        """Return whether a stored score with these fields, and this evaluation's limit, seed and dtype, can be reused."""
        fields = {"limit": self.args.limit, "seed": self.args.seed or 0, "dtype": self.dtype, **fields}
        return not self.args.force and bool(self.kept.where(**fields))

    def store(self, records: Sequence[Result]) -> None:
        """Add records to the known scores and to the results file, from which scores of other weights are removed."""
        stored = self.kept if self.target is None else Results.read(self.target).where(fingerprint=self.fingerprint)
        self.kept = stored.merge(records, keep_other_sample_counts=self.args.recipe.kind == "image")
        if self.target is not None:
            self.kept.write(self.target)
            tasks = ", ".join(dict.fromkeys(record.task for record in records))
            logger.info("%s: the scores of %s are stored in %s", self.name, tasks, self.target)

    def provenance(self, device: torch.device | str, task: str | None = None) -> dict[str, Any]:
        """Return the fields of a `Result` that say what was run, when, and on which weights."""
        return {
            **describe_run(self.args.command or format_command([self], task), device),
            "model": self.name if self.loaded else shorten_path(self.source),
            "revision": self.load_options["revision"],
            "fingerprint": self.fingerprint,
            "dtype": self.dtype,
            "limit": self.args.limit,
        }

    def store_scores(self, task: str, scores: Mapping[str, tuple], task_hash: str, started: float, device: Any) -> None:
        """Store `scores` of our own metrics, {metric: (value, standard error or None, higher is better, samples)}.

        `started` is the `time.perf_counter` at which the measurement began.
        """
        facts = {**self.provenance(device), "task": task, "task_hash": task_hash, "task_version": VERSION}
        facts |= {"shots": 0, "seed": self.args.seed or 0, "seconds": round(time.perf_counter() - started, 3)}
        self.store([
            Result(metric=metric, value=value, stderr=stderr, higher_is_better=is_better, samples=samples, **facts)
            for metric, (value, stderr, is_better, samples) in scores.items()
        ])  # fmt: skip


def format_command(subjects: Sequence[Subject], task: str | None = None) -> str:
    """Return the shell command that repeats an evaluation, restricted to `task` if the recipe has it."""
    args, recipe = subjects[0].args, subjects[0].args.recipe
    options: list[tuple[str, Any]] = [("recipe", recipe.name or None)]
    for name, value in recipe.changed.items():
        value = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else value
        value = getattr(value, "name", value) if callable(value) else value  # an `Extractor`
        options.append(("set", f"{name}={shorten_path(value)}"))
    options.append(("tasks", task if task in recipe.tasks else ",".join(recipe.tasks)))
    options += [("include-path", path) for path in args.include_path]
    names = ("data_files", "num_fewshot", "limit", "batch_size", "seed", "dtype", "max_length", "revision")
    options += [(name.replace("_", "-"), getattr(args, name)) for name in names]
    words = ["mhla-hf", "evaluate", *(x.name if x.loaded else shorten_path(x.source) for x in subjects)]
    for name, value in options:
        if value is not None and (name, value) != ("dtype", "auto"):
            words += [f"--{name}", shorten_path(value)]
    return shlex.join(words + ["--trust-remote-code"] * args.trust_remote_code)


def find_subjects(models: Any, args: Any, pipeline: bool = False) -> list[Subject]:
    """Check the models passed to `evaluate`, without loading them, and name them after their class or path."""
    if not isinstance(models, dict):
        model_list = models if isinstance(models, (list, tuple)) else [models]
        titles = [model if isinstance(model, (str, Path)) else type(model).__name__ for model in model_list]
        parts = [Path(title).resolve().parts if os.path.exists(title) else (str(title),) for title in titles]
        last = [part[-1] for part in parts]
        names = ["/".join(part[-2:]) if last.count(part[-1]) > 1 else part[-1] for part in parts]
        if duplicates := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"models: got {duplicates[0]!r} twice, expected each once, or a dict {{name: model}}.")
        models = dict(zip(names, model_list, strict=True))
    if not models:
        raise ValueError("models: got none, expected at least one folder, Hub id or model.")
    if args.output and Path(args.output).suffix == ".json" and len(models) > 1:
        raise ValueError(f"output: got {str(args.output)!r} for {len(models)} models, expected a folder.")
    return [_make_subject(str(name), model, args, pipeline) for name, model in models.items()]


def _make_subject(name: str, model: Any, args: Any, pipeline: bool) -> Subject:
    """Check a model and its results file, and return a `Subject`. Without `output`, only models in folders store results."""
    dtype, target = args.dtype, Path(args.output) if args.output else None
    if target and target.suffix != ".json":
        target /= f"{name.replace('/', '--')}.json"
    if isinstance(model, (str, Path)):
        if not pipeline and (Path(model) / PIPELINE_INDEX).is_file():
            raise ValueError(f"models: got the pipeline {str(model)!r}, expected a model, or a recipe for pipelines.")
        source = resolve_model_name(model, pipeline=pipeline)
        if isinstance(source, Path):
            fingerprint = fingerprint_folder(source)
            target = target or results_path(source)
            if dtype == "auto":
                dtype = "float32" if pipeline else read_stored_dtype(source)
        else:
            with wrap_errors(f"models: got {source!r}, expected a folder or a model on the Hub"):
                commit = HfApi().model_info(source, revision=args.revision).sha
                if dtype == "auto" and not pipeline:
                    config = load_config(source, revision=commit, trust_remote_code=args.trust_remote_code)
                    dtype = str(config.dtype or "auto").removeprefix("torch.")
            fingerprint = f"hub:{commit}"
    else:
        if not (hasattr(model, "components") if pipeline else isinstance(model, torch.nn.Module)):
            expected = f"a folder, a Hub id or a loaded {'diffusers pipeline' if pipeline else 'model of transformers'}"
            raise TypeError(f"models: got {name!r} of type {type(model).__name__}, expected {expected}.")
        fingerprint = fingerprint_model(model)
        dtype = str(model.dtype).removeprefix("torch.")
    if target is not None:
        check_writable(target, "output")
    kept = Results.read(target).where(fingerprint=fingerprint) if target else Results()
    if kept and not args.force:
        logger.info("%s: the scores in %s are read, not run again", name, target)
    return Subject(name, model, fingerprint, dtype, target, kept, args)


def shorten_path(path: Any) -> str:
    """Return an existing path relative to the working folder, or its name if it is outside; leave other text unchanged."""
    if not os.path.exists(str(path)):
        return str(path)
    resolved, here = Path(path).resolve(), Path.cwd().resolve()
    return str(resolved.relative_to(here)) if resolved.is_relative_to(here) else resolved.name


@contextlib.contextmanager
def joined_processes() -> Iterator[Any]:
    """Yield Accelerate's `PartialState`, and wait for all processes at the end."""
    fresh = not PartialState._shared_state
    state = PartialState(cpu=not torch.cuda.is_available())
    try:
        yield state
        state.wait_for_everyone()
    finally:
        if fresh and state.num_processes == 1:  # forked processes would inherit it
            PartialState._reset_state()


def broadcast_scores(subject: Subject) -> None:
    """Set `subject.kept` to its value in the main process. All processes must call this."""
    subject.kept = broadcast_object_list([subject.kept])[0]


class Sample(NamedTuple):
    """One file to generate."""

    name: str
    condition: Any  # class label, prompt, or None
    seed: int


def seed_of_sample(seed: int, index: int) -> int:
    """Return a seed below 2**63, different for every pair of a seed below 2**31 and an index below 2**32."""
    return (seed % 2**31) * 2**32 + index


class PipelineJudge:
    """Scores one pipeline on `task`; subclasses set the attributes below. All processes must create it, and call `run`."""

    noun: str  # what the samples are
    output_type: str  # of the pipeline
    save: Any  # method that writes an output of the pipeline to a path
    measure: Any  # method that generates the samples for a list of metrics; in the main process, it stores the scores
    totals: tuple[str, ...] = ()  # metrics that are computed from others

    def __init__(self, subject: Subject, protocol: Any, state: Any, task: str, content: Sequence[Any]) -> None:
        """`content` is what determines the scores, besides the model, the seed and the limit."""
        self.subject, self.protocol, self.state = subject, protocol, state
        self.task, self.hash = task, hash_json([VERSION, *content])
        self.args = args = subject.args
        self.labels = {metric: metric for metric in args.recipe.tasks}  # metric -> its name in tables
        self.seed = args.seed or 0
        self.progress = args.progress and state.is_main_process
        self.device = choose_device(getattr(subject.source, "device", None) or args.device or state.device)
        self.folder = Path(protocol.samples) / subject.name.replace("/", "--")  # this model's samples
        broadcast_scores(subject)

    def run(self) -> Results:
        """Return all requested scores, after measuring those that are not known."""
        key = {"task": self.task, "task_hash": self.hash}
        if missing := [x for x, label in self.labels.items() if not self.subject.knows(metric=label, **key)]:
            self.measure(missing)
        scores = self.subject.kept.where(limit=self.args.limit, **key)
        return Results(record for record in scores if record.metric in {*self.labels.values(), *self.totals})

    def make(self, folder: Path, plan: Sequence[Sample], identity: dict[str, Any], batch_size: int) -> None:
        """Generate the samples of `plan` into `folder`, except for batches whose files all exist.

        `identity` is what determines the samples, besides the weights, their dtype, and the arguments of the pipeline.
        """
        pipeline, state, label = self.subject.source, self.state, f"{self.subject.name}: {self.noun}"
        sampling = {"output_type": self.output_type, **self.protocol.sampling}
        if not self.subject.loaded:
            options = {"dtype": self.subject.dtype, "device": self.device, **self.subject.load_options}
            pipeline = load_pipeline(pipeline, **options)
        argument = {int: "class_labels", str: "prompt", type(None): None}[type(plan[0].condition)]
        if argument is not None and argument not in inspect.signature(pipeline.__call__).parameters:
            raise ValueError(f"models: got {type(pipeline).__name__}, expected a pipeline that takes {argument}.")
        if state.is_main_process:
            weights = {"fingerprint": self.subject.fingerprint, "dtype": self.subject.dtype}
            identity = {**weights, "sampling": sampling, **identity}
            if not can_resume(folder, IDENTITY, identity, "samples"):
                write_json(folder / IDENTITY, identity)
            logger.info("%s: %d in %s", label, len(plan), folder)
        state.wait_for_everyone()
        batches = [plan[start : start + batch_size] for start in range(0, len(plan), batch_size)]
        mine = batches[state.process_index :: state.num_processes]
        missing = [batch for batch in mine if not all((folder / sample.name).is_file() for sample in batch)]
        bar_config = getattr(pipeline, "_progress_bar_config", {})
        pipeline.set_progress_bar_config(disable=True)
        try:
            for batch in tqdm(missing, desc=label, unit="batch", disable=not self.progress):
                torch.manual_seed(batch[0].seed)
                conditions = {} if argument is None else {argument: [sample.condition for sample in batch]}
                generators = [torch.Generator().manual_seed(sample.seed) for sample in batch]
                result = pipeline(**conditions, generator=generators, **sampling)
                outputs = result.frames if hasattr(result, "frames") else result.images
                for sample, output in zip(batch, outputs, strict=True):
                    with atomic_file(folder / sample.name) as temporary:
                        self.save(output, temporary)
        finally:
            pipeline.set_progress_bar_config(**{"disable": False, **bar_config})
        state.wait_for_everyone()
