"""Learned mixing by decays (`ops/decays.py`): what takes the place of a mixing matrix where the state has to stay small."""

import torch
import torch.nn.functional as F
from torch import nn

from ..ops.decays import Decays
from .heads import HeadSplit

START_WEIGHT = 0.01  # of each decay at the start, beside the one without decay
START_RATES = (0.9, 0.7, 0.4)  # lambda of the decays at the start, then halved again and again
START_FREE = 0.98  # of the first decay, if it is free
START_POWER = 0.5


class DecayMixing(nn.Module):
    """Mixing by `Decays`, and the balance of the far part against a local softmax; used in fp32 whatever the model's dtype.

    `weight` `[H, R]`: logits of w, which sum to one. `rate` `[G, R - 1]`, or `[G, R]` if all are free: lambda is
    sigmoid(rate), and 1 for the first that is not free. `balance` `[H]`: see `ops/local.py`; only with a local softmax.
    `power` `[H]`: that of `Decays`, if it is learned.

    Args:
        num_heads: query heads H.
        num_kv_heads: key/value heads G.
        num_decays: R.
        balance: its start, or None without a local softmax.
        learn: False freezes w and lambda, not the balance, at their start, plain linear attention.
        free: the first decay's lambda is learned, too.
        by_length: there is a power.
    """

    by_head = True

    def __init__(
        self, num_heads: int, num_kv_heads: int, num_decays: int, *, balance: float | None = None, learn: bool = True,
        free: bool = False, by_length: bool = False,
    ):  # fmt: skip
        super().__init__()
        self.num_heads, self.num_kv_heads, self.num_decays = num_heads, num_kv_heads, num_decays
        self.start, self.learn, self.num_fixed = balance, learn, 0 if free else 1
        self.weight = nn.Parameter(torch.empty(num_heads, num_decays), requires_grad=learn)
        if num_decays > self.num_fixed:
            self.rate = nn.Parameter(torch.empty(num_kv_heads, num_decays - self.num_fixed), requires_grad=learn)
        if by_length:
            self.power = nn.Parameter(torch.empty(num_heads), requires_grad=learn)
        if balance is not None:
            self.balance = nn.Parameter(torch.empty(num_heads))
        for name, value in self.initial_values().items():
            self.get_parameter(name).data.copy_(value)

    def initial_values(self) -> dict[str, torch.Tensor]:
        """The start of each own parameter, for models that are built empty and filled later."""
        others = self.num_decays - 1
        share = START_WEIGHT if self.learn else 1e-30
        weight = torch.tensor([1.0 - share * others, *[share] * others])
        values = {"weight": weight.log().expand(self.weight.shape)}
        if self.num_decays > self.num_fixed:
            rates = [*START_RATES, *(0.4 / 2**n for n in range(1, others))][:others]
            rates = torch.tensor(rates if self.num_fixed else [START_FREE, *rates])
            values["rate"] = torch.logit(rates).expand(self.rate.shape)
        if hasattr(self, "power"):
            values["power"] = torch.full(self.power.shape, START_POWER)
        if self.start is not None:
            values["balance"] = torch.full(self.balance.shape, self.start)
        return values

    def forward(self, heads: HeadSplit | None = None) -> tuple[Decays, torch.Tensor | None]:
        """The decays and the balance (None without a local softmax), fp32; of the MHLA heads of `heads`, or of all."""
        if self.num_decays > self.num_fixed:
            log_rate = F.pad(F.logsigmoid(self.rate.float()), (self.num_fixed, 0))
        else:  # fewer groups where heads are split over processes
            log_rate = self.weight.new_zeros(self.num_kv_heads * len(self.weight) // self.num_heads, 1).float()
        balance = None if self.start is None else self.balance.float()
        power = self.power.float() if hasattr(self, "power") else None
        values = self.weight.float().softmax(-1), log_rate, power, balance
        if heads is not None:
            values = (x if x is None else heads.part(x, False, 0) for x in values)
        *values, balance = values
        return Decays(*values), balance

    @torch.inference_mode(False)
    def pack(self, decays: Decays, balance: torch.Tensor | None) -> torch.Tensor:
        """What `forward` returned, as one fp32 tensor without gradient: `[H, 2R]` and columns for power and balance."""
        log_rate = decays.log_rate.repeat_interleave(self.num_heads // self.num_kv_heads, 0)
        parts = [decays.weight, log_rate, *(x[:, None] for x in (decays.power, balance) if x is not None)]
        return torch.cat(parts, 1).detach()

    def unpack(self, packed: torch.Tensor) -> tuple[Decays, torch.Tensor | None]:
        """What `pack` was given."""
        count, share = self.num_decays, self.num_heads // self.num_kv_heads
        power = packed[:, 2 * count] if hasattr(self, "power") else None
        decays = Decays(packed[:, :count], packed[::share, count : 2 * count], power)
        return decays, None if self.start is None else packed[:, -1]
