"""A clean process: no mhla_hf, no triton, no diffusers, no network, its own Hugging Face home."""

import os
import subprocess
import sys

import pytest

BLOCKED = ("mhla_hf", "triton", "diffusers")


@pytest.fixture
def clean_python(tmp_path):
    """run(code, blocked=BLOCKED) -> stdout of `code` in a new process whose folder, path and caches are empty."""
    site = tmp_path / "clean_site"
    home = tmp_path / "clean_home"
    work = tmp_path / "clean_work"
    for folder in (site, home, work):
        folder.mkdir()

    def run(code, blocked=BLOCKED):
        lines = [f"sys.modules[{name!r}] = None" for name in blocked]
        (site / "sitecustomize.py").write_text("\n".join(["import sys", *lines, ""]))
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(site),
            "HF_HOME": str(home),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=work, env=environment)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    return run
