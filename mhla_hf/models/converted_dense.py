"""What a checkpoint of a language model by mixing matrices carries: `converted.py` without decays."""

from functools import partial

from ..nn.core import MHLA
from .attention import MHLAMixer, install_mhla, pass_padding
from .families import LANGUAGE
from .overlay import MHLAHeadMixin, forward_preparing, overlay_named


class MHLADenseLanguageMixin(MHLAHeadMixin):
    """Mixed into the base's class."""

    install = staticmethod(partial(install_mhla, core_class=MHLA))

    @staticmethod
    def members_over(base: type) -> dict:
        """Of bodies and heads alike: a forward that says which tokens are padding."""
        return {"forward": forward_preparing(base.forward, pass_padding)}


def __getattr__(name: str):
    return overlay_named(name, LANGUAGE, MHLADenseLanguageMixin, MHLAMixer)
