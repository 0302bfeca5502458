"""Facts, one per line, that a model must look up in its context: for evaluation, and inserted into training text.

Training and evaluation have different words and sentences.
"""

import math
import random
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

LINES = {  # kind of fact -> beginning and end of its line, around the answer and the space before it
    "codes": ("The code of the {} is", ".\n"),  # for evaluation, like "lookups"
    "lookups": ("- {}", "\n"),
    "numbers": ("\nThe number of the {} is", ".\n"),  # for training, like "pairs"
    "pairs": ("\n* {}:", "\n"),
}
OBJECTS = tuple(
    """anchor basket candle drawer engine feather garden hammer island jacket kettle ladder mirror needle orchard pencil
    quarry ribbon saddle tunnel umbrella valley window yard bridge castle desert forest harbor lantern meadow
    river""".split()  # noqa: SIM905
)
# Lookups take the last NUM_WORDS of the first NUM_FREQUENT_WORDS words of a vocabulary: familiar, yet rare in the text.
NUM_FREQUENT_WORDS, NUM_WORDS = 400, 120
NUM_FACT_WORDS, MIN_FACT_WORDS = 2000, 100  # words for training, after the frequent ones: at most, at least
TOKENS_PER_FACT = 100  # a row of 1,000 tokens has ten facts; about one in three is a number
FACTLESS = 8  # an eighth of a row, before its questions, has no facts, so that all facts have left the attention window
ANSWER_WEIGHT = 10.0  # of an answer's tokens in the loss; all other tokens weigh 1


def list_words(tokenizer: Any) -> list[str]:
    """List the lowercase words that are one token with the space before them, by token id, which is roughly by frequency."""
    tokens = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return [token[1:] for token, _ in tokens if re.fullmatch("[Ġ▁][a-z]{3,}", token)]


class Fact(NamedTuple):
    """A line of text that states a fact."""

    kind: str  # one of `LINES`
    start: str  # text before the answer, which is also the question
    answer: str  # with the space before it
    end: str

    @property
    def line(self) -> str:
        return self.start + self.answer + self.end


def make_fact(kind: str, name: str, answer: object) -> Fact:
    start, end = LINES[kind]
    return Fact(kind, start.format(name), f" {answer}", end)


def choose_words(tokenizer: Any) -> tuple[list[str], list[str]]:
    """Choose names and values of lookups, three names per value: lowercase words of one token with the space before."""
    words = list_words(tokenizer)[:NUM_FREQUENT_WORDS][-NUM_WORDS:]
    random.Random("words").shuffle(words)
    return words[len(words) // 4 :], words[: len(words) // 4]


def draw_facts(tokenizer: Any, kinds: Sequence[str], rng: random.Random) -> list[Fact]:
    """Draw an evaluation fact for each item of `kinds`, "codes" or "lookups"; ValueError if the tokenizer lacks words."""
    num_codes, num_lookups = (kinds.count(kind) for kind in ("codes", "lookups"))
    codes = zip(rng.sample(OBJECTS, num_codes), rng.sample(range(1000, 10_000), num_codes), strict=True)
    names, values = choose_words(tokenizer) if num_lookups else ([], [])
    if num_lookups > 3 * len(values):
        got = f"{len(names) + len(values)} lowercase words of one token"
        raise ValueError(f"tokenizer: got {got}, expected at least {4 * math.ceil(num_lookups / 3)}.")
    values = rng.sample(values, num_lookups) if num_lookups <= len(values) else rng.choices(values, k=num_lookups)
    pairs: Any = {"codes": codes, "lookups": zip(rng.sample(names, num_lookups), values, strict=True)}
    return [make_fact(kind, *next(pairs[kind])) for kind in kinds]


class FactRows:
    """Inserts facts and questions into a fraction of rows. Whether a row gets any, and which, depends only on its tokens."""

    def __init__(self, tokenizer: Any, fraction: float) -> None:
        self.tokenizer, self.fraction = tokenizer, fraction
        words = list_words(tokenizer) if hasattr(tokenizer, "get_vocab") else []
        self.words = words[NUM_FREQUENT_WORDS:][:NUM_FACT_WORDS]

    @property
    def can_ask(self) -> bool:
        return len(self.words) >= MIN_FACT_WORDS

    def __call__(self, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return ids and labels [N, L] with facts in some rows, and the weight of every token in the loss, fp32 [N, L]."""
        ids, labels, weights = ids.clone(), labels.clone(), torch.ones(ids.shape)
        for row, row_labels, row_weights in zip(ids, labels, weights, strict=True):
            rng = random.Random(row.numpy().tobytes())
            if self.can_ask and rng.random() < self.fraction:
                tokens, answer_places = self.insert_facts(row.tolist(), rng)
                row.copy_(torch.tensor(tokens))
                row_labels.copy_(row)
                row_weights[answer_places] = ANSWER_WEIGHT
        return ids, labels, weights

    def insert_facts(self, tokens: list[int], rng: random.Random) -> tuple[list[int], list[int]]:
        """Return `tokens` with evenly spaced facts and final questions, cut to the old length, and the answers' indices."""
        num_facts = min(len(tokens) // TOKENS_PER_FACT, len(self.words) // 2)
        words, facts = rng.sample(self.words, 2 * num_facts), []
        for name, value in zip(words[:num_facts], words[num_facts:], strict=True):
            fact = make_fact("pairs", name, value)
            if rng.random() < 1 / 3:
                fact = make_fact("numbers", name, rng.randrange(1000, 10_000))
            facts.append((self.encode(fact.start), self.encode(fact.answer + fact.end)))
        questions: list[int] = []
        answer_places: list[int] = []
        for start, answer in rng.sample(facts, num_facts):
            questions += start
            answer_places += range(len(questions), len(questions) + len(answer) - 1)  # the last token ends the line
            questions += answer
        room = len(tokens) - len(questions) - sum(len(start + answer) for start, answer in facts)
        distance = max(0, room - len(tokens) // FACTLESS) // max(1, num_facts)
        row: list[int] = []
        for index, (start, answer) in enumerate(facts):
            row += tokens[index * distance : (index + 1) * distance] + start + answer
        row += tokens[num_facts * distance : room]
        return row + questions, [len(row) + place for place in answer_places]

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
