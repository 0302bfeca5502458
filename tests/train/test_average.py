"""The moving average of the weights: what it is, and that a stopped run ends with the same one."""

import copy
import os
import signal

import pytest
import torch

from mhla_hf.training import objectives


def test_average_by_hand(lab, tmp_path, monkeypatch):
    """The decay of step n, counted from 0, is min(decay, (1 + n) / (10 + n)), and 0 for the first."""
    student = lab.student()
    seen, real = [], torch.optim.AdamW.step

    def step(self, *arguments, **options):
        real(self, *arguments, **options)
        seen.append(copy.deepcopy(student.state_dict()))

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    lab.distill(tmp_path / "out", None, student, stages=lab.lm(12, ema=0.4))
    want = seen[0]
    for number, weights in enumerate(seen[1:], 1):
        decay = min(0.4, (1 + number) / (10 + number))
        want = {name: decay * value + (1 - decay) * weights[name] for name, value in want.items()}
    torch.testing.assert_close(dict(student.state_dict()), want, rtol=1e-5, atol=1e-6)

    plain = lab.distill(tmp_path / "plain", None, lab.student(), stages=lab.lm(12))
    torch.testing.assert_close(plain.state_dict(), seen[11], rtol=0, atol=0)  # the optimizer never sees the average


@pytest.mark.parametrize("stop", [7, 15])
def test_stopped_run_has_the_same_average(lab, tmp_path, monkeypatch, stop):
    """In the first stage, and in the second, which begins with the first one's average."""
    stages = [*lab.lm(10, ema=0.9), *lab.lm(10, name="more")]
    lab.distill(tmp_path / "whole", None, lab.student(), stages=stages)
    calls, real = [], objectives.DistillStep.forward

    def forward(self, *arguments):
        calls.append(1)
        if len(calls) == stop:
            os.kill(os.getpid(), signal.SIGINT)
        return real(self, *arguments)

    monkeypatch.setattr(objectives.DistillStep, "forward", forward)
    with pytest.raises(KeyboardInterrupt):
        lab.distill(tmp_path / "out", None, lab.student(), stages=stages)
    lab.distill(tmp_path / "out", None, lab.student(), stages=stages)
    assert lab.weights(tmp_path / "out") == lab.weights(tmp_path / "whole")
