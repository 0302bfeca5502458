"""Tasks: what the one training loop asks of a kind of model, which is the data, batches and losses; all else is the loop's.

A new kind is a subclass each of `Task`, `Reader` and `Objective`, a stage type in `recipe.STAGE_TYPES`, and a line in
`find_task`.
"""

import abc
import contextlib
import functools

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from ..checkpoints.file_io import SHARD_SIZE
from ..convert.families import family_of, is_of_diffusers
from ..models.families import ENCODERS
from ..models.transformers_api import set_gradient_checkpointing
from .trainable import check_student, check_teacher, mhla_attentions


class Task(abc.ABC):
    """One kind of model.

    given: what `distill` was called with and returns. student: the module that is trained. teacher: that which is asked, or
    None; the loop moves it to the device and never trains it.
    """

    name: str  # key of recipe.STAGE_TYPES; in recipes and records
    step: type  # its `Objective`
    unit: str  # what runs count: "tokens", "images", "samples"
    wanted: str  # what student and teacher have to be, for errors
    equal = ()  # (loss, what the configurations of student and teacher have to agree on for it)
    without_data = False  # whether `data=None` means something
    tool = None  # a tokenizer or an image processor, saved with the model
    progress = False  # whether bars are shown, as the loop says
    whole = True  # whether this process has the student's weights between stages: of a sharded run only the first has

    def __init__(self, student, teacher):
        self.given, self.student, self.teacher = student, student, teacher

    def check(self, stages):
        """One sentence for the first thing that could not work, before anything is loaded or written."""
        for name, model in (("student", self.student), ("teacher", self.teacher)):
            if not hasattr(model, "num_parameters") and (name == "student" or model is not None):
                raise TypeError(f"{name}: got {type(model).__name__}; expected {self.wanted}")
        for loss, key in self.equal if self.teacher is not None else ():
            own, its = (getattr(model.config, key, None) for model in (self.student, self.teacher))
            if own != its and any(stage.loss == loss for stage in stages):
                raise ValueError(f"teacher: its {key} is {its}, and the student's is {own}; expected one number")
        check_student(self.student, stages)
        check_teacher(self.student, self.teacher, stages)

    @abc.abstractmethod
    def open(self, data, stages):
        """The source of the data: has `name` and `describe()`, JSON-able, what identifies them. ValueError, one sentence."""

    @abc.abstractmethod
    def reader(self, source, stage, number, seed, state):
        """The `Reader` of stage `number` (0-based), from its start or from what `state()` or `handover()` gave."""

    def take(self, reader, stage, rows):
        """The `rows` (a slice) of the next batch: (tensors `[rows, ...]`, shares), the objective's arguments in this order.

        The loop cuts the tensors into `grad_accum` parts; shares are numbers such as 1 / batch_size, which it multiplies by
        the number of processes.
        """
        return reader.take(stage.batch_size, rows), (1 / stage.batch_size,)

    def objective(self, stage):
        """The `Objective` of `stage`."""
        return self.step(self.student, self.teacher, stage)

    def count(self, stage):
        """How many units one optimizer step works on."""
        return stage.batch_size

    def judge(self):
        """Scores of the student as it is now, by name, for the history."""
        return {}

    @contextlib.contextmanager
    def prepared(self, stage):
        """The student as `stage` trains it, and made whole again behind it."""
        yield

    def checkpoint_gradients(self, on):
        """Recompute the student's layers in the backward pass, or no longer."""
        set_gradient_checkpointing(self.student, on)

    def save(self, folder):
        """Write the trained model and what belongs to it into `folder`, which exists."""
        self.given.save_pretrained(folder, max_shard_size=SHARD_SIZE)
        if self.tool is not None:
            self.tool.save_pretrained(folder)

    def load(self, folder):
        """Put the weights that `save` wrote into the student."""
        inner = "" if self.given is self.student else "transformer"  # of a pipeline
        trained = type(self.student).from_pretrained(folder, subfolder=inner, dtype=self.student.dtype)
        self.student.load_state_dict(trained.state_dict())


class Objective(nn.Module):
    """The student with the loss of one stage: what Accelerate wraps.

    Its forward gives the loss and a dict of detached scalars, "loss" among them; both add up over the parts of a batch. The
    teacher is no submodule, so that nothing moves or saves it.
    """

    def __init__(self, student, teacher, stage):
        super().__init__()
        self.student, self.stage = student, stage
        self.__dict__["teacher"] = teacher

    def transfer(self, ask, attend=None, size=torch.square):
        """Sum over samples and MHLA layers of size(student - teacher) / size(teacher), on the teacher's own inputs.

        The student's attention runs inside the teacher's forward pass, where its inputs are; nothing else of it runs.
        ask: runs the teacher. attend: calls the student's attention, the first argument, with the others. size: elementwise.
        """
        losses, dtype = [], self.student.dtype

        def compare(name, _module, args, kwargs, wanted):
            args, kwargs = tree_map_only(
                torch.Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, (args, kwargs)
            )
            own = self.student.get_submodule(name)
            if isinstance(
                own, FSDPModule
            ):  # lets go of its weights in the backward pass when its input's gradient is there
                leaves, form = tree_flatten((args, kwargs))
                first = next(i for i, x in enumerate(leaves) if torch.is_tensor(x) and x.is_floating_point())
                leaves[first] = leaves[first].detach().requires_grad_()
                args, kwargs = tree_unflatten(leaves, form)
            with torch.enable_grad():
                got = attend(own, *args, **kwargs) if attend else own(*args, **kwargs)
                losses.append(relative_error(*(x[0] if isinstance(x, tuple) else x for x in (got, wanted)), size))

        with contextlib.ExitStack() as hooks, torch.no_grad():
            for name in mhla_attentions(self.student):
                hook = functools.partial(compare, name)
                hooks.enter_context(self.teacher.get_submodule(name).register_forward_hook(hook, with_kwargs=True))
            ask()
        return sum(losses)


def relative_error(got, wanted, size=torch.square):
    """Sum over samples of size(got - wanted) / size(wanted), in fp32; of a sample the sum of all its elements."""
    got, wanted = got.float().flatten(1), wanted.float().flatten(1)
    whole = size(wanted).sum(1).clamp_min(torch.finfo(torch.float32).tiny)
    return (size(got - wanted).sum(1) / whole).sum()


def find_task(student, teacher, options) -> Task:
    """The task that trains `student`, bound to it. TypeError, one sentence, for an option that it does not know."""
    if is_of_diffusers(student):
        from .diffusion import DiffusionTask as Found
    elif getattr(student, "main_input_name", None) == "pixel_values":
        from .images import ImageTask as Found
    elif family_of(student) in ENCODERS:
        from .encoders import EncoderTask as Found
    else:
        from .language import LanguageTask as Found
    return Found(student, teacher, **options)
