"""Conversion of language models with text: KV heads that keep softmax, and what is told of it."""

import copy
import io
import json
import logging

import pytest
import torch
from tools.small_models import CACHE, VOCAB, refused, softmax_model, tokens
from tools.small_repos import save_model
from tools.small_scores import small_tokenizer
from tools.small_types import small_model_of
from tqdm import tqdm

import mhla_hf
from mhla_hf.cli.main import main
from mhla_hf.conversion import head_choice, kl_to_teacher
from mhla_hf.conversion.head_choice import AskingRow, HeadChoice, highest_scores, score_heads
from mhla_hf.conversion.sizes import sizes_of_conversion
from mhla_hf.conversion.teacher import log_probabilities, mhla_layers, replaced_cores, softmax_instead
from mhla_hf.models.language.causal_attention import ATTENTION_NAME
from mhla_hf.nn.core import softmax_attention

SMALL = {"block_size": 8, "window": 2, "progress": False}


def urns(count, seed, length=96, reach=40):
    """Rows `[count, length]` of which most tokens are one of the `reach` before: the past counts, the distant one not."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCAB, (count, length), generator=draw)
    for place in range(1, length):
        back = torch.randint(1, min(place, reach) + 1, (count,), generator=draw)
        again = torch.rand(count, generator=draw) < 0.8
        ids[:, place] = torch.where(again, ids[torch.arange(count), place - back], ids[:, place])
    return ids


@pytest.fixture(scope="module")
def teacher():
    """A Llama of four KV heads that has learned a little."""
    model, steps = softmax_model(initializer_range=0.05, num_key_value_heads=4, max_position_embeddings=96), 60
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - step / steps)
        ids = urns(8, seed=step)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


TEXT = urns(33, seed=1000).flatten()


def converted(teacher, **options):
    return mhla_hf.convert(copy.deepcopy(teacher), **{**SMALL, "text": TEXT, **options})


@pytest.mark.parametrize("salient", [0, 4])
def test_each_stage_comes_closer_to_the_original(teacher, salient):
    model = converted(teacher, keep=0.25, salient=salient)
    told = model.config.mhla_measured
    assert "fitted" not in told and 0 < told["kept"]["kl"] < told["converted"]["kl"]
    assert sum(map(len, model.config.mhla["softmax_heads"].values())) == 3
    assert told["softmax_heads"] == model.config.mhla["softmax_heads"] and set(told["head_scores"]) == {"0", "1", "2"}
    rows = urns(4, seed=2000)
    alone = mhla_hf.convert(copy.deepcopy(teacher), layers="all", block_size=8, window=2, salient=0)
    assert kl_to_teacher(model, [rows]) < 0.7 * kl_to_teacher(alone, [rows])
    assert model.state_dict().keys() == teacher.state_dict().keys(), "nothing is new"
    for name, value in teacher.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), f"{name} of the base has changed"


def test_scores_of_heads_are_squares_of_first_order_effects(teacher):
    """Of one head and token at a time: the derivative of the loss by a step from softmax to MHLA."""
    model = mhla_hf.convert(copy.deepcopy(teacher), layers="all", salient=2, block_size=8, window=2).double()
    ids, bar = urns(1, seed=7), tqdm(total=12, file=io.StringIO())
    scores = score_heads(model, [ids, ids], bar)
    assert bar.n == 12 and all(parameter.requires_grad for parameter in model.parameters())
    positions = torch.arange(12, 95)

    class Stepped(torch.nn.Module):
        def __init__(self, core, head, token, step):
            super().__init__()
            self.core, self.head, self.token, self.step = core, head, token, step

        def forward(self, q, k, v, *, scale=None, **options):
            o = softmax_attention(q, k, v, scale, True)
            change = torch.zeros(*o.shape[:3], 1, dtype=o.dtype)
            change[:, self.token, self.head * o.shape[2] // 4 : (self.head + 1) * o.shape[2] // 4] = self.step
            return o + change * (self.core(q, k, v, scale=scale, **options) - o)

    @torch.no_grad()
    def loss(*change):
        with softmax_instead(model), replaced_cores({1: mhla_layers(model)[1]}, lambda x: Stepped(x.core, *change)):
            log_p = log_probabilities(model, ids, positions)
        return -log_p.double().gather(-1, ids[:, positions + 1, None]).sum()

    for head in (0, 3):
        changes = [float(loss(head, token, 0.1) - loss(head, token, -0.1)) / 0.2 for token in range(16, 95)]
        expected = sum(change**2 for change in changes) / (2 * len(positions))
        assert expected == pytest.approx(scores[1][head], rel=0.05)
    assert highest_scores({0: [1.0, 3.0], 2: [3.0, 2.0]}, 2) == {0: [1], 2: [0]}


def test_auto_takes_the_smallest_cache_that_keeps_enough(teacher, monkeypatch, caplog):
    """Every row of the curve is the model that its settings make; a larger tolerance takes a smaller cache."""
    monkeypatch.setattr(head_choice, "SLOTS", (2, 8))
    monkeypatch.setattr(head_choice, "MAX_LOSS", 1.0)
    with caplog.at_level(logging.WARNING, "mhla_hf"):
        strict = converted(teacher, tolerance=1e-9).config.mhla_measured
    assert "no candidate keeps enough" in caplog.text
    model = converted(teacher, keep="auto", tolerance=100.0)
    original, *points = told = model.config.mhla_measured["curve"]
    assert [(point["salient"], point["heads"]) for point in points] == [(n, k) for n in (2, 8) for k in (1, 2, 3)]
    assert [point["heads"] for point in points if point.get("chosen")] == [1] and model.config.mhla["salient"] == 2
    assert model.config.mhla_measured["context"] == 96 and "settings" not in original
    chosen = next(point for point in strict["curve"] if point.get("chosen"))
    assert chosen["kl"] == min(point["kl"] for point in points) > original["kl"] == 0
    assert chosen["bytes"]["96"] > points[0]["bytes"]["96"] and original["bytes"]["96"] > chosen["bytes"]["96"]
    assert model.config.mhla_measured["cache_bytes"]["96"]["converted"] == points[0]["bytes"]["96"]
    remade = mhla_hf.convert(copy.deepcopy(teacher), **points[0]["settings"])
    ids = urns(1, seed=4)
    with torch.no_grad():
        assert torch.equal(remade(ids).logits, model(ids).logits)
    assert told == json.loads(json.dumps(told))
    longer = converted(teacher, context=200, tolerance=100.0).config.mhla_measured
    assert list(longer["cache_bytes"]) == ["96", "200"]


def test_a_size_compares_numbers_of_salient_tokens(teacher, monkeypatch):
    """Even if no head can keep softmax."""
    monkeypatch.setattr(head_choice, "SLOTS", (7, 8))
    settings = mhla_hf.MHLASettings(windowed=True, block_size=8, window=2, salient=8)
    state = sum(x.state_bytes for x in sizes_of_conversion(teacher, settings).values())
    model = converted(teacher, keep=f"{(state + 400) / 1024}KiB", context=96)
    _, few, many = model.config.mhla_measured["curve"]
    chosen = min((few, many), key=lambda point: point["kl"])
    assert (few["heads"], many["heads"]) == (0, 0) and chosen["chosen"]
    assert model.config.mhla["salient"] == chosen["salient"] and model.config.mhla["softmax_heads"] is None
    assert model.config._attn_implementation == ATTENTION_NAME and "kept" not in model.config.mhla_measured


def test_a_curve_measures_the_models_that_its_settings_make(teacher):
    """KL and recall of one candidate, by another way than `ChangedCore`."""
    row = AskingRow(urns(1, seed=5), torch.arange(96) == 90)
    model = mhla_hf.convert(copy.deepcopy(teacher), layers="all", salient=8, block_size=8, window=2)
    kept = {0: [0], 1: [0], 2: [0]}
    points = [{"salient": 4, "heads": 3, "kept_heads": kept}]
    original = head_choice.measure_candidates(model, row, points, tqdm(disable=True))
    made = mhla_hf.convert(copy.deepcopy(teacher), layers="all", salient=4, block_size=8, window=2, softmax_heads=kept)
    with torch.no_grad():
        log_p, expected = (x(row.ids).logits.log_softmax(-1)[0] for x in (made, teacher))
    compared = torch.arange(12, 95)
    kl = (expected.exp() * (expected - log_p)).sum(-1)[compared].mean()
    assert points[0]["kl"] == pytest.approx(float(kl), abs=1e-4) and kl > 1e-3
    for told, of_model in ((points[0], log_p), (original, expected)):
        assert told["answers"] == pytest.approx(float(of_model[89, row.ids[0, 90]].exp()), abs=1e-4)
        copied = torch.arange(82 - 6, 82)
        assert told["recall"] == pytest.approx(float(of_model[copied - 1, row.ids[0, copied]].mean()), abs=1e-4)


def test_a_seed_repeats_it(teacher):
    options = {"keep": 3, "salient": 4}  # few, so that tokens are dropped
    first, second, other = (converted(teacher, seed=seed, **options).config.mhla_measured for seed in (5, 5, 6))
    assert first["head_scores"] == second["head_scores"] != other["head_scores"]


def test_its_own_text_and_a_list_of_texts(teacher):
    assert converted(teacher, text="self", keep=1).config.mhla_measured["text"] == "self"
    tokenizer = small_tokenizer()
    model = softmax_model(vocab_size=len(tokenizer), max_position_embeddings=64, num_key_value_heads=4)
    texts = ["some words of a text that goes on. " * 20, "and other ones, again and again. " * 30]
    mhla_hf.convert(model, tokenizer=tokenizer, text=texts, keep="9%", **SMALL)
    assert model.config.mhla_measured["text"] == "a list of texts"
    assert sum(map(len, model.config.mhla["softmax_heads"].values())) == 1


def test_what_keep_means(teacher, monkeypatch):
    settings = mhla_hf.MHLASettings(windowed=True, block_size=8)

    def choose(keep, context=96, compares_slots=False):
        choice = HeadChoice(teacher, settings, keep, context, 0.1, compares_slots)
        return [(point["salient"], point["heads"]) for point in choice.candidates]

    for keep, count in ((1 / 6, 2), (0, 0), (0.0, 0), (3, 3), ("25%", 3)):
        assert choose(keep) == choose(keep, compares_slots=True) == [(0, count)]
    sizes = sizes_of_conversion(teacher, settings)
    token, state = sum(x for _, x, _ in sizes.values()), sum(x for _, _, x in sizes.values())
    assert choose(f"{(state + (token * 4096 - state) / 2) / 1024}KiB", 4096) == [(0, 6)]
    monkeypatch.setattr(head_choice, "SLOTS", (2, 8, 4096))
    (few, more), (many, fewer) = choose("64KiB", 96, compares_slots=True)  # 4,096 salient tokens do not fit
    assert (few, many) == (2, 8) and more > fewer
    for wrong in (12, "64", 1.0, -1, "many", True, "200%", "1KiB"):
        with refused(f"keep: got {wrong!r} at 96 tokens, expected 0 to 11 of the 12 KV heads"):
            choose(wrong)


def test_cache_of_a_converted_model_is_as_told(teacher):
    """The bytes in `mhla_measured`, counted in a cache that the model filled."""
    model = converted(teacher, keep=5)
    with torch.no_grad():
        cache = model(urns(1, seed=3), use_cache=True)[CACHE]
    held = sum(layer.state.nbytes() for layer in cache.layers if hasattr(layer, "state"))
    kept = [getattr(layer, "softmax", layer) for layer in cache.layers]
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in kept if layer is not None)
    assert list(model.config.mhla_measured["cache_bytes"]) == ["96"]
    told = model.config.mhla_measured["cache_bytes"]["96"]["converted"]
    assert abs(kept + held - told) <= 0.01 * told


@pytest.mark.parametrize("model_type", ["cohere", "deepseek_v3", "gpt2", "phi3", "smollm3"])
def test_other_types(model_type):
    """Interleaved, latent, partial and no rotation: two heads of the converted model equal the original's with all kept."""
    base = small_model_of(model_type)
    ids = torch.randint(3, 60, (1, 60), generator=torch.Generator().manual_seed(0))
    model = mhla_hf.convert(copy.deepcopy(base), text=tokens(1, 2000)[0] % 60, keep=2, **SMALL)
    assert sum(map(len, (model.config.mhla["softmax_heads"] or {}).values())) <= 2
    with torch.no_grad(), softmax_instead(model):
        torch.testing.assert_close(model(ids).logits, base(ids).logits, rtol=1e-4, atol=1e-4)


WRONG = [
    ({"text": TEXT[:100]}, "text: got 100 tokens, expected at least 150: 6 rows longer than a window and a block (24"),
    ({"window": 12}, "window: got 12 with block_size 8, expected (window + 1) * block_size below the 96 tokens"),
    ({"context": "4096"}, "context: got '4096', expected a whole number of at least 1."),
    ({"windowed": False}, "text: got a text along with windowed=False"),
    (
        {"checkpoint": "part"},
        "checkpoint: got 'part' with a language model, which has nothing to resume, expected None.",
    ),
    ({"tolerance": "0.1"}, "tolerance: got '0.1' with keep=None, expected a number above 0"),
    ({"keep": 2, "tolerance": 0.1}, 'tolerance: got 0.1 with keep=2, expected a number above 0 with keep="auto".'),
    ({"effort": 0}, "effort: got 0, expected a finite number above 0"),
    ({"text": None, "softmax_heads": {1: [4]}}, "softmax_heads: got head 4 in layer 1, expected 0 to 3"),
]


def test_what_is_refused(teacher):
    before, model = copy.deepcopy(teacher.state_dict()), copy.deepcopy(teacher)
    for options, words in WRONG:
        with refused(words, kind=(TypeError, ValueError)):
            mhla_hf.convert(model, **{"text": TEXT, **SMALL, **options})
    with refused("model: got LlamaForCausalLM on the meta device, expected one with weights."):
        converted(copy.deepcopy(model).to("meta"))
    with refused("text: got a text for LlamaModel, which predicts no tokens"):
        mhla_hf.convert(model.model, text=TEXT, **SMALL)
    assert type(model) is type(teacher)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_layer_that_lists_all_its_heads_stays_softmax(teacher):
    model = mhla_hf.convert(copy.deepcopy(teacher), layers="all", softmax_heads={1: [0, 1, 2, 3], 2: [0]}, block_size=8)
    assert model.config.mhla["layers"] == [0, 2] and model.config.mhla["softmax_heads"] == {"2": [0]}
    assert not hasattr(model.model.layers[1].self_attn, "mhla")


def test_the_command(tmp_path, capsys):
    """It prints the report of `convert` once."""
    base = softmax_model(vocab_size=400, num_key_value_heads=4, max_position_embeddings=96)
    source, text = save_model(tmp_path / "base", base), tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog, and then it sleeps in the sun. " * 60)
    out = tmp_path / "new" / "folder" / "out"  # with a slash at its end, as a shell completes it
    options = ["--text", str(text), "--keep", "1/6", "--set", "block_size=8", "--set", "window=2"]
    assert main(["convert", str(source), f"{out}/", *options]) == 0
    told = capsys.readouterr().out
    assert told.count("perplexity") == 1 and "KV heads" in told and "cache at 96 tokens" in told
    config = json.loads((out / "config.json").read_text())
    assert config["mhla"]["softmax_heads"] and config["mhla_measured"]["text"] == "text.txt"
    assert [path.name for path in out.parent.iterdir()] == ["out"]
