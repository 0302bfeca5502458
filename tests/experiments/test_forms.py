"""The table of forms in miniature: a teacher trained once, and rows that start from it."""

import json

import pytest
from small_recipes import STUDENT, TEACHER

from experiments import forms
from experiments.demo.text import read_text
from mhla_hf.checkpoints.machine import describe_run


def test_rows_share_a_teacher(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(forms, "RECIPES", tmp_path)
    (tmp_path / "demo_teacher.yaml").write_text(TEACHER)
    (tmp_path / "demo_student.yaml").write_text(STUDENT.replace("seq_len: 512", "seq_len: 64"))
    (tmp_path / "own.txt").write_text(read_text()[0][-120_000:])
    monkeypatch.setattr(forms, "LOOKUPS", {1: 10, 4: 5})
    monkeypatch.setattr(forms, "FORMS", {name: forms.FORMS[name] for name in ("window + MHLA by 2 decays",)})
    rows = [forms.make_row("own.txt", {"form": form, "seed": 0}) for form in (*forms.FORMS, forms.CONTROL)]
    ours, control = rows
    assert (
        ours["state_bytes"] > 0 and ours["before"]["kl"] > 0 and control["before"]["kl"] == pytest.approx(0, abs=1e-12)
    )
    assert set(ours["after"]["recall"]) == {"1", "4"} and forms.describe(ours).startswith("seed 0, window + MHLA by 2")
    table = forms.render_forms({"rows": json.loads(json.dumps(rows)), **describe_run("test", "cpu")})
    assert table.count("\n| ") == 2 * (1 + 1 + 2) - 1 and "Seed 0 alone" in table
