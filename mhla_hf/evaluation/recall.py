"""Generate texts of any length with facts in them, and questions about the facts, as tasks for lm-eval.

A fact is a line inserted into a text or filler: a code ("The code of the anchor is 4821.") or a lookup ("- method
string"). Only attention to this line can answer a question about it. There are three tasks for each length:
`codes_recall_<tokens>` ranks the codes in the text, `codes_generation_<tokens>` has the model write the code, and in
`lookups_recall_<tokens>` the right value must be the likeliest token. The metric `acc_back_256` is the accuracy for facts
about 256 tokens before the question.
"""

import itertools
import json
import random
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ..facts import draw_facts

# RULER's filler.
NOISE = ("The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.")
NUM_EXAMPLES = 3  # lookups that are repeated before a question, to show what is asked
ANSWER_TOKENS = 32
LINE_WIDTH = 120  # characters of a line of filler
LOADER = '''"""Reads the JSONL files beside this one for lm-eval, wherever the folder is, and scores answers by distance."""

import json
from pathlib import Path

from datasets import Dataset, DatasetDict


def load(file, **_):
    with Path(__file__).with_name(file).open(encoding="utf-8") as lines:
        return DatasetDict({"test": Dataset.from_list([json.loads(line) for line in lines])})


def greedy(doc, results):
    right = float(results[0][1])
    return {"acc": right, f"acc_back_{doc['back']}": right}


def choice(doc, results):
    likelihoods = [likelihood for likelihood, _ in results]
    best = max(likelihoods)  # which several may share
    right = (likelihoods[doc["answer"]] == best) / likelihoods.count(best)
    return {"acc": right, f"acc_back_{doc['back']}": right}


def answer(doc, results):
    right = float(results[0].strip().startswith(doc["target"].strip()))
    return {"exact_match": right, f"exact_match_back_{doc['back']}": right}
'''
CHOICE = {"output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": "answer"}
WRITING_LIMITS = {"until": ["\n\n"], "do_sample": False, "max_gen_toks": ANSWER_TOKENS}
WRITING = {"output_type": "generate_until", "doc_to_target": "target", "generation_kwargs": WRITING_LIMITS}
LIKELIEST = {"output_type": "loglikelihood", "doc_to_target": "target"}
# Name -> kind of facts, scoring function, metric, settings of lm-eval.
TASKS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "codes_recall": ("codes", "choice", "acc", CHOICE),
    "codes_generation": ("codes", "answer", "exact_match", WRITING),
    "lookups_recall": ("lookups", "greedy", "acc", LIKELIEST),
}


class Question(NamedTuple):
    """A question about a fact, to be appended to the text."""

    kind: str  # "codes" or "lookups"
    end: int  # where the line of the fact ends in the text, in characters
    prompt: str
    answer: str  # with the space before it
    choices: list[str]  # the answers of all facts of this kind


def filler_lines(text: str | None) -> list[str]:
    lines = [part for line in (text or "").splitlines() for part in textwrap.wrap(line, LINE_WIDTH)]
    return [f"{line}\n" for line in lines or NOISE]


def make_text(
    tokenizer: Any, lines: Sequence[str], length: int, facts: Sequence[tuple[str, float]], rng: random.Random, *,
    examples: Mapping[str, int], reserve: int = 0,
) -> tuple[str, list[Question]]:  # fmt: skip
    """Make a text of `lines` with facts, and a question about each; together they have at most `length - reserve` tokens.

    `facts` are pairs of a kind ("codes" or "lookups") and a place in percent of the text, in ascending order. `examples`
    says for each kind how many other facts a question repeats as examples.
    """

    def count(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    drawn = draw_facts(tokenizer, [kind for kind, _ in facts], rng)
    questions = []
    for fact in drawn:
        same_kind = [other for other in drawn if other.kind == fact.kind]
        others = [other.line for other in same_kind if other.start != fact.start]
        prompt = "\n" + "".join(rng.sample(others, min(examples[fact.kind], len(others)))) + fact.start
        questions.append(Question(fact.kind, 0, prompt, fact.answer, [other.answer for other in same_kind]))
    room = length - reserve - max(count(question.prompt) for question in questions)
    room_for_filler = room - sum(count(fact.line) for fact in drawn)
    first = rng.randrange(len(lines))
    filler: list[str] = []
    for line in itertools.cycle([*lines[first:], *lines[:first]]):
        room_for_filler -= count(line)
        if room_for_filler < 0:
            break
        filler.append(line)
    while True:
        if len(filler) < len(facts) - 1:
            raise ValueError(f"lengths: got {length}, expected more tokens for {len(facts)} facts, or fewer depths.")
        pieces = list(filler)
        for index, (_, depth) in enumerate(facts):
            # The first tokens are sinks, to which every token attends: no fact is the first line.
            place = max(1, round(depth / 100 * len(filler))) + index
            pieces.insert(place, drawn[index].line)
            questions[index] = questions[index]._replace(end=sum(map(len, pieces[: place + 1])))
        if count(text := "".join(pieces)) <= room:
            return text, questions
        filler.pop()  # a line can have more tokens after another line than alone


def make_recall(
    folder: str | Path, tokenizer: Any, *, lengths: Sequence[int], depths: Sequence[int] = (0, 25, 50, 75, 100),
    items: int = 20, seed: int = 0, text: str | None = None, tasks: Sequence[str] = tuple(TASKS),
) -> list[str]:  # fmt: skip
    """Write recall tasks (facts hidden in a text, and questions about them) as YAML files for lm-eval's `--include_path`.

    The same arguments give the same bytes.

    Args:
        folder: A folder to create, or an empty one.
        tokenizer: A transformers tokenizer, which defines lengths in tokens.
        lengths: Largest numbers of tokens of a prompt (text and question) with its answer; each has its own tasks.
        depths: Positions of the facts in percent of the text. Each text has one fact, and one question, per depth.
        items: Number of texts per length and kind of fact, which is the number of questions per depth.
        seed: Random seed.
        text: Text between whose lines the facts stand (default: filler).
        tasks: Which of `TASKS`.

    Returns:
        The names of the tasks, such as "codes_recall_4096".

    Raises:
        ValueError: A length is too short, or the tokenizer has too few words.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "local_data.py").write_text(LOADER, encoding="utf-8")
    lines, depths = filler_lines(text), sorted(depths)
    for length in lengths:
        rows: dict[str, list[dict[str, Any]]] = {TASKS[task][0]: [] for task in tasks}
        for kind, item in itertools.product(rows, range(items)):
            rng = random.Random(f"{kind} {seed} {length} {item}")
            options: dict[str, Any] = {"examples": {"codes": 0, "lookups": NUM_EXAMPLES}, "reserve": ANSWER_TOKENS}
            context, questions = make_text(tokenizer, lines, length, [(kind, d) for d in depths], rng, **options)
            for answer, (depth, question) in enumerate(zip(depths, questions, strict=True)):
                row = {"context": context + question.prompt, "target": question.answer, "choices": question.choices}
                rows[kind].append({**row, "answer": answer, "back": round(length * (100 - depth) / 100)})
        for task in tasks:
            write_task(folder, f"{task}_{length}", task, rows[TASKS[task][0]])
    return [f"{task}_{length}" for length in lengths for task in tasks]


def write_task(folder: Path, name: str, task: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write NAME.jsonl, the documents `rows`, and NAME.yaml, the settings of lm-eval, for `task`, a key of `TASKS`."""
    _, scoring, metric, settings = TASKS[task]
    documents = "".join(json.dumps(row, ensure_ascii=False, sort_keys=True) + "\n" for row in rows)
    (folder / f"{name}.jsonl").write_text(documents, encoding="utf-8")
    metrics = [metric, *(f"{metric}_back_{back}" for back in sorted({row["back"] for row in rows}))]
    content = {"task": name, "dataset_kwargs": {"file": f"{name}.jsonl"}, "test_split": "test", "num_fewshot": 0}
    content |= {"target_delimiter": "", "doc_to_text": "context", **settings}
    content["metric_list"] = [{"metric": x, "aggregation": "mean", "higher_is_better": True} for x in metrics]
    content["metadata"] = {"version": 1.0}
    functions = f"custom_dataset: !function local_data.load\nprocess_results: !function local_data.{scoring}\n"
    text = functions + yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
