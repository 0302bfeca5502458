"""Replaces softmax attention with an MHLA core in the attention modules of transformers' language models.

The base keeps its projections, norms, and RoPE, and calls "the attention function". Converted modules have a copy of the
configuration that selects ours, `mhla_attention`. What the base does not pass to it travels as keyword arguments:
`mhla_padding` (see `pass_padding`), `mhla_cache`, `mhla_hidden_states`, `mhla_cos_sin`, and, in models from scratch,
`mhla_rotate`. Heads that keep softmax go to the base's own attention function (`SoftmaxHeads`).
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from ...nn.heads import HeadSplit
from ...nn.settings import MHLASettings
from ...ops.namespace import NAMESPACE
from ..derived_classes import AttentionSwap, attention_sizes, calls_interface, is_attention
from ..transformers_api import check_cache_arrived, find_cache
from .cache import mhla_cache_layer
from .rotation import rotation_cos_sin, rotation_layout, unrotate

ATTENTION_NAME = f"mhla_{NAMESPACE}"
# Arguments with which other attention functions compute something that MHLA cannot.
SOFTMAX_ONLY = ("softcap", "s_aux", "sliding_window", "position_bias")


def mhla_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute the attention of an MHLA layer; transformers calls this as an attention function.

    query is [B, H, T, K], key [B, G, T, K], value [B, G, T, V], the output [B, T, H, V]. The mask and dropout are only for
    heads that keep softmax; MHLA reads `mhla_padding`, which needs no T x T mask.
    """
    check_cache_arrived(query.shape[2], key.shape[2], kwargs)
    for name in SOFTMAX_ONLY:
        if (argument := kwargs.get(name)) is not None:
            got = f"{type(argument).__name__} in an MHLA layer, which does not support it"
            raise ValueError(f"{name}: got {got}, expected None.")
    if kwargs.get("is_causal") is False:
        raise ValueError("is_causal: got False for an MHLA layer of a language model, expected True or None.")
    starts, key_mask = kwargs.get("mhla_padding") or (None, None)
    cache = kwargs.get("mhla_cache")
    options = {
        "hidden_states": kwargs.get("mhla_hidden_states"),
        "cache": cache,
        "scale": scaling,
        "starts": starts,
        "key_mask": key_mask,
        "cu_seqlens": kwargs.get("cu_seq_lens_q") if cache is None else None,
        # Only some cores take these.
        **{name: kwargs[f"mhla_{name}"] for name in ("rotate", "cos_sin") if f"mhla_{name}" in kwargs},
    }
    if not hasattr(module, "attend_with_softmax"):
        o = module.mhla(*(x.transpose(1, 2) for x in (query, key, value)), **options)
    else:
        softmax_options = {name: value for name, value in kwargs.items() if not name.startswith("mhla_")}
        softmax_options.update(attention_mask=attention_mask, scaling=scaling, dropout=dropout)
        o = module.attend_with_softmax(query, key, value, options, softmax_options)
    # Some bases call `view` on the output.
    return o.contiguous(), None


class SoftmaxHeads(nn.Module):
    """Computes the softmax of an MHLA layer, by the attention function that the model's configuration selects.

    This is the softmax of the heads that keep it and, while all tokens are within one window, of all heads. The module is
    passed to that function in place of an attention module, and has the attributes that such functions read. `config` is the
    model's, which `set_attn_implementation` changes; the attention module's own copy selects MHLA.
    """

    def __init__(self, attention: Any, config: Any):
        super().__init__()
        self.config = config
        self.layer_idx = attention.layer_idx
        self.is_causal = True
        # Layers with learned sinks are not converted.
        self.sinks = None
        self.num_key_value_groups = getattr(attention, "num_key_value_groups", 1)
        base = next(cls for cls in type(attention).__mro__ if calls_interface(cls))
        # Every modeling file has its own.
        self.eager = sys.modules[base.__module__].eager_attention_forward

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cache: Any, **options: Any
    ) -> torch.Tensor:
        """Attend by softmax, to [B, T, H, V]. Keys and values go into `cache.softmax`, if there is one."""
        if cache is not None:
            key, value = cache.softmax.update(key, value)
        return selected_attention(self.config, self.eager)(self, query, key, value, **options)[0]


def selected_attention(config: Any, eager: Callable[..., Any]) -> Callable[..., Any]:
    """Return the attention function that a configuration selects; in `SoftmaxHeads`, `calls_interface` would find it."""
    return ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, eager)


def padding_mask(
    *args: Any, q_length: int, q_offset: Any = 0, attention_mask: torch.Tensor | None = None, **kwargs: Any
) -> torch.Tensor | None:
    """Return the columns of a mask [B, S] for the new tokens, [B, T]; the mask function of models without softmax layers.

    With the columns of the past, every compiled step of `generate` would see a new shape.
    """
    return None if attention_mask is None else new_columns(attention_mask, q_length, q_offset)


AttentionInterface.register(ATTENTION_NAME, mhla_attention)
AttentionMaskInterface.register(ATTENTION_NAME, padding_mask)


class MatrixMixer:
    """Passes the layer's input and its MHLA cache to `mhla_attention`; a mixin for attention classes with a child `mhla`."""

    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        cache_name, keeps_softmax = find_cache(kwargs), getattr(self.mhla, "heads", None) is not None
        past = kwargs.pop(cache_name) if cache_name is not None else None
        cache = mhla_cache_layer(past, self.layer_idx, keeps_softmax=keeps_softmax)
        added = {"mhla_cache": cache, "mhla_hidden_states": hidden_states}
        output = super().forward(hidden_states, *args, **added, **kwargs)  # type: ignore[misc]
        if cache is not None:
            cache.count(hidden_states)
        return output


class MHLAMixer(MatrixMixer):
    """Adds what only cores that mix by decays need: softmax beside MHLA, and q and k without their rotation.

    `reads_unrotated` says whether MHLA reads q and k as they were before the rotary embedding (`rope="near"`).
    """

    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.reads_unrotated:
            kwargs["mhla_cos_sin"] = rotation_cos_sin(self, kwargs)
        return super().forward(hidden_states, *args, **kwargs)

    def attend_with_softmax(
        self: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: dict[str, Any],
        softmax_options: dict[str, Any],
    ) -> torch.Tensor:
        """Attend by softmax in the heads that keep it and by MHLA in the others; if nothing is far, by softmax in all."""
        heads, cache = getattr(self.mhla, "heads", None), options["cache"]
        if softmax_is_exact(self, query.shape[2], softmax_options["attention_mask"], options):
            if softmax_options["attention_mask"] is not None:
                mask = softmax_options["attention_mask"][..., : key.shape[2]]
                softmax_options = {**softmax_options, "attention_mask": mask}
            o = self.softmax_heads(query, key, value, None, **softmax_options)
            if cache is not None:
                if heads is not None:
                    cache.softmax.update(heads.part(key, True, 1), heads.part(value, True, 1))
                    query, key, value = (heads.part(x, False, 1) for x in (query, key, value))
                tokens = (x.transpose(1, 2) for x in (query, key, value))
                self.mhla.remember(*tokens, cache, options.get("cos_sin"))
            return self.mhla.finish_output(o, options["hidden_states"], value.dtype)
        if heads is None:
            return self.mhla(*(x.transpose(1, 2) for x in (query, key, value)), **options)
        outputs = {}  # by whether heads keep softmax
        if heads.counts[True]:
            parts = [heads.part(x, True, 1) for x in (query, key, value)]
            outputs[True] = self.softmax_heads(*parts, cache, **softmax_options)
        if heads.counts[False]:
            parts = [heads.part(x, False, 1).transpose(1, 2) for x in (query, key, value)]
            outputs[False] = self.mhla(*parts, **options)
        elif self.training and torch.is_grad_enabled():
            # This process would have no gradients of the MHLA parameters, for which the other processes wait.
            got = f"a process that has no MHLA head in layer {self.layer_idx}"
            raise ValueError(f"tp_size: got {got}, expected fewer processes for training.")
        return heads.join(outputs, 2)


def softmax_is_exact(attention: Any, num_tokens: int, attention_mask: Any, options: Mapping[str, Any]) -> bool:
    """Return whether the base's own attention of T new tokens is the result: nothing is far from any of them.

    Eager attention is causal by its mask alone, which a model without softmax layers does not make.
    """
    softmax = getattr(attention, "softmax_heads", None)
    if not (isinstance(softmax, SoftmaxHeads) and hasattr(attention.mhla, "fits_window")):
        return False
    implementation = softmax.config._attn_implementation
    if implementation in (None, ATTENTION_NAME):  # then no layer of the model has softmax
        return False
    # Only a tensor of four axes can be cut to the new tokens, since it may cover a whole static cache.
    fits_mask = getattr(attention_mask, "ndim", 0) == 4 if attention_mask is not None else implementation != "eager"
    if not fits_mask:
        return False
    names = ("cache", "starts", "key_mask", "cu_seqlens")
    return attention.mhla.fits_window(num_tokens, **{name: options[name] for name in names})


def find_causal_attentions(model: nn.Module) -> dict[int, Any]:
    """Return the attention modules of a decoder by layer index."""
    modules: list[Any] = [module for module in model.modules() if isinstance(getattr(module, "layer_idx", None), int)]
    return {module.layer_idx: module for module in modules if is_attention(module)}


def causal_core_sizes(attention: Any, config: Any) -> dict[str, Any]:
    return {**attention_sizes(attention, config), "norm_eps": getattr(config, "rms_norm_eps", 1e-6)}


def finish_causal_layers(model: Any, settings: MHLASettings) -> None:
    attentions = find_causal_attentions(model)
    for attention in (attentions[index] for index in settings.layers):  # type: ignore[index]
        attention.reads_unrotated = settings.rope == "near" and not settings.salient
        if attention.reads_unrotated:
            attention.mhla.unrotate = partial(unrotate, layout=rotation_layout(attention))
        if settings.windowed and any(calls_interface(cls) for cls in type(attention).__mro__):
            attention.softmax_heads = SoftmaxHeads(attention, model.config)
    for index, heads in (settings.softmax_heads or {}).items():
        keep_softmax_heads(attentions[int(index)], model.config, heads)


def keep_softmax_heads(attention: Any, config: Any, heads: Sequence[int]) -> None:
    num_heads = attention.mhla.num_kv_heads
    if max(heads) >= num_heads or len(heads) >= num_heads:
        expected = f"some of 0 to {num_heads - 1}, but not all: leave a layer without MHLA heads out of `layers`"
        raise ValueError(f"softmax_heads: got {list(heads)} for layer {attention.layer_idx}, expected {expected}.")
    attention.mhla.heads = HeadSplit(heads, num_heads)
    attention.softmax_heads = SoftmaxHeads(attention, config)


def pass_padding(
    body: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], names: tuple[str, ...]
) -> tuple[tuple[()], dict[str, Any]]:
    """Add the padding or the borders of packed sequences to the arguments of a model without its head, for its layers.

    `mhla_padding` is a pair: the first real token of each row, int64 [B], and which tokens are real, bool [B, T]. If the
    caller passes no positions, only real tokens count as positions, so that padding does not change the outputs of a row.
    """
    kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
    if not isinstance(pages := kwargs.get("cache"), Cache | None):  # of transformers' continuous batching
        raise ValueError(f"cache: got {type(pages).__name__}, expected a Cache of transformers, which is not paged.")
    inputs = kwargs["input_ids"] if kwargs.get("input_ids") is not None else kwargs.get("inputs_embeds")
    if inputs is None:
        return (), kwargs
    batch, length = inputs.shape[:2]
    mask, cache_name = kwargs.get("attention_mask"), find_cache(kwargs)
    # A static cache counts in a tensor.
    seen = 0 if cache_name is None else kwargs[cache_name].get_seq_length()
    borders = packed_borders(kwargs, batch, seen)
    if borders is not None:
        return (), {**kwargs, **packed_arguments(kwargs, borders, length)}
    if mask is None or "mhla_padding" in kwargs:
        return (), kwargs
    columns = real_columns(mask, batch, length, seen)
    is_real = None if columns is None else new_columns(columns, length, seen)
    if is_real is not None and (torch.compiler.is_compiling() or not bool(is_real.all())):
        starts = torch.where(is_real.any(1), is_real.int().argmax(1), length)
        kwargs["mhla_padding"] = (starts, is_real)
    has_two_axes = isinstance(mask, torch.Tensor) and mask.ndim == 2
    if has_two_axes and kwargs.get("position_ids") is None and (torch.compiler.is_compiling() or not bool(mask.all())):
        kwargs["position_ids"] = new_columns((mask.long().cumsum(-1) - 1).clamp_min(0), length, seen)
    return (), kwargs


def new_columns(mask: torch.Tensor, length: int, seen: Any) -> torch.Tensor:
    """Return the columns [B, T] of a mask [B, S] that belong to the T new tokens, after `seen` in the cache."""
    last = mask.shape[1] - length
    if last == 0:
        return mask
    first = seen.clamp(max=last) if isinstance(seen, torch.Tensor) else torch.sym_min(seen, last)
    return mask[:, first + torch.arange(length, device=mask.device)]


def real_columns(mask: Any, batch: int, length: int, seen: Any) -> torch.Tensor | None:
    """Return which tokens, in the cache or new, are not padding, bool [B, S]; None without a mask for full attention.

    The mask is [B, S], a causal mask [B, 1, T, S], or a dictionary of these by the type of layer.
    """
    # Sliding layers are not converted.
    mask = mask["full_attention"] if isinstance(mask, dict) else mask
    if mask is None:
        return None
    if mask.ndim == 2 and mask.shape[0] == batch and mask.shape[1] >= length:
        return mask.bool()
    if mask.ndim == 4 and (torch.compiler.is_compiling() or mask.shape[-1] >= seen + length):
        allowed = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] == 0
        if length > 1:
            check_only_padding(allowed[..., : seen + length], seen)
        return allowed.any(1).expand(batch, -1)
    expected = f"[{batch}, at least {length}] or a causal [{batch}, 1, {length}, S]"
    raise ValueError(f"attention_mask: got shape {tuple(mask.shape)} for {length} new tokens, expected {expected}.")


@torch.compiler.disable(reason="attention_mask came with four axes, checked by value, expected [batch, length].")
def check_only_padding(allowed: torch.Tensor, seen: int) -> None:
    """Raise ValueError if a mask, bool [B, T, S], hides more than the future and padding: MHLA can hide nothing else."""
    real = allowed.any(1)
    causal = torch.ones_like(allowed).tril(int(seen)) & real[:, None]
    # Rows of padded queries do not matter.
    if bool(((causal != allowed) & real[:, seen:, None]).any()):
        expected = "[batch, length], or packed sequences by position_ids or cu_seq_lens_q in a batch of 1"
        got = "four axes that hide more than padding and the future"
        raise ValueError(f"attention_mask: got {got}, expected {expected}.")


def packed_borders(kwargs: dict[str, Any], batch: int, seen: Any) -> torch.Tensor | None:
    """Return the borders, int [N + 1], of N sequences that are packed into one row; None if nothing is packed."""
    if kwargs.get("cu_seq_lens_q") is not None:
        return kwargs["cu_seq_lens_q"]
    if kwargs.get("seq_idx") is not None:
        return find_borders(kwargs["seq_idx"], 0, batch)
    position_ids = kwargs.get("position_ids")
    if position_ids is None or position_ids.ndim != 2 or position_ids.shape[1] == 1:
        return None
    if kwargs.get("attention_mask") is not None or seen:
        return None
    return find_borders(position_ids, 1, batch)


@torch.compiler.disable(reason="position_ids or seq_idx are read by value, expected cu_seq_lens_q with them.")
def find_borders(ids: torch.Tensor, step: int, batch: int) -> torch.Tensor | None:
    """Return the borders of packed sequences, int32 [N + 1], from 0 to T; None for a single sequence.

    A sequence begins where an id is not the previous one plus `step`: 1 for positions, 0 for indices of sequences.
    """
    is_border = ids.diff() != step
    if not bool(is_border.any()):
        return None
    if batch != 1:
        raise ValueError(f"position_ids or seq_idx: got sequences packed in a batch of {batch}, expected a batch of 1.")
    inner = is_border[0].nonzero()[:, 0] + 1
    return torch.cat([inner.new_tensor([0]), inner, inner.new_tensor([ids.shape[1]])]).to(torch.int32)


def packed_arguments(kwargs: dict[str, Any], borders: torch.Tensor, length: int) -> dict[str, Any]:
    """Return the arguments for packed sequences: borders, positions that restart in each sequence, and no cache."""
    for name in ("attention_mask", find_cache(kwargs), "use_cache"):
        if name is not None and kwargs.get(name) is not None and kwargs[name] is not False:
            got = "True" if kwargs[name] is True else type(kwargs[name]).__name__
            raise ValueError(
                f"{name}: got {got} with packed sequences, which have no padding and no cache, expected None."
            )
    token, edges = torch.arange(length, device=borders.device), borders.long()
    position_ids = kwargs.get("position_ids")
    if position_ids is None:
        position_ids = (token - edges[torch.searchsorted(edges, token, right=True) - 1])[None]
    return {"cu_seq_lens_q": borders, "position_ids": position_ids, "use_cache": False}


# `models/converted.py` adds the cores.
MATRIX_SWAP = AttentionSwap(
    function_name=ATTENTION_NAME,
    mixin=MatrixMixer,
    find_attentions=find_causal_attentions,
    core_sizes=causal_core_sizes,
    prepare=pass_padding,
)
CAUSAL_SWAP = replace(MATRIX_SWAP, mixin=MHLAMixer, finish=finish_causal_layers)
