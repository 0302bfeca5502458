"""Lookups: lines of a name and a value, such as "- method string", within a text; a repeated name keeps its value.

Only the earlier line determines the value, so a model can predict it only by attending to that line. `make_recall` asks
for values at several distances.
"""

import itertools
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

# Words are the last NUM_WORDS of the first NUM_FREQUENT_WORDS of a vocabulary: familiar to the model, yet rare in the text.
NUM_FREQUENT_WORDS = 400
NUM_WORDS = 120
MIN_WORDS = 8
MAX_LIVE_NAMES = 8  # names that may be repeated
NEW_NAME_PROBABILITY = 0.25  # probability that a line introduces a name instead of repeating one
MIN_LEAD_TOKENS = 8  # before the value of a question, because the first tokens are sinks, to which every token attends
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.85)  # distances, as fractions of the window


def choose_words(tokenizer: Any) -> tuple[list[str], list[str]]:
    """Choose names and values: lowercase words that are one token with the space before them, but not the most frequent.

    Args:
        tokenizer: A transformers tokenizer.

    Returns:
        (names, values), disjoint lists of words without the space, in an order that depends only on the tokenizer.

    Raises:
        ValueError: The tokenizer has too few such words.
    """
    tokens = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    words = [token[1:] for token, _ in tokens if re.fullmatch("[Ġ▁][a-z]{3,}", token)]
    words = words[:NUM_FREQUENT_WORDS][-NUM_WORDS:]
    if len(words) < MIN_WORDS:
        raise ValueError(f"tokenizer: got {len(words)} lowercase words of one token, expected at least {MIN_WORDS}.")
    random.Random("words").shuffle(words)
    return words[len(words) // 4 :], words[: len(words) // 4]


class Lookups:
    """Generates lookup lines such as "- method string".

    Args:
        words: Names and values; see `choose_words`.
        rng: Random number generator.
        excluded: A name that no line may contain.
    """

    def __init__(
        self, words: tuple[Sequence[str], Sequence[str]], rng: random.Random, excluded: str | None = None
    ) -> None:
        self.names, self.values = words
        self.rng = rng
        self.excluded = excluded
        self.live: dict[str, str] = {}  # name -> value, the oldest first

    def line(self) -> str:
        """Return the next line, with its newline. It introduces a new name or repeats one of the last few."""
        if not self.live or self.rng.random() < NEW_NAME_PROBABILITY:
            unused = [name for name in self.names if name != self.excluded and name not in self.live]
            name = self.rng.choice(unused)
            self.live[name] = self.rng.choice(self.values)
            if len(self.live) > min(MAX_LIVE_NAMES, len(self.names) // 2):
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
    """Generate questions that ask for the value of a name.

    A question consists of a line of text, a name with its value, text with lookups of other names, and the name again. The
    answer is the value.

    Args:
        text: The text, which is repeated if it is shorter than the window.
        count: Function that returns the number of tokens of a text.
        words: Names and values; see `choose_words`.
        window: Maximum number of tokens of a question with its answer.
        items: Maximum number of questions.
        seed: Random seed.

    Returns:
        A list of dicts with "context", "word" (the answer), "distance" (tokens from the value to the end of the context)
        and "back" (the target distance).
    """
    rng = random.Random(f"recall {seed}")
    rows = []
    lines = [line for line in text.splitlines(keepends=True) if line.strip()]
    target_distances = [int(depth * window) for depth in DEPTHS]
    for turn in range(2 * items):
        target_distance = target_distances[turn % len(target_distances)]
        name, value = map(rng.choice, words)
        lookups = Lookups(words, rng, excluded=name)
        between = "\n"
        size = 0
        start = rng.randrange(len(lines))
        text_lines = [line for line in lines[start:] + lines[:start] if not re.search(rf"\b{name}\b", line)]
        for line in itertools.cycle(text_lines) if text_lines else ():
            added = line + lookups.line()
            between = between + added
            size = size + count(added)
            if size >= target_distance and count(between) >= target_distance:
                break
        lead = next((line for line in text_lines if count(line) >= MIN_LEAD_TOKENS), "")
        context = f"{lead}- {name} {value}{between}- {name}"
        distance = count(between) + 2
        if lead and distance >= target_distance and count(context) < window:
            rows.append({"context": context, "word": f" {value}", "distance": distance, "back": target_distance})
        if len(rows) == items:
            break
    return rows
