"""Feature maps: what is done to q and k before the products that replace softmax(q k^T).

The learned one follows Hedgehog (arXiv 2402.04347): two softmaxes over the width, of x W and of -x W, with W the identity
at the start, so that a converted model begins close to attention that peaks where softmax attention does.
"""

import torch
import torch.nn.functional as F
from torch import nn

from .heads import HeadSplit

RELU_EPS = {"relu": 1e-6, "plain_relu": 0.0}  # above relu(x), what keeps every denominator alive


LEARNED_STARTS = {"hedgehog": 1.0, "softmax": 1.0, "exp": 0.35}  # W begins as so many times the identity
LARGEST_EXPONENT = 6.0


class FeatureMap(nn.Module):
    """Maps `[B, T, H, K]` to `[B, T, H, features]`, the same for q and for k.

    Args:
        kind: "relu", "plain_relu", "elu", "identity", "hedgehog", "softmax" or "exp" (see `MHLASettings`).
        num_heads: heads of its input (the learned map has its own W per head).
        head_dim: width K.
    """

    by_head = True

    def __init__(self, kind: str, num_heads: int, head_dim: int):
        super().__init__()
        self.kind = kind
        self.head_dim = head_dim
        if kind in LEARNED_STARTS:
            self.weight = nn.Parameter(torch.empty(num_heads, head_dim, head_dim))
        if kind == "exp":
            self.bias = nn.Parameter(torch.empty(num_heads, head_dim))
        for name, value in self.initial_values().items():
            self.get_parameter(name).data.copy_(value)

    @property
    def num_features(self) -> int:
        """Width of the result."""
        return 2 * self.head_dim if self.kind == "hedgehog" else self.head_dim

    def initial_values(self) -> dict[str, torch.Tensor]:
        """The start of each own parameter, for models that are built empty and filled later."""
        if self.kind not in LEARNED_STARTS:
            return {}
        weight = LEARNED_STARTS[self.kind] * torch.eye(self.head_dim).expand(self.weight.shape)
        return {"weight": weight} | ({"bias": torch.zeros(self.bias.shape)} if self.kind == "exp" else {})

    def forward(self, x: torch.Tensor, heads: HeadSplit | None = None) -> torch.Tensor:
        """Map x `[B, T, H, K]`, or of some of the H heads: the MHLA heads of `heads`."""
        if self.kind in RELU_EPS:
            return torch.relu(x) + RELU_EPS[self.kind] if RELU_EPS[self.kind] else torch.relu(x)
        if self.kind == "elu":
            return F.elu(x) + 1.0
        if self.kind == "identity":
            return x
        weight = self.weight if heads is None else heads.part(self.weight, False, 0)
        y = torch.einsum("bthk,hkf->bthf", x, weight.to(x.dtype)).float()
        if self.kind == "softmax":
            return y.softmax(-1).to(x.dtype)
        if self.kind == "exp":
            bias = self.bias if heads is None else heads.part(self.bias, False, 0)
            return (torch.exp((y + bias).clamp(max=LARGEST_EXPONENT)) * self.head_dim**-0.5).to(x.dtype)
        if torch.compiler.is_compiling():  # a stack would not be fused
            both = torch.where(torch.arange(2, device=y.device)[:, None] == 0, y[..., None, :], -y[..., None, :])
        else:
            both = torch.stack([y, -y], -2)
        return both.softmax(-1).flatten(-2).to(x.dtype)
