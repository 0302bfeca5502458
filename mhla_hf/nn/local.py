"""The cores of converted models of text that mix by decays, with a local softmax: causal (`DecayMHLA`) and both ways."""

from dataclasses import replace
from math import log

import torch

from ..ops.local import LocalForm, local_attention, two_way_attention
from ..ops.local_state import LocalState, continue_local
from ..ops.torch_layout import shift_to_start
from .core import MHLACore, check_causal, check_encoder, move_tokens, padding_first, refuse_gradients, without_padding
from .decay_mixing import DecayMixing
from .heads import HeadSplit
from .settings import MHLASettings

WINDOW_BALANCE = -4.0  # at which the far part does no harm to SmolLM2 before it has learned, at 1,024 and 4,096 tokens


def start_balance(settings: MHLASettings, key_dim: int, causal: bool) -> float:
    """The balance at which far weights begin in the unit of the softmax.

    <fq, fk> is about 2 / K for Hedgehog features of random keys, of the order of K for those without a softmax. Features of
    real keys saturate: in converted models the start is small enough that a conversion is not worse than its window.
    """
    if settings.rope == "near" or not causal:
        return WINDOW_BALANCE if settings.feature_map in ("hedgehog", "softmax") else WINDOW_BALANCE - log(key_dim)
    return log(key_dim / 2) if settings.feature_map == "hedgehog" else -log(key_dim)


def keep_rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """What stands in the place of undoing RoPE where there is none."""
    return x


class DecayCore(MHLACore):
    """What the causal core and that of encoders share: mixing by decays, and what says which tokens are near.

    Its parameters are those of all heads, also where some keep softmax: which ones do can then be chosen after they learned.

    Args: as `MHLACore`, which makes its own `DecayMixing` from `settings`.

    Attributes:
        heads: the `HeadSplit` of a layer in which some KV heads keep softmax, whose q, k and v do not come here; else None.
        unrotate: a function of q or k and of their angles that undoes RoPE, for `rope="near"`.
    """

    def __init__(self, settings: MHLASettings, *, num_heads: int, num_kv_heads: int, key_dim: int, **widths):
        check_causal(settings) if self.causal else check_encoder(settings)
        local = settings.local is not None
        balance = start_balance(settings, key_dim, self.causal) if local else None
        choices = {"free": settings.free_decay, "by_length": settings.length_power, "learn": settings.learn_mixing}
        mixing = DecayMixing(num_heads, num_kv_heads, settings.num_decays, balance=balance, **choices)
        super().__init__(settings, mixing, num_heads=num_heads, num_kv_heads=num_kv_heads, key_dim=key_dim, **widths)
        self.heads: HeadSplit | None = None
        self.unrotate = keep_rotated
        self.form = LocalForm(
            settings.block_size,
            lag=settings.window if local else 1,
            sinks=settings.sinks if local else 0,
            scale=key_dim**-0.5,
            normalize=settings.normalize,
            impl=settings.impl,
            unrounded=settings.output_norm,
            both_ways=not self.causal,
        )


class DecayMHLA(DecayCore):
    """Causal attention over `[B, T, H, K]` queries whose far part is MHLA by decays (`ops/local.py` has the formula)."""

    causal = True

    def forward(
        self, q, k, v, *, hidden_states=None, starts=None, key_mask=None, cu_seqlens=None, cache=None, scale=None,
        angles=None,
    ) -> torch.Tensor:  # fmt: skip
        """Attend; arguments as `MHLA.forward`, all of the MHLA heads alone.

        scale: of q k^T in the softmax, the base's; None is K**-0.5. angles: `[B or 1, T, 1, A]`, how q and k were rotated;
        None if they were not.
        """
        form = self.form if scale in (None, self.form.scale) else replace(self.form, scale=scale)
        q, k, v = without_padding(key_mask, q.to(v.dtype), k.to(v.dtype), v)  # autocast leaves rotated ones in fp32
        angles = q.new_zeros(*q.shape[:2], 1, 0) if angles is None else angles.to(q.dtype).expand(len(q), -1, -1, -1)
        real = key_mask
        if key_mask is not None:
            source, back, starts = padding_first(key_mask)
            q, k, v, angles = move_tokens(source, back, q, k, v, angles)
            real = key_mask if source is None else key_mask.gather(1, source)
        if q.shape[1] == 1 and torch.compiler.is_compiling():  # in memory, or each key would rotate the query anew
            both = torch.cat([q, k], 2)
            q, k = both[:, :, : q.shape[2]], both[:, :, q.shape[2] :]
        mixing, map_keys = self.read_mixing(cache), self.map_keys
        fq = self.q_map(self.unrotate(q, angles), self.heads)
        if mixing[1] is None:  # without a balance the near part reads features, too
            q, k, map_keys = fq, self.map_keys(k, angles), keep_rotated
        inputs, padding = (q, k, v, fq), {"key_mask": real, "starts": starts}
        dropped = (cache is None or cache.state is None) and self.drops_window()
        if dropped and cache is not None:
            with torch.no_grad():
                self.continue_cache(*inputs, map_keys, mixing, form, cache, angles=angles, **padding)
        if cache is not None and not dropped:
            o = self.continue_cache(*inputs, map_keys, mixing, form, cache, angles=angles, **padding)
        else:
            form = replace(form, lag=1) if dropped else form
            with torch.autocast(q.device.type, enabled=False):
                o = self.attend(*inputs, map_keys(k, angles), *mixing, form, cu_seqlens=cu_seqlens, **padding)
        if key_mask is not None:
            (o,) = move_tokens(back, source, o)
            if cache is not None:
                cache.note_padding(key_mask)
        return self.finish_output(o, hidden_states, v.dtype)

    attend = staticmethod(local_attention)  # of whole sequences; shards of them: see training/sequence_parallel.py

    def map_keys(self, k: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """The far part's features of keys `[B, N, G, D]`, which were rotated by `angles` `[B, N, 1, A]`."""
        return self.k_map(self.unrotate(k, angles), self.heads)

    def read_mixing(self, cache) -> tuple:
        """The decays and the balance. A cache keeps those it began with, as one tensor: each one that a step takes costs."""
        if cache is None or cache.state is None:
            mixing = self.mixing(self.heads)
            if cache is not None:
                cache.mixing = self.mixing.pack(*mixing)
            return mixing
        return self.mixing.unpack(cache.mixing)

    def drops_window(self) -> bool:
        """Whether this training step leaves all blocks before the open one to the far part."""
        share = self.settings.window_dropout if self.training and self.form.lag > 1 else 0
        return share > 0 and float(torch.rand(())) < share

    def continue_cache(self, q, k, v, fq, map_keys, mixing, form, cache, *, key_mask, starts, angles):
        """The outputs of new tokens behind those of `cache.state`, which goes on by them."""
        fresh, (decays, balance) = cache.state is None, mixing
        if fresh:
            features = self.k_map.num_features
            cache.state = LocalState.empty(k, v, self.mixing.num_decays, features, form, angles)
        else:
            refuse_gradients(self, q, k, v)
        options = {"fresh": fresh, "key_mask": key_mask, "starts": starts, "angles": angles}
        return continue_local(q, k, v, fq, map_keys, decays, balance, form, cache.state, **options)


class TwoWayMHLA(DecayCore):
    """The same over whole sequences where every token sees every other of its row: the core of converted encoders.

    The window has `window - 1` blocks on either side of a token's own. Blocks are counted from a row's first real token.
    """

    attend = staticmethod(two_way_attention)

    def forward(self, q, k, v, *, hidden_states=None, starts=None, key_mask=None, scale=None) -> torch.Tensor:
        """Attend; arguments as `SequenceMHLA.forward`, all of the MHLA heads alone, and `scale` of q k^T in the softmax.

        Returns:
            `[B, T, H, V]` in v's dtype.
        """
        form = self.form if scale in (None, self.form.scale) else replace(self.form, scale=scale)
        q, k, v = without_padding(key_mask, q.to(v.dtype), k.to(v.dtype), v)
        if starts is not None:
            there, back = shift_to_start(starts, q.shape[1])
            q, k, v = move_tokens(there, back, q, k, v)
            key_mask = key_mask.gather(1, there.clamp_min(0)) & (there >= 0)
        fq, fk = self.q_map(q, self.heads), self.k_map(k, self.heads)
        with torch.autocast(q.device.type, enabled=False):
            o = self.attend(q, k, v, fq, fk, *self.mixing(self.heads), form, key_mask=key_mask)
        if starts is not None:
            (o,) = move_tokens(back, there, o)
        return self.finish_output(o, hidden_states, v.dtype)
