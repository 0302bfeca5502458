"""One folder is one run: what is refused, what a finished one does, and what a damaged or half-written one leaves."""

import contextlib
import os
import resource
import shutil
import signal

import pytest
import torch
from transformers import AutoModelForCausalLM

from mhla_hf.training import loop
from mhla_hf.training.run_folder import RunFolder


@pytest.fixture
def finished(lab, tmp_path):
    """A run of four steps in `out`, and the student that it trained."""
    student = lab.student()
    return tmp_path / "out", lab.train(tmp_path / "out", student)


@pytest.fixture
def stopped(lab, tmp_path, monkeypatch):
    """A run of ten steps that was stopped with two states, those after step 6 and step 8."""
    real = loop._Run._log
    with monkeypatch.context() as later:
        later.setattr(loop._Run, "_log", lambda run, *rest: real(run, *rest) or run.at["total"] == 8)
        with pytest.raises(KeyboardInterrupt, match="stopped after step 8"):
            go_on(lab, tmp_path / "out")
    assert sorted(path.name[-1] for path in tmp_path.glob("out.state/step-*")) == ["6", "8"]
    return tmp_path / "out"


def go_on(lab, out, **changes):
    return lab.train(out, lab.dropped(), stages=lab.lm(10), save_every=2, log_every=2, **changes)


def test_finished_twice_does_nothing_and_says_so(lab, finished, capsys):
    out, trained = finished
    stamp, fresh = {path: path.stat().st_mtime_ns for path in out.rglob("*")}, lab.student()
    (out.parent / "out.state").mkdir()  # as after a kill between the rename and the end
    (out.parent / "out.state" / "lock").touch()
    assert lab.train(out, fresh, progress=True) is fresh
    torch.testing.assert_close(fresh.state_dict(), trained.state_dict(), rtol=0, atol=0)
    assert "finished already: nothing to do" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == stamp
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert lab.train(out, trained) is trained  # the same object, as in a notebook
    loaded, ids = AutoModelForCausalLM.from_pretrained(out), lab.tokens()[:96].view(2, 48)
    assert torch.equal(loaded(ids).logits, trained.eval()(ids).logits)


@pytest.fixture(scope="module")
def both(lab, tmp_path_factory):
    """A finished run, and one that was stopped before its end."""
    place = tmp_path_factory.mktemp("both")
    lab.train(place / "finished")
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(loop._Run, "_finish", lambda run: (_ for _ in ()).throw(KeyboardInterrupt))
        lab.train(place / "stopped")
    assert sorted(path.name for path in place.iterdir()) == ["finished", "stopped.state"]
    return place


@pytest.mark.parametrize("name", ["finished", "stopped"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 1}, "begun with seed 0, not 1"),
        ({"lr": 1e-4}, r"begun with lr in stage 'lm' 0.003, not 0.0001"),
        ({"steps": 9}, "begun with steps in stage 'lm' 4, not 9"),
        ({"more": True}, "begun with stages 1, not 2"),
        ({"text": 1}, "begun with another data or tokenizer"),
        ({"student": {"block_size": 8}}, "begun with another student"),
        ({"student": {"learn_mixing": False}}, "begun with another student"),
        ({"mixed_precision": "bf16"}, "begun with mixed_precision 'no', not 'bf16'"),
        ({"save_dtype": "float32"}, "begun with save_dtype None, not 'float32'"),
        ({"weights": 1}, "begun with another student"),
    ],
)
def test_another_run_is_refused(lab, both, name, change, words):
    before = sorted(both.rglob("*"))
    stages = lab.lm(change.get("steps", 4), lr=change.get("lr", 3e-3)) + lab.lm(1, name="more") * ("more" in change)
    options = {key: change[key] for key in ("seed", "mixed_precision", "save_dtype") if key in change}
    if "text" in change:
        options["data"] = lab.tokens(seed=1)
    student = lab.student(lab.teacher(change.get("weights", 0)), **change.get("student", {}))
    with pytest.raises(ValueError, match=words):
        lab.train(both / name, student, stages=stages, **options)
    assert sorted(both.rglob("*")) == before


def test_another_teacher_is_refused(lab, tmp_path):
    """One with a single other number in it, too."""
    student, teacher = lab.student(), lab.teacher()
    for _ in range(2):  # the same objects: finished, and found so
        lab.distill(tmp_path / "out", teacher, student, stages=lab.stages(2))
    teacher.model.embed_tokens.weight.data[63, 31] += 1e-3
    with pytest.raises(ValueError, match="begun with another teacher"):
        lab.distill(tmp_path / "out", teacher, student, stages=lab.stages(2))


def test_a_run_that_begins_anew_is_of_what_the_object_is_now(lab, finished):
    out, student = finished
    shutil.rmtree(out)
    lab.train(out, student)
    with pytest.raises(ValueError, match="begun with another student"):
        lab.train(out)


def test_two_at_once_are_refused(lab, tmp_path):
    out = tmp_path / "out"
    process = lab.start(lambda: lab.train(out, stages=lab.lm(200), save_every=1), lambda: lab.newest(out) > 0)
    os.kill(process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(ValueError, match="another process is training into"):
            lab.train(out, stages=lab.lm(200))
    finally:
        process.kill()
        process.join()


def one_bit(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def half(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.fixture(scope="module")
def whole(lab, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "out"
    go_on(lab, out)
    return out


@pytest.mark.parametrize(
    ("damage", "name"),
    [(one_bit, "pytorch_model.bin"), (half, "optimizer.bin"), (os.remove, "run.json"), (os.remove, "SHA256SUMS")],
)
def test_a_damaged_state_gives_way_to_the_one_before(lab, whole, stopped, caplog, name, damage):
    states = stopped.with_name("out.state")
    damage(states / "step-000000008" / name)
    (states / "step-000000006" / ".DS_Store").touch()
    go_on(lab, stopped)
    assert "step-000000008 was damaged" in caplog.text
    assert (lab.weights(stopped), lab.history(stopped)) == (lab.weights(whole), lab.history(whole))


def test_without_a_whole_state_nothing_is_gone_on_with(lab, stopped):
    for file in stopped.parent.glob("out.state/step-*/optimizer.bin"):
        half(file)
    before = sorted(stopped.parent.rglob("*"))
    with pytest.raises(ValueError, match=r"out: every state in '.*out.state' is damaged") as caught:
        go_on(lab, stopped)
    assert "\n" not in str(caught.value)
    assert sorted(stopped.parent.rglob("*")) == before


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("out", "mine", r"out: '.*out' is a file"),
        ("out/letter.txt", "mine", "holds other files; expected a new or an empty folder"),
        ("out/train.json", "", "out: .* is damaged"),
        ("out/train.json", "[]", "out: .* is damaged"),
        ("out/train.json", "{}", "out: .* was begun with seed None, not 0"),
    ],
)
def test_out_that_is_something_else(lab, tmp_path, file, content, words):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(content)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=words) as caught:
        lab.train(tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before and (tmp_path / file).read_text() == content


def test_out_may_be_an_empty_folder(lab, tmp_path):
    (tmp_path / "out").mkdir()
    lab.train(tmp_path / "out", stages=lab.lm(1))
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_a_place_that_cannot_be_written(lab, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        OSError, match=r"out: the run's state of '.*' cannot be written \(.*\); nothing was kept"
    ) as caught:
        lab.train(tmp_path / "file" / "out")
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("limit", [2_000, 60_000, 110_000])
def test_disk_full_on_the_way(lab, tmp_path, limit):
    """A limit on the size of files stands for a full disk: the record, the weights or the moments do not fit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    student = lab.student()
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(OSError, match=r"out: .* of '.*out' cannot be written \(.*\); nothing was kept") as caught:
            lab.train(tmp_path / "out", student)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists() and not list(tmp_path.rglob("*tmp-*"))
    lab.train(tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_last_whole_state_is_named_when_the_disk_fills(lab, tmp_path, monkeypatch):
    real, seen = RunFolder._states, []

    def full(self):
        seen.append(1)
        if len(seen) == 4:  # found none, wrote two states, and now the third
            raise OSError(28, "No space left on device")
        return real(self)

    with monkeypatch.context() as later:
        later.setattr(RunFolder, "_states", full)
        with pytest.raises(OSError, match=r"No space left on device.*the state in '.*step-000000003' is whole"):
            lab.train(tmp_path / "out", save_every=1)
    lab.train(tmp_path / "out", save_every=1)
    assert (tmp_path / "out" / "model.safetensors").exists()
