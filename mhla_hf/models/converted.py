"""Converted language models: `MHLALlamaForCausalLM`, `MHLAQwen3ForCausalLM`, ..., made on first use."""

from torch import nn

from ..nn.settings import MHLASettings
from .attention import MHLAMixer
from .converted_dense import install_matrices
from .converted_local import install_decays
from .families import LANGUAGE
from .overlay import MHLAHeadMixin, overlay_named


def install_by_form(model: nn.Module, settings: MHLASettings) -> None:
    """`install_mhla` with the core that these settings ask for."""
    install = install_decays if settings.mixing_form == "decay" else install_matrices
    install(model, settings)


class MHLALanguageMixin(MHLAHeadMixin):
    """Mixed into the base's class."""

    install = staticmethod(install_by_form)

    def entry_to_save(self) -> str:
        """A checkpoint carries one form and nothing of the other."""
        return f"models.converted_{'local' if self.config.mhla['mixing_form'] == 'decay' else 'dense'}"


def __getattr__(name: str):
    return overlay_named(name, LANGUAGE, lambda family, base: MHLALanguageMixin, MHLAMixer)
