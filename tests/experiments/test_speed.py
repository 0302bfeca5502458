"""Cost against length: measured once, small, and rendered."""

import argparse
import json

from experiments import speed

TINY = {"vocab_size": 64, "hidden_size": 48, "intermediate_size": 32, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 3, "num_key_value_heads": 3}


def test_measured_and_rendered(monkeypatch, tmp_path):
    for name, value in {"STEPS": 2, "ROUNDS": 1, "PREFILLED": 80}.items():
        monkeypatch.setattr(speed, name, value)
    monkeypatch.setattr(speed.torch, "compile", lambda model, **options: model)
    settings = {"softmax_heads": {"1": [2]}, "block_size": 8}
    options = {"lengths": (96, 1600), "batches": (1, 2), "prefill": (96,), "training": (96,), "threads": 1}
    record = speed.run(argparse.Namespace(**options, out=tmp_path / "speed.json"), "", TINY, **settings)
    assert json.loads((tmp_path / "speed.json").read_text())["rows"] == record["rows"]
    assert record["rows"][3]["MHLA"]["bytes"] < record["rows"][3]["softmax"]["bytes"] / 2
    assert [(row["length"], row["batch"]) for row in record["rows"]] == [(96, 1), (1600, 1), (96, 2), (1600, 2)]
    assert [(row["length"], row["batch"]) for row in record["eager"]] == [(96, 1), (1600, 1)]
    assert all(row[name]["next token"] > 0 for row in record["rows"] + record["eager"] for name in speed.MODELS)
    assert record["rows"][3]["window alone"]["bytes"] < record["rows"][3]["MHLA"]["bytes"]
    assert record["prefill"][0]["products"]["MHLA"] > record["prefill"][0]["products"]["softmax"] > 0  # too few tokens
    assert all(record[key][0][name] > 0 for key in ("prefill", "training") for name in speed.MODELS)
    speed.draw_speed(record, tmp_path / "speed.png")
    tables = speed.render_speed(record)
    assert "| 1,600 | 2 | " in tables and tables.endswith("bf16.")
