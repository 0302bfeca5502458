"""The distillation of calibrated grids, in miniature."""

import pytest
import torch

from experiments import distill_grids as grids
from experiments.calibrate_grids import TASKS, place_digits
from mhla_hf.conversion import calibration
from mhla_hf.conversion.grid_fit import GridSoftmaxCore
from mhla_hf.nn.grid import GridMHLA
from mhla_hf.nn.settings import MHLASettings

TINY = grids.Recipe(trajectories=2, batch=2, steps=2, samples=20)
RECORD = {"command": "", "hardware": "", "versions": {"torch": "", "transformers": ""}}


@pytest.fixture(autouse=True)
def miniature(monkeypatch):
    for name, task in TASKS.items():
        size = (16, 16) if name != "wan" else (4, 16, 16)
        monkeypatch.setitem(TASKS, name, task._replace(sizes=(size,), steps=2, batch=2, fit_batch=1, frame_steps=1))
    for name in ("FIT_STEPS", "RUNS", "HELD_OUT_RUNS"):
        monkeypatch.setattr(calibration, name, 1)
    for name in (
        "calibrate_grids.FIT_SAMPLING_STEPS",
        "calibrate_grids.HELD_OUT_STEPS",
        "distill_grids.SAMPLING_STEPS",
    ):
        monkeypatch.setattr(f"experiments.{name}", 2)
    monkeypatch.setattr(grids, "JUDGE_STEPS", 2)


def test_every_model_gets_a_row_of_the_table(tmp_path):
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


def test_own_blocks_see_no_other():
    core = GridMHLA(MHLASettings(layout=(2, 2)), num_heads=2, key_dim=4, value_dim=4, hidden_size=8)
    q, k, v = (torch.randn(1, 16, 2, 4) for _ in range(3))
    local = grids.BlockSoftmaxCore(core)
    block = torch.tensor([0, 1, 4, 5])  # the first of a grid of 4 x 4 tokens
    o = local(q, k, v, grid=(4, 4), rotate=None)
    alone = GridSoftmaxCore(core)(q[:, block], k[:, block], v[:, block])
    torch.testing.assert_close(o[:, block], alone)


def test_the_frames_of_a_video_are_judged_together():
    """A judge that reads the digit from a frame's brightness; one confident frame outweighs two others."""

    def judge(images):
        return torch.stack([images.mean((1, 2, 3)) * 10, *[torch.zeros(len(images))] * 9], -1)

    video = torch.stack([torch.full((1, 2, 2), x) for x in (1.0, -0.1, -0.1)], 1)[None]
    assert grids.recognized_share(judge, video, torch.tensor([0])) == 1.0
    videos = place_digits(torch.rand(3, 1, 4, 4), (2, 8, 8), torch.Generator().manual_seed(0))
    torch.testing.assert_close(grids.frames_of(videos)[2:4], videos[1].transpose(0, 1))
