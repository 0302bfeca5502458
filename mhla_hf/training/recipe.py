"""Stages and recipes of training runs: dataclasses that validate their values and reject unknown keys."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from ..checkpoints import values
from ..checkpoints.file_io import find_yaml, read_yaml
from ..checkpoints.values import Number, checked, read_settings

RECIPE_FOLDER = Path(__file__).parent / "recipes"


@checked
class CommonStage:
    """A stage of a training run: a loss, the parameters that it trains, and the settings of AdamW.

    Args:
        name: Identifies the stage in logs and records; unique within a run.
        loss: One of the losses that the subclass lists. "transfer" is the relative squared error (L1 for diffusion) between
            the attention outputs of MHLA layers and of the softmax original, both on the teacher's hidden states.
        steps: Number of optimizer steps.
        lr: Peak learning rate.
        batch_size: Samples per optimizer step, over all processes and accumulation steps.
        grad_accum: Micro-batches per process and step. Changes the memory, not the result.
        trainable: "mhla" (what the conversion added), "attention" (the converted attention modules) or "all".
        lr_mhla: Peak learning rate of the parameters under `.mhla.`; None means `lr`.
        warmup: Number of steps of linear warmup.
        schedule: Learning-rate schedule after the warmup: "cosine", "linear" or "constant".
        lr_end: Final learning rates, as a fraction of the peak learning rates. Not used by the constant schedule.
        weight_decay: Applied only to matrices outside of `.mhla.`.
        max_grad_norm: Norm to which gradients are clipped; 0 disables clipping.
        ema: Decay of an exponential moving average of the weights, which replaces them at the end of the stage; 0 disables
            it. At step n the decay is at most (1 + n) / (10 + n), so that early weights are forgotten.
    """

    WITHOUT_TEACHER: ClassVar[tuple[str, ...]] = ()  # losses that need no teacher

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

    def validate_trainable(self) -> None:
        if self.loss == "transfer" and self.trainable not in ("mhla", "attention"):
            raise ValueError(f"trainable: got {self.trainable!r} with loss 'transfer', expected 'mhla' or 'attention'.")

    @property
    def needs_teacher(self) -> bool:
        return self.loss not in self.WITHOUT_TEACHER

    def lr_factor(self, step: int) -> float:
        """Return the multiplier of the peak learning rates at `step` (0-based)."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.schedule == "constant":
            return 1.0
        progress = (step - self.warmup) / max(1, self.steps - self.warmup)
        decay = 0.5 * (1 + math.cos(math.pi * progress)) if self.schedule == "cosine" else 1 - progress
        return self.lr_end + (1 - self.lr_end) * decay


@checked
class Stage(CommonStage):
    """A stage that trains a language model; see also the fields of `CommonStage`.

    Args:
        loss: "transfer" (see `CommonStage`), "logits" (KL divergence from the teacher's next-token distribution, plus
            `ce_weight` times cross-entropy), or "lm" (cross-entropy).
        seq_len: Tokens per sequence.
        facts: Fraction of the sequences into which facts are inserted, with questions about them at the end, whose answers
            weigh more in the loss. Without a tokenizer, there are no facts, and a warning is logged.
        temperature: Softmax temperature T of both distributions in the KL divergence, which is multiplied by T^2.
        top_k: Number of the teacher's most likely tokens over which the KL divergence is computed, at temperature 1; all
            others count as one token. This takes less memory. 0 means the whole vocabulary.
    """

    WITHOUT_TEACHER: ClassVar[tuple[str, ...]] = ("lm",)

    loss: Literal["transfer", "logits", "lm"]
    seq_len: int = values.at_least(2, 512)
    facts: Number = values.fraction(0.0)
    ce_weight: Number = values.not_negative(0.0)
    temperature: Number = values.positive(1.0)
    top_k: int = values.at_least(0, 0)

    def validate_top_k(self) -> None:
        if self.top_k and self.temperature != 1:
            got = f"{self.temperature} with top_k {self.top_k}"
            raise ValueError(f"temperature: got {got}, expected 1, or top_k 0.")


@checked
class DiffusionStage(CommonStage):
    """A stage that trains a diffusion transformer; see also the fields of `CommonStage`.

    Args:
        loss: "transfer" (see `CommonStage`), "prediction" (squared error against the teacher's prediction, plus
            `data_weight` times the loss "denoising"), or "denoising" (the usual flow-matching or DDPM loss on data).
        trainable: As in `CommonStage`, or "lora": what the conversion added, and LoRA of rank `lora_rank` on the projections
            of the converted attention modules, merged into their weights at the end of the stage.
        size: Size in pixels, [rows, columns] or [frames, rows, columns]; None means the data's size, or the model's own.
        timesteps: Distribution of timesteps. None means "logit-normal" in flow matching and "uniform" in DDPM.
        shift: Timestep shift toward noise in flow matching; None means the scheduler's.
        drop_condition: Fraction of samples that are trained without their text or class, for classifier-free guidance.
        sampling_steps: Steps of previews and of the teacher's trajectories, on which the student is trained without latents.
        guidance: Scale of the classifier-free guidance of previews and of these trajectories.
    """

    WITHOUT_TEACHER: ClassVar[tuple[str, ...]] = ("denoising",)

    loss: Literal["transfer", "prediction", "denoising"]
    trainable: Literal["mhla", "attention", "all", "lora"] = "all"  # type: ignore[assignment]
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

    def __post_init__(self) -> None:
        self.size = self.size and list(self.size)


@checked
class ImageStage(CommonStage):
    """A stage that trains an image classifier or a vision tower; see also the fields of `CommonStage`.

    Args:
        loss: "labels" (cross-entropy), "logits" (KL divergence from the teacher's class distribution, plus `ce_weight` times
            cross-entropy), "features" (relative squared error against the teacher's last hidden state), or "transfer".
        temperature: Softmax temperature T of both distributions in the KL divergence, which is multiplied by T^2.
        smoothing: Label smoothing, from 0 to 1.
        crop: Smallest area of a random crop, as a fraction of the image's; no side exceeds the image's. 1: no crop.
        flip: Fraction of images that are flipped horizontally.
        shift: Largest distance in pixels by which images are moved, wrapping around at the edges.
        erase: Fraction of images in which a random box is replaced by noise.
        mixup: Parameter a of the distribution Beta(a, a) of mixup's weights; 0 disables mixup.
        cutmix: Likewise for CutMix's weights. If both are set, each batch uses one of them at random.
    """

    WITHOUT_TEACHER: ClassVar[tuple[str, ...]] = ("labels",)

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
    """A stage that trains a text encoder; see also the fields of `CommonStage`.

    Args:
        loss: "transfer" (see `CommonStage`), or "embeddings" (sum of three cosine distances between last hidden states of
            student and teacher: the tokens' mean distance, the first token's, and the distance of the mean-pooled states).
        seq_len: Tokens per sequence, including special tokens.
    """

    loss: Literal["transfer", "embeddings"]
    seq_len: int = values.at_least(2, 128)


@checked
class Options:
    """The arguments of `distill` that a recipe can set under `run`; see `distill`."""

    mixed_precision: Literal["no", "bf16"] | None = None
    save_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    gradient_checkpointing: bool = False
    save_every: int = values.at_least(1, 100)
    log_every: int = values.at_least(1, 10)
    preview_every: int = values.at_least(0, 0)
    tracker: str = ""


STAGE_TYPES: dict[str, type[CommonStage]] = {
    "language": Stage,
    "encoders": EncoderStage,
    "diffusion": DiffusionStage,
    "images": ImageStage,
}


@checked
class Recipe:
    """A training recipe, as read from a YAML file.

    Args:
        stages: Stages, or dicts with their fields, in the order in which they run.
        task: Kind of model, a key of `STAGE_TYPES`.
        about: One or two sentences about the recipe.
        base: Folder or Hub id of the softmax model that is converted.
        tokenizer: Folder or Hub id of the tokenizer; None means the tokenizer of `base`.
        data: Training data: a path or a Hub id that `distill` accepts.
        settings: Arguments of `convert`; or, to train from scratch, the model's `preset` and settings that differ from it.
        processes: Number of processes that the recipe is meant for; a run may have any number.
        run: Fields of `Options`.
    """

    stages: list | tuple
    task: Literal["language", "encoders", "diffusion", "images"] = "language"
    about: str = ""
    base: str | None = None
    tokenizer: str | None = None
    data: str | None = None
    settings: dict = dataclasses.field(default_factory=dict)
    processes: int = values.at_least(1, 1)
    run: dict = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.stages = make_stages(self.stages, STAGE_TYPES[self.task])
        read_settings(Options, self.run, "run: ")


def recipe_names() -> list[str]:
    return sorted(path.stem for path in RECIPE_FOLDER.glob("*.yaml"))


def describe_recipes() -> list[dict[str, Any]]:
    stage_keys = ("name", "loss", "steps", "batch_size", "seq_len")
    recipes = []
    for name in recipe_names():
        recipe = read_recipe(name)
        stages = [{key: getattr(stage, key) for key in stage_keys if hasattr(stage, key)} for stage in recipe.stages]
        fields = {"task": recipe.task, "base": recipe.base, "stages": stages, "about": recipe.about}
        recipes.append({"name": name, **fields})
    return recipes


def read_recipe(name: str | Path | Recipe, changes: Mapping[str, Any] | None = None) -> Recipe:
    """Read and check one of `recipe_names()`, or a YAML file; a `Recipe` is returned unchanged.

    `changes` maps keys to new values: "STAGE.FIELD", "*.FIELD" (in every stage), "settings.FIELD", "run.FIELD", or the name
    of a field of `Recipe`.
    """
    if isinstance(name, Recipe):
        return name
    content = read_yaml(find_yaml(name, RECIPE_FOLDER, "recipe"), "recipe")
    fields: dict[str, Any] = content if isinstance(content, dict) else {}  # what does not fit is refused below
    stage_list = fields["stages"] if isinstance(fields.get("stages"), list) else []
    stages = {stage.get("name"): stage for stage in stage_list if isinstance(stage, dict)}
    for key, value in (changes or {}).items():
        section, dot, field = key.rpartition(".")
        if not dot:
            fields[field] = value
        elif section == "*":
            for stage in stages.values():
                stage[field] = value
        elif section in ("settings", "run"):
            fields[section] = {**(fields.get(section) or {}), field: value}
        elif section in stages:
            stages[section][field] = value
        else:
            allowed_keys = ", ".join(f"{name}.*" for name in (*stages, "settings", "run"))
            raise ValueError(f"set: got {key!r}, expected one of {allowed_keys}.")
    return read_settings(Recipe, content, f"recipe {str(name)!r}: ")


def make_stages(stages: Any, stage_type: type[CommonStage] = Stage) -> tuple[CommonStage, ...]:
    if not isinstance(stages, (list, tuple)) or not stages:
        expected = f"a list of {stage_type.__name__} or of mappings, at least one"
        raise ValueError(f"stages: got {stages!r:.80}, expected {expected}.")
    checked_stages: list[CommonStage] = []
    for number, stage in enumerate(stages, 1):
        name = stage.get("name", number) if isinstance(stage, dict) else number
        is_checked = isinstance(stage, stage_type)
        checked_stages.append(stage if is_checked else read_settings(stage_type, stage, f"stage {name!r}: "))
    names = [stage.name for stage in checked_stages]
    if len(set(names)) < len(names) or not all(names):
        raise ValueError(f"stages: got the names {', '.join(map(repr, names))}, expected different, nonempty ones.")
    return tuple(checked_stages)
