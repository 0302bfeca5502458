"""Estimate the costs of recipes for models of transformers from a configuration.

For image models and text encoders, a step is measured (see `step_costs`). For language models, sizes are added up (see
`costs`).
"""

import copy
import functools
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from ..conversion import convert
from ..conversion.transformers_models import family_to_convert
from ..models.configuration import MHLAConfig
from ..models.derived_classes import base_classes
from ..models.families import ENCODERS, VISION, family_of_type
from ..models.language import MHLAForCausalLM
from ..models.vision import MHLAForImageClassification
from ..models.vision_configuration import MHLAVisionConfig
from .costs import add_up_stages, count_active_parameters, count_disk, estimate_costs
from .recipe import CommonStage, EncoderStage, Recipe
from .step_costs import count_states, count_trained, measure_step, micro_batch_size, set_modes
from .tasks import find_task
from .tasks.base import Task
from .trainable import set_trainable

# Enough for the peak to be where the backward pass begins, not where it ends with all gradients.
MEASURED_SAMPLES = (16, 32)


def estimate_transformers_costs(config: Any, recipe: Recipe, tflops: float | None = None) -> dict[str, Any]:
    """Estimate the memory, FLOPs, and hours that the stages of a recipe take in a single process.

    Args:
        config: Configuration of the softmax original; not used by a recipe with a `preset`.
        recipe: A recipe whose task is not "diffusion".
        tflops: As in `estimate_costs`.

    Returns:
        A dict as that of `estimate_costs`. For image models and encoders, "flops" are those of all matrix products,
        attention, and convolutions, and stages have no "tokens".
    """
    if recipe.task == "language":
        return estimate_language_costs(config, recipe, tflops)
    stages = []
    for stage in recipe.stages:
        with torch.device("meta"):
            task = make_task(config, recipe, stage)
        set_trainable(task.student, stage, {})
        trained, memory = count_trained(task), count_states(task, stage)
        disk = count_disk(task.student.num_parameters(), trained, stage)
        memory["activations"], flops = measure_samples(config, recipe, stage)
        flops *= stage.grad_accum * stage.steps
        stages.append({"name": stage.name, "trained": trained, "memory": memory, "flops": flops, "disk": disk})
    return add_up_stages(stages, tflops)


def suits_config(recipe: Recipe, config: Any) -> bool:
    """Return whether a recipe converts and trains a model with this configuration, or a language model from scratch.

    Args:
        recipe: The recipe.
        config: Configuration of a model of transformers, or None.
    """
    if config is None or "preset" in recipe.settings:
        return recipe.task == "language" and "preset" in recipe.settings
    family = family_of_type(config.model_type)
    if recipe.task != "images":
        kind = "encoders" if family in ENCODERS else "images" if family in VISION else "language"
        return recipe.task == kind
    needs_classes = any(stage.loss in ("logits", "labels") for stage in recipe.stages)
    return family in VISION and (not needs_classes or "ForImageClassification" in softmax_class(config).__name__)


def estimate_language_costs(config: Any, recipe: Recipe, tflops: float | None) -> dict[str, Any]:
    """Estimate the costs of a recipe for language models; see `estimate_costs`.

    Args:
        config: Configuration of the softmax original; not used by a recipe with a `preset`.
        recipe: The recipe.
        tflops: As in `estimate_costs`.
    """
    settings = dict(recipe.settings)
    if preset := settings.pop("preset", None):
        with torch.device("meta"):
            student = MHLAForCausalLM(MHLAConfig.preset(preset, **settings))
    else:
        student = model_without_weights(copy.deepcopy(config))
    sizes = student.num_parameters(), count_active_parameters(student)
    return estimate_costs(student if preset else convert(student, **settings), recipe, *sizes, tflops)


def model_without_weights(config: Any) -> Any:
    """Return the causal language model of a configuration, in eval mode on the meta device.

    Raises:
        NotConvertible, ValueError: The model is not a softmax language model that can be converted.
    """
    start = f"model: got {config.model_type!r}"
    if getattr(config, "mhla", None) is not None:
        raise ValueError(f"{start}, an MHLA model already, expected a softmax one.")
    if (family := family_to_convert(config.model_type)) in (*ENCODERS, *VISION):
        kind = "a vision tower" if family in VISION else "an encoder of text"
        raise ValueError(f"{start}, {kind}, expected a causal language model.")
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config).eval()


def softmax_class(config: Any) -> Any:
    """Return the class that a configuration names, or else the first class of its family."""
    classes = base_classes(family_to_convert(config.model_type))
    return classes.get((config.architectures or [""])[0], next(iter(classes.values())))


def measure_samples(config: Any, recipe: Recipe, stage: CommonStage) -> tuple[int, int]:
    """Return the bytes and the FLOPs of a micro-batch's step; see `measure_step`.

    Both grow linearly with the number of samples, so those of many samples are extrapolated from two smaller numbers.

    Args:
        config, recipe: See `estimate_transformers_costs`.
        stage: The recipe's stage.
    """
    count = micro_batch_size(recipe, stage)
    measured = []
    for samples in (count,) if count <= MEASURED_SAMPLES[1] else MEASURED_SAMPLES:
        with torch.device("meta"):
            task = make_task(config, recipe, stage)
        measured.append(measure_step(task, recipe, stage, functools.partial(make_inputs, task, stage, samples)))
    (few_bytes, few_flops), (bytes_, flops) = measured[0], measured[-1]
    added, more = max(0, count - MEASURED_SAMPLES[1]), MEASURED_SAMPLES[1] - MEASURED_SAMPLES[0]
    return bytes_ + (bytes_ - few_bytes) * added // more, flops + (flops - few_flops) * added // more


def make_task(config: Any, recipe: Recipe, stage: Any) -> Task[Any]:
    """Create the task of a stage, with the student in fp32 and the teacher in the dtype of `mixed_precision`.

    Call this under `torch.device("meta")`. See `estimate_transformers_costs` for the other arguments.
    """
    if "preset" in recipe.settings:
        settings = dict(recipe.settings)
        student = MHLAForImageClassification(MHLAVisionConfig.preset(settings.pop("preset"), **settings))
    else:
        student = convert(softmax_class(config)(copy.deepcopy(config)), **recipe.settings)
    teacher = softmax_class(config)(copy.deepcopy(config)) if stage.needs_teacher else None
    task = find_task(student, teacher, {})
    set_modes(task, recipe)
    return task


def make_inputs(task: Task[Any], stage: Any, count: int) -> tuple[Any, ...]:
    """Return the arguments of the task's objective for `count` samples, of the size in the student's configuration."""
    config = task.student.config
    weight = 1 / stage.batch_size
    if isinstance(stage, EncoderStage):
        return torch.zeros(count, stage.seq_len, dtype=torch.long), weight
    size = config.image_size
    sides = (size, size) if isinstance(size, int) else size
    classes = config.num_labels if stage.reads_labels else 1
    return torch.empty(count, config.num_channels, *sides), torch.empty(count, classes), weight
