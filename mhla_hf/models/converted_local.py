"""What a checkpoint of a language model by decays carries: `converted.py` without the other form."""

from functools import partial

from ..nn.local import DecayMHLA
from .attention import MHLAMixer, forward_with_padding, install_mhla
from .families import LANGUAGE
from .overlay import MHLAHeadMixin, overlay_named


class MHLALocalLanguageMixin(MHLAHeadMixin):
    """Mixed into the base's class."""

    install = staticmethod(partial(install_mhla, core_class=DecayMHLA))

    @staticmethod
    def members_over(base: type) -> dict:
        """Of bodies and heads alike: a forward that says which tokens are padding."""
        return {"forward": forward_with_padding(base.forward)}


def __getattr__(name: str):
    return overlay_named(name, LANGUAGE, MHLALocalLanguageMixin, MHLAMixer)
