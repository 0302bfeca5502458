"""Stages and recipes: what a training run does, as values that can be checked, saved and compared.

A recipe is a YAML file; `conversion/recipes/` has the paper's and the field's. Unusual: a misspelt key is refused, never
left to its default; `batch_size` counts the samples of one optimizer step over all processes and all accumulation, so
that the same recipe gives the same result on one process and on many; and `1e-3` means a number, which YAML 1.1 denies.
"""

import dataclasses
import math
import re
from pathlib import Path
from typing import ClassVar

from ..checkpoints.files import read_yaml

MOST = {"batch_size": 1_000_000}
SCHEDULES = ("cosine", "linear", "constant")
SCIENTIFIC = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")
RUN_KEYS = {
    "mixed_precision": str,
    "save_dtype": str,
    "gradient_checkpointing": bool,
    "save_every": int,
    "log_every": int,
    "tracker": str,
}


@dataclasses.dataclass(frozen=True)
class CommonStage:
    """What a stage of every task has: a loss, the parameters it trains, and how.

    name: the stage's name in logs and records; no two stages share one.
    loss: one of the task's, see the subclass.
    steps: optimizer steps. lr: peak learning rate. lr_mhla: that of the parameters under `.mhla.`; None: `lr`.
    batch_size: samples of one optimizer step, over all processes and accumulation.
    grad_accum: the number of parts each process works its share of the batch off in; changes memory, not the result.
    trainable: "mhla" (only what conversion added), "attention" (the converted attention modules whole), "all". What was
        frozen before the run stays frozen in every case.
    warmup: steps of linear warmup. schedule: "cosine", "linear" or "constant" from there on, down to `lr_end` times lr.
    weight_decay: AdamW's, on matrices outside `.mhla.` only. beta1, beta2, eps: AdamW's.
    max_grad_norm: gradients are clipped to this norm; 0 leaves them.
    ema: decay of the moving average of the trained weights that the stage ends with; it starts lower, at
        (1 + step) / (10 + step). 0: the stage ends with the weights of its last step.
    """

    LOSSES: ClassVar = ()
    WITHOUT_TEACHER: ClassVar = ()
    TRAINABLE: ClassVar = ("mhla", "attention", "all")
    CHOICES: ClassVar = {"schedule": SCHEDULES}
    WHOLE: ClassVar = {"steps": 1, "batch_size": 1, "grad_accum": 1, "warmup": 0}
    POSITIVE: ClassVar = ("lr", "lr_mhla", "eps")
    NOT_NEGATIVE: ClassVar = ("weight_decay", "max_grad_norm")
    SHARES: ClassVar = ("lr_end", "beta1", "beta2", "ema")

    name: str
    loss: str
    steps: int
    lr: float
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
    eps: float = 1e-8
    max_grad_norm: float = 1.0
    ema: float = 0.0

    def __post_init__(self):
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"stage: name is {self.name!r}; expected a non-empty text")
        for key, allowed in {"loss": self.LOSSES, "trainable": self.TRAINABLE, **self.CHOICES}.items():
            if getattr(self, key) not in allowed:
                self._refuse(key, _either(allowed))
        for key, least in self.WHOLE.items():
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST.get(key, value):
                most = f" and at most {MOST[key]:,}" if key in MOST else ""
                self._refuse(key, f"a whole number of at least {least}{most}")
        for key in self.POSITIVE:
            value = getattr(self, key)
            if not (value is None and key == "lr_mhla") and not (_number(value) and value > 0):
                self._refuse(key, "a number above 0")
        for key in self.NOT_NEGATIVE:
            if not _number(getattr(self, key)) or getattr(self, key) < 0:
                self._refuse(key, "a number of at least 0")
        for key in self.SHARES:
            value = getattr(self, key)
            if not _number(value) or not 0 <= value <= 1 or (key in ("beta1", "beta2", "ema") and value == 1):
                self._refuse(key, "a number from 0 to 1")
        if self.loss == "transfer" and self.trainable not in ("mhla", "attention"):
            raise ValueError(
                f"stage {self.name!r}: trainable is {self.trainable!r} with loss 'transfer', which reaches attention "
                "modules only; expected 'mhla' or 'attention'"
            )
        if self.batch_size % self.grad_accum:
            raise ValueError(
                f"stage {self.name!r}: batch_size {self.batch_size} cannot be cut into grad_accum {self.grad_accum} "
                "equal parts"
            )

    @property
    def needs_teacher(self) -> bool:
        """Whether the loss asks a teacher."""
        return self.loss not in self.WITHOUT_TEACHER

    def lr_factor(self, step: int) -> float:
        """What the learning rates of `step` (0-based) are multiplied by; a function of the step alone."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.schedule == "constant":
            return 1.0
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        falling = 0.5 * (1 + math.cos(math.pi * done)) if self.schedule == "cosine" else 1 - done
        return self.lr_end + (1 - self.lr_end) * falling

    def _refuse(self, key, expected):
        raise ValueError(f"stage {self.name!r}: {key} is {getattr(self, key)!r}; expected {expected}")


@dataclasses.dataclass(frozen=True)
class Stage(CommonStage):
    """A stage of a language model's run.

    loss: "transfer" (each MHLA layer's attention output against the softmax original's, on the teacher's inputs),
        "logits" (KL to the teacher's next-token distribution, plus `ce_weight` of cross-entropy), "lm" (cross-entropy).
    seq_len: tokens in a sequence. temperature: of the KL, scaled by its square. The rest: `CommonStage`.
    """

    LOSSES: ClassVar = ("transfer", "logits", "lm")
    WITHOUT_TEACHER: ClassVar = ("lm",)
    WHOLE: ClassVar = CommonStage.WHOLE | {"seq_len": 2}
    POSITIVE: ClassVar = (*CommonStage.POSITIVE, "temperature")
    NOT_NEGATIVE: ClassVar = (*CommonStage.NOT_NEGATIVE, "ce_weight")

    seq_len: int = 512
    ce_weight: float = 0.0
    temperature: float = 1.0


@dataclasses.dataclass(frozen=True)
class DiffusionStage(CommonStage):
    """A stage of a diffusion transformer's run.

    loss: "transfer" (each MHLA layer's attention output against the softmax original's, L1, on the teacher's inputs),
        "prediction" (the teacher's velocity or noise, plus `data_weight` of the flow or DDPM loss), "denoising" (the flow
        or DDPM loss alone).
    trainable: also "lora": what conversion added whole, and low-rank adapters of rank `lora_rank` on the projections of
        the converted attentions, which the stage merges into the weights at its end.
    size: pixels per axis, [rows, columns] or [frames, rows, columns]; None: the data's, or the model's own size.
    timesteps: "logit-normal" or "uniform"; None: logit-normal for a flow, uniform for DDPM. shift: of the times of a flow;
        None: the scheduler's. drop_condition: share of samples that are trained without their text or class.
    sampling_steps, guidance: of the teacher's trajectories, which are the data where there are none.
    The rest: `CommonStage`.
    """

    LOSSES: ClassVar = ("transfer", "prediction", "denoising")
    WITHOUT_TEACHER: ClassVar = ("denoising",)
    TRAINABLE: ClassVar = (*CommonStage.TRAINABLE, "lora")
    CHOICES: ClassVar = CommonStage.CHOICES | {"timesteps": (None, "logit-normal", "uniform")}
    WHOLE: ClassVar = CommonStage.WHOLE | {"lora_rank": 1, "sampling_steps": 1}
    NOT_NEGATIVE: ClassVar = (*CommonStage.NOT_NEGATIVE, "data_weight", "guidance")
    SHARES: ClassVar = (*CommonStage.SHARES, "drop_condition")

    beta2: float = 0.999
    data_weight: float = 0.0
    lora_rank: int = 16
    size: tuple[int, ...] | list[int] | None = None
    timesteps: str | None = None
    shift: float | None = None
    drop_condition: float = 0.1
    sampling_steps: int = 25
    guidance: float = 4.0

    def __post_init__(self):
        super().__post_init__()
        if self.shift is not None and not (_number(self.shift) and self.shift > 0):
            self._refuse("shift", "a number above 0")
        if self.size is not None:
            right = isinstance(self.size, (list, tuple)) and len(self.size) in (2, 3)
            if not right or any(isinstance(side, bool) or not isinstance(side, int) or side < 1 for side in self.size):
                self._refuse("size", "[rows, columns] or [frames, rows, columns] in pixels")
            object.__setattr__(self, "size", list(self.size))


@dataclasses.dataclass(frozen=True)
class ImageStage(CommonStage):
    """A stage of an image classifier's or a vision tower's run.

    loss: "labels" (cross-entropy), "logits" (KL to the teacher's classes, plus `ce_weight` of cross-entropy), "features"
        (the teacher's last hidden state), "transfer" (each MHLA layer's attention output against the softmax original's,
        on the teacher's inputs).
    size: pixels of a side; None: the image processor's. temperature: of the KL, scaled by its square. smoothing: of labels.
    crop: the least share of an image's area that a random crop keeps; 1: the whole image. flip: share of images mirrored.
    shift: pixels that images are moved by at most, around the edges. erase: share of images of which a box becomes noise.
    mixup, cutmix: of each image with another, Beta(a, a); with both, half of the batches each. 0: none.
    The rest: `CommonStage`.
    """

    LOSSES: ClassVar = ("labels", "logits", "features", "transfer")
    WITHOUT_TEACHER: ClassVar = ("labels",)
    WHOLE: ClassVar = CommonStage.WHOLE | {"shift": 0}
    POSITIVE: ClassVar = (*CommonStage.POSITIVE, "temperature")
    NOT_NEGATIVE: ClassVar = (*CommonStage.NOT_NEGATIVE, "ce_weight", "mixup", "cutmix")
    SHARES: ClassVar = (*CommonStage.SHARES, "smoothing", "crop", "flip", "erase")

    beta2: float = 0.999
    size: int | None = None
    ce_weight: float = 0.0
    temperature: float = 1.0
    smoothing: float = 0.0
    crop: float = 1.0
    flip: float = 0.0
    shift: int = 0
    erase: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        if self.size is not None and (isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 1):
            self._refuse("size", "a whole number of pixels")


STAGE_TYPES = {"language": Stage, "diffusion": DiffusionStage, "images": ImageStage}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A whole recipe.

    stages: in order, of the task's type. task: what is trained, one of STAGE_TYPES. about: one or two sentences. base:
    what a conversion starts from (folder or Hub id), or None. tokenizer: folder or Hub id, or None for the base's. data:
    what to train on, as `distill(data=...)` takes it, or None. settings: arguments of `convert`; or `preset` and arguments
    of `MHLAConfig`, for a model from scratch. run: arguments of `distill` (the keys of RUN_KEYS).
    """

    stages: tuple[CommonStage, ...]
    task: str = "language"
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
    return make_recipe(read_yaml(path, "recipe"), str(path))


def make_recipe(content, where="recipe") -> Recipe:
    """A `Recipe` from the dict that a YAML file holds; `where` names it in errors."""
    known = [field.name for field in dataclasses.fields(Recipe)]
    if not isinstance(content, dict) or not content.get("stages"):
        raise ValueError(f"recipe: {where!r} has no stages; expected a mapping with a list under 'stages'")
    _refuse_unknown(content, known, f"recipe {where!r}")
    for key in ("about", "base", "tokenizer", "data"):
        if content.get(key) is not None and not isinstance(content[key], str):
            raise ValueError(f"recipe {where!r}: {key} is {content[key]!r}; expected a text")
    task = content.get("task", "language")
    if task not in STAGE_TYPES:
        raise ValueError(f"recipe {where!r}: task is {task!r}; expected {_either(tuple(STAGE_TYPES))}")
    for key in ("settings", "run"):
        if not isinstance(content.get(key, {}), dict):
            raise ValueError(f"recipe {where!r}: {key} is {content[key]!r}; expected a mapping")
    run = content.get("run", {})
    _refuse_unknown(run, RUN_KEYS, f"recipe {where!r}, run")
    for key, value in run.items():
        if type(value) is not RUN_KEYS[key]:
            raise ValueError(f"recipe {where!r}, run: {key} is {value!r}; expected a {RUN_KEYS[key].__name__}")
    return Recipe(**{**content, "stages": make_stages(content["stages"], STAGE_TYPES[task])})


def make_stages(stages, kind=Stage) -> tuple[CommonStage, ...]:
    """Stages of type `kind` from a list of them or of dicts, checked: at least one, names different, no unknown key."""
    if isinstance(stages, (CommonStage, dict, str)) or not hasattr(stages, "__iter__"):
        raise TypeError(f"stages: got {type(stages).__name__}; expected a list of {kind.__name__} or of mappings")
    made = []
    for number, stage in enumerate(stages, 1):
        if isinstance(stage, kind):
            made.append(stage)
            continue
        if not isinstance(stage, dict):
            raise TypeError(
                f"stages: number {number} is a {type(stage).__name__}; expected a {kind.__name__} or a mapping"
            )
        label = f"stage {stage.get('name', number)!r}"
        _refuse_unknown(stage, [field.name for field in dataclasses.fields(kind)], label)
        for field in dataclasses.fields(kind):
            if field.default is dataclasses.MISSING and field.name not in stage:
                raise ValueError(f"{label}: {field.name} is missing; every stage has name, loss, steps and lr")
        made.append(kind(**{key: _as_number(value) for key, value in stage.items()}))
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
    return " or ".join(filter(None, (", ".join(map(repr, words[:-1])), repr(words[-1]))))


def _number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
