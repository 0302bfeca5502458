"""Registration with vLLM, by stand-ins where vLLM is not installed."""

import importlib
import pkgutil
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from tools.small_models import refused
from transformers import AutoConfig

from mhla_hf.vllm_plugin import register as plugin

ROOT = Path(__file__).parents[2]
CONFIGURATION = "mhla_hf.vllm_plugin.configuration"


@pytest.fixture
def configuration(monkeypatch):
    """The module `configuration` on top of stand-ins for what it imports from vLLM."""
    models, compilation = {}, SimpleNamespace(_attention_ops=[])
    names = {
        "vllm": {"ModelRegistry": SimpleNamespace(register_model=models.__setitem__)},
        "vllm.config": {"CompilationConfig": compilation, "ModelConfig": object, "VllmConfig": object},
        "vllm.model_executor": {},
        "vllm.model_executor.models": {},
        "vllm.model_executor.models.config": {"MODELS_CONFIG_MAP": {}, "VerifyAndUpdateConfig": object},
        "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: True)},
    }
    for name, members in names.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules.pop(CONFIGURATION, None)
    yield SimpleNamespace(module=importlib.import_module(CONFIGURATION), models=models)
    del sys.modules[CONFIGURATION]


def test_vllm_finds_the_plugin():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert pkgutil.resolve_name(project["entry-points"]["vllm.general_plugins"]["mhla_hf"]) is plugin.register


@pytest.mark.parametrize("version", ["0.31.4", "0.33.0", "0.3.2", "1.0.0+cpu"])
def test_another_vllm_is_refused(version):
    for supported in ("0.32.0", "0.32.3+cpu"):
        plugin.check_version(supported)
    with refused("vllm", version, "0.32", kind=ImportError):
        plugin.check_version(version)


def test_every_family_is_registered_twice_without_harm(configuration):
    for _ in range(2):
        configuration.module.register_models()
    models = configuration.models
    assert models["MHLALlamaForCausalLM"] == "mhla_hf.vllm_plugin.model:MHLAForCausalLM"
    assert models["MHLAMixtralForCausalLM"] == models["MHLAQwen3MoeForCausalLM"]
    assert models["MHLAMixtralForCausalLM"] == "mhla_hf.vllm_plugin.model:MHLAMoEForCausalLM"
    assert len(models) > 70
    assert configuration.module.CompilationConfig._attention_ops == ["vllm::mhla_attention"]
    assert AutoConfig.for_model("mhla_starcoder2").base_model_type == "starcoder2"


def checked_model(configuration, windowed=True, **fields):
    """The configuration of a model, after the hook for models."""
    config = SimpleNamespace(model_type="mhla_qwen3", mhla={"layers": [0, 2], "windowed": windowed}, **fields)
    configuration.module.MHLAServingConfig.verify_and_update_model_config(SimpleNamespace(hf_config=config))
    return config


def test_mhla_layers_are_marked_as_linear(configuration):
    types = ["full_attention", "sliding_attention", "full_attention"]
    for _ in range(2):
        types = checked_model(configuration, layer_types=types).layer_types
    assert types == ["linear_attention", "sliding_attention", "linear_attention"]


@pytest.mark.parametrize("word, changes", [("windowed", {"windowed": False}), ("model_type", {"kv_lora_rank": 4})])
def test_models_that_cannot_be_served(configuration, word, changes):
    with refused(f"{word}: got "):
        checked_model(configuration, **changes)


def check_options(configuration, *, softmax_heads=None, block_size=None, cache_dtype="auto", **changes):
    """The configuration of vLLM, after the hook for it."""
    sizes = ("tensor_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size")
    options = ("lora_config", "speculative_config", "kv_transfer_config")
    mhla = {"layers": [0, 1], "softmax_heads": softmax_heads}
    cache = {"cache_dtype": cache_dtype, "enable_prefix_caching": True, "block_size": block_size}
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(**{name: changes.get(name, 1) for name in sizes}),
        cache_config=SimpleNamespace(**cache, user_specified_block_size=block_size is not None),
        model_config=SimpleNamespace(hf_config=SimpleNamespace(mhla=mhla, num_key_value_heads=4, num_hidden_layers=2)),
        **{name: changes.get(name) for name in options},
    )
    configuration.module.MHLAServingConfig.verify_and_update_config(config)
    return config


@pytest.mark.parametrize(
    "word, changes",
    [
        ("tensor_parallel_size", {"tensor_parallel_size": 3}),
        ("tensor_parallel_size", {"tensor_parallel_size": 2, "softmax_heads": {"0": [1]}}),
        ("enable_prefix_caching", {"tensor_parallel_size": 2, "softmax_heads": {"0": [0, 1], "1": [0, 1]}}),
        ("pipeline_parallel_size", {"pipeline_parallel_size": 2}),
        ("lora", {"lora_config": object()}),
        ("kv_transfer", {"kv_transfer_config": object()}),
        ("cache_dtype", {"cache_dtype": "fp8"}),
    ],
)
def test_options_that_are_refused(configuration, word, changes):
    with refused(word):
        check_options(configuration, **changes)


def test_heads_are_split_among_processes(configuration):
    config = check_options(configuration, tensor_parallel_size=2, softmax_heads={"0": [1], "1": [2, 3]})
    assert config.cache_config.kv_cache_layout == "LBHNC"


@pytest.mark.parametrize("given, expected", [(None, 32), (128, 128)])
def test_block_size_on_a_cpu_is_kept(configuration, given, expected):
    cache = check_options(configuration, block_size=given).cache_config
    assert cache.block_size == expected and cache.user_specified_block_size
