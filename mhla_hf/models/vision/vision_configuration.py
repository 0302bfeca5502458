"""The configuration of image classifiers from scratch: plain (the paper's DeiT) and in stages (its MHLA-VLT).

Without `stages` the model is one stage of `num_hidden_layers` equal layers. With `stages`, `hidden_size` and
`num_attention_heads` are those of the last stage, and `num_hidden_layers` is the sum over all stages.
"""

import math
from copy import deepcopy
from typing import Any, Literal

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig

from ...nn.settings import MHLASettings, check_grid_settings, is_layout

STAGE_KEYS = ("hidden_size", "depth", "num_heads", "layout")


def staged(*columns: list[Any]) -> list[dict[str, Any]]:
    """Build the `stages` of a configuration from a list of values for each of `STAGE_KEYS`."""
    return [dict(zip(STAGE_KEYS, stage, strict=True)) for stage in zip(*columns, strict=True)]


# Of arXiv 2411.07635. A last projection as wide as the last MLP, 1792, gives table 2's 16 M and 27 M parameters within 1 %;
# the published one, 1024 wide, gives 14.9 M and 25.6 M.
VLT_ARCHITECTURE: dict[str, Any] = {
    "num_labels": 1000, "stem": "conv", "patch_size": 4, "positions": "rope", "position_conv": 3, "mlp_conv": 3,
    "mlp_ratio": 3.5, "qk_norm": False, "output_product": True, "layer_scale": 1.0, "feature_size": 1792,
    "pad_to_blocks": False,
}  # fmt: skip
VLT_LAYOUTS = [[7, 7], [4, 4], [4, 4], [4, 4]]
VLT_MHLA = {"feature_map": "elu", "rope": "after", "cpe": 5}
DIGITS = {"image_size": 32, "patch_size": 2, "num_channels": 1, "hidden_size": 48, "num_hidden_layers": 4}
MHLA_VISION_PRESETS: dict[str, dict[str, Any]] = {
    "digits": {**DIGITS, "num_labels": 10, "drop_path_rate": 0.0},
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
PAPER_VISION_SETTINGS = {"feature_map": "relu", "layout": [4, 4], "cpe": 3}


@strict
class MHLAVisionConfig(PreTrainedConfig):
    """The configuration of an image classifier from scratch (section 5.1, appendix E); by default, DeiT-T with MHLA.

    Args:
        image_size: Side of images, in pixels, for which positions are learned, or [height, width]. Other sizes work, too.
        patch_size: Side of the square that a token covers after the stem, in pixels; 4 with the stem "conv".
        num_channels: Number of channels of an image.
        hidden_size, num_hidden_layers, num_attention_heads: Sizes of a model without stages; `stages` overrides them.
        stages: List of {"hidden_size", "depth", "num_heads", "layout"}; "layout" is optional. Between two stages a 3x3
            convolution of stride 2 halves the grid.
        attention: Attention of the layers in `mhla["layers"]`: "mhla", "linear" (uniform, frozen mixing), or "softmax". The
            other layers are softmax.
        mlp_ratio: Width of the MLP divided by that of the layer.
        mlp_conv: Kernel size of a depthwise convolution in the MLP; 0 for none.
        hidden_act: Activation of the MLP.
        stem: "patch" (one convolution) or "conv" (four 3x3 convolutions with BatchNorm, to a quarter of the side).
        positions: "learned" (added, resized to other grids) or "rope" (2-D, on q and k).
        position_conv: Kernel size of a depthwise convolution that is added to a layer's input; 0 for none.
        qk_norm: Whether to apply an RMSNorm to q and to k, over all heads together.
        qkv_bias: Whether the projections of q, k, and v have biases.
        input_norm: Whether to apply a second LayerNorm inside the attention, as in the authors' release.
        output_product: Whether to multiply the attention's output by a projection of its input (VLT).
        layer_scale: Initial value of a learned multiplier per channel on both branches; None for no multiplier.
        feature_size: Width of a last 1x1 projection with BatchNorm and SiLU before pooling; 0 for a LayerNorm instead.
        pool_first: Whether to average the tokens before the last LayerNorm, as in the authors' release, or after it.
        pad_to_blocks: Whether to pad images with zeros on all sides until every block of the first stage has whole patches,
            as the paper pads 224 pixels to 256.
        drop_path_rate: Stochastic depth rate of the last layer; the rate rises linearly from 0 at the first layer.
        layer_norm_eps: Epsilon of the LayerNorms of blocks and of the last one.
        initializer_range: Standard deviation of initial weights.
        image_mean, image_std: Per channel, for the image processor. Default: those of ImageNet for three channels, else 0.5.
        mhla: Settings as a dictionary (`MHLASettings`). Default: [4, 4] blocks, relu, `cpe` 3. The layout of a stage takes
            precedence.

    `MHLAVisionConfig.preset("deit-t", image_size=384)` returns a ready configuration.
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

    def __post_init__(self, **kwargs: Any) -> None:
        if self.stages is not None:
            for stage in self.stages:
                layout = stage.get("layout") or [1, 1]
                has_keys = set(STAGE_KEYS[:3]) <= set(stage) <= set(STAGE_KEYS)
                if not (has_keys and is_layout(layout) and len(layout) == 2):
                    expected = f"the keys {list(STAGE_KEYS)}; layout, blocks along height and width, is optional"
                    raise ValueError(f"stages: got {stage!r}, expected {expected}.")
            self.hidden_size = self.stages[-1]["hidden_size"]
            self.num_attention_heads = self.stages[-1]["num_heads"]
            self.num_hidden_layers = sum(stage["depth"] for stage in self.stages)
        is_rgb, gray = self.num_channels == 3, [0.5] * self.num_channels
        if self.image_mean is None:
            self.image_mean = [0.485, 0.456, 0.406] if is_rgb else gray
        if self.image_std is None:
            self.image_std = [0.229, 0.224, 0.225] if is_rgb else gray
        settings = MHLASettings.from_dict({**PAPER_VISION_SETTINGS, **(self.mhla or {})})
        check_grid_settings(settings, "an image classifier", 2)
        settings.layers = settings.resolve_layers(self.num_hidden_layers)
        self.mhla = settings.to_dict()
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        """Raise ValueError if sizes do not fit together; called by the validation of `strict`."""
        if self.stem == "conv" and self.patch_size != 4:
            raise ValueError(f'patch_size: got {self.patch_size}, expected 4 with stem "conv".')
        unit = 4 if self.positions == "rope" else 1  # RoPE rotates pairs of channels, half by row, half by column
        for stage in self.stage_list():
            width, heads = stage["hidden_size"], stage["num_heads"]
            if width % heads or width // heads % unit:
                expected = f"a divisor of hidden_size {width} that makes the head width a multiple of {unit}"
                name = "stages: num_heads" if self.stages else "num_attention_heads"
                raise ValueError(f"{name}: got {heads}, expected {expected}.")

    def image_sides(self) -> tuple[int, int]:
        height, width = [self.image_size] * 2 if isinstance(self.image_size, int) else self.image_size
        return height, width

    def padded_sides(self, height: int, width: int) -> tuple[int, ...]:
        """Return the height and width, in pixels, of an image of this height and width after the model has padded it."""
        if not self.pad_to_blocks:
            return height, width
        units = [self.patch_size * count for count in self.stage_list()[0]["layout"]]
        return tuple(math.ceil(side / unit) * unit for side, unit in zip((height, width), units, strict=True))

    def stage_list(self) -> list[dict[str, Any]]:
        """Return one dictionary per stage, with all of `STAGE_KEYS`; a model without `stages` has one stage."""
        sizes = (self.hidden_size, self.num_hidden_layers, self.num_attention_heads)
        stages = self.stages or [dict(zip(STAGE_KEYS, sizes, strict=False))]
        settings: Any = self.mhla
        return [{**stage, "layout": list(stage.get("layout") or settings["layout"])} for stage in stages]

    def preprocessing(self) -> dict[str, Any]:
        """Return the content of `preprocessor_config.json`, with which `AutoImageProcessor` works without our code."""
        height, width = self.image_sides()
        return {
            "image_processor_type": "ViTImageProcessor",
            "do_convert_rgb": True if self.num_channels == 3 else None,
            **dict.fromkeys(("do_resize", "do_rescale", "do_normalize"), True),
            **{name: list(getattr(self, name)) for name in ("image_mean", "image_std")},
            **{"resample": 3, "rescale_factor": 1 / 255, "size": {"height": height, "width": width}},
        }

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> "MHLAVisionConfig":
        """Return the configuration "deit-t", "deit-s", "deit-b", "vlt-t", "vlt-s" (table 2), or "digits" (tiny, gray).

        `overrides` replace its arguments; `mhla` is merged into the preset's. Raise ValueError for other names.
        """
        if name not in MHLA_VISION_PRESETS:
            raise ValueError(f"name: got {name!r}, expected one of {sorted(MHLA_VISION_PRESETS)}.")
        preset = deepcopy(MHLA_VISION_PRESETS[name])
        return cls(**{**preset, **overrides, "mhla": {**preset.get("mhla", {}), **(overrides.get("mhla") or {})}})
