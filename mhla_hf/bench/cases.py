"""What is timed: one shape of attention, and decoding; each with its competitors and its definition in fp64.

A case has a `name`, a `dtype`, `whats` (what of it is timed), `graph` (whether a CUDA graph can hold it), and
    names(device)                the competitors that run there
    errors(name, device, seed)   {what: relative error} against the definition
    prepare(device, seed)        what all competitors share while they are timed
    work(prepared, what, name)   a function of nothing to be timed; its `reset()`, if any, is called before, untimed
"""

import copy
import dataclasses
import functools
import math
import warnings

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..ops.api import mhla, mhla_step
from ..ops.blocks import Blocks

FORWARD, TRAINING = "forward", "forward + backward"
STEPS = 64
SAMPLED_QUERIES = 16
MATH_TOKENS = 4096
BACKENDS = {
    "sdpa flash": SDPBackend.FLASH_ATTENTION,
    "sdpa cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa math": SDPBackend.MATH,
}


def rows_of_definition(q, k, v, mixing, queries, blocks, causal, normalize=False):
    """The outputs of some queries in fp64, head by head: MHLA's, or softmax attention's where `mixing` is None."""
    later = (torch.arange(k.shape[1], device=q.device) > queries[:, None]) & causal
    index, rows = blocks.index(q.device), []
    for head in range(q.shape[2]):
        weights = q[:, queries, head].double() @ k[:, :, head].double().mT * q.shape[-1] ** -0.5
        if mixing is None:
            weights = weights.masked_fill(later, -torch.inf).softmax(-1)
        else:
            weights = weights * (mixing.double()[index[queries]][:, index] * ~later)
            weights = weights / weights.sum(-1, keepdim=True) if normalize else weights
        rows.append(weights @ v[:, :, head].double())
    return torch.stack(rows, 2)


def relative_error(got, expected):
    """Frobenius distance over the size of what is expected."""
    got, expected = got.detach().double(), expected.detach().double()
    return float((got - expected).norm() / expected.norm())


def plain_linear(q, k, v, causal, normalize, chunk=64):
    """Plain linear attention in torch: one summary, or, causal, chunks with a running sum over theirs."""
    length, scale = q.shape[1], q.shape[-1] ** -0.5
    v = F.pad(v, (0, 1), value=1.0) if normalize else v  # its last column sums the weights
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if causal:
        q, k, v = (F.pad(x, (0, 0, 0, -length % chunk)).unflatten(2, (-1, chunk)) for x in (q, k, v))
        summary = (k.mT @ v).float()
        before = (summary.cumsum(2) - summary).to(v.dtype)
        o = (q @ before + (q @ k.mT).tril() @ v).flatten(2, 3)[:, :, :length]
    else:
        o = q @ (k.mT @ v)
    o = o[..., :-1] / o[..., -1:] if normalize else o * scale
    return o.transpose(1, 2)


def softmax_by(backend, causal, q, k, v):
    """torch's fused attention with one backend, [B, T, H, K]."""
    with sdpa_kernel(BACKENDS[backend]):
        return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal).transpose(1, 2)


@functools.cache
def backends(device, dtype, widths, causal, gradients):
    """The backends of torch's attention that take heads of such widths; tried on a few tokens."""
    like = {"device": device, "dtype": getattr(torch, dtype), "requires_grad": gradients}
    q, k, v = (torch.rand(1, 64, 2, width, **like) for width in (widths[0], *widths))
    found = []
    for name in BACKENDS:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # backends say why they do not take them
                o = softmax_by(name, causal, q, k, v)
                if gradients:
                    torch.autograd.grad(o.sum(), (q, k, v))
        except RuntimeError:
            continue
        found.append(name)
    return tuple(found)


def fla_kernels(device):
    """fla's linear attention in chunks and token by token, on a GPU where fla is installed; else None."""
    if torch.device(device).type != "cuda":
        return None
    try:
        from fla.ops.linear_attn import chunk_linear_attn, fused_recurrent_linear_attn
    except ImportError:
        return None
    return chunk_linear_attn, fused_recurrent_linear_attn


def forms(device):
    """MHLA's implementations that are worth timing: torch everywhere, the kernels on a GPU."""
    return ["mhla torch", "mhla triton"] if torch.device(device).type == "cuda" else ["mhla torch"]


def copy_of(moved, device):
    """A function that moves so many bytes: reads half of them and writes the others."""
    source = torch.empty(moved // 2, dtype=torch.uint8, device=device)
    return functools.partial(torch.empty_like(source).copy_, source)


@dataclasses.dataclass(frozen=True)
class Operator:
    """One shape of attention, against softmax, plain linear attention, and a copy of the bytes that must move at least.

    widths: of keys and of values.
    """

    name: str
    blocks: Blocks
    batch: int
    heads: int
    widths: tuple
    causal: bool = False
    normalize: bool = False
    dtype: str = "bfloat16"
    whats = (FORWARD, TRAINING)
    graph = True

    def small(self):
        """The same on few tokens and two heads, for the whole definition: blocks of a ragged size."""
        if self.blocks.block_size is not None:
            size = min(self.blocks.block_size, 96)
            blocks = Blocks.sequence(2 * size + size // 2, size)
        else:
            shape = zip(self.blocks.shape, self.blocks.counts, strict=True)
            blocks = Blocks.grid([min(side, count + 1) for side, count in shape], self.blocks.counts)
        return dataclasses.replace(self, blocks=blocks, batch=1, heads=2)

    def prepare(self, device, seed):
        """q, k, v, mixing fp32 [M, M], with gradients, and dL/do."""
        random = torch.Generator(device).manual_seed(seed)
        make = functools.partial(torch.randn, generator=random, device=device)
        size, dtype = (self.batch, self.blocks.length, self.heads), getattr(torch, self.dtype)
        q, k, v = (make(*size, width).to(dtype) for width in (self.widths[0], *self.widths))
        if self.normalize:
            q, k = q.abs(), k.abs()
        mixing = torch.rand(self.blocks.num_blocks, self.blocks.num_blocks, generator=random, device=device)
        return [x.requires_grad_() for x in (q, k, v, mixing)], make(*size, self.widths[1]).to(dtype)

    def names(self, device):
        """The competitors: every backend of softmax attention, plain linear attention, MHLA's forms, the copy."""
        softmax = backends(device, self.dtype, self.widths, self.causal, True)
        softmax = [name for name in softmax if name != "sdpa math" or self.blocks.length <= MATH_TOKENS]
        fla = ["linear fla"] if self.causal and fla_kernels(device) else []
        return [*softmax, "linear torch", *fla, *forms(device), "copy"]

    def attend(self, name, q, k, v, mixing):
        """The output of one competitor."""
        kind, form = name.split()
        if kind == "sdpa":
            return softmax_by(name, self.causal, q, k, v)
        if form == "fla":
            return fla_kernels(q.device)[0](q, k, v, scale=q.shape[-1] ** -0.5, normalize=self.normalize)[0]
        if kind == "linear":
            return plain_linear(q, k, v, self.causal, self.normalize)
        return mhla(q, k, v, mixing, blocks=self.blocks, causal=self.causal, normalize=self.normalize, impl=form)

    def errors(self, name, device, seed):
        """Of the output and every gradient: all of them on few tokens, those of some queries at full length (batch 1)."""
        if name == "copy":
            return {}
        found, cases = {}, [self.small()]
        if name.startswith("mhla"):
            cases.append(dataclasses.replace(self, batch=1))
        for case, queries in zip(cases, (cases[0].blocks.length, SAMPLED_QUERIES), strict=False):
            last = case.blocks.length - 1
            queries = torch.linspace(0, last, min(queries, last + 1), device=device).round().long()
            errors = case.errors_at(name, queries, *case.prepare(device, seed))
            found |= {f"{what} of {case.blocks.length:,} tokens": error for what, error in errors.items()}
        return found

    def errors_at(self, name, queries, tensors, direction):
        """{"output", "dq", ...: relative error} of some queries' outputs, and of the gradients of those alone."""
        used = tensors if name.startswith("mhla") else tensors[:3]
        got = self.attend(name, *tensors)[:, queries]
        exact = [x.detach().double().requires_grad_() for x in used]
        if name.startswith("sdpa"):
            mixing = None
        else:
            mixing = exact[3] if len(exact) > 3 else torch.ones_like(tensors[3])
        wanted = rows_of_definition(*exact[:3], mixing, queries, self.blocks, self.causal, self.normalize)
        got = got, *torch.autograd.grad(got, used, direction[:, queries])
        wanted = wanted, *torch.autograd.grad(wanted, exact, direction[:, queries].double())
        names = ("output", "dq", "dk", "dv", "dmixing")[: len(got)]
        return {what: relative_error(x, y) for what, x, y in zip(names, got, wanted, strict=True)}

    def work(self, prepared, what, name):
        """One forward pass without gradients, or one with the gradients of all inputs; for "copy" the bytes of either."""
        tensors, direction = prepared
        if name == "copy":
            return copy_of(self.moved()[what], direction.device)
        if what == FORWARD:
            return torch.no_grad()(functools.partial(self.attend, name, *tensors))
        used = tensors if name.startswith("mhla") else tensors[:3]
        return lambda: torch.autograd.grad(self.attend(name, *tensors), used, direction)

    def moved(self):
        """what -> bytes that must move: q, k, v and o; backward again q, k and v, the gradient of o, and three gradients."""
        rows = self.batch * self.blocks.length * self.heads
        average = rows * sum(self.widths) * getattr(torch, self.dtype).itemsize // 2
        return {FORWARD: 4 * average, TRAINING: (4 + 7) * average}


@dataclasses.dataclass(frozen=True)
class Decoding:
    """STEPS tokens, one by one, after `length` of causal attention with one sequence and no denominator; a block ends half
    way through them, so that closing one is paid for.

    block_size: None: a power of two from 2 * width and sqrt(length) on, which keeps mixing cheaper than the tokens. `length`
    is cut down to whole blocks.
    """

    length: int
    heads: int = 16
    width: int = 64
    block_size: int | None = None
    dtype: str = "bfloat16"
    whats = (f"decode, {STEPS} tokens",)
    graph = False

    @property
    def name(self):
        """After how many tokens."""
        return f"after {self.length:,} tokens, {self.heads} heads of {self.width}"

    @property
    def blocks(self):
        """Of the text with the tokens that are decoded."""
        size = self.block_size or 1 << math.ceil(math.log2(max(2 * self.width, self.length**0.5)))
        return Blocks.sequence(max(1, self.length // size) * size + STEPS // 2, size)

    def names(self, device):
        """The competitors."""
        fla = ["linear fla"] if fla_kernels(device) else []
        return [*backends(device, self.dtype, (self.width,) * 2, False, False), "linear torch", *fla, *forms(device)]

    def prepare(self, device, seed):
        """q, k, v [1, T, H, K], the last STEPS of which are to be decoded, and mixing fp32 [M, M]."""
        random = torch.Generator(device).manual_seed(seed)
        size, count = (1, self.blocks.length, self.heads, self.width), self.blocks.num_blocks
        q, k, v = (torch.randn(size, generator=random, device=device).to(getattr(torch, self.dtype)) for _ in range(3))
        return q, k, v, torch.rand(count, count, generator=random, device=device)

    @torch.no_grad()
    def errors(self, name, device, seed):
        """Of the first and the last token and those around the end of a block, the second time they are decoded."""
        q, k, v, mixing = self.prepare(device, seed)
        steps = torch.tensor([0, STEPS // 2 - 1, STEPS // 2, STEPS - 1], device=device)
        mixing = {"sdpa": None, "linear": torch.ones_like(mixing), "mhla": mixing}[name.split()[0]]
        wanted = rows_of_definition(q, k, v, mixing, q.shape[1] - STEPS + steps, self.blocks, True)
        decode = self.work((q, k, v, mixing), self.whats[0], name)
        for _ in range(2):
            decode.reset()
            got = decode()[:, steps]
        return {"tokens": relative_error(got, wanted)}

    def work(self, prepared, what, name):
        """A `Decoder`."""
        return Decoder(name, self.blocks.block_size, *prepared)


class Decoder:
    """One competitor before the last STEPS tokens: a call decodes them, [1, STEPS, H, V], `reset` goes back."""

    def __init__(self, name, block_size, q, k, v, mixing):
        self.name, self.scale, self.tokens, self.mixing = name, q.shape[-1] ** -0.5, (q, k, v), mixing
        self.kind, self.form = name.split()
        first = [x[:, :-STEPS] for x in (q, k, v)]
        if self.kind == "sdpa":
            self.start = [x.transpose(1, 2).contiguous() for x in (k, v)]  # keys and values as models cache them
        elif self.kind == "linear":
            parts = zip(first[1].split(1024, 1), first[2].split(1024, 1), strict=True)
            self.start = sum(torch.einsum("bthk,bthv->bhkv", x.float(), y.float()) for x, y in parts)
        else:
            blocks, options = Blocks.sequence(first[0].shape[1], block_size), {"causal": True, "normalize": False}
            self.start = mhla(*first, mixing, blocks=blocks, impl=self.form, return_state=True, **options)[1]
        self.reset()

    def reset(self):
        """Back to where the decoding starts; softmax writes over the same places."""
        self.state = self.start if self.kind == "sdpa" else copy.deepcopy(self.start)

    @torch.no_grad()
    def __call__(self):
        length = self.tokens[0].shape[1]
        tokens = ((i, *(x[:, i : i + 1] for x in self.tokens)) for i in range(length - STEPS, length))
        return torch.cat([self.step(*token) for token in tokens], 1)

    def step(self, place, q, k, v):
        """The output of one token, [1, 1, H, V]."""
        if self.kind == "mhla":
            return mhla_step(q, k, v, self.mixing, self.state, normalize=False, impl=self.form)[0]
        if self.kind == "sdpa":
            for cached, new in zip(self.state, (k, v), strict=True):
                cached[:, :, place] = new[:, 0]
            return softmax_by(
                self.name, False, q, *(cached[:, :, : place + 1].transpose(1, 2) for cached in self.state)
            )
        if self.form == "fla":
            options = {"initial_state": self.state, "output_final_state": True, "normalize": False}
            o, self.state = fla_kernels(q.device)[1](q, k, v, scale=self.scale, **options)
            return o
        self.state.addcmul_(k[:, 0, :, :, None].float(), v[:, 0, :, None].float())
        return (q[:, 0, :, None].float() @ self.state * self.scale).transpose(1, 2).to(v.dtype)
