"""What the kernels compile to on chips that are not here; in processes of their own, for this one runs the interpreter."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from mhla_hf.ops import triton_configs
from mhla_hf.ops.triton_configs import config_for

OPS = Path(__file__).parent
ONE_COMPILATION = """
import torch
from kernel_launches import *

forms = {
    "sequence": [Form(Blocks.sequence(n, 64), True) for n in (1, 40, 64, 65, 512, 1000, 1024, 4096)],
    "long blocks": [Form(Blocks.sequence(n, 256), True, "no", "mask") for n in (40, 256, 300, 4096)],
    "packed": [Form(Blocks.sequence(n, 64), True, "shared", "packed") for n in (256, 300, 1024)],
    "image": [Form(Blocks.grid((n, m), (k, k)), mapped=True) for n, m, k in ((32, 40, 2), (64, 64, 2), (99, 48, 6))],
    "video": [Form(Blocks.grid((n, 30, 52), (n // 3, 3, 4)), normalize="separate") for n in (9, 12, 21)],
    "heads": [Form(Blocks.grid((40, 6), (4, 2)), normalize="separate", heads=h, groups=h) for h in (1, 4, 6, 16)],
    "ragged video": [Form(Blocks.grid((n, 5, 7), (2, 3, 4)), normalize="separate") for n in (48, 50, 51)],
    "official": [Form(Blocks.grid((n, m), (2, 2)), normalize="official") for n, m in ((40, 32), (34, 38), (42, 44))],
    **{f"causal, {padding}": [Form(Blocks.sequence(n, 64), True, "separate", padding, heads=h, groups=h)
                              for n, h in ((999, 16), (1001, 6), (1024, 4))]
       for padding in ("", "mask", "starts", "starts, mask")},
    "short": [Form(Blocks.grid((n, n), (n // 4, n // 4))) for n in (8, 9, 12, 16)],
}
for name, same in forms.items():
    launches = [
        {Launch(f, types_of(f.arg_names, a), tuple(sorted(s.items())), 90).digest
         for f, a, s in recorded(form, torch.bfloat16, (64, 64), 90)}
        for form in same
    ]
    assert all(launches[0] == others for others in launches), (name, list(map(len, launches)))
"""


def run(*arguments):
    """A process that compiles, or would; fails with its words."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": f"{OPS.parents[1]}{os.pathsep}{OPS}"}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_table_is_of_these_kernels():
    """Every launch that docs/kernels.md is about was compiled as it is now, and none has a fault."""
    run(str(OPS / "kernel_builds.py"), "--check")


@pytest.mark.skipif(
    triton.__version__ != json.loads((OPS / "kernel_builds.json").read_text())["triton"],
    reason="the table is of another version of triton",
)
@pytest.mark.parametrize("chip", ["80", "90", "100", "120", "gfx942"])
def test_one_width_compiles_to_what_the_table_says(chip):
    """A sixteenth of its launches; all would take minutes."""
    run(str(OPS / "kernel_builds.py"), "--again", "16", "--chips", chip)


def test_one_compilation_for_all_lengths():
    run("-c", ONE_COMPILATION)


@pytest.mark.parametrize("chip", [(8, 0), (8, 6), (9, 0), (10, 0), (12, 0), (0, 0)])
@pytest.mark.parametrize("kind", ["mix", "mix_grads"])
@pytest.mark.parametrize("dot", ["bf16", "fp32"])
def test_mixing_has_one_configuration_for_all_lengths(kind, dot, chip):
    configs = [config_for(kind, blocks, 64 * 64, dot, chip) for blocks in (1, 4, 9, 16, 32, 64, 100, 128, 256, 1000)]
    assert all(config == configs[0] for config in configs)


@pytest.mark.parametrize("chip", [(8, 6), (8, 9)])
def test_chips_with_99_kib_take_the_tiles_of_sm_80(chip, monkeypatch):
    """With as many stages or fewer, so no more shared memory than the table says of sm_80."""
    monkeypatch.setattr(triton_configs, "INTERPRETED", False)
    roles = ["attend", *(f"attend_{length}{role}" for length in ("own", "long") for role in ("", "_queries", "_keys"))]
    kinds = ["summaries", "mix", "mix_grads", "quadratic", "normed", "close", *roles]
    shapes = itertools.product(kinds, (32, 64, 72, 96, 128, 256), ("bf16", "fp16", "tf32", "fp32"), (False, True))
    for kind, width, dot, padded in shapes:
        ours, theirs = (config_for.__wrapped__(kind, width, width, dot, at, padded) for at in (chip, (8, 0)))
        stages = ours["num_stages"]
        assert stages <= theirs["num_stages"] and ours == {**theirs, "num_stages": stages}, (kind, width, dot, padded)
    record = json.loads((OPS / "kernel_builds.json").read_text())["cells"]
    assert max(cells["sm_80"][1] for cells in record.values()) <= 99
