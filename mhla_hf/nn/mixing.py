"""The mixing matrix: the weights with which every query block reads the summary of every key block (paper section 4.2).

A row beyond the learned ones has, at each distance, the weight of the last learned row; farther back, a geometric tail
fitted to that row's older half. So early outputs do not depend on the prompt's length, and uniform mixing stays uniform.
"""

import torch
from torch import Tensor, nn

MIN_INITIAL_WEIGHT = 1e-3


def locality_weights(distances: Tensor, max_distance: Tensor | float) -> Tensor:
    """Return initial weights [M, M] that fall linearly with distance (section 4.2), but stay above 0, so that all learn."""
    return (1.0 - distances / max_distance).clamp_min(MIN_INITIAL_WEIGHT)


def extend_causal(core: Tensor, num_blocks: int) -> Tensor:
    """Extend or cut a lower-triangular matrix [..., M, M] to `num_blocks` rows and columns."""
    size = core.shape[-1]
    if num_blocks <= size:
        return core[..., :num_blocks, :num_blocks]
    by_distance = core[..., -1, :].flip(-1)  # [..., M], the last row by distance
    tiny = torch.finfo(core.dtype).tiny
    oldest, middle = by_distance[..., -1], by_distance[..., size // 2]
    steps = max(size - 1 - size // 2, 1)
    decay = (oldest.clamp_min(tiny) / middle.clamp_min(tiny)).clamp(max=1.0) ** (1.0 / steps)
    exponents = torch.arange(1, num_blocks - size + 1, device=core.device, dtype=core.dtype)
    tail = oldest[..., None] * decay[..., None] ** exponents
    by_distance = torch.cat([by_distance, tail], dim=-1)
    rows = torch.arange(size, num_blocks, device=core.device)[:, None]
    columns = torch.arange(num_blocks, device=core.device)
    bottom = by_distance[..., (rows - columns).clamp_min(0)].masked_fill(columns > rows, 0.0)
    top = torch.cat([core, core.new_zeros(*core.shape[:-1], num_blocks - size)], dim=-1)
    return torch.cat([top, bottom], dim=-2)


class Mixing(nn.Module):
    """A learned causal mixing matrix, computed in fp32 whatever the dtype of the model.

    `weight` is [M, M] or, with `num_heads`, [H, M, M]. Its form is logits of a softmax over the blocks that a query block
    sees ("softmax"), nonnegative weights ("direct"), or weights of any sign ("free").
    """

    def __init__(
        self, num_blocks: int, num_heads: int | None = None, *, start: str = "locality", form: str = "softmax",
        learn: bool = True,
    ):  # fmt: skip
        super().__init__()
        self.num_blocks, self.start, self.form, self.learn = num_blocks, start, form, learn
        self.by_head = num_heads is not None  # see `FeatureMap.by_head`
        shape = (num_blocks, num_blocks) if num_heads is None else (num_heads, num_blocks, num_blocks)
        self.weight = nn.Parameter(torch.empty(shape, dtype=torch.float32), requires_grad=learn)
        self.weight.data.copy_(self.initial_values()["weight"])

    def initial_values(self) -> dict[str, Tensor]:
        if self.start == "uniform":
            start = torch.ones(self.num_blocks, self.num_blocks, dtype=torch.float32)
        else:
            position = torch.arange(self.num_blocks, dtype=torch.float32)
            start = locality_weights((position[:, None] - position[None, :]).abs(), float(self.num_blocks))
        if self.form == "softmax":
            return {"weight": start.log().tril().expand(self.weight.shape)}
        start = start.tril()
        return {"weight": (start / start.sum(-1, keepdim=True)).expand(self.weight.shape)}

    def check_values(self, name: str) -> None:
        """Raise ValueError if a weight of the "direct" form is negative; called when weights are loaded."""
        if self.form == "direct" and not self.weight.is_meta and (self.weight < 0).any():
            raise ValueError(f"{name}.weight: got negative mixing weights, expected all >= 0, or mixing_form='free'.")

    def core(self) -> Tensor:
        """Compute the weights for M blocks: fp32 [M, M] or [H, M, M], lower triangular."""
        weight = self.weight.float()
        if self.form != "softmax":
            return (weight.clamp_min(0.0) if self.form == "direct" else weight).tril()
        future = torch.ones(self.num_blocks, self.num_blocks, dtype=torch.bool, device=weight.device).triu(1)
        return weight.masked_fill(future, float("-inf")).softmax(-1)

    def forward(self, num_blocks: int) -> Tensor:
        """Compute the weights for n = `num_blocks` blocks: fp32 [n, n] or [H, n, n], lower triangular."""
        return extend_causal(self.core(), num_blocks)
