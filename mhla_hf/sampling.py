"""`use_mhla_in_steps` runs some steps of a diffusion pipeline with MHLA, and the others with the base's attention."""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

from .conversion.model_family import transformers_of

# Methods of a scheduler to which a pipeline passes the timesteps, the index of the first step, and a model's prediction.
COUNTED_METHODS = ("set_timesteps", "set_begin_index", "step")


class StepSwitch:
    """Counts the steps of a scheduler, and switches transformers between MHLA and the attention of the base."""

    def __init__(self, scheduler: Any, transformers: list[Any], start: int, end: int | None) -> None:
        self.scheduler = scheduler
        self.transformers = transformers
        self.steps = slice(start, end)
        self.index = 0  # of the step that runs next

    def __deepcopy__(self, memo: dict[int, Any]) -> "StepSwitch":
        """Copy without transformers: a copied scheduler, such as LTX-2's for audio, must not switch them."""
        return StepSwitch(copy.deepcopy(self.scheduler, memo), [], self.steps.start, self.steps.stop)

    def run(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the result of `method`, the scheduler's own method `name`, and switch to the attention of the next step."""
        result = method(*args, **kwargs)
        self.index = self.index + 1 if name == "step" else getattr(self.scheduler, "begin_index", None) or 0
        steps = range(len(self.scheduler.timesteps))
        uses_mhla = self.index in steps[self.steps] or self.index not in steps
        for transformer in self.transformers:
            transformer.use_base_attention(not uses_mhla)
        return result


@contextlib.contextmanager
def use_mhla_in_steps(pipeline: Any, start: int = 0, end: int | None = None) -> Iterator[None]:
    """Context manager in which MHLA runs in some steps of sampling, and the attention of the base in the others.

    The base's attention uses the projections of the converted model, which training may have changed.
    Steps are those of `pipeline.scheduler`, and both passes of classifier-free guidance belong to one step.

    Args:
        pipeline: A pipeline of diffusers with a converted transformer, or two.
        start: The first step with MHLA. Negative numbers count from the last step, as in a slice.
        end: The first step after those with MHLA, counted like `start`; None: MHLA runs to the last step.

    Raises:
        ValueError: The pipeline has no MHLA transformer, or no scheduler.

    Example:
        >>> with mhla_hf.use_mhla_in_steps(pipe, start=5):  # softmax in the first five steps
        ...     video = pipe("a cat walks").frames[0]
    """
    transformers = [x for x in transformers_of(pipeline) if hasattr(x, "use_base_attention")]
    scheduler: Any = getattr(pipeline, "scheduler", None)
    if not transformers or not hasattr(scheduler, "step"):
        expected = "one with a scheduler and a converted transformer"
        raise ValueError(f"pipeline: got {type(pipeline).__name__}, expected {expected}.")
    switch = StepSwitch(scheduler, transformers, start, end)
    earlier = {name: vars(scheduler)[name] for name in COUNTED_METHODS if name in vars(scheduler)}
    try:
        for name in [name for name in COUNTED_METHODS if hasattr(scheduler, name)]:
            method = getattr(scheduler, name)
            # Unlike a closure, a partial is copied with its arguments: LTX-2 copies the scheduler for its audio.
            counted = functools.partial(switch.run, name, method)
            setattr(scheduler, name, functools.update_wrapper(counted, method))
        yield
    finally:
        for name in COUNTED_METHODS:
            vars(scheduler).pop(name, None)
        vars(scheduler).update(earlier)
        for transformer in transformers:
            transformer.use_base_attention(False)
