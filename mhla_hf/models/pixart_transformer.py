"""PixArt with MHLA in its self-attentions."""

from diffusers import PixArtTransformer2DModel

from .diffusion import MHLATransformerMixin, holds_mhla, self_attentions
from .families import PIXART


class MHLAPixArtTransformer2DModel(MHLATransformerMixin, PixArtTransformer2DModel):
    """`PixArtTransformer2DModel` with MHLA in the layers that `mhla` lists."""

    family = PIXART

    def unfuse_qkv_projections(self) -> None:
        """As the base, which brings back the processors it found when it fused, perhaps before the conversion; MHLA layers
        keep theirs, and read from the attention whether it is fused."""
        if self.original_attn_processors is not None:
            own = {name: found for name, found in self.attn_processors.items() if holds_mhla(found)}
            self.original_attn_processors = {**self.original_attn_processors, **own}
        super().unfuse_qkv_projections()
        for attn in self_attentions(self):
            attn.fused_projections = False
