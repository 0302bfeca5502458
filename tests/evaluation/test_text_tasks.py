"""Tasks made from a text: nothing of it is lost, questions are fair, the folder is whole or not there."""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
from lm_eval.api.model import LM
from tools.small_scores import HELD_OUT, WINDOW, small_tokenizer

from mhla_hf.evaluation.language import HARNESS_SEEDS, load_tasks, score
from mhla_hf.evaluation.text_tasks import find_sentences, make_cloze, make_tasks, split_text

BLOCK = 32
TOKENIZER = small_tokenizer()


def count(piece):
    return len(TOKENIZER(piece, add_special_tokens=False)["input_ids"])


def make(folder, text=HELD_OUT, **changes):
    arguments = {"prefix": "here", "window": WINDOW, "items": 40, "block": BLOCK} | changes
    return make_tasks(text, folder, TOKENIZER, **arguments)


def rows_of(made, kind):
    """Split at line feeds alone: a text may hold other ends of lines."""
    return list(map(json.loads, Path(made.folder, f"here_{kind}.jsonl").read_bytes().splitlines()))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make(tmp_path_factory.mktemp("made") / "tasks")


def test_every_byte_is_scored_once_whatever_ends_its_lines(tmp_path):
    text = HELD_OUT[:9000].replace(". ", ".\u2028", 5).replace("\n", "\r\n", 20) + HELD_OUT[9000:]
    made = make(tmp_path / "tasks", text)
    parts = [row["text"] for row in rows_of(made, "bits_per_byte")]
    assert "".join(parts) == text and max(map(count, parts)) <= WINDOW - 2
    loaded = load_tasks(["here_bits_per_byte"], made.folder)[0].loaded["tasks"]["here_bits_per_byte"].eval_docs
    assert loaded["text"][:] == parts and made.sizes["here_bits_per_byte"] == len(parts)
    for text in ("a\n" * 500, "\n\n\nx", "ü€ " * 300 + "\r\nend", "x" * 3000):
        parts = split_text(text, 50, count)
        assert "".join(parts) == text and all(0 < count(part) <= 50 for part in parts)


def test_sentences_are_prose():
    sentences = [HELD_OUT[start:end] for start, end in find_sentences(HELD_OUT)]
    assert len(sentences) > 80
    for sentence in sentences:
        assert sentence[0].isupper() and sentence[-1] in ".!?" and "\n\n" not in sentence
        assert len(sentence.split()) >= 8 and ">>>" not in sentence and "::=" not in sentence
    text = "Heading\n\nThis one sentence, e.g. with dots, is long enough.\nShort one. 12 34 56 78 90 12 34 56 78."
    assert [text[a:b] for a, b in find_sentences(text)] == ["This one sentence, e.g. with dots, is long enough."]


def test_cloze_asks_for_the_true_ending_among_three_of_its_size_and_layout(made):
    rows = rows_of(made, "cloze")
    assert len(rows) == 40 and len({row["context"] for row in rows}) == 40
    ends = {" ".join(HELD_OUT[start:end].split())[-15:] for start, end in find_sentences(HELD_OUT)}
    for row in rows:
        choices, true = row["choices"], row["choices"][row["answer"]]
        assert row["context"] + true in HELD_OUT and count(row["context"]) <= WINDOW // 3
        assert sum(row["context"] + choice in HELD_OUT for choice in choices) == 1
        assert len({" ".join(choice.split()) for choice in choices}) == 4
        sizes = [len(" ".join(choice.split())) for choice in choices]
        assert max(sizes) - min(sizes) <= max(sizes) // 3
        assert {choice.count("\n") for choice in choices} == {true.count("\n")}
        assert all(choice[0] == " " and " ".join(choice.split())[-15:] in ends for choice in choices)


def test_the_right_answer_is_at_no_favorite_place():
    rows = make_cloze(HELD_OUT, count, context=20, items=80, seed=3)
    places = Counter(row["answer"] for row in rows)
    assert len(rows) > 70 and min(places[i] for i in range(4)) > 0.15 * len(rows)


class Reader(LM):
    """A language model for tests: `judge(context, continuation)` is the log-likelihood, `write(context)` its text."""

    max_length = WINDOW

    def __init__(self, judge, write):
        super().__init__()
        self.judge, self.write = judge, write

    def loglikelihood(self, requests, disable_tqdm=False):
        scores = [self.judge(*request.args) for request in requests]
        return [(score, score > 0) for score in scores]

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        return [-float(len(request.args[0].encode())) for request in requests]

    def generate_until(self, requests, disable_tqdm=False):
        return [self.write(request.args[0]) for request in requests]


def scores(made, judge, write=lambda context: ""):
    facts = dict.fromkeys(("model", "fingerprint", "commit", "dtype", "hardware", "seed", "command", "date"), "any")
    facts |= {"revision": None, "limit": None, "versions": {}}
    found = {}
    for item in load_tasks(list(made.names), made.folder):
        records = score(Reader(judge, write), item, seeds=HARNESS_SEEDS, facts=facts)
        found.update({(record.task.removeprefix("here_"), record.metric): record for record in records})
    return found


def blind(context, word):
    """A likelihood that sees the last words alone."""
    return -1.0 - float(hash((context[-60:], word)) % 97)


def finds(context, word):
    """Positive, which is likeliest, where the context says this value of the name at its end."""
    return float(f"- {context.split(' ')[-1]}{word}\n" in context)


def test_memory_scores_everything_and_no_memory_nothing(made):
    """Of recall; a copy is scored word by word, and loops are seen."""
    rows = rows_of(made, "generation")
    for row in rows:
        assert count(row["context"]) + 32 < WINDOW and len(row["target"].split()) >= 4
        assert (row["context"].rpartition("\n\n")[2] + row["target"]) in row["context"]
    exact = {row["context"]: row["target"] for row in rows}
    depths = {f"acc_back_{row['back']}" for row in rows_of(made, "recall")}
    remembers = scores(made, finds, exact.__getitem__)
    assert len(depths) >= 3 and all(remembers["recall", depth].value == 1.0 for depth in depths)
    assert sum(remembers["recall", depth].samples for depth in depths) == remembers["recall", "acc"].samples == 40
    assert remembers["recall", "acc"].value == 1.0
    assert remembers["generation", "exact_match"].value == remembers["generation", "right_words"].value == 1.0
    assert remembers["generation", "distinct_threes"].value > 0.9
    half = scores(made, blind, lambda context: " ".join(exact[context].split()[:2] + ["so"] * 20))
    assert half["recall", "acc"].value == 0
    assert half["bits_per_byte", "bits_per_byte"].value == pytest.approx(1.4426950408889634)
    assert half["bits_per_byte", "bits_per_byte"].stderr == pytest.approx(0, abs=1e-9)
    assert half["generation", "exact_match"].value == 0 and 0.1 < half["generation", "right_words"].value < 0.7
    assert half["generation", "distinct_threes"].value < 0.3
    reads = scores(made, lambda context, ending: float(context + ending in HELD_OUT))
    assert reads["cloze", "acc"].value == 1.0


def test_the_same_call_writes_the_same_bytes_and_another_seed_others(made, tmp_path):
    again, other = make(tmp_path / "again"), make(tmp_path / "other", seed=1)
    files = sorted(path.name for path in (tmp_path / "again").iterdir())
    assert len(files) == 10
    for name in files:
        assert (tmp_path / "again" / name).read_bytes() == Path(made.folder, name).read_bytes()
    for kind in ("cloze", "recall", "generation"):
        assert rows_of(again, kind) != rows_of(other, kind)


def test_the_folder_can_be_moved_and_made_anew(made, tmp_path):
    moved = shutil.copytree(made.folder, tmp_path / "elsewhere")
    tasks = load_tasks(["here_*"], moved)
    assert [item.name for item in tasks] == sorted(made.names)
    assert [item.scored for item in tasks] == [item.scored for item in load_tasks(sorted(made.names), made.folder)]
    make(moved, items=16)
    assert len((moved / "here_cloze.jsonl").read_text().splitlines()) == 16
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]


def test_a_text_that_is_too_short_is_one_sentence_and_nothing_is_written(tmp_path):
    with pytest.raises(ValueError, match="expected at least 16: give a longer text"):
        make(tmp_path / "tasks", "Too short a text for questions.")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("window", [1, 3, BLOCK + 32])
def test_a_window_without_room_for_a_block_and_an_answer_is_refused(tmp_path, window):
    with pytest.raises(ValueError, match=rf"^window: got {window}, expected more than 64 tokens\.$"):
        make(tmp_path / "tasks", window=window)
