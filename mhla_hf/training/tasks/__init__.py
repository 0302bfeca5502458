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
    """Return the task that trains `student`. Raise TypeError for an option that this kind of model does not take."""
    task_type: type[Task] = LanguageTask  # which rejects unknown models
    if is_of_diffusers(student):
        task_type = DiffusionTask
    elif getattr(student, "main_input_name", None) == "pixel_values":
        task_type = ImageTask
    elif family_of(student) in ENCODERS:
        task_type = EncoderTask
    return task_type(student, teacher, **options)
