"""Compile the kernels for GPUs that are not there: what a launch would compile, with its registers and shared memory.

Run: TRITON_INTERPRET=0 python tests/ops/kernel_builds.py [--chips 80 90 100 ...] [--quick] > docs/kernels.md

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
    *((torch.bfloat16, widths) for widths in ((64, 64), (72, 72), (128, 128), (128, 256))),
    (torch.float16, (64, 64)),
    (torch.float32, (64, 64)),
)
HEADER = """# Kernels: registers and shared memory

Made by `python tests/ops/kernel_builds.py` with triton {version}: compiled offline, no GPU was used.
A spilled register shows as stack bytes; kernels without products of tiles use no tensor cores. The quadratic form
is taken, without causality, where S * S < 260 * (S + max(K, V) * M) for S keys in M blocks and K, V up to 128.

Causal heads whose width is no multiple of 32 are not listed: they work, and spill (144 bytes at 72 on sm_90). With
`--chips 80 100` the same kernels compile, some with spills: their tiles are tuned for sm_90 only.
"""
WITHOUT_PRODUCTS = ("prepare", "decode")
SPILL_FREE = (90,)  # on the others the table shows what is left to tune
TENSOR_CORE = re.compile(r"\b(HMMA|HGMMA|UTCHMMA|UTCQMMA|QGMMA)")


@contextlib.contextmanager
def recorded_launches(chip):
    """Inside, launches of every module go into the list this gives, as (function, arguments, settings), for that chip."""
    found, kept = [], [(module, module.launch) for module in MODULES]
    chip_of = triton_configs.chip_of
    for module in MODULES:
        module.launch = lambda function, programs, device, *args, **settings: found.append((function, args, settings))
    triton_configs.chip_of = lambda device: divmod(chip, 10)
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
        ("quadratic", False, Blocks.grid((16, 16), (4, 4)), "shared"),
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
    rest = (None, None, None, spell(blocks), spell(blocks), causal, normalize, 1.0)
    dens = (q, k) if normalize == "separate" else (None, None)
    with recorded_launches(chip) as found:
        if name == "decode":
            state = MHLAState.empty(2, 2, 4, width, value_width, 64, dtype=dtype)
            seen, own = torch.tensor([9, 9]), torch.ones(1, 1, 1, 1, 1)
            triton_decode.triton_decode(q[:, :1], None, [state.window_k, state.window_v], state, own, seen, 1.0, dtype)
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
    """Compile one launch; registers, stack bytes (spills), shared KiB, and whether tensor cores are used."""
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
        sass = subprocess.run([TOOLS / "cuobjdump", "-sass", file.name], capture_output=True, text=True, check=True)
    numbers = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout)
    return {
        "registers": int(numbers[1]),
        "stack": int(numbers[2]),
        "shared": shared,
        "tensor_cores": bool(TENSOR_CORE.search(sass.stdout)),
    }


def all_builds(chip, shapes):
    """Every different launch of the forms: (label, settings, outcome of `build`)."""
    seen = set()
    for form in forms():
        for dtype, (width, value_width) in shapes:
            if form[1] and width % 32 != 0:
                continue  # image models only; causal heads of such widths work, and spill up to 144 bytes on sm_90
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
    if outcome["stack"] > 0 and chip in SPILL_FREE:
        found.append(f"{outcome['stack']} bytes of spilled registers")
    if outcome["shared"] > SHARED_LIMIT[chip]:
        found.append(f"{outcome['shared']:.0f} KiB of shared memory, more than {SHARED_LIMIT[chip]}")
    if not outcome["tensor_cores"] and not label.endswith(WITHOUT_PRODUCTS):
        found.append("no tensor cores")
    return found


def describe(function, settings):
    """The kernel, and for the one with several roles which it is."""
    name = function.__name__.removesuffix("_kernel")
    if name not in ("attend", "quadratic"):
        return name
    role = {0: "values" if settings["REVERSE"] else "outputs", 1: "queries", 2: "keys"}[settings["RANK"]]
    return f"{name} ({role})"


def main():
    """Print the table; exit code 1 if a kernel has a fault."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--chips", type=int, nargs="+", default=[90])
    parser.add_argument("--quick", action="store_true", help="bf16 heads of width 64 only")
    arguments = parser.parse_args()
    print(HEADER.format(version=triton.__version__))
    bad = []
    for chip in arguments.chips:
        print(f"## sm_{chip}\n\n| kernel | warps, stages | registers | stack bytes | shared KiB | tensor cores |")
        print("|---|---|---|---|---|---|")
        for label, settings, outcome in all_builds(chip, SHAPES[:1] if arguments.quick else SHAPES):
            print(
                f"| {label} | {settings.get('num_warps', 4)}, {settings.get('num_stages', 3)} | {outcome['registers']} "
                f"| {outcome['stack']} | {outcome['shared']:.1f} | {'yes' if outcome['tensor_cores'] else 'no'} |",
                flush=True,
            )
            bad += [f"sm_{chip}, {label}: {fault}" for fault in faults(label, outcome, chip)]
        print()
    if bad:
        sys.exit("\n".join(bad))


if __name__ == "__main__":
    main()
