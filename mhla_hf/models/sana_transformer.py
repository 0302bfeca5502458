"""Sana with MHLA in its self-attentions. They are linear attention already: uniform mixing is the model as it was."""

from diffusers import SanaTransformer2DModel

from .diffusion import MHLATransformerMixin


class MHLASanaTransformer2DModel(MHLATransformerMixin, SanaTransformer2DModel):
    """`SanaTransformer2DModel` with MHLA in the layers that `mhla` lists; with the default start, an exact drop-in."""

    source_entry = "models.sana_transformer"
    mhla_defaults = {
        "layout": [4, 4],
        "feature_map": "plain_relu",
        "normalize": True,
        "mixing_start": "uniform",
        "layers": "all",
    }
    _repeated_blocks = ["SanaTransformerBlock"]
