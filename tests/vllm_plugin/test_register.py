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
    models = {}
    names = {
        "vllm": {"ModelRegistry": SimpleNamespace(register_model=models.__setitem__)},
        "vllm.config": {"CompilationConfig": SimpleNamespace(_attention_ops=[])},
        "vllm.model_executor": {},
        "vllm.model_executor.models": {},
        "vllm.model_executor.models.config": {"MODELS_CONFIG_MAP": {}, "VerifyAndUpdateConfig": object},
    }
    names["vllm.config"] |= {"ModelConfig": object, "VllmConfig": object}
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


def model_config(rope_parameters=None, layer_types=None, **settings):
    settings = {"layers": [0, 2], "mixing_form": "decay", "rope": "near", **settings}
    config = SimpleNamespace(
        model_type="mhla_qwen3", mhla=settings, layer_types=layer_types, rope_parameters=rope_parameters
    )
    return SimpleNamespace(hf_config=config)


def test_mhla_layers_are_marked_as_linear(configuration):
    config = model_config(layer_types=["full_attention", "sliding_attention", "full_attention"])
    for _ in range(2):
        configuration.module.MHLAServingConfig.verify_and_update_model_config(config)
    assert config.hf_config.layer_types == ["linear_attention", "sliding_attention", "linear_attention"]


@pytest.mark.parametrize(
    "word, changes",
    [
        ("mixing_form", {"mixing_form": "softmax"}),
        ("rope_type", {"rope_parameters": {"rope_type": "dynamic"}}),
        ("rope_type", {"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}),
    ],
)
def test_models_that_cannot_be_served(configuration, word, changes):
    with refused(word):
        configuration.module.MHLAServingConfig.verify_and_update_model_config(model_config(**changes))


def test_any_rotation_suits_salient_tokens(configuration):
    config = model_config(rope_parameters={"rope_type": "dynamic"}, salient=5)
    configuration.module.MHLAServingConfig.verify_and_update_model_config(config)


def vllm_config(**changes):
    sizes = ("tensor_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size")
    settings = {"softmax_heads": changes.pop("kept", None)}
    model = SimpleNamespace(hf_config=SimpleNamespace(mhla=settings, num_key_value_heads=4))
    options = {"lora_config": None, "speculative_config": None, "kv_transfer_config": None}
    cache = SimpleNamespace(cache_dtype=changes.pop("cache_dtype", "auto"), enable_prefix_caching=True)
    parallel = SimpleNamespace(**{name: changes.pop(name, 1) for name in sizes})
    configs = {"parallel_config": parallel, "cache_config": cache, "model_config": model}
    return SimpleNamespace(**configs, **{**options, **changes})


@pytest.mark.parametrize(
    "name, value",
    [
        ("tensor_parallel_size", 3),
        ("pipeline_parallel_size", 2),
        ("lora_config", object()),
        ("kv_transfer_config", object()),
        ("cache_dtype", "fp8"),
    ],
)
def test_options_that_are_refused(configuration, name, value):
    with refused(name.removesuffix("_config"), "MHLA"):
        configuration.module.MHLAServingConfig.verify_and_update_config(vllm_config(**{name: value}))


def test_prefix_caching_is_turned_off_and_heads_are_shared_by_processes(configuration):
    hooks, config = configuration.module.MHLAServingConfig, vllm_config(tensor_parallel_size=2)
    hooks.verify_and_update_config(config)
    assert config.cache_config.enable_prefix_caching is False
    with refused("tensor_parallel_size", "softmax"):
        hooks.verify_and_update_config(vllm_config(tensor_parallel_size=2, kept={"0": [1]}))
