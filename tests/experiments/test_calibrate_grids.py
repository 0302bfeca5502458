"""The experiment on calibrated grids, in miniature."""

import json

import torch

from experiments import calibrate_grids as grids
from mhla_hf.conversion import calibration


def test_a_small_run(tmp_path, monkeypatch):
    monkeypatch.setitem(grids.TASKS, "dit", grids.TASKS["dit"]._replace(steps=2, batch=2, fit_batch=1))
    for name in ("FIT_STEPS", "RUNS", "HELD_OUT_RUNS"):
        monkeypatch.setattr(calibration, name, 1)
    for name in ("FIT_SAMPLING_STEPS", "HELD_OUT_STEPS"):
        monkeypatch.setattr(grids, name, 1)
    record = grids.main(["--out", str(tmp_path), "--tasks", "dit", "--seeds", "1"])
    assert json.loads(json.dumps(record)) == json.loads((tmp_path / "calibrate_grids.json").read_text())
    rows = [row for row, start in grids.STARTS.items() if not start.tasks or "dit" in start.tasks]
    assert list(record["tasks"]["dit"]["errors"]) == [*rows, grids.ONE_KEPT]
    assert len(record["tasks"]["dit"]["reports"][0]["layers"]) == 4
    assert f"| {grids.CALIBRATED} | " in grids.render_calibration(record)


def test_digits_stay_whole_where_they_move():
    images = torch.rand(3, 1, 12, 12)
    for size in ((12, 12), (24, 20), (5, 24, 20)):
        canvas = grids.place_digits(images, size, torch.Generator().manual_seed(0))
        assert canvas.shape == (3, 1, *size)
        inside = (canvas + 1).sum((-1, -2)).reshape(3, -1)
        torch.testing.assert_close(inside, (images + 1).sum((-1, -2)).expand_as(inside))
