"""The distillation of calibrated grids, in miniature."""

from experiments import distill_grids as grids
from experiments.calibrate_grids import TASKS
from mhla_hf.conversion import calibration

TINY = grids.Recipe(trajectories=2, batch=2, steps=2, samples=20)
RECORD = {"command": "", "hardware": "", "versions": {"torch": "", "transformers": ""}}


def test_every_model_gets_a_row_of_the_table(tmp_path, monkeypatch):
    monkeypatch.setitem(TASKS, "dit", TASKS["dit"]._replace(steps=2, batch=2, fit_batch=1, frame_steps=1))
    for name in ("FIT_STEPS", "RUNS", "HELD_OUT_RUNS"):
        monkeypatch.setattr(calibration, name, 1)
    for name in ("calibrate_grids.FIT_SAMPLING_STEPS", "calibrate_grids.HELD_OUT_STEPS"):
        monkeypatch.setattr(f"experiments.{name}", 2)
    for name in ("SAMPLING_STEPS", "JUDGE_STEPS"):
        monkeypatch.setattr(grids, name, 2)
    jobs = [{"task": "dit", "model": model, "seed": 0, **TINY._asdict()} for model in grids.MODELS]
    rows = [grids.make_row(job, tmp_path) for job in jobs]
    for job, row in zip(jobs, rows, strict=True):
        assert job.items() <= row.items() and 0 <= row["recognized"]["16x16"] <= 1
        if "errors" in row:
            before, after = row["errors"]["16x16"]
            assert before != after
    rows.append({**rows[2], "steps": 4 * TINY.steps})
    shares, errors, _ = grids.render_distilled({**RECORD, "rows": rows}).split("\n\n")
    for table, models in ((shares, grids.MODELS), (errors, grids.STUDENTS)):
        models = (*models, f"{grids.MHLA}, 4 times the steps")
        assert [line.split(" | ")[0].lstrip("| ") for line in table.splitlines()[2:]] == list(models)
