"""The rank that attention can have: random features, N from 64 to 4096, softmax, plain linear and MHLA (table 1).

The whole N x N matrix is made and all its singular values are computed, in fp64, so that a rank stated here was
counted and not derived. Each size is written as soon as it is done, and is not measured again.
"""

import json
import time
from pathlib import Path

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


def measure_random_rank(tokens: int, width: int, *, blocks: int = BLOCKS, seed: int = 0) -> dict:
    """The ranks of random-feature attention over one size.

    q and k are Gaussian `[N, d]`; plain linear attention and MHLA use their relu + 1e-6. MHLA's mixing has random entries
    in (0, 1), rows summing to one, and is invertible (its condition number is part of the answer); "start" is MHLA with
    the paper's locality start in its place.

    Returns:
        dict: "tokens", "width", "blocks", "tolerance" (relative to the largest singular value: N times fp64's eps, as
        `torch.linalg.matrix_rank` takes it), "rank" -> kind -> int, "bound" -> kind -> int (table 1),
        "smallest" -> kind -> the last singular value that was counted over the largest, "mixing_condition".
    """
    random = torch.Generator().manual_seed(seed)
    cut = Blocks.grid((tokens,), (blocks,))
    q, k = (torch.randn(1, tokens, 1, width, generator=random, dtype=torch.float64) for _ in range(2))
    mixing = torch.rand(1, cut.num_blocks, cut.num_blocks, generator=random, dtype=torch.float64)
    mixing = mixing / mixing.sum(-1, keepdim=True)
    start = GridMixing((cut.num_blocks,), form="direct").weight.detach()[None]
    weights = {"linear": torch.full_like(mixing, 1.0 / cut.num_blocks), "mhla": mixing, "start": start}
    seen = {
        kind: Attention("random", "mhla", q.relu() + 1e-6, k.relu() + 1e-6, {"mixing": own, "blocks": cut})
        for kind, own in weights.items()
    }
    seen["softmax"] = Attention("random", "softmax", q, k)
    tolerance = tokens * torch.finfo(torch.float64).eps
    most = rank_bound(cut.sizes(), width)
    bound = {"linear": min(tokens, width), "mhla": most, "start": most, "softmax": tokens}
    rank, smallest = {}, {}
    for kind in KINDS:
        values = torch.linalg.svdvals(seen[kind].matrix())
        rank[kind] = count_rank(values, tolerance)
        smallest[kind] = (values[rank[kind] - 1] / values[0]).item()
    return {
        "tokens": tokens,
        "width": width,
        "blocks": cut.num_blocks,
        "seed": seed,
        "tolerance": tolerance,
        "rank": rank,
        "bound": bound,
        "smallest": smallest,
        "mixing_condition": torch.linalg.cond(mixing[0]).item(),
    }


def study_random_rank(
    out, *, lengths=LENGTHS, widths=WIDTHS, blocks=BLOCKS, seed=0, threads=1, progress=True, command=None
):
    """`measure_random_rank` over all sizes, into `out`: rank.json, rank.md, rank.png. Goes on where it was stopped.

    Returns:
        What rank.json holds: "rows", versions, hardware, commit, seed, command, date, seconds.

    Raises:
        ValueError: `out` holds another study. ImportError: no matplotlib.
    """
    torch.set_num_threads(threads)
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    place = out / "rank.json"
    settings = {"lengths": list(lengths), "widths": list(widths), "blocks": blocks, "seed": seed}
    record = json.loads(place.read_text(encoding="utf-8")) if place.exists() else {"settings": settings, "rows": []}
    if record.get("settings") != settings:
        raise ValueError(f"out: {str(place)!r} holds {record.get('settings')}, expected {settings}, or another folder")
    done = {(row["tokens"], row["width"]) for row in record["rows"]}
    missing = [size for size in ((n, d) for n in lengths for d in widths) if size not in done]
    for tokens, width in tqdm(missing, desc="rank", unit="size", disable=not progress):
        begun = time.monotonic()
        row = measure_random_rank(tokens, width, blocks=blocks, seed=seed)
        record["rows"].append(row | {"seconds": round(time.monotonic() - begun, 2)})
        record["rows"].sort(key=lambda row: (row["tokens"], row["width"]))
        record |= describe_run(command)
        write_json(place, record)
    plot_random_rank(out / "rank.png", record["rows"])
    return record


def render_random_rank(record) -> str:
    """The table: one line per size, for every kind the rank that was counted and the bound of table 1."""
    lines = [
        "| N | d | blocks | plain linear | MHLA, random mixing | MHLA, locality start | softmax |",
        "|---:" * 7 + "|",
    ]
    for row in record["rows"]:
        cells = [f"{row['rank'][kind]:,} of {row['bound'][kind]:,}" for kind in KINDS]
        lines.append(f"| {row['tokens']:,} | {row['width']} | {row['blocks']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
