"""Converted encoders of text: `MHLABertModel`, `MHLABertForSequenceClassification`, ..., made on first use."""

from .encoder_attention import MHLAEncoderMixer, install_encoder_mhla, pass_rows
from .families import ENCODERS
from .overlay import MHLAHeadMixin, forward_preparing, overlay_named


class MHLAEncoderMixin(MHLAHeadMixin):
    """Mixed into the base's class of a body, or of a head on it."""

    install = staticmethod(install_encoder_mhla)
    _can_compile_fullgraph = True

    @staticmethod
    def members_over(base: type) -> dict:
        """Of bodies and heads alike: a forward that says which tokens are padding."""
        return {"forward": forward_preparing(base.forward, pass_rows)}


def __getattr__(name: str):
    return overlay_named(name, ENCODERS, MHLAEncoderMixin, MHLAEncoderMixer)
