"""Needles in a haystack, after RULER's multi-key task (arXiv 2404.06654), made here without any download.

The codes of several things are hidden in a text that says nothing, and one of them is asked for: by ranking the codes that
stand in the text (`needle_recall_<tokens>`), and by writing the code (`needle_generation_<tokens>`). Both are also reported
by depth: `acc_back_256` is the share of right answers where the code lies about 256 tokens back.
"""

import bisect
import fnmatch
import random

from datasets import Dataset, DatasetDict
from lm_eval.api.task import ConfigurableTask

ANSWER_TOKENS = 32
LEAST = 128
NOISE = ("The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.")
FACT, ASK = "The code of the {} is {}.", "\n\nThe code of the {} is"
THINGS = tuple(
    """anchor basket candle drawer engine feather garden hammer island jacket kettle ladder mirror needle orchard pencil
    quarry ribbon saddle tunnel umbrella valley window yard bridge castle desert forest harbor lantern meadow
    river""".split()  # noqa: SIM905
)


def score_choice(doc, results):
    """The share of the right code among those with the highest likelihood, alone and by depth."""
    scores = [loglikelihood for loglikelihood, _ in results]
    right = (scores[doc["answer"]] == max(scores)) / scores.count(max(scores))
    return {"acc": right, f"acc_back_{doc['back']}": right}


def score_answer(doc, results):
    """Whether the text begins with the right code, alone and by depth."""
    right = float(results[0].strip().startswith(doc["target"].strip()))
    return {"exact_match": right, f"exact_match_back_{doc['back']}": right}


CHOICE = {"output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": "answer"}
ANSWER = {"until": ["\n\n"], "do_sample": False, "max_gen_toks": ANSWER_TOKENS}
WRITING = {"output_type": "generate_until", "doc_to_target": "target", "generation_kwargs": ANSWER}
KINDS = {  # in the name of the task -> its metric, how an answer is scored, and lm-eval's settings
    "recall": ("acc", score_choice, CHOICE),
    "generation": ("exact_match", score_answer, WRITING),
}


def make_needles(patterns, tokenizer, *, lengths, depths=(0, 25, 50, 75, 100), items=20, seed=0):
    """The tasks whose names match one of `patterns`, name -> lm-eval task; the same arguments give the same questions.

    tokenizer: of transformers, which counts. lengths: tokens of a question with its answer, each at least 128. depths:
    percent of the text before the code asked for, 0 its start. items: questions per depth. ValueError: too short a length.
    """
    made = {}
    for length in lengths:
        rows = make_questions(tokenizer, length, sorted(depths), items, seed)
        for kind in KINDS:
            name = f"needle_{kind}_{length}"
            if any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
                made[name] = _task(name, kind, rows)
    return made


def _task(name, kind, rows):
    metric, scored, own = KINDS[kind]
    metrics = [metric, *(f"{metric}_back_{back}" for back in sorted({row["back"] for row in rows}))]
    return ConfigurableTask(
        config={
            "task": name,
            "custom_dataset": lambda **_: DatasetDict({"test": Dataset.from_list(rows)}),
            "test_split": "test",
            "num_fewshot": 0,
            "doc_to_text": "context",
            "process_results": scored,
            "target_delimiter": "",
            "metric_list": [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in metrics],
            "metadata": {"version": 1.0},
            **own,
        }
    )


def make_questions(tokenizer, length, depths, items, seed):
    """Rows {"context", "choices", "answer", "target", "back"} of one length, `items` for each depth.

    All have the same haystack: as many sentences of noise as fit beside the longest needles.
    """

    def count(piece):
        return len(tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"])

    def with_noise(sentences):
        return " ".join(_noise(sentences) + facts) + ASK.format(longest[-1])

    longest = sorted(THINGS, key=count)[-len(depths) :]
    facts, room = [FACT.format(thing, "8888") for thing in longest], length - ANSWER_TOKENS
    fits = bisect.bisect_right(range(room + 1), room, key=lambda sentences: count(with_noise(sentences))) - 1
    if fits < len(depths):
        raise ValueError(f"settings: lengths: {length} tokens are too few for {len(depths)} depths")
    return [
        _question(_noise(fits), length, depths, number, random.Random(f"needle {seed} {length} {depth} {item}"))
        for item in range(items)
        for number, depth in enumerate(depths)
    ]


def _noise(sentences):
    return [NOISE[number % len(NOISE)] for number in range(sentences)]


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
