"""Text becomes full sequences: every token once per epoch, the same order for the same seed, streams that go on."""

import json

import datasets
import numpy
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tools.small_models import refused
from transformers import PreTrainedTokenizerFast

from mhla_hf.data import open_text

WORDS = {"<end>": 0} | {word: i for i, word in enumerate(["a", "b", "c", "d", "e", "f", "g", "h"], 1)}


@pytest.fixture(scope="module")
def tokenizer():
    model = Tokenizer(models.WordLevel(WORDS, unk_token="<end>"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<end>", unk_token="<end>")


def test_an_epoch_shows_every_token_once_in_an_order_of_seed_and_stage():
    ring = open_text(torch.arange(60))
    reader = ring.reader(12, 7, 0)
    first, second = reader.take(5)[0], reader.take(5)[0]
    assert sorted(first.flatten().tolist()) == sorted(second.flatten().tolist()) == list(range(60))
    assert not torch.equal(first, second)
    assert ((first - first[:, :1]) % 60 == torch.arange(12)).all()  # sequences are stretches of the ring
    assert torch.equal(first, ring.reader(12, 7, 0).take(5)[0])
    for seed, stage in ((8, 0), (7, 1)):
        assert not torch.equal(first, ring.reader(12, seed, stage).take(5)[0])
    rest = ring.reader(12, 7, 0, json.loads(json.dumps(reader.state()))).take(24)[0]
    assert torch.equal(rest, reader.take(24)[0])


def test_files_folders_and_their_ends(tokenizer, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("c d")
    (tmp_path / "a.md").write_text("a b")
    (tmp_path / "sub" / "c.rst").write_text("e")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "code.py").write_text("h h h")
    assert open_text(tmp_path, tokenizer).tokens.tolist() == [1, 2, 0, 3, 4, 0, 5, 0]
    assert open_text(str(tmp_path / "b.txt"), tokenizer).tokens.tolist() == [3, 4, 0]


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def rows():
    random = numpy.random.default_rng(0)
    return [{"text": " ".join(random.choice(list("abcdefgh"), random.integers(1, 30)))} for _ in range(150)]


@pytest.mark.parametrize("kind", ["parquet", "folder", "dataset", "iterable"])
def test_a_stream_is_the_documents_in_order_and_goes_on_anywhere(tokenizer, tmp_path, rows, kind):
    table = datasets.Dataset.from_list(rows)
    if kind == "folder":
        (tmp_path / "many").mkdir()
        for i in range(3):
            write_rows(tmp_path / "many" / f"{i}.jsonl", rows[i * 50 : i * 50 + 50])
    made = {
        "parquet": lambda: table.to_parquet(tmp_path / "t.parquet") and str(tmp_path / "t.parquet"),
        "folder": lambda: tmp_path / "many",
        "dataset": lambda: table,
        "iterable": lambda: table.to_iterable_dataset(num_shards=3),
    }[kind]
    text = tokenizer(" <end> ".join(row["text"] for row in rows) + " <end>")["input_ids"]
    epoch = len(text) // 11
    whole = open_text(made(), tokenizer).reader(11, 5, 0).take(620)[0]  # three epochs and more
    assert torch.equal(whole[:epoch].flatten(), torch.tensor(text)[: 11 * epoch])
    for stop in (0, epoch, 512):
        reader = open_text(made(), tokenizer).reader(11, 5, 0)
        if stop:
            assert torch.equal(reader.take(stop)[0], whole[:stop])
        again = open_text(made(), tokenizer).reader(11, 5, 0, json.loads(json.dumps(reader.state())))
        assert torch.equal(again.take(100)[0], whole[stop : stop + 100])


def test_the_next_stage_goes_on_in_the_stream_with_the_labels_of_its_rows(tmp_path):
    rows = [{"input_ids": [i, i + 1, i + 2], "labels": [-100, i + 1, i + 2]} for i in range(0, 300, 3)]
    source = open_text(write_rows(tmp_path / "t.jsonl", rows))
    reader = source.reader(10, 0, 0)
    reader.take(6)
    ids, labels = source.reader(20, 0, 1, json.loads(json.dumps(reader.handover()))).take(2)
    assert torch.equal(ids, torch.arange(60, 100).view(2, 20))
    assert torch.equal(labels, ids.masked_fill(ids % 3 == 0, -100))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("t.txt", "", "which is empty, expected text"),
        ("t.txt", "a b c", "with 4 tokens, expected at least seq_len, which is 10."),
        ("t.jsonl", '{"body": "a b"}\n', "with columns body, expected text in a column 'text'"),
        ("t.jsonl", '{"text": "a b"\n', "rows that can be read|that can be reached"),
        ("t.jsonl", '{"input_ids": [1, 99]}\n', "with token ids 1 to 99, expected ids 0 to 8"),
        ("empty", "folder", "the folder '.*empty', which holds no text, expected files ending in .txt"),
    ],
)
def test_bad_text(tokenizer, tmp_path, name, content, words):
    path = tmp_path / name
    if content == "folder":
        path.mkdir()
    else:
        path.write_text(content)
    with refused(match=words):
        open_text(str(path), tokenizer, vocab_size=9).reader(10, 0, 0).take(1)


def test_text_needs_a_tokenizer_and_a_dataset_within_reach():
    for value, says in (
        ("nobody/nothing-of-this-name", "a file or folder, or a dataset that can be reached"),
        (100 * "Once upon a time. ", "which does not exist, expected a file, a folder, a dataset, or a list"),
        (torch.tensor([1, -1]), "with token ids -1 to 1, expected ids 0 to 63"),
        ({"some": "text"}, "got dict, expected a file"),
        (["a b c"], "tokenizer: got None"),
    ):
        with pytest.raises((ValueError, TypeError), match=says):
            open_text(value, vocab_size=64)
