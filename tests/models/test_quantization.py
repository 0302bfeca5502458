"""Converted language models with int8 and 4-bit weights, by torchao, bitsandbytes and quanto, through `from_pretrained`."""

import copy

import pytest
import torch
from tools.small_models import shaken, softmax_model, tokens
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, QuantoConfig, TorchAoConfig

import mhla_hf

FORMS = {"window": {"salient": 3}, "dense": {"windowed": False, "output_norm": True, "gate": True}}

KINDS = {  # a package, and what makes a configuration of it
    "quanto": ("optimum.quanto", lambda _: QuantoConfig(weights="int8")),
    "torchao": ("torchao.quantization", lambda package: TorchAoConfig(package.Int8WeightOnlyConfig(version=2))),
    "8-bit": ("bitsandbytes", lambda _: BitsAndBytesConfig(load_in_8bit=True)),
    "4-bit": ("bitsandbytes", lambda _: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")),
}


def logits_of(model):
    with torch.no_grad():
        return model(tokens(2, 40)).logits


def quantized(model, config, folder):
    """The model loaded from a folder with this configuration, and how far its logits are from what they were, relative."""
    model.save_pretrained(folder)
    loaded, whole = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config), logits_of(model)
    return loaded, float((logits_of(loaded) - whole).norm() / whole.norm())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_linear_weights_are_quantized_and_maps_mixing_and_norms_are_not(kind, form, tmp_path):
    """It loses at most twice what the softmax model loses, and saves and loads to the same bits (quanto does not save)."""
    package, configure = KINDS[kind]
    config = configure(pytest.importorskip(package))
    base = softmax_model(hidden_size=64, intermediate_size=64, head_dim=16, initializer_range=0.05)
    model = shaken(mhla_hf.convert(copy.deepcopy(base), block_size=8, **FORMS[form]))
    _, usual = quantized(base, config, tmp_path / "base")
    loaded, lost = quantized(model, config, tmp_path / "whole")
    assert 0 < lost < 2 * usual
    attention, before = loaded.model.layers[1].self_attn, model.model.layers[1].self_attn.mhla
    assert type(attention.q_proj.weight) is not nn.Parameter
    kept = {name: value for name, value in attention.mhla.named_parameters() if name != "gate.weight"}
    parts = {"q_map", "k_map", "mixing", "norm", "gate"} if form == "dense" else set()
    assert {name.split(".")[0] for name in kept} == parts
    for name, value in kept.items():
        assert type(value) is nn.Parameter and torch.equal(value, before.get_parameter(name))
    assert loaded.generate(tokens(1, 30), max_new_tokens=10).shape == (1, 40)
    if kind == "quanto":
        return
    loaded.save_pretrained(tmp_path / "small")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert torch.equal(logits_of(again), logits_of(loaded))
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("small", "whole")]
    assert sizes[0] < 0.5 * sizes[1]
