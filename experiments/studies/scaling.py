"""Time MHLA by the number of tokens N and of blocks M, beside softmax and plain linear attention (table 14).

Mixing should cost next to nothing while M^2 < N. All candidates of one N take turns, and the fastest round of each
counts, so that a busy moment of the machine affects all of them alike.
"""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
ROUNDS, SECONDS = 5, 10.0  # at least, per number of tokens


def time_scaling(
    side: int,
    *,
    counts: Sequence[int] = COUNTS,
    heads: int = HEADS,
    width: int = WIDTH,
    rounds: int = ROUNDS,
    seconds: float = SECONDS,
    seed: int = 0,
) -> dict[str, Any]:
    """Time forward and backward of attention over `side` x `side` tokens with a batch of 1 in fp32.

    Args:
        side: Tokens along each axis.
        counts: Blocks along each axis; counts larger than `side` are skipped.
        heads: Number of heads.
        width: Width of a head.
        rounds, seconds: The measurement ends after so many rounds, but not before so many seconds.
        seed: Seed of the inputs.

    Returns:
        "tokens", "rounds" (without the warm-up), "softmax" (seconds), and "mhla", a list of "blocks" (M) and
        "seconds". One block is plain linear attention.
    """
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, side * side, heads, width, generator=generator) for _ in range(3))
    features = [q.relu() + 1e-6, k.relu() + 1e-6, v]
    runs: dict[Any, tuple[Any, list[torch.Tensor], Blocks | None]] = {"softmax": (softmax_pass, [q, k, v], None)}
    for count in (count for count in counts if count <= side):
        grid = Blocks.grid((side, side), (count, count))
        mixing = torch.rand(grid.num_blocks, grid.num_blocks, generator=generator)
        runs[grid.num_blocks] = (mhla_pass, [*features, mixing / mixing.sum(-1, keepdim=True)], grid)
    best = dict.fromkeys(runs, float("inf"))
    started = time.perf_counter()
    num_rounds = -1  # the first round is the warm-up
    while num_rounds < rounds or time.perf_counter() - started < seconds:
        num_rounds += 1
        for name, (run, tensors, blocks) in runs.items():
            leaves = [tensor.detach().requires_grad_() for tensor in tensors]
            run_started = time.perf_counter()
            run(*leaves, blocks).sum().backward()
            best[name] = min(best[name], time.perf_counter() - run_started)
    softmax = best.pop("softmax")
    rows = [{"blocks": num_blocks, "seconds": fastest} for num_blocks, fastest in best.items()]
    return {"tokens": side * side, "rounds": num_rounds, "softmax": softmax, "mhla": rows}


def softmax_pass(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: None) -> torch.Tensor:
    """Compute torch's fused softmax attention."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def mhla_pass(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mixing: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """Compute MHLA, normalized as in image models."""
    return mhla(q, k, v, mixing, blocks=blocks)


def study_scaling(
    out: str | Path,
    *,
    sides: Sequence[int] = SIDES,
    seconds: float = SECONDS,
    threads: int = 1,
    seed: int = 0,
    progress: bool = True,
    command: str | None = None,
) -> dict[str, Any]:
    """Run `time_scaling` for every side, and write scaling.json and scaling.png.

    Args:
        out: Folder to create, or of a study to resume.
        sides, seconds, seed: As for `time_scaling`.
        threads: CPU threads.
        progress: Whether to show a progress bar.
        command: Shell command, for the record.

    Returns:
        The content of scaling.json: "settings", "rows", and what `describe_run` says.

    Raises:
        ValueError: `out` has results of other settings.
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    path = out / "scaling.json"
    settings = {
        "sides": list(sides),
        "heads": HEADS,
        "width": WIDTH,
        "rounds": ROUNDS,
        "seconds": seconds,
        "threads": threads,
        "seed": seed,
    }
    record: dict[str, Any] = (
        json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"settings": settings, "rows": []}
    )
    if record.get("settings") != settings:
        raise ValueError(
            f"out: got {str(path)!r} with {record.get('settings')}, expected {settings}, or another folder."
        )
    measured = {row["tokens"] for row in record["rows"]}
    torch.set_num_threads(threads)
    missing = [side for side in sides if side * side not in measured]
    for side in tqdm(missing, desc="scaling", unit="size", disable=not progress):
        record["rows"].append(time_scaling(side, seconds=seconds, seed=seed))
        record.update(describe_run(command))
        write_json(path, record)
    plot_scaling(out / "scaling.png", record["rows"], f"{HEADS} heads of {WIDTH}, batch 1, fp32, {record['hardware']}")
    return record


def render_scaling(record: Mapping[str, Any]) -> str:
    """Render the table: milliseconds of forward and backward by N and M, in parentheses where M^2 exceeds N."""
    counts = sorted({cell["blocks"] for row in record["rows"] for cell in row["mhla"]})
    names = ["plain linear (M = 1)" if count == 1 else f"M = {count}" for count in counts]
    lines = ["| N | softmax | " + " | ".join(names) + " |", "|---:" * (len(counts) + 2) + "|"]
    for row in record["rows"]:
        milliseconds = {cell["blocks"]: f"{1000 * cell['seconds']:.1f}" for cell in row["mhla"]}
        cells = []
        for count in counts:
            cell = milliseconds.get(count, "")
            cells.append(f"({cell})" if cell and count**2 > row["tokens"] else cell)
        lines.append(f"| {row['tokens']:,} | {1000 * row['softmax']:.1f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
