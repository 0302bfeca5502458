"""A hash of what a function does: equal for the same in any process, another when its weights or its code change.

Run: pytest tests/evaluation/test_identity.py
"""

import functools
import os
import subprocess
import sys

import numpy
import torch

from mhla_hf.evaluation.identity import hash_files, hash_thing

SCALE = 2.0


def twice(images):
    return SCALE * images


class Judge:
    """Data and a method."""

    def __init__(self, weights):
        self.weights, self.names = weights, {"b", "a"}

    def features(self, images):
        return twice(images) @ self.weights

    def __call__(self, images):
        return self.features(images)


def through(module):
    kept = {}

    def extract(images):
        kept["last"] = module(images)
        return kept["last"]

    return extract


def test_weights_code_and_what_is_reached_decide(monkeypatch):
    torch.manual_seed(0)
    first, second = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    ones, zeros = torch.ones(3, 2), torch.zeros(3, 2)
    things = [
        twice,
        lambda images: images,
        lambda images: images + 1,
        lambda images: images - 1,
        lambda images: images + 2,
        lambda images: twice(images),
        functools.partial(twice),
        functools.partial(numpy.quantile, q=0.5),
        functools.partial(numpy.quantile, q=0.25),
        through(first),
        through(second),
        through(torch.nn.Sequential(first)),
        first,
        second,
        first.forward,
        Judge(ones),
        Judge(zeros),
        Judge(ones.numpy()),
        Judge(ones).features,
        Judge(zeros).features,
        Judge,
    ]
    hashes = [hash_thing(thing) for thing in things]
    assert len(set(hashes)) == len(things)
    assert hash_thing(through(first)) == hashes[9] and hash_thing(Judge(torch.ones(3, 2))) == hashes[15]
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 3.0)
    changed = [old != hash_thing(thing) for old, thing in zip(hashes, things, strict=True)]
    assert [number for number, yes in enumerate(changed) if yes] == [0, 5, 6, 15, 16, 17, 18, 19, 20]
    with torch.no_grad():
        first.bias += 1
    assert hash_thing(through(first)) != hashes[9] and hash_thing(through(second)) == hashes[10]


CODE = """
import torch
from mhla_hf.evaluation.identity import hash_thing
def judge(images):
    return [images in {"a", "b", "c", "d"}, judge, torch.nn.functional.relu, object]
print(hash_thing(judge), hash_thing(type("Empty", (), {})()))
"""


def test_it_is_the_same_in_every_process():
    said = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        said.add(done.stdout)
    assert len(said) == 1 and len(said.pop().split()) == 2


def test_names_below_the_folder_and_bytes_of_files_decide(tmp_path):
    def made(name, content):
        (tmp_path / "a").mkdir(exist_ok=True)
        (tmp_path / "a" / name).write_text(content)
        found = hash_files(list((tmp_path / "a").iterdir()), tmp_path)
        (tmp_path / "a" / name).unlink()
        return found

    assert made("x", "1") == made("x", "1") and len({made("x", "1"), made("x", "2"), made("y", "1")}) == 3
