"""Two processes against one with the same global batch, and against the same batch in parts."""

import json
import os
import signal

import pytest
import torch
from accelerate import PartialState, debug_launcher
from safetensors.torch import load_file

from mhla_hf.training.tasks.language import LanguageObjective


def run(lab, out, parts):
    os.environ.pop("FORK_LAUNCHED", None)  # as torchrun's processes are, whose group accelerate would end
    first, second = lab.stages(4, batch_size=8, grad_accum=parts)
    second.ce_weight = 0.5
    teacher = lab.teacher(initializer_range=0.3)
    lab.distill(out, teacher, lab.student(teacher), data=rows(out), stages=[first, second], log_every=1, save_every=2)


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


@pytest.fixture(scope="module")
def runs(lab, tmp_path_factory):
    """The run by one process, by one in four parts, and by two processes in two parts each."""
    place = tmp_path_factory.mktemp("runs")
    rows(place / "one")
    run(lab, place / "one", 1)
    run(lab, place / "parts", 4)
    debug_launcher(run, (lab, place / "two", 2), num_processes=2)
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


def stop(lab, out):
    """The run, stopped in its seventh step by Ctrl-C in the second process."""
    real, calls = LanguageObjective.forward, []

    def forward(self, *arguments):
        calls.append(1)
        if len(calls) == 13 and PartialState().process_index == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return real(self, *arguments)

    LanguageObjective.forward = forward  # in this process, which ends here
    with pytest.raises(KeyboardInterrupt):
        run(lab, out, 2)


def test_two_processes_go_on_exactly(lab, runs, tmp_path):
    out = tmp_path / "out"
    rows(out)
    debug_launcher(stop, (lab, out), num_processes=2)
    assert lab.newest(out) == 7
    debug_launcher(run, (lab, out, 2), num_processes=2)
    assert lab.weights(out) == lab.weights(runs / "two")
    assert lab.record(out)["resumed"] == 1
