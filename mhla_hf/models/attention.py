"""How an MHLA core takes the place of softmax inside a transformers attention module, unchanged around it.

The base module keeps its projections, its norms on q and k and its RoPE, and calls "the attention function" as for any
other implementation; the function is ours (`mhla_attention`), chosen by a private copy of the configuration in that one
module. What the base does not hand on (the padding of the batch, the cache, the layer's input) travels as keyword
arguments: `mhla_padding` (see `pass_padding`), `mhla_cache`, `mhla_hidden_states`, `mhla_angles`, and `mhla_rotate` from
scratch. Heads that keep softmax go to the base's own attention function (`SoftmaxHeads`).
"""

import sys
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from ..nn.heads import HeadSplit
from ..nn.settings import MHLASettings
from ..ops.namespace import NAMESPACE
from .cache import mhla_cache_layer
from .overlay import attention_sizes, calls_interface, overlay_class, prepare_inner_body, swap_attention
from .rotation import rotation_angles, rotation_layout, unrotate
from .transformers_api import check_cache_arrived, find_cache, refuse_paged_cache, set_attention_function

ATTENTION_NAME = f"mhla_{NAMESPACE}"
SOFTMAX_ONLY = ("softcap", "s_aux", "sliding_window", "position_bias")  # other attention functions obey them


def mhla_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    """The attention function of MHLA layers: q, k, v as transformers gives them, `[B, H, T, K]`; o is `[B, T, H, V]`.

    `dropout` belongs to softmax and has no meaning here; `attention_mask` is not read: `mhla_padding` says the same without
    T x T numbers.
    """
    check_cache_arrived(query.shape[2], key.shape[2], kwargs)
    for name in SOFTMAX_ONLY:
        if kwargs.get(name) is not None:
            raise ValueError(f"{name}: it came for an MHLA layer, which cannot do it; expected None.")
    if kwargs.get("is_causal") is False:
        raise ValueError("is_causal: got False for an MHLA layer of a language model, expected True or None.")
    starts, key_mask = kwargs.get("mhla_padding") or (None, None)
    cache = kwargs.get("mhla_cache")
    options = {"hidden_states": kwargs.get("mhla_hidden_states"), "cache": cache, "scale": scaling}
    options |= {name: kwargs[f"mhla_{name}"] for name in ("rotate", "angles") if f"mhla_{name}" in kwargs}
    options |= {"starts": starts, "key_mask": key_mask}
    options["cu_seqlens"] = kwargs.get("cu_seq_lens_q") if cache is None else None
    heads = getattr(module.mhla, "heads", None)
    if heads is None:
        o = module.mhla(*(x.transpose(1, 2) for x in (query, key, value)), **options)
        return o.contiguous(), None  # as some bases view it
    outputs = {}
    if heads.counts[True]:
        parts = [heads.part(x, True, 1) for x in (query, key, value)]
        others = {name: value for name, value in kwargs.items() if not name.startswith("mhla_")}
        outputs[True] = module.softmax_heads(*parts, attention_mask, cache, scaling, dropout, **others)
    if heads.counts[False]:
        parts = [heads.part(x, False, 1).transpose(1, 2) for x in (query, key, value)]
        outputs[False] = module.mhla(*parts, **options)
    elif module.training and torch.is_grad_enabled():  # optimizers of several processes wait for each other's gradients
        what = "expected fewer processes for training, so that each has an MHLA head in every layer"
        raise ValueError(f"tp_size: got a process with softmax heads alone in layer {module.layer_idx}, {what}.")
    return heads.join(outputs, 2), None


class SoftmaxHeads(nn.Module):
    """The heads of an MHLA layer that keep softmax: they go to the attention function that the model's configuration names.

    It stands where that function expects an attention module, of which it has what such functions read.

    Args:
        attention: the attention module of transformers.
        config: the model's configuration, which users change, not the module's own.
    """

    def __init__(self, attention: nn.Module, config):
        super().__init__()
        self.config = config
        self.layer_idx = attention.layer_idx
        self.is_causal = True
        self.sinks = None  # layers that have some are not converted
        self.num_key_value_groups = getattr(attention, "num_key_value_groups", 1)
        base = next(cls for cls in type(attention).__mro__ if calls_interface(cls))
        self.eager = sys.modules[base.__module__].eager_attention_forward  # every modeling file has its own

    def forward(self, query, key, value, attention_mask, cache, scaling, dropout, **kwargs) -> torch.Tensor:
        """Attend.

        Args:
            query: `[B, H, T, K]`. key, value: `[B, G, T, K]`, of the same heads.
            attention_mask: as the base's attention function takes it.
            cache: the `MHLACacheLayer` of the layer, which holds the keys and values before these; or None.
            scaling, dropout, kwargs: as the base hands them to its attention function.

        Returns:
            `[B, T, H, K]`.
        """
        if cache is not None:
            key, value = cache.softmax.update(key, value)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, self.eager)
        return attend(self, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)[0]


def padding_mask(*args, q_length, q_offset=0, attention_mask: torch.Tensor | None = None, **kwargs):
    """The mask of a model without softmax layers: which new tokens are padding `[B, T]`, never T x T numbers.

    So long and no longer, or each compiled step of `generate` would see another shape.
    """
    return None if attention_mask is None else new_columns(attention_mask, q_length, q_offset)


AttentionInterface.register(ATTENTION_NAME, mhla_attention)
AttentionMaskInterface.register(ATTENTION_NAME, padding_mask)


class MHLAMixer:
    """Mixed into a transformers attention class; the module has a child `mhla` (`MHLA`)."""

    def forward(self, hidden_states: torch.Tensor, *args, **kwargs):
        """As the base, with the layer's own cache in place of keys and values, whatever the base calls the cache."""
        name, mixed = find_cache(kwargs), hasattr(self, "softmax_heads")
        cache = mhla_cache_layer(kwargs.pop(name), self.layer_idx, mixed) if name is not None else None
        added = {"mhla_cache": cache, "mhla_hidden_states": hidden_states}
        if self.reads_unrotated:
            added["mhla_angles"] = rotation_angles(self, kwargs)
        output = super().forward(hidden_states, *args, **added, **kwargs)
        if cache is not None:
            cache.count(hidden_states)
        return output


def softmax_attentions(model: nn.Module) -> dict[int, nn.Module]:
    """The attention modules of a decoder, by layer index: those that call transformers' attention interface, and MHLA's."""
    found = [module for module in model.modules() if isinstance(getattr(module, "layer_idx", None), int)]
    return {module.layer_idx: module for module in found if hasattr(module, "mhla") or calls_interface(type(module))}


def install_mhla(model: nn.Module, settings: MHLASettings, core_class: type[nn.Module]) -> None:
    """Turn the attention modules that `settings.layers` lists into MHLA, in place; `model` is a body, or a head on one.

    core_class: `MHLA` or `DecayMHLA`, made once for each of these modules.
    """
    config = model.config
    attentions = softmax_attentions(model)
    chosen, kept = settings.resolve_layers(config.num_hidden_layers), settings.softmax_heads or {}
    widths = {"hidden_size": config.hidden_size, "norm_eps": getattr(config, "rms_norm_eps", 1e-6)}
    for index in chosen:
        attention = attentions[index]
        core = core_class(settings, **attention_sizes(attention, config), **widths)
        mixed = overlay_class(type(attention), MHLAMixer, "models.converted")
        attention.reads_unrotated = settings.rope == "near"
        if attention.reads_unrotated:
            core.unrotate = partial(unrotate, layout=rotation_layout(attention))
        swap_attention(attention, mixed, core, ATTENTION_NAME)
        if str(index) in kept:
            keep_softmax_heads(attention, config, kept[str(index)])
    if set(chosen) == set(attentions) and not kept:  # a base may have layers without attention
        set_attention_function(config, ATTENTION_NAME)
    prepare_inner_body(model, pass_padding)


def keep_softmax_heads(attention: nn.Module, config, heads: Sequence[int]) -> None:
    """Give KV heads of an MHLA attention module their softmax back, in place.

    Args:
        attention: the module.
        config: the model's configuration.
        heads: indices of KV heads, not all of the module's.

    Raises:
        ValueError: there are no such heads, or they are all.
    """
    count = attention.mhla.num_kv_heads
    if max(heads) >= count or len(heads) >= count:
        what = f"expected some of 0 to {count - 1}, fewer than all: a layer without MHLA heads is not in `layers`"
        raise ValueError(f"softmax_heads: got {list(heads)} for layer {attention.layer_idx}, {what}.")
    attention.mhla.heads = HeadSplit(heads, count)
    attention.softmax_heads = SoftmaxHeads(attention, config)


def pass_padding(body: nn.Module, args: tuple, kwargs: dict, names: tuple):
    """Before a body runs, whose forward takes `names`: say which tokens are padding, or where packed sequences begin, to the
    layers below.

    Adds `mhla_padding`, a pair (first real token of each row `[B]`, real tokens `[B, T]`), or `cu_seq_lens_q`; and counts
    positions from the first real token where the caller gave none, so that a padded row equals the row alone.
    """
    kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
    refuse_paged_cache(kwargs)
    inputs = kwargs.get("input_ids")
    inputs = inputs if inputs is not None else kwargs.get("inputs_embeds")
    if inputs is None:
        return (), kwargs
    batch, length = inputs.shape[:2]
    mask, past = kwargs.get("attention_mask"), kwargs.get(find_cache(kwargs))
    seen = past.get_seq_length() if past is not None else 0  # a tensor in a static cache
    borders = packed_borders(kwargs, batch, seen)
    if borders is not None:
        return (), {**kwargs, **packed_arguments(kwargs, borders, length)}
    if mask is None or "mhla_padding" in kwargs:
        return (), kwargs
    columns = real_columns(mask, batch, length, seen)
    real = None if columns is None else new_columns(columns, length, seen)
    if real is not None and (torch.compiler.is_compiling() or not bool(real.all())):
        starts = torch.where(real.any(1), real.int().argmax(1), length)
        kwargs["mhla_padding"] = (starts, real)
    two_axes = isinstance(mask, torch.Tensor) and mask.ndim == 2
    if two_axes and kwargs.get("position_ids") is None and (torch.compiler.is_compiling() or not bool(mask.all())):
        kwargs["position_ids"] = new_columns((mask.long().cumsum(-1) - 1).clamp_min(0), length, seen)
    return (), kwargs


def first_new_column(mask: torch.Tensor, length: int, seen):
    """The first of `length` new columns of `[B, S]`: number `seen`, or the last ones of a shorter mask."""
    last = mask.shape[1] - length
    return seen.clamp(max=last) if isinstance(seen, torch.Tensor) else torch.sym_min(seen, last)


def new_columns(mask: torch.Tensor, length: int, seen) -> torch.Tensor:
    """What `[B, S]` says of the new tokens `[B, T]`."""
    if mask.shape[1] == length:
        return mask
    return mask[:, first_new_column(mask, length, seen) + torch.arange(length, device=mask.device)]


def real_columns(mask, batch: int, length: int, seen: int) -> torch.Tensor | None:
    """Which tokens are real, old and new, bool `[B, S]`, from a mask `[B, S]` or a causal one `[B, 1, T, S]`."""
    if isinstance(mask, dict):
        mask = mask["full_attention"]  # MHLA layers were no sliding ones
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
    """One sentence if a mask `[B, T, S]` says more than "causal, without these padded tokens", which MHLA would not see."""
    real = allowed.any(1)
    wanted = torch.ones_like(allowed).tril(int(seen)) & real[:, None]
    if bool(((wanted != allowed) & real[:, seen:, None]).any()):
        what = "expected [batch, length], or packed sequences by position_ids or cu_seq_lens_q in a batch of 1"
        raise ValueError(f"attention_mask: got four axes that hide more than padding and the future; {what}.")


def packed_borders(kwargs: dict, batch: int, seen: int) -> torch.Tensor | None:
    """Borders of the sequences packed into one row, int `[N + 1]`, if there are several."""
    if kwargs.get("cu_seq_lens_q") is not None:
        return kwargs["cu_seq_lens_q"]
    if kwargs.get("seq_idx") is not None:
        return find_borders(kwargs["seq_idx"], 0, batch)
    position_ids = kwargs.get("position_ids")
    if position_ids is None or position_ids.ndim != 2 or position_ids.shape[1] == 1:  # one token is one sequence
        return None
    if kwargs.get("attention_mask") is not None or seen:
        return None
    return find_borders(position_ids, 1, batch)


@torch.compiler.disable(reason="position_ids or seq_idx are read by value, expected cu_seq_lens_q beside them.")
def find_borders(ids: torch.Tensor, step: int, batch: int) -> torch.Tensor | None:
    """Borders int32 `[N + 1]` where ids `[1, T]` do not go on by `step`; None if they always do."""
    new = ids.diff() != step
    if not bool(new.any()):
        return None
    if batch != 1:
        raise ValueError(f"position_ids or seq_idx: got sequences packed in a batch of {batch}, expected a batch of 1.")
    inner = new[0].nonzero()[:, 0] + 1
    return torch.cat([inner.new_tensor([0]), inner, inner.new_tensor([ids.shape[1]])]).to(torch.int32)


def packed_arguments(kwargs: dict, borders: torch.Tensor, length: int) -> dict:
    """What a body gets of packed sequences: their borders, positions that start anew in each, and no cache."""
    for name in ("attention_mask", find_cache(kwargs), "use_cache"):
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise ValueError(f"{name}: it came with packed sequences, expected none: they have no padding, no cache.")
    token, edges = torch.arange(length, device=borders.device), borders.long()
    position_ids = kwargs.get("position_ids")
    if position_ids is None:
        position_ids = (token - edges[torch.searchsorted(edges, token, right=True) - 1])[None]
    return {"cu_seq_lens_q": borders, "position_ids": position_ids, "use_cache": False}
