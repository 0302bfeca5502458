"""How kernels are compiled and their tiles chosen, and small helpers of their launchers.

Without triton, `kernel` leaves functions as they are, and nothing is launched. Numbers that depend on a length are never
compile-time constants, so a kernel is compiled once for all lengths.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None
    tl = None

INTERPRETED = triton is not None and triton.knobs.runtime.interpret
CHUNK = 64  # tokens per tile; causal blocks are quadratic within one
MAX_HEAD_WIDTH = 256
# Kernel parameters on which Triton must not specialize: lengths, strides of the mixing matrix, and some ratios of numbers of
# heads. For values that are 1 or divisible by 16, it would compile a kernel again.
LENGTH_PARAMETERS = frozenset((
    "num_tokens", "block_size", "span", "num_parts", "num_blocks", "num_columns", "mixing_head_stride",
    "mixing_row_stride", "queries_per_kv", "sources_per_head", "heads_per_sum",
))  # fmt: skip


def kernel(function: Callable) -> Any:
    """Compile a function by `triton.jit`, not specialized on `LENGTH_PARAMETERS`; without triton, return it as it is."""
    if triton is None:
        return function
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return triton.jit(function, do_not_specialize=[name for name in names if name in LENGTH_PARAMETERS])


class TunedKernel:
    """A kernel whose tile sizes `triton.autotune` chooses once for every combination of the constants named in `key`.

    `configurations` returns the tile sizes to try for the constants of a launch, each with num_warps and num_stages; the
    interpreter takes the first. Kernels never read their outputs, so they can be run repeatedly for timing.
    """

    def __init__(self, function: Callable, configurations: Callable[[dict], list[dict]], key: tuple[str, ...]):
        self.jitted = kernel(function)
        self.configurations = configurations
        self.tuner = None
        if triton is not None and not INTERPRETED:
            placeholders = [triton.Config({}, num_warps=warps) for warps in (4, 8)]  # replaced by `choices`
            prune = {"early_config_prune": lambda configs, named_args, **arguments: self.choices(arguments)}
            tune = triton.autotune(placeholders, key=list(key), prune_configs_by=prune, cache_results=True)
            self.tuner = tune(self.jitted)

    def choices(self, constants: dict[str, Any]) -> list[Any]:
        """Return the `triton.Config`s that fit the shared memory of this GPU, or only the last one if none fits."""
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        available = getattr(properties, "shared_memory_per_block_optin", 65536)
        configurations = self.configurations(constants)
        fitting = [config for config in configurations if shared_bytes(constants["DOT"], config) <= available]
        return [
            triton.Config(sizes, num_warps=sizes.pop("num_warps"), num_stages=sizes.pop("num_stages"))
            for sizes in fitting or configurations[-1:]
        ]

    def __getitem__(self, grid: Callable[[dict], tuple[int]]) -> Callable[..., Any]:
        """Return the launcher of the kernel, which takes all arguments and constants but tile sizes by keyword."""
        if self.tuner is not None:
            return partial(self.tuner[grid], enable_fp_fusion=True)
        launch = partial(self.jitted[grid], enable_fp_fusion=True)
        return lambda **arguments: launch(**arguments, **self.configurations(arguments)[0])


def tuned(configurations: Callable[[dict], list[dict]], *key: str) -> Callable[[Callable], TunedKernel]:
    return lambda function: TunedKernel(function, configurations, key)


def token_tiles(constants: dict[str, Any], max_lanes: int = 128) -> list[dict[str, int]]:
    """List the tile sizes to try for kernels on tokens: first those of a rule, then variants.

    By the rule, a tile is as wide as a head, but at most `max_lanes` lanes (32 if products are not bf16), to stay in
    registers. Wider keys and values are divided into the same number of parts.
    """
    K, V = (max(16, triton.next_power_of_2(constants[name])) for name in "KV")
    is_bf16 = constants["DOT"] == "bf16"
    num_parts = max(1, max(K, V) // (max_lanes if is_bf16 else 32))
    BK, BV = max(16, K // num_parts), max(16, V // num_parts)
    warps = 4 if is_bf16 and max(BK, BV) <= 64 else 8
    rule = {"BT": CHUNK, "BK": BK, "BV": BV, "num_warps": warps, "num_stages": 2}
    half = {**rule, "BK": max(16, BK // 2), "BV": max(16, BV // 2), "num_warps": 4}
    double = [] if constants["CAUSAL"] else [{**rule, "BT": 2 * CHUNK, "num_warps": 8}]
    return [rule, {**rule, "num_warps": 12 - warps}, *double, half, {**half, "num_stages": 1}]


def block_tiles(constants: dict[str, Any]) -> list[dict[str, int]]:
    """List the tile sizes to try for products of mixing and summaries, the default first."""
    width = 128 if constants["DOT"] == "bf16" else 64
    if INTERPRETED:  # where a tile of any size takes the same time
        width = 2048
    rule = {"BM": 32, "BN": 32, "BX": width, "num_warps": 4, "num_stages": 2}
    larger = {**rule, "BM": 64, "BN": 64, "num_warps": 8}
    return [rule, {**rule, "num_stages": 3}, larger, {**rule, "BX": width // 2}]


def shared_bytes(DOT: str, config: dict[str, int]) -> int:
    """Estimate the shared memory of a program in bytes: the tiles that an iteration of its loop loads, for each stage."""
    rows, *widths = (size for name, size in config.items() if name.startswith("B"))
    tile_elements = rows * sum(widths) + widths[0] * widths[-1]
    return config["num_stages"] * (2 if DOT == "bf16" else 4) * tile_elements


def dot_kind(*tensors: Tensor) -> str:
    """Return the DOT constant (see `dot`) for products of these tensors.

    fp16 tensors take tf32, which holds fp16 numbers exactly and intermediate results beyond the range of fp16. On AMD GPUs,
    all tensors but bf16 take "ieee".
    """
    dtypes = {x.dtype for x in tensors}
    if dtypes == {torch.bfloat16}:
        return "bf16"
    if torch.version.hip:
        return "ieee"
    return "tf32" if dtypes == {torch.float16} else "tf32x3"


def with_strides(x: Tensor) -> tuple[Tensor, int, int, int]:
    """Return a tensor [B, T, H, W] as kernels take it, with its strides of row, token, and head."""
    return x, x.stride(0), x.stride(1), x.stride(2)


def mixing_arguments(mixing: Tensor) -> dict[str, Any]:
    """Return the kernel arguments for a mixing matrix with contiguous rows; if heads share it, its head stride is 0."""
    head_stride = mixing.stride(0) if mixing.dim() == 3 else 0
    return {"mixing": mixing, "mixing_head_stride": head_stride, "mixing_row_stride": mixing.stride(-2)}


def contiguous_rows(x: Tensor) -> Tensor:
    """Return x if its last axis is contiguous, else a copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
