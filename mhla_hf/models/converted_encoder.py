"""Converted encoders of text: `MHLABertModel`, `MHLABertForSequenceClassification`, ..., made on first use."""

from .encoder_attention import MHLAEncoderMixer, install_encoder_mhla, pass_rows
from .families import ENCODERS
from .overlay import MHLAHeadMixin, overlay_named


class MHLAEncoderMixin(MHLAHeadMixin):
    """Mixed into the base's class of a body, or of a head on it."""

    install, prepare = staticmethod(install_encoder_mhla), staticmethod(pass_rows)
    _can_compile_fullgraph = True


def __getattr__(name: str):
    return overlay_named(name, ENCODERS, MHLAEncoderMixin, MHLAEncoderMixer)
