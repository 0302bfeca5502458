"""What is judged: told apart by name, checked before anything runs; scores go where they are told."""

import shutil

import pytest
from accelerate import PartialState
from tools.small_scores import small_llama, small_tokenizer

import mhla_hf
from mhla_hf.evaluation.records import Results

TASKS = ["here_cloze"]


def judge(world, models, **options):
    return mhla_hf.evaluate(models, TASKS, include_path=world / "tasks", progress=False, limit=2, **options)


def test_models_of_one_class_and_folders_of_one_name_are_told_apart(world, tmp_path):
    source, options = world / "llama", {"ignore": shutil.ignore_patterns("results.json")}
    folders = [shutil.copytree(source, tmp_path / place / "llama", **options) for place in ("a", "b", "c/b")]
    table = judge(world, folders[:2], output=tmp_path / "out")
    assert list(table) == ["a/llama", "b/llama"] and str(table) == table.table()
    assert not list(tmp_path.rglob("results.json"))
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"a--llama.json", "b--llama.json"}
    for alike in (folders[1:], [small_llama(), small_llama()]):
        with pytest.raises(ValueError, match="twice, expected each once, or a dict"):
            judge(world, alike, tokenizer=small_tokenizer())
    judge(world, folders[0], output=tmp_path / "one.json")
    assert len(Results.read(tmp_path / "one.json")) == 2


NONE = [
    (3, "models: got 'int' of type int"),
    ([], "models: got none"),
    (small_llama(), "tokenizer: got None"),
    ("nobody/nothing", "expected a folder or a model on the Hub"),
    (["llama", "mhla"], "for 2 models, expected a folder"),
]


@pytest.mark.parametrize("models, says", NONE)
def test_models_that_are_none_are_refused(world, monkeypatch, models, says):
    monkeypatch.chdir(world)
    with pytest.raises((TypeError, ValueError), match=says):
        judge(world, models, output="one.json")
    assert not PartialState._shared_state  # a process alone forgets that it was
