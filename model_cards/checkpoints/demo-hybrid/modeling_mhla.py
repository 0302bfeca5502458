"""MHLA, multi-head linear attention (arXiv 2601.07832): mhla_hf.models.converted_local in one file.

Folded from the source of mhla_hf for loading with trust_remote_code=True; needs no mhla_hf.
Change the package, not this file. License of the code: Apache-2.0.

format: 1
entry: models.converted_local
made by mhla_hf: 0.1.0
sha256: 8d8899d501f3
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
from functools import partial
from math import log
from math import prod
from pathlib import Path
import copy
import functools
import inspect
import logging
import os
import re
import sys
import types
import warnings

from safetensors import SafetensorError
from safetensors import safe_open
from torch import nn
from transformers.cache_utils import Cache
from transformers.cache_utils import CacheLayerMixin
from transformers.cache_utils import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin
from transformers.cache_utils import StaticLayer
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.initialization import copy_
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.modeling_utils import AttentionInterface
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
import torch
import torch.nn.functional as F
import transformers


# mhla_hf/ops/state.py

class RowState:
    """A dataclass of tensors, [B, ..] each: what a decoder remembers of B rows. Methods that change it work in place."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors, by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}

    def nbytes(self) -> int:
        """Bytes held."""
        return sum(value.nbytes for value in self.tensors().values())

    def leave_inference_mode(self) -> None:
        """Tensors of inference mode cannot be written outside of it: copies can."""
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return
        for name, value in self.tensors().items():
            if value.is_inference():
                setattr(self, name, value.clone())

    @torch.inference_mode(False)
    def select(self, index: torch.Tensor) -> None:
        """Keep the rows of `index` (int64 [B'], repeats allowed), in that order; addresses stay where their number does."""
        self.leave_inference_mode()
        for name, value in self.tensors().items():
            chosen = value.index_select(0, index.to(value.device))
            if chosen.shape == value.shape:
                value.copy_(chosen)
            else:
                setattr(self, name, chosen)

    def repeat(self, times: int) -> None:
        """Repeat every row `times` times, the copies side by side."""
        rows = len(next(iter(self.tensors().values())))
        self.select(torch.arange(rows).repeat_interleave(times))


# mhla_hf/ops/checks.py

IMPLEMENTATIONS = ("auto", "reference", "torch", "triton")


def is_capturing(device: torch.device) -> bool:
    """Whether work on the device is being recorded for a CUDA graph, when no number can be read back."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


# mhla_hf/ops/reference.py

def divide_or_zero(numerator, denominator):
    """numerator [..., V] / denominator [...], and 0 where the denominator vanishes; finite in the backward pass too."""
    dead = denominator.abs() < torch.finfo(denominator.dtype).tiny
    quotient = numerator / torch.where(dead, 1, denominator)[..., None]
    return torch.where(dead[..., None], 0, quotient)


# mhla_hf/ops/torch_layout.py

class MoveTokens(torch.autograd.Function):
    """y[b, p] = x[b, source[b, p]], zeros where source is -1.

    `back` says the same of the way back, so the gradient is a gather too.
    """

    @staticmethod
    def forward(ctx, x, source, back):
        ctx.save_for_backward(source, back)
        rows = torch.arange(x.shape[0], device=x.device)[:, None]
        return torch.where((source >= 0)[..., None, None], x[rows, source.clamp(min=0)], 0)

    @staticmethod
    def backward(ctx, g):
        source, back = ctx.saved_tensors
        return MoveTokens.apply(g, back, source), None, None


def shift_to_start(starts, tokens):
    """source and back [B, T] for `MoveTokens` that bring the first real token of each row to place 0."""
    place, starts = torch.arange(tokens, device=starts.device), starts[:, None]
    source, back = place + starts, place - starts
    return torch.where(source < tokens, source, -1), torch.where(back >= 0, back, -1)


def align_sequences(cu_seqlens, tokens, size):
    """How packed sequences are brought to block edges: source [1, M * C] and back [1, T] for `MoveTokens`, and of each of
    those M blocks its place in its sequence and the sequence's number, int64 [M] (behind the last: a number of its own).

    M is the most that so many sequences can need.
    """
    edges = cu_seqlens.long()
    last = ((edges.diff() + size - 1) // size).cumsum(0)
    first = torch.nn.functional.pad(last, (1, 0))
    token = torch.arange(tokens, device=edges.device)
    sequence = torch.searchsorted(edges, token, right=True) - 1
    back = first[sequence] * size + token - edges[sequence]
    count = (tokens + (len(edges) - 1) * (size - 1)) // size
    source = torch.full((count * size,), -1, device=edges.device).index_copy(0, back, token)
    block = torch.arange(count, device=edges.device)
    sequence = torch.searchsorted(last, block, right=True)
    return source[None], back[None], block - first[sequence], sequence


def ring_slot(position, slots, sinks=0):
    """Which of `slots` the token at `position` is in: the first `sinks` have their own, the others share a ring."""
    return torch.where(position < sinks, position, sinks + position % (slots - sinks))


class TokenLayout:
    """New tokens behind those that are held, each row laid out from the edge of its block `first` on.

    before: int64 [B], tokens that a row has seen, in `slots` as `ring_slot` says (0: nothing is held). count: int64 [B], how
    many of the `steps` new tokens are a row's own, the last ones (padding is on the left). blocks: how many of them there
    are. All these may be on the CPU while tokens are on `device`.
    """

    def __init__(self, before, count, steps, first, blocks, size, slots, device, sinks=0):
        self.before, self.count, self.steps, self.first, self.size = before, count, steps, first * size, size
        self.slots, self.sinks, self.device = slots, sinks, device
        self.blocks = first[:, None] + torch.arange(blocks, device=first.device)  # [B, M]
        position = self.first[:, None] + torch.arange(blocks * size, device=first.device)
        token = (position - before[:, None] + (steps - count)[:, None]).clamp(min=0, max=steps - 1)
        source = token
        if slots:
            source = torch.where(position < before[:, None], ring_slot(position, slots, sinks), token + slots)
        self.token, self.source = token.to(device), source.to(device)
        self.filled = (position < (before + count)[:, None]).to(device)
        self.rows = torch.arange(len(before), device=device)[:, None]

    def place_keys(self, held, new):
        """What is held [B, slots, ..] and [B, T, ..] -> [B, M * C, ..]; anything where not `filled`."""
        return (torch.cat([held, new.to(held.dtype)], 1) if self.slots else new)[self.rows, self.source]

    def place_queries(self, q):
        """[B, T, ..] -> [B, M * C, ..]."""
        return q[self.rows, self.token]

    def take_back(self, o):
        """[B, M * C, ..] -> [B, T, ..], zeros for padding."""
        token = torch.arange(self.steps, device=self.before.device) - (self.steps - self.count)[:, None]
        place = (token + (self.before - self.first)[:, None]).clamp(min=0).to(self.device)
        real = (token >= 0).to(self.device)
        return torch.where(real.view(*real.shape, *[1] * (o.dim() - 2)), o[self.rows, place], 0)

    def keep(self, held, laid):
        """Write the last of the tokens laid out, [B, M * C, ..], into `held` [B, slots, ..], in place."""
        end, slots = (self.before + self.count - 1)[:, None], held.shape[1]
        slot = torch.arange(slots, device=end.device)
        last = end - (end - slot + self.sinks) % (slots - self.sinks)  # of each slot of the ring
        position = torch.where(slot < self.sinks, slot, last)
        new = (position >= torch.maximum(self.before, self.first)[:, None]) & (position <= end)
        new = (new & (ring_slot(position, slots, self.sinks) == slot)).to(self.device)
        values = laid[self.rows, (position - self.first[:, None]).clamp(0, laid.shape[1] - 1).to(self.device)]
        held.copy_(torch.where(new.view(*new.shape, *[1] * (held.dim() - 2)), values.to(held.dtype), held))


# mhla_hf/ops/namespace.py

NAMESPACE = "8d8899d501f3"


# mhla_hf/ops/triton/tuning.py

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


def in_rows(x):
    """x itself if its last axis is contiguous, else a copy."""
    return x if x is None or x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def lanes_for(width):
    """The power of two, at least 16, that holds a width."""
    return max(16, 1 << (width - 1).bit_length())


def tiles(count, tile):
    """How many tiles cover a count."""
    return (count + tile - 1) // tile


# mhla_hf/ops/triton/common.py

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
def invert_or_zero(den):
    """1 / den, and 0 where den vanishes: 0/0 is 0 in this operator."""
    alive = tl.abs(den) >= 1.1754943508222875e-38
    return tl.where(alive, 1.0 / tl.where(alive, den, 1.0), 0.0)


# mhla_hf/ops/triton/register.py

TRITON_SPACE = f"mhla_{NAMESPACE}"


def triton_refusal(q, k, v, k_den=None):
    """Why these tensors cannot go through the kernels, as the end of a sentence; None if they can."""
    if triton is None:
        return "triton is not installed"
    if q.device.type != "cuda" and not INTERPRETED:
        return f"q is on {q.device.type}, where triton runs only with TRITON_INTERPRET=1 set before the import"
    if q.device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_properties(q.device).major < 8:
        return "the GPU is older than sm_80"
    if torch.float64 in (q.dtype, k.dtype, v.dtype):
        return "the kernels compute in fp32, not in fp64"
    widest = max(x.shape[3] for x in (k, v, k_den) if x is not None)
    if widest > WIDEST:
        return f"heads are {widest} wide, more than {WIDEST}"
    return None


def registered_operator(name, schema, function, fake, gradients=None, keep=None):
    """The operator of that name in this version's namespace, registered unless an equal copy of this file has done so."""
    space = getattr(torch.ops, TRITON_SPACE)
    if not hasattr(space, name):
        operator = torch.library.custom_op(f"{TRITON_SPACE}::{name}", function, mutates_args=(), schema=schema)
        operator.register_fake(fake)
        if gradients is not None:
            operator.register_autograd(gradients, setup_context=keep)
    return getattr(space, name)


# mhla_hf/ops/triton/check.py

DIFFERENCE_ALLOWED = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 5e-2}
FAULTS_FOUND = {}


def known_fault(call, kind) -> str | None:
    """Why kernels of a kind cannot be trusted on its device, kind[0]; None if they can. Found out once, by a small call."""
    named = call.__name__, *kind
    if named not in FAULTS_FOUND:
        if is_capturing(kind[0]):
            return "a CUDA graph is being captured, and no such call came before it to check the Triton kernels"
        FAULTS_FOUND[named] = find_fault(call, *kind)
    return FAULTS_FOUND[named]


def find_fault(call, device, dtype, value_dtype, *kind) -> str | None:
    """`known_fault`, by running them."""
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
            got, want = call(device, dtype, value_dtype, *kind)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return f"the Triton kernels failed on {device} with {type(error).__name__}: {str(error).strip()[:200]}"
    errors = [
        float(((x.double() - y).norm() / y.norm()).nan_to_num(float("inf"))) for x, y in zip(got, want, strict=True)
    ]
    if max(errors) <= DIFFERENCE_ALLOWED[min((dtype, value_dtype), key=lambda x: x.itemsize)]:
        return None
    name = ("o", "dq", "dk", "dv", "dmixing", "dq_den", "dk_den")[errors.index(max(errors))]
    return f"the Triton kernels gave {name} off by {max(errors):.1e} of fp64 on {device}, for {(dtype, value_dtype, *kind)}"


# mhla_hf/ops/api.py

OPERATOR_LOG = logging.getLogger("mhla_hf")
KERNEL_DEVICES = ("cuda",)
ANNOUNCED_CHOICES = set()


def choose_implementation(impl, device, find_refusal, find_fault):
    """The implementation on a device; says once what "auto" took. ValueError where Triton is asked in vain.

    find_refusal, find_fault: say why the kernels cannot be used, and why they cannot be trusted; None if they can.
    """
    if impl not in ("auto", "triton"):
        return impl
    on_cpu = device.type not in KERNEL_DEVICES
    refusal = None if impl == "auto" and on_cpu else find_refusal()
    if impl == "triton":
        if refusal is not None:
            raise ValueError(f"impl is 'triton'; expected another one, for {refusal}.")
        return impl
    choice, why, level = "torch", refusal, logging.INFO
    if on_cpu:
        why = f"the fastest form this version has for {device.type} tensors"
    elif refusal is None:
        why = find_fault()
        level = logging.WARNING if why is not None else level
    if why is None:
        choice, why = "triton", f"whose kernels agreed with fp64 on {device}"
    if not torch.compiler.is_compiling() and (choice, why) not in ANNOUNCED_CHOICES:
        ANNOUNCED_CHOICES.add((choice, why))
        OPERATOR_LOG.log(level, "mhla: impl='auto' took %r, %s.", choice, why)
    return choice


# mhla_hf/ops/decays.py

GROUP = 8  # blocks that one small matrix mixes; what lies before them arrives as one running summary


@dataclass
class Decays:
    """R decays: weight w `[H, R]` of the query heads, log_rate (log lambda, at most 0) `[G, R]` of the key/value heads.

    Query head h uses the rates of key/value head h // (H // G): the heads of a group share their running summaries.
    power: a `[H]` or None; with it all weights of a query block are divided by n^a, n being how many blocks are far from it.
    Sums over features grow with n, sums of a softmax hardly do.
    """

    weight: torch.Tensor
    log_rate: torch.Tensor
    power: torch.Tensor | None = None

    def to(self, dtype: torch.dtype) -> "Decays":
        """The same in another dtype."""
        return Decays(*(x if x is None else x.to(dtype) for x in (self.weight, self.log_rate, self.power)))

    def matrix(self, num_blocks: int, lag: int = 1, both_ways: bool = False) -> torch.Tensor:
        """The mixing matrix `[H, M, M]` that they stand for; lag: the first distance that is far.

        Lower triangular, or with `both_ways` symmetric, by the distance on either side.
        """
        log_rate = self.log_rate.repeat_interleave(len(self.weight) // len(self.log_rate), 0)
        power = powers(log_rate, block_distances(num_blocks, log_rate).abs())  # [H, R, M, M]
        matrix = (self.weight[..., None, None] * power).sum(1)
        matrix = matrix if both_ways else matrix.tril()
        block = torch.arange(num_blocks, device=matrix.device)
        return matrix if self.power is None else matrix * self.by_length(block, lag).T[..., None]

    def by_length(self, block: torch.Tensor, lag: int) -> torch.Tensor:
        """n^-a for query blocks of these numbers, int of any shape -> `[.., H]`."""
        return torch.exp(-self.power * (block - lag + 1).clamp(min=1).to(self.power.dtype).log()[..., None])


def spread(fq, weight):
    """w_r `[H, R]` times query features, so that one product with the R running summaries mixes and reads them.

    `[B, G, M, N, K]` -> `[B, G, M, N, R * K]`; N holds the query heads of a key/value head, then tokens.
    """
    weight = weight.view(fq.shape[1], 1, -1, 1, weight.shape[1], 1)
    fq = fq.unflatten(3, (weight.shape[2], -1))[..., None, :]
    return (fq * weight).flatten(5).flatten(3, 4)


def powers(log_rate: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
    """lambda^distance: `[G, R]` and distances of any shape -> `[G, R, *distance.shape]`."""
    return torch.exp(log_rate.view(*log_rate.shape, *[1] * distance.dim()) * distance)


def block_distances(count: int, like: torch.Tensor) -> torch.Tensor:
    """i - j, `[count, count]`."""
    block = torch.arange(count, device=like.device)
    return block[:, None] - block[None, :]


def decayed_sums(summaries, log_rate, lag: int = 1, sequence=None):
    """sum over j <= i - lag of lambda_r^(i - j) S_j, for every block i: `[B, G, M, X]` -> `[B, G, M, R, X]`.

    sequence: int `[M]`, which packed sequence a block belongs to; sums stay inside one. A scan of two levels: groups of
    `GROUP` blocks each by a matrix, and the groups' own sums, an eighth as many, by another.
    """
    count, rates = summaries.shape[2], log_rate.shape[1]
    groups = (count + GROUP - 1) // GROUP + 1  # never 1, for which torch.compile would make a graph of its own
    earlier, padding = min(lag - 1, count), groups * GROUP - count
    summaries = torch.nn.functional.pad(summaries[:, :, : count - earlier], (0, 0, earlier, padding))
    grouped = summaries.unflatten(2, (groups, GROUP))  # S_{i - lag + 1} stands at place i

    place, distance = torch.arange(GROUP, device=summaries.device), block_distances(GROUP, summaries)
    inner = powers(log_rate, (distance - 1).clamp(min=0)).masked_fill(distance < 1, 0)  # [G, R, i, j]
    inner = inner.permute(0, 2, 1, 3)[:, None]  # [G, 1, i, R, j]
    to_end = powers(log_rate, GROUP - 1 - place)[:, None]  # [G, 1, R, j]
    outer_distance = block_distances(groups, summaries)
    outer = powers(log_rate, GROUP * (outer_distance - 1).clamp(min=0)).masked_fill(outer_distance < 1, 0)
    from_start = powers(log_rate, place).transpose(1, 2)[:, None, ..., None]  # [G, 1, i, R, 1]
    if sequence is not None:
        own = torch.nn.functional.pad(sequence, (0, padding), value=-1).view(groups, GROUP)
        source = torch.nn.functional.pad(sequence[: count - earlier], (earlier, padding), value=-2).view(groups, GROUP)
        last = source[:, -1]
        before = torch.cat([last.new_full((1,), -3), last[:-1]])
        inner = inner.masked_fill(own[:, :, None, None] != source[:, None, None, :], 0)
        to_end = to_end.masked_fill((source != last[:, None])[:, None], 0)
        outer = outer.masked_fill(before[:, None] != last[None, :], 0)
        from_start = from_start.masked_fill((own != before[:, None])[..., None, None], 0)

    ends = (to_end @ grouped).permute(0, 1, 3, 2, 4)  # [B, G, R, groups, X]
    arriving = (outer @ ends).permute(0, 1, 3, 2, 4)[:, :, :, None]  # [B, G, groups, 1, R, X]
    sums = (inner.flatten(-3, -2) @ grouped).unflatten(3, (GROUP, rates)) + from_start * arriving
    return sums.flatten(2, 3)[:, :, :count] * torch.exp(lag * log_rate)[:, None, :, None]


# mhla_hf/ops/torch_local.py

@dataclass(frozen=True)
class LocalForm:
    """What stays the same for all calls of a layer.

    block_size: tokens per block C. lag: blocks of the window, the open one included; the far part begins that many blocks
    back. sinks: first tokens that are always near (0 without a softmax). scale: of q k^T. normalize: divide by the weights.
    impl: "auto", "torch" or "triton", as in `mhla`; a single token behind a state is always torch.
    unrounded: o in the dtype of the sums; else the kernel writes it in v's.
    both_ways: later tokens are seen as earlier ones are; the window has `lag - 1` blocks on either side of the open one.
    """

    block_size: int
    lag: int = 2
    sinks: int = 4
    scale: float = 1.0
    normalize: bool = True
    impl: str = "auto"
    unrounded: bool = True
    both_ways: bool = False


def near_and_far(q, k, v, fq, mixed, valid, weight, balance, sink, place, form):
    """The outputs [B, T, H, V] of M blocks of C tokens, in mixed's dtype; `triton_near_and_far` is the same in one kernel.

    q [B, T, H, D], k [B, T, G, D], v [B, T, G, V], fq [B, T, H, K], T at most M * C. mixed: running sums
    [B, G, M, R, K, V + 1], to be weighed by weight [H, R]. valid: bool [B, M * C]. balance, sink, place: as in
    `attend_local`.
    """
    tokens, size, groups, exact = q.shape[1], form.block_size, k.shape[2], mixed.dtype
    q, k, v, fq = (resize_tokens(x, valid.shape[1]) for x in (q, k, v, fq))
    k, v = (torch.where(valid[..., None, None], x, 0) for x in (k, v))
    q, k, v, fq = (by_block_and_group(x, groups, size, exact) for x in (q, k, v, fq))
    k, v, seen = near_keys(k, v, valid.unflatten(1, (-1, size)), place, form)
    if sink is not None:
        k, v, seen = with_sinks(k, v, seen, sink, place, form, exact)
    share = weight.shape[0] // groups

    def of_each_query(x):
        return x.view(groups, 1, share, 1, 1).expand(-1, -1, -1, size, 1).flatten(2, 3)

    far = spread(fq, weight) @ mixed.flatten(3, 4)
    seen = seen[:, None, :, None].expand(-1, -1, -1, share, -1, -1).flatten(3, 4)
    has_far = ((place >= form.lag) | form.both_ways)[:, None, :, None, None]
    weight, balance = (x if x is None else of_each_query(x.to(exact)) for x in (weight.sum(-1), balance))
    o = combine((q @ k.mT) * form.scale, seen, v, far, weight, balance, has_far, form)
    o = o.unflatten(3, (share, size)).permute(0, 2, 4, 1, 3, 5).flatten(3, 4).flatten(1, 2)
    return resize_tokens(o, tokens)


def resize_tokens(x, count):
    """The first `count` of the tokens [B, T, ..], with more behind them where there are too few: zeros, or while compiling
    the last one again, for a graph in which padding by none is no case of its own."""
    if torch.compiler.is_compiling():
        return x.index_select(1, torch.arange(count, device=x.device).clamp(max=x.shape[1] - 1))
    if x.shape[1] == count:
        return x
    return torch.nn.functional.pad(x, (*[0, 0] * (x.dim() - 2), 0, count - x.shape[1]))


def by_block_and_group(x, groups, size, exact):
    """[B, T, H, K] -> [B, G, M, (H / G) * C, K] in the exact dtype, heads before tokens."""
    x = x.to(exact).unflatten(2, (groups, -1)).unflatten(1, (-1, size))
    return x.permute(0, 3, 1, 4, 2, 5).flatten(3, 4)


def with_ones(v):
    """A column of ones behind the values [.., V]: weights are then summed as values are."""
    return torch.nn.functional.pad(v, (0, 1), value=1.0)


def near_keys(k, v, valid, place, form):
    """The window of every block: k and v [B, G, M, W * C, ...], and who sees whom, bool [B, M, C, W * C].

    W: blocks of the window, `lag`, or `2 * lag - 1` if it goes both ways.
    """
    keys, values, seen = [], [], []
    size, lag = form.block_size, form.lag
    own = torch.ones(size, size, dtype=torch.bool, device=k.device)
    for back in reversed(range(1 - lag if form.both_ways else 0, lag)):
        keys.append(shift_blocks(k, back, 2))
        values.append(shift_blocks(v, back, 2))
        there = shift_blocks(valid, back, 1) & (place >= back)[..., None]
        seen.append(there[:, :, None] & (own if back or form.both_ways else own.tril()))
    return torch.cat(keys, 3), torch.cat(values, 3), torch.cat(torch.broadcast_tensors(*seen), 3)


def shift_blocks(x, back, dim):
    """What is `back` blocks before each block along `dim` of x, or after it if negative; zeros where nothing is."""
    count = x.shape[dim]
    kept = max(count - abs(back), 0)
    missing = (count - kept, 0) if back >= 0 else (0, count - kept)
    kept = x.narrow(dim, 0 if back >= 0 else count - kept, kept)
    return torch.nn.functional.pad(kept, (*[0, 0] * (x.dim() - dim - 1), *missing))


def with_sinks(near_k, near_v, seen, sink, place, form, exact):
    """The window and, where a block's window does not reach them, the sinks."""
    k, v, valid = (x if x.dim() == near else x[:, None] for x, near in zip(sink, (5, 5, 3), strict=True))
    k, v = (x.to(exact).permute(0, 3, 1, 2, 4) for x in (k, v))
    count = near_k.shape[2]
    k, v = (x.expand(-1, -1, count, -1, -1) for x in (k, v))
    there = (valid & (place >= form.lag)[..., None])[:, :, None].expand(len(seen), count, form.block_size, -1)
    k, v = (torch.where(there[:, None, :, 0, :, None], x, 0) for x in (k, v))
    return torch.cat([k, near_k], 3), torch.cat([v, near_v], 3), torch.cat([there, seen], 3)


def combine(score, seen, v, far, weight, balance, has_far, form):
    """The outputs [.., N, V] of N queries, from their scores [.., N, L] with near keys, of which some are `seen`.

    v [.., L, V]: near values. far [.., N, V + 1]: what the far part sums to; has_far: whether there is one. weight
    [.., N, 1]: the decays' weights in sum. balance [.., N, 1]: of the far part, in the unit of the softmax, or None.
    """
    if balance is None:
        near, unit = torch.where(seen, score, 0) * weight, form.scale
    else:
        near, unit = softmax_weights(score, seen, balance, has_far & (far[..., -1:] != 0))
    o, far = near @ v, unit * far
    if not form.normalize:
        return o + far[..., :-1]
    return divide_or_zero(o + far[..., :-1], near.sum(-1) + far[..., -1])


def softmax_weights(score, seen, balance, has_far):
    """e^score of the near keys and e^balance of the far part, both over one e^c, which no gradient sees."""
    score = score.masked_fill(~seen, float("-inf"))
    largest = score.detach().amax(-1, keepdim=True)
    shift = torch.where(has_far, torch.maximum(largest, balance.detach()), largest)
    shift = shift.masked_fill(shift == float("-inf"), 0)
    return torch.exp(score - shift), torch.exp(torch.where(has_far, balance - shift, 0))


# mhla_hf/ops/triton/local.py

LOCAL_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor fq, Tensor mixed, Tensor weight, Tensor? balance, Tensor? sink_k, "
    "Tensor? sink_v, Tensor? there, Tensor valid, Tensor place, SymInt size, SymInt lag, float scale, bool normalize, "
    "ScalarType dtype) -> Tensor"
)


@kernel
def add_keys(
    largest, den, total, q, k, v, row, token, inside, head, key, real, source, sees, scale, own, v_lanes,
    K: constexpr, V: constexpr, SOFTMAX: constexpr, DOT: constexpr, BT: constexpr, BN: constexpr, BK: constexpr,
):  # fmt: skip
    """The largest score, the sum of weights and that of weight times value with BN more keys, each at a `key` token."""
    score = tl.zeros((BT, BN), tl.float32)
    for first in range(0, K, BK):
        lanes = first + tl.arange(0, BK)
        query = load_tile(q, row, token, head, inside, lanes, K)
        score += dot(query, tl.trans(load_tile(k, row, key, source, real, lanes, K)), DOT)
    score *= scale
    if SOFTMAX:
        score = tl.where(sees, score, float("-inf"))
        before, largest = largest, tl.maximum(largest, tl.max(score, 1))
        shift = tl.where(largest == float("-inf"), 0.0, largest)
        weight, kept = tl.exp(score - shift[:, None]), tl.exp(before - shift)
        den, total = den * kept, total * kept[:, None]
    else:
        weight = tl.where(sees, score * own, 0.0)
    den += tl.sum(weight, 1)
    total += dot(weight, load_tile(v, row, key, source, real, v_lanes, V), DOT)
    return largest, den, total


def local_tiles(constants):
    """What other kernels on causal tokens take."""
    return token_tiles({**constants, "CAUSAL": True})


@tuned(local_tiles, "K", "V", "F", "R", "DOT")
def local_kernel(
    q, k, v, fq, mixed, weight, balance, sink_k, sink_v, there, valid, place, o, tokens, size, blocks, heads, group, lag,
    sinks, sink_step, scale,
    K: constexpr, V: constexpr, F: constexpr, R: constexpr, NORMALIZE: constexpr, DOT: constexpr, BT: constexpr,
    BK: constexpr, BV: constexpr,
):  # fmt: skip
    """o [B, T, H, V]: BV lanes of one tile of queries. Arguments as in `near_and_far`; T is tokens.

    sink_k, sink_v, there: [B, S, G, ..] with sink_step 0, or S of each of M blocks, [B, M * S, G, ..], with sink_step S.
    """
    v_tiles: constexpr = (V + BV - 1) // BV
    v_tile, part, block, head, row = program_of(v_tiles, tl.cdiv(size, BT), blocks, heads)
    source, v_lanes = head // group, v_tile * BV + tl.arange(0, BV)
    begin, end = block * size + part * BT, tl.minimum(block * size + size, tokens)
    token = (begin + tl.arange(0, BT)).to(tl.int64)
    inside = token < end
    here = tl.load(place + row * blocks + block).to(tl.int32)

    state = ((row * (heads // group) + source) * blocks + block) * R
    total, den, own = tl.zeros((BT, BV), tl.float32), tl.zeros((BT,), tl.float32), 0.0
    for rate in range(0, R):
        own += tl.load(weight + head * R + rate)
    for first in range(0, F, BK):
        lanes = first + tl.arange(0, BK)
        mixture, z = tl.zeros((BK, BV), tl.float32), tl.zeros((BK,), tl.float32)
        for rate in range(0, R):
            share, running = tl.load(weight + head * R + rate), mixed + ((state + rate) * F + lanes) * (V + 1)
            known = (lanes < F)[:, None] & (v_lanes < V)[None, :]
            mixture += share * tl.load(running[:, None] + v_lanes[None, :], mask=known, other=0.0)
            z += share * tl.load(running + V, mask=lanes < F, other=0.0)
        features = load_tile(fq, row, token, head, inside, lanes, F)
        total += dot(features, mixture, DOT)
        den += tl.sum(features.to(tl.float32) * z[None, :], 1)

    largest = tl.full((BT,), float("-inf"), tl.float32)
    if balance is not None:
        largest = tl.where(den != 0, tl.load(balance + head), largest)
    else:
        total, den = total * scale, den * scale
    if sink_k is not None:
        for first in range(0, tl.where(here >= lag, sinks, 0), 16):
            slot = first + tl.arange(0, 16)
            key = (block * sink_step + slot).to(tl.int64)
            real = slot < sinks
            real = real & (tl.load(there + row * sinks + key, mask=real, other=0) != 0)
            largest, den, total = add_keys(
                largest, den, total, q, sink_k, sink_v, row, token, inside, head, key, real, source, real[None, :],
                scale, own, v_lanes, K, V, balance is not None, DOT, BT, 16, BK,
            )  # fmt: skip
    window = tl.minimum(tl.minimum(lag - 1, here), block)
    for first in range((block - window) * size, tl.minimum(begin + BT, end), BT):
        key = (first + tl.arange(0, BT)).to(tl.int64)
        real = key < end
        real = real & (tl.load(valid + row * blocks * size + key, mask=real, other=0) != 0)
        sees = real[None, :] & (key[None, :] <= token[:, None])
        largest, den, total = add_keys(
            largest, den, total, q, k, v, row, token, inside, head, key, real, source, sees, scale, own, v_lanes,
            K, V, balance is not None, DOT, BT, BT, BK,
        )  # fmt: skip
    if NORMALIZE:
        total *= invert_or_zero(den)[:, None]
    store_tile(o, row, token, head, inside, v_lanes, total, V)


def triton_near_and_far(q, k, v, fq, mixed, valid, weight, balance, sink, place, form):
    """`near_and_far` by the kernel, of values v [B, T, G, V]; o in v's dtype unless the form wants it unrounded."""
    dtype, sink = torch.float32 if form.unrounded else v.dtype, (None, None, None) if sink is None else sink
    options = form.block_size, form.lag, form.scale, form.normalize, dtype
    return TRITON_LOCAL(q, k, v, fq, mixed, weight, balance, *sink, valid, place, *options)


def local_forward(
    q, k, v, fq, mixed, weight, balance, sink_k, sink_v, there, valid, place, size, lag, scale, normalize, dtype
):
    """o [B, T, H, V] in `dtype`."""
    (batch, tokens, heads), (groups, width) = q.shape[:3], v.shape[2:]
    blocks, sinks, step = place.shape[1], 0, 0
    o = torch.empty(batch, tokens, heads, width, dtype=dtype, device=q.device)
    if sink_k is not None:
        sinks, packed = there.shape[-1], there.dim() == 3
        step = sinks * packed
        sink_k, sink_v = (x.flatten(1, 2) if packed else x for x in (sink_k, sink_v))
    constants = {"K": k.shape[3], "V": width, "F": fq.shape[3], "R": weight.shape[1], "DOT": dot_kind(q, k, v, fq)}

    def grid(sizes):
        return (tiles(width, sizes["BV"]) * tiles(size, sizes["BT"]) * blocks * heads * batch,)

    given = [x if x is None else as_argument(in_rows(x)) for x in (q, k, v, fq, sink_k, sink_v)]
    others = (mixed, weight, balance, there, valid, place.expand(batch, -1))
    others = [x if x is None else x.contiguous() for x in others]
    with on_device(q):
        arguments = (
            *given[:4],
            *others[:3],
            *given[4:],
            *others[3:],
            as_argument(o),
            *(tokens, size, blocks, heads, heads // groups, lag, sinks, step, scale),
        )
        local_kernel.launch(grid, arguments, {**constants, "NORMALIZE": normalize})
    return o


def local_forward_fake(
    q, k, v, fq, mixed, weight, balance, sink_k, sink_v, there, valid, place, size, lag, scale, normalize, dtype
):
    """The shape of `local_forward`."""
    return v.new_empty(*q.shape[:3], v.shape[3], dtype=dtype)


def keep_for_gradients(ctx, inputs, output):
    """What the backward pass reads: the inputs."""
    ctx.save_for_backward(*inputs[:12])
    ctx.options = inputs[12:16]


def local_gradients(ctx, do):
    """The autograd formula of `local_forward`: the PyTorch form again, and its gradients."""
    *inputs, there, valid, place = ctx.saved_tensors
    size, lag, scale, normalize = ctx.options
    form = LocalForm(size, lag, scale=scale, normalize=normalize)
    with torch.enable_grad(), torch.autocast(do.device.type, enabled=False):
        inputs = [
            None if x is None else x.view_as(x) for x in inputs
        ]  # sinks may be a part of k and v, which are apart here
        q, k, v, fq, mixed, weight, balance, sink_k, sink_v = inputs
        sink = None if sink_k is None else (sink_k, sink_v, there)
        o = near_and_far(q, k, v, fq, mixed, valid, weight, balance, sink, place, form)
    wanted = [x is not None and x.requires_grad for x in inputs]
    learned = [x for x, asked in zip(inputs, wanted, strict=True) if asked]
    found = iter(torch.autograd.grad(o, learned, do.to(o.dtype), create_graph=torch.is_grad_enabled()))
    return *(next(found) if asked else None for asked in wanted), *[None] * 8


TRITON_LOCAL = registered_operator(
    "local", LOCAL_SCHEMA, local_forward, local_forward_fake, local_gradients, keep_for_gradients
)


def local_kind(q, v, fq, decays, balance, form):
    """What calls have in common that are checked once, as `small_local_call` takes it."""
    size = min(form.block_size, CHUNK + CHUNK // 2)
    numbers = q.shape[3], v.shape[3], fq.shape[3], decays.weight.shape[1], size, form.lag, form.sinks
    numbers = (len([None] * x) for x in numbers)  # a symbol becomes a number
    options = not q.shape[2] <= v.shape[2], balance is not None, form.normalize, form.unrounded
    return q.device, q.dtype, v.dtype, *numbers, *options


@torch.compiler.assume_constant_result
def local_fault(*kind) -> str | None:
    """`known_fault` of a `local_kind`."""
    return known_fault(small_local_call, kind)


def small_local_call(
    device, dtype, value_dtype, width, value_width, features, rates, size, lag, sinks, grouped, softmax, normalize, unrounded
):  # fmt: skip
    """Outputs of the kernel and of PyTorch in fp64. The inputs are always the same, and no other random number is used."""
    form, random = (
        LocalForm(size, lag, sinks, width**-0.5, normalize, unrounded=unrounded),
        torch.Generator().manual_seed(0),
    )
    blocks, groups = lag + 2, 1 if grouped else 2

    def numbers(*shape, dtype=torch.float32):
        return torch.rand(shape, generator=random).to(device, dtype)

    q, k, fq = (numbers(1, blocks * size, n, w, dtype=dtype) for n, w in ((2, width), (groups, width), (2, features)))
    v = numbers(1, blocks * size, groups, value_width, dtype=value_dtype) - 0.5
    mixed, weight = numbers(1, groups, blocks, rates, features, value_width + 1), numbers(2, rates)
    mixed[:, :, :lag] = 0  # where nothing is far
    balance = numbers(2) if softmax else None
    valid = torch.arange(blocks * size, device=device)[None] % 5 != 4
    sink = (k[:, :sinks], v[:, :sinks], valid[:, :sinks]) if sinks else None
    rest = balance, sink, torch.arange(blocks, device=device)[None], form
    got = triton_near_and_far(q, k, v, fq, mixed, valid, weight, *rest)
    q, k, fq, mixed, weight = (x.double() for x in (q, k, fq, mixed, weight))
    return [got], [near_and_far(q, k, v, fq, mixed, valid, weight, *rest)]


# mhla_hf/ops/local.py

SEGMENT = 2048  # tokens that are worked on at once where no gradient is asked for


def local_attention(
    q, k, v, fq, fk, decays: Decays, balance, form: LocalForm, *, key_mask=None, starts=None, cu_seqlens=None
):
    """o [B, T, H, V] in the dtype of the sums (at least fp32), or in v's where the form allows it.

    q [B, T, H, D], k [B, T, G, D]: rotated queries and keys of the near part (with balance None, features). v [B, T, G, V].
    fq [B, T, H, K], fk [B, T, G, K]: features of the far part. balance: [H], see the top of this file, or None.
    key_mask, starts, cu_seqlens: as in `mhla`.
    """
    tokens, size = q.shape[1], form.block_size
    valid = q.new_ones(q.shape[:2], dtype=torch.bool) if key_mask is None else key_mask
    back = place = sequence = None
    if starts is not None:
        if cu_seqlens is not None:
            raise ValueError("starts came with cu_seqlens; expected one of them.")
        source, back = shift_to_start(starts.to(q.device), tokens)
    if cu_seqlens is not None:
        source, back, place, sequence = align_sequences(cu_seqlens, tokens, size)
    if back is not None:
        q, k, v, fq, fk = (MoveTokens.apply(x, source, back) for x in (q, k, v, fq, fk))
        rows = torch.arange(len(valid), device=q.device)[:, None]
        valid = (source >= 0) & valid[rows, source.clamp(min=0)]
    if place is None:
        place = torch.arange((q.shape[1] + size - 1) // size, device=q.device)
    o, _ = attend_local(q, k, v, fq, fk, valid, decays, balance, form, place[None], sequence=sequence)
    return o if back is None else MoveTokens.apply(o, back, source)


def attend_local(
    q, k, v, fq, fk, valid, decays, balance, form, place, *, sequence=None, sink=None, carried=None, opened=None, now=None
):  # fmt: skip
    """Outputs [B, T, H, V] of tokens that begin at a block edge, M blocks of C; shapes as in `local_attention`.

    valid: bool [B, T], tokens that are keys. place: int [B or 1, M], the index of each block in its sequence. sequence: int
    [M], its number where several are packed. sink: sink keys and values (k, v, valid) [B, S, G, ...] from a state, else
    they are found among the tokens. carried: [B, G, R, K, V + 1], the running sums of a state whose last block is `opened`,
    int [B], and whose sequence is that of the first block; now: int [B], the last block behind these tokens. Returns the
    outputs and the running sums there (None without `now`). Without gradients a long sequence is taken `SEGMENT` tokens at
    a time: memory and cost per token do not grow.
    """
    if form.sinks and sink is None:
        sink = find_sinks(k, v, valid, form, sequence)
    impl = choose_implementation(
        form.impl,
        q.device,
        lambda: triton_refusal(q, k, v),
        lambda: local_fault(*local_kind(q, v, fq, decays, balance, form)),
    )
    size, count = form.block_size, place.shape[1]
    real = torch.arange(count * size, device=q.device) < q.shape[1]
    tensors = q, k, v, fq, fk, resize_tokens(valid, count * size) & real
    step = max(SEGMENT // size, form.lag)
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in (*tensors, decays.weight))
    if count <= 2 * step or recorded or sequence is not None or torch.compiler.is_compiling():
        o, summaries = attend_segment(*tensors, decays, balance, form, place, sequence, sink, carried, opened, impl)
        return o, None if now is None else advance(carried, summaries, decays, form.lag, place, opened, now)
    outputs = []
    for first in range(0, count, step):
        begin, end = max(first - form.lag, 0), min(first + step, count)
        here = place[:, begin:end]
        parts = (x[:, begin * size : end * size] for x in tensors)
        o, summaries = attend_segment(*parts, decays, balance, form, here, None, sink, carried, opened, impl)
        outputs.append(o[:, (first - begin) * size :])
        last = here[:, -1] if now is None else torch.minimum(here[:, -1], now)
        carried, opened = advance(carried, summaries, decays, form.lag, here, opened, last), last
    return torch.cat(outputs, 1), carried


def advance(carried, summaries, decays, lag, place, opened, now):
    """Running sums [B, G, R, K, V + 1] as of block `now` [B], from those as of `opened` and the summaries of blocks `place`.

    Of these, blocks up to `opened - lag` are in the old sums.
    """
    log_rate, distance = decays.log_rate.to(summaries.dtype), now[:, None] - place
    weight = torch.exp(log_rate[None, ..., None] * distance.clamp(min=0)[:, None, None])
    new = (distance >= lag) if opened is None else (distance >= lag) & (place > (opened - lag)[:, None])
    weight = torch.where(new[:, None, None], weight, 0)  # [B, G, R, M]
    running = (weight @ summaries.flatten(3)).unflatten(3, summaries.shape[3:])
    if carried is None:
        return running
    return running + torch.exp(log_rate * (now - opened)[:, None, None])[..., None, None] * carried


def attend_segment(q, k, v, fq, fk, valid, decays, balance, form, place, sequence, sink, carried, opened, impl):
    """`attend_local` all at once, of valid [B, M * C]: its outputs, and the summaries [B, G, M, K, V + 1]."""
    summaries = block_summaries(fk, v, valid, place, form)
    decays = decays.to(summaries.dtype)
    mixed = decayed_sums(summaries.flatten(3), decays.log_rate, form.lag, sequence).unflatten(4, summaries.shape[3:])
    if carried is not None:
        passed = (place - opened[:, None]).clamp(min=0)[:, None, :, None]  # blocks before it hold no new token
        decay = torch.exp(decays.log_rate[:, None] * passed)  # [B, G, M, R]
        if sequence is not None:
            decay = torch.where((sequence == sequence[0])[:, None], decay, 0)
        mixed = mixed + decay[..., None, None] * carried[:, :, None]
    if decays.power is not None:
        scale = decays.by_length(place, form.lag).repeat_interleave(form.block_size, 1)  # [B or 1, M * C, H]
        fq = fq * resize_tokens(scale, fq.shape[1])[..., None].to(fq.dtype)
    given = fq, mixed, valid, decays.weight, balance, sink, place, form
    attend = triton_near_and_far if impl == "triton" else near_and_far
    return attend(q, k, v, *given), summaries


def block_summaries(fk, v, valid, place, form):
    """What the far keys and values of each block sum to, and in a last column the keys: [B, G, M, K, V + 1]."""
    exact = torch.float64 if torch.float64 in (fk.dtype, v.dtype) else torch.float32
    fk, v = (resize_tokens(x, valid.shape[1]) for x in (fk, v))
    fk = torch.where((valid & ~sink_tokens(place, form))[..., None, None], fk, 0)
    v = with_ones(torch.where(valid[..., None, None], v, 0))
    fk, v = (by_block_and_group(x, v.shape[2], form.block_size, exact) for x in (fk, v))
    return fk.mT @ v  # paper eq. 4


def sink_tokens(place, form):
    """Which tokens are sinks and so never far: bool [B or 1, M * C]."""
    slot = torch.arange(form.block_size, device=place.device)
    position = (place[:, :, None] * form.block_size + slot).flatten(1)
    return position < form.sinks


def find_sinks(k, v, valid, form, sequence):
    """The first tokens of each sequence: k, v and valid, [B, S, G, ...], or [B, M, S, G, ...] for packed ones."""
    if sequence is None:
        return tuple(x[:, : form.sinks] for x in (k, v, valid))
    first = torch.searchsorted(sequence, sequence) * form.block_size  # of the same sequence
    token = (first[:, None] + torch.arange(form.sinks, device=k.device)).clamp(max=k.shape[1] - 1)
    return tuple(x[:, token] for x in (k, v, valid))


# mhla_hf/ops/local_state.py

@dataclass
class LocalState(RowState):
    """State of B rows, changed in place (its tensors keep their addresses); nothing has a gradient.

    k [B, S + W, G, D], v [B, S + W, G, V], valid bool [B, S + W]: the first S tokens (sinks), then a ring of
    W = (lag + 1) * C: `ring_slot` says which token is where. angles [B, S + W, 1, A]: how each of them was rotated, for the
    far part, which reads keys before their rotation; A is 0 where it does not.
    running [B, G, R, V + 1, K]: for the block i of the last token, the sum over j <= i - lag of lambda_r^(i - j) times
    summary j, transposed (its last row sums the keys); pending [B, G, V + 1, K]: as much of summary i - lag + 1 as has been
    read. Both fp32 at least, and transposed because V + 1 is an awkward width for the vector units that decode.
    position: tokens seen, int64 [B]; furthest: the most there were before any was taken back. cropped: tokens taken back
    whose part of the sums `rewind` has yet to undo.
    """

    block_size: int
    k: torch.Tensor
    v: torch.Tensor
    valid: torch.Tensor
    angles: torch.Tensor
    running: torch.Tensor
    pending: torch.Tensor
    position: torch.Tensor
    furthest: torch.Tensor
    cropped: int = 0

    @staticmethod
    @torch.inference_mode(False)  # whose tensors could not be written outside of it
    def empty(
        k: torch.Tensor, v: torch.Tensor, rates: int, features: int, form: LocalForm, angles: torch.Tensor | None = None
    ) -> "LocalState":
        """A state that has seen nothing, for keys, values and angles like k and v [B, T, G, ..] and angles [.., A]."""
        angles = k.new_zeros(0) if angles is None else angles
        batch, _, groups, value_dim = v.shape
        slots, exact = form.sinks + (form.lag + 1) * form.block_size, torch.promote_types(k.dtype, torch.float32)
        return LocalState(
            block_size=form.block_size,
            k=k.new_zeros(batch, slots, *k.shape[2:]),
            v=v.new_zeros(batch, slots, *v.shape[2:]),
            valid=k.new_zeros(batch, slots, dtype=torch.bool),
            angles=angles.new_zeros(batch, slots, 1, angles.shape[-1]),
            running=k.new_zeros(batch, groups, rates, value_dim + 1, features, dtype=exact),
            pending=k.new_zeros(batch, groups, value_dim + 1, features, dtype=exact),
            position=k.new_zeros(batch, dtype=torch.int64),
            furthest=k.new_zeros(batch, dtype=torch.int64),
        )

    def crop(self, count: int) -> None:
        """Forget the last `count` tokens of every row. ValueError where the ring no longer has what was before them."""
        torch.maximum(self.furthest, self.position, out=self.furthest)
        back = int((self.furthest - self.position).max()) + count
        if back > self.block_size:
            raise ValueError(
                f"count: got {count}, expected a position at most a block of {self.block_size} tokens behind the furthest."
            )
        if count > int(self.position.min()):
            raise ValueError(f"count: got {count}, expected at most the {int(self.position.min())} tokens of a row.")
        self.cropped += count
        self.position.sub_(count)

    @torch.no_grad()
    def rewind(self, decays: Decays, map_keys, form: LocalForm) -> None:
        """Undo in the sums what `crop` took from the positions; map_keys: see `continue_local`."""
        decays, now = decays.to(self.running.dtype), (self.position - 1).clamp(min=0) // form.block_size
        was = (self.position + self.cropped - 1).clamp(min=0) // form.block_size
        left = self.summary(was - form.lag, form.block_size, map_keys, form)  # what entered as block `was` opened
        decay = torch.exp(decays.log_rate)[..., None, None]
        earlier = (self.running - decay**form.lag * left[:, :, None]) / decay
        now, was = (x.view(-1, 1, 1, 1, 1) for x in (now, was))
        # where nothing is far, or a rate keeps less than a rounding error, all that subtraction leaves is error
        earlier = torch.where((now >= form.lag) & (decay > torch.finfo(decay.dtype).eps), earlier, 0)
        self.running.copy_(torch.where(now < was, earlier, self.running))
        self.cropped = 0
        self.refresh_pending(map_keys, form)

    def refresh_pending(self, map_keys, form: LocalForm) -> None:
        """Sum `pending` anew from the ring."""
        last = self.position - 1
        count = torch.where(last >= 0, last % form.block_size + 1, 0)[:, None]
        block = last.clamp(min=0) // form.block_size - form.lag + 1
        self.pending.copy_(self.summary(block, count, map_keys, form))

    def summary(self, block, count, map_keys, form: LocalForm) -> torch.Tensor:
        """The transposed summary [B, G, V + 1, K] of each row's `block` [B], of its first `count` (or [B, 1]) tokens."""
        token = torch.arange(form.block_size, device=block.device)
        position = block[:, None] * form.block_size + token
        rows, place = torch.arange(len(block), device=block.device)[:, None], self.slot(position, form)
        far = self.valid[rows, place] & (position >= form.sinks) & (token < count)
        fk = map_keys(self.k[rows, place], self.angles[rows, place])
        fk = torch.where(far[..., None, None], fk, 0).to(self.running.dtype)
        v = with_ones(torch.where(far[..., None, None], self.v[rows, place], 0)).to(self.running.dtype)
        with torch.autocast(v.device.type, enabled=False):
            return v.permute(0, 2, 3, 1) @ fk.transpose(1, 2)

    def slot(self, position: torch.Tensor, form: LocalForm) -> torch.Tensor:
        """Where the token at `position` is; anywhere for one before the first."""
        return ring_slot(position, self.k.shape[1], form.sinks)


def continue_local(q, k, v, fq, map_keys, decays: Decays, balance, form: LocalForm, state: LocalState, *, fresh: bool,
                   key_mask=None, starts=None, angles=None):  # fmt: skip
    """o [B, T, H, V] (as in `local_attention`) of T new tokens of every row; `state` goes on by them.

    q, k, v, fq, decays, balance, form, key_mask and starts as in `local_attention`. map_keys: a function of keys
    [B, N, G, D] and their angles [B, N, 1, A] that returns the far part's features [B, N, G, K]. angles: of k, [B, T, 1, A];
    None is A = 0. fresh: the state has seen nothing. Gradients flow among the new tokens, not through the state.
    """
    if angles is None:
        angles = state.angles.new_zeros(*q.shape[:2], 1, 0)
    if state.cropped:
        state.rewind(decays, map_keys, form)
    if q.shape[1] == 1 and not fresh:
        real = None if key_mask is None else key_mask[:, 0]
        own = None if starts is None else starts.to(q.device) == 0
        with torch.autocast(q.device.type, enabled=False):
            return local_step(q, k, v, fq, map_keys, decays, balance, form, state, real, own, angles)
    size, steps, before = form.block_size, q.shape[1], state.position.clone()
    count = torch.full_like(before, steps) if starts is None else steps - starts.to(q.device)
    first = torch.zeros_like(before) if fresh else ((before - 1).clamp(min=0) // size - form.lag + 1).clamp(min=0)
    blocks, slots = (steps + size - 1) // size + (0 if fresh else form.lag), 0 if fresh else state.k.shape[1]
    layout = TokenLayout(before, count, steps, first, blocks, size, slots, q.device, form.sinks)
    valid = key_mask if key_mask is not None else torch.ones(q.shape[:2], dtype=torch.bool, device=q.device)
    valid = layout.place_keys(state.valid, valid) & layout.filled
    k, v = layout.place_keys(state.k, k), layout.place_keys(state.v, v)
    angles = layout.place_keys(state.angles, angles)
    q, fq, fk = layout.place_queries(q), layout.place_queries(fq), map_keys(k, angles)
    with torch.no_grad():
        for held, laid in ((state.k, k), (state.v, v), (state.valid, valid), (state.angles, angles)):
            layout.keep(held, laid)
        state.position.copy_(before + count)
    past = {"now": (before + count - 1).clamp(min=0) // size}
    if not fresh:
        past |= {"carried": state.running.mT, "opened": (before - 1).clamp(min=0) // size}
        if form.sinks:
            past["sink"] = tuple(held[:, : form.sinks] for held in (state.k, state.v, state.valid))
    with torch.autocast(q.device.type, enabled=False):
        o, running = attend_local(q, k, v, fq, fk, valid, decays, balance, form, layout.blocks, **past)
    with torch.no_grad():
        state.running.copy_(running.mT)
        state.refresh_pending(map_keys, form)
    return layout.take_back(o)


@torch.no_grad()
def local_step(q, k, v, fq, map_keys, decays: Decays, balance, form: LocalForm, state: LocalState, real=None, own=None,
               angles=None):  # fmt: skip
    """One new token of every row: o [B, 1, H, V] in the dtype of the sums; `state` goes on by it.

    Arguments as of `continue_local`. real: bool [B], whose token is no padding. own: bool [B], whose row goes on by it, be
    it padding after its first token; other rows are left as they are. The same graph for every position.
    """
    size, lag, exact, p = form.block_size, form.lag, state.running.dtype, state.position
    heads = (len(p), k.shape[2], q.shape[2] // k.shape[2])  # [B, G, H / G]
    decays = decays.to(exact)
    rows, slot, inside = torch.arange(len(p), device=p.device), state.slot(p, form), p % size
    for ring, new in ((state.k, k[:, 0]), (state.v, v[:, 0])):
        new = new if real is None else new.masked_fill(~real[:, None, None], 0)
        ring[rows, slot] = new.to(ring.dtype)
    if angles is not None:
        state.angles[rows, slot] = angles[:, 0].to(state.angles.dtype)
    state.valid[rows, slot] = torch.ones_like(p, dtype=torch.bool) if real is None else real

    opens = inside == 0 if own is None else (inside == 0) & own
    opens = opens.view(-1, 1, 1, 1, 1)
    decay = torch.exp(decays.log_rate)[..., None, None]
    state.running.mul_(torch.where(opens, decay, 1))
    state.running.addcmul_(torch.where(opens, decay**lag, 0), state.pending[:, :, None])
    old = p - (lag - 1) * size
    place = state.slot(old, form)
    enters = (old >= form.sinks) & state.valid[rows, place]
    enters = enters if own is None else enters & own
    entering = map_keys(state.k[rows, place][:, None], state.angles[rows, place][:, None])[:, 0]
    entering = entering.masked_fill(~enters[:, None, None], 0).to(exact)
    left_v = with_ones(state.v[rows, place]).to(exact)
    state.pending.mul_(~opens[..., 0]).addcmul_(left_v[..., None], entering[:, :, None])

    slots = torch.arange(state.k.shape[1], device=p.device)
    age = (p[:, None] - slots + form.sinks) % (len(slots) - form.sinks)  # in the ring
    last = inside + (lag - 1) * size
    seen = state.valid & torch.where(slots < form.sinks, slots <= p[:, None], age <= last[:, None])
    score = (q.reshape(*heads, -1).to(exact) @ state.k.permute(0, 2, 3, 1).to(exact)) * form.scale
    fq = fq[:, 0].to(exact)
    if decays.power is not None:
        fq = fq * decays.by_length(p // size, lag)[..., None]
    weighed = fq.view(*heads, 1, -1) * decays.weight.view(*heads[1:], -1, 1)
    far = weighed.flatten(3) @ state.running.mT.flatten(2, 3)
    near_v, has_far = state.v.transpose(1, 2).to(exact), (p >= lag * size).view(-1, 1, 1, 1)
    of_heads = (x if x is None else x.to(exact).view(*heads[1:], 1) for x in (decays.weight.sum(-1), balance))
    o = combine(score, seen[:, None, None], near_v, far, *of_heads, has_far, form).flatten(1, 2)[:, None]
    state.position.add_(1 if own is None else own)
    return o if own is None else o.masked_fill(~own.view(-1, 1, 1, 1), 0)


# mhla_hf/nn/heads.py

class HeadSplit:
    """The KV heads of one layer, each softmax or MHLA; a query head goes with the KV head that it reads.

    Heads are cut as slices, not gathered by an index: nothing has to be on a device, and one run of heads is a view.

    Args:
        softmax_heads: KV heads that keep softmax.
        num_kv_heads: KV heads of the layer G.
    """

    def __init__(self, softmax_heads: Sequence[int], num_kv_heads: int):
        self.softmax_heads = sorted(softmax_heads)
        self.num_kv_heads = num_kv_heads
        self.counts = {True: len(self.softmax_heads), False: num_kv_heads - len(self.softmax_heads)}
        self.runs = []  # [first KV head, one past the last, whether they are softmax]
        for head in range(num_kv_heads):
            kept = head in self.softmax_heads
            if self.runs and self.runs[-1][2] == kept:
                self.runs[-1][1] = head + 1
            else:
                self.runs.append([head, head + 1, kept])

    def part(self, x: torch.Tensor, softmax: bool, dim: int) -> torch.Tensor:
        """The softmax heads, or else the MHLA heads, of `x`, which has the G KV heads or their query heads along `dim`."""
        share = x.shape[dim] // self.num_kv_heads
        parts = [x.narrow(dim, a * share, (b - a) * share) for a, b, kept in self.runs if kept == softmax]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def join(self, parts: dict[bool, torch.Tensor], dim: int) -> torch.Tensor:
        """All heads in their order along `dim`, from those of the softmax heads (True) and of the MHLA heads (False)."""
        pieces, begin = [], {True: 0, False: 0}
        for first, end, kept in self.runs:
            size = (end - first) * parts[kept].shape[dim] // self.counts[kept]
            pieces.append(parts[kept].narrow(dim, begin[kept], size))
            begin[kept] += size
        return torch.cat(pieces, dim)

    def of_rank(self, rank: int, size: int) -> "HeadSplit":
        """The heads of one of `size` tensor-parallel processes, which take them in order, renumbered from 0."""
        count = self.num_kv_heads // size
        return HeadSplit([head - rank * count for head in self.softmax_heads if head // count == rank], count)


# mhla_hf/nn/features.py

RELU_EPS = {"relu": 1e-6, "plain_relu": 0.0}  # above relu(x), what keeps every denominator alive


LEARNED_STARTS = {"hedgehog": 1.0, "softmax": 1.0, "exp": 0.35}  # W begins as so many times the identity
LARGEST_EXPONENT = 6.0


class FeatureMap(nn.Module):
    """Maps `[B, T, H, K]` to `[B, T, H, features]`, the same for q and for k.

    Args:
        kind: "relu", "plain_relu", "elu", "identity", "hedgehog", "softmax" or "exp" (see `MHLASettings`).
        num_heads: heads of its input (the learned map has its own W per head).
        head_dim: width K.
    """

    by_head = True

    def __init__(self, kind: str, num_heads: int, head_dim: int):
        super().__init__()
        self.kind = kind
        self.head_dim = head_dim
        if kind in LEARNED_STARTS:
            self.weight = nn.Parameter(torch.empty(num_heads, head_dim, head_dim))
        if kind == "exp":
            self.bias = nn.Parameter(torch.empty(num_heads, head_dim))
        for name, value in self.initial_values().items():
            self.get_parameter(name).data.copy_(value)

    @property
    def num_features(self) -> int:
        """Width of the result."""
        return 2 * self.head_dim if self.kind == "hedgehog" else self.head_dim

    def initial_values(self) -> dict[str, torch.Tensor]:
        """The start of each own parameter, for models that are built empty and filled later."""
        if self.kind not in LEARNED_STARTS:
            return {}
        weight = LEARNED_STARTS[self.kind] * torch.eye(self.head_dim).expand(self.weight.shape)
        return {"weight": weight} | ({"bias": torch.zeros(self.bias.shape)} if self.kind == "exp" else {})

    def forward(self, x: torch.Tensor, heads: HeadSplit | None = None) -> torch.Tensor:
        """Map x `[B, T, H, K]`, or of some of the H heads: the MHLA heads of `heads`."""
        if self.kind in RELU_EPS:
            return torch.relu(x) + RELU_EPS[self.kind] if RELU_EPS[self.kind] else torch.relu(x)
        if self.kind == "elu":
            return F.elu(x) + 1.0
        if self.kind == "identity":
            return x
        weight = self.weight if heads is None else heads.part(self.weight, False, 0)
        y = torch.einsum("bthk,hkf->bthf", x, weight.to(x.dtype)).float()
        if self.kind == "softmax":
            return y.softmax(-1).to(x.dtype)
        if self.kind == "exp":
            bias = self.bias if heads is None else heads.part(self.bias, False, 0)
            return (torch.exp((y + bias).clamp(max=LARGEST_EXPONENT)) * self.head_dim**-0.5).to(x.dtype)
        if torch.compiler.is_compiling():  # a stack would not be fused
            both = torch.where(torch.arange(2, device=y.device)[:, None] == 0, y[..., None, :], -y[..., None, :])
        else:
            both = torch.stack([y, -y], -2)
        return both.softmax(-1).flatten(-2).to(x.dtype)


# mhla_hf/nn/settings.py

FORMAT_VERSION = 3
# In config.json as `transformers_weights`, the name of a file that is not there, on which softmax classes stop.
NO_SOFTMAX = "these are no weights of a softmax model, load them with trust_remote_code=True or with mhla_hf installed"
MOST_BLOCKS = 16_384  # their matrix takes a gigabyte
LARGEST_BLOCK = 65_536  # tokens, whose keys and values a cache makes room for at its first step
MOST_DECAYS = 64
MOST_WINDOW = 1_024


def is_whole(value, least: int, most: int = sys.maxsize) -> bool:
    """Whether `value` is a whole number from `least` to `most`; True and False are none."""
    return type(value) is int and least <= value <= most


def is_layout(layout) -> bool:
    """Whether `layout` is None or one count of blocks per axis."""
    right = isinstance(layout, list) and 1 <= len(layout) <= 3 and all(is_whole(count, 1) for count in layout)
    return layout is None or (right and prod(layout) <= MOST_BLOCKS)


def is_choice_of_layers(layers) -> bool:
    """Whether `layers` is "all", "2/3" or a list of different indices."""
    if not isinstance(layers, list):
        return layers in ("all", "2/3")
    return len(layers) > 0 and all(is_whole(index, 0) for index in layers) and len(set(layers)) == len(layers)


def is_choice_of_heads(heads) -> bool:
    """Whether `heads` is None, or a list of different KV heads for each layer, by its index as a string."""
    if not isinstance(heads, dict):
        return heads is None
    right = [isinstance(layer, str) and layer.isdecimal() and isinstance(own, list) for layer, own in heads.items()]
    return all(right) and all(own and all(is_whole(head, 0) for head in own) for own in heads.values())


def one_of(*allowed) -> tuple:
    """The rule of a setting with few values; 1 is not True."""
    return (lambda value: (type(value), value) in [(type(one), one) for one in allowed]), f"one of {list(allowed)}"


RULES = {  # of each setting: whether a value is right, and what is
    "block_size": (lambda value: is_whole(value, 1, LARGEST_BLOCK), f"a whole number from 1 to {LARGEST_BLOCK}"),
    "num_blocks": (lambda value: is_whole(value, 1, MOST_BLOCKS), f"a whole number from 1 to {MOST_BLOCKS}"),
    "layout": (is_layout, f"1 to 3 counts of blocks, each at least 1, and at most {MOST_BLOCKS} blocks in all"),
    "feature_map": one_of("relu", "plain_relu", "elu", "hedgehog", "softmax", "exp", "identity"),
    "normalize": one_of(True, False, "official"),
    "mixing_start": one_of("locality", "uniform"),
    "learn_mixing": one_of(True, False),
    "mixing_form": one_of("softmax", "direct", "free", "decay"),
    "free_decay": one_of(True, False),
    "length_power": one_of(True, False),
    "num_decays": (lambda value: is_whole(value, 1, MOST_DECAYS), f"a whole number from 1 to {MOST_DECAYS}"),
    "local": one_of(None, "softmax"),
    "window": (lambda value: is_whole(value, 1, MOST_WINDOW), f"a whole number from 1 to {MOST_WINDOW}"),
    "sinks": (lambda value: is_whole(value, 0), "a whole number of at least 0"),
    "window_dropout": (lambda value: type(value) in (int, float) and 0 <= value <= 1, "a number from 0 to 1"),
    "per_head": one_of(True, False),
    "output_norm": one_of(True, False),
    "gate": one_of(True, False),
    "cpe": (lambda value: is_whole(value, 0) and (value % 2 == 1 or value == 0), "0 or an odd kernel size"),
    "rope": one_of("before", "after", "near"),
    "layers": (is_choice_of_layers, '"all", "2/3" or a list of layer indices, each at least 0 and there once'),
    "softmax_heads": (is_choice_of_heads, "a dictionary of layer indices and lists of KV heads, each at least 0"),
    "impl": one_of(*IMPLEMENTATIONS),
}


@dataclass
class MHLASettings:
    """How MHLA layers are built. Saved with the model; checked when made and when loaded.

    Args:
        block_size: tokens in a block of a sequence (the paper's chunk; 64 in section 5.4).
        num_blocks: side M of the learned mixing matrix. Longer sequences work: rows beyond M repeat the last row by
            distance and continue it with a geometric tail (`Mixing`). Of an encoder: as many as its longest input has.
        layout: blocks per axis of a grid of tokens, for images [rows, columns] and video [frames, rows, columns]; then
            block_size and num_blocks have no meaning. None: the tokens are a sequence.
        feature_map: "relu" (the paper's; max(x, 0) + 1e-6), "plain_relu" (max(x, 0), Sana's), "elu" (elu(x) + 1),
            "identity", or one that is learned per head: "softmax" (of x W), "hedgehog" (softmax(x W) and softmax(-x W) side
            by side, twice the width), "exp" (e^(x W + b), at most e^6).
        normalize: True divides by the summed weights (eq. 4), False leaves that to `output_norm` (section 4.1), "official"
            is the released vision code's denominator (not for causal models).
        mixing_start: "locality" (section 4.2: 1 - distance / number of blocks, rows summing to one) or "uniform" (plain
            linear attention).
        learn_mixing: False freezes the mixing at its start.
        mixing_form: "softmax" keeps a matrix of logits (rows sum to one, weights positive); "direct" keeps the weights
            themselves, as released checkpoints do (negative ones are refused when loaded); "free" too, of any sign (the
            released video checkpoints); "decay" is a sum of `num_decays` exponentials of the distance per head, which needs
            no matrix: its cost is linear and its decoding state constant. It starts at plain linear attention.
        num_decays: R of the "decay" form, the first of them without decay.
        free_decay: the first of them decays, too, by a learned rate.
        length_power: the far weights of a block from which n blocks are far are divided by n^a, with a learned per head
            (with `local`).
        local: None, or "softmax": exact softmax over the last `window` blocks and the first `sinks` tokens, and MHLA by
            decays for all others, under one normalizer (language models and encoders; needs "decay").
        window: blocks of the softmax of `local`, the open one included; of an encoder as many on the other side, too.
        sinks: first tokens of a sequence that stay in the softmax of `local`; 0 for an encoder.
        window_dropout: how often, in training, all blocks before the open one are left to the far part, 0 to 1.
        per_head: one mixing matrix per query head instead of one per layer.
        output_norm: RMSNorm over each head's output (section 4.1 for language and video).
        gate: multiply the output by silu(W x + b), starting at one.
        cpe: kernel size of a depthwise convolution of v over the grid that is added to the output (the paper's CPE, appendix
            F.2), starting at zero; 0 for none. Grids only.
        rope: "before" rotates q and k before the feature map (converted models), "after" rotates the features (the
            paper's order; the denominator, if any, then uses the un-rotated ones), "near" rotates them for the softmax of
            `local` alone: features of rotated keys are functions of absolute positions, which do not hold beyond the lengths
            they were fitted at.
        layers: "all", "2/3" (softmax stays in layers 0, 3, 6, ...), or a list (tuple, range) of layer indices.
        softmax_heads: KV heads that keep softmax in these layers, with the query heads that read them, and so their whole
            past in the cache: {layer index: [KV head, ...]}. A layer that lists all of its KV heads is not in `layers`.
            Needs "decay".
        impl: which implementation of the operator: "auto", "torch" or "triton"; without decays also "reference".
    """

    block_size: int = 64
    num_blocks: int = 32
    layout: list[int] | tuple[int, ...] | None = None
    feature_map: str = "hedgehog"
    normalize: bool | str = True
    mixing_start: str = "locality"
    learn_mixing: bool = True
    mixing_form: str = "softmax"
    num_decays: int = 2
    free_decay: bool = False
    length_power: bool = False
    local: str | None = None
    window: int = 2
    sinks: int = 4
    window_dropout: float = 0.0
    per_head: bool = False
    output_norm: bool = False
    gate: bool = False
    cpe: int = 0
    rope: str = "before"
    layers: str | list[int] | tuple[int, ...] = "all"
    softmax_heads: dict[str, list[int]] | None = None
    impl: str = "auto"

    def __post_init__(self):
        for name in ("layout", "layers"):
            if isinstance(getattr(self, name), (list, tuple, range)):
                setattr(self, name, list(getattr(self, name)))
        if isinstance(self.softmax_heads, dict):
            own = {str(layer): sorted(set(heads)) for layer, heads in self.softmax_heads.items()}
            self.softmax_heads = own or None
        for name, (is_right, expected) in RULES.items():
            if not is_right(getattr(self, name)):
                raise ValueError(f"{name}: got {getattr(self, name)!r}, expected {expected}.")
        if isinstance(self.layers, list):
            self.layers = sorted(self.layers)
        decay, local = self.mixing_form == "decay", self.local is not None
        if decay and self.layout is not None:
            what = 'expected "softmax", "direct" or "free" for grids'
            raise ValueError(f'mixing_form: got "decay" with a layout, {what}.')
        if decay and self.rope == "after":
            raise ValueError('rope: got "after" with mixing_form="decay", expected "before".')
        if decay and self.impl == "reference":
            raise ValueError('impl: got "reference" with mixing_form="decay", expected "auto", "torch" or "triton".')
        if self.free_decay and not decay:
            raise ValueError(f'free_decay: got true with mixing_form={self.mixing_form!r}, expected "decay".')
        if self.length_power and not local:
            raise ValueError('length_power: got true without local="softmax", expected false.')
        if self.rope == "near" and not local:
            raise ValueError('rope: got "near" without local="softmax", expected "before" or "after".')
        if self.softmax_heads and (not decay or self.gate):
            got = "gate=true" if decay else f"mixing_form={self.mixing_form!r}"
            raise ValueError(f'softmax_heads: got some with {got}, expected mixing_form="decay" and no gate.')
        if local and not decay:
            raise ValueError(f'mixing_form: got {self.mixing_form!r} with local="softmax", expected "decay".')
        if local and not self.normalize:
            raise ValueError('normalize: got false with local="softmax", expected true.')
        if local and self.sinks > self.block_size:
            raise ValueError(f"sinks: got {self.sinks}, expected at most the block_size of {self.block_size}.")

    def resolve_layers(self, num_layers: int) -> list[int]:
        """The indices of the layers that are MHLA in a model of `num_layers` layers, in order."""
        if self.layers == "all":
            return list(range(num_layers))
        if self.layers == "2/3":
            chosen = [i for i in range(num_layers) if i % 3]
            if not chosen:
                raise ValueError(f'layers: got "2/3" for a model of {num_layers} layer, which would convert none.')
            return chosen
        if self.layers[-1] >= num_layers:
            raise ValueError(
                f"layers: got index {self.layers[-1]}, expected less than the model's {num_layers} layers."
            )
        return list(self.layers)

    def to_dict(self) -> dict[str, object]:
        """Plain values for `config.json`, with the version of this format."""
        return {"format_version": FORMAT_VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, values: dict[str, object]) -> "MHLASettings":
        """The settings that `to_dict` wrote. A newer format, or a key this version does not know, is refused."""
        if not isinstance(values, dict):
            raise ValueError(f"mhla: got {type(values).__name__}, expected a dictionary of settings.")
        values = dict(values)
        version = values.pop("format_version", FORMAT_VERSION)
        if not is_whole(version, 1, FORMAT_VERSION):
            what = f"expected 1 to {FORMAT_VERSION}; update mhla_hf to load a newer checkpoint"
            raise ValueError(f"format_version: got {version!r}, {what}.")
        if unknown := sorted(set(values) - set(RULES)):
            raise ValueError(f"mhla: got unknown setting {unknown[0]!r}, expected a field of MHLASettings.")
        return cls(**values)


# mhla_hf/nn/core.py

GATE_OPEN = 1.2784645  # silu(GATE_OPEN) == 1


class OutputNorm(nn.Module):
    """RMSNorm over each head's output, computed in fp32, one weight of `[V]` for all heads (section 4.1)."""

    def __init__(self, value_dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(value_dim))

    def initial_values(self) -> dict[str, torch.Tensor]:
        """The start of each own parameter, for models that are built empty and filled later."""
        return {"weight": torch.ones(self.weight.shape)}

    def forward(self, o: torch.Tensor) -> torch.Tensor:
        """Of o `[.., V]`; where it and the weight differ in dtype, in fp32 (fp64 if one is)."""
        weight = self.weight
        if o.dtype != weight.dtype:
            dtype = torch.promote_types(torch.promote_types(o.dtype, weight.dtype), torch.float32)
            o, weight = o.to(dtype), weight.to(dtype)
        return F.rms_norm(o, weight.shape, weight, self.eps)


def without_padding(key_mask: torch.Tensor | None, *tensors: torch.Tensor) -> tuple:
    """Zeros in `[B, T, H, K]` where key_mask `[B, T]` is False: NaN in padding would get through a weight of 0."""
    return tensors if key_mask is None else tuple(x.masked_fill(~key_mask[:, :, None, None], 0.0) for x in tensors)


def padding_first(key_mask: torch.Tensor) -> tuple:
    """Where tokens go so that padding comes before all real tokens of its row and has no place among them.

    Returns the `source` and `back` of `MoveTokens` (None for single tokens) and where the real tokens begin, int64 `[B]`.
    """
    starts = key_mask.shape[1] - key_mask.sum(1)
    if key_mask.shape[1] == 1:
        return None, None, starts
    source = key_mask.int().argsort(stable=True)
    return source, source.argsort(), starts


def move_tokens(source: torch.Tensor | None, back: torch.Tensor | None, *tensors: torch.Tensor) -> tuple:
    """`MoveTokens` of each tensor `[B, T, H, K]`, as `padding_first` says."""
    return tensors if source is None else tuple(MoveTokens.apply(x, source, back) for x in tensors)


def refuse_gradients(core: nn.Module, *tensors: torch.Tensor) -> None:
    """No gradient flows through a cache that holds tokens: refused in training, said once elsewhere."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        sentence = "past_key_values: got a cache that holds tokens, expected torch.no_grad() or use_cache=False: "
        sentence += "no gradient flows through an MHLA cache."
        if core.training:
            raise ValueError(sentence)
        warnings.warn(sentence, stacklevel=3)


class OutputGate(nn.Linear):
    """W x + b for every output channel, of which silu is one at the start (section 4.1).

    The silu is the core's: what replaces or wraps linear layers (quantization, LoRA) knows only of the product.
    """

    def initial_values(self) -> dict[str, torch.Tensor]:
        """The start of each own parameter, for models that are built empty and filled later."""
        return {"weight": torch.zeros(self.weight.shape), "bias": torch.full(self.bias.shape, GATE_OPEN)}

    def reset_parameters(self) -> None:
        """As `initial_values` says."""
        for name, value in self.initial_values().items():
            self.get_parameter(name).data.copy_(value)


class MHLACore(nn.Module):
    """What the causal core and the grid core share: feature maps, mixing, and what is done to the output.

    Args:
        settings: the choices.
        mixing: the module that holds the mixing.
        num_heads: query heads H.
        num_kv_heads: key/value heads G; query head h uses head h // (H // G).
        key_dim: width K of q and k.
        value_dim: width V of v.
        hidden_size: width of the layer's input, needed by the gate.
        norm_eps: eps of the output norm.
    """

    causal = False

    def __init__(
        self, settings, mixing, *, num_heads, num_kv_heads, key_dim, value_dim, hidden_size, norm_eps: float = 1e-6
    ):
        super().__init__()
        self.settings = settings
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.value_dim = value_dim
        self.q_map = FeatureMap(settings.feature_map, num_heads, key_dim)
        self.k_map = FeatureMap(settings.feature_map, num_kv_heads, key_dim)
        self.mixing = mixing
        if settings.output_norm:
            self.norm = OutputNorm(value_dim, norm_eps)
        if settings.gate:
            self.gate = OutputGate(hidden_size, num_heads * value_dim)

    def operands(self, q, k, v, key_mask, rotate) -> tuple:
        """Features of q and k, v, and the operator's options that follow from them and the settings.

        `settings.rope` says whether `rotate`, if there is one, comes before the maps or after. All features are in v's
        dtype: under autocast a rotation leaves fp32, which softmax attention would cast back, too.
        """
        if rotate is not None and self.settings.rope == "before":
            (q, k), rotate = rotate(q, k), None
        q, k, v = without_padding(key_mask, q, k, v)
        q, k = self.q_map(q), *without_padding(key_mask, self.k_map(k))
        options = {"normalize": self.settings.normalize, "unrounded": self.settings.output_norm}
        if rotate is not None:
            if self.settings.normalize:
                options |= {"q_den": q.to(v.dtype), "k_den": k.to(v.dtype)}
            q, k = rotate(q, k)
        return q.to(v.dtype), k.to(v.dtype), v, options

    def finish_output(self, o: torch.Tensor, hidden_states: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """Output norm and gate over o `[B, T, H, V]`, which is then in `dtype`."""
        if self.settings.output_norm:
            o = self.norm(o)
        o = o.to(dtype)
        if self.settings.gate:
            o = o * F.silu(self.gate(hidden_states)).view_as(o)
        return o


def check_causal(settings: MHLASettings, model: str = "a causal model") -> None:
    """One sentence if `settings` are not those of a causal model, or of another one of sequences, named `model`."""
    if settings.normalize == "official":
        raise ValueError(f'normalize: got "official", expected true or false for {model}.')
    for name in ("layout", "cpe"):
        if getattr(settings, name):
            raise ValueError(f"{name}: got {getattr(settings, name)!r}, expected none for {model}.")


def check_encoder(settings: MHLASettings) -> None:
    """One sentence if `settings` are not those of an encoder, which has mixing by a matrix, or by decays with a window."""
    check_causal(settings, "an encoder")
    if settings.mixing_form != "decay":
        return
    if settings.local is None:
        raise ValueError('local: got None with mixing_form="decay", expected "softmax" for an encoder.')
    if settings.impl == "triton":
        raise ValueError('impl: got "triton" with mixing_form="decay", expected "auto" or "torch" for an encoder.')
    expected = {"rope": "before", "sinks": 0, "length_power": False, "window_dropout": 0}
    for name, value in {**expected, "softmax_heads": None}.items():
        if getattr(settings, name) != value:
            raise ValueError(f"{name}: got {getattr(settings, name)!r}, expected {value!r} for an encoder.")


# mhla_hf/nn/decay_mixing.py

START_WEIGHT = 0.01  # of each decay at the start, beside the one without decay
START_RATES = (0.9, 0.7, 0.4)  # lambda of the decays at the start, then halved again and again
START_FREE = 0.98  # of the first decay, if it is free
START_POWER = 0.5


class DecayMixing(nn.Module):
    """Mixing by `Decays`, and the balance of the far part against a local softmax; used in fp32 whatever the model's dtype.

    `weight` `[H, R]`: logits of w, which sum to one. `rate` `[G, R - 1]`, or `[G, R]` if all are free: lambda is
    sigmoid(rate), and 1 for the first that is not free. `balance` `[H]`: see `ops/local.py`; only with a local softmax.
    `power` `[H]`: that of `Decays`, if it is learned.

    Args:
        num_heads: query heads H.
        num_kv_heads: key/value heads G.
        num_decays: R.
        balance: its start, or None without a local softmax.
        learn: False freezes w and lambda, not the balance, at their start, plain linear attention.
        free: the first decay's lambda is learned, too.
        by_length: there is a power.
    """

    by_head = True

    def __init__(
        self, num_heads: int, num_kv_heads: int, num_decays: int, *, balance: float | None = None, learn: bool = True,
        free: bool = False, by_length: bool = False,
    ):  # fmt: skip
        super().__init__()
        self.num_heads, self.num_kv_heads, self.num_decays = num_heads, num_kv_heads, num_decays
        self.start, self.learn, self.num_fixed = balance, learn, 0 if free else 1
        self.weight = nn.Parameter(torch.empty(num_heads, num_decays), requires_grad=learn)
        if num_decays > self.num_fixed:
            self.rate = nn.Parameter(torch.empty(num_kv_heads, num_decays - self.num_fixed), requires_grad=learn)
        if by_length:
            self.power = nn.Parameter(torch.empty(num_heads), requires_grad=learn)
        if balance is not None:
            self.balance = nn.Parameter(torch.empty(num_heads))
        for name, value in self.initial_values().items():
            self.get_parameter(name).data.copy_(value)

    def initial_values(self) -> dict[str, torch.Tensor]:
        """The start of each own parameter, for models that are built empty and filled later."""
        others = self.num_decays - 1
        share = START_WEIGHT if self.learn else 1e-30
        weight = torch.tensor([1.0 - share * others, *[share] * others])
        values = {"weight": weight.log().expand(self.weight.shape)}
        if self.num_decays > self.num_fixed:
            rates = [*START_RATES, *(0.4 / 2**n for n in range(1, others))][:others]
            rates = torch.tensor(rates if self.num_fixed else [START_FREE, *rates])
            values["rate"] = torch.logit(rates).expand(self.rate.shape)
        if hasattr(self, "power"):
            values["power"] = torch.full(self.power.shape, START_POWER)
        if self.start is not None:
            values["balance"] = torch.full(self.balance.shape, self.start)
        return values

    def forward(self, heads: HeadSplit | None = None) -> tuple[Decays, torch.Tensor | None]:
        """The decays and the balance (None without a local softmax), fp32; of the MHLA heads of `heads`, or of all."""
        if self.num_decays > self.num_fixed:
            log_rate = F.pad(F.logsigmoid(self.rate.float()), (self.num_fixed, 0))
        else:  # fewer groups where heads are split over processes
            log_rate = self.weight.new_zeros(self.num_kv_heads * len(self.weight) // self.num_heads, 1).float()
        balance = None if self.start is None else self.balance.float()
        power = self.power.float() if hasattr(self, "power") else None
        values = self.weight.float().softmax(-1), log_rate, power, balance
        if heads is not None:
            values = (x if x is None else heads.part(x, False, 0) for x in values)
        *values, balance = values
        return Decays(*values), balance

    @torch.inference_mode(False)
    def pack(self, decays: Decays, balance: torch.Tensor | None) -> torch.Tensor:
        """What `forward` returned, as one fp32 tensor without gradient: `[H, 2R]` and columns for power and balance."""
        log_rate = decays.log_rate.repeat_interleave(self.num_heads // self.num_kv_heads, 0)
        parts = [decays.weight, log_rate, *(x[:, None] for x in (decays.power, balance) if x is not None)]
        return torch.cat(parts, 1).detach()

    def unpack(self, packed: torch.Tensor) -> tuple[Decays, torch.Tensor | None]:
        """What `pack` was given."""
        count, share = self.num_decays, self.num_heads // self.num_kv_heads
        power = packed[:, 2 * count] if hasattr(self, "power") else None
        decays = Decays(packed[:, :count], packed[::share, count : 2 * count], power)
        return decays, None if self.start is None else packed[:, -1]


# mhla_hf/nn/local.py

WINDOW_BALANCE = -4.0  # at which the far part does no harm to SmolLM2 before it has learned, at 1,024 and 4,096 tokens


def start_balance(settings: MHLASettings, key_dim: int, causal: bool) -> float:
    """The balance at which far weights begin in the unit of the softmax.

    <fq, fk> is about 2 / K for Hedgehog features of random keys, of the order of K for those without a softmax. Features of
    real keys saturate: in converted models the start is small enough that a conversion is not worse than its window.
    """
    if settings.rope == "near" or not causal:
        return WINDOW_BALANCE if settings.feature_map in ("hedgehog", "softmax") else WINDOW_BALANCE - log(key_dim)
    return log(key_dim / 2) if settings.feature_map == "hedgehog" else -log(key_dim)


def keep_rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """What stands in the place of undoing RoPE where there is none."""
    return x


class DecayCore(MHLACore):
    """What the causal core and that of encoders share: mixing by decays, and what says which tokens are near.

    Its parameters are those of all heads, also where some keep softmax: which ones do can then be chosen after they learned.

    Args: as `MHLACore`, which makes its own `DecayMixing` from `settings`.

    Attributes:
        heads: the `HeadSplit` of a layer in which some KV heads keep softmax, whose q, k and v do not come here; else None.
        unrotate: a function of q or k and of their angles that undoes RoPE, for `rope="near"`.
    """

    def __init__(self, settings: MHLASettings, *, num_heads: int, num_kv_heads: int, key_dim: int, **widths):
        check_causal(settings) if self.causal else check_encoder(settings)
        local = settings.local is not None
        balance = start_balance(settings, key_dim, self.causal) if local else None
        choices = {"free": settings.free_decay, "by_length": settings.length_power, "learn": settings.learn_mixing}
        mixing = DecayMixing(num_heads, num_kv_heads, settings.num_decays, balance=balance, **choices)
        super().__init__(settings, mixing, num_heads=num_heads, num_kv_heads=num_kv_heads, key_dim=key_dim, **widths)
        self.heads: HeadSplit | None = None
        self.unrotate = keep_rotated
        self.form = LocalForm(
            settings.block_size,
            lag=settings.window if local else 1,
            sinks=settings.sinks if local else 0,
            scale=key_dim**-0.5,
            normalize=settings.normalize,
            impl=settings.impl,
            unrounded=settings.output_norm,
            both_ways=not self.causal,
        )


class DecayMHLA(DecayCore):
    """Causal attention over `[B, T, H, K]` queries whose far part is MHLA by decays (`ops/local.py` has the formula)."""

    causal = True

    def forward(
        self, q, k, v, *, hidden_states=None, starts=None, key_mask=None, cu_seqlens=None, cache=None, scale=None,
        angles=None,
    ) -> torch.Tensor:  # fmt: skip
        """Attend; arguments as `MHLA.forward`, all of the MHLA heads alone.

        scale: of q k^T in the softmax, the base's; None is K**-0.5. angles: `[B or 1, T, 1, A]`, how q and k were rotated;
        None if they were not.
        """
        form = self.form if scale in (None, self.form.scale) else replace(self.form, scale=scale)
        q, k, v = without_padding(key_mask, q.to(v.dtype), k.to(v.dtype), v)  # autocast leaves rotated ones in fp32
        angles = q.new_zeros(*q.shape[:2], 1, 0) if angles is None else angles.to(q.dtype).expand(len(q), -1, -1, -1)
        real = key_mask
        if key_mask is not None:
            source, back, starts = padding_first(key_mask)
            q, k, v, angles = move_tokens(source, back, q, k, v, angles)
            real = key_mask if source is None else key_mask.gather(1, source)
        if q.shape[1] == 1 and torch.compiler.is_compiling():  # in memory, or each key would rotate the query anew
            both = torch.cat([q, k], 2)
            q, k = both[:, :, : q.shape[2]], both[:, :, q.shape[2] :]
        mixing, map_keys = self.read_mixing(cache), self.map_keys
        fq = self.q_map(self.unrotate(q, angles), self.heads)
        if mixing[1] is None:  # without a balance the near part reads features, too
            q, k, map_keys = fq, self.map_keys(k, angles), keep_rotated
        inputs, padding = (q, k, v, fq), {"key_mask": real, "starts": starts}
        dropped = (cache is None or cache.state is None) and self.drops_window()
        if dropped and cache is not None:
            with torch.no_grad():
                self.continue_cache(*inputs, map_keys, mixing, form, cache, angles=angles, **padding)
        if cache is not None and not dropped:
            o = self.continue_cache(*inputs, map_keys, mixing, form, cache, angles=angles, **padding)
        else:
            form = replace(form, lag=1) if dropped else form
            with torch.autocast(q.device.type, enabled=False):
                o = self.attend(*inputs, map_keys(k, angles), *mixing, form, cu_seqlens=cu_seqlens, **padding)
        if key_mask is not None:
            (o,) = move_tokens(back, source, o)
            if cache is not None:
                cache.note_padding(key_mask)
        return self.finish_output(o, hidden_states, v.dtype)

    attend = staticmethod(local_attention)  # of whole sequences; shards of them: see training/sequence_parallel.py

    def map_keys(self, k: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """The far part's features of keys `[B, N, G, D]`, which were rotated by `angles` `[B, N, 1, A]`."""
        return self.k_map(self.unrotate(k, angles), self.heads)

    def read_mixing(self, cache) -> tuple:
        """The decays and the balance. A cache keeps those it began with, as one tensor: each one that a step takes costs."""
        if cache is None or cache.state is None:
            mixing = self.mixing(self.heads)
            if cache is not None:
                cache.mixing = self.mixing.pack(*mixing)
            return mixing
        return self.mixing.unpack(cache.mixing)

    def drops_window(self) -> bool:
        """Whether this training step leaves all blocks before the open one to the far part."""
        share = self.settings.window_dropout if self.training and self.form.lag > 1 else 0
        return share > 0 and float(torch.rand(())) < share

    def continue_cache(self, q, k, v, fq, map_keys, mixing, form, cache, *, key_mask, starts, angles):
        """The outputs of new tokens behind those of `cache.state`, which goes on by them."""
        fresh, (decays, balance) = cache.state is None, mixing
        if fresh:
            features = self.k_map.num_features
            cache.state = LocalState.empty(k, v, self.mixing.num_decays, features, form, angles)
        else:
            refuse_gradients(self, q, k, v)
        options = {"fresh": fresh, "key_mask": key_mask, "starts": starts, "angles": angles}
        return continue_local(q, k, v, fq, map_keys, decays, balance, form, cache.state, **options)


# mhla_hf/models/cache.py

class MHLACacheLayer(LinearAttentionCacheLayerMixin, CacheLayerMixin):
    """What one layer remembers (`state`, an `MHLAState` or a `LocalState`), the mixing it is read with, and its length.

    `state` is None until the first forward pass. `seen_tokens` counts columns, padding included, as transformers does.

    Args:
        static: whether it stands for a static layer, which counts in a tensor.
        max_cache_len: of that layer.
        softmax: the layer for the keys and values of the heads that keep softmax; None if there are none.
    """

    is_compileable = True  # False would make transformers drop the mask that a hybrid's static softmax layers need
    is_croppable = True
    is_sliding = False

    def __init__(self, static: bool = False, max_cache_len: int | None = None, softmax: CacheLayerMixin | None = None):
        LinearAttentionCacheLayerMixin.__init__(self)
        CacheLayerMixin.__init__(self)
        self.state = None
        self.seen_tokens = torch.tensor(0) if static else 0  # as in transformers' layers: no recompilation by a tensor
        self.mixing = None  # a matrix, or packed decays
        self.max_cache_len = max_cache_len
        self.softmax = softmax
        self.padded = None  # the last call with padding: its real tokens, and the columns there were after it

    def count(self, hidden_states: torch.Tensor) -> None:
        """Note the columns of `hidden_states` `[B, T, ..]`, in place if static."""
        if not isinstance(self.seen_tokens, torch.Tensor):
            self.seen_tokens += hidden_states.shape[1]
            return
        if self.seen_tokens.device != hidden_states.device:
            self.seen_tokens = self.seen_tokens.to(hidden_states.device)
        self.seen_tokens.add_(hidden_states.shape[1])  # `+=` would make it an output of a compiled step

    def mixing_for(self, mixing, new_tokens: int, block_size: int) -> torch.Tensor:
        """The mixing weights for the blocks reached after `new_tokens` more, computed once per doubling of the length."""
        needed = -(-(int(self.seen_tokens) + new_tokens) // block_size)
        if torch.is_grad_enabled() and mixing.weight.requires_grad:
            return mixing(needed)
        if self.mixing is None or self.mixing.shape[-1] < needed:
            capacity = max(mixing.num_blocks, 1 << (needed - 1).bit_length())
            self.mixing = mixing(capacity).detach()
        return self.mixing

    def note_padding(self, key_mask: torch.Tensor) -> None:
        """Remember the padding `[B, T]` of the call that is under way, for `crop`, which reads it."""
        if not torch.compiler.is_compiling():
            self.padded = key_mask, self.seen_tokens + key_mask.shape[1]

    def get_seq_length(self) -> int:
        return self.seen_tokens

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        # As the softmax layer in whose place this one is: transformers may size the masks of the other layers by it.
        return (self.seen_tokens + query_length if self.max_cache_len is None else self.max_cache_len), 0

    def lazy_initialization(self, *args, **kwargs) -> None:
        """Nothing to do: the first forward pass makes the state."""

    def update(self, *args, **kwargs):
        raise ValueError("past_key_values: a layer without MHLA wrote to an MHLA cache; expected one model's layers.")

    update_conv_state = update_recurrent_state = update

    def offload(self) -> None:
        """Stays where it is: transformers offloads before the layer has read its state."""

    prefetch = offload

    def reset(self) -> None:
        self.state, self.mixing, self.padded = None, None, None
        self.seen_tokens *= 0
        if self.softmax is not None:
            self.softmax.reset()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        if self.state is not None:
            self.state.select(beam_idx)
        if self.softmax is not None:
            self.softmax.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self.state.repeat(repeats)
        if self.softmax is not None:
            self.softmax.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self.state is not None:
            self.state.select(indices)
        if self.softmax is not None:
            self.softmax.batch_select_indices(indices)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens, exactly; at most one block of them."""
        if self.state is None or tokens_to_remove == 0:
            return
        if not 0 < -tokens_to_remove <= self.state.block_size:
            what = f"{-self.state.block_size} to 0: an MHLA cache forgets one block exactly (see num_assistant_tokens)"
            raise ValueError(f"tokens_to_remove: got {tokens_to_remove}, expected {what}.")
        if self.padded is not None:
            real, columns = self.padded
            back = int(columns) - int(self.seen_tokens) - tokens_to_remove
            if back > 0 and not bool(real[:, -back:].all()):
                raise ValueError(f"tokens_to_remove: got {tokens_to_remove}, expected none that is padding.")
        self.state.crop(-tokens_to_remove)
        self.seen_tokens += tokens_to_remove
        if self.softmax is not None:
            self.softmax.crop(tokens_to_remove)


class MHLADynamicCache(DynamicCache):
    """A `DynamicCache` with MHLA layers."""

    def crop(self, tokens_to_remove: int) -> None:
        """As the base; what the MHLA layers refuse, they refuse before a softmax layer has forgotten it."""
        for layer in sorted(self.layers, key=lambda layer: not isinstance(layer, MHLACacheLayer)):
            layer.crop(tokens_to_remove)


def mhla_cache_layer(past_key_values: Cache | None, layer_idx: int, mixed: bool = False) -> MHLACacheLayer | None:
    """The MHLA layer number `layer_idx` of a cache, put there at first use; None without a cache.

    mixed: some heads of the layer keep softmax; their keys and values go into a layer such as the one that it replaces.
    """
    if past_key_values is None:
        return None
    layers = past_key_values.layers
    while len(layers) <= layer_idx:
        layers.append(past_key_values.layer_class_to_replicate())
    layer = layers[layer_idx]
    if isinstance(layer, MHLACacheLayer):
        return layer
    if isinstance(layer, CacheLayerMixin) and layer.is_initialized and layer.get_seq_length():
        raise ValueError(
            f"past_key_values: layer {layer_idx} holds {layer.get_seq_length()} tokens of softmax keys and values, "
            "expected an empty cache or one that this model filled."
        )
    static = isinstance(layer, StaticLayer)
    length = layer.max_cache_len if static else None
    if mixed and static and layer.is_initialized:  # with room for all heads
        layer = type(layer)(max_cache_len=length)
    layers[layer_idx] = MHLACacheLayer(static, max_cache_len=length, softmax=layer if mixed else None)
    if type(past_key_values) is DynamicCache and not torch.compiler.is_compiling():
        past_key_values.__class__ = MHLADynamicCache
    return layers[layer_idx]


# mhla_hf/models/families.py

HEADS = {  # how a language model's class ends, and the Auto class that finds it
    "LMHeadModel": "AutoModelForCausalLM",
    "ForCausalLM": "AutoModelForCausalLM",
    "Model": "AutoModel",
    "TextModel": "AutoModel",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForTokenClassification": "AutoModelForTokenClassification",
    "ForQuestionAnswering": "AutoModelForQuestionAnswering",
}
ENCODER_HEADS = {head: auto for head, auto in HEADS.items() if not head.endswith(("LM", "HeadModel", "TextModel"))}
ENCODER_HEADS |= {"ForMaskedLM": "AutoModelForMaskedLM", "ForMultipleChoice": "AutoModelForMultipleChoice"}
IMAGE_HEADS = dict.fromkeys(("ForImageClassification", "WithTeacher"), "AutoModelForImageClassification")


@dataclass(frozen=True)
class Family:
    """One family of base models.

    base: its model type in transformers, or its first class in diffusers.
    classes: the base's classes that `convert` takes; the MHLA class of each has its name with MHLA before it.
    entry: the module that defines these classes, and that is folded into their checkpoints.
    task: what the Hub calls the thing it does.
    defaults: the settings of a conversion (`MHLASettings`).
    conditions: what it is told beside the time, in the order in which training data hold it; without any, it cannot be
        trained as a transformer of diffusers.
    linear: its attention is linear before the conversion, which then loses nothing.
    prefix: tokens before the grid of a vision tower; registers come after them.
    axes: how many axes the grid of a transformer of diffusers has.
    fixed_size: it takes square latents of its `sample_size` only.
    """

    base: str
    classes: tuple[str, ...]
    entry: str
    task: str
    defaults: dict = field(default_factory=dict)
    conditions: tuple[str, ...] = ()
    linear: bool = False
    prefix: int = 1
    axes: int = 2
    fixed_size: bool = False


def language_family(base: str) -> Family:
    """A family of causal language models of transformers: a body and the heads on it, as far as it has them."""
    prefix = SPELLED.get(base) or "".join(map(str.capitalize, base.removesuffix("_text").split("_")))
    defaults = {"layers": "2/3", "mixing_form": "decay", "local": "softmax", "rope": "near", "window": 6}
    defaults |= {"num_decays": 1, "free_decay": True, "length_power": True, "feature_map": "softmax"}
    defaults |= {"rope": "before"} if base.startswith("hunyuan") else {}  # see models/rotation.py
    return Family(base, tuple(prefix + head for head in HEADS), "models.converted", "text-generation", defaults)


LANGUAGE_TYPES = (  # of transformers
    "afmoe apertus apertus1p5_text arcee aria_text axk1 bailing_hybrid beam biogpt bitnet cohere cohere2 "
    "cohere2_moe ctrl cwm deepseek_v2 deepseek_v3 dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo gemma "
    "gemma2 gemma3_text gemma3n_text gemma4_text glm glm4 glm4_moe glm4_moe_lite gpt2 gpt_bigcode gpt_neox "
    "granite granitemoe granitemoehybrid granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 "
    "hyperclovax jais2 jamba jetmoe kimi_linear kolibri1 laguna lara_mini lfm2 lfm2_moe lfm3 llama llama4_text "
    "mellum mimo_v2_flash minicpm3 minimax minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral "
    "modernbert-decoder nanochat nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe persimmon phi phi3 phimoe qwen2 "
    "qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next seed_oss smollm3 solar_open starcoder2 "
    "vaultgemma youtu"
)
SPELLED = {  # where the names of their classes do not begin as the type does
    "apertus1p5_text": "Apertus1p5Text",
    "aria_text": "AriaText", "axk1": "AXK1", "biogpt": "BioGpt", "bitnet": "BitNet", "ctrl": "CTRL",
    "ernie4_5": "Ernie4_5", "ernie4_5_moe": "Ernie4_5_Moe", "gpt2": "GPT2", "gpt_bigcode": "GPTBigCode",
    "gpt_neox": "GPTNeoX", "granitemoe": "GraniteMoe", "granitemoehybrid": "GraniteMoeHybrid",
    "granitemoeshared": "GraniteMoeShared", "hunyuan_v1_dense": "HunYuanDenseV1", "hunyuan_v1_moe": "HunYuanMoEV1",
    "hy_v3": "HYV3", "hyperclovax": "HyperCLOVAX", "jetmoe": "JetMoe", "mimo_v2_flash": "MiMoV2Flash",
    "minicpm3": "MiniCPM3", "minimax": "MiniMax", "minimax_m2": "MiniMaxM2", "minimax_m3_vl_text": "MiniMaxM3VL",
    "modernbert-decoder": "ModernBertDecoder", "nanochat": "NanoChat", "nemotron_h": "NemotronH",
    "qwen3_5_moe_text": "Qwen3_5Moe", "qwen3_5_text": "Qwen3_5", "smollm3": "SmolLM3", "vaultgemma": "VaultGemma",
}  # fmt: skip
LANGUAGE = tuple(language_family(base) for base in LANGUAGE_TYPES.split())

ENCODER_DEFAULTS = {"layers": "2/3", "mixing_form": "decay", "local": "softmax", "window": 1, "sinks": 0}
ENCODER_DEFAULTS |= {"num_decays": 1, "free_decay": True, "feature_map": "softmax"}


def auto_class_of(name: str) -> str:
    """The Auto class of transformers that finds a model class of this name."""
    return next(
        (auto for end, auto in {**HEADS, **ENCODER_HEADS, **IMAGE_HEADS}.items() if name.endswith(end)), "AutoModel"
    )


# mhla_hf/models/saving.py

SOURCE_FILE = "modeling_mhla.py"
_SOURCE_MAKER = []


def write_source(entry: str, folder: str | os.PathLike, name: str = SOURCE_FILE) -> None:
    """Write the one file that defines a model into `folder` (made if missing), under `name`."""
    own = Path(__file__).read_text(encoding="utf-8") if NAMESPACE != "package" else _SOURCE_MAKER[0](entry)[1]
    target = Path(folder, name)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_suffix(f".tmp-{os.getpid()}")
    aside.write_text(own, encoding="utf-8", newline="\n")
    os.replace(aside, target)


def check_whole_files(folder: str | os.PathLike) -> None:
    """One sentence if a safetensors file in or below `folder` is cut short or no such file."""
    for file in sorted(Path(folder).rglob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except SafetensorError as error:
            raise ValueError(f"{file} is no whole safetensors file: {error}.") from None


def check_loaded_weights(model: torch.nn.Module) -> None:
    """One sentence if a loaded model's MHLA weights cannot be right (negative or non-finite mixing, non-finite others)."""
    for name, module in model.named_modules():
        for parameter in module.initial_values() if hasattr(module, "initial_values") else ():
            value = module.get_parameter(parameter)
            plain = isinstance(value, torch.nn.Parameter) and type(value.data) is torch.Tensor  # not quantized
            if plain and value.is_floating_point() and not value.is_meta and not torch.isfinite(value).all():
                what = "expected finite ones; the checkpoint is damaged"
                raise ValueError(f"{name}.{parameter}: got NaN or infinite values, {what}.")
        if hasattr(module, "check_values"):
            module.check_values(name)


# mhla_hf/models/transformers_api.py

# The oldest and the newest release that the tests run on.
TESTED_TRANSFORMERS = ("5.19.0", "5.24.0")


def config_class_name(model_type: str) -> str | None:
    """The name of the configuration class of `model_type`, or None if this release of transformers lacks the type."""
    return CONFIG_MAPPING_NAMES.get(model_type)


def config_class_of(model_type: str) -> type | None:
    """The configuration class of `model_type`, or None if this release of transformers lacks the type."""
    try:
        return CONFIG_MAPPING[model_type]  # a lazy mapping, whose `get` finds only what was registered
    except KeyError:
        return None


def copy_weight_renames(base_type: str, model_type: str) -> None:
    """Let checkpoints of `model_type` load through the weight renames that transformers has for `base_type`."""
    renames = get_checkpoint_conversion_mapping(base_type)
    if renames is not None and get_checkpoint_conversion_mapping(model_type) is None:
        register_checkpoint_conversion_mapping(model_type, renames)


def with_layer_wildcard(name: str) -> str:
    """`model.layers.3.mlp` as tensor-parallel plans write it: `model.layers.*.mlp`."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def set_attention_function(config, name: str) -> None:
    """Select an attention function in `config` without the checks that transformers makes for its users."""
    config._attn_implementation_internal = name


def find_cache(kwargs: dict) -> str | None:
    """The argument that holds a KV cache, by its type: its name differs between models and between releases."""
    return next((name for name, value in kwargs.items() if isinstance(value, Cache)), None)


def refuse_paged_cache(kwargs: dict) -> None:
    """Refuse the caches of transformers' continuous batching, which are no `Cache` and have no place for a state."""
    pages = kwargs.get("cache")
    if pages is not None and not isinstance(pages, Cache):
        raise ValueError(
            f"cache: got {type(pages).__name__}, expected a Cache of transformers: MHLA layers have no pages."
        )


def check_cache_arrived(query_length: int, key_length: int, kwargs: dict) -> None:
    """Refuse keys or caches that reach an MHLA attention function past the layer's own cache.

    Otherwise a release of transformers that hands caches on in a new way would decode without the past, in silence.
    """
    if query_length != key_length or find_cache(kwargs) is not None:
        tested = " to ".join(TESTED_TRANSFORMERS)
        raise ValueError(
            f"cache: got {key_length} keys for {query_length} queries in an MHLA layer, expected the layer's own cache: "
            f"this code was tested with transformers {tested}, got {transformers.__version__}."
        )


# mhla_hf/models/pretrained.py

class MHLAPreTrainedMixin:
    """Before a `PreTrainedModel` class in the bases; `source_entry` names the module that defines the model."""

    source_entry = ""
    _keep_in_fp32_modules_strict = ["mixing"]
    # With a mixing matrix, a decode step reads the length of the cache on the host: it compiles, but not as one graph.
    _can_compile_fullgraph = False

    def entry_to_save(self) -> str:
        """The module whose bundle goes into the checkpoint."""
        return self.source_entry

    def class_names(self) -> list[str]:
        """The names of the classes that this checkpoint can be loaded as, by their Auto classes."""
        return []

    def initialize_weights(self):
        """As transformers, then the MHLA modules' own starts (parameters that were loaded are left alone)."""
        super().initialize_weights()
        for module in self.modules():
            if hasattr(module, "initial_values"):
                for name, value in module.initial_values().items():
                    copy_(module.get_parameter(name), value)

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        """As transformers; damaged MHLA weights (NaN, negative mixing) are refused, and a frozen mixing is frozen again."""
        try:
            loaded = super().from_pretrained(*args, **kwargs)
        except SafetensorError:
            check_whole_files(args[0] if args else kwargs["pretrained_model_name_or_path"])  # says which file
            raise
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        check_loaded_weights(model)
        for module in model.modules():
            if not getattr(module, "learn", True):  # a frozen mixing
                for name, parameter in module.named_parameters():
                    parameter.requires_grad_(name == "balance")
        return loaded

    @classmethod
    def maybe_distribute_model(cls, model, distributed_config, mesh_manager):
        """As transformers; where the base's plan splits heads over processes, what `mhla` has by head is split alike."""
        if distributed_config is not None and distributed_config.tp_size > 1:
            size, rank = distributed_config.tp_size, mesh_manager.get_mesh("tp").get_local_rank()
            model._tp_plan |= split_heads_plan(model, size)
            for core in (module.mhla for module in model.modules() if hasattr(module, "softmax_heads")):
                core.heads = core.heads.of_rank(rank, size)
        return super().maybe_distribute_model(model, distributed_config, mesh_manager)

    def init_continuous_batching(self, *args, **kwargs):
        """Refused: its caches are paged."""
        what = "expected generate(), or mhla_hf.serving.ContinuousBatch for requests that come and go"
        raise ValueError(f"cache: got continuous batching with paged caches, {what}.")

    def save_pretrained(self, save_directory, *args, push_to_hub: bool = False, **kwargs):
        """As transformers, with `modeling_mhla.py` beside the weights: the folder loads with `trust_remote_code=True`."""
        if kwargs.get("is_main_process", True):
            write_source(self.entry_to_save(), save_directory)
        module = SOURCE_FILE.removesuffix(".py")
        names = [*self.class_names(), type(self).__name__]
        self.config.auto_map = {"AutoConfig": f"{module}.{type(self.config).__name__}"}
        self.config.auto_map |= {auto_class_of(name): f"{module}.{name}" for name in names}
        hub = {name: kwargs.pop(name) for name in HUB_ARGUMENTS if push_to_hub and name in kwargs}
        super().save_pretrained(save_directory, *args, **kwargs)
        if push_to_hub:
            self.push_to_hub(hub.pop("repo_id", Path(save_directory).name), **hub)


HUB_ARGUMENTS = ("repo_id", "commit_message", "private", "token", "revision", "create_pr", "tags", "commit_description")


def split_heads_plan(model: nn.Module, size: int) -> dict[str, str]:
    """The tensor-parallel plan of the parameters of `mhla`, by name, in layers whose projections are split by head.

    Feature maps, decays and matrices by head are split on their first axis; what all heads share is replicated, its
    gradients summed. ValueError: heads that `size` does not divide.
    """
    plan = {}
    for name, module in model.named_modules():
        layer = with_layer_wildcard(name)
        split = any(style == "colwise" for rule, style in model.tp_plan.items() if rule.startswith(f"{layer}."))
        if not hasattr(module, "mhla") or not split:
            continue
        if module.mhla.num_kv_heads % size:
            what = f"expected one that divides the {module.mhla.num_kv_heads} key/value heads of {name}"
            raise ValueError(f"tp_plan: got tensor-parallel size {size}, {what}.")
        for child, part in module.mhla.named_children():
            path = f"{layer}.mhla.{child}"
            if child == "gate":
                plan[path] = "colwise"
            elif getattr(part, "by_head", False):
                first_axis = {f"{path}.{own}": "embedding_rowwise" for own, _ in part.named_parameters()}
                plan |= {path: "local_params"} | first_axis
            else:
                plan[path] = "replicated_with_grad_allreduce"
    return plan


# mhla_hf/models/overlay.py

class MHLAOverlayConfig:
    """What a converted model's configuration adds to its base's: `mhla`, checked when made and when loaded.

    In `config.json` also `transformers_weights`, which names no file: softmax classes refuse the folder by it, which they
    would load but for `mhla.*`; this class drops it.
    """

    def __post_init__(self, **kwargs):
        values = kwargs.pop("mhla", None)
        if values is not None:
            kwargs.pop("transformers_weights", None)
        super().__post_init__(**kwargs)
        if values is not None:
            settings = MHLASettings.from_dict(values.to_dict() if isinstance(values, MHLASettings) else values)
            settings.layers = settings.resolve_layers(self.num_hidden_layers)
            self.mhla = settings.to_dict()

    def to_dict(self) -> dict:
        """As the base, and what stops softmax classes."""
        values = super().to_dict()
        return {**values, "transformers_weights": NO_SOFTMAX} if values.get("mhla") is not None else values


class MHLAHeadMixin(MHLAPreTrainedMixin):
    """Mixed into the base's class: builds the base, then makes the layers that `config.mhla` lists MHLA by `install`.

    prepare: called before the body runs, as by `forward_preparing`; None: nothing is. While the base is built the
    configuration is of its base's class, by which heads find their body.
    """

    prepare = None

    def __init__(self, config, *args, **kwargs):
        if not isinstance(config, self.config_class) or getattr(config, "mhla", None) is None:
            what = "with `mhla`; use mhla_hf.convert(model) on a softmax model"
            raise ValueError(f"config: got {type(config).__name__}, expected {self.config_class.__name__} {what}.")
        own, config.__class__ = type(config), self.config_class.__bases__[1]
        try:
            super().__init__(config, *args, **kwargs)
        finally:
            config.__class__ = own
        self.install(self, MHLASettings.from_dict(config.mhla))

    def class_names(self) -> list[str]:
        """Of the body and the heads that the base's family has."""
        return [f"MHLA{name}" for name in base_classes(self.family)]


MODEL_NAME = re.compile("(LMHead|Vision)?Model$")
_OVERLAYS = {}  # every class that is made here, by what it is made of: each is made once


def overlay_class(base: type, mixin: type, entry: str, **namespace) -> type:
    """`MHLALlamaAttention(mixin, LlamaAttention)` for `LlamaAttention`.

    entry: the module in which a process that unpickles it finds it by name; in a bundle that is this one.
    """
    if base not in _OVERLAYS:
        namespace["__module__"] = __name__.replace("models.overlay", entry)
        _OVERLAYS[base] = type(f"MHLA{base.__name__}", (mixin, base), namespace)
    return _OVERLAYS[base]


def base_classes(family: Family) -> dict[str, type]:
    """The classes of a family's base that there are, by name."""
    found = {name: getattr(transformers, name, None) for name in family.classes}
    config = config_class_of(family.base)
    return {
        name: cls for name, cls in found.items() if cls is not None and getattr(cls, "config_class", None) is config
    }


def overlay_config_class(family: Family) -> type:
    """The configuration class of a converted family: `MHLALlamaConfig(LlamaConfig)` for "llama"."""
    base = config_class_of(family.base)
    types = {"model_type": f"mhla_{family.base}", "base_model_type": family.base}
    doc = f"`{base.__name__}` with `mhla`, the settings of its MHLA layers."
    return overlay_class(base, MHLAOverlayConfig, family.entry, __doc__=doc, **types)


def overlay_model_class(family: Family, base: type, mixin: type) -> type:
    """A model class of a converted family: `MHLALlamaForCausalLM(mixin, LlamaForCausalLM)`."""
    config = overlay_config_class(family)
    copy_weight_renames(family.base, config.model_type)
    doc = f"`{base.__name__}` with MHLA in the layers that `config.mhla` lists."
    members = {"__doc__": doc, "config_class": config, "source_entry": family.entry, "family": family}
    # transformers looks for a decorator in the source of the class's module, which is ours here: ask the base instead.
    members["_can_set_experts_implementation"] = classmethod(lambda cls: base._can_set_experts_implementation())
    if mixin.prepare is not None:
        members["forward"] = forward_preparing(base.forward, mixin.prepare)
    return overlay_class(base, mixin, family.entry, **members)


@functools.cache
def calls_interface(attention_class: type) -> bool:
    """Whether the forward of this class asks transformers for "the attention function", in the way all its models do."""
    return "attention_interface" in inspect.unwrap(attention_class.forward).__code__.co_varnames


def attention_sizes(attention: nn.Module, config) -> dict[str, int]:
    """Heads and widths of an attention module of transformers, as the MHLA cores take them."""
    heads, groups = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    if isinstance(groups, int) and heads % groups:
        raise ValueError(f"num_key_value_heads: got {groups}, expected a divisor of the {heads} attention heads.")
    width = getattr(attention, "head_dim", None) or getattr(config, "head_dim", None) or config.hidden_size // heads
    sizes = {"num_heads": heads, "num_kv_heads": heads // getattr(attention, "num_key_value_groups", 1)}
    latent = {"key_dim": getattr(attention, "qk_head_dim", width), "value_dim": getattr(attention, "v_head_dim", width)}
    return sizes | latent  # which differ in latent attention


def forward_preparing(forward, prepare):
    """The forward of a model that may be a body: then `prepare` is called before, as by `prepare_inner_body`.

    A hook would not do: callers of `model.forward`, such as sentence-transformers, run none.
    """
    names = tuple(inspect.signature(forward).parameters)[1:]

    @functools.wraps(forward)
    def own_forward(self, *args, **kwargs):
        if self.base_model is self:
            args, kwargs = prepare(self, args, kwargs, names)
        return forward(self, *args, **kwargs)

    return own_forward


def prepare_inner_body(model: nn.Module, prepare) -> None:
    """Call `prepare(body, args, kwargs, names)`, which gives both anew, before the body of a head runs.

    names: of the arguments of the body's forward.
    """
    if (body := model.base_model) is not model:
        names = tuple(inspect.signature(type(body).forward).parameters)[1:]
        body.register_forward_pre_hook(functools.partial(prepare, names=names), with_kwargs=True)


def swap_attention(attention: nn.Module, mixed: type, core: nn.Module, name: str) -> None:
    """Turn one attention module of transformers into MHLA, in place.

    mixed: its new class, see `overlay_class`. core: its new child `mhla`. name: of the attention function that it
    calls from now on, in a configuration of its own.
    """
    core.train(attention.training)
    attention.__class__ = mixed
    if "_old_forward" in attention.__dict__:  # accelerate keeps the forward that its hooks wrap
        attention._old_forward = types.MethodType(mixed.forward, attention)
    attention.config = copy.copy(attention.config)
    set_attention_function(attention.config, name)
    attention.add_module("mhla", core)


def overlay_named(name: str, families: tuple[Family, ...], model_mixin: type, attention_mixin: type):
    """What the modules of converted families have under `name`: a configuration, a model or an attention class."""
    own = name.removeprefix("MHLA")
    for family in families if name.startswith("MHLA") else ():
        if own == config_class_name(family.base):
            return overlay_config_class(family)
        if own in family.classes and own in base_classes(family):
            return overlay_model_class(family, base_classes(family)[own], model_mixin)
        if own.endswith("Attention") and own.startswith(MODEL_NAME.sub("", family.classes[0])):
            for base in base_classes(family).values():
                if hasattr(module := sys.modules[base.__module__], own):
                    return overlay_class(getattr(module, own), attention_mixin, family.entry)
    raise AttributeError(
        f"module {__name__!r} has no attribute {name!r}, expected one of {[f.base for f in families]}."
    )


# mhla_hf/models/rotation.py

@dataclass(frozen=True)
class RotationLayout:
    """Which dimensions of a head the base rotates together, where they are, and how it hands cosines and sines on.

    pairs: dimensions 2i and 2i + 1 are rotated by angle i; otherwise dimensions i and i + R/2, as in Llama.
    repeated: cos and sin hold each angle twice in a row; otherwise all angles, and then all again.
    backward: dimensions are rotated by minus the angle.
    last: the rotated dimensions are the last R of a head; otherwise the first R.
    """

    pairs: bool = False
    repeated: bool = False
    backward: bool = False
    last: bool = False


HALVES, LAST_HALVES = RotationLayout(), RotationLayout(last=True)
PAIRS, REPEATED_PAIRS = RotationLayout(pairs=True), RotationLayout(pairs=True, repeated=True)
ROTATION_LAYOUTS = {  # by model type; `HALVES` or, in latent attention, `LAST_HALVES` for all others
    **dict.fromkeys(("cohere", "cohere2", "cohere2_moe"), REPEATED_PAIRS),
    **dict.fromkeys(("ernie4_5", "ernie4_5_moe", "glm", "glm4", "helium", "llama4_text"), PAIRS),
    "deepseek_v2": RotationLayout(pairs=True, last=True),
    "nanochat": RotationLayout(backward=True),
}
SCALED_AFTER = ("hunyuan_v1_dense", "hunyuan_v1_moe")  # by learned weights, after the rotation
NEVER_ROTATED = ("biogpt", "ctrl", "gpt2", "gpt_bigcode", "jamba", "kimi_linear", "nemotron_h")
# Types that rotate in sliding layers only, and types that do so only if they have sliding layers.
SLIDING_ROTATED, SLIDING_ROTATED_IF_ANY = ("afmoe", "cohere2", "cohere2_moe"), ("exaone4", "exaone_moe", "kolibri1")


def rotated_type(config) -> str:
    """The model type of the base, of its own configuration or of a converted model's."""
    return getattr(config, "base_model_type", None) or config.model_type


def rotation_layout(attention) -> RotationLayout:
    """How the base rotates.

    Args:
        attention: an attention module of transformers.

    Raises:
        ValueError: q and k of this type are no longer a rotation of what they were.
    """
    latent, kind = hasattr(attention, "qk_rope_head_dim"), rotated_type(attention.config)
    if kind in SCALED_AFTER:
        what = "it scales q and k by learned weights after their rotation"
        raise ValueError(f"rope: got 'near' for {kind}, expected 'before': {what}.")
    return ROTATION_LAYOUTS.get(kind, LAST_HALVES if latent else HALVES)


def is_rotated(attention: nn.Module) -> bool:
    """Whether the forward of this attention module applies the rotation that it is given."""
    kind = rotated_type(attention.config)
    if kind in NEVER_ROTATED:
        return False
    if kind in SLIDING_ROTATED:
        sliding = getattr(attention, "is_local_attention", attention.sliding_window is not None)
        return sliding or getattr(attention, "force_rope", False)
    if kind in SLIDING_ROTATED_IF_ANY:
        return attention.sliding_window is None or attention.is_sliding
    return bool(getattr(attention, "use_rope", True))


def rotation_angles(attention: nn.Module, kwargs: dict) -> torch.Tensor | None:
    """The rotation of one call of an attention module, in the form that `unrotate` takes.

    If the base scales its rotation, as YaRN does, cos and sin come divided by the square of the scale: `unrotate` then
    undoes both.

    Args:
        attention: an attention module of transformers.
        kwargs: keyword arguments of the call; "position_embeddings", (cos, sin) or one complex tensor, is None in layers
            without rotation.

    Returns:
        `[B or 1, T, 1, R]` for R rotated dimensions of a head: R/2 cosines and R/2 sines; None if this module does not
        rotate. In the dtype of the base's cos and sin, but at least fp32.

    Raises:
        ValueError: the module rotates, but not by an argument.
    """
    if not is_rotated(attention):
        return None
    if "position_embeddings" not in kwargs:
        what = "its attention is not given the cosines and sines of its rotation as `position_embeddings`"
        raise ValueError(f"rope: got 'near' for {rotated_type(attention.config)}, expected 'before': {what}.")
    if (rotation := kwargs["position_embeddings"]) is None:
        return None
    cos, sin = distinct_angles(rotation, rotation_layout(attention))
    scale = cos.square() + sin.square()
    return torch.cat((cos / scale, sin / scale), -1).unsqueeze(2)


def distinct_angles(rotation, layout: RotationLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin `[B or 1, T, R/2]`, at least in fp32, of (cos, sin) or of one complex tensor: each angle once."""
    if isinstance(rotation, torch.Tensor):
        return rotation.real, rotation.imag
    if layout.repeated:
        cos, sin = (x[..., ::2] for x in rotation)
    else:
        cos, sin = (x[..., : x.shape[-1] // 2] for x in rotation)
    dtype = torch.promote_types(cos.dtype, torch.float32)
    return cos.to(dtype), (-sin if layout.backward else sin).to(dtype)


def unrotate(x: torch.Tensor, angles: torch.Tensor | None, layout: RotationLayout) -> torch.Tensor:
    """Undo the rotation of queries or keys.

    Where the base permutes dimensions as it rotates them (`rope_interleave`), they stay permuted, those of q and of k alike.

    Args:
        x: `[B, T, H, K]` as rotated, floating point.
        angles: `[B or 1, T, 1, R]` of `rotation_angles`; None, or a width of 0, returns x as it is.
        layout: of `rotation_layout`.

    Returns:
        `[B, T, H, K]` in the dtype of x.
    """
    if angles is None or not angles.shape[-1]:
        return x
    width, rest = angles.shape[-1], x.shape[-1] - angles.shape[-1]
    kept, turned = x.split((rest, width), -1) if layout.last else reversed(x.split((width, rest), -1))
    a, b = turned.unflatten(-1, (-1, 2)).unbind(-1) if layout.pairs else turned.chunk(2, -1)
    cos, sin = angles.to(x).chunk(2, -1)
    back = (a * cos + b * sin, b * cos - a * sin)
    back = (torch.stack(back, -1).flatten(-2),) if layout.pairs else back
    return torch.cat((kept, *back) if layout.last else (*back, kept), -1)


# mhla_hf/models/attention.py

ATTENTION_NAME = f"mhla_{NAMESPACE}"
SOFTMAX_ONLY = ("softcap", "s_aux", "sliding_window", "position_bias")  # other attention functions obey them


def mhla_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    """The attention function of MHLA layers: q, k, v as transformers gives them, `[B, H, T, K]`; o is `[B, T, H, V]`.

    `dropout` belongs to softmax and has no meaning here; `attention_mask` is not read: `mhla_padding` says the same without
    T x T numbers.
    """
    check_cache_arrived(query.shape[2], key.shape[2], kwargs)
    for name in SOFTMAX_ONLY:
        if kwargs.get(name) is not None:
            raise ValueError(f"{name}: it came for an MHLA layer, which cannot do it; expected None.")
    if kwargs.get("is_causal") is False:
        raise ValueError("is_causal: got False for an MHLA layer of a language model, expected True or None.")
    starts, key_mask = kwargs.get("mhla_padding") or (None, None)
    cache = kwargs.get("mhla_cache")
    options = {"hidden_states": kwargs.get("mhla_hidden_states"), "cache": cache, "scale": scaling}
    options |= {name: kwargs[f"mhla_{name}"] for name in ("rotate", "angles") if f"mhla_{name}" in kwargs}
    options |= {"starts": starts, "key_mask": key_mask}
    options["cu_seqlens"] = kwargs.get("cu_seq_lens_q") if cache is None else None
    heads = getattr(module.mhla, "heads", None)
    if heads is None:
        o = module.mhla(*(x.transpose(1, 2) for x in (query, key, value)), **options)
        return o.contiguous(), None  # as some bases view it
    outputs = {}
    if heads.counts[True]:
        parts = [heads.part(x, True, 1) for x in (query, key, value)]
        others = {name: value for name, value in kwargs.items() if not name.startswith("mhla_")}
        outputs[True] = module.softmax_heads(*parts, attention_mask, cache, scaling, dropout, **others)
    if heads.counts[False]:
        parts = [heads.part(x, False, 1).transpose(1, 2) for x in (query, key, value)]
        outputs[False] = module.mhla(*parts, **options)
    elif module.training and torch.is_grad_enabled():  # optimizers of several processes wait for each other's gradients
        what = "expected fewer processes for training, so that each has an MHLA head in every layer"
        raise ValueError(f"tp_size: got a process with softmax heads alone in layer {module.layer_idx}, {what}.")
    return heads.join(outputs, 2), None


class SoftmaxHeads(nn.Module):
    """The heads of an MHLA layer that keep softmax: they go to the attention function that the model's configuration names.

    It stands where that function expects an attention module, of which it has what such functions read.

    Args:
        attention: the attention module of transformers.
        config: the model's configuration, which users change, not the module's own.
    """

    def __init__(self, attention: nn.Module, config):
        super().__init__()
        self.config = config
        self.layer_idx = attention.layer_idx
        self.is_causal = True
        self.sinks = None  # layers that have some are not converted
        self.num_key_value_groups = getattr(attention, "num_key_value_groups", 1)
        base = next(cls for cls in type(attention).__mro__ if calls_interface(cls))
        self.eager = sys.modules[base.__module__].eager_attention_forward  # every modeling file has its own

    def forward(self, query, key, value, attention_mask, cache, scaling, dropout, **kwargs) -> torch.Tensor:
        """Attend.

        Args:
            query: `[B, H, T, K]`. key, value: `[B, G, T, K]`, of the same heads.
            attention_mask: as the base's attention function takes it.
            cache: the `MHLACacheLayer` of the layer, which holds the keys and values before these; or None.
            scaling, dropout, kwargs: as the base hands them to its attention function.

        Returns:
            `[B, T, H, K]`.
        """
        if cache is not None:
            key, value = cache.softmax.update(key, value)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, self.eager)
        return attend(self, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)[0]


def padding_mask(*args, q_length, q_offset=0, attention_mask: torch.Tensor | None = None, **kwargs):
    """The mask of a model without softmax layers: which new tokens are padding `[B, T]`, never T x T numbers.

    So long and no longer, or each compiled step of `generate` would see another shape.
    """
    return None if attention_mask is None else new_columns(attention_mask, q_length, q_offset)


AttentionInterface.register(ATTENTION_NAME, mhla_attention)
AttentionMaskInterface.register(ATTENTION_NAME, padding_mask)


class MHLAMixer:
    """Mixed into a transformers attention class; the module has a child `mhla` (`MHLA`)."""

    def forward(self, hidden_states: torch.Tensor, *args, **kwargs):
        """As the base, with the layer's own cache in place of keys and values, whatever the base calls the cache."""
        name, mixed = find_cache(kwargs), hasattr(self, "softmax_heads")
        cache = mhla_cache_layer(kwargs.pop(name), self.layer_idx, mixed) if name is not None else None
        added = {"mhla_cache": cache, "mhla_hidden_states": hidden_states}
        if self.reads_unrotated:
            added["mhla_angles"] = rotation_angles(self, kwargs)
        output = super().forward(hidden_states, *args, **added, **kwargs)
        if cache is not None:
            cache.count(hidden_states)
        return output


def softmax_attentions(model: nn.Module) -> dict[int, nn.Module]:
    """The attention modules of a decoder, by layer index: those that call transformers' attention interface, and MHLA's."""
    found = [module for module in model.modules() if isinstance(getattr(module, "layer_idx", None), int)]
    return {module.layer_idx: module for module in found if hasattr(module, "mhla") or calls_interface(type(module))}


def install_mhla(model: nn.Module, settings: MHLASettings, core_class: type[nn.Module]) -> None:
    """Turn the attention modules that `settings.layers` lists into MHLA, in place; `model` is a body, or a head on one.

    core_class: `MHLA` or `DecayMHLA`, made once for each of these modules.
    """
    config = model.config
    attentions = softmax_attentions(model)
    chosen, kept = settings.resolve_layers(config.num_hidden_layers), settings.softmax_heads or {}
    widths = {"hidden_size": config.hidden_size, "norm_eps": getattr(config, "rms_norm_eps", 1e-6)}
    for index in chosen:
        attention = attentions[index]
        core = core_class(settings, **attention_sizes(attention, config), **widths)
        mixed = overlay_class(type(attention), MHLAMixer, "models.converted")
        attention.reads_unrotated = settings.rope == "near"
        if attention.reads_unrotated:
            core.unrotate = partial(unrotate, layout=rotation_layout(attention))
        swap_attention(attention, mixed, core, ATTENTION_NAME)
        if str(index) in kept:
            keep_softmax_heads(attention, config, kept[str(index)])
    if set(chosen) == set(attentions) and not kept:  # a base may have layers without attention
        set_attention_function(config, ATTENTION_NAME)
    prepare_inner_body(model, pass_padding)


def keep_softmax_heads(attention: nn.Module, config, heads: Sequence[int]) -> None:
    """Give KV heads of an MHLA attention module their softmax back, in place.

    Args:
        attention: the module.
        config: the model's configuration.
        heads: indices of KV heads, not all of the module's.

    Raises:
        ValueError: there are no such heads, or they are all.
    """
    count = attention.mhla.num_kv_heads
    if max(heads) >= count or len(heads) >= count:
        what = f"expected some of 0 to {count - 1}, fewer than all: a layer without MHLA heads is not in `layers`"
        raise ValueError(f"softmax_heads: got {list(heads)} for layer {attention.layer_idx}, {what}.")
    attention.mhla.heads = HeadSplit(heads, count)
    attention.softmax_heads = SoftmaxHeads(attention, config)


def pass_padding(body: nn.Module, args: tuple, kwargs: dict, names: tuple):
    """Before a body runs, whose forward takes `names`: say which tokens are padding, or where packed sequences begin, to the
    layers below.

    Adds `mhla_padding`, a pair (first real token of each row `[B]`, real tokens `[B, T]`), or `cu_seq_lens_q`; and counts
    positions from the first real token where the caller gave none, so that a padded row equals the row alone.
    """
    kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
    refuse_paged_cache(kwargs)
    inputs = kwargs.get("input_ids")
    inputs = inputs if inputs is not None else kwargs.get("inputs_embeds")
    if inputs is None:
        return (), kwargs
    batch, length = inputs.shape[:2]
    mask, past = kwargs.get("attention_mask"), kwargs.get(find_cache(kwargs))
    seen = past.get_seq_length() if past is not None else 0  # a tensor in a static cache
    borders = packed_borders(kwargs, batch, seen)
    if borders is not None:
        return (), {**kwargs, **packed_arguments(kwargs, borders, length)}
    if mask is None or "mhla_padding" in kwargs:
        return (), kwargs
    columns = real_columns(mask, batch, length, seen)
    real = None if columns is None else new_columns(columns, length, seen)
    if real is not None and (torch.compiler.is_compiling() or not bool(real.all())):
        starts = torch.where(real.any(1), real.int().argmax(1), length)
        kwargs["mhla_padding"] = (starts, real)
    two_axes = isinstance(mask, torch.Tensor) and mask.ndim == 2
    if two_axes and kwargs.get("position_ids") is None and (torch.compiler.is_compiling() or not bool(mask.all())):
        kwargs["position_ids"] = new_columns((mask.long().cumsum(-1) - 1).clamp_min(0), length, seen)
    return (), kwargs


def first_new_column(mask: torch.Tensor, length: int, seen):
    """The first of `length` new columns of `[B, S]`: number `seen`, or the last ones of a shorter mask."""
    last = mask.shape[1] - length
    return seen.clamp(max=last) if isinstance(seen, torch.Tensor) else torch.sym_min(seen, last)


def new_columns(mask: torch.Tensor, length: int, seen) -> torch.Tensor:
    """What `[B, S]` says of the new tokens `[B, T]`."""
    if mask.shape[1] == length:
        return mask
    return mask[:, first_new_column(mask, length, seen) + torch.arange(length, device=mask.device)]


def real_columns(mask, batch: int, length: int, seen: int) -> torch.Tensor | None:
    """Which tokens are real, old and new, bool `[B, S]`, from a mask `[B, S]` or a causal one `[B, 1, T, S]`."""
    if isinstance(mask, dict):
        mask = mask["full_attention"]  # MHLA layers were no sliding ones
        if mask is None:
            return None
    if mask.ndim == 2 and mask.shape[0] == batch and mask.shape[1] >= length:
        return mask.bool()
    if mask.ndim == 4 and (torch.compiler.is_compiling() or mask.shape[-1] >= seen + length):
        allowed = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] == 0
        if length > 1:
            check_only_padding(allowed[..., : seen + length], seen)
        return allowed.any(1).expand(batch, -1)
    expected = f"[{batch}, at least {length}] or a causal [{batch}, 1, {length}, S]"
    raise ValueError(f"attention_mask: got shape {tuple(mask.shape)} for {length} new tokens, expected {expected}.")


@torch.compiler.disable(reason="attention_mask came with four axes, checked by value, expected [batch, length].")
def check_only_padding(allowed: torch.Tensor, seen: int) -> None:
    """One sentence if a mask `[B, T, S]` says more than "causal, without these padded tokens", which MHLA would not see."""
    real = allowed.any(1)
    wanted = torch.ones_like(allowed).tril(int(seen)) & real[:, None]
    if bool(((wanted != allowed) & real[:, seen:, None]).any()):
        what = "expected [batch, length], or packed sequences by position_ids or cu_seq_lens_q in a batch of 1"
        raise ValueError(f"attention_mask: got four axes that hide more than padding and the future; {what}.")


def packed_borders(kwargs: dict, batch: int, seen: int) -> torch.Tensor | None:
    """Borders of the sequences packed into one row, int `[N + 1]`, if there are several."""
    if kwargs.get("cu_seq_lens_q") is not None:
        return kwargs["cu_seq_lens_q"]
    if kwargs.get("seq_idx") is not None:
        return find_borders(kwargs["seq_idx"], 0, batch)
    position_ids = kwargs.get("position_ids")
    if position_ids is None or position_ids.ndim != 2 or position_ids.shape[1] == 1:  # one token is one sequence
        return None
    if kwargs.get("attention_mask") is not None or seen:
        return None
    return find_borders(position_ids, 1, batch)


@torch.compiler.disable(reason="position_ids or seq_idx are read by value, expected cu_seq_lens_q beside them.")
def find_borders(ids: torch.Tensor, step: int, batch: int) -> torch.Tensor | None:
    """Borders int32 `[N + 1]` where ids `[1, T]` do not go on by `step`; None if they always do."""
    new = ids.diff() != step
    if not bool(new.any()):
        return None
    if batch != 1:
        raise ValueError(f"position_ids or seq_idx: got sequences packed in a batch of {batch}, expected a batch of 1.")
    inner = new[0].nonzero()[:, 0] + 1
    return torch.cat([inner.new_tensor([0]), inner, inner.new_tensor([ids.shape[1]])]).to(torch.int32)


def packed_arguments(kwargs: dict, borders: torch.Tensor, length: int) -> dict:
    """What a body gets of packed sequences: their borders, positions that start anew in each, and no cache."""
    for name in ("attention_mask", find_cache(kwargs), "use_cache"):
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise ValueError(f"{name}: it came with packed sequences, expected none: they have no padding, no cache.")
    token, edges = torch.arange(length, device=borders.device), borders.long()
    position_ids = kwargs.get("position_ids")
    if position_ids is None:
        position_ids = (token - edges[torch.searchsorted(edges, token, right=True) - 1])[None]
    return {"cu_seq_lens_q": borders, "position_ids": position_ids, "use_cache": False}


# mhla_hf/models/converted_local.py

class MHLALocalLanguageMixin(MHLAHeadMixin):
    """Mixed into the base's class."""

    install, prepare = staticmethod(partial(install_mhla, core_class=DecayMHLA)), staticmethod(pass_padding)
    _can_compile_fullgraph = True


def __getattr__(name: str):
    return overlay_named(name, LANGUAGE, MHLALocalLanguageMixin, MHLAMixer)
