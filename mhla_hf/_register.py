"""Registration: what transformers is told of MHLA's model types, by the register functions of its Auto classes alone."""

from .checkpoints.bundle import make_source
from .checkpoints.load import register_classes, register_family
from .models.configuration import MHLAConfig
from .models.families import VISION, family_of_type
from .models.language import HEADS_FROM_SCRATCH
from .models.saving import set_source_maker
from .models.vision import MHLAForImageClassification, MHLAVisionModel
from .models.vision_configuration import MHLAVisionConfig

COMMON = ("llama", "mistral", "mixtral", "olmo2", "qwen2", "qwen3", "smollm3")


def register() -> None:
    """Register the models from scratch and the commonest bases; the types of other bases when one is converted or loaded.

    Importing the modeling files of all bases would take seconds. Also tells `models` how the one-file source of a checkpoint
    is made, which is the business of a room above it.
    """
    set_source_maker(make_source)
    register_classes(MHLAConfig, HEADS_FROM_SCRATCH)
    register_classes(MHLAVisionConfig, (MHLAVisionModel, MHLAForImageClassification))
    for family in (*map(family_of_type, COMMON), *VISION):
        register_family(family)
