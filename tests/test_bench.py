"""The benchmark: right before fast, a record that explains itself, and what fails said in place of its time."""

import json

import pytest
import torch

from mhla_hf import Blocks, bench
from mhla_hf.bench import FORWARD, TRAINING, Operator, count_kept_bytes, render_bench, run_bench
from mhla_hf.cli import main

GRID = Operator("grid", Blocks.grid((4, 6), (2, 3)), 2, 2, (8, 8), normalize=True, dtype="float32")
TEXT = Operator("text", Blocks.sequence(40, 16), 1, 2, (4, 8), causal=True, dtype="bfloat16")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(bench, "MIN_TURN_SECONDS", 0.0)


def measured(*shapes, **options):
    return run_bench(shapes, rounds=1, progress=False, **options)


def test_side_by_side(tmp_path):
    threads = torch.get_num_threads()
    assert f"{threads + 1} threads" in measured(threads=threads + 1)["hardware"] and torch.get_num_threads() == threads
    record = measured(GRID, TEXT, threads=threads, out=tmp_path / "bench.json")
    assert json.loads((tmp_path / "bench.json").read_text()) == record
    rows = {(row["case"], row["what"]): row for row in record["rows"]}
    assert rows.keys() == {(case, what) for case in ("grid", "text") for what in (FORWARD, TRAINING)}
    for (case, _), row in rows.items():
        assert row["ms"].keys() == {"mhla torch", "linear", "sdpa"} and min(row["ms"].values()) > 0
        assert row["failed"] == {}
        assert 0 < row["error"]["mhla torch"] < bench.TOLERANCES["bfloat16" if case == "text" else "float32"]
    table = render_bench(record)
    assert "| grid | forward + backward | " in table and record["hardware"] in table and "* " not in table
    assert "| decoding keeps, KiB | sdpa | " in table and "| after 8,192 tokens | 16,384 | 64 | " in table


def off(attend, what="output"):
    """`Operator.attend`, wrong for MHLA on the grid: in its output, or in a gradient."""

    def wrong(self, asked, q, k, v, mixing=None):
        if (self.name, asked) != ("grid", "mhla torch"):
            return attend(self, asked, q, k, v, mixing)
        if what == "gradient":
            k = k.detach() + 0.5 * (k - k.detach())
        return attend(self, asked, q, k, v, mixing) * (1.001 if what == "output" else 1)

    return wrong


@pytest.mark.parametrize(
    ("what", "said"),
    [("output", "is wrong: output with a relative error of 1.0e-03"), ("gradient", "is wrong: dk with")],
)
def test_no_speed_for_a_wrong_result_and_the_others_keep_theirs(what, said, monkeypatch):
    monkeypatch.setattr(Operator, "attend", off(Operator.attend, what))
    record = measured(GRID, TEXT)
    for row in record["rows"]:
        wrong = {"mhla torch"} if row["case"] == "grid" else set()
        assert row["failed"].keys() == wrong and row["ms"].keys() == {"mhla torch", "linear", "sdpa"} - wrong
    assert record["rows"][0]["failed"]["mhla torch"].startswith(said)
    assert "* grid, mhla torch: is wrong" in render_bench(record)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError("full"), "did not fit the memory of the device"),
        (KeyError("no"), "failed: KeyError: 'no'"),
    ],
)
@pytest.mark.parametrize("place", ["work", "errors", "prepare"])
def test_what_fails_is_a_row(error, said, place, monkeypatch):
    right = getattr(Operator, place)

    def failing(self, *arguments):
        if self.name == "grid" and (place == "prepare" or "linear" in arguments):
            raise error
        return right(self, *arguments)

    monkeypatch.setattr(Operator, place, failing)
    monkeypatch.setattr(Operator, "competitors", lambda self, device: ["linear", "mhla torch"])
    rows = {row["case"]: row for row in measured(GRID, TEXT)["rows"]}
    assert rows["grid"]["failed"]["linear"] == said and "mhla torch" in rows["text"]["ms"]
    assert ("mhla torch" in rows["grid"]["ms"]) is (place != "prepare")


def test_what_is_measured_is_kept_when_one_stops(monkeypatch, tmp_path):
    timed = iter([[{"case": "first", "error": {}}]])
    monkeypatch.setattr(bench, "time_case", lambda *arguments: next(timed))
    with pytest.raises(StopIteration):
        measured(GRID, TEXT, out=tmp_path / "bench.json")
    assert [row["case"] for row in json.loads((tmp_path / "bench.json").read_text())["rows"]] == ["first"]


def test_a_window_keeps_as_much_at_every_length():
    short, long = count_kept_bytes(700), count_kept_bytes(1900)
    assert short["linear"] == long["linear"] < short["mhla window"] == long["mhla window"] < long["mhla"] < long["sdpa"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--threads 0", "threads: got 0, expected a whole number of at least 1."),
        ("--device abacus", "device: got 'abacus', expected one that is available here"),
        ("--out ./no/such/place.json", "place.json"),
    ],
)
def test_bad_arguments(arguments, said, capsys):
    assert main(["bench", *arguments.split(), "--quiet"]) == 2
    printed = capsys.readouterr().err
    assert said in printed and printed.count("\n") == 1


def test_from_the_shell_a_wrong_result_is_exit_code_1(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(bench, "make_quick_cases", lambda: [GRID])
    assert main(["bench", "--quiet", "--out", str(tmp_path / "bench.json")]) == 0
    assert "| grid | forward | " in capsys.readouterr().out
    assert json.loads((tmp_path / "bench.json").read_text())["command"].startswith("mhla-hf bench --quiet")
    monkeypatch.setattr(Operator, "attend", off(Operator.attend))
    assert main(["bench", "--quiet"]) == 1
