"""Speed, against what a user would pick instead: torch's fused softmax attention, plain linear attention, fla where it is
installed.

Nothing is timed before it agrees with its definition in fp64. The competitors take turns, round after round in one process,
and the fastest round of each counts, so that a busy moment of the machine hits all of them or none. On a GPU an operator is
captured as a CUDA graph, so that kernels are compared and not Python; decoding runs as users run it. What is wrong, fails or
does not fit the memory is said in place of its time, and leaves the others their turn.
"""

import functools
import time
from pathlib import Path

import torch
from tqdm import tqdm

from ..checkpoints.files import write_json
from ..checkpoints.load import choose_device
from ..checkpoints.machine import describe_run
from ..ops.blocks import Blocks
from .cases import Decoding, Operator

FORMAT_VERSION = 2
TOLERANCES = {"float32": 1e-5, "bfloat16": 1.5e-2, "float16": 1.5e-2}
TURN = 0.02  # seconds that a competitor's turn takes at least
NO_ROOM = "did not fit the memory of the device"


def quick_cases():
    """Causal attention and decoding in fp32, by length: a minute or two on a CPU."""
    lengths, heads, width, size = (512, 2048, 8192), 4, 64, 64
    operators = [
        Operator(f"{n:,} tokens", Blocks.sequence(n, size), 1, heads, (width, width), causal=True, dtype="float32")
        for n in lengths
    ]
    return [*operators, *(Decoding(n, heads, width, size, "float32") for n in lengths)]


def decode_cases():
    """Decoding in bf16 after long texts: meant for a GPU."""
    return [Decoding(length) for length in (8192, 32768, 131072, 1048576)]


SUITES = {"quick": quick_cases, "decode": decode_cases}


def run_bench(suite="quick", *, device="cpu", threads=1, seed=0, rounds=5, out=None, progress=True, command=None):
    """Check, time and compare.

    Args:
        suite: "quick" (causal attention and decoding at three lengths, a minute or two), "decode" (64 tokens more
            after 8k to 1M, bf16, meant for a GPU), or a list of cases.
        device: where. threads: CPU threads while timing; the old number is restored. seed: of the inputs.
        rounds: how often every competitor takes its turn.
        out: JSON file, which grows by one case after another, so that one can stop it. progress: show a bar on stderr.

    Returns:
        A dict that goes to JSON as it is: "rows", each with "case", "what", "ms" (competitor -> milliseconds), "error" (the
        largest relative error of each that was found before) and "failed" (competitor -> why it has no time); versions,
        hardware, commit, seed, command, date.

    Raises:
        ValueError: unknown suite, threads below 1, or a device that torch cannot use. OSError: `out` cannot be written.
    """
    if isinstance(suite, str) and suite not in SUITES:
        raise ValueError(f"suite is {suite!r}; expected one of {', '.join(SUITES)}.")
    if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
        raise ValueError(f"threads is {threads!r}; expected an integer of at least 1.")
    cases = SUITES[suite]() if isinstance(suite, str) else suite
    device, before = choose_device(device), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        record = {
            "format_version": FORMAT_VERSION,
            "suite": suite if isinstance(suite, str) else "own",
            **describe_run(command, device),
            "seed": seed,
            "rows": [],
        }
        keep(record, out)
        for case in tqdm(cases, desc="bench", disable=not progress):
            record["rows"] += time_case(case, device, seed, rounds)
            keep(record, out)
    finally:
        torch.set_num_threads(before)
    return record


def keep(record, out):
    """Write the record, if anywhere."""
    if out is not None:
        write_json(Path(out), record)


def time_case(case, device, seed=0, rounds=5):
    """The rows of one case, one for each of its `whats`."""
    error, failed, sound = {}, {}, []
    try:
        for name in case.names(device):
            try:
                errors = case.errors(name, device, seed)
            except Exception as reason:  # triton's are no RuntimeErrors
                failed[name] = why(reason)
                continue
            error[name] = max(errors.values(), default=0.0)
            wrong = [what for what, size in errors.items() if not size < TOLERANCES[case.dtype]]
            if wrong:
                failed[name] = f"is wrong: {wrong[0]} with a relative error of {errors[wrong[0]]:.1e}"
            else:
                sound.append(name)
        prepared, rows = case.prepare(device, seed), []
        for what in case.whats:
            work = {name: functools.partial(case.work, prepared, what, name) for name in sound}
            best, lost = fastest_of_rounds(work, device, rounds, case.graph)
            ms = {name: 1e3 * taken for name, taken in best.items()}
            rows.append({"case": case.name, "what": what, "ms": ms, "error": error, "failed": failed | lost})
        return rows
    except Exception as reason:  # of one case, which leaves the others their turn
        return [{"case": case.name, "what": "", "ms": {}, "error": error, "failed": failed | {"all": why(reason)}}]


def why(error):
    """An exception in a few words."""
    if isinstance(error, torch.OutOfMemoryError):
        return NO_ROOM
    return f"failed: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def fastest_of_rounds(work, device, rounds, graph=False):
    """name -> seconds of one call, and name -> why it has none. work: name -> what makes the function to be timed."""
    graph, ready, calls, best, failed = graph and torch.device(device).type == "cuda", {}, {}, {}, {}
    for name, make in work.items():
        try:
            function = captured(make(), device) if graph else make()
            seconds_of(function, 1, device)  # warms up
            calls[name] = max(1, int(TURN / max(seconds_of(function, 1, device), 1e-7)))
            ready[name] = function
        except Exception as error:
            failed[name] = why(error)
    for _ in range(rounds):
        for name, function in ready.items():
            taken = seconds_of(function, calls[name], device)
            best[name] = min(best.get(name, taken), taken)
    return best, failed


def captured(function, device):
    """The function's kernels as a CUDA graph."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = function()  # memory of a graph lives as long as it
    graph.kept = kept
    return graph.replay


def seconds_of(function, calls, device):
    """Seconds of one of `calls` calls; of a single one where it has to be reset."""
    if reset := getattr(function, "reset", None):
        reset()
        calls = 1
    start = clock(device)
    for _ in range(calls):
        function()
    return (clock(device) - start) / calls


def clock(device):
    """Seconds, once the device has finished what it was given."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def render_bench(record):
    """The record in Markdown: the fastest of each kind with its name, and how many times as fast MHLA is."""
    worst = max((error for row in record["rows"] for error in row["error"].values()), default=0.0)
    versions = ", ".join(
        f"{name} {record['versions'][name]}" for name in ("torch", "triton") if name in record["versions"]
    )
    lines = [
        f"{record['hardware']}; {versions}; largest relative error found before timing: {worst:.0e}.",
        "",
        "| case | what | MHLA, ms | softmax, ms | plain linear, ms | copy, ms | times softmax | times linear |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in record["rows"]:
        for ours in ("mhla", "hybrid"):
            if any(name.startswith(ours) for name in row["ms"]):
                found = [fastest(row["ms"], kind) for kind in ((ours,), ("sdpa", "softmax"), ("linear",), ("copy",))]
                times = [f"{other[0] / found[0][0]:.2f}" if other else "" for other in found[1:3]]
                cells = [f"{ms:.4g} {name}".rstrip() if ms else "" for ms, name in (one or (None, "") for one in found)]
                case = row["case"] if ours == "mhla" else f"{row['case']}, hybrid"
                lines.append(f"| {case} | {row['what']} | {' | '.join([*cells, *times])} |")
    failed = {f"{row['case']}, {name}: {text}" for row in record["rows"] for name, text in row["failed"].items()}
    return "\n".join([*lines, *([""] if failed else []), *(f"* {line}" for line in sorted(failed))])


def fastest(ms, kinds):
    """(milliseconds, the rest of its name) of the fastest competitor of these kinds; None without one."""
    found = [(value, name.partition(" ")[2]) for name, value in ms.items() if name.startswith(kinds)]
    return min(found, default=None)
