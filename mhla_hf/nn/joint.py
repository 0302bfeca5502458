"""The MHLA core of layers in which tokens of text and of a grid attend in one sequence, as in Flux or HunyuanVideo.

A query t of the grid reads the text, and optionally the blocks around its own, by softmax, and all other blocks by MHLA,
under one normalizer. With scores z_ts = <q_t, k_s> / sqrt(K), features phi, a balance b per head, and t, s in blocks i, j:

    o_t = (sum_near e^z_ts v_s + e^b sum_far m_ij <phi(q_t), phi(k_s)> v_s) / (the same with 1 for v_s)

A query of the text reads all tokens by softmax. There may be several grids, such as a new image and its source images; block
m has the tokens of block m of every grid.
"""

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.api import mhla
from ..ops.blocks import Blocks
from ..ops.reference import divide_or_zero
from ..ops.torch_layout import with_ones
from .core import MHLACore, Rotation, mixing_options, softmax_attention
from .features import harmless_balance
from .grid import GridMixing, PositionConv, block_gaps
from .settings import MHLASettings

LOWEST_SCORE = -1000.0  # of the additional key, where there is no far part
WIDTH_STEP = 8  # of heads, for fused kernels

# Called like `softmax_attention`, as softmax(q, k, v, mask=..., scale=...).
SoftmaxFunction = Callable[..., Tensor]


class TextTokens(NamedTuple):
    """The S text tokens: q and k [B, S, H, K], rotated if the model has RoPE, v [B, S, H, V], and two masks.

    Masks are bool or are added to the scores. `mask` [B, 1, 1, S] is for queries of the grid and keys of the text,
    `full_mask` [B, 1, 1 or S, S + T] for queries of the text and all keys, those of the text first.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None = None
    full_mask: Tensor | None = None


def softmax_beside_key(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, softmax: SoftmaxFunction
) -> tuple[Tensor, Tensor, Tensor]:
    """Call `softmax` over keys [B, S, H, K] and one more key, with a score z' for each query.

    The last channel of q [B, T, H, K + 1] is z' * sqrt(K); the mask is [B, 1, 1, at most S]. With weights
    e^z / (sum e^z + e^z'), returns the sum of weight * value over S keys [B, T, H, V], the sum of their weights, and the
    weight of the additional key, both [B, T, H, 1]. To merge other values, whose weights have the sum e^z', a caller adds
    their mean times the weight of the additional key. A logsumexp would do, too, but fused kernels give it no gradient;
    these weights, computed as further columns of v, have one. What underflows, also in fp16, is negligible beside the rest.
    """
    num_keys, key_width, value_width = k.shape[1], k.shape[3], v.shape[3]
    width = -(-max(key_width + 1, value_width + 2) // WIDTH_STEP) * WIDTH_STEP
    additional = F.pad(k.new_ones(1, 1, 1, 1), (key_width, width - key_width - 1))  # [1, 1, 1, width]
    keys = torch.cat([F.pad(k, (0, width - key_width)), additional.expand(len(k), -1, k.shape[2], -1)], 1)
    is_key = torch.arange(num_keys + 1, device=v.device) < num_keys
    columns = torch.stack([is_key, ~is_key], -1).to(v.dtype)[None, :, None]  # [1, S + 1, 1, 2]
    columns = columns.expand(len(v), -1, v.shape[2], -1)
    values = torch.cat([F.pad(v, (0, 0, 0, 0, 0, 1)), columns], -1)  # [B, S + 1, H, V + 2]
    if mask is not None:
        mask = F.pad(mask, (0, num_keys + 1 - mask.shape[-1]), value=float(mask.dtype == torch.bool))
    q, values = F.pad(q, (0, width - q.shape[3])), F.pad(values, (0, width - value_width - 2))
    o = softmax(q, keys, values, mask=mask, scale=key_width**-0.5)
    return o[..., :value_width], o[..., value_width : value_width + 1], o[..., value_width + 1 : value_width + 2]


def split_grids(grid: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    """Return the sizes of all grids, from the size of a single grid or from a sequence of such tuples."""
    return tuple(grid) if isinstance(grid[0], tuple) else (tuple(grid),)


def near_blocks(counts: Sequence[int], window: int) -> list[list[int]]:
    """List, for each block of a grid, the blocks that are fewer than `window` blocks from it along every axis."""
    lists = []
    for place in product(*(range(count) for count in counts)):
        near = [0]
        for position, count in zip(place, counts, strict=True):
            around = range(max(0, position - window + 1), min(count, position + window))
            near = [index * count + i for index in near for i in around]
        lists.append(near)
    return lists


def far_block_mask(counts: Sequence[int], window: int, device: torch.device) -> Tensor:
    """Return fp32 [M, M], 0 for the pairs of blocks that `near_blocks` lists and 1 for others."""
    return (block_gaps(counts, device).amax(-1) >= window).float()


class JointMixing(GridMixing):
    """Mixing over the blocks of a grid, and `balance` [H], the log of the multiplier of MHLA weights beside e^score."""

    def __init__(self, layout: Sequence[int], *, balance: float, all_heads: int, **choices: Any):
        self.initial_balance, self.all_heads = balance, all_heads
        super().__init__(layout, **choices)
        self.balance = torch.nn.Parameter(self.initial_values()["balance"])

    def initial_values(self) -> dict[str, Tensor]:
        balance = torch.full((self.all_heads,), self.initial_balance, dtype=torch.float32)
        return {**super().initial_values(), "balance": balance}

    def forward(self, counts: Sequence[int]) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return the weights between blocks, as `GridMixing` does, and e^balance, fp32 [H, 1]."""
        return super().forward(counts), self.balance.float().exp()[:, None]


class JointMHLA(MHLACore):
    """Attention over a text and a grid, whose tokens read each other by MHLA (near ones by softmax with `windowed`).

    `settings.layout` is required; see `MHLACore` for the arguments. Initially, the balance is so small that the softmax part
    dominates in a converted layer.
    """

    mixing: JointMixing

    def __init__(self, settings: MHLASettings, *, num_heads: int, key_dim: int, value_dim: int, **widths: Any):
        assert settings.layout is not None  # see `check_grid_settings`
        balance = harmless_balance(settings.feature_map, key_dim)
        options = mixing_options(settings, num_heads)
        mixing = JointMixing(settings.layout, balance=balance, all_heads=num_heads, **options)
        sizes = {"num_heads": num_heads, "num_kv_heads": num_heads, "key_dim": key_dim, "value_dim": value_dim}
        super().__init__(settings, mixing, **sizes, **widths)
        if settings.cpe:
            self.cpe = PositionConv(num_heads * value_dim, settings.cpe, len(settings.layout))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, text: TextTokens, *, grid: Sequence[Any],
        hidden_states: Tensor | None = None, rotate: Rotation | None = None,
        softmax: SoftmaxFunction = softmax_attention,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Attend over the text and the grid.

        Args:
            q, k, v: [B, T, H, K] (q and k) and [B, T, H, V], the tokens of the grid, or of one grid after the other, in
                row-major order.
            text: The tokens of the text, of which there may be none.
            grid: Number of tokens along each axis of `settings.layout`; for several grids, a tuple of such tuples.
            hidden_states: [B, T, hidden_size], the input of the layer for the tokens of the grid, which the gate reads.
            rotate: Rotary embedding of q and k; None if there is none. With `rope="near"`, only the softmax part has it.
            softmax: Computes the softmax attention; for the grid, with one more key and wider heads (`softmax_beside_key`).

        Returns:
            The outputs of the grid [B, T, H, V] and of the text [B, S, H, V], in v's dtype.

        Raises:
            ValueError: If the grid does not have T tokens.
        """
        grids = split_grids(grid)
        blocks = Blocks.grid(grids[0], self.mixing.layout, others=grids[1:])
        if blocks.length != q.shape[1]:
            raise ValueError(f"grid: got {tuple(grid)} for {q.shape[1]} tokens, expected {blocks.length} tokens.")
        mixing, balance = self.mixing(blocks.counts)
        rotated_q, rotated_k = (q, k) if rotate is None else rotate(q, k)
        q, k = (q, k) if self.settings.rope == "near" else (rotated_q, rotated_k)
        # Under autocast, norms and rotations give fp32.
        q, k, rotated_q, rotated_k = (x.to(v.dtype) for x in (q, k, rotated_q, rotated_k))
        text = TextTokens._make(x if x is None or x.dtype == torch.bool else x.to(v.dtype) for x in text)
        if self.settings.windowed:
            mixing = mixing * far_block_mask(blocks.counts, self.settings.window, mixing.device)
        options: dict[str, Any] = {"normalize": False, "scale": 1.0, "unrounded": True, "impl": self.settings.impl}
        q_features, k_features = (x.to(v.dtype) for x in (self.q_map(q), self.k_map(k)))
        far: Any = mhla(q_features, k_features, with_ones(v), mixing, blocks=blocks, **options)
        with torch.autocast(q.device.type, enabled=False):
            far = balance * far  # [B, T, H, V + 1]
            size, scale = far[..., -1:].detach().abs(), q.shape[3] ** -0.5
            score = (size.log() / scale).clamp(min=LOWEST_SCORE / scale).to(v.dtype)  # [B, T, H, 1]
            queries = torch.cat([rotated_q, score], -1)
            parts = self.attend_near(queries, rotated_k, v, text, blocks, softmax)
            near, near_weight, far_weight, score = (x.to(far.dtype) for x in (*parts, score))
            # v's dtype rounds the score, so it is not quite the log of the size.
            far = far_weight * (size.log() - scale * score).exp() * divide_or_zero(far, size[..., 0])
            o = divide_or_zero(near + far[..., :-1], (near_weight + far[..., -1:])[..., 0])
            keys, values = torch.cat([text.k, rotated_k], 1), torch.cat([text.v, v], 1)
            text_o = softmax(text.q, keys, values, mask=text.full_mask)
        o = self.finish_output(o, hidden_states, v.dtype)
        if self.settings.cpe:
            images = v.split([math.prod(one) for one in grids], 1)
            o = o + torch.cat([self.cpe(image, one) for image, one in zip(images, grids, strict=True)], 1)
        return o, text_o

    def attend_near(
        self, q: Tensor, k: Tensor, v: Tensor, text: TextTokens, blocks: Blocks, softmax: SoftmaxFunction
    ) -> tuple[Tensor, ...]:
        """Return the three tensors of `softmax_beside_key` for the queries of the grid."""
        if not self.settings.windowed:
            return softmax_beside_key(q, text.k, text.v, text.mask, softmax)
        order = torch.argsort(blocks.index(q.device), stable=True)
        by_block = [x[:, order].split(blocks.sizes(), 1) for x in (q, k, v)]
        parts = []
        for queries, near in zip(by_block[0], near_blocks(blocks.counts, self.settings.window), strict=True):
            keys = torch.cat([text.k, *(by_block[1][block] for block in near)], 1)
            values = torch.cat([text.v, *(by_block[2][block] for block in near)], 1)
            parts.append(softmax_beside_key(queries, keys, values, text.mask, softmax))
        inverse = torch.argsort(order)
        return tuple(torch.cat(pieces, 1)[:, inverse] for pieces in zip(*parts, strict=True))
