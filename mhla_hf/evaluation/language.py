"""Score language models with unpatched lm-eval 0.4.13, as `lm_eval --model hf` does.

A score is reused if task, its hash, shots, limit, seeds, window, dtype and weights are the same. Scores are stored after
every task, so that an interrupted evaluation can continue.
"""

import contextlib
import dataclasses
import difflib
import hashlib
import inspect
import io
import itertools
import json
import logging
import math
import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from accelerate import Accelerator
from lm_eval import evaluate as run_harness
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import resolve_max_length
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml  # no public call reads a task's settings; lm-eval is pinned exactly

from ..checkpoints.file_io import temporary_folder
from ..checkpoints.load import load_config, load_language_model, load_tokenizer, wrap_errors
from ..checkpoints.values import at_least, checked, read_settings
from ..data import read_text_file
from ..facts import OBJECTS
from .recall import TASKS, make_recall
from .records import Result, Results, finite
from .subjects import Subject, broadcast_scores, find_subjects, joined_processes

logger = logging.getLogger("mhla_hf")
HARNESS_SEEDS = (0, 1234, 1234, 1234)
UNHASHED_SETTINGS = ("metadata", "dataset_path", "dataset_name", "dataset_kwargs", "custom_dataset", "num_fewshot")
RATIO_METRICS = ("bits_per_byte", "byte_perplexity", "word_perplexity")
MIN_LENGTH = 128


@checked
class LanguageProtocol:
    """Settings of a recipe of kind "language"; all but `lengths` are for recall.

    `lengths` are for generated tasks (recall, and lm-eval's RULER), in tokens of text, question and answer together.
    """

    lengths: int | list[int] = dataclasses.field(default_factory=list)
    depths: list[int] = dataclasses.field(default_factory=lambda: [0, 25, 50, 75, 100])  # in percent of the text
    items: int = at_least(1, 20)  # number of questions per depth
    text: str | None = None  # a UTF-8 file between whose lines the facts stand; None means filler

    def validate_lengths(self) -> None:
        self.lengths = sorted({self.lengths} if isinstance(self.lengths, int) else set(self.lengths))
        if min(self.lengths, default=MIN_LENGTH) < MIN_LENGTH:
            raise ValueError(f"lengths: got {self.lengths}, expected whole numbers of at least {MIN_LENGTH}.")
        if not 2 <= len(set(self.depths)) <= len(OBJECTS) or min(self.depths) < 0 or max(self.depths) > 100:
            raise ValueError(f"depths: got {self.depths}, expected 2 to {len(OBJECTS)} percentages from 0 to 100.")


class Requested(NamedTuple):
    """The lm-eval tasks of one requested name (a task, group or tag), as `TaskManager.load` returns them."""

    name: str
    loaded: dict
    # Task, or group with a score -> (hash, examples in the prompt). A group's hash is computed from its tasks' hashes.
    scored: dict[str, tuple[str, int]]


def judge_language_models(models: object, args: Any) -> dict[str, Results]:
    """Score language models on lm-eval tasks, reusing known scores. All processes must call this."""
    protocol: Any = read_settings(LanguageProtocol, args.recipe.settings)
    subjects = find_subjects(models, args)
    if args.tokenizer is None and (loaded := [subject.name for subject in subjects if subject.loaded]):
        raise ValueError(f"tokenizer: got None, expected the tokenizer of the loaded model {loaded[0]!r}.")
    with quiet_harness(args.progress):
        requested = _load_requested_tasks(protocol, subjects[0], args)
    seed = ",".join(map(str, HARNESS_SEEDS)) if args.seed is None else args.seed  # as stored with scores
    with joined_processes() as state:
        for subject in subjects:
            broadcast_scores(subject)
            window = args.max_length
            if subject.kept and window is None:  # as lm-eval will choose it
                source, options = subject.source, subject.load_options
                config = source.config if subject.loaded else load_config(source, **options)
                tokenizer = args.tokenizer or load_tokenizer(source, **options)
                window = resolve_max_length(config, tokenizer, default=HFLM._DEFAULT_MAX_LENGTH)
            key = {"seed": seed, "window": window}
            missing = [
                item for item in requested
                if not all(subject.knows(task=x, task_hash=y, shots=z, **key) for x, (y, z) in item.scored.items())
            ]  # fmt: skip
            if missing:
                _judge(subject, missing, state, seed, longest=max(protocol.lengths, default=0))
                broadcast_scores(subject)
    identities = {(name, shots, args.limit) for item in requested for name, (_, shots) in item.scored.items()}
    return {x.name: Results(r for r in x.kept if (r.task, r.shots, r.limit) in identities) for x in subjects}


def _load_requested_tasks(protocol: Any, subject: Subject, args: Any) -> list[Requested]:
    """Load the recipe's tasks. If it has lengths, its recall tasks are generated first, in a temporary folder."""
    names, paths, metadata = args.recipe.tasks, [*args.include_path], None
    with temporary_folder(tempfile.gettempdir(), "mhla_hf-tasks-") as folder:
        if protocol.lengths:
            tokenizer = args.tokenizer or load_tokenizer(subject.source, **subject.load_options)
            tokenizer.save_pretrained(folder)
            metadata = {"tokenizer": str(folder), "max_seq_lengths": protocol.lengths}
            pairs = [*itertools.product(protocol.lengths, names)]
            if tasks := [task for task in TASKS if any(fnmatch(f"{task}_{length}", name) for length, name in pairs)]:
                text = None if protocol.text is None else read_text_file(Path(protocol.text), "settings: text")
                make_recall(folder / "recall", tokenizer, **{**vars(protocol), "text": text}, tasks=tasks)
                paths.append(folder / "recall")
        return load_tasks(names, paths, args.num_fewshot, metadata, args.data_files)


def load_tasks(
    names: Sequence[str] | Mapping[str, int | None], include_path: Sequence[str | Path], num_fewshot: int | None = None,
    metadata: Mapping[str, Any] | None = None, data_files: str | Path | None = None,
) -> list[Requested]:  # fmt: skip
    """Load tasks, groups or tags by name or pattern, or by a dict from these to the number of examples in the prompt.

    `num_fewshot` overrides these numbers, except in tasks that require 0. `metadata` are arguments of tasks that generate
    their data. For `data_files` see `evaluate`.
    """
    names = names if isinstance(names, dict) else dict.fromkeys(names)
    paths = [*map(str, include_path)]
    if missing := [path for path in paths if not Path(path).is_dir()]:
        raise ValueError(f"include_path: got {missing[0]!r}, expected a folder with task files (.yaml).")
    if data_files is not None and not Path(data_files).is_dir():
        raise ValueError(f"data_files: got {str(data_files)!r}, expected a folder with files such as piqa.jsonl.")
    manager = TaskManager(include_path=paths, include_defaults=False, metadata=metadata)
    # Indexing all of lm-eval's tasks is slow, so it is done only if needed.
    if any(not manager.match_tasks([name]) for name in names):
        manager = TaskManager(include_path=paths, metadata=metadata)
    shots_by_task: dict[str, int | None] = {}
    for name, shots in names.items():
        matches = manager.match_tasks([name])
        if not matches:
            similar = difflib.get_close_matches(name, manager.all_tasks, n=3)
            hint = f"did you mean {', '.join(similar)}?" if similar else "`lm_eval ls tasks` lists all of them."
            raise ValueError(f"tasks: got {name!r}, expected a task that exists; {hint}")
        for match in matches:
            shots_by_task.setdefault(match, num_fewshot if num_fewshot is not None else shots)
    filed = None if data_files is None else read_from_files(manager.task_index, data_files)
    return [_load_task(manager, name, shots, filed) for name, shots in shots_by_task.items()]


def read_from_files(index: dict[str, Any], folder: str | Path) -> set[str]:
    """Change `index` in place so that tasks with a file in `folder` read it instead of the Hub; return their names."""
    files = sorted(Path(folder).iterdir(), reverse=True)  # NAME.jsonl is taken before NAME.jsonl.gz
    path_by_name = {file.name.removesuffix(".gz"): str(file.resolve()) for file in files}
    filed = {name for name, entry in index.items() if f"{name}.jsonl" in path_by_name and entry.yaml_path}
    for name in filed:
        splits = {"test": path_by_name[f"{name}.jsonl"]}
        if examples := path_by_name.get(f"{name}.train.jsonl"):
            splits["train"] = examples
        settings = {**load_yaml(index[name].yaml_path), "task": name, "dataset_path": "json"}
        settings |= {"dataset_kwargs": {"data_files": splits}, "test_split": "test", "fewshot_split": [*splits][-1]}
        settings |= dict.fromkeys(("custom_dataset", "dataset_name", "training_split", "validation_split"))
        index[name] = dataclasses.replace(index[name], yaml_path=None, cfg=settings)
    return filed


def _load_task(manager: TaskManager, name: str, num_fewshot: int | None, filed: set[str] | None) -> Requested:
    """Load the tasks of one name. Raise ValueError if `filed`, the tasks that read local files, is given and lacks one."""
    random.seed(HARNESS_SEEDS[0])  # RULER generates its questions while it loads, from the global generators
    numpy.random.seed(HARNESS_SEEDS[1])
    scored: dict[str, tuple[str, int]] = {}
    with wrap_errors(f"tasks: got {name!r}, expected a task that can be loaded"):  # a task can run any code
        loaded = manager.load([name])
        for task_name, task in loaded["tasks"].items():
            if filed is not None and task_name not in filed:
                raise ValueError(f"data_files has neither {task_name}.jsonl nor {task_name}.jsonl.gz")
            task_shots = task.get_config("num_fewshot")
            if task_shots is None or (num_fewshot is not None and task_shots != 0):
                task.set_config(key="num_fewshot", value=num_fewshot or 0)
            if not len(task.eval_docs):
                raise ValueError(f"{task.config.task} has no documents")
            scored[task_name] = task_hash(task), task.get_config("num_fewshot") or 0
    hashes, shots = zip(*(scored[task_name] for task_name in sorted(scored)), strict=True)
    group_score = hashlib.sha256(" ".join(hashes).encode()).hexdigest()[:16], max(shots)
    groups = loaded.get("groups") or {}
    scored |= {group_name: group_score for group_name, group in groups.items() if group.has_aggregation}
    return Requested(name, loaded, scored)


def task_hash(task: Any) -> str:
    """Hash a task's settings, except `UNHASHED_SETTINGS`, and its documents."""

    def as_text(value: Any) -> str:  # lm-eval replaces functions by their source, but not inside mappings
        return inspect.getsource(value) if inspect.isfunction(value) else str(value)

    settings = {key: value for key, value in task.dump_config().items() if key not in UNHASHED_SETTINGS}
    digest = hashlib.sha256()
    for content in (settings, *task.eval_docs):
        digest.update(json.dumps(content, sort_keys=True, default=as_text).encode())
    return digest.hexdigest()[:16]


def _judge(subject: Subject, missing: Sequence[Requested], state: Any, seed: int | str, longest: int) -> None:
    """Run `missing` tasks on one model, whose context must hold `longest` tokens; store the records after each task."""
    args = subject.args
    accelerator = Accelerator(cpu=not torch.accelerator.is_available()) if state.num_processes > 1 else None
    model, own_tokenizer = subject.load(load_language_model, args.device or (accelerator and str(accelerator.device)))
    seeds = HARNESS_SEEDS if args.seed is None else (args.seed,) * 4
    with contextlib.ExitStack() as stack:
        stack.callback(model.train, model.training)
        with quiet_harness(args.progress):
            sizes = {"batch_size": args.batch_size, "max_length": args.max_length}
            judge = HFLM(pretrained=model, tokenizer=own_tokenizer or args.tokenizer, **sizes)
        if longest > judge.max_length:  # lm-eval would truncate the text, perhaps including the answer
            expected = f"at most the {judge.max_length} tokens that the model sees, or a larger max_length"
            raise ValueError(f"settings: lengths: got {longest}, expected {expected}.")
        for number, item in enumerate(missing, 1):
            logger.info("%s: %s (%d of %d)", subject.name, item.name, number, len(missing))
            # lm-eval distributes documents only for models that it loads itself, so attributes of `HFLM` are set here. It
            # drops metrics that are missing on one process, so tasks with metrics by depth run in full on every process.
            if accelerator:
                has_depths = any("_back_" in str(task.config.metric_list) for task in item.loaded["tasks"].values())
                judge.accelerator = accelerator
                judge._rank, judge._world_size = (0, 1) if has_depths else (state.process_index, state.num_processes)
            with quiet_harness(args.progress):
                facts = {**subject.provenance(model.device, item.name), "seed": seed}
                records = score(judge, item, seeds=seeds, facts=facts)
            if state.is_main_process:
                subject.store(records)


def score(model: HFLM, requested: Requested, *, seeds: Sequence[int], facts: Mapping[str, Any]) -> list[Result]:
    """Run lm-eval on the tasks of one name; in the main process, return the records, which share `facts`.

    The four `seeds` are for Python, NumPy, torch, and lm-eval's choice of examples.
    """
    random.seed(seeds[0])
    numpy.random.seed(seeds[1])
    torch.manual_seed(seeds[2])
    for task in requested.loaded["tasks"].values():
        task.set_fewshot_seed(seed=seeds[3])
    started = time.perf_counter()
    raw = run_harness(lm=model, task_dict=requested.loaded, limit=facts["limit"], log_samples=True)
    if raw is None:  # only the first process gets the results
        return []
    facts = {**facts, "seconds": round(time.perf_counter() - started, 3), "window": model.max_length}
    records = []
    for name, (hash_of_task, shots) in requested.scored.items():
        values = raw["results"][name]
        for key, value in values.items():
            metric, comma, filter_name = key.partition(",")
            # RULER writes -1 for lengths that were not requested.
            if not comma or metric.endswith("_stderr") or (metric.isdecimal() and value == -1):
                continue
            stderr = finite(values.get(f"{metric}_stderr,{filter_name}"))
            samples = [sample for sample in raw["samples"].get(name, ()) if metric in sample]
            if stderr is None and metric in RATIO_METRICS and samples:
                stderr = ratio_stderr(metric, [sample[metric] for sample in samples])
            record = Result(
                task=name,
                metric=metric if filter_name == "none" else key,
                value=finite(value),
                stderr=stderr,
                higher_is_better=raw["higher_is_better"].get(name, {}).get(metric),
                shots=shots,
                samples=len(samples) or int(values.get("sample_len") or 0),
                task_version=str(raw["versions"].get(name)),
                task_hash=hash_of_task,
                **facts,
            )
            records.append(record)
    return records


def ratio_stderr(metric: str, pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return the standard error of one of `RATIO_METRICS`, which lm-eval lacks; None for fewer than two documents.

    `pairs` are (l_i, w_i), the log-likelihood of document i and its words or bytes. The metric is a function of
    r = sum l_i / sum w_i, whose standard error for n documents is about sqrt(n / (n - 1) * sum (l_i - r w_i)^2) / sum w_i.
    """
    total = sum(size for _, size in pairs)
    if len(pairs) < 2 or total <= 0:
        return None
    ratio = sum(loglikelihood for loglikelihood, _ in pairs) / total
    spread = sum((loglikelihood - ratio * size) ** 2 for loglikelihood, size in pairs)
    error = math.sqrt(len(pairs) / (len(pairs) - 1) * spread) / total
    return finite(error / math.log(2) if metric == "bits_per_byte" else error * math.exp(-ratio))


@contextlib.contextmanager
def quiet_harness(progress: bool) -> Iterator[None]:
    """Hide lm-eval's log messages below errors and, without `progress`, what is written to stderr."""
    harness = logging.getLogger("lm_eval")
    with contextlib.ExitStack() as stack:
        stack.callback(harness.setLevel, harness.level)
        harness.setLevel(logging.ERROR)
        if not progress:
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        yield
