"""Converted vision towers and classifiers: `MHLAViTModel`, `MHLAViTForImageClassification`, ..., made on first use."""

from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES

from .families import VISION, Family
from .grid_attention import grid_mixer_class, install_grid_mhla
from .overlay import MHLAHeadMixin, overlay_model_class, overlay_named


class MHLATowerMixin(MHLAHeadMixin):
    """Mixed into the base's class of a tower."""

    install = staticmethod(install_grid_mhla)
    auto_name = "AutoModel"
    _can_compile_fullgraph = True


class MHLATowerClassifierMixin(MHLATowerMixin):
    """The same for a classifier on a vision tower."""

    auto_name = "AutoModelForImageClassification"


def converted_tower_class(family: Family, base: type) -> type:
    """`MHLAViTModel` for `ViTModel`, `MHLAViTForImageClassification` for `ViTForImageClassification`."""
    names = MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES.get(family.base, ())
    classifies = base.__name__ in ([names] if isinstance(names, str) else names)
    return overlay_model_class(family, base, MHLATowerClassifierMixin if classifies else MHLATowerMixin)


def __getattr__(name: str):
    return overlay_named(name, VISION, converted_tower_class, grid_mixer_class)
