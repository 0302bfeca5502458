"""The toy demo in miniature: run to its end, run again, killed and gone on with, and what it refuses."""

import importlib
import json
import math

import pytest
from tools.small_recipes import STUDENT, TEACHER

from experiments.demo import lookups, toy
from experiments.demo.report import render_report
from experiments.demo.text import hold_out, read_text
from experiments.demo.toy import FULL, run_toy
from mhla_hf.evaluation.records import Results
from mhla_hf.hub.card import check_card


def test_it_runs_to_its_end_and_once(tmp_path, monkeypatch, capsys):
    """On models with 30,000 weights, for each of which it does little."""
    (tmp_path / "demo_teacher.yaml").write_text(TEACHER)
    (tmp_path / "demo_student.yaml").write_text(STUDENT)
    monkeypatch.setattr(lookups, "LEAST", 0)  # the text comes once
    text = read_text()[0][-120_000:]
    for name, value in {"RECIPES": tmp_path, "ITEMS": 2, "read_text": lambda: (text, "the end")}.items():
        monkeypatch.setattr(toy, name, value)
    for name in ("FIT_ROWS", "GATE_STEPS"):
        monkeypatch.setattr(importlib.import_module("mhla_hf.conversion.language"), name, 4)
    out = tmp_path / "out"
    run_toy(out, full=True, progress=False)
    printed = capsys.readouterr().out
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
    card = (out / "mhla" / "README.md").read_text()
    assert "license: apache-2.0" in card and "plain linear" in card
    assert render_report(results) in printed
    assert "loaded as transformers_modules." in printed and "logits equal bit for bit" in printed
    kept = [path for name in FULL for path in (out / name).iterdir() if path.name not in ("README.md", "card.json")]
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in kept}
    run_toy(out, full=True, progress=False)
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in before} == before
    assert capsys.readouterr().out.count("is there already") == len(FULL)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for changes, sentence in (
        ({"full": False}, "^--out: .* was started with another model, expected another folder"),
        ({"seeds": 2, "full": False}, "seeds: got 2, expected 1, or --full as well"),
        ({"out": tmp_path}, "holds other files and no demo.json"),
    ):
        with pytest.raises(ValueError, match=sentence):
            run_toy(**{"out": out, "full": True, "progress": False, **changes})
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}


def test_a_text_that_cannot_be_trained_on_is_refused(tmp_path):
    (tmp_path / "short.txt").write_text("Too short. " * 10)
    for file, words in (("short.txt", "with 110 characters, expected at least 60,000"), ("none", "does not exist")):
        with pytest.raises(ValueError, match=words):
            read_text(tmp_path / file)


def test_held_out_text_is_not_trained_on():
    text, name = read_text()
    train, held_out = hold_out(text)
    assert name == "pydoc_data.topics" and text.startswith(train) and 0.05 < len(held_out) / len(text) < 0.07
    known, kept = (
        {" ".join(paragraph.split()) for paragraph in part.split("\n\n")} - {""} for part in (train, held_out)
    )
    assert len(kept) > 100 and not known & kept
