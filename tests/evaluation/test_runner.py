"""evaluate(): what is wrong with its arguments is said before anything runs.

Run: pytest tests/evaluation/test_runner.py
"""

import re
import sys

import pytest

import mhla_hf
from mhla_hf.evaluation import language


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tasks": []}, "tasks is empty"),
        ({"tasks": 3}, "tasks is 3"),
        ({"tasks": None}, "tasks is None and so is recipe; expected task names, or one of recall, ruler"),
        ({"settings": {"lengths": 3}}, "settings is {'lengths': 3} without a recipe"),
        ({"tasks": "here_close"}, "task 'here_close' does not exist; did you mean here_cloze"),
        ({"include_path": "/nowhere"}, "include_path '/nowhere' is no folder"),
        ({"limit": 0}, "limit is 0"),
        ({"limit": 2.5}, "limit is 2.5"),
        ({"limit": float("nan")}, "limit is nan"),
        ({"batch_size": "many"}, "batch_size is 'many'"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"num_fewshot": -1}, "num_fewshot is -1"),
        ({"seed": "x"}, "seed is 'x'"),
        ({"dtype": "int8"}, "dtype is 'int8'; expected one of ['auto'"),
        ({"device": "tpu:9"}, "device 'tpu:9' is not available"),
        ({"max_length": 1}, "max_length is 1"),
    ],
)
def test_bad_arguments_are_one_sentence(world, monkeypatch, changes, says):
    whole = language.TaskManager
    # the index of all of lm-eval's own tasks takes half a minute to read
    monkeypatch.setattr(language, "TaskManager", lambda **options: whole(**{**options, "include_defaults": False}))
    options = {"tasks": "here_cloze", "include_path": world / "tasks", "progress": False, "limit": 2, **changes}
    with pytest.raises((ValueError, TypeError), match=re.escape(says)) as caught:
        mhla_hf.evaluate(world / "llama", **options)
    assert "\n" not in str(caught.value)


def test_without_lm_eval_the_line_that_installs_it(world, monkeypatch):
    monkeypatch.delitem(sys.modules, "mhla_hf.evaluation.language")
    monkeypatch.delattr(sys.modules["mhla_hf.evaluation"], "language")
    monkeypatch.delitem(sys.modules, "mhla_hf.evaluation.needles")
    monkeypatch.delattr(sys.modules["mhla_hf.evaluation"], "needles")
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ImportError, match=r"pip install 'mhla_hf\[eval\]'"):
        mhla_hf.evaluate(world / "llama", "here_cloze", include_path=world / "tasks")
