"""Measure the rank of attention with random features, for softmax, plain linear attention, and MHLA (table 1).

All singular values of the N x N matrix are computed in fp64, for N from 64 to 4,096, so that ranks are measured and
not derived. Each size is written as soon as it is finished, and is not measured again.
"""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from mhla_hf.analysis.attention import Attention
from mhla_hf.analysis.measures import count_rank, rank_bound
from mhla_hf.checkpoints.file_io import write_json
from mhla_hf.checkpoints.provenance import describe_run
from mhla_hf.nn.grid import GridMixing
from mhla_hf.ops.blocks import Blocks

from .figures import plot_random_rank

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
WIDTHS = (16, 32, 64, 72)
BLOCKS = 16
KINDS = ("linear", "mhla", "start", "softmax")


def measure_random_rank(tokens: int, width: int, *, blocks: int = BLOCKS, seed: int = 0) -> dict[str, Any]:
    """Measure the ranks of attention with random q and k of one size.

    q and k are Gaussian `[N, d]`; plain linear attention and MHLA use relu(x) + 1e-6 of them. The mixing matrix of
    "mhla" has random entries in (0, 1) and rows that sum to one; that of "start" is the paper's start from locality.

    Args:
        tokens: N.
        width: d.
        blocks: Number of blocks.
        seed: Seed of q, k, and the mixing matrix.

    Returns:
        "tokens", "width", "blocks", "seed", "tolerance" (relative to the largest singular value: N times fp64's eps,
        the default of `torch.linalg.matrix_rank`), "mixing_condition" (the condition number of the random mixing
        matrix), and, for each kind of attention, "rank", "bound" (of table 1), and "smallest" (the last singular value
        counted over the largest).
    """
    generator = torch.Generator().manual_seed(seed)
    grid = Blocks.grid((tokens,), (blocks,))
    num_blocks = grid.num_blocks
    q, k = (torch.randn(1, tokens, 1, width, generator=generator, dtype=torch.float64) for _ in range(2))
    random_mixing = torch.rand(1, num_blocks, num_blocks, generator=generator, dtype=torch.float64)
    random_mixing = random_mixing / random_mixing.sum(-1, keepdim=True)
    mixings = {
        "linear": torch.full_like(random_mixing, 1.0 / num_blocks),
        "mhla": random_mixing,
        "start": GridMixing((num_blocks,), form="direct").weight.detach()[None],
    }
    calls = {
        kind: Attention("random", "mhla", q.relu() + 1e-6, k.relu() + 1e-6, {"mixing": mixing, "blocks": grid})
        for kind, mixing in mixings.items()
    }
    calls["softmax"] = Attention("random", "softmax", q, k)
    tolerance = tokens * torch.finfo(torch.float64).eps
    mhla_bound = rank_bound(grid.sizes(), width)
    bound = {"linear": min(tokens, width), "mhla": mhla_bound, "start": mhla_bound, "softmax": tokens}
    rank, smallest = {}, {}
    for kind in KINDS:
        values = torch.linalg.svdvals(calls[kind].matrix())
        rank[kind] = count_rank(values, tolerance)
        smallest[kind] = (values[rank[kind] - 1] / values[0]).item()
    return {
        "tokens": tokens,
        "width": width,
        "blocks": num_blocks,
        "seed": seed,
        "tolerance": tolerance,
        "rank": rank,
        "bound": bound,
        "smallest": smallest,
        "mixing_condition": torch.linalg.cond(random_mixing[0]).item(),
    }


def study_random_rank(
    out: str | Path,
    *,
    lengths: Sequence[int] = LENGTHS,
    widths: Sequence[int] = WIDTHS,
    blocks: int = BLOCKS,
    seed: int = 0,
    threads: int = 1,
    progress: bool = True,
    command: str | None = None,
) -> dict[str, Any]:
    """Run `measure_random_rank` for all sizes, and write rank.json and rank.png.

    Args:
        out: Folder to create, or of a study to resume.
        lengths: Numbers of tokens.
        widths: Head widths.
        blocks, seed: As for `measure_random_rank`.
        threads: CPU threads.
        progress: Whether to show a progress bar.
        command: Shell command, for the record.

    Returns:
        The content of rank.json: "settings", "rows", and what `describe_run` says.

    Raises:
        ValueError: `out` has results of other settings.
        ImportError: matplotlib is not installed.
    """
    torch.set_num_threads(threads)
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    path = out / "rank.json"
    settings = {"lengths": list(lengths), "widths": list(widths), "blocks": blocks, "seed": seed}
    record: dict[str, Any] = (
        json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"settings": settings, "rows": []}
    )
    if record.get("settings") != settings:
        raise ValueError(
            f"out: got {str(path)!r} with {record.get('settings')}, expected {settings}, or another folder."
        )
    done = {(row["tokens"], row["width"]) for row in record["rows"]}
    missing = [size for size in ((n, d) for n in lengths for d in widths) if size not in done]
    for tokens, width in tqdm(missing, desc="rank", unit="size", disable=not progress):
        started = time.monotonic()
        row = measure_random_rank(tokens, width, blocks=blocks, seed=seed)
        row["seconds"] = round(time.monotonic() - started, 2)
        record["rows"].append(row)
        record["rows"].sort(key=lambda row: (row["tokens"], row["width"]))
        record.update(describe_run(command))
        write_json(path, record)
    plot_random_rank(out / "rank.png", record["rows"])
    return record


def render_random_rank(record: Mapping[str, Any]) -> str:
    """Render the table: a line per size, with the measured rank and the bound of table 1 for each kind of attention."""
    lines = [
        "| N | d | blocks | plain linear | MHLA, random mixing | MHLA, locality start | softmax |",
        "|---:" * 7 + "|",
    ]
    for row in record["rows"]:
        cells = [f"{row['rank'][kind]:,} of {row['bound'][kind]:,}" for kind in KINDS]
        lines.append(f"| {row['tokens']:,} | {row['width']} | {row['blocks']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
