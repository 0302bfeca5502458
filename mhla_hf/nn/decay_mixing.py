"""Learned mixing by decays (`ops/decays.py`): what takes the place of a mixing matrix where the state has to stay small."""

import torch
import torch.nn.functional as F
from torch import nn

from ..ops.decays import Decays
from .heads import HeadSplit

START_WEIGHT = 0.01  # of each decay at the start, beside the one without decay
START_RATES = (0.9, 0.7, 0.4)  # lambda of the decays at the start, then halved again and again


class DecayMixing(nn.Module):
    """Mixing by `Decays`, and the balance of the far part against a local softmax; used in fp32 whatever the model's dtype.

    `weight` `[H, R]`: logits of w, which sum to one. `rate` `[G, R - 1]`: lambda is sigmoid(rate); it is 1 for the first.
    `balance` `[H]`: see `ops/local.py`; only with a local softmax.

    Args:
        num_heads: query heads H.
        num_kv_heads: key/value heads G.
        num_decays: R.
        balance: its start, or None without a local softmax.
        learn: False freezes w and lambda, not the balance, at their start, plain linear attention.
    """

    by_head = True

    def __init__(
        self, num_heads: int, num_kv_heads: int, num_decays: int, *, balance: float | None = None, learn: bool = True
    ):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.num_decays = num_heads, num_kv_heads, num_decays
        self.start, self.learn = balance, learn
        self.weight = nn.Parameter(torch.empty(num_heads, num_decays), requires_grad=learn)
        if num_decays > 1:
            self.rate = nn.Parameter(torch.empty(num_kv_heads, num_decays - 1), requires_grad=learn)
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
        if others:
            rates = torch.tensor([*START_RATES, *(0.4 / 2**n for n in range(1, others))][:others])
            values["rate"] = torch.logit(rates).expand(self.rate.shape)
        if self.start is not None:
            values["balance"] = torch.full(self.balance.shape, self.start)
        return values

    def forward(self, heads: HeadSplit | None = None) -> tuple[Decays, torch.Tensor | None]:
        """The decays and the balance (None without a local softmax), fp32; of the MHLA heads of `heads`, or of all."""
        if self.num_decays > 1:
            log_rate = F.pad(F.logsigmoid(self.rate.float()), (1, 0))
        else:  # fewer groups where heads are split over processes
            log_rate = self.weight.new_zeros(self.num_kv_heads * len(self.weight) // self.num_heads, 1).float()
        weight, balance = self.weight.float().softmax(-1), None if self.start is None else self.balance.float()
        if heads is not None:
            weight, log_rate = heads.part(weight, False, 0), heads.part(log_rate, False, 0)
            balance = None if balance is None else heads.part(balance, False, 0)
        return Decays(weight, log_rate), balance

    @torch.inference_mode(False)
    def pack(self, decays: Decays, balance: torch.Tensor | None) -> torch.Tensor:
        """What `forward` returned as one tensor, fp32 `[H, 2R + 1]` (`[H, 2R]` without balance), without gradient."""
        log_rate = decays.log_rate.repeat_interleave(self.num_heads // self.num_kv_heads, 0)
        parts = [decays.weight, log_rate, *([] if balance is None else [balance[:, None]])]
        return torch.cat(parts, 1).detach()

    def unpack(self, packed: torch.Tensor) -> tuple[Decays, torch.Tensor | None]:
        """What `pack` was given."""
        count, share = self.num_decays, self.num_heads // self.num_kv_heads
        decays = Decays(packed[:, :count], packed[::share, count : 2 * count])
        return decays, None if self.start is None else packed[:, -1]
