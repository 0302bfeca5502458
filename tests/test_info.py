"""info: what it counts is what real models hold, from configurations alone, and it says why layers stay softmax."""

import itertools
import json

import pytest
import torch
from tools.small_models import CACHE, softmax_model
from tools.small_types import small_model_of
from transformers import AutoConfig, AutoModelForCausalLM, BloomConfig, ViTConfig

import mhla_hf
from mhla_hf.cli.main import main
from mhla_hf.info import compare_with_softmax, describe_model
from mhla_hf.models.language.cache import MHLACacheLayer

LARGE = {  # Llama-3.2-1B, as its config.json says it
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
    "vocab_size": 128256, "max_position_embeddings": 131072, "tie_word_embeddings": True, "dtype": "bfloat16",
    "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_act": "silu",
}  # fmt: skip


def test_a_large_model_without_its_weights():
    config = AutoConfig.for_model(**LARGE)
    before, token = config.to_dict(), 2 * 16 * 8 * 64 * 2  # bytes of a token's keys and values
    record = compare_with_softmax(config, None, 5000)
    assert config.to_dict() == before
    assert record["mhla_layers"] == list(range(16)) and record["kept_layers"] == {}
    assert record["parameters"] == 1_235_814_400 and record["dtype"] == "bfloat16"
    small = {"hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 8}
    small = AutoConfig.for_model(**{**LARGE, **small, "bos_token_id": 1, "eos_token_id": 2})
    model = mhla_hf.convert(AutoModelForCausalLM.from_config(small).eval(), layers="all", salient=128)
    with torch.no_grad():
        state = bytes_held(model(torch.zeros(1, 200, dtype=torch.long), use_cache=True)[CACHE].layers[0])
    assert record["kv_heads"] == {"softmax": 21, "all": 128}
    cache = record["cache"]
    assert cache["tokens"] == 5000 and cache["softmax"] == token * 5000 and cache["mhla_alone"] == state * 16
    expected = 21 / 128 * token * 5000 + (1 - 21 / 128) * state * 16
    assert cache["mhla"] == pytest.approx(expected, abs=16)  # each layer is rounded


@pytest.mark.parametrize("name", ["cohere2", "deepseek_v3", "gemma4_text", "gpt2", "qwen3_next"])
def test_windows_latents_and_states_are_counted_as_real_caches_hold_them(name):
    model, tokens = small_model_of(name), 60
    record = compare_with_softmax(model.config, None, tokens)
    held = []
    for convert in (False, True):
        if convert:
            mhla_hf.convert(model, layers="all", salient=128)
        with torch.no_grad():
            cache = model(torch.ones(1, tokens, dtype=torch.long), use_cache=True)[CACHE]
        held.append(sum(map(bytes_held, cache.layers)))
    assert (record["cache"]["softmax"], record["cache"]["mhla_alone"]) == (held[0], held[1])
    assert record["mhla_layers"] == model.config.mhla["layers"]
    every = itertools.chain(record["mhla_layers"], *record["kept_layers"].values())
    assert sorted(every) == list(range(model.config.num_hidden_layers))


def bytes_held(layer):
    """What a layer's cache says it holds; a window is a view of what it was cut from."""
    if isinstance(layer, MHLACacheLayer):
        return layer.state.nbytes()
    states = [x for name in ("conv_states", "recurrent_states") for x in getattr(layer, name, {}).values()]
    states += [getattr(layer, "keys", None), getattr(layer, "values", None)]
    return sum(x.nbytes for x in states if x is not None)


def test_why_layers_stay():
    for model, converted, kept in (
        (small_model_of("cohere2"), None, {"it sees only the last 16 tokens (sliding_window)": [0, 1, 2]}),
        (small_model_of("lfm2_moe"), None, {"it has no softmax attention": [0, 2]}),
        (softmax_model(), mhla_hf.convert(softmax_model(), layers=[1]), {"by the choice of layers or heads": [0, 2]}),
    ):
        assert compare_with_softmax(model.config, converted and converted.config, 9)["kept_layers"] == kept


@pytest.fixture
def folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    AutoConfig.for_model(**LARGE).save_pretrained("llama")
    BloomConfig().save_pretrained("bloom")
    ViTConfig().save_pretrained("vit")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.json").write_text("{")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("llama --context 0", "argument --context: got 0, expected a whole number of at least 1"),
        ("damaged", "config.json: got a file that is no JSON"),
        ("vit", "got 'vit', a vision tower, expected a causal language model"),
        ("bloom", "got model type 'bloom', which cannot be converted: its attention does not call transformers' "),
    ],
)
def test_bad_input_is_one_sentence(folders, capsys, line, said):
    assert main(["info", *line.split(), "--quiet"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and said in err and err.count("\n") == 1 and err.startswith("mhla-hf info: ")


def test_from_the_shell(folders, capsys):
    assert main(["info", "llama", "--context", "8192"]) == 0
    page = capsys.readouterr().out
    assert page.startswith("llama: llama\nattention:  16 of 16 layers can become MHLA, 21 of 128 KV heads keep softmax")
    assert "MiB a sequence at 8,192 tokens, 256.00 MiB with softmax alone, " in page
    assert main(["info", "llama", "--context", "8192", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == describe_model("llama", 8192)
