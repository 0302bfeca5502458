"""Compile the kernels for GPUs that are not there, and keep what came out: registers, shared memory and spills.

Run: TRITON_INTERPRET=0 python tests/ops/kernel_builds.py [--chips 80 90 100 120] [--jobs 2]

What tests/ops/kernel_builds.json does not hold of the kernels and tiles as they are now is compiled, that file and
docs/kernels.md are written, and the exit code is 1 if a kernel has a fault. It can be stopped at any point and goes on where
it was. --check compiles nothing and says what that file lacks, nothing if no source has changed since nothing did; --again
compiles one width anew (--again 4 a fourth of its launches) and says what differs. For another version of triton than the
table's: --record build/other.json, which leaves that file and the table alone.
No driver is needed; ptxas and cuobjdump come with triton.
"""

import argparse
import itertools
import json
import multiprocessing
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch
import triton
from kernel_launches import KINDS, SHAPES, WIDTHS, digest_of, shipped

ROOT = Path(__file__).parents[2]
RECORD, DOCUMENT = Path(__file__).with_suffix(".json"), ROOT / "docs" / "kernels.md"
UNFINISHED = ROOT / "build" / "kernel_builds"
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
SPILL_FREE = (80, 90, 100, 120, "gfx942")
CHIPS = (*SPILL_FREE, 86)  # there the table shows what is left to tune, without padding
SHARED_LIMIT = {80: 163, 86: 99, 90: 227, 100: 227, 120: 99, "gfx942": 64}  # KiB a block may use
HEADER = """# Kernels: registers and shared memory

Made by `python tests/ops/kernel_builds.py` with triton {version}: compiled offline, no GPU was used. The launches of a
forward and a backward pass are compiled with the configuration they would have, {count:,} of them. Without causality: grids,
and sequences (which grids cut into equal runs of tokens are too), in the linear and in the quadratic form, with and without
relu inside, and, where nothing is normalised, with fp32 values beside fp16 queries and keys, and with an RMSNorm inside.
Causal ones: with blocks of 16, 64 and 256, with left padding, alone or with a key mask, with packed sequences, and decoding.
Each with a denominator of the same features, with none, and with one of other features (or the official one); with and
without a key mask; with a key head for each query head and with one for two; with a mixing for all heads and one for each.
In bf16, fp16 and fp32, with heads of these widths of keys and values: {widths}.
Where widths are multiples of 16, or heads even in number, how many batches, heads, tokens and blocks there are changes
nothing of what is compiled.

A cell is the most that any launch of a kernel needs, registers of a thread and KiB of shared memory of a block; "spills"
are bytes of registers that did not fit. All kernels with products of tiles use tensor cores.

The quadratic form is taken, without causality, where S * S < 260 * (S + max(K, V) * M) for S keys in M blocks and K, V up
to 128: with 16 blocks and heads of 64, up to 662 tokens. That is a count of operations and bytes, not yet a measurement.
Where queries are a grid and keys a sequence, or the reverse, the linear form is taken always.

Not compiled: other widths, which take the tiles of the next power of two, and tensors of other dtypes beside each other
(layers of this package give q and k the dtype of v, also under autocast). There the tiles may spill.

fp32 products are three of tf32; gradients of fp16 tensors go through one of tf32, which reads fp16 numbers exactly and has
room for what is between them. In both, heads wider than 64 are taken 64 lanes at a time; on sm_120 causal fp32 ones
are taken 32 at a time, and bf16 ones 128 at a time where blocks have more than 64 tokens, or for gradients of normalised
keys.

Without causality a relu of q and k that nothing rotates afterwards is taken where the kernels read q and k (`feature_map` of
`mhla`), and its derivative where they write gradients: the mapped features are neither written nor kept. Where a rotation
comes between, as in Wan and in language models, the map stays outside.

The RMSNorm after a form without denominator (`output_norm` of `mhla`) is taken where the linear form writes outputs
("normed") if nothing is causal, no gradient is asked for, q, k and v are all bf16 or all fp16, and heads up to 128 wide: a
pass less over the output. With gradients, the output before the norm must be written in any case. Causal tiles hold 64
columns or fewer beside their running state, often 32, and a norm needs whole rows. There it is a call of torch's.

{all} must not spill; sm_86, which is compiled without padding and for heads of 64, still
spills where the table says so. sm_86 and sm_89 take the tiles of sm_80, with as many stages or fewer: of the 99 KiB
that they have, nothing takes more than the column of sm_80 says, which is {ampere} at most. The tests hold this table to the
kernels and tiles as they are: a changed one is compiled again before they pass. For sm_90 they were compiled by hand with
triton 3.6.0 too: none spills, all but those without products of tiles use tensor cores, and none takes more than 156 KiB
(`--record`, see CONTRIBUTING.md).

Causal heads of fp32, or with keys or values wider than 128, that have a key mask, have masked keys and values set to zero
outside the kernels, a pass over memory more: inside, a mask takes registers that are not left there. So have those of a
denominator of other features, which is of fp32 products. In all other cases the kernels read the mask.

"""
WITHOUT_PRODUCTS = ("prepare", "decode")
TENSOR_CORE = re.compile(r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma)")
AMD_COUNTS = ("vgpr_count", "private_segment_fixed_size")  # registers, bytes of spills of a thread
WIDE_LOAD = re.compile(r"\b(cp\.async\.cg\.|ld\.global\S*\.(v2\.b64|v4\.b32|v4\.b64|v8\.b32)\b)")  # 16 bytes or more


def build(launch):
    """Compile one; registers, KiB of shared memory and bytes of spills, and what else is wrong with it (or None)."""
    source, options = launch.source()
    made = triton.compile(source, target=launch.target, options=options)
    shared = made.metadata.shared / 1024
    if isinstance(launch.chip, str):
        code = made.asm["amdgcn"]
        registers, stack = (int(re.search(rf"\.{name}: +(\d+)", code)[1]) for name in AMD_COUNTS)
        return registers, shared, stack, fault_of(launch, shared, "mfma" in code, True)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout).groups())
    used = [bool(instruction.search(made.asm["ptx"])) for instruction in (TENSOR_CORE, WIDE_LOAD)]
    return registers, shared, stack, fault_of(launch, shared, *used)


def fault_of(launch, shared, tensor_cores, wide_loads):
    """What a shipped kernel must not have, but for spills; None if it has nothing of that."""
    if shared > SHARED_LIMIT[launch.chip]:
        return f"{shared:.0f} KiB of shared memory, more than {SHARED_LIMIT[launch.chip]}"
    if not tensor_cores and launch.kernel not in WITHOUT_PRODUCTS:
        return "no tensor cores"
    if launch.kernel in ("mix", "mix_grads") and not wide_loads and launch.type_of("wide")[2]:
        return "no loads of 16 bytes"
    return None


def name_of(chip):
    """sm_90, or the name of an AMD chip."""
    return chip if isinstance(chip, str) else f"sm_{chip}"


def shapes_of(chip):
    """All dtypes and widths; heads of 64 on sm_86, where spills are let pass."""
    return [shape for shape in SHAPES if chip != 86 or shape[1] == SHAPES[0][1]]


def rows_of(chip):
    """{row of the table: launches by digest} of all dtypes and widths of a chip."""
    return dict(itertools.chain(*(cells_of(chip, *shape).items() for shape in shapes_of(chip))))


def cells_of(chip, dtype, widths):
    """{row of the table: launches by digest} of a dtype and widths."""
    cells = {}
    for digest, launch in shipped(dtype, widths, chip, chip in SPILL_FREE).items():
        row = f"{launch.kernel} | {KINDS[dtype]} | K {widths[0]}, V {widths[1]}"
        cells.setdefault(row, {})[digest] = launch
    return cells


def read_record(path):
    """{row: {chip's name: [registers, KiB, bytes of spills, fault, digest]}}, the version of triton that was, and the
    `sources_digest` of when it lacked nothing."""
    record = json.loads(path.read_text()) if path.is_file() else {"cells": {}}
    return record["cells"], record.get("triton"), record.get("sources")


def sources_digest():
    """Changes with anything that decides what is launched: the operator's code, the forms, the chips, torch and triton."""
    files = [*sorted((ROOT / "mhla_hf" / "ops").glob("*.py")), ROOT / "tests" / "ops" / "kernel_launches.py"]
    texts = [file.read_text(encoding="utf-8") for file in files]
    return digest_of(texts, CHIPS, SPILL_FREE, torch.__version__.partition("+")[0], triton.__version__)


def is_current(record, chip, row, launches):
    """Whether the record of a cell is that of these launches."""
    return record.get(row, {}).get(name_of(chip), [None])[-1] == digest_of(sorted(launches))


def build_shape(chip, dtype, widths, record):
    """{row: cell of the record} of what the record lacks, and how many launches were compiled for it."""
    file = UNFINISHED / triton.__version__ / f"{name_of(chip)}-{KINDS[dtype]}-{widths[0]}-{widths[1]}.jsonl"
    known = dict(map(json.loads, file.read_text().splitlines())) if file.is_file() else {}
    cells, compiled = {}, 0
    for row, launches in cells_of(chip, dtype, widths).items():
        if is_current(record, chip, row, launches):
            continue
        for digest in launches.keys() - known.keys():
            known[digest] = build(launches[digest])
            compiled += 1
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a") as lines:
                lines.write(json.dumps([digest, known[digest]]) + "\n")
        cells[row] = cell_of(launches, [known[digest] for digest in launches])
    return cells, compiled


def cell_of(launches, built):
    """The most that any of what was built needs, and which launches these are."""
    registers, shared, stacks, faults = zip(*built, strict=True)
    fault = next(filter(None, faults), None)
    return [max(registers), round(max(shared)), max(stacks), fault, digest_of(sorted(launches))]


def build_all(chips, jobs, path):
    """The record at `path`, with what it lacked for these chips; written after every shape."""
    (record, version, _), start, done = read_record(path), time.monotonic(), 0
    record = record if version == triton.__version__ else {}
    units = [(chip, *shape) for chip in chips for shape in shapes_of(chip)]
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,))
    try:
        running = {pool.submit(build_shape, *unit, record): unit for unit in units}
        for future in as_completed(running):
            chip, dtype, widths = running[future]
            cells, compiled = future.result()
            for row, cell in cells.items():
                record.setdefault(row, {})[name_of(chip)] = cell
            write_record(record, path)
            done, spent = done + 1, time.monotonic() - start
            name = f"{name_of(chip)} {KINDS[dtype]} {widths}"
            left = spent / done * (len(units) - done)
            print(
                f"{done}/{len(units)} {name}: {compiled} compiled, {spent:.0f} s, some {left:.0f} s left",
                file=sys.stderr,
            )
    finally:
        pool.shutdown(cancel_futures=True)
    for chip in chips:
        for row in record.keys() - rows_of(chip).keys():
            record[row].pop(name_of(chip), None)
    record = {row: cells for row, cells in record.items() if cells}
    write_record(record, path, sources_digest() if set(CHIPS) <= set(chips) else None)
    return record


def write_record(record, path, sources=None):
    """Aside, then renamed; a row a line."""
    rows = ",\n".join(f"{json.dumps(row)}: {json.dumps(record[row])}" for row in sorted(record))
    aside = path.with_suffix(".new")
    head = json.dumps({"triton": triton.__version__, "sources": sources})[:-1]
    aside.write_text(f'{head}, "cells": {{\n{rows}\n}}}}\n')
    aside.replace(path)


def complaints(record, chips):
    """What is wrong in the record: cells with faults, spills where there must be none."""
    for row, cells in sorted(record.items()):
        for chip in chips:
            _, _, stack, fault, _ = cells.get(name_of(chip), (0, 0, 0, None, ""))
            if fault is not None:
                yield f"{name_of(chip)}, {row}: {fault}"
            if stack > 0 and chip in SPILL_FREE:
                yield f"{name_of(chip)}, {row}: {stack} bytes of spilled registers"


def lacking(record, chips):
    """What is not in the record, or not of the kernels as they are; rows of the record that no launch has any more."""
    for chip in chips:
        rows = rows_of(chip)
        for row, launches in rows.items():
            if not is_current(record, chip, row, launches):
                yield f"{name_of(chip)}, {row}: changed since it was compiled"
        for row in sorted(record.keys() - rows.keys()):
            if name_of(chip) in record[row]:
                yield f"{name_of(chip)}, {row}: of no launch"


def differences(record, chips, step):
    """Between the record and one width compiled now; of every `step`th launch only what is above the record."""
    for chip in chips:
        for row, launches in cells_of(chip, *SHAPES[0]).items():
            cell = cell_of(launches, [build(launches[digest]) for digest in sorted(launches)[::step]])
            recorded = record.get(row, {}).get(name_of(chip), [-1, -1, -1, None, None])
            above = any(now > then for now, then in zip(cell[:3], recorded[:3], strict=True))
            if above or cell[3:] != recorded[3:] or (step == 1 and cell != recorded):
                yield f"{name_of(chip)}, {row}: {cell}, and {recorded} in the record"


def document(record, count):
    """docs/kernels.md."""
    widths = ", ".join(f"{width}/{value_width}" for width, value_width in sorted(WIDTHS))
    free = ", ".join(map(name_of, SPILL_FREE))
    ampere = max(cells[name_of(80)][1] for cells in record.values() if name_of(80) in cells)
    text = HEADER.format(version=triton.__version__, count=count, widths=widths, all=free, ampere=ampere)
    names = [name_of(chip) for chip in CHIPS]
    lines = [
        "| kernel | tensors | widths |" + "".join(f" {name} |" for name in names),
        "|---|---|---|" + "---|" * len(names),
    ]
    for row in sorted(record):
        lines.append(f"| {row} |" + "".join(f" {in_words(record[row].get(name))} |" for name in names))
    return text + "\n".join(lines) + "\n"


def count_of(path):
    """How many launches the page at `path` says were compiled."""
    return int(re.search(r"([\d,]+) of them", path.read_text())[1].replace(",", ""))


def in_words(cell):
    """registers / KiB, and what spills."""
    if cell is None:
        return "-"
    return f"{cell[0]} / {cell[1]}" + (f", spills {cell[2]}" if cell[2] else "")


def main():
    """Bring the record up to date and write the table, or compare; exit code 1 with what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--chips", nargs="+", default=[str(chip) for chip in CHIPS], help="80, 86, 90, 100, 120, gfx942"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--check", action="store_true", help="say what the record lacks, and compile nothing")
    parser.add_argument(
        "--again",
        nargs="?",
        type=int,
        const=1,
        metavar="N",
        help="compile every Nth launch of bf16 heads of width 64 anew (default: 1) and compare with the record",
    )
    parser.add_argument("--record", type=Path, default=RECORD, help="the file; the table is written from the default")
    arguments = parser.parse_args()
    if arguments.again is not None and arguments.again < 1:
        parser.error(f"--again is {arguments.again}; expected a number of at least 1.")
    chips = [int(name) if name.isdigit() else name for name in arguments.chips]
    torch.set_num_threads(1)  # the tensors of the recorded calls are small
    if arguments.check or arguments.again:
        record, _, sources = read_record(arguments.record)
        if arguments.again:
            found = list(differences(record, chips, arguments.again))
        else:
            found = [] if sources == sources_digest() else list(lacking(record, chips))
        found += complaints(record, chips)
        count = count_of(DOCUMENT) if arguments.record == RECORD else None
        if count is not None and DOCUMENT.read_text() != document(record, count):
            found.append("docs/kernels.md is not the table of this record.")
    else:
        record = build_all(chips, arguments.jobs, arguments.record)
        if arguments.record.resolve() == RECORD:
            count = sum(len(shipped(*shape, chip, chip in SPILL_FREE)) for chip in CHIPS for shape in shapes_of(chip))
            DOCUMENT.write_text(document(record, count))
        found = list(complaints(record, chips))
    if found:
        sys.exit("\n".join([*found[:20], f"{len(found)} in all"]))


if __name__ == "__main__":
    main()
