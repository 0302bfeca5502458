"""docs/evidence.md: every table is what its JSON renders to, every verdict in words is the JSON's, every file exists.

Run: pytest tests/evidence/test_document.py
"""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from experiments.studies.rank import LENGTHS, WIDTHS, render_random_rank
from experiments.studies.report import judge_claim, over_seeds, render_study
from experiments.studies.scaling import render_scaling
from experiments.studies.study import read_study

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")


def read(name):
    return json.loads((ROOT / "docs" / "evidence" / name).read_text(encoding="utf-8"))


TABLES = {
    "rank/rank.json": render_random_rank,
    "images/results.json": render_study,
    "start/results.json": render_study,
    "cpe/results.json": render_study,
    "blocks/results.json": render_study,
    "resolution/results.json": render_study,
    "scaling/scaling.json": render_scaling,
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_measured(name):
    record = read(name)
    assert TABLES[name](record) in TEXT
    for key in ("hardware", "versions", "commit", "command", "date"):
        assert record[key], key
    assert record["command"] in TEXT and record["hardware"] in TEXT


def git(*arguments):
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)


@pytest.mark.skipif(
    not shutil.which("git") or git("rev-parse", "--is-shallow-repository").stdout != "false\n",
    reason="needs the whole history",
)
def test_the_commits_that_are_said_to_be_missing_are():
    assert "commits of 2026-11-20 named here and in the JSON are of a working history" in " ".join(TEXT.split())
    for path in (ROOT / "docs" / "evidence").rglob("*.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        commit, working = record["commit"].removesuffix("+changed"), record["date"].startswith("2026-11-20")
        assert (git("merge-base", "--is-ancestor", commit, "HEAD").returncode != 0) == working, path


@pytest.mark.parametrize("name", ["images", "start", "cpe", "blocks", "resolution"])
def test_what_was_concluded_follows_from_the_seeds(name):
    results = read(f"{name}/results.json")
    for claim in results["claims"]:
        again = judge_claim(results["rows"], claim["higher"], claim["lower"], claim["measure"])
        assert again == claim
    for row in results["rows"].values():
        assert over_seeds(row["accuracy"]["values"]) == row["accuracy"]
        assert row["by_epoch"][-1] == row["accuracy"]
    study = read_study(name)
    recipe = results["study"]
    for key in ("model", "mhla", "positions", "stage", "epochs", "rows"):
        assert json.loads(json.dumps(getattr(study, key))) == recipe[key], key


def test_the_ranks_are_those_of_table_1():
    rows = read("rank/rank.json")["rows"]
    assert {(row["tokens"], row["width"]) for row in rows} == {(n, d) for n in LENGTHS for d in WIDTHS}
    for row in rows:
        assert row["rank"] == row["bound"] and row["rank"]["linear"] <= row["width"]


def test_the_times_that_are_told_are_measured():
    rows = {row["tokens"]: row for row in read("scaling/scaling.json")["rows"]}
    taken = {cell["blocks"]: cell["seconds"] for cell in rows[4096]["mhla"]}
    more = {blocks: 100 * (seconds / taken[1] - 1) for blocks, seconds in taken.items()}
    assert f"4 blocks cost {more[4]:.1f} % and 16 blocks {more[16]:.1f} % more than plain linear" in TEXT
    seconds = [row["seconds"]["values"] for row in read("images/results.json")["rows"].values()]
    first, last = (sum(sum(values[own]) for values in seconds) for own in (slice(0, 3), slice(3, 5)))
    call = read("images/three_seeds.json")
    assert call["call"] == {"seconds": call["call"]["seconds"], "trained": 9} and call["seeds"] == [0, 1, 2]
    assert f"the nine runs of seeds 0 to 2 in {call['call']['seconds']:.0f} s" in TEXT
    assert f"took {first:.0f} s of training" in TEXT and f"of seeds 3 and 4 {last:.0f} s" in TEXT


def test_a_wrong_number_is_found():
    results = read("start/results.json")
    results["rows"]["MHLA"]["accuracy"]["mean"] += 0.002
    assert render_study(results) not in TEXT


def test_named_files_exist():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", TEXT):
        assert (ROOT / "docs" / target).exists(), target
