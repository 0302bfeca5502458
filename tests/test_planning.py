"""plan(): what it counts is what real models hold, from configurations alone, and its advice follows from the numbers."""

import copy
import itertools
import json
import time

import pytest
import torch
from tools.small_models import CACHE, SIZES, refused, softmax_model
from tools.small_types import small_model_of
from transformers import AutoConfig, AutoModelForCausalLM, BloomConfig, ViTConfig

import mhla_hf
from mhla_hf import planning
from mhla_hf.cli.main import main
from mhla_hf.conversion.transformers_models import NotConvertible
from mhla_hf.models.language.cache import MHLACacheLayer
from mhla_hf.planning import advise, count_active_parameters, find_crossover, model_without_weights, render_plan

COMMON = {"dtype": "bfloat16", "num_attention_heads": 32, "num_key_value_heads": 8}
LARGE = {  # as their config.json says it
    "Llama-3.2-1B": {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
        "vocab_size": 128256, "max_position_embeddings": 131072, "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0, "bos_token_id": 128000, "eos_token_id": 128001, **COMMON,
    },
    "Qwen3-8B": {
        "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "head_dim": 128,
        "vocab_size": 151936, "max_position_embeddings": 40960, "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
        "rope_theta": 1000000, "bos_token_id": 151643, "eos_token_id": 151645, "use_sliding_window": False, **COMMON,
    },
    "Mixtral-8x7B": {
        "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "vocab_size": 32000, "max_position_embeddings": 32768, "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0, "bos_token_id": 1, "eos_token_id": 2, "sliding_window": None, "num_local_experts": 8,
        "num_experts_per_tok": 2, **COMMON,
    },
}  # fmt: skip
COUNTED = {  # parameters, those that a token meets, bytes of a token's keys and values: 2 * layers * heads * width * 2
    "Llama-3.2-1B": (1_235_814_400, 1_235_814_400, 2 * 16 * 8 * 64 * 2),
    "Qwen3-8B": (8_190_735_360, 8_190_735_360, 2 * 36 * 8 * 128 * 2),
    "Mixtral-8x7B": (46_702_792_704, 12_879_925_248, 2 * 32 * 8 * 128 * 2),
}
QUIET = {"timing": False, "progress": False}


def config_of(name, **changes):
    values = {**LARGE[name], **changes}
    return AutoConfig.for_model(**values)


def planned(model, context=8192, **options):
    return mhla_hf.plan(model, context=context, **{**QUIET, **options})


def row_at(record, tokens):
    return next(row for row in record["cache"]["rows"] if row["tokens"] == tokens)


@pytest.mark.parametrize("name", list(LARGE))
def test_a_large_model_without_its_weights(name):
    """A model of one layer with the same heads, really converted and run, has what each layer of the large one has."""
    record, config = planned(config_of(name), 5000), config_of(name)
    layers = [index for index in range(config.num_hidden_layers) if index % 3]
    assert record["mhla_layers"] == layers and record["dtype"] == "bfloat16"
    assert record["kept_layers"] == {"by the choice of layers": list(range(0, config.num_hidden_layers, 3))}
    parameters, active, token = COUNTED[name]
    small = {"hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 8}
    small["head_dim"] = config.head_dim or config.hidden_size // config.num_attention_heads
    small = config_of(name, **small, bos_token_id=1, eos_token_id=2)
    model = AutoModelForCausalLM.from_config(small).eval()
    before = model.num_parameters()
    mhla_hf.convert(model, layers="all")
    added = (model.num_parameters() - before) * len(layers)
    assert record["parameters"] == {"base": parameters, "added": added}
    with torch.no_grad():
        state = bytes_held(model(torch.zeros(1, 200, dtype=torch.long), use_cache=True)[CACHE].layers[0])
    kept = config.num_hidden_layers - len(layers)
    for tokens in (2048, 5000, 131072):
        converted = token * kept // config.num_hidden_layers * tokens + state * len(layers)
        assert row_at(record, tokens) == {"tokens": tokens, "softmax": token * tokens, "mhla": converted}
    one = token // config.num_hidden_layers
    assert one * (record["cache"]["smaller_from"] - 1) <= state < one * record["cache"]["smaller_from"]
    assert count_active_parameters(model_without_weights(config)) == active


@pytest.mark.parametrize("name", ["cohere2", "deepseek_v3", "gemma4_text", "gpt2", "lfm2_moe", "qwen3_next"])
def test_windows_latents_and_states_are_counted_as_real_caches_hold_them(name):
    model, tokens = small_model_of(name), 60
    record = planned(model.config, tokens, layers="all", block_size=16)
    held = []
    for convert in (False, True):
        if convert:
            mhla_hf.convert(model, layers="all", block_size=16)
        with torch.no_grad():
            cache = model(torch.ones(1, tokens, dtype=torch.long), use_cache=True)[CACHE]
        held.append(sum(map(bytes_held, cache.layers)))
    assert row_at(record, tokens) == {"tokens": tokens, "softmax": held[0], "mhla": held[1]}
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
    kept = planned(small_model_of("cohere2").config, layers="all")["kept_layers"]
    assert kept == {"it sees only the last 16 tokens (sliding_window)": [0, 1, 2]}
    assert planned(small_model_of("lfm2_moe").config)["kept_layers"] == {
        "it has no softmax attention": [0, 2], "by the choice of layers": [1],
    }  # fmt: skip


def test_the_configuration_stays_as_it_was():
    config = config_of("Mixtral-8x7B")
    before = config.to_dict()
    planned(config)
    assert config.to_dict() == before


def test_more_tokens_than_the_model_has_positions():
    config = config_of("Llama-3.2-1B", max_position_embeddings=8192)
    said = "Plan for at most 8,192 tokens: the model has no more positions, with softmax or with MHLA."
    assert planned(config, 32768)["advice"] == said and planned(config, 8192)["advice"].startswith("Convert")


def rows_of(softmax, mhla, lengths):
    return [{"tokens": n, "softmax_ms": softmax(n), "mhla_ms": mhla(n)} for n in lengths]


@pytest.mark.parametrize(
    ("lengths", "found", "known"),
    [
        ([256, 512, 1024, 2048, 8192], 3000, 32768),  # between
        ([256, 512, 1024], 3000, 4096),  # beyond, by less than four times
        ([256, 512], None, 2048),
        ([256], None, 256),  # one length has no direction
        ([4096, 8192], 4096, 8192),  # all faster
    ],
)
def test_crossover(lengths, found, known):
    rows = rows_of(lambda n: 1e-6 * n * n, lambda n: 3e-3 * n, lengths)
    assert find_crossover(rows) == {"faster_from": found, "known_to": known}


def test_no_crossover_where_the_distance_grows():
    assert find_crossover(rows_of(lambda n: n, lambda n: n * n, [256, 512])) == {"faster_from": None, "known_to": 512}


def test_what_is_faster_for_a_while_only_is_not_counted():
    rows = [{"tokens": n, "softmax_ms": s, "mhla_ms": 1.0} for n, s in ((256, 2.0), (512, 0.5), (1024, 2.0))]
    assert find_crossover(rows)["faster_from"] == 683


def test_advice(monkeypatch):
    def timed(prefill, decoding):
        rows = rows_of(lambda n: 1.0, lambda n: 2.0, [256])
        each = {"rows": rows, "known_to": 1024}
        made = {"prefill": {**each, "faster_from": prefill}, "decoding": {**each, "faster_from": decoding}}
        made |= {"hardware": "abacus", "versions": {"torch": "2"}}
        monkeypatch.setattr(planning, "time_layer", lambda *arguments: made)
        return planned(config_of("Llama-3.2-1B"), timing=True)

    good = timed(6000, 2000)
    assert good["advice"].startswith(
        "Convert: at 8,192 tokens 10 MHLA layers save 148.1 MiB of cache (2.37 times smaller)."
    )
    assert "convert MODEL OUT --text FILE --keep 1/6" in good["advice"]
    assert "known" not in good["advice"]
    assert "prefill is slower. Let" in timed(9000, 2000)["advice"]
    unknown = timed(None, 2000)["advice"]
    assert "slower" not in unknown and "smaller); whether prefill is faster there is not known. Let" in unknown
    both = "; prefill is slower; whether decoding is faster there is not known. Let"
    assert both in timed(9000, None)["advice"]
    neither = timed(9000, 9000)
    assert neither["advice"] == "Stay with softmax: at 8,192 tokens neither prefill nor decoding is faster with MHLA."
    page = render_plan(timed(6000, None))
    assert "With MHLA prefill is faster from 6,000 tokens on." in page
    assert "With MHLA decoding is slower up to 1,024 tokens; longer contexts were not measured." in page
    untimed = planned(config_of("Llama-3.2-1B"))["advice"]
    assert "; whether prefill or decoding is faster there is not known. Let" in untimed
    short = planned(config_of("Llama-3.2-1B"), 2048)
    assert advise(short).startswith("Stay with softmax: at 2,048 tokens the cache would shrink by a factor of 1.78,")


def test_attention_that_is_most_of_the_work_should_be_sparse_where_mhla_is_no_help():
    """Of 131,072 tokens: 16 layers of 32 heads with keys and values of 64, two operations a number, half of the pairs."""
    one = planned(config_of("Llama-3.2-1B"), 131072, layers=[1])
    products = 16 * 32 * (64 + 64) * 131072
    assert one["attention"] == pytest.approx(products / (products + 2 * 1_235_814_400))
    said = "Use sparse attention: 78% of a prompt's operations are attention's, and at 131,072 tokens the cache would shrink"
    assert one["advice"].startswith(said) and "78% of the softmax model's operations" in render_plan(one)
    assert planned(config_of("Llama-3.2-1B"), 131072)["advice"].startswith("Convert")
    assert planned(config_of("Llama-3.2-1B"), 8192, layers=[1])["advice"].startswith("Stay with softmax")


def test_a_layer_is_timed(monkeypatch):
    monkeypatch.setattr(planning, "TIMED_LENGTHS", (32, 64))
    config = softmax_model().config
    record = planned(config, timing=True, device="cpu", block_size=8)
    for what in ("prefill", "decoding"):
        found = record["timing"][what]
        assert [row["tokens"] for row in found["rows"]] in ([32, 64], [32])
        assert all(value > 0 for row in found["rows"] for value in row.values())
        assert found.items() >= find_crossover(found["rows"]).items()
    assert "MHLA, ms" in render_plan(record) and record["timing"]["hardware"] in render_plan(record)


def test_timed_work_is_attention():
    """Softmax over all tokens before, itself included; MHLA with a window over all of them gives the same."""
    student = model_without_weights(softmax_model().config)
    core = mhla_hf.convert(student, layers="all", block_size=64).model.layers[0].self_attn.mhla
    core = planning.initialize_core(core, "cpu")
    with torch.no_grad():
        work = planning.make_prefill_work(core, torch.float32, "cpu", 40)
        torch.testing.assert_close(work["softmax"]()[0], work["mhla"](), rtol=1e-5, atol=1e-5)
        work = planning.make_decoding_work(core, torch.float32, "cpu", 40)
        first, again = work["softmax"]()[0], work["softmax"]()[0]
    assert first.shape == (1, 1, SIZES["num_attention_heads"], SIZES["head_dim"])
    torch.testing.assert_close(first, again, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("what", planning.WORKS)
def test_whole_models_cross_where_the_plan_says(what, monkeypatch):
    """Two layers with Llama-3.2-1B's heads and all around them, by turns at every length: within 30 % of the plan's."""
    monkeypatch.setattr(time, "perf_counter", time.process_time)  # of one thread: other processes do not count
    monkeypatch.setattr(planning, "SECONDS_PER_PHASE", 60.0)
    monkeypatch.setattr(planning, "WORKS", {what: planning.WORKS[what]})
    small = {"vocab_size": 64, "hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 2, "dtype": "float32"}
    config = config_of("Llama-3.2-1B", **small, bos_token_id=1, eos_token_id=2)
    model = AutoModelForCausalLM.from_config(config).eval()
    models = {"softmax": model, "mhla": mhla_hf.convert(copy.deepcopy(model), layers="all").eval()}
    core = models["mhla"].model.layers[0].self_attn.mhla

    def works(tokens):
        run = prefill_of if what == "prefill" else steps_of
        return {name: run(model, torch.zeros(1, tokens, dtype=torch.long)) for name, model in models.items()}

    with torch.inference_mode():
        said = planning.time_layer(copy.deepcopy(core).to("meta"), torch.float32, "cpu", False, None)[what]
        rows = planning.time_lengths(works, torch.device("cpu"), False)
    found = find_crossover(rows)["faster_from"]
    print(what, said, rows, found)
    assert found == pytest.approx(said["faster_from"], rel=0.3)


def prefill_of(model, ids):
    return lambda: model(ids, use_cache=True, logits_to_keep=1)


def steps_of(model, ids, steps=16):
    """The next tokens after ids; softmax's cache, which grows, is cut back to them each time."""
    cache = model(ids, use_cache=True, logits_to_keep=1)[CACHE]

    def run():
        for _ in range(steps):
            model(ids[:, :1], **{CACHE: cache}, use_cache=True)
        if not hasattr(model.config, "mhla"):
            cache.crop(-steps)

    return run


def test_what_converts_to_nothing():
    with refused("'bloom'", "its attention does not call transformers' attention interface", kind=NotConvertible):
        planned(BloomConfig())
    with refused("it sees only the last 16 tokens", kind=NotConvertible):
        planned(softmax_model("mistral", sliding_window=16).config)


@pytest.fixture
def folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config_of("Llama-3.2-1B").save_pretrained("llama")
    BloomConfig().save_pretrained("bloom")
    ViTConfig().save_pretrained("vit")
    mhla_hf.convert(softmax_model()).config.save_pretrained("mhla")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.json").write_text("{")


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("llama", 2, "the following arguments are required: --context"),
        ("llama --context 0", 2, "context: got 0, expected the tokens of a sequence"),
        ("llama --context many", 2, "argument --context: invalid int value"),
        ("nowhere/at/all --context 9", 2, "model: got 'nowhere/at/all', which is not a folder"),
        ("nobody/nothing --context 9", 2, "model: got 'nobody/nothing', which is not a folder, expected a model"),
        ("damaged --context 9", 2, "model: got 'damaged', expected a configuration that can be loaded"),
        ("vit --context 9", 2, "got 'vit', a vision tower, expected a causal language model"),
        ("mhla --context 9", 2, "an MHLA model already"),
        ("llama --context 9 --layers half", 2, "layers: got 'half'"),
        ("llama --context 9 --layers 16", 2, "layers: got layer 16"),
        ("llama --context 9 --set mixing_form=softmax", 2, "mixing_form: got 'softmax', whose state grows"),
        ("llama --context 9 --set colour=red", 2, "'colour'"),
        ("bloom --context 9", 1, "got model type 'bloom'"),
    ],
)
def test_bad_input_is_one_sentence(folders, capsys, line, code, said):
    assert main(["plan", *line.split(), "--quiet", "--no-timing"]) == code
    out, err = capsys.readouterr()
    assert out == "" and said in err and err.count("\n") == 1 and err.startswith("mhla-hf plan: ")


def test_from_the_shell(folders, capsys):
    line = ["plan", "llama", "--context", "8192", "--quiet"]
    assert main([*line, "--no-timing"]) == 0
    page = capsys.readouterr().out
    assert page.startswith("llama: bfloat16, sequences of 8,192 tokens\n") and "10 of 16 layers become MHLA" in page
    assert "8,192         256.0           107.9           2.37" in page and "next token" not in page
    assert main([*line, "--device", "abacus", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["timing"] == {"unknown": "the speed on 'abacus' is not known: it is not here"}
    assert "Time: the speed on 'abacus' is not known: it is not here.\n" in render_plan(record)
