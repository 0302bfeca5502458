"""info: what it counts is what real models hold, from configurations alone, and it says why layers stay softmax."""

import itertools
import json

import pytest
import torch
from tools.small_models import CACHE, refused, softmax_model
from tools.small_types import small_model_of
from transformers import AutoConfig, AutoModelForCausalLM, BloomConfig, ViTConfig

import mhla_hf
from mhla_hf.cli.main import main
from mhla_hf.conversion.transformers_models import NotConvertible
from mhla_hf.info import compare_with_softmax, describe_model
from mhla_hf.models.language.cache import MHLACacheLayer

COMMON = {"dtype": "bfloat16", "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_act": "silu"}
LARGE = {  # as their config.json says it
    "Llama-3.2-1B": {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
        "vocab_size": 128256, "max_position_embeddings": 131072, "tie_word_embeddings": True, **COMMON,
    },
    "Mixtral-8x7B": {
        "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "vocab_size": 32000, "max_position_embeddings": 32768, "tie_word_embeddings": False, "sliding_window": None,
        "num_local_experts": 8, "num_experts_per_tok": 2, **COMMON,
    },
}  # fmt: skip
COUNTED = {  # parameters, KV heads, bytes of a token's keys and values: 2 * layers * heads * width * 2
    "Llama-3.2-1B": (1_235_814_400, 16 * 8, 2 * 16 * 8 * 64 * 2),
    "Mixtral-8x7B": (46_702_792_704, 32 * 8, 2 * 32 * 8 * 128 * 2),
}


def config_of(name, **changes):
    return AutoConfig.for_model(**{**LARGE[name], **changes})


@pytest.mark.parametrize("name", list(LARGE))
def test_a_large_model_without_its_weights(name):
    """A model of one layer with the same heads, really converted and run, has what each layer of the large one has."""
    config = config_of(name)
    before = config.to_dict()
    record = compare_with_softmax(config, None, 5000)
    assert config.to_dict() == before
    layers, (parameters, heads, token) = config.num_hidden_layers, COUNTED[name]
    assert record["mhla_layers"] == list(range(layers)) and record["kept_layers"] == {}
    assert record["parameters"] == parameters and record["dtype"] == "bfloat16"
    small = {"hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 8}
    small["head_dim"] = config.head_dim or config.hidden_size // config.num_attention_heads
    model = AutoModelForCausalLM.from_config(config_of(name, **small, bos_token_id=1, eos_token_id=2)).eval()
    mhla_hf.convert(model, layers="all")
    with torch.no_grad():
        state = bytes_held(model(torch.zeros(1, 200, dtype=torch.long), use_cache=True)[CACHE].layers[0])
    kept = round(heads / 6)
    assert record["kv_heads"] == {"softmax": kept, "all": heads}
    cache = record["cache"]
    assert cache["tokens"] == 5000 and cache["softmax"] == token * 5000 and cache["mhla_alone"] == state * layers
    expected = kept / heads * token * 5000 + (1 - kept / heads) * state * layers
    assert cache["mhla"] == pytest.approx(expected, abs=layers)  # each layer is rounded


@pytest.mark.parametrize("name", ["cohere2", "deepseek_v3", "gemma4_text", "gpt2", "qwen3_next"])
def test_windows_latents_and_states_are_counted_as_real_caches_hold_them(name):
    model, tokens = small_model_of(name), 60
    record = compare_with_softmax(model.config, None, tokens)
    held = []
    for convert in (False, True):
        if convert:
            mhla_hf.convert(model, layers="all")
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
    kept = compare_with_softmax(small_model_of("cohere2").config, None, 9)["kept_layers"]
    assert kept == {"it sees only the last 16 tokens (sliding_window)": [0, 1, 2]}
    assert compare_with_softmax(small_model_of("lfm2_moe").config, None, 9)["kept_layers"] == {
        "it has no softmax attention": [0, 2]
    }
    model = mhla_hf.convert(softmax_model(), layers=[1])
    kept = compare_with_softmax(softmax_model().config, model.config, 9)["kept_layers"]
    assert kept == {"by the choice of layers or heads": [i for i in range(model.config.num_hidden_layers) if i != 1]}


def test_no_more_tokens_than_the_model_has_positions():
    config = config_of("Llama-3.2-1B", max_position_embeddings=8192)
    assert compare_with_softmax(config, None, 32768)["cache"] == compare_with_softmax(config, None, 8192)["cache"]


def test_what_converts_to_nothing():
    with refused("it sees only the last 16 tokens", kind=NotConvertible):
        compare_with_softmax(softmax_model("mistral", sliding_window=16).config, None, 9)


@pytest.fixture
def folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config_of("Llama-3.2-1B").save_pretrained("llama")
    BloomConfig().save_pretrained("bloom")
    ViTConfig().save_pretrained("vit")
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.json").write_text("{")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("llama --context 0", "argument --context: got 0, expected a whole number of at least 1"),
        ("nobody/nothing", "model: got 'nobody/nothing', which is not a folder, expected a model"),
        ("empty", "got no config.json"),
        ("damaged", "config.json: got invalid JSON"),
        ("vit", "got 'vit', a vision tower, expected a causal language model"),
        ("bloom", "got model type 'bloom', expected another one: its attention does not call transformers' attention"),
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
