"""Code run in a process where mhla_hf, triton and most of what it knows cannot be imported, offline, away from here."""

import subprocess
import sys

HEAD = """
import importlib.util, json, os, sys
ABSENT = ("mhla_hf", "triton", "diffusers", "accelerate", "lm_eval")
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name.split(".")[0] in ABSENT else find_spec(name, package)
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
sys.path[:] = [p for p in sys.path if not os.path.isdir(os.path.join(p, "mhla_hf"))]
"""


def run_elsewhere(code, folder, **options):
    """Run `code` after `HEAD` with `folder` as home and working directory; the finished process, with its text.

    options: of subprocess.run.
    """
    env = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(folder),
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-c", HEAD + code]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, **options)
