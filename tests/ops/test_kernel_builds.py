"""What the kernels compile to on chips that are not here; in a process of its own, for this one runs the interpreter."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mhla_hf.ops.triton_configs import config_for

ROOT = Path(__file__).parents[2]


def table(*options):
    """Rows of the table that `kernel_builds.py` prints; fails with its words if a kernel has a fault."""
    command = [sys.executable, str(ROOT / "tests" / "ops" / "kernel_builds.py"), *options]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return re.findall(r"^\| \w.*\d / \d.*$", done.stdout, flags=re.MULTILINE)


CHIPS = ["80", "90", "100", "120", "gfx942"]


@pytest.mark.parametrize("chip", CHIPS)
def test_one_width_builds_without_spills(chip):
    """And mixing moves 16 bytes at a time on Hopper, or `kernel_builds.faults` has said so."""
    rows = table("--chips", chip, "--quick")
    assert len(rows) >= 14
    assert not any("spills" in row for row in rows)


@pytest.mark.parametrize("chip", [(8, 0), (8, 6), (9, 0), (10, 0), (12, 0), (0, 0)])
@pytest.mark.parametrize("kind", ["mix", "mix_grads"])
@pytest.mark.parametrize("dot", ["bf16", "fp32"])
def test_mixing_has_one_configuration_for_all_lengths(kind, dot, chip):
    configs = [config_for(kind, blocks, 64 * 64, dot, chip) for blocks in (1, 4, 9, 16, 32, 64, 100, 128, 256, 1000)]
    assert all(config == configs[0] for config in configs)


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_every_shape_builds(chip):
    """Tensor cores and shared memory on all; no spill where `kernel_builds.SPILL_FREE` says so."""
    assert len(table("--chips", chip)) >= 150
