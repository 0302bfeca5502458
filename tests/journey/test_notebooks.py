"""Every notebook runs from top to bottom, and shows what it says it shows."""

import os
import re
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


def run(name):
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    os.environ["OMP_NUM_THREADS"] = "1"
    NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
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
