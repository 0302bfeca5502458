"""Texts with facts: as long as asked, each question answered by one line alone, and the same tasks every time."""

import random
import re
import shutil

import pytest
from lm_eval.api.model import LM
from tools.small_scores import HELD_OUT, small_tokenizer

from mhla_hf.evaluation.language import HARNESS_SEEDS, load_tasks, score
from mhla_hf.evaluation.recall import ANSWER_TOKENS, filler_lines, make_recall, make_text

TOKENIZER = small_tokenizer()
DEPTHS = (0, 25, 50, 75, 100)
LINE = {"codes": r"The code of the (\w+) is (\d{4})\.\n", "lookups": r"- (\w+) (\w+)\n"}


def count(text):
    return len(TOKENIZER(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize(("length", "text"), [(256, None), (1024, HELD_OUT)], ids=["filler", "text"])
@pytest.mark.parametrize("kind", LINE)
def test_a_question_is_as_long_as_asked_and_can_be_answered_from_the_text_alone(kind, length, text):
    facts = [(kind, depth) for depth in DEPTHS]
    options = {"examples": {"codes": 0, "lookups": 3}, "reserve": ANSWER_TOKENS}
    context, questions = make_text(TOKENIZER, filler_lines(text), length, facts, random.Random(0), **options)
    said = dict(re.findall(LINE[kind], context))
    assert len(said) == len(questions) == 5
    assert {choice.strip() for choice in questions[0].choices} == set(said.values())
    sizes = [count(context + question.prompt) for question in questions]
    assert length - 130 <= max(sizes) + ANSWER_TOKENS <= length
    for depth, question in zip(DEPTHS, questions, strict=True):
        *examples, asked = question.prompt.strip("\n").split("\n")
        name = re.search(r"(\w+)( is)?$", asked)[1]
        assert question.answer == f" {said[name]}" and f"{asked}{question.answer}" in context[: question.end]
        assert context[: question.end].endswith("\n") and not any(name in example for example in examples)
        assert len(examples) == options["examples"][kind] and all(f"{line}\n" in context for line in examples)
        assert abs(question.end / len(context) - depth / 100) < 0.35
    assert count(context[: context.index(f" {questions[0].answer.strip()}")]) > 4  # behind the sinks
    kept = re.sub(LINE[kind], "", context)
    assert all(line in filler_lines(text) for line in kept.splitlines(keepends=True))


class Reader(LM):
    """A language model for tests that finds the line of a fact, or nothing."""

    max_length = 1024

    def __init__(self, finds):
        super().__init__()
        self.finds = finds

    def loglikelihood(self, requests, disable_tqdm=False):
        lines = [(context, context.rpartition("\n")[2] + word) for context, word in (x.args for x in requests)]
        right = [self.finds and any(line + end in context for end in ("\n", ".\n")) for context, line in lines]
        return [(float(is_right), is_right) for is_right in right]

    def generate_until(self, requests, disable_tqdm=False):
        found = [re.search(re.escape(x.args[0].rpartition("\n")[2]) + r"( \w+)", x.args[0]) for x in requests]
        return [match[1] if self.finds and match else " 0" for match in found]

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        raise NotImplementedError


@pytest.mark.parametrize("finds", [True, False])
def test_memory_scores_everything_and_no_memory_chance(tmp_path, finds):
    names = make_recall(tmp_path, TOKENIZER, lengths=[320], items=4, text=HELD_OUT)
    facts = dict.fromkeys(("model", "fingerprint", "commit", "dtype", "hardware", "seed", "command", "date"), "any")
    facts |= {"revision": None, "limit": None, "versions": {}}
    chance = {"codes_recall_320": 0.2, "codes_generation_320": 0, "lookups_recall_320": 0}
    assert names == [*chance]
    for item in load_tasks(names, [tmp_path]):
        records = score(Reader(finds), item, seeds=HARNESS_SEEDS, facts=facts)
        assert [record.value for record in records] == pytest.approx([1.0 if finds else chance[item.name]] * 6)
        backs = {record.metric.rpartition("_")[2]: record.samples for record in records if "_back_" in record.metric}
        assert backs == dict.fromkeys(("0", "80", "160", "240", "320"), 4) and records[0].samples == 20


def test_the_same_call_writes_the_same_bytes_another_seed_others_and_the_folder_can_be_moved(tmp_path):
    def hashes(place, **changes):
        make_recall(tmp_path / place, TOKENIZER, **{"lengths": [320, 512], "items": 2, **changes})
        return {item.name: item.scored[item.name] for item in load_tasks(["*_recall_320"], [tmp_path / place])}

    one = hashes("one")
    assert set(one) == {"codes_recall_320", "lookups_recall_320"} and hashes("two") == one
    assert not set(hashes("three", seed=1).values()) & set(one.values())
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert len(files) == 13
    assert all((tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes() for name in files)
    moved = shutil.move(tmp_path / "one", tmp_path / "elsewhere")
    assert {item.name: item.scored[item.name] for item in load_tasks([*one], [moved])} == one
