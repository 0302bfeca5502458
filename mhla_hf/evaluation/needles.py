"""Needles in a haystack, modeled on RULER's multi-key task (arXiv 2404.06654), generated without any download.

The codes of several objects are hidden in a text of filler sentences. The model has to find the code of one object by
ranking the codes in the text (`needle_recall_<tokens>`) and by generating it (`needle_generation_<tokens>`).
"""

import bisect
import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .text_tasks import ANSWER_TOKENS, LocalTasks, write_tasks

NOISE = ("The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.")
FACT = "The code of the {} is {}."
QUESTION = "\n\nThe code of the {} is"
OBJECTS = tuple(
    """anchor basket candle drawer engine feather garden hammer island jacket kettle ladder mirror needle orchard pencil
    quarry ribbon saddle tunnel umbrella valley window yard bridge castle desert forest harbor lantern meadow
    river""".split()  # noqa: SIM905
)
KINDS = {"recall": "choice", "generation": "answer"}  # kind in the task's name -> key of `text_tasks.KINDS`


def make_needles(
    folder: str | Path,
    tokenizer: Any,
    *,
    lengths: Sequence[int],
    depths: Sequence[int] = (0, 25, 50, 75, 100),
    items: int = 20,
    seed: int = 0,
) -> LocalTasks:
    """Write a needle task for each length and each of `KINDS`.

    Args:
        folder: See `write_tasks`.
        tokenizer: A transformers tokenizer, which defines lengths in tokens.
        lengths, depths, items: See `LanguageProtocol`.
        seed: Random seed.

    Returns:
        The folder with the names and sizes of the tasks.

    Raises:
        ValueError: A length is too short for the depths.
    """
    rows = {length: make_questions(tokenizer, length, sorted(depths), items, seed) for length in lengths}
    documents = {
        f"needle_{kind}_{length}": (task_kind, rows[length]) for kind, task_kind in KINDS.items() for length in lengths
    }
    return write_tasks(folder, documents, {"seed": seed})


def make_questions(tokenizer: Any, length: int, depths: Sequence[int], items: int, seed: int) -> list[dict[str, Any]]:
    """Generate the questions of one length, `items` for each depth.

    All questions have the same haystack: as many filler sentences as fit in addition to the longest needles.

    Args:
        tokenizer: See `make_needles`.
        length: Maximum number of tokens of a question with its answer.
        depths: Positions of the needles in percent of the text, in ascending order.
        items: Number of questions per depth.
        seed: Random seed.

    Returns:
        A list of dicts with "context", "choices", "answer" (index of the right choice), "target" (the right code) and
        "back" (approximate number of tokens from the code to the end, from `length` and the depth).

    Raises:
        ValueError: `length` is too short for the depths.
    """

    def count(piece: str) -> int:
        return len(tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"])

    longest = sorted(OBJECTS, key=count)[-len(depths) :]
    context_tokens = length - ANSWER_TOKENS
    noise = list(itertools.islice(itertools.cycle(NOISE), context_tokens))
    facts = [FACT.format(name, "8888") for name in longest]
    question = QUESTION.format(longest[-1])

    def count_context(num_sentences: int) -> int:
        return count(" ".join(noise[:num_sentences] + facts) + question)

    num_sentences = bisect.bisect_right(range(context_tokens + 1), context_tokens, key=count_context) - 1
    if num_sentences < len(depths):
        raise ValueError(f"settings: lengths: got {length}, expected more tokens for {len(depths)} depths.")
    return [
        _make_question(
            noise[:num_sentences], length, depths, number, random.Random(f"needle {seed} {length} {depth} {item}")
        )
        for item in range(items)
        for number, depth in enumerate(depths)
    ]


def _make_question(
    sentences: list[str], length: int, depths: Sequence[int], answer: int, rng: random.Random
) -> dict[str, Any]:
    """Generate a question. Its answer is the code at `depths[answer]`, and the other codes are the wrong choices.

    The needles are inserted into the filler `sentences` in place. The result is one dict of the list that `make_questions`
    returns.
    """
    names = rng.sample(OBJECTS, len(depths))
    codes = [str(code) for code in rng.sample(range(1000, 10_000), len(depths))]
    indices = [round(depth / 100 * len(sentences)) for depth in depths]
    for index, name, code in reversed(list(zip(indices, names, codes, strict=True))):
        sentences.insert(index, FACT.format(name, code))
    return {
        "context": " ".join(sentences) + QUESTION.format(names[answer]),
        "choices": [f" {code}" for code in codes],
        "answer": answer,
        "target": f" {codes[answer]}",
        "back": round(length * (100 - depths[answer]) / 100),
    }
