"""MHLA on grids: the core of image and video layers, and its mixing matrix.

The counts of blocks are the model's, the size of the grid is the input's. A larger or odd-sized grid gets larger
blocks; an axis with fewer tokens than blocks gets one block per token, and the matrix is averaged down to those blocks.
"""

from math import prod

import torch
import torch.nn.functional as F
from torch import nn

from ..ops.api import mhla
from ..ops.blocks import Blocks
from ..ops.shards import sharded_mhla
from .core import MHLACore, mixing_choices
from .mixing import Mixing, locality_start
from .settings import MHLASettings


def rotate_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of neighboring pairs: x `[B, T, H, K]`, cos and sin `[.., T, 1, K]`, each number twice; in fp32."""
    turned = torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
    return (x * cos.float() + turned * sin.float()).to(x.dtype)


def block_overlap(new: int, old: int) -> torch.Tensor:
    """How much of each of `new` equal parts of an axis lies in each of `old`: fp32 `[new, old]`, rows sum to 1."""
    starts, size = torch.arange(new, dtype=torch.float32) / new, 1.0 / new
    edges = torch.arange(old + 1, dtype=torch.float32) / old
    low = torch.maximum(starts[:, None], edges[None, :-1])
    high = torch.minimum(starts[:, None] + size, edges[None, 1:])
    overlap = (high - low).clamp_min(0.0)
    return overlap / overlap.sum(1, keepdim=True)


def grid_distances(layout) -> torch.Tensor:
    """Euclidean distance between the places of two blocks in the grid of blocks, fp32 `[M, M]` (section 4.2)."""
    axes = [torch.arange(count, dtype=torch.float32, device="cpu") for count in layout]
    places = torch.cartesian_prod(*axes).view(-1, len(axes))
    return (places[:, None] - places).square().sum(-1).sqrt()


class GridMixing(Mixing):
    """A learned mixing matrix over the blocks of a grid, used in fp32 whatever the model's dtype (section 4.2).

    `weight` is `[M, M]`, or `[H, M, M]` with one matrix per head; M is the product of `layout`, plus one for the block of
    prefix tokens if there are any.

    Args: as `Mixing`, whose distances are here those of the grid, the largest being their end; and
        layout: blocks per axis.
        prefix: True if class or register tokens, in a block of their own, come before the grid. They and all others see
            each other as an average block is seen.
    """

    def __init__(self, layout, num_heads: int | None = None, *, prefix: bool = False, **choices):
        self.layout, self.prefix = tuple(layout), prefix
        super().__init__(prod(self.layout) + prefix, num_heads, **choices)

    def initial_values(self) -> dict[str, torch.Tensor]:
        """The start of `weight`, for models that are built empty and filled later."""
        count = prod(self.layout)
        start = torch.ones(count, count)
        if self.start == "locality" and count > 1:
            distances = grid_distances(self.layout)
            start = locality_start(distances, distances.max())
        start = start / start.sum(-1, keepdim=True)
        if self.prefix:
            start = F.pad(start, (1, 0, 1, 0), value=1.0 / count)
            start = start / start.sum(-1, keepdim=True)
        return {"weight": (start.log() if self.form == "softmax" else start).expand(self.weight.shape)}

    def forward(self, counts) -> torch.Tensor:
        """The weights between the blocks of a grid cut into `counts` blocks per axis: `[M', M']` or `[H, M', M']`, fp32.

        Fewer blocks than `layout` on an axis: both sides are averaged over the old blocks that a new one covers, so that
        uniform mixing stays uniform.
        """
        weight = self.weight.float()
        weight = weight.softmax(-1) if self.form == "softmax" else weight * 1.0
        if self.form == "direct":
            weight = weight.clamp_min(0.0)
        if tuple(counts) == self.layout:
            return weight
        overlap = torch.ones(1, 1)
        for new, old in zip(counts, self.layout, strict=True):
            overlap = torch.kron(overlap, block_overlap(new, old))
        if self.prefix:
            overlap = torch.block_diag(torch.ones(1, 1), overlap)
        overlap = overlap.to(weight.device)
        return overlap @ weight @ overlap.mT


class GridConv(nn.Module):
    """A depthwise convolution of tokens over their grid, with an odd kernel size, the same on each of 1, 2 or 3 axes."""

    def __init__(self, channels: int, kernel: int, axes: int = 2):
        super().__init__()
        kind = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[axes]
        self.conv = kind(channels, channels, kernel, padding=kernel // 2, groups=channels)

    def forward(self, x: torch.Tensor, grid) -> torch.Tensor:
        """`[B, T, C]` or `[B, T, H, V]` with T the row-major tokens of `grid` -> the same shape."""
        planes = x.flatten(2).mT.contiguous()  # else wrong gradients of 3 axes in bf16 on CPUs (PyTorch 2.13)
        return self.conv(planes.unflatten(2, tuple(grid))).flatten(2).mT.reshape(x.shape)


class PositionConv(GridConv):
    """The paper's CPE (appendix F.2): a convolution of v that is zero at the start."""

    def __init__(self, channels: int, kernel: int, axes: int):
        super().__init__(channels, kernel, axes)
        for value in self.conv.parameters():
            value.data.zero_()

    def initial_values(self) -> dict[str, torch.Tensor]:
        """The start of each parameter, for models that are built empty and filled later."""
        return {f"conv.{name}": torch.zeros(value.shape) for name, value in self.conv.named_parameters()}


class GridMHLA(MHLACore):
    """Bidirectional multi-head linear attention over the tokens of a grid (sections 4.1 and 4.2).

    Args: as `MHLACore`, with as many heads for k and v as for q; `settings.layout` is required. prefix: how many class or
        register tokens come before the grid.
    """

    def __init__(self, settings: MHLASettings, *, num_heads: int, value_dim: int, prefix: int = 0, **widths):
        mixing = GridMixing(settings.layout, prefix=prefix > 0, **mixing_choices(settings, num_heads))
        super().__init__(settings, mixing, num_heads=num_heads, num_kv_heads=num_heads, value_dim=value_dim, **widths)
        self.prefix = prefix
        if settings.cpe:
            self.cpe = PositionConv(num_heads * value_dim, settings.cpe, len(settings.layout))

    def forward(self, q, k, v, *, grid, hidden_states=None, rotate=None, key_mask=None, shard=None) -> torch.Tensor:
        """Attend.

        Args:
            q, k: `[B, T, H, K]`. v: `[B, T, H, V]`; T is `prefix` tokens, then the grid's, row-major.
            grid: tokens per axis, as many axes as `settings.layout`.
            hidden_states: `[B, T, hidden_size]`, the layer's input; read by the gate.
            rotate: rotary embedding of q and k or, with `rope="after"`, of their features: a function of both.
            key_mask: bool `[B, T]`, False where a token is padding.
            shard: where tokens are spread over processes, `rank`, `edges` and `add_up` of `sharded_mhla`; then neither
                prefix, key_mask nor cpe.

        Returns:
            `[B, T, H, V]` in v's dtype.
        """
        blocks = Blocks.grid(grid, self.settings.layout, prefix=self.prefix)
        if shard is not None and (self.prefix or self.settings.cpe or key_mask is not None):
            raise ValueError("shard: got tokens of one process, expected all for cpe, prefix tokens or a key_mask.")
        if shard is None and blocks.length != q.shape[1]:
            raise ValueError(f"grid: got {tuple(grid)} for {q.shape[1]} tokens, expected {blocks.length} tokens.")
        q, k, v, options = self.operands(q, k, v, key_mask, rotate)
        mixing = self.mixing(blocks.counts)
        if shard is None:
            o = mhla(q, k, v, mixing, blocks=blocks, key_mask=key_mask, impl=self.settings.impl, **options)
        else:
            o = sharded_mhla(q, k, v, mixing, blocks=blocks, **shard, **options)
        o = self.finish_output(o, hidden_states, v.dtype)
        if self.settings.cpe:
            local = self.cpe(v[:, self.prefix :], grid)
            o = o + F.pad(local, (0, 0, 0, 0, self.prefix, 0))
        return o
