"""Replaces softmax attention with an MHLA core in the attention modules of transformers' language models.

The base keeps its projections, norms, and RoPE, and calls an attention function: ours, `mhla_attention`, in converted
modules. What the base itself does not pass to it, such as `mhla_padding` (see `pass_padding`) and `mhla_cache`, goes through
the base as keyword arguments. Heads that keep softmax go to the base's own attention function (`SoftmaxHeads`).
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from ...nn.heads import HeadSplit
from ...nn.settings import MHLASettings
from ...ops.namespace import NAMESPACE
from ..derived_classes import AttentionSwap, attention_sizes, calls_interface, is_attention
from ..transformers_api import check_cache_arrived, find_cache
from .cache import take_cache_layer

ATTENTION_NAME = f"mhla_{NAMESPACE}"
# Arguments with which other attention functions compute something that MHLA cannot.
SOFTMAX_ONLY = ("softcap", "s_aux", "sliding_window", "position_bias")


def mhla_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Compute the attention of an MHLA layer, [B, H, T, K] -> [B, T, H, V], as an attention function of transformers."""
    check_cache_arrived(query.shape[2], key.shape[2], kwargs)
    for name in SOFTMAX_ONLY:
        if (argument := kwargs.get(name)) is not None:
            raise ValueError(f"{name}: got {type(argument).__name__} in an MHLA layer, expected None.")
    if kwargs.get("is_causal") is False:
        raise ValueError("is_causal: got False for an MHLA layer of a language model, expected True or None.")
    starts, key_mask = kwargs.get("mhla_padding") or (None, None)  # `attention_mask` is for heads that keep softmax
    options = {
        "hidden_states": kwargs.get("mhla_hidden_states"),
        "cache": kwargs.get("mhla_cache"),
        "scale": kwargs.get("scaling"),
        "starts": starts,
        "key_mask": key_mask,
        "cu_seqlens": kwargs.get("cu_seq_lens_q"),
    }
    if "mhla_rotate" in kwargs:  # of a model from scratch
        options["rotate"] = kwargs["mhla_rotate"]
    if not hasattr(module, "attend_with_softmax"):
        o = module.mhla(*(x.transpose(1, 2) for x in (query, key, value)), **options)
    else:
        softmax_options = {name: x for name, x in kwargs.items() if not name.startswith("mhla_")}
        o = module.attend_with_softmax(query, key, value, attention_mask, options, softmax_options)
    return o.contiguous(), None  # some bases call `view` on it


class SoftmaxHeads(nn.Module):
    """Computes softmax by the model's attention function, to which it is passed in place of the attention module."""

    def __init__(self, attention: Any, config: Any):
        super().__init__()
        self.config = config  # the model's, which `set_attn_implementation` changes; that of `attention` selects MHLA
        self.layer_idx = attention.layer_idx
        self.is_causal = True
        self.sinks = None  # layers with learned sinks are not converted
        self.num_key_value_groups = getattr(attention, "num_key_value_groups", 1)
        base = next(cls for cls in type(attention).__mro__ if calls_interface(cls))
        self.eager = sys.modules[base.__module__].eager_attention_forward

    def forward(self, query: Tensor, key: Tensor, value: Tensor, cache: Any, **options: Any) -> Tensor:
        """Return softmax attention [B, T, H, V]. With a cache, append keys and values to `cache.softmax`, and read all."""
        if cache is not None:
            key, value = cache.softmax.update(key, value)
        return self.selected_function()(self, query, key, value, **options)[0]

    def selected_function(self) -> Callable[..., Any]:
        """Return the model's attention function. If `forward` looked it up, `is_attention` would be true of this class."""
        return ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, self.eager)


def padding_mask(
    *args: Any, q_length: int, q_offset: Any = 0, attention_mask: Tensor | None = None, **kwargs: Any
) -> Tensor | None:
    """Return the columns of a mask [B, S] for the new tokens, [B, T], so that all compiled steps see one shape."""
    return None if attention_mask is None else new_columns(attention_mask, q_length, q_offset)


AttentionInterface.register(ATTENTION_NAME, mhla_attention)
AttentionMaskInterface.register(ATTENTION_NAME, padding_mask)


class MatrixMixer:
    """Passes the layer's input and its cache to `mhla_attention`; a mixin for attention classes with a child `mhla`."""

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        keeps_softmax = getattr(self.mhla, "heads", None) is not None
        cache = take_cache_layer(kwargs, self.layer_idx, keeps_softmax)
        added = {"mhla_cache": cache, "mhla_hidden_states": hidden_states}
        output = super().forward(hidden_states, *args, **added, **kwargs)  # type: ignore[misc]
        if cache is not None:
            cache.count(hidden_states)
        return output


class SoftmaxMixer(MatrixMixer):
    """Mixin of windowed layers: softmax heads call the base's attention, and so do all heads while no token is dropped."""

    def attend_with_softmax(
        self: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: dict[str, Any],
        softmax_options: dict[str, Any],
    ) -> Tensor:  # fmt: skip
        """Attend by softmax in the heads that keep it and by MHLA in the others; by softmax in all if `softmax_is_exact`.

        Shapes are those of `mhla_attention`. `options` go to the MHLA core, `softmax_options` to the attention function.
        """
        heads, cache = getattr(self.mhla, "heads", None), options["cache"]
        if softmax_is_exact(self, query.shape[2], mask, options):
            mask = None if mask is None else mask[..., : key.shape[2]]
            o = self.softmax_heads(query, key, value, None, attention_mask=mask, **softmax_options)
            if cache is not None:
                if heads is not None:
                    cache.softmax.update(heads.part(key, True, 1), heads.part(value, True, 1))
                    query, key, value = (heads.part(x, False, 1) for x in (query, key, value))
                tokens = (x.transpose(1, 2) for x in (query, key, value))
                self.mhla.remember(*tokens, cache)
            return o.to(value.dtype)
        if heads is None:
            return self.mhla(*(x.transpose(1, 2) for x in (query, key, value)), **options)
        outputs = {}  # by whether heads keep softmax
        if heads.counts[True]:
            parts = [heads.part(x, True, 1) for x in (query, key, value)]
            outputs[True] = self.softmax_heads(*parts, cache, attention_mask=mask, **softmax_options)
        if heads.counts[False]:
            parts = [heads.part(x, False, 1).transpose(1, 2) for x in (query, key, value)]
            outputs[False] = self.mhla(*parts, **options)
        return heads.join(outputs, 2)


def softmax_is_exact(attention: Any, num_tokens: int, attention_mask: Any, options: Mapping[str, Any]) -> bool:
    """Return whether the base's attention may compute all heads of a call: MHLA surely drops no token of it yet."""
    softmax, core = getattr(attention, "softmax_heads", None), attention.mhla
    if not isinstance(softmax, SoftmaxHeads) or torch.compiler.is_compiling():  # vLLM has another class
        return False
    if not hasattr(core, "options"):  # what replaces a core for a measurement has none
        return False
    implementation, cache = softmax.config._attn_implementation, options["cache"]
    if implementation in (None, ATTENTION_NAME):  # then no layer of the model has softmax
        return False
    if attention_mask is None and implementation == "eager":  # which is causal by its mask alone
        return False
    if attention_mask is not None and getattr(attention_mask, "ndim", 0) != 4:  # cannot be cut to the keys
        return False
    if any(options[name] is not None for name in ("starts", "key_mask", "cu_seqlens")):
        return False
    if cache is not None and cache.state is not None:
        return False
    return num_tokens <= core.options.tokens_before_drop


def find_causal_attentions(model: nn.Module) -> dict[int, Any]:
    modules: list[Any] = [module for module in model.modules() if isinstance(getattr(module, "layer_idx", None), int)]
    return {module.layer_idx: module for module in modules if is_attention(module)}


def causal_core_sizes(attention: Any, config: Any) -> dict[str, Any]:
    return {**attention_sizes(attention, config), "norm_eps": getattr(config, "rms_norm_eps", 1e-6)}


def add_softmax(model: Any, settings: MHLASettings) -> None:
    attentions = find_causal_attentions(model)
    for attention in (attentions[index] for index in settings.layers):  # type: ignore[index]
        if settings.windowed:
            attention.softmax_heads = SoftmaxHeads(attention, model.config)
    for index, heads in (settings.softmax_heads or {}).items():
        keep_softmax_heads(attentions[int(index)], heads)


def keep_softmax_heads(attention: Any, heads: Sequence[int]) -> None:
    num_heads = attention.mhla.num_kv_heads
    if max(heads) >= num_heads or len(heads) >= num_heads:
        expected = f"some, but not all, of 0 to {num_heads - 1}; to keep all, leave the layer out of `layers`"
        raise ValueError(f"softmax_heads: got {list(heads)} for layer {attention.layer_idx}, expected {expected}.")
    attention.mhla.heads = HeadSplit(heads, num_heads)


def pass_padding(
    body: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], names: tuple[str, ...]
) -> tuple[tuple[()], dict[str, Any]]:
    """Return the arguments of a headless model's forward, and add what its layers need for padding or packed sequences.

    `mhla_padding` has the index of each row's first real token, int64 [B], and a mask of real ones [B, T]. Positions, unless
    the caller passes them, count only real tokens, so that padding does not change outputs.
    """
    kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
    if not isinstance(pages := kwargs.get("cache"), Cache | None):  # of transformers' continuous batching
        got = f"{type(pages).__name__}, of continuous batching"
        raise ValueError(f"cache: got {got}, expected a Cache; call generate(), or serve the model with vLLM.")
    inputs = kwargs["input_ids"] if kwargs.get("input_ids") is not None else kwargs.get("inputs_embeds")
    if inputs is None:
        return (), kwargs
    batch, length = inputs.shape[:2]
    mask, cache_name = kwargs.get("attention_mask"), find_cache(kwargs)
    seen = 0 if cache_name is None else kwargs[cache_name].get_seq_length()
    borders = packed_borders(kwargs, batch, seen)
    if borders is not None:
        return (), {**kwargs, **packed_arguments(kwargs, borders, length)}
    mask = mask["full_attention"] if isinstance(mask, dict) else mask  # sliding layers are not converted
    if mask is None or "mhla_padding" in kwargs:
        return (), kwargs
    compiles = torch.compiler.is_compiling()
    is_real = new_columns(real_columns(mask, batch, length, seen), length, seen)
    if compiles or not bool(is_real.all()):
        starts = torch.where(is_real.any(1), is_real.int().argmax(1), length)
        kwargs["mhla_padding"] = (starts, is_real)
    if mask.ndim == 2 and kwargs.get("position_ids") is None and (compiles or not bool(mask.all())):
        kwargs["position_ids"] = new_columns((mask.long().cumsum(-1) - 1).clamp_min(0), length, seen)
    return (), kwargs


def new_columns(mask: Tensor, length: int, seen: Any) -> Tensor:
    """Return the columns [B, T] of a mask [B, S] that belong to the T new tokens, after `seen` in the cache."""
    last = mask.shape[1] - length
    if last == 0:
        return mask
    first = seen.clamp(max=last) if isinstance(seen, Tensor) else torch.sym_min(seen, last)
    return mask[:, first + torch.arange(length, device=mask.device)]


def real_columns(mask: Tensor, batch: int, length: int, seen: Any) -> Tensor:
    """Return which tokens are not padding, bool [B, S], by a mask [B, S] or [B, 1, T, S]."""
    if mask.ndim == 2 and mask.shape[0] == batch and mask.shape[1] >= length:
        return mask.bool()
    if mask.ndim == 4 and (torch.compiler.is_compiling() or mask.shape[-1] >= seen + length):
        allowed = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] == 0
        if length > 1:
            check_only_padding(allowed[..., : seen + length], seen)
        return allowed.any(1).expand(batch, -1)
    expected = f"[{batch}, at least {length}] or a causal [{batch}, 1, {length}, S]"
    raise ValueError(f"attention_mask: got shape {tuple(mask.shape)} for {length} new tokens, expected {expected}.")


@torch.compiler.disable(reason="attention_mask: got a 4-D mask, which is read by value, expected [batch, length].")
def check_only_padding(allowed: Tensor, seen: int) -> None:
    """Raise ValueError if a mask, bool [B, T, S], hides more than the future and padding: MHLA can hide nothing else."""
    real = allowed.any(1)
    causal = torch.ones_like(allowed).tril(int(seen)) & real[:, None]
    # Rows of padded queries do not matter.
    if bool(((causal != allowed) & real[:, seen:, None]).any()):
        got = "a 4-D mask that hides more than padding and the future"
        expected = "a mask [batch, length], or packed sequences by position_ids or cu_seq_lens_q in a batch of 1"
        raise ValueError(f"attention_mask: got {got}, expected {expected}.")


def packed_borders(kwargs: dict[str, Any], batch: int, seen: Any) -> Tensor | None:
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
def find_borders(ids: Tensor, step: int, batch: int) -> Tensor | None:
    """Return the borders of N packed sequences, int32 [N + 1]: where ids do not grow by `step`; None if N is 1."""
    is_border = ids.diff() != step
    if not bool(is_border.any()):
        return None
    if batch != 1:
        raise ValueError(f"position_ids or seq_idx: got sequences packed in a batch of {batch}, expected a batch of 1.")
    inner = is_border[0].nonzero()[:, 0] + 1
    return torch.cat([inner.new_tensor([0]), inner, inner.new_tensor([ids.shape[1]])]).to(torch.int32)


def packed_arguments(kwargs: dict[str, Any], borders: Tensor, length: int) -> dict[str, Any]:
    """Return the arguments for packed sequences: borders, positions that restart in each sequence, and no cache."""
    for name in ("attention_mask", find_cache(kwargs), "use_cache"):
        value = kwargs.get(name) if name is not None else None
        if value is not None and value is not False:
            got = f"{'True' if value is True else type(value).__name__} with packed sequences"
            raise ValueError(f"{name}: got {got}, which have no padding and no cache, expected None.")
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
WINDOWED_SWAP = replace(MATRIX_SWAP, mixin=SoftmaxMixer, finish=add_softmax)
