"""The ViT on digits in small."""

import json

import pytest

from experiments import digits_vit
from mhla_hf.evaluation.records import Results
from mhla_hf.hub.card import check_card


@pytest.mark.slow
def test_digits_in_small_and_again(tmp_path, capsys):
    arguments = ["--out", str(tmp_path / "out"), "--seeds", "1", "--steps", "3", "--distill-steps", "2"]
    first = digits_vit.main(arguments)
    record = json.loads((tmp_path / "out" / "digits_vit.json").read_text())
    assert [row["attention"] for row in record["students"]] == ["MHLA", "plain linear"]
    assert 0 < record["teacher"] <= 1 and record["judged_on"] == 497
    shown = capsys.readouterr().out
    again = digits_vit.main(arguments)
    assert again["students"] == first["students"] and capsys.readouterr().out == shown
    card = (tmp_path / "out" / "MHLA-0" / "README.md").read_text()
    check_card(tmp_path / "out" / "MHLA-0")
    assert "| digits | acc ↑ | 497 |" in card and "| teacher | MHLA | plain linear |" in card
    accuracies = {f"{row['attention'].replace(' ', '-')}-0": row["distilled"] for row in record["students"]}
    for folder, accuracy in {"teacher": record["teacher"], **accuracies}.items():
        (score,) = Results.read(tmp_path / "out" / folder)
        assert (score.task, score.metric, score.value) == ("digits", "acc", accuracy), folder
