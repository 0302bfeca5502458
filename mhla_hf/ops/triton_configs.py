"""Which tile sizes, warps and stages each kernel runs with: a table by shape, dtype and chip, not a search.

Entries are compiled offline by the tests, which assert no register spill and that shared memory fits; `docs/kernels.md`
lists the outcome. Not a search because that needs a driver even where nothing runs on a GPU, and because its outcome would
change with every new length.
"""

from functools import lru_cache

import torch

from .triton_common import INTERPRETED, TILE_TOKENS, WIDEST_FP32, lanes_for

SMALL_SHARED_MEMORY = {(8, 6), (8, 7), (8, 9), (12, 0), (12, 1)}


@lru_cache(maxsize=64)
def chip_of(device):
    """(major, minor) of a CUDA device; (0, 0) for AMD and (9, 0) for the interpreter."""
    if device.type != "cuda":
        return 9, 0
    return (0, 0) if torch.version.hip else torch.cuda.get_device_capability(device)


def dot_precision(dot, width=0, amd=bool(torch.version.hip)):
    """How fp32 operands are multiplied on NVIDIA's tensor cores: as three tf32 products, about as exact as fp32.

    Wide fp32 products are denominators of 16-bit features only, which one tf32 product holds exactly.
    """
    if dot != torch.float32 or amd or INTERPRETED:
        return "ieee"
    return "tf32x3" if width <= WIDEST_FP32 else "tf32"


def pass_config(kind, width, other, dot, device):
    """Tiles, warps and stages of a kernel for inner width X and outer width Y: the keywords of its launch."""
    return dict(config_for(kind, width, other, dot, chip_of(device)))


@lru_cache(maxsize=1024)
def config_for(kind, width, other, dot, chip):
    """`pass_config` for a chip's (major, minor)."""
    wide, inner = dot == torch.float32, lanes_for(width)
    config = {"num_warps": 8, "num_stages": 2}
    if kind == "summaries":
        config |= {"BT": 32 if wide or chip[0] == 8 else 64, "BX": min(64, inner), "BY": min(64, lanes_for(other))}
    elif kind == "mix":
        config |= {"BM": 32, "BN": 32, "BX": 64 if wide else 128, "num_warps": 8 if wide else 4}
    elif kind == "mix_grads":
        config |= {"BM": 32, "BN": 32, "BX": 32 if wide else 64, "num_warps": 8 if wide else 4}
    else:
        config |= attend_tiles(kind, inner, wide, width < inner or chip[0] == 8)
        config["BY"] = min(config["BY"], lanes_for(other))
    if chip in SMALL_SHARED_MEMORY:
        config["num_stages"] = 1
    if INTERPRETED:
        config |= {name: 32 for name in ("BT", "BM", "BN") if name in config}
        config |= {"BX": 2048} if kind in ("mix", "mix_grads") else {}
    return config


def attend_tiles(kind, inner, wide, tight):
    """Tokens BT and outer width BY of a tile of the kernels that make tokens, for `inner` lanes.

    What runs out is registers: with a running state ("long"), where the other side is weighed token by token ("keys"),
    with fp32 operands, and (tight) with masked lanes or on Ampere and Ada, whose products keep operands in registers.
    """
    long, keys = "long" in kind, "keys" in kind
    if kind == "attend":
        return {"BT": TILE_TOKENS, "BY": 32 if wide or inner > 128 else 64, "num_warps": 8 if inner > 64 else 4}
    if wide:
        return {"BT": 16, "BY": 32, "num_stages": 1}
    if keys and (tight or inner > 128 or (long and inner > 64)):
        return {"BT": 16, "BY": 32 if tight or inner > 128 else 64, "num_stages": 1}
    if tight and long and inner > 128:
        return {"BT": TILE_TOKENS, "BY": 16}
    return {"BT": TILE_TOKENS, "BY": 32 if tight or long or inner > 128 else 64}
