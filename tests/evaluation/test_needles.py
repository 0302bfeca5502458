"""Needles in a haystack: as long as asked, to be answered from the text alone, the same each time."""

import re

import pytest
from small_scores import WINDOW, small_llama, small_tokenizer

import mhla_hf
from mhla_hf.evaluation.language import task_hash
from mhla_hf.evaluation.needles import make_needles, make_questions

TOKENIZER = small_tokenizer()
DEPTHS = (0, 25, 50, 75, 100)


@pytest.mark.parametrize("length", [256, 512])
def test_a_question_is_as_long_as_asked_and_can_be_answered_from_the_text_alone(length):
    rows = make_questions(TOKENIZER, length, DEPTHS, items=3, seed=0)
    assert [row["answer"] for row in rows[:5]] == [0, 1, 2, 3, 4] and len(rows) == 15
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


def test_needles_are_the_same_each_time_and_others_for_another_seed():
    def hashes(**changes):
        made = make_needles(["needle_*_256"], TOKENIZER, **{"lengths": [256, 512], "items": 2, **changes})
        return {name: task_hash(task) for name, task in made.items()}

    assert list(hashes()) == ["needle_recall_256", "needle_generation_256"] and hashes() == hashes()
    assert not set(hashes().values()) & set(hashes(seed=1).values())


def test_the_recipe_makes_needles_and_scores_them():
    model = small_llama(max_position_embeddings=320)
    options = {"tokenizer": TOKENIZER, "progress": False, "recipe": "recall"}
    found = mhla_hf.evaluate(model, settings={"lengths": [240, 320], "items": 2}, **options)["LlamaForCausalLM"]
    names = {f"needle_{kind}_{length}" for kind in ("recall", "generation") for length in (240, 320)}
    assert {record.task for record in found} == names
    record = found.find("needle_recall_240", "acc")
    assert record.samples == 10 and found.find("needle_recall_240", "acc_back_120").samples == 2
    assert "--recipe recall --set lengths=240,320 --set items=2" in record.command
    assert found.find("needle_generation_320", "exact_match").value == 0.0


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"lengths": [64]}, r"settings: lengths is \[64\]; expected whole numbers of at least 128"),
        ({"depths": [0, 101]}, r"depths is \[0, 101\]; expected between 2 and"),
        ({"depths": [50]}, r"depths is \[50\]; expected between 2 and"),
        ({"lengths": 128, "depths": list(range(0, 100, 10))}, "128 tokens are too few for 10 depths"),
        ({"length": [256]}, "settings: unknown 'length'"),
        ({"items": 1}, f"settings: lengths has 4096 tokens, but the model sees {WINDOW}"),
    ],
)
def test_bad_settings_are_one_sentence(settings, says):
    with pytest.raises(ValueError, match=says) as caught:
        mhla_hf.evaluate(small_llama(), recipe="recall", tokenizer=TOKENIZER, progress=False, settings=settings)
    assert "\n" not in str(caught.value)
