"""What an encoder keeps: a model beside itself, a row made by tiny models, and the table."""

import torch
from transformers import EuroBertModel

from experiments import encoder


def test_a_row_and_its_table(tmp_path, monkeypatch):
    text = encoder.read_text()[0][:200_000]
    monkeypatch.setattr(encoder, "read_text", lambda: (text, "text"))
    monkeypatch.setattr(encoder, "SIZES", {**encoder.SIZES, "hidden_size": 16, "intermediate_size": 16})
    monkeypatch.setattr(encoder, "STEPS", 2)
    monkeypatch.setattr(encoder, "STUDENT_STEPS", 2)
    rows = [encoder.make_row({"form": form, "seed": 0}, tmp_path) for form in list(encoder.FORMS)[:2]]
    run = {"command": "c", "hardware": "h", "versions": {"torch": "t", "transformers": "u"}}
    table = encoder.render_encoder({"rows": rows, **run})
    assert f"| MHLA | {rows[1]['before']['128']['cosine']:.4f} | " in table and "seed 0 alone" in table
    teacher, ids = EuroBertModel.from_pretrained(tmp_path / "0").eval(), torch.load(tmp_path / "0" / "tokens.pt")[1]
    for found in encoder.compare(teacher, teacher, ids).values():
        assert abs(found["cosine"] - 1) < 1e-6 and abs(found["rank"] - 1) < 1e-6
    for found in encoder.compare(EuroBertModel(teacher.config).eval(), teacher, ids).values():
        assert found["cosine"] < 0.9 and found["rank"] < 0.9
