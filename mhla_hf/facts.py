"""Insert facts into rows of training text, and ask for them at the end: a model must look them up in its context."""

import random
import re
from typing import Any

import torch

# The lookups of `evaluation.recall` use the first words of a vocabulary. The facts here have other words and sentences.
NUM_FREQUENT_WORDS = 400
PAIR, NUMBER = ("\n* {}:", " {}\n"), ("\nThe number of the {} is", " {}.\n")
NUM_FACT_WORDS, MIN_FACT_WORDS = 2000, 100
TOKENS_PER_FACT = 100  # a row of 1,000 tokens has ten facts; about one in three is a number
FACTLESS = 8  # an eighth of a row, before the questions, has no facts, so that all have left the window by then
ANSWER_WEIGHT = 10.0  # of an answer's tokens in the loss; all other tokens weigh 1


def list_words(tokenizer: Any) -> list[str]:
    """List the lowercase words that are one token with the space before them, by token id, which is roughly by frequency."""
    tokens = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return [token[1:] for token, _ in tokens if re.fullmatch("[Ġ▁][a-z]{3,}", token)]


class FactRows:
    """Inserts facts and questions into a fraction of rows; which ones, and which facts, depends on a row's tokens alone."""

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
        """Return as many tokens, with evenly spaced facts and, at the end, questions, and the positions of the answers."""
        num_facts = min(len(tokens) // TOKENS_PER_FACT, len(self.words) // 2)
        words, facts = rng.sample(self.words, 2 * num_facts), []
        for name, value in zip(words[:num_facts], words[num_facts:], strict=True):
            (start, end), answer = (NUMBER, str(rng.randrange(1000, 10_000))) if rng.random() < 1 / 3 else (PAIR, value)
            facts.append((self.encode(start.format(name)), self.encode(end.format(answer))))
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
