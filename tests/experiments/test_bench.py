"""The benchmark: right before fast, and what fails said in place of its time; whole models and the paper's shapes."""

import dataclasses
import json

import pytest
import torch

from experiments import bench
from mhla_hf import Blocks
from mhla_hf.checkpoints.provenance import describe_run

GRID = bench.Operator("grid", Blocks.grid((4, 6), (2, 3)), 2, 2, (8, 8), normalize=True, dtype="float32")
TEXT = bench.Operator("text", Blocks.sequence(40, 16), 1, 2, (4, 8), causal=True, dtype="bfloat16")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(bench, "MIN_TURN_SECONDS", 0.0)


def measured(*cases):
    rows = [row for case in cases for row in bench.time_case(case, "cpu", rounds=1)]
    return {**describe_run(None), "rows": rows}


def test_side_by_side():
    record = measured(GRID, TEXT)
    rows = {(row["case"], row["what"]): row for row in record["rows"]}
    assert rows.keys() == {(case, what) for case in ("grid", "text") for what in (bench.FORWARD, bench.TRAINING)}
    for (case, _), row in rows.items():
        assert row["ms"].keys() == {"mhla torch", "linear", "sdpa"} and min(row["ms"].values()) > 0
        assert row["failed"] == {}
        assert 0 < row["error"]["mhla torch"] < bench.TOLERANCES["bfloat16" if case == "text" else "float32"]
    table = bench.render_bench(record)
    assert "| grid | forward + backward | " in table and record["hardware"] in table and "* " not in table


def off(attend, what="output"):
    """`bench.Operator.attend`, wrong for MHLA on the grid: in its output, or in a gradient."""

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
    monkeypatch.setattr(bench.Operator, "attend", off(bench.Operator.attend, what))
    record = measured(GRID, TEXT)
    for row in record["rows"]:
        wrong = {"mhla torch"} if row["case"] == "grid" else set()
        assert row["failed"].keys() == wrong and row["ms"].keys() == {"mhla torch", "linear", "sdpa"} - wrong
    assert record["rows"][0]["failed"]["mhla torch"].startswith(said)
    assert "* grid, mhla torch: is wrong" in bench.render_bench(record)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError("full"), "did not fit the memory of the device"),
        (KeyError("no"), "failed: KeyError: 'no'"),
    ],
)
@pytest.mark.parametrize("place", ["work", "errors", "prepare"])
def test_what_fails_is_a_row(error, said, place, monkeypatch):
    right = getattr(bench.Operator, place)

    def failing(self, *arguments):
        if self.name == "grid" and (place == "prepare" or "linear" in arguments):
            raise error
        return right(self, *arguments)

    monkeypatch.setattr(bench.Operator, place, failing)
    monkeypatch.setattr(bench.Operator, "competitors", lambda self, device: ["linear", "mhla torch"])
    rows = {row["case"]: row for row in measured(GRID, TEXT)["rows"]}
    assert rows["grid"]["failed"]["linear"] == said and "mhla torch" in rows["text"]["ms"]
    assert ("mhla torch" in rows["grid"]["ms"]) is (place != "prepare")


def test_a_wrong_result_is_exit_code_1(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(bench, "quick_cases", lambda: [GRID])
    arguments = ["--threads", str(torch.get_num_threads()), "--out", str(tmp_path / "bench.json")]
    record = bench.main(arguments)
    assert "| grid | forward | " in capsys.readouterr().out
    assert json.loads((tmp_path / "bench.json").read_text()) == record
    assert record["command"].startswith("python -m experiments.bench --threads")
    monkeypatch.setattr(bench.Operator, "attend", off(bench.Operator.attend))
    with pytest.raises(SystemExit, match=r"^1$"):
        bench.main(arguments)


WAN = {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 3}
WAN |= {"ffn_dim": 16, "text_dim": 8, "freq_dim": 16}
TINY = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 8}
TINY_LM = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TINY_LM |= {"vocab_size": 1000}
VIDEO = bench.Operator("video", Blocks.grid((2, 4, 4), (1, 2, 2)), 1, 2, (12, 12), dtype="float32")
SQUARE = bench.Operator("grid", Blocks.grid((4, 4), (2, 2)), 1, 2, (8, 8), dtype="float32")
MODELS = {
    "dit": bench.WholeModel("dit", {**bench.DIT, **TINY}, SQUARE),
    "wan": bench.WholeModel("wan", WAN, VIDEO),
    "lm": bench.WholeModel("lm", TINY_LM, dataclasses.replace(TEXT, dtype="float32")),
}


@pytest.mark.parametrize("name", list(MODELS))
def test_whole_models(name, tmp_path):
    case = MODELS[name]
    rows = measured(case)["rows"]
    names = {"softmax", "mhla", "linear (one block)", *(["hybrid 2/3"] if name == "wan" else [])}
    assert [row["what"] for row in rows] == [bench.FORWARD, bench.TRAINING] and all(row["failed"] == {} for row in rows)
    assert all(set(row["ms"]) == names and row["error"]["mhla"] > 0 for row in rows)
    case = dataclasses.replace(case, operator=dataclasses.replace(case.operator, dtype="bfloat16"))
    models, _ = case.prepare("cpu", 0)
    weights = {form: sum(weight.numel() for weight in model.parameters()) for form, model in models.items()}
    assert weights["linear (one block)"] < weights["mhla"] < 1.5 * weights["linear (one block)"]  # the mixing's
    if name == "wan":  # cast as a loaded model
        models["mhla"].save_pretrained(tmp_path)
        loaded = type(models["mhla"]).from_pretrained(tmp_path, dtype=torch.bfloat16)
        dtypes = [{n: p.dtype for n, p in model.named_parameters()} for model in (models["mhla"], loaded)]
        assert dtypes[0] == dtypes[1] and torch.float32 in dtypes[0].values()


def test_every_shape_is_timed_once():
    cases = [*bench.target_cases(), *bench.paper_cases(), *bench.model_cases()]
    assert len({case.name for case in cases}) == len(cases)
