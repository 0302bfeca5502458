"""Converted language models inside vLLM: its Transformers backend, with MHLA where `config.mhla` says so."""

from collections.abc import Collection
from dataclasses import replace
from functools import cached_property
from math import gcd
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
from vllm.model_executor.models.transformers import TransformersForCausalLM, TransformersMoEForCausalLM

from ..models.derived_classes import swap_attention
from ..models.language.causal_attention import ATTENTION_NAME, SoftmaxMixer, causal_core_sizes
from ..models.transformers_api import set_attention_function
from ..nn.heads import HeadSplit
from ..nn.settings import FOREIGN_ENTRIES, MHLASettings
from .layers import BatchPlan, PagedMHLA, PagedSoftmax, SplitSoftmax
from .pages import PageLayout

# Keys of a converted configuration that its base does not have.
ADDED_KEYS = ("mhla", "mhla_measured", *FOREIGN_ENTRIES, "auto_map", "model_type", "architectures")


class MHLAServing:
    """Mixin that puts MHLA into a model of vLLM's Transformers backend; must be the first base of a class."""

    # What vLLM's protocols `HasInnerState` and `IsHybrid` demand; inheriting from a protocol would break `__init__`.
    has_inner_state = True
    is_hybrid = True

    @cached_property
    def _from_config_kwargs(self: Any) -> dict[str, Any]:
        """The backend's arguments for building the model of transformers: its configuration is the base's, without MHLA."""
        options: dict[str, Any] = super()._from_config_kwargs  # type: ignore[misc]
        config = base_config(self.config)
        set_attention_function(config, self.text_config._attn_implementation)
        config.dtype = self.config.dtype
        return {**options, "config": config}

    def _create_attention_instances(self: Any, prefix: str = "") -> None:
        """Create vLLM's attention; replace it in MHLA layers; split others into groups of KV heads that fill a page."""
        super()._create_attention_instances(prefix)  # type: ignore[misc]
        config = self._from_config_kwargs["config"]
        settings = MHLASettings.from_dict(self.config.mhla)
        num_kv_heads = self.model_config.get_num_kv_heads(self.parallel_config)
        size, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        splits = {
            layer: [HeadSplit(heads, num_kv_heads * size).of_rank(index, size) for index in range(size)]
            for layer, heads in (settings.softmax_heads or {}).items()
        }
        # All pages have one size, so the heads per page must divide the numbers of softmax heads of every layer and process.
        counts = [split.counts[True] for parts in splits.values() for split in parts]
        heads_per_page = gcd(num_kv_heads, *counts)
        plan = BatchPlan()
        for index, (attention_name, fuser) in self.attention_fusers.items():
            attention = self.get_submodule(attention_name)
            base = attention.attn
            scale = fuser.scale(attention) or base.head_size**-0.5
            options = {
                "head_size": base.head_size,
                "scale": scale,
                "cache_config": self.cache_config,
                "quant_config": self.quant_config,
                "logits_soft_cap": getattr(config, "attn_logit_softcapping", None),
            }
            context, name = self.compilation_config.static_forward_context, base.layer_name
            queries_per_kv = base.num_heads // base.num_kv_heads
            kept = splits[str(index)][rank].softmax_heads if str(index) in splits else []
            if index in settings.layers and len(kept) < num_kv_heads:
                del context[name], attention.attn
                sizes = {"num_heads": num_kv_heads * queries_per_kv, "num_kv_heads": num_kv_heads}
                core = PagedMHLA(settings, **{**causal_core_sizes(attention, config), **sizes})
                core.options = replace(core.options, scale=scale)
                put_mhla(attention, core, kept)
                core.install(name, heads_per_page, plan, self.vllm_config)
                if kept:
                    attention.softmax_heads = PagedSoftmax(name, len(kept), heads_per_page, queries_per_kv, **options)
            elif num_kv_heads > heads_per_page:
                if base.sliding_window is not None:
                    options["per_layer_sliding_window"] = base.sliding_window
                del context[name]
                attention.attn = SplitSoftmax(name, num_kv_heads, heads_per_page, queries_per_kv, **options)

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the state of all KV heads of a layer, by which vLLM chooses the size of pages."""
        return layer_layout(vllm_config).shapes

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        return layer_layout(vllm_config).dtypes

    @classmethod
    def get_mamba_state_copy_funcs(cls, kinds: Collection[str]) -> dict[str, tuple[Any, ...]]:
        """Return {kind: (function,)} by which vLLM finds the bytes to copy if requests share a prefix: a page is one row."""
        return dict.fromkeys(kinds, (get_temporal_copy_spec,))


class MHLAForCausalLM(MHLAServing, TransformersForCausalLM):
    """Serves converted language models without experts."""


class MHLAMoEForCausalLM(MHLAServing, TransformersMoEForCausalLM):
    """Serves converted language models with experts."""


def base_config(config: Any) -> Any:
    """Return the base's configuration, with the original type of the layers that are marked as linear in `config`."""
    values = {name: value for name, value in config.to_dict().items() if name not in ADDED_KEYS}
    if values.get("layer_types") is not None:  # only layers of full attention are converted
        layers, types = config.mhla["layers"], enumerate(values["layer_types"])
        values["layer_types"] = ["full_attention" if index in layers else kind for index, kind in types]
    base: Any = type(config).__bases__[1]
    return base.from_dict(values)


def put_mhla(attention: Any, core: PagedMHLA, kept: list[int]) -> None:
    """Turn an attention module, whose `forward` vLLM may have rewritten, into MHLA; the KV heads `kept` keep softmax."""
    base = type(attention)
    rewritten = attention.__dict__.pop("forward", None)
    if rewritten is not None:
        base = type(base.__name__, (base,), {"forward": rewritten.__func__})
    swap_attention(attention, type(f"MHLA{base.__name__}", (SoftmaxMixer, base), {}), core, ATTENTION_NAME)
    core.heads = HeadSplit(kept, core.num_kv_heads) if kept else None


def layer_layout(vllm_config: VllmConfig) -> PageLayout:
    """Return the layout of the state of all KV heads of a layer, from configurations alone."""
    model_config = vllm_config.model_config
    settings = MHLASettings.from_dict(model_config.hf_config.mhla)
    num_kv_heads = model_config.get_num_kv_heads(vllm_config.parallel_config)
    return PageLayout.of(settings, num_kv_heads, model_config.get_head_size(), model_config.dtype)
