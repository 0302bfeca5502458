"""Converted vision towers and classifiers: `MHLAViTModel`, `MHLAViTForImageClassification`, ..., made on first use."""

from typing import Any

from .families import VISION
from .grid_attention import MHLAGridMixer, install_grid_mhla
from .overlay import MHLAHeadMixin, overlay_named


class MHLATowerMixin(MHLAHeadMixin):
    """Mixed into the classes of vision towers and of classifiers."""

    install = staticmethod(install_grid_mhla)
    _can_compile_fullgraph = True


def __getattr__(name: str) -> Any:
    """Make a class on first use."""
    return overlay_named(name, VISION, MHLATowerMixin, MHLAGridMixer)
