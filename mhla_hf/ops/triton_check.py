"""What impl="auto" asks before it takes the kernels on a GPU: do they give there what the definition gives?

The tests run the kernels in triton's interpreter and compile them for chips that are not there. A chip, a driver or a
version of triton that nobody has tried may still miscompile them, so the first call of each kind is preceded by a small
one of the same kind, compared with PyTorch in fp64: a second or so once triton has the kernels in its cache. A kind that
differs, or does not run, is left to PyTorch, and the log says which and by how much.
"""

from typing import NamedTuple

import torch

from .blocks import Blocks
from .checks import is_capturing
from .reference import FEATURE_EPS, head_norm, relu_features
from .state import MHLAState
from .torch_decode import torch_step
from .torch_operator import torch_mhla
from .triton_common import TILE_TOKENS
from .triton_decode import triton_step
from .triton_operator import triton_mhla
from .triton_quadratic import use_quadratic

DIFFERENCE_ALLOWED = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 5e-2}
FAULTS_FOUND = {}


class KernelKind(NamedTuple):
    """What calls have in common that are checked once. Tables of places, padding on the left and packed sequences, which
    only say where tokens lie, are not part of it."""

    device: torch.device
    dtype: torch.dtype
    value_dtype: torch.dtype
    width: int
    value_width: int
    den_width: int
    normalize: bool | str
    causal: bool
    long: bool
    grouped: bool
    masked: bool
    mapped: bool
    normed: bool
    unrounded: bool
    backward: bool
    decode: bool


def kernel_kind(
    q, k, v, q_den=None, *, normalize, causal=False, blocks=None, feature_map=None, masked=False, normed=False,
    unrounded=False, backward=False, decode=False,
):  # fmt: skip
    """The fields of the kind of a call of `mhla`, or with `decode` of `mhla_step`."""
    long = causal and not decode and not blocks.block_size <= TILE_TOKENS  # a symbol that is negated becomes a bool
    grouped = not q.shape[2] <= k.shape[2]  # likewise
    den_width = 0 if q_den is None else q_den.shape[3]
    widths = (len([None] * width) for width in (q.shape[3], v.shape[3], den_width))  # a symbol becomes a number
    mapped = feature_map is not None and not causal
    flags = causal, long, grouped, masked, mapped, normed, unrounded, backward, decode
    return q.device, q.dtype, v.dtype, *widths, normalize, *flags


@torch.compiler.assume_constant_result
def kernel_fault(*fields) -> str | None:
    """Why kernels of the `KernelKind` of these fields cannot be trusted on its device; None if they can. Found out once.

    Fields, for torch.compile runs this while it traces and takes no tuples for it.
    """
    kind = KernelKind(*fields)
    if kind not in FAULTS_FOUND:
        if is_capturing(kind.device):
            return "a CUDA graph is being captured, and no such call came before it to check the Triton kernels"
        FAULTS_FOUND[kind] = find_fault(kind)
    return FAULTS_FOUND[kind]


def find_fault(kind: KernelKind) -> str | None:
    """`kernel_fault`, by running them."""
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast(kind.device.type, enabled=False):
            errors = decode_errors(kind) if kind.decode else call_errors(kind)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return f"the Triton kernels failed on {kind.device} with {type(error).__name__}: {str(error).strip()[:200]}"
    name, worst = max(errors.items(), key=lambda pair: pair[1])
    if worst <= DIFFERENCE_ALLOWED[min((kind.dtype, kind.value_dtype), key=lambda x: x.itemsize)]:
        return None
    return f"the Triton kernels gave {name} off by {worst:.1e} of fp64 on {kind.device}, for {kind}"


def call_errors(kind: KernelKind) -> dict[str, float]:
    """Relative differences of a small call's output and gradients, in every form it may take."""
    errors = {}
    if kind.causal:
        size = TILE_TOKENS + TILE_TOKENS // 2 if kind.long else TILE_TOKENS
        shapes = [Blocks.sequence(4 * size - 5, size)]
    else:
        widths = kind.width, kind.value_width
        side = next(n for n in range(8, 64, 2) if not use_quadratic(n * n, 4, widths, False))
        shapes = [
            Blocks.grid((n, n), (2, 2)) for n in {8, side}
        ]  # the smaller one takes the quadratic form, if any does
    for blocks in shapes:
        inputs, grad = made_up(kind, blocks)
        options = {"blocks": blocks, "causal": kind.causal, "normalize": kind.normalize}
        options["unrounded"] = kind.unrounded
        if kind.masked:
            options["key_mask"] = torch.arange(blocks.length, device=kind.device)[None] % 5 != 4
        norm = (torch.linspace(0.5, 1.5, kind.value_width, device=kind.device), 1.0) if kind.normed else None
        inside = {"eps": FEATURE_EPS["relu"] if kind.mapped else None, "norm": norm}
        got = outcome(triton_mhla, inputs, grad, kind, {**options, **inside})
        inputs = [x.double() for x in inputs]
        want = outcome(torch_mhla, inputs, grad.double(), kind, options, "relu" if kind.mapped else None)
        want[0] = head_norm(want[0], *norm) if kind.normed else want[0]
        for name, x, y in zip(("o", "dq", "dk", "dv", "dmixing", "dq_den", "dk_den"), got, want, strict=False):
            errors[name] = max(errors.get(name, 0.0), difference(x, y))
    return errors


def made_up(kind: KernelKind, blocks: Blocks, batch: int = 1, tokens: int | None = None) -> tuple:
    """q, k, v, mixing (q_den, k_den) and a gradient of the output; always the same, and no other random number is used."""
    random = torch.Generator().manual_seed(0)
    tokens = blocks.length if tokens is None else tokens

    def numbers(heads, width, dtype):
        return torch.rand(batch, tokens, heads, width, generator=random).to(kind.device, dtype)

    heads, groups = 2, 1 if kind.grouped else 2
    q, k = numbers(heads, kind.width, kind.dtype), numbers(groups, kind.width, kind.dtype)
    v, grad = (numbers(h, kind.value_width, kind.value_dtype) - 0.5 for h in (groups, heads))
    q, k = (x - 0.5 for x in (q, k)) if kind.mapped or not kind.normalize else (q, k)
    mixing = torch.rand(blocks.num_blocks, blocks.num_blocks, generator=random).to(kind.device)
    dens = [numbers(h, kind.den_width, kind.dtype) for h in (heads, groups)] if kind.den_width else []
    return [q, k, v, mixing, *dens], grad


def outcome(function, inputs, grad, kind: KernelKind, options: dict, feature_map: str | None = None) -> list:
    """Output, and the gradients of all inputs if the kind has a backward pass."""
    inputs = [x.detach().requires_grad_(kind.backward) for x in inputs]
    q, k, v, mixing, *dens = inputs
    if feature_map is not None:
        q, k = relu_features(q, feature_map), relu_features(k, feature_map)
    o = function(q, k, v, mixing, **dict(zip(("q_den", "k_den"), dens, strict=False)), **options)
    return [o.detach(), *(torch.autograd.grad(o, inputs, grad.to(o.dtype)) if kind.backward else ())]


@torch.no_grad()
def decode_errors(kind: KernelKind) -> dict[str, float]:
    """The relative difference of decoded tokens, over the end of two blocks."""
    blocks, outputs = Blocks.sequence(20, 8), []
    (q, k, v, mixing, *dens), _ = made_up(kind, blocks, batch=2)
    for step, dtype in ((triton_step, None), (torch_step, torch.float64)):
        widths = (k.shape[2], q.shape[2], kind.width, kind.value_width, 8)
        options = {"normalize": bool(kind.normalize), "separate_den": bool(dens), "den_dim": kind.den_width or None}
        store = torch.promote_types(kind.dtype, kind.value_dtype) if dtype is None else dtype
        state = MHLAState.empty(2, *widths, **options, dtype=store, device=kind.device)
        rows = [x if dtype is None else x.to(dtype) for x in (q, k, v, *dens)]
        weights, found = mixing if dtype is None else mixing.to(dtype), []
        for t in range(blocks.length):
            now = [x[:, t : t + 1] for x in rows]
            arguments = (*now[:3], weights, state, kind.width**-0.5, *(now[3:] or (None, None)))
            found.append(step(*arguments, kind.unrounded) if dtype is None else step(*arguments, None))
        outputs.append(torch.cat(found, 1))
    return {"o": difference(*outputs)}


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative, Frobenius; infinite where `got` is not finite."""
    return float(((got.double() - want).norm() / want.norm()).nan_to_num(float("inf")))
