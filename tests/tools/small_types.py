"""Tiny causal language models with random weights, of every model type that converts."""

import inspect

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mhla_hf.models.derived_classes import base_classes
from mhla_hf.models.families import LANGUAGE, family_of_type

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "initializer_range": 0.2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "sliding_window": None, "n_embd": 32, "n_layer": 4,
    "n_head": 4, "n_positions": 128, "n_inner": 48, "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "dff": 48,
    "embedding_size": 32, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64, "linear_head_dim": 8,
    "linear_num_heads": 4,
}  # fmt: skip
WINDOW = {"sliding_window": 16}
MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2, **WINDOW}
LATENT = {
    "num_key_value_heads": 4, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12, "kv_lora_rank": 16,
    "q_lora_rank": 16, "n_group": 1, "topk_group": 1, "head_dim": ...,  # not set
}  # fmt: skip
DEEP = {**LATENT, "num_hidden_layers": 8}
UNCAPPED = {"attn_logit_softcapping": None, **WINDOW}
TYPE_SIZES = {  # fields that differ from SIZES
    **dict.fromkeys(
        ("afmoe", "cohere2", "cohere2_moe", "cwm", "laguna", "lara_mini", "mimo_v2_flash", "olmo3"), WINDOW
    ),
    **dict.fromkeys(("exaone_moe", "gemma3_text", "kolibri1", "ministral"), MIXED),
    **dict.fromkeys(("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu"), LATENT),
    **dict.fromkeys(("bailing_hybrid", "kimi_linear"), DEEP),
    **dict.fromkeys(("gemma2", "vaultgemma"), UNCAPPED),
    "beam": {**LATENT, **WINDOW},
    "dots1": {"n_shared_experts": 1},
    "exaone4": {**MIXED, "sliding_window_pattern": 2},
    "gemma4_text": {**WINDOW, "global_head_dim": 16},
    "gemma3n_text": {**MIXED, "num_kv_shared_layers": 0},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, "mamba_d_head": 8, "mamba_n_heads": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4, "mamba_dt_rank": 4},
    "nemotron_h": {
        **{"layers_block_type": ["mamba", "attention"] * 2, "mamba_num_heads": 8, "mamba_head_dim": 8},
        **{"n_groups": 1, "initializer_range": 0.1},
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
}
TYPES = [family.base for family in LANGUAGE if base_classes(family)]  # of this release


def small_model_of(model_type: str):
    config_class = CONFIG_MAPPING[model_type]
    parameters = inspect.signature(config_class.__init__).parameters
    known = {*parameters, *(config_class.attribute_map or {}), "global_head_dim"}  # Gemma 4 takes it by **kwargs
    sizes = {**SIZES, **TYPE_SIZES.get(model_type, {})}
    config = config_class(**{name: size for name, size in sizes.items() if name in known and size is not ...})
    classes = base_classes(family_of_type(model_type))
    torch.manual_seed(0)
    return next(classes[name] for name in classes if name.endswith(("ForCausalLM", "LMHeadModel")))(config).eval()
