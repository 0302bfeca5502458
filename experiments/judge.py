"""What people judge language models by, of a real model and its conversions: lookups in long texts, tasks with many examples
in the prompt, and chats.

What precedes all questions of a kind (a long text, the examples) is read once, and each question continues a copy of its
cache, so that a small machine can ask many. Forms are those of `experiments.heads`.
"""

import argparse
import copy
import functools
import itertools
import json
import os
import random
import shlex
import statistics
import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer

from mhla_hf.cli import script
from mhla_hf.evaluation.lookups import choose_words
from mhla_hf.evaluation.needles import ASK, FACT, THINGS
from mhla_hf.models.transformers_api import forward_cached

from .heads import FORMS, converted, load, read_text
from .rows import add_rows, made

SOFTMAX = "softmax"
FACTS = {1024: 12, 4096: 24}  # tokens of a long text: facts of each kind
NEAR = 448  # tokens at its end without facts: whatever is asked for has left the window
SHOWN = 3  # lookups before the one that is asked for
BATCH = 6  # questions asked at once


@functools.lru_cache(maxsize=1)
def subject(model_folder, fit_text, work, form, heads):
    """The original, or a conversion with so many softmax heads, and the tokenizer."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    tokenizer = AutoTokenizer.from_pretrained(model_folder, trust_remote_code=False)
    if form == SOFTMAX:
        return load(model_folder), tokenizer
    return converted(model_folder, fit_text, work, form, heads, 0)[0], tokenizer


@torch.no_grad()
def answer_scores(model, prefix, questions):
    """(log-probability of the answer, whether it is right) of each question, all of which follow `prefix`.

    prefix: token ids. questions: (asked, answer, choices), the token ids of what is asked (at least one) and of the answer,
    and those of answers of one token of which the likeliest counts; without choices, it is right if greedy decoding says it.
    """
    _, cache = forward_cached(model, torch.tensor([prefix]), logits_to_keep=1)
    scores = []
    for first in range(0, len(questions), BATCH):
        group = questions[first : first + BATCH]
        rows = [[*asked, *answer][:-1] for asked, answer, _ in group]
        ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)  # padding on the right is seen by nobody
        for row, tokens in zip(ids, rows, strict=True):
            row[: len(tokens)] = torch.tensor(tokens)
        copied = copy.deepcopy(cache)
        copied.batch_repeat_interleave(len(rows))
        logits = forward_cached(model, ids, copied)[0].logits
        for row, (asked, answer, choices) in zip(logits, group, strict=True):
            log_p = row[len(asked) - 1 :][: len(answer)].float().log_softmax(-1)
            target = torch.tensor(answer)
            said = torch.tensor(choices)[log_p[:, choices].argmax(-1)] if choices else log_p.argmax(-1)
            scores.append((float(log_p.gather(-1, target[:, None]).sum()), bool((said == target).all())))
    return scores


def make_lookups(tokenizer, text, length, seed):
    """A text of so many tokens with facts at even distances between its lines, and questions about them.

    Facts of two kinds, mixed by chance: codes of things (`needles`), to be written, and lines such as "- method string"
    (`lookups`), whose values are ranked. A question is (kind, tokens back, asked, answer, choices).
    """
    rng = random.Random(f"lookups {length} {seed}")

    def tokens(piece):
        return tokenizer(piece, add_special_tokens=False, verbose=False).input_ids

    count, (names, values) = FACTS[length], choose_words(tokenizer)
    codes = zip(rng.sample(THINGS, count), rng.sample(range(1000, 10_000), count), strict=True)
    facts = [("code", FACT.format(*pair) + "\n", ASK.format(pair[0]), f" {pair[1]}") for pair in codes]
    pairs = [f"- {' '.join(pair)}\n" for pair in zip(rng.sample(names, count), rng.sample(values, count), strict=True)]
    for pair in pairs:  # asked for behind three others, which show what is wanted
        asked = "\n" + "".join(rng.sample([other for other in pairs if other != pair], SHOWN)) + pair[:-1]
        facts.append(("lookup", pair, asked.rpartition(" ")[0], f" {pair.split()[-1]}"))
    choices = [tokens(fact[3])[0] for fact in facts if fact[0] == "lookup"]
    rng.shuffle(facts)
    lines = [line for line in text.splitlines(keepends=True) if line.strip()]
    filler = itertools.chain(*map(tokens, itertools.islice(lines, rng.randrange(len(lines) // 2), None)))
    newline, ids, questions = tokens("\n"), [], []
    room = length - NEAR - sum(len(tokens(fact[1])) + len(newline) for fact in facts)
    for number, (kind, statement, asked, answer) in enumerate(facts, 1):
        part = number * room // len(facts) - (number - 1) * room // len(facts)
        ids += [*itertools.islice(filler, part), *newline, *tokens(statement)]
        questions.append((kind, length - len(ids), tokens(asked), tokens(answer), choices if kind == "lookup" else []))
    ids += itertools.islice(filler, length - len(ids))
    return ids, questions


def judge_lookups(model, tokenizer, arguments, job):
    """[kind, tokens back, log-probability, whether it is right] of each question about one text."""
    ids, questions = make_lookups(tokenizer, read_text(arguments["text"]), job["length"], job["seed"])
    scores = answer_scores(model, ids, [question[2:] for question in questions])
    return [[*question[:2], *score] for question, score in zip(questions, scores, strict=True)]


def make_row(arguments, job):
    """One model on one kind of questions."""
    where = arguments["model"], arguments["fit"], arguments["work"]
    model, tokenizer = subject(*where, job["form"], job["heads"])
    return job | {"answers": JUDGES[job["what"]](model, tokenizer, arguments, job)}


JUDGES = {"lookups": judge_lookups}


def jobs_of(arguments):
    """One after another of each model, so that it is made once."""
    for asked in arguments["rows"]:
        form, _, heads = asked.partition(":")
        for length, count in arguments["lengths"].items():
            for seed in range(count):
                yield {"what": "lookups", "form": form, "heads": int(heads or 0), "length": length, "seed": seed}


def describe(row):
    """One line of the log."""
    answers = row["answers"]
    right, log_p = (statistics.fmean(answer[column] for answer in answers) for column in (3, 2))
    return f"{row['form']}, {row['heads']} heads, {row['what']} {row['length']}: {right:.3f}, log-probability {log_p:.3f}"


def main():
    """Run it."""
    parser = argparse.ArgumentParser("judge", description=__doc__.split("\n")[0])
    parser.add_argument("model", help="folder of a softmax language model with a chat template")
    parser.add_argument("--fit", required=True, help="text to learn from")
    parser.add_argument("--text", required=True, help="text between the facts")
    parser.add_argument("--rows", nargs="+", required=True, metavar="FORM[:HEADS]", help=f"{SOFTMAX}, {', '.join(FORMS)}")
    parser.add_argument(
        "--lengths", type=json.loads, default={}, metavar="JSON", help='{"tokens of a long text": texts}'
    )
    parser.add_argument("--work", default="out-heads", help="folder for what is fitted")
    parser.add_argument("--out", default="docs/language/judge.json")
    arguments = vars(parser.parse_args())
    arguments["lengths"] = {int(length): count for length, count in arguments["lengths"].items()}
    command = shlex.join(["python", "-m", "experiments.judge", *(Path(x).name if "/" in x else x for x in sys.argv[1:])])
    make = functools.partial(make_row, arguments)
    add_rows(arguments["out"], make, list(jobs_of(arguments)), describe, workers=1, command=command)


if __name__ == "__main__":
    script(main, "judge")
