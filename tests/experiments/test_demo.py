"""The toy demo in miniature: run to its end, run again, killed and gone on with, and what it refuses."""

import contextlib
import importlib
import io
import json
import math
import re
import statistics

import pytest
from tools.small_scores import HELD_OUT

import mhla_hf
from experiments.demo import lookups, toy
from experiments.demo.report import collect, render_report, tokens_to_loss
from experiments.demo.text import hold_out, make_tokenizer, read_text
from experiments.demo.toy import FULL, Toy, run_toy
from mhla_hf.evaluation.recall import choose_words
from mhla_hf.evaluation.records import Results
from mhla_hf.hub.card import check_card

TEACHER = """
settings: {vocab_size: 440, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 3, num_attention_heads: 2,
  num_key_value_heads: 2, max_position_embeddings: 256, tie_word_embeddings: true, attention_bias: true}
stages:
  - {name: language model, loss: lm, steps: 6, lr: 3e-3, batch_size: 2, seq_len: 64}
run: {save_every: 6}
"""
STUDENT = """
settings: {layers: all, block_size: 16}
stages:
  - {name: transfer, loss: transfer, trainable: mhla, steps: 2, lr: 1e-2, batch_size: 2, seq_len: 64}
  - {name: distill, loss: logits, steps: 4, lr: 1e-3, lr_mhla: 1e-2, batch_size: 2, seq_len: 256}
run: {save_every: 1}
"""


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """A demo of models with 30,000 weights, which does little for each of them."""
    recipes = tmp_path_factory.mktemp("recipes")
    (recipes / "demo_teacher.yaml").write_text(TEACHER)
    (recipes / "demo_student.yaml").write_text(STUDENT)
    text = read_text()[0][-120_000:]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookups, "LEAST", 0)  # the text comes once
        patch.setattr(toy, "RECIPES", recipes)
        patch.setattr(toy, "ITEMS", 2)
        patch.setattr(toy, "read_text", lambda: (text, "the end"))
        for name in ("FIT_ROWS", "LONG_ROWS"):
            patch.setattr(importlib.import_module("mhla_hf.conversion.language"), name, 4)
        yield


def run(out, **options):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        run_toy(out, full=True, progress=False, **options)
    return printed.getvalue()


@pytest.fixture(scope="module")
def journey(short, tmp_path_factory):
    out = tmp_path_factory.mktemp("journey") / "out"
    return out, run(out)


def test_what_lies_in_out_and_run_again_it_trains_and_measures_nothing(journey):
    out, printed = journey
    results = json.loads((out / "results.json").read_text())
    assert list(results["models"]) == list(FULL) and results["seeds"] == [0]
    teacher = results["models"]["teacher"]["bits_per_byte"]["mean"]
    for name in FULL:
        folder, models = out / name, results["models"]
        assert (folder / "model.safetensors").is_file() and (folder / "tokenizer.json").is_file()
        assert (folder / "modeling_mhla.py").exists() == (name != "teacher")
        measured = models[name]["bits_per_byte"]["mean"]
        recall = Results.read(folder).find("lookups_recall_256", "acc_back_128").value
        assert models[name]["recall_back_128"]["mean"] == recall
        change = models[name]["over_teacher_percent"]["mean"]
        assert 1 < measured < 10 and math.isclose(change, 100 * (measured / teacher - 1), abs_tol=1e-9)
    assert [path.name for path in out.rglob("*") if ".tmp-" in path.name or path.suffix in (".state", ".start")] == []
    assert json.loads((out / "mhla" / "train.json").read_text())["steps"] == 6
    check_card(out / "mhla")
    assert render_report(results) in printed and "hybrid 1 in 4" in printed
    assert "loaded as transformers_modules." in printed and "logits equal bit for bit" in printed
    kept = [path for name in FULL for path in (out / name).iterdir() if path.name != "README.md"]
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in kept if path.name != "card.json"}
    printed = run(out)
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in before} == before
    assert printed.count("is there already") == len(FULL)


def test_of_several_seeds_the_teacher_is_trained_on_as_well(short, tmp_path):
    control = Toy(tmp_path, True, 2, False, None)
    assert control.models == (*FULL, "control") and control.folder("mhla", 1) == tmp_path / "seed-1" / "mhla"
    (stage,) = control.control_plan.stages
    student = control.student_plan.stages
    assert (stage.loss, stage.steps, stage.lr) == ("lm", sum(s.steps for s in student), student[-1].lr)


def test_refused_in_one_sentence_and_nothing_changed(journey, tmp_path):
    out, _ = journey
    (tmp_path / "own.txt").write_text("mine")
    before = {path: path.stat().st_mtime_ns for place in (out, tmp_path) for path in place.rglob("*")}
    for changes, sentence in (
        ({"full": False}, "^--out: .* was started with another model, expected another folder"),
        ({"seeds": 0}, "seeds: got 0"),
        ({"seeds": 2, "full": False}, "seeds: got 2, expected 1, or --full as well"),
        ({"out": tmp_path}, "holds other files and no demo.json"),
    ):
        with pytest.raises(ValueError, match=sentence):
            run_toy(**{"out": out, "full": True, "progress": False, **changes})
    assert before == {path: path.stat().st_mtime_ns for place in (out, tmp_path) for path in place.rglob("*")}


def test_a_text_that_cannot_be_trained_on_is_refused(tmp_path):
    (tmp_path / "short.txt").write_text("Too short. " * 10)
    with pytest.raises(ValueError, match="with 110 characters, expected at least 60,000"):
        read_text(tmp_path / "short.txt")
    with pytest.raises(ValueError, match="which does not exist, expected a file"):
        read_text("no/such/file.txt")


def test_held_out_text_is_not_trained_on():
    text, name = read_text()
    train, held_out = hold_out(text)
    assert name == "pydoc_data.topics" and text.startswith(train) and 0.05 < len(held_out) / len(text) < 0.07
    known = {" ".join(paragraph.split()) for paragraph in train.split("\n\n")}
    paragraphs = [paragraph for paragraph in held_out.split("\n\n") if paragraph.strip()]
    assert len(paragraphs) > 100 and not known & {" ".join(paragraph.split()) for paragraph in paragraphs}
    assert all(paragraph in text[len(train) :] for paragraph in paragraphs)
    long = "".join(f"paragraph {number} of many words\n\n" for number in range(50_000))
    train, held_out = hold_out(long)
    assert train + held_out == long and 35_000 < len(held_out) <= 40_000


def test_a_measured_start_is_not_measured_again(journey, tmp_path, monkeypatch):
    measured, distilled = [], []

    def convert(model, text=None, keep=None, **settings):
        settings = {name: value for name, value in settings.items() if name not in ("tokenizer", "seed", "progress")}
        model = mhla_hf.convert(model, **settings)
        measured.append(keep)
        model.config.mhla_measured = {"softmax_heads": {"1": [0]}}
        return model

    def distill(self, student, *_):
        distilled.append(student.config.mhla_measured)
        raise KeyboardInterrupt

    monkeypatch.setattr(toy, "CONTINUATION", 1)
    monkeypatch.setattr(toy, "convert", convert)
    monkeypatch.setattr(toy, "TEACHER", journey[0] / "teacher")
    monkeypatch.setattr(Toy, "distill", distill)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            run_toy(tmp_path / "out", progress=False)
    assert measured == [0.25] and distilled == 2 * [{"softmax_heads": {"1": [0]}}]


def test_spread_is_over_seeds(journey):
    """Three seeds that differ in one number: mean and standard error by hand."""
    out, _ = journey
    folders = {seed: {name: out / name for name in FULL} for seed in range(3)}
    bits = {seed: dict.fromkeys(FULL, 2.0) | {"mhla": float(seed == 1)} for seed in range(3)}
    results = collect(folders, bits, {})
    measure = results["models"]["mhla"]["bits_per_byte"]
    assert math.isclose(measure["mean"], 1 / 3)
    assert math.isclose(measure["stderr"], statistics.stdev([0, 1, 0]) / math.sqrt(3))
    assert results["models"]["teacher"]["bits_per_byte"]["stderr"] == 0.0
    assert "mean ± standard error over 3 seeds" in render_report(results)


def test_tokens_to_a_loss():
    curve = [{"stage": "transfer", "loss": 0.0, "tokens": 1}]
    curve += [{"stage": "distill", "loss": loss, "tokens": 10 * n} for n, loss in enumerate((9, 8, 7, 6, 5, 4, 3), 1)]
    assert [tokens_to_loss(curve, goal) for goal in (7.0, 5.9, 4.9)] == [50, 70, None]


def test_a_name_comes_back_with_its_last_value_and_the_text_is_kept(monkeypatch):
    words = choose_words(make_tokenizer(read_text()[0][:100_000], 600, 256))
    monkeypatch.setattr(lookups, "LEAST", 2 * len(HELD_OUT))
    added = lookups.add_lookups(HELD_OUT, words)
    lookup = re.compile(r"- (\w+) (\w+)\n")
    lines = added.splitlines(keepends=True)
    known, back, new = {}, 0, 0
    for line in lines:
        if (found := lookup.fullmatch(line)) and found[1] in words[0]:
            back += known.get(found[1]) == found[2]
            new += known.get(found[1]) != found[2]
            known[found[1]] = found[2]
    assert back > new > 20
    kept = "".join(line for line in lines if not ((found := lookup.fullmatch(line)) and found[1] in words[0]))
    assert kept == 2 * HELD_OUT and added[: len(added) // 2] != added[len(added) // 2 :]
