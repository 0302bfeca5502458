"""What README and docs claim: every table is what its JSON renders to, and every file and command they name exists."""

import json
import re
import shutil
from pathlib import Path

import pytest

from mhla_hf.bench import render_bench
from mhla_hf.cli import build_parser
from mhla_hf.demo.report import render_report
from mhla_hf.hub.card import check_card

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "model_cards" / "demo"
BENCH = ROOT / "docs" / "bench"


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def blocks(path):
    """The ```text blocks of a document."""
    return re.findall(r"```text\n(.*?)\n```", path.read_text(encoding="utf-8"), flags=re.DOTALL)


def plain(table):
    return "\n".join(line.rstrip() for line in table.strip("\n").splitlines())


def test_the_demo_table_is_measured():
    results = read(DEMO / "seeds.json")
    assert plain(render_report(results)) in blocks(ROOT / "README.md")
    assert results["seeds"] == ["0", "1", "2"] or results["seeds"] == [0, 1, 2]
    for key in ("hardware", "versions", "commit", "command"):
        assert results[key], key
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert results["hardware"] in text and results["command"] in text


def test_the_demo_holds_what_was_asked():
    """MHLA within 1.5 % of its teacher and the hybrid within 0.5 %, over three seeds; the teacher at 1.9 or better."""
    models = read(DEMO / "seeds.json")["models"]
    assert models["teacher"]["bits_per_byte"]["mean"] <= 1.9
    assert models["mhla"]["over_teacher_percent"]["mean"] <= 1.5
    assert models["hybrid"]["over_teacher_percent"]["mean"] <= 0.5


def test_the_bench_table_is_measured():
    record = read(BENCH / "bench.json")
    assert plain(render_bench(record)) in blocks(ROOT / "docs" / "performance.md")
    assert record["hardware"] in (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")


def test_a_wrong_number_is_found(tmp_path):
    """These tests can fail."""
    results = read(DEMO / "seeds.json")
    results["models"]["mhla"]["bits_per_byte"]["mean"] += 0.001
    assert plain(render_report(results)) not in blocks(ROOT / "README.md")


def test_the_card_is_proven_by_the_files_beside_it(tmp_path):
    check_card(DEMO, weights=False)
    copy = shutil.copytree(DEMO, tmp_path / "demo")
    card = (copy / "README.md").read_text(encoding="utf-8")
    number = re.search(r"\| heldout_bits_per_byte \| bits_per_byte ↓ \| 0 \| \d+ \| (\d\.\d+)", card)[1]
    (copy / "README.md").write_text(card.replace(number, "1.2345"), encoding="utf-8")
    with pytest.raises(ValueError, match=r"1\.2345"):
        check_card(copy, weights=False)


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "docs/performance.md", "conversion/README.md"])
def test_named_files_exist(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    named = set(
        re.findall(r"\b(?:mhla_hf|conversion|docs|model_cards|notebooks|tests|ops|nn|models|hub)/[\w./-]*\w", text)
    )
    assert named
    for name in named:
        assert (ROOT / name).exists() or (ROOT / "mhla_hf" / name).exists(), name
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (ROOT / document).parent.joinpath(target).exists(), target


def test_named_commands_exist():
    parser = build_parser()
    commands = set(parser._subparsers._group_actions[0].choices)
    text = "".join((ROOT / d).read_text(encoding="utf-8") for d in ("README.md", "docs/performance.md"))
    assert set(re.findall(r"mhla-hf (\w+)", text)) <= commands
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert set(re.findall(r"make ([\w-]+)", text)) - {"it"} <= targets
