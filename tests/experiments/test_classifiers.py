"""Digits learned from scratch: finished runs are kept, and the rule that judges a claim."""

import json

import pytest

from experiments import classifiers
from experiments.classifiers import judge_claim, main, render_study
from experiments.digits_vit import load_digits
from experiments.rows import over_seeds

TINY = {"patch_size": 4, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}


def test_a_stopped_study_ends_as_the_one_that_was_not(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(classifiers, "MODEL", {**classifiers.MODEL, **TINY, "mhla": {"layout": [2, 2], "cpe": 0}})
    arguments = ["--seeds", "1", "--epochs", "1", "--out"]
    whole = main([*arguments, str(tmp_path / "whole")])
    train, calls = classifiers.distill, iter([False, True])

    def stopping(*arguments, **options):
        if next(calls):
            raise KeyboardInterrupt
        return train(*arguments, **options)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(classifiers, "distill", stopping)
        main([*arguments, str(tmp_path / "part")])
    again = main([*arguments, str(tmp_path / "part")])
    for results in (whole, again):
        assert [row.pop("seconds")["mean"] > 0 for row in results["rows"].values()] == [True] * 3
    assert whole["rows"] == again["rows"] and whole["claims"] == again["claims"]
    assert (tmp_path / "part" / "mixing.png").stat().st_size > 100
    stored = json.loads((tmp_path / "part" / "results.json").read_text())
    assert render_study(stored) in capsys.readouterr().out
    assert stored["data"] == {"name": "scikit-learn digits", "train": 1300, "test": 497}


def test_a_claim_is_judged_on_the_same_seeds():
    def judge(a, b):
        return judge_claim({"a": {"accuracy": over_seeds(a)}, "b": {"accuracy": over_seeds(b)}}, "a", "b", "accuracy")

    clear = judge([0.9, 0.8, 0.7], [0.8, 0.7, 0.59])
    assert clear["verdict"] == "holds" and clear["difference"] == pytest.approx(0.31 / 3)
    assert judge([0.8, 0.7, 0.59], [0.9, 0.8, 0.7])["verdict"] == "does not hold"
    open_claim = judge([0.9, 0.5, 0.7], [0.6, 0.7, 0.7])
    assert open_claim["verdict"] == "undecided" and open_claim["interval"][0] < 0 < open_claim["interval"][1]
    alone = judge([0.9], [0.1])
    assert (alone["difference"], alone["interval"], alone["verdict"]) == (pytest.approx(0.8), None, "undecided")


def test_digits_are_the_same_for_everyone():
    (train, labels), (test, _) = load_digits(16)
    assert train.shape == (1300, 1, 16, 16) and test.shape == (497, 1, 16, 16)
    assert train[0].sum() == 18739 and labels[:5].tolist() == [6, 5, 5, 7, 9]
