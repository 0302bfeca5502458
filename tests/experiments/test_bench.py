"""The benchmark: right before fast, and what fails said in place of its time; whole models and the paper's shapes."""

import dataclasses
import json

import pytest
import torch
from tools.tiny_pipelines import WAN

from experiments import bench
from mhla_hf import Blocks

GRID = bench.Operator("grid", Blocks.grid((4, 6), (2, 3)), 2, 2, (8, 8), normalize=True, dtype="float32")
TEXT = bench.Operator("text", Blocks.sequence(40, 16), 1, 2, (4, 8), causal=True, dtype="bfloat16")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(bench, "MIN_TURN_SECONDS", 0.0)


def test_side_by_side_and_what_is_wrong_or_fails_has_its_reason_instead_of_a_speed(monkeypatch, capsys, tmp_path):
    attend, arguments = bench.Operator.attend, ["--threads", "1", "--out", str(tmp_path / "bench.json")]
    monkeypatch.setattr(bench, "quick_cases", lambda: [GRID, TEXT])
    record = bench.main(arguments)
    rows = {(row["case"], row["what"]): row for row in record["rows"]}
    assert rows.keys() == {(case, what) for case in ("grid", "text") for what in (bench.FORWARD, bench.TRAINING)}
    for (case, _), row in rows.items():
        assert row["ms"].keys() == {"mhla torch", "linear", "sdpa"} and min(row["ms"].values()) > 0
        assert row["failed"] == {}
        assert 0 < row["error"]["mhla torch"] < bench.TOLERANCES["bfloat16" if case == "text" else "float32"]
    table = capsys.readouterr().out
    assert "| grid | forward + backward | " in table and record["hardware"] in table and "* " not in table
    assert json.loads((tmp_path / "bench.json").read_text()) == record
    assert record["command"].startswith("python -m experiments.bench --threads")

    def wrong(self, asked, q, k, v, mixing=None):
        if (self.name, asked) == ("grid", "linear"):
            raise torch.OutOfMemoryError("full")
        return attend(self, asked, q, k, v, mixing) * (1.001 if (self.name, asked) == ("grid", "mhla torch") else 1)

    monkeypatch.setattr(bench.Operator, "attend", wrong)
    with pytest.raises(SystemExit, match=r"^1$"):
        bench.main(arguments)
    for row in json.loads((tmp_path / "bench.json").read_text())["rows"]:
        failed = {"mhla torch", "linear"} if row["case"] == "grid" else set()
        assert row["failed"].keys() == failed and row["ms"].keys() == {"mhla torch", "linear", "sdpa"} - failed
    shown = capsys.readouterr().out
    assert "* grid, mhla torch: is wrong: output with a relative error of 1.0e-03" in shown
    assert "* grid, linear: did not fit the memory of the device" in shown


DIT = {**bench.DIT, "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 8}
LM = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 1000}
VIDEO = bench.Operator("video", Blocks.grid((2, 4, 4), (1, 2, 2)), 1, 2, (12, 12), dtype="float32")
SQUARE = bench.Operator("grid", Blocks.grid((4, 4), (2, 2)), 1, 2, (8, 8), dtype="float32")


@pytest.mark.parametrize(("sizes", "operator"), [(DIT, SQUARE), (WAN, VIDEO), (LM, TEXT)], ids=["dit", "wan", "lm"])
def test_whole_models(sizes, operator):
    case = bench.WholeModel("model", sizes, dataclasses.replace(operator, dtype="float32"))
    rows = bench.time_case(case, "cpu", rounds=1)
    names = {"softmax", "mhla", "linear (one block)", *(["hybrid 2/3"] if operator is VIDEO else [])}
    assert [row["what"] for row in rows] == [bench.FORWARD, bench.TRAINING] and all(row["failed"] == {} for row in rows)
    assert all(set(row["ms"]) == names and row["error"]["mhla"] > 0 for row in rows)
    case = dataclasses.replace(case, operator=dataclasses.replace(case.operator, dtype="bfloat16"))
    models, _ = case.prepare("cpu", 0)
    weights = {form: sum(weight.numel() for weight in model.parameters()) for form, model in models.items()}
    assert weights["linear (one block)"] < weights["mhla"] < 1.5 * weights["linear (one block)"]  # the mixing's
