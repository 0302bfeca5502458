"""The kernels compiled for GPUs that are not there, as launches would compile them, with the first configuration.

Run: TRITON_INTERPRET=0 python tests/ops/triton/offline.py causal-64:90 wan:gfx942
"""

import re
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from mhla_hf.ops.blocks import Blocks
from mhla_hf.ops.triton.common import blocks_as_numbers
from mhla_hf.ops.triton.register import triton_backward, triton_forward
from mhla_hf.ops.triton.tuning import TunedKernel

CHIPS = {"80": 163, "90": 227, "100": 227, "120": 99, "gfx942": 64}  # KiB of shared memory a block may use
GRID, VIDEO = Blocks.grid((16, 16), (4, 4)), Blocks.grid((3, 10, 20), (3, 5, 10))
SHAPES = {  # blocks, widths, causal, normalize
    "causal-64": (Blocks.sequence(256, 64), (64, 64), True, False),
    "causal-128": (Blocks.sequence(256, 64), (128, 128), True, False),
    "lm-340m": (Blocks.sequence(256, 64), (128, 256), True, False),
    "long-blocks": (Blocks.sequence(512, 256), (64, 64), True, True),
    "dit": (GRID, (64, 64), False, True),
    "dit-xl": (GRID, (72, 72), False, True),
    "sana": (GRID, (32, 32), False, True),
    "wan": (VIDEO, (128, 128), False, False),
}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Chips:
    """A driver for chips that are not there: device i is the i-th of CHIPS."""

    device = 0

    def get_current_device(self):
        return self.device

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        chip = list(CHIPS)[self.device]
        return GPUTarget("hip", chip, 64) if chip.startswith("gfx") else GPUTarget("cuda", int(chip), 32)


def compile_only(found):
    """From now on launches only compile, for the chip of the active driver, and go into `found` as (name, compiled)."""
    run = JITFunction.run

    def warm_up(self, *args, grid, warmup, **kwargs):
        found.append((self.fn.__name__, run(self, *args, grid=grid, warmup=True, **kwargs)))

    def first(self, grid):
        launch = partial(self.jitted[grid], enable_fp_fusion=True)
        return lambda **arguments: launch(**arguments, **self.configurations(arguments)[0])

    JITFunction.run, TunedKernel.__getitem__ = warm_up, first
    driver.set_active(Chips())


def call(blocks, widths, causal, normalize, *, batch=2, **padding):
    """All launches of a forward and a backward pass."""
    shape, dtype = (batch, blocks.length, 2), torch.bfloat16
    q, k, v = (torch.zeros(*shape, width, dtype=dtype) for width in (widths[0], *widths))
    mixing, cut = torch.zeros(blocks.num_blocks, blocks.num_blocks), blocks_as_numbers(blocks)
    places = [padding.get(name) for name in ("key_mask", "starts", "edges")]
    rest = (*places, cut, cut, causal, normalize, 1.0, dtype)
    o, inv = triton_forward(q, k, v, mixing, *rest)
    triton_backward(torch.zeros_like(o), o, inv, q, k, v, mixing, *rest)


def spilled(compiled, chip):
    """Registers, and bytes of them that did not fit."""
    if chip.startswith("gfx"):
        names = ("vgpr_count", "private_segment_fixed_size")
        return [int(re.search(rf"\.{name}: +(\d+)", compiled.asm["amdgcn"])[1]) for name in names]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        used = [TOOLS / "cuobjdump", "-res-usage", file.name]
        usage = subprocess.run(used, capture_output=True, text=True, check=True).stdout
    return [int(x) for x in re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()]


def main(*pairs):
    """Compile shapes for chips, each "shape:chip" or "all:chip"; a line for each kernel; an error if one does not fit."""
    found, pairs = [], [pair.split(":") for pair in pairs]
    pairs = [(own, chip) for name, chip in pairs for own in (SHAPES if name == "all" else [name])]
    compile_only(found)
    for shape, chip in pairs:
        driver.active.device = list(CHIPS).index(chip)
        torch.version.hip = "6" if chip.startswith("gfx") else None
        found.clear()
        call(*SHAPES[shape])
        for name, compiled in dict(found).items():
            code = compiled.asm["amdgcn" if chip.startswith("gfx") else "ptx"]
            cores = bool(re.search(r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma|v_mfma)", code))
            registers, spill = spilled(compiled, chip)
            shared = compiled.metadata.shared / 1024
            print(f"{shape} {chip} {name}: {registers} registers, {spill} bytes spilled, {shared:.0f} KiB", flush=True)
            assert shared <= CHIPS[chip], f"more than {CHIPS[chip]} KiB of shared memory"
            assert cores, "no tensor cores"


if __name__ == "__main__":
    main(*sys.argv[1:])
