"""Learned mixing by decays, in place of a mixing matrix: the decoder state then has a constant size."""

import torch
import torch.nn.functional as F
from torch import nn

from ..ops.windowed.decays import Decays
from .heads import HeadSplit

INITIAL_DECAY_WEIGHT = 0.01  # of every decay but the first, which gets the rest
INITIAL_RATES = (0.9, 0.7, 0.4)  # lambda of every decay but the first; further ones halve the last
INITIAL_FREE_RATE = 0.98  # lambda of the first decay, if it is learned
INITIAL_POWER = 0.5
FROZEN_DECAY_WEIGHT = 1e-30  # practically zero, but with a finite logarithm


class DecayMixing(nn.Module):
    """Learns the weights and rates of `Decays`, and the balance of the far part relative to a softmax.

    Attributes:
        weight: [H, R], logits; their softmax over R gives the weights of the decays.
        rate: [G, R - 1], logits of the factors of all decays but the first, which is fixed at 1; or [G, R] with
            `free_decay`.
        balance: [H], see `WindowedInputs`; trained even without `learn`. Absent without an initial balance.
        power: [H], see `Decays`; only with `length_power`.
    """

    by_head = True  # see `FeatureMap.by_head`

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        num_decays: int,
        *,
        balance: float | None = None,
        learn: bool = True,
        free_decay: bool = False,
        length_power: bool = False,
    ):
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.num_decays = num_decays
        self.initial_balance = balance
        self.learn = learn
        self.num_fixed = 0 if free_decay else 1
        self.weight = nn.Parameter(torch.empty(num_heads, num_decays, dtype=torch.float32), requires_grad=learn)
        if num_decays > self.num_fixed:
            self.rate = nn.Parameter(
                torch.empty(num_kv_heads, num_decays - self.num_fixed, dtype=torch.float32), requires_grad=learn
            )
        if length_power:
            self.power = nn.Parameter(torch.empty(num_heads, dtype=torch.float32), requires_grad=learn)
        if balance is not None:
            self.balance = nn.Parameter(torch.empty(num_heads, dtype=torch.float32))
        for name, value in self.initial_values().items():
            self.get_parameter(name).data.copy_(value)

    def initial_values(self) -> dict[str, torch.Tensor]:
        num_others = self.num_decays - 1
        other_weight = INITIAL_DECAY_WEIGHT if self.learn else FROZEN_DECAY_WEIGHT
        weight = torch.tensor([1.0 - other_weight * num_others, *[other_weight] * num_others], dtype=torch.float32)
        values = {"weight": weight.log().expand(self.weight.shape)}
        if self.num_decays > self.num_fixed:
            further = (INITIAL_RATES[-1] / 2**n for n in range(1, num_others))
            rates = [*INITIAL_RATES, *further][:num_others]
            if self.num_fixed == 0:
                rates = [INITIAL_FREE_RATE, *rates]
            values["rate"] = torch.logit(torch.tensor(rates, dtype=torch.float32)).expand(self.rate.shape)
        if hasattr(self, "power"):
            values["power"] = torch.full(self.power.shape, INITIAL_POWER, dtype=torch.float32)
        if self.initial_balance is not None:
            values["balance"] = torch.full(self.balance.shape, self.initial_balance, dtype=torch.float32)
        return values

    def forward(self, heads: HeadSplit | None = None) -> tuple[Decays, torch.Tensor | None]:
        """Return the decays and the balance [H] (None without a softmax), in fp32; with `heads`, of the MHLA heads."""
        if self.num_decays > self.num_fixed:
            log_rate = F.pad(F.logsigmoid(self.rate.float()), (self.num_fixed, 0))
        else:  # tensor parallelism may have left fewer than `num_kv_heads`
            num_kv_heads = self.num_kv_heads * len(self.weight) // self.num_heads
            log_rate = self.weight.new_zeros(num_kv_heads, 1).float()
        weight = self.weight.float().softmax(-1)
        power = self.power.float() if hasattr(self, "power") else None
        balance = None if self.initial_balance is None else self.balance.float()
        if heads is not None:
            weight = heads.part(weight, False, 0)
            log_rate = heads.part(log_rate, False, 0)
            power = None if power is None else heads.part(power, False, 0)
            balance = None if balance is None else heads.part(balance, False, 0)
        return Decays(weight, log_rate, power), balance

    @torch.inference_mode(False)
    def pack(self, decays: Decays, balance: torch.Tensor | None) -> torch.Tensor:
        """Pack the result of `forward` into one tensor without gradient, for a cache: fp32 [H, 2 * R + (0 to 2)].

        Columns are weights, log rates repeated for query heads, then power and balance if they exist.
        """
        log_rate = decays.log_rate.repeat_interleave(self.num_heads // self.num_kv_heads, 0)
        columns = [x[:, None] for x in (decays.power, balance) if x is not None]
        return torch.cat([decays.weight, log_rate, *columns], 1).detach()

    def unpack(self, packed: torch.Tensor) -> tuple[Decays, torch.Tensor | None]:
        count = self.num_decays
        queries_per_kv = self.num_heads // self.num_kv_heads
        weight = packed[:, :count]
        log_rate = packed[::queries_per_kv, count : 2 * count]
        power = packed[:, 2 * count] if hasattr(self, "power") else None
        return Decays(weight, log_rate, power), None if self.initial_balance is None else packed[:, -1]
