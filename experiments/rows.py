"""A table whose rows are made by worker processes, and what its cells look like."""

import json
import multiprocessing
import statistics
from pathlib import Path

import torch

from mhla_hf.checkpoints.file_io import write_json
from mhla_hf.checkpoints.provenance import describe_run


def add_rows(out, make_row, jobs, describe, *, workers=2, command=None):
    """Make the rows that the JSON file `out` lacks, one job each; returns the record. It is written after every row.

    jobs: dicts of what tells a row from the others, which it has as well. describe: of a row, for the log.
    """
    out = Path(out)
    torch.set_num_threads(1)  # what the record says, and every worker does
    record = json.loads(out.read_text()) if out.exists() else {"rows": []}
    missing = [job for job in jobs if not any(job.items() <= row.items() for row in record["rows"])]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for done, row in enumerate(pool.imap_unordered(make_row, missing), 1):
            record |= describe_run(command, "cpu")
            record["rows"].append(row)
            write_json(out, record)
            print(f"{done} of {len(missing)}: {describe(row)}", flush=True)
    return record


def whole_seeds(rows, count):
    """The rows of the seeds that have all `count` of theirs, else of the first seed; and how to call these seeds."""
    seeds = sorted({row["seed"] for row in rows})
    whole = [seed for seed in seeds if sum(row["seed"] == seed for row in rows) == count] or seeds[:1]
    said = f"mean ± standard error over seeds {whole[0]} to {whole[-1]}" if len(whole) > 1 else f"seed {whole[0]} alone"
    return [row for row in rows if row["seed"] in whole], said


def made(record):
    """How it was measured."""
    versions = ", ".join(f"{name} {record['versions'][name]}" for name in ("torch", "transformers"))
    return f"`{record['command']}`, {record['hardware']}, {versions}, {record.get('dtype', 'fp32')}."


def number(values, form):
    """Mean ± standard error."""
    mean = form.format(statistics.fmean(values))
    if len(values) == 1:
        return mean
    return f"{mean} ± {form.replace('+', '').format(statistics.stdev(values) / len(values) ** 0.5)}"
