"""The MHLA core of layers in which softmax over some tokens and MHLA over the others share one normalizer.

In Flux or HunyuanVideo, tokens of text and of a grid attend in one sequence; elsewhere, there is no text. A query t of the
grid reads the text, with `windowed` the blocks around its own, and with `salient_blocks` further blocks that its own one
chooses, by softmax, and all other blocks by MHLA. With scores z_ts = <q_t, k_s> / sqrt(K), features phi, a balance b per
head, and t, s in blocks i, j:

    o_t = (sum_near e^z_ts v_s + e^b sum_far m_ij <phi(q_t), phi(k_s)> v_s) / (the same with 1 for v_s)

A query of the text reads all tokens by softmax. There may be several grids, such as a new image and its source images; block
m has the tokens of block m of every grid.
"""

import math
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.api import mhla
from ..ops.blocks import Blocks
from ..ops.reference import divide_or_zero
from ..ops.torch_layout import with_ones
from .core import Rotation, mixing_options, softmax_attention
from .features import harmless_balance
from .grid import GridCore, GridMixing, SoftmaxFunction, block_gaps
from .settings import MHLASettings

LOWEST_SCORE = -1000.0  # of the additional key, where there is no far part
WIDTH_STEP = 8  # of heads, for fused kernels


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


def with_additional_key(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Widen q [B, T, H, K + 1], k [B, S, H, K], and v [B, S, H, V] to one width, and append the key of `softmax_beside_key`.

    The value of each key gets two more columns: 1 and 0, of the additional key 0 and 1.
    """
    num_keys, key_width, value_width = k.shape[1], k.shape[3], v.shape[3]
    width = -(-max(key_width + 1, value_width + 2) // WIDTH_STEP) * WIDTH_STEP
    additional = F.pad(k.new_ones(1, 1, 1, 1), (key_width, width - key_width - 1))  # [1, 1, 1, width]
    keys = torch.cat([F.pad(k, (0, width - key_width)), additional.expand(len(k), -1, k.shape[2], -1)], 1)
    is_key = torch.arange(num_keys + 1, device=v.device) < num_keys
    columns = torch.stack([is_key, ~is_key], -1).to(v.dtype)[None, :, None]  # [1, S + 1, 1, 2]
    columns = columns.expand(len(v), -1, v.shape[2], -1)
    values = torch.cat([F.pad(v, (0, 0, 0, 0, 0, 1)), columns], -1)  # [B, S + 1, H, V + 2]
    return F.pad(q, (0, width - q.shape[3])), keys, F.pad(values, (0, width - value_width - 2))


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
    if mask is not None:
        mask = F.pad(mask, (0, k.shape[1] + 1 - mask.shape[-1]), value=float(mask.dtype == torch.bool))
    o = softmax(*with_additional_key(q, k, v), mask=mask, scale=k.shape[3] ** -0.5)
    return split_columns(o, v.shape[3])


def split_columns(o: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output [..., V] and the two sums of weights [..., 1] that `with_additional_key` makes columns of values."""
    return o[..., :width], o[..., width : width + 1], o[..., width + 1 : width + 2]


def attend_jointly(
    text: TextTokens, q: Tensor, k: Tensor, v: Tensor, softmax: SoftmaxFunction = softmax_attention
) -> tuple[Tensor, Tensor]:
    """Attend over text and grid by softmax alone; return the outputs of the grid [B, T, H, V] and of the text."""
    keys, values, mask = torch.cat([text.k, k], 1), torch.cat([text.v, v], 1), text.mask
    if mask is not None:
        mask = F.pad(mask, (0, keys.shape[1] - mask.shape[-1]), value=float(mask.dtype == torch.bool))
    return softmax(q, keys, values, mask=mask), attend_text(text, keys, values, softmax)


def attend_text(text: TextTokens, k: Tensor, v: Tensor, softmax: SoftmaxFunction) -> Tensor:
    """Attend from the text to all tokens, those of the text first; fused kernels may refuse to do so without queries."""
    return softmax(text.q, k, v, mask=text.full_mask) if text.q.shape[1] else text.v


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


@torch.no_grad()
def choose_blocks(q: Tensor, k: Tensor, blocks: Blocks, near: Tensor, count: int) -> Tensor:
    """Choose `count` blocks for each block of queries, of those that are not near [M, M]: int64 [B, H, M, count].

    They are those whose mean key has the largest product with the mean query, as in block-sparse attention (MoBA, VSA); -1
    stands for none where there are too few.
    """
    slots, is_token, _ = block_slots(blocks, q.device)
    weights = (is_token / is_token.sum(1, keepdim=True))[None, :, :, None, None]  # [1, M, N, 1, 1]
    # Not by index_add, whose sums vary on CUDA: a recomputed layer must choose the same blocks.
    means = ((x[:, slots].float() * weights).sum(2) for x in (q, k))
    score = torch.einsum("bihk,bjhk->bhij", *means).masked_fill(near, float("-inf"))
    best = score.topk(min(count, len(near)), -1)
    return best.indices.masked_fill(best.values == float("-inf"), -1)


def block_slots(blocks: Blocks, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Lay out tokens by block, padded to N per block.

    Returns the token in each slot [M, N] (0 for padding), which slots hold a token [M, N], and the slot of each token [T].
    """
    index, longest = blocks.index(device), max(blocks.sizes())
    order = torch.argsort(index, stable=True)
    starts = torch.tensor((0, *blocks.sizes()), device=device).cumsum(0)
    place = torch.empty_like(index)
    place[order] = index[order] * longest + torch.arange(len(index), device=device) - starts[index[order]]
    slots = torch.zeros(blocks.num_blocks * longest, dtype=torch.int64, device=device)
    is_token = torch.zeros_like(slots, dtype=torch.bool)
    slots[place], is_token[place] = torch.arange(len(index), device=device), True
    return slots.view(-1, longest), is_token.view(-1, longest), place


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


class JointMHLA(GridCore):
    """Attention over a text and a grid, whose tokens read each other by MHLA (near ones by softmax with `windowed`).

    `settings.layout` is required; see `GridCore` for the arguments. Initially, the balance is so small that the softmax part
    dominates in a converted layer.
    """

    mixing: JointMixing

    def __init__(
        self, settings: MHLASettings, *, num_heads: int, key_dim: int, softmax_heads: Sequence[int] = (), **widths: Any
    ):
        assert settings.layout is not None  # see `check_grid_settings`
        num_mhla, balance = num_heads - len(softmax_heads), harmless_balance(settings.feature_map, key_dim)
        mixing = JointMixing(settings.layout, balance=balance, all_heads=num_mhla, **mixing_options(settings, num_mhla))
        super().__init__(settings, mixing, num_heads, softmax_heads, key_dim=key_dim, **widths)

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
            softmax: Computes the softmax attention; in the grid's MHLA heads, wider and with one more key
                (`softmax_beside_key`).

        Returns:
            The outputs of the grid [B, T, H, V] and of the text [B, S, H, V], in v's dtype.

        Raises:
            ValueError: If the grid does not have T tokens.
        """
        grids = split_grids(grid)
        blocks = Blocks.grid(grids[0], self.mixing.layout, others=grids[1:])
        if blocks.length != q.shape[1]:
            raise ValueError(f"grid: got {tuple(grid)} for {q.shape[1]} tokens, expected {blocks.length} tokens.")
        text = TextTokens._make(x if x is None or x.dtype == torch.bool else x.to(v.dtype) for x in text)
        if self.heads is not None:
            (kept_q, kept_k, kept_v), (q, k, v), rotate = self.split_heads(q, k, v, rotate)
            kept_text, text = (
                text._replace(**{name: self.heads.part(getattr(text, name), part, 2) for name in "qkv"})
                for part in (True, False)
            )
            kept_outputs = attend_jointly(kept_text, kept_q, kept_k, kept_v, softmax)
        mixing, balance = self.mixing(blocks.counts)
        rotated_q, rotated_k = (q, k) if rotate is None else rotate(q, k)
        q, k = (q, k) if self.settings.rope == "near" else (rotated_q, rotated_k)
        # Under autocast, norms and rotations give fp32.
        q, k, rotated_q, rotated_k = (x.to(v.dtype) for x in (q, k, rotated_q, rotated_k))
        chosen = None
        if self.settings.windowed:
            is_far = far_block_mask(blocks.counts, self.settings.window, mixing.device)
            mixing = mixing * is_far
            if self.settings.salient_blocks:
                chosen = choose_blocks(rotated_q, rotated_k, blocks, is_far == 0, self.settings.salient_blocks)
        options: dict[str, Any] = {"normalize": False, "scale": 1.0, "unrounded": True, "impl": self.settings.impl}
        q_features, k_features = (x.to(v.dtype) for x in (self.q_map(q), self.k_map(k)))
        far = far_outputs(q_features, k_features, with_ones(v), mixing, chosen, {"blocks": blocks, **options})
        with torch.autocast(q.device.type, enabled=False):
            far = balance * far  # [B, T, H, V + 1]
            size, scale = far[..., -1:].detach().abs(), q.shape[3] ** -0.5
            score = (size.log() / scale).clamp(min=LOWEST_SCORE / scale).to(v.dtype)  # [B, T, H, 1]
            queries = torch.cat([rotated_q, score], -1)
            if chosen is None:
                parts = self.attend_near(queries, rotated_k, v, text, blocks, softmax)
            else:
                parts = self.attend_salient(queries, rotated_k, v, text, blocks, softmax, chosen)
            near, near_weight, far_weight, score = (x.to(far.dtype) for x in (*parts, score))
            # v's dtype rounds the score, so it is not quite the log of the size.
            far = far_weight * (size.log() - scale * score).exp() * divide_or_zero(far, size[..., 0])
            o = divide_or_zero(near + far[..., :-1], (near_weight + far[..., -1:])[..., 0])
            keys, values = torch.cat([text.k, rotated_k], 1), torch.cat([text.v, v], 1)
            text_o = attend_text(text, keys, values, softmax)
        o = self.finish_output(o, hidden_states, v.dtype)
        if self.settings.cpe:
            images = v.split([math.prod(one) for one in grids], 1)
            o = o + torch.cat([self.cpe(image, one) for image, one in zip(images, grids, strict=True)], 1)
        if self.heads is None:
            return o, text_o
        o, text_o = (self.heads.join({True: x, False: y}, 2) for x, y in zip(kept_outputs, (o, text_o), strict=True))
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

    def attend_salient(
        self, q: Tensor, k: Tensor, v: Tensor, text: TextTokens, blocks: Blocks, softmax: SoftmaxFunction, chosen: Tensor
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Do as `attend_near`, with the blocks in `chosen` [B, H, M, count] beside the near ones."""
        slots, is_token, place = block_slots(blocks, q.device)
        near, num_text = near_blocks(blocks.counts, self.settings.window), text.k.shape[1]
        widest, (batch, heads, *_) = max(map(len, near)), chosen.shape
        padded = torch.tensor([[*row, *[-1] * (widest - len(row))] for row in near], device=q.device)
        listed = torch.cat([padded.expand(batch, heads, -1, -1), chosen], -1).transpose(1, 2)  # [B, M, H, L]
        is_whole = blocks.equal and min(map(len, near)) == widest and chosen.shape[3] <= len(near) - widest
        queries, keys, values = with_additional_key(q, torch.cat([text.k, k], 1), torch.cat([text.v, v], 1))
        num_keys = keys.shape[1]
        by_head = [x.transpose(1, 2).flatten(0, 2) for x in (keys, values)]  # [B * H * (S + T + 1), width]
        first = num_keys * torch.arange(batch * heads, device=q.device).view(batch, 1, heads, 1)
        parts = []
        # As many blocks of queries at a time as have one copy of all keys between them.
        at_once = max(1, slots.numel() // (num_text + listed.shape[3] * slots.shape[1]))
        for rows in torch.arange(len(near), device=q.device).split(at_once):
            some = listed[:, rows]
            tokens = num_text + slots[some.clamp_min(0)].flatten(3)  # [B, m, H, L * N]
            texts = torch.arange(num_text, device=q.device).expand(*tokens.shape[:3], -1)
            index = first + torch.cat([texts, tokens, tokens.new_full((*tokens.shape[:3], 1), num_keys - 1)], -1)
            some_keys, some_values = (
                x.index_select(0, index.flatten()).view(-1, *index.shape[2:], x.shape[1]).transpose(1, 2)
                for x in by_head
            )  # [B * m, S + L * N + 1, H, width]
            mask = None
            if not (is_whole and text.mask is None):
                seen = (is_token[some.clamp_min(0)] & (some >= 0)[..., None]).flatten(3)
                mask = join_masks(text.mask, num_text, F.pad(seen, (0, 1), value=True))
            some_queries = queries[:, slots[rows]].flatten(0, 1)  # [B * m, N, H, width]
            o = softmax(some_queries, some_keys, some_values, mask=mask, scale=k.shape[3] ** -0.5)
            parts.append(o.unflatten(0, (batch, -1)).flatten(1, 2))
        return split_columns(torch.cat(parts, 1)[:, place], v.shape[3])


def far_outputs(
    q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, chosen: Tensor | None, options: dict[str, Any]
) -> Tensor:
    """Call `mhla`, with a mixing per head and row of the batch if each has chosen other blocks, whose weights become 0."""
    if chosen is None:
        o: Any = mhla(q, k, v, mixing, **options)
        return o
    is_chosen = F.one_hot(chosen + 1, mixing.shape[-1] + 1)[..., 1:].amax(-2)  # [B, H, M, M]
    folded = [x.transpose(0, 1).flatten(1, 2)[None] for x in (q, k, v)]  # [1, T, B * H, K]
    o = mhla(folded[0], folded[1], folded[2], (mixing * (1 - is_chosen)).flatten(0, 1), **options)
    return o[0].unflatten(1, (len(q), -1)).transpose(0, 1)


def join_masks(text_mask: Tensor | None, num_text: int, seen: Tensor) -> Tensor:
    """Join the mask [B, 1, 1, S] of the text with `seen` [B, m, H, N], bool for other keys: [B * m, H, 1, S + N]."""
    if text_mask is None:
        return F.pad(seen, (num_text, 0), value=True).flatten(0, 1)[:, :, None]
    if text_mask.dtype != torch.bool:
        seen = torch.zeros_like(seen, dtype=text_mask.dtype).masked_fill(~seen, float("-inf"))
    return torch.cat([text_mask.expand(*seen.shape[:3], -1), seen], -1).flatten(0, 1)[:, :, None]
