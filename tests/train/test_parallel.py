"""Two processes against one with the same global batch."""

import json
import os
import signal

import pytest
import torch
from accelerate import PartialState, debug_launcher
from safetensors.torch import load_file

from mhla_hf.training import objectives
from mhla_hf.training.recipe import Stage


def run(lab, out, parts):
    stages = [
        Stage("transfer", "transfer", 6, 1e-2, seq_len=48, batch_size=8, grad_accum=parts, trainable="mhla"),
        Stage("logits", "logits", 6, 1e-3, seq_len=48, batch_size=8, grad_accum=parts, ce_weight=0.5),
    ]
    teacher = lab.teacher(initializer_range=0.3)
    lab.distill(out, teacher, lab.student(teacher), data=rows(out), stages=stages, log_every=1, save_every=2)


def rows(out):
    """Rows whose labels are unevenly missing, so that processes see different numbers of targets."""
    file = out.parent / "rows.jsonl"
    if not file.exists():
        random = torch.Generator().manual_seed(0)
        ids = torch.randint(0, 64, (300, 48), generator=random)
        labels = ids.masked_fill(torch.rand(300, 48, generator=random) < torch.rand(300, 1, generator=random), -100)
        lines = [{"input_ids": a, "labels": b} for a, b in zip(ids.tolist(), labels.tolist(), strict=True)]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(file)


@pytest.mark.parametrize("parts", [1, 2])
def test_two_processes_equal_one(lab, tmp_path, parts):
    rows(tmp_path / "one")
    run(lab, tmp_path / "one", 1)
    debug_launcher(run, (lab, tmp_path / "two", parts), num_processes=2)
    one, two = (json.loads((tmp_path / name / "train.json").read_text()) for name in ("one", "two"))
    assert (one["processes"], two["processes"]) == (1, 2)
    for a, b in zip(one["history"], two["history"], strict=True):
        for key in {"loss", "kl", "ce"} & set(a):
            assert a[key] == pytest.approx(b[key], rel=1e-5), (a["stage"], a["step"], key)
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "rows.jsonl", "two"]


def stop(lab, out, how):
    """The run, stopped in its ninth step: by an error in both processes, or by Ctrl-C in the second."""
    real, calls = objectives.DistillStep.forward, []

    def forward(self, *arguments):
        calls.append(1)
        if len(calls) == 9 and how == "error":
            raise MemoryError
        if len(calls) == 9 and PartialState().process_index == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return real(self, *arguments)

    objectives.DistillStep.forward = forward
    with pytest.raises(MemoryError if how == "error" else KeyboardInterrupt):
        run(lab, out, 1)
    objectives.DistillStep.forward = real


@pytest.fixture(scope="module")
def whole(lab, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "out"
    rows(out)
    debug_launcher(run, (lab, out, 1), num_processes=2)
    return out


@pytest.mark.parametrize(("how", "state"), [("error", 8), ("ctrl-c", 9)])
def test_two_processes_go_on_exactly(lab, whole, tmp_path, how, state):
    out = tmp_path / "out"
    rows(out)
    debug_launcher(stop, (lab, out, how), num_processes=2)
    assert max(path.name for path in tmp_path.glob("out.state/step-*")) == f"step-{state:09d}"
    debug_launcher(run, (lab, out, 1), num_processes=2)
    assert lab.weights(out) == lab.weights(whole)
    assert json.loads((out / "train.json").read_text())["resumed"] == 1


def uneven(lab, out):
    with pytest.raises(ValueError, match="batch_size 5 cannot be shared by 2 processes in 1 equal parts each"):
        lab.distill(out, None, lab.student(), stages=lab.lm(2, batch_size=5))


def test_batch_that_cannot_be_shared(lab, tmp_path):
    debug_launcher(uneven, (lab, tmp_path / "out"), num_processes=2)
    assert not list(tmp_path.iterdir())
