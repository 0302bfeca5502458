"""What a checkpoint of a language model by mixing matrices carries: `converted.py` without decays."""

from functools import partial

from ..nn.core import MHLA
from .attention import MHLAMixer, install_mhla
from .families import LANGUAGE
from .overlay import MHLAHeadMixin, overlay_named


class MHLADenseLanguageMixin(MHLAHeadMixin):
    """Mixed into the base's class."""

    install = staticmethod(partial(install_mhla, core_class=MHLA))


def __getattr__(name: str):
    return overlay_named(name, LANGUAGE, MHLADenseLanguageMixin, MHLAMixer)
