"""Stages and recipes: what a training run does, as values that can be checked, saved and compared.

A recipe is a YAML file; `conversion/recipes/` has the paper's and the field's. Unusual: a misspelt key is refused, never
left to its default; `batch_size` counts the sequences of one optimizer step over all processes and all accumulation, so
that the same recipe gives the same result on one process and on many; and `1e-3` means a number, which YAML 1.1 denies.
"""

import dataclasses
import math
import re
from pathlib import Path

import yaml

LOSSES = ("transfer", "logits", "lm")
TRAINABLE = ("mhla", "attention", "all")
SCHEDULES = ("cosine", "linear", "constant")
SCIENTIFIC = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")
RUN_KEYS = {
    "mixed_precision": str,
    "gradient_checkpointing": bool,
    "save_every": int,
    "log_every": int,
    "tracker": str,
}


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage of a run: a loss, the parameters it trains, and how.

    name: the stage's name in logs and records; no two stages share one.
    loss: "transfer" (each MHLA layer's attention output against the softmax original's, on the teacher's inputs),
        "logits" (KL to the teacher's next-token distribution, plus `ce_weight` of cross-entropy), "lm" (cross-entropy).
    steps: optimizer steps. lr: peak learning rate. lr_mhla: that of the parameters under `.mhla.`; None: `lr`.
    seq_len: tokens in a sequence. batch_size: sequences of one optimizer step, over all processes and accumulation.
    grad_accum: the number of parts each process works its share of the batch off in; changes memory, not the result.
    trainable: "mhla" (only what conversion added), "attention" (the converted attention modules whole), "all". What was
        frozen before the run stays frozen in every case.
    warmup: steps of linear warmup. schedule: "cosine", "linear" or "constant" from there on, down to `lr_end` times lr.
    weight_decay: AdamW's, on matrices outside `.mhla.` only. beta1, beta2: AdamW's.
    max_grad_norm: gradients are clipped to this norm; 0 leaves them. temperature: of the KL, scaled by its square.
    """

    name: str
    loss: str
    steps: int
    lr: float
    seq_len: int = 512
    batch_size: int = 8
    grad_accum: int = 1
    trainable: str = "all"
    lr_mhla: float | None = None
    warmup: int = 0
    schedule: str = "cosine"
    lr_end: float = 0.0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    max_grad_norm: float = 1.0
    ce_weight: float = 0.0
    temperature: float = 1.0

    def __post_init__(self):
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"stage: name is {self.name!r}; expected a non-empty text")
        for key, allowed in (("loss", LOSSES), ("trainable", TRAINABLE), ("schedule", SCHEDULES)):
            if getattr(self, key) not in allowed:
                raise ValueError(f"stage {self.name!r}: {key} is {getattr(self, key)!r}; expected {_either(allowed)}")
        for key, least in (("steps", 1), ("seq_len", 2), ("batch_size", 1), ("grad_accum", 1), ("warmup", 0)):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(
                    f"stage {self.name!r}: {key} is {value!r}; expected a whole number of at least {least}"
                )
        for key in ("lr", "temperature", "lr_mhla"):
            value = getattr(self, key)
            if not (value is None and key == "lr_mhla") and not (_number(value) and value > 0):
                raise ValueError(f"stage {self.name!r}: {key} is {value!r}; expected a number above 0")
        for key in ("weight_decay", "max_grad_norm", "ce_weight", "lr_end", "beta1", "beta2"):
            value = getattr(self, key)
            limit = 1 if key in ("lr_end", "beta1", "beta2") else math.inf
            if not _number(value) or not 0 <= value <= limit or (key.startswith("beta") and value == 1):
                wanted = "from 0 to 1" if limit == 1 else "of at least 0"
                raise ValueError(f"stage {self.name!r}: {key} is {value!r}; expected a number {wanted}")
        if self.loss == "transfer" and self.trainable == "all":
            raise ValueError(
                f"stage {self.name!r}: trainable is 'all' with loss 'transfer', which reaches attention modules only; "
                "expected 'mhla' or 'attention'"
            )
        if self.batch_size % self.grad_accum:
            raise ValueError(
                f"stage {self.name!r}: batch_size {self.batch_size} cannot be cut into grad_accum {self.grad_accum} "
                "equal parts"
            )

    def lr_factor(self, step: int) -> float:
        """What the learning rates of `step` (0-based) are multiplied by; a function of the step alone."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.schedule == "constant":
            return 1.0
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        falling = 0.5 * (1 + math.cos(math.pi * done)) if self.schedule == "cosine" else 1 - done
        return self.lr_end + (1 - self.lr_end) * falling


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A whole recipe.

    stages: in order. about: one or two sentences. base: what a conversion starts from (folder or Hub id), or None.
    tokenizer: folder or Hub id, or None for the base's. data: text to train on, as `distill(data=...)` takes it, or
    None. settings: arguments of `convert`; or `preset` and arguments of `MHLAConfig`, for a model from scratch. run:
    arguments of `distill` (the keys of RUN_KEYS).
    """

    stages: tuple[Stage, ...]
    about: str = ""
    base: str | None = None
    tokenizer: str | None = None
    data: str | None = None
    settings: dict = dataclasses.field(default_factory=dict)
    run: dict = dataclasses.field(default_factory=dict)


def read_recipe(path) -> Recipe:
    """Read a recipe from a YAML file. ValueError, one sentence, for whatever is wrong with it."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(
            f"recipe: {str(path)!r} is not a file; expected a YAML file such as those in conversion/recipes"
        )
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"recipe: {str(path)!r} is not YAML ({' '.join(str(error).split())})") from None
    return make_recipe(content, str(path))


def make_recipe(content, where="recipe") -> Recipe:
    """A `Recipe` from the dict that a YAML file holds; `where` names it in errors."""
    known = [field.name for field in dataclasses.fields(Recipe)]
    if not isinstance(content, dict) or not content.get("stages"):
        raise ValueError(f"recipe: {where!r} has no stages; expected a mapping with a list under 'stages'")
    _refuse_unknown(content, known, f"recipe {where!r}")
    for key in ("about", "base", "tokenizer", "data"):
        if content.get(key) is not None and not isinstance(content[key], str):
            raise ValueError(f"recipe {where!r}: {key} is {content[key]!r}; expected a text")
    for key in ("settings", "run"):
        if not isinstance(content.get(key, {}), dict):
            raise ValueError(f"recipe {where!r}: {key} is {content[key]!r}; expected a mapping")
    run = content.get("run", {})
    _refuse_unknown(run, RUN_KEYS, f"recipe {where!r}, run")
    for key, value in run.items():
        if type(value) is not RUN_KEYS[key]:
            raise ValueError(f"recipe {where!r}, run: {key} is {value!r}; expected a {RUN_KEYS[key].__name__}")
    return Recipe(**{**content, "stages": make_stages(content["stages"])})


def make_stages(stages) -> tuple[Stage, ...]:
    """`Stage`s from a list of `Stage` or dict, checked: at least one, names all different, no unknown key."""
    if isinstance(stages, (Stage, dict, str)) or not hasattr(stages, "__iter__"):
        raise TypeError(f"stages: got {type(stages).__name__}; expected a list of Stage or of mappings")
    made = []
    for number, stage in enumerate(stages, 1):
        if isinstance(stage, Stage):
            made.append(stage)
            continue
        if not isinstance(stage, dict):
            raise TypeError(f"stages: number {number} is a {type(stage).__name__}; expected a Stage or a mapping")
        label = f"stage {stage.get('name', number)!r}"
        _refuse_unknown(stage, [field.name for field in dataclasses.fields(Stage)], label)
        for field in dataclasses.fields(Stage):
            if field.default is dataclasses.MISSING and field.name not in stage:
                raise ValueError(f"{label}: {field.name} is missing; every stage has name, loss, steps and lr")
        made.append(Stage(**{key: _as_number(value) for key, value in stage.items()}))
    if not made:
        raise ValueError("stages: the list is empty; expected at least one stage")
    names = [stage.name for stage in made]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"stages: {name!r} names {names.count(name)} stages; expected different names")
    return tuple(made)


def _refuse_unknown(mapping, known, where):
    for key in mapping:
        if key not in known:
            raise ValueError(f"{where}: unknown key {key!r}; expected one of {', '.join(known)}")


def _as_number(value):
    return float(value) if isinstance(value, str) and SCIENTIFIC.fullmatch(value) else value


def _either(words):
    return ", ".join(map(repr, words[:-1])) + f" or {words[-1]!r}"


def _number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
