"""The layers of image classifiers from scratch: stems, positions, attention of three kinds, MLP, block, stage.

Tokens travel as `[B, T, C]` with their grid beside them, in every stage, so that any grid works and MHLA, plain
linear and softmax attention are the same module but for the core. Layers own their core as `attn.mhla` (`GridMHLA`), or as
`attn.softmax` where they are softmax. Every parameter sits in a module that is called.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer

from ..nn.core import MHLACore
from ..nn.grid import GridConv, GridMHLA, PositionConv, rotate_pairs
from ..nn.settings import MHLASettings
from .vision_configuration import MHLAVisionConfig

QK_NORM_EPS = 2.0**-23  # of fp32, as `nn.RMSNorm` takes when it is given none


def as_map(tokens: torch.Tensor, grid) -> torch.Tensor:
    """Tokens `[B, T, C]` of a grid as a map `[B, C, rows, columns]`."""
    return tokens.mT.unflatten(2, tuple(grid))


def as_tokens(image: torch.Tensor) -> torch.Tensor:
    """A map `[B, C, rows, columns]` as row-major tokens `[B, T, C]`."""
    return image.flatten(2).mT


class PatchStem(nn.Sequential):
    """Non-overlapping patches by one convolution: `[B, C, H, W]` to `[B, width, H / patch, W / patch]`."""

    def __init__(self, config: MHLAVisionConfig, width: int):
        super().__init__()
        self.proj = nn.Conv2d(config.num_channels, width, config.patch_size, config.patch_size)


class ConvStem(nn.Sequential):
    """Four 3x3 convolutions with BatchNorm, the first and the last of stride 2: to a quarter of the side."""

    def __init__(self, config: MHLAVisionConfig, width: int):
        channels = [config.num_channels, width // 2, width // 2, width // 2, width]
        layers = []
        for i, stride in enumerate((2, 1, 1, 2)):
            conv = nn.Conv2d(channels[i], channels[i + 1], 3, stride, 1)
            layers += [conv, nn.BatchNorm2d(channels[i + 1]), nn.GELU()]
        super().__init__(*layers[:-1])


class GridPositions(nn.Module):
    """Learned positions `[1, width, rows, columns]`, resized bicubically to other grids."""

    def __init__(self, width: int, grid):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, width, *grid))

    def forward(self, grid) -> torch.Tensor:
        if tuple(self.weight.shape[2:]) == tuple(grid):
            return as_tokens(self.weight)
        resized = F.interpolate(self.weight.float(), size=tuple(grid), mode="bicubic", align_corners=False)
        return as_tokens(resized.to(self.weight.dtype))


def grid_rotation(grid, head_dim: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of 2-D RoPE, fp32 `[T, 1, head_dim]`: half of each head turns with the row, half with the column."""
    steps = torch.linspace(0, 1, head_dim // 4, device=device)
    angles = (1.0 / 10000**steps).repeat_interleave(2)
    rows = torch.arange(grid[0], device=device)[:, None, None] * angles
    columns = torch.arange(grid[1], device=device)[None, :, None] * angles
    angles = torch.cat([rows.expand(*grid, -1), columns.expand(*grid, -1)], dim=-1).flatten(0, 1)[:, None]
    return angles.cos(), angles.sin()


class GridSoftmax(MHLACore):
    """Softmax attention with what MHLA's core has around it (norm, gate, position convolution): the yardstick.

    Takes and gives what `GridMHLA` does, without its feature map and mixing.
    """

    def __init__(self, settings: MHLASettings, *, num_heads: int, value_dim: int, **widths):
        settings = replace(settings, feature_map="identity")
        super().__init__(settings, None, num_heads=num_heads, num_kv_heads=num_heads, value_dim=value_dim, **widths)
        if settings.cpe:
            self.cpe = PositionConv(num_heads * value_dim, settings.cpe, 2)

    def forward(self, q, k, v, *, grid, hidden_states=None, rotate=None) -> torch.Tensor:
        """q, k, v `[B, T, H, K]` to `[B, T, H, K]`."""
        if rotate is not None:
            q, k = rotate(q, k)
        o = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)
        o = self.finish_output(o, hidden_states, v.dtype)
        return o + self.cpe(v, grid) if self.settings.cpe else o


class MHLAVisionMixer(nn.Module):
    """Projections around one core, "mhla", "linear" or "softmax": `[B, T, width]` to `[B, T, width]`."""

    def __init__(self, config: MHLAVisionConfig, stage: dict, kind: str):
        super().__init__()
        width, heads = stage["hidden_size"], stage["num_heads"]
        self.num_heads, self.head_dim = heads, width // heads
        settings = replace(MHLASettings.from_dict(config.mhla), layout=stage["layout"])
        self.norm = nn.LayerNorm(width) if config.input_norm else nn.Identity()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width, bias=config.qkv_bias) for _ in range(3))
        norms = (nn.RMSNorm(width, QK_NORM_EPS) if config.qk_norm else nn.Identity() for _ in range(2))
        self.q_norm, self.k_norm = norms
        self.product = nn.Linear(width, width, bias=config.qkv_bias) if config.output_product else None
        self.o_proj = nn.Linear(width, width)
        sizes = {"num_heads": heads, "hidden_size": width, "key_dim": self.head_dim, "value_dim": self.head_dim}
        if kind == "softmax":
            self.softmax = GridSoftmax(settings, **sizes)
            return
        if kind == "linear":
            settings = replace(settings, layout=[1, 1], mixing_start="uniform", learn_mixing=False)
        self.mhla = GridMHLA(settings, **sizes)

    def forward(self, hidden_states: torch.Tensor, grid, rotation=None) -> torch.Tensor:
        """grid: (rows, columns). rotation: cosines and sines of `grid_rotation`, or None."""
        x = self.norm(hidden_states)
        shape = (*x.shape[:-1], self.num_heads, self.head_dim)
        q, k = self.q_norm(self.q_proj(x)).view(shape), self.k_norm(self.k_proj(x)).view(shape)
        v = self.v_proj(x).view(shape)

        def rotate(a, b):
            return rotate_pairs(a, *rotation), rotate_pairs(b, *rotation)

        core = self.softmax if hasattr(self, "softmax") else self.mhla
        o = core(q, k, v, grid=grid, hidden_states=x, rotate=None if rotation is None else rotate).flatten(2)
        if self.product is not None:
            o = o * self.product(x)
        return self.o_proj(o)


class VisionConv(GridConv):
    """A depthwise convolution of tokens over their grid, added to them."""

    def forward(self, x: torch.Tensor, grid) -> torch.Tensor:
        return x + super().forward(x, grid)


class VisionMLP(nn.Module):
    """Two linear layers with an activation between, and a depthwise convolution after it where there is one."""

    def __init__(self, config: MHLAVisionConfig, width: int):
        super().__init__()
        hidden = int(width * config.mlp_ratio)
        self.fc1 = nn.Linear(width, hidden)
        self.act = ACT2FN[config.hidden_act]
        self.conv = VisionConv(hidden, config.mlp_conv) if config.mlp_conv else None
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor, grid) -> torch.Tensor:
        x = self.act(self.fc1(x))
        return self.fc2(x if self.conv is None else self.conv(x, grid))


class BranchScale(nn.Module):
    """A learned factor per channel."""

    def __init__(self, width: int, start: float):
        super().__init__()
        self.start = start
        self.weight = nn.Parameter(torch.full((width,), float(start)))

    def initial_values(self) -> dict[str, torch.Tensor]:
        """The start of each parameter, for models that are built empty and filled later."""
        return {"weight": torch.full(self.weight.shape, float(self.start))}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class MHLAVisionBlock(GradientCheckpointingLayer):
    """Norm, attention, norm, MLP, each with its residual, which a row of a training batch goes alone at the rate `drop`."""

    def __init__(self, config: MHLAVisionConfig, stage: dict, kind: str, drop: float):
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

    def forward(self, hidden_states: torch.Tensor, grid, rotation=None, **kwargs) -> torch.Tensor:
        x = hidden_states if self.positions is None else self.positions(hidden_states, grid)
        x = x + self.kept(x) * self.scale1(self.attn(self.norm1(x), grid, rotation))
        return x + self.kept(x) * self.scale2(self.mlp(self.norm2(x), grid))

    def kept(self, x: torch.Tensor) -> torch.Tensor:
        """The factor of a branch for each row `[B, 1, 1]` (stochastic depth): 0, or what keeps the mean."""
        return F.dropout(x.new_ones(len(x), 1, 1), self.drop, self.training)


class MHLAVisionStage(nn.Module):
    """Blocks of one width, and before them, in all stages but the first, a strided convolution."""

    def __init__(self, config: MHLAVisionConfig, number: int):
        super().__init__()
        stages = config.stage_list()
        stage, first = stages[number], sum(before["depth"] for before in stages[:number])
        width, total = stage["hidden_size"], max(config.num_hidden_layers - 1, 1)
        self.head_dim = width // stage["num_heads"]
        self.rotates = config.positions == "rope"
        self.reduce = None
        if number:
            before = stages[number - 1]["hidden_size"]
            self.reduce = nn.Sequential(nn.Conv2d(before, width, 3, 2, 1), nn.BatchNorm2d(width))
        self.blocks = nn.ModuleList()
        for layer in range(first, first + stage["depth"]):
            kind = config.attention if layer in config.mhla["layers"] else "softmax"
            self.blocks.append(MHLAVisionBlock(config, stage, kind, config.drop_path_rate * layer / total))

    def forward(self, x: torch.Tensor, grid, **kwargs) -> tuple[torch.Tensor, tuple[int, int]]:
        """Tokens and grid to tokens and grid."""
        if self.reduce is not None:
            image = self.reduce(as_map(x, grid))
            x, grid = as_tokens(image), tuple(image.shape[2:])
        rotation = grid_rotation(grid, self.head_dim, x.device) if self.rotates else None
        for block in self.blocks:
            x = block(x, grid=grid, rotation=rotation, **kwargs)
        return x, grid
