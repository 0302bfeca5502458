"""Converted language models: `MHLALlamaForCausalLM`, `MHLAQwen3ForCausalLM`, ..., made on first use."""

from typing import Any

from ..nn.core import MHLA
from ..nn.local import DecayMHLA
from ..nn.settings import MHLASettings
from .attention import MHLAMixer, install_mhla, pass_padding
from .families import LANGUAGE
from .overlay import MHLAHeadMixin, overlay_named


def install_by_form(model: Any, settings: MHLASettings) -> None:
    """Install the core of the settings' mixing form; see `install_mhla`."""
    has_decays = settings.mixing_form == "decay"
    install_mhla(model, settings, DecayMHLA if has_decays else MHLA)
    model._can_compile_fullgraph = has_decays


class MHLALanguageMixin(MHLAHeadMixin):
    """Mixed into the classes of language models, bodies and heads."""

    install, prepare = staticmethod(install_by_form), staticmethod(pass_padding)

    def entry_to_save(self: Any) -> str:
        """Return the module of this model's mixing form, so that the checkpoint does not contain the other form."""
        return f"models.converted_{'local' if self.config.mhla['mixing_form'] == 'decay' else 'dense'}"


def __getattr__(name: str) -> Any:
    """Make a class on first use."""
    return overlay_named(name, LANGUAGE, MHLALanguageMixin, MHLAMixer)
