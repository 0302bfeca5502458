"""evaluate(): one call that judges language models, classifiers, image and video pipelines, one or several side by side.

What is judged how stands in a score recipe, a YAML file; those of this package are in `recipes/` beside this file. Its kind
decides who judges: `language.py` (lm-eval), `images.py`, `video.py` (VBench), or `judge_speed` below. All of them give
`Result` records, run only what is missing, write after each task, and are imported with what they need when asked for.
"""

import dataclasses
import importlib
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch

from ..checkpoints.file_io import find_yaml, read_yaml
from ..checkpoints.fingerprint import hash_json
from ..checkpoints.load import choose_device, load_language_model
from ..checkpoints.values import at_least, checked, read_settings
from ..speed import measure_speed
from .records import SPEED, SPEED_METRICS, Comparison, Results
from .subjects import command_of, find_subjects

FOLDER = Path(__file__).parent / "recipes"
JUDGES = {
    "language": (".language", "judge_language_models"),
    "classification": (".images", "judge_classifiers"),
    "image": (".images", "judge_image_pipelines"),
    "video": (".video", "judge_video_pipelines"),
    "speed": (".runner", "judge_speed"),
}
LANGUAGE_ONLY = ("tokenizer", "include_path", "data_files", "num_fewshot", "max_length")


@checked
class ScoreRecipe:
    """How to judge.

    kind: of the models. tasks: task -> examples in the prompt, or None for the task's own number; for other kinds than
    language the metrics, with None. settings: the protocol of this kind of model, such as `ImageProtocol`. columns: see
    `paper_values`. name: of a recipe of this package, else its file's. changed: the settings that are not the file's.
    """

    kind: Literal["language", "classification", "image", "video", "speed"]
    tasks: dict[str, int | None]
    about: str = ""
    settings: dict = dataclasses.field(default_factory=dict)
    columns: dict[str, dict] = dataclasses.field(default_factory=dict)
    name: str = ""
    changed: dict = dataclasses.field(default_factory=dict)

    def validate_tasks(self):
        """At least one, none with fewer than no examples."""
        if not self.tasks or min(shots or 0 for shots in self.tasks.values()) < 0:
            raise ValueError(f"tasks is {self.tasks!r}; expected names, or names with the examples in the prompt")

    def with_settings(self, settings):
        """The recipe with some settings replaced; "sampling.height" is one value of the setting "sampling"."""
        merged = dict(self.settings)
        for name, value in settings.items():
            outer, dot, inner = name.partition(".")
            if dot and not isinstance(merged.get(outer, {}), dict):
                raise ValueError(f"settings: {name!r} is given, but {outer} holds no values by name")
            merged[outer] = {**merged.get(outer, {}), inner: value} if dot else value
        return dataclasses.replace(self, settings=merged, changed={**self.changed, **settings})


def recipe_names():
    """Names of the recipes that come with this package."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def read_score_recipe(name):
    """A recipe by name, or from a YAML file. ValueError, in one sentence, names what is wrong in it."""
    content, what = read_yaml(find_yaml(name, FOLDER, "recipe"), "recipe"), f"recipe {str(name)!r}: "
    if isinstance(content, dict):
        tasks = content.get("tasks")
        content |= {"name": str(name), **({"tasks": dict.fromkeys(tasks)} if isinstance(tasks, list) else {})}
    return read_settings(ScoreRecipe, content, what)


@checked
class Asked:
    """How the user wants it done; the fields are the arguments of `evaluate`."""

    recipe: ScoreRecipe
    tokenizer: object
    output: str | Path | None
    include_path: object
    data_files: str | Path | None
    limit: int | float | None
    batch_size: int | Literal["auto"]
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    device: object
    revision: str | None
    trust_remote_code: bool
    force: bool
    trust_scores: bool
    progress: bool
    command: str | None
    num_fewshot: int | None = at_least(0, None)
    seed: int | None = at_least(0, None)
    max_length: int | None = at_least(2, None)

    def validate_for_kind(self):
        """What only language models take is not given for others."""
        language, limit, size = self.recipe.kind == "language", self.limit, self.batch_size
        share = " of documents, or a share below 1" if language else ""
        if limit is not None and not (0 < limit < math.inf and (limit == int(limit) or (language and limit < 1))):
            raise ValueError(f"limit is {limit!r}; expected a whole number{share}")
        if (size == "auto" and not language) or (size != "auto" and size < 1):
            raise ValueError(f"batch_size is {size!r}; expected an integer of at least 1" + ' or "auto"' * language)
        for name in () if language else LANGUAGE_ONLY:
            if getattr(self, name) is not None:
                raise ValueError(f"{name} is given, which the recipe {self.recipe.name!r} does not take; expected None")


def evaluate(
    models: object, tasks: str | Sequence[str] | None = None, *, recipe: str | Path | None = None,
    settings: Mapping[str, object] | None = None, tokenizer: object = None, output: str | Path | None = None,
    include_path: str | Path | Sequence[str | Path] | None = None, data_files: str | Path | None = None,
    num_fewshot: int | None = None, limit: int | float | None = None, batch_size: int | Literal["auto"] = 8,
    seed: int | None = None, dtype: str = "auto", device: torch.device | str | None = None,
    max_length: int | None = None, revision: str | None = None, trust_remote_code: bool = False, force: bool = False,
    trust_scores: bool = False, progress: bool = True, command: str | None = None,
) -> Comparison:  # fmt: skip
    """Judge models: language models on lm-eval tasks, image classifiers, image pipelines, video pipelines.

    Args:
        models: a folder, a Hub id or a loaded model or pipeline; or a list of them, or a dict name -> one of them.
        tasks: names of lm-eval tasks, groups or tags, or patterns with *; a list or one text with commas. With a recipe:
            only these of its tasks. Needed where there is no recipe.
        recipe: name of a score recipe (see `recipe_names`, such as `table_6_language`) or a YAML file. It says of which kind
            the models are; without one they are language models.
        settings: replaces some of the recipe's settings, such as {"lengths": [256]} or {"reference": "imagenet.npz"}.
        tokenizer: for loaded language models; else it comes with the model.
        output: where the scores are kept: a .json file (one model) or a folder (one file per model). Default:
            results.json in a local model's folder; nothing is written for Hub ids and loaded models.
        include_path: folder, or list of folders, with further lm-eval tasks, such as `make_tasks` writes.
        data_files: folder from which lm-eval's tasks read their documents instead of the Hub: NAME.jsonl or NAME.jsonl.gz
            for each task, with the columns of its dataset; examples in the prompt come from NAME.train.jsonl if it exists.
        num_fewshot: examples in the prompt; None: the recipe's or the task's own, and never more where a task says 0.
        limit: documents, images or prompts, or a share of an lm-eval task below 1; for trying out.
        batch_size: int, or "auto" for language models. seed: None gives lm-eval's own seeds, and 0 for sampling.
        dtype: "auto" (the checkpoint's), "float32", "bfloat16", "float16". device: as torch names it; None: CUDA if any.
        max_length: tokens a language model sees at once; None: the configuration's.
        revision, trust_remote_code: as in transformers. MHLA language models need no remote code here, saved pipelines do.
        force: run again what is known. trust_scores: read what the results file holds though another machine measured it, or
            somebody wrote it there; by default only what this machine measured is read. progress: bars on stderr.
        command: the shell line to keep with the scores; None: the `mhla-hf evaluate` line that gives them again.

    Returns:
        `Comparison`: dict name -> `Results` with the scores asked for.

    Raises:
        ValueError, TypeError: one sentence; whatever can be checked is checked before a model runs. ImportError: a
        library is missing; the text has the line that installs it.
    """
    given = {**locals(), "recipe": _find_recipe(recipe, tasks, settings)}
    asked = read_settings(Asked, {field.name: given[field.name] for field in dataclasses.fields(Asked)}, "")
    choose_device(device)
    module, judge = JUDGES[asked.recipe.kind]
    try:
        compared = Comparison(getattr(importlib.import_module(module, __package__), judge)(models, asked))
    except ModuleNotFoundError as error:
        raise ImportError(f"evaluate needs {error.name}, which is missing: pip install 'mhla_hf[eval]'") from error
    compared.columns = asked.recipe.columns
    return compared


def _find_recipe(recipe, tasks, settings):
    """The recipe with the settings and the choice of tasks applied; language models on `tasks` where there is none."""
    tasks = tasks.split(",") if isinstance(tasks, str) else tasks
    if tasks is not None:
        if not (isinstance(tasks, (list, tuple)) and all(isinstance(name, str) and name.strip() for name in tasks)):
            raise TypeError(f"tasks is {tasks!r}; expected task names in a list or separated by commas")
        tasks = list(dict.fromkeys(name.strip() for name in tasks))
    if recipe is None:
        if not tasks:
            raise ValueError(
                f"tasks is {tasks} without a recipe; expected names, or a recipe: {', '.join(recipe_names())}"
            )
        if settings:
            raise ValueError(f"settings is {settings!r} without a recipe; expected them with one")
        return ScoreRecipe("language", dict.fromkeys(tasks))
    recipe = read_score_recipe(recipe).with_settings(settings or {})
    if unknown := [name for name in tasks or () if name not in recipe.tasks]:
        raise ValueError(f"task {unknown[0]!r} is not in recipe {recipe.name!r}; it has {', '.join(recipe.tasks)}")
    return recipe if tasks is None else dataclasses.replace(recipe, tasks={name: recipe.tasks[name] for name in tasks})


@checked
class SpeedProtocol:
    """The settings of a recipe of kind "speed", as `measure_speed` takes them. lengths: in tokens."""

    lengths: list[int] | int
    decode_tokens: int = at_least(1, 64)
    rounds: int = at_least(1, 3)

    def validate_lengths(self):
        """At least one, each of a token or more."""
        self.lengths = [self.lengths] if isinstance(self.lengths, int) else self.lengths
        if min(self.lengths, default=0) < 1:
            raise ValueError(f"lengths is {self.lengths!r}; expected whole numbers of tokens")


def judge_speed(models, asked):
    """name -> `Results` of the times. models: as `evaluate` takes them. asked: an `Asked`.

    A time is worth something only next to another, so the models of one call are timed by turns, and the records of all of
    them carry one hash of who took part; where it differs, the card does not put them side by side.
    """
    protocol = read_settings(SpeedProtocol, asked.recipe.settings)
    subjects = find_subjects(models, asked)
    asked.command = asked.command or command_of(subjects)
    together = sorted(subject.fingerprint for subject in subjects)
    task_hash = hash_json([together, *vars(protocol).values(), asked.device])
    metrics = [f"{metric}_{length}" for metric in SPEED_METRICS.values() for length in protocol.lengths]
    if not all(subject.knows(SPEED, metric, task_hash) for subject in subjects for metric in metrics):
        started = time.perf_counter()
        how = {"dtype": asked.dtype, "device": asked.device}
        loaded = {
            one.name: one.source if one.loaded else load_language_model(one.source, **how, **one.where)[0]
            for one in subjects
        }
        rows = measure_speed(loaded, **vars(protocol), progress=asked.progress)
        for subject in subjects:
            scores = {
                f"{SPEED_METRICS[row['what'], unit]}_{row['length']}": (value, None, False, protocol.rounds)
                for row in rows
                for unit in ("ms", "mib")
                if (value := row.get(f"{subject.name}_{unit}")) is not None
            }
            subject.keep(SPEED, scores, task_hash, started, loaded[subject.name].device)
    return {subject.name: Results(r for r in subject.kept if r.task_hash == task_hash) for subject in subjects}
