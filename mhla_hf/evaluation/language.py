"""Judging language models with unpatched lm-eval 0.4.13: the numbers of `lm_eval --model hf`, for several models.

What is missing is decided before a model is loaded: a score counts when task, hash of the task, shots, limit, seeds, window,
precision and the fingerprint of the weights are those asked for. Scores go into results.json after every task, so a stopped
evaluation continues.
"""

import contextlib
import dataclasses
import difflib
import hashlib
import io
import json
import logging
import math
import random
import tempfile
import time
from pathlib import Path

import numpy
import torch
from accelerate import Accelerator
from lm_eval import evaluate as run_harness
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import resolve_max_length
from lm_eval.tasks import TaskManager

from ..checkpoints.file_io import temporary_folder
from ..checkpoints.load import load_config, load_language_model, load_tokenizer, summarize_error
from ..checkpoints.values import at_least, checked, read_settings
from .needles import THINGS, make_needles
from .records import Result, Results, finite
from .subjects import agree, find_subjects, joined_processes, paths_of

logger = logging.getLogger("mhla_hf")
HARNESS_SEEDS = (0, 1234, 1234, 1234)
NOT_THE_TASK = ("metadata", "dataset_path", "dataset_name", "dataset_kwargs", "custom_dataset", "num_fewshot")
RATIO_METRICS = ("bits_per_byte", "byte_perplexity", "word_perplexity")
LEAST = 128


@checked
class LanguageProtocol:
    """The settings of a recipe of kind "language" whose tasks are made to length: needles, or lm-eval's RULER.

    lengths: tokens of a question with its answer, each at least 128. Of needles, depths: percent of the text before the
    code asked for, 0 its start; items: questions per depth.
    """

    lengths: int | list[int] = dataclasses.field(default_factory=list)
    depths: list[int] = dataclasses.field(default_factory=lambda: [0, 25, 50, 75, 100])
    items: int = at_least(1, 20)

    def validate_lengths(self):
        """Long enough, and depths within the text."""
        self.lengths = sorted({self.lengths} if isinstance(self.lengths, int) else set(self.lengths))
        if min(self.lengths, default=LEAST) < LEAST:
            raise ValueError(f"lengths is {self.lengths}; expected whole numbers of at least {LEAST}")
        if not 2 <= len(set(self.depths)) <= len(THINGS) or min(self.depths) < 0 or max(self.depths) > 100:
            raise ValueError(f"depths is {self.depths}; expected between 2 and {len(THINGS)} numbers from 0 to 100")


@dataclasses.dataclass
class Requested:
    """One name the user asked for. loaded: what lm-eval's `evaluate` takes.

    scored: name -> (hash, examples in the prompt) of every task, and of the groups that aggregate: all hashes, the most.
    """

    name: str
    loaded: dict
    scored: dict = dataclasses.field(init=False)

    def __post_init__(self):
        """Now, as the source of what scores an answer is part of a hash, and its file may be gone later."""
        tasks = self.loaded["tasks"].items()
        found = {name: (task_hash(task), task.get_config("num_fewshot") or 0) for name, task in tasks}
        everything = hashlib.sha256(" ".join(found[name][0] for name in sorted(found)).encode()).hexdigest()[:16]
        most = max(shots for _, shots in found.values())
        groups = (self.loaded.get("groups") or {}).items()
        self.scored = found | {name: (everything, most) for name, group in groups if group.has_aggregation}

    def known(self, subject, window):
        """Whether exactly what is asked for is kept under every name. window: tokens that the model will see."""
        how = (subject.asked.limit, seed_of(subject.asked), subject.dtype, window)
        kept = [r for r in subject.kept if (r.limit, r.seed, r.dtype, r.window) == how]
        there = {(r.task, r.task_hash, r.shots) for r in kept}
        return there >= {(name, *what) for name, what in self.scored.items()}


def judge_language_models(models, asked):
    """name -> `Results` of what was asked for. models: as `evaluate` takes them. asked: an `Asked`."""
    protocol = read_settings(LanguageProtocol, asked.recipe.settings)
    subjects = find_subjects(models, asked)
    for subject in subjects:
        if subject.loaded and asked.tokenizer is None:
            raise ValueError(f"tokenizer is None; a loaded model such as {subject.name!r} needs one")
    with quiet_harness(asked.progress):
        requested = _load_recipe(protocol, subjects[0], asked)
    shots = {(name, shots) for item in requested for name, (_, shots) in item.scored.items()}
    compared = {}
    with joined_processes() as state:
        for subject in subjects:
            agree(subject, state)
            window = _window(subject, asked) if subject.kept else None
            missing = [item for item in requested if asked.force or not item.known(subject, window)]
            if missing:
                _judge(subject, missing, asked, state, max(protocol.lengths, default=0))
                agree(subject, state)
            else:
                logger.info("%s: every score is known already", subject.name)
            found = (r for r in subject.kept if r.limit == asked.limit and (r.task, r.shots) in shots)
            compared[subject.name] = Results(found)
    return compared


def _load_recipe(protocol, first, asked):
    """The tasks asked for, each a `Requested`; what is made to length counts tokens of the `first` model's tokenizer."""
    names, paths, metadata = asked.recipe.tasks, paths_of(asked.include_path), None
    with temporary_folder(tempfile.gettempdir(), "mhla_hf-tasks-") as place:
        if protocol.lengths:
            tokenizer = asked.tokenizer or load_tokenizer(first.source, **first.where)
            tokenizer.save_pretrained(place)
            metadata = {"tokenizer": str(place), "max_seq_lengths": protocol.lengths}
            if any(name.startswith("needle_") for name in names):
                paths.append(make_needles(Path(place, "needles"), tokenizer, **vars(protocol)).folder)
        return load_tasks(names, paths, asked.num_fewshot, metadata, asked.data_files)


def load_tasks(names, include_path=None, num_fewshot=None, metadata=None, data_files=None):
    """Tasks by name (task, group, tag or pattern with *), each a `Requested`. ValueError names what does not exist.

    names: in a list, or as a dict name -> examples in the prompt (None: num_fewshot, else the task's own). metadata: what
    tasks that make their own data are told, such as RULER's lengths and tokenizer. data_files: see `read_from_files`.
    """
    names = names if isinstance(names, dict) else dict.fromkeys(names)
    paths = paths_of(include_path)
    if odd := [path for path in paths if not Path(path).is_dir()]:
        raise ValueError(f"include_path {odd[0]!r} is no folder; expected one that holds task files (.yaml)")
    if data_files is not None and not Path(data_files).is_dir():
        raise ValueError(f"data_files: got {str(data_files)!r}, expected a folder with files such as piqa.jsonl.")
    manager = TaskManager(include_path=paths, include_defaults=False, metadata=metadata)
    if any(not manager.match_tasks([name]) for name in names):  # only then, as reading all of lm-eval's takes long
        manager = TaskManager(include_path=paths, metadata=metadata)
    wanted = {}
    for name, shots in names.items():
        matches = manager.match_tasks([name])
        if not matches:
            close = difflib.get_close_matches(name, manager.all_tasks, n=3)
            hint = f"did you mean {', '.join(close)}?" if close else "`lm_eval ls tasks` lists all of them"
            raise ValueError(f"task {name!r} does not exist; {hint}")
        for match in matches:
            wanted.setdefault(match, num_fewshot if num_fewshot is not None else shots)
    with temporary_folder(tempfile.gettempdir(), "mhla_hf-files-") as place:
        local = None if data_files is None else read_from_files(manager, data_files, place)
        return [_load_task(manager, name, shots, local) for name, shots in wanted.items()]


def read_from_files(manager, folder, place):
    """Let the tasks of a `TaskManager` read files instead of the Hub; returns the names of those that have one.

    The documents of a task are NAME.jsonl or NAME.jsonl.gz in `folder`, with the columns of the dataset on the Hub. The
    examples in the prompt come from NAME.train.jsonl(.gz), or else from the other documents. place: an empty folder.
    """
    there = {path.name: str(path.resolve()) for path in sorted(Path(folder).iterdir(), reverse=True)}
    there = {name.removesuffix(".gz"): path for name, path in there.items()}
    local = {name: entry for name, entry in manager.task_index.items() if f"{name}.jsonl" in there and entry.yaml_path}
    for name, entry in local.items():
        files = {"test": there[f"{name}.jsonl"], "train": there.get(f"{name}.train.jsonl")}
        files = {split: path for split, path in files.items() if path}
        settings = {"include": str(entry.yaml_path), "task": name, "custom_dataset": None, "dataset_path": "json"}
        settings |= {"dataset_name": None, "dataset_kwargs": {"data_files": files}, "test_split": "test"}
        settings |= {"training_split": None, "validation_split": None, "fewshot_split": list(files)[-1]}
        file = Path(place, f"{name}.yaml")
        file.write_text(json.dumps(settings), encoding="utf-8")  # which is YAML as well
        manager.task_index[name] = dataclasses.replace(entry, yaml_path=file)
    return set(local)


def _load_task(manager, name, num_fewshot, local=None):
    """local: the tasks that read files, all of which have to; None: wherever they read from."""
    random.seed(HARNESS_SEEDS[0])  # RULER makes its questions here, from the global generators
    numpy.random.seed(HARNESS_SEEDS[1])
    try:
        loaded = manager.load([name])
        if local is not None and (missing := [task for task in loaded["tasks"] if task not in local]):
            raise ValueError(f"data_files has neither {missing[0]}.jsonl nor {missing[0]}.jsonl.gz")
        for task in loaded["tasks"].values():
            own = task.get_config("num_fewshot")
            if own is None or (num_fewshot is not None and own != 0):
                task.set_config(key="num_fewshot", value=num_fewshot or 0)
            if not len(task.eval_docs):
                raise ValueError("it has no documents")
    except Exception as error:  # the code of a task is somebody's
        raise ValueError(f"task {name!r} cannot be loaded: {summarize_error(error)}") from error
    return Requested(name, loaded)


def task_hash(task):
    """First 16 hex digits of a sha256 over what the task asks and how it is scored: its settings and every document."""
    settings = {key: value for key, value in dict(task.dump_config()).items() if key not in NOT_THE_TASK}
    digest = hashlib.sha256()
    for part in (settings, *task.eval_docs):
        digest.update(json.dumps(part, sort_keys=True, default=str).encode())
    return digest.hexdigest()[:16]


def _window(subject, asked):
    """Tokens that the model will see at once; its configuration and tokenizer are read, not its weights."""
    if asked.max_length is not None:
        return asked.max_length
    config = subject.source.config if subject.loaded else load_config(subject.source, **subject.where)
    tokenizer = asked.tokenizer or load_tokenizer(subject.source, **subject.where)
    return resolve_max_length(config, tokenizer, default=HFLM._DEFAULT_MAX_LENGTH)


def seed_of(asked):
    """The seed as records keep it: the user's, or lm-eval's own four as text."""
    return ",".join(map(str, HARNESS_SEEDS)) if asked.seed is None else asked.seed


def _judge(subject, missing, asked, state, longest):
    """Run what is missing on one model, whose records are kept after each task. longest: tokens that a task needs."""
    accelerator = Accelerator(cpu=not torch.accelerator.is_available()) if state.num_processes > 1 else None
    device = asked.device or (accelerator and str(accelerator.device))
    how = {"dtype": asked.dtype, "device": device, **subject.where}
    loaded = (subject.source, asked.tokenizer) if subject.loaded else load_language_model(subject.source, **how)
    (model, tokenizer), was_training = loaded, loaded[0].training
    seeds = HARNESS_SEEDS if asked.seed is None else (asked.seed,) * 4
    sizes = {"batch_size": asked.batch_size, "max_length": asked.max_length}
    known = {"seed": seed_of(asked), "dtype": str(model.dtype).removeprefix("torch.")}
    known |= {"revision": getattr(model.config, "_commit_hash", None)}
    try:
        with quiet_harness(asked.progress):
            judge = HFLM(pretrained=model, tokenizer=tokenizer, **sizes)
        if longest > judge.max_length:  # lm-eval would cut it, and with it perhaps what is asked for
            seen = f"the model sees {judge.max_length}; expected shorter ones, or max_length"
            raise ValueError(f"settings: lengths has {longest} tokens, but {seen}")
        for number, item in enumerate(missing, 1):
            logger.info("%s: %s (%d of %d)", subject.name, item.name, number, len(missing))
            # lm-eval shares the work only for models that it loads, and loses the depths that a process's share lacks
            if accelerator:
                apart = any("_back_" in str(task.config.metric_list) for task in item.loaded["tasks"].values())
                share = (0, 1) if apart else (accelerator.process_index, accelerator.num_processes)
                judge.accelerator, (judge._rank, judge._world_size) = accelerator, share
            with quiet_harness(asked.progress):
                records = score(judge, item, seeds=seeds, facts=subject.facts(model.device, item.name) | known)
            if state.is_main_process:
                subject.store(records)
    finally:
        model.train(was_training)


def score(language_model, requested, *, seeds, facts):
    """Run one `Requested` on an `HFLM`. facts: the `Result` fields that all its records share. Returns the records."""
    random.seed(seeds[0])
    numpy.random.seed(seeds[1])
    torch.manual_seed(seeds[2])
    for task in requested.loaded["tasks"].values():
        task.set_fewshot_seed(seed=seeds[3])
    started = time.perf_counter()
    raw = run_harness(lm=language_model, task_dict=requested.loaded, limit=facts["limit"], log_samples=True)
    if raw is None:  # the first process has the answers of all
        return []
    seconds = round(time.perf_counter() - started, 3)
    facts = {**facts, "seconds": seconds, "window": language_model.max_length}
    return [record for name in requested.scored for record in _records(raw, name, requested.scored[name], facts)]


def _records(raw, name, scored, facts):
    """Of a task or group in lm-eval's answer; without -1, RULER's word for a length that was not asked for."""
    values = raw["results"][name]
    for key, value in values.items():
        metric, comma, filtered = key.partition(",")
        if not comma or metric.endswith("_stderr") or (metric.isdecimal() and value == -1):
            continue
        stderr = finite(values.get(f"{metric}_stderr,{filtered}"))
        samples = [sample for sample in raw["samples"].get(name, ()) if metric in sample]
        if stderr is None and metric in RATIO_METRICS and samples:
            stderr = ratio_stderr(metric, [sample[metric] for sample in samples])
        yield Result(
            task=name,
            metric=metric if filtered == "none" else key,
            value=finite(value),
            stderr=stderr,
            higher_is_better=raw["higher_is_better"].get(name, {}).get(metric),
            shots=scored[1],
            samples=len(samples) or int(values.get("sample_len") or 0),
            task_version=str(raw["versions"].get(name)),
            task_hash=scored[0],
            **facts,
        )


def ratio_stderr(metric, pairs):
    """Standard error of a metric made from sum(loglikelihood) / sum(size), which lm-eval leaves out; None for one document.

    pairs: (loglikelihood in nats, bytes or words) per document. That of a ratio estimator (linearized):
    sqrt(n / (n - 1) * sum (l_i - r w_i)^2) / sum w_i; then scaled by the metric's slope at r.
    """
    total = sum(size for _, size in pairs)
    if len(pairs) < 2 or total <= 0:
        return None
    ratio = sum(loglikelihood for loglikelihood, _ in pairs) / total
    spread = sum((loglikelihood - ratio * size) ** 2 for loglikelihood, size in pairs)
    error = math.sqrt(len(pairs) / (len(pairs) - 1) * spread) / total
    return finite(error / math.log(2) if metric == "bits_per_byte" else error * math.exp(-ratio))


@contextlib.contextmanager
def quiet_harness(progress):
    """lm-eval's notes below the level of errors are held back meanwhile; without `progress` its bars as well."""
    harness = logging.getLogger("lm_eval")
    level = harness.level
    harness.setLevel(logging.ERROR)
    try:
        with contextlib.nullcontext() if progress else contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        harness.setLevel(level)
