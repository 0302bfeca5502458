"""The table of forms in miniature: a demo's teacher, rows that start from it, and a student that the demo trained."""

import json

import pytest
import torch
from small_recipes import STUDENT
from transformers import LlamaConfig, LlamaForCausalLM

from experiments import forms
from experiments.demo.text import hold_out, make_tokenizer, read_text
from mhla_hf.checkpoints.machine import describe_run

OURS, MATRIX = "window + MHLA by 2 decays", "MHLA, the paper's matrix"


def save_demo(folder):
    """What the table needs of a demo: text, tokenizer, teacher, and the teacher trained on."""
    train, held_out = hold_out(read_text()[0][-120_000:])
    tokenizer = make_tokenizer(train, 440, 256)
    tokenizer.save_pretrained(folder / "data" / "tokenizer")
    (folder / "data" / "train.txt").write_text(train)
    (folder / "data" / "heldout.txt").write_text(held_out[:4000])
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2}
    for name in ("teacher", "control", "mhla"):
        torch.manual_seed(name == "control")
        model = LlamaForCausalLM(LlamaConfig(vocab_size=440, max_position_embeddings=256, **sizes))
        model = forms.convert(model, layers="all", block_size=16) if name == "mhla" else model
        model.save_pretrained(folder / name)


def test_rows_of_what_is_trained_and_of_what_the_demo_has(tmp_path, monkeypatch):
    save_demo(tmp_path)
    (tmp_path / "student.yaml").write_text(STUDENT.replace("seq_len: 512", "seq_len: 64"))
    monkeypatch.setattr(forms, "RECIPE", tmp_path / "student.yaml")
    monkeypatch.setattr(forms, "LOOKUPS", {1: 5, 4: 5})
    monkeypatch.setattr(forms, "FORMS", {name: forms.FORMS[name] for name in (MATRIX, OURS)})
    jobs = [{"form": form, "seed": 0} for form in (MATRIX, OURS, forms.CONTROL)]
    rows = trained, found, control = [forms.make_row(tmp_path, job) for job in jobs]
    assert trained["before"]["kl"] > 0 and trained["after"] != trained["before"]
    assert found["after"] == found["before"], "the demo's student here is as it was converted"
    assert control["before"]["kl"] == pytest.approx(0, abs=1e-12) and control["after"]["kl"] > 0
    assert (
        set(found["after"]["recall"]) == {"1", "4"}
        and len(found["after"]["depths"]["4"]) == 5
        and found["state_bytes"] < trained["state_bytes"]
    )
    assert forms.describe(found).startswith("seed 0, window + MHLA by 2 decays: KL ")
    record = {"rows": json.loads(json.dumps(rows)), **describe_run("test", "cpu")}
    table, depths = forms.render_forms(record), forms.render_depths(record)
    assert table.count("\n| ") == 2 * (1 + 2 + 2) - 1 and "Seed 0 alone" in table
    assert depths.count("\n| ") == 3 * 2 and "| teacher, 4x | " in depths and "| 0.10 | 0.30 |" in depths
