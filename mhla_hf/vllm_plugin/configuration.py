"""Registers converted models with vLLM, and checks and adapts vLLM's configuration for serving them."""

from typing import Any

from transformers import AutoConfig
from vllm import ModelRegistry
from vllm.config import CompilationConfig, ModelConfig, VllmConfig
from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig
from vllm.platforms import current_platform

from ..models.derived_classes import derived_config_class
from ..models.families import LANGUAGE
from ..models.transformers_api import class_names, config_class_of
from ..nn.heads import HeadSplit

OPERATOR = "vllm::mhla_attention"
CPU_BLOCK_SIZE = 32  # the smallest that vLLM's attention on a CPU prefers
# Configuration fields by which vLLM recognizes models with experts.
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


class MHLAServingConfig(VerifyAndUpdateConfig):
    """Hooks that vLLM calls before it uses the configuration of a converted model."""

    @staticmethod
    def verify_and_update_model_config(model_config: ModelConfig) -> None:
        """Check the settings, and mark MHLA layers as linear: vLLM keeps no states if all layers are full attention."""
        config = model_config.hf_config
        check_settings(config.mhla, config)
        if getattr(config, "layer_types", None) is not None:
            layers = config.mhla["layers"]
            types = enumerate(config.layer_types)
            config.layer_types = ["linear_attention" if index in layers else kind for index, kind in types]

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        """Raise ValueError for unsupported options; on a CPU, set the cache's block size, state dtype, and layout."""
        parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
        for name in ("pipeline_parallel_size", "decode_context_parallel_size"):
            if getattr(parallel, name) > 1:
                raise ValueError(f"{name}: got {getattr(parallel, name)} with MHLA layers, expected 1.")
        size = parallel.tensor_parallel_size
        check_tensor_parallel(size, vllm_config.model_config.hf_config, cache.enable_prefix_caching)
        if vllm_config.lora_config is not None:
            raise ValueError("enable_lora: got True with MHLA layers, expected False and a merged adapter.")
        for name in ("speculative_config", "kv_transfer_config"):
            if getattr(vllm_config, name) is not None:
                raise ValueError(f"{name}: got a value with MHLA layers, expected None.")
        if cache.cache_dtype != "auto":
            raise ValueError(f"kv_cache_dtype: got {cache.cache_dtype!r} with MHLA layers, expected 'auto'.")
        if not current_platform.is_cpu():
            return
        cache.mamba_ssm_cache_dtype = "float32"  # only other models use it; vLLM would set it with a warning
        if not cache.user_specified_block_size:
            # vLLM rounds a state's page up to whole blocks. Unless marked as the user's, the block size is set to 128, also
            # in the engine's process after rounding: states would be stored at other lengths than they are looked up.
            cache.block_size, cache.user_specified_block_size = CPU_BLOCK_SIZE, True
        if size > 1:
            cache.kv_cache_layout = "LBHNC"  # a process without softmax heads would choose another layout


def check_settings(settings: dict[str, Any], config: Any) -> None:
    """Raise ValueError if the plugin cannot serve a converted model with these settings, its `config.mhla`."""
    if not settings["windowed"]:
        raise ValueError("windowed: got false, expected true: with a mixing matrix, the state grows with the text.")
    if getattr(config, "kv_lora_rank", None) is not None:
        raise ValueError(f"model_type: got {config.model_type}, expected one without latent attention.")


def check_tensor_parallel(size: int, config: Any, caches_prefixes: bool) -> None:
    """Raise ValueError if `size` processes cannot share the heads, or get kinds of heads that vLLM cannot serve together."""
    if size == 1:
        return
    num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if num_heads % size:
        raise ValueError(f"tensor_parallel_size: got {size}, expected a divisor of the {num_heads} KV heads of MHLA.")
    num_layers = len(config.mhla["layers"])
    splits = [HeadSplit(heads, num_heads) for heads in (config.mhla.get("softmax_heads") or {}).values()]
    has_whole_layer = {True: num_layers < config.num_hidden_layers, False: len(splits) < num_layers}
    kinds = set()  # for each process, whether it has softmax heads, and whether it has MHLA heads
    for rank in range(size):
        counts = [split.of_rank(rank, size).counts for split in splits]
        kinds.add(tuple(has_whole_layer[kind] or any(count[kind] for count in counts) for kind in (True, False)))
    # vLLM sizes pages by the attention layers of each process.
    if kinds >= {(True, True), (False, True)}:
        expected = "a size that gives every process softmax heads"
        raise ValueError(f"tensor_parallel_size: got {size}, with only MHLA heads in a process, expected {expected}.")
    if caches_prefixes and len(kinds) > 1:
        raise ValueError(
            f"enable_prefix_caching: got True with {size} processes that have different kinds of heads, expected False "
            "(--no-enable-prefix-caching)."
        )


def register_models() -> None:
    """Register every family of converted language models that this release of transformers has."""
    if OPERATOR not in CompilationConfig._attention_ops:
        CompilationConfig._attention_ops.append(OPERATOR)
    for family in LANGUAGE:
        if config_class_of(family.base) is None:
            continue
        config_class = derived_config_class(family)
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
        has_experts = any(hasattr(config_class, name) for name in EXPERT_COUNTS)
        kind = "MHLAMoEForCausalLM" if has_experts else "MHLAForCausalLM"
        for name in class_names(family):
            if name.endswith(("ForCausalLM", "LMHeadModel")):
                ModelRegistry.register_model(f"MHLA{name}", f"mhla_hf.vllm_plugin.model:{kind}")
                MODELS_CONFIG_MAP[f"MHLA{name}"] = MHLAServingConfig
