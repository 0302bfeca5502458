"""The experiment on calibrated grids, in miniature."""

import json

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
    rows.insert(1 + rows.index(grids.CALIBRATED), grids.LAYER_KEPT)
    assert list(record["tasks"]["dit"]["errors"]) == rows
    assert len(record["tasks"]["dit"]["reports"][0]["layers"]) == 4
    assert f"| {grids.CALIBRATED} | " in grids.render_calibration(record)
