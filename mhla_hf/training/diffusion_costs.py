"""Estimate the costs of diffusion recipes from the configuration of a transformer; see `step_costs`."""

import functools
import math
import os
import types
from collections.abc import Mapping
from typing import Any

import diffusers
import torch
from diffusers import AutoModel

from ..conversion.model_family import mhla_class, transformer_family
from ..models.diffusion_inputs import BLOCK_LISTS, read_grid
from ..models.dit_transformer import MHLADiTTransformer2DModel
from .costs import FP32_BYTES, add_up_stages, count_disk
from .recipe import Recipe
from .step_costs import count_states, count_trained, measure_step, micro_batch_size, set_modes
from .tasks.diffusion import DiffusionTask
from .trainable import find_mhla_attentions, set_trainable

TEXT_TOKENS = 512
# With FSDP2, a process holds the weights of the block at work and of the next one, and the gradients of one.
GATHERED_BLOCKS = 2
MEASURED_DEPTHS = (3, 6)  # multiples of three, for layers "2/3"


def estimate_diffusion_costs(
    config: Mapping[str, Any], vae: Mapping[str, Any], recipe: Recipe, tflops: float | None = None
) -> dict[str, Any]:
    """Estimate the memory, FLOPs, and hours that the stages of a diffusion recipe take.

    The memory is that of one of `recipe.processes` processes, over which FSDP2 shards all weights. It does not include the
    text encoder, which leaves the device before a step begins, and what CUDA takes for itself.

    Args:
        config: Configuration of the base's transformer, with its class as `_class_name`.
        vae: The same of its VAE, whose factors turn sizes in pixels into those of latents.
        recipe: The recipe.
        tflops: As in `estimate_costs`.

    Returns:
        A dict as that of `estimate_costs`.
    """
    stages = []
    for stage in recipe.stages:
        with torch.device("meta"):
            task = make_task(config, recipe, stage)
            shape = latent_shape(task.student.config, vae, stage)
        parameters = task.student.num_parameters()
        attentions = [task.student.get_submodule(name) for name in find_mhla_attentions(task.student)]
        attention_parameters = sum(x.numel() for module in attentions for x in module.parameters())
        with torch.device("meta"), task.prepare(stage):
            set_trainable(task.student, stage, {})
            trained = count_trained(task)
            memory = {name: size // recipe.processes for name, size in count_states(task, stage).items()}
            memory["gathered"] = count_gathered(task.student, trained, recipe.processes)
        memory["activations"] = measure_depths(config, shape, recipe, stage)
        grid = read_grid(task.student.family.kind, task.student.config, torch.empty(1, *shape, device="meta"), {})
        tokens = stage.steps * stage.batch_size * math.prod(grid)
        student_weights = attention_parameters if stage.loss == "transfer" else parameters
        teacher_weights = parameters if stage.needs_teacher else 0
        stages.append({
            "name": stage.name,
            "tokens": tokens,
            "trained": trained,
            "memory": memory,
            "flops": (6 * student_weights + 2 * teacher_weights) * tokens,
            "disk": count_disk(parameters, trained, stage),
        })  # fmt: skip
    return add_up_stages(stages, tflops)


def read_pipeline_configs(name: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the configurations of the transformer and of the VAE of a pipeline, a folder or Hub id."""
    transformer, vae = (AutoModel.load_config(name, subfolder=subfolder) for subfolder in ("transformer", "vae"))
    return transformer, vae


def suits_transformer(recipe: Recipe, config: Mapping[str, Any]) -> bool:
    """Return whether a diffusion recipe converts and trains a transformer with this configuration."""
    family = transformer_family(getattr(diffusers, config["_class_name"]))
    if recipe.task != "diffusion" or family is None or not family.conditions:
        return False
    return "preset" not in recipe.settings and len(recipe.settings.get("layout", ())) == family.kind.axes


def measure_depths(config: Mapping[str, Any], shape: tuple[int, ...], recipe: Recipe, stage: Any) -> int:
    """Return the bytes that a step allocates for a micro-batch, without the gradients that it leaves.

    The bytes grow linearly with the number of layers, so those of a deep model are extrapolated from two shallow ones.

    Args:
        config: See `estimate_diffusion_costs`.
        shape: Shape of a sample's latents.
        recipe, stage: The recipe and its stage.
    """
    depth = 0 if "preset" in recipe.settings else config.get("num_layers", 0)
    if depth <= MEASURED_DEPTHS[1] or recipe.settings.get("layers", "all") not in ("all", "2/3"):
        return measure_activations(config, shape, recipe, stage)
    shallow, deep = (measure_activations({**config, "num_layers": d}, shape, recipe, stage) for d in MEASURED_DEPTHS)
    return deep + (deep - shallow) * (depth - MEASURED_DEPTHS[1]) // (MEASURED_DEPTHS[1] - MEASURED_DEPTHS[0])


def measure_activations(config: Mapping[str, Any], shape: tuple[int, ...], recipe: Recipe, stage: Any) -> int:
    """Return the bytes that a step of a model with all of its layers allocates. See `measure_depths` for the arguments."""
    with torch.device("meta"):
        task = make_task(config, recipe, stage)
    count = micro_batch_size(recipe, stage)
    return measure_step(task, recipe, stage, functools.partial(make_inputs, task, stage, shape, count))[0]


def make_task(config: Mapping[str, Any], recipe: Recipe, stage: Any) -> DiffusionTask:
    """Create the task of a stage, with the student in fp32 and the teacher in the dtype of `mixed_precision`.

    Call this under `torch.device("meta")`. See `estimate_diffusion_costs` for the other arguments.
    """
    base: Any = getattr(diffusers, config["_class_name"])
    family: Any = transformer_family(base)
    if "preset" in recipe.settings:
        student = MHLADiTTransformer2DModel.from_preset(**recipe.settings)
    else:
        student = mhla_class(family, base).from_config({**config, "mhla": recipe.settings})
    task = DiffusionTask(student, base.from_config(config) if stage.needs_teacher else None)
    task.has_weights = False
    set_modes(task, recipe)
    return task


def latent_shape(config: Mapping[str, Any], vae: Mapping[str, Any], stage: Any) -> tuple[int, ...]:
    """Return the shape of a sample's latents, [C, (F,) h, w]. See `estimate_diffusion_costs` for the arguments."""
    if stage.size is None:
        return config["in_channels"], config["sample_size"], config["sample_size"]
    factors = getattr(diffusers, vae["_class_name"]).from_config(vae).config
    levels = factors.get("block_out_channels") or factors.get("encoder_block_out_channels") or ()
    spatial = factors.get("scale_factor_spatial") or 2 ** (len(levels) - 1)
    frames = [(count - 1) // factors["scale_factor_temporal"] + 1 for count in stage.size[:-2]]
    return (config["in_channels"], *frames, *(side // spatial for side in stage.size[-2:]))


def make_inputs(task: DiffusionTask, stage: Any, shape: tuple[int, ...], count: int) -> tuple[Any, ...]:
    """Return the arguments of the task's objective for `count` samples with latents of a shape."""
    config = task.student.config
    width = config.get("text_dim") or config.get("caption_channels")
    batch = {"noisy": torch.empty(count, *shape), "times": torch.empty(count)}
    for name in task.student.family.conditions:
        if name == "class_labels":
            batch[name] = torch.zeros(count, dtype=torch.long)
        else:
            batch[name] = torch.empty(count, TEXT_TOKENS, *([width] if name == "encoder_hidden_states" else []))
    if stage.loss == "denoising" or stage.data_weight:
        batch["target"] = torch.empty(count, *shape)
    tensors, weights = task.take(types.SimpleNamespace(take_rows=lambda count, rows: batch), stage, slice(None))
    return *tensors, *weights


def count_gathered(student: Any, trained: int, processes: int) -> int:
    """Return the bytes of the blocks that FSDP2 gathers in each of several processes; 0 for a single one."""
    blocks = [block for name in BLOCK_LISTS for block in getattr(student, name, None) or ()]
    block = max(sum(x.numel() for x in one.parameters()) for one in blocks)
    return FP32_BYTES * block * (GATHERED_BLOCKS + (trained > 0)) * (processes > 1)
