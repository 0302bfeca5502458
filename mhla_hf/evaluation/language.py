"""Judging language models with lm-eval: the numbers of `lm_eval --model hf`, for several models, each once.

What is missing is decided before a model is loaded: a score counts when task, hash of the task, shots, limit, seeds, window,
precision and the fingerprint of the weights are those asked for. Scores go into results.json after every task, so a
stopped evaluation continues. Unusual: lm-eval is imported when it is needed, and only `harness.py` knows it; tasks that are
made here (`needle_*`, RULER) live in a folder for as long as the call.
"""

import contextlib
import functools
import logging
import shlex
import tempfile
from pathlib import Path

import torch

from ..checkpoints.load import load_config, load_language_model, load_tokenizer
from ..checkpoints.machine import describe_hardware, describe_versions, now, source_commit
from .needles import LEAST, PREFIX, make_needles, whole_numbers
from .results import Results
from .subjects import find_subjects, shown_path

logger = logging.getLogger("mhla_hf")
NEEDLE_SETTINGS = ("lengths", "depths", "items")


def judge_language_models(models, asked):
    """name -> `Results` of what was asked for. models: as `evaluate` takes them. asked: an `Asked`."""
    harness = import_harness()
    subjects = find_subjects(models, output=asked.output, dtype=asked.dtype, revision=asked.revision)
    for subject in subjects:
        if subject.loaded and asked.tokenizer is None:
            raise ValueError(f"tokenizer is None; a loaded model such as {subject.name!r} needs one")
    compared = {}
    with made_tasks(subjects, asked) as (paths, metadata):
        with harness.quiet_harness(bars_too=not asked.progress):
            requested = harness.load_tasks(asked.recipe.tasks, paths, asked.num_fewshot, metadata)
        for subject in subjects:
            kept = subject.known(asked)
            window = functools.cache(functools.partial(_window, harness, subject, asked))
            missing = [item for item in requested if asked.force or _missing(item, kept, subject, asked, window)]
            if not missing:
                logger.info("%s: every score is known already", subject.name)
            else:
                kept = _judge(harness, subject, missing, kept, asked)
            compared[subject.name] = _wanted(kept, requested, asked.limit)
    return compared


def import_harness():
    """The module that runs lm-eval. ImportError with the line that installs what is missing."""
    try:
        from . import harness
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("mhla_hf"):
            raise
        raise ImportError(f"evaluate needs {error.name}, which is missing: pip install 'mhla_hf[eval]'") from error
    return harness


@contextlib.contextmanager
def made_tasks(subjects, asked):
    """(folders for lm-eval, metadata for it): the user's, and while this lasts the tasks that the recipe has made here."""
    given = [asked.include_path] if isinstance(asked.include_path, (str, Path)) else list(asked.include_path or [])
    settings = asked.recipe.settings
    if unknown := sorted(set(settings) - set(NEEDLE_SETTINGS)):
        raise ValueError(f"settings: unknown {unknown[0]!r}; a recipe for language has {', '.join(NEEDLE_SETTINGS)}")
    if not settings:
        yield given, None
        return
    tokenizer = asked.tokenizer or load_tokenizer(subjects[0].source, **subjects[0].where(asked))
    with tempfile.TemporaryDirectory(prefix="mhla_hf-tasks-") as place:
        tokenizer.save_pretrained(Path(place) / "tokenizer")
        metadata = {"tokenizer": str(Path(place) / "tokenizer"), "max_seq_lengths": _lengths(settings)}
        if any(task.startswith(f"{PREFIX}_") for task in asked.recipe.tasks):
            make_needles(Path(place) / "needles", tokenizer, **settings)
            given, metadata = [*given, str(Path(place) / "needles")], None
        yield given, metadata


def _window(harness, subject, asked):
    """Tokens that the model will see at once; its configuration and tokenizer are read, not its weights."""
    if asked.max_length is not None:
        return asked.max_length
    source, where = subject.source, subject.where(asked)
    config = source.config if subject.loaded else load_config(source, **where)
    return harness.window_of(config, asked.tokenizer or load_tokenizer(source, **where))


def _missing(item, kept, subject, asked, window):
    """Whether one of the names that `item` scores has no record of exactly what is asked for. window: () -> tokens."""
    hashes, shots = item.hashes(), item.shots()
    seed = seed_of(asked)
    for name in item.scored_names():
        found = any(
            record.task == name
            and record.task_hash == hashes[name]
            and record.shots == shots[name]
            and (record.limit, record.seed, record.dtype) == (asked.limit, seed, subject.dtype)
            and record.fingerprint == subject.fingerprint
            and record.window == window()
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


def _judge(harness, subject, missing, kept, asked):
    """Run what is missing on one model; its file is written after each task. Returns all its records."""
    if isinstance(subject.source, torch.nn.Module):
        model, tokenizer, was_training = subject.source, asked.tokenizer, subject.source.training
    else:
        how = {"dtype": asked.dtype, "device": asked.device, **subject.where(asked)}
        model, tokenizer = load_language_model(subject.source, **how)
        was_training = False
    facts = {
        "model": subject.shown,
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
        with harness.quiet_harness(bars_too=not asked.progress):
            judge = harness.MHLALM(
                pretrained=model, tokenizer=tokenizer, batch_size=asked.batch_size, max_length=asked.max_length
            )
        judge.quiet = not asked.progress
        _check_lengths(judge, asked)
        for number, item in enumerate(missing, 1):
            logger.info("%s: %s (%d of %d)", subject.name, item.name, number, len(missing))
            command = asked.command or command_of(item.name, facts["model"], asked)
            shared = {**facts, "command": command, "date": now()}
            new = harness.score(judge, item, limit=asked.limit, seeds=seeds, facts=shared)
            kept.merge(new)
            subject.store(new)
    finally:
        model.train(was_training)
    return kept


def _lengths(settings):
    """The setting `lengths` as a list, empty where the recipe has none."""
    return whole_numbers("lengths", settings["lengths"], LEAST, 10**9) if "lengths" in settings else []


def _check_lengths(judge, asked):
    """lm-eval would cut what is too long, and with it perhaps what is asked for."""
    longest = max(_lengths(asked.recipe.settings), default=0)
    if longest > judge.max_length:
        raise ValueError(
            f"lengths: {longest} tokens, but the model sees {judge.max_length}; expected shorter ones, or max_length"
        )


def command_of(task, model, asked):
    """The shell line that gives the scores of a task, or of the tasks of a recipe, again."""
    words = ["mhla-hf", "evaluate", model]
    words += asked.recipe.words(shown_path) if asked.recipe.name else []
    if not asked.recipe.name or (task in asked.recipe.tasks and not asked.recipe.settings):
        words += ["--tasks", task]
    paths = [asked.include_path] if isinstance(asked.include_path, (str, Path)) else asked.include_path or []
    for path in paths:
        words += ["--include-path", shown_path(path)]
    return shlex.join(words + asked.words())
