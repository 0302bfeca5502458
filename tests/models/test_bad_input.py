"""What is wrong is refused in one sentence that names it, and nothing has been changed by then."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import converted_model, one_sentence, scratch_model, softmax_model, tokens
from transformers import AutoModelForCausalLM

import mhla_hf
from mhla_hf import MHLAConfig

CONFIGS = [
    ({"head_dim": 7}, "head_dim"),
    ({"mhla": {"layers": [0]}}, "layers"),
    ({"mhla": {"feature_map": "x"}}, "feature_map"),
    ({"mhla": {"format_version": 99}}, "format_version"),
    ({"mhla": {"normalise": True}}, "normalise"),
]


@pytest.mark.parametrize(("values", "word"), CONFIGS)
def test_config(values, word):
    with pytest.raises(Exception) as error:
        MHLAConfig.preset("tiny", **values)
    assert word in str(error.value)


def test_overlay_class_without_settings():
    model_class = mhla_hf.MHLALlamaForCausalLM
    with pytest.raises(ValueError) as error:
        model_class(softmax_model().config)
    one_sentence(error, "config: got LlamaConfig", "mhla_hf.convert")


def test_unknown_names():
    for name in ("MHLAFalconForCausalLM", "MHLAFalconConfig", "nothing"):
        with pytest.raises(AttributeError, match=name):
            getattr(mhla_hf, name)


DAMAGE = [
    ("mixing.weight", -0.5, {"mixing_form": "direct"}, "negative"),
    ("q_map.weight", float("nan"), {}, "q_map.weight"),
    ("norm.weight", float("nan"), {"output_norm": True}, "norm.weight"),
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
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-100])
    for load in (AutoModelForCausalLM.from_pretrained, mhla_hf.MHLALlamaForCausalLM.from_pretrained):
        with pytest.raises(ValueError) as error:
            load(tmp_path)
        one_sentence(error, "model.safetensors is no whole safetensors file")


CALLS = [
    ({"attention_mask": torch.ones(3, 9)}, "attention_mask"),
    ({"attention_mask": torch.ones(2, 5)}, "attention_mask"),
    ({"attention_mask": torch.ones(2, 9, 9)}, "attention_mask"),
    ({"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5]] * 2)}, "position_ids"),
    ({"softcap": 50.0}, "softcap"),
    ({"s_aux": torch.zeros(4)}, "s_aux"),
    ({"sliding_window": 4}, "sliding_window"),
    ({"position_bias": torch.zeros(1, 4, 9, 9)}, "position_bias"),
    ({"is_causal": False}, "is_causal"),
]


@pytest.mark.parametrize(("arguments", "word"), CALLS)
@pytest.mark.parametrize("make", [converted_model, scratch_model])
def test_calls(make, arguments, word):
    with pytest.raises(ValueError) as error:
        make()(tokens(2, 9), **arguments)
    one_sentence(error, word)


def test_both_inputs():
    model = scratch_model()
    with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
        model(tokens(1, 3), inputs_embeds=torch.zeros(1, 3, 32))


def test_crop_past_a_block():
    from transformers import DynamicCache

    model = converted_model()
    cache = DynamicCache(config=model.config)
    model(tokens(1, 30), past_key_values=cache)
    with pytest.raises(ValueError) as error:
        cache.crop(-9)
    one_sentence(error, "tokens_to_remove: got -9, expected at least -8")
    with pytest.raises(ValueError) as error:
        cache.crop(4)
    one_sentence(error, "tokens_to_remove")


@pytest.mark.parametrize("layers", ["all", "2/3"])
def test_continuous_batching_is_refused(layers):
    model = converted_model(layers=layers)
    calls = (
        lambda: model(tokens(1, 4), attention_mask=torch.eye(4)[None, None], cache=object(), use_cache=False),
        lambda: model.generate_batch([[1, 2, 3], [4, 5]]),
    )
    for call in calls:
        with pytest.raises(ValueError) as error:
            call()
        one_sentence(error, "paged caches", "past_key_values")


@pytest.mark.parametrize("make", [converted_model, scratch_model])
@pytest.mark.parametrize("arguments", [{"distributed_config": {"tp_plan": "auto"}}, {"tp_plan": "auto"}])
@pytest.mark.filterwarnings("ignore:Passing `tp_plan`:FutureWarning")
def test_tensor_parallelism_is_refused(make, arguments, tmp_path, monkeypatch):
    """In each of two processes, as torchrun starts them; none waits for the other."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    make().save_pretrained(tmp_path)
    with pytest.raises(ValueError) as error:
        AutoModelForCausalLM.from_pretrained(tmp_path, **arguments)
    one_sentence(error, "tp_plan", "size 2")
