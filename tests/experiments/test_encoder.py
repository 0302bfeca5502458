"""What an encoder keeps: scores of a model beside itself, rows made by a tiny model, and the table."""

import json

import pytest
from tools.small_encoders import softmax_encoder
from tools.small_scores import TRAINING, small_tokenizer

from experiments import encoder


def test_rows_and_their_table(tmp_path, monkeypatch):
    tokenizer = small_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    softmax_encoder("bert", vocab_size=len(tokenizer)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text(TRAINING)
    words = TRAINING.split()
    pairs = [(words[i], " ".join(words[i : i + 9]), i % 3) for i in range(0, 200, 10)]
    pairs = [dict(zip(("sentence1", "sentence2", "score"), pair, strict=True)) for pair in pairs]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    names = {"fit": "text.txt", "long": "text.txt", "sts": "pairs.jsonl", "model": "model"}
    arguments = {name: str(tmp_path / file) for name, file in names.items()} | {"folders": {}}
    monkeypatch.setattr(encoder, "LENGTHS", {32: 8, 64: 6})
    monkeypatch.setattr(encoder, "KEYS", {"sts": "STS-B", "cosine 64": "cosine, 64", "rank 64": "rank, 64"})
    monkeypatch.setattr(encoder, "MAX_SENTENCE_TOKENS", 60)
    forms = {name: encoder.FORMS[name] for name in ("softmax", "window", "MHLA")}
    small = {name: (far and {**settings, "block_size": 8}, far) for name, (settings, far) in forms.items()}
    monkeypatch.setattr(encoder, "FORMS", small)
    rows = {form: encoder.make_row(arguments, {"form": form, "seed": 0}) for form in small}
    original = rows["softmax"]["scores"]
    assert abs(original["cosine 64"] - 1) < 1e-6 and original["rank 64"] == pytest.approx(1)
    losses = [1 - rows[form]["scores"]["cosine 64"] for form in ("MHLA", "window")]
    assert 1e-6 < losses[0] < losses[1]
    run = {"command": "c", "hardware": "h", "versions": {"torch": "t", "transformers": "u"}}
    table = encoder.render_encoder({"rows": list(rows.values()), **run})
    assert f"| MHLA | 1 | {rows['MHLA']['scores']['sts']:.2f} | {rows['MHLA']['scores']['cosine 64']:.4f} |" in table
