"""What is wrong is refused in one sentence that names it, and nothing has been changed by then."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import converted_model, one_sentence, scratch_model, softmax_model, tokens
from transformers import AutoModelForCausalLM

import mhla_hf
from mhla_hf import MHLAConfig


@pytest.mark.parametrize(("name", "value"), [("layers", [0]), ("format_version", 99), ("normalise", True)])
def test_config(name, value):
    with pytest.raises(Exception) as error:
        MHLAConfig.preset("tiny", mhla={name: value})
    assert name in str(error.value)


def test_overlay_class_without_settings():
    with pytest.raises(ValueError) as error:
        mhla_hf.MHLALlamaForCausalLM(softmax_model().config)
    one_sentence(error, "config: got LlamaConfig", "mhla_hf.convert")


DAMAGE = [
    ("mixing.weight", -0.5, {"mixing_form": "direct"}, "negative"),
    ("q_map.weight", float("nan"), {}, "q_map.weight"),
]


@pytest.mark.parametrize(("which", "value", "settings", "word"), DAMAGE)
def test_damaged_weights(tmp_path, which, value, settings, word):
    model = mhla_hf.convert(softmax_model(), layers=[1], block_size=8, num_blocks=4, **settings)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights[f"model.layers.1.self_attn.mhla.{which}"].view(-1)[0] = value
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError) as error:
        AutoModelForCausalLM.from_pretrained(tmp_path)
    one_sentence(error, f"model.layers.1.self_attn.mhla.{which.split('.')[0]}", word)


def test_truncated_weights(tmp_path):
    converted_model().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError) as error:
        AutoModelForCausalLM.from_pretrained(tmp_path)
    one_sentence(error, "model.safetensors is no whole safetensors file")


CALLS = [
    ({"attention_mask": torch.ones(3, 9)}, "attention_mask"),
    ({"attention_mask": torch.ones(2, 9, 9)}, "attention_mask"),
    ({"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5]] * 2)}, "position_ids"),
    ({"softcap": 50.0}, "softcap"),
    ({"cache": object()}, "cache"),
    ({"is_causal": False}, "is_causal"),
]


@pytest.mark.parametrize(("arguments", "word"), CALLS)
@pytest.mark.parametrize("make", [converted_model, scratch_model])
def test_calls(make, arguments, word):
    with pytest.raises(ValueError) as error:
        make()(tokens(2, 9), **arguments)
    one_sentence(error, word)


def test_crop_past_a_block():
    cache = converted_model()(tokens(1, 30), use_cache=True).past_key_values
    for count in (-9, 4):
        with pytest.raises(ValueError) as error:
            cache.crop(count)
        one_sentence(error, f"tokens_to_remove: got {count}, expected -8 to 0")


def test_continuous_batching_is_refused():
    with pytest.raises(ValueError) as error:
        converted_model(layers="2/3").generate_batch([[1, 2, 3], [4, 5]])
    one_sentence(error, "paged caches", "past_key_values")


def test_tensor_parallelism_is_refused(tmp_path, monkeypatch):
    """In each of two processes, as torchrun starts them; none waits for the other."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    converted_model().save_pretrained(tmp_path)
    with pytest.raises(ValueError) as error:
        AutoModelForCausalLM.from_pretrained(tmp_path, distributed_config={"tp_plan": "auto"})
    one_sentence(error, "tp_plan", "size 2")
