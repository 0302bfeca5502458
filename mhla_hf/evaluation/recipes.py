"""Score recipes: which tasks, how many shots, which protocol, and how the paper's tables are laid out.

A recipe is a YAML file; those of this package are in `recipes/` beside this file and go by their names. Its `columns` say
what each column of a published table is, as (task, metric), so that our scores can be put in that layout.
"""

import dataclasses
from pathlib import Path
from typing import Literal

from huggingface_hub.dataclasses import strict

from ..checkpoints.files import read_yaml
from ..checkpoints.values import read_settings

FOLDER = Path(__file__).parent / "recipes"
COLUMN_KEYS = {"task", "metric", "percent", "mean_of", "higher_is_better"}


@strict
@dataclasses.dataclass
class ScoreRecipe:
    """How to judge.

    kind: of the models. tasks: task -> examples in the prompt, or None for the task's own number; for other kinds than
    language the metrics, with None. settings: the protocol of this kind of model, see `ImageProtocol`, `VideoProtocol`,
    `ClassificationProtocol`, `SpeedProtocol`, `make_needles`. columns: label -> {"task", "metric", "percent",
    "higher_is_better"} or {"mean_of": labels}; empty: no such layout. name: of a recipe of this package, else its file's.
    changed: the settings that are not the file's.
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

    def validate_columns(self):
        """Each is a score, or the mean of such columns."""
        for label, column in self.columns.items():
            parts = column.get("mean_of", [])
            scored = {"task", "metric"} <= set(column)
            if set(column) - COLUMN_KEYS or set(parts) - set(self.columns) or bool(parts) == scored:
                raise ValueError(f"column {label!r} is {column!r}; expected task and metric, or mean_of other columns")

    def words(self, shown=str):
        """The words after `mhla-hf evaluate MODEL` that mean this recipe. shown: text -> how the words say it."""
        words = ["--recipe", shown(self.name)] if self.name else []
        for name, value in self.changed.items():
            if isinstance(value, (list, tuple)):
                value = ",".join(map(str, value))
            words += ["--set", f"{name}={shown(value) if isinstance(value, str) else getattr(value, 'name', value)}"]
        return words


def recipe_names():
    """Names of the recipes that come with this package."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def read_score_recipe(name):
    """A recipe by name, or from a YAML file. ValueError, in one sentence, names what is wrong in it."""
    if isinstance(name, ScoreRecipe):
        return name
    path = FOLDER / f"{name}.yaml" if str(name) in recipe_names() else Path(name)
    if not path.is_file():
        raise ValueError(f"recipe {str(name)!r} is no file; expected one, or a name: {', '.join(recipe_names())}")
    content, what = read_yaml(path, "recipe"), f"recipe {str(name)!r}: "
    if not isinstance(content, dict):
        raise ValueError(f"{what}holds a {type(content).__name__}; expected kind, tasks, settings and columns")
    if isinstance(content.get("tasks"), list):
        content["tasks"] = dict.fromkeys(content["tasks"])
    return read_settings(ScoreRecipe, {**content, "name": path.stem if path.parent == FOLDER else str(name)}, what)


def with_settings(recipe, settings):
    """`recipe` with some of its settings replaced; "sampling.height" is one value of the setting "sampling"."""
    changed, merged = dict(settings or {}), dict(recipe.settings)
    for name, value in changed.items():
        outer, dot, inner = name.partition(".")
        if dot and not isinstance(merged.get(outer, {}), dict):
            raise ValueError(f"settings: {name!r} is given, but {outer} holds no values by name")
        merged[outer] = {**merged.get(outer, {}), inner: value} if dot else value
    return dataclasses.replace(recipe, settings=merged, changed={**recipe.changed, **changed})
