"""MHLA cores that mix by decays, for converted models of text: causal (`DecayMHLA`) and bidirectional (`TwoWayMHLA`)."""

from dataclasses import replace
from math import log
from typing import Any

import torch

from ..ops.torch_layout import shift_to_start
from ..ops.windowed.attention import far_range, two_way_attention, windowed_attention
from ..ops.windowed.decays import Decays
from ..ops.windowed.decoding import KeyMap, WindowedState, continue_windowed, fill_state
from ..ops.windowed.inputs import WindowedInputs, WindowedOptions
from .core import MHLACore, check_no_gradients, move_tokens, padding_first, without_padding
from .decay_mixing import DecayMixing
from .heads import HeadSplit
from .settings import MHLASettings, check_settings

# Measured on SmolLM2 at 1,024 and 4,096 tokens: with this balance the far part does no harm before it has learned.
HARMLESS_BALANCE = -4.0


def start_balance(settings: MHLASettings, key_dim: int, causal: bool) -> float:
    """Compute the initial balance of the far part (see `WindowedInputs`).

    For random keys, the product of a query's and a key's features is about 2 / K with Hedgehog, and is taken to be of the
    order of K with all other maps; the balance compensates for that. Features of real keys saturate: with `rope="near"`,
    and in encoders, the far part starts so small that a converted model is not worse than its window alone.
    """
    if settings.rope == "near" or not causal:
        sums_to_one = settings.feature_map in ("hedgehog", "softmax")
        return HARMLESS_BALANCE if sums_to_one else HARMLESS_BALANCE - log(key_dim)
    return log(key_dim / 2) if settings.feature_map == "hedgehog" else -log(key_dim)


def keep_rotated(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Return `x` unchanged; used in place of a function that undoes a rotary embedding."""
    return x


class DecayCore(MHLACore):
    """Base class of cores that mix by decays, causal (`DecayMHLA`) and bidirectional (`TwoWayMHLA`).

    It has the parameters of all heads, even if some of them keep softmax, so that these can be chosen after training.

    Attributes:
        heads: The `HeadSplit` of a layer in which some KV heads keep softmax, else None. `forward` then gets the MHLA heads
            only.
        unrotate: Called as unrotate(x, cos_sin) with q or k; undoes the rotary embedding, for `rope="near"`.
    """

    mixing: DecayMixing

    def __init__(self, settings: MHLASettings, *, num_heads: int, num_kv_heads: int, key_dim: int, **widths: Any):
        check_settings(settings, "a causal model" if self.causal else "an encoder", both_ways=not self.causal)
        mixing = DecayMixing(
            num_heads,
            num_kv_heads,
            settings.num_decays,
            balance=start_balance(settings, key_dim, self.causal) if settings.windowed else None,
            learn=settings.learn_mixing,
            free_decay=settings.free_decay,
            length_power=settings.length_power,
        )
        super().__init__(settings, mixing, num_heads=num_heads, num_kv_heads=num_kv_heads, key_dim=key_dim, **widths)
        self.heads: HeadSplit | None = None
        self.unrotate: KeyMap = keep_rotated
        self.options = WindowedOptions(
            settings.block_size,
            window=settings.window if settings.windowed else 1,
            sinks=settings.sinks if settings.windowed else 0,
            scale=key_dim**-0.5,
            normalize=settings.normalize is not False,
            impl=settings.impl,
            unrounded=settings.output_norm,
            both_ways=not self.causal,
        )


class DecayMHLA(DecayCore):
    """Causal attention whose far part is MHLA by decays (`ops/windowed/attention.py` has the formula)."""

    causal = True

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
        cos_sin: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Apply causal attention: each token attends to itself and to all earlier tokens.

        Args:
            q, k, v, hidden_states, starts, key_mask, cu_seqlens, cache: As in `MHLA.forward`, for the MHLA heads only.
            scale: Multiplier of q k^T in the softmax of the base model; None is K**-0.5.
            cos_sin: [B or 1, T, 1, A], cosines and sines of the rotation of q and k, where A is the number of rotated
                dimensions of a head; None if q and k were not rotated.

        Returns:
            [B, T, H, V] in v's dtype.

        Raises:
            ValueError: If gradients are required in training and the cache holds tokens, or `settings.impl` is "triton" and
                the kernel cannot run.
        """
        options = self.options if scale in (None, self.options.scale) else replace(self.options, scale=scale)
        # Under autocast, rotated q and k arrive in fp32.
        q, k, v = without_padding(key_mask, q.to(v.dtype), k.to(v.dtype), v)
        if cos_sin is None:
            cos_sin = q.new_zeros(*q.shape[:2], 1, 0)
        else:
            cos_sin = cos_sin.to(q.dtype).expand(len(q), -1, -1, -1)
        if key_mask is not None:  # `starts` then tells which tokens are real
            source, inverse, starts = padding_first(key_mask)
            q, k, v, cos_sin = (move_tokens(x, source, inverse) for x in (q, k, v, cos_sin))
        if q.shape[1] == 1 and torch.compiler.is_compiling():
            # Materialize q and k: fused into the loop over keys, the query would be rotated again for every key.
            both = torch.cat([q, k], 2)
            q, k = both[:, :, : q.shape[2]], both[:, :, q.shape[2] :]
        decays, balance = self.read_mixing(cache)
        is_new = cache is None or cache.state is None
        drop_window = is_new and self.draw_window_dropout()
        first, end = 0, q.shape[1]
        if (
            is_new
            and starts is None
            and cu_seqlens is None
            and balance is not None
            and not torch.compiler.is_compiling()
        ):
            first, end = far_range(q.shape[1], replace(options, window=1) if drop_window else options)
            if torch.is_grad_enabled() and end == 0:  # gradients of zero, as other processes may have some
                first, end = 0, q.shape[1]
        q_features = self.q_map(self.unrotate(q[:, first:], cos_sin[:, first:]), self.heads)
        map_keys: KeyMap = self.map_keys
        if balance is None:  # the near part is linear, too, and reads features
            q = q_features
            k = self.map_keys(k, cos_sin)
            map_keys = keep_rotated
        inputs = WindowedInputs(q, k, v, q_features, decays, balance, options, None, starts, cu_seqlens)
        if cache is not None and not drop_window:
            o = self.continue_cache(inputs, map_keys, cache, cos_sin)
        else:
            if cache is not None:  # the cache has to see the tokens as they are
                with torch.no_grad():
                    self.continue_cache(inputs, map_keys, cache, cos_sin)
            if drop_window:
                inputs = inputs._replace(options=replace(options, window=1))
            with torch.autocast(q.device.type, enabled=False):
                o = windowed_attention(inputs, map_keys(k[:, :end], cos_sin[:, :end]))
        if key_mask is not None:
            o = move_tokens(o, inverse, source)
            if cache is not None:
                cache.note_padding(key_mask)
        return self.finish_output(o, hidden_states, v.dtype)

    def fits_window(self, num_tokens: int, *, cache: Any, starts: Any, key_mask: Any, cu_seqlens: Any) -> bool:
        """Return whether T new tokens need plain causal softmax alone, and no gradient of this core."""
        is_whole = starts is None and key_mask is None and cu_seqlens is None and (cache is None or cache.state is None)
        if not (is_whole and self.settings.windowed) or torch.compiler.is_compiling():
            return False
        learns = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self.parameters())
        drops_window = self.training and self.settings.window_dropout
        return num_tokens <= self.options.window * self.options.block_size and not learns and not drops_window

    @torch.no_grad()
    def remember(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: Any, cos_sin: torch.Tensor | None
    ) -> None:
        """Put tokens that fit the window into an empty `cache`; q [B, T, H, K], k, and v are those of the MHLA heads."""
        k = k.to(v.dtype)
        cos_sin = k.new_zeros(*k.shape[:2], 1, 0) if cos_sin is None else cos_sin.to(k.dtype).expand(len(k), -1, -1, -1)
        self.read_mixing(cache)
        cache.state = self.new_state(k, v, cos_sin)
        fill_state(k, v, self.map_keys, cache.state, self.options, cos_sin)

    def new_state(self, k: torch.Tensor, v: torch.Tensor, cos_sin: torch.Tensor | None) -> WindowedState:
        """Create a state without tokens, for k and v [B, T, G, ..] of the MHLA heads and cos_sin [.., A] like these."""
        num_decays, num_features = self.mixing.num_decays, self.k_map.num_features
        return WindowedState.empty(k, v, num_decays, num_features, self.options, cos_sin)

    def map_keys(self, k: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
        """Compute the features with which the MHLA heads' keys enter the far part. See `KeyMap` for arguments and result."""
        return self.k_map(self.unrotate(k, cos_sin), self.heads)

    def read_mixing(self, cache: Any) -> tuple[Decays, torch.Tensor | None]:
        """Return the decays and the balance of the MHLA heads, from a cache that holds tokens or for a new one.

        The cache has them in one tensor, because every tensor that a compiled step reads costs time.
        """
        if cache is not None and cache.state is not None:
            return self.mixing.unpack(cache.mixing)
        decays, balance = self.mixing(self.heads)
        if cache is not None:
            cache.mixing = self.mixing.pack(decays, balance)
        return decays, balance

    def draw_window_dropout(self) -> bool:
        """Draw whether this forward pass restricts the window to the current block; never in eval mode."""
        probability = self.settings.window_dropout if self.training and self.options.window > 1 else 0
        return probability > 0 and float(torch.rand(())) < probability

    def continue_cache(
        self, inputs: WindowedInputs, map_keys: KeyMap, cache: Any, cos_sin: torch.Tensor
    ) -> torch.Tensor:
        """Compute the outputs of new tokens, and add the tokens to `cache.state`; see `continue_windowed`."""
        fresh = cache.state is None
        q, k, v = inputs[:3]
        if fresh:
            cache.state = self.new_state(k, v, cos_sin)
        else:
            check_no_gradients(self, q, k, v)
        return continue_windowed(inputs, map_keys, cache.state, fresh=fresh, cos_sin=cos_sin)


class TwoWayMHLA(DecayCore):
    """Bidirectional MHLA by decays with a softmax window, for encoders: every token attends to all real tokens of its row.

    The window has `window - 1` blocks on either side of a token's own. Blocks are counted from a row's first real token.
    """

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        hidden_states: torch.Tensor | None = None,
        starts: torch.Tensor | None = None,
        key_mask: torch.Tensor | None = None,
        scale: float | None = None,
    ) -> torch.Tensor:
        """Attend to all real tokens of each row.

        Args:
            q: [B, T, H, K].
            k: [B, T, G, K].
            v: [B, T, G, V].
            hidden_states: [B, T, hidden_size], the input of the layer, which the gate reads.
            starts: int64 [B], index of the first real token of each row; needs key_mask, too. None if rows begin with a real
                token.
            key_mask: bool [B, T], False for padding.
            scale: Multiplier of q k^T in the softmax of the base model; None is K**-0.5.

        Returns:
            [B, T, H, V] in v's dtype.
        """
        options = self.options if scale in (None, self.options.scale) else replace(self.options, scale=scale)
        q, k, v = without_padding(key_mask, q.to(v.dtype), k.to(v.dtype), v)
        if starts is not None and key_mask is not None:
            source, inverse = shift_to_start(starts, q.shape[1])
            q, k, v = (move_tokens(x, source, inverse) for x in (q, k, v))
            key_mask = key_mask.gather(1, source.clamp_min(0)) & (source >= 0)
        q_features = self.q_map(q, self.heads)
        k_features = self.k_map(k, self.heads)
        decays, balance = self.mixing(self.heads)
        inputs = WindowedInputs(q, k, v, q_features, decays, balance, options, key_mask)
        with torch.autocast(q.device.type, enabled=False):
            o = two_way_attention(inputs, k_features)
        if starts is not None:
            o = move_tokens(o, inverse, source)
        return self.finish_output(o, hidden_states, v.dtype)
