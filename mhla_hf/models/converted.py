"""Converted language models: `MHLALlamaForCausalLM`, `MHLAQwen3ForCausalLM`, ..., made on first use."""

from torch import nn

from ..nn.core import MHLA
from ..nn.local import DecayMHLA
from ..nn.settings import MHLASettings
from .attention import MHLAMixer, install_mhla, pass_padding
from .families import LANGUAGE
from .overlay import MHLAHeadMixin, overlay_named


def install_by_form(model: nn.Module, settings: MHLASettings) -> None:
    """`install_mhla` with the core that these settings ask for."""
    decays = settings.mixing_form == "decay"
    install_mhla(model, settings, DecayMHLA if decays else MHLA)
    model._can_compile_fullgraph = decays


class MHLALanguageMixin(MHLAHeadMixin):
    """Mixed into the base's class."""

    install, prepare = staticmethod(install_by_form), staticmethod(pass_padding)

    def entry_to_save(self) -> str:
        """A checkpoint carries one form and nothing of the other."""
        return f"models.converted_{'local' if self.config.mhla['mixing_form'] == 'decay' else 'dense'}"


def __getattr__(name: str):
    return overlay_named(name, LANGUAGE, MHLALanguageMixin, MHLAMixer)
