"""`evaluate`: score language models, image classifiers, and image and video pipelines, one or several side by side.

A score recipe, a YAML file such as those in `evaluation/recipes/`, says what is measured and how. Its kind selects the
implementation, which is imported only then, measures only missing scores, and stores them after each task.
"""

import dataclasses
import importlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from ..checkpoints.file_io import find_yaml, read_yaml
from ..checkpoints.load import choose_device
from ..checkpoints.values import at_least, checked, read_settings
from .records import Comparison

FOLDER = Path(__file__).parent / "recipes"
JUDGES = {
    "language": (".language", "judge_language_models"),
    "classification": (".images", "judge_classifiers"),
    "image": (".images", "judge_image_pipelines"),
    "video": (".video", "judge_video_pipelines"),
    "speed": (".speed", "judge_speed"),
}
LANGUAGE_ONLY = ("tokenizer", "include_path", "data_files", "num_fewshot", "max_length")
UNUSED = {"language": (), "speed": (*LANGUAGE_ONLY, "limit")}  # refused; other kinds refuse `LANGUAGE_ONLY`


@checked
class ScoreRecipe:
    """A recipe of an evaluation: what to measure, and how.

    `tasks` maps lm-eval's tasks to the number of examples in the prompt, where None is the task's own number; for kinds
    other than "language", it maps metrics (for "speed", the name "speed") to None.
    """

    kind: Literal["language", "classification", "image", "video", "speed"]
    tasks: dict[str, int | None]
    about: str = ""
    settings: dict = dataclasses.field(default_factory=dict)  # of this kind's protocol, such as `ImageProtocol`
    columns: dict[str, dict] = dataclasses.field(default_factory=dict)  # see `compute_paper_values`
    name: str = ""  # of the recipe, or path of its file
    changed: dict = dataclasses.field(default_factory=dict)  # the settings that `with_settings` has replaced

    def validate_tasks(self) -> None:
        if not self.tasks or min(shots or 0 for shots in self.tasks.values()) < 0:
            raise ValueError(f"tasks: got {self.tasks!r}, expected names, each with None or a number of examples.")

    def with_settings(self, settings: Mapping[str, Any]) -> "ScoreRecipe":
        """Return a copy with some settings replaced; "sampling.height" is the key "height" of the setting "sampling"."""
        merged = dict(self.settings)
        for name, value in settings.items():
            outer, dot, inner = name.partition(".")
            if dot and not isinstance(merged.get(outer, {}), dict):
                raise ValueError(f"settings: got {name!r}, expected {outer!r} to be a mapping.")
            merged[outer] = {**merged.get(outer, {}), inner: value} if dot else value
        return dataclasses.replace(self, settings=merged, changed={**self.changed, **settings})


def recipe_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def read_score_recipe(name: str | Path) -> ScoreRecipe:
    """Read one of the package's score recipes, or a YAML file."""
    content = read_yaml(find_yaml(name, FOLDER, "recipe"), "recipe")
    if isinstance(content, dict):
        content["name"] = str(name)
        if isinstance(content.get("tasks"), list):
            content["tasks"] = dict.fromkeys(content["tasks"])
    return read_settings(ScoreRecipe, content, f"recipe {str(name)!r}: ")


@checked
class EvaluationArgs:
    """The checked arguments of `evaluate`, with the recipe as a `ScoreRecipe`."""

    recipe: ScoreRecipe
    tokenizer: object
    output: str | Path | None
    include_path: Any
    data_files: str | Path | None
    limit: int | float | None
    batch_size: int | Literal["auto"]
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    device: object
    revision: str | None
    trust_remote_code: bool
    force: bool
    progress: bool
    command: str | None
    num_fewshot: int | None = at_least(0, None)
    seed: int | None = at_least(0, None)
    max_length: int | None = at_least(2, None)

    def validate_for_kind(self) -> None:
        """Raise ValueError for what the recipe's kind does not allow, such as a tokenizer for image models."""
        is_language, limit, size = self.recipe.kind == "language", self.limit, self.batch_size
        if limit is not None and not (0 < limit < math.inf and (limit == int(limit) or (is_language and limit < 1))):
            expected = "a whole number of at least 1" + ", or a fraction between 0 and 1" * is_language
            raise ValueError(f"limit: got {limit!r}, expected {expected}.")
        if (size == "auto" and not is_language) or (size != "auto" and size < 1):
            expected = "a whole number of at least 1" + ' or "auto"' * is_language
            raise ValueError(f"batch_size: got {size!r}, expected {expected}.")
        for name in UNUSED.get(self.recipe.kind, LANGUAGE_ONLY):
            if getattr(self, name) is not None:
                raise ValueError(f"{name}: got a value with the recipe {self.recipe.name!r}, expected None.")
        paths = self.include_path or []
        self.include_path = [paths] if isinstance(paths, (str, Path)) else paths


def evaluate(
    models: object, tasks: str | Sequence[str] | None = None, *, recipe: str | Path | None = None,
    settings: Mapping[str, object] | None = None, tokenizer: object = None, output: str | Path | None = None,
    include_path: str | Path | Sequence[str | Path] | None = None, data_files: str | Path | None = None,
    num_fewshot: int | None = None, limit: int | float | None = None, batch_size: int | Literal["auto"] = 8,
    seed: int | None = None, dtype: str = "auto", device: torch.device | str | None = None,
    max_length: int | None = None, revision: str | None = None, trust_remote_code: bool = False, force: bool = False,
    progress: bool = True, command: str | None = None,
) -> Comparison:  # fmt: skip
    """Evaluate language models (by lm-eval tasks or speed), image classifiers, image pipelines, or video pipelines.

    On several processes, all must call this, and only the main one is sure to have all scores.

    Args:
        models: Folder, Hub id, or loaded model or pipeline; or a list of them, or a dict from names to them.
        tasks: Names of lm-eval tasks, groups or tags, or patterns with *, in a list or one string with commas. With a
            recipe, the ones of its tasks to run; required without a recipe.
        recipe: Name of a score recipe (such as `table_6_language`; see `recipe_names`), or a YAML file, which also states
            the kind of the models. Without a recipe they are language models.
        settings: Overrides settings of the recipe, e.g. {"lengths": [256]} or {"reference": "imagenet.npz"}.
        tokenizer: Tokenizer of loaded language models; saved models come with theirs.
        output: Where to store the scores: a .json file (for one model) or a folder (one file per model). Default:
            results.json in the folder of a local model; nothing is written for Hub ids and loaded models.
        include_path: Folder, or list of folders, with further lm-eval tasks.
        data_files: Folder from which lm-eval's tasks read documents instead of from the Hub: NAME.jsonl or NAME.jsonl.gz
            for each task, with the columns of its dataset; examples in the prompt come from NAME.train.jsonl if it exists.
        num_fewshot: Number of examples in the prompt; None means the recipe's or the task's own. Tasks that demand 0 always
            get 0.
        limit: Number of documents, images or prompts, or a fraction below 1 of an lm-eval task, for a quick test.
        batch_size: Number of documents or images per batch; "auto" lets lm-eval choose, for language models.
        seed: Random seed; None means lm-eval's own seeds for its tasks, and 0 for all others.
        dtype: Dtype of the parameters: "auto" (the checkpoint's; float32 for pipelines), "float32", "bfloat16", "float16".
        device: Where saved models run; None means CUDA if available.
        max_length: Longest context of a language model, in tokens; None means the one in its configuration.
        revision, trust_remote_code: As in transformers. MHLA language models need no remote code here; saved pipelines do.
        force: Whether to measure known scores again.
        progress: Whether to show progress bars on stderr.
        command: Shell command to store with the scores; None means the `mhla-hf evaluate` command that repeats them.

    Returns:
        `Comparison`: a dict from name to `Results` with the requested scores.

    Raises:
        ValueError, TypeError: An argument is not valid. Arguments are checked before a model runs, as far as possible.
        ImportError: A library is missing; the message contains the command that installs it.
    """
    arguments = {**locals(), "recipe": _find_recipe(recipe, tasks, settings)}
    args = EvaluationArgs(**{field.name: arguments[field.name] for field in dataclasses.fields(EvaluationArgs)})
    choose_device(device)
    module, judge = JUDGES[args.recipe.kind]
    try:
        compared = Comparison(getattr(importlib.import_module(module, __package__), judge)(models, args))
    except ModuleNotFoundError as error:
        raise ImportError(f"evaluate needs {error.name}, which is missing: pip install 'mhla_hf[eval]'") from error
    compared.columns = args.recipe.columns
    return compared


def _find_recipe(recipe: str | Path | None, tasks: Any, settings: Mapping[str, Any] | None) -> ScoreRecipe:
    """Return the recipe with `settings` and `tasks` applied, or a new one for lm-eval's `tasks`."""
    tasks = tasks.split(",") if isinstance(tasks, str) else tasks
    if tasks is not None:
        if not (isinstance(tasks, (list, tuple)) and all(isinstance(name, str) and name.strip() for name in tasks)):
            raise TypeError(f"tasks: got {tasks!r}, expected task names in a list, or separated by commas.")
        tasks = list(dict.fromkeys(name.strip() for name in tasks))
    if recipe is None:
        if not tasks:
            names = ", ".join(recipe_names())
            raise ValueError(f"tasks: got {tasks} without a recipe, expected names, or a recipe: {names}.")
        if settings:
            raise ValueError(f"settings: got {settings!r} without a recipe, expected a recipe that has them.")
        return ScoreRecipe("language", dict.fromkeys(tasks))
    changed = read_score_recipe(recipe).with_settings(settings or {})
    if unknown := [name for name in tasks or () if name not in changed.tasks]:
        raise ValueError(f"tasks: got {unknown[0]!r}, expected some of the recipe's: {', '.join(changed.tasks)}.")
    return changed if tasks is None else dataclasses.replace(changed, tasks={x: changed.tasks[x] for x in tasks})
