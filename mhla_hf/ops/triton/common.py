"""What the kernels share: products, and how tokens, tiles and states are found and read.

Kernels also run in triton's interpreter, on CPU tensors, where bf16 arithmetic is wrong: products go through `dot`, and
everything else is fp32. A tensor [B, T, H, W] enters a kernel as a tuple (pointer, stride of the row, of the token, of the
head); its last axis is contiguous. Offsets are int64. Letters in kernels: K and V are the widths of keys and values, BT, BK
and BV the tiles of tokens and of the two widths.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch

from ..blocks import Blocks
from .tuning import INTERPRETED, kernel, tl

constexpr = None if tl is None else tl.constexpr
UPCAST = INTERPRETED if tl is None else tl.constexpr(INTERPRETED)


@kernel
def as_tf32(x):
    """fp32 numbers as a tf32 product reads them in the worst case: their last 13 bits cut off."""
    return (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@kernel
def cast(x, dtype: constexpr):
    """x in another dtype, to nearest even; the interpreter alone would cut fp32 off to make bf16."""
    if UPCAST and dtype == tl.bfloat16 and x.dtype == tl.float32:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)


@kernel
def operand(x, DOT: constexpr):
    """x as a product reads it: bf16 if DOT is that, else fp32."""
    if DOT == "bf16":
        x = cast(x, tl.bfloat16)
    else:
        x = x.to(tl.float32)
    return x


@kernel
def dot(a, b, DOT: constexpr):
    """a @ b in fp32; DOT is "bf16", or how fp32 numbers are multiplied: "tf32", "tf32x3" (three of tf32) or "ieee"."""
    a, b = operand(a, DOT), operand(b, DOT)
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
        if DOT == "tf32":
            a, b = as_tf32(a), as_tf32(b)
        product = tl.dot(a, b, input_precision="ieee")
    elif DOT == "bf16":
        product = tl.dot(a, b)
    else:
        product = tl.dot(a, b, input_precision=DOT)
    return product


@kernel
def program_of(tiles, parts, blocks, heads):
    """Which tile, part of a block, block, head and row of the batch this program is for."""
    program = tl.program_id(0)
    item = program // tiles // parts
    head, row = (item // blocks % heads).to(tl.int64), (item // blocks // heads).to(tl.int64)
    return program % tiles, program // tiles % parts, item % blocks, head, row


@kernel
def block_range(block, row, places, tokens, size):
    """First place of a block, and the place behind its last; places: the tables of `Cut`."""
    if places[0] is not None:
        low = tl.load(places[0] + 2 * block)
        high = tl.load(places[0] + 2 * block + 1)
    else:
        low = (block * size).to(tl.int32)
        if places[2] is not None:
            low += tl.load(places[2] + row).to(tl.int32)
        high = tl.minimum(low + size, tokens)
    return low, high


@kernel
def tokens_from(low, high, places, key_mask, row, tokens, BT: constexpr, KEYS: constexpr):
    """The tokens (int64) at BT places of the block order, which of them lie before `high`, and of those, where KEYS, which
    key_mask [B, T] leaves in."""
    place = low + tl.arange(0, BT)
    valid = place < high
    if places[1] is not None:
        token = tl.load(places[1] + place, mask=valid, other=0).to(tl.int64)
    else:
        token = place.to(tl.int64)
    real = valid
    if KEYS and key_mask is not None:
        real = valid & (tl.load(key_mask + row * tokens + token, mask=valid, other=0) != 0)
    return token, valid, real


@kernel
def tile_of(
    lane_tiles, key_mask, places, tokens, size, span, blocks, heads, BT: constexpr, CAUSAL: constexpr, KEYS: constexpr
):  # fmt: skip
    """What this program is for: the tile of lanes, row, head and block; the place of its state among a head's, and their
    number; its tokens, which of them there are, and where KEYS which of them are real keys."""
    parts = tl.cdiv(span, BT)
    tile, part, block, head, row = program_of(lane_tiles, parts, blocks, heads)
    low, high = block_range(block, row, places, tokens, size)
    token, valid, real = tokens_from(low + part * BT, high, places, key_mask, row, tokens, BT, KEYS)
    state, states = block, blocks
    if CAUSAL:
        state, states = block * parts + part, blocks * parts
    return tile, row, head, block, state, states, token, valid, real


@kernel
def load_tile(x, row, token, head, valid, lanes, WIDTH: constexpr):
    """Rows of x [B, T, H, WIDTH] at some tokens, zeros where not valid or beyond WIDTH."""
    pointers = x[0] + row * x[1] + head * x[3] + token[:, None] * x[2] + lanes[None, :]
    return tl.load(pointers, mask=valid[:, None] & (lanes < WIDTH)[None, :], other=0.0)


@kernel
def store_tile(x, row, token, head, valid, lanes, tile, WIDTH: constexpr):
    """Write a tile to rows of x [B, T, H, WIDTH]."""
    pointers = x[0] + row * x[1] + head * x[3] + token[:, None] * x[2] + lanes[None, :]
    tl.store(pointers, cast(tile, x[0].dtype.element_ty), mask=valid[:, None] & (lanes < WIDTH)[None, :])


@kernel
def load_number(x, row, token, head, tokens, heads, valid):
    """x [B, T, H] at some tokens of a head, zeros where not valid."""
    return tl.load(x + (row * tokens + token) * heads + head, mask=valid, other=0.0)


@kernel
def load_scaled(x, by, row, token, head, tokens, heads, valid, lanes, WIDTH: constexpr, DOT: constexpr):
    """`load_tile`, times by [B, T, H] if there is one."""
    tile = load_tile(x, row, token, head, valid, lanes, WIDTH)
    if by is not None:
        tile = operand(tile.to(tl.float32) * load_number(by, row, token, head, tokens, heads, valid)[:, None], DOT)
    return tile


@kernel
def load_state(state, index, k_lanes, v_lanes, K: constexpr, V: constexpr):
    """A tile of the index-th state of [.., K, V]."""
    pointers = state + index * (K * V) + k_lanes[:, None] * V + v_lanes[None, :]
    return tl.load(pointers, mask=(k_lanes < K)[:, None] & (v_lanes < V)[None, :], other=0.0)


@kernel
def invert_or_zero(den):
    """1 / den, and 0 where den vanishes: 0/0 is 0 in this operator."""
    alive = tl.abs(den) >= 1.1754943508222875e-38
    return tl.where(alive, 1.0 / tl.where(alive, den, 1.0), 0.0)


@dataclass(frozen=True)
class Cut:
    """Where the blocks of one side are, as kernels see it.

    blocks M, tokens T, and the most tokens in a block (span). places: edges, order and starts, None where not needed. Either
    block i is the places from starts[row] + i * size on, or edges (int32 [M, 2]) holds first and end of each; order (int32
    [T]) is the token at each place, which else is the place itself.
    """

    blocks: int
    tokens: int
    span: int
    size: int
    places: tuple


def cut_of(shape, device, starts=None, edges=None):
    """The Cut of `Blocks` as `spell` gives them, with tables where it needs them."""
    axes = len(shape) // 2 - 1
    blocks = Blocks(tuple(shape[:axes]), tuple(shape[axes:-2]), shape[-2] or None, shape[-1])
    size = blocks.block_size
    if edges is not None:
        return Cut(edges.shape[0], blocks.length, size, size, (edges, None, None))
    if size is None and blocks.contiguous and blocks.equal:
        size = blocks.length // blocks.num_blocks
    if size is not None:
        return Cut(blocks.num_blocks, blocks.length, min(size, blocks.length), size, (None, None, starts))
    return Cut(blocks.num_blocks, blocks.length, max(blocks.sizes()), 0, grid_tables(blocks, device))


def spell(blocks):
    """`Blocks` as integers, for an operator's schema: axes, counts, block size or 0, prefix."""
    return [*blocks.shape, *blocks.counts, blocks.block_size or 0, blocks.prefix]


@lru_cache(maxsize=1024)  # many, for a CUDA graph goes on reading those of its grid
def grid_tables(blocks, device):
    """The places of a grid; kept, for they are read every call."""
    ends = torch.tensor(blocks.sizes()).cumsum(0)
    edges = torch.stack((ends - torch.tensor(blocks.sizes()), ends), 1)
    order = torch.argsort(blocks.index(), stable=True)
    return edges.to(device, torch.int32), order.to(device, torch.int32), None
