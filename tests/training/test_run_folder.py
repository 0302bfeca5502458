"""One folder is one run: what is refused, what a finished one does, and what a damaged or half-written one leaves."""

import os
import resource
import shutil
import signal
from types import SimpleNamespace

import pytest
import torch
from tools.small_models import refused
from transformers import AutoModelForCausalLM

from mhla_hf.training.run import Run


def go_on(lab, out, **changes):
    return lab.train(out, lab.dropped(), stages=lab.lm(10), save_every=2, log_every=2, **changes)


@pytest.fixture(scope="module")
def runs(lab, tmp_path_factory):
    """A run of ten steps, `whole`, and one that was stopped with two states, those after step 6 and step 8."""
    place, real = tmp_path_factory.mktemp("runs"), Run._log
    go_on(lab, place / "whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "_log", lambda run, *rest: real(run, *rest) or run.progress["total"] == 8)
        with pytest.raises(KeyboardInterrupt, match="stopped after step 8"):
            go_on(lab, place / "stopped")
    assert sorted(path.name[-1] for path in place.glob("stopped.state/step-*")) == ["6", "8"]
    return place


@pytest.fixture
def stopped(runs, tmp_path):
    shutil.copytree(runs / "stopped.state", tmp_path / "out.state")
    return tmp_path / "out.state"


def test_finished_twice_does_nothing_and_says_so(lab, tmp_path, capsys):
    out, trained = tmp_path / "out", lab.train(tmp_path / "out", lab.student())
    stamp, fresh = {path: path.stat().st_mtime_ns for path in out.rglob("*")}, lab.student()
    (out.parent / "out.state" / "unfinished").mkdir(parents=True)  # as after a kill between the rename and the end
    (out.parent / "out.state" / "lock").touch()
    assert lab.train(out, fresh, progress=True) is fresh
    torch.testing.assert_close(fresh.state_dict(), trained.state_dict(), rtol=0, atol=0)
    assert "finished already: nothing to do" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == stamp
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert lab.train(out, trained) is trained  # the same object, as in a notebook
    loaded, ids = AutoModelForCausalLM.from_pretrained(out), lab.tokens()[:96].view(2, 48)
    assert torch.equal(loaded(ids).logits, trained.eval()(ids).logits)
    shutil.rmtree(out)
    lab.train(out, trained)  # begun anew, it is of what the object is now
    with pytest.raises(ValueError, match="began with another student"):
        lab.train(out)


CHANGES = {
    "seed": lambda lab: {"seed": 1},
    "recipe": lambda lab: {"stages": lab.lm(10, lr=1e-4)},
    "data or tokenizer": lambda lab: {"data": lab.tokens(seed=1)},
    "student": lambda lab: {"student": lab.student(layers=[1], learn_mixing=False)},
    "mixed_precision": lambda lab: {"mixed_precision": "bf16"},
}


@pytest.mark.parametrize("changed", CHANGES)
def test_another_run_is_refused(lab, runs, changed):
    before = sorted(runs.rglob("*"))
    options = {"student": lab.dropped(), "stages": lab.lm(10), **CHANGES[changed](lab)}
    for name in ("whole", "stopped"):
        with pytest.raises(ValueError, match=f"began with another {changed}"):
            lab.train(runs / name, **options)
    assert sorted(runs.rglob("*")) == before


def test_a_state_folder_that_is_not_the_runs_is_refused_and_what_is_put_in_it_later_stays(lab, stopped):
    out, note = stopped.with_name("out"), stopped / "note.txt"
    note.touch()
    go_on(lab, out)
    assert list(stopped.iterdir()) == [note] and (out / "model.safetensors").exists()
    shutil.rmtree(out)
    with pytest.raises(ValueError, match=r"whose state would go to '.*out.state', which holds other files"):
        go_on(lab, out)
    assert list(stopped.iterdir()) == [note]


def test_two_at_once_are_refused(lab, tmp_path):
    out = tmp_path / "out"
    process = lab.start(lambda: lab.train(out, stages=lab.lm(200), save_every=1), lambda: lab.newest(out) > 0)
    os.kill(process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(ValueError, match="into which another process is training now"):
            lab.train(out, stages=lab.lm(200))
    finally:
        process.kill()
        process.join()


DAMAGES = {"pytorch_model.bin": "pytorch_model.bin is damaged", "progress.json": "progress.json is missing"}


@pytest.mark.parametrize("file, why", DAMAGES.items())
def test_a_state_that_cannot_be_read_is_named_and_without_it_the_run_goes_on(lab, runs, stopped, file, why):
    out, newest = stopped.with_name("out"), stopped / "step-000000008"
    content = bytearray((newest / file).read_bytes())
    (newest / file).unlink()
    if file == "pytorch_model.bin":
        content[len(content) // 2] ^= 1
        (newest / file).write_bytes(content)
    before = sorted(stopped.glob("step-*/*"))
    words = rf"'.*step-000000008', which cannot be read \({why}\), expected .*: delete it to resume"
    with pytest.raises(ValueError, match=words):
        go_on(lab, out)
    assert sorted(stopped.glob("step-*/*")) == before
    shutil.rmtree(newest)
    go_on(lab, out)
    assert (lab.weights(out), lab.history(out)) == (lab.weights(runs / "whole"), lab.history(runs / "whole"))


def test_out_that_is_something_else_or_cannot_be_written(lab, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    size = sum(parameter.nbytes for parameter in lab.student().parameters())
    for name, content in (("text/letter.txt", "mine"), ("half/train.json", "")):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(content)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(TypeError, match="out: got NoneType, expected the path of a folder to create"):
        lab.train(None)
    for out, words in (
        ("text", "holds other files, expected a new or empty folder"),
        ("half", "train.json: got a file that is no JSON"),
        ("file/out", r"out: got '.*', which cannot be made in '.*file', expected a writable"),
        ("new", r"out: got '.*', with .* MiB of free space, expected at least .* MiB"),
    ):
        if out == "new":
            monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=2 * size - 1))
        with refused(match=words):
            lab.train(tmp_path / out)
    assert sorted(tmp_path.rglob("*")) == before and (tmp_path / "text/letter.txt").read_text() == "mine"


def test_disk_full_on_the_way(lab, stopped):
    """A limit on the size of files stands for a full disk: the moments do not fit."""
    before, out = resource.getrlimit(resource.RLIMIT_FSIZE), stopped.with_name("out")
    resource.setrlimit(resource.RLIMIT_FSIZE, (110_000, before[1]))
    said = r"out: got '.*out', where a state cannot be written \(the disk is full, or .*; earlier states are intact\)"
    try:
        with refused(match=said, kind=OSError):
            go_on(lab, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not out.exists() and not list(out.parent.rglob("*tmp-*")) and lab.newest(out) == 8
    out.mkdir()  # an empty folder may be there
    go_on(lab, out)
    assert (out / "model.safetensors").exists()
