"""The core of language models whose heads keep a window and salient tokens (`ops/windowed/salient.py`)."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.windowed.options import WindowedOptions
from ..ops.windowed.salient import salient_attention
from ..ops.windowed.salient_decoding import SalientState, continue_salient, plan_step, start_salient
from .core import check_no_gradients, padding_first, without_padding
from .heads import HeadSplit
from .settings import MHLASettings, check_settings


class SalientCore(nn.Module):
    """Causal softmax over a window, sinks, and the tokens of the past that each KV head attended to most; no parameters.

    Attributes:
        heads: The `HeadSplit` of a layer in which some KV heads keep softmax over all tokens, else None. With a `HeadSplit`,
            `forward` gets the other heads only.
    """

    causal = True

    def __init__(
        self, settings: MHLASettings, *, num_heads: int, num_kv_heads: int, key_dim: int, value_dim: int, **unused: Any
    ):
        super().__init__()
        check_settings(settings, "a causal model")
        self.settings = settings
        self.num_heads, self.num_kv_heads, self.value_dim = num_heads, num_kv_heads, value_dim
        self.heads: HeadSplit | None = None
        size, window, sinks = settings.block_size, settings.window, settings.sinks
        self.options = WindowedOptions(size, window, sinks, scale=key_dim**-0.5, salient=settings.salient)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, hidden_states: Tensor | None = None, starts: Tensor | None = None,
        key_mask: Tensor | None = None, cu_seqlens: Tensor | None = None, cache: Any = None, scale: float | None = None,
    ) -> Tensor:  # fmt: skip
        """Attend as `salient_attention` does, after the tokens of a `cache` if there is one.

        Args:
            q, k, v, starts, key_mask, cu_seqlens, cache: As in `MHLA.forward`, for the MHLA heads only.
            hidden_states: Ignored: there is no gate.
            scale: Multiplier of q k^T; None is K**-0.5.

        Returns:
            [B, T, H, V] in v's dtype.

        Raises:
            ValueError: If gradients are required in training and the cache holds tokens.
        """
        options = self.options if scale in (None, self.options.scale) else replace(self.options, scale=scale)
        # Under autocast, rotated q and k arrive in fp32.
        q, k, v = without_padding(key_mask, q.to(v.dtype), k.to(v.dtype), v)
        padding, starts = padding_first(key_mask, starts)
        q, k, v = padding.move(q, k, v)
        with torch.autocast(q.device.type, enabled=False):
            if cache is None:
                o = salient_attention(q, k, v, options, starts=starts, cu_seqlens=cu_seqlens)
            else:
                fresh, plan = cache.state is None, None
                if fresh:
                    cache.state = self.new_state(k, v)
                else:
                    check_no_gradients(self, q, k, v)
                    if q.shape[1] == 1:
                        plan = cache.shared_plan(partial(plan_step, cache.state, options, starts), q.device)
                o = continue_salient(q, k, v, cache.state, options, starts=starts, fresh=fresh, plan=plan)
                if key_mask is not None:
                    cache.note_padding(key_mask)
        return padding.take_back(o)

    @torch.no_grad()
    def remember(self, q: Tensor, k: Tensor, v: Tensor, cache: Any) -> None:
        """Fill an empty cache with tokens and their votes, without attending; q, k, and v have the MHLA heads only."""
        k = k.to(v.dtype)
        cache.state = self.new_state(k, v)
        start_salient(q.to(v.dtype), k, v, cache.state, self.options, attends=False)

    def new_state(self, k: Tensor, v: Tensor) -> SalientState:
        """Create an empty state whose sizes, dtypes, and device are those of k and v, which have the MHLA heads only."""
        return SalientState.empty(k, v, self.options)
