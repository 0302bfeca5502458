"""The table of forms in miniature: a teacher trained once, and rows that start from it."""

import pytest
from test_demo import STUDENT, TEACHER

from experiments import forms
from experiments.demo.text import read_text


def test_rows_share_a_teacher(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(forms, "RECIPES", tmp_path)
    (tmp_path / "demo_teacher.yaml").write_text(TEACHER.replace("embeddings: 256", "embeddings: 64"))
    (tmp_path / "demo_student.yaml").write_text(STUDENT.replace("seq_len: 512", "seq_len: 64"))
    (tmp_path / "own.txt").write_text(read_text()[0][-120_000:])
    ours, control = (
        forms.make_row("own.txt", {"form": form, "seed": 0}) for form in ("window + MHLA by 2 decays", forms.CONTROL)
    )
    assert ours["teacher"] == control["teacher"] == control["before"]
    assert ours["before"]["kl"] > 0 and control["before"]["kl"] == pytest.approx(0, abs=1e-12)
    assert ours["state_bytes"] > 0 and forms.describe(ours).startswith("seed 0, window + MHLA by 2 decays: KL ")
