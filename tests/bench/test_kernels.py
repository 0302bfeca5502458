"""Each kernel alone: which launches are timed, what they must move, and that they start again as they were."""

from functools import partial

import pytest
import torch

from mhla_hf.bench import Comparison, compare, kernels, render_bench, run_bench
from mhla_hf.bench.cases import KERNELS
from mhla_hf.bench.compare import Operator
from mhla_hf.bench.document import GPU_TARGETS
from mhla_hf.bench.kernels import Kernels, bytes_of, recorded_launches
from mhla_hf.ops.blocks import Blocks
from mhla_hf.ops.triton_common import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="only the interpreter runs kernels on the CPU")
GRID = Operator("grid", Blocks.grid((4, 6), (2, 3)), 2, 2, (8, 8), normalize=True, dtype="float32")
TEXT = Operator("text", Blocks.sequence(40, 16), 1, 2, (4, 8), causal=True, dtype="float32")
BOTH = Comparison((Kernels(GRID), Kernels(TEXT)), rounds=1, seconds=0.0)
K, V, S = 40 * 2 * 4 * 4, 40 * 2 * 8 * 4, 3 * 2 * 4 * 8 * 4  # bytes of q or k, of v or o, and of TEXT's summaries


@pytest.fixture
def interpreted(monkeypatch):
    """The kernels run in the interpreter, which is nothing to time but for the order of things."""
    monkeypatch.setattr(compare, "forms_for", lambda *shape: ("torch", "triton"))
    monkeypatch.setattr(kernels, "TIMES", 2)


def test_every_launch_beside_a_copy(interpreted, tmp_path):
    record = run_bench(BOTH, out=tmp_path, progress=False, show=False)
    started = {
        name: [row["what"].partition(" of ")[0] for row in record["rows"] if row["case"] == name]
        for name in ("grid", "text")
    }
    assert started["grid"] == [
        "forward 1, quadratic",
        *("backward 1, prepare", "backward 2, quadratic", "backward 3, quadratic", "backward 4, quadratic"),
        *("backward 5, summaries", "backward 6, summaries", "backward 7, mix_grads", "backward 8, mix_grads"),
    ]
    assert started["text"][:3] == ["forward 1, summaries", "forward 2, mix", "forward 3, attend"]
    assert record["rows"][9]["what"] == f"forward 1, summaries of {(K + V + S) / 1e6:.3g} MB, 2 times"
    for row in record["rows"]:
        assert row["ms"].keys() == {"mhla kernel", "copy"} and min(row["ms"].values()) > 0
    assert "x MHLA's time" in render_bench(record) and (tmp_path / "bench.png").stat().st_size > 1000
    assert any(name.startswith("text, triton, dk") for name in record["checks"])


def test_the_copy_moves_what_the_kernel_must(interpreted):
    for what, pair in Kernels(TEXT).work("cpu", 0).items():
        assert f"of {2 * pair['copy']().nbytes / 1e6:.3g} MB" in what


def test_bytes_are_counted_once():
    x, expanded = torch.zeros(3, 4), torch.zeros(1, 5).expand(7, 5)
    assert bytes_of(partial(print, x, None, 3, 1.0)) == 48
    assert bytes_of(partial(print, (x, 4, 1), x, (expanded, 0, 1))) == 48 + 20
    assert bytes_of(partial(print, x, x[:, :2])) == 48 + 24  # another tensor: a kernel reads both


def test_a_launch_starts_again_as_it_was():
    (q, k, v, mixing), _ = TEXT.inputs("cpu", 0)
    with recorded_launches() as found:
        o = TEXT.attend(q, k, v, mixing, "triton").detach()
    assert len(found) == 3
    wanted = o.clone()
    o.fill_(torch.nan)
    found[-1]()
    assert torch.equal(o, wanted)


@pytest.mark.parametrize("operator", [GRID, TEXT])
def test_traffic_is_told_without_a_launch(operator, interpreted, monkeypatch):
    pairs = Kernels(operator).work("cpu", 0)
    moved = {what: 2 * pair["copy"]().nbytes for what, pair in pairs.items()}
    forward = sum(size for what, size in moved.items() if what.startswith("forward"))
    monkeypatch.setattr(kernels, "start", lambda *_, **__: pytest.fail("a kernel was started"))
    told = Kernels(operator).traffic()
    assert all(0 <= t - m < 2 * len(moved) for t, m in zip(told, (forward, sum(moved.values())), strict=True))


def test_without_a_gpu_it_says_so(tmp_path):
    with pytest.raises(ValueError, match=r"^device is 'cpu'; expected a GPU that MHLA's kernels run on\.$"):
        run_bench("kernels", out=tmp_path, progress=False)
    assert not list(tmp_path.iterdir())


def test_the_suite_has_the_operators_with_targets():
    assert {case.name for case in KERNELS.cases} == GPU_TARGETS.keys() and len(KERNELS.cases) == len(GPU_TARGETS)
