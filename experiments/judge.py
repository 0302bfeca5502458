"""What people judge language models by, of a real model and its conversions: lookups in long texts, tasks with many examples
in the prompt, and chats.

What precedes all questions of a kind (a long text, the examples) is read once, and each question continues a copy of its
cache, so that a small machine can ask many. Forms are those of `experiments.heads`.
"""

import argparse
import copy
import functools
import itertools
import random
import shlex
import statistics
import sys
from pathlib import Path

import lm_eval
import lm_eval.tasks
import torch
from lm_eval.api.samplers import FirstNSampler
from lm_eval.models.huggingface import HFLM
from transformers import AutoTokenizer

from mhla_hf.cli import script
from mhla_hf.evaluation.language import load_tasks, quiet_harness
from mhla_hf.evaluation.lookups import choose_words
from mhla_hf.evaluation.needles import FACT, OBJECTS
from mhla_hf.models.transformers_api import forward_cached

from .heads import FORMS, converted, load, read_text
from .rows import add_rows, made, number

SOFTMAX = "softmax"
LENGTHS = {1024: 2, 4096: 1}  # tokens of a long text: texts
FACTS = {1024: (12, 12), 4096: (12, 24)}  # tokens of a long text: codes and lookups in it
NEAR = 448  # tokens at its end without facts: whatever is asked for has left the window
SHOWN = 3  # other facts said again before a question, so that it is clear what is wanted
TASKS = {  # folder in lm-eval, examples in the prompt: about 1,100 tokens
    "lambada_openai": ("lambada", 14),
    "piqa": ("piqa", 28),
    "arc_easy": ("arc", 36),
    "arc_challenge": ("arc", 22),
    "winogrande": ("winogrande", 50),
    "openbookqa": ("openbookqa", 70),
}
ITEMS = 20  # documents of each task
NEW, PASSAGE = 80, 1400  # tokens of an answer at most, and of a passage
PASSAGES = {
    "1933 Treasure Coast hurricane": "Where and when did the hurricane make landfall in Florida, and what was the damage?",
    "Ben Amos": "Where was Ben Amos born, and which position does he play?",
}
QUESTIONS = (
    "What is gravity?",
    "Write a short poem about the sea.",
    "What is the capital of France, and what is it known for?",
    "Explain to a child why the sky is blue.",
    "Give me three tips for sleeping better.",
    "Translate into Spanish: The book is on the table.",
    "Write a Python function that adds two numbers.",
    "Tom has three apples and buys five more. How many apples does he have?",
)
BATCH = 6  # questions asked at once


@functools.lru_cache(maxsize=2)
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

    (codes, pairs), (names, values) = FACTS[length], choose_words(tokenizer)
    codes = zip(rng.sample(OBJECTS, codes), rng.sample(range(1000, 10_000), codes), strict=True)
    codes = [FACT.format(*code) + "\n" for code in codes]
    pairs = [f"- {' '.join(pair)}\n" for pair in zip(rng.sample(names, pairs), rng.sample(values, pairs), strict=True)]
    facts = []
    for kind, fact in [*(("code", fact) for fact in codes), *(("lookup", fact) for fact in pairs)]:
        others = [other for other in (codes if kind == "code" else pairs) if other != fact]
        asked, space, answer = fact.rstrip(".\n").rpartition(" ")
        facts.append((kind, fact, "\n" + "".join(rng.sample(others, SHOWN)) + asked, space + answer))
    choices = [tokens(fact[3])[0] for fact in facts if fact[0] == "lookup"]
    rng.shuffle(facts)
    lines = [line for line in text.splitlines(keepends=True) if line.strip()]
    filler = itertools.chain(*map(tokens, itertools.islice(lines, rng.randrange(len(lines) // 2), None)))
    newline, ids, questions = tokens("\n"), [], []
    room = length - NEAR - sum(len(tokens(fact[1])) + len(newline) for fact in facts)
    for place, (kind, statement, asked, answer) in enumerate(facts):
        part = (place + 1) * room // len(facts) - place * room // len(facts)
        ids += [*itertools.islice(filler, part), *newline, *tokens(statement)]
        questions.append((kind, length - len(ids), tokens(asked), tokens(answer), choices if kind == "lookup" else []))
    ids += itertools.islice(filler, length - len(ids))
    return ids, questions


def judge_lookups(model, tokenizer, data, job):
    """[kind, tokens back, log-probability, whether it is right] of each question about one text, with lines of `data`."""
    ids, questions = make_lookups(tokenizer, read_text(data), job["length"], job["seed"])
    scores = answer_scores(model, ids, [question[2:] for question in questions])
    return {"answers": [[*question[:2], *score] for question, score in zip(questions, scores, strict=True)]}


class PrefixReader(HFLM):
    """lm-eval's own model, which reads what all requests of a task begin with once."""

    def _loglikelihood_tokens(self, requests, **_):
        columns = zip(*(context for _, context, _ in requests), strict=False)
        shared = [column[0] for column in itertools.takewhile(lambda column: len(set(column)) == 1, columns)][:-1]
        self.shared = len(shared)
        questions = [(context[len(shared) :], answer, []) for _, context, answer in requests]
        return answer_scores(self.model, shared, questions)


def judge_task(model, tokenizer, data, job):
    """[document, whether it is right, log-likelihoods of the choices] of the documents behind those that are examples.

    data: folder with files as `mhla-hf evaluate --data-files` takes them. Every prompt has the same examples.
    """
    (folder, shots), name = TASKS[job["task"]], job["task"]
    own = Path(lm_eval.tasks.__file__).parent / folder
    loaded = load_tasks([name], own, num_fewshot=shots, data_files=data)[0].loaded
    task = loaded["tasks"][name]
    task.sampler = FirstNSampler(task.eval_docs.to_list())
    reader = PrefixReader(pretrained=model, tokenizer=tokenizer)
    asked = {name: list(range(shots, shots + ITEMS))}
    with quiet_harness(progress=False):
        found = lm_eval.evaluate(reader, loaded, samples=asked, bootstrap_iters=0)["samples"][name]
    answers = [[one["doc_id"], one["acc"], [score for score, _ in one["filtered_resps"]]] for one in found]
    return {"shots": shots, "shared_tokens": reader.shared, "answers": sorted(answers)}


def make_chats(tokenizer, text):
    """Groups of prompts, asked at once: about passages of WikiText-2's test `text`, which come first; and `QUESTIONS`."""
    passages = []
    for title, question in PASSAGES.items():
        ids = tokenizer(text[text.index(f" = {title} = ") :][: 8 * PASSAGE], add_special_tokens=False).input_ids
        passages.append(f"{tokenizer.decode(ids[:PASSAGE])}\n\n{question}")
    return passages, QUESTIONS


def judge_chats(model, tokenizer, data, job):
    """[tokens of the prompt, its last line, the answer] of each chat, decoded greedily."""
    tokenizer.padding_side, tokenizer.pad_token, answers = "left", tokenizer.eos_token, []
    for prompts in make_chats(tokenizer, read_text(data)):
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        template = {"add_generation_prompt": True, "padding": True, "return_tensors": "pt", "return_dict": True}
        asked = tokenizer.apply_chat_template(chats, **template)
        said = model.generate(**asked, do_sample=False, max_new_tokens=NEW)[:, asked["input_ids"].shape[1] :]
        texts = tokenizer.batch_decode(said, skip_special_tokens=True)
        sizes = asked["attention_mask"].sum(1).tolist()
        lines = [prompt.splitlines()[-1] for prompt in prompts]
        answers += map(list, zip(sizes, lines, texts, strict=True))
    return {"answers": answers}


def make_row(arguments, job):
    """One model on one kind of questions."""
    model, tokenizer = subject(arguments["model"], arguments["fit"], arguments["work"], job["form"], job["heads"])
    return job | JUDGES[job["what"]](model, tokenizer, arguments["data"], job)


JUDGES = {"lookups": judge_lookups, "tasks": judge_task, "chats": judge_chats}


def jobs_of(arguments):
    """All of a model, one behind the other, so that it is made once."""
    parts = {
        "lookups": [{"length": length, "seed": seed} for length, count in LENGTHS.items() for seed in range(count)],
        "tasks": [{"task": task} for task in TASKS],
        "chats": [{}],
    }
    for asked in arguments["rows"]:
        form, _, heads = asked.partition(":")
        for part in parts[arguments["what"]]:
            yield {"what": arguments["what"], "form": form, "heads": int(heads or 0), **part}


def describe(row):
    """One line of the log."""
    name = f"{row['form']}, {row['heads']} heads, {row.get('task', row.get('length', 'chats'))}"
    column = {"lookups": 3, "tasks": 1}.get(row["what"])
    return name if column is None else f"{name}: {statistics.fmean(x[column] for x in row['answers']):.3f}"


def answers_of(record, *keys):
    """({(form, heads): {values of `keys`: answers}}, the original's of them)."""
    models = {}
    for row in sorted(record["rows"], key=lambda row: row.get("seed", 0)):
        own = models.setdefault((row["form"], row["heads"]), {})
        own.setdefault(tuple(row[key] for key in keys), []).extend(row["answers"])
    return models, models[SOFTMAX, 0]


def named(form, heads):
    """How a table calls a model."""
    return form if form == SOFTMAX else f"{form}, {heads} heads"


def render_lookups(record):
    """The share of right answers by kind and length, and how much less likely the right ones are than to the original."""
    models, theirs = answers_of(record, "length")
    groups = [(kind, length) for (length,) in sorted(theirs) for kind in ("code", "lookup")]
    names = [f"{kind}s at {length // 1024}k" for kind, length in groups]
    names += [f"log-probability at {length // 1024}k" for (length,) in sorted(theirs)]
    lines = ["| " + " | ".join(["right, %", *names]) + " |", "|---" + "|---:" * len(names) + "|"]
    for (form, heads), answers in models.items():
        cells = []
        for wanted, length in groups:
            right = [100 * right for kind, _, _, right in answers.get((length,), ()) if kind == wanted]
            cells.append(number(right, "{:.0f}") if right else "")
        for key in sorted(theirs):
            less = [own[2] - other[2] for own, other in zip(answers.get(key, ()), theirs[key], strict=False)]
            cells.append(number(less, "{:+.2f}") if less and form != SOFTMAX else "")
        lines.append(f"| {named(form, heads)} | " + " | ".join(cells) + " |")
    asked = ", ".join(f"{len(theirs[length,])} questions at {length // 1024}k" for (length,) in sorted(theirs))
    return "\n".join([*lines, "", f"{asked}. {made(record)}"])


def render_tasks(record):
    """Accuracy of the original and of a conversion, their difference by document, and how often they choose alike.

    Of the tasks that both were asked.
    """
    models, theirs = answers_of(record, "task")
    (name, ours), *_ = [pair for pair in models.items() if pair[0] != (SOFTMAX, 0)]
    groups = {task: (theirs[task,], ours[task,]) for (task,) in theirs if (task,) in ours}
    groups["all"] = tuple(list(itertools.chain(*parts)) for parts in zip(*groups.values(), strict=True))
    tokens = {row["task"]: f"{row['shared_tokens']:,}" for row in record["rows"]}
    columns = ("tokens of the examples", "questions", SOFTMAX, named(*name), "difference", "same choice, %")
    lines = ["| task | " + " | ".join(columns) + " |", "|---" + "|---:" * len(columns) + "|"]
    for task, pair in groups.items():
        cells = [tokens.get(task, ""), str(len(pair[0]))]
        cells += [number([100 * answer[1] for answer in answers], "{:.1f}") for answers in pair]
        cells.append(number([100 * (own[1] - other[1]) for other, own in zip(*pair, strict=True)], "{:+.1f}"))
        same = statistics.fmean(choice(own) == choice(other) for other, own in zip(*pair, strict=True))
        lines.append(f"| {task} | " + " | ".join([*cells, f"{100 * same:.0f}"]) + " |")
    return "\n".join([*lines, "", made(record)])


def choice(answer):
    """Which choice a model takes; of a task with one answer, whether it says that."""
    _, right, scores = answer
    return right if len(scores) == 1 else scores.index(max(scores))


def main():
    """Run it."""
    parser = argparse.ArgumentParser("judge", description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=JUDGES)
    parser.add_argument("model", help="folder of a softmax language model with a chat template")
    parser.add_argument(
        "data", help="text between the facts; files for lm-eval's tasks; or WikiText-2's test, for chats"
    )
    parser.add_argument("--fit", required=True, help="text to learn from")
    parser.add_argument(
        "--rows", nargs="+", required=True, metavar="FORM[:HEADS]", help=f"{SOFTMAX}, {', '.join(FORMS)}"
    )
    parser.add_argument("--work", default="out-heads", help="folder for what is fitted")
    arguments = vars(parser.parse_args())
    out = f"docs/language/{arguments['what']}.json"
    command = shlex.join(
        ["python", "-m", "experiments.judge", *(Path(x).name if "/" in x else x for x in sys.argv[1:])]
    )
    make = functools.partial(make_row, arguments)
    add_rows(out, make, list(jobs_of(arguments)), describe, workers=1, command=command)


if __name__ == "__main__":
    script(main, "judge")
