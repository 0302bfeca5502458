"""The mixing matrix: what every query block takes from the summary of every key block (section 4.2).

It answers for more blocks than it has rows. Rows up to M are the learned matrix, untouched. Row i >= M reads the
last learned row by distance, and beyond that distance continues it with a geometric tail fitted to its oldest entries:
a prompt longer than the trained one keeps the outputs of its beginning, and uniform mixing stays uniform at any length.
"""

import torch
from torch import nn

MIXING_FLOOR = 1e-3


def locality_start(distances: torch.Tensor, reach: torch.Tensor | float) -> torch.Tensor:
    """1 - distance / reach, not below `MIXING_FLOOR` (section 4.2; a weight of exactly zero could not learn).

    Args:
        distances: `[M, M]` distances between blocks.
        reach: the distance at which the weight ends: a number, or `[M, 1]` for one of its own per row.
    """
    return (1.0 - distances / reach).clamp_min(MIXING_FLOOR)


def extend_causal(core: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """The lower-triangular matrix of `num_blocks` rows that continues `core` `[..., M, M]` (see the top of this file)."""
    size = core.shape[-1]
    if num_blocks <= size:
        return core[..., :num_blocks, :num_blocks]
    by_distance = core[..., -1, :].flip(-1)
    tiny = torch.finfo(core.dtype).tiny
    oldest, middle = by_distance[..., -1], by_distance[..., size // 2]
    steps = max(size - 1 - size // 2, 1)
    decay = (oldest.clamp_min(tiny) / middle.clamp_min(tiny)).clamp(max=1.0) ** (1.0 / steps)
    exponents = torch.arange(1, num_blocks - size + 1, device=core.device, dtype=core.dtype)
    tail = oldest[..., None] * decay[..., None] ** exponents
    by_distance = torch.cat([by_distance, tail], dim=-1)
    rows = torch.arange(size, num_blocks, device=core.device)[:, None]
    columns = torch.arange(num_blocks, device=core.device)[None, :]
    below = by_distance[..., (rows - columns).clamp_min(0)].masked_fill(columns > rows, 0.0)
    top = torch.cat([core, core.new_zeros(*core.shape[:-1], num_blocks - size)], dim=-1)
    return torch.cat([top, below], dim=-2)


class Mixing(nn.Module):
    """A learned causal mixing matrix, used in fp32 whatever the model's dtype.

    `weight` is `[M, M]`, or `[H, M, M]` with one matrix per query head: logits of a softmax over the blocks a query block
    may see ("softmax"), the nonnegative weights themselves ("direct"), or weights of any sign ("free").

    Args:
        num_blocks: M.
        num_heads: None for one matrix shared by all heads (the paper's), else H.
        start: "locality" (1 - distance / M) or "uniform"; rows sum to one.
        form: "softmax", "direct" or "free".
        learn: False freezes the matrix.
    """

    def __init__(self, num_blocks: int, num_heads=None, *, start="locality", form="softmax", learn: bool = True):
        super().__init__()
        if form == "decay":
            what = '"softmax", "direct" or "free" for a model from scratch'
            raise ValueError(f'mixing_form: got "decay", expected {what}.')
        self.num_blocks, self.start, self.form, self.learn = num_blocks, start, form, learn
        self.by_head = num_heads is not None
        shape = (num_blocks, num_blocks) if num_heads is None else (num_heads, num_blocks, num_blocks)
        self.weight = nn.Parameter(torch.empty(shape, dtype=torch.float32), requires_grad=learn)
        self.weight.data.copy_(self.initial_values()["weight"])

    def initial_values(self) -> dict[str, torch.Tensor]:
        """The start of `weight`, for models that are built empty and filled later."""
        if self.start == "uniform":
            start = torch.ones(self.num_blocks, self.num_blocks)
        else:
            position = torch.arange(self.num_blocks, dtype=torch.float32)
            start = locality_start((position[:, None] - position[None, :]).abs(), float(self.num_blocks))
        if self.form == "softmax":
            return {"weight": start.log().tril().expand(self.weight.shape)}
        start = start.tril()
        return {"weight": (start / start.sum(-1, keepdim=True)).expand(self.weight.shape)}

    def check_values(self, name: str) -> None:
        """One sentence if the loaded weights, all finite, cannot be a mixing matrix; `name` is the module's."""
        if self.form == "direct" and not self.weight.is_meta and (self.weight < 0).any():
            raise ValueError(f"{name}.weight: got negative mixing weights, expected nonnegative ones.")

    def core(self) -> torch.Tensor:
        """The learned matrix as weights: `[M, M]` or `[H, M, M]`, fp32, lower triangular."""
        weight = self.weight.float()
        if self.form != "softmax":
            return (weight.clamp_min(0.0) if self.form == "direct" else weight).tril()
        future = torch.ones(self.num_blocks, self.num_blocks, dtype=torch.bool, device=weight.device).triu(1)
        return weight.masked_fill(future, float("-inf")).softmax(-1)

    def forward(self, num_blocks: int) -> torch.Tensor:
        """The weights for a sequence of `num_blocks` blocks: `[n, n]` or `[H, n, n]`, fp32, lower triangular."""
        return extend_causal(self.core(), num_blocks)
