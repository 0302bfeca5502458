"""PixArt with MHLA in its self-attentions."""

from diffusers import PixArtTransformer2DModel

from .diffusion import MHLAAttnProcessor, MHLATransformerMixin, self_attentions


class MHLAPixArtTransformer2DModel(MHLATransformerMixin, PixArtTransformer2DModel):
    """`PixArtTransformer2DModel` with MHLA in the layers that `mhla` lists."""

    source_entry = "models.pixart_transformer"
    _repeated_blocks = ["BasicTransformerBlock"]

    def fuse_qkv_projections(self) -> None:
        """As the base, which puts one softmax processor into every layer, except that MHLA layers keep theirs."""
        own = {name: found for name, found in self.attn_processors.items() if isinstance(found, MHLAAttnProcessor)}
        super().fuse_qkv_projections()
        self.set_attn_processor({**self.attn_processors, **own})

    def unfuse_qkv_projections(self) -> None:
        """As the base; MHLA layers read from the attention whether it is fused."""
        super().unfuse_qkv_projections()
        for attn in self_attentions(self):
            attn.fused_projections = False
