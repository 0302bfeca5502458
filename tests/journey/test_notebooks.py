"""Every notebook runs from top to bottom, shows what it says it shows, and keeps outputs for a reader."""

import json
import re
import tempfile
from pathlib import Path

import pytest
from tools.execute_notebooks import NOTEBOOKS, execute
from tools.loopback_hub import USER

NAMES = [path.name for path in sorted(NOTEBOOKS.glob("*.ipynb"))]


@pytest.fixture
def run(tmp_path):
    """run(name) -> what the cells print, the number of pictures, and the Hub."""

    def run(name):
        notebook, hub = execute(NOTEBOOKS / name, tmp_path)
        outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
        printed = "".join(output.get("text", "") for output in outputs)
        return printed, sum("image/png" in output.get("data", ()) for output in outputs), hub

    return run


@pytest.mark.parametrize("name", NAMES)
def test_its_outputs_are_kept(name):
    content = json.loads((NOTEBOOKS / name).read_text(encoding="utf-8"))
    cells = content["cells"]
    assert len(cells) <= 25 and "![" in "".join(cells[0]["source"]) and content["metadata"]["kernelspec"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]
    outputs = [output for cell in code for output in cell["outputs"]]
    assert len(outputs) > 3
    assert not {"error", "stderr"} & {output.get("name", output["output_type"]) for output in outputs}
    for place in ("127.0.0.1", "localhost", str(Path.home()), str(NOTEBOOKS.parent), tempfile.gettempdir()):
        assert place not in json.dumps(outputs)


def numbers(pattern, printed):
    return [float(number) for number in re.search(pattern, printed).groups()]


@pytest.mark.slow
def test_language(run):
    printed, pictures, _ = run("01_language.ipynb")
    assert "logits equal bit for bit: True" in printed and "three times the trained length: True" in printed
    assert "MHLALlamaForCausalLM | layers [0, 1, 2, 3]" in printed and pictures == 1
    softmax, distilled = numbers(r"softmax (\d+\.\d+), MHLA (\d+\.\d+)", printed)
    assert distilled < min(softmax + 0.5, *numbers(r"untrained (\d+\.\d+)", printed))


@pytest.mark.slow
def test_video(run):
    printed, pictures, _ = run("02_video.ipynb")
    assert "MHLAWanTransformer3DModel | layers [1, 2]" in printed and pictures == 2
    assert "videos equal bit for bit: True" in printed and "as before saving: True" in printed
    untrained, distilled = numbers(r"untrained (\d\.\d+), distilled (\d\.\d+)", printed)
    assert distilled < 0.5 * untrained


@pytest.mark.slow
def test_convert_distill_share(run):
    printed, _, hub = run("03_convert_distill_share.ipynb")
    assert hub.repos == {} and hub.sent("DELETE", "/api/repos/delete") == hub.sent("POST", "/commit/main") == 1
    assert f"https://huggingface.co/{USER}/mhla-notebook/commit/" in printed
    assert "MHLALlamaForCausalLM | layers [0, 2, 3]" in printed and "logits equal bit for bit: True" in printed
    scores = numbers(r"lookups_recall_448 +acc ↑ +0 +20 +(\S+) ± \S+ +(\S+) ±", printed)
    assert min(scores) > 0.9, "the layer that looks things up keeps softmax"


@pytest.mark.slow
def test_why_it_works(run):
    """Collapse is seen: plain linear attention stops at rank d, MHLA does not."""
    printed, pictures, _ = run("04_why_it_works.ipynb")
    ranks = re.findall(r"N = (\d+): softmax rank (\d+), plain linear rank (\d+), MHLA rank (\d+)", printed)
    assert [tuple(map(int, row)) for row in ranks] == [(64, 64, 16, 64), (256, 256, 16, 256), (512, 512, 16, 256)]
    form = r"N = \d+: softmax (\S+), plain linear (\S+), MHLA (\S+), floor of rank 16 (\S+)"
    for found in re.findall(form, printed):
        softmax, linear, mhla, floor = map(float, found)
        assert softmax < mhla < linear and linear > floor
    rows = dict(re.findall(r"(softmax|plain linear|MHLA): accuracy \S+, rank (\S+) of 64", printed))
    assert float(rows["plain linear"]) <= 16 < float(rows["MHLA"]) and pictures == 2
