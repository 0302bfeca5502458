"""Records of scores: written whole, read back as they were, merged by what they measure, shown side by side."""

import dataclasses
import json
import os
import re

import pytest
from small_scores import make_result

from mhla_hf.evaluation.records import Results, finite, render_table, score_rows

SAMPLES = make_result().samples


def test_a_file_gives_back_what_was_written_and_a_stop_leaves_the_old_one(tmp_path, monkeypatch):
    records = [make_result(), make_result(metric="ppl", value=None, stderr=None, limit=0.5, seconds=1.5, window=512)]
    path = Results(records).write(tmp_path)
    assert path == tmp_path / "results.json"
    assert Results.read(tmp_path) == records == Results.read(path)
    assert Results.read(tmp_path / "nothing.json") == []
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        Results([make_result(value=0.9)]).write(tmp_path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_merge_replaces_only_the_same_thing():
    old = Results([make_result(), make_result(shots=5), make_result(limit=10), make_result(metric="f1")])
    old.merge([make_result(value=0.75), make_result(task="arc")])
    assert {record.identity: record.value for record in old} == {
        ("arc", "acc", 0, None, SAMPLES): 0.5,
        ("copa", "acc", 0, None, SAMPLES): 0.75,
        ("copa", "acc", 0, 10, SAMPLES): 0.5,
        ("copa", "acc", 5, None, SAMPLES): 0.5,
        ("copa", "f1", 0, None, SAMPLES): 0.5,
    }
    assert old.find("copa", "acc", shots=0).value == 0.75
    assert old.find("copa", "acc", limit=10).value == 0.5
    assert old.find("copa", "acc", shots=3) is None
    both = Results([make_result(), make_result(task="arc", fingerprint="files:2")])
    assert [record.task for record in both.of("files:2")] == ["arc"]


def test_a_score_of_other_numbers_of_samples_is_replaced_or_stays_beside():
    """A task whose data changed is measured anew; images are made in any number."""
    for beside, kept in ((False, [7]), (True, [7, SAMPLES])):
        both = Results([make_result()]).merge([make_result(samples=7)], beside=beside)
        assert sorted(record.samples for record in both) == kept
    assert both.merge([make_result(samples=7, value=0.25)], beside=True).find("copa", "acc").samples == SAMPLES
    assert [record.value for record in both if record.samples == 7] == [0.25]


def test_a_number_that_is_not_finite_is_no_score():
    for name in ("value", "stderr"):
        with pytest.raises(ValueError, match=f"{name} is nan; expected a finite number"):
            make_result(**{name: float("nan")})
    assert [finite(value) for value in (1, 0.5)] == [1.0, 0.5]
    assert {finite(value) for value in (float("inf"), float("nan"), "N/A", None, True)} == {None}


def broken_files():
    good = {"format_version": 1, "results": [dataclasses.asdict(make_result())]}
    record = good["results"][0]
    yield "half", json.dumps(good)[:100], "is not a results file"
    yield "list", "[1]", "is not a results file"
    yield "bytes", b"\xff\xfe\x00", "is not a results file"
    yield "newer", json.dumps(good | {"format_version": 99}), "format_version 99"
    yield "unknown", json.dumps(good | {"results": [record | {"color": "red"}]}), "unknown 'color'"
    missing = {key: value for key, value in record.items() if key != "hardware"}
    yield "missing", json.dumps(good | {"results": [missing]}), "hardware is missing"
    yield "text", json.dumps(good | {"results": [record | {"value": "high"}]}), "value is 'high'; expected int | float"


@pytest.mark.parametrize(("content", "says"), [pytest.param(*case[1:], id=case[0]) for case in broken_files()])
def test_a_broken_file_is_refused_in_one_sentence(tmp_path, content, says):
    path = tmp_path / "results.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        Results.read(tmp_path)
    assert "\n" not in str(caught.value)


def test_the_table_shows_models_side_by_side_with_errors():
    models = {
        "teacher": [make_result(), make_result(metric="bpb", higher_is_better=False, value=1.9, stderr=None)],
        "mhla": [make_result(value=0.25, stderr=0.1), make_result(limit=5, samples=5, value=None)],
    }
    header, rows = score_rows(models)
    assert header == ["task", "metric", "shots", "samples", "teacher", "mhla"]
    assert ["copa", "acc ↑", "0", "100", "0.5000 ± 0.0500", "0.2500 ± 0.1000"] in rows
    assert ["copa", "bpb ↓", "0", "100", "1.9000", ""] in rows
    assert ["copa", "acc ↑", "0", "5 (limit)", "", "not finite"] in rows
    assert len(rows) == 3
    lines = render_table(models).splitlines()
    assert len({line.index("±") for line in lines if "0.5000" in line}) == 1 and len(lines) == 5
    assert lines[0].index("mhla") + 4 == lines[1].rindex("-") + 1
    depths = {"a|b": [make_result(metric=f"acc_back_{back}") for back in (128, 64)]}
    markdown = render_table(depths, style="markdown").splitlines()
    assert markdown[0] == "| task | metric | shots | samples | a\\|b |"
    assert markdown[2] == "| copa | acc_back_64 ↑ | 0 | 100 | 0.5000 ± 0.0500 |" and "_128" in markdown[3]
    with pytest.raises(ValueError, match="style is 'html'"):
        render_table(models, style="html")
