"""Models to evaluate: folders, Hub ids and loaded objects, each checked, named and fingerprinted before it is loaded.

A fingerprint covers everything that determines a model's outputs, so that scores cannot be attributed to other weights.
Scores are stored in the model's results file, and a score for the same task and protocol is not measured again.

For pipelines, this module also generates the images and videos that are scored. Every sample has its own seed and file, and
batches whose files all exist are not generated again. Batches are cut from the whole plan, not from the missing samples, and
the global random generator is seeded per batch (DDPM draws from it). Therefore a run that was interrupted gives the same
files as one that was not, on any number of processes.
"""

import contextlib
import dataclasses
import functools
import inspect
import logging
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from tqdm import tqdm

from ..checkpoints.file_io import atomic_file, can_resume, write_json
from ..checkpoints.fingerprint import PIPELINE_INDEX, fingerprint_folder, fingerprint_model
from ..checkpoints.load import choose_device, load_pipeline, read_stored_dtype, resolve_model_name, wrap_errors
from ..checkpoints.provenance import describe_run
from .records import Result, Results, results_path

logger = logging.getLogger("mhla_hf")
VERSION = "1"  # of our own metrics; part of every task hash
IDENTITY = "samples.json"


@dataclasses.dataclass
class Subject:
    """One model to evaluate, and its scores.

    Args:
        name: Name in tables.
        source: Folder, Hub id or loaded object.
        fingerprint: Fingerprint of the weights.
        dtype: Dtype of the parameters, such as "float32"; "auto" for a model on the Hub if `args.dtype` is "auto".
        target: The model's results file; None to write none.
        args: The checked arguments of `evaluate`, an `EvaluationArgs`.
    """

    name: str
    source: Any
    fingerprint: str
    dtype: str
    target: Path | None
    args: Any

    @property
    def loaded(self) -> bool:
        """Whether `source` is an object in memory."""
        return not isinstance(self.source, (str, Path))

    @property
    def load_options(self) -> dict[str, Any]:
        """Keyword arguments for loading the model. The revision of a Hub model is the commit in its fingerprint."""
        origin, _, commit = self.fingerprint.partition(":")
        return {"revision": commit if origin == "hub" else None, "trust_remote_code": self.args.trust_remote_code}

    @functools.cached_property
    def kept(self) -> Results:
        """The stored scores of these weights, read on first use. `knows` decides whether a score can be reused."""
        stored = Results() if self.target is None else Results.read(self.target).of(self.fingerprint)
        if stored and not self.args.force:
            logger.info("%s: the scores in %s are read, not run again", self.name, self.target)
        return stored

    def knows(self, task: str, metric: str, task_hash: str) -> bool:
        """Return whether a score with the same protocol, limit, seed and dtype is in `kept`; with `force`, return False."""
        key = (task, metric, task_hash, self.args.limit, self.args.seed or 0, self.dtype)
        kept_keys = ((r.task, r.metric, r.task_hash, r.limit, r.seed, r.dtype) for r in self.kept)
        return not self.args.force and key in kept_keys

    def store(self, records: Sequence[Result], keep_other_sample_counts: bool = False) -> None:
        """Add newly measured records to the known scores and, if there is one, to the results file; see `Results.merge`.

        Records of other weights are removed from the file.
        """
        self.kept.merge(records, keep_other_sample_counts)
        if self.target is not None:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            stored = Results.read(self.target).of(self.fingerprint)
            stored.merge(records, keep_other_sample_counts).write(self.target)

    def facts(self, device: torch.device | str, task: str | None = None) -> dict[str, Any]:
        """Return the fields of a `Result` that do not depend on the task: about the run, the model, and the limit.

        Args:
            device: The device of the model.
            task: Name of the task that the recorded command is to repeat; None for all tasks of the recipe.
        """
        return {
            **describe_run(self.args.command or format_command([self], task), device),
            "model": self.name if self.loaded else shorten_path(self.source),
            "revision": self.load_options["revision"],
            "fingerprint": self.fingerprint,
            "dtype": self.dtype,
            "limit": self.args.limit,
        }

    def keep(
        self,
        task: str,
        scores: Mapping[str, tuple[Any, ...]],
        task_hash: str,
        started: float,
        device: torch.device | str,
        keep_other_sample_counts: bool = False,
    ) -> None:
        """Store scores of metrics that are implemented in this package.

        Args:
            task: Name of the task.
            scores: Dict from metric to (value, standard error, higher is better, samples).
            task_hash: Hash of the protocol and its data.
            started: `time.perf_counter()` at the start of the measurement.
            device: The device of the model.
            keep_other_sample_counts: See `Results.merge`.
        """
        facts = {
            **self.facts(device),
            "task": task,
            "shots": 0,
            "task_version": VERSION,
            "task_hash": task_hash,
            "seed": self.args.seed or 0,
            "seconds": round(time.perf_counter() - started, 3),
        }
        names = ("value", "stderr", "higher_is_better", "samples")
        fields = {metric: dict(zip(names, score, strict=True)) for metric, score in scores.items()}
        records = [Result(metric=metric, **values, **facts) for metric, values in fields.items()]
        self.store(records, keep_other_sample_counts)


def format_command(subjects: Sequence[Subject], task: str | None = None) -> str:
    """Return the shell command that repeats an evaluation.

    Args:
        subjects: The evaluated models.
        task: The only task to repeat, if the recipe has a task of that name; else all tasks are repeated.
    """
    args = subjects[0].args
    recipe = subjects[0].args.recipe
    models = [subject.name if subject.loaded else shorten_path(subject.source) for subject in subjects]
    words = ["mhla-hf", "evaluate", *models, *(["--recipe", shorten_path(recipe.name)] if recipe.name else [])]
    for name, value in recipe.changed.items():
        value = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else getattr(value, "name", value)
        words += ["--set", f"{name}={shorten_path(value) if isinstance(value, str) else value}"]
    words += ["--tasks", str(task) if task in recipe.tasks else ",".join(recipe.tasks)]
    for path in list_paths(args.include_path):
        words += ["--include-path", shorten_path(path)]
    if args.data_files is not None:
        words += ["--data-files", shorten_path(args.data_files)]
    for name in ("num_fewshot", "limit", "batch_size", "seed", "dtype", "max_length", "revision"):
        if (value := getattr(args, name)) is not None and (name, value) != ("dtype", "auto"):
            words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words + ["--trust-remote-code"] * args.trust_remote_code)


def list_paths(paths: str | Path | Sequence[str | Path] | None) -> list[str]:
    """Return a path, a sequence of paths or None as a list of strings."""
    return [str(path) for path in ([paths] if isinstance(paths, (str, Path)) else paths or [])]


def find_subjects(models: object, args: Any, pipeline: bool = False) -> list[Subject]:
    """Check the models passed to `evaluate`, without loading them.

    Args:
        models: See `evaluate`.
        args: The checked arguments of `evaluate`.
        pipeline: Whether the models must be diffusers pipelines.

    Returns:
        One `Subject` per model.

    Raises:
        ValueError, TypeError: A model, `output` or an existing results file is not valid.
    """
    models = name_models(models)
    output = args.output and Path(args.output)
    files = dict.fromkeys(models, output)
    if output and output.suffix != ".json":
        files = {name: output / f"{name.replace('/', '--')}.json" for name in models}
    elif output and len(models) > 1:
        raise ValueError(f"output: got {str(output)!r} for {len(models)} models, expected a folder.")
    return [_make_subject(name, model, files[name], args, pipeline) for name, model in models.items()]


def name_models(models: Any) -> dict[str, Any]:
    """Return a dict from name to model.

    A folder is named after its last component, or after the last two if several folders have the same last one. A Hub id is
    its own name, and a loaded model is named after its class.

    Args:
        models: A folder, Hub id or object; a list of them; or a dict from names to them.

    Raises:
        ValueError: There is no model, or two models have the same name.
    """
    if not isinstance(models, dict):
        model_list = models if isinstance(models, (list, tuple)) else [models]
        parts: list[tuple[str, ...]] = [(type(model).__name__,) for model in model_list]
        for index, model in enumerate(model_list):
            if isinstance(model, (str, Path)):
                parts[index] = Path(model).resolve().parts if Path(model).exists() else (str(model),)
        last = [part[-1] for part in parts]
        names = ["/".join(part[-2:]) if last.count(part[-1]) > 1 else part[-1] for part in parts]
        if duplicates := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(
                f"models: got {duplicates[0]!r} twice, expected each once, or a dict from names to models."
            )
        models = dict(zip(names, model_list, strict=True))
    if not models:
        raise ValueError("models: got none, expected at least one folder, Hub id or model.")
    return {str(name): model for name, model in models.items()}


def _make_subject(name: str, model: Any, target: Path | None, args: Any, pipeline: bool) -> Subject:
    """Check a model and its results file, and return a `Subject`.

    Args:
        name: Name in tables.
        model: Folder, Hub id or loaded object.
        target: The results file; None means the one in the model's folder, or none if it has no folder.
        args: The checked arguments of `evaluate`.
        pipeline: Whether the model must be a diffusers pipeline.

    Raises:
        ValueError, TypeError: The model is not valid, or the results file cannot be read or written.
    """
    dtype = args.dtype
    if isinstance(model, (str, Path)):
        if not pipeline and (Path(model) / PIPELINE_INDEX).is_file():
            raise ValueError(
                f"models: got the pipeline {str(model)!r}, expected a recipe for images or videos with it."
            )
        source = resolve_model_name(model, pipeline=pipeline)
        if isinstance(source, Path):
            fingerprint = fingerprint_folder(source)
            target = target or results_path(source)
            if dtype == "auto":
                dtype = "float32" if pipeline else read_stored_dtype(source)
        else:
            with wrap_errors(f"models: got {source!r}, expected a folder or a model on the Hub"):
                fingerprint = f"hub:{HfApi().model_info(source, revision=args.revision).sha}"
    else:
        if not (hasattr(model, "components") if pipeline else isinstance(model, torch.nn.Module)):
            expected = "diffusers pipeline" if pipeline else "model of transformers"
            raise TypeError(
                f"models: got {name!r} of type {type(model).__name__}, expected a folder, a Hub id or a loaded {expected}."
            )
        fingerprint = fingerprint_model(model)
        dtype = str(model.dtype).removeprefix("torch.")
    if target is not None:
        check_writable(target)
        Results.read(target)
    return Subject(name, model, fingerprint, dtype, target, args)


def check_writable(target: Path) -> None:
    """Raise ValueError if the file `target` cannot be written, without creating it."""
    folder = target.parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK) or target.is_dir():
        raise ValueError(f"output: got {str(target)!r}, which cannot be written, expected another file or folder.")


def shorten_path(path: Any) -> str:
    """Return a path for records and cards: relative to the working folder, or only its last component if outside.

    Anything that does not exist on disk, such as a Hub id, is returned unchanged.
    """
    path = Path(path)
    if not path.exists():
        return str(path)
    resolved = path.resolve()
    working_folder = Path.cwd().resolve()
    return str(resolved.relative_to(working_folder)) if resolved.is_relative_to(working_folder) else resolved.name


@contextlib.contextmanager
def joined_processes() -> Iterator[Any]:
    """Context manager that yields Accelerate's `PartialState`. If there is no error, it waits for all processes at the end.

    If there is only one process, and no state existed before, the state is reset at the end. Otherwise processes that are
    forked later would inherit it, and each would act as the only process.
    """
    from accelerate import PartialState

    fresh = not PartialState._shared_state
    state = PartialState(cpu=not torch.cuda.is_available())
    try:
        yield state
        state.wait_for_everyone()
    finally:
        if fresh and state.num_processes == 1:
            PartialState._reset_state()


def broadcast_scores(subject: Subject, state: Any) -> None:
    """Set `subject.kept` in all processes to its value in the main process. All processes must call this."""
    from accelerate.utils import broadcast_object_list

    subject.kept = broadcast_object_list([subject.kept if state.is_main_process else None])[0]


@dataclasses.dataclass(frozen=True)
class Sample:
    """One file to generate.

    Args:
        name: Name of the file, relative to the folder.
        condition: Class label (int), prompt (str) or None.
        seed: Seed of this sample.
    """

    name: str
    condition: Any
    seed: int


def seed_of_sample(seed: int, index: int) -> int:
    """Return the seed of sample `index` in a run with `seed`.

    For seeds below 2**31 and indices below 2**32, it is different for every pair, and below 2**63.
    """
    return (seed % 2**31) * 2**32 + index


class PipelineJudge:
    """Generates the samples of one pipeline under a protocol; subclasses score them.

    All processes must create it, since its constructor sends the known scores of the main process to the others.

    Args:
        subject: The pipeline.
        args: The checked arguments of `evaluate`.
        protocol: `ImageProtocol` or `VideoProtocol`.
        state: Accelerate's `PartialState`.
    """

    def __init__(self, subject: Subject, args: Any, protocol: Any, state: Any) -> None:
        self.subject = subject
        self.args = args
        self.protocol = protocol
        self.state = state
        self.seed = args.seed or 0
        self.progress = args.progress and state.is_main_process
        source_device = getattr(subject.source, "device", None) if subject.loaded else None
        self.device = choose_device(source_device or args.device or state.device)
        self.folder = Path(protocol.samples) / subject.name.replace("/", "--")  # this model's samples
        broadcast_scores(subject, state)

    @functools.cached_property
    def pipeline(self) -> Any:
        """The pipeline, loaded on first use. A pipeline that was passed as an object stays on its device."""
        if self.subject.loaded:
            return self.subject.source
        return load_pipeline(
            self.subject.source, dtype=self.subject.dtype, device=self.device, **self.subject.load_options
        )

    def make(
        self,
        folder: Path,
        plan: Sequence[Sample],
        identity: dict[str, Any],
        sampling: Mapping[str, Any],
        save: Callable[[Any, Path], object],
        *,
        batch_size: int,
        label: str,
    ) -> None:
        """Generate the samples of a plan, except for batches whose files all exist.

        All processes must call this. It seeds torch's global random generator for each batch.

        Args:
            folder: Folder of the samples.
            plan: All samples.
            identity: JSON-serializable dict of everything that determines the samples except weights, dtype and
                `sampling`.
            sampling: Further arguments of the pipeline.
            save: Called as `save(image_or_frames, path)` to write a file.
            batch_size: Samples per call of the pipeline.
            label: Label of the progress bar.

        Raises:
            ValueError: The folder contains samples of something else, or the pipeline does not take the plan's conditions.
        """
        pipeline, state = self.pipeline, self.state
        argument = {int: "class_labels", str: "prompt", type(None): None}[type(plan[0].condition)]
        if argument is not None and argument not in inspect.signature(pipeline.__call__).parameters:
            raise ValueError(f"models: got {type(pipeline).__name__}, expected a pipeline that takes {argument}.")
        if state.is_main_process:
            record = {"fingerprint": self.subject.fingerprint, "dtype": self.subject.dtype, "sampling": sampling}
            record.update(identity)
            if not can_resume(folder, IDENTITY, record, "samples"):
                folder.mkdir(parents=True, exist_ok=True)
                write_json(folder / IDENTITY, record)
            logger.info("%s: %d in %s", label, len(plan), folder)
        state.wait_for_everyone()
        batches = [plan[start : start + batch_size] for start in range(0, len(plan), batch_size)]
        local_batches = [
            batch
            for batch in batches[state.process_index :: state.num_processes]
            if not all((folder / sample.name).is_file() for sample in batch)
        ]
        bar_config = getattr(pipeline, "_progress_bar_config", {})
        pipeline.set_progress_bar_config(disable=True)
        try:
            for batch in tqdm(local_batches, desc=label, unit="batch", disable=not self.progress):
                torch.manual_seed(batch[0].seed)
                conditions = {} if argument is None else {argument: [sample.condition for sample in batch]}
                generators = [torch.Generator().manual_seed(sample.seed) for sample in batch]
                result = pipeline(**conditions, generator=generators, **sampling)
                outputs = result.frames if hasattr(result, "frames") else result.images
                for sample, output in zip(batch, outputs, strict=True):
                    (folder / sample.name).parent.mkdir(parents=True, exist_ok=True)
                    with atomic_file(folder / sample.name) as temporary:
                        save(output, temporary)
        finally:
            pipeline.set_progress_bar_config(**{"disable": False, **bar_config})
        state.wait_for_everyone()
