"""Needles in a haystack for lm-eval, made without any data: recall by depth at any length, asked and written out.

After RULER's multi-key task (arXiv 2404.06654): codes of several things lie spread over a text that says nothing, and one
of them is asked for. `needle_recall_<length>` ranks the codes of all the things in the text, so that chance is one over
their number and a model of any size can be asked; `needle_generation_<length>` has the model write the code. Unusual: the
wrong answers stand in the text as well, so remembering that some code was said is not enough; and length counts tokens of
the tokenizer given, so questions are equal only for models judged together.
"""

import random
from pathlib import Path

from .local_tasks import ANSWER_TOKENS, MANIFEST, write_tasks

NOISE = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)
THINGS = tuple(
    """anchor basket candle drawer engine feather garden hammer island jacket kettle ladder mirror needle orchard pencil
    quarry ribbon saddle tunnel umbrella valley window yard bridge castle desert forest harbor lantern meadow
    river""".split()  # noqa: SIM905
)
PREFIX = "needle"
LEAST = 128


def make_needles(folder, tokenizer, *, lengths=(512, 1024, 2048), depths=(0, 25, 50, 75, 100), items=20, seed=0):
    """Write `needle_recall_<length>` and `needle_generation_<length>` into `folder` (aside, then renamed).

    tokenizer: a transformers tokenizer, which counts. lengths: tokens of a question with its answer, at least 128.
    depths: percent of the text before the code asked for, 0 its start; two or more. items: questions per depth.
    seed: of every choice. The same arguments give the same bytes. A score by depth is called `acc_back_<tokens>`, the
    tokens from the code to the question. Returns `LocalTasks`.
    """
    lengths, depths = whole_numbers("lengths", lengths, LEAST, 10**9), whole_numbers("depths", depths, 0, 100)
    whole_numbers("items", [items], 1, 10**6)
    if not 2 <= len(depths) <= len(THINGS):
        raise ValueError(f"depths is {depths}; expected between 2 and {len(THINGS)} of them")
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()) and not (folder / MANIFEST).exists():
        raise ValueError(f"folder {str(folder)!r} is not empty and holds no {MANIFEST}; expected a new or an empty one")
    documents = {}
    for length in lengths:
        haystack = _Haystack(tokenizer, length - ANSWER_TOKENS, len(depths))
        rows = [
            _question(
                haystack, length, depths, number, random.Random(f"needle {seed} {length} {depths[number]} {item}")
            )
            for item in range(items)
            for number in range(len(depths))
        ]
        documents[f"{PREFIX}_recall_{length}"] = ("needle_recall", rows)
        documents[f"{PREFIX}_generation_{length}"] = ("needle_generation", rows)
    arguments = {"lengths": lengths, "depths": depths, "items": items, "seed": seed}
    return write_tasks(folder, documents, arguments)


def whole_numbers(name, values, least, most):
    """`values` as a sorted list of different whole numbers within bounds; ValueError otherwise."""
    values = list(values) if isinstance(values, (list, tuple, range)) else [values]
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ValueError(f"{name}: got {value!r}; expected whole numbers from {least} to {most}")
    return sorted(set(values))


class _Haystack:
    """How many sentences of noise fit, found once per length: every question of a length is nearly equally long."""

    def __init__(self, tokenizer, tokens, needles):
        self.tokens, self.count = (
            tokens,
            lambda text: len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]),
        )
        low, high = 0, tokens
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._fits(middle, needles) else (low, middle - 1)
        if low < needles:
            raise ValueError(f"lengths: {tokens + ANSWER_TOKENS} tokens are too few for {needles} depths")
        self.sentences = [NOISE[number % len(NOISE)] for number in range(low)]

    def _fits(self, sentences, needles):
        longest = sorted(THINGS, key=self.count)[-needles:]
        text = " ".join(
            [NOISE[number % len(NOISE)] for number in range(sentences)] + [_fact(t, "8888") for t in longest]
        )
        return self.count(text + _ask(longest[-1])) <= self.tokens


def _fact(thing, code):
    return f"The code of the {thing} is {code}."


def _ask(thing):
    return f"\n\nThe code of the {thing} is"


def _question(haystack, length, depths, asked, rng):
    """One row: the code at depth number `asked` is wanted; the codes at the other depths are the wrong answers."""
    things = rng.sample(THINGS, len(depths))
    codes = [str(code) for code in rng.sample(range(1000, 10_000), len(depths))]
    sentences = list(haystack.sentences)
    for number in reversed(range(len(depths))):
        place = round(depths[number] / 100 * len(haystack.sentences))
        sentences.insert(place, _fact(things[number], codes[number]))
    return {
        "context": " ".join(sentences) + _ask(things[asked]),
        "choices": [f" {code}" for code in codes],
        "answer": asked,
        "target": f" {codes[asked]}",
        "back": round(length * (100 - depths[asked]) / 100),
    }
