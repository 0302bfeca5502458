"""MHLA cores that mix by decays, for converted models of text: causal (`DecayMHLA`) and bidirectional (`TwoWayMHLA`)."""

from dataclasses import replace
from math import log
from typing import Any

import torch
from torch import Tensor

from ..ops.windowed.attention import far_range, windowed_attention
from ..ops.windowed.decays import Decays
from ..ops.windowed.decoding import KeyMap, WindowedState, continue_windowed, fill_state
from ..ops.windowed.inputs import WindowedInputs, WindowedOptions
from .core import MHLACore, check_no_gradients, padding_first, without_padding
from .decay_mixing import DecayMixing
from .heads import HeadSplit
from .settings import MHLASettings, check_settings

# Measured on SmolLM2 at 1,024 and 4,096 tokens: with this balance the far part does no harm before it has learned.
HARMLESS_BALANCE = -4.0


def start_balance(settings: MHLASettings, key_dim: int, causal: bool) -> float:
    """Compute the initial balance of the far part (see `WindowedInputs`).

    It compensates for the product of a query's and a key's features, which for random keys is about 2 / K with Hedgehog, and
    taken to be K with other maps. Features of real keys saturate: with `rope="near"`, and in encoders, the far part starts
    so small that a converted model is not worse than its window alone.
    """
    if settings.rope == "near" or not causal:
        sums_to_one = settings.feature_map in ("hedgehog", "softmax")
        return HARMLESS_BALANCE if sums_to_one else HARMLESS_BALANCE - log(key_dim)
    return log(key_dim / 2) if settings.feature_map == "hedgehog" else -log(key_dim)


def keep_rotated(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Return x unchanged: the `unrotate` of a core without `rope="near"`, and the key map of keys that are features."""
    return x


class DecayCore(MHLACore):
    """Base class of cores that mix by decays, causal (`DecayMHLA`) and bidirectional (`TwoWayMHLA`).

    It has the parameters of all heads, even if some of them keep softmax, so that these can be chosen after training.

    Attributes:
        heads: The `HeadSplit` of a layer in which some KV heads keep softmax, else None. With it, `forward` gets the MHLA
            heads only.
        unrotate: Called as unrotate(x, cos_sin) with q or k; undoes the rotary embedding, for `rope="near"`.
    """

    mixing: DecayMixing

    def __init__(self, settings: MHLASettings, *, num_heads: int, num_kv_heads: int, key_dim: int, **widths: Any):
        check_settings(settings, "a causal model" if self.causal else "an encoder", both_ways=not self.causal)
        balance = start_balance(settings, key_dim, self.causal) if settings.windowed else None
        mixing = DecayMixing(settings, num_heads, num_kv_heads, balance)
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
        self, q: Tensor, k: Tensor, v: Tensor, *, hidden_states: Tensor | None = None, starts: Tensor | None = None,
        key_mask: Tensor | None = None, cu_seqlens: Tensor | None = None, cache: Any = None,
        scale: float | None = None, cos_sin: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Apply causal attention: each token attends to itself and to all earlier tokens.

        Args:
            q, k, v, hidden_states, starts, key_mask, cu_seqlens, cache: As in `MHLA.forward`, for the MHLA heads only.
            scale: Multiplier of q k^T in the softmax of the base model; None is K**-0.5.
            cos_sin: [B or 1, T, 1, A], cosines and sines of the rotation of A dimensions of q and k; None if q and k were
                not rotated.

        Returns:
            [B, T, H, V] in v's dtype.

        Raises:
            ValueError: If gradients are required in training and the cache holds tokens.
        """
        options = self.options if scale in (None, self.options.scale) else replace(self.options, scale=scale)
        # Under autocast, rotated q and k arrive in fp32.
        q, k, v = without_padding(key_mask, q.to(v.dtype), k.to(v.dtype), v)
        padding, starts = padding_first(key_mask, starts)
        q, k, v, cos_sin = padding.move(q, k, v, rotation_of(k, cos_sin))
        if q.shape[1] == 1 and torch.compiler.is_compiling():
            # Materialize q and k: fused into the loop over keys, q would be rotated again for every key.
            both = torch.cat([q, k], 2)
            q, k = both[:, :, : q.shape[2]], both[:, :, q.shape[2] :]
        decays, balance = self.read_mixing(cache)
        is_new = cache is None or cache.state is None
        drops_window = is_new and self.draw_window_dropout()
        seen = replace(options, window=1) if drops_window else options
        first, end = 0, q.shape[1]
        is_whole = is_new and starts is None and cu_seqlens is None
        if is_whole and balance is not None and not torch.compiler.is_compiling():
            first, end = far_range(q.shape[1], seen)
            if torch.is_grad_enabled() and end == 0:  # other processes may have gradients, so this one needs zeros
                first, end = 0, q.shape[1]
        q_features = self.q_map(self.unrotate(q[:, first:], cos_sin[:, first:]), self.heads)
        map_keys: KeyMap = self.map_keys
        if balance is None:  # the near part is linear, too, and reads features
            q = q_features
            k = self.map_keys(k, cos_sin)
            map_keys = keep_rotated
        inputs = WindowedInputs(q, k, v, q_features, decays, balance, seen, None, starts, cu_seqlens)
        if cache is not None and not drops_window:
            o = self.continue_cache(inputs, map_keys, cache, cos_sin)
        else:
            if cache is not None:  # its state must not depend on window dropout
                with torch.no_grad():
                    self.continue_cache(inputs._replace(options=options), map_keys, cache, cos_sin)
            with torch.autocast(q.device.type, enabled=False):
                o = windowed_attention(inputs, map_keys(k[:, :end], cos_sin[:, :end]))
        if key_mask is not None and cache is not None:
            cache.note_padding(key_mask)
        return self.finish_output(padding.take_back(o), hidden_states, v.dtype)

    @torch.no_grad()
    def remember(self, q: Tensor, k: Tensor, v: Tensor, cache: Any, cos_sin: Tensor | None) -> None:
        """Put tokens that fit the window into an empty cache; q, k, and v are those of the MHLA heads."""
        k = k.to(v.dtype)
        cos_sin = rotation_of(k, cos_sin)
        self.read_mixing(cache)
        cache.state = self.new_state(k, v, cos_sin)
        fill_state(k, v, self.map_keys, cache.state, self.options, cos_sin)

    def new_state(self, k: Tensor, v: Tensor, cos_sin: Tensor | None) -> WindowedState:
        """Create an empty state whose sizes, dtypes, and device are those of cos_sin and of the MHLA heads' k and v."""
        return WindowedState.empty(k, v, self.mixing.num_decays, self.k_map.num_features, self.options, cos_sin)

    def map_keys(self, k: Tensor, cos_sin: Tensor) -> Tensor:
        """Compute the features of the MHLA heads' keys, as a `KeyMap`."""
        return self.k_map(self.unrotate(k, cos_sin), self.heads)

    def read_mixing(self, cache: Any) -> tuple[Decays, Tensor | None]:
        """Return the decays and the balance of the MHLA heads: those in a cache that holds tokens, else the current ones.

        A new cache stores them as one tensor, because every tensor that a compiled step reads costs time.
        """
        if cache is not None and cache.state is not None:
            return self.mixing.unpack(cache.mixing)
        decays, balance = self.mixing(self.heads)
        if cache is not None:
            cache.mixing = self.mixing.pack(decays, balance)
        return decays, balance

    def draw_window_dropout(self) -> bool:
        """Draw whether this forward pass in training restricts the window to the current block."""
        probability = self.settings.window_dropout if self.training and self.options.window > 1 else 0
        return probability > 0 and float(torch.rand(())) < probability

    def continue_cache(self, inputs: WindowedInputs, map_keys: KeyMap, cache: Any, cos_sin: Tensor) -> Tensor:
        """Compute the outputs of new tokens, and add these to `cache.state`; see `continue_windowed`."""
        fresh = cache.state is None
        q, k, v = inputs[:3]
        if fresh:
            cache.state = self.new_state(k, v, cos_sin)
        else:
            check_no_gradients(self, q, k, v)
        return continue_windowed(inputs, map_keys, cache.state, fresh=fresh, cos_sin=cos_sin)


def rotation_of(k: Tensor, cos_sin: Tensor | None) -> Tensor:
    """Return cosines and sines as [B, T, 1, A] in the dtype of k [B, T, G, K]; A is 0 for None."""
    return k.new_zeros(*k.shape[:2], 1, 0) if cos_sin is None else cos_sin.to(k.dtype).expand(len(k), -1, -1, -1)


class TwoWayMHLA(DecayCore):
    """Bidirectional MHLA by decays with a softmax window, for encoders: every token attends to all real tokens of its row.

    The window has `window - 1` blocks on either side of a token's own. Blocks are counted from a row's first real token.
    """

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
        q_features, k_features = self.q_map(q, self.heads), self.k_map(k, self.heads)
        decays, balance = self.mixing(self.heads)
        inputs = WindowedInputs(q, k, v, q_features, decays, balance, options, key_mask, starts)
        with torch.autocast(q.device.type, enabled=False):
            o = windowed_attention(inputs, k_features)
        return self.finish_output(o, hidden_states, v.dtype)
