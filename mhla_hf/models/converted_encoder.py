"""Converted text encoders: `MHLABertModel`, `MHLABertForSequenceClassification`, ..., made on first use."""

from typing import Any

from .encoder_attention import MHLAEncoderMixer, install_encoder_mhla, pass_rows
from .families import ENCODERS
from .overlay import MHLAHeadMixin, overlay_named


class MHLAEncoderMixin(MHLAHeadMixin):
    """Mixed into the classes of text encoders, bodies and heads."""

    install, prepare = staticmethod(install_encoder_mhla), staticmethod(pass_rows)
    _can_compile_fullgraph = True


def __getattr__(name: str) -> Any:
    """Make a class on first use."""
    return overlay_named(name, ENCODERS, MHLAEncoderMixin, MHLAEncoderMixer)
