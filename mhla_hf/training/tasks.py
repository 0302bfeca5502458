"""Tasks: what the one training loop asks of a kind of model.

A task binds the student, its teacher and what belongs to them, opens the data, and gives the loop batches and losses.
Everything else (steps, resuming, processes, precision, records, bars) is the loop's. A new kind of model is a subclass of
`Task`, a stage type in `recipe.STAGE_TYPES`, and a line in `find_task`.
"""

import abc
import contextlib
import inspect

from ..checkpoints.files import SHARD_SIZE
from ..convert.families import is_of_diffusers
from .trainable import check_model, check_not_shared, check_original, check_plain, check_stage


class Task(abc.ABC):
    """One kind of model, bound to a student and a teacher.

    given: what `distill` was called with and returns. student: the module that is trained. teacher: the module that is
    asked, or None; the loop moves it to the device and never trains it. progress: whether bars are shown, as the loop says.
    """

    name: str  # key of recipe.STAGE_TYPES; in recipes and records
    unit: str  # what runs count: "tokens", "images", "samples"
    wanted: str  # what student and teacher have to be, for errors
    without_data = False  # whether `data=None` means something
    progress = False

    def __init__(self, student, teacher):
        self.given, self.student, self.teacher = student, student, teacher

    def check(self, stages):
        """One sentence for the first thing that could not work, before anything is loaded or written."""
        check_model("student", self.student, self.wanted)
        if self.teacher is not None:
            check_model("teacher", self.teacher, self.wanted)
        check_plain(self.student)
        for stage in stages:
            check_stage(self.student, self.teacher, stage)
            if stage.loss == "transfer":
                check_original(self.student, self.teacher)
        if self.teacher is not None and any(stage.needs_teacher for stage in stages):
            check_not_shared(self.student, self.teacher)

    @abc.abstractmethod
    def open(self, data, stages):
        """The source of the data: has `name` (a text) and `describe()` (JSON-able, what identifies the data).

        ValueError, one sentence, when `data` cannot be read or does not suit the model.
        """

    @abc.abstractmethod
    def reader(self, source, stage, number, seed, state):
        """What gives the batches of stage `number` (0-based), from its start or from what `state()` or `handover()` gave.

        Has `state()` (JSON-able: to go on in this stage), `handover()` (JSON-able: where the next stage's reader starts)
        and `close()`. Which samples a step gets, and every random choice about them, follow from seed, number and step.
        """

    def try_data(self, source, stages, seed):
        """Open and close a reader, so that data that cannot be read are known before anything is written."""
        self.reader(source, stages[0], 0, seed, None).close()

    @abc.abstractmethod
    def take(self, reader, stage, rows):
        """The next batch, as the process that works on its `rows` (a slice) needs it.

        Returns (tensors, shares): tensors `[rows, ...]`, which the loop cuts into `grad_accum` parts and puts on the
        device; shares, plain numbers such as 1 / batch_size, which it multiplies by the number of processes. Both are the
        objective's arguments, in this order.
        """

    @abc.abstractmethod
    def objective(self, stage):
        """The student with the loss of `stage`: an nn.Module that Accelerate wraps.

        Its forward gives the loss (scalar with gradient) and a dict of detached scalars, "loss" among them; both add up
        over the parts of a batch. The teacher is held, not owned: `self.__dict__["teacher"] = teacher`.
        """

    def count(self, stage):
        """How many units one optimizer step works on."""
        return stage.batch_size

    def judge(self):
        """Scores of the student as it is now, for the entries of the history: a dict of numbers."""
        return {}

    @contextlib.contextmanager
    def prepared(self, stage):
        """The student as `stage` trains it, and made whole again behind it."""
        yield

    def checkpoint_gradients(self, on):
        """Recompute the student's layers in the backward pass, or no longer."""
        if on:
            self.student.activation_checkpointing_enable({"use_reentrant": False})
        else:
            self.student.activation_checkpointing_disable()

    def save(self, folder):
        """Write the trained model and what belongs to it into `folder`, which exists."""
        self.student.save_pretrained(folder, max_shard_size=SHARD_SIZE)

    def bytes_saved(self):
        """How much `save` writes, about."""
        return bytes_of(self.student)

    def load(self, folder):
        """Put the weights that `save` wrote into the student."""
        trained = type(self.student).from_pretrained(folder, dtype=self.student.dtype)
        self.student.load_state_dict(trained.state_dict())


def bytes_of(model):
    """The size of a model's weights in bytes."""
    return sum(value.numel() * value.element_size() for value in model.state_dict().values())


def find_task(student, teacher, options) -> Task:
    """The task that trains `student`, bound to it. TypeError, one sentence, for an option that it does not know."""
    kind = _kind_of(student)
    known = list(inspect.signature(kind).parameters)[2:]
    for key in options:
        if key not in known:
            raise TypeError(f"distill: unknown argument {key!r}; a model for {kind.name} knows {', '.join(known)}")
    return kind(student, teacher, **options)


def _kind_of(student):
    if is_of_diffusers(student):
        from .diffusion import DiffusionTask

        return DiffusionTask
    if getattr(student, "main_input_name", None) == "pixel_values":
        from .images import ImageTask

        return ImageTask
    from .language import LanguageTask

    return LanguageTask
