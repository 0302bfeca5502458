"""The DiT on digits in seconds."""

import json

import pytest
from diffusers import AutoModel

import mhla_hf
from experiments import digits_dit
from mhla_hf.evaluation.records import Results
from mhla_hf.hub.card import check_card


@pytest.mark.slow
def test_digits_in_seconds(tmp_path, capsys, monkeypatch):
    """Everything once, small; a second call runs nothing again and says the same."""
    monkeypatch.setattr(digits_dit, "SAMPLING_STEPS", 3)
    monkeypatch.setattr(digits_dit, "HELD_OUT", 71)
    arguments = ["--seeds", "1", "--steps", "3", "--distill-steps", "2", "--samples", "20", "--width", "32"]
    arguments += ["--judge-epochs", "1", "--out", str(tmp_path / "out")]
    results = digits_dit.main(arguments)
    assert set(results["models"]) == {*digits_dit.FROM_SCRATCH, *digits_dit.DISTILLED}
    assert results["parameters"]["softmax"] < results["parameters"]["MHLA + CPE + gate"]
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    again = digits_dit.main(arguments)
    assert again["models"] == results["models"]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")} == stamps
    assert digits_dit.render(json.loads((tmp_path / "out" / "digits.json").read_text())) in capsys.readouterr().out
    assert (tmp_path / "out" / "digits.png").stat().st_size > 10_000
    assert mhla_hf.MHLADiTTransformer2DModel.from_pretrained(tmp_path / "out" / "MHLA-0", subfolder="transformer")
    place = tmp_path / "out" / "MHLA-distilled-on-the-digits-0" / "transformer"
    check_card(place)
    card = (place / "README.md").read_text()
    assert "| digits | Fréchet distance (digits judge) ↓ | 20 |" in card
    assert " FID " not in card.replace("no FID", "")
    made = card.partition("## How the scores were measured")[2]
    assert all(label in made for label in ("teacher", *digits_dit.COMPARED))
    for name, (row,) in results["models"].items():
        scores = {r.metric: r for r in Results.read(tmp_path / "out" / digits_dit.folder_of(name, 0) / "transformer")}
        accuracy, loss = scores["accuracy (digits judge)"], scores["held-out loss"]
        assert (100 * accuracy.value, loss.value, loss.samples) == (row["accuracy"], row["loss"], 71)
        assert scores["Fréchet distance (digits judge)"].value == row["frechet"]
        assert accuracy.stderr is not None and loss.stderr > 0
    assert type(AutoModel.from_pretrained(str(place), trust_remote_code=True)).__name__ == "MHLADiTTransformer2DModel"
