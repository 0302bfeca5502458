"""The MHLA core of image and video layers, over tokens on a grid, and its mixing matrix.

The model fixes the number of blocks, and the input sets the size of the grid. An axis with fewer tokens than blocks gets one
block per token, and the matrix is averaged down to these blocks.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.api import mhla
from ..ops.blocks import Blocks
from ..ops.grid_shards import sharded_mhla
from .core import MHLACore, Rotation, mixing_options, prepare_operands, softmax_attention
from .heads import HeadSplit
from .mixing import Mixing, locality_weights
from .settings import MHLASettings

# Called like `softmax_attention`, as softmax(q, k, v, mask=..., scale=...).
SoftmaxFunction = Callable[..., Tensor]


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, distance: int = 1) -> Tensor:
    """Apply a rotary embedding to pairs of channels of x [B, T, H, K], in fp32.

    `cos` and `sin` are [..., T, 1 or H, K], with each number at both channels of its pair, or [..., T, 1, 1]. The channels
    of a pair are `distance` apart: 1 for neighbors, K / 2 for the halves of a head.
    """
    first, second = x.unflatten(-1, (-1, 2, distance)).unbind(-2)  # [B, T, H, K / (2 * distance), distance]
    turned = torch.stack([-second, first], dim=-2).flatten(-3)
    return (x * cos.float() + turned * sin.float()).to(x.dtype)


def rotate_both(x: Tensor, y: Tensor, angles: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """Apply `rotate_pairs` to queries and keys; `angles` are its arguments after the tensor."""
    return rotate_pairs(x, *angles), rotate_pairs(y, *angles)


def block_overlap(num_new: int, num_old: int) -> Tensor:
    """Return what fraction of each of `num_new` equal parts of an axis is in each of `num_old` parts: [num_new, num_old]."""
    starts, size = torch.arange(num_new, dtype=torch.float32) / num_new, 1.0 / num_new
    edges = torch.arange(num_old + 1, dtype=torch.float32) / num_old
    low = torch.maximum(starts[:, None], edges[None, :-1])
    high = torch.minimum(starts[:, None] + size, edges[None, 1:])
    overlap = (high - low).clamp_min(0.0)
    return overlap / overlap.sum(1, keepdim=True)


def block_gaps(counts: Sequence[int], device: torch.device | str) -> Tensor:
    """Compute how far apart the blocks of a grid are along each axis, fp32 [M, M, number of axes]."""
    axes = [torch.arange(count, dtype=torch.float32, device=device) for count in counts]
    positions = torch.cartesian_prod(*axes).view(-1, len(axes))
    return (positions[:, None] - positions).abs()


class GridMixing(Mixing):
    """A learned mixing matrix over the blocks of a grid, computed in fp32 whatever the model's dtype (paper section 4.2).

    Prefix tokens have a block of their own, which initially has the weights of an average block.
    """

    def __init__(self, layout: Sequence[int], num_heads: int | None = None, *, prefix: bool = False, **choices: Any):
        self.layout, self.prefix = tuple(layout), prefix
        super().__init__(prod(self.layout) + prefix, num_heads, **choices)

    def initial_values(self) -> dict[str, Tensor]:
        count = prod(self.layout)
        start = torch.ones(count, count, dtype=torch.float32)
        if self.start == "locality" and count > 1:
            distances = block_gaps(self.layout, "cpu").square().sum(-1).sqrt()  # Euclidean (paper section 4.2)
            start = locality_weights(distances, distances.max())
        start = start / start.sum(-1, keepdim=True)
        if self.prefix:
            start = F.pad(start, (1, 0, 1, 0), value=1.0 / count)
            start = start / start.sum(-1, keepdim=True)
        return {"weight": (start.log() if self.form == "softmax" else start).expand(self.weight.shape)}

    def forward(self, counts: Sequence[int]) -> Tensor:  # type: ignore[override]  # a count for every axis
        """Compute the weights for `counts` blocks along each axis, n in all: fp32 [n, n] or [H, n, n].

        If an axis has fewer blocks than in the layout, weights are averaged over the blocks that each new one covers.
        """
        weight = self.weight.float()
        weight = weight.softmax(-1) if self.form == "softmax" else weight * 1.0
        if self.form == "direct":
            weight = weight.clamp_min(0.0)
        if tuple(counts) == self.layout:
            return weight
        overlap = one = torch.ones(1, 1, dtype=torch.float32)
        for num_new, num_old in zip(counts, self.layout, strict=True):
            overlap = torch.kron(overlap, block_overlap(num_new, num_old))
        if self.prefix:
            overlap = torch.block_diag(one, overlap)
        overlap = overlap.to(weight.device)
        return overlap @ weight @ overlap.mT


class GridConv(nn.Module):
    """A depthwise convolution of tokens over their grid, with an odd kernel size."""

    def __init__(self, channels: int, kernel: int, axes: int = 2):
        super().__init__()
        conv_class = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[axes]
        self.conv = conv_class(channels, channels, kernel, padding=kernel // 2, groups=channels)

    def forward(self, x: Tensor, grid: Sequence[int]) -> Tensor:
        """Convolve tokens [B, T, C] or [B, T, H, V], in row-major order, over a grid."""
        # Without `contiguous`, PyTorch 2.13 gives wrong gradients for 3 axes in bf16 on CPUs.
        channels_first = x.flatten(2).mT.contiguous()
        return self.conv(channels_first.unflatten(2, tuple(grid))).flatten(2).mT.reshape(x.shape)


class PositionConv(GridConv):
    """The paper's CPE (appendix F.2): a depthwise convolution of v, initialized to zero."""

    def __init__(self, channels: int, kernel: int, axes: int):
        super().__init__(channels, kernel, axes)
        for value in self.conv.parameters():
            value.data.zero_()

    def initial_values(self) -> dict[str, Tensor]:
        return {f"conv.{name}": torch.zeros(value.shape) for name, value in self.conv.named_parameters()}


class GridCore(MHLACore):
    """Base class of the cores over a grid, in which some heads may keep softmax over all tokens; see `MHLACore`.

    Args:
        num_heads: Number of all heads. Feature maps, mixing, gate, output norm, and cpe are those of the MHLA heads alone.
        softmax_heads: Indices of the heads that keep softmax, fewer than `num_heads`.

    Attributes:
        heads: The `HeadSplit`; None if no head keeps softmax.
    """

    mixing: GridMixing

    def __init__(
        self, settings: MHLASettings, mixing: nn.Module, num_heads: int, softmax_heads: Sequence[int], *, value_dim: int,
        **widths: Any
    ):  # fmt: skip
        if len(softmax_heads) >= num_heads or max(softmax_heads, default=0) >= num_heads:
            raise ValueError(
                f"softmax_heads: got {softmax_heads}, expected some of the heads 0 to {num_heads - 1}, not all."
            )
        num_mhla, layout = num_heads - len(softmax_heads), settings.layout
        super().__init__(settings, mixing, num_heads=num_mhla, num_kv_heads=num_mhla, value_dim=value_dim, **widths)
        self.sizes: dict[str, Any] = {"num_heads": num_heads, "value_dim": value_dim, **widths}
        self.heads = HeadSplit(softmax_heads, num_heads) if softmax_heads else None
        if settings.cpe and layout is not None:
            self.cpe = PositionConv(num_mhla * value_dim, settings.cpe, len(layout))

    def split_heads(self, q: Tensor, k: Tensor, v: Tensor, rotate: Rotation | None) -> tuple[Any, Any, Rotation | None]:
        """Return q, k, and v of the softmax heads, rotated, those of the MHLA heads, and the rotary embedding of these."""
        heads: Any = self.heads
        rotated: Any = (q, k) if rotate is None else rotate(q, k)
        # Under autocast, rotations give fp32.
        kept = [heads.part(x, True, 2).to(v.dtype) for x in (*rotated, v)]
        others = [heads.part(x, False, 2) for x in (q, k, v)]
        if rotate is None:
            return kept, others, None

        def rotate_mhla_heads(*tensors: Tensor) -> Any:
            if self.settings.rope == "after":  # they are features; angles may differ by head, so it gets all heads
                zeros = [x.new_zeros(*x.shape[:2], heads.counts[True], x.shape[3]) for x in tensors]
                whole = [heads.join({True: x, False: y}, 2) for x, y in zip(zeros, tensors, strict=True)]
                return tuple(heads.part(x, False, 2) for x in rotate(*whole))
            return tuple(heads.part(x, False, 2) for x in rotated)

        return kept, others, rotate_mhla_heads

    def with_softmax_heads(self, softmax_heads: Sequence[int]) -> "GridCore":
        """Return a core like this one, which has no softmax heads, in which some are; the others keep their parameters."""
        split = HeadSplit(softmax_heads, self.num_heads)
        core: GridCore = type(self)(self.settings, softmax_heads=softmax_heads, **self.sizes)
        for name, value in core.named_parameters():
            whole = self.get_parameter(name).data
            value.data = (whole if whole.shape == value.shape else split.part(whole, False, 0)).clone()
        return core.train(self.training)


class GridMHLA(GridCore):
    """Bidirectional multi-head linear attention over the tokens of a grid (paper sections 4.1 and 4.2).

    Args:
        settings: Settings of the model; `layout` is required.
        prefix: Number of class or register tokens before the grid.
        num_heads, softmax_heads, **widths: As in `GridCore`.
    """

    def __init__(
        self, settings: MHLASettings, *, num_heads: int, softmax_heads: Sequence[int] = (), prefix: int = 0,
        **widths: Any
    ):  # fmt: skip
        assert settings.layout is not None  # see `check_grid_settings`
        options = mixing_options(settings, num_heads - len(softmax_heads))
        mixing = GridMixing(settings.layout, prefix=prefix > 0, **options)
        super().__init__(settings, mixing, num_heads, softmax_heads, **widths)
        self.sizes["prefix"] = self.prefix = prefix

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, grid: Sequence[int], hidden_states: Tensor | None = None,
        rotate: Rotation | None = None, key_mask: Tensor | None = None, shard: dict[str, Any] | None = None,
        softmax: SoftmaxFunction = softmax_attention,
    ) -> Tensor:  # fmt: skip
        """Attend to all tokens of the grid.

        Args:
            q, k, v: [B, T, H, K] (q and k) and [B, T, H, V], the `prefix` tokens, then the grid in row-major order.
            grid: Number of tokens along each axis, with as many axes as `settings.layout`.
            hidden_states: [B, T, hidden_size], the input of the layer, which the gate reads.
            rotate: Rotary embedding of q and k or, with `rope="after"`, of their features; None if there is none.
            key_mask: bool [B, T], False for padding.
            shard: If tokens are spread over processes, the arguments `rank`, `edges`, and `add_up` of `sharded_mhla`; the
                tensors then have the tokens of this process.
            softmax: Computes the attention of heads that keep softmax; with `shard`, over the tokens of all processes.

        Returns:
            [B, T, H, V] in v's dtype.

        Raises:
            ValueError: If grid and prefix do not have T tokens, or `shard` comes with prefix tokens, a key_mask, or cpe.
        """
        blocks = Blocks.grid(tuple(grid), self.mixing.layout, prefix=self.prefix)
        if shard is not None and (self.prefix or self.settings.cpe or key_mask is not None):
            raise ValueError("shard: got a part of the tokens, expected None with cpe, prefix tokens, or a key_mask.")
        if shard is None and blocks.length != q.shape[1]:
            expected = f"{blocks.length} tokens, {self.prefix} of them before the grid"
            raise ValueError(f"grid: got {tuple(grid)} for {q.shape[1]} tokens, expected {expected}.")
        if self.heads is not None:
            kept, (q, k, v), rotate = self.split_heads(q, k, v, rotate)
            kept_o = softmax(*kept, mask=None if key_mask is None else key_mask[:, None, None])
        q, k, v, options = prepare_operands(self, q, k, v, key_mask, rotate)
        mixing = self.mixing(blocks.counts)
        if shard is None:
            o: Any = mhla(q, k, v, mixing, blocks=blocks, key_mask=key_mask, impl=self.settings.impl, **options)
        else:
            o = sharded_mhla(q, k, v, mixing, blocks=blocks, **shard, **options)
        o = self.finish_output(o, hidden_states, v.dtype)
        if self.settings.cpe:
            o = o + F.pad(self.cpe(v[:, self.prefix :], grid), (0, 0, 0, 0, self.prefix, 0))
        return o if self.heads is None else self.heads.join({True: kept_o, False: o}, 2)
