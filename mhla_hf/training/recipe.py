"""Stages and recipes: what a training run does, as values that are checked, saved and compared. Unknown keys are refused."""

import copy
import dataclasses
import math
from pathlib import Path
from typing import ClassVar, Literal

from ..checkpoints import values
from ..checkpoints.file_io import find_yaml, read_yaml
from ..checkpoints.values import Number, checked, read_settings

FOLDER = Path(__file__).parent / "recipes"


@checked
class CommonStage:
    """What a stage of every task has: a loss, the parameters it trains, and how.

    name: in logs and records; no two stages share one. loss: one of the task's, see the subclass.
    steps: optimizer steps. lr: peak learning rate. lr_mhla: that of the parameters under `.mhla.`; None: `lr`.
    batch_size: samples of one optimizer step, over all processes and accumulation.
    grad_accum: the number of parts each process works its share of the batch off in; changes memory, not the result.
    trainable: "mhla" (only what conversion added), "attention" (the converted attention modules whole), "all".
    warmup: steps of linear warmup. schedule: "cosine", "linear" or "constant" from there on, down to `lr_end` times lr.
    weight_decay: AdamW's, on matrices outside `.mhla.` only. beta1, beta2, eps: AdamW's.
    max_grad_norm: gradients are clipped to this norm; 0 leaves them.
    ema: decay, from (1 + step) / (10 + step) up, of the moving average of the weights with which the stage ends; 0: none.
    """

    WITHOUT_TEACHER: ClassVar = ()

    name: str
    loss: str
    steps: int = values.at_least(1)
    lr: Number = values.positive()
    batch_size: int = values.checked_field(lambda value: 1 <= value <= 1_000_000, "a whole number from 1 to 1000000", 8)
    grad_accum: int = values.at_least(1, 1)
    trainable: Literal["mhla", "attention", "all"] = "all"
    lr_mhla: Number | None = values.positive(None)
    warmup: int = values.at_least(0, 0)
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    lr_end: Number = values.fraction(0.0)
    weight_decay: Number = values.not_negative(0.0)
    beta1: Number = values.fraction_below_one(0.9)
    beta2: Number = values.fraction_below_one(0.95)
    eps: Number = values.positive(1e-8)
    max_grad_norm: Number = values.not_negative(1.0)
    ema: Number = values.fraction_below_one(0.0)

    def validate_trainable(self):
        if self.loss == "transfer" and self.trainable not in ("mhla", "attention"):
            raise ValueError(f"trainable is {self.trainable!r} with loss 'transfer'; expected 'mhla' or 'attention'")

    @property
    def needs_teacher(self) -> bool:
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


@checked
class Stage(CommonStage):
    """A stage of a language model's run.

    loss: "transfer" (each MHLA layer's attention output against the softmax original's, on the teacher's inputs),
        "logits" (KL to the teacher's next-token distribution, plus `ce_weight` of cross-entropy), "stored" (the same with
        what `teach` wrote, and no teacher), "lm" (cross-entropy).
    seq_len: tokens in a sequence. temperature: of the KL, scaled by its square; 1 with `top_k`. top_k: the KL is over that
        many of the teacher's likeliest tokens and all others as one; 0: over all. The rest: `CommonStage`.
    """

    WITHOUT_TEACHER: ClassVar = ("lm", "stored")

    loss: Literal["transfer", "logits", "stored", "lm"]
    seq_len: int = values.at_least(2, 512)
    ce_weight: Number = values.not_negative(0.0)
    temperature: Number = values.positive(1.0)
    top_k: int = values.at_least(0, 0)

    def validate_top_k(self):
        if (self.top_k or self.loss == "stored") and self.temperature != 1:
            raise ValueError(f"temperature is {self.temperature} with a KL over the likeliest tokens; expected 1")


@checked
class DiffusionStage(CommonStage):
    """A stage of a diffusion transformer's run.

    loss: "transfer" (each MHLA layer's attention output against the softmax original's, L1, on the teacher's inputs),
        "prediction" (the teacher's velocity or noise, plus `data_weight` of the flow or DDPM loss), "denoising" (the flow
        or DDPM loss alone).
    trainable: also "lora": what conversion added, and adapters of rank `lora_rank` on the projections of the converted
        attentions, which the stage merges into the weights at its end.
    size: pixels per axis, [rows, columns] or [frames, rows, columns]; None: the data's, or the model's own size.
    timesteps: "logit-normal" or "uniform"; None: logit-normal for a flow, uniform for DDPM. shift: of the times of a flow;
        None: the scheduler's. drop_condition: share of samples that are trained without their text or class.
    sampling_steps, guidance: of the teacher's trajectories, which are the data where there are none.
    The rest: `CommonStage`.
    """

    WITHOUT_TEACHER: ClassVar = ("denoising",)

    loss: Literal["transfer", "prediction", "denoising"]
    trainable: Literal["mhla", "attention", "all", "lora"] = "all"
    beta2: Number = values.fraction_below_one(0.999)
    data_weight: Number = values.not_negative(0.0)
    lora_rank: int = values.at_least(1, 16)
    size: list | tuple | None = values.checked_field(
        lambda sides: len(sides) in (2, 3) and all(type(side) is int and side > 0 for side in sides),
        "[rows, columns] or [frames, rows, columns] in pixels", None,
    )  # fmt: skip
    timesteps: Literal["logit-normal", "uniform"] | None = None
    shift: Number | None = values.positive(None)
    drop_condition: Number = values.fraction(0.1)
    sampling_steps: int = values.at_least(1, 25)
    guidance: Number = values.not_negative(4.0)

    def __post_init__(self):
        self.size = self.size and list(self.size)


@checked
class ImageStage(CommonStage):
    """A stage of an image classifier's or a vision tower's run.

    loss: "labels" (cross-entropy), "logits" (KL to the teacher's classes, plus `ce_weight` of cross-entropy), "features"
        (the teacher's last hidden state), "transfer" (each MHLA layer's attention output against the softmax original's,
        on the teacher's inputs).
    temperature: of the KL, scaled by its square. smoothing: of labels.
    crop: the least share of an image's area that a random crop keeps; 1: the whole image. flip: share of images mirrored.
    shift: pixels that images are moved by at most, around the edges. erase: share of images of which a box becomes noise.
    mixup, cutmix: of each image with another, Beta(a, a); with both, half of the batches each. 0: none.
    The rest: `CommonStage`.
    """

    WITHOUT_TEACHER: ClassVar = ("labels",)

    loss: Literal["labels", "logits", "features", "transfer"]
    beta2: Number = values.fraction_below_one(0.999)
    ce_weight: Number = values.not_negative(0.0)
    temperature: Number = values.positive(1.0)
    smoothing: Number = values.fraction(0.0)
    crop: Number = values.fraction(1.0)
    flip: Number = values.fraction(0.0)
    shift: int = values.at_least(0, 0)
    erase: Number = values.fraction(0.0)
    mixup: Number = values.not_negative(0.0)
    cutmix: Number = values.not_negative(0.0)

    @property
    def reads_labels(self) -> bool:
        return self.loss == "labels" or (self.loss == "logits" and self.ce_weight > 0)


@checked
class EncoderStage(CommonStage):
    """A stage of a text encoder's run.

    loss: "transfer" (each MHLA layer's attention output against the softmax original's, on the teacher's inputs),
        "embeddings" (1 - cosine to the teacher's last hidden state: of each token, of the first one, and of their mean).
    seq_len: tokens in a sequence, special ones included. The rest: `CommonStage`.
    """

    loss: Literal["transfer", "embeddings"]
    seq_len: int = values.at_least(2, 128)


@checked
class Options:
    """How a run is worked off: arguments of `distill` that a recipe may hold under `run`; see there."""

    mixed_precision: Literal["no", "bf16"] | None = None
    save_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    gradient_checkpointing: bool = False
    save_every: int = values.at_least(1, 100)
    log_every: int = values.at_least(1, 10)
    tracker: str = ""


STAGE_TYPES = {"language": Stage, "encoders": EncoderStage, "diffusion": DiffusionStage, "images": ImageStage}


@checked
class Recipe:
    """A whole recipe.

    stages: in order, of the task's type. task: what is trained. about: one or two sentences. base: what a conversion starts
    from (folder or Hub id). tokenizer: folder or Hub id; None: the base's. data: what to train on, as `distill` takes it.
    settings: arguments of `convert`; or `preset` and arguments of `MHLAConfig`, from scratch. run: fields of `Options`.
    """

    stages: list | tuple
    task: Literal["language", "encoders", "diffusion", "images"] = "language"
    about: str = ""
    base: str | None = None
    tokenizer: str | None = None
    data: str | None = None
    settings: dict = dataclasses.field(default_factory=dict)
    run: dict = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        self.stages = make_stages(self.stages, STAGE_TYPES[self.task])
        read_settings(Options, self.run, "run: ")


def recipe_names() -> list[str]:
    """Names of the recipes that come with this package."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def read_recipe(name, changes=None) -> Recipe:
    """A recipe by name, or from a YAML file. ValueError, one sentence, for whatever is wrong with it.

    name: one of `recipe_names()` or a path; a `Recipe` is given back. changes: values that replace the recipe's, by
    "STAGE.FIELD" ("*.FIELD": of every stage), "settings.FIELD", "run.FIELD", or the name of a field of `Recipe`.
    """
    if isinstance(name, Recipe):
        return name
    content = read_yaml(find_yaml(name, FOLDER, "recipe"), "recipe")
    if changes and isinstance(content, dict):
        content = changed(content, changes)
    return read_settings(Recipe, content, f"recipe {str(name)!r}: ")


def changed(content: dict, changes: dict) -> dict:
    """A recipe as YAML has it with some values replaced, see `read_recipe`. ValueError: there is no such place."""
    content = copy.deepcopy(content)
    listed = content.get("stages") if isinstance(content.get("stages"), list) else []
    stages = {stage.get("name"): stage for stage in listed if isinstance(stage, dict)}
    for place, value in changes.items():
        outer, dot, field = place.rpartition(".")
        if not dot:
            content[field] = value
        elif outer == "*":
            for stage in stages.values():
                stage[field] = value
        elif outer in ("settings", "run"):
            content[outer] = {**(content.get(outer) or {}), field: value}
        elif outer in stages:
            stages[outer][field] = value
        else:
            known = ", ".join(f"{name}.*" for name in (*stages, "settings", "run"))
            raise ValueError(f"set: got {place!r}, and the recipe has no {outer!r}; expected one of {known}")
    return content


def make_stages(stages, kind=Stage) -> tuple[CommonStage, ...]:
    """Stages of type `kind` from a list of them or of dicts, checked: at least one, names different, no unknown key."""
    if not isinstance(stages, (list, tuple)) or not stages:
        raise ValueError(f"stages: got {stages!r:.80}; expected a list of {kind.__name__} or of mappings, at least one")
    made = []
    for number, stage in enumerate(stages, 1):
        name = stage.get("name", number) if isinstance(stage, dict) else number
        made.append(stage if isinstance(stage, kind) else read_settings(kind, stage, f"stage {name!r}: "))
    names = [stage.name for stage in made]
    if len(set(names)) < len(names) or not all(names):
        raise ValueError(f"stages: their names are {', '.join(map(repr, names))}; expected different ones")
    return tuple(made)
