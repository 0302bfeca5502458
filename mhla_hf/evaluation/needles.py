"""Needles in a haystack, after RULER's multi-key task (arXiv 2404.06654), generated without any download.

The codes of several objects are hidden in a text of filler sentences, and one of them is asked for: by ranking the codes in
the text (`needle_recall_<tokens>`) and by writing the code (`needle_generation_<tokens>`), both also by depth.
"""

import bisect
import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .text_tasks import ANSWER_TOKENS, LocalTasks, write_tasks

NOISE = ("The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.")
FACT, ASK = "The code of the {} is {}.", "\n\nThe code of the {} is"
THINGS = tuple(
    """anchor basket candle drawer engine feather garden hammer island jacket kettle ladder mirror needle orchard pencil
    quarry ribbon saddle tunnel umbrella valley window yard bridge castle desert forest harbor lantern meadow
    river""".split()  # noqa: SIM905
)
KINDS = {"recall": "choice", "generation": "answer"}  # kind in the name of the task -> key of `text_tasks.KINDS`


def make_needles(
    folder: str | Path,
    tokenizer: Any,
    *,
    lengths: Sequence[int],
    depths: Sequence[int] = (0, 25, 50, 75, 100),
    items: int = 20,
    seed: int = 0,
) -> LocalTasks:
    """Write a task of each kind and length.

    Args:
        folder: As in `write_tasks`.
        tokenizer: A tokenizer of transformers, by which tokens are counted.
        lengths, depths, items: As in `LanguageProtocol`.
        seed: Seed of the random choices.
    """
    rows = {length: make_questions(tokenizer, length, sorted(depths), items, seed) for length in lengths}
    documents = {
        f"needle_{kind}_{length}": (task_kind, rows[length]) for kind, task_kind in KINDS.items() for length in lengths
    }
    return write_tasks(folder, documents, {"seed": seed})


def make_questions(tokenizer: Any, length: int, depths: Sequence[int], items: int, seed: int) -> list[dict[str, Any]]:
    """Make the questions of one length, `items` for each depth.

    All have the same haystack: as many filler sentences as fit beside the longest needles.

    Returns:
        Rows {"context", "choices", "answer", "target", "back"}.

    Raises:
        ValueError: `length` is too short for the depths.
    """

    def count(piece: str) -> int:
        return len(tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"])

    longest = sorted(THINGS, key=count)[-len(depths) :]
    context_tokens = length - ANSWER_TOKENS
    noise = list(itertools.islice(itertools.cycle(NOISE), context_tokens))
    facts = [FACT.format(thing, "8888") for thing in longest]
    question = ASK.format(longest[-1])
    fits = (
        bisect.bisect_right(
            range(context_tokens + 1), context_tokens, key=lambda n: count(" ".join(noise[:n] + facts) + question)
        )
        - 1
    )
    if fits < len(depths):
        raise ValueError(f"settings: lengths: got {length}, expected more tokens for {len(depths)} depths.")
    return [
        _question(noise[:fits], length, depths, number, random.Random(f"needle {seed} {length} {depth} {item}"))
        for item in range(items)
        for number, depth in enumerate(depths)
    ]


def _question(
    sentences: list[str], length: int, depths: Sequence[int], asked: int, rng: random.Random
) -> dict[str, Any]:
    """Make one row, whose answer is the code at depth number `asked`; the other codes are the wrong choices."""
    things = rng.sample(THINGS, len(depths))
    codes = [str(code) for code in rng.sample(range(1000, 10_000), len(depths))]
    indices = [round(depth / 100 * len(sentences)) for depth in depths]
    for index, thing, code in reversed(list(zip(indices, things, codes, strict=True))):
        sentences.insert(index, FACT.format(thing, code))
    return {
        "context": " ".join(sentences) + ASK.format(things[asked]),
        "choices": [f" {code}" for code in codes],
        "answer": asked,
        "target": f" {codes[asked]}",
        "back": round(length * (100 - depths[asked]) / 100),
    }
