"""The questions that a real model and its conversions are asked: what they are, and that reading once changes no score."""

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tools.small_scores import HELD_OUT, WINDOW, small_llama, small_tokenizer

from experiments import judge
from experiments.demo.text import make_tokenizer
from mhla_hf import convert

TOKENIZER = small_tokenizer()


@pytest.mark.parametrize("seed", [0, 1])
def test_what_is_asked_stands_in_the_text_and_not_near_its_end(monkeypatch, seed):
    monkeypatch.setattr(judge, "FACTS", {900: (4, 5)})
    tokenizer = make_tokenizer(HELD_OUT, 1000, 1024)
    ids, questions = judge.make_lookups(tokenizer, HELD_OUT, 900, seed)
    assert 800 < len(ids) < 960 and sorted(question[0] for question in questions) == 4 * ["code"] + 5 * ["lookup"]
    for kind, back, (asked, answer, choices) in questions:
        assert back >= judge.NEAR
        line = tokenizer.decode([*asked, *answer]).splitlines()[-1]
        before = tokenizer.decode(ids[: len(ids) - back]).strip().removesuffix(".")
        assert before.endswith(line) and tokenizer.decode(asked).strip().count("\n") == judge.SHOWN
        assert len(set(choices)) == (5 if kind == "lookup" else 0)
        assert not choices or (len(answer) == 1 and answer[0] in choices)
    assert judge.make_lookups(tokenizer, HELD_OUT, 900, seed) == (ids, questions)


@pytest.fixture(scope="module", params=["softmax", "MHLA"])
def model(request):
    model = small_llama()
    return model if request.param == "softmax" else convert(model, layers="all", block_size=8, window=2).eval()


@torch.no_grad()
def test_questions_behind_a_text_are_scored_as_in_one_pass(model):
    prefix, rows = list(range(5, 65)), [([3, 4], [7, 8, 9]), ([2], [6]), ([9] * 5, [1, 2])]
    choices = [[], [6, 11], []]
    found = judge.answer_scores(model, prefix, [(*row, few) for row, few in zip(rows, choices, strict=True)])
    for (asked, answer), few, (score, right) in zip(rows, choices, found, strict=True):
        ids = torch.tensor([prefix + asked + answer])
        log_p = model(input_ids=ids).logits[0].log_softmax(-1)[-len(answer) - 1 : -1]
        expected = sum(float(row[token]) for row, token in zip(log_p, answer, strict=True))
        assert score == pytest.approx(expected, rel=1e-5)
        likeliest = [few[int(row[few].argmax())] if few else int(row.argmax()) for row in log_p]
        assert right == (likeliest == answer)


def test_reading_the_examples_once_gives_the_scores_of_lm_eval(model):
    texts = [(HELD_OUT[:150] + " it", " is"), (HELD_OUT[:150] + " it", " has a name"), (HELD_OUT[:150] + " a", " b")]
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(texts)]
    reader = judge.PrefixReader(pretrained=model, tokenizer=TOKENIZER, max_length=WINDOW)
    found = reader.loglikelihood(requests, disable_tqdm=True)
    expected = HFLM(pretrained=model, tokenizer=TOKENIZER, max_length=WINDOW).loglikelihood(requests, disable_tqdm=True)
    assert reader.shared > 20
    for (score, greedy), (other, same) in zip(found, expected, strict=True):
        assert score == pytest.approx(other, rel=1e-5) and greedy == same
