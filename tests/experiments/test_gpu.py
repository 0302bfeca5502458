"""What `make gpu` does, in triton's interpreter and on tiny models; and what it says without a GPU."""

import dataclasses
import itertools

import pytest
import torch

from experiments import gpu
from experiments.bench import TOLERANCES
from experiments.docs import render_gpu
from mhla_hf import Blocks
from mhla_hf.checkpoints.provenance import describe_run

SHORT = Blocks.sequence(18, 16)
SMALL_PAGES = dataclasses.replace(gpu.SMALL_PAGES, window=1)
FEW = {
    "variants": {"sequence": (SHORT, {"widths": (16, 16)}, gpu.CAUSAL)},
    "windows": {"window": (dataclasses.replace(gpu.WINDOW, block_size=16), {"widths": (16, 16)})},
    "pages": {"pages": {"width": 16, "num_features": 16, "queries_per_kv": 1, "options": SMALL_PAGES}},
}


CALLS = [(gpu.variant_errors, kind, 5 + 2 * ("own" in name)) for name, kind in gpu.VARIANTS.items()]
CALLS += [(gpu.window_errors, kind, 6) for kind in gpu.WINDOWS.values()]
SMALL = {"width": 8, "num_features": 8, "queries_per_kv": 1}
CALLS += [(gpu.page_errors, kind | SMALL, 1) for kind in gpu.PAGES.values()]


@pytest.mark.parametrize(("errors_of", "kind", "number"), CALLS, ids=[*gpu.VARIANTS, *gpu.WINDOWS, *gpu.PAGES])
def test_every_kind_of_call_has_a_definition(errors_of, kind, number):
    errors = errors_of(kind, "cpu", torch.float32, impl="torch")
    assert len(errors) == number and max(errors.values()) < 1e-5


def test_kernels_are_rows_and_so_are_failures(monkeypatch):
    """In the interpreter: right, wrong, failed and too late."""
    monkeypatch.setattr(gpu, "SEQUENCE", Blocks.sequence(50, 16))
    rows = gpu.check_kernels("cpu", **FEW)
    made = itertools.product(("bfloat16", "float32"), ("sequence", "window", "pages"))
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


def test_without_a_gpu_nothing_is_measured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device: got no GPU that torch can use, expected one; nothing was measured"):
        gpu.main([])
