"""lm-eval over two processes of `accelerate launch`: the records of one."""

import json

import pytest
from tools.launched import launch
from tools.small_scores import HELD_OUT, WINDOW, save_mhla, small_tokenizer
from tools.small_tasks import make_tasks

SAME = ("task", "metric", "stderr", "samples", "shots", "task_hash", "fingerprint", "seed", "window", "dtype")


@pytest.mark.slow
def test_two_processes_write_the_records_of_one(tmp_path):
    make_tasks(tmp_path / "tasks", HELD_OUT, small_tokenizer(), WINDOW, items=17)
    save_mhla(tmp_path / "mhla")
    tasks = ",".join(f"here_{name}" for name in ("bits_per_byte", "cloze", "generation", "recall"))
    found = []
    for setup, processes in ((None, 1), ("ddp", 2)):
        arguments = ("--tasks", tasks, "--include-path", "tasks", "--out", f"{processes}.json", "--quiet")
        code, text = launch(tmp_path, setup, processes, "evaluate", "mhla", *arguments)
        assert code == 0, text
        assert text.count("task   ") == 1  # the table, once
        found.append(json.loads((tmp_path / f"{processes}.json").read_text())["results"])
    one, two = (sorted(records, key=lambda record: (record["task"], record["metric"])) for records in found)
    assert len(one) == len(two) > 3
    for a, b in zip(one, two, strict=True):
        assert a["value"] == pytest.approx(b["value"], rel=1e-6)
        for key in SAME:
            assert a[key] == (pytest.approx(b[key], rel=1e-5) if key == "stderr" else b[key]), (a["task"], key)
