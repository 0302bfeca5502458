"""Compile the kernels for GPUs that are not there: what a launch would compile, with its registers and shared memory.

Run: TRITON_INTERPRET=0 python tests/ops/kernel_builds.py --chips 80 90 100 > docs/kernels.md [--quick]

The real launches are recorded (on CPU tensors, where nothing runs) and each is compiled with the types, divisibilities and
configuration it had. No driver is needed; ptxas and cuobjdump come with triton. Not for a process in the interpreter.
"""

import argparse
import contextlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mhla_hf.ops import triton_attend, triton_blocks, triton_configs, triton_decode, triton_quadratic, triton_summaries
from mhla_hf.ops.blocks import Blocks
from mhla_hf.ops.state import MHLAState
from mhla_hf.ops.triton_common import COUNTS, spell
from mhla_hf.ops.triton_operator import triton_backward, triton_forward

MODULES = [triton_attend, triton_blocks, triton_decode, triton_quadratic, triton_summaries]
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
KINDS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64"}
KINDS[torch.bool] = "i1"
SHARED_LIMIT = {80: 163, 86: 99, 90: 227, 100: 227, 120: 99}  # KiB a block may use
SHAPES = (
    *((torch.bfloat16, widths) for widths in ((64, 64), (32, 32), (72, 72), (128, 128), (128, 256), (256, 256))),
    *((torch.float16, widths) for widths in ((64, 64), (72, 72), (128, 128), (256, 256))),
    *((torch.float32, widths) for widths in ((32, 32), (64, 64), (72, 72), (128, 128), (256, 256))),
)
HEADER = """# Kernels: registers and shared memory

Made by `python tests/ops/kernel_builds.py --chips {chips}` with triton {version}: compiled offline, no GPU was used. Every
launch of a forward and a backward pass is compiled with the configuration it would have: without causality, in the
quadratic form, both also with relu inside, causal with blocks of 64 and of 256, without a denominator and with one of
other features, and decoding.
A cell is the most that any launch of a kernel needs, registers of a thread and KiB of shared memory of a block; "spills"
are bytes of registers that did not fit. All kernels with products of tiles use tensor cores.

The quadratic form is taken, without causality, where S * S < 260 * (S + max(K, V) * M) for S keys in M blocks and K, V up
to 128. fp32 products are three of tf32; gradients of fp16 tensors go through one of tf32, which reads fp16 numbers exactly
and has room for what is between them. Heads wider than 64 are then taken 64 lanes at a time; on sm_120 causal fp32 ones are
taken 32 at a time, and bf16 ones with blocks of more than 64 tokens 128 at a time.

Without causality a relu of q and k that nothing rotates afterwards is taken where the kernels read q and k (`feature_map` of
`mhla`; forms "mapped", in the same rows), and its derivative where they write gradients: the mapped features are neither
written nor kept. Where a rotation comes between, as in Wan and in language models, the map stays outside.

By hand: triton 3.6.0 compiles every shape for sm_90 without a spill too, and so does 3.7.1, which comes with torch 2.13
for CUDA. sm_80, sm_90, sm_100 and sm_120 must not spill; sm_86 still does in some shapes, where the table says so. AMD's
compiler gives no such counts. Not in the table: key masks, with which causal bf16 heads of 128 in blocks of 256 spill on
sm_80 and sm_120.
"""
WITHOUT_PRODUCTS = ("prepare", "decode")
SPILL_FREE = (80, 90, 100, 120)  # on the others the table shows what is left to tune
TENSOR_CORE = re.compile(r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma)")
WIDE_LOAD = re.compile(r"\b(cp\.async\.cg\.|ld\.global\S*\.(v2\.b64|v4\.b32|v4\.b64|v8\.b32)\b)")  # 16 bytes or more


@contextlib.contextmanager
def recorded_launches(chip):
    """Inside, launches of every module go into the list this gives, as (function, arguments, settings), for that chip."""
    found, kept = [], [(module, module.launch) for module in MODULES]
    chip_of = triton_configs.chip_of
    for module in MODULES:
        module.launch = lambda function, programs, device, *args, **settings: found.append((function, args, settings))
    triton_configs.chip_of = lambda device: (0, 0) if isinstance(chip, str) else divmod(chip, 10)
    try:
        yield found
    finally:
        triton_configs.chip_of = chip_of
        for module, launch in kept:
            module.launch = launch


def forms():
    """Name, causal, blocks and kind of denominator of the forms whose kernels differ."""
    return (
        ("bidirectional", False, Blocks.grid((32, 32), (2, 2)), "shared"),
        ("bidirectional, mapped", False, Blocks.grid((32, 32), (2, 2)), "shared"),
        ("quadratic", False, Blocks.grid((16, 16), (4, 4)), "shared"),
        ("quadratic, mapped", False, Blocks.grid((16, 16), (4, 4)), "shared"),
        ("causal 64", True, Blocks.sequence(256, 64), "shared"),
        ("causal 256", True, Blocks.sequence(512, 256), "shared"),
        ("causal 64, no denominator", True, Blocks.sequence(256, 64), "no"),
        ("causal 64, separate denominator", True, Blocks.sequence(256, 64), "separate"),
        ("decode", True, Blocks.sequence(256, 64), "shared"),
    )


def launches_of(form, dtype, width, value_width, chip):
    """What one forward and one backward pass launch."""
    name, causal, blocks, normalize = form
    q, k, v = (torch.zeros(2, blocks.length, h, d, dtype=dtype) for h, d in ((4, width), (2, width), (2, value_width)))
    mixing = torch.zeros(blocks.num_blocks, blocks.num_blocks)
    rest = (None, None, None, spell(blocks), spell(blocks), causal, normalize, 1.0, 1e-6 if "mapped" in name else None)
    dens = (q, k) if normalize == "separate" else (None, None)
    with recorded_launches(chip) as found:
        if name == "decode":
            state = MHLAState.empty(2, 2, 4, width, value_width, 64, dtype=dtype)
            triton_decode.triton_step(q[:, :1], k[:, :1], v[:, :1], mixing, state, 1.0, None, None)
            return found
        o, inv = triton_forward(q, k, v, mixing, *dens, *rest)
        triton_backward(torch.zeros_like(o), o, inv, q, k, v, mixing, *dens, *rest)
    return found


def typed(value, specialize=True):
    """(type, constant or None, divisible by 16) of an argument, or a list of those for a tuple."""
    if isinstance(value, tuple):
        return [typed(part) for part in value]
    if value is None:
        return "constexpr", (None,), False
    if isinstance(value, torch.Tensor):
        return f"*{KINDS[value.dtype]}", None, True
    if isinstance(value, float):
        return "fp32", None, False
    if value == 1 and specialize:
        return "constexpr", (1,), False
    return "i32" if abs(value) < 2**31 else "i64", None, specialize and value % 16 == 0


def source_of(function, arguments, settings):
    """The ASTSource that triton's launcher would make, and the options."""
    names = function.arg_names
    signature, constants, attributes = {}, {}, {}

    def note(entry, path):
        if isinstance(entry, list):
            return tuple(note(part, (*path, i)) for i, part in enumerate(entry))
        kind, constant, divisible = entry
        if constant is not None:
            constants[path] = constant[0]
        if divisible:
            attributes[path] = [["tt.divisibility", 16]]
        return kind

    for i, value in enumerate(arguments):
        signature[names[i]] = note(typed(value, names[i] not in COUNTS), (i,))
    options = {"enable_fp_fusion": True}
    for name, value in settings.items():
        if name in names:
            signature[name] = "constexpr"
            constants[(names.index(name),)] = value
        else:
            options[name] = value
    return ASTSource(function, signature, constants, attributes), options


def build(function, arguments, settings, chip):
    """Compile one launch; registers, stack bytes (spills), shared KiB, whether tensor cores and wide loads are used."""
    if isinstance(chip, str) and "PRECISION" in settings:
        settings = {**settings, "PRECISION": "ieee"}  # what `dot_precision` says where torch is built for AMD
    source, options = source_of(function, arguments, settings)
    target = GPUTarget("hip", chip, 64) if isinstance(chip, str) else GPUTarget("cuda", chip, 32)
    made = triton.compile(source, target=target, options=options)
    shared = made.metadata.shared / 1024
    if isinstance(chip, str):
        return {"shared": shared, "tensor_cores": "mfma" in made.asm["amdgcn"]}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    numbers = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout)
    return {
        "registers": int(numbers[1]),
        "stack": int(numbers[2]),
        "shared": shared,
        "tensor_cores": bool(TENSOR_CORE.search(made.asm["ptx"])),
        "wide_loads": bool(WIDE_LOAD.search(made.asm["ptx"])),
    }


def all_builds(chip, shapes):
    """Every different launch of the forms: (label, settings, outcome of `build`)."""
    seen = set()
    for form in forms():
        for dtype, (width, value_width) in shapes:
            for function, arguments, settings in launches_of(form, dtype, width, value_width, chip):
                entries = tuple(
                    repr(typed(a, n not in COUNTS)) for a, n in zip(arguments, function.arg_names, strict=False)
                )
                key = function.__name__, entries, tuple(sorted((n, str(s)) for n, s in settings.items()))
                if key not in seen:
                    seen.add(key)
                    label = f"{form[0]}, {KINDS[dtype]}, K {width}, V {value_width}: {describe(function, settings)}"
                    yield label, settings, build(function, arguments, settings, chip)


def faults(label, outcome, chip):
    """What a shipped kernel must not have."""
    found = []
    if outcome.get("stack", 0) > 0 and chip in SPILL_FREE:
        found.append(f"{outcome['stack']} bytes of spilled registers")
    limit = SHARED_LIMIT.get(chip, 64)
    if outcome["shared"] > limit:
        found.append(f"{outcome['shared']:.0f} KiB of shared memory, more than {limit}")
    if not outcome["tensor_cores"] and not label.endswith(WITHOUT_PRODUCTS):
        found.append("no tensor cores")
    width = int(re.search(r"K (\d+)", label)[1])
    if label.endswith(("mix", "mix_grads")) and width % 16 == 0 and not outcome.get("wide_loads", True):
        found.append("no loads of 16 bytes")
    return found


def describe(function, settings):
    """The kernel, and for the one with several roles which it is."""
    name = function.__name__.removesuffix("_kernel")
    if name not in ("attend", "quadratic"):
        return name
    role = {0: "values" if settings["REVERSE"] else "outputs", 1: "queries", 2: "keys"}[settings["RANK"]]
    return f"{name} ({role})"


def tabulate(builds):
    """Lines of the table for {chip: [(label, settings, outcome)]}: a row for each kernel, dtype and width."""
    cells = {}
    for chip, found in builds.items():
        for label, _, outcome in found:
            shape, kernel = label.split(": ")
            row = kernel, *shape.split(", ")[-3:-2], ", ".join(shape.split(", ")[-2:])
            cell = cells.setdefault(row, {}).setdefault(chip, [0, 0.0, 0])
            cell[:] = (
                max(cell[0], outcome.get("registers", 0)),
                max(cell[1], outcome["shared"]),
                max(cell[2], outcome.get("stack", 0)),
            )
    yield "| kernel | tensors | widths |" + "".join(f" {name_of(chip)} |" for chip in builds)
    yield "|---|---|---|" + "---|" * len(builds)
    for row in sorted(cells):
        yield f"| {' | '.join(row)} |" + "".join(f" {in_words(cells[row].get(chip))} |" for chip in builds)


def in_words(cell):
    """registers / KiB, and what spills."""
    if cell is None:
        return "-"
    return f"{cell[0]} / {cell[1]:.0f}" + (f", spills {cell[2]}" if cell[2] else "")


def name_of(chip):
    """sm_90, or the name of an AMD chip."""
    return chip if isinstance(chip, str) else f"sm_{chip}"


def main():
    """Print the table; exit code 1 if a kernel has a fault."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--chips", nargs="+", default=["90"], help="80, 86, 90, 100, 120 or gfx942")
    parser.add_argument("--quick", action="store_true", help="bf16 heads of width 64 only")
    arguments = parser.parse_args()
    builds, bad = {}, []
    for chip in (int(name) if name.isdigit() else name for name in arguments.chips):
        builds[chip] = []
        for label, settings, outcome in all_builds(chip, SHAPES[:1] if arguments.quick else SHAPES):
            builds[chip].append((label, settings, outcome))
            bad += [f"{name_of(chip)}, {label}: {fault}" for fault in faults(label, outcome, chip)]
    print(HEADER.format(version=triton.__version__, chips=" ".join(arguments.chips)))
    print("\n".join(tabulate(builds)))
    if bad:
        sys.exit("\n".join(bad))


if __name__ == "__main__":
    main()
