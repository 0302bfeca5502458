"""Records of scores: written whole, read back as they were, merged by what they measure, shown side by side, drawn."""

import dataclasses
import json
import os
import re

import pytest
from matplotlib.figure import Figure
from tools.small_scores import make_result

from mhla_hf.evaluation.records import Comparison, Results, finite, render_table
from mhla_hf.evaluation.runner import read_score_recipe


def test_a_file_gives_back_what_was_written_and_a_stop_leaves_the_old_one(tmp_path, monkeypatch):
    records = [make_result(), make_result(metric="ppl", value=None, stderr=None, limit=0.5, seconds=1.5, window=512)]
    path = Results(records).write(tmp_path)
    assert path == tmp_path / "results.json"
    assert Results.read(tmp_path) == records == Results.read(path)
    assert Results.read(tmp_path / "nothing.json") == []
    before = path.read_bytes()
    monkeypatch.setattr(os, "replace", lambda *_: os.stat(tmp_path / "no"))
    with pytest.raises(OSError, match="No such file"):
        Results([make_result(value=0.9)]).write(tmp_path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_merge_replaces_only_the_same_thing():
    old = Results([make_result(), make_result(shots=5), make_result(limit=10), make_result(metric="f1")])
    old.merge([make_result(value=0.75), make_result(task="arc")])
    assert [record.value for record in old] == [0.5, 0.5, 0.75, 0.5, 0.5]
    assert (old.find("copa", "acc").value, old.find("copa", "acc", limit=10).value) == (0.75, 0.5)
    for keeps, kept in ((False, [7]), (True, [7, 100])):  # a task whose data changed; images in any number
        both = Results([make_result()]).merge([make_result(samples=7)], keep_other_sample_counts=keeps)
        assert sorted(record.samples for record in both) == kept


def test_a_number_that_is_not_finite_is_no_score():
    with pytest.raises(ValueError, match="value: got nan, expected a finite number"):
        make_result(value=float("nan"))
    assert [finite(value) for value in (0.5, float("inf"), "N/A", None, True)] == [0.5, *[None] * 4]


GOOD = {"format_version": 1, "results": [dataclasses.asdict(make_result())]}
RECORD = GOOD["results"][0]
BROKEN = [
    (json.dumps(GOOD)[:100], "expected a results file"),
    (json.dumps(GOOD | {"format_version": 99}), "format_version 99"),
    (json.dumps(GOOD | {"results": [RECORD | {"color": "red"}]}), "color: got an unknown name"),
]


@pytest.mark.parametrize("content, says", BROKEN)
def test_a_broken_file_is_refused_in_one_sentence(tmp_path, content, says):
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(ValueError, match=re.escape(says)):
        Results.read(tmp_path)


def test_the_table_shows_models_side_by_side_with_errors():
    models = {
        "teacher": [make_result(), make_result(metric="bpb", higher_is_better=False, value=1.9, stderr=None)],
        "mhla": [make_result(value=0.25, stderr=0.1), make_result(limit=5, samples=5, value=None)],
    }
    lines = render_table(models).splitlines()
    rows = [[cell.strip() for cell in re.split("  +", line)] for line in lines]
    assert rows[0] == ["task", "metric", "shots", "samples", "teacher", "mhla"] and len(rows) == 5
    assert ["copa", "acc ↑", "0", "100", "0.5000 ± 0.0500", "0.2500 ± 0.1000"] in rows
    assert ["copa", "bpb ↓", "0", "100", "1.9000"] in rows
    assert ["copa", "acc ↑", "0", "5 (limit)", "not finite"] in rows
    assert lines[0].index("mhla") + 4 == lines[1].rindex("-") + 1
    depths = {"a|b": [make_result(metric=f"acc_back_{back}") for back in (128, 64)]}
    markdown = render_table(depths, style="markdown").splitlines()
    assert markdown[0] == "| task | metric | shots | samples | a\\|b |"
    assert markdown[2] == "| copa | acc_back_64 ↑ | 0 | 100 | 0.5000 ± 0.0500 |" and "_128" in markdown[3]
    with pytest.raises(ValueError, match="style: got 'html'"):
        render_table(models, style="html")


FID = ["FID", "IS"], ["FID ↓", "IS ↑"]
JUDGE = ["precision (judge)"], ["imagenet_256\nprecision (judge) ↑"]


@pytest.mark.parametrize("metrics, titles", [FID, JUDGE])
def test_the_columns_of_a_recipe_are_drawn_or_else_every_score_and_speed(tmp_path, monkeypatch, metrics, titles):
    drawn, models = [], Comparison()
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: path.touch() or drawn.extend(figure.axes))
    for name, rate in (("teacher", 2.0), ("mhla", 1.0)):
        models[name] = [make_result(task="imagenet_256", metric=metric) for metric in metrics]
        for length in (1024, 256, 512):
            made = make_result(task="speed", metric=f"forward_ms_{length}", value=rate * length)
            models[name].append(made)
    models.columns = read_score_recipe("table_9_class_to_image").columns
    models.plot(tmp_path / "any.png")
    drawn = [axes for axes in drawn if axes.get_visible()]
    assert [axes.get_title("left") for axes in drawn] == [*titles, "speed\nforward_ms, by length ↓"]
    with pytest.raises(ValueError, match="plot: got no score"):
        Comparison(mhla=[make_result(value=None)]).plot(tmp_path / "b.png")
    curves = {curve.get_label(): curve.lines[0].get_xydata().tolist() for curve in drawn[-1].containers}
    assert curves == {"teacher": [[n, 2.0 * n] for n in (256, 512, 1024)], "mhla": [[n, n] for n in (256, 512, 1024)]}
