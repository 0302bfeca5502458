"""Run code in an isolated process, offline, where mhla_hf, Triton, and most of their dependencies cannot be
imported."""

import json
import os
import subprocess
import sys

from safetensors.torch import save_file

ABSENT = ("mhla_hf", "triton", "diffusers", "accelerate", "lm_eval")
COMPARE = """
import torch, transformers
from safetensors.torch import load_file
torch.set_num_threads(1)
inputs, expected, different = load_file("inputs.safetensors"), load_file("expected.safetensors"), []
for name in sorted(expected):
    folder, _, auto = name.rpartition("-")
    options = {"trust_remote_code": True, "output_loading_info": True}
    model, info = getattr(transformers, auto).from_pretrained(folder, **options)
    is_complete = not info["missing_keys"] and (auto == "AutoModel" or not info["unexpected_keys"])
    with torch.no_grad():
        output = model.eval()(**inputs)[0]
    is_remote = type(model).__module__.startswith("transformers_modules")
    if not (is_remote and is_complete and (output - expected[name]).abs().max() <= %s):
        different.append(name)
    model.save_pretrained("again")
print(json.dumps([different, [name for name in ("mhla_hf", "triton", "diffusers") if sys.modules[name]]]))
"""


def run_elsewhere(code, folder, absent=ABSENT, environment=None):
    """Run code in an isolated process in a folder, and return its last printed line, JSON, and the content of stderr."""
    env = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"}
    env |= {"OMP_NUM_THREADS": "1", "MKL_CBWR": os.environ["MKL_CBWR"], "PYTHONDONTWRITEBYTECODE": "1"}
    prologue = f"import gc, json, os, sys\nsys.modules.update(dict.fromkeys({absent!r}))\n"
    prologue += "gc.disable()\n"  # it would take a sixth of the time of imports
    options = {"env": env | (environment or {}), "stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    process = subprocess.run([sys.executable, "-c", prologue + code], cwd=folder, **options)
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout.splitlines()[-1]), process.stderr


def check_elsewhere(folder, inputs, expected, tolerance=0.0):
    """Check that models in a folder load completely in an isolated process, and give the outputs that `expected` has by
    "<folder>-<Auto class>"."""
    save_file(inputs, folder / "inputs.safetensors")
    save_file({name: x.contiguous() for name, x in expected.items()}, folder / "expected.safetensors")
    different, forbidden = run_elsewhere(COMPARE % tolerance, folder)[0]
    assert not different and not forbidden, (different, forbidden)
