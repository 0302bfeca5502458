"""The source of checkpoints of language models that mix by matrices: `converted.py` without the other mixing form."""

from functools import partial
from typing import Any

from ..nn.core import MHLA
from .attention import MHLAMixer, install_mhla, pass_padding
from .families import LANGUAGE
from .overlay import MHLAHeadMixin, overlay_named


class MHLADenseLanguageMixin(MHLAHeadMixin):
    """Mixed into the classes of language models, bodies and heads."""

    install, prepare = staticmethod(partial(install_mhla, core_class=MHLA)), staticmethod(pass_padding)


def __getattr__(name: str) -> Any:
    """Make a class on first use."""
    return overlay_named(name, LANGUAGE, MHLADenseLanguageMixin, MHLAMixer)
