"""VBench: names by its protocol, upstream's exact totals, no total of less than everything; a stop is resumed."""

import json
import sys
from pathlib import Path

import numpy
import pytest
import torch
from tools.small_models import refused
from tools.small_vbench import PROMPTS, make_python

import mhla_hf
from mhla_hf.evaluation.records import Results
from mhla_hf.evaluation.video import DIMENSIONS, compute_vbench_totals

# averages, and what upstream's scripts/cal_final_score.py (commit 45e79ec) prints for them
AVERAGES = (
    "0.892598 0.86368 0.846526 0.844772 0.647667 0.575355 0.832983 0.506253 0.624086 0.6967 0.917517 0.643187 0.404234 "
    "0.232549 0.262259 0.171205"
)
PRINTED = (0.6755662473836423, 0.6537970319516901, 0.6712124042972519)


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    return make_python(tmp_path_factory.mktemp("bench"))


class Camera:
    """A video pipeline of a few lines: noise of the sample's seed, brighter for longer prompts."""

    dtype = torch.float32
    components = {}

    def __init__(self):
        self.prompts = []

    def set_progress_bar_config(self, **options):
        pass

    def __call__(self, prompt, generator, output_type, **options):
        self.prompts += prompt
        frames = [torch.rand(4, 32, 32, 3, generator=one).numpy() * min(1, len(prompt[0]) / 30) for one in generator]
        return type("Output", (), {"frames": numpy.stack(frames)})()


def judge(camera, tmp_path, python, tasks=("temporal_flickering",), **changes):
    settings = {"python": python, "samples": str(tmp_path / "samples"), "sampling": {}, **changes.pop("settings", {})}
    options = {"recipe": "table_5_vbench", "settings": settings, "progress": False, **changes}
    return mhla_hf.evaluate({"wan": camera}, list(tasks), **options)


def test_videos_are_named_by_the_protocol_judged_and_resumed(tmp_path, python):
    camera, out = Camera(), tmp_path / "wan.json"
    found = judge(camera, tmp_path, python, output=out)["wan"]
    videos = tmp_path / "samples" / "wan" / "vbench" / "videos"
    names = {f"{prompt}-{index}.mp4" for prompt in ("a cat walks", "a dog, running") for index in range(5)}
    assert {file.name for file in videos.iterdir()} == names and camera.prompts.count("a dog, running") == 5
    assert len({file.read_bytes() for file in videos.iterdir()}) == 10
    (record,) = found
    assert (record.task, record.metric, record.samples) == ("vbench", "temporal_flickering", 10)
    assert 0 < record.value < 1 and record.stderr > 0 and "--recipe table_5_vbench" in record.command
    camera.prompts.clear()
    judge(camera, tmp_path, python, ("temporal_flickering", "color"), output=out)
    assert camera.prompts == ["a red bus"] * 5
    again, before = videos / "a red bus-3.mp4", (videos / "a red bus-3.mp4").read_bytes()
    again.unlink()
    judge(camera, tmp_path, python, ("color",), output=out, force=True)
    assert again.read_bytes() == before and len(camera.prompts) == 6
    limited = judge(camera, tmp_path, python, ("temporal_flickering",), output=out, limit=1)["wan"]
    assert [(r.limit, r.samples) for r in limited] == [(1, 5)]


def test_the_totals_come_when_all_dimensions_are_there_and_go_into_the_same_table(tmp_path, python):
    averages = dict(zip(DIMENSIONS, map(float, AVERAGES.split()), strict=True))
    assert tuple(compute_vbench_totals(averages).values()) == PRINTED
    info = Path(python).parent / "vbench" / "VBench_full_info.json"
    info.write_text(json.dumps([{"prompt_en": "a cat walks", "dimension": list(DIMENSIONS)}]))
    try:
        out = tmp_path / "wan.json"
        most = judge(Camera(), tmp_path, python, DIMENSIONS[:-1], output=out)
        assert len(most["wan"]) == 15 and most.paper_table() == ""
        compared = judge(Camera(), tmp_path, python, DIMENSIONS, output=out)
    finally:
        info.write_text(json.dumps(PROMPTS))
    values = {record.metric: record.value for record in compared["wan"]}
    assert len(values) == 19
    assert {name: values[name] for name in ("quality", "semantic", "total")} == compute_vbench_totals(values)
    row = compared.paper_table("markdown").splitlines()[2]
    assert f"| {100 * values['total']:.2f} |" in row
    assert "| vbench | total ↑ | 0 | 80 |" in compared.table("markdown")
    assert len(Results.read(out)) == 19


BAD = [
    ("python", None, "python: got None, expected an interpreter that has vbench"),
    ("python", sys.executable, "vbench is not installed for this interpreter"),
    ("videos", 6, "videos: got 6, expected 1 to 5"),
]


@pytest.mark.parametrize("name, value, says", BAD)
def test_bad_settings_are_one_sentence(tmp_path, python, name, value, says):
    with refused(says):
        judge(Camera(), tmp_path, python, settings={name: value})
    assert not (tmp_path / "samples").exists()
