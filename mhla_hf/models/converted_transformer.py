"""Converted transformers of diffusers that need nothing but their record: `MHLAWanTransformer3DModel` and the like.

No class is written out: each is made on first use from the base's own, which diffusers has under the record's name. A family
with code of its own has a module of its own (`dit_transformer.py`, `pixart_transformer.py`).

Wan, VACE and SkyReels-V2 (section 5.3): the rotary embedding turns the features, after the map; instead of a denominator
there is an RMSNorm per head (section 4.1). 150 blocks are the layout (3, 5, 10); the paper does not spell out its 105, which
(7, 3, 5) gives. The control blocks of VACE stay softmax; SkyReels-V2 takes whole videos: its blockwise causal mask is
refused. Sana and Sana Video are linear attention already: with uniform mixing they are as they were.
"""

import diffusers

from .diffusion import MHLATransformerMixin
from .families import DIFFUSION

_OVERLAY_TRANSFORMERS = {}


def __getattr__(name: str):
    for family in DIFFUSION:
        if family.entry == "models.converted_transformer" and name in [f"MHLA{base}" for base in family.classes]:
            if name not in _OVERLAY_TRANSFORMERS:
                base = getattr(diffusers, name.removeprefix("MHLA"))
                namespace = {
                    "family": family,
                    "__module__": __name__,
                    "__doc__": f"`{base.__name__}` with MHLA in the layers that `mhla` lists.",
                }
                _OVERLAY_TRANSFORMERS[name] = type(name, (MHLATransformerMixin, base), namespace)
            return _OVERLAY_TRANSFORMERS[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}.")
