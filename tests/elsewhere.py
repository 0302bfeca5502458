"""Code run in a process where mhla_hf, triton and most of what it knows cannot be imported, offline, away from here."""

import subprocess
import sys

ABSENT = ("mhla_hf", "triton", "diffusers", "accelerate", "lm_eval")


def run_elsewhere(code, folder, absent=ABSENT, **options):
    """Run `code` with `folder` as home and working directory; the finished process, with its text.

    absent: packages that are not there. options: of subprocess.run.
    """
    env = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(folder),
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    head = f"import json, os, sys\nsys.modules.update(dict.fromkeys({absent!r}))\n"
    return subprocess.run(
        [sys.executable, "-c", head + code], cwd=folder, env=env, capture_output=True, text=True, **options
    )
