"""The core of converted encoders: softmax over a window, MHLA over all other tokens (`ops/windowed/two_way.py`)."""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.windowed.options import WindowedOptions
from ..ops.windowed.two_way import FarPart, two_way_attention
from .core import MHLACore, without_padding
from .features import harmless_balance
from .settings import MHLASettings, check_settings

INITIAL_DECAY = 0.98


class DistanceMixing(nn.Module):
    """Learns the weights of tokens outside the window: a decay per block of distance, and a balance beside the softmax.

    Attributes:
        rate: [G], logits of the decays.
        balance: [H], the log of the multiplier of far weights; trained even without `learn_mixing`.
    """

    by_head = True  # see `FeatureMap.by_head`

    def __init__(self, num_heads: int, num_kv_heads: int, balance: float, learn: bool):
        super().__init__()
        self.initial_balance, self.learn = balance, learn
        self.rate = nn.Parameter(torch.empty(num_kv_heads, dtype=torch.float32), requires_grad=learn)
        self.balance = nn.Parameter(torch.empty(num_heads, dtype=torch.float32))
        for name, value in self.initial_values().items():
            self.get_parameter(name).data.copy_(value)

    def initial_values(self) -> dict[str, Tensor]:
        rate = torch.logit(torch.tensor(INITIAL_DECAY, dtype=torch.float32))
        balance = torch.tensor(self.initial_balance, dtype=torch.float32)
        return {"rate": rate.expand(self.rate.shape), "balance": balance.expand(self.balance.shape)}

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return the logs of the decays [G], and the balance [H], in fp32."""
        return F.logsigmoid(self.rate.float()), self.balance.float()


class TwoWayMHLA(MHLACore):
    """Bidirectional MHLA with a softmax window, for encoders: every token attends to all real tokens of its row.

    The window has `window - 1` blocks on either side of a token's own. Blocks are counted from a row's first real token.
    """

    mixing: DistanceMixing

    def __init__(self, settings: MHLASettings, *, num_heads: int, num_kv_heads: int, key_dim: int, **widths: Any):
        check_settings(settings, "an encoder", both_ways=True)
        balance = harmless_balance(settings.feature_map, key_dim)
        mixing = DistanceMixing(num_heads, num_kv_heads, balance, settings.learn_mixing)
        super().__init__(settings, mixing, num_heads=num_heads, num_kv_heads=num_kv_heads, key_dim=key_dim, **widths)
        self.options = WindowedOptions(settings.block_size, settings.window, 0, scale=key_dim**-0.5)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, hidden_states: Tensor | None = None, starts: Tensor | None = None,
        key_mask: Tensor | None = None, scale: float | None = None,
    ) -> Tensor:  # fmt: skip
        """Attend to all real tokens of each row.

        Args:
            q, k, v: [B, T, H, K], [B, T, G, K], and [B, T, G, V].
            hidden_states: [B, T, hidden_size], the input of the layer, which the gate reads.
            starts: int64 [B], index of the first real token of each row; None if rows begin with one.
            key_mask: bool [B, T], False for padding.
            scale: Multiplier of q k^T in the softmax of the base model; None is K**-0.5.

        Returns:
            [B, T, H, V] in v's dtype.
        """
        options = self.options if scale in (None, self.options.scale) else replace(self.options, scale=scale)
        q, k, v = without_padding(key_mask, q.to(v.dtype), k.to(v.dtype), v)
        far = FarPart(self.q_map(q), self.k_map(k), *self.mixing())
        with torch.autocast(q.device.type, enabled=False):
            o = two_way_attention(q, k, v, far, options, key_mask=key_mask, starts=starts)
        return self.finish_output(o, hidden_states, v.dtype)
