"""Sana Video with MHLA in its self-attentions. They are linear attention already: uniform mixing is the model as it was."""

from diffusers import SanaVideoTransformer3DModel

from .diffusion import MHLATransformerMixin


class MHLASanaVideoTransformer3DModel(MHLATransformerMixin, SanaVideoTransformer3DModel):
    """`SanaVideoTransformer3DModel` with MHLA in the layers that `mhla` lists; with the default start, an exact drop-in.

    The rotary embedding turns the features of the numerator, after the map; the denominator keeps the features as they are.
    """

    source_entry = "models.sana_video_transformer"
    mhla_axes = 3
    mhla_defaults = {
        "layout": [3, 4, 4],
        "feature_map": "plain_relu",
        "normalize": True,
        "mixing_start": "uniform",
        "rope": "after",
        "layers": "all",
    }
    _repeated_blocks = ["SanaVideoTransformerBlock"]
