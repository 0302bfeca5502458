"""Generate lm-eval tasks from held-out text: bits per byte, a cloze test, recall of a value, and copying in generation.

`make_tasks` writes a folder that unpatched lm-eval reads through `--include_path`: one YAML and one JSONL file per task and
a small loader, which finds them relative to the folder, so that the folder can be moved and shared. Recall is the accuracy
on lookups (`lookups.py`), also by distance: in `acc_back_256` the value is about 256 tokens back.
"""

import dataclasses
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ..checkpoints.file_io import atomic_folder
from .lookups import choose_words, make_recall

NUM_CHOICES = 4
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
MIN_QUESTIONS = 16  # of a task
_QUESTION = {"doc_to_text": "context", "doc_to_choice": "choices", "doc_to_target": "answer"}
_WRITING = {
    "output_type": "generate_until",
    "doc_to_text": "context",
    "doc_to_target": "target",
    "generation_kwargs": {"until": ["\n\n"], "do_sample": False, "max_gen_toks": ANSWER_TOKENS},
}
_ROLLING = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "text"}
_LOOKUP = {"output_type": "loglikelihood", "doc_to_text": "context", "doc_to_target": "word"}
# Kind of task -> (settings in the YAML file, scoring function of the loader, metric -> aggregation). The first metric is
# also computed by distance.
KINDS: dict[str, tuple[dict[str, Any], str | None, dict[str, str]]] = {
    "bits_per_byte": (_ROLLING, None, {"bits_per_byte": "bits_per_byte"}),
    "cloze": (_QUESTION, None, {"acc": "mean", "acc_mutual_info": "mean"}),
    "recall": (_LOOKUP, "recall", {"acc": "mean"}),
    "generation": (_WRITING, "copy", {"exact_match": "mean", "right_words": "mean", "distinct_threes": "mean"}),
    "choice": (_QUESTION, "choice", {"acc": "mean"}),
    "answer": (_WRITING, "answer", {"exact_match": "mean"}),
}


@dataclasses.dataclass(frozen=True)
class LocalTasks:
    """The tasks that `write_tasks` wrote.

    Args:
        folder: The folder, for `include_path`.
        names: Names of the tasks.
        sizes: Dict from task to number of documents.
    """

    folder: str
    names: tuple
    sizes: dict


def make_tasks(
    text: str,
    folder: str | Path,
    tokenizer: Any,
    *,
    prefix: str = "heldout",
    window: int = 512,
    items: int = 150,
    block: int = 64,
    seed: int = 0,
) -> LocalTasks:
    """Generate four tasks from a text, and write them to a folder.

    The same arguments give the same bytes. The folder is written under a temporary name and then renamed.

    Args:
        text: Text that no model was trained on, ideally at least 20,000 characters of prose with paragraphs.
        folder: The folder to create, or to replace if this function wrote it.
        tokenizer: A transformers tokenizer, for lengths in tokens and for words of one token. The tasks themselves are
            plain text.
        prefix: The tasks are named `<prefix>_bits_per_byte`, `<prefix>_cloze`, `<prefix>_recall` and
            `<prefix>_generation`.
        window: Longest context in tokens, which no document exceeds.
        items: Maximum number of questions per task.
        block: Minimum distance, in tokens, between a sentence and its continuation in the generation task.
        seed: Random seed.

    Returns:
        The folder with the names and sizes of the tasks.

    Raises:
        ValueError: `items` is below 16, the text is too short for 16 questions, `window` is too short for a block and an
            answer, the tokenizer has too few words of one token, or `folder` contains something that this function did not
            write.
    """
    if items < MIN_QUESTIONS:
        raise ValueError(f"items: got {items}, expected at least {MIN_QUESTIONS}.")
    if window <= block + ANSWER_TOKENS:
        raise ValueError(f"window: got {window}, expected more than {block + ANSWER_TOKENS} tokens.")
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()) and not (folder / MANIFEST).exists():
        raise ValueError(
            f"folder: got {str(folder)!r}, which has files but no {MANIFEST}, expected a new or an empty one."
        )

    def count(piece: str) -> int:
        return len(tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"])

    shape = {"window": window, "items": items, "block": block, "seed": seed}
    rows_by_kind = {
        "bits_per_byte": [{"text": part} for part in split_text(text, window - 2, count)],
        "cloze": make_cloze(text, count, context=window // 3, items=items, seed=seed),
        "recall": make_recall(text, count, choose_words(tokenizer), window=window, items=items, seed=seed),
        "generation": make_generation(text, count, **shape),
    }
    for kind, rows in rows_by_kind.items():
        if kind != "bits_per_byte" and len(rows) < MIN_QUESTIONS:
            raise ValueError(
                f"text: got {len(rows)} questions for {prefix}_{kind}, expected at least {MIN_QUESTIONS}: "
                f"give a longer text, or a window of more than {window} tokens."
            )
    documents = {f"{prefix}_{kind}": (kind, rows) for kind, rows in rows_by_kind.items()}
    return write_tasks(folder, documents, {"prefix": prefix, **shape})


def split_text(text: str, tokens: int, count: Callable[[str], int]) -> list[str]:
    """Split a text into parts of at most `tokens` tokens, at line ends if possible, without dropping any character.

    `count` returns the number of tokens of a text.
    """
    parts = []
    current = ""
    for line in text.splitlines(keepends=True):
        while count(line) > tokens:
            cut = len(line) // 2
            while cut > 1 and count(line[:cut]) > tokens:
                cut //= 2
            parts += [current] if current else []
            parts = [*parts, line[:cut]]
            current = ""
            line = line[cut:]
        if current and count(current + line) > tokens:
            parts = [*parts, current]
            current = ""
        current += line
    return parts + ([current] if current else [])


def find_sentences(text: str) -> list[tuple[int, int]]:
    """Find the sentences of prose in a text, and return (start, end) of each, in characters.

    They have at least 8 words and at most 300 characters, and do not extend over several paragraphs.
    """
    sentences = []
    for paragraph in re.finditer(r"\S(?:.|\n(?![ \t]*\n))*", text):
        body, offset = paragraph.group(), paragraph.start()
        starts = [0] + [match.end() for match in re.finditer(r"[.!?]\s+(?=[A-Z])", body)]
        for start, next_start in zip(starts, [*starts[1:], len(body)], strict=True):
            sentence = body[start:next_start].rstrip()
            letters = sum(character.isalpha() or character == " " for character in sentence)
            is_prose = re.fullmatch(r"[A-Z].*[.!?]", sentence, re.DOTALL) and letters > 0.85 * len(sentence)
            if is_prose and len(sentence.split()) >= 8 and len(sentence) <= 300:
                sentences.append((offset + start, offset + start + len(sentence)))
    return sentences


def _context_before(text: str, end: int, tokens: int, count: Callable[[str], int]) -> str:
    """Return the last lines of `text[:end]`, as many as fit in `tokens` tokens, without leading blank lines."""
    start = max(0, end - 12 * tokens)
    lines = text[start:end].splitlines(keepends=True)
    context = ""
    for line in reversed(lines[1:] if start else lines):
        if count(line + context) > tokens:
            break
        context = line + context
    return context.lstrip("\n")


def make_cloze(text: str, count: Callable[[str], int], *, context: int, items: int, seed: int) -> list[dict[str, Any]]:
    """Generate cloze questions: given the text up to the middle of a sentence, which of four endings follows?

    The three wrong endings come from other sentences of the text. They have nearly as many characters as the true ending,
    and line breaks at similar positions, so that neither length nor layout reveals the answer.

    Args:
        text: The text.
        count: Function that returns the number of tokens of a text.
        context: Maximum number of tokens before the gap.
        items: Maximum number of questions.
        seed: Random seed.

    Returns:
        A list of dicts with "context", "choices" (each begins with the space after the context) and "answer" (the index of
        the true ending).
    """
    rng = random.Random(f"cloze {seed}")
    rows = []
    endings = []
    for start, end in find_sentences(text):
        if text.find(text[start:end]) < start:
            continue
        gaps = [start + match.start() for match in re.finditer(r"(?<=\S) (?=\S)", text[start:end])]
        gaps = [gap for gap in gaps if len(text[start:gap].split()) >= 4 and 30 <= end - gap <= 90]
        if gaps:
            gap = rng.choice(gaps)
            endings.append((gap, text[gap:end]))
    for gap, true_ending in rng.sample(endings, len(endings)):
        length = len(true_ending)
        similar = {
            _flatten(ending)
            for other_gap, ending in endings
            if other_gap != gap and abs(len(ending) - length) <= length // 8 + 1
        }
        wrong_endings = sorted(similar - {_flatten(true_ending)})
        before = _context_before(text, gap, context, count)
        if len(wrong_endings) < NUM_CHOICES - 1 or not before:
            continue
        choices = [_insert_line_breaks(ending, true_ending) for ending in rng.sample(wrong_endings, NUM_CHOICES - 1)]
        answer = rng.randrange(NUM_CHOICES)
        choices.insert(answer, true_ending)
        rows.append({"context": before, "choices": choices, "answer": answer})
        if len(rows) == items:
            break
    return rows


def _flatten(ending: str) -> str:
    """Return `ending` on one line, with single spaces and a leading space."""
    return " " + " ".join(ending.split())


def _insert_line_breaks(ending: str, true_ending: str) -> str:
    """Return `ending`, a single line, with the line breaks and indentation of `true_ending` at similar positions."""
    for match in re.finditer(r"[ \t]*\n[ \t]*", true_ending):
        gaps = [
            position
            for position in range(1, len(ending))
            if ending[position] == " " and ending[position - 1] not in " \n"
        ]
        if gaps:
            position = min(gaps, key=lambda gap: abs(gap - match.start()))
            ending = ending[:position] + match.group() + ending[position + 1 :]
    return ending


def _context_after(text: str, start: int, tokens: int, count: Callable[[str], int]) -> str:
    """Return the fewest lines of `text[start:]` with at least `tokens` tokens, cut off after `12 * tokens` characters."""
    context = ""
    for line in text[start : start + 12 * tokens].splitlines(keepends=True):
        context += line
        if count(context) >= tokens:
            break
    return context.rstrip()


def make_generation(
    text: str, count: Callable[[str], int], *, window: int, items: int, block: int, seed: int
) -> list[dict[str, str]]:
    """Generate prompts: a sentence, at least one block of the text after it, and the first half of the sentence again.

    The model generates greedily with its cache. The target is the rest of the sentence, compared word by word.

    Args:
        text: The text.
        count: Function that returns the number of tokens of a text.
        window: Maximum number of tokens of a prompt with its answer.
        items: Maximum number of prompts.
        block: Minimum number of tokens between the sentence and its repetition.
        seed: Random seed.

    Returns:
        A list of dicts with "context" and "target".
    """
    rng = random.Random(f"generation {seed}")
    rows = []
    sentences = find_sentences(text)
    for start, end in rng.sample(sentences, len(sentences)):
        words = [match.end() for match in re.finditer(r"\S+", text[start:end])]
        half = start + words[len(words) // 2 - 1]
        passage = text[start:end] + _context_after(text, end, block, count)
        row = {"context": passage + "\n\n" + text[start:half], "target": text[half:end]}
        if count(passage[end - start :]) >= block and count(row["context"]) + ANSWER_TOKENS < window:
            rows.append(row)
        if len(rows) == items:
            break
    return rows


def write_tasks(
    folder: str | Path, documents: Mapping[str, tuple[str, Sequence[Mapping[str, Any]]]], arguments: Mapping[str, Any]
) -> LocalTasks:
    """Write tasks for lm-eval atomically.

    Args:
        folder: The folder to create. If it exists, it is replaced, whatever it contains.
        documents: Dict from the name of a task to (key of `KINDS`, documents of the task).
        arguments: JSON-serializable values to store in the manifest, in addition to the tasks.

    Returns:
        The folder with the names and sizes of the tasks.
    """
    sizes = {name: len(rows) for name, (_, rows) in documents.items()}
    with atomic_folder(folder, replace=True) as temporary:
        (temporary / "local_data.py").write_text(LOADER, encoding="utf-8")
        for name, (kind, rows) in documents.items():
            lines = "".join(json.dumps(row, ensure_ascii=False, sort_keys=True) + "\n" for row in rows)
            (temporary / f"{name}.jsonl").write_text(lines, encoding="utf-8")
            (temporary / f"{name}.yaml").write_text(_task_yaml(name, kind, rows), encoding="utf-8")
        manifest = json.dumps({"tasks": sizes, **arguments}, indent=1) + "\n"
        (temporary / MANIFEST).write_text(manifest, encoding="utf-8")
    return LocalTasks(str(folder), tuple(documents), sizes)


def _task_yaml(name: str, kind: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the YAML file of one task for lm-eval. It refers to fields of the documents and uses no templates."""
    kind_settings, scoring, metrics = KINDS[kind]
    functions = {"custom_dataset": "load"}
    if scoring:
        functions["process_results"] = scoring
    depths = sorted({row["back"] for row in rows if "back" in row})
    metrics = {**metrics, **{f"{next(iter(metrics))}_back_{depth}": "mean" for depth in depths}}
    metric_list = [
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
        **kind_settings,
        "metric_list": metric_list,
        "metadata": {"version": 1.0},
    }
    tags = "".join(f"{field}: !function local_data.{function}\n" for field, function in functions.items())
    return tags + yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
