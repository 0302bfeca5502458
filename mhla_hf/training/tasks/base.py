"""What the training loop needs to know of a kind of model: `Task`, and `Objective`, which computes the losses.

To add a kind of model, subclass `Task`, `Objective` and `mhla_hf.data.Reader`, and add a stage type to
`recipe.STAGE_TYPES` and a line to `tasks.find_task`.
"""

import abc
import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_flatten, tree_unflatten

from ...checkpoints.file_io import SHARD_SIZE
from ...conversion.model_family import note_classes
from ...data import Reader
from ...models.transformers_api import set_gradient_checkpointing
from ..recipe import CommonStage
from ..trainable import check_student, check_teacher, find_mhla_attentions

StageT = TypeVar("StageT", bound=CommonStage)
LossAndLogs = tuple[torch.Tensor, dict[str, torch.Tensor]]  # scalar loss, detached scalars by name
TensorsAndWeights = tuple[tuple[torch.Tensor, ...], tuple[float, ...]]
Elementwise = Callable[[torch.Tensor], torch.Tensor]


class Task(abc.ABC, Generic[StageT]):
    """Data, batches, losses and files of one kind of model. `returned`, the student or its pipeline, is saved."""

    name: str  # key of recipe.STAGE_TYPES; appears in recipes and records
    objective_type: type["Objective"]
    unit: str  # what the record counts: "tokens", "images" or "samples"
    expected_model: str  # for error messages
    equal_sizes: tuple[tuple[str, str], ...] = ()  # (loss, configuration field equal in student and teacher)
    trains_without_data = False  # whether `data=None` is allowed
    cpu_recipe: str | None = None  # name of the recipe that is made for a CPU

    def __init__(self, student: Any, teacher: Any, preprocessor: Any = None) -> None:
        self.returned = self.student = student
        self.teacher = teacher
        self.preprocessor = preprocessor  # a tokenizer or image processor that is saved with the model
        self.has_weights = True  # with FSDP, False in all but the main process
        self.earlier_record: dict[str, Any] | None = None  # in the second of two `parts`: train.json of the first

    def parts(self) -> "tuple[Task, ...]":
        """Return the tasks to run in turn: two for a pipeline with two transformers."""
        return (self,)

    def check(self, stages: Sequence[StageT]) -> None:
        """Raise TypeError or ValueError if student, teacher and stages do not fit together."""
        for argument, model in (("student", self.student), ("teacher", self.teacher)):
            if not hasattr(model, "num_parameters") and (argument == "student" or model is not None):
                raise TypeError(f"{argument}: got {type(model).__name__}, expected {self.expected_model}.")
        if self.teacher is not None:
            for loss, field in self.equal_sizes:
                sizes = [getattr(model.config, field, None) for model in (self.student, self.teacher)]
                if any(stage.loss == loss for stage in stages) and sizes[0] != sizes[1]:
                    raise ValueError(f"teacher: got {field} {sizes[1]}, expected {sizes[0]} as the student has.")
        check_student(self.student, stages)
        check_teacher(self.student, self.teacher, stages)

    @abc.abstractmethod
    def open(self, data: Any, stages: Sequence[StageT]) -> Any:
        """Open data, which must fit model and stages. The result has a `name`, and `describe()`, its identity in JSON."""

    @abc.abstractmethod
    def reader(self, source: Any, stage: StageT, number: int, seed: int, state: dict[str, Any] | None) -> Reader:
        """Return stage `number`'s reader, resumed from an earlier one's `state()` or `handover()` if `state` is given."""

    def take(self, reader: Any, stage: StageT, rows: slice) -> TensorsAndWeights:
        """Read a batch, and return the objective's arguments for `rows` of it: tensors, and the weight of a sample."""
        return reader.take(stage.batch_size, rows), (1 / stage.batch_size,)

    def objective(self, stage: StageT) -> "Objective":
        return self.objective_type(self.student, self.teacher, stage)

    def units_per_step(self, stage: StageT) -> int:
        return stage.batch_size * getattr(stage, "seq_len", 1)

    def seconds_of(self, stages: Sequence[StageT], progress: Mapping[str, Any]) -> float:
        """Estimate the seconds that stages take, at the speed of the run so far."""
        return progress["seconds"] / progress[self.unit] * sum(x.steps * self.units_per_step(x) for x in stages)

    def evaluate(self) -> dict[str, float]:
        return {}

    def previewer(self, source: Any) -> Callable[[StageT, int], list[Any]]:
        """Return a function of (stage, seed) that samples an image, or the frames of a video, for the opened data."""
        raise ValueError("preview_every: got a number with a model that makes no images, expected 0.")

    @contextlib.contextmanager
    def prepare(self, stage: StageT) -> Iterator[None]:
        """Change the student for the duration of `stage`, for example by adding LoRA."""
        yield

    def set_gradient_checkpointing(self, enabled: bool) -> None:
        set_gradient_checkpointing(self.student, enabled)

    def save(self, folder: Path) -> None:
        note_classes(self.returned)
        self.returned.save_pretrained(folder, max_shard_size=SHARD_SIZE)
        if self.preprocessor is not None:
            self.preprocessor.save_pretrained(folder)

    def load(self, folder: Path) -> None:
        load_weights(self.student, folder)


def load_weights(model: Any, folder: Path, subfolder: str = "") -> None:
    """Load saved weights into a model in place; `subfolder` names a component if the folder holds a pipeline."""
    trained = type(model).from_pretrained(folder, subfolder=subfolder, dtype=model.dtype)
    model.load_state_dict(trained.state_dict())


class Objective(nn.Module):
    """Base class of the module that Accelerate wraps: the student and the loss of one stage.

    `forward` returns the loss of a micro-batch, and scalars to log, which add up to those of the batch.
    """

    student: Any
    teacher: Any

    def __init__(self, student: nn.Module, teacher: nn.Module | None, stage: Any) -> None:
        super().__init__()
        self.student, self.stage = student, stage
        self.__dict__["teacher"] = teacher  # no submodule, so that Accelerate does not move, wrap or save it

    def attention_transfer_loss(
        self, run_teacher: Callable[[], Any], call_attention: Callable[..., Any] | None = None,
        magnitude: Elementwise = torch.square,
    ) -> torch.Tensor:  # fmt: skip
        """Return the `relative_error` of the student's attention outputs, summed over MHLA layers and samples, in fp32.

        While the teacher runs, hooks on its attention modules call the student's with the same inputs, so that every layer
        is trained without the errors of earlier ones.
        """
        losses: list[torch.Tensor] = []
        dtype = self.student.dtype

        def compare(name: str, _module: nn.Module, args: Any, kwargs: Any, teacher_output: Any) -> None:
            attention = self.student.get_submodule(name)
            leaves, structure = tree_flatten((args, kwargs))
            is_float = [torch.is_tensor(x) and x.is_floating_point() for x in leaves]
            leaves = [x.to(dtype) if cast else x for x, cast in zip(leaves, is_float, strict=True)]
            if isinstance(attention, FSDPModule):
                # FSDP2 reshards a module in the backward pass of its inputs, so one of them must require a gradient.
                index = is_float.index(True)
                leaves[index] = leaves[index].detach().requires_grad_()
            args, kwargs = tree_unflatten(leaves, structure)
            with torch.enable_grad():
                output = call_attention(attention, *args, **kwargs) if call_attention else attention(*args, **kwargs)
                # Attention modules may return a tuple, which begins with the hidden states.
                states, teacher_states = (x[0] if isinstance(x, tuple) else x for x in (output, teacher_output))
                losses.append(relative_error(states, teacher_states, magnitude))

        with contextlib.ExitStack() as hooks, torch.no_grad():
            for name in find_mhla_attentions(self.student):
                hook = functools.partial(compare, name)
                hooks.enter_context(self.teacher.get_submodule(name).register_forward_hook(hook, with_kwargs=True))
            run_teacher()
        return functools.reduce(torch.add, losses)


def relative_error(output: torch.Tensor, target: torch.Tensor, magnitude: Elementwise = torch.square) -> torch.Tensor:
    """Return sum(magnitude(output - target)) / sum(magnitude(target)) of each sample, summed over samples, in fp32."""
    output, target = output.float().flatten(1), target.float().flatten(1)
    scale = magnitude(target).sum(1).clamp_min(torch.finfo(torch.float32).tiny)
    return (magnitude(output - target).sum(1) / scale).sum()
