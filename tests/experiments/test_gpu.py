"""What `make gpu` does, in triton's interpreter and on tiny models; and what it says without a GPU."""

import dataclasses
import itertools
import json
from functools import partial

import pytest
import torch

from experiments import gpu, speed
from experiments.bench import FORWARD, TOLERANCES, target_cases
from experiments.docs import render_gpu
from mhla_hf import Blocks
from mhla_hf.checkpoints.provenance import describe_run

SHORT = Blocks.sequence(18, 16)
FEW = {
    "variants": {"sequence": (SHORT, {"widths": (16, 16)}, gpu.CAUSAL)},
    "windows": {"window": (gpu.CAUSAL_WINDOW, dataclasses.replace(gpu.WINDOW, block_size=16), {"widths": (16, 16)})},
}


CALLS = [
    (partial(gpu.variant_errors, kind, impl="torch"), 5 + 2 * ("own" in name)) for name, kind in gpu.VARIANTS.items()
]
CALLS += [(partial(gpu.window_errors, kind), 8 if kind[0] is gpu.TWO_WAYS else 4) for kind in gpu.WINDOWS.values()]


@pytest.mark.parametrize(("errors_of", "number"), CALLS, ids=[*gpu.VARIANTS, *gpu.WINDOWS])
def test_every_kind_of_call_has_a_definition(errors_of, number):
    errors = errors_of(device="cpu", dtype=torch.float32)
    assert len(errors) == number and max(errors.values()) < 1e-5


def test_kernels_are_rows_and_so_are_failures(monkeypatch):
    monkeypatch.setattr(gpu, "SEQUENCE", Blocks.sequence(50, 16))
    rows = gpu.check_kernels("cpu", **FEW)
    made = itertools.product(("bfloat16", "float32"), ("sequence", "window"))
    assert [(row["dtype"], row["kind"]) for row in rows] == [*made]
    assert all(row["failed"] is None and 0 < max(row["error"].values()) < TOLERANCES[row["dtype"]] for row in rows)
    record = {"rows": [], "language": [], **describe_run("make gpu")}
    assert "| sequence | " in render_gpu(record | {"kernels": rows})
    right = gpu.mhla
    monkeypatch.setattr(gpu, "mhla", lambda *a, impl, **o: right(*a, impl=impl, **o) * (1.1 if impl == "torch" else 1))
    fails = {"fails": (SHORT, {"widths": ()}, gpu.CAUSAL)}
    rows = gpu.check_kernels("cpu", impl="torch", variants=FEW["variants"] | fails, windows={})
    assert rows[0]["failed"].startswith("is wrong: output with a relative error of ")
    assert rows[1]["failed"].startswith("failed: IndexError")
    assert gpu.check_kernels("cpu", limit=-1)[0]["failed"] == "not started within -1 s"


def test_a_language_model_by_length_and_what_failed(monkeypatch):
    monkeypatch.setattr(speed, "STEPS", 2)
    monkeypatch.setattr(speed, "ROUNDS", 1)
    monkeypatch.setattr(speed.torch, "compile", lambda model, **options: model)
    passes = gpu.measure_passes
    monkeypatch.setattr(gpu, "measure_passes", lambda models, length: passes(models, 96 // (length < 200)))
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    rows = gpu.time_language("cpu", sizes, (96, 200), 2, torch.float32)
    assert all(value > 0 for value in [*rows[0]["MHLA"].values(), *rows[0]["prefill"].values()])
    assert rows[1]["failed"].startswith("failed: ZeroDivision")
    assert "| 200 | 2 | failed: ZeroDivision" in speed.speed_table(rows)


def test_one_command_checks_times_and_writes(monkeypatch, tmp_path, capsys):
    """As on a GPU, with what is slow replaced; what there is no time for is a row."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device: got no GPU that torch can use, expected one; nothing was measured"):
        gpu.main([])
    few, late = target_cases()[:1], target_cases()[1:2]
    timed = [{"case": few[0].name, "what": FORWARD, "ms": {"mhla triton": 1.0}, "error": {}, "failed": {}}]
    clock = iter([0.0, 1.0, gpu.MAX_SECONDS + 1.0])
    for place, stand_in in {
        "torch.cuda.is_available": lambda: True,
        "experiments.gpu.describe_run": lambda command, device: describe_run(command),
        "experiments.gpu.check_kernels": lambda device: [],
        "experiments.gpu.time_language": lambda device: [],
        "experiments.gpu.time_case": lambda case, device: timed,
        "experiments.gpu.time.monotonic": lambda: next(clock),
        "experiments.gpu.target_cases": lambda: few + late,
        **{f"experiments.gpu.{name}": list for name in ("paper_cases", "model_cases", "write_documents")},
        "experiments.gpu.tqdm": lambda cases, desc: cases,
    }.items():
        monkeypatch.setattr(place, stand_in)
    monkeypatch.setattr(gpu, "OUT", tmp_path / "gpu.json")
    record = gpu.main([])
    assert json.loads((tmp_path / "gpu.json").read_text()) == record and record["command"] == "make gpu"
    assert [row["case"] for row in record["rows"]] == [case.name for case in few + late]
    assert f"* {late[0].name}, all: not started within {gpu.MAX_SECONDS} s" in capsys.readouterr().out
