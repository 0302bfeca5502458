"""Tasks made from a text: nothing of it is lost, questions are fair, the folder is whole or not there.

Run: pytest tests/evaluation/test_local_tasks.py
"""

import json
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
from lm_eval.api.model import LM
from small_scores import HELD_OUT, WINDOW, small_llama, small_tokenizer

import mhla_hf
from mhla_hf.evaluation.language import HARNESS_SEEDS, load_tasks, score
from mhla_hf.evaluation.local_tasks import find_sentences, make_cloze, make_needles, make_recall, make_tasks, split_text

BLOCK = 32
TOKENIZER = small_tokenizer()


def count(piece):
    return len(TOKENIZER(piece, add_special_tokens=False)["input_ids"])


def make(folder, text=HELD_OUT, **changes):
    arguments = {"prefix": "here", "window": WINDOW, "items": 40, "block": BLOCK} | changes
    return make_tasks(text, folder, TOKENIZER, **arguments)


def read_rows(made, name):
    with Path(made.folder, f"{name}.jsonl").open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def rows_of(made, kind):
    return read_rows(made, f"here_{kind}")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make(tmp_path_factory.mktemp("made") / "tasks")


def test_every_byte_is_scored_once(made):
    parts = [row["text"] for row in rows_of(made, "bits_per_byte")]
    assert "".join(parts) == HELD_OUT
    assert max(map(count, parts)) <= WINDOW - 2
    assert made.sizes["here_bits_per_byte"] == len(parts)


@pytest.mark.parametrize("text", ["one line " * 200, "a\n" * 500, "\n\n\nx", "ü€ " * 300 + "\r\nend", "x" * 3000])
def test_any_text_is_cut_without_loss(text):
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


def test_recall_passages_differ_in_one_word_more_than_a_block_back(made):
    rows = rows_of(made, "recall")
    assert len(rows) == 40
    for row in rows:
        word, contexts = row["word"].strip(), row["contexts"]
        words = [re.findall(r"\w+", context) for context in contexts]
        assert len({len(passage) for passage in words}) == 1
        differing = [column for column in zip(*words, strict=True) if len(set(column)) > 1]
        assert len(differing) == 1 and len(set(differing[0])) == 4
        assert differing[0][row["answer"]] == word
        assert [passage.count(word) for passage in words] == [int(i == row["answer"]) for i in range(4)]
        assert len({count(context) for context in contexts}) == 1
        assert max(count(context + row["word"]) for context in contexts) < WINDOW
        assert BLOCK < row["distance"] == count(contexts[0].split(differing[0][0], 1)[1])
    assert max(row["distance"] for row in rows) > 3 * BLOCK


def test_the_right_answer_is_at_no_favourite_place():
    for rows in (
        make_recall(HELD_OUT, count, window=WINDOW, items=300, block=BLOCK, seed=3),
        make_cloze(HELD_OUT, count, context=20, items=300, seed=3),
    ):
        places = Counter(row["answer"] for row in rows)
        assert len(rows) > 70 and min(places[i] for i in range(4)) > 0.15 * len(rows)


class Reader(LM):
    """A language model for tests: `judge(context, continuation)` is the log-likelihood, `write(context)` its text."""

    max_length, quiet = WINDOW, True

    def __init__(self, judge, write=lambda context: ""):
        super().__init__()
        self.judge, self.write = judge, write

    def loglikelihood(self, requests, disable_tqdm=False):
        return [(self.judge(*request.args), False) for request in requests]

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        return [-float(len(request.args[0].encode())) for request in requests]

    def generate_until(self, requests, disable_tqdm=False):
        return [self.write(request.args[0]) for request in requests]


def scores(made, judge, write=lambda context: ""):
    facts = dict.fromkeys(
        ("model", "revision", "fingerprint", "commit", "dtype", "hardware", "seed", "command", "date")
    )
    found = {}
    for item in load_tasks(list(made.names), made.folder):
        records = score(Reader(judge, write), item, limit=None, seeds=HARNESS_SEEDS, facts={**facts, "versions": {}})
        found.update({(record.task.removeprefix("here_"), record.metric): record for record in records})
    return found


def test_memory_scores_everything_and_no_memory_exactly_a_quarter(made):
    remembers = scores(made, lambda context, word: 5.0 * (word.strip() in context.split("\n\n")[0]))
    assert remembers["recall", "acc"].value == 1.0
    assert remembers["recall", "gain_bits"].value == pytest.approx(5 / 0.6931471805599453)
    blind = scores(made, lambda context, word: -float(hash((context[-60:], word)) % 97))
    assert blind["recall", "acc"].value == 0.25 and blind["recall", "gain_bits"].value == 0.0
    assert blind["bits_per_byte", "bits_per_byte"].value == pytest.approx(1.4426950408889634)
    assert blind["bits_per_byte", "bits_per_byte"].stderr == pytest.approx(0, abs=1e-9)
    reads = scores(made, lambda context, ending: float(context + ending in HELD_OUT))
    assert reads["cloze", "acc"].value == 1.0


def test_generation_scores_the_copy_word_by_word_and_sees_loops(made):
    rows = rows_of(made, "generation")
    for row in rows:
        assert count(row["context"]) + 32 < WINDOW and len(row["target"].split()) >= 4
        assert (row["context"].rpartition("\n\n")[2] + row["target"]) in row["context"]
    exact = {row["context"]: row["target"] for row in rows}
    found = scores(made, lambda context, word: 0.0, exact.__getitem__)
    assert found["generation", "exact_match"].value == found["generation", "right_words"].value == 1.0
    assert found["generation", "distinct_threes"].value > 0.9
    half = scores(made, lambda context, word: 0.0, lambda context: " ".join(exact[context].split()[:2] + ["so"] * 20))
    assert half["generation", "exact_match"].value == 0 and 0.1 < half["generation", "right_words"].value < 0.7
    assert half["generation", "distinct_threes"].value < 0.3


def test_recall_is_given_by_depth_too(made):
    depths = {f"acc_back_{row['back']}" for row in rows_of(made, "recall")}
    found = scores(made, lambda context, word: 5.0 * (word.strip() in context.split("\n\n")[0]))
    assert len(depths) >= 3 and all(found["recall", depth].value == 1.0 for depth in depths)
    assert sum(found["recall", depth].samples for depth in depths) == found["recall", "acc"].samples == 40


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
    assert [item.hashes() for item in tasks] == [item.hashes() for item in load_tasks(sorted(made.names), made.folder)]
    make(moved, items=16)
    assert len((moved / "here_cloze.jsonl").read_text().splitlines()) == 16
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]


def refusals():
    yield {"text": ""}, "text is str ''"
    yield {"text": None}, "text is NoneType"
    yield {"text": "Too short a text for questions."}, "expected at least 16, so a longer text"
    yield {"prefix": "a/b"}, "prefix is 'a/b'"
    yield {"window": 100}, "window: got 100"
    yield {"window": 128, "block": 64}, "2 \\* block \\+ 64"
    yield {"items": 3}, "items: got 3"
    yield {"items": True}, "items: got True"
    yield {"block": 0}, "block: got 0"


@pytest.mark.parametrize(("changes", "says"), list(refusals()))
def test_bad_arguments_are_one_sentence_and_nothing_is_written(tmp_path, changes, says):
    with pytest.raises(ValueError, match=says) as caught:
        make(tmp_path / "tasks", **changes)
    assert "\n" not in str(caught.value) and list(tmp_path.iterdir()) == []


def test_unusual_line_ends_survive_the_files(tmp_path):
    text = HELD_OUT[:9000].replace(". ", ".\u2028", 5).replace("\n", "\r\n", 20) + HELD_OUT[9000:]
    made = make(tmp_path / "tasks", text)
    assert "".join(row["text"] for row in rows_of(made, "bits_per_byte")) == text
    loaded = load_tasks(["here_bits_per_byte"], made.folder)[0].tasks["here_bits_per_byte"].eval_docs
    assert "".join(loaded["text"]) == text


def test_a_foreign_folder_is_left_alone(tmp_path):
    (tmp_path / "letter.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not empty and holds no"):
        make(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


@pytest.fixture(scope="module")
def needles(tmp_path_factory):
    return make_needles(tmp_path_factory.mktemp("made") / "needles", TOKENIZER, lengths=[256, 512], items=3)


@pytest.mark.parametrize("length", [256, 512])
def test_a_question_is_as_long_as_asked_and_can_be_answered_from_the_text_alone(needles, length):
    rows = read_rows(needles, f"needle_recall_{length}")
    assert rows == read_rows(needles, f"needle_generation_{length}") and len(rows) == 15
    for row in rows:
        tokens = len(TOKENIZER(row["context"] + row["target"], verbose=False)["input_ids"])
        assert length - 64 <= tokens + 32 <= length + 8
        text, _, question = row["context"].rpartition("\n\n")
        said = dict(re.findall(r"The code of the (\w+) is (\d{4})\.", text))
        assert len(said) == 5 and sorted(said.values()) == sorted(choice.strip() for choice in row["choices"])
        wanted = re.fullmatch(r"The code of the (\w+) is", question)[1]
        assert row["target"] == row["choices"][row["answer"]] == f" {said[wanted]}"
        part = text.index(said[wanted]) / len(text)
        assert abs(row["back"] / length - (1 - part)) < 0.2
    assert sorted({row["back"] for row in rows}) == [round(length * part) for part in (0, 0.25, 0.5, 0.75, 1)]


def test_needles_are_the_same_bytes_each_time_and_the_first_questions_cover_every_depth(needles, tmp_path):
    again = make_needles(tmp_path / "again", TOKENIZER, lengths=[512, 256], items=3)
    for name in needles.names:
        assert read_rows(needles, name) == read_rows(again, name)
    other = make_needles(tmp_path / "other", TOKENIZER, lengths=[256], items=3, seed=1)
    assert read_rows(other, "needle_recall_256") != read_rows(needles, "needle_recall_256")
    assert [row["answer"] for row in read_rows(needles, "needle_recall_256")[:5]] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"lengths": [64]}, "lengths: got 64; expected whole numbers from 128"),
        ({"lengths": 0.5}, "lengths: got 0.5"),
        ({"depths": [0, 101]}, "depths: got 101"),
        ({"depths": [50]}, "depths is [50]; expected between 2 and"),
        ({"items": 0}, "items: got 0"),
        ({"lengths": [128], "depths": list(range(0, 100, 10))}, "128 tokens are too few for 10 depths"),
    ],
)
def test_bad_arguments_of_needles_are_one_sentence(tmp_path, changes, says):
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        make_needles(tmp_path / "none", TOKENIZER, **{"lengths": [256], **changes})
    assert "\n" not in str(caught.value) and not (tmp_path / "none").exists()


def test_the_recipe_makes_needles_scores_them_and_throws_the_data_away():
    model = small_llama(max_position_embeddings=320)
    options = {"tokenizer": TOKENIZER, "progress": False, "recipe": "recall"}
    settings = {"lengths": [240, 320], "items": 2}
    found = mhla_hf.evaluate(model, settings=settings, **options)["LlamaForCausalLM"]
    names = {f"needle_{kind}_{length}" for kind in ("recall", "generation") for length in (240, 320)}
    assert {record.task for record in found} == names
    record = found.find("needle_recall_240", "acc")
    assert record.samples == 10 and found.find("needle_recall_240", "acc_back_120").samples == 2
    assert "--recipe recall --set lengths=240,320 --set items=2" in record.command
    assert found.find("needle_generation_320", "exact_match").value == 0.0
    with pytest.raises(ValueError, match=f"lengths: 4096 tokens, but the model sees {WINDOW}"):
        mhla_hf.evaluate(small_llama(), settings={"items": 1}, **options)
    with pytest.raises(ValueError, match="settings: unknown 'length'"):
        mhla_hf.evaluate(model, settings={"length": [256]}, **options)
