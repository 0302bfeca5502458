"""Learned mixing by decays, in place of a mixing matrix: the decoder state then has a constant size."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.windowed.decays import Decays
from .heads import HeadSplit
from .settings import MHLASettings

INITIAL_DECAY_WEIGHT = 0.01  # of each decay but the first, which gets the rest
INITIAL_RATES = (0.9, 0.7, 0.4)  # lambda of the decays after the first; further ones halve the last
INITIAL_FREE_RATE = 0.98  # lambda of the first decay, if it is learned
INITIAL_POWER = 0.5
FROZEN_DECAY_WEIGHT = 1e-30  # practically zero, but with a finite logarithm


class DecayMixing(nn.Module):
    """Learns the weights and rates of `Decays`, and the balance of the far part beside a softmax.

    Attributes:
        weight: [H, R], logits; their softmax over R gives the weights of the decays.
        rate: [G, R - 1], logits of the lambdas of all decays but the first, which is fixed at 1; [G, R] with `free_decay`.
        balance: [H], see `WindowedInputs`; trained even without `learn_mixing`. Absent without an initial balance.
        power: [H], see `Decays`; only with `length_power`.
    """

    by_head = True  # see `FeatureMap.by_head`

    def __init__(self, settings: MHLASettings, num_heads: int, num_kv_heads: int, balance: float | None):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.num_decays = num_heads, num_kv_heads, settings.num_decays
        self.initial_balance, self.learn = balance, settings.learn_mixing
        self.num_fixed = 0 if settings.free_decay else 1

        def parameter(*shape: int, learn: bool = self.learn) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=torch.float32), requires_grad=learn)

        self.weight = parameter(num_heads, self.num_decays)
        if self.num_decays > self.num_fixed:
            self.rate = parameter(num_kv_heads, self.num_decays - self.num_fixed)
        if settings.length_power:
            self.power = parameter(num_heads)
        if balance is not None:
            self.balance = parameter(num_heads, learn=True)
        for name, value in self.initial_values().items():
            self.get_parameter(name).data.copy_(value)

    def initial_values(self) -> dict[str, Tensor]:
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

    def forward(self, heads: HeadSplit | None = None) -> tuple[Decays, Tensor | None]:
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
            weight, log_rate = heads.part(weight, False, 0), heads.part(log_rate, False, 0)
            power, balance = (None if x is None else heads.part(x, False, 0) for x in (power, balance))
        return Decays(weight, log_rate, power), balance

    @torch.inference_mode(False)
    def pack(self, decays: Decays, balance: Tensor | None) -> Tensor:
        """Pack the result of `forward` into one tensor without gradient, fp32 [H, columns], for a cache.

        Columns are R weights, R log rates, repeated for query heads, and, if they exist, power and balance.
        """
        log_rate = decays.log_rate.repeat_interleave(self.num_heads // self.num_kv_heads, 0)
        columns = [x[:, None] for x in (decays.power, balance) if x is not None]
        return torch.cat([decays.weight, log_rate, *columns], 1).detach()

    def unpack(self, packed: Tensor) -> tuple[Decays, Tensor | None]:
        count = self.num_decays
        log_rate = packed[:: self.num_heads // self.num_kv_heads, count : 2 * count]
        power = packed[:, 2 * count] if hasattr(self, "power") else None
        return Decays(packed[:, :count], log_rate, power), None if self.initial_balance is None else packed[:, -1]
