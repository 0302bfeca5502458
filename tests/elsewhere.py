"""Code run in a process where mhla_hf, triton and most of what it knows cannot be imported, offline, away from here."""

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
given, wanted, different = load_file("given.safetensors"), load_file("wanted.safetensors"), []
for name in sorted(wanted):
    folder, _, auto = name.rpartition("-")
    options = {"trust_remote_code": True, "output_loading_info": True}
    model, info = getattr(transformers, auto).from_pretrained(folder, **options)
    whole = not info["missing_keys"] and (auto == "AutoModel" or not info["unexpected_keys"])
    with torch.no_grad():
        found = model.eval()(**given)[0]
    own = type(model).__module__.startswith("transformers_modules")
    if not (own and whole and (found - wanted[name]).abs().max() <= %s):
        different.append(name)
    model.save_pretrained("again")
print(json.dumps([different, [name for name in ("mhla_hf", "triton", "diffusers") if sys.modules[name]]]))
"""


def run_elsewhere(code, folder, absent=ABSENT, environment=None):
    """Run `code` with `folder` as home and working directory; the last line it prints, as JSON, and what it complains of.

    absent: packages that are not there. environment: variables that it has besides.
    """
    env = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(folder),
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "MKL_CBWR": os.environ["MKL_CBWR"],
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    head = f"import json, os, sys\nsys.modules.update(dict.fromkeys({absent!r}))\n"
    options = {"env": env | (environment or {}), "stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", head + code], cwd=folder, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def check_elsewhere(folder, given, wanted, tolerance=0.0):
    """That models saved in `folder` load whole elsewhere by their Auto classes, by code of their own, and say the same.

    given: arguments of their forward. wanted: "<folder>-<Auto class>" -> what the model there must say.
    """
    save_file(given, folder / "given.safetensors")
    save_file({name: x.contiguous() for name, x in wanted.items()}, folder / "wanted.safetensors")
    different, forbidden = run_elsewhere(COMPARE % tolerance, folder)[0]
    assert not different and not forbidden, (different, forbidden)
