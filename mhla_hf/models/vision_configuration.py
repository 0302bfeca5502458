"""The configuration of image classifiers from scratch: plain (the paper's DeiT) and in stages (its MHLA-VLT).

One class serves both. Without `stages` the model is one stage of `num_hidden_layers` equal layers; with `stages` each
is spelt out, and `hidden_size`, `num_attention_heads` and `num_hidden_layers` speak of the last stage and of all together.
`attention` puts plain linear or softmax attention where MHLA would be, everything else equal: the yardsticks.
"""

import math
from copy import deepcopy
from typing import Literal

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig

from ..nn.settings import MHLASettings, is_layout

STAGE_KEYS = ("hidden_size", "depth", "num_heads", "layout")


def staged(*facts) -> list[dict]:
    """The `stages` of a hierarchical configuration, from one list for each of `STAGE_KEYS`."""
    return [dict(zip(STAGE_KEYS, stage, strict=True)) for stage in zip(*facts, strict=True)]


# What "Breaking the low-rank dilemma of linear attention" (arXiv 2411.07635) publishes; its first two stages are linear.
# The last projection is 1024 wide there, which gives 14.9 M and 25.6 M parameters. Table 2 has 16 M and 27 M, and does not
# say where they are; 1792, as wide as the last MLP, fits both within 1 %.
VLT_ARCHITECTURE = {"num_labels": 1000, "stem": "conv", "patch_size": 4, "positions": "rope", "position_conv": 3}
VLT_ARCHITECTURE |= {"mlp_conv": 3, "mlp_ratio": 3.5, "qk_norm": False, "output_product": True, "layer_scale": 1.0}
VLT_ARCHITECTURE |= {"feature_size": 1792, "pad_to_blocks": False}
VLT_LAYOUTS = [[7, 7], [4, 4], [4, 4], [4, 4]]
VLT_MHLA = {"feature_map": "elu", "rope": "after", "cpe": 5}
MHLA_VISION_PRESETS = {
    "deit-t": {"num_labels": 1000},
    "deit-s": {"num_labels": 1000, "hidden_size": 384, "num_attention_heads": 6},
    "deit-b": {"num_labels": 1000, "hidden_size": 768, "num_attention_heads": 12},
    "vlt-t": {
        **VLT_ARCHITECTURE,
        "stages": staged([64, 128, 256, 512], [2, 2, 6, 2], [1, 2, 4, 8], VLT_LAYOUTS),
        "mhla": {**VLT_MHLA, "layers": list(range(4))},
    },
    "vlt-s": {
        **VLT_ARCHITECTURE,
        "drop_path_rate": 0.15,
        "stages": staged([64, 128, 320, 512], [3, 5, 9, 3], [1, 2, 5, 8], VLT_LAYOUTS),
        "mhla": {**VLT_MHLA, "layers": list(range(8))},
    },
}
DIGITS = {"image_size": 32, "patch_size": 2, "num_channels": 1, "hidden_size": 48, "num_hidden_layers": 4}
MHLA_VISION_PRESETS["digits"] = {**DIGITS, "num_labels": 10, "drop_path_rate": 0.0}
PAPER_VISION_SETTINGS = {"feature_map": "relu", "layout": [4, 4], "cpe": 3}


@strict
class MHLAVisionConfig(PreTrainedConfig):
    """An image classifier from scratch (section 5.1, appendix E); the defaults are DeiT-T with MHLA.

    Args:
        image_size: pixels, one number or [height, width]: the size that learned positions are for. Others work.
        patch_size: pixels of a token's side after the stem. num_channels: of the image.
        hidden_size, num_hidden_layers, num_attention_heads: of the plain model; follow from `stages` where those are given.
        stages: list of {"hidden_size", "depth", "num_heads", "layout"}; a strided 3x3 convolution halves the grid between
            two of them.
        attention: what the layers in `mhla["layers"]` do: "mhla", "linear" (uniform, frozen mixing) or "softmax"; the
            others are softmax.
        mlp_ratio: width of the MLP over that of the layer. mlp_conv: kernel of a depthwise convolution in it; 0: none.
        stem: "patch" (one convolution) or "conv" (four 3x3 ones with BatchNorm, to a quarter of the side).
        positions: "learned" (added, resized to other grids) or "rope" (2-D, on q and k).
        position_conv: kernel of a depthwise convolution that is added to a layer's input; 0: none.
        qk_norm: RMSNorm of all of q and of all of k before the heads are cut. qkv_bias: biases of their projections.
        input_norm: a second LayerNorm inside the attention (the authors' release).
        output_product: multiply the attention's output by a projection of its input (VLT).
        layer_scale: start of a learned factor per channel on both branches; None: none.
        feature_size: width of a last 1x1 projection with BatchNorm and SiLU before pooling; 0: a LayerNorm instead.
        pool_first: average the tokens before the last LayerNorm (the authors' release), not after it.
        pad_to_blocks: pad images with zeros, centred, until every block of the first stage has whole patches (the paper
            pads 224 to 256).
        drop_path_rate: of the last layer; rising linearly from 0.
        image_mean, image_std: per channel, for the image processor.
        mhla: settings as a dictionary (`MHLASettings`). Default: [4, 4] blocks, relu, normalized, locality start, depthwise
            position convolution of kernel 3. A stage's own layout wins.

    `MHLAVisionConfig.preset("deit-t", image_size=384)` gives a ready configuration.
    """

    model_type = "mhla_vision"

    image_size: int | list[int] | tuple[int, int] = 224
    patch_size: int = 16
    num_channels: int = 3
    hidden_size: int = 192
    num_hidden_layers: int = 12
    num_attention_heads: int = 3
    stages: list[dict] | None = None
    attention: Literal["mhla", "linear", "softmax"] = "mhla"
    mlp_ratio: float = 4.0
    mlp_conv: int = 0
    hidden_act: str = "gelu"
    stem: Literal["patch", "conv"] = "patch"
    positions: Literal["learned", "rope"] = "learned"
    position_conv: int = 0
    qk_norm: bool = True
    qkv_bias: bool = True
    input_norm: bool = False
    output_product: bool = False
    layer_scale: float | None = None
    feature_size: int = 0
    pool_first: bool = False
    pad_to_blocks: bool = True
    drop_path_rate: float = 0.1
    layer_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    image_mean: list[float] | tuple[float, ...] | None = None
    image_std: list[float] | tuple[float, ...] | None = None
    mhla: dict | None = None

    def __post_init__(self, **kwargs):
        if self.stages is not None:
            for stage in self.stages:
                layout = stage.get("layout") or [1, 1]
                if (
                    not set(STAGE_KEYS[:3]) <= set(stage) <= set(STAGE_KEYS)
                    or not is_layout(layout)
                    or len(layout) != 2
                ):
                    what = f"{list(STAGE_KEYS)}, the last with blocks per row and column"
                    raise ValueError(f"stages: got {stage!r}, expected the keys {what}.")
            self.hidden_size = self.stages[-1]["hidden_size"]
            self.num_attention_heads = self.stages[-1]["num_heads"]
            self.num_hidden_layers = sum(stage["depth"] for stage in self.stages)
        gray = [0.5] * self.num_channels
        if self.image_mean is None:
            self.image_mean = [0.485, 0.456, 0.406] if self.num_channels == 3 else gray
        if self.image_std is None:
            self.image_std = [0.229, 0.224, 0.225] if self.num_channels == 3 else gray
        settings = MHLASettings.from_dict({**PAPER_VISION_SETTINGS, **(self.mhla or {})})
        if settings.layout is None or len(settings.layout) != 2:
            raise ValueError(f"layout: got {settings.layout!r}, expected blocks per row and column, such as [4, 4].")
        settings.layers = settings.resolve_layers(self.num_hidden_layers)
        self.mhla = settings.to_dict()
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        """Part of the strict validation: sizes that fit each other."""
        if self.stem == "conv" and self.patch_size != 4:
            raise ValueError(f'patch_size: got {self.patch_size}, expected 4 with stem "conv".')
        unit = 4 if self.positions == "rope" else 1  # 2-D RoPE turns pairs by row and by column
        for stage in self.stage_list():
            width, heads = stage["hidden_size"], stage["num_heads"]
            if width % heads or width // heads % unit:
                what = f"a divisor of the hidden size {width}, and heads as wide as a multiple of {unit}"
                raise ValueError(f"num_attention_heads: got {heads}, expected {what}.")

    def image_sides(self) -> tuple[int, int]:
        """Height and width of `image_size`."""
        return (self.image_size,) * 2 if isinstance(self.image_size, int) else tuple(self.image_size)

    def padded_sides(self, height: int, width: int) -> tuple[int, int]:
        """The size that an image of `height` x `width` pixels is padded to."""
        if not self.pad_to_blocks:
            return height, width
        units = [self.patch_size * count for count in self.stage_list()[0]["layout"]]
        return tuple(math.ceil(side / unit) * unit for side, unit in zip((height, width), units, strict=True))

    def stage_list(self) -> list[dict]:
        """The stages, also of a plain model, each with its own layout."""
        sizes = (self.hidden_size, self.num_hidden_layers, self.num_attention_heads)
        stages = [dict(zip(STAGE_KEYS, sizes, strict=False))] if self.stages is None else self.stages
        return [{**stage, "layout": list(stage.get("layout") or self.mhla["layout"])} for stage in stages]

    def preprocessing(self) -> dict:
        """What `preprocessor_config.json` says, so that `AutoImageProcessor` needs no code of ours."""
        height, width = self.image_sides()
        return {
            "image_processor_type": "ViTImageProcessor",
            "do_convert_rgb": True if self.num_channels == 3 else None,
            **dict.fromkeys(("do_resize", "do_rescale", "do_normalize"), True),
            "image_mean": list(self.image_mean),
            "image_std": list(self.image_std),
            "resample": 3,
            "rescale_factor": 1 / 255,
            "size": {"height": height, "width": width},
        }

    @classmethod
    def preset(cls, name: str, **overrides: object) -> "MHLAVisionConfig":
        """A named configuration with any argument replaced; `mhla` is merged into the preset's.

        Names: "deit-t", "deit-s", "deit-b", "vlt-t", "vlt-s" (table 2) and "digits" (32 px, one channel).
        """
        if name not in MHLA_VISION_PRESETS:
            raise ValueError(f"name: got {name!r}, expected one of {sorted(MHLA_VISION_PRESETS)}.")
        preset = deepcopy(MHLA_VISION_PRESETS[name])
        return cls(**{**preset, **overrides, "mhla": {**preset.get("mhla", {}), **(overrides.get("mhla") or {})}})
