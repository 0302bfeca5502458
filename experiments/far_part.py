"""One layer's attention with a configurable far part, for `experiments.far_forms`."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from mhla_hf.ops.decays import Decays, LocalForm
from mhla_hf.ops.inputs import WindowedInputs
from mhla_hf.ops.local import local_attention

KV_BYTES = 256  # bytes of a token's key and value in one KV head, 64 wide, in bf16


@dataclass(frozen=True)
class FarForm:
    """A variant of the far part and of its training. The defaults are the baseline.

    Attributes:
        rates: Decays lambda over 64 tokens at the start; 1.0 is fixed, the others are learned.
        weights: Weights of the decays at the start; None: 0.01 each, and the rest for the first one.
        features: "both" (softmax of W x and of -W x), "one" (softmax of W x), "elu" (elu + 1), "exp", or None for no
            far part.
        width: Number of columns of W.
        scale: Factor of W at the start.
        center: Whether a learned mean is subtracted from x.
        gates: Which features are multiplied by e^(g x / sqrt(K)) with a learned g: "k", "qk", or "".
        inputs: Whether features read q and k "unrotated" or "rotated" by RoPE.
        block_size: Tokens per block.
        lag: How many blocks, the current one included, the window covers.
        sinks: Number of first tokens that softmax always attends to.
        balance: Log factor of far weights at the start; None: the far part gets the mass it has under softmax.
        power: Start of the learned a in (far tokens / 512)^-a, a factor of far weights; None: no such factor.
        loss: "relative", "per head", or "cosine".
        lr: Learning rate of W.
        lr_factor: Learning rate of all other parameters over that of W.
        betas: Betas of Adam.
        rows: Training rows: "short" (1,024 tokens), "long" (4,096), or "mixed".
        steps: Number of training rows.
        updates: Updates per row.
    """

    rates: tuple[float, ...] = (1.0, 0.9)
    weights: tuple[float, ...] | None = None
    features: str | None = "both"
    width: int = 64
    scale: float = 1.0
    center: bool = False
    gates: str = ""
    inputs: str = "unrotated"
    block_size: int = 64
    lag: int = 2
    sinks: int = 4
    balance: float | None = None
    power: float | None = 0.5
    loss: str = "relative"
    lr: float = 3e-2
    lr_factor: float = 1.0
    betas: tuple[float, float] = (0.9, 0.999)
    rows: str = "short"
    steps: int = 60
    updates: int = 1

    @property
    def num_bytes(self) -> int:
        """Bytes of the state per KV head of width 64.

        The state has a running sum per decay and that of the current block in fp32, and the keys and values of window
        and sinks in bf16.
        """
        num_features = {"both": 2, None: 0}.get(self.features, 1) * self.width
        kept_tokens = (self.lag + 1) * self.block_size + (self.sinks if self.features else 0)
        return (len(self.rates) + 1) * num_features * 65 * 4 + kept_tokens * KV_BYTES


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """Apply RoPE, or undo it.

    Args:
        x: [B, T, H, K]
        cos, sin: Tables, [T, K] or longer.
        inverse: Whether to undo RoPE.
    """
    half = x.shape[-1] // 2
    swapped = torch.cat([-x[..., half:], x[..., :half]], -1)
    cos, sin = cos[: x.shape[1], None], sin[: x.shape[1], None]  # [T, 1, K]
    return x * cos - swapped * sin if inverse else x * cos + swapped * sin


class FarPart(nn.Module):
    """The attention of one layer: softmax over a window and the sinks, and a far part.

    Args:
        form: Variant of the far part.
        num_heads: Number of query heads H.
        num_kv_heads: Number of KV heads G.
        width: Width K of q, k, and v.
    """

    q_mean: nn.Parameter
    k_mean: nn.Parameter

    def __init__(self, form: FarForm, num_heads: int, num_kv_heads: int, width: int = 64) -> None:
        super().__init__()
        self.form, self.group_size = form, num_heads // num_kv_heads
        self.local = LocalForm(form.block_size, lag=form.lag, sinks=form.sinks, scale=width**-0.5)
        torch.manual_seed(0)
        eye, rotation = torch.eye(width), torch.linalg.qr(torch.randn(width, width)).Q
        if form.width < width:
            projection = rotation[:, : form.width]
        else:
            projection = torch.cat([eye, rotation], 1)[:, : form.width]
        for name, count in (("q", num_heads), ("k", num_kv_heads)):
            setattr(self, f"{name}_weight", nn.Parameter((projection * form.scale).repeat(count, 1, 1)))
            if form.center:
                setattr(self, f"{name}_mean", nn.Parameter(torch.zeros(count, width)))
            if name in form.gates:
                setattr(self, f"{name}_gate", nn.Parameter(torch.zeros(count, width)))
        rates = torch.tensor(form.rates) ** (form.block_size / 64)
        num_rates = len(rates)
        weights = torch.tensor(form.weights or [1 - 0.01 * (num_rates - 1), *[0.01] * (num_rates - 1)])
        self.weight = nn.Parameter(weights.log().repeat(num_heads, 1))
        self.rate = nn.Parameter(torch.logit(rates[rates < 1]).repeat(num_kv_heads, 1))
        self.balance = nn.Parameter(torch.full((num_heads,), -2.0 if form.balance is None else form.balance))
        if form.power is not None:
            self.power = nn.Parameter(torch.full((num_heads,), form.power))

    def features(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Compute the features of q or k.

        Args:
            x: [B, T, H, K] or [B, T, G, K]
            name: "q" or "k".
        """
        if self.form.center:
            x = x - getattr(self, f"{name}_mean")
        y = torch.einsum("bthk,hkf->bthf", x, getattr(self, f"{name}_weight"))
        kind = self.form.features
        if kind == "both":
            y = torch.cat([y.softmax(-1), (-y).softmax(-1)], -1)
        elif kind == "one":
            y = y.softmax(-1)
        else:
            scale = y.shape[-1] ** -0.5
            y = F.elu(y) + 1 if kind == "elu" else y.clamp(max=6).exp()
            y = y * scale
        if name in self.form.gates:
            gate = (x * getattr(self, f"{name}_gate")).sum(-1, keepdim=True) * x.shape[-1] ** -0.5
            y = y * gate.clamp(-8, 8).exp()
        return y

    def decays(self) -> Decays:
        """Return the decays, the fixed lambda = 1 before the learned ones."""
        num_fixed = len(self.form.rates) - self.rate.shape[1]
        return Decays(self.weight.softmax(-1), F.pad(F.logsigmoid(self.rate), (num_fixed, 0)))

    def num_far_tokens(self, length: int) -> torch.Tensor:
        """Return the number of far keys of each token, at least 1: [T]."""
        block = torch.arange(length) // self.form.block_size
        return ((block - self.form.lag + 1) * self.form.block_size - self.form.sinks).clamp(min=1)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        unrotated_q: torch.Tensor,
        unrotated_k: torch.Tensor,
    ) -> torch.Tensor:
        """Compute attention.

        Args:
            q: Queries after RoPE, [B, T, H, K].
            k, v: Keys after RoPE and values, [B, T, G, K].
            unrotated_q, unrotated_k: What the features are computed of, shaped as `q` and `k`.

        Returns:
            [B, T, H, K]
        """
        if self.form.features is None:
            q_features, k_features = (x.new_zeros(*x.shape[:3], 1) for x in (q, k))
            decays = Decays(self.weight[:, :1], self.weight[:: self.group_size, :1] * 0)
            return local_attention(WindowedInputs(q, k, v, q_features, decays, self.balance, self.local), k_features)
        q_features, k_features = self.features(unrotated_q, "q"), self.features(unrotated_k, "k")
        if self.form.power is not None:
            log_count = (self.num_far_tokens(q.shape[1])[:, None] / 512).log()
            q_features = q_features * torch.exp(-self.power * log_count)[..., None]
        return local_attention(WindowedInputs(q, k, v, q_features, self.decays(), self.balance, self.local), k_features)

    @torch.no_grad()
    def balance_masses(
        self, q: torch.Tensor, k: torch.Tensor, unrotated_q: torch.Tensor, unrotated_k: torch.Tensor
    ) -> None:
        """Set each head's balance so that the far part of one row has the mass that softmax gives to far keys.

        Args:
            q, k, unrotated_q, unrotated_k: As for `forward`, with B = 1.
        """
        token = torch.arange(q.shape[1])
        distance = token[:, None] // self.form.block_size - token // self.form.block_size
        is_far = (distance >= self.form.lag) & (token >= self.form.sinks)  # [T, S]
        q_features, k_features = self.features(unrotated_q, "q"), self.features(unrotated_k, "k")
        q, q_features = (x[0].transpose(0, 1) for x in (q, q_features))  # [H, T, ..]
        k, k_features = (x[0].transpose(0, 1).repeat_interleave(self.group_size, 0) for x in (k, k_features))
        score = (q @ k.mT * self.local.scale).masked_fill(token[:, None] < token, float("-inf"))
        total = score.logsumexp(-1, keepdim=True)
        softmax_mass = ((score - total).exp() * is_far).sum((1, 2))
        feature_mass = (q_features @ k_features.mT / total.exp() * is_far).sum((1, 2))
        self.balance.copy_((softmax_mass / feature_mass).log())
