"""Training rows with facts: what they ask stands earlier in the row, and which rows have facts is theirs alone."""

import itertools
import logging

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mhla_hf.conversion.language import ask_of_row
from mhla_hf.facts import ANSWER_WEIGHT, FACTLESS, FactRows, choose_words
from mhla_hf.training.loop import Stage, distill
from mhla_hf.training.tasks.language import LanguageTask


@pytest.fixture(scope="module")
def tokenizer():
    """Of words of three letters, one token each with the space before them."""
    words = ["".join(letters) for letters in itertools.product("abcdefghi", repeat=3)]
    tokens = ["<unk>", "Ċ", ":", ".", "*", *(f"Ġ{word}" for word in ("The", "number", "of", "the", "is", *words))]
    tokens += [f"Ġ{number}" for number in range(1000, 10_000)]
    model = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>")


def rows_of(count, length):
    return torch.randint(5, 700, (count, length), generator=torch.Generator().manual_seed(0))


def test_answers_stand_in_the_row_once_before_their_question(tokenizer):
    text = rows_of(3, 1200)
    ids, labels, weights = FactRows(tokenizer, 1.0)(text, text)
    assert torch.equal(ids, labels) and ids.shape == text.shape
    evaluated = {word for words in choose_words(tokenizer) for word in words}
    for row, row_weights in zip(ids, weights, strict=True):
        places = row_weights.gt(1).nonzero().flatten().tolist()
        assert set(row_weights.tolist()) == {1, ANSWER_WEIGHT} and len(places) >= 12
        told = row[: min(places) - len(row) // FACTLESS].tolist()
        for place in places:
            if row[place] == tokenizer.convert_tokens_to_ids("."):
                continue
            name_and_answer = row[place - 2 : place + 1].tolist()  # "name: answer", or "name is answer"
            starts = [i for i in range(len(told)) if told[i : i + 3] == name_and_answer]
            assert len(starts) == 1
            assert not evaluated & set(tokenizer.decode(name_and_answer).split())


def test_heads_are_scored_on_a_row_that_repeats_itself_and_asks(tokenizer):
    text = rows_of(1, 1200)
    copied = torch.cat([text[:, :800], text[:, :400]], 1)
    assert torch.equal(ask_of_row(text, None).ids, copied) and not ask_of_row(text, None).is_answer.any()
    row, (ids, _, weights) = ask_of_row(text, tokenizer), FactRows(tokenizer, 1.0)(copied, copied)
    assert torch.equal(row.ids, ids) and torch.equal(row.is_answer, weights[0] > 1)
    assert not torch.equal(ids, copied)


def test_rows_depend_on_their_tokens_alone(tokenizer):
    text = rows_of(200, 128)
    fact_rows = FactRows(tokenizer, 0.25)
    ids, _, weights = fact_rows(text, text)
    assert all(map(torch.equal, (x[50:90] for x in (ids, weights)), fact_rows(text[50:90], text[50:90])[::2]))
    changed = (ids != text).any(1)
    assert 25 < changed.sum() < 75 and torch.equal(changed, weights.gt(1).any(1))
    labels = text.clone().fill_(-100)
    assert torch.equal(fact_rows(text, labels)[1].ne(-100).any(1), changed)


@pytest.mark.parametrize("has_tokenizer", [False, True])
def test_without_words_a_stage_trains_on_text_and_says_so(lab, tmp_path, caplog, has_tokenizer, tokenizer):
    few = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0})))
    stages = [Stage("lm", "lm", 1, 1e-3, seq_len=128, batch_size=1, facts=1.0)]
    options = {"stages": stages, "data": lab.tokens(), "tokenizer": few if has_tokenizer else None}
    with caplog.at_level(logging.WARNING, "mhla_hf"):
        distill(lab.student(), out=tmp_path / "out", **options)
    reason = "too few words are one token" if has_tokenizer else "there is no tokenizer"
    assert f"without facts, because {reason}" in caplog.text
    task = LanguageTask(lab.student(), None, tokenizer)
    reader = task.reader(task.open(rows_of(1, 700)[0] % 60, stages), stages[0], 0, 0, None)
    (_, _, weights), (token_weight, _) = task.take(reader, stages[0], slice(None))
    assert weights.gt(1).any() and token_weight == pytest.approx(1 / float(weights[:, 1:].sum()))
