"""The core of converted language models whose heads keep a window and salient tokens (`ops/windowed/salient.py`).

It has no parameters: a model is converted by choosing the heads that keep all tokens, and is ready.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ..ops.windowed.inputs import WindowedOptions
from ..ops.windowed.salient import salient_attention
from ..ops.windowed.salient_decoding import SalientState, continue_salient, fill_salient
from .core import check_no_gradients, move_tokens, padding_first, without_padding
from .heads import HeadSplit
from .settings import MHLASettings, check_settings


class SalientCore(nn.Module):
    """Causal softmax over a window, sinks, and the tokens of the past that each KV head attended to most.

    Attributes:
        heads: The `HeadSplit` of a layer in which some KV heads keep all tokens, else None. `forward` then gets the other
            heads only.
    """

    causal = True
    compiles_fullgraph = True

    def __init__(
        self, settings: MHLASettings, *, num_heads: int, num_kv_heads: int, key_dim: int, value_dim: int, **unused: Any
    ):
        super().__init__()
        check_settings(settings, "a causal model")
        self.settings = settings
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.value_dim = value_dim
        self.heads: HeadSplit | None = None
        self.options = WindowedOptions(
            settings.block_size,
            window=settings.window,
            sinks=settings.sinks,
            scale=key_dim**-0.5,
            salient=settings.salient,
        )

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        hidden_states: torch.Tensor | None = None,
        starts: torch.Tensor | None = None,
        key_mask: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        cache: Any = None,
        scale: float | None = None,
    ) -> torch.Tensor:
        """Attend as `salient_attention` does, or, with a `cache`, after its tokens. Arguments are as in `MHLA.forward`.

        `scale` is the multiplier of q k^T, None for K**-0.5. Returns [B, T, H, V] in v's dtype.
        """
        options = self.options if scale in (None, self.options.scale) else replace(self.options, scale=scale)
        # Under autocast, rotated q and k arrive in fp32.
        q, k, v = without_padding(key_mask, q.to(v.dtype), k.to(v.dtype), v)
        if key_mask is not None:  # `starts` then tells which tokens are real
            source, inverse, starts = padding_first(key_mask)
            q, k, v = (move_tokens(x, source, inverse) for x in (q, k, v))
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
                        plan = cache.shared_plan(partial(cache.state.plan_step, options, starts), q.device)
                o = continue_salient(q, k, v, cache.state, options, starts=starts, fresh=fresh, plan=plan)
        if key_mask is not None:
            o = move_tokens(o, inverse, source)
            if cache is not None:
                cache.note_padding(key_mask)
        return o

    def fits_window(self, num_tokens: int, *, cache: Any, starts: Any, key_mask: Any, cu_seqlens: Any) -> bool:
        """Return whether T new tokens need plain causal softmax alone."""
        is_whole = starts is None and key_mask is None and cu_seqlens is None and (cache is None or cache.state is None)
        fits = num_tokens <= self.options.window * self.options.block_size
        return is_whole and fits and not torch.compiler.is_compiling()

    @torch.no_grad()
    def remember(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: Any, cos_sin: None = None) -> None:
        """Put tokens that fit the window into an empty `cache`; q [B, T, H, K], k, and v are those of the MHLA heads."""
        if k.shape[1] <= (self.options.window - 1) * self.options.block_size:
            k = k.to(v.dtype)
            cache.state = self.new_state(k, v)
            fill_salient(k, v, cache.state, self.options)
        else:
            self(q, k, v, cache=cache)

    def new_state(self, k: torch.Tensor, v: torch.Tensor, cos_sin: None = None) -> SalientState:
        """Create a state without tokens, for k and v [B, T, G, ..] of the MHLA heads like these."""
        return SalientState.empty(k, v, self.options)

    def finish_output(self, o: torch.Tensor, hidden_states: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """Cast the base's own attention, where it is the output, [B, T, H, V]."""
        return o.to(dtype)
