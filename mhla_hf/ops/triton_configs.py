"""Which tile sizes, warps and stages each kernel runs with: a table by shape, dtype and chip, not a search.

Entries are compiled offline by the tests, which assert no register spill and that shared memory fits; `docs/kernels.md`
lists the outcome. Not a search because that needs a driver even where nothing runs on a GPU, and because its outcome would
change with every new length.
"""

from functools import lru_cache

import torch

from .triton_common import INTERPRETED, TILE_TOKENS, lanes_for

SMALL_SHARED_MEMORY = {(8, 6), (8, 7), (8, 9), (12, 0), (12, 1)}


@lru_cache(maxsize=64)
def chip_of(device):
    """(major, minor) of a CUDA device; (0, 0) for AMD and (9, 0) for the interpreter."""
    if device.type != "cuda":
        return 9, 0
    return (0, 0) if torch.version.hip else torch.cuda.get_device_capability(device)


def dot_precision(dot, amd=bool(torch.version.hip)):
    """How fp32 operands are multiplied: three tf32 products on NVIDIA's tensor cores, about as exact as fp32."""
    return "tf32x3" if dot == torch.float32 and not amd and not INTERPRETED else "ieee"


def pass_config(kind, width, other, dot, device):
    """Tiles, warps and stages of a kernel for inner width X and outer width Y: the keywords of its launch."""
    return config_for(kind, width, other, dot, chip_of(device))


@lru_cache(maxsize=1024)
def config_for(kind, width, other, dot, chip):
    """`pass_config` for a chip's (major, minor)."""
    wide = dot == torch.float32
    inner = lanes_for(width)
    config = {"num_warps": 4, "num_stages": 2}
    if kind == "summaries":
        config |= {"BT": 32 if wide else 64, "BX": min(64, inner), "BY": min(64, lanes_for(other))}
    elif kind == "mix":
        config |= {"BM": 32, "BN": 32, "BX": 64 if wide else 128}
    elif kind == "mix_grads":
        config |= {"BM": 32, "BN": 32, "BX": 32 if wide else 64, "num_warps": 8 if wide else 4}
    else:
        half = inner > 128 or (kind == "attend_long" and inner > 64)
        config |= {"BT": 32 if half else TILE_TOKENS, "BY": 32 if wide or half else 64}
        if wide and kind in ("attend_own", "attend_long", "quadratic"):
            config |= {"BT": 16, "num_stages": 1}
        config["BY"] = min(config["BY"], lanes_for(other))
        config["num_warps"] = 4 if kind == "attend" and inner < 128 else 8
    if INTERPRETED:
        config |= {name: 32 for name in ("BT", "BX", "BY", "BM", "BN") if name in config}
    return config
