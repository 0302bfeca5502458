"""Registration of MHLA's model types with transformers, by the public `register` functions of its Auto classes."""

from typing import Any

from .checkpoints.bundle import make_source
from .checkpoints.load import register_classes, register_family
from .models.families import VISION, family_of_type
from .models.language.configuration import MHLAConfig
from .models.language.language_model import MHLAForCausalLM, MHLAModel
from .models.saving import set_source_maker
from .models.vision.vision_configuration import MHLAVisionConfig
from .models.vision.vision_model import MHLAForImageClassification, MHLAVisionModel

COMMON = ("llama", "mistral", "mixtral", "olmo2", "qwen2", "qwen3", "smollm3")


def register() -> None:
    """Register MHLA's own model types, and the types converted from the most common base models, with the Auto classes.

    Other types are registered when a model of theirs is converted or loaded: importing all base models takes seconds.
    Also give `models` the function `make_source` for source files, which `models` may not import from `checkpoints`.
    """
    set_source_maker(make_source)
    register_classes(MHLAConfig, (MHLAModel, MHLAForCausalLM))
    register_classes(MHLAVisionConfig, (MHLAVisionModel, MHLAForImageClassification))
    common: Any = map(family_of_type, COMMON)
    for family in (*common, *VISION):
        register_family(family)
