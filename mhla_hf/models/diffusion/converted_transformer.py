"""Transformers of diffusers that need no code of their own, such as `MHLAWanTransformer3DModel`; made on first use.

The control blocks of VACE and Latte's attention between frames stay softmax. SkyReels-V2 runs only without its causal mask
over blocks of frames (num_frame_per_block of 1). In LTX-2 and Kandinsky 6, the self-attention of the video stream becomes
MHLA. Sana's attention is linear already, and becomes MHLA with uniform mixing.
"""

import functools
from typing import Any

import diffusers
from diffusers.models.attention import AttentionMixin

from ..families import DIFFUSION
from .transformer import MHLAProcessorsMixin, MHLATransformerMixin


@functools.cache
def derived_transformer(name: str) -> Any:
    """Return the MHLA class of a transformer of diffusers by its name."""
    family = next((family for family in DIFFUSION if name in [f"MHLA{base}" for base in family.classes]), None)
    if family is None or family.kind.entry != "models.diffusion.converted_transformer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}.")
    base = getattr(diffusers, name.removeprefix("MHLA"))
    doc = f"`{base.__name__}` with MHLA in the layers that `mhla` lists."
    mixins = (
        (MHLATransformerMixin, MHLAProcessorsMixin) if issubclass(base, AttentionMixin) else (MHLATransformerMixin,)
    )
    return type(name, (*mixins, base), {"family": family, "__module__": __name__, "__doc__": doc})


__getattr__ = derived_transformer
