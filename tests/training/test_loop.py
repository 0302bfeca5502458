"""The loop: a run stopped at any moment ends as the one that was not, its record, its dtypes, and several processes."""

import copy
import itertools
import json
import os
import signal
from types import SimpleNamespace

import pytest
import torch
from accelerate import PartialState, debug_launcher
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tools.tiny_pipelines import PIPELINES, generate
from transformers import AutoModelForCausalLM

import mhla_hf
from mhla_hf.training.recipe import DiffusionStage
from mhla_hf.training.run import Run, deferred_interrupt
from mhla_hf.training.tasks.language import LanguageObjective

HALF, FULL = torch.bfloat16, torch.float32


@pytest.fixture(scope="module")
def stream(lab, tmp_path_factory):
    return lab.rows(tmp_path_factory.mktemp("stream") / "text.jsonl")


def run(lab, stream, out, **changes):
    """Ten steps of transfer and ten of distillation with a moving average."""
    first, second = lab.stages()
    second.ema = 0.9
    return lab.distill(out, data=stream, **({"student": lab.dropped(), "stages": [first, second]} | changes))


@pytest.fixture(scope="module")
def whole(lab, stream, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "out"
    run(lab, stream, out)
    return lab.weights(out), lab.history(out)


def test_kill_again_and_again_and_go_on(lab, stream, whole, tmp_path):
    out = tmp_path / "out"
    lab.kill(lambda: run(lab, stream, out), lambda: lab.newest(out) >= 10)
    for _ in range(2):
        last = lab.newest(out)
        until = lambda last=last: lab.newest(out) > last + 1 and any(tmp_path.glob("out.state/unfinished/*.tmp-*"))  # noqa: E731
        lab.kill(lambda: run(lab, stream, out, save_every=1), until)
    assert not out.exists()
    run(lab, stream, out)
    assert (lab.weights(out), lab.history(out), lab.record(out)["resumed"]) == (*whole, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_ctrl_c_leaves_a_state_and_the_same_object_goes_on(lab, stream, whole, tmp_path, monkeypatch):
    out, student, before = tmp_path / "out", lab.dropped(), signal.getsignal(signal.SIGINT)
    lab.stop_in(monkeypatch, LanguageObjective, 13)
    with pytest.raises(KeyboardInterrupt, match=r"stopped after step 13 of 20, saved in .*out\.state"):
        run(lab, stream, out, student=student, save_every=100)
    assert signal.getsignal(signal.SIGINT) is before
    assert all(value.requires_grad for value in student.parameters())
    assert lab.newest(out) == 13 and not out.exists()
    run(lab, stream, out, student=student, save_every=100)
    assert (lab.weights(out), lab.history(out)) == whole


def test_the_first_steps_say_how_long_all_stages_take(lab, tmp_path, monkeypatch, capsys):
    """Each step takes an hour, so that a CPU hears of its recipe, too."""
    hours = itertools.count()
    monkeypatch.setattr("mhla_hf.training.run.time", SimpleNamespace(monotonic=lambda: 3600.0 * next(hours)))
    lab.stop_in(monkeypatch, LanguageObjective, 5)
    with pytest.raises(KeyboardInterrupt):
        lab.distill(tmp_path / "out", stages=lab.stages(10_000), progress=True, log_every=4)
    shown = capsys.readouterr().err
    assert "about 19997:00:00 left for all 20,000 steps" in shown
    assert "language_cpu is the recipe for a CPU: about 1173:20:00" in shown
    assert "tokens/s 0, left in all 19996:00:00" in shown


def test_ctrl_c_at_the_last_step_still_stops_the_caller_and_a_second_one_at_once(lab, tmp_path, monkeypatch):
    real = Run._make_record
    monkeypatch.setattr(Run, "_make_record", lambda run: (os.kill(os.getpid(), signal.SIGINT), real(run))[1])
    with pytest.raises(KeyboardInterrupt, match="had just finished"):
        lab.train(tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").exists()
    with pytest.raises(KeyboardInterrupt, match=r"^$"), deferred_interrupt():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)


def test_record(lab, stream, tmp_path, capsys):
    out = tmp_path / "out"
    lab.teacher().save_pretrained(tmp_path / "original")
    teacher = type(lab.teacher()).from_pretrained(tmp_path / "original")
    options = {"command": "mhla-hf ...", "tracker": "tensorboard", "log_every": 4, "progress": True}
    lab.distill(out, teacher, data=stream, seed=3, **options)
    shown = capsys.readouterr().err
    assert "logits (2/2): step 10 of 10, loss " in shown and "out is finished: 20 steps in" in shown
    record = lab.record(out)
    assert (record["steps"], record["tokens"], record["seed"]) == (20, 20 * 4 * 48, 3)
    assert (record["command"], record["data"]["name"], record["teacher"]) == ("mhla-hf ...", "text.jsonl", "original")
    assert [(stage["name"], stage["tokens"]) for stage in record["stages"]] == [("transfer", 1920), ("logits", 1920)]
    assert record["seconds"] == pytest.approx(sum(stage["seconds"] for stage in record["stages"]), abs=0.01)
    assert [entry["total"] for entry in record["history"]] == [4, 8, 10, 14, 18, 20]
    keys = {"stage", "step", "total", "tokens", "loss", "kl", "ce", "lr", "seconds", "grad_norm"}
    assert set(record["history"][-1]) == keys
    assert str(tmp_path) not in (out / "train.json").read_text()
    events = EventAccumulator(str(out / "runs"))
    events.Reload()
    points = {event.step: event.value for event in events.Scalars("logits/kl")}
    assert points == pytest.approx({e["total"]: e["kl"] for e in record["history"] if "kl" in e}, rel=1e-6)


def test_history_is_the_mean_since_the_last_entry(lab, tmp_path, capsys):
    for every in (1, 4):
        lab.train(tmp_path / str(every), stages=lab.lm(6), log_every=every, save_every=3)
    each, means = ([entry["loss"] for entry in lab.history(tmp_path / name)] for name in ("1", "4"))
    assert means == pytest.approx([sum(each[:4]) / 4, sum(each[4:]) / 2], rel=1e-6)
    silent = capsys.readouterr()
    assert silent.out == "" and "lm (1/1)" not in silent.err


@pytest.mark.parametrize("first", ["log_every", "save_every"])
def test_numbers_that_are_not_finite(lab, tmp_path, first):
    stages = lab.lm(20, lr=1e30, max_grad_norm=1.0 if first == "save_every" else 0.0)
    said = r"lr: got 1e\+30, with which the loss is .* at step .* of stage 'lm', expected a smaller learning rate"
    with pytest.raises(ValueError, match=said):
        lab.train(tmp_path / "out", stages=stages, **{"log_every": 20, "save_every": 20, first: 5})
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob("out.state/step-*"))


def test_gradient_checkpointing_and_bf16(lab, tmp_path):
    """Where the backward pass is under autocast, gradients of what the forward pass does in fp32 are products in bf16."""
    options = {"plain": {}, "saved": {"gradient_checkpointing": True}, "half": {"mixed_precision": "bf16"}}
    runs, seen = {}, set()
    for name, more in options.items():
        student = lab.student()
        student.lm_head.weight.register_hook(lambda grad: seen.add(torch.is_autocast_enabled("cpu")))
        runs[name] = lab.distill(tmp_path / name, student=student, stages=lab.stages(4), **more)
    assert seen == {False}
    plain, saved, half = (model.state_dict() for model in runs.values())
    torch.testing.assert_close(plain, saved, rtol=1e-4, atol=1e-6)
    assert not runs["saved"].is_activation_checkpointing
    assert {value.dtype for value in half.values()} == {FULL}
    torch.testing.assert_close(plain, half, rtol=0.1, atol=0.05)
    assert not torch.equal(plain["lm_head.weight"], half["lm_head.weight"])


def dtypes(state):
    return {name: value.dtype for name, value in state.items()}


def test_trained_in_float32_and_saved_as_it_came_or_as_told(lab, tmp_path):
    """What comes out is what a float32 run gives, rounded once, at the end; the mixing is float32 in every MHLA model."""
    lab.teacher().to(HALF).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    before = copy.deepcopy(base.state_dict())

    def trained(name, dtype=None, **options):
        return lab.distill(tmp_path / name, base, lab.student(base).to(dtype), stages=lab.stages(4), **options)

    full, half = trained("full", FULL).state_dict(), trained("half")
    saved = load_file(tmp_path / "half" / "model.safetensors")
    assert dtypes(saved) == {name: FULL if ".mixing." in name else HALF for name in saved}
    wanted = {name: full[name].to(value.dtype) for name, value in saved.items()}
    torch.testing.assert_close(saved, wanted, rtol=0, atol=0)
    torch.testing.assert_close(base.state_dict(), before, rtol=0, atol=0)
    loaded, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "half"), lab.tokens()[:96].view(2, 48)
    assert loaded.dtype == half.dtype == HALF
    assert torch.equal(loaded(ids).logits, half.eval()(ids).logits)
    for dtype in (FULL, "float32"):  # the second finds the first, finished
        torch.testing.assert_close(trained("told", save_dtype=dtype).state_dict(), full, rtol=0, atol=0)
    small = trained("small", FULL, save_dtype="bfloat16").state_dict()
    torch.testing.assert_close({name: small[name] for name in saved}, saved, rtol=0, atol=0)


def test_pipelines_in_half_precision(tmp_path):
    """Loaded as diffusers loads them in bfloat16: what its class keeps in float32 stays so."""
    PIPELINES["wan"]().save_pretrained(tmp_path / "base")
    kind = type(PIPELINES["wan"]())
    teacher, student = (kind.from_pretrained(tmp_path / "base", dtype=HALF) for _ in range(2))
    mhla_hf.convert(student, layers=[1], layout=(1, 2, 2))
    before = dtypes(student.transformer.state_dict())
    common = {"batch_size": 2, "sampling_steps": 2, "size": [9, 64, 80], "ema": 0.5}
    stages = [DiffusionStage("lora", "prediction", 2, 1e-3, trainable="lora", lora_rank=2, **common)]
    mhla_hf.distill(student, teacher, out=tmp_path / "out", data=["a cat"], stages=stages, progress=False)
    assert dtypes(student.transformer.state_dict()) == before and HALF in before.values()
    loaded = kind.from_pretrained(tmp_path / "out", dtype=HALF, trust_remote_code=True)
    torch.testing.assert_close(loaded.transformer.state_dict(), student.transformer.state_dict(), rtol=0, atol=0)
    assert torch.equal(generate(loaded), generate(student))


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """A file of rows whose labels are unevenly missing, so that processes see different numbers of targets."""
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 64, (300, 48), generator=random)
    labels = ids.masked_fill(torch.rand(300, 48, generator=random) < torch.rand(300, 1, generator=random), -100)
    lines = [{"input_ids": a, "labels": b} for a, b in zip(ids.tolist(), labels.tolist(), strict=True)]
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(file)


def train_rows(lab, rows, out, parts):
    """Four steps of transfer and four of distillation, each of a batch of 8 in parts."""
    os.environ.pop("FORK_LAUNCHED", None)  # as torchrun's processes are, whose group accelerate would end
    first, second = lab.stages(4, batch_size=8, grad_accum=parts)
    second.ce_weight = 0.5
    teacher = lab.teacher(initializer_range=0.3)
    lab.distill(out, teacher, lab.student(teacher), data=rows, stages=[first, second], log_every=1, save_every=2)


@pytest.fixture(scope="module")
def runs(lab, rows, tmp_path_factory):
    place = tmp_path_factory.mktemp("runs")
    train_rows(lab, rows, place / "one", 1)
    train_rows(lab, rows, place / "parts", 4)
    debug_launcher(train_rows, (lab, rows, place / "two", 2), num_processes=2)
    return place


@pytest.mark.parametrize("name", ["parts", "two"])
def test_parts_and_processes_equal_the_big_batch(lab, runs, name):
    one, other = lab.record(runs / "one"), lab.record(runs / name)
    assert (one["processes"], other["processes"]) == (1, 2 if name == "two" else 1)
    for a, b in zip(one["history"], other["history"], strict=True):
        keys = {"loss", "kl", "ce"} & set(a)
        assert [a[key] for key in keys] == pytest.approx([b[key] for key in keys], rel=1e-5), (a["stage"], a["step"])
    weights = [load_file(runs / each / "model.safetensors") for each in ("one", name)]
    torch.testing.assert_close(*weights, rtol=1e-3, atol=1e-5)
    assert not list(runs.glob("*.state"))


def stop(*given):
    """The run, stopped in its seventh step by Ctrl-C in the second process."""
    real, calls = LanguageObjective.forward, []

    def forward(self, *arguments):
        calls.append(1)
        if len(calls) == 13 and PartialState().process_index == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return real(self, *arguments)

    LanguageObjective.forward = forward  # in this process, which ends here
    with pytest.raises(KeyboardInterrupt):
        train_rows(*given)


def test_two_processes_go_on_exactly(lab, rows, runs, tmp_path):
    out = tmp_path / "out"
    debug_launcher(stop, (lab, rows, out, 2), num_processes=2)
    assert lab.newest(out) == 7
    debug_launcher(train_rows, (lab, rows, out, 2), num_processes=2)
    assert (lab.weights(out), lab.record(out)["resumed"]) == (lab.weights(runs / "two"), 1)
