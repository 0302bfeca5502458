"""Converted language models: `MHLALlamaForCausalLM`, `MHLAQwen3ForCausalLM`, ..., made on first use."""

from .attention import install_mhla, mixer_class
from .families import LANGUAGE, Family
from .overlay import MHLAHeadMixin, overlay_model_class, overlay_named


class MHLALanguageMixin(MHLAHeadMixin):
    """Mixed into the base's class."""

    install = staticmethod(install_mhla)


def converted_language_class(family: Family, base: type) -> type:
    """`MHLALlamaForCausalLM` for `LlamaForCausalLM`."""
    return overlay_model_class(family, base, MHLALanguageMixin)


def __getattr__(name: str):
    return overlay_named(name, LANGUAGE, converted_language_class, mixer_class)
