"""What is wrong is refused in one sentence that names it, and nothing has been changed by then."""

import copy
import math
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file
from tools.small_models import CACHE, converted_model, refused, scratch_model, softmax_model, tokens
from transformers import AutoModelForCausalLM

import mhla_hf
from mhla_hf import MHLAConfig
from mhla_hf.models.pretrained import split_heads_plan


@pytest.mark.parametrize("form", ["decay", "softmax"])
def test_settings_of_a_causal_model(form):
    for name, value in {"cpe": 3, "normalize": "official", "block_size": 10**9}.items():
        config = converted_model(mixing_form=form).config
        config.mhla |= {name: value}
        with refused(f"{name}: got"):
            AutoModelForCausalLM.from_config(config)


def test_key_heads_that_do_not_divide_the_heads():
    config = converted_model(mixing_form="decay").config
    config.num_key_value_heads = 3
    with refused("num_key_value_heads: got 3, expected a divisor of the 4 attention heads."):
        AutoModelForCausalLM.from_config(config)
    with refused("size 3", "divides the 2 key/value heads of model.layers.1.self_attn"):
        split_heads_plan(converted_model(layers=[1]), 3)
    with refused("layers", kind=Exception):
        MHLAConfig.preset("tiny", mhla={"layers": [0]})


DAMAGED = [
    ("mixing.weight", -0.5, {"mixing_form": "direct"}, "negative"),
    ("q_map.weight", math.nan, {}, "q_map.weight"),
]


@pytest.mark.parametrize(("which", "value", "settings", "word"), DAMAGED)
def test_damaged_weights(tmp_path, which, value, settings, word):
    model = mhla_hf.convert(softmax_model(), layers=[1], block_size=8, num_blocks=4, **settings)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    weights[f"model.layers.1.self_attn.mhla.{which}"].view(-1)[0] = value
    save_file(weights, file, {"format": "pt"})
    with refused(f"model.layers.1.self_attn.mhla.{which.split('.')[0]}", word):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    file.write_bytes(file.read_bytes()[:-100])
    with refused("model.safetensors is not a complete safetensors file"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


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
    with refused(word):
        make()(tokens(2, 9), **arguments)


@torch.no_grad()
@pytest.mark.parametrize("settings", [{}, {"mixing_form": "decay", "windowed": True}])
def test_a_refused_crop_has_cut_no_layer_of_a_hybrid(settings):
    model, ids = converted_model(layers="2/3", **settings), tokens(1, 30)
    cache = model(ids, use_cache=True)[CACHE]
    for count in (-9, 4, -31):
        with refused(f"tokens_to_remove: got {count}"):
            cache.crop(count)
        assert [layer.get_seq_length() for layer in cache.layers] == [30] * 3
    cache = copy.deepcopy(pickle.loads(pickle.dumps(cache)))
    cache.crop(-5)
    again = model(ids[:, 25:], **{CACHE: cache}).logits
    torch.testing.assert_close(again, model(ids).logits[:, 25:], rtol=1e-5, atol=1e-5)


def test_continuous_batching_is_refused():
    with refused("paged caches", "vLLM"):
        converted_model(layers="2/3").generate_batch([[1, 2, 3], [4, 5]])
