"""What all kernels share: matrix products, and how tokens, tiles, and states are located and read.

Triton's interpreter, in which kernels run on CPU tensors, rounds wrongly to bf16, so matrix products go through `dot`,
which avoids that, and all else is computed in fp32.

A tensor [B, T, H, W] enters a kernel as a tuple (pointer, stride of the row, of the token, of the head); its last axis is
contiguous. BT, BK, and BV are tile sizes along tokens and the widths K and V; "lanes" are indices along a width.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, no_type_check

import torch
from torch import Tensor

from ..blocks import Blocks
from .tuning import INTERPRETED, kernel, tl

constexpr = None if tl is None else tl.constexpr
UPCAST = None if tl is None else tl.constexpr(INTERPRETED)  # kernels can only read constants of this type


@kernel
@no_type_check
def as_tf32(x):
    """Cut off the last 13 bits of fp32 numbers, as a tf32 product does in the worst case."""
    return (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@kernel
@no_type_check
def cast(x, dtype: constexpr):
    """Cast x, rounding to nearest even, also in the interpreter, which would truncate fp32 to bf16."""
    if UPCAST and dtype == tl.bfloat16 and x.dtype == tl.float32:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)


@kernel
@no_type_check
def operand(x, DOT: constexpr):
    """Cast an operand of a matrix product: to bf16 if DOT is "bf16", else to fp32."""
    return cast(x, tl.bfloat16) if DOT == "bf16" else x.to(tl.float32)


@kernel
@no_type_check
def dot(a, b, DOT: constexpr):
    """Compute a @ b in fp32. DOT is "bf16", or the `input_precision` of fp32 numbers: "tf32", "tf32x3", or "ieee"."""
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
@no_type_check
def program_of(num_lane_tiles, num_parts, num_blocks, num_heads):
    """Return the indices of this program: tile along a width, part of a block, block, head, and batch row."""
    program = tl.program_id(0)
    item = program // num_lane_tiles // num_parts
    head = (item // num_blocks % num_heads).to(tl.int64)
    row = (item // num_blocks // num_heads).to(tl.int64)
    return program % num_lane_tiles, program // num_lane_tiles % num_parts, item % num_blocks, head, row


@kernel
@no_type_check
def block_range(block, row, tables, num_tokens, block_size):
    """Return the first place of a block and the one after its last; see `KernelBlocks` for places and `tables`."""
    edges, starts = tables[0], tables[2]
    if edges is not None:
        low = tl.load(edges + 2 * block)
        high = tl.load(edges + 2 * block + 1)
    else:
        low = (block * block_size).to(tl.int32)
        if starts is not None:
            low += tl.load(starts + row).to(tl.int32)
        high = tl.minimum(low + block_size, num_tokens)
    return low, high


@kernel
@no_type_check
def tokens_from(low, high, tables, key_mask, row, num_tokens, BT: constexpr, AS_KEYS: constexpr):
    """Return the tokens at the BT places from `low` on, and two masks: which are valid (before `high`), and which are real.

    Real tokens are the valid ones; with AS_KEYS, only those of them for which `key_mask` [B, T] is True.
    """
    order = tables[1]
    place = low + tl.arange(0, BT)
    valid = place < high
    if order is not None:
        token = tl.load(order + place, mask=valid, other=0).to(tl.int64)
    else:
        token = place.to(tl.int64)
    real = valid
    if AS_KEYS and key_mask is not None:
        real = valid & (tl.load(key_mask + row * num_tokens + token, mask=valid, other=0) != 0)
    return token, valid, real


@kernel
@no_type_check
def tile_of(
    num_lane_tiles, key_mask, tables, num_tokens, block_size, span, num_blocks, num_heads,
    BT: constexpr, CAUSAL: constexpr, AS_KEYS: constexpr,
):  # fmt: skip
    """Return this program's lane tile, row, head, block, and state, the states per head, and what `tokens_from` returns."""
    num_parts = tl.cdiv(span, BT)
    tile, part, block, head, row = program_of(num_lane_tiles, num_parts, num_blocks, num_heads)
    low, high = block_range(block, row, tables, num_tokens, block_size)
    token, valid, real = tokens_from(low + part * BT, high, tables, key_mask, row, num_tokens, BT, AS_KEYS)
    state, num_states = block, num_blocks
    if CAUSAL:
        state, num_states = block * num_parts + part, num_blocks * num_parts
    return tile, row, head, block, state, num_states, token, valid, real


@kernel
@no_type_check
def tile_pointers(x, row, token, head, lanes):
    """Return the pointers to some tokens and lanes of a head of x [B, T, H, W]."""
    pointer, row_stride, token_stride, head_stride = x[0], x[1], x[2], x[3]
    return pointer + row * row_stride + head * head_stride + token[:, None] * token_stride + lanes[None, :]


@kernel
@no_type_check
def load_tile(x, row, token, head, valid, lanes, WIDTH: constexpr):
    """Load a tile of x [B, T, H, WIDTH] at some tokens, with zeros where not valid or beyond WIDTH."""
    pointers = tile_pointers(x, row, token, head, lanes)
    return tl.load(pointers, mask=valid[:, None] & (lanes < WIDTH)[None, :], other=0.0)


@kernel
@no_type_check
def store_tile(x, row, token, head, valid, lanes, tile, WIDTH: constexpr):
    """Store a tile to x [B, T, H, WIDTH] at some tokens, where valid."""
    pointers = tile_pointers(x, row, token, head, lanes)
    tl.store(pointers, cast(tile, x[0].dtype.element_ty), mask=valid[:, None] & (lanes < WIDTH)[None, :])


@kernel
@no_type_check
def load_number(x, row, token, head, num_tokens, num_heads, valid):
    """Load x [B, T, H] at some tokens of a head, with zeros where not valid."""
    return tl.load(x + (row * num_tokens + token) * num_heads + head, mask=valid, other=0.0)


@kernel
@no_type_check
def load_scaled(x, factor, row, token, head, num_tokens, num_heads, valid, lanes, WIDTH: constexpr, DOT: constexpr):
    """Load a tile as `load_tile` does and, if there is a factor [B, T, H], multiply by it and cast as `operand` does."""
    tile = load_tile(x, row, token, head, valid, lanes, WIDTH)
    if factor is not None:
        numbers = load_number(factor, row, token, head, num_tokens, num_heads, valid)
        tile = operand(tile.to(tl.float32) * numbers[:, None], DOT)
    return tile


@kernel
@no_type_check
def load_state(states, index, k_lanes, v_lanes, K: constexpr, V: constexpr):
    """Load a tile of state number `index` of states [..., K, V]."""
    pointers = states + index * (K * V) + k_lanes[:, None] * V + v_lanes[None, :]
    return tl.load(pointers, mask=(k_lanes < K)[:, None] & (v_lanes < V)[None, :], other=0.0)


@kernel
@no_type_check
def invert_or_zero(den):
    """Return 1 / den, or 0 where `divide_or_zero` gives 0."""
    nonzero = tl.abs(den) >= 1.1754943508222875e-38  # the smallest normal fp32 number
    return tl.where(nonzero, 1.0 / tl.where(nonzero, den, 1.0), 0.0)


BlockTables = tuple[Tensor | None, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class KernelBlocks:
    """Tells kernels which tokens are in which block; `span` is the number of tokens of the largest block.

    A token's place is its index in an order in which blocks are contiguous. Block i of a row begins at place
    starts[row] + i * block_size or, if there are `edges`, at edges[i, 0]. The tables, each None if not needed, are edges,
    int32 [M, 2], the first place of each block and the one after its last; order, int32 [T], the token at each place; and
    starts.
    """

    num_blocks: int
    num_tokens: int
    span: int
    block_size: int  # 0 for a grid whose blocks are listed in `edges`
    tables: BlockTables

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of kernels that locate blocks."""
        return {name: value for name, value in vars(self).items() if name != "span"}


def kernel_blocks(
    numbers: list[int], device: torch.device, starts: Tensor | None = None, edges: Tensor | None = None
) -> KernelBlocks:
    """Make `KernelBlocks` from the result of `blocks_as_numbers` and, if any, starts or the edges of packed sequences."""
    block_size, prefix, num_axes, *sizes = numbers
    counts, shape, *others = (tuple(sizes[i : i + num_axes]) for i in range(0, len(sizes), num_axes))
    blocks = Blocks(shape, counts, block_size or None, prefix, tuple(others))
    size = blocks.block_size
    if edges is not None:
        assert size is not None  # packed sequences have blocks of a fixed size
        return KernelBlocks(edges.shape[0], blocks.length, size, size, (edges, None, None))
    if size is None and blocks.contiguous and blocks.equal:
        size = blocks.length // blocks.num_blocks
    if size is not None:
        span = min(size, blocks.length)
        return KernelBlocks(blocks.num_blocks, blocks.length, span, size, (None, None, starts))
    return KernelBlocks(blocks.num_blocks, blocks.length, max(blocks.sizes()), 0, grid_tables(blocks, device))


def blocks_as_numbers(blocks: Blocks) -> list[int]:
    """Convert to integers for an operator's schema: block size or 0, prefix, number of axes, counts, and shapes of grids."""
    others = [size for shape in blocks.others for size in shape]
    return [blocks.block_size or 0, blocks.prefix, len(blocks.counts), *blocks.counts, *blocks.shape, *others]


@lru_cache(maxsize=1024)  # large, because a captured CUDA graph keeps reading the tables of its grid
def grid_tables(blocks: Blocks, device: torch.device) -> BlockTables:
    """Return the tables of `KernelBlocks` for a grid."""
    ends = torch.tensor(blocks.sizes()).cumsum(0)
    edges = torch.stack((ends - torch.tensor(blocks.sizes()), ends), 1)
    order = torch.argsort(blocks.index(), stable=True)
    return edges.to(device, torch.int32), order.to(device, torch.int32), None
