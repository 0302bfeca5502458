"""A run that was stopped at any moment ends as the one that was not; one folder is one run."""

import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import time

import pytest
import torch
from transformers import AutoModelForCausalLM

import mhla_hf
from mhla_hf.training import data, loop, objectives, run_folder

FORK = multiprocessing.get_context("fork")


def start(lab, out, **changes):
    """The run in a process of its own, as a call that somebody may kill."""

    def work():
        os.setsid()
        with contextlib.suppress(KeyboardInterrupt):
            lab.distill(out, **changes)

    process = FORK.Process(target=work)
    process.start()
    return process


def wait_for(condition, process):
    while not condition() and process.is_alive():
        time.sleep(0.002)


def history(out):
    entries = json.loads((out / "train.json").read_text())["history"]
    return [{key: value for key, value in entry.items() if key != "seconds"} for entry in entries]


@pytest.fixture(scope="module")
def whole(lab, tmp_path_factory):
    """The uninterrupted run, with dropout so that random states count, and how long it took."""
    out = tmp_path_factory.mktemp("whole") / "out"
    begun = time.monotonic()
    process = start(lab, out, student=dropped(lab))
    process.join()
    return out, time.monotonic() - begun


def dropped(lab):
    """A student whose softmax layer drops out."""
    return lab.student(lab.teacher(attention_dropout=0.2), layers=[1])


def kill_and_go_on(lab, whole, out, after):
    process = start(lab, out, student=dropped(lab))
    process.join(after)
    process.kill()
    process.join()
    finished = out.exists()
    lab.distill(out, student=dropped(lab))
    assert lab.weights(out) == lab.weights(whole)
    assert history(out) == history(whole)
    assert sorted(path.name for path in out.parent.iterdir()) == [out.name]
    return finished


@pytest.mark.parametrize("part", [0.35, 0.6, 0.85])
def test_kill_and_go_on(lab, whole, tmp_path, part):
    """Three fixed moments of the run, for the quick suite; twenty random ones are the next test's, which is slow."""
    kill_and_go_on(lab, whole[0], tmp_path / "out", part * whole[1])


@pytest.mark.slow
def test_kill_at_twenty_moments(lab, whole, tmp_path):
    """Twenty random moments; too long for the quick suite, so it runs with the slow tests only."""
    moments = random.Random(0)
    for number in range(20):
        kill_and_go_on(lab, whole[0], tmp_path / str(number) / "out", moments.uniform(0.02, 1.0) * whole[1])


def test_kill_while_a_state_is_written(lab, whole, tmp_path):
    out = tmp_path / "out"
    process = start(lab, out, student=dropped(lab), save_every=1)
    state = tmp_path / "out.state"
    wait_for(lambda: any(state.glob("step-00000001*.tmp-*")), process)
    process.kill()
    process.join()
    assert any(state.glob("step-*.tmp-*"))
    lab.distill(out, student=dropped(lab))
    assert lab.weights(out) == lab.weights(whole[0])


def test_kill_again_and_again(lab, whole, tmp_path):
    out, last, kills = tmp_path / "out", -1, 0
    while not out.exists():
        process = start(lab, out, student=dropped(lab), save_every=3)
        wait_for(lambda last=last: newest(out) > last + 9, process)
        last, kills = newest(out), kills + 1
        process.kill()
        process.join()
    assert kills > 3
    lab.distill(out, student=dropped(lab))
    assert lab.weights(out) == lab.weights(whole[0])
    assert json.loads((out / "train.json").read_text())["resumed"] > 3


def newest(out):
    names = [path.name for path in out.with_name(f"{out.name}.state").glob("step-*") if ".tmp-" not in path.name]
    return max((int(name.removeprefix("step-")) for name in names), default=0)


def test_ctrl_c_leaves_a_state_and_says_so(lab, whole, tmp_path, monkeypatch):
    out, real = tmp_path / "out", objectives.DistillStep.forward
    calls = []

    def forward(self, *arguments):
        calls.append(1)
        if len(calls) == 37:
            os.kill(os.getpid(), signal.SIGINT)
        return real(self, *arguments)

    monkeypatch.setattr(objectives.DistillStep, "forward", forward)
    before = signal.getsignal(signal.SIGINT)
    student = dropped(lab)
    with pytest.raises(KeyboardInterrupt, match=r"stopped after step 37 of 60, which is saved in .*out\.state"):
        lab.distill(out, student=student, save_every=100)
    assert signal.getsignal(signal.SIGINT) is before
    assert all(value.requires_grad for value in student.parameters())
    assert newest(out) == 37
    assert not out.exists()
    lab.distill(out, student=student, save_every=100)  # the same object, trained half way, as in a notebook
    assert lab.weights(out) == lab.weights(whole[0])
    assert history(out) == history(whole[0])


def test_ctrl_c_at_the_last_step_still_stops_the_caller(lab, tmp_path, monkeypatch):
    real = loop._Run._record
    monkeypatch.setattr(loop._Run, "_record", lambda run: (os.kill(os.getpid(), signal.SIGINT), real(run))[1])
    with pytest.raises(KeyboardInterrupt, match="had just been finished"):
        lab.distill(tmp_path / "out", None, lab.student(), stages=lab.lm(2))
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_second_ctrl_c_stops_at_once():
    with pytest.raises(KeyboardInterrupt, match="at once"), loop._Interrupt() as _:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)


def test_resume_at_the_border_of_stages(lab, whole, tmp_path):
    out = tmp_path / "out"
    process = start(lab, out, student=dropped(lab), save_every=30)
    wait_for(lambda: newest(out) == 30, process)
    process.kill()
    process.join()
    assert newest(out) == 30
    lab.distill(out, student=dropped(lab))
    assert lab.weights(out) == lab.weights(whole[0])


def test_states_kept_and_their_number(lab, tmp_path):
    process = start(lab, tmp_path / "out", save_every=2)
    seen = set()
    while process.is_alive():
        seen.add(len([path for path in tmp_path.glob("out.state/step-*") if ".tmp-" not in path.name]))
        time.sleep(0.005)
    assert max(seen) <= 3  # two, and a third between its rename and the removal of the oldest
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_finished_twice_does_nothing_and_says_so(lab, tmp_path, capsys):
    out = tmp_path / "out"
    trained = lab.distill(out, None, lab.student(), stages=lab.lm(4))
    stamp = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    fresh = lab.student()
    again = lab.distill(out, None, fresh, stages=lab.lm(4), progress=True)
    assert again is fresh
    torch.testing.assert_close(again.state_dict(), trained.state_dict(), rtol=0, atol=0)
    assert "finished already: nothing to do" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == stamp


def test_killed_between_the_rename_and_the_end(lab, tmp_path):
    out = tmp_path / "out"
    lab.distill(out, None, lab.student(), stages=lab.lm(4))
    (tmp_path / "out.state").mkdir()
    (tmp_path / "out.state" / "lock").touch()
    lab.distill(out, None, lab.student(), stages=lab.lm(4))
    assert not (tmp_path / "out.state").exists()


def test_result_is_a_model_anyone_can_load(lab, tmp_path):
    trained = lab.distill(tmp_path / "out", None, lab.student(), stages=lab.lm(4))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = lab.tokens()[:96].view(2, 48)
    assert torch.equal(loaded(ids).logits, trained.eval()(ids).logits)
    assert mhla_hf.distill is loop.distill


@pytest.mark.parametrize("stopped", [True, False])
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
def test_another_run_is_refused(lab, tmp_path, monkeypatch, stopped, change, words):
    out = tmp_path / "out"
    if stopped:
        monkeypatch.setattr(loop._Run, "_finish", lambda run: (_ for _ in ()).throw(KeyboardInterrupt))
    with contextlib.suppress(KeyboardInterrupt):
        lab.distill(out, None, lab.student(), stages=lab.lm(4))
    assert out.exists() is not stopped
    before = sorted(tmp_path.rglob("*"))
    stages = lab.lm(change.get("steps", 4), lr=change.get("lr", 3e-3))
    if "more" in change:
        stages.append(loop.Stage("more", "lm", 1, 1e-3, seq_len=48))
    options = {key: change[key] for key in ("seed", "mixed_precision", "save_dtype") if key in change}
    if "text" in change:
        options["data"] = lab.tokens(seed=1)
    student = lab.student(lab.teacher(change.get("weights", 0)), **change.get("student", {}))
    with pytest.raises(ValueError, match=words):
        lab.distill(out, None, student, stages=stages, **options)
    assert sorted(tmp_path.rglob("*")) == before


def test_another_teacher_is_refused(lab, tmp_path):
    """One with a single other number in it, too."""
    student, teacher = lab.student(), lab.teacher()
    lab.distill(tmp_path / "out", teacher, student, stages=lab.stages(2))
    lab.distill(tmp_path / "out", teacher, student, stages=lab.stages(2))  # the same objects: finished, and found so
    teacher.model.embed_tokens.weight.data[63, 31] += 1e-3
    with pytest.raises(ValueError, match="begun with another teacher"):
        lab.distill(tmp_path / "out", teacher, student, stages=lab.stages(2))


def test_a_changed_student_is_another(lab, tmp_path):
    """The object that a run has trained is known again only as the run left it."""
    student = lab.student()
    lab.distill(tmp_path / "out", None, student, stages=lab.lm(4))
    lab.distill(tmp_path / "out", None, student, stages=lab.lm(4))  # the same object: finished, and found so
    student.model.norm.weight.data[0] += 1e-3
    with pytest.raises(ValueError, match="begun with another student"):
        lab.distill(tmp_path / "out", None, student, stages=lab.lm(4))


def test_a_run_that_begins_anew_is_of_what_the_object_is_now(lab, tmp_path):
    student = lab.student()
    lab.distill(tmp_path / "out", None, student, stages=lab.lm(4))
    shutil.rmtree(tmp_path / "out")
    lab.distill(tmp_path / "out", None, student, stages=lab.lm(4))
    with pytest.raises(ValueError, match="begun with another student"):
        lab.distill(tmp_path / "out", None, lab.student(), stages=lab.lm(4))


def test_two_at_once_are_refused(lab, tmp_path):
    process = start(lab, tmp_path / "out", save_every=1)
    wait_for(lambda: newest(tmp_path / "out") > 0, process)
    os.kill(process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(ValueError, match="another process is training into"):
            lab.distill(tmp_path / "out")
    finally:
        process.kill()
        process.join()


def stopped_at_eight(lab, out, monkeypatch, student=None):
    """A run of ten steps that was stopped with two states, those after step 6 and step 8."""
    real = loop._Run._log
    with monkeypatch.context() as later:
        later.setattr(loop._Run, "_log", lambda run, *rest: real(run, *rest) or run.at["total"] == 8)
        with pytest.raises(KeyboardInterrupt, match="stopped after step 8"):
            lab.distill(out, None, student or lab.student(), stages=lab.lm(10), save_every=2, log_every=2)
    assert sorted(path.name for path in out.with_name("out.state").glob("step-*")) == [
        "step-000000006",
        "step-000000008",
    ]


def test_unreadable_random_state_is_not_passed_over(lab, tmp_path, monkeypatch):
    """As one from another version: whole, and not to be read."""
    stopped_at_eight(lab, tmp_path / "out", monkeypatch, dropped(lab))
    for state in tmp_path.glob("out.state/step-*"):
        (state / "random_states_0.pkl").write_bytes(b"broken")
        run_folder.RunFolder(tmp_path / "out", json.loads((state / "run.json").read_text())).seal(state)
    with pytest.raises(ValueError, match="random state"):
        lab.distill(tmp_path / "out", None, dropped(lab), stages=lab.lm(10), save_every=2, log_every=2)


def one_bit(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def half(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (one_bit, "pytorch_model.bin"),
        (one_bit, "progress.json"),
        (half, "optimizer.bin"),
        (os.remove, "run.json"),
        (os.remove, "SHA256SUMS"),
    ],
)
def test_a_damaged_state_gives_way_to_the_one_before(lab, tmp_path, monkeypatch, caplog, name, damage):
    lab.distill(tmp_path / "whole" / "out", None, lab.student(), stages=lab.lm(10), save_every=2, log_every=2)
    out = tmp_path / "out"
    stopped_at_eight(lab, out, monkeypatch)
    damage(tmp_path / "out.state" / "step-000000008" / name)
    (tmp_path / "out.state" / "step-000000006" / ".DS_Store").touch()
    lab.distill(out, None, lab.student(), stages=lab.lm(10), save_every=2, log_every=2)
    assert "step-000000008 was damaged" in caplog.text
    assert lab.weights(out) == lab.weights(tmp_path / "whole" / "out")
    assert history(out) == history(tmp_path / "whole" / "out")


def test_without_a_whole_state_nothing_is_gone_on_with(lab, tmp_path, monkeypatch):
    stopped_at_eight(lab, tmp_path / "out", monkeypatch)
    for file in tmp_path.glob("out.state/step-*/optimizer.bin"):
        half(file)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=r"out: every state in '.*out.state' is damaged") as caught:
        lab.distill(tmp_path / "out", None, lab.student(), stages=lab.lm(10), save_every=2, log_every=2)
    assert "\n" not in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_no_state_is_adopted_under_another_name(lab, tmp_path, monkeypatch):
    """Whatever is lost beside the states, they say themselves what run they are of."""
    stopped_at_eight(lab, tmp_path / "out", monkeypatch)
    for file in tmp_path.glob("out.state/*"):
        if file.is_file():
            file.unlink()
    with pytest.raises(ValueError, match="begun with seed 0, not 1"):
        lab.distill(tmp_path / "out", None, lab.student(), stages=lab.lm(10), save_every=2, log_every=2, seed=1)


def test_stream_goes_on_where_it_was(lab, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "WINDOW", 16)
    tokens = lab.tokens().split(37)
    file = tmp_path / "text.jsonl"
    file.write_text("".join(json.dumps({"input_ids": part.tolist()}) + "\n" for part in tokens))
    results = []
    for name, stop_at in (("one", None), ("two", 7), ("three", 13), ("four", 21)):
        if stop_at:
            process = start(lab, tmp_path / name, data=str(file), stages=lab.stages(12), save_every=1)
            wait_for(lambda name=name, stop_at=stop_at: newest(tmp_path / name) >= stop_at, process)
            process.kill()
            process.join()
        lab.distill(tmp_path / name, data=str(file), stages=lab.stages(12))
        results.append((lab.weights(tmp_path / name), history(tmp_path / name)))
    assert all(result == results[0] for result in results[1:])
