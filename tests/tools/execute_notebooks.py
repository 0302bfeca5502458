"""Execute the notebooks and store their outputs: python -m tests.tools.execute_notebooks [NOTEBOOK ...] (`make notebooks`)

Each notebook runs in its own process and in its folder, with a Hub on the loopback interface. In the outputs, the
address of this Hub is replaced by huggingface.co, and stderr is left out.
"""

import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from .loopback_hub import LoopbackHub

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


def execute(path, home):
    """Execute a notebook with this Hugging Face home, and return it with the outputs of its cells, and its `LoopbackHub`."""
    notebook = nbformat.read(path, as_version=4)
    options = {"record_timing": False, "coalesce_streams": True, "resources": {"metadata": {"path": path.parent}}}
    client = NotebookClient(notebook, **options)
    with LoopbackHub() as hub:
        client.execute(env={**os.environ, **hub.environment(home), "OMP_NUM_THREADS": "1"})
    for cell in (cell for cell in notebook.cells if cell.cell_type == "code"):
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        for output in cell.outputs:
            if "text" in output:
                output.text = output.text.replace(hub.endpoint, "https://huggingface.co")
    return notebook, hub


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:] or sorted(NOTEBOOKS.glob("*.ipynb"))):
        with tempfile.TemporaryDirectory() as home:
            nbformat.write(execute(path.resolve(), home)[0], path)
        print(f"{path.name}: executed", flush=True)
