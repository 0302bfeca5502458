"""Measure a training step on tensors that have sizes and no values (`FakeTensorMode`).

One step runs for real, with the task's own losses, while the memory and the FLOPs that its operators would take are
counted. So gradient checkpointing, LoRA, mixed precision, and the teacher's share are not formulas of their own. PyTorch's
operators for CPUs run, and the form of MHLA in PyTorch; the Triton kernels keep less.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import conv_flop_count, flop_registry, shape_wrapper

from .costs import FP32_BYTES
from .recipe import CommonStage, Recipe
from .tasks.base import Task
from .trainable import set_trainable


def count_convolution_backward(
    output_shape: Any, input_shape: Any, weight_shape: Any, *arguments: Any, out_shape: Any
) -> int:
    """Return the FLOPs of a convolution's backward pass; torch's own count is too large for depthwise ones.

    Args:
        output_shape, input_shape, weight_shape: Shapes of the gradient of the output, of the input, and of the weight.
        arguments: The other arguments of `aten.convolution_backward`, the last of which says what it computes: the gradients
            of input, weight, and bias.
        out_shape: Shapes of its results.
    """
    transposed, (of_input, of_weight, _) = arguments[4], arguments[-1]
    return (of_input + of_weight) * conv_flop_count(input_shape, weight_shape, output_shape, transposed=transposed)


CPU_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"  # which torch does not count, unlike that of GPUs
FLOPS = {
    **flop_registry,
    torch.ops.aten.convolution_backward: shape_wrapper(count_convolution_backward),
    getattr(torch.ops.aten, CPU_ATTENTION): flop_registry[torch.ops.aten._scaled_dot_product_flash_attention],
    getattr(torch.ops.aten, f"{CPU_ATTENTION}_backward"): flop_registry[
        torch.ops.aten._scaled_dot_product_flash_attention_backward
    ],
}


class StepCounter(TorchDispatchMode):
    """Counts the bytes of the tensors that operators create while the mode is active, and the operators' FLOPs.

    `FlopCounterMode` is not used, because it keeps tensors alive.

    Attributes:
        current: Bytes of the tensors that still exist.
        highest: The largest value of `current`.
        flops: FLOPs of matrix products, attention, and convolutions.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current = 0
        self.highest = 0
        self.flops = 0
        self.storages: Any = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor):  # an input, such as a weight, or a tensor that is counted already
                self.storages.add(tensor.untyped_storage())
        output = func(*args, **(kwargs or {}))
        if count_flops := FLOPS.get(func.overloadpacket):
            self.flops += count_flops(*args, **(kwargs or {}), out_val=output)
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


def set_modes(task: Task[Any], recipe: Recipe) -> None:
    """Put student and teacher in the modes of a run, and the teacher in the dtype of `mixed_precision`, in place."""
    task.student.train()
    if task.teacher is not None:
        task.teacher.eval()
        if uses_bf16(recipe):
            task.teacher.to(torch.bfloat16)


def uses_bf16(recipe: Recipe) -> bool:
    """Return whether a recipe's steps run under autocast to bf16."""
    return recipe.run.get("mixed_precision") == "bf16"


def count_states(task: Task[Any], stage: CommonStage) -> dict[str, int]:
    """Count the bytes that a single process holds between the forward and backward passes, by purpose.

    Args:
        task: The task, whose student requires gradients as in `stage`.
        stage: The stage.

    Returns:
        A dict with the entries of `estimate_costs`' "memory" except for "activations" and "logits", and "average" (of
        `ema`).
    """
    trained = count_trained(task)
    return {
        "weights": FP32_BYTES * sum(x.numel() for x in task.student.parameters()),
        "gradients": FP32_BYTES * trained,
        "moments": 2 * FP32_BYTES * trained,
        "average": FP32_BYTES * trained * (stage.ema > 0),
        "teacher": 0 if task.teacher is None else sum(x.nbytes for x in task.teacher.parameters()),
    }


def count_trained(task: Task[Any]) -> int:
    """Return the number of the student's parameters that require gradients."""
    return sum(x.numel() for x in task.student.parameters() if x.requires_grad)


def micro_batch_size(recipe: Recipe, stage: CommonStage) -> int:
    """Return the number of samples in each of the parts in which a process computes a step."""
    return stage.batch_size // stage.grad_accum // recipe.processes


def measure_step(
    task: Task[Any], recipe: Recipe, stage: CommonStage, make_inputs: Callable[[], tuple[Any, ...]]
) -> tuple[int, int]:
    """Run the forward and backward pass of a micro-batch without values.

    Args:
        task: The task, with models on the meta device, which are moved to the CPU and have no values there either.
        recipe, stage: The recipe and its stage.
        make_inputs: Function that returns the arguments of the objective for the micro-batch.

    Returns:
        The bytes that the step allocates besides gradients, and its FLOPs (see `StepCounter`).
    """
    with task.prepare(stage), FakeTensorMode(allow_non_fake_inputs=True), torch.device("cpu"):
        for model in (task.student, task.teacher):
            for module in model.modules() if model is not None else ():  # each only once, if blocks share one
                module.to_empty(device="cpu", recurse=False)
        set_trainable(task.student, stage, {})
        task.set_gradient_checkpointing(recipe.run.get("gradient_checkpointing", False))
        inputs = make_inputs()
        trained = [parameter for parameter in task.student.parameters() if parameter.requires_grad]
        if stage.grad_accum > 1:  # the gradients of earlier micro-batches
            for parameter in trained:
                parameter.grad = torch.empty_like(parameter)
        with StepCounter() as counter:
            with torch.autocast("cpu", torch.bfloat16, enabled=uses_bf16(recipe)):
                loss, _ = task.objective(stage)(*inputs)
            loss.backward()
        gradients = 0 if stage.grad_accum > 1 else sum(parameter.nbytes for parameter in trained)
        return counter.highest - gradients, counter.flops
