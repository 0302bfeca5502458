"""The demo in miniature: run to its end, run again, killed and gone on with, and what it refuses."""

import contextlib
import importlib
import io
import json
import math
import multiprocessing
import shutil
import statistics
import time

import pytest
from tools.small_recipes import STUDENT, TEACHER

import mhla_hf
from experiments.demo import lookups
from experiments.demo import toy as steps
from experiments.demo.figures import compare_times
from experiments.demo.report import collect, render_report, tokens_to_loss
from experiments.demo.text import hold_out, make_tokenizer, read_text
from experiments.demo.toy import MODELS, _Demo, default_folder, run_demo
from mhla_hf.evaluation.records import Results
from mhla_hf.hub.card import check_card


class Journey:
    """One demo of 30,000 weights: how it is called, and where it lies."""

    def __init__(self, place):
        self.out = place / "out"
        (place / "teacher.yaml").write_text(TEACHER)
        (place / "student.yaml").write_text(STUDENT)
        (place / "own.txt").write_text(read_text()[0][-120_000:])
        files = {"text": "own.txt", "teacher_recipe": "teacher.yaml", "student_recipe": "student.yaml", "out": "out"}
        self.arguments = {name: str(place / file) for name, file in files.items()}
        self.arguments |= {"items": 2, "lengths": [64], "full": True, "control": True, "progress": False}
        self.arguments["plain"] = False

    def run(self, **changes):
        """What it prints."""
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            run_demo(**{**self.arguments, **changes})
        return printed.getvalue()


@pytest.fixture(scope="module")
def short():
    """Little of what a demo does for each of its models."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookups, "LEAST", 0)  # the text comes once
        for name in ("FIT_ROWS", "GATE_STEPS"):
            patch.setattr(importlib.import_module("mhla_hf.conversion.language"), name, 4)
        yield


@pytest.fixture(scope="module")
def journey(short, tmp_path_factory):
    """A demo that was run to its end; `first` is what it printed."""
    journey = Journey(tmp_path_factory.mktemp("journey"))
    journey.first = journey.run()
    return journey


def check_models(out):
    """Check that each model is there, with its scores, and that nothing else was left."""
    assert json.loads((out / "mhla" / "train.json").read_text())["steps"] == 6
    for name in MODELS:
        folder = out / name
        assert (folder / "model.safetensors").is_file() and (folder / "tokenizer.json").is_file()
        assert {record.metric for record in Results.read(folder)} >= {"acc", "acc_back_0"}
        assert (folder / "modeling_mhla.py").exists() == (name not in ("teacher", "control"))
    assert [path.name for path in out.rglob("*") if ".tmp-" in path.name or path.suffix in (".state", ".start")] == []


@pytest.mark.slow
def test_killed_it_goes_on_to_the_end(short, tmp_path):
    """With SIGKILL, while MHLA was distilled."""
    killed = Journey(tmp_path)
    process = multiprocessing.get_context("fork").Process(target=killed.run)
    process.start()
    while not any(".tmp-" not in state.name for state in (killed.out / "mhla.state").glob("step-*")):
        assert process.is_alive()
        time.sleep(0.01)
    process.kill()
    process.join()
    assert not (killed.out / "mhla").exists()
    assert f"{killed.out / 'teacher'} is there already" in killed.run()
    check_models(killed.out)
    assert json.loads((killed.out / "mhla" / "train.json").read_text())["resumed"] >= 1


def test_every_model_is_there(journey):
    check_models(journey.out)


def test_what_lies_in_out(journey):
    results = json.loads((journey.out / "results.json").read_text())
    assert list(results["models"]) == list(MODELS) and results["seeds"] == [0]
    teacher = results["models"]["teacher"]["bits_per_byte"]["mean"]
    for name in MODELS:
        measured = results["models"][name]["bits_per_byte"]["mean"]
        recall = Results.read(journey.out / name).find("lookups_recall_256", "acc_back_128").value
        assert results["models"][name]["recall_back_128"]["mean"] == recall
        change = results["models"][name]["over_teacher_percent"]["mean"]
        assert 1 < measured < 10 and math.isclose(change, 100 * (measured / teacher - 1), abs_tol=1e-9)
    for figure in ("loss.png", "recall.png", "speed.png"):
        assert (journey.out / figure).read_bytes().startswith(b"\x89PNG")
    timed = {name: {r.metric for r in Results.read(journey.out / name) if r.task == "speed"} for name in MODELS}
    both = {"forward_ms_64", "decode_ms_64", "cache_mib_64"}
    assert timed == {"teacher": both, "mhla": both, "linear": set(), "hybrid": set(), "control": set()}
    assert results["models"]["control"]["steps"]["mean"] == results["models"]["mhla"]["steps"]["mean"] == 6
    check_card(journey.out / "mhla")
    card = (journey.out / "mhla" / "README.md").read_text()
    assert "license: apache-2.0" in card and "plain linear" in card
    assert render_report(results) in journey.first
    for label in ("softmax teacher", "MHLA", "plain linear", "hybrid 1 in 4", "teacher, trained on"):
        assert label in journey.first


def test_a_process_without_the_package_computes_the_same(journey):
    seen = json.loads((journey.out / "visit.json").read_text())
    assert seen["logits_equal"] and seen["largest_difference"] == 0.0
    assert seen["missing"] == seen["unexpected"] == seen["imported"] == []
    assert seen["class"].startswith("transformers_modules.") and seen["continuation"]
    assert seen["continuation"] in journey.first


def test_run_again_it_trains_and_measures_nothing(journey):
    kept = [path for name in MODELS for path in (journey.out / name).iterdir() if path.name != "README.md"]
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in kept if path.name != "card.json"}
    output = journey.run()
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in before} == before
    assert output.count("is there already") == 6


@pytest.mark.slow
def test_a_given_model_without_a_license_gets_no_card(journey, tmp_path):
    """Scored and trained as the others, which is not repeated here; `control` is made with several seeds only."""
    given, out = tmp_path / "given", tmp_path / "out"
    shutil.copytree(journey.out / "teacher", given, ignore=shutil.ignore_patterns("README.md"))
    for file in ("train.json", "results.json"):
        (given / file).unlink()
    fresh = Journey(tmp_path)
    (tmp_path / "student.yaml").write_text(STUDENT.replace("steps: 2", "steps: 1").replace("steps: 4", "steps: 1"))
    output = fresh.run(model=str(given), control=None)
    assert "no model card: license: got none" in output and not (out / "mhla" / "README.md").exists()
    assert (out / "teacher" / "model.safetensors").read_bytes() == (given / "model.safetensors").read_bytes()
    assert "logits equal bit for bit" in output and not (out / "control").exists()
    results = (out / "results.json").read_text()
    assert str(tmp_path) not in results and list(json.loads(results)["models"]) == list(MODELS[:-1])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"items": 3}, "was started with another items"),
        ({"model": "someone/else"}, "^--out: .* was started with another model, expected another folder"),
        ({"seeds": 0}, "seeds: got 0"),
        ({"text": "no/such/file.txt"}, "which does not exist, expected a file"),
        ({"text": ""}, "text: got '', expected a file"),
        ({"student_recipe": "{teacher}"}, "student_recipe: got stages with the losses"),
        ({"teacher_recipe": "nowhere.yaml"}, "'nowhere.yaml', which is not a file"),
        ({"out": "{place}"}, "holds other files and no demo.json"),
        ({"out": "{place}/new", "text": "{place}/short.txt"}, "with 110 characters, expected at least 60,000"),
    ],
)
def test_refused_in_one_sentence_and_nothing_changed(journey, tmp_path, changes, sentence):
    (tmp_path / "short.txt").write_text("Too short. " * 10)
    before = {path: path.stat().st_mtime_ns for place in (journey.out, tmp_path) for path in place.rglob("*")}
    for key, value in changes.items():
        if isinstance(value, str):
            changes = {**changes, key: value.format(teacher=journey.arguments["teacher_recipe"], place=tmp_path)}
    with pytest.raises(ValueError, match=sentence):
        run_demo(**{**journey.arguments, **changes})
    assert before == {path: path.stat().st_mtime_ns for place in (journey.out, tmp_path) for path in place.rglob("*")}


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


def stop(*_):
    raise KeyboardInterrupt


def test_a_users_text_is_trained_on_as_it_is(journey, tmp_path, monkeypatch, capsys):
    """Unless lookups are asked for; how much they add is then said."""
    monkeypatch.setattr(_Demo, "make_models", stop)
    train, _ = hold_out(read_text(journey.arguments["text"])[0])
    for plain in (None, True, False):
        with pytest.raises(KeyboardInterrupt):
            run_demo(**{**journey.arguments, "out": str(tmp_path / str(plain)), "plain": plain})
        text = (tmp_path / str(plain) / "data" / "train.txt").read_text(encoding="utf-8")
        assert (text == train) == (plain is not False)
        said = f"{len(train):,} characters become {len(text):,} (--plain leaves them out)"
        assert (said in capsys.readouterr().out) == (plain is False)
    with pytest.raises(ValueError, match="started with another text"):
        journey.run(out=str(tmp_path / "False"), plain=True)


def test_a_measured_start_is_not_measured_again(journey, tmp_path, monkeypatch):
    """Stopped in the distillation after it, the demo goes on from what was measured."""
    measured, distilled = [], []

    def convert(model, text=None, keep=None, **settings):
        settings = {name: value for name, value in settings.items() if name not in ("tokenizer", "seed", "progress")}
        model = mhla_hf.convert(model, **settings)
        if text is not None:
            measured.append(keep)
            model.config.mhla_measured = {"softmax_heads": {"1": [0]}}
        return model

    def distill(self, student, *_):
        distilled.append(student.config.mhla_measured)
        stop()

    monkeypatch.setattr(steps, "CONTINUATION", 1)
    monkeypatch.setattr(steps, "convert", convert)
    monkeypatch.setattr(_Demo, "_distill", distill)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            journey.run(out=str(tmp_path / "out"), full=False, control=None)
    assert measured == [0.25] and distilled == 2 * [{"softmax_heads": {"1": [0]}}]


@pytest.mark.parametrize(
    ("arguments", "folder"),
    [
        ({}, "out-toy"),
        ({"plain": False}, "out-toy"),
        ({"model": "HuggingFaceTB/SmolLM2-135M"}, "out-toy-SmolLM2-135M"),
        ({"model": "models/llama/", "text": "texts/notes.txt"}, "out-toy-llama-notes"),
        ({"text": "notes.txt", "plain": False}, "out-toy-notes-lookups"),
        ({"full": True, "plain": True}, "out-toy-full-plain"),
    ],
)
def test_another_demo_has_another_folder(arguments, folder):
    assert default_folder(**arguments) == folder


def test_times_in_words():
    assert compare_times(1.80, 1.0) == "1.8x\nfaster" and compare_times(1.0, 1.80) == "1.8x\nslower"
    assert compare_times(1.04, 1.0) == compare_times(1.0, 1.04) == "as fast"


def test_a_table_of_a_plain_text_says_what_its_recall_is(journey):
    results = json.loads((journey.out / "results.json").read_text())
    note = "recall: lookups in held-out text; the training text had none (--lookups adds them)"
    assert note not in render_report(results)
    assert render_report(results | {"text": "own.txt, plain"}).endswith(note)


def test_tokenizer_keeps_every_byte():
    tokenizer, strange = make_tokenizer(read_text()[0][:80_000], 300, 512), "naïve ✓ \x00\t\n 語"
    assert tokenizer.decode(tokenizer(strange)["input_ids"]) == strange and len(tokenizer) == 300


def test_spread_is_over_seeds(journey):
    """Three folders that differ in one number each: mean and standard error by hand."""
    folders = {seed: {name: journey.out / name for name in MODELS} for seed in range(3)}
    folders[1] = {**folders[1], "mhla": journey.out / "linear"}
    bits = {seed: {name: 2.0 + index for index, name in enumerate(MODELS)} for seed in range(3)}
    bits[1]["mhla"] = bits[1]["linear"]
    results = collect(folders, bits, {})
    mhla, linear = bits[0]["mhla"], bits[0]["linear"]
    measure = results["models"]["mhla"]["bits_per_byte"]
    assert math.isclose(measure["mean"], (2 * mhla + linear) / 3)
    assert math.isclose(measure["stderr"], statistics.stdev([mhla, linear, mhla]) / math.sqrt(3))
    assert results["models"]["teacher"]["bits_per_byte"]["stderr"] == 0.0
    assert "mean ± standard error over 3 seeds" in render_report(results)


def test_tokens_to_a_loss():
    curve = [{"stage": "transfer", "loss": 0.0, "tokens": 1}]
    curve += [{"stage": "distill", "loss": loss, "tokens": 10 * n} for n, loss in enumerate((9, 8, 7, 6, 5, 4, 3), 1)]
    assert [tokens_to_loss(curve, goal) for goal in (7.0, 5.9, 4.9)] == [50, 70, None]
