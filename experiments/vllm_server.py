"""Measure a converted model behind `vllm serve` as its users would see it (docs/serving.md).

    python -m experiments.vllm_server BASE CONVERTED

Runs in the environment of `make test-vllm`: eight requests at once by `vllm bench serve` for each case, on one server per
model, compiled and eager, in bf16 and with prefix caching. A stopped run continues.
"""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mhla_hf.cli.main import script

from .rows import describe_setup, make_parser, markdown, parse_call, write_record

VLLM = str(Path(sys.executable).with_name("vllm"))
PORT = 8139
CASES = {"256": (0, 256), "1,024": (0, 1024), "4,096": (0, 4096), "7,168": (0, 7168), "1,500 shared + 256": (1500, 256)}
REQUESTS, NEW_TOKENS = 8, 64
WAYS = {"compiled": (), "eager": ("--enforce-eager",)}


@contextlib.contextmanager
def serve(folder: str, options: tuple[str, ...]) -> Iterator[float]:
    """Run a server, and yield the seconds that it took to start."""
    command = [VLLM, "serve", folder, "--port", str(PORT), "--kv-cache-memory-bytes", "1G", "--dtype", "bfloat16"]
    started = time.perf_counter()
    with open(f"{tempfile.gettempdir()}/vllm_server.log", "w") as log:
        server = subprocess.Popen([*command, *options], stdout=log, stderr=log, start_new_session=True)
    try:
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://localhost:{PORT}/health", timeout=5)
                break
            if server.poll() is not None:
                raise RuntimeError(f"vllm serve {folder}: ended with {server.returncode}; see {log.name}.")
            time.sleep(1)
        yield time.perf_counter() - started
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(120)


def measure(folder: str, case: str, seed: int) -> dict[str, float]:
    """Return the mean seconds to the first token and the new tokens per second of all requests together."""
    prefix, length = CASES[case]
    flags = (
        f"--dataset-name random --random-prefix-len {prefix} --random-input-len {length} --seed {seed} --port {PORT} "
    )
    flags += f"--random-output-len {NEW_TOKENS} --num-prompts {REQUESTS} --max-concurrency {REQUESTS} --ignore-eos "
    flags += "--num-warmups 1"  # a request that is not measured leaves the prefix in the cache
    with tempfile.TemporaryDirectory() as results:
        saved = ["--save-result", "--result-dir", results, "--result-filename", "result.json"]
        subprocess.run([VLLM, "bench", "serve", "--model", folder, *flags.split(), *saved], check=True,
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
        result = json.loads(Path(results, "result.json").read_text(encoding="utf-8"))
    if result["completed"] != REQUESTS:
        raise RuntimeError(f"vllm bench serve: got {result['completed']} answers, expected {REQUESTS}.")
    return {"first_token": result["mean_ttft_ms"] / 1e3, "tokens_per_second": result["output_throughput"]}


def render_server(record: Mapping[str, Any]) -> str:
    names = list(record["models"])
    lines = []
    for way, case in itertools.product(WAYS, CASES):
        rows = {row["model"]: row for row in record["rows"] if (row["way"], row["case"]) == (way, case)}
        if len(rows) < len(names):  # the run goes on
            continue
        cells = [f"{rows[name]['first_token']:.2f}" for name in names]
        lines.append([case, way, *cells, *(f"{rows[name]['tokens_per_second']:.1f}" for name in names)])
    starts = {(row["way"], row["model"]): f"{row['start']:.0f}" for row in record["rows"]}
    for way in dict.fromkeys(way for way, _ in starts):
        lines.append(
            ["seconds until the server answers", way, *(starts[way, name] for name in names), *[""] * len(names)]
        )
    header = ["prompt tokens", "", *(f"first token, s, {x}" for x in names), *(f"tokens/s, {x}" for x in names)]
    note = f"{REQUESTS} requests at once, {NEW_TOKENS} new tokens each, random prompts; vLLM {record['vllm']}. "
    return f"{markdown(header, lines, 2)}\n\n{note}{describe_setup(record)}"


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("base", help="folder of the softmax model")
    parser.add_argument("converted", help="folder of its conversion")
    parser.add_argument("--out", type=Path, default=Path("docs/scale/server.json"), help="JSON file to write")
    args, command = parse_call(parser, "vllm_server", None)
    models = {"softmax": args.base, "MHLA": args.converted}
    record: dict[str, Any] = {"rows": []}
    if args.out.exists():
        record = json.loads(args.out.read_text(encoding="utf-8"))
    for (way, options), (name, folder) in itertools.product(WAYS.items(), models.items()):
        known = {row["case"] for row in record["rows"] if (row["way"], row["model"]) == (way, name)}
        if known == set(CASES):
            continue
        with serve(folder, options) as start:
            measure(folder, "256", 0)  # warms up
            for seed, case in enumerate(CASES, 1):
                if case not in known:
                    row = {"model": name, "way": way, "case": case, "start": start, **measure(folder, case, seed)}
                    record = {**record, "rows": [*record["rows"], row], "models": models, "vllm": version("vllm")}
                    record = write_record(args.out, {**record, "dtype": "bf16"}, command)
                    print(row, flush=True)


if __name__ == "__main__":
    script(main, "vllm_server")
