"""evaluate(): one call that judges language models, classifiers, image and video pipelines, one or several side by side.

The recipe's kind decides who judges: `language.py` (lm-eval), `classification.py`, `images.py`, `video.py` (VBench) or
`speed.py`. All of them give `Result` records, run only what is missing, and write after each task. The judges and what they
need are imported when they are asked for.
"""

import dataclasses
import importlib
import math
from pathlib import Path
from typing import Literal

from huggingface_hub.dataclasses import strict

from ..checkpoints.load import choose_device
from ..checkpoints.values import at_least, read_settings
from .recipes import ScoreRecipe, read_score_recipe, recipe_names, with_settings
from .records import paper_rows, render_rows, render_table
from .subjects import paths_of, shown_path

JUDGES = {
    "language": (".language", "judge_language_models"),
    "classification": (".classification", "judge_classifiers"),
    "image": (".images", "judge_image_pipelines"),
    "video": (".video", "judge_video_pipelines"),
    "speed": (".speed", "judge_speed"),
}
LANGUAGE_ONLY = ("tokenizer", "include_path", "num_fewshot", "max_length")


class Comparison(dict):
    """name -> `Results` of what was asked for, in the order of the models; `table()` shows them side by side."""

    recipe = None

    def table(self, style="text"):
        """The scores with their standard errors. style: "text" for a terminal or "markdown"."""
        return render_table(self, style=style)

    def paper_table(self, style="text"):
        """The recipe's columns in the paper's layout, one row per model; "" where there is none to fill."""
        header, rows = paper_rows(self, self.recipe.columns if self.recipe else {})
        return render_rows(header, rows, style=style, left=1) if any(any(row[1:]) for row in rows) else ""

    def plot(self, path):
        """Draw the scores into a PNG: one panel per score, and recall by depth where there is any. Returns its path."""
        from .figures import plot_scores

        return plot_scores(path, self, self.recipe and self.recipe.columns)

    def __str__(self):
        return self.table()


@strict
@dataclasses.dataclass
class Asked:
    """How the user wants it done; the fields are the arguments of `evaluate`."""

    recipe: ScoreRecipe
    tokenizer: object
    output: str | Path | None
    include_path: object
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

    def words(self):
        """The words of the command line that are the same for all kinds of models."""
        names = ("num_fewshot", "limit", "batch_size", "seed", "dtype", "max_length", "revision")
        given = [(name, getattr(self, name)) for name in names]
        given = [(name, value) for name, value in given if value is not None and (name, value) != ("dtype", "auto")]
        given = [("include_path", shown_path(path)) for path in paths_of(self.include_path)] + given
        words = [word for name, value in given for word in (f"--{name.replace('_', '-')}", str(value))]
        return words + (["--trust-remote-code"] if self.trust_remote_code else [])


def evaluate(
    models,
    tasks=None,
    *,
    recipe=None,
    settings=None,
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
    trust_scores=False,
    progress=True,
    command=None,
):
    """Judge models: language models on lm-eval tasks, image classifiers, image pipelines, video pipelines.

    Args:
        models: a folder, a Hub id or a loaded model or pipeline; or a list of folders and ids; or a dict name -> any.
        tasks: names of lm-eval tasks, groups or tags, or patterns with *; a list or one text with commas. With a recipe:
            only these of its tasks. Needed where there is no recipe.
        recipe: name of a score recipe (`table_6_language`, `table_8_longbench`, `recall`, `ruler`, `speed`,
            `table_2_imagenet`, `table_4_text_to_image`, `table_9_class_to_image`, `table_5_vbench`) or a YAML file. It
            says of which kind the models are; without one they are language models.
        settings: replaces some of the recipe's settings, such as {"lengths": [256]} or {"reference": "imagenet.npz"}.
        tokenizer: for loaded language models; else it comes with the model.
        output: where the scores are kept: a .json file (one model) or a folder (one file per model). Default:
            results.json in a local model's folder; nothing is written for Hub ids and loaded models.
        include_path: folder, or list of folders, with further lm-eval tasks, such as `make_tasks` writes.
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
    compared = Comparison(_find_judge(asked.recipe.kind)(models, asked))
    compared.recipe = asked.recipe
    return compared


def _find_judge(kind):
    """The function that judges models of a kind. ImportError with the line that installs what is missing."""
    module, judge = JUDGES[kind]
    try:
        return getattr(importlib.import_module(module, __package__), judge)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("mhla_hf"):
            raise
        raise ImportError(f"evaluate needs {error.name}, which is missing: pip install 'mhla_hf[eval]'") from error


def split_names(tasks):
    """Task names from a list or from one text with commas. ValueError when none is left."""
    if isinstance(tasks, str):
        tasks = tasks.split(",")
    if not isinstance(tasks, (list, tuple)) or not all(isinstance(name, str) for name in tasks):
        raise TypeError(f"tasks is {tasks!r}; expected task names in a list or separated by commas")
    names = [name.strip() for name in tasks if name.strip()]
    if not names:
        raise ValueError("tasks is empty; expected at least one task name")
    return list(dict.fromkeys(names))


def _find_recipe(recipe, tasks, settings):
    """The recipe with the settings and the choice of tasks applied; language models on `tasks` where there is none."""
    names = None if tasks is None else split_names(tasks)
    if recipe is None:
        if names is None:
            names = ", ".join(recipe_names())
            raise ValueError(f"tasks is None and so is recipe; expected task names, or one of {names}")
        if settings:
            raise ValueError(f"settings is {settings!r} without a recipe; expected them with one")
        return ScoreRecipe("language", dict.fromkeys(names))
    recipe = with_settings(read_score_recipe(recipe), settings)
    if names is None:
        return recipe
    if unknown := [name for name in names if name not in recipe.tasks]:
        raise ValueError(f"task {unknown[0]!r} is not in recipe {recipe.name!r}; it has {', '.join(recipe.tasks)}")
    return dataclasses.replace(recipe, tasks={name: recipe.tasks[name] for name in names})
