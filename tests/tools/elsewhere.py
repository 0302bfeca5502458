"""Load models in an isolated process, offline, where mhla_hf, Triton, and most of their dependencies cannot be imported."""

import json
import os
import subprocess
import sys
from pathlib import Path

from safetensors.torch import save_file

ABSENT = ("mhla_hf", "triton", "diffusers", "accelerate", "lm_eval")
COMPARE = """
import inspect, pickle, torch, transformers
from safetensors.torch import load_file
torch.set_num_threads(1)
inputs, expected, different = load_file("inputs.safetensors"), load_file("expected.safetensors"), []
for name in sorted(name for name in expected if not name.endswith(" text")):
    source, _, auto = name.rpartition("-")
    options = {"trust_remote_code": True, "revision": %r.get(source)}
    if is_of_diffusers := auto in ("DiffusionPipeline", "diffusers.AutoModel"):
        sys.path.append(%r)
        import diffusers
        from tools import tiny_pipelines
        whole = getattr(diffusers, auto.rpartition(".")[2]).from_pretrained(source, **options)
        tiny_pipelines.at_fresh_addresses(whole)
        model = getattr(whole, "transformer", whole)
        assert type(pickle.loads(pickle.dumps(model))) is type(model)
    else:
        whole, info = getattr(transformers, auto).from_pretrained(source, output_loading_info=True, **options)
        assert not info["missing_keys"] and (auto == "AutoModel" or not info["unexpected_keys"]), (name, info)
        model = whole.eval()
    with torch.no_grad():
        if auto == "DiffusionPipeline":
            output = tiny_pipelines.generate(whole)
        elif is_of_diffusers:
            output = model(**tiny_pipelines.inputs(source.rpartition("alone-")[2], batch=2)).sample
        else:
            known = inspect.signature(model.forward).parameters
            output = model(**{key: x for key, x in inputs.items() if key in known})[0]
    is_equal = (output - expected[name]).abs().max() <= %s
    if (text := expected.get(f"{name} text")) is not None:
        options = {"attention_mask": torch.ones_like(inputs["input_ids"]), "max_new_tokens": 6, "do_sample": False}
        is_equal &= torch.equal(model.generate(inputs["input_ids"], **options), text)
    home = sys.modules[type(model).__module__].__name__
    if not (is_equal and home.startswith(("transformers_modules.", "diffusers_modules.local.modeling_mhla_"))):
        different.append((name, home))
    whole.save_pretrained(f"again/{source}")
found = [different, [name for name in absent if sys.modules[name]]]
print("", json.dumps(found), sep="\\n")  # on a line of its own, also after a question that nobody answered
"""


def check_elsewhere(
    folder, inputs, expected, tolerance=0.0, *, first="", revisions=None, absent=ABSENT, environment=None
):
    """Check that models in a folder load completely in an isolated process, and give the outputs that `expected` has by
    "<source>-<Auto class>". They are saved again in again/<source>. Return the content of stderr.

    The source is a folder or a Hub id. " text" after a name stands for what the model generates. `first` is code that runs
    before, where `absent` modules are missing and `environment` is added to a bare one.
    """
    save_file(inputs, folder / "inputs.safetensors")
    save_file({name: x.contiguous().clone() for name, x in expected.items()}, folder / "expected.safetensors")
    env = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"}
    env |= {"OMP_NUM_THREADS": "1", "MKL_CBWR": os.environ["MKL_CBWR"], "PYTHONDONTWRITEBYTECODE": "1"}
    code = f"import gc, json, os, sys\nabsent = {absent!r}\nsys.modules.update(dict.fromkeys(absent))\n"
    code += "gc.disable()\n"  # it would take a sixth of the time of imports
    code += first + COMPARE % (revisions or {}, str(Path(__file__).parents[1]), tolerance)
    options = {"env": env | (environment or {}), "stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    process = subprocess.run([sys.executable, "-c", code], cwd=folder, **options)
    assert process.returncode == 0, process.stderr[-3000:]
    different, forbidden = json.loads(process.stdout.splitlines()[-1])
    assert not different and not forbidden, (different, forbidden)
    return process.stderr
