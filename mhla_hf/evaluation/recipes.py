"""Score recipes: which tasks, how many shots, which protocol, and how the paper's tables are laid out.

A recipe is a YAML file; those of this package are in `recipes/` beside this file and go by their names. Unusual: its
`columns` say what each column of a published table is, as (task, metric), so that our scores can be put in that layout.
"""

import dataclasses
from pathlib import Path

from ..checkpoints.files import read_yaml

FOLDER = Path(__file__).parent / "recipes"
KINDS = ("language", "classification", "image", "video", "speed")
KEYS = ("about", "kind", "tasks", "settings", "columns")
COLUMN_KEYS = ("task", "metric", "percent", "mean_of", "higher_is_better")


@dataclasses.dataclass(frozen=True)
class ScoreRecipe:
    """How to judge.

    name: of a recipe of this package, else its file's. kind: of the models, one of `KINDS`. about: what it is for.
    tasks: task -> examples in the prompt, or None for the task's own number; for images and videos the metrics, with None.
    settings: the protocol of this kind of model; see `ImageProtocol`, `VideoProtocol`, `ClassificationProtocol`,
        `make_needles`. changed: those that are not the file's.
    columns: label -> {"task", "metric", "percent"} or {"mean_of": labels}; empty: no such layout.
    """

    name: str
    kind: str
    about: str
    tasks: dict
    settings: dict
    columns: dict
    changed: dict = dataclasses.field(default_factory=dict)

    def words(self, shown=str):
        """The words after `mhla-hf evaluate MODEL` that mean this recipe; shown: how a text among the settings is told."""
        words = ["--recipe", shown(self.name)]
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
    content = read_yaml(path, "recipe")
    if not isinstance(content, dict):
        raise ValueError(f"recipe {str(name)!r} holds a {type(content).__name__}; expected keys {', '.join(KEYS)}")
    _check(str(name), content)
    own = path.parent == FOLDER
    return ScoreRecipe(
        name=path.stem if own else str(name),
        kind=content["kind"],
        about=content.get("about", ""),
        tasks=_tasks(content.get("tasks")),
        settings=dict(content.get("settings") or {}),
        columns=dict(content.get("columns") or {}),
    )


def _tasks(tasks):
    return dict(tasks) if isinstance(tasks, dict) else dict.fromkeys(tasks)


def _check(name, content):
    where = f"recipe {name!r}"
    if unknown := sorted(set(content) - set(KEYS)):
        raise ValueError(f"{where}: unknown key {unknown[0]!r}; a score recipe has {', '.join(KEYS)}")
    if content.get("kind") not in KINDS:
        raise ValueError(f"{where}: kind is {content.get('kind')!r}; expected {', '.join(KINDS)}")
    tasks = content.get("tasks")
    if not tasks or not isinstance(tasks, (dict, list)) or not all(isinstance(task, str) for task in tasks):
        raise ValueError(f"{where}: tasks is {tasks!r}; expected names, or names with the examples in the prompt")
    for task, shots in _tasks(tasks).items():
        if shots is not None and (isinstance(shots, bool) or not isinstance(shots, int) or shots < 0):
            raise ValueError(f"{where}: task {task!r} has {shots!r} shots; expected a whole number")
    if not isinstance(content.get("settings") or {}, dict):
        raise ValueError(f"{where}: settings is {content['settings']!r}; expected names and values")
    columns = content.get("columns") or {}
    for label, column in columns.items():
        if not isinstance(column, dict) or set(column) - set(COLUMN_KEYS):
            raise ValueError(f"{where}: column {label!r} is {column!r}; expected keys {', '.join(COLUMN_KEYS)}")
        parts = column.get("mean_of", [])
        if any(part not in columns for part in parts) or bool(parts) == ("metric" in column):
            raise ValueError(
                f"{where}: column {label!r} needs task and metric, or mean_of with labels of other columns"
            )


def with_settings(recipe, settings):
    """`recipe` with some of its settings replaced; "sampling.height" is one value of the setting "sampling"."""
    changed = dict(settings or {})
    merged = dict(recipe.settings)
    for name, value in changed.items():
        outer, dot, inner = name.partition(".")
        if dot and not isinstance(merged.get(outer, {}), dict):
            raise ValueError(f"settings: {name!r} is given, but {outer} holds no values by name")
        merged[outer] = {**merged.get(outer, {}), inner: value} if dot else value
    return dataclasses.replace(recipe, settings=merged, changed={**recipe.changed, **changed})
