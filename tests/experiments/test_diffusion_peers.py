"""The comparison of methods that make a video model faster, in miniature."""

import json

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from experiments import calibrate_grids, diffusion_peers
from experiments.calibrate_grids import CALIBRATED, STARTS, TASKS
from experiments.diffusion_peers import METHODS, TiledCore, main, near_tiles, render_peers, similar_tiles
from mhla_hf.conversion import calibration


def dense_attention(q, k, v, block_mask):
    mask = block_mask.to_dense().bool().repeat_interleave(32, -1).repeat_interleave(32, -2)
    return scaled_dot_product_attention(q, k, v, attn_mask=mask)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(diffusion_peers, "compiled_attention", dense_attention)
    monkeypatch.setattr(diffusion_peers, "TILE", (2, 4, 4))


def rotate(q, k):
    return 2 * q, k


def test_attention_over_tiles_is_masked_softmax(monkeypatch):
    grid = (2, 8, 12)
    q, k, v = torch.randn(3, 1, 192, 2, 16)
    heads = [x.transpose(1, 2) for x in (2 * q, k, v)]
    rows, columns = torch.cartesian_prod(*map(torch.arange, grid)).div(4, rounding_mode="floor")[:, 1:].T
    near = ((rows[:, None] - rows).abs() <= 1) & ((columns[:, None] - columns).abs() <= 1)
    expected = scaled_dot_product_attention(*heads, attn_mask=near).transpose(1, 2)
    torch.testing.assert_close(TiledCore(None, near_tiles)(q, k, v, grid=grid, rotate=rotate), expected)
    monkeypatch.setattr(diffusion_peers, "SPARSE_SHARE", 1)
    expected = scaled_dot_product_attention(*heads).transpose(1, 2)
    torch.testing.assert_close(TiledCore(None, similar_tiles)(q, k, v, grid=grid, rotate=rotate), expected)


def test_a_small_run(tmp_path, monkeypatch):
    small = {"steps": 1, "frame_steps": 0, "batch": 1, "sizes": ((4, 16, 16),)}
    monkeypatch.setitem(TASKS, "wan", TASKS["wan"]._replace(**small))
    for name in ("FIT_STEPS", "RUNS", "HELD_OUT_RUNS"):
        monkeypatch.setattr(calibration, name, 1)
    monkeypatch.setattr(calibrate_grids, "FIT_SAMPLING_STEPS", 1)
    for name, value in {"SIZES": ((4, 16, 16), (4, 16, 32)), "STEPS": 3, "ROUNDS": 1}.items():
        monkeypatch.setattr(diffusion_peers, name, value)
    record = main(["--out", str(tmp_path), "--seeds", "1"])
    assert json.loads(json.dumps(record)) == json.loads((tmp_path / "diffusion_peers.json").read_text())
    assert [row["method"] for row in record["rows"]] == 2 * list(METHODS)
    table = render_peers(record)
    assert "| softmax | 0 | 1.00 | 0 | 1.00 |" in table and f"| {CALIBRATED} | " not in table
    distances = {row["method"]: row["distances"][0] for row in record["rows"][: len(METHODS)]}
    assert distances["softmax"] == 0 < distances["MHLA, calibrated"] and set(STARTS) & set(METHODS)
    assert distances["local: tiles of 128 tokens and their neighbors (`flex_attention`)"] < 1e-6  # all tiles are near
