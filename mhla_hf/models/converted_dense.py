"""What a checkpoint of a language model by mixing matrices carries: `converted.py` without decays."""

from functools import partial

from ..nn.core import MHLA
from .attention import MHLAMixer, install_mhla, pass_padding
from .families import LANGUAGE
from .overlay import MHLAHeadMixin, overlay_named


class MHLADenseLanguageMixin(MHLAHeadMixin):
    """Mixed into the base's class."""

    install, prepare = staticmethod(partial(install_mhla, core_class=MHLA)), staticmethod(pass_padding)


def __getattr__(name: str):
    return overlay_named(name, LANGUAGE, MHLADenseLanguageMixin, MHLAMixer)
