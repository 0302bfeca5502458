"""Stored logits: the same loss as the teacher's own over its likeliest tokens, without the teacher."""

import copy
import errno
import os

import numpy
import pytest
import torch

from mhla_hf.training.loop import Stage
from mhla_hf.training.tasks.language import LanguageObjective
from mhla_hf.training.teach import TaughtText, teach

TOP = 8


def stages(loss, length, **values):
    return [Stage(name="s", loss=loss, steps=6, lr=1e-3, batch_size=2, seq_len=length, **values)]


def test_stored_and_online_losses_are_the_same_and_fall(lab, tmp_path):
    teacher, student = lab.teacher(), lab.student(lab.teacher(seed=5), mixing_form="decay", local="softmax")
    teach(teacher, lab.tokens(), None, tmp_path / "taught", seq_len=lab.length, top_k=TOP, progress=False)
    ids, labels, *likeliest = TaughtText(tmp_path / "taught", 64).reader(lab.length, 0, 0).take(4)
    share = 1 / (4 * (lab.length - 1)), 1 / 4
    online = {
        top: LanguageObjective(student, teacher, *stages("logits", lab.length, top_k=top, ce_weight=0.5))(
            ids, labels, *share
        )
        for top in (TOP, 0, 10**6)
    }
    stored = LanguageObjective(student, None, *stages("stored", lab.length, ce_weight=0.5))
    (one, logs), (other, before) = online[TOP], stored(ids, labels, *likeliest, *share)
    assert abs(one - other) < 1e-5 and abs(logs["kl"] - before["kl"]) < 1e-5
    assert one < online[0][0] and abs(online[10**6][0] - online[0][0]) < 1e-5  # merging tokens never adds to a KL
    weights = copy.deepcopy(student.state_dict())
    lab.distill(tmp_path / "x", None, student, data=str(tmp_path / "taught"), stages=stages("stored", lab.length))
    assert any(not torch.equal(value, weights[name]) for name, value in student.state_dict().items())
    assert stored(ids, labels, *likeliest, *share)[1]["kl"] < before["kl"]


def test_stopped_it_goes_on_and_ends_the_same(lab, tmp_path, monkeypatch):
    teacher, sizes = lab.teacher(), {"seq_len": lab.length, "top_k": TOP, "batch_size": 4, "progress": False}
    teach(teacher, lab.tokens(), None, tmp_path / "whole", **sizes)
    calls, forward = [], teacher.forward

    def stopping(**given):
        calls.append(given)
        if len(calls) == 3:
            raise MemoryError
        return forward(**given)

    monkeypatch.setattr(teacher, "forward", stopping)
    with pytest.raises(MemoryError):
        teach(teacher, lab.tokens(), None, tmp_path / "cut", **sizes)
    with pytest.raises(ValueError, match="with 8 of 41 rows, expected all"):
        TaughtText(tmp_path / "cut", 64)
    assert teach(teacher, lab.tokens(), None, tmp_path / "cut", **sizes)["done"] == 41
    for name in ("ids.npy", "tokens.npy", "log_p.npy", "taught.json"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    with pytest.raises(ValueError, match="started with another top_k"):
        teach(teacher, lab.tokens(), None, tmp_path / "cut", **{**sizes, "top_k": 4})


def test_what_does_not_fit_is_said_before_training(lab, tmp_path):
    stored = {"student": lab.student(), "stages": stages("stored", lab.length)}
    with pytest.raises(ValueError, match="expected a folder that `mhla-hf teach` wrote"):
        lab.distill(tmp_path / "out", None, **stored)
    with pytest.raises(ValueError, match="seq_len: got 4000, expected at most the 2000 tokens"):
        teach(lab.teacher(), lab.tokens(), None, tmp_path / "taught", seq_len=4000, progress=False)
    assert list(tmp_path.iterdir()) == []
    teach(lab.teacher(vocab_size=80), lab.tokens(), None, tmp_path / "taught", seq_len=lab.length, progress=False)
    with pytest.raises(ValueError, match="for a vocabulary of 80 tokens, expected at most the student's 64"):
        lab.distill(tmp_path / "out", None, **stored, data=str(tmp_path / "taught"))


@pytest.fixture
def taught(lab, tmp_path):
    """A folder that is written, and what wrote it: call it with what changes."""
    sizes = {"seq_len": lab.length, "top_k": TOP, "batch_size": 50, "progress": False}

    def again(teacher=None, out=tmp_path / "taught", **changes):
        return teach(teacher or lab.teacher(), lab.tokens(), None, out, **(sizes | changes))

    again()
    return tmp_path / "taught", again


def files_of(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_another_teacher_is_refused_whatever_its_name(lab, taught):
    folder, again = taught
    before = files_of(folder)
    for teacher in (lab.teacher(seed=5), lab.teacher().double()):
        with pytest.raises(ValueError, match="started with another teacher"):
            again(teacher)
    assert again()["done"] == 41 and files_of(folder) == before


@pytest.mark.parametrize("name", ["ids", "tokens", "log_p"])
def test_an_array_that_is_missing_or_another_is_refused_and_not_made_anew(lab, taught, name):
    (folder, again), student = taught, lab.student()
    options = {"data": str(folder), "stages": stages("stored", lab.length)}
    for content in (None, numpy.zeros((41, 1), "int32")):
        (folder / f"{name}.npy").unlink(missing_ok=True)
        if content is not None:
            numpy.save(folder / f"{name}.npy", content)
        before = files_of(folder)
        for use in (again, lambda: lab.distill(folder.with_name("out"), None, student, **options)):
            with pytest.raises(ValueError, match=rf"{name}.npy: got (no such file|int32 \[41, 1\]), expected"):
                use()
        assert files_of(folder) == before


@pytest.mark.parametrize("name", ["ids", "tokens"])
def test_tokens_beyond_the_vocabulary(lab, taught, name):
    folder, _ = taught
    numpy.load(folder / f"{name}.npy", mmap_mode="r+")[:] = 64
    with pytest.raises(ValueError, match="with tokens 64 to 64, expected 0 to 63"):
        TaughtText(folder, 64).reader(lab.length, 0, 0).take(1)


def test_a_record_that_is_none(lab, taught):
    folder, again = taught
    (folder / "taught.json").write_text("{}")
    for use in (again, lambda: TaughtText(folder, 64)):
        with pytest.raises(ValueError, match=r"taught.json: text: got nothing, expected a value\.$"):
            use()


def test_a_folder_that_holds_other_files_is_left_alone(lab, taught, tmp_path):
    (tmp_path / "mine").mkdir()
    numpy.save(tmp_path / "mine" / "ids.npy", numpy.ones((41, lab.length), "int32"))
    before = files_of(tmp_path)
    with pytest.raises(ValueError, match=r"mine', which holds other files and no taught.json"):
        taught[1](out=tmp_path / "mine")
    assert files_of(tmp_path) == before


def test_a_full_disk_is_said_before_anything_is_written(taught, tmp_path, monkeypatch):
    before = sorted(tmp_path.rglob("*"))

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        OSError,
        match=r"^out: got .*, where ids.npy cannot be created \(No space .*\), expected room for its 7,872 bytes\.$",
    ):
        taught[1](out=tmp_path / "new")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["seq_len", "top_k", "batch_size"])
def test_sizes_are_counts(taught, tmp_path, name):
    with pytest.raises(ValueError, match=rf"^{name}: got 0, expected a whole number of at least 1.$"):
        taught[1](out=tmp_path / "new", **{name: 0})
