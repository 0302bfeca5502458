"""The benchmark: right before fast, a record that explains itself, and no number for a wrong result."""

import functools
import json

import pytest
import torch

from mhla_hf.bench import Suite, run_bench
from mhla_hf.bench import lengths as bench

TINY = Suite((20, 48), heads=2, width=8, block_size=16, rounds=1, decode_tokens=3)


@pytest.fixture
def tiny_targets(monkeypatch):
    monkeypatch.setattr(bench, "TARGETS", {(bench.TRAINING, 48, "softmax"): 1e9, (bench.TRAINING, 48, "linear"): 1e-9})


def test_record_files_and_table(tmp_path, capsys, tiny_targets):
    threads = torch.get_num_threads()
    record = run_bench(TINY, threads=threads + 1, out=tmp_path / "made" / "here", progress=False)
    assert torch.get_num_threads() == threads and f"{threads + 1} threads" in record["hardware"]
    assert json.loads((tmp_path / "made" / "here" / "bench.json").read_text()) == json.loads(json.dumps(record))
    assert sorted(p.name for p in (tmp_path / "made" / "here").iterdir()) == ["bench.json", "bench.png"]
    rows = {(row["what"], row["length"]): row for row in record["rows"]}
    assert set(rows) == {(what, n) for what in (bench.TRAINING, bench.FORWARD, bench.DECODING) for n in (20, 48)}
    assert all(row[f"{name}_ms"] > 0 for row in rows.values() for name in bench.NAMES)
    for (what, _), row in rows.items():
        assert row["others_ms"].keys() == (set() if what == bench.DECODING else {"sdpa math", "copy"})
        assert all(time > 0 for time in row["others_ms"].values())
    for ratio in record["ratios"]:
        row = rows[ratio["what"], ratio["length"]]
        assert ratio["ratio"] == row[f"{ratio['against']}_ms"] / row["mhla_ms"]
    assert 0 < max(record["checks"].values()) < 1e-5 and len(record["checks"]) == (4 + 4 + 5 + 4) + 2 * (1 + 3)
    assert record["softmax"] == "sdpa flash" and "sdpa math, dk of 53 tokens" in record["checks"]
    assert record["versions"]["torch"] == torch.__version__ and record["seed"] == 0
    table = capsys.readouterr().out
    assert "softmax: sdpa flash\n" in table and "  sdpa math ms" in table and "  copy ms" in table
    lines = [line for line in table.splitlines() if line.startswith(bench.TRAINING)]
    assert len(lines) == 2 and "(>=1e+09)!" in lines[1] and "(>=1e-09)" in lines[1] and "(>=1e-09)!" not in lines[1]


def test_memory_is_what_is_kept(tiny_targets):
    record = run_bench(TINY, progress=False, show=False)
    row = record["memory"][1]
    tensors = 48 * 2 * 8 * 4
    assert row["mhla_bytes"] == 3 * tensors + 3 * 3 * 4
    assert row["softmax_bytes"] >= 4 * tensors


def off_by_a_little(right, q, k, v, mixing, blocks):
    return right(q, k, v, mixing, blocks) * (1 + 1e-4)


def wrong_gradient(right, q, k, v, mixing, blocks):
    return right(q, k.detach() + 0.5 * (k - k.detach()), v, mixing, blocks)


def wrong_late(right, q, k, v, mixing, blocks):
    return right(q, k, v, mixing * (1.01 if q.shape[1] == 48 else 1), blocks)


@pytest.mark.parametrize(
    "name, wrong, words",
    [
        *((name, off_by_a_little, f"{name}, output of 53 tokens: relative error 1.0e-04") for name in bench.NAMES),
        *((name, wrong_gradient, f"{name}, dk of 53 tokens: relative error 5.0e-01") for name in bench.NAMES),
        ("mhla", wrong_late, "last block of 48 tokens: relative error 1.0e-02"),
    ],
)
def test_no_speed_for_a_wrong_result(monkeypatch, tmp_path, capsys, name, wrong, words):
    monkeypatch.setitem(bench.ATTENTION, name, functools.partial(wrong, bench.ATTENTION[name]))
    with pytest.raises(RuntimeError) as error:
        run_bench(TINY, out=tmp_path / "out", progress=False)
    assert str(error.value).startswith(words) and str(error.value).endswith("so no speed is reported.")
    assert capsys.readouterr().out == "" and not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    "change, words",
    [
        ({"suite": "slow"}, "suite is 'slow'; expected one of quick, full, wide, decode, kernels, paper."),
        ({"threads": 0}, "threads is 0; expected an integer of at least 1."),
        ({"threads": 1.0}, "threads is 1.0; expected an integer of at least 1."),
        ({"device": "abacus"}, "device is 'abacus'; expected one that torch can use here."),
    ],
)
def test_bad_arguments(change, words):
    with pytest.raises(ValueError) as error:
        run_bench(**{"suite": TINY, "progress": False, **change})
    assert str(error.value) == words


def test_a_file_in_the_way_is_said_before_timing(tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(ValueError, match=r"expected a folder that can be made \(File exists\)\.$"):
        run_bench(TINY, out=tmp_path / "out", progress=False)
    assert (tmp_path / "out").read_text() == "mine"
