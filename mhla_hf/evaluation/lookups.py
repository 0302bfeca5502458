"""Lookups: lines such as "- method string" among those of a text. A name that comes back has the value it last had.

Nothing but the earlier line tells the value, so that a model predicts it only if it attends there. `make_recall` asks for
values by distance.
"""

import itertools
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

# Words are the last WORDS of the FREQUENT first ones of a vocabulary: known to the model, yet rare in the text around.
FREQUENT, WORDS, FEWEST = 400, 120, 8
LIVE, NEW = 8, 0.25  # names that may come back, and the probability that a line gives a new value
LEAD = 8  # tokens at least before the value of a question: the first tokens are sinks, which every token attends to
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.85)  # distances, as fractions of the window


def choose_words(tokenizer: Any) -> tuple[list[str], list[str]]:
    """Choose names and values: words that are one token with the space before them, without the most frequent ones.

    Args:
        tokenizer: A tokenizer of transformers.

    Returns:
        (names, values).

    Raises:
        ValueError: The tokenizer has too few such words.
    """
    tokens = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    words = [token[1:] for token, _ in tokens if re.fullmatch("[Ġ▁][a-z]{3,}", token)][:FREQUENT][-WORDS:]
    if len(words) < FEWEST:
        raise ValueError(f"tokenizer: got {len(words)} lowercase words of one token, expected at least {FEWEST}.")
    random.Random("words").shuffle(words)
    return words[len(words) // 4 :], words[: len(words) // 4]


class Lookups:
    """Generates lookup lines.

    Args:
        words: Names and values, see `choose_words`.
        rng: Source of the random choices.
        besides: A name that no line contains.
    """

    def __init__(
        self, words: tuple[Sequence[str], Sequence[str]], rng: random.Random, besides: str | None = None
    ) -> None:
        self.names, self.values = words
        self.rng = rng
        self.besides = besides
        self.live: dict[str, str] = {}  # name -> value, the oldest first

    def line(self) -> str:
        """Return the next line."""
        if not self.live or self.rng.random() < NEW:
            free = [name for name in self.names if name != self.besides and name not in self.live]
            name = self.rng.choice(free)
            self.live[name] = self.rng.choice(self.values)
            if len(self.live) > min(LIVE, len(self.names) // 2):
                del self.live[next(iter(self.live))]
        else:
            name = self.rng.choice(list(self.live))
        return f"- {name} {self.live[name]}\n"


def make_recall(
    text: str,
    count: Callable[[str], int],
    words: tuple[Sequence[str], Sequence[str]],
    *,
    window: int,
    items: int,
    seed: int,
) -> list[dict[str, Any]]:
    """Make questions: a line, a name with its value, text with lookups of other names, and the name. Which word is next?

    Args:
        text: The text, which is repeated if it is shorter than the window.
        count: Function that returns the number of tokens of a text.
        words: Names and values, see `choose_words`.
        window: Tokens in which context and word fit.
        items: Maximum number of questions.
        seed: Seed of the random choices.

    Returns:
        Rows {"context", "word", "distance", "back"}: "distance" is the number of tokens from the value to the end of the
        context, "back" the round number that it was meant to be.
    """
    rng = random.Random(f"recall {seed}")
    rows = []
    lines = [line for line in text.splitlines(keepends=True) if line.strip()]
    target_distances = [int(depth * window) for depth in DEPTHS]
    for turn in range(2 * items):
        target_distance, name, value = target_distances[turn % len(target_distances)], *map(rng.choice, words)
        lookups = Lookups(words, rng, besides=name)
        between = "\n"
        size = 0
        start = rng.randrange(len(lines))
        others = [line for line in lines[start:] + lines[:start] if not re.search(rf"\b{name}\b", line)]
        for line in itertools.cycle(others) if others else ():
            added = line + lookups.line()
            between = between + added
            size = size + count(added)
            if size >= target_distance and count(between) >= target_distance:
                break
        lead = next((line for line in others if count(line) >= LEAD), "")
        context = f"{lead}- {name} {value}{between}- {name}"
        distance = count(between) + 2
        if lead and distance >= target_distance and count(context) < window:
            rows.append({"context": context, "word": f" {value}", "distance": distance, "back": target_distance})
        if len(rows) == items:
            break
    return rows
