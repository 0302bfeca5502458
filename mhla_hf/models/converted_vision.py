"""Converted vision towers and classifiers: `MHLAViTModel`, `MHLAViTForImageClassification`, ..., made on first use."""

from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES

from .families import VISION, Family
from .grid_attention import MHLAGridMixer, install_grid_mhla
from .overlay import MHLAHeadMixin, overlay_named


class MHLATowerMixin(MHLAHeadMixin):
    """Mixed into the base's class of a tower."""

    install = staticmethod(install_grid_mhla)
    auto_name = "AutoModel"
    _can_compile_fullgraph = True


class MHLATowerClassifierMixin(MHLATowerMixin):
    """The same for a classifier on a vision tower."""

    auto_name = "AutoModelForImageClassification"


def tower_mixin(family: Family, base: type) -> type:
    """What is mixed into a class, by whether transformers lists it among the image classifiers."""
    names = MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES.get(family.base, ())
    classifies = base.__name__ in ([names] if isinstance(names, str) else names)
    return MHLATowerClassifierMixin if classifies else MHLATowerMixin


def __getattr__(name: str):
    return overlay_named(name, VISION, tower_mixin, MHLAGridMixer)
