"""Registration: what transformers is told of MHLA's model types, by the register functions of its Auto classes alone."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageClassification
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .checkpoints.bundle import make_source
from .models import converted, converted_vision
from .models.configuration import MHLAConfig
from .models.families import LANGUAGE, VISION
from .models.language import MHLAForCausalLM
from .models.overlay import overlay_config_class
from .models.saving import set_source_maker
from .models.vision import MHLAForImageClassification, MHLAVisionModel
from .models.vision_configuration import MHLAVisionConfig


def register() -> None:
    """Register every model type with transformers' Auto classes; a type that is registered already stays as it is.

    Also tells `models` how the one-file source of a checkpoint is made, which is the business of a room above it.
    """
    set_source_maker(make_source)
    models = {MHLAConfig: [MHLAForCausalLM], MHLAVisionConfig: [MHLAVisionModel, MHLAForImageClassification]}
    for module, families in ((converted, LANGUAGE), (converted_vision, VISION)):
        for family in families:
            models[overlay_config_class(family)] = [getattr(module, f"MHLA{name}") for name in family.classes]
    autos = {auto.__name__: auto for auto in (AutoModel, AutoModelForCausalLM, AutoModelForImageClassification)}
    for config, classes in models.items():
        if config.model_type not in CONFIG_MAPPING:
            AutoConfig.register(config.model_type, config)
            for model in reversed(classes):  # of several for one Auto class, the first
                autos[model.auto_name].register(config, model, exist_ok=True)
