"""One layer's attention with a far part of many possible forms, for `experiments.far_forms`."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from mhla_hf.ops.decays import Decays, LocalForm
from mhla_hf.ops.local import local_attention

KV_BYTES = 256  # of a token's key and value in one KV head, bf16


@dataclass(frozen=True)
class FarForm:
    """A form of the far part and how it is learned; the defaults are what all others are compared with.

    rates: lambda over 64 tokens at the start, 1.0 stays 1; shares: their weights, None: .01 but for the first. features:
    "both" (softmax of W x and of -W x), "one" (without the second), "elu" (+ 1), "exp", or None: no far part. width:
    columns of W. start: its factor. center: x less its mean, which is learned, too. gates: "k", "q": their features times
    e^(g x / sqrt(K)), g learned. read: q and k "unrotated" or "rotated". balance: at the start, None: by mass. power: far
    weights times (n far tokens / 512)^-a, the start of a. rows: "short" (of 1,024), "long" (of 4,096), "mixed"; steps:
    rows read; repeats: updates on each. faster: times lr for all that is not W.
    """

    rates: tuple = (1.0, 0.9)
    shares: tuple | None = None
    features: str | None = "both"
    width: int = 64
    start: float = 1.0
    center: bool = False
    gates: str = ""
    read: str = "unrotated"
    block: int = 64
    lag: int = 2
    sinks: int = 4
    balance: float | None = None
    power: float | None = 0.5
    loss: str = "relative"
    lr: float = 3e-2
    faster: float = 1.0
    betas: tuple = (0.9, 0.999)
    rows: str = "short"
    steps: int = 60
    repeats: int = 1

    @property
    def size(self):
        """Bytes per KV head: running sums and that of the open block in fp32, the ring of the window, the sinks."""
        count = {"both": 2, None: 0}.get(self.features, 1) * self.width
        window = (self.lag + 1) * self.block + (self.sinks if self.features else 0)
        return (len(self.rates) + 1) * count * 65 * 4 + window * KV_BYTES


def rotate(x, cos, sin, back=False):
    """RoPE of x [B, T, H, K] by tables [T, K], or the inverse."""
    turned = torch.cat([-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]], -1)
    cos, sin = cos[: x.shape[1], None], sin[: x.shape[1], None]
    return x * cos - turned * sin if back else x * cos + turned * sin


class FarPart(nn.Module):
    """One layer by a form: `forward` gives its outputs, of rotated q, k and un-rotated ones."""

    def __init__(self, form, heads, groups, width=64):
        super().__init__()
        self.form, self.share = form, heads // groups
        self.local = LocalForm(form.block, lag=form.lag, sinks=form.sinks, scale=width**-0.5)
        torch.manual_seed(0)
        eye, other = torch.eye(width), torch.linalg.qr(torch.randn(width, width)).Q
        start = other[:, : form.width] if form.width < width else torch.cat([eye, other], 1)[:, : form.width]
        for name, count in (("q", heads), ("k", groups)):
            setattr(self, f"{name}_weight", nn.Parameter((start * form.start).repeat(count, 1, 1)))
            if form.center:
                setattr(self, f"{name}_mean", nn.Parameter(torch.zeros(count, width)))
            if name in form.gates:
                setattr(self, f"{name}_gate", nn.Parameter(torch.zeros(count, width)))
        rates = torch.tensor(form.rates) ** (form.block / 64)
        count = len(rates)
        shares = torch.tensor(form.shares or [1 - 0.01 * (count - 1), *[0.01] * (count - 1)])
        self.weight = nn.Parameter(shares.log().repeat(heads, 1))
        self.rate = nn.Parameter(torch.logit(rates[rates < 1]).repeat(groups, 1))
        self.balance = nn.Parameter(torch.full((heads,), -2.0 if form.balance is None else form.balance))
        if form.power is not None:
            self.power = nn.Parameter(torch.full((heads,), form.power))

    def features(self, x, name):
        """Of `[B, T, H, K]`."""
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
            y = {"elu": lambda z: F.elu(z) + 1, "exp": lambda z: z.clamp(max=6).exp()}[kind](y) * scale
        if name in self.form.gates:
            gate = (x * getattr(self, f"{name}_gate")).sum(-1, keepdim=True) * x.shape[-1] ** -0.5
            y = y * gate.clamp(-8, 8).exp()
        return y

    def decays(self):
        """The decays, lambda 1 before the others where the form has it."""
        fixed = len(self.form.rates) - self.rate.shape[1]
        return Decays(self.weight.softmax(-1), F.pad(F.logsigmoid(self.rate), (fixed, 0)))

    def far_count(self, tokens):
        """How many far keys each token has, at least 1."""
        block = torch.arange(tokens) // self.form.block
        return ((block - self.form.lag + 1) * self.form.block - self.form.sinks).clamp(min=1)

    def forward(self, q, k, v, uq, uk):
        if self.form.features is None:
            fq, fk = (x.new_zeros(*x.shape[:3], 1) for x in (q, k))
            decays = Decays(self.weight[:, :1], self.weight[:: self.share, :1] * 0)
            return local_attention(q, k, v, fq, fk, decays, self.balance, self.local)
        fq, fk = self.features(uq, "q"), self.features(uk, "k")
        if self.form.power is not None:
            fq = fq * torch.exp(-self.power * (self.far_count(q.shape[1])[:, None] / 512).log())[..., None]
        return local_attention(q, k, v, fq, fk, self.decays(), self.balance, self.local)

    @torch.no_grad()
    def balance_masses(self, q, k, uq, uk):
        """The balance of each head at which far features weigh what the softmax's far keys do, on one row."""
        token = torch.arange(q.shape[1])
        distance = token[:, None] // self.form.block - token // self.form.block
        far = (distance >= self.form.lag) & (token >= self.form.sinks)
        fq, fk = self.features(uq, "q"), self.features(uk, "k")
        q, fq = (x[0].transpose(0, 1) for x in (q, fq))
        k, fk = (x[0].transpose(0, 1).repeat_interleave(self.share, 0) for x in (k, fk))
        score = (q @ k.mT * self.local.scale).masked_fill(token[:, None] < token, float("-inf"))
        total = score.logsumexp(-1, keepdim=True)
        mass, own = ((x * far).sum((1, 2)) for x in ((score - total).exp(), fq @ fk.mT / total.exp()))
        self.balance.copy_((mass / own).log())
