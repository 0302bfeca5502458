"""The mixing matrix: the weights with which every query block reads the summary of every key block (paper section 4.2).

It extends to more blocks than it has rows: a further row reads the last learned row by distance, and continues it with a
geometric tail fitted to its oldest entries. So the outputs for the beginning of a prompt do not depend on its length, and
uniform mixing stays uniform at any length.
"""

import torch
from torch import nn

MIN_INITIAL_WEIGHT = 1e-3


def locality_weights(distances: torch.Tensor, max_distance: torch.Tensor | float) -> torch.Tensor:
    """Return initial weights [M, M] that fall linearly with distance (section 4.2); none is zero, which could not learn."""
    return (1.0 - distances / max_distance).clamp_min(MIN_INITIAL_WEIGHT)


def extend_causal(core: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Extend or cut a lower-triangular matrix [.., M, M] to `num_blocks` rows and columns."""
    size = core.shape[-1]
    if num_blocks <= size:
        return core[..., :num_blocks, :num_blocks]
    by_distance = core[..., -1, :].flip(-1)  # [..., M], the last row by distance
    tiny = torch.finfo(core.dtype).tiny
    oldest = by_distance[..., -1]
    middle = by_distance[..., size // 2]
    steps = max(size - 1 - size // 2, 1)
    decay = (oldest.clamp_min(tiny) / middle.clamp_min(tiny)).clamp(max=1.0) ** (1.0 / steps)
    exponents = torch.arange(1, num_blocks - size + 1, device=core.device, dtype=core.dtype)
    tail = oldest[..., None] * decay[..., None] ** exponents
    by_distance = torch.cat([by_distance, tail], dim=-1)
    rows = torch.arange(size, num_blocks, device=core.device)[:, None]
    columns = torch.arange(num_blocks, device=core.device)[None, :]
    bottom = by_distance[..., (rows - columns).clamp_min(0)].masked_fill(columns > rows, 0.0)
    top = torch.cat([core, core.new_zeros(*core.shape[:-1], num_blocks - size)], dim=-1)
    return torch.cat([top, bottom], dim=-2)


class Mixing(nn.Module):
    """A learned causal mixing matrix, computed in fp32 whatever the dtype of the model.

    `weight` is [M, M], or [H, M, M] with `num_heads` set. It holds logits of a softmax over the blocks that a query block
    may see ("softmax"), nonnegative weights ("direct"), or weights of any sign ("free").
    """

    def __init__(
        self,
        num_blocks: int,
        num_heads: int | None = None,
        *,
        start: str = "locality",
        form: str = "softmax",
        learn: bool = True,
    ):
        super().__init__()
        if form == "decay":
            expected = '"softmax", "direct" or "free" for a model from scratch'
            raise ValueError(f'mixing_form: got "decay", expected {expected}.')
        self.num_blocks = num_blocks
        self.start = start
        self.form = form
        self.learn = learn
        self.by_head = num_heads is not None  # see `FeatureMap.by_head`
        shape = (num_blocks, num_blocks) if num_heads is None else (num_heads, num_blocks, num_blocks)
        self.weight = nn.Parameter(torch.empty(shape, dtype=torch.float32), requires_grad=learn)
        self.weight.data.copy_(self.initial_values()["weight"])

    def initial_values(self) -> dict[str, torch.Tensor]:
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
        """Raise ValueError if a weight of the "direct" form is negative; called after weights were loaded."""
        if self.form == "direct" and not self.weight.is_meta and (self.weight < 0).any():
            raise ValueError(f"{name}.weight: got negative mixing weights, expected nonnegative ones.")

    def core(self) -> torch.Tensor:
        """Return the learned matrix as weights: [M, M] or [H, M, M], fp32, lower triangular."""
        weight = self.weight.float()
        if self.form != "softmax":
            return (weight.clamp_min(0.0) if self.form == "direct" else weight).tril()
        future = torch.ones(self.num_blocks, self.num_blocks, dtype=torch.bool, device=weight.device).triu(1)
        return weight.masked_fill(future, float("-inf")).softmax(-1)

    def forward(self, num_blocks: int) -> torch.Tensor:
        """Compute the weights for a sequence of n = `num_blocks` blocks: [n, n] or [H, n, n], fp32, lower triangular."""
        return extend_causal(self.core(), num_blocks)
