"""Image classifiers from scratch (section 5.1): the paper's DeiT with average pooling, and its hierarchical MHLA-VLT.

After the stem, layers take tokens [B, T, C] and their grid, so that any grid works. Every parameter belongs to a module that
is called, since offloading and FSDP act when a module is called.
"""

import functools
import json
import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.initialization import trunc_normal_, zeros_
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPooling, ImageClassifierOutput
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from ...nn.core import MHLACore, Rotation, softmax_attention
from ...nn.grid import GridConv, GridMHLA, PositionConv, rotate_both
from ...nn.settings import MHLASettings
from ..pretrained import MHLAPreTrainedMixin
from .vision_configuration import MHLAVisionConfig

PREPROCESSOR_FILE = "preprocessor_config.json"
QK_NORM_EPS = 2.0**-23  # what `nn.RMSNorm` takes in fp32 by default


def as_map(tokens: Tensor, grid: Sequence[int]) -> Tensor:
    return tokens.mT.unflatten(2, tuple(grid))


def as_tokens(image: Tensor) -> Tensor:
    return image.flatten(2).mT


def make_stem(config: MHLAVisionConfig, width: int) -> nn.Sequential:
    """Build the stem (patch embedding), [B, channels, height, width] -> [B, C, rows, columns]."""
    if config.stem == "patch":
        patches = nn.Conv2d(config.num_channels, width, config.patch_size, config.patch_size)
        return nn.Sequential(OrderedDict(proj=patches))
    channels = [config.num_channels, width // 2, width // 2, width // 2, width]
    layers: list[nn.Module] = []
    for i, stride in enumerate((2, 1, 1, 2)):
        conv = nn.Conv2d(channels[i], channels[i + 1], 3, stride, 1)
        layers += [conv, nn.BatchNorm2d(channels[i + 1]), nn.GELU()]
    return nn.Sequential(*layers[:-1])


class GridPositions(nn.Module):
    """Learned position embeddings [1, width, rows, columns], resized bicubically to other grids."""

    def __init__(self, width: int, grid: Sequence[int]):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, width, *grid))

    def forward(self, grid: Sequence[int]) -> Tensor:
        if tuple(self.weight.shape[2:]) == tuple(grid):
            return as_tokens(self.weight)
        resized = F.interpolate(self.weight.float(), size=tuple(grid), mode="bicubic", align_corners=False)
        return as_tokens(resized.to(self.weight.dtype))


def grid_rotation(grid: Sequence[int], head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Compute cosines and sines of 2-D RoPE, each fp32 [T, 1, head_dim]: half of a head by row, half by column."""
    steps = torch.linspace(0, 1, head_dim // 4, device=device)
    angles = (1.0 / 10000**steps).repeat_interleave(2)
    rows = torch.arange(grid[0], device=device)[:, None, None] * angles
    columns = torch.arange(grid[1], device=device)[None, :, None] * angles
    angles = torch.cat([rows.expand(*grid, -1), columns.expand(*grid, -1)], dim=-1).flatten(0, 1)[:, None]
    return angles.cos(), angles.sin()


class GridSoftmax(MHLACore):
    """Softmax attention with the output norm, gate, and position convolution of `GridMHLA`, for comparison."""

    def __init__(self, settings: MHLASettings, *, num_heads: int, value_dim: int, **widths: Any):
        settings = replace(settings, feature_map="identity")
        mixing: Any = None  # softmax has none
        super().__init__(settings, mixing, num_heads=num_heads, num_kv_heads=num_heads, value_dim=value_dim, **widths)
        if settings.cpe:
            self.cpe = PositionConv(num_heads * value_dim, settings.cpe, 2)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, grid: Sequence[int], hidden_states: Tensor, rotate: Rotation | None
    ) -> Tensor:
        if rotate is not None:
            q, k = rotate(q, k)
        o = self.finish_output(softmax_attention(q, k, v), hidden_states, v.dtype)
        return o + self.cpe(v, grid) if self.settings.cpe else o


class MHLAVisionMixer(nn.Module):
    """Attention of a layer: projections, norms, and the core for a `kind`, "mhla", "linear", or "softmax"."""

    def __init__(self, config: MHLAVisionConfig, stage: dict[str, Any], kind: str):
        super().__init__()
        width, heads = stage["hidden_size"], stage["num_heads"]
        self.num_heads, self.head_dim = heads, width // heads
        mhla: Any = config.mhla
        settings = replace(MHLASettings.from_dict(mhla), layout=stage["layout"])
        self.norm = nn.LayerNorm(width) if config.input_norm else nn.Identity()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width, bias=config.qkv_bias) for _ in range(3))
        self.q_norm = nn.RMSNorm(width, QK_NORM_EPS) if config.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(width, QK_NORM_EPS) if config.qk_norm else nn.Identity()
        self.product = nn.Linear(width, width, bias=config.qkv_bias) if config.output_product else None
        self.o_proj = nn.Linear(width, width)
        sizes = {"num_heads": heads, "hidden_size": width, "key_dim": self.head_dim, "value_dim": self.head_dim}
        if kind == "linear":
            settings = replace(settings, layout=[1, 1], mixing_start="uniform", learn_mixing=False)
        if kind == "softmax":
            self.softmax = GridSoftmax(settings, **sizes)
        else:
            self.mhla = GridMHLA(settings, **sizes)

    def forward(self, hidden_states: Tensor, grid: Sequence[int], rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        """Attend over the whole grid: [B, T, width] -> [B, T, width]. `rotation` is from `grid_rotation`, or None."""
        x = self.norm(hidden_states)
        shape = (*x.shape[:-1], self.num_heads, self.head_dim)
        q, k = self.q_norm(self.q_proj(x)).view(shape), self.k_norm(self.k_proj(x)).view(shape)
        v = self.v_proj(x).view(shape)
        core = self.softmax if hasattr(self, "softmax") else self.mhla
        rotate = None if rotation is None else functools.partial(rotate_both, angles=rotation)
        o = core(q, k, v, grid=grid, hidden_states=x, rotate=rotate).flatten(2)
        if self.product is not None:
            o = o * self.product(x)
        return self.o_proj(o)


class VisionConv(GridConv):
    """A depthwise convolution of tokens over their grid, with a residual connection."""

    def forward(self, x: Tensor, grid: Sequence[int]) -> Tensor:
        return x + super().forward(x, grid)


class VisionMLP(nn.Module):
    """Two linear layers with an activation and, by `config.mlp_conv`, a depthwise convolution in between."""

    def __init__(self, config: MHLAVisionConfig, width: int):
        super().__init__()
        hidden = int(width * config.mlp_ratio)
        self.fc1 = nn.Linear(width, hidden)
        self.act = ACT2FN[config.hidden_act]
        self.conv = VisionConv(hidden, config.mlp_conv) if config.mlp_conv else None
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor, grid: Sequence[int]) -> Tensor:
        x = self.act(self.fc1(x))
        return self.fc2(x if self.conv is None else self.conv(x, grid))


class BranchScale(nn.Module):
    """Multiplies each channel by a learned weight (LayerScale)."""

    def __init__(self, width: int, start: float):
        super().__init__()
        self.start = start
        self.weight = nn.Parameter(torch.full((width,), float(start)))

    def initial_values(self) -> dict[str, Tensor]:
        return {"weight": torch.full(self.weight.shape, float(self.start))}

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class MHLAVisionBlock(GradientCheckpointingLayer):
    """A transformer block with stochastic depth: `drop` is the probability that a row of a batch skips a branch."""

    def __init__(self, config: MHLAVisionConfig, stage: dict[str, Any], kind: str, drop: float):
        super().__init__()
        width, scale = stage["hidden_size"], config.layer_scale
        self.positions = VisionConv(width, config.position_conv) if config.position_conv else None
        self.norm1 = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.attn = MHLAVisionMixer(config, stage, kind)
        self.scale1 = nn.Identity() if scale is None else BranchScale(width, scale)
        self.norm2 = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.mlp = VisionMLP(config, width)
        self.scale2 = nn.Identity() if scale is None else BranchScale(width, scale)
        self.drop = drop

    def forward(
        self, hidden_states: Tensor, grid: Sequence[int], rotation: tuple[Tensor, Tensor] | None, **kwargs: Any
    ) -> Tensor:
        x = hidden_states if self.positions is None else self.positions(hidden_states, grid)
        x = x + self.draw_branch_factor(x) * self.scale1(self.attn(self.norm1(x), grid, rotation))
        return x + self.draw_branch_factor(x) * self.scale2(self.mlp(self.norm2(x), grid))

    def draw_branch_factor(self, x: Tensor) -> Tensor:
        """Draw a branch's multiplier for each row, [B, 1, 1]: 0 or 1 / (1 - drop); 1 in eval mode."""
        return F.dropout(x.new_ones(len(x), 1, 1), self.drop, self.training)


class MHLAVisionStage(nn.Module):
    """Blocks of one width; in all stages but the first, a convolution of stride 2 comes before them."""

    def __init__(self, config: MHLAVisionConfig, number: int):
        super().__init__()
        stages = config.stage_list()
        stage, first = stages[number], sum(earlier["depth"] for earlier in stages[:number])
        width, last = stage["hidden_size"], max(config.num_hidden_layers - 1, 1)
        self.head_dim = width // stage["num_heads"]
        self.rotates = config.positions == "rope"
        self.reduce = None
        if number:
            input_width = stages[number - 1]["hidden_size"]
            self.reduce = nn.Sequential(nn.Conv2d(input_width, width, 3, 2, 1), nn.BatchNorm2d(width))
        mhla: Any = config.mhla
        self.blocks = nn.ModuleList()
        for layer in range(first, first + stage["depth"]):
            kind = config.attention if layer in mhla["layers"] else "softmax"
            self.blocks.append(MHLAVisionBlock(config, stage, kind, config.drop_path_rate * layer / last))

    def forward(self, x: Tensor, grid: Sequence[int], **kwargs: Any) -> tuple[Tensor, Sequence[int]]:
        """Return tokens [B, T', width] and their grid, which the convolution halves."""
        if self.reduce is not None:
            image = self.reduce(as_map(x, grid))
            x, grid = as_tokens(image), tuple(image.shape[2:])
        rotation = grid_rotation(grid, self.head_dim, x.device) if self.rotates else None
        for block in self.blocks:
            x = block(x, grid=grid, rotation=rotation, **kwargs)
        return x, grid


class MHLAVisionPreTrainedModel(MHLAPreTrainedMixin, PreTrainedModel):
    """Base class of the image classifiers from scratch: loading, saving, and initial weights."""

    config: MHLAVisionConfig
    source_entry = "models.vision.vision_model"
    base_model_prefix = "model"
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    supports_gradient_checkpointing = True
    _no_split_modules = ["MHLAVisionBlock"]
    _can_record_outputs = {"hidden_states": MHLAVisionBlock}
    _supports_sdpa = True
    _can_compile_fullgraph = True

    @torch.no_grad()
    def _init_weights(self, module: Any) -> None:
        if not isinstance(module, (nn.Linear, nn.Conv2d, GridPositions)):
            return super()._init_weights(module)
        trunc_normal_(module.weight, std=self.config.initializer_range)
        if getattr(module, "bias", None) is not None:
            zeros_(module.bias)

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Save as `MHLAPreTrainedMixin` does, and write `preprocessor_config.json` unless there is one already."""
        target = Path(save_directory) / PREPROCESSOR_FILE
        if kwargs.get("is_main_process", True) and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(json.dumps(self.config.preprocessing(), indent=2) + "\n", encoding="utf-8")
        super().save_pretrained(save_directory, *args, **kwargs)


class MHLAVisionModel(MHLAVisionPreTrainedModel):
    """Maps images [B, channels, height, width] to tokens [B, T, width] and their average [B, width], without a head."""

    def __init__(self, config: MHLAVisionConfig) -> None:
        super().__init__(config)
        stages = config.stage_list()
        first, last = stages[0]["hidden_size"], stages[-1]["hidden_size"]
        self.stem = make_stem(config, first)
        self.positions = None
        if config.positions == "learned":
            sides = config.padded_sides(*config.image_sides())
            self.positions = GridPositions(first, [-(-side // config.patch_size) for side in sides])
        self.stages = nn.ModuleList(MHLAVisionStage(config, number) for number in range(len(stages)))
        if config.feature_size:
            self.features = nn.Sequential(nn.Conv2d(last, config.feature_size, 1), nn.BatchNorm2d(config.feature_size))
        else:
            self.norm = nn.LayerNorm(last, eps=config.layer_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.stem

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self, pixel_values: Tensor, interpolate_pos_encoding: bool = True, **kwargs: object
    ) -> BaseModelOutputWithPooling:
        """Return `last_hidden_state` [B, T, width] and `pooler_output` [B, width] of images.

        Args:
            pixel_values: [B, channels, height, width]. With the "patch" stem and without `pad_to_blocks`, height and width
                are multiples of the patch size; otherwise they may have any value.
            interpolate_pos_encoding: Whether to resize learned positions to other grids, instead of refusing these.
            **kwargs: `output_hidden_states`, and other arguments of transformers.

        Raises:
            ValueError: The images do not have this shape, or learned positions do not fit their grid.
        """
        x = self.stem(self.padded(pixel_values))
        grid = tuple(x.shape[2:])
        x = as_tokens(x)
        if self.positions is not None:
            trained_grid = tuple(self.positions.weight.shape[2:])
            if not interpolate_pos_encoding and grid != trained_grid:
                expected = f"{trained_grid}, or interpolate_pos_encoding=True"
                raise ValueError(f"pixel_values: got a grid of {grid} tokens, expected {expected}.")
            x = x + self.positions(grid)
        for stage in self.stages:
            x, grid = stage(x, grid, **kwargs)
        if self.config.feature_size:
            x = as_tokens(F.silu(self.features(as_map(x, grid))))
            pooled = x.mean(1)
        elif self.config.pool_first:
            pooled = self.norm(x.mean(1))
        else:
            x = self.norm(x)
            pooled = x.mean(1)
        return BaseModelOutputWithPooling(last_hidden_state=x, pooler_output=pooled)

    def padded(self, pixel_values: Tensor) -> Tensor:
        """Cast images to the model's dtype, and zero-pad them if `config.pad_to_blocks`; ValueError if shapes do not fit."""
        if pixel_values.ndim != 4 or pixel_values.shape[1] != self.config.num_channels:
            expected = f"[B, {self.config.num_channels}, height, width]"
            raise ValueError(f"pixel_values: got shape {tuple(pixel_values.shape)}, expected {expected}.")
        height, width = pixel_values.shape[-2:]
        unit = self.config.patch_size if self.config.stem == "patch" and not self.config.pad_to_blocks else 1
        if height % unit or width % unit:
            raise ValueError(f"pixel_values: got {height} x {width} pixels, expected multiples of patch size {unit}.")
        rows, columns = self.config.padded_sides(height, width)
        left, top = (columns - width) // 2, (rows - height) // 2
        return F.pad(pixel_values.to(self.dtype), (left, columns - width - left, top, rows - height - top))


class MHLAForImageClassification(MHLAVisionPreTrainedModel):
    """Maps images [B, channels, height, width] to logits [B, num_labels] and, with labels, a loss."""

    def __init__(self, config: MHLAVisionConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = MHLAVisionModel(config)
        width = config.feature_size or config.hidden_size
        self.classifier = nn.Linear(width, config.num_labels) if config.num_labels else nn.Identity()
        self.post_init()

    @can_return_tuple
    def forward(self, pixel_values: Tensor, labels: Tensor | None = None, **kwargs: object) -> ImageClassifierOutput:
        """Return `logits` [B, num_labels] of images, a `loss` if there are labels [B], and `hidden_states` if requested."""
        outputs = self.model(pixel_values, **kwargs)
        logits = self.classifier(outputs.pooler_output)
        loss = None if labels is None else self.loss_function(labels, logits, self.config)
        return ImageClassifierOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)
