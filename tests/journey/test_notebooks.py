"""Every notebook runs from top to bottom, and shows what it says it shows."""

import os
import re
from pathlib import Path

import nbformat
from loopback_hub import USER, LoopbackHub
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


def run(name):
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    os.environ["OMP_NUM_THREADS"] = "1"
    place = {"metadata": {"path": str(NOTEBOOKS)}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=place).execute()
    printed = [o.get("text", "") for c in notebook.cells if c.cell_type == "code" for o in c.outputs]
    pictures = sum("image/png" in o.get("data", {}) for c in notebook.cells if c.cell_type == "code" for o in c.outputs)
    return "".join(printed), pictures


def test_language():
    printed, pictures = run("01_language.ipynb")
    assert "logits equal bit for bit: True" in printed and "three times the trained length: True" in printed
    assert "MHLALlamaForCausalLM | layers [0, 1, 2]" in printed and pictures == 1
    untrained = float(re.search(r"untrained (\d+\.\d+)", printed)[1])
    softmax, distilled = map(float, re.search(r"softmax (\d+\.\d+), MHLA (\d+\.\d+)", printed).groups())
    assert distilled < untrained and distilled < softmax + 0.5


def test_video():
    printed, pictures = run("02_video.ipynb")
    assert "MHLAWanTransformer3DModel | layers [1, 2]" in printed and pictures == 2
    assert "videos equal bit for bit: True" in printed and "as before saving: True" in printed
    assert "another size: (5, 48, 128, 3)" in printed
    untrained, distilled = map(float, re.search(r"untrained (\d\.\d+), distilled (\d\.\d+)", printed).groups())
    assert distilled < 0.5 * untrained


def test_convert_distil_share(monkeypatch, tmp_path):
    with LoopbackHub() as hub:
        for name, value in hub.environment(tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        printed, _ = run("03_convert_distil_share.ipynb")
        assert hub.repos == {} and hub.sent("DELETE", "/api/repos/delete") == 1
        assert hub.sent("POST", "/commit/main") == 1 and hub.sent("POST", "/tag/") == 1
        assert f"{hub.endpoint}/{USER}/mhla-notebook/commit/" in printed
    assert "MHLALlamaForCausalLM | layers [1, 2]" in printed and "logits equal bit for bit: True" in printed
    assert "nothing new: True" in printed and "heldout_recall" in printed and "heldout_generation" in printed


def test_why_it_works():
    """Collapse is seen: plain linear attention stops at rank d and above its floor, MHLA goes below that floor."""
    printed, pictures = run("04_why_it_works.ipynb")
    ranks = {int(n): tuple(map(int, rest)) for n, *rest in re.findall(
        r"N = (\d+): softmax rank (\d+), plain linear rank (\d+), MHLA rank (\d+)", printed
    )}  # fmt: skip
    assert ranks == {64: (64, 16, 64), 256: (256, 16, 256), 512: (512, 16, 256)}
    form = r"N = \d+: softmax (\S+), plain linear (\S+), MHLA (\S+), floor of rank 16 (\S+)"
    errors = [tuple(map(float, found)) for found in re.findall(form, printed)]
    assert len(errors) == 3 and [row[3] for row in errors] == sorted(row[3] for row in errors)
    for softmax, linear, mhla, floor in errors:
        assert softmax < mhla < linear and linear > floor
    assert all(mhla < floor for _, _, mhla, floor in errors[1:])
    rows = dict(re.findall(r"(softmax|plain linear|MHLA): accuracy \S+, rank (\S+) of 64", printed))
    assert float(rows["plain linear"]) <= 16 < float(rows["MHLA"]) and pictures == 2
