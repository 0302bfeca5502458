"""Needles: questions of the length asked for, answers that only memory gives, depth by depth.

Run: pytest tests/evaluation/test_needles.py
"""

import json
import re
from pathlib import Path

import pytest
from small_scores import WINDOW, small_llama, small_tokenizer

import mhla_hf
from mhla_hf.evaluation.local_tasks import make_needles

TOKENIZER = small_tokenizer()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_needles(tmp_path_factory.mktemp("made") / "needles", TOKENIZER, lengths=[256, 512], items=3)


def rows_of(made, name):
    return [json.loads(line) for line in Path(made.folder, f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("length", [256, 512])
def test_a_question_is_as_long_as_asked_and_can_be_answered_from_the_text_alone(made, length):
    rows = rows_of(made, f"needle_recall_{length}")
    assert rows == rows_of(made, f"needle_generation_{length}") and len(rows) == 15
    for row in rows:
        tokens = len(TOKENIZER(row["context"] + row["target"], verbose=False)["input_ids"])
        assert length - 64 <= tokens + 32 <= length + 8
        text, _, question = row["context"].rpartition("\n\n")
        said = dict(re.findall(r"The code of the (\w+) is (\d{4})\.", text))
        assert len(said) == 5 and sorted(said.values()) == sorted(choice.strip() for choice in row["choices"])
        wanted = re.fullmatch(r"The code of the (\w+) is", question)[1]
        assert row["target"] == row["choices"][row["answer"]] == f" {said[wanted]}"
        part = text.index(said[wanted]) / len(text)
        assert abs(row["back"] / length - (1 - part)) < 0.2
    assert sorted({row["back"] for row in rows}) == [round(length * part) for part in (0, 0.25, 0.5, 0.75, 1)]


def test_the_same_call_gives_the_same_bytes_and_the_first_questions_cover_every_depth(made, tmp_path):
    again = make_needles(tmp_path / "again", TOKENIZER, lengths=[512, 256], items=3)
    for name in made.names:
        assert rows_of(made, name) == rows_of(again, name)
    other = make_needles(tmp_path / "other", TOKENIZER, lengths=[256], items=3, seed=1)
    assert rows_of(other, "needle_recall_256") != rows_of(made, "needle_recall_256")
    assert [row["answer"] for row in rows_of(made, "needle_recall_256")[:5]] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"lengths": [64]}, "lengths: got 64; expected whole numbers from 128"),
        ({"lengths": 0.5}, "lengths: got 0.5"),
        ({"depths": [0, 101]}, "depths: got 101"),
        ({"depths": [50]}, "depths is [50]; expected between 2 and"),
        ({"items": 0}, "items: got 0"),
        ({"lengths": [128], "depths": list(range(0, 100, 10))}, "128 tokens are too few for 10 depths"),
    ],
)
def test_bad_arguments_are_one_sentence(tmp_path, changes, says):
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        make_needles(tmp_path / "none", TOKENIZER, **{"lengths": [256], **changes})
    assert "\n" not in str(caught.value) and not (tmp_path / "none").exists()


def test_the_recipe_makes_them_scores_them_and_throws_the_data_away():
    model = small_llama(max_position_embeddings=320)
    options = {"tokenizer": TOKENIZER, "progress": False, "recipe": "recall"}
    settings = {"lengths": [240, 320], "items": 2}
    found = mhla_hf.evaluate(model, settings=settings, **options)["LlamaForCausalLM"]
    names = {f"needle_{kind}_{length}" for kind in ("recall", "generation") for length in (240, 320)}
    assert {record.task for record in found} == names
    record = found.find("needle_recall_240", "acc")
    assert record.samples == 10 and found.find("needle_recall_240", "acc_back_120").samples == 2
    assert "--recipe recall --set lengths=240,320 --set items=2" in record.command
    assert found.find("needle_generation_320", "exact_match").value == 0.0
    with pytest.raises(ValueError, match=f"lengths: 4096 tokens, but the model sees {WINDOW}"):
        mhla_hf.evaluate(small_llama(), settings={"items": 1}, **options)
    with pytest.raises(ValueError, match="settings: unknown 'length'"):
        mhla_hf.evaluate(model, settings={"length": [256]}, **options)
