"""Converted language models: `MHLALlamaForCausalLM`, `MHLAQwen3ForCausalLM`, ..., made on first use."""

from .attention import MHLAMixer, install_mhla
from .families import LANGUAGE
from .overlay import MHLAHeadMixin, overlay_named


class MHLALanguageMixin(MHLAHeadMixin):
    """Mixed into the base's class."""

    install = staticmethod(install_mhla)


def __getattr__(name: str):
    return overlay_named(name, LANGUAGE, lambda family, base: MHLALanguageMixin, MHLAMixer)
