"""One task per kind of model, and `find_task`, which selects the task of a given model."""

from collections.abc import Mapping
from typing import Any

from ...conversion.model_family import family_of, is_of_diffusers
from ...models.families import ENCODERS
from .base import Task
from .diffusion import DiffusionTask
from .encoders import EncoderTask
from .images import ImageTask
from .language import LanguageTask


def find_task(student: Any, teacher: Any, options: Mapping[str, Any]) -> Task:
    """Return the task that trains `student`. Raise TypeError if it does not take one of the options, such as a tokenizer."""
    return _find_task_type(student)(student, teacher, **options)


def _find_task_type(student: Any) -> type[Task]:
    """Return the class of the task. For an unknown model this is `LanguageTask`, which rejects it."""
    if is_of_diffusers(student):
        return DiffusionTask
    if getattr(student, "main_input_name", None) == "pixel_values":
        return ImageTask
    if family_of(student) in ENCODERS:
        return EncoderTask
    return LanguageTask
