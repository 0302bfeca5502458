"""What a checkpoint of a language model by mixing matrices carries: `converted.py` without decays."""

from torch import nn

from ..nn.core import MHLA
from ..nn.settings import MHLASettings
from .attention import MHLAMixer, install_mhla
from .families import LANGUAGE
from .overlay import MHLAHeadMixin, overlay_named


def install_matrices(model: nn.Module, settings: MHLASettings) -> None:
    """`install_mhla` with the core by mixing matrices."""
    if settings.mixing_form == "decay":
        raise ValueError('mixing_form: got "decay", expected another: this checkpoint has mixing matrices.')
    install_mhla(model, settings, MHLA)


class MHLADenseLanguageMixin(MHLAHeadMixin):
    """Mixed into the base's class."""

    install = staticmethod(install_matrices)


def __getattr__(name: str):
    return overlay_named(name, LANGUAGE, lambda family, base: MHLADenseLanguageMixin, MHLAMixer)
