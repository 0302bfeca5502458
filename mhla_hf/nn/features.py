"""Feature maps of q and k, whose products replace softmax(q k^T).

As in Hedgehog (arXiv 2402.04347), the weights of learned maps start at a multiple of the identity, so that the attention of
a converted model peaks about where softmax does.
"""

from math import log

import torch
from torch import Tensor, nn

RELU_EPS = {"relu": 1e-6, "plain_relu": 0.0}  # added to relu(x), to keep the denominator from vanishing
INITIAL_WEIGHT_SCALE = {"hedgehog": 1.0, "softmax": 1.0, "exp": 0.35}  # learned maps start at this times the identity
MAX_EXPONENT = 6.0  # of the "exp" map


def harmless_balance(kind: str, key_dim: int) -> float:
    """Return a balance, the log of a multiplier of MHLA's weights, so low that MHLA hardly changes a softmax beside it.

    Features of real keys saturate, so MHLA does harm until it is trained. The products of features are taken to be about 1
    for maps that end in a softmax, and K for the others.
    """
    return -4.0 if kind in ("hedgehog", "softmax") else -4.0 - log(key_dim)


class FeatureMap(nn.Module):
    """Maps queries or keys [B, T, H, K] to features [B, T, H, F]; F is 2 * K for "hedgehog" and K for the other kinds.

    Learned maps ("hedgehog", "softmax", "exp") have a weight matrix for each head; see `MHLASettings.feature_map`.
    """

    by_head = True  # parameters have the heads as their first axis, along which tensor parallelism splits them

    def __init__(self, kind: str, num_heads: int, head_dim: int):
        super().__init__()
        self.kind, self.head_dim = kind, head_dim
        if kind in INITIAL_WEIGHT_SCALE:
            self.weight = nn.Parameter(torch.empty(num_heads, head_dim, head_dim))
        if kind == "exp":
            self.bias = nn.Parameter(torch.empty(num_heads, head_dim))
        for name, value in self.initial_values().items():
            self.get_parameter(name).data.copy_(value)

    def initial_values(self) -> dict[str, Tensor]:
        values = {}
        if self.kind in INITIAL_WEIGHT_SCALE:
            values["weight"] = INITIAL_WEIGHT_SCALE[self.kind] * torch.eye(self.head_dim).expand(self.weight.shape)
        if self.kind == "exp":
            values["bias"] = torch.zeros(self.bias.shape)
        return values

    def forward(self, x: Tensor) -> Tensor:
        """Compute features in x's dtype."""
        if self.kind in RELU_EPS:
            return torch.relu(x) + RELU_EPS[self.kind] if RELU_EPS[self.kind] else torch.relu(x)
        if self.kind == "elu":
            return torch.where(x > 0, x + 1.0, x.clamp(max=0).exp())  # elu(x) + 1 would round e^x to a multiple of eps
        if self.kind == "identity":
            return x
        by_head = torch.bmm(x.flatten(0, 1).transpose(0, 1), self.weight.to(x.dtype))
        y = by_head.transpose(0, 1).unflatten(0, x.shape[:2]).float()
        if self.kind == "softmax":
            return y.softmax(-1).to(x.dtype)
        if self.kind == "exp":
            return (torch.exp((y + self.bias).clamp(max=MAX_EXPONENT)) * self.head_dim**-0.5).to(x.dtype)
        if torch.compiler.is_compiling():  # the compiler would not fuse a stack
            both = torch.where(torch.arange(2, device=y.device)[:, None] == 0, y[..., None, :], -y[..., None, :])
        else:
            both = torch.stack([y, -y], -2)
        return both.softmax(-1).flatten(-2).to(x.dtype)
