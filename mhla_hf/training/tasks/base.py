"""The interface between the training loop and a kind of model: `Task`, and `Objective`, the losses that it computes.

A task knows the data, batches and losses of its kind of model; everything else belongs to the loop. A new kind of model is a
subclass each of `Task`, `Objective` and `mhla_hf.data.Reader`, a stage type in `recipe.STAGE_TYPES`, and a line in
`tasks.find_task`.
"""

import abc
import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from ...checkpoints.file_io import SHARD_SIZE
from ...data import Reader
from ...models.transformers_api import set_gradient_checkpointing
from ..recipe import CommonStage
from ..trainable import check_student, check_teacher, find_mhla_attentions

StageT = TypeVar("StageT", bound=CommonStage)
LossAndLogs = tuple[torch.Tensor, dict[str, torch.Tensor]]  # scalar loss, detached scalars by name
Elementwise = Callable[[torch.Tensor], torch.Tensor]


class DataSource(Protocol):
    """Opened training data, as `Task.open` returns it."""

    name: str

    def describe(self) -> dict[str, Any]:
        """Return what identifies the data, as JSON-serializable values."""


class Task(abc.ABC, Generic[StageT]):
    """Base class: how one kind of model is trained.

    Args:
        student: what `distill` was called with: a model of transformers, or a transformer or pipeline of diffusers.
        teacher: the softmax original, or None.

    Attributes:
        returned: what `distill` was called with, saves and returns: the student, or the pipeline that holds it.
        student: the module that is trained.
        teacher: the module that is asked for targets, or None. The loop moves it to the device and never trains it.
    """

    name: str  # key of recipe.STAGE_TYPES; appears in recipes and records
    objective_type: type["Objective"]
    unit: str  # what the record counts: "tokens", "images" or "samples"
    expected_model: str  # for error messages: what student and teacher have to be
    equal_sizes: tuple[
        tuple[str, str], ...
    ] = ()  # (loss, config entry on which student and teacher have to agree for it)
    trains_without_data = False  # whether `data=None` is allowed

    def __init__(self, student: Any, teacher: Any) -> None:
        self.returned = student
        self.student = student
        self.teacher = teacher
        self.preprocessor: Any = None  # a tokenizer or image processor that is saved with the model
        self.show_bars = False  # set by the loop
        # Set by the loop: whether this process holds the student's weights. With FSDP only the main process does.
        self.has_weights = True

    def check(self, stages: Sequence[StageT]) -> None:
        """Check student, teacher and stages before any data is opened or anything is written.

        Raises:
            TypeError: student or teacher is another kind of model.
            ValueError: they do not fit each other or the stages.
        """
        for argument, model in (("student", self.student), ("teacher", self.teacher)):
            if not hasattr(model, "num_parameters") and (argument == "student" or model is not None):
                raise TypeError(f"{argument}: got {type(model).__name__}, expected {self.expected_model}.")
        if self.teacher is not None:
            for loss, entry in self.equal_sizes:
                if any(stage.loss == loss for stage in stages):
                    self._check_equal_size(entry)
        check_student(self.student, stages)
        check_teacher(self.student, self.teacher, stages)

    def _check_equal_size(self, entry: str) -> None:
        of_student, of_teacher = (getattr(model.config, entry, None) for model in (self.student, self.teacher))
        if of_student != of_teacher:
            raise ValueError(f"teacher: got {entry} {of_teacher}, expected {of_student} as the student has.")

    @abc.abstractmethod
    def open(self, data: Any, stages: Sequence[StageT]) -> Any:
        """Return the data as a `DataSource`.

        Args:
            data: what the user passed to `distill`, or the recipe's.
            stages: all stages of the run.

        Raises:
            ValueError, TypeError, ImportError: the data cannot be opened or do not fit the model or a stage.
        """

    @abc.abstractmethod
    def reader(self, source: Any, stage: StageT, number: int, seed: int, state: dict[str, Any] | None) -> Reader:
        """Return a reader of the batches of one stage.

        Args:
            source: what `open` returned.
            stage: the stage.
            number: its 0-based position in the run.
            seed: seed of the run.
            state: what `Reader.state` or the previous stage's `Reader.handover` returned; None: start at the beginning.
        """

    def take(self, reader: Any, stage: StageT, rows: slice) -> tuple[tuple[torch.Tensor, ...], tuple[float, ...]]:
        """Read the next batch.

        Args:
            reader: what `reader` returned. All processes read the same batches.
            stage: the stage.
            rows: the samples of the batch that this process computes.

        Returns:
            tensors `[rows, ...]`, which the loop splits into `grad_accum` parts, and weights such as 1 / batch size, by
            which sums over samples become means over the batch. The loop multiplies the weights by the number of processes,
            whose gradients are averaged. Both are the arguments of the objective, in this order.
        """
        return reader.take_rows(stage.batch_size, rows), (1 / stage.batch_size,)

    def objective(self, stage: StageT) -> "Objective":
        """Return the module that computes the loss of `stage`."""
        return self.objective_type(self.student, self.teacher, stage)

    def units_per_step(self, stage: StageT) -> int:
        """Return how many units (tokens, images or samples) one optimizer step processes."""
        return stage.batch_size

    def evaluate(self) -> dict[str, float]:
        """Return scores of the student in its current state, by name, for the history."""
        return {}

    @contextlib.contextmanager
    def prepare(self, stage: StageT) -> Iterator[None]:
        """Change the student for the duration of `stage`, for example by adding LoRA."""
        yield

    def set_gradient_checkpointing(self, enabled: bool) -> None:
        """Recompute the student's layers in the backward pass, or stop doing so."""
        set_gradient_checkpointing(self.student, enabled)

    def save(self, folder: Path) -> None:
        """Write the trained model, and its tokenizer or image processor, into an existing folder."""
        self.returned.save_pretrained(folder, max_shard_size=SHARD_SIZE)
        if self.preprocessor is not None:
            self.preprocessor.save_pretrained(folder)

    def load(self, folder: Path) -> None:
        """Load the weights that `save` wrote into the student."""
        subfolder = "" if self.returned is self.student else "transformer"  # of a pipeline
        trained = type(self.student).from_pretrained(folder, subfolder=subfolder, dtype=self.student.dtype)
        self.student.load_state_dict(trained.state_dict())


class Objective(nn.Module):
    """Base class: the student with the loss of one stage, as the module that Accelerate wraps.

    `forward` takes what `Task.take` returned, tensors and then weights. It returns the loss of a part of the batch and a
    dict of detached scalars to log, "loss" among them. Both are sums over the parts of a batch.

    Args:
        student: trained; a submodule.
        teacher: not a submodule, so that nobody moves, wraps or saves it.
        stage: decides the loss.
    """

    student: Any
    teacher: Any

    def __init__(self, student: nn.Module, teacher: nn.Module | None, stage: Any) -> None:
        super().__init__()
        self.student = student
        self.stage = stage
        self.__dict__["teacher"] = teacher

    def attention_transfer_loss(
        self,
        run_teacher: Callable[[], Any],
        call_attention: Callable[..., Any] | None = None,
        magnitude: Elementwise = torch.square,
    ) -> torch.Tensor:
        """Return the relative error of the student's attention outputs, given the teacher's hidden states as inputs.

        The student's attention modules run inside the teacher's forward pass, where their inputs are; no other part of the
        student runs. Every layer is thus trained by itself, without the errors of the layers before it.

        Args:
            run_teacher: runs the teacher on the batch.
            call_attention: called as `call_attention(attention, *args, **kwargs)` with the student's attention module and
                the arguments of the teacher's; default: call the module.
            magnitude: elementwise measure of errors and outputs.

        Returns:
            scalar, fp32: the sum over MHLA layers and samples of `relative_error`.
        """
        losses: list[torch.Tensor] = []
        dtype = self.student.dtype

        def cast(x: torch.Tensor) -> torch.Tensor:
            return x.to(dtype) if x.is_floating_point() else x

        def compare(name: str, _module: nn.Module, args: Any, kwargs: Any, teacher_output: Any) -> None:
            args, kwargs = tree_map_only(torch.Tensor, cast, (args, kwargs))
            attention = self.student.get_submodule(name)
            if isinstance(attention, FSDPModule):
                args, kwargs = _require_grad_of_first_input(args, kwargs)
            with torch.enable_grad():
                output = (call_attention or _call)(attention, *args, **kwargs)
                losses.append(relative_error(_first(output), _first(teacher_output), magnitude))

        with contextlib.ExitStack() as hooks, torch.no_grad():
            for name in find_mhla_attentions(self.student):
                hook = functools.partial(compare, name)
                hooks.enter_context(self.teacher.get_submodule(name).register_forward_hook(hook, with_kwargs=True))
            run_teacher()
        return functools.reduce(torch.add, losses)


def _call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)


def _first(output: Any) -> torch.Tensor:
    """Return the hidden states of an attention's output, which may be a tuple."""
    return output[0] if isinstance(output, tuple) else output


def _require_grad_of_first_input(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments with `requires_grad` set on the first floating-point tensor.

    FSDP reshards a module's weights in the backward pass when the gradient of its input has been computed, so without such
    a gradient every layer would stay unsharded.
    """
    leaves, structure = tree_flatten((args, kwargs))
    first = next(i for i, x in enumerate(leaves) if torch.is_tensor(x) and x.is_floating_point())
    leaves[first] = leaves[first].detach().requires_grad_()
    args, kwargs = tree_unflatten(leaves, structure)
    return args, kwargs


def relative_error(output: torch.Tensor, target: torch.Tensor, magnitude: Elementwise = torch.square) -> torch.Tensor:
    """Return the sum over samples of magnitude(output - target) / magnitude(target), each summed over a sample's elements.

    Args:
        output: `[B, ...]`, any floating dtype.
        target: the same shape.
        magnitude: elementwise, `torch.square` or `torch.abs`.

    Returns:
        scalar, fp32.
    """
    output, target = output.float().flatten(1), target.float().flatten(1)
    scale = magnitude(target).sum(1).clamp_min(torch.finfo(torch.float32).tiny)
    return (magnitude(output - target).sum(1) / scale).sum()
