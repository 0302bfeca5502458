"""lm-eval tasks made from held-out text: bits per byte, a cloze, lookups of a value, copying in generation.

`make_tasks` writes a folder that unpatched lm-eval reads through `--include_path`: one YAML and one JSONL per task and a
small loader, all found relative to the folder, so it can be moved and shared. Recall counts the lookups (`lookups.py`) whose
value is the model's likeliest next token, also by depth: in `acc_back_256` the value stood about 256 tokens back.
"""

import dataclasses
import json
import random
import re
from pathlib import Path

import yaml

from ..checkpoints.file_io import atomic_folder
from .lookups import choose_words, make_recall

OPTIONS = 4
ANSWER_TOKENS = 32
LOADER = '''"""Reads the JSONL files beside this one for lm-eval, wherever the folder lies, and scores answers by depth."""

import json
import math
import os
from pathlib import Path

from datasets import Dataset, DatasetDict


def load(file, **_):
    with Path(__file__).with_name(file).open(encoding="utf-8") as lines:
        return DatasetDict({"test": Dataset.from_list([json.loads(line) for line in lines])})


def recall(doc, results):
    right = float(results[0][1])
    return {"acc": right, f"acc_back_{doc['back']}": right}


def copy(doc, results):
    said, meant = results[0].split(), doc["target"].split()
    right = len(os.path.commonprefix([said, meant])) / len(meant)
    threes = list(zip(said, said[1:], said[2:]))
    distinct = len(set(threes)) / len(threes) if threes else 1.0
    return {"exact_match": float(right == 1), "right_words": right, "distinct_threes": distinct}


def choice(doc, results):
    likelihoods = [likelihood for likelihood, _ in results]
    best = max(likelihoods)  # which several may share
    right = (likelihoods[doc["answer"]] == best) / likelihoods.count(best)
    return {"acc": right, f"acc_back_{doc['back']}": right}


def answer(doc, results):
    right = float(results[0].strip().startswith(doc["target"].strip()))
    return {"exact_match": right, f"exact_match_back_{doc['back']}": right}
'''
MANIFEST = "tasks.json"
LEAST = 16  # questions of a task
_QUESTION = {"doc_to_text": "context", "doc_to_choice": "choices", "doc_to_target": "answer"}
_WRITING = {
    "output_type": "generate_until",
    "doc_to_text": "context",
    "doc_to_target": "target",
    "generation_kwargs": {"until": ["\n\n"], "do_sample": False, "max_gen_toks": ANSWER_TOKENS},
}
# kind of task -> (its part of the YAML, function of the loader that scores, metric -> aggregation, the first also by depth)
_ROLLING = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "text"}
_LOOKUP = {"output_type": "loglikelihood", "doc_to_text": "context", "doc_to_target": "word"}
KINDS = {
    "bits_per_byte": (_ROLLING, None, {"bits_per_byte": "bits_per_byte"}),
    "cloze": (_QUESTION, None, {"acc": "mean", "acc_mutual_info": "mean"}),
    "recall": (_LOOKUP, "recall", {"acc": "mean"}),
    "generation": (_WRITING, "copy", {"exact_match": "mean", "right_words": "mean", "distinct_threes": "mean"}),
    "choice": (_QUESTION, "choice", {"acc": "mean"}),
    "answer": (_WRITING, "answer", {"exact_match": "mean"}),
}


@dataclasses.dataclass(frozen=True)
class LocalTasks:
    """What `make_tasks` wrote. folder: for `include_path`. names: the tasks. sizes: task -> documents."""

    folder: str
    names: tuple
    sizes: dict


def make_tasks(text, folder, tokenizer, *, prefix="heldout", window=512, items=150, block=64, seed=0):
    """Write the four tasks made from `text` into `folder` (aside, then renamed). Returns `LocalTasks`.

    text: str, held out from training; some 20,000 characters of prose with paragraphs give good tasks.
    tokenizer: a transformers tokenizer, for lengths in tokens and words of one token; the tasks themselves are plain text.
    prefix: tasks are called `<prefix>_bits_per_byte`, `<prefix>_cloze`, `<prefix>_recall`, `<prefix>_generation`.
    window: tokens a model sees at once; no document is longer. items: questions per task, fewer where the text has fewer.
    block: a generation goes on with what was said at least this many tokens before. seed: of every choice.

    The same arguments give the same bytes. ValueError: fewer than 16 `items`, a text too short for 16, a `window` that holds
    no block and an answer, or a `folder` that holds something this function did not write.
    """
    if items < LEAST:
        raise ValueError(f"items: got {items}; expected at least {LEAST}")
    if window <= block + ANSWER_TOKENS:
        raise ValueError(f"window: got {window}; expected more than {block + ANSWER_TOKENS} tokens")
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()) and not (folder / MANIFEST).exists():
        raise ValueError(f"folder {str(folder)!r} is not empty and holds no {MANIFEST}; expected a new or an empty one")

    def count(piece):
        return len(tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"])

    shape = {"window": window, "items": items, "block": block, "seed": seed}
    made = {
        "bits_per_byte": [{"text": part} for part in split_text(text, window - 2, count)],
        "cloze": make_cloze(text, count, context=window // 3, items=items, seed=seed),
        "recall": make_recall(text, count, choose_words(tokenizer), window=window, items=items, seed=seed),
        "generation": make_generation(text, count, **shape),
    }
    for kind, rows in made.items():
        if kind != "bits_per_byte" and len(rows) < LEAST:
            raise ValueError(
                f"text gives only {len(rows)} questions for {prefix}_{kind}; expected at least {LEAST}: "
                f"give a longer text, or a window of more than {window} tokens"
            )
    documents = {f"{prefix}_{kind}": (kind, rows) for kind, rows in made.items()}
    return write_tasks(folder, documents, {"prefix": prefix, **shape})


def split_text(text, tokens, count):
    """Cut `text` into parts of at most `tokens` tokens, at line ends where there is one; joined they are `text` again."""
    parts, current = [], ""
    for line in text.splitlines(keepends=True):
        while count(line) > tokens:
            cut = len(line) // 2
            while cut > 1 and count(line[:cut]) > tokens:
                cut //= 2
            parts += [current] if current else []
            parts, current, line = [*parts, line[:cut]], "", line[cut:]
        if current and count(current + line) > tokens:
            parts, current = [*parts, current], ""
        current += line
    return parts + ([current] if current else [])


def find_sentences(text):
    """(start, end) of the prose sentences of `text`: 8 words or more, at most 300 characters, inside one paragraph."""
    found = []
    for paragraph in re.finditer(r"\S(?:.|\n(?![ \t]*\n))*", text):
        whole, offset = paragraph.group(), paragraph.start()
        starts = [0] + [match.end() for match in re.finditer(r"[.!?]\s+(?=[A-Z])", whole)]
        for start, after in zip(starts, [*starts[1:], len(whole)], strict=True):
            sentence = whole[start:after].rstrip()
            letters = sum(character.isalpha() or character == " " for character in sentence)
            prose = re.fullmatch(r"[A-Z].*[.!?]", sentence, re.DOTALL) and letters > 0.85 * len(sentence)
            if prose and len(sentence.split()) >= 8 and len(sentence) <= 300:
                found.append((offset + start, offset + start + len(sentence)))
    return found


def _context_before(text, end, tokens, count):
    """The last lines of `text[:end]` that fit in `tokens` tokens; the first is whole, the last ends at `end`."""
    start = max(0, end - 12 * tokens)
    lines, taken = text[start:end].splitlines(keepends=True), ""
    for line in reversed(lines[1:] if start else lines):
        if count(line + taken) > tokens:
            break
        taken = line + taken
    return taken.lstrip("\n")


def make_cloze(text, count, *, context, items, seed):
    """Questions of the form: the text up to the middle of a sentence; which of four sentence ends follows?

    The other three are the ends of other sentences of the text with nearly the same number of characters, broken into
    lines where the true one is, so that neither length nor layout gives it away. context: tokens before the gap.
    Returns rows {"context", "choices", "answer"}; choices begin with the space that separates them from the context.
    """
    rng, rows = random.Random(f"cloze {seed}"), []
    endings = []
    for start, end in find_sentences(text):
        if text.find(text[start:end]) < start:
            continue
        gaps = [start + match.start() for match in re.finditer(r"(?<=\S) (?=\S)", text[start:end])]
        gaps = [gap for gap in gaps if len(text[start:gap].split()) >= 4 and 30 <= end - gap <= 90]
        if gaps:
            gap = rng.choice(gaps)
            endings.append((gap, text[gap:end]))
    for gap, true in rng.sample(endings, len(endings)):
        size = len(true)
        others = {
            _flat(ending) for other, ending in endings if other != gap and abs(len(ending) - size) <= size // 8 + 1
        }
        others = sorted(others - {_flat(true)})
        before = _context_before(text, gap, context, count)
        if len(others) < OPTIONS - 1 or not before:
            continue
        choices = [_broken_like(ending, true) for ending in rng.sample(others, OPTIONS - 1)]
        answer = rng.randrange(OPTIONS)
        choices.insert(answer, true)
        rows.append({"context": before, "choices": choices, "answer": answer})
        if len(rows) == items:
            break
    return rows


def _flat(ending):
    return " " + " ".join(ending.split())


def _broken_like(ending, true):
    """`ending` (one line) with the line breaks, and the indentation after them, at the places where `true` has them."""
    for match in re.finditer(r"[ \t]*\n[ \t]*", true):
        gaps = [at for at in range(1, len(ending)) if ending[at] == " " and ending[at - 1] not in " \n"]
        if gaps:
            at = min(gaps, key=lambda gap: abs(gap - match.start()))
            ending = ending[:at] + match.group() + ending[at + 1 :]
    return ending


def _context_after(text, start, tokens, count):
    """Whole lines of text from `start` on, as many as reach `tokens` tokens; shorter only where the text ends."""
    taken = ""
    for line in text[start : start + 12 * tokens].splitlines(keepends=True):
        taken += line
        if count(taken) >= tokens:
            break
    return taken.rstrip()


def make_generation(text, count, *, window, items, block, seed):
    """Questions of the form: a sentence, at least a block of what follows it, the sentence's first half; go on.

    The model writes on its own, greedily, through its cache; the target is the rest of the sentence, word by word.
    Returns rows {"context", "target"}; context and answer fit in `window` together.
    """
    rng, rows = random.Random(f"generation {seed}"), []
    sentences = find_sentences(text)
    for start, end in rng.sample(sentences, len(sentences)):
        words = [match.end() for match in re.finditer(r"\S+", text[start:end])]
        half = start + words[len(words) // 2 - 1]
        followed = text[start:end] + _context_after(text, end, block, count)
        row = {"context": followed + "\n\n" + text[start:half], "target": text[half:end]}
        if count(followed[end - start :]) >= block and count(row["context"]) + ANSWER_TOKENS < window:
            rows.append(row)
        if len(rows) == items:
            break
    return rows


def write_tasks(folder, documents, arguments):
    """Put tasks where lm-eval finds them, aside and renamed; an older folder written by this gives way.

    documents: task name -> (one of `KINDS`, rows). arguments: for the manifest. Returns `LocalTasks`.
    """
    sizes = {name: len(rows) for name, (_, rows) in documents.items()}
    with atomic_folder(folder, replace=True) as aside:
        (aside / "local_data.py").write_text(LOADER, encoding="utf-8")
        for name, (kind, rows) in documents.items():
            lines = "".join(json.dumps(row, ensure_ascii=False, sort_keys=True) + "\n" for row in rows)
            (aside / f"{name}.jsonl").write_text(lines, encoding="utf-8")
            (aside / f"{name}.yaml").write_text(_task_yaml(name, kind, rows), encoding="utf-8")
        (aside / MANIFEST).write_text(json.dumps({"tasks": sizes, **arguments}, indent=1) + "\n", encoding="utf-8")
    return LocalTasks(str(folder), tuple(documents), sizes)


def _task_yaml(name, kind, rows):
    """lm-eval's description of one task; the field names are given as such, so that no template touches the text."""
    own, scoring, metrics = KINDS[kind]
    functions = {"custom_dataset": "load"} | ({"process_results": scoring} if scoring else {})
    depths = sorted({row["back"] for row in rows if "back" in row})
    metrics = {**metrics, **{f"{next(iter(metrics))}_back_{depth}": "mean" for depth in depths}}
    listed = [
        {"metric": metric, "aggregation": aggregation, "higher_is_better": metric != "bits_per_byte"}
        for metric, aggregation in metrics.items()
    ]
    content = {
        "task": name,
        "dataset_kwargs": {"file": f"{name}.jsonl"},
        "test_split": "test",
        "num_fewshot": 0,
        "output_type": "multiple_choice",
        "target_delimiter": "",
        **own,
        "metric_list": listed,
        "metadata": {"version": 1.0},
    }
    tags = "".join(f"{field}: !function local_data.{function}\n" for field, function in functions.items())
    return tags + yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
