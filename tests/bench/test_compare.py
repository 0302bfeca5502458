"""Operators and whole models side by side: what is compared, what is refused, and the shapes of the paper."""

import dataclasses
import json
import math

import pytest
import torch

from mhla_hf.bench import DECODE, Comparison, compare, competitors, render_bench, run_bench
from mhla_hf.bench.cases import DIT, PAPER, WholeModel
from mhla_hf.bench.compare import FORWARD, TRAINING, Decoding, Operator
from mhla_hf.ops.blocks import Blocks
from mhla_hf.ops.triton.tuning import INTERPRETED

GRID = Operator("grid", Blocks.grid((4, 6), (2, 3)), 2, 2, (8, 8), normalize=True, dtype="float32")
MORE = Decoding(100, heads=2, width=8, dtype="float32")
TEXT = Operator("text", Blocks.sequence(40, 16), 1, 2, (4, 8), causal=True, dtype="bfloat16")
GRADED = ("output", "dq", "dk", "dv")


def quick(*cases):
    return Comparison(cases, rounds=1, seconds=0.0)


def test_operators_side_by_side(tmp_path, capsys):
    record = run_bench(quick(GRID, TEXT), out=tmp_path, progress=False)
    assert json.loads((tmp_path / "bench.json").read_text()) == json.loads(json.dumps(record))
    assert (tmp_path / "bench.png").stat().st_size > 1000
    rows = {(row["case"], row["what"]): row["ms"] for row in record["rows"]}
    assert set(rows) == {(name, what) for name in ("grid", "text") for what in (FORWARD, TRAINING)}
    for ms in rows.values():
        assert {"mhla torch", "linear ours", "copy", "sdpa math"} <= set(ms) and all(time > 0 for time in ms.values())
    assert "mhla triton" not in rows["grid", FORWARD]  # the interpreter is nothing to time
    backends = sum(name.startswith("sdpa") for name in rows["grid", FORWARD])
    tokens = GRID.small().blocks.length
    assert {
        f"grid, {name}, {what} of {tokens} tokens" for name in ("sdpa math", "linear ours") for what in GRADED
    } <= set(record["checks"])
    assert len(record["checks"]) >= 2 * (6 + 4 * 2) + 4 * (backends - 1) and max(record["checks"].values()) < 1.5e-2
    table = capsys.readouterr().out
    assert table.strip() == render_bench(record).strip() and "grid: forward + backward" in table


def test_decoding_side_by_side(tmp_path, capsys):
    record = run_bench(quick(MORE), out=tmp_path, progress=False)
    (row,) = record["rows"]
    assert row["case"] == "after 100 tokens, 2 heads of 8" and row["what"] == "decode, 64 tokens"
    backends = {name for name in row["ms"] if name.startswith("sdpa")}
    assert row["ms"].keys() == {"mhla torch", "linear ours", "copy", *backends} and "sdpa math" in backends
    assert len(record["checks"]) == len(row["ms"]) - 1 and max(record["checks"].values()) < 1e-5
    assert "after 100 tokens, 2 heads of 8: decode, 64 tokens" in capsys.readouterr().out


def test_half_of_the_decoded_tokens_come_after_a_block_ends():
    blocks = [case.blocks for case in (MORE, *DECODE.cases)]
    assert [cut.block_size for cut in blocks] == [16, 128, 256, 512, 1024]
    assert all((cut.length - compare.STEPS // 2) % cut.block_size == 0 for cut in blocks)
    assert [cut.length - compare.STEPS // 2 for cut in blocks[1:]] == [case.length for case in DECODE.cases]


@pytest.mark.skipif(not INTERPRETED, reason="only the interpreter runs kernels on the CPU")
def test_the_decoding_kernels_go_back_to_where_they_were(monkeypatch):
    """What a CUDA graph replays: the same tokens at the same places, the second time too."""
    monkeypatch.setattr(compare, "STEPS", 8)
    monkeypatch.setattr(compare, "forms_for", lambda *shape: ("triton",))
    checks = Decoding(20, heads=2, width=4, dtype="float32").check("cpu", 0)
    assert checks["after 20 tokens, 2 heads of 4, mhla triton"] < 1e-5


@pytest.mark.parametrize("name", ["mhla_step", "decode_linear", "softmax_by"])
def test_no_speed_for_a_wrong_decoder(name, monkeypatch, tmp_path):
    place = competitors if name == "softmax_by" else compare
    right = getattr(place, name)

    def wrong(*arguments, **options):
        o = right(*arguments, **options)
        return (o[0] * 1.001, o[1]) if isinstance(o, tuple) else o * 1.001

    monkeypatch.setattr(place, name, wrong)
    with pytest.raises(RuntimeError, match=r"after 100 tokens, .*so no speed is reported\.$"):
        run_bench(quick(MORE), out=tmp_path, progress=False)
    assert not list(tmp_path.iterdir())


def test_plain_linear_attention_in_long_blocks_is_the_same(monkeypatch):
    (q, k, v, _), _ = TEXT.inputs("cpu", 0)
    whole = TEXT.linear("cpu")(q, k, v)
    monkeypatch.setattr(compare, "LINEAR_BLOCK", 16)
    assert compare.relative_error(TEXT.linear("cpu")(q, k, v), whole.double()) < 1e-2


def fla_chunked(q, k, v, scale=None, initial_state=None, output_final_state=False, normalize=True, cu_seqlens=None):
    """As fla 0.6.0 declares its kernel, slow."""
    return fla_recurrent(q, k, v, scale, initial_state, output_final_state, False, normalize)


def fla_recurrent(
    q, k, v, scale=None, initial_state=None, output_final_state=False, reverse=False, normalize=False, cu_seqlens=None
):
    """As fla 0.6.0 declares its kernel, slow."""
    assert scale is not None and not reverse and cu_seqlens is None
    weights = torch.einsum("bthk,bshk->bhts", q.float(), k.float()).tril() * scale
    o = torch.einsum("bhts,bshv->bthv", weights, v.float())
    if normalize:
        o = o / weights.sum(-1).transpose(1, 2)[..., None]
    if initial_state is not None:
        o = o + torch.einsum("bthk,bhkv->bthv", q.float(), initial_state) * scale
    state = torch.einsum("bthk,bthv->bhkv", k.float(), v.float()) + (0 if initial_state is None else initial_state)
    return o.to(v.dtype), state if output_final_state else None


@pytest.mark.parametrize("normalize", [False, True])
def test_flas_kernels_are_competitors_where_fla_is_installed(normalize, monkeypatch, tmp_path):
    monkeypatch.setattr(compare, "fla_kernels", lambda device: (fla_chunked, fla_recurrent))
    record = run_bench(quick(dataclasses.replace(TEXT, normalize=normalize), MORE), progress=False, show=False)
    assert all("linear fla" in row["ms"] for row in record["rows"])
    assert any("linear fla, dk" in name for name in record["checks"])
    assert f"{MORE.name}, linear fla" in record["checks"]
    monkeypatch.setattr(
        compare, "fla_kernels", lambda device: (fla_chunked, lambda *a, **s: (a[2], s["initial_state"]))
    )
    with pytest.raises(RuntimeError, match="linear fla"):
        run_bench(quick(MORE), out=tmp_path, progress=False)


def test_the_floor_moves_what_must_move():
    work = GRID.work("cpu", 0)
    tensor = 2 * 24 * 2 * 8 * 4
    assert 2 * work[FORWARD]["copy"]().nbytes == 4 * tensor  # read and written
    assert 2 * work[TRAINING]["copy"]().nbytes == 11 * tensor


@pytest.mark.parametrize("what", ["output", "gradient", "far"])
def test_no_speed_for_a_wrong_result(what, monkeypatch, tmp_path, capsys):
    attend = Operator.attend

    def wrong(self, q, k, v, mixing, impl, blocks=None):
        if what == "gradient":
            k = k.detach() + 0.5 * (k - k.detach())
        o = attend(self, q, k, v, mixing, impl, blocks)
        return o * (1.001 if what == "output" or (what == "far" and q.shape[1] == 24) else 1)

    monkeypatch.setattr(Operator, "attend", wrong)
    with pytest.raises(RuntimeError, match=r"grid, torch, .*so no speed is reported\.$"):
        run_bench(quick(GRID), out=tmp_path, progress=False)
    assert capsys.readouterr().out == "" and not list(tmp_path.iterdir())


def test_a_wrong_result_leaves_the_others_their_speed(monkeypatch, tmp_path, capsys):
    attend = Operator.attend

    def wrong(self, *arguments, **options):
        return attend(self, *arguments, **options) * (1.001 if self.name == "grid" else 1)

    monkeypatch.setattr(Operator, "attend", wrong)
    with pytest.raises(RuntimeError, match=r"^grid, torch, output.*so no speed is reported\.$"):
        run_bench(quick(GRID, TEXT), out=tmp_path, progress=False)
    record = json.loads((tmp_path / "bench.json").read_text())
    assert {row["case"] for row in record["rows"]} == {"text"} and len(record["wrong"]) == 1
    told = capsys.readouterr().out
    assert record["wrong"][0] in told and "grid: forward" not in told


def test_a_case_that_fails_leaves_the_others_their_turn(monkeypatch, tmp_path):
    """Also with an error of triton's, which is no RuntimeError."""

    class Refused(Exception):
        pass

    def refuse(*_):
        raise Refused("no room for\nits tiles")

    check = Operator.check
    monkeypatch.setattr(Operator, "check", lambda self, *a: refuse() if self.name == "grid" else check(self, *a))
    with pytest.raises(RuntimeError, match=r"^grid: forward failed: Refused: no room for$"):
        run_bench(quick(GRID, TEXT), out=tmp_path, progress=False, show=False)
    assert {row["case"] for row in json.loads((tmp_path / "bench.json").read_text())["rows"]} == {"text"}
    best, failed = compare.fastest_of_rounds({"one": refuse, "other": list}, "cpu", 1, 0.0, False)
    assert best.keys() == {"other"} and failed == {"one": "failed: no room for"}


def test_what_is_measured_is_kept_when_one_stops(monkeypatch, tmp_path):
    def stop(*_):
        raise KeyboardInterrupt

    second = dataclasses.replace(TEXT, name="second")
    check = Operator.check
    monkeypatch.setattr(Operator, "check", lambda self, *a: stop() if self.name == "second" else check(self, *a))
    with pytest.raises(KeyboardInterrupt):
        run_bench(quick(GRID, second), out=tmp_path, progress=False)
    assert {row["case"] for row in json.loads((tmp_path / "bench.json").read_text())["rows"]} == {"grid"}


def test_a_wrong_competitor_is_not_timed(monkeypatch):
    true = competitors.softmax_by
    monkeypatch.setattr(competitors, "softmax_by", lambda *arguments: true(*arguments) * 1.001)
    with pytest.raises(RuntimeError, match=r"^grid, sdpa "):
        run_bench(quick(GRID), progress=False, show=False)


def test_what_does_not_fit_is_said(monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(compare, "training_step", full)
    record = run_bench(quick(GRID), progress=False, show=False)
    assert [row["what"] for row in record["rows"]] == [FORWARD]
    assert record["skipped"] == {"grid: forward + backward": "did not fit the memory of the device"}
    assert "grid: forward + backward: not timed, it did not fit" in render_bench(record)


def test_what_fails_leaves_the_others_their_turn(monkeypatch):
    true = competitors.softmax_by

    def failing(backend, causal, q, k, v):
        if q.shape[1] == GRID.blocks.length and torch.is_grad_enabled():
            raise RuntimeError("no kernel here\nand more")
        return true(backend, causal, q, k, v)

    one = {"sdpa math": competitors.SOFTMAX_BACKENDS["sdpa math"]}
    monkeypatch.setattr(competitors, "SOFTMAX_BACKENDS", one)
    monkeypatch.setattr(competitors, "takes", lambda *_: True)
    monkeypatch.setattr(competitors, "softmax_by", failing)
    record = run_bench(quick(GRID), progress=False, show=False)
    assert [row["what"] for row in record["rows"]] == [FORWARD, TRAINING]
    assert record["skipped"] == {f"grid: {TRAINING}, sdpa math": "failed: no kernel here"}
    assert "sdpa math" in record["rows"][0]["ms"] and "mhla torch" in record["rows"][1]["ms"]


WAN = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "ffn_dim": 16,
    "num_layers": 3,
    "text_dim": 8,
    "freq_dim": 16,
}
TINY = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 8}
TINY_LM = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 1000,
}
VIDEO = Operator("video", Blocks.grid((2, 4, 4), (1, 2, 2)), 1, 2, (12, 12), dtype="float32")


SQUARE = Operator("grid", Blocks.grid((4, 4), (2, 2)), 1, 2, (8, 8), dtype="float32")


@pytest.mark.parametrize(
    "model, names",
    [
        (WholeModel("dit", {**DIT, **TINY}, (4, 4), 1, SQUARE), {"softmax", "linear", "mhla"}),
        (WholeModel("wan", WAN, (2, 4, 4), 1, VIDEO, (3, 8)), {"softmax", "linear", "mhla", "mhla hybrid 2/3"}),
        (WholeModel("lm", TINY_LM, (40,), 1, TEXT), {"softmax", "linear", "mhla"}),
    ],
)
def test_whole_models(model, names):
    record = run_bench(quick(model), progress=False, show=False)
    assert [set(row["ms"]) for row in record["rows"]] == [names, names]
    models = model.models("cpu")
    weights = {name: sum(weight.numel() for weight in made.parameters()) for name, made in models.items()}
    assert weights["linear"] < weights["mhla"] < 1.5 * weights["linear"]  # the mixing's


@pytest.mark.parametrize("name, size, operator", [("wan", WAN, VIDEO), ("lm", TINY_LM, TEXT)])
def test_whole_models_have_the_dtypes_of_loaded_ones(name, size, operator, tmp_path):
    half = dataclasses.replace(operator, dtype="bfloat16")
    grid = operator.blocks.shape if name == "wan" else (operator.blocks.length,)
    case = WholeModel(name, size, grid, 1, half, (3, 8))
    made = case.models("cpu")["mhla"]
    made.save_pretrained(tmp_path)
    loaded = type(made).from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {n: p.dtype for n, p in made.named_parameters()} == {n: p.dtype for n, p in loaded.named_parameters()}
    assert {p.dtype for n, p in made.named_parameters() if "mixing" in n} == {torch.float32}
    for forms in case.work("cpu", 0).values():
        assert forms["mhla"]() is not None


def test_the_papers_shapes():
    operators = {case.name: case for case in PAPER.cases if isinstance(case, Operator)}
    assert len({case.name for case in PAPER.cases}) == len(PAPER.cases)
    shapes = {(case.blocks.length, case.heads, *case.widths, case.causal) for case in operators.values()}
    images = {(tokens, 6, 64, 64, False) for tokens in (256, 1024, 4096, 16384, 65536)} | {(1024, 16, 72, 72, False)}
    texts = {(tokens, 16, width, width, True) for tokens in (2048, 8192, 32768) for width in (64, 128)}
    assert shapes == images | texts | {(31500, 12, 128, 128, False), (2048, 4, 128, 256, True)}
    wan = [case for case in operators.values() if case.blocks.length == 31500]
    assert {(case.blocks.num_blocks, case.blocks.equal) for case in wan} == {(150, True), (105, True)}
    table = {
        (case.blocks.num_blocks, case.blocks.length) for name, case in operators.items() if name.startswith("table 14")
    }
    assert len(table) == 12 and (1024, 4096) in table and (1024, 1024) not in table
    whole = [case for case in PAPER.cases if isinstance(case, WholeModel)]
    small = {(case.operator.blocks.length, case.batch) for case in whole if case.name.startswith("DiT-S/2")}
    assert small == {(256, 32), (1024, 32), (4096, 8), (16384, 1), (65536, 1)}
    assert {case.name.split()[0] for case in whole} == {"DiT-S/2", "DiT-XL/2", "Wan2.1-1.3B,", "LM-340M"}
    assert all(case.operator.blocks.length == math.prod(case.grid) for case in whole)
    assert all(case.operator.batch == case.batch for case in whole)
