"""What a checkpoint of a language model by decays carries: `converted.py` without the other form."""

from functools import partial

from ..nn.local import DecayMHLA
from .attention import MHLAMixer, install_mhla, pass_padding
from .families import LANGUAGE
from .overlay import MHLAHeadMixin, overlay_named


class MHLALocalLanguageMixin(MHLAHeadMixin):
    """Mixed into the base's class."""

    install, prepare = staticmethod(partial(install_mhla, core_class=DecayMHLA)), staticmethod(pass_padding)
    _can_compile_fullgraph = True


def __getattr__(name: str):
    return overlay_named(name, LANGUAGE, MHLALocalLanguageMixin, MHLAMixer)
