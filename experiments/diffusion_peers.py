"""Compare MHLA with what else makes a video model faster, by speed and by distance from its samples, on one CPU core.

    python -m experiments.diffusion_peers --out out/grids

The model is the small Wan of `experiments.calibrate_grids`. Each method runs the same 20 sampling steps from the same noise,
at a size that it was trained on and at one with 13.5 times as many tokens. No weight of the original changes.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, PyramidAttentionBroadcastConfig
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from mhla_hf.cli.main import script
from mhla_hf.conversion.grid_fit import grid_layers
from mhla_hf.conversion.teacher import replaced_cores
from mhla_hf.ops.blocks import Blocks
from mhla_hf.training.denoising import sample_latents

from . import calibrate_grids as grids
from .calibrate_grids import BOTH_KEPT, CALIBRATED, HEADS_KEPT, LINEAR_CALIBRATED, SALIENT, TASKS, Size
from .rows import describe_setup, format_range, make_parser, markdown, parse_call, write_record

SIZES: tuple[Size, ...] = ((16, 16, 16), (24, 48, 48))
STEPS, EXACT_STEPS = 20, 5
ROUNDS = 2  # of the first seed; the fastest run of all counts
TILE = (4, 4, 8)  # tokens along each axis
NEAR_TILES = 1  # that local attention reads on each side
SPARSE_SHARE = 8  # sparse attention reads one of so many tiles
compiled_attention = torch.compile(flex_attention)
TileChoice = Callable[[torch.Tensor, torch.Tensor, tuple[int, ...]], torch.Tensor]


def near_tiles(q: torch.Tensor, k: torch.Tensor, counts: tuple[int, ...]) -> torch.Tensor:
    """Return which tiles are at most `NEAR_TILES` apart along every axis, bool [1, 1, tiles, tiles]; see `TiledCore`."""
    places = torch.cartesian_prod(*map(torch.arange, counts))
    return ((places[:, None] - places).abs() <= NEAR_TILES).all(-1)[None, None]


def similar_tiles(q: torch.Tensor, k: torch.Tensor, counts: tuple[int, ...]) -> torch.Tensor:
    """Return the tiles whose mean key fits each tile's mean query best, and its own: bool [B, H, tiles, tiles]."""
    q, k = (x.unflatten(2, (-1, TILE[0] * TILE[1] * TILE[2])).mean(3) for x in (q, k))
    scores = q @ k.mT  # [B, H, tiles, tiles]
    count = max(1, scores.shape[-1] // SPARSE_SHARE)
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.topk(count).indices, True)
    return chosen | torch.eye(scores.shape[-1], dtype=torch.bool)


class TiledCore(nn.Module):
    """Computes softmax attention over the tiles that `choose` returns, in place of an MHLA core."""

    def __init__(self, core: Any, choose: TileChoice) -> None:
        super().__init__()
        self.core = core
        self.choose = choose

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, grid: Size, rotate: Any, **options: Any
    ) -> torch.Tensor:
        """Attend. See `GridMHLA` for the arguments; returns [B, T, H, V]."""
        counts = tuple(size // side for size, side in zip(grid, TILE, strict=True))
        order = Blocks.grid(tuple(grid), counts).index(torch.device("cpu")).argsort(stable=True)  # [T], tile by tile
        q, k = rotate(q, k)
        q, k, v = (x[:, order].transpose(1, 2).contiguous() for x in (q, k, v))
        chosen = self.choose(q, k, counts)
        numbers = chosen.sum(-1, dtype=torch.int32)
        indices = chosen.int().argsort(dim=-1, descending=True, stable=True).int()
        mask = BlockMask.from_kv_blocks(numbers, indices, BLOCK_SIZE=TILE[0] * TILE[1] * TILE[2])
        o = compiled_attention(q, k, v, block_mask=mask)
        return o.transpose(1, 2)[:, order.argsort()]


Context = Callable[[Any, Callable[[], float]], contextlib.AbstractContextManager[Any]]  # of a model and of the time now


class Method(NamedTuple):
    start: str | None  # key of `STARTS`; None: the original
    context: Context = lambda model, now: contextlib.nullcontext()  # in which the model runs
    exact_steps: int = 0  # first steps that use the original's attention


@contextlib.contextmanager
def broadcast(model: Any, now: Callable[[], float]) -> Iterator[None]:
    """Reuse the output of each self-attention in every second step; `now` returns the time of the step."""
    config = PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2, spatial_attention_timestep_skip_range=(100, 900),
        spatial_attention_block_identifiers=("blocks",), current_timestep_callback=now,
    )  # fmt: skip
    model.enable_cache(config)
    try:
        yield
    finally:
        model.disable_cache()


def tiled(choose: TileChoice) -> Method:
    """Return the method that computes all layers by softmax over some tiles; see `TiledCore`."""
    return Method(
        CALIBRATED, lambda model, now: replaced_cores(grid_layers(model), lambda core: TiledCore(core, choose))
    )


METHODS = {
    "softmax": Method(None),
    "MHLA, calibrated": Method(CALIBRATED),
    f"MHLA, {HEADS_KEPT}": Method(HEADS_KEPT),
    f"MHLA, {BOTH_KEPT}": Method(BOTH_KEPT),
    f"MHLA, {SALIENT}": Method(SALIENT),
    f"MHLA, calibrated, softmax in the first {EXACT_STEPS} steps": Method(CALIBRATED, exact_steps=EXACT_STEPS),
    LINEAR_CALIBRATED: Method(LINEAR_CALIBRATED),
    "local: tiles of 128 tokens and their neighbors (`flex_attention`)": tiled(near_tiles),
    "sparse: the eighth of the tiles that fits best (`flex_attention`)": tiled(similar_tiles),
    "PAB, every second step": Method(None, broadcast),
    "MHLA, calibrated, with PAB": Method(CALIBRATED, broadcast),
}


def sample(model: Any, method: Method, size: Size, seed: int) -> tuple[torch.Tensor, float]:
    """Sample one video [1, 1, *size] with a method, and return it and the seconds per step."""
    generator = torch.Generator().manual_seed(seed)
    conditions = TASKS["wan"].conditions(torch.randint(grids.CLASSES, (1,), generator=generator))
    noise = torch.randn(1, 1, *size, generator=generator)
    times: list[float] = []

    def prepare(_: torch.Tensor, now: float) -> None:
        times.append(now)
        if method.start is not None:
            model.use_base_attention(len(times) <= method.exact_steps)

    scheduler = FlowMatchEulerDiscreteScheduler()
    with torch.no_grad(), method.context(model, lambda: times[-1]):
        started = time.perf_counter()
        video = sample_latents(model, scheduler, noise, conditions, None, steps=STEPS, guidance=1.0, on_step=prepare)
        seconds = time.perf_counter() - started
    return video, seconds / STEPS


def measure(folder: Path, seeds: int) -> list[dict[str, Any]]:
    """Measure all methods: "distances" (squared, relative to the original's video, by seed) and "seconds" per step."""
    task = TASKS["wan"]
    teacher = grids.train(task, folder / "wan.safetensors")
    rows: dict[tuple[str, Size], dict[str, Any]] = {}
    for seed in range(seeds):
        models: dict[str | None, Any] = {None: teacher}
        for start in dict.fromkeys(method.start for method in METHODS.values() if method.start is not None):
            models[start] = grids.convert_or_load("wan", teacher, start, seed, folder)
        for size in SIZES:
            for _ in range(ROUNDS if seed == 0 else 1):
                for name, method in METHODS.items():
                    video, seconds = sample(models[method.start], method, size, seed)
                    if name == "softmax":
                        expected = video
                    row: dict[str, Any] = {"method": name, "size": size, "distances": [], "seconds": seconds}
                    row = rows.setdefault((name, size), row)
                    row["seconds"] = min(row["seconds"], seconds)
                    distance = float((video - expected).square().sum() / expected.square().sum())
                    row["distances"][seed:] = [distance]
                    print(f"{size}, {name}: {distance:.4f}, {seconds:.3f} s per step", file=sys.stderr, flush=True)
    return list(rows.values())


def render_peers(record: Mapping[str, Any]) -> str:
    exact = {tuple(row["size"]): row["seconds"] for row in record["rows"] if row["method"] == "softmax"}
    titles = [f"{title}, {' x '.join(map(str, size))}" for size in exact for title in ("distance", "times faster")]
    lines: dict[str, list[str]] = {}
    for row in record["rows"]:
        distance = format_range(row["distances"], "{:.4f}") if any(row["distances"]) else "0"
        cells = [distance, f"{exact[tuple(row['size'])] / row['seconds']:.2f}"]
        lines.setdefault(row["method"], [row["method"]]).extend(cells)
    seconds = " and ".join(f"{value:.2f}" for value in exact.values())
    table = markdown(["attention", *titles], list(lines.values()))
    return f"{table}\n\nA step of softmax takes {seconds} s. {describe_setup(record)}"


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = make_parser(__doc__, seeds=3)
    parser.add_argument("--out", type=Path, default=Path("out/grids"), help="folder to create, or with a trained model")
    args, command = parse_call(parser, "diffusion_peers", arguments)
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    record = write_record(args.out / "diffusion_peers.json", {"rows": measure(args.out, args.seeds)}, command)
    print(render_peers(record))
    return record


if __name__ == "__main__":
    script(main, "diffusion_peers")
