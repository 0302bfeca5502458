"""The kernels of each pass, beside a copy of what the pass must move."""

import pytest

from mhla_hf.bench import Comparison, compare, kernels, render_bench, run_bench
from mhla_hf.bench.cases import KERNELS
from mhla_hf.bench.compare import Operator
from mhla_hf.bench.document import GPU_TARGETS
from mhla_hf.bench.kernels import Kernels
from mhla_hf.ops.blocks import Blocks
from mhla_hf.ops.triton.tuning import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="only the interpreter runs kernels on the CPU")
GRID = Operator("grid", Blocks.grid((4, 6), (2, 3)), 2, 2, (8, 8), normalize=True, dtype="float32")
TEXT = Operator("text", Blocks.sequence(40, 16), 1, 2, (4, 8), causal=True, dtype="float32")
BOTH = Comparison((Kernels(GRID), Kernels(TEXT)), rounds=1, seconds=0.0)


@pytest.fixture
def interpreted(monkeypatch):
    """The kernels run in the interpreter, which is nothing to time but for the order of things."""
    monkeypatch.setattr(compare, "forms_for", lambda *shape: ("torch", "triton"))
    monkeypatch.setattr(kernels, "TIMES", 2)


def test_each_pass_beside_a_copy(interpreted, tmp_path):
    record = run_bench(BOTH, out=tmp_path, progress=False, show=False)
    moved = 4 * 40 * 2 * (4 + 8) // 2 * 4  # q, k, v and o of TEXT
    rows = [(row["case"], row["what"]) for row in record["rows"]]
    assert [case for case, _ in rows] == ["grid", "grid", "text", "text"]
    assert rows[2][1] == f"forward of {moved / 1e6:.3g} MB, 2 times"
    assert rows[3][1] == f"backward of {moved * 7 / 4 / 1e6:.3g} MB, 2 times"
    for row in record["rows"]:
        assert row["ms"].keys() == {"mhla kernels", "copy"} and min(row["ms"].values()) > 0
    assert "x MHLA's time" in render_bench(record) and (tmp_path / "bench.png").stat().st_size > 1000
    assert any(name.startswith("text, triton, dk") for name in record["checks"])


def test_the_copy_moves_what_the_pass_must(interpreted):
    for what, pair in Kernels(TEXT).work("cpu", 0).items():
        assert f"of {2 * pair['copy']().nbytes / 1e6:.3g} MB" in what


def test_without_a_gpu_it_says_so(tmp_path):
    with pytest.raises(ValueError, match=r"^device is 'cpu'; expected a GPU that MHLA's kernels run on\.$"):
        run_bench("kernels", out=tmp_path, progress=False)
    assert not list(tmp_path.iterdir())


def test_the_suite_has_the_operators_with_targets():
    assert {case.name for case in KERNELS.cases} == GPU_TARGETS.keys() and len(KERNELS.cases) == len(GPU_TARGETS)
