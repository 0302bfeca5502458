"""Speed, against what a user would pick instead: `run_bench`, one record for every suite.

`lengths.py` has causal attention by length and decoding, `compare.py` single operators and whole models side by side,
`kernels.py` the kernels of an operator one by one, `cases.py` the shapes of the paper. Unusual in all: nothing is timed
before it is shown to be right (`checks.py`), and the competitors (`competitors.py` has those that others wrote) take turns,
round after round in one process, the fastest round of each counting.
"""

import contextlib
import dataclasses
import os
from pathlib import Path

import torch

from ..checkpoints.files import write_json
from ..checkpoints.machine import describe_hardware, describe_versions, now, source_commit
from .compare import Comparison, Decoding, render_comparison
from .lengths import LENGTH_SUITES, Suite, render_lengths

FORMAT_VERSION = 1
DECODE = Comparison(tuple(Decoding(length) for length in (8192, 32768, 131072, 1048576)))
SUITES = (*LENGTH_SUITES, "decode", "kernels", "paper")


def run_bench(suite="quick", *, device="cpu", threads=1, seed=0, out=None, progress=True, show=True, command=None):
    """Check, time and compare; prints the table (`render_bench`) unless `show` is False.

    Args:
        suite: "quick" (three lengths, a minute or two), "full" (six, to 16,384 tokens), "wide" (16 heads of 128), "decode"
            (64 tokens more after 8k to 1M, bf16), "paper" (the shapes of the paper's figures and tables, operator and whole
            models, bf16; these two are meant for a GPU), "kernels" (each kernel alone, on a GPU only), or a `Suite` or
            `Comparison`.
        device: where. threads: CPU threads while timing; the old number is restored.
        seed: of the inputs.
        out: folder for bench.json and bench.png, made if missing; None writes nothing. The figure needs matplotlib.
        progress: show a bar on stderr.

    Returns:
        A dict that goes to JSON as it is: "rows" (what was timed and <name>_ms; for a `Comparison` also the model or
        operator, "skipped" for what did not fit the device's memory, "wrong", and "took", what impl="auto" has chosen in
        this process), "checks" (errors found before timing), and versions, hardware, commit, seed, command, date. Of a
        `Suite` also "ratios" (how many times as fast MHLA is) and "memory" (bytes kept for the backward pass).

    Raises:
        ValueError: unknown suite, threads below 1, a device that torch cannot use or, for "kernels", that runs none of them;
            out is no folder one can write to.
        RuntimeError: a result was wrong, so its speed is not reported, or did not come. Other cases of a `Comparison` are
            timed and written first; bench.json grows by one after another, so that one can stop it.
    """
    shape = check_arguments(suite, device, threads, out)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        record = {
            "format_version": FORMAT_VERSION,
            "suite": suite if isinstance(suite, str) else "own",
            "settings": shape.settings(),
            "date": now(),
            "versions": describe_versions(),
            "hardware": describe_hardware(device),
            "commit": source_commit(),
            "seed": seed,
            "command": command,
        }
        keeping = (lambda part: keep(out, record | part),) if isinstance(shape, Comparison) else ()
        gpu = torch.device(device).type == "cuda"
        with torch.cuda.device(device) if gpu else contextlib.nullcontext():  # graphs and clocks are those of this one
            record |= shape.measure(device, seed, progress, *keeping)
    finally:
        torch.set_num_threads(before)
    if record["rows"] or not record.get("wrong"):
        if show:
            print(render_bench(record))
        keep(out, record)
        if out is not None and record["rows"]:
            shape.plot(Path(out) / "bench.png", record)
    if record.get("wrong"):
        raise RuntimeError("\n".join(record["wrong"]))
    return record


def keep(out, record):
    """Write bench.json, if anywhere."""
    if out is not None:
        write_json(Path(out) / "bench.json", record)


def render_bench(record):
    """The record as a table for the terminal."""
    return render_lengths(record) if "ratios" in record else render_comparison(record)


def check_arguments(suite, device, threads, out):
    """The suite meant; ValueError in one sentence before anything is timed. Makes the folder `out`."""
    if not dataclasses.is_dataclass(suite) and suite not in SUITES:
        raise ValueError(f"suite is {suite!r}; expected one of {', '.join(SUITES)}.")
    if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
        raise ValueError(f"threads is {threads!r}; expected an integer of at least 1.")
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device is {device!r}; expected one that torch can use here.") from error
    if out is not None:
        try:
            Path(out).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"out is {str(out)!r}; expected a folder that can be made ({error.strerror}).") from error
        if not os.access(out, os.W_OK | os.X_OK):
            raise ValueError(f"out is {str(out)!r}; expected a folder that can be written to.")
    if suite in ("kernels", "paper"):
        from . import cases  # imports transformers and diffusers

        return cases.PAPER if suite == "paper" else cases.KERNELS
    if suite == "decode":
        return DECODE
    return LENGTH_SUITES[suite] if isinstance(suite, str) else suite


__all__ = ["SUITES", "Comparison", "Suite", "render_bench", "run_bench"]
