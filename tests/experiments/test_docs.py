"""README and docs: every table is what its JSON renders to, and every file and command they name exists."""

import dataclasses
import json
import re

import pytest

from experiments import docs
from experiments.docs import ADAPTER_CARD, DOCUMENTS, PAGES, ROOT, TABLE, render
from mhla_hf.cli.main import build_parser
from mhla_hf.training.recipe import STAGE_TYPES, Options, Recipe

DOCUMENTED = ("README.md", ADAPTER_CARD, "CONTRIBUTING.md", "conversion/README.md", *PAGES)
TEXTS = {path: (ROOT / path).read_text(encoding="utf-8") for path in DOCUMENTED}
LONGEST = 1200  # words of a page that somebody wrote


@pytest.mark.parametrize("document", sorted({*DOCUMENTS, *PAGES}))
def test_every_table_is_rendered_from_its_file_and_no_page_is_too_long_to_read(document):
    assert render(TEXTS[document]) == TEXTS[document]
    assert document not in PAGES or len(TABLE.sub("", TEXTS[document]).split()) <= LONGEST


def test_the_readme_comes_to_the_point():
    text = TEXTS["README.md"]
    assert {"make demo", "make test"} <= {*re.findall(r"^make \w+", text, flags=re.MULTILINE)}
    assert len(text.split()) <= 900 and "```python" in text.splitlines()[:40]
    shown = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
    for table in re.findall(r"(?:^\|.*\n)+", shown, flags=re.MULTILINE):
        head, _, *rows = table.splitlines()
        assert len(rows) <= 5 and max(map(len, (head, *rows))) <= 90, table


def test_every_picture_and_record_is_used():
    users = [*PAGES, "README.md", *(f"notebooks/{path.name}" for path in (ROOT / "notebooks").glob("*.ipynb"))]
    text = "".join((ROOT / name).read_text(encoding="utf-8") for name in users)
    for path in (ROOT / "docs").rglob("*.*"):
        assert path.suffix == ".md" or f"{path.parent.name}/{path.name}" in text, path


def test_the_picture_compares_with_the_fair_window_first(monkeypatch):
    drawn = []
    monkeypatch.setattr(docs, "plot_gains", lambda path, time, cache, quality, titles: drawn.append(quality))
    docs.draw_gains(ROOT / "docs/gains.png")
    assert [*drawn[0]] == ["softmax", "MHLA", "6 heads, 256 salient tokens", "window of as many bytes"]
    rows = json.loads((ROOT / "docs/language/heads.json").read_text())["rows"]
    bytes_of = {row["form"]: row["bytes"]["8192"] for row in rows if row["heads"] == 15}
    assert abs(bytes_of["wide window"] - bytes_of["salient 128"]) < 75 * 64 * 256  # a block of each other head


def test_every_key_of_a_recipe_is_explained():
    fields = {field.name for kind in (Recipe, Options, *STAGE_TYPES.values()) for field in dataclasses.fields(kind)}
    assert sorted(fields - set(re.findall(r"`(\w+)`", TEXTS["docs/recipes.md"]))) == []


@pytest.mark.parametrize("document", TEXTS)
def test_named_files_exist(document):
    rooms = "mhla_hf|conversion|experiments|docs|model_cards|notebooks|tests|ops|nn|models|hub"
    named = set(re.findall(rf"(?<!\w/)\b(?:{rooms})/[\w./-]*\w", TEXTS[document])) - {"docs/bench/gpu.json"}
    for name in named:
        assert (ROOT / name).exists() or (ROOT / "mhla_hf" / name).exists(), name
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", TEXTS[document]):
        target = re.sub(r"^\.\./\.\./actions/(workflows/[\w.]+).*", r".github/\1", target)  # a badge, on GitHub
        assert (ROOT / document).parent.joinpath(target).exists(), target


def test_named_commands_exist():
    """The evidence names those that measured it, at commits that had other ones."""
    everything = "\n".join(TABLE.sub("", text) for text in TEXTS.values())
    text = "\n".join(TABLE.sub("", text) for name, text in TEXTS.items() if not name.startswith("docs/evidence"))
    commands = set(build_parser()._subparsers._group_actions[0].choices)
    assert set(re.findall(r"mhla-hf (\w+)", text)) <= commands
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert set(re.findall(r"`make ([\w-]+)", text)) <= targets
    for module in re.findall(r"python -m (experiments[\w.]*)", everything):
        place = ROOT / module.rstrip(".").replace(".", "/")
        assert (place / "__main__.py").is_file() or place.with_suffix(".py").is_file(), module


def test_triton_is_left_to_torch():
    """torch's CUDA builds ask for one version of triton; a pin of another would make them impossible to install."""
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert "torch==" in pins and "triton==" not in pins
