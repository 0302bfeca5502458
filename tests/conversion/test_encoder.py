"""Conversion of encoders with text: MHLA heads that learned without labels, and what is told of it."""

import copy
import json

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from tools.small_encoders import SLIDING, softmax_encoder
from tools.small_models import refused
from tools.small_scores import TRAINING, small_tokenizer

import mhla_hf
from mhla_hf.cli.main import main
from mhla_hf.conversion import encoder
from mhla_hf.conversion.encoder import embed, read_encoder_rows
from mhla_hf.conversion.fit import OutputFit
from mhla_hf.conversion.teacher import mhla_layers, softmax_instead
from mhla_hf.hub.card import write_first_card
from mhla_hf.hub.facts import Person

SMALL = {"block_size": 8, "progress": False}
TEXT = torch.randint(3, 60, (6000,), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def teacher():
    return softmax_encoder("bert")


@pytest.fixture
def tokenizer():
    """One that puts a token before each text and another behind it."""
    made = small_tokenizer()
    made.add_special_tokens({"cls_token": "[CLS]", "sep_token": "[SEP]"})
    special = [("[CLS]", made.cls_token_id), ("[SEP]", made.sep_token_id)]
    made.backend_tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=special)
    return made


@pytest.mark.parametrize("settings", [{}, {"window": 2}, {"layers": [0, 2]}])
def test_it_comes_closer_to_the_original(teacher, settings):
    model = mhla_hf.convert(copy.deepcopy(teacher), text=TEXT, **SMALL, **settings)
    told = model.config.mhla_measured
    assert list(told["fitted"]["cosine"]) == ["16", "64"] and told["text"] == "a tensor of tokens"
    losses = [1 - told[stage]["cosine"]["64"] for stage in ("fitted", "converted")]
    assert 0 <= losses[0] < 0.5 * losses[1]
    assert told["softmax_heads"] == {} and "cache_bytes" not in told
    assert model.config.mhla["layers"] == settings.get("layers", [0, 1, 2])
    for name, value in teacher.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), f"{name} of the base has changed"
    ids = TEXT[:64].view(1, 64)
    assert float((embed(model, ids) * embed(teacher, ids)).sum()) < 1 - 1e-4, "MHLA changes nothing"
    with softmax_instead(model):
        torch.testing.assert_close(embed(model, ids), embed(teacher, ids))


@pytest.mark.parametrize("settings", [{}, {"mixing_form": "softmax", "feature_map": "exp"}])
def test_outputs_of_every_layer_come_closer(teacher, settings):
    model = mhla_hf.convert(copy.deepcopy(teacher), layers="all", block_size=8, **settings)
    fit, ids = OutputFit(model, steps=30), TEXT[: 4 * 64].view(4, 64)
    first = [fit.step(ids), dict(fit.errors)][1]
    for _ in range(29):
        fit.step(ids)
    assert all(fit.errors[core] < 0.8 * error for core, error in first.items())


def test_an_input_within_the_window_is_as_the_original_computes_it(teacher):
    model = mhla_hf.convert(copy.deepcopy(teacher), layers="all", block_size=16)
    ids = TEXT[:16].view(1, 16)
    torch.testing.assert_close(model(ids)[0], teacher(ids)[0])


@pytest.mark.parametrize("model_type", [*SLIDING[:1], "eurobert", "roberta"])
def test_other_types(model_type):
    """Layers that stay softmax, grouped heads, and positions that begin later."""
    base = softmax_encoder(model_type)
    model = mhla_hf.convert(copy.deepcopy(base), text=TEXT, **SMALL)
    told = model.config.mhla_measured
    assert list(told["fitted"]["cosine"]) == (["15", "62"] if model_type == "roberta" else ["16", "64"])
    assert set(mhla_layers(model)) == ({0, 2} if model_type in SLIDING else {0, 1, 2})
    assert told["fitted"]["cosine"] != told["converted"]["cosine"]


def test_rows_have_special_tokens_and_lengths_of_their_own(teacher, tokenizer):
    model = softmax_encoder("bert", vocab_size=len(tokenizer))
    rows = read_encoder_rows(model, tokenizer, [TRAINING], 0, False)
    assert [ids.shape for ids in rows.fit[:4]] == [(3, 64), (6, 32), (12, 16), (3, 64)]
    assert len(rows.fit) == encoder.FIT_STEPS and [ids.shape[1] for ids in rows.held_out] == [16, 64]
    for ids in (*rows.fit, *rows.held_out):
        assert set(ids[:, 0].tolist()) == {tokenizer.cls_token_id}
        assert set(ids[:, -1].tolist()) == {tokenizer.sep_token_id}
    tokens = torch.arange(3, 60).repeat(20)
    short = read_encoder_rows(model, None, tokens[:120], 0, False)
    assert short.fit[0].shape == (3, 20) and len(short.held_out[1]) == 1
    again = read_encoder_rows(model, None, tokens, 1, False).fit[0]
    assert not torch.equal(read_encoder_rows(model, None, tokens, 0, False).fit[0], again)


def test_the_command_and_the_card(tmp_path, capsys, tokenizer):
    softmax_encoder("bert", vocab_size=len(tokenizer)).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    (tmp_path / "text.txt").write_text(TRAINING)
    out = tmp_path / "out"
    line = ["convert", str(tmp_path / "base"), str(out), "--text", str(tmp_path / "text.txt"), "--set", "block_size=8"]
    assert main(line) == 0
    told = capsys.readouterr().out
    measured = json.loads((out / "config.json").read_text())["mhla_measured"]
    fitted = [f"{value:.4f}" for value in measured["fitted"]["cosine"].values()]
    assert "cosine, 64 tokens" in told and all(value in told for value in fitted)
    card = write_first_card(out, Person("toy", None, "mit")).read_text()
    assert f"| all heads MHLA | {fitted[0]} | {fitted[1]} |" in card
    assert "What the conversion kept" in card and "KV heads" not in card and "Nothing was measured" not in card
    assert main([*line[:2], str(tmp_path / "plain")]) == 0
    assert "next, distill it" in capsys.readouterr().out and not list(tmp_path.glob("*.part*"))


def test_what_is_refused(teacher):
    model = copy.deepcopy(teacher)
    for options, words in (
        ({"text": "self"}, ('text: got "self" with BertModel', "which writes no text")),
        ({"text": TEXT, "keep": 0.5}, ("keep: got 0.5 with BertModel, an encoder",)),
        ({"text": TEXT, "context": 512}, ("context: got 512 with BertModel",)),
        ({"text": TEXT[:90]}, ("text: got 90 tokens, expected at least 102: 6 rows of more than 16",)),
        ({"text": TEXT, "mixing_form": "softmax"}, ("text: got a text along with windowed=False",)),
    ):
        with refused(*words):
            mhla_hf.convert(model, **SMALL, **options)
    assert type(model) is type(teacher)
