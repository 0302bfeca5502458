"""docs/performance.md from what `mhla-hf bench` has measured: python -m mhla_hf.bench.document docs

Unusual: a part without a measurement says so and names the command that makes one; nothing here holds a figure of its own.
"""

import json
import sys
from pathlib import Path

from ..files import file_aside
from . import render_bench

PAGE = """# Performance

Made from the JSON files beside it by `python -m mhla_hf.bench.document docs`. In all of them every competitor takes its
turn in every round of one process, the fastest round of each counts, and nothing is timed before it has been compared with
the definition.

## The operator on a CPU

{quick}

MHLA loses where the context is short: one decoded token costs a fixed overhead in Python, and plain linear attention,
which keeps one summary and mixes nothing, decoded faster at every length measured.

## Whole models

The demo's models (0.9 M parameters, batch 1) by length, measured by `mhla-hf demo` in one run; the crossover for
decoding lies between 1,024 and 4,096 tokens. Another model was being trained on the same machine meanwhile, which shows in
the decode times.

![Forward and decode time against length](demo/speed.png)

## On a GPU

{gpu}

### Decoding on a GPU

{decode}
"""
UNMEASURED = (
    "Not measured yet: no GPU was at hand. `make bench-gpu`, on a machine with one, runs the suite `{suite}` and fills\n"
    "this part. What the kernels compile to stands in [kernels.md](kernels.md); no speed is claimed."
)


def performance_page(docs):
    """The text of performance.md for the folder `docs`, whose bench/, bench/gpu/ and bench/decode/ hold a bench.json."""
    docs = Path(docs)
    parts = {"quick": ("bench", "quick"), "gpu": ("bench/gpu", "paper"), "decode": ("bench/decode", "decode")}
    return PAGE.format(**{name: measured_part(docs, *where) for name, where in parts.items()})


def measured_part(docs, folder, suite):
    """One measurement: how it was made, its table and its plot; or that there is none."""
    file = docs / folder / "bench.json"
    if not file.exists():
        return UNMEASURED.format(suite=suite)
    record = json.loads(file.read_text(encoding="utf-8"))
    table = "\n".join(line.rstrip() for line in render_bench(record).splitlines())
    made = f"`{record['command']}` ({record['date']}, commit `{record['commit'][:12]}`)."
    caution = "Other programs may have been running:\nread the ratios, not the milliseconds."
    return f"{made} {caution}\n\n```text\n{table}\n```\n\n![The same as a plot]({folder}/bench.png)"


if __name__ == "__main__":
    with file_aside(Path(sys.argv[1]) / "performance.md") as aside:
        aside.write_text(performance_page(sys.argv[1]), encoding="utf-8")
