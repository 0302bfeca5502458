"""evaluate(): language models, one or several, on lm-eval tasks; only what is missing is run.

What is missing is decided before a model is loaded: a score counts when task, hash of the task, shots, limit, seeds, window,
precision and the fingerprint of the weights are those asked for. Scores go into results.json beside the model after every
task, so a stopped evaluation continues. Unusual: lm-eval is imported when it is needed, and only `harness.py` knows it.
"""

import dataclasses
import logging
import math
import os
import shlex
from pathlib import Path

import torch

from .loading import DTYPES, check_model_name, choose_device, load_language_model, stored_dtype
from .machine import describe_hardware, describe_versions, now, source_commit
from .results import Results, fingerprint_folder, fingerprint_model, render_table, results_path

logger = logging.getLogger("mhla_hf")


class Comparison(dict):
    """name -> `Results` of what was asked for, in the order of the models; `table()` shows them side by side."""

    def table(self, style="text"):
        """The scores with their standard errors. style: "text" for a terminal or "markdown"."""
        return render_table(self, style=style)

    def __str__(self):
        return self.table()


@dataclasses.dataclass
class _Subject:
    """One model to judge. source: folder, Hub id or loaded model. target: its results file, or None to write none."""

    name: str
    source: object
    fingerprint: str
    dtype: str
    target: Path | None


@dataclasses.dataclass
class _Asked:
    """How the user wants it done; see `evaluate`."""

    tasks: list
    include_path: object
    num_fewshot: int | None
    limit: int | float | None
    batch_size: object
    seed: int | None
    dtype: str
    device: str | None
    max_length: int | None
    revision: str | None
    trust_remote_code: bool
    command: str | None


def evaluate(
    models,
    tasks,
    *,
    tokenizer=None,
    output=None,
    include_path=None,
    num_fewshot=None,
    limit=None,
    batch_size=8,
    seed=None,
    dtype="auto",
    device=None,
    max_length=None,
    revision=None,
    trust_remote_code=False,
    force=False,
    progress=True,
    command=None,
):
    """Judge language models on lm-eval tasks; the numbers are those of `lm_eval --model hf`.

    Args:
        models: a folder, a Hub id or a loaded causal language model; or a list of folders and ids; or a dict name -> any.
        tasks: names of lm-eval tasks, groups or tags, or patterns with *; a list or one text with commas.
        tokenizer: for loaded models; else it comes with the model.
        output: where the scores are kept: a .json file (one model) or a folder (one file per model). Default:
            results.json in a local model's folder; nothing is written for Hub ids and loaded models.
        include_path: folder, or list of folders, with further tasks, such as `make_tasks` writes.
        num_fewshot: examples in the prompt; None: the task's own number, and never more where a task says 0.
        limit: documents per task, or a share of them below 1; for trying out.
        batch_size: int, or "auto". seed: None gives lm-eval's own seeds, an int sets all of them.
        dtype: "auto" (the checkpoint's), "float32", "bfloat16", "float16". device: as torch names it; None: CUDA if any.
        max_length: tokens the model sees at once; None: the configuration's.
        revision, trust_remote_code: as in transformers. MHLA models need no remote code here.
        force: run again what is known. progress: bars on stderr.
        command: the shell line to keep with the scores; None: the `mhla-hf evaluate` line that gives them again.

    Returns:
        `Comparison`: dict name -> `Results` with the scores asked for.

    Raises:
        ValueError, TypeError: one sentence; whatever can be checked is checked before a model runs. ImportError: lm-eval
        is missing; the text has the line that installs it.
    """
    asked = _Asked(
        tasks=split_names(tasks),
        include_path=include_path,
        num_fewshot=num_fewshot,
        limit=limit,
        batch_size=batch_size,
        seed=seed,
        dtype=dtype,
        device=device,
        max_length=max_length,
        revision=revision,
        trust_remote_code=trust_remote_code,
        command=command,
    )
    _check(asked)
    harness = import_harness()
    subjects = _subjects(models, tokenizer, output, asked)
    with harness.quiet_harness(bars_too=not progress):
        requested = harness.load_tasks(asked.tasks, include_path, num_fewshot)
    compared = Comparison()
    for subject in subjects:
        kept = Results() if subject.target is None else Results.read(subject.target)
        missing = [item for item in requested if force or _missing(item, kept, subject, asked)]
        if not missing:
            logger.info("%s: every score is known already", subject.name)
        else:
            kept = _judge(harness, subject, missing, kept, tokenizer, asked, progress)
        compared[subject.name] = _wanted(kept.of(subject.fingerprint), requested, limit)
    return compared


def evaluate_language(model, tasks, **options):
    """The scores of one model as a list of `Result`; arguments as in `evaluate`."""
    return next(iter(evaluate({"model": model}, tasks, **options).values())).records


def import_harness():
    """The module that runs lm-eval. ImportError with the line that installs what is missing."""
    try:
        from . import harness
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("mhla_hf"):
            raise
        raise ImportError(f"evaluate needs {error.name}, which is missing: pip install 'mhla_hf[eval]'") from error
    return harness


def split_names(tasks):
    """Task names from a list or from one text with commas. ValueError when none is left."""
    if isinstance(tasks, str):
        tasks = tasks.split(",")
    if not isinstance(tasks, (list, tuple)) or not all(isinstance(name, str) for name in tasks):
        raise TypeError(f"tasks is {tasks!r}; expected task names in a list or separated by commas")
    names = [name.strip() for name in tasks if name.strip()]
    if not names:
        raise ValueError("tasks is empty; expected at least one task name")
    return names


def _check(asked):
    whole = {"num_fewshot": (asked.num_fewshot, 0), "seed": (asked.seed, 0), "max_length": (asked.max_length, 2)}
    for name, (value, least) in whole.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise ValueError(f"{name} is {value!r}; expected an integer of at least {least}")
    limit, size = asked.limit, asked.batch_size
    number = isinstance(limit, (int, float)) and not isinstance(limit, bool) and math.isfinite(limit)
    if limit is not None and not (number and limit > 0 and (limit < 1 or limit == int(limit))):
        raise ValueError(f"limit is {limit!r}; expected a whole number of documents, or a share below 1")
    if size != "auto" and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
        raise ValueError(f'batch_size is {size!r}; expected an integer of at least 1 or "auto"')
    if asked.dtype != "auto" and asked.dtype not in DTYPES:
        raise ValueError(f"dtype is {asked.dtype!r}; expected auto, {', '.join(DTYPES)}")
    choose_device(asked.device)


def _subjects(models, tokenizer, output, asked):
    """What was given as `models`, each checked, named and fingerprinted; nothing is loaded yet."""
    if not isinstance(models, dict):
        listed = models if isinstance(models, (list, tuple)) else [models]
        models = {}
        for model in listed:
            name = _default_name(model)
            models[name if name not in models else str(model)] = model
    if not models:
        raise ValueError("models is empty; expected at least one folder, Hub id or model")
    single_file = output is not None and str(output).endswith(".json")
    if single_file and len(models) > 1:
        raise ValueError(f"output {str(output)!r} is one file for {len(models)} models; expected a folder")
    return [_subject(name, model, tokenizer, output, single_file, asked) for name, model in models.items()]


def _default_name(model):
    if isinstance(model, (str, Path)):
        path = Path(model)
        return path.resolve().name if path.exists() else str(model)
    return type(model).__name__


def _subject(name, model, tokenizer, output, single_file, asked):
    target = None
    if output is not None:
        target = Path(output) if single_file else Path(output) / f"{str(name).replace('/', '--')}.json"
    if isinstance(model, torch.nn.Module):
        if tokenizer is None:
            raise ValueError(f"tokenizer is None; a loaded model such as {name!r} needs one")
        fingerprint, dtype = fingerprint_model(model), str(model.dtype).removeprefix("torch.")
    elif isinstance(model, (str, Path)):
        source = check_model_name(model)
        if isinstance(source, Path):
            fingerprint, target = fingerprint_folder(source), target or results_path(source)
            dtype = stored_dtype(source) if asked.dtype == "auto" else asked.dtype
        else:
            fingerprint, dtype = _hub_fingerprint(source, asked.revision), asked.dtype
    else:
        raise TypeError(f"model {name!r} is {type(model).__name__}; expected a folder, a Hub id or a loaded model")
    if target is not None:
        _check_writable(target)
        Results.read(target)
    return _Subject(str(name), model, fingerprint, dtype, target)


def _hub_fingerprint(name, revision):
    """ "hub:" + the commit that `revision` of a Hub model is now. ValueError when the Hub does not give it."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        return f"hub:{HfApi().model_info(name, revision=revision).sha}"
    except (HfHubHTTPError, OfflineModeIsEnabled, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"model {name!r} is no folder here, and the Hub does not give it: {reason}") from error


def _check_writable(target):
    folder = target.parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK) or target.is_dir():
        raise ValueError(f"results cannot be written to {str(target)!r}; give another place as output")


def _missing(item, kept, subject, asked):
    """Whether one of the names that `item` scores has no record of exactly what is asked for."""
    hashes, shots = item.hashes(), item.shots()
    seed = seed_of(asked)
    for name in item.scored_names():
        found = any(
            record.task == name
            and record.task_hash == hashes[name]
            and record.shots == shots[name]
            and (record.limit, record.seed, record.dtype) == (asked.limit, seed, subject.dtype)
            and record.fingerprint == subject.fingerprint
            and asked.max_length in (None, record.window)
            for record in kept
        )
        if not found:
            return True
    return False


def _wanted(kept, requested, limit):
    """Of all scores that are kept, those that were asked for."""
    shots = {name: number for item in requested for name, number in item.shots().items()}
    names = {name for item in requested for name in item.scored_names()}
    return Results(
        record
        for record in kept
        if record.task in names and record.limit == limit and record.shots == shots[record.task]
    )


def seed_of(asked):
    """The seed as records keep it: the user's, or lm-eval's own four as text."""
    return "0,1234,1234,1234" if asked.seed is None else asked.seed


def _judge(harness, subject, missing, kept, tokenizer, asked, progress):
    """Run what is missing on one model; its file is written after each task. Returns all its records."""
    if isinstance(subject.source, torch.nn.Module):
        model, was_training = subject.source, subject.source.training
    else:
        where = {"revision": asked.revision, "trust_remote_code": asked.trust_remote_code}
        model, tokenizer = load_language_model(subject.source, dtype=asked.dtype, device=asked.device, **where)
        was_training = False
    facts = {
        "model": shown_path(subject.source) if isinstance(subject.source, (str, Path)) else subject.name,
        "revision": getattr(model.config, "_commit_hash", None),
        "fingerprint": subject.fingerprint,
        "versions": describe_versions(),
        "commit": source_commit(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "hardware": describe_hardware(model.device),
        "seed": seed_of(asked),
    }
    seeds = harness.HARNESS_SEEDS if asked.seed is None else (asked.seed,) * 4
    try:
        with harness.quiet_harness(bars_too=not progress):
            judge = harness.MHLALM(
                pretrained=model, tokenizer=tokenizer, batch_size=asked.batch_size, max_length=asked.max_length
            )
        judge.quiet = not progress
        for number, item in enumerate(missing, 1):
            logger.info("%s: %s (%d of %d)", subject.name, item.name, number, len(missing))
            command = asked.command or _command(item.name, facts["model"], asked)
            shared = {**facts, "command": command, "date": now()}
            kept = kept.of(subject.fingerprint)
            kept.merge(harness.score(judge, item, limit=asked.limit, seeds=seeds, facts=shared))
            if subject.target is not None:
                subject.target.parent.mkdir(parents=True, exist_ok=True)
                kept.write(subject.target)
    finally:
        model.train(was_training)
    return kept


def shown_path(path):
    """A path fit for records and cards: relative to the working folder, or the last part where it lies elsewhere."""
    path = Path(path)
    if not path.exists():
        return str(path)
    resolved, here = path.resolve(), Path.cwd().resolve()
    return str(resolved.relative_to(here)) if resolved.is_relative_to(here) else resolved.name


def _command(task, model, asked):
    """The shell line that gives a task's scores again."""
    words = ["mhla-hf", "evaluate", model, "--tasks", task]
    paths = [asked.include_path] if isinstance(asked.include_path, (str, Path)) else asked.include_path or []
    for path in paths:
        words += ["--include-path", shown_path(path)]
    options = {
        "--num-fewshot": asked.num_fewshot,
        "--limit": asked.limit,
        "--batch-size": asked.batch_size,
        "--seed": asked.seed,
        "--dtype": None if asked.dtype == "auto" else asked.dtype,
        "--max-length": asked.max_length,
        "--revision": asked.revision,
    }
    for option, value in options.items():
        words += [] if value is None else [option, str(value)]
    return shlex.join(words + (["--trust-remote-code"] if asked.trust_remote_code else []))
