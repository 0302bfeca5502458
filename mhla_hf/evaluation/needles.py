"""Needles in a haystack, after RULER's multi-key task (arXiv 2404.06654), made here without any download.

The codes of several things are hidden in a text that says nothing, and one of them is asked for, by ranking the codes that
stand in the text (`needle_recall_<tokens>`) and by writing the code (`needle_generation_<tokens>`), both also by depth.
"""

import bisect
import itertools
import random

from .text_tasks import ANSWER_TOKENS, write_tasks

NOISE = ("The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.")
FACT, ASK = "The code of the {} is {}.", "\n\nThe code of the {} is"
THINGS = tuple(
    """anchor basket candle drawer engine feather garden hammer island jacket kettle ladder mirror needle orchard pencil
    quarry ribbon saddle tunnel umbrella valley window yard bridge castle desert forest harbor lantern meadow
    river""".split()  # noqa: SIM905
)
KINDS = {"recall": "choice", "generation": "answer"}  # in the name of the task -> of `text_tasks.KINDS`


def make_needles(folder, tokenizer, *, lengths, depths=(0, 25, 50, 75, 100), items=20, seed=0):
    """Write a task of each kind and length, as `write_tasks` does; the rest as in `LanguageProtocol`."""
    rows = {length: make_questions(tokenizer, length, sorted(depths), items, seed) for length in lengths}
    made = {f"needle_{kind}_{length}": (own, rows[length]) for kind, own in KINDS.items() for length in lengths}
    return write_tasks(folder, made, {"seed": seed})


def make_questions(tokenizer, length, depths, items, seed):
    """Rows {"context", "choices", "answer", "target", "back"} of one length, `items` for each depth; ValueError: too short.

    All have the same haystack: as many sentences of noise as fit beside the longest needles.
    """

    def count(piece):
        return len(tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"])

    longest, room = sorted(THINGS, key=count)[-len(depths) :], length - ANSWER_TOKENS
    noise = list(itertools.islice(itertools.cycle(NOISE), room))
    facts, question = [FACT.format(thing, "8888") for thing in longest], ASK.format(longest[-1])
    fits = bisect.bisect_right(range(room + 1), room, key=lambda n: count(" ".join(noise[:n] + facts) + question)) - 1
    if fits < len(depths):
        raise ValueError(f"settings: lengths: {length} tokens are too few for {len(depths)} depths")
    return [
        _question(noise[:fits], length, depths, number, random.Random(f"needle {seed} {length} {depth} {item}"))
        for item in range(items)
        for number, depth in enumerate(depths)
    ]


def _question(sentences, length, depths, asked, rng):
    """One row: the code at depth number `asked` is wanted; the codes at the other depths are the wrong answers."""
    things = rng.sample(THINGS, len(depths))
    codes = [str(code) for code in rng.sample(range(1000, 10_000), len(depths))]
    places = [round(depth / 100 * len(sentences)) for depth in depths]
    for place, thing, code in reversed(list(zip(places, things, codes, strict=True))):
        sentences.insert(place, FACT.format(thing, code))
    return {
        "context": " ".join(sentences) + ASK.format(things[asked]),
        "choices": [f" {code}" for code in codes],
        "answer": asked,
        "target": f" {codes[asked]}",
        "back": round(length * (100 - depths[asked]) / 100),
    }
