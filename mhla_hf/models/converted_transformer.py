"""Converted transformers of diffusers that need nothing but their record: `MHLAWanTransformer3DModel` and the like.

No class is written out: each is made on first use from the base's own, which diffusers has under the record's name. A family
with code of its own has a module of its own (`dit_transformer.py`).

Wan and its kin (section 5.3): the rotary embedding turns the features, after the map; instead of a denominator
there is an RMSNorm per head (section 4.1). 150 blocks are the layout (3, 5, 10); the paper does not spell out its 105, which
(7, 3, 5) gives. The control blocks of VACE stay softmax; SkyReels-V2 takes whole videos: its blockwise causal mask is
refused. Sana and Sana Video are linear attention already: with uniform mixing they are as they were.
"""

import functools

import diffusers

from .diffusion import MHLAProcessorsMixin, MHLATransformerMixin
from .families import DIFFUSION


@functools.cache
def overlay_transformer(name: str) -> type:
    """`MHLAWanTransformer3DModel(MHLATransformerMixin, MHLAProcessorsMixin, WanTransformer3DModel)`, made once."""
    family = next((family for family in DIFFUSION if name in [f"MHLA{base}" for base in family.classes]), None)
    if family is None or family.entry != "models.converted_transformer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}.")
    base = getattr(diffusers, name.removeprefix("MHLA"))
    doc = f"`{base.__name__}` with MHLA in the layers that `mhla` lists."
    bases = (MHLATransformerMixin, MHLAProcessorsMixin, base)
    return type(name, bases, {"family": family, "__module__": __name__, "__doc__": doc})


__getattr__ = overlay_transformer
