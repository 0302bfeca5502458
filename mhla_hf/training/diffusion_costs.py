"""Estimate the costs of diffusion recipes from the configuration of a transformer.

One training step runs for real, with the task's own losses, on tensors that have sizes and no values
(`FakeTensorMode`), while the memory that its operators would take is counted. So gradient checkpointing, LoRA, mixed
precision, and the teacher's share are not formulas of their own. PyTorch's operators for CPUs run, and the form of MHLA in
PyTorch; the Triton kernels keep less.
"""

import math
import os
import types
import weakref
from collections.abc import Mapping
from typing import Any

import diffusers
import torch
from diffusers import AutoModel
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..conversion.model_family import mhla_class, transformer_family
from ..models.diffusion_inputs import BLOCK_LISTS, read_grid
from .costs import FP32_BYTES, add_up_stages
from .recipe import Recipe
from .run_folder import NUM_KEPT_STATES
from .tasks.diffusion import DiffusionTask
from .trainable import find_mhla_attentions, set_trainable

TEXT_TOKENS = 512
# With FSDP2, a process holds the weights of the block at work and of the next one, and the gradients of one.
GATHERED_BLOCKS = 2
MEASURED_DEPTHS = (3, 6)  # multiples of three, for layers "2/3"


class MemoryPeak(TorchDispatchMode):
    """Counts the bytes of the tensors that operators create while the mode is active.

    Attributes:
        current: Bytes of those that still exist.
        highest: The largest value of `current`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current = 0
        self.highest = 0
        self.storages: Any = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor):  # an input, such as a weight, or a tensor that is counted already
                self.storages.add(tensor.untyped_storage())
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage() not in self.storages:
                self._add(tensor.untyped_storage())
        return output

    def _add(self, storage: torch.UntypedStorage) -> None:
        """Count a storage until it is freed."""
        self.storages.add(storage)
        size = storage.nbytes()
        self.current += size
        self.highest = max(self.highest, self.current)
        weakref.finalize(storage, self._remove, size)

    def _remove(self, size: int) -> None:
        self.current -= size


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
        A dict as that of `estimate_costs`. Each stage also has "disk", the bytes of the states that a run keeps.
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
            trained = sum(x.numel() for x in task.student.parameters() if x.requires_grad)
            memory = count_states(task, stage, trained, recipe.processes)
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
            "disk": NUM_KEPT_STATES * FP32_BYTES * (parameters + (3 if stage.ema else 2) * trained),
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
    depth = config.get("num_layers", 0)
    if depth <= MEASURED_DEPTHS[1] or recipe.settings.get("layers", "all") not in ("all", "2/3"):
        return measure_activations(config, shape, recipe, stage)
    shallow, deep = (measure_activations({**config, "num_layers": d}, shape, recipe, stage) for d in MEASURED_DEPTHS)
    return deep + (deep - shallow) * (depth - MEASURED_DEPTHS[1]) // (MEASURED_DEPTHS[1] - MEASURED_DEPTHS[0])


def measure_activations(config: Mapping[str, Any], shape: tuple[int, ...], recipe: Recipe, stage: Any) -> int:
    """Return the bytes that a step of a model with all of its layers allocates. See `measure_depths` for the arguments."""
    with torch.device("meta"):
        task = make_task(config, recipe, stage)
    with task.prepare(stage), FakeTensorMode(allow_non_fake_inputs=True), torch.device("cpu"):
        for model in (task.student, task.teacher):
            if model is not None:
                model.to_empty(device="cpu")  # fake tensors, which have sizes and no values
        set_trainable(task.student, stage, {})
        task.set_gradient_checkpointing(recipe.run.get("gradient_checkpointing", False))
        batch = make_batch(task, stage, shape, stage.batch_size // stage.grad_accum // recipe.processes)
        return measure_step(task, stage, batch, recipe.run.get("mixed_precision") == "bf16")


def make_task(config: Mapping[str, Any], recipe: Recipe, stage: Any) -> DiffusionTask:
    """Create the task of a stage, with the student in fp32 and the teacher in the dtype of `mixed_precision`.

    Call this under `torch.device("meta")`. See `estimate_diffusion_costs` for the other arguments.
    """
    base: Any = getattr(diffusers, config["_class_name"])
    family: Any = transformer_family(base)
    student = mhla_class(family, base).from_config({**config, "mhla": recipe.settings})
    teacher = base.from_config(config) if stage.needs_teacher else None
    if teacher is not None and recipe.run.get("mixed_precision") == "bf16":
        teacher.to(torch.bfloat16)
    task = DiffusionTask(student, teacher)
    task.has_weights = False
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


def make_batch(task: DiffusionTask, stage: Any, shape: tuple[int, ...], count: int) -> dict[str, torch.Tensor]:
    """Create the tensors of a micro-batch of `count` samples, by the names that `DiffusionTask.take` reads."""
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
    return batch


def count_states(task: DiffusionTask, stage: Any, trained: int, processes: int) -> dict[str, int]:
    """Count the bytes that a process holds between the forward and backward passes, by purpose.

    Returns:
        A dict with the entries of `estimate_costs`' "memory" except for "activations" and "logits", and "average" (of
        `ema`) and "gathered" (what FSDP2 gathers).
    """
    student: Any = task.student
    blocks = [block for name in BLOCK_LISTS for block in getattr(student, name, None) or ()]
    block = max(sum(x.numel() for x in one.parameters()) for one in blocks)
    blocks_gathered = (GATHERED_BLOCKS + (trained > 0)) * (processes > 1)
    teacher = 0 if task.teacher is None else sum(x.nbytes for x in task.teacher.parameters())
    return {
        "weights": FP32_BYTES * sum(x.numel() for x in student.parameters()) // processes,
        "gradients": FP32_BYTES * trained // processes,
        "moments": 2 * FP32_BYTES * trained // processes,
        "average": FP32_BYTES * trained * (stage.ema > 0) // processes,
        "teacher": teacher // processes,
        "gathered": FP32_BYTES * block * blocks_gathered,
    }


def measure_step(task: DiffusionTask, stage: Any, batch: dict[str, torch.Tensor], bf16: bool) -> int:
    """Run the forward and backward pass of a micro-batch, and return the bytes that it allocates besides gradients.

    Args:
        task: The task, whose student requires gradients as in `stage`.
        stage: The stage.
        batch: The tensors of the micro-batch, by name.
        bf16: Whether the step runs under autocast to bf16.
    """
    tensors, weights = task.take(types.SimpleNamespace(take_rows=lambda count, rows: batch), stage, slice(None))
    trained = [parameter for parameter in task.student.parameters() if parameter.requires_grad]
    if stage.grad_accum > 1:  # the gradients of earlier micro-batches
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)
    with MemoryPeak() as memory:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss, _ = task.objective(stage)(*tensors, *weights)
        loss.backward()
    gradients = 0 if stage.grad_accum > 1 else sum(parameter.nbytes for parameter in trained)
    return memory.highest - gradients
