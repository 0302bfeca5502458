"""Converted vision towers and classifiers: `MHLAViTModel`, `MHLAViTForImageClassification`, ..., made on first use."""

from .families import VISION
from .grid_attention import MHLAGridMixer, install_grid_mhla
from .overlay import MHLAHeadMixin, overlay_named


class MHLATowerMixin(MHLAHeadMixin):
    """Mixed into the base's class of a tower, or of a classifier on it."""

    install = staticmethod(install_grid_mhla)
    _can_compile_fullgraph = True


def __getattr__(name: str):
    return overlay_named(name, VISION, MHLATowerMixin, MHLAGridMixer)
