"""Lookups: lines such as "- method string" between those of a text; a name comes back with the value it last had.

No statistics of language tell the value: a model says it only if it attends to where it stood. `make_recall` asks for values
by distance.
"""

import itertools
import random
import re

FREQUENT, WORDS, FEWEST = 400, 120, 8  # the last WORDS of a vocabulary's first: known, yet rare between the lookups
LIVE, NEW = 8, 0.25  # names that may come back, and how often a line states a new value
LEAD = 8  # tokens at least before a question's value: the first ones of all are sinks, which are always near
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.85)  # of the window


def choose_words(tokenizer):
    """(names, values): words that are one token each with the space before them, and not the most frequent ones.

    ValueError: the tokenizer has too few of them.
    """
    tokens = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    words = [token[1:] for token, _ in tokens if re.fullmatch("[Ġ▁][a-z]{3,}", token)][:FREQUENT][-WORDS:]
    if len(words) < FEWEST:
        raise ValueError(
            f"tokenizer: has {len(words)} lower-case words of one token; expected at least {FEWEST} for lookups"
        )
    random.Random("words").shuffle(words)
    return words[len(words) // 4 :], words[: len(words) // 4]


class Lookups:
    """Lines, one after the other. besides: a name that none of them says."""

    def __init__(self, words, rng, besides=None):
        self.names, self.values = words
        self.rng, self.besides, self.live = rng, besides, {}

    def line(self):
        """The next one."""
        if not self.live or self.rng.random() < NEW:
            free = [name for name in self.names if name != self.besides and name not in self.live]
            name = self.rng.choice(free)
            self.live[name] = self.rng.choice(self.values)
            if len(self.live) > min(LIVE, len(self.names) // 2):
                del self.live[next(iter(self.live))]
        else:
            name = self.rng.choice(list(self.live))
        return f"- {name} {self.live[name]}\n"


def make_recall(text, count, words, *, window, items, seed):
    """Questions of the form: a line; a name with its value; text, and lookups of others; the name. Which word is next?

    text: str, which begins again where it is shorter than the window. count: from text to its number of tokens.

    Returns rows {"context", "word", "distance", "back"}; distance: tokens from the value to the end of the context; back:
    the round number that it was meant to be. Context and word fit in `window` tokens.
    """
    rng, rows = random.Random(f"recall {seed}"), []
    lines = [line for line in text.splitlines(keepends=True) if line.strip()]
    reaches = [int(depth * window) for depth in DEPTHS]
    for turn in range(2 * items):
        reach, name, value = reaches[turn % len(reaches)], *map(rng.choice, words)
        lookups, between, size, start = Lookups(words, rng, besides=name), "\n", 0, rng.randrange(len(lines))
        others = [line for line in lines[start:] + lines[:start] if not re.search(rf"\b{name}\b", line)]
        for line in itertools.cycle(others) if others else ():
            added = line + lookups.line()
            between, size = between + added, size + count(added)
            if size >= reach and count(between) >= reach:
                break
        lead = next((line for line in others if count(line) >= LEAD), "")
        context, distance = f"{lead}- {name} {value}{between}- {name}", count(between) + 2
        if lead and distance >= reach and count(context) < window:
            rows.append({"context": context, "word": f" {value}", "distance": distance, "back": reach})
        if len(rows) == items:
            break
    return rows
