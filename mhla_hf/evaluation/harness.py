"""lm-eval 0.4.13, unpatched, as a library: tasks by name, one model in memory, our records out.

Importing this registers the model type "mhla" with lm-eval. It runs lm-eval's own `evaluate` on lm-eval's own `HFLM`, with
the seeds and the few-shot rule of its command line, so the numbers are those of `lm_eval --model hf`. Unusual: standard
errors of bits per byte and its kin, which lm-eval leaves out, are computed here from the documents; and a task's hash
covers its definition and every document, so a score says which questions it answers.
"""

import contextlib
import dataclasses
import difflib
import hashlib
import json
import logging
import math
import random
import sys
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

from ..checkpoints.load import first_line
from .results import Result, finite

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
    """One name the user asked for. tasks: leaf name -> lm-eval Task. loaded: what lm-eval's `evaluate` takes."""

    name: str
    loaded: dict

    @property
    def tasks(self):
        return self.loaded["tasks"]

    def hashes(self):
        """Task or group name -> hash of definition and documents; a group's covers its tasks'."""
        found = {name: task_hash(task) for name, task in self.tasks.items()}
        everything = hashlib.sha256(" ".join(found[name] for name in sorted(found)).encode()).hexdigest()[:16]
        return {**dict.fromkeys(self.loaded.get("groups") or {}, everything), **found}

    def shots(self):
        """Task or group name -> examples in the prompt; a group has the most that one of its tasks has."""
        found = {name: task.get_config("num_fewshot") or 0 for name, task in self.tasks.items()}
        return {**dict.fromkeys(self.loaded.get("groups") or {}, max(found.values(), default=0)), **found}

    def scored_names(self):
        """Names under which this gives records: every task, and the groups that aggregate."""
        groups = self.loaded.get("groups") or {}
        return [*self.tasks, *(name for name, group in groups.items() if group.has_aggregation)]


def load_tasks(names, include_path=None, num_fewshot=None, metadata=None):
    """Tasks by name (task, group, tag or pattern with *), each a `Requested`. ValueError names what does not exist.

    names: in a list, or as a dict name -> examples in the prompt (None: num_fewshot, else the task's own). metadata: what
    tasks that make their own data are told, such as RULER's lengths and tokenizer.
    """
    names = names if isinstance(names, dict) else dict.fromkeys(names)
    paths = [str(path) for path in ([include_path] if isinstance(include_path, (str, Path)) else include_path or [])]
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


def window_of(config, tokenizer):
    """Tokens that lm-eval lets a model see at once when it is told none."""
    return resolve_max_length(config, tokenizer, default=HFLM._DEFAULT_MAX_LENGTH)


def task_hash(task):
    """First 16 hex digits of a sha256 over what the task asks and how it is scored: its settings and every document."""
    settings = {key: value for key, value in dict(task.dump_config()).items() if key not in NOT_THE_TASK}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    for document in task.eval_docs:
        digest.update(json.dumps(document, sort_keys=True, default=str).encode())
    return digest.hexdigest()[:16]


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
            stderr = finite(values.get(f"{metric}_stderr,{filtered}"))
            samples = [sample for sample in raw["samples"].get(name, ()) if metric in sample]
            if stderr is None and metric in RATIO_METRICS and samples:
                stderr = ratio_stderr(metric, [sample[metric] for sample in samples])
            if metric.isdecimal() and finite(value) == -1:
                continue  # RULER's word for a length that was not asked for
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
    (linearised): sqrt(n / (n - 1) * sum (l_i - r w_i)^2) / sum w_i; then scaled by the metric's slope at r.
    """
    total = sum(size for _, size in pairs)
    if len(pairs) < 2 or total <= 0:
        return None
    ratio = sum(loglikelihood for loglikelihood, _ in pairs) / total
    spread = sum((loglikelihood - ratio * size) ** 2 for loglikelihood, size in pairs)
    error = math.sqrt(len(pairs) / (len(pairs) - 1) * spread) / total
    return finite(error / math.log(2) if metric == "bits_per_byte" else error * math.exp(-ratio))


@contextlib.contextmanager
def quiet_harness(bars_too):
    """lm-eval's notes below the level of errors are held back meanwhile; with `bars_too` its progress bars as well."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(_WithoutBars(sys.stderr)) if bars_too else contextlib.nullcontext():
            yield
    finally:
        logger.setLevel(level)


class _WithoutBars:
    """A text stream that passes on everything but progress bars, which begin by returning to the line's start."""

    def __init__(self, stream):
        self.stream = stream

    def write(self, text):
        return len(text) if text.startswith("\r") or not text.strip() else self.stream.write(text)

    def flush(self):
        self.stream.flush()
