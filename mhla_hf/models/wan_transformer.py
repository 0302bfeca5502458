"""Wan with MHLA in its self-attentions (section 5.3), and the two models that share its blocks: VACE and SkyReels-V2."""

from diffusers import SkyReelsV2Transformer3DModel, WanTransformer3DModel, WanVACETransformer3DModel

from .diffusion import MHLATransformerMixin

WAN_SETTINGS = {
    "layout": [3, 5, 10],
    "feature_map": "relu",
    "normalize": False,
    "output_norm": True,
    "rope": "after",
    "layers": "2/3",
}


class MHLAWanTransformer3DModel(MHLATransformerMixin, WanTransformer3DModel):
    """`WanTransformer3DModel` with MHLA in the layers that `mhla` lists; the paper's hybrid keeps softmax in every third.

    The rotary embedding turns the features, after the map; there is no denominator but an RMSNorm per head (section 4.1).
    150 blocks are the layout (3, 5, 10); the paper's 105 are not spelt out, (7, 3, 5) gives 105.
    """

    source_entry = "models.wan_transformer"
    mhla_axes = 3
    mhla_defaults = WAN_SETTINGS


class MHLAWanVACETransformer3DModel(MHLATransformerMixin, WanVACETransformer3DModel):
    """`WanVACETransformer3DModel` the same way; `mhla` counts its main blocks, the control blocks stay softmax."""

    source_entry = "models.wan_transformer"
    mhla_axes = 3
    mhla_defaults = WAN_SETTINGS


class MHLASkyReelsV2Transformer3DModel(MHLATransformerMixin, SkyReelsV2Transformer3DModel):
    """`SkyReelsV2Transformer3DModel` the same way, for whole videos: its blockwise causal mask is refused."""

    source_entry = "models.wan_transformer"
    mhla_axes = 3
    mhla_defaults = WAN_SETTINGS
