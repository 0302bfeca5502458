"""What the experiments share: their command lines, rows computed by worker processes, and cells of tables."""

import argparse
import gzip
import json
import multiprocessing
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch

from mhla_hf.checkpoints.file_io import write_json
from mhla_hf.checkpoints.provenance import describe_run

Row = dict[str, Any]


def make_parser(description: str | None, seeds: int = 0) -> argparse.ArgumentParser:
    """Return a parser whose help shows a module's docstring as it is, with --seeds if it has a default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if seeds:
        parser.add_argument("--seeds", type=int, default=seeds, help=f"number of seeds (default: {seeds})")
    return parser


def parse_call(
    parser: argparse.ArgumentParser, name: str, arguments: Sequence[str] | None
) -> tuple[argparse.Namespace, str]:
    """Parse the arguments (None: those of the process); also return the command for the record, without absolute paths."""
    arguments = sys.argv[1:] if arguments is None else arguments
    args = parser.parse_args(arguments)
    if getattr(args, "seeds", 1) < 1:
        parser.error(f"--seeds: got {args.seeds}, expected at least 1.")
    words = [Path(word).name if Path(word).is_absolute() else word for word in arguments]
    return args, shlex.join(["python", "-m", f"experiments.{name}", *words])


def add_rows(out: str | Path, make_row: Callable[[Row], Row], jobs: Sequence[Row], command: str) -> Row:
    """Compute the rows that a JSON file lacks, in one worker process that keeps its caches, and write each at once."""
    out = Path(out)
    torch.set_num_threads(1)  # as in the worker, because the record states the threads of this process
    record = json.loads(out.read_text()) if out.exists() else {"rows": []}
    missing = [job for job in jobs if not any(job.items() <= row.items() for row in record["rows"])]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        for job, row in zip(missing, pool.imap(make_row, missing), strict=True):
            record = write_record(out, {**record, "rows": [*record["rows"], row]}, command)
            print(", ".join(f"{key} {value}" for key, value in job.items()), "is done", flush=True)
    return record


def write_record(path: str | Path, record: Row, command: str | None) -> Row:
    """Write a record, with what `describe_run` says of this CPU, and return it."""
    record = {**record, **describe_run(command, "cpu")}
    write_json(path, record)
    return record


def open_text(path: str | Path) -> TextIO:
    """Open a UTF-8 text file for reading; a name that ends in .gz is decompressed."""
    open_file = gzip.open if Path(path).suffix == ".gz" else open
    return open_file(path, "rt", encoding="utf-8")


def over_seeds(values: Sequence[Any]) -> dict[str, Any]:
    """Return "mean", "stderr" (of the mean; None for one seed), and "values". If a value is None, so is the mean."""
    if None in values:
        return {"mean": None, "stderr": None, "values": values}
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "stderr": error, "values": list(values)}


def describe_setup(record: Mapping[str, Any]) -> str:
    """Describe how a record was measured: command, hardware, versions, and dtype."""
    versions = ", ".join(f"{name} {record['versions'][name]}" for name in ("torch", "transformers"))
    return f"`{record['command']}`, {record['hardware']}, {versions}, {record.get('dtype', 'fp32')}."


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Render a table of strings, with the first `left` columns aligned left."""
    ruler = "|" + "---|" * left + "---:|" * (len(header) - left)
    first_line, *lines = (f"| {' | '.join(cells)} |" for cells in (header, *rows))
    return "\n".join([first_line, ruler, *lines])


def format_mean(values: Sequence[float], spec: str) -> str:
    """Format the mean of values by a `spec` such as "{:+.2f}", with ± its standard error if there are several."""
    mean, stderr, _ = over_seeds(values).values()
    return spec.format(mean) if stderr is None else f"{spec.format(mean)} ± {spec.replace('+', '').format(stderr)}"


def format_range(values: Sequence[float], spec: str) -> str:
    """Format the mean of values and, if there are several, the lowest and the highest; see `format_mean`."""
    mean = spec.format(statistics.fmean(values))
    return mean if len(values) == 1 else f"{mean} ({spec.format(min(values))}–{spec.format(max(values))})"
