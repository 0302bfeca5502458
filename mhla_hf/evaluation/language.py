"""Judging language models with unpatched lm-eval 0.4.13: the numbers of `lm_eval --model hf`, for several models.

What is missing is decided before a model is loaded: a score counts when task, hash of the task, shots, limit, seeds, window,
precision and the fingerprint of the weights are those asked for. A task's hash covers its definition and every document.
Scores go into results.json after every task, so a stopped evaluation continues. Importing this registers the model type
"mhla" with lm-eval. Standard errors of bits per byte and its kin, which lm-eval leaves out, are computed from the documents.
"""

import contextlib
import dataclasses
import difflib
import functools
import hashlib
import json
import logging
import math
import random
import shlex
import sys
import tempfile
import time
from pathlib import Path

import numpy
import torch
from accelerate.state import AcceleratorState, PartialState
from lm_eval import evaluate as run_harness
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import resolve_max_length
from lm_eval.tasks import TaskManager

from ..checkpoints.load import first_line, load_config, load_language_model, load_tokenizer
from ..checkpoints.machine import now
from .local_tasks import LEAST, PREFIX, make_needles, whole_numbers
from .records import Result, Results, finite
from .subjects import common_facts, find_subjects, shown_path

logger = logging.getLogger("mhla_hf")
NEEDLE_SETTINGS = ("lengths", "depths", "items")
HARNESS_SEEDS = (0, 1234, 1234, 1234)
NOT_THE_TASK = ("metadata", "dataset_path", "dataset_name", "dataset_kwargs", "custom_dataset", "num_fewshot")
RATIO_METRICS = ("bits_per_byte", "byte_perplexity", "word_perplexity")


@register_model("mhla")
class MHLALM(HFLM):
    """lm-eval's `HFLM`; with mhla_hf imported, MHLA models load by it without `trust_remote_code`."""

    quiet = False

    def __init__(self, *args, **kwargs):
        fresh = not PartialState._shared_state
        super().__init__(*args, **kwargs)
        if fresh and not hasattr(self, "accelerator"):
            # lm-eval made an Accelerator only to count processes; its global settings would bind a later training.
            AcceleratorState._reset_state(reset_partial_state=True)

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        return super().loglikelihood_rolling(requests, disable_tqdm=True)

    def _loglikelihood_tokens(self, requests, disable_tqdm=False, override_bs=None):
        hidden = disable_tqdm or self.quiet or override_bs is not None
        return super()._loglikelihood_tokens(requests, disable_tqdm=hidden, override_bs=override_bs)


@dataclasses.dataclass
class Requested:
    """One name the user asked for. loaded: what lm-eval's `evaluate` takes."""

    name: str
    loaded: dict

    @property
    def tasks(self):
        """Leaf name -> lm-eval Task."""
        return self.loaded["tasks"]

    @property
    def groups(self):
        """Group name -> lm-eval Group."""
        return self.loaded.get("groups") or {}

    def hashes(self):
        """Task or group name -> hash of definition and documents; a group's covers its tasks'."""
        found = {name: task_hash(task) for name, task in self.tasks.items()}
        everything = hashlib.sha256(" ".join(found[name] for name in sorted(found)).encode()).hexdigest()[:16]
        return {**dict.fromkeys(self.groups, everything), **found}

    def shots(self):
        """Task or group name -> examples in the prompt; a group has the most that one of its tasks has."""
        found = {name: task.get_config("num_fewshot") or 0 for name, task in self.tasks.items()}
        return {**dict.fromkeys(self.groups, max(found.values(), default=0)), **found}

    def scored_names(self):
        """Names under which this gives records: every task, and the groups that aggregate."""
        return [*self.tasks, *(name for name, group in self.groups.items() if group.has_aggregation)]


def judge_language_models(models, asked):
    """name -> `Results` of what was asked for. models: as `evaluate` takes them. asked: an `Asked`."""
    subjects = find_subjects(models, output=asked.output, dtype=asked.dtype, revision=asked.revision)
    for subject in subjects:
        if subject.loaded and asked.tokenizer is None:
            raise ValueError(f"tokenizer is None; a loaded model such as {subject.name!r} needs one")
    compared = {}
    with made_tasks(subjects, asked) as (paths, metadata):
        with quiet_harness(bars_too=not asked.progress):
            requested = load_tasks(asked.recipe.tasks, paths, asked.num_fewshot, metadata)
        shots = {name: number for item in requested for name, number in item.shots().items()}
        names = {name for item in requested for name in item.scored_names()}
        for subject in subjects:
            kept = subject.known(asked)
            window = functools.cache(functools.partial(_window, subject, asked))
            missing = [item for item in requested if asked.force or _missing(item, kept, subject, asked, window)]
            if missing:
                _judge(subject, missing, kept, asked)
            else:
                logger.info("%s: every score is known already", subject.name)
            compared[subject.name] = Results(
                r for r in kept if r.task in names and r.limit == asked.limit and r.shots == shots[r.task]
            )
    return compared


@contextlib.contextmanager
def made_tasks(subjects, asked):
    """(folders for lm-eval, metadata for it): the user's, and while this lasts the tasks that the recipe has made here."""
    given, settings = _paths(asked.include_path), asked.recipe.settings
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


def _paths(include_path):
    """Folders as a list of texts."""
    return [str(path) for path in ([include_path] if isinstance(include_path, (str, Path)) else include_path or [])]


def _lengths(settings):
    """The setting `lengths` as a list, empty where the recipe has none."""
    return whole_numbers("lengths", settings["lengths"], LEAST, 10**9) if "lengths" in settings else []


def load_tasks(names, include_path=None, num_fewshot=None, metadata=None):
    """Tasks by name (task, group, tag or pattern with *), each a `Requested`. ValueError names what does not exist.

    names: in a list, or as a dict name -> examples in the prompt (None: num_fewshot, else the task's own). metadata: what
    tasks that make their own data are told, such as RULER's lengths and tokenizer.
    """
    names = names if isinstance(names, dict) else dict.fromkeys(names)
    paths = _paths(include_path)
    for path in paths:
        if not Path(path).is_dir():
            raise ValueError(f"include_path {path!r} is no folder; expected one that holds task files (.yaml)")
    manager = TaskManager(include_path=paths, include_defaults=False, metadata=metadata) if paths else None
    if manager is None or any(not manager.match_tasks([name]) for name in names):
        manager = TaskManager(include_path=paths or None, metadata=metadata)
    wanted = {}
    for name, shots in names.items():
        matches = manager.match_tasks([name])
        if not matches:
            close = difflib.get_close_matches(name, manager.all_tasks, n=3)
            hint = f"did you mean {', '.join(close)}?" if close else "`lm_eval ls tasks` lists all of them"
            raise ValueError(f"task {name!r} does not exist; {hint}")
        for match in matches:
            wanted.setdefault(match, num_fewshot if num_fewshot is not None else shots)
    return [_load_task(manager, name, shots) for name, shots in wanted.items()]


def _load_task(manager, name, num_fewshot):
    random.seed(HARNESS_SEEDS[0])  # RULER makes its questions here, from the global generators
    numpy.random.seed(HARNESS_SEEDS[1])
    try:
        loaded = manager.load([name])
        for task in loaded["tasks"].values():
            own = task.get_config("num_fewshot")
            if num_fewshot is not None and own != 0:
                task.set_config(key="num_fewshot", value=num_fewshot)
            elif own is None:
                task.set_config(key="num_fewshot", value=0)
            if not len(task.eval_docs):
                raise ValueError("it has no documents")
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, TypeError, AttributeError) as error:
        raise ValueError(f"task {name!r} cannot be loaded: {first_line(error)}") from error
    return Requested(name, loaded)


def task_hash(task):
    """First 16 hex digits of a sha256 over what the task asks and how it is scored: its settings and every document."""
    settings = {key: value for key, value in dict(task.dump_config()).items() if key not in NOT_THE_TASK}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    for document in task.eval_docs:
        digest.update(json.dumps(document, sort_keys=True, default=str).encode())
    return digest.hexdigest()[:16]


def _window(subject, asked):
    """Tokens that the model will see at once; its configuration and tokenizer are read, not its weights."""
    if asked.max_length is not None:
        return asked.max_length
    source, where = subject.source, subject.where(asked)
    config = source.config if subject.loaded else load_config(source, **where)
    tokenizer = asked.tokenizer or load_tokenizer(source, **where)
    return resolve_max_length(config, tokenizer, default=HFLM._DEFAULT_MAX_LENGTH)


def _missing(item, kept, subject, asked, window):
    """Whether one of the names that `item` scores has no record of exactly what is asked for. window: () -> tokens."""
    hashes, shots = item.hashes(), item.shots()
    how = (asked.limit, seed_of(asked), subject.dtype, subject.fingerprint)
    known = {
        (r.task, r.task_hash, r.shots)
        for r in kept
        if (r.limit, r.seed, r.dtype, r.fingerprint) == how and r.window == window()
    }
    return any((name, hashes[name], shots[name]) not in known for name in item.scored_names())


def seed_of(asked):
    """The seed as records keep it: the user's, or lm-eval's own four as text."""
    return ",".join(map(str, HARNESS_SEEDS)) if asked.seed is None else asked.seed


def _judge(subject, missing, kept, asked):
    """Run what is missing on one model; its file is written after each task, and `kept` has its new records."""
    if subject.loaded:
        model, tokenizer, was_training = subject.source, asked.tokenizer, subject.source.training
    else:
        how = {"dtype": asked.dtype, "device": asked.device, **subject.where(asked)}
        model, tokenizer = load_language_model(subject.source, **how)
        was_training = False
    facts = {
        **common_facts(subject, model.device),
        "revision": getattr(model.config, "_commit_hash", None),
        "dtype": str(model.dtype).removeprefix("torch."),
        "seed": seed_of(asked),
    }
    seeds = HARNESS_SEEDS if asked.seed is None else (asked.seed,) * 4
    try:
        with quiet_harness(bars_too=not asked.progress):
            judge = MHLALM(
                pretrained=model, tokenizer=tokenizer, batch_size=asked.batch_size, max_length=asked.max_length
            )
        judge.quiet = not asked.progress
        longest = max(_lengths(asked.recipe.settings), default=0)
        if longest > judge.max_length:  # lm-eval would cut it, and with it perhaps what is asked for
            seen = judge.max_length
            raise ValueError(
                f"lengths: {longest} tokens, but the model sees {seen}; expected shorter ones, or max_length"
            )
        for number, item in enumerate(missing, 1):
            logger.info("%s: %s (%d of %d)", subject.name, item.name, number, len(missing))
            command = asked.command or command_of(item.name, facts["model"], asked)
            shared = {**facts, "command": command, "date": now()}
            new = score(judge, item, limit=asked.limit, seeds=seeds, facts=shared)
            kept.merge(new)
            subject.store(new)
    finally:
        model.train(was_training)


def score(language_model, requested, *, limit, seeds, facts):
    """Run one `Requested` on an `MHLALM`. facts: the `Result` fields that all its records share. Returns the records."""
    random.seed(seeds[0])
    numpy.random.seed(seeds[1])
    torch.manual_seed(seeds[2])
    for task in requested.tasks.values():
        task.set_fewshot_seed(seed=seeds[3])
    started = time.perf_counter()
    with quiet_harness(language_model.quiet):
        raw = run_harness(lm=language_model, task_dict=requested.loaded, limit=limit, log_samples=True)
    seconds = round(time.perf_counter() - started, 3)
    return _records(raw, requested, {**facts, "limit": limit, "seconds": seconds, "window": language_model.max_length})


def _records(raw, requested, facts):
    hashes, shots, records = requested.hashes(), requested.shots(), []
    for name in requested.scored_names():
        values = raw["results"][name]
        for key, value in values.items():
            metric, comma, filtered = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            if metric.isdecimal() and finite(value) == -1:
                continue  # RULER's word for a length that was not asked for
            stderr = finite(values.get(f"{metric}_stderr,{filtered}"))
            samples = [sample for sample in raw["samples"].get(name, ()) if metric in sample]
            if stderr is None and metric in RATIO_METRICS and samples:
                stderr = ratio_stderr(metric, [sample[metric] for sample in samples])
            records.append(
                Result(
                    task=name,
                    metric=metric if filtered == "none" else key,
                    value=finite(value),
                    stderr=stderr,
                    higher_is_better=raw["higher_is_better"].get(name, {}).get(metric),
                    shots=shots[name],
                    samples=len(samples) or int(values.get("sample_len") or 0),
                    task_version=str(raw["versions"].get(name)),
                    task_hash=hashes[name],
                    **facts,
                )
            )
    return records


def ratio_stderr(metric, pairs):
    """Standard error of a metric made from sum(loglikelihood) / sum(size), over documents; None for fewer than two.

    pairs: (loglikelihood in nats, bytes or words) per document. The ratio's error is that of a ratio estimator
    (linearized): sqrt(n / (n - 1) * sum (l_i - r w_i)^2) / sum w_i; then scaled by the metric's slope at r.
    """
    total = sum(size for _, size in pairs)
    if len(pairs) < 2 or total <= 0:
        return None
    ratio = sum(loglikelihood for loglikelihood, _ in pairs) / total
    spread = sum((loglikelihood - ratio * size) ** 2 for loglikelihood, size in pairs)
    error = math.sqrt(len(pairs) / (len(pairs) - 1) * spread) / total
    return finite(error / math.log(2) if metric == "bits_per_byte" else error * math.exp(-ratio))


def command_of(task, model, asked):
    """The shell line that gives the scores of a task, or of the tasks of a recipe, again."""
    words = ["mhla-hf", "evaluate", model]
    words += asked.recipe.words(shown_path) if asked.recipe.name else []
    if not asked.recipe.name or (task in asked.recipe.tasks and not asked.recipe.settings):
        words += ["--tasks", task]
    for path in _paths(asked.include_path):
        words += ["--include-path", shown_path(path)]
    return shlex.join(words + asked.words())


@contextlib.contextmanager
def quiet_harness(bars_too):
    """lm-eval's notes below the level of errors are held back meanwhile; with `bars_too` its progress bars as well."""
    harness = logging.getLogger("lm_eval")
    level = harness.level
    harness.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(_WithoutBars(sys.stderr)) if bars_too else contextlib.nullcontext():
            yield
    finally:
        harness.setLevel(level)


class _WithoutBars:
    """A text stream that passes on everything but progress bars, which begin by returning to the line's start."""

    def __init__(self, stream):
        self.stream = stream

    def write(self, text):
        return len(text) if text.startswith("\r") or not text.strip() else self.stream.write(text)

    def flush(self):
        self.stream.flush()
