"""Time against the number of tokens N and of blocks M (table 14): free while M^2 < N, and what it costs beyond.

All of one N take turns, round after round, the fastest round of each counting, so that a busy moment of the
machine spares none of them; and softmax and plain linear attention stand beside MHLA.
"""

import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

from mhla_hf import mhla
from mhla_hf.checkpoints.file_io import write_json
from mhla_hf.checkpoints.provenance import describe_run
from mhla_hf.ops.blocks import Blocks

from .figures import plot_scaling

SIDES = (16, 32, 64)
COUNTS = (1, 2, 4, 8, 16)
HEADS, WIDTH = 6, 64
ROUNDS, SECONDS = 5, 10.0  # at least so many rounds, and at least so long, per number of tokens


def time_scaling(side: int, *, counts=COUNTS, heads=HEADS, width=WIDTH, rounds=ROUNDS, seconds=SECONDS, seed=0) -> dict:
    """Forward and backward of attention over `side` x `side` tokens, batch 1, fp32, in seconds.

    Returns:
        dict: "tokens", "rounds" (after one that warms up), "softmax" (seconds), "mhla": list of {"blocks": M, "seconds"}; M
        of 1 is plain linear attention.
    """
    random = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, side * side, heads, width, generator=random) for _ in range(3))
    features = [q.relu() + 1e-6, k.relu() + 1e-6, v]
    runs = {"softmax": (softmax_pass, [q, k, v], None)}
    for count in (count for count in counts if count <= side):
        blocks = Blocks.grid((side, side), (count, count))
        mixing = torch.rand(blocks.num_blocks, blocks.num_blocks, generator=random)
        runs[blocks.num_blocks] = (mhla_pass, [*features, mixing / mixing.sum(-1, keepdim=True)], blocks)
    best = dict.fromkeys(runs, float("inf"))
    started, done = time.perf_counter(), -1  # the first round warms up
    while done < rounds or time.perf_counter() - started < seconds:
        done += 1
        for name, (run, tensors, blocks) in runs.items():
            leaves = [tensor.detach().requires_grad_() for tensor in tensors]
            begun = time.perf_counter()
            run(*leaves, blocks).sum().backward()
            best[name] = min(best[name], time.perf_counter() - begun)
    softmax = best.pop("softmax")
    rows = [{"blocks": blocks, "seconds": taken} for blocks, taken in best.items()]
    return {"tokens": side * side, "rounds": done, "softmax": softmax, "mhla": rows}


def softmax_pass(q, k, v, blocks):
    """torch's fused attention."""
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def mhla_pass(q, k, v, mixing, blocks):
    """The operator, normalized, as in image models."""
    return mhla(q, k, v, mixing, blocks=blocks)


def study_scaling(out, *, sides=SIDES, seconds=SECONDS, threads=1, seed=0, progress=True, command=None) -> dict:
    """`time_scaling` for every side, into `out`: scaling.json and scaling.png. Goes on where it was stopped.

    Raises:
        ValueError: `out` holds other sizes.
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    place = out / "scaling.json"
    settings = {
        "sides": list(sides),
        "heads": HEADS,
        "width": WIDTH,
        "rounds": ROUNDS,
        "seconds": seconds,
        "threads": threads,
        "seed": seed,
    }
    record = json.loads(place.read_text(encoding="utf-8")) if place.exists() else {"settings": settings, "rows": []}
    if record.get("settings") != settings:
        raise ValueError(f"out: {str(place)!r} holds {record.get('settings')}, expected {settings}, or another folder")
    done = {row["tokens"] for row in record["rows"]}
    torch.set_num_threads(threads)
    missing = [side for side in sides if side * side not in done]
    for side in tqdm(missing, desc="scaling", unit="size", disable=not progress):
        record["rows"].append(time_scaling(side, seconds=seconds, seed=seed))
        record |= describe_run(command)
        write_json(place, record)
    plot_scaling(out / "scaling.png", record["rows"], f"{HEADS} heads of {WIDTH}, batch 1, fp32, {record['hardware']}")
    return record


def render_scaling(record) -> str:
    """The table: milliseconds, forward and backward, by N and M, beside softmax; in brackets where M^2 exceeds N."""
    counts = sorted({cell["blocks"] for row in record["rows"] for cell in row["mhla"]})
    names = ["plain linear (M = 1)" if count == 1 else f"M = {count}" for count in counts]
    lines = ["| N | softmax | " + " | ".join(names) + " |", "|---:" * (len(counts) + 2) + "|"]
    for row in record["rows"]:
        found = {cell["blocks"]: 1000 * cell["seconds"] for cell in row["mhla"]}
        forms = {count: "{:.1f}" if count**2 <= row["tokens"] else "({:.1f})" for count in found}
        cells = [forms[count].format(found[count]) if count in found else "" for count in counts]
        lines.append(f"| {row['tokens']:,} | {1000 * row['softmax']:.1f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
