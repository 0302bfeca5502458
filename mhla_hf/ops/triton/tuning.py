"""How kernels are made, how their tiles are chosen, and what their launchers share.

triton may be absent: then `kernel` leaves functions as they are and nothing launches. Counts that depend on a length are
never compile-time constants, so one compilation serves all lengths.
"""

from contextlib import nullcontext

import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None
    tl = None

INTERPRETED = triton is not None and triton.knobs.runtime.interpret
CHUNK = 64  # tokens of a tile; of a causal block, what is handled quadratically
WIDEST = 256
LENGTHS = {"tokens", "size", "span", "parts", "blocks", "columns", "m_head", "m_row", "group"}


def kernel(function):
    """`triton.jit`, with what depends on lengths kept out of the compilation key."""
    if triton is None:
        return function
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return triton.jit(function, do_not_specialize=[name for name in names if name in LENGTHS])


class TunedKernel:
    """A kernel whose tiles `triton.autotune` chooses, once for every combination of the constants named in `key`.

    configurations(constants) lists the tiles (keywords of a launch), the rule's first, which the interpreter takes. A kernel
    writes its outputs and reads none of them, so it can be run again and again to be timed.
    """

    def __init__(self, function, configurations, key):
        self.jitted, self.configurations, self.tuner = kernel(function), configurations, None
        if triton is not None and not INTERPRETED:
            any_two = [triton.Config({}, num_warps=warps) for warps in (4, 8)]  # `choices` takes their place
            prune = {"early_config_prune": lambda configs, arguments, **constants: self.choices(constants)}
            tune = triton.autotune(any_two, key=list(key), prune_configs_by=prune, cache_results=True)
            self.tuner = tune(self.jitted)

    def choices(self, constants):
        """The configurations that fit the shared memory of this GPU, at least one."""
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        room = getattr(properties, "shared_memory_per_block_optin", 65536)
        listed = self.configurations(constants)
        listed = [config for config in listed if shared_bytes(constants["DOT"], config) <= room] or listed[-1:]
        return [
            triton.Config(tiles, num_warps=tiles.pop("num_warps"), num_stages=tiles.pop("num_stages"))
            for tiles in listed
        ]

    def launch(self, grid, arguments, constants):
        """Start the kernel; grid is a function of the constants, tiles among them."""
        constants = {**constants, "enable_fp_fusion": True}
        if self.tuner is not None:
            self.tuner[grid](*arguments, **constants)
        else:
            self.jitted[grid](*arguments, **constants, **self.configurations(constants)[0])


def tuned(configurations, *key):
    """Decorator: a `TunedKernel`."""
    return lambda function: TunedKernel(function, configurations, key)


def token_tiles(constants, most=128):
    """What is tried for kernels on tokens: a rule, and its neighbors.

    The rule: whole heads of up to `most` lanes (fp32: 32), so that tiles stay in registers; else parts, of both alike.
    """
    K, V, bf16 = lanes_for(constants["K"]), lanes_for(constants["V"]), constants["DOT"] == "bf16"
    parts = max(1, max(K, V) // (most if bf16 else 32))
    BK, BV = max(16, K // parts), max(16, V // parts)
    warps = 4 if bf16 and max(BK, BV) <= 64 else 8
    rule = {"BT": CHUNK, "BK": BK, "BV": BV, "num_warps": warps, "num_stages": 2}
    half = {**rule, "BK": max(16, BK // 2), "BV": max(16, BV // 2), "num_warps": 4}
    more = [] if constants["CAUSAL"] else [{**rule, "BT": 2 * CHUNK, "num_warps": 8}]
    return [rule, {**rule, "num_warps": 12 - warps}, *more, half, {**half, "num_stages": 1}]


def summary_tiles(constants):
    """The same for summaries, whose tiles have the width of keys times that of values."""
    return token_tiles(constants, most=64)


def block_tiles(constants):
    """What is tried for products of mixing and summaries: a rule that knows the dtype only, and its neighbors."""
    wide = 2048 if INTERPRETED else 128 if constants["DOT"] == "bf16" else 64  # every tile costs the same in the former
    rule = {"BM": 32, "BN": 32, "BX": wide, "num_warps": 4, "num_stages": 2}
    return [rule, {**rule, "num_stages": 3}, {**rule, "BM": 64, "BN": 64, "num_warps": 8}, {**rule, "BX": wide // 2}]


def shared_bytes(DOT, config):
    """About the shared memory that a block of threads needs: for each stage, the tiles that a step of its loop loads."""
    rows, *others = (size for name, size in config.items() if name.startswith("B"))
    return config["num_stages"] * (2 if DOT == "bf16" else 4) * (rows * sum(others) + others[0] * others[-1])


def dot_kind(*tensors):
    """DOT for products of these tensors: fp16 numbers are read by tf32 exactly, and what is between them has room there."""
    kinds = {x.dtype for x in tensors}
    if kinds == {torch.bfloat16}:
        return "bf16"
    if torch.version.hip:
        return "ieee"
    return "tf32" if kinds == {torch.float16} else "tf32x3"


def on_device(x):
    """Launches inside go to x's device."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def as_argument(x):
    """A tensor [B, T, H, W] as a kernel takes it."""
    return (x, *x.stride()[:3])


def as_matrix(mixing):
    """A mixing matrix whose rows are contiguous as a kernel takes it: pointer, strides of the head and of the row."""
    return mixing, mixing.stride(0) if mixing.dim() == 3 else 0, mixing.stride(-2)


def in_rows(x):
    """x itself if its last axis is contiguous, else a copy."""
    return x if x is None or x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def lanes_for(width):
    """The power of two, at least 16, that holds a width."""
    return max(16, 1 << (width - 1).bit_length())


def tiles(count, tile):
    """How many tiles cover a count."""
    return (count + tile - 1) // tile
