"""What triton's compiler makes of the kernels for chips that are not here; in processes without the interpreter."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CHIPS = ("80", "90", "100", "120", "gfx942")
TUNING = """
from types import SimpleNamespace
import torch
import mhla_hf.ops.triton.tuning as tuning
from mhla_hf.ops.triton.attend import forward_kernel
from mhla_hf.ops.triton.summaries import summaries_kernel
from offline import *

launched, tried, launch = [], [], TunedKernel.__getitem__
main("causal-64:80")  # really compiled, for a chip of its own

def keep(self, key, signature, device, constants, options, attributes, warmup):
    self.device_caches[device][0][key] = options
    return options

def bench(run, quantiles):
    run()
    tried.append(launched[-1])
    return [float(len(tried))] * 3

JITFunction._do_compile = keep
compile_only(launched)
TunedKernel.__getitem__ = launch
Chips.get_benchmarker = lambda self: bench
room = SimpleNamespace(shared_memory_per_block_optin=99 * 1024)
torch.cuda.current_device, torch.cuda.get_device_properties = lambda: 0, lambda device: room
driver.active.device = list(CHIPS).index("120")

shape = (64, 64), True, True
call(Blocks.sequence(256, 64), *shape)
configs = forward_kernel.configurations({"K": 64, "V": 64, "CAUSAL": True, "DOT": "bf16"})
assert sum(name == "forward_kernel" for name, _ in tried) == len(configs) == 4
before = len(tried)
call(Blocks.sequence(1000, 64), *shape)
assert len(tried) == before, "tried again for another length"
found = next(iter(forward_kernel.tuner.cache.values())).all_kwargs()
assert found == {**configs[0], "num_ctas": 1} or found == configs[0], found
fits = summaries_kernel.choices({"K": 256, "V": 256, "CAUSAL": False, "DOT": "bf16"})
sizes = [tuning.shared_bytes("bf16", {**config.kwargs, "num_stages": config.num_stages}) for config in fits]
assert sizes and max(sizes) <= 99 * 1024
"""


def run(*arguments, **environment):
    """The output of a process that compiles; fails with its words."""
    places = f"{HERE.parents[2]}{os.pathsep}{HERE}"
    environment = {**os.environ, **environment, "TRITON_INTERPRET": "0", "PYTHONPATH": places}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_every_shape_compiles(chip):
    run(HERE / "offline.py", f"all:{chip}")


def test_tiles_are_tried_once_for_all_lengths(tmp_path):
    """With a clock for which the first configuration is the fastest; what comes out is kept on disk."""
    said = run("-c", TUNING, TRITON_CACHE_DIR=str(tmp_path))
    assert re.match(r"causal-64 80 \w+: \d+ KiB", said)
    assert len(list(tmp_path.glob("*/*.autotune.json"))) >= 5
