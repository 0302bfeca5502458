"""What a checkpoint of a language model by decays carries: `converted.py` without the other form."""

from torch import nn

from ..nn.local import DecayMHLA
from ..nn.settings import MHLASettings
from .attention import MHLAMixer, install_mhla
from .families import LANGUAGE
from .overlay import MHLAHeadMixin, overlay_named


def install_decays(model: nn.Module, settings: MHLASettings) -> None:
    """`install_mhla` with the core by decays."""
    if settings.mixing_form != "decay":
        raise ValueError(f'mixing_form: got {settings.mixing_form!r}, expected "decay", the form of this checkpoint.')
    install_mhla(model, settings, DecayMHLA)


class MHLALocalLanguageMixin(MHLAHeadMixin):
    """Mixed into the base's class."""

    install = staticmethod(install_decays)


def __getattr__(name: str):
    return overlay_named(name, LANGUAGE, lambda family, base: MHLALocalLanguageMixin, MHLAMixer)
