"""What all kernels share: the guarded import, the decorator, loads, dots, and the table of configurations.

Unusual: triton may be absent (then `kernel` leaves functions as they are and nothing launches), and kernels also run in
triton's interpreter, on CPU tensors, where bf16 arithmetic is wrong: every dot goes through `tile_dot`, every elementwise
operation through fp32. A tensor enters a kernel as a tuple (pointer, stride of the row, of the token, of the head); its
last axis is contiguous. Offsets are int64. Token and block counts are never compile-time constants.
"""

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache

import torch

from .blocks import Blocks

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None
    tl = None

constexpr = None if tl is None else tl.constexpr
INTERPRETED = triton is not None and triton.knobs.runtime.interpret
UPCAST = INTERPRETED if tl is None else tl.constexpr(INTERPRETED)
COUNTS = (
    *("tokens", "rows", "columns", "size", "size_a", "size_b", "blocks", "parts", "span", "pairs", "splits"),
    *("heads", "groups", "group", "share", "matrices"),  # of queries, of keys, the former to one of the latter
    *("capacity", "limit"),  # of a decoder's state
    *("m_head", "m_row"),  # strides of a mixing matrix, which are counts of blocks
)
REPEATS = ("reps",)  # one alone needs no loop: specialised where 1, but not where a multiple of 16
WIDEST = 256
TILE_TOKENS = 64
PART_TOKENS = 256
ENOUGH_PROGRAMS = 384  # some three for each multiprocessor of the largest GPUs


def kernel(function):
    """`triton.jit`, with counts that change from call to call kept out of the compilation key."""
    if triton is None:
        return function
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    counts, repeats = ([name for name in names if name in among] for among in (COUNTS, REPEATS))
    return triton.jit(function, do_not_specialize=counts, do_not_specialize_on_alignment=repeats)


@kernel
def as_tf32(x):
    """fp32 numbers as one tf32 product reads them in the worst case: their last 13 bits cut off."""
    return (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@kernel
def tile_dot(a, b, PRECISION: constexpr):
    """a @ b in fp32; PRECISION says how fp32 operands are multiplied."""
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
        if PRECISION == "tf32":
            a, b = as_tf32(a), as_tf32(b)
        product = tl.dot(a, b, input_precision="ieee")
    else:
        product = tl.dot(a, b, input_precision=PRECISION)
    return product


@kernel
def cast(x, DTYPE: constexpr):
    """x in another dtype, to nearest even; the interpreter alone would cut fp32 off to make bf16."""
    if UPCAST and DTYPE == tl.bfloat16 and x.dtype == tl.float32:  # noqa: SIM300
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = bits.to(tl.float32, bitcast=True)
    return x.to(DTYPE)


@kernel
def state_dot(a, state, shrink, DOT: constexpr, PRECISION: constexpr):
    """a @ state for an fp32 sum over many tokens; fp16 could not hold it, so there it goes through a power of two."""
    if DOT == tl.float16:  # noqa: SIM300
        product = tile_dot(a, cast(state * shrink, DOT), PRECISION) / shrink
    else:
        product = tile_dot(a, cast(state, DOT), PRECISION)
    return product


@kernel
def block_range(block, row, edges, starts, tokens, size):
    """First place of a block, and the place behind its last."""
    if edges is not None:
        low = tl.load(edges + 2 * block)
        high = tl.load(edges + 2 * block + 1)
    else:
        low = (block * size).to(tl.int32)
        if starts is not None:
            low += tl.load(starts + row).to(tl.int32)
        high = tl.minimum(low + size, tokens)
    return low, high


@kernel
def token_at(place, valid, order):
    """The token at a place of the block order: int64."""
    if order is not None:
        token = tl.load(order + place, mask=valid, other=0).to(tl.int64)
    else:
        token = place.to(tl.int64)
    return token


@kernel
def load_tile(x, row, token, head, valid, lanes, WIDTH: constexpr, DOT: constexpr):
    """Rows of x [B, T, H, WIDTH] at some tokens, [BT, lanes], zeros where not valid or beyond WIDTH."""
    start = x[0] + row * x[1] + head * x[3]
    pointers = start + token[:, None] * x[2] + lanes[None, :]
    return cast(tl.load(pointers, mask=valid[:, None] & (lanes < WIDTH)[None, :], other=0.0), DOT)


@kernel
def load_features(x, row, token, head, valid, lanes, eps, WIDTH: constexpr, MAPPED: constexpr, DOT: constexpr):
    """`load_tile`, and relu(x) + eps of what is loaded if MAPPED; zeros stay where not valid or beyond WIDTH."""
    if MAPPED:
        raw = load_tile(x, row, token, head, valid, lanes, WIDTH, tl.float32)
        mapped = tl.where(raw < 0, 0.0, raw) + eps
        tile = cast(tl.where(valid[:, None] & (lanes < WIDTH)[None, :], mapped, 0.0), DOT)
    else:
        tile = load_tile(x, row, token, head, valid, lanes, WIDTH, DOT)
    return tile


@kernel
def store_tile(x, row, token, head, valid, lanes, tile, WIDTH: constexpr):
    """Write a tile [BT, lanes] to rows of x [B, T, H, WIDTH]."""
    start = x[0] + row * x[1] + head * x[3]
    pointers = start + token[:, None] * x[2] + lanes[None, :]
    tl.store(pointers, cast(tile, x[0].dtype.element_ty), mask=valid[:, None] & (lanes < WIDTH)[None, :])


@kernel
def real_tokens_of(mask, row, token, valid, tokens):
    """valid, and not masked by mask [B, T]."""
    if mask is not None:
        valid = valid & (tl.load(mask + row * tokens + token, mask=valid, other=0) != 0)
    return valid


@dataclass(frozen=True)
class Cut:
    """Where the blocks of one side are, as kernels see it.

    blocks M, tokens T, and the most tokens in a block (span). Either size is the block size and block i is the places
    from starts[row] + i * size on, or edges (int32 [M, 2]) holds first and end of each. order (int32 [T]) is the token at
    each place, None where that is the place itself; index (int32 [T]) is the block of each token, None if there is a size.
    """

    blocks: int
    tokens: int
    span: int
    size: int
    edges: torch.Tensor | None = None
    order: torch.Tensor | None = None
    starts: torch.Tensor | None = None
    index: torch.Tensor | None = None

    @property
    def place(self):
        """The arguments edges, order and starts of a kernel."""
        return self.edges, self.order, self.starts


def cut_of(shape, device, starts=None, edges=None):
    """The Cut of `Blocks` as `spell` gives them, with tables where it needs them."""
    axes = len(shape) // 2 - 1
    blocks = Blocks(tuple(shape[:axes]), tuple(shape[axes:-2]), shape[-2] or None, shape[-1])
    if edges is not None:
        return Cut(edges.shape[0], blocks.length, blocks.block_size, blocks.block_size, edges=edges)
    size = blocks.block_size
    if size is None and blocks.contiguous and blocks.equal:
        size = blocks.length // blocks.num_blocks
    if size is not None:
        return Cut(blocks.num_blocks, blocks.length, min(size, blocks.length), size, starts=starts)
    order, edges, index = grid_tables(blocks, device)
    return Cut(blocks.num_blocks, blocks.length, max(blocks.sizes()), 0, edges, order, index=index)


def spell(blocks):
    """`Blocks` as integers, for an operator's schema: axes, counts, block size or 0, prefix."""
    return [*blocks.shape, *blocks.counts, blocks.block_size or 0, blocks.prefix]


@lru_cache(maxsize=1024)  # many, for a CUDA graph goes on reading those of its grid
def grid_tables(blocks, device):
    """order [T], edges [M, 2] and index [T] of a grid, int32; kept, for they are read every call."""
    index = blocks.index()
    ends = torch.tensor(blocks.sizes()).cumsum(0)
    edges = torch.stack((ends - torch.tensor(blocks.sizes()), ends), 1)
    order = torch.argsort(index, stable=True)
    return tuple(table.to(torch.int32).to(device) for table in (order, edges, index))


def as_argument(x):
    """A tensor [B, T, H, K] as a kernel takes it."""
    return (x, *x.stride()[:3])


def as_matrix(mixing):
    """A mixing matrix whose rows are contiguous as a kernel takes it: pointer, strides of the head and of the row."""
    if mixing is None:
        return None, 0, 0
    return mixing, mixing.stride(0) if mixing.dim() == 3 else 0, mixing.stride(-2)


def in_rows(x):
    """x itself if its last axis is contiguous, else a copy."""
    return x if x is None or x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def dot_kind(*tensors):
    """How products of these tensors are computed: as "bf16" or "fp16" if all are, else as "fp32"."""
    kinds = {x.dtype for x in tensors}
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(kinds.pop(), "fp32") if len(kinds) == 1 else "fp32"


def language_dtype(dot):
    """The dtype of a product's operands, for a kernel."""
    return {"bf16": tl.bfloat16, "fp16": tl.float16}.get(dot, tl.float32)


def lanes_for(width):
    """The power of two, at least 16, that holds a width."""
    return max(16, 1 << (width - 1).bit_length())


def in_parts(span, programs):
    """How many parts of PART_TOKENS or more a block of `span` tokens is cut into for ENOUGH_PROGRAMS, and their span."""
    wanted = max(1, min(span // PART_TOKENS, tiles(ENOUGH_PROGRAMS, programs)))
    span_of_part = tiles(tiles(span, wanted), TILE_TOKENS) * TILE_TOKENS
    return tiles(span, span_of_part), span_of_part


def tiles(count, tile):
    """How many tiles cover a count."""
    return (count + tile - 1) // tile


def start(function, programs, device, *arguments, **settings):
    """Start a kernel on its device."""
    place = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with place:
        function[(programs,)](*arguments, **settings, enable_fp_fusion=True)


LAUNCHERS = [start]


def launch(function, programs, device, *arguments, **settings):
    """`start` a kernel, or what `launches_through` has put in the place of that."""
    LAUNCHERS[-1](function, programs, device, *arguments, **settings)


@contextmanager
def launches_through(launcher):
    """Inside, and in all threads, every launch is launcher(function, programs, device, *arguments, **settings)."""
    LAUNCHERS.append(launcher)
    try:
        yield
    finally:
        LAUNCHERS.remove(launcher)
