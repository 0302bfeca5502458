"""Which tile sizes, warps and stages each kernel runs with: a table by shape, dtype and chip, not a search.

Entries are compiled offline, within a chip's shared memory and, for most chips, without a register spill; `docs/kernels.md`
lists the outcome, and the tests fail where an entry or a kernel is not the one that was compiled. Not a search because that
needs a driver even where nothing runs on a GPU, and because its outcome would change with every new length.
"""

from functools import lru_cache

import torch

from .triton_common import INTERPRETED, TILE_TOKENS, lanes_for

SMALL_SHARED_MEMORY = {(0, 0), (8, 6), (8, 7), (8, 9), (12, 0), (12, 1)}  # (0, 0): AMD


# What the general rules of `config_for` would spill: (8 for chips without warp-group products, else the chip's major, kind,
# lanes, some of them masked, products) -> changes, each the largest tile of a list that compiles in every role of that kind;
# "maxnreg" where ptxas by itself would rather spill a few bytes than hold one block less. Those of "_padded" kinds come on
# top where there is a key mask, then "_queries" in the gradient of normalised queries, and those of 12 on top of those of 8.
# Mixing kernels have no lanes: 0, whatever M is.
EXCEPTIONS = {
    **{(8, "summaries", lanes, False, "fp16"): {"num_stages": 1, "maxnreg": 96} for lanes in (64, 128, 256)},
    **{(8, "summaries", lanes, False, "tf32"): {"maxnreg": 96} for lanes in (64, 128, 256)},
    (8, "summaries", 128, True, "tf32"): {"num_warps": 4, "num_stages": 1, "maxnreg": 255},
    **{(family, "mix", 0, False, "bf16"): {"num_stages": 3} for family in (8, 9)},
    **{(family, "mix", 0, False, "fp32"): {"maxnreg": 168} for family in (8, 9)},
    **{
        (family, kind, 256, False, "bf16"): {"num_stages": 2}
        for family in (8, 9)
        for kind in ("attend_own_keys", "attend_long_keys")
    },
    (8, "summaries", 32, False, "bf16"): {"maxnreg": 64},
    (8, "summaries", 128, True, "bf16"): {"maxnreg": 128},
    (8, "summaries", 128, True, "fp16"): {"maxnreg": 99},
    (8, "summaries", 128, True, "fp32"): {"maxnreg": 254},
    (8, "attend", 64, False, "fp32"): {"maxnreg": 250},
    (8, "quadratic", 16, True, "fp32"): {"maxnreg": 72},
    (8, "quadratic_padded", 16, True, "fp32"): {"maxnreg": 255},
    (8, "quadratic", 64, False, "bf16"): {"maxnreg": 255},
    (8, "quadratic", 64, False, "fp16"): {"maxnreg": 155},
    (8, "quadratic", 128, True, "bf16"): {"maxnreg": 195},
    (8, "quadratic", 32, False, "tf32"): {"maxnreg": 94},
    (8, "attend_long_keys", 32, False, "tf32"): {"BT": 32, "num_stages": 1},
    (8, "quadratic", 32, False, "fp32"): {"num_stages": 2},
    (8, "quadratic", 128, False, "bf16"): {"BT": 32, "BY": 64, "num_warps": 8, "num_stages": 2},
    (8, "quadratic", 128, True, "tf32"): {"BT": 16, "BY": 64, "num_warps": 8, "num_stages": 1, "maxnreg": 255},
    (8, "quadratic", 128, False, "tf32"): {"maxnreg": 255},
    (8, "quadratic_padded", 128, False, "bf16"): {"maxnreg": 255},
    (8, "quadratic_padded", 128, False, "fp16"): {"BT": 32},
    (8, "quadratic", 128, True, "fp32"): {"BT": 16, "BY": 64, "num_warps": 8, "num_stages": 1},
    (8, "attend_own", 32, False, "bf16"): {"BT": 64, "BY": 64, "num_warps": 4, "num_stages": 2},
    (8, "attend_own", 128, True, "bf16"): {"BT": 32, "BY": 32, "num_warps": 8, "num_stages": 1},
    (8, "attend_own_keys", 32, False, "fp32"): {"BT": 16, "BY": 64, "num_warps": 8, "num_stages": 1},
    (8, "attend_own_keys_padded", 64, False, "tf32"): {"maxnreg": 255},
    (8, "attend_long", 128, False, "bf16"): {"BT": 64, "BY": 32, "num_warps": 8, "num_stages": 1},
    (8, "attend_long", 128, False, "fp16"): {"BT": 64, "BY": 32, "num_warps": 8, "num_stages": 1},
    (8, "attend_long", 256, False, "bf16"): {"BT": 16, "BY": 16, "num_warps": 8, "num_stages": 1},
    (8, "attend_long_keys", 32, False, "bf16"): {"BT": 32, "BY": 32, "num_warps": 4, "num_stages": 2},
    (8, "attend_long_keys", 32, False, "fp32"): {"BT": 16, "BY": 64, "num_warps": 8, "num_stages": 1},
    (8, "attend_long_padded", 128, False, "bf16"): {"BT": 32},
    (8, "summaries_padded", 64, False, "tf32"): {"maxnreg": 116},
    (8, "attend_long_padded", 64, False, "fp16"): {"num_stages": 1},
    (8, "quadratic_padded", 128, True, "fp16"): {"maxnreg": 255},
    (8, "quadratic_padded", 64, False, "fp16"): {"maxnreg": 255},
    (8, "attend_long_padded", 128, False, "fp16"): {"BT": 32},
    (8, "attend_own_padded", 128, True, "fp16"): {"BY": 16},
    (10, "attend_own", 64, False, "bf16"): {"BT": 64, "BY": 32, "num_warps": 4, "num_stages": 2},
    **{(10, "summaries", lanes, False, "bf16"): {"num_stages": 1} for lanes in (32, 128, 256)},
    (10, "summaries", 64, False, "bf16"): {"maxnreg": 255},
    (10, "summaries", 128, True, "bf16"): {"num_stages": 1, "maxnreg": 255},
    (10, "summaries", 128, True, "fp32"): {"BT": 64, "num_warps": 4, "num_stages": 1, "maxnreg": 255},
    (10, "mix", 0, False, "fp32"): {"maxnreg": 255},
    **{(10, "summaries", lanes, False, "fp32"): {"maxnreg": 255} for lanes in (32, 64)},
    (10, "attend_padded", 64, False, "tf32"): {"maxnreg": 255},
    **{(10, "quadratic", lanes, False, "tf32"): {"maxnreg": 255} for lanes in (32, 64)},
    **{(10, kind, 32, False, "tf32"): {"maxnreg": 255} for kind in ("attend_own", "attend_long")},
    **{
        (family, kind, 32, False, "tf32"): {"maxnreg": None}
        for family in (9, 10)
        for kind in ("attend_own_padded", "attend_long_padded")
    },
    (10, "attend_own", 128, True, "bf16"): {"maxnreg": 255},
    (10, "attend_long", 128, False, "bf16"): {"maxnreg": 255},
    (10, "attend_long_keys", 64, False, "bf16"): {"maxnreg": 255},
    (10, "attend_own_keys_padded", 32, False, "tf32"): {"maxnreg": 255},
    (10, "attend_long_padded", 64, False, "fp16"): {"maxnreg": 255},
    (10, "quadratic_padded", 128, True, "fp16"): {"BT": 32, "maxnreg": 255},
    **{(10, "attend", *lanes, "fp32"): {"maxnreg": 255} for lanes in ((32, False), (16, True))},
    (10, "quadratic_padded", 32, False, "fp32"): {"maxnreg": 255},
    (10, "attend_own", 32, False, "bf16"): {"maxnreg": 255},
    (10, "attend_own_keys_padded", 32, False, "bf16"): {"maxnreg": 255},
    (10, "attend", 32, False, "tf32"): {"maxnreg": 255},
    (10, "summaries", 128, True, "tf32"): {"maxnreg": 255},
    (10, "attend", 64, False, "fp32"): {"num_stages": 1},
    (10, "normed", 64, False, "fp16"): {"maxnreg": 255},
    **{(10, "quadratic", 128, False, dot): {"maxnreg": 255} for dot in ("bf16", "fp16")},
    (10, "attend_own_queries", 64, False, "tf32"): {"maxnreg": 255},
    (10, "summaries_padded", 128, False, "fp16"): {"maxnreg": 255},
    (10, "quadratic", 32, False, "fp32"): {"num_stages": 2},
    (10, "quadratic", 64, False, "bf16"): {"num_stages": 1},
    (10, "quadratic", 128, True, "bf16"): {"BT": 32, "BY": 64, "num_stages": 1, "maxnreg": 255},
    (10, "quadratic", 32, False, "bf16"): {"maxnreg": 255},
    (10, "attend", 64, False, "tf32"): {"maxnreg": 255},
    (10, "quadratic_padded", 64, False, "fp16"): {"maxnreg": 255},
    (10, "attend_own", 32, False, "fp32"): {"BT": 16, "BY": 64, "num_stages": 2},
    (10, "attend_own", 128, False, "bf16"): {"num_stages": 1},
    (10, "attend_long", 32, False, "fp32"): {"BT": 16, "BY": 64, "num_stages": 2},
    (10, "attend_long_keys", 32, False, "bf16"): {"num_stages": 2},
    (10, "attend_long_keys", 32, False, "fp32"): {"BT": 16, "BY": 16, "num_stages": 1},
    (12, "summaries", 32, False, "fp32"): {"BT": 64, "num_stages": 2, "maxnreg": 255},
    (12, "mix_grads", 0, False, "fp32"): {"num_stages": 2},
    **{(family, "mix_grads", 0, False, "bf16"): {"maxnreg": 255} for family in (9, 12)},
    (12, "quadratic", 128, False, "fp16"): {"num_stages": 2},
    (12, "attend", 16, True, "fp32"): {"maxnreg": 255},
    **{(12, "normed", lanes, False, dot): {"maxnreg": 255} for lanes in (32, 64, 128) for dot in ("bf16", "fp16")},
    (12, "attend_own", 16, True, "fp32"): {"maxnreg": 255},
    (12, "attend_own_padded", 128, True, "bf16"): {"maxnreg": 255},
    (12, "attend_own_padded", 64, False, "tf32"): {"maxnreg": 255},
    (12, "attend_own_queries", 128, True, "bf16"): {"maxnreg": None},
    (12, "attend_own_queries", 64, False, "tf32"): {"maxnreg": None},
    **{(12, "attend", 32, False, dot): {"maxnreg": 255} for dot in ("bf16", "fp16")},
    (12, "attend", 64, False, "fp32"): {"num_warps": 8, "maxnreg": 255},
    (12, "attend", 64, False, "tf32"): {"maxnreg": 255},
    (12, "attend", 128, True, "bf16"): {"BY": 32, "maxnreg": 255},
    **{(12, "summaries", lanes, False, "tf32"): {"maxnreg": 255} for lanes in (32, 64, 128, 256)},
    **{(12, "summaries", lanes, False, "fp16"): {"maxnreg": 255} for lanes in (128, 256)},
    (12, "summaries_padded", 64, False, "fp16"): {"maxnreg": 255},
    (12, "attend_padded", 32, False, "fp32"): {"maxnreg": 255},
    (12, "attend", 128, False, "fp16"): {"maxnreg": 255},
    (12, "attend", 256, False, "bf16"): {"maxnreg": 255},
    (12, "quadratic", 16, True, "fp32"): {"maxnreg": 255},
    (12, "quadratic", 128, False, "bf16"): {"maxnreg": 255},
    (12, "quadratic", 128, False, "tf32"): {"BT": 16, "BY": 64, "num_warps": 8, "num_stages": 1},
    (12, "summaries", 128, True, "fp16"): {"maxnreg": 255},
    **{(12, "quadratic_padded", 128, True, dot): {"num_stages": 2, "maxnreg": 255} for dot in ("bf16", "fp16")},
    (12, "quadratic", 32, False, "fp32"): {"maxnreg": 255},
    (12, "attend_padded", 16, True, "fp32"): {"maxnreg": 255},
    (12, "attend_padded", 32, False, "tf32"): {"maxnreg": 255},
    (12, "attend_own_padded", 64, False, "bf16"): {"num_stages": 2, "maxnreg": 255},
    (12, "attend_own", 128, False, "bf16"): {"num_stages": 2},
    **{
        (12, kind, 128, masked, "bf16"): {"num_stages": 2}
        for kind in ("attend_own_keys", "attend_long_keys")
        for masked in (False, True)
    },
    **{(12, f"attend_{kind}_keys_padded", 128, True, "bf16"): {"BY": 16} for kind in ("own", "long")},
    **{(12, f"attend_{kind}_keys", 64, False, "tf32"): {"BY": 16} for kind in ("own", "long")},
    (12, "attend_own_padded", 128, True, "fp16"): {"BT": 32},
    (12, "attend_long_padded", 64, False, "bf16"): {"BT": 32, "BY": 16},
    (12, "attend_long_padded", 128, False, "bf16"): {"BT": 16},
    (12, "attend_long_padded", 64, False, "fp16"): {"BY": 16},
    (12, "attend_long_padded", 128, False, "fp16"): {"num_stages": 2},
    **{(12, "quadratic", 64, False, dot): {"maxnreg": 255} for dot in ("fp16", "fp32", "tf32")},
    **{(12, kind, 64, False, "tf32"): {"BY": 16} for kind in ("attend_own", "attend_long")},
    (12, "attend_own", 128, True, "bf16"): {"BT": 16, "BY": 16},
    (12, "attend_own", 256, False, "bf16"): {"num_stages": 2},
    (12, "attend_long_queries", 128, False, "bf16"): {"BT": 16, "num_warps": 4, "maxnreg": 255},
    **{(12, kind, 32, False, "fp32"): {"BY": 64, "num_stages": 2} for kind in ("attend_own", "attend_long")},
    **{(12, f"attend_{kind}_keys", 32, False, "fp32"): {"BY": 64, "num_stages": 2} for kind in ("own", "long")},
    **{(12, kind, 32, False, "tf32"): {"BT": 16} for kind in ("attend_own_keys", "attend_long_keys")},
    (12, "attend_long", 256, False, "fp16"): {"BY": 16},
    **{(12, "attend_long", 128, masked, "bf16"): {"BY": 16} for masked in (False, True)},
    (9, "summaries", 32, False, "fp32"): {"BT": 64, "maxnreg": 255},
    **{(9, kind, 32, False, "fp32"): {"num_warps": 4, "num_stages": 2} for kind in ("attend_own", "attend_long")},
    (9, "attend_own_keys", 32, False, "fp32"): {"BT": 16, "BY": 32, "num_warps": 8, "num_stages": 2},
    (9, "quadratic", 16, True, "fp32"): {"maxnreg": 255},  # for triton 3.6
    **{(9, kind, 64, False, "fp32"): {"num_stages": 2} for kind in ("attend_own", "attend_long")},
    (9, "quadratic", 64, False, "tf32"): {"maxnreg": 100},
    (9, "quadratic", 32, False, "tf32"): {"maxnreg": 80},
    (9, "attend_own", 32, False, "tf32"): {"maxnreg": 252},
    (9, "attend_long", 32, False, "tf32"): {"maxnreg": 252},
    (9, "attend_long_keys", 32, False, "tf32"): {"BT": 32, "BY": 16, "num_stages": 2},
    **{(9, "quadratic", 128, masked, "tf32"): {"BT": 32, "BY": 64, "maxnreg": 255} for masked in (False, True)},
    (9, "quadratic_padded", 64, False, "fp32"): {"maxnreg": 255},  # for triton 3.6
    (9, "quadratic_padded", 32, False, "fp32"): {"maxnreg": 126},
    **{(9, "quadratic_padded", lanes, False, "tf32"): {"maxnreg": 255} for lanes in (32, 64)},
    (9, "attend_long_keys_padded", 32, False, "bf16"): {"BY": 16},
    (9, "quadratic", 32, False, "fp32"): {"BT": 16, "BY": 32, "num_warps": 4, "num_stages": 1},
    (9, "attend_own", 128, True, "bf16"): {"BT": 16, "BY": 64, "num_warps": 8, "num_stages": 1},
    (9, "attend_own", 16, True, "fp32"): {"maxnreg": 255},
    (9, "attend_own_queries", 128, True, "bf16"): {"maxnreg": 255},
    (9, "attend_own_padded", 128, True, "bf16"): {"maxnreg": 255},  # for triton 3.6
    (9, "attend_own_queries", 64, False, "tf32"): {"maxnreg": 255},
    (9, "attend_own", 128, True, "fp16"): {"BT": 32, "BY": 32, "num_warps": 8, "num_stages": 1},
    (9, "attend_own_padded", 128, True, "fp16"): {"BT": 64, "BY": 16},
    (9, "attend_long_keys", 32, False, "fp32"): {"BT": 16, "BY": 16, "num_warps": 8, "num_stages": 1},
}


@lru_cache(maxsize=64)
def chip_of(device):
    """(major, minor) of a CUDA device; (0, 0) for AMD and (9, 0) for the interpreter."""
    if device.type != "cuda":
        return 9, 0
    return (0, 0) if torch.version.hip else torch.cuda.get_device_capability(device)


def dot_precision(dot, amd=bool(torch.version.hip)):
    """How fp32 operands are multiplied on NVIDIA's tensor cores: as three tf32 products, about as exact as fp32, or as one.

    One is for the gradients of fp16 tensors, which it reads exactly: fp16 could not hold what is between them.
    """
    return {"fp32": "tf32x3", "tf32": "tf32"}.get(dot, "ieee") if not amd else "ieee"


def pass_config(kind, width, other, dot, device, key_mask=None):
    """Tiles, warps and stages of a kernel for inner width X and outer width Y: the keywords of its launch."""
    return dict(config_for(kind, width, other, dot, chip_of(device), key_mask is not None))


def lanes_at_once(kind, width, dot, device):
    """How many of `width` lanes one launch of an attend kernel sums over: all, or fewer where registers run out.

    That is with operands of 32 bits, and on chips of 12.x, whose products keep operands in registers, where causal.
    """
    tight = chip_of(device)[0] == 12
    if dot in ("fp32", "tf32"):
        return 32 if tight and dot == "fp32" and kind != "attend" else 64
    many = "long" in kind or kind.endswith("_keys")
    return min(width, 128) if tight and dot == "bf16" and many else width


@lru_cache(maxsize=1024)
def config_for(kind, width, other, dot, chip, padded=False):
    """`pass_config` for a chip's (major, minor), with a key mask or without."""
    wide, inner, family = dot in ("fp32", "tf32"), lanes_for(width), 8 if chip[0] == 12 else chip[0]
    config = {"num_warps": 8, "num_stages": 2}
    asked, kind = kind, kind.removesuffix("_queries")
    if kind == "close":
        return {**config, "num_warps": 4, **({"maxnreg": 255} if chip != (0, 0) else {})}
    if kind == "summaries":
        config |= {"BT": 32 if wide or family == 8 else 64, "BX": min(64, inner), "BY": min(64, lanes_for(other))}
        config["num_stages"] = 1 if wide else 2
    elif kind == "mix":
        config |= {"BM": 32, "BN": 32, "BX": 64 if wide else 128, "num_warps": 8 if wide else 4}
    elif kind == "mix_grads":
        config |= {"BM": 32, "BN": 32, "BX": 32 if wide else 64, "num_warps": 8 if wide else 4}
    else:
        config |= attend_tiles(kind, inner, dot, width < inner, family == 8)
        if chip == (0, 0):  # a warp has 64 lanes, and a lane 512 registers where there are no more than four
            config["num_warps"] = min(config["num_warps"], 4)
    shape = (0, False, dot) if kind in ("mix", "mix_grads") else (inner, width < inner, dot)
    kinds = dict.fromkeys((kind, f"{kind}_padded" if padded else kind, asked))
    for name in kinds:
        config |= EXCEPTIONS.get((family, name, *shape), {})
    if chip in SMALL_SHARED_MEMORY:
        config["num_stages"] = 1
    for name in kinds if chip[0] == 12 else ():
        config |= EXCEPTIONS.get((12, name, *shape), {})
    if "BY" in config:
        config["BY"] = min(config["BY"], lanes_for(other))
    if INTERPRETED:  # every tile costs the same there: fewer and larger ones
        config |= {name: 32 for name in ("BT", "BM", "BN") if name in config}
        config |= {"BX": min(8192, lanes_for(other))} if kind in ("mix", "mix_grads") else {}
        config |= {"BX": min(128, inner)} if kind == "summaries" else {}
        config |= {"BY": min(128, lanes_for(other))} if "BY" in config else {}
    return config


def attend_tiles(kind, inner, dot, masked, ampere):
    """Tokens BT and outer width BY of a tile of the kernels that make tokens, for `inner` lanes, some perhaps masked.

    What runs out is registers: with a running state ("long"), where the other side is weighed token by token ("keys"),
    with fp32 operands, with masked lanes, and on chips whose products keep operands in registers.
    """
    long, keys, wide, tight = "long" in kind, "keys" in kind, dot in ("fp32", "tf32"), masked or ampere
    small = {"BT": 16, "BY": 32, "num_stages": 1}
    if kind == "normed":
        return {"BT": TILE_TOKENS, "BY": 128, "num_warps": 8}
    if kind == "attend":
        return {"BT": TILE_TOKENS, "BY": 32 if wide or inner > 128 else 64, "num_warps": 8 if inner > 64 else 4}
    if kind == "quadratic" and inner > 64 and ampere and (dot == "tf32" or (masked and not wide)):
        return {**small, "BT": 32, "num_warps": 8 if wide else 4}
    if kind == "quadratic" and not (wide and inner <= 64) and dot != "fp32":
        return {"BT": TILE_TOKENS, "BY": 32 if tight or wide else 64, "num_stages": 1 if wide else 2}
    if keys and inner <= 32 and (wide or long):
        return {**small, "BT": TILE_TOKENS, "num_stages": 2 if wide else 1}
    if wide or (long and (inner > 128 or (masked and inner > 64))):
        return small
    if keys and (tight or inner > 128 or (long and inner > 64)):
        return {**small, "BY": 32 if tight or inner > 128 else 64}
    return {"BT": TILE_TOKENS, "BY": 32 if tight or long or inner > 128 else 64}
