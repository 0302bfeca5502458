"""What impl="auto" asks before it takes the kernels on a GPU: do they give there what the definition gives?

The tests run the kernels in triton's interpreter and compile them for chips that are not there. A chip, a driver or a
version of triton that nobody has tried may still miscompile them, so the first call of each kind is preceded by a small
one of the same kind, compared with PyTorch in fp64: a second or so once triton has the kernels in its cache. A kind that
differs, or does not run, is left to PyTorch, and the log says which and by how much.
"""

import torch

from ..blocks import Blocks
from ..checks import is_capturing
from ..torch_operator import torch_mhla
from .register import triton_mhla
from .tuning import CHUNK

DIFFERENCE_ALLOWED = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 5e-2}
FAULTS_FOUND = {}


def kernel_kind(q, k, v, q_den, *, normalize, causal, blocks, masked, unrounded, backward):
    """What calls of `mhla` have in common that are checked once; as `small_call` takes it.

    Tables of places, padding on the left and packed sequences, which only say where tokens lie, are not part of it.
    """
    long = causal and not blocks.block_size <= CHUNK  # a symbol that is negated becomes a bool
    grouped = not q.shape[2] <= k.shape[2]  # likewise
    den_width = 0 if q_den is None else q_den.shape[3]
    widths = (len([None] * width) for width in (q.shape[3], v.shape[3], den_width))  # a symbol becomes a number
    return q.device, q.dtype, v.dtype, *widths, normalize, causal, long, grouped, masked, unrounded, backward


@torch.compiler.assume_constant_result
def kernel_fault(*kind) -> str | None:
    """`known_fault` of a `kernel_kind`; not one tuple, for torch.compile runs this while it traces and takes none for it."""
    return known_fault(small_call, kind)


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


def small_call(
    device, dtype, value_dtype, width, value_width, den_width, normalize, causal, long, grouped, masked, unrounded, backward
):  # fmt: skip
    """Output, and gradients if there is a backward pass, of the kernels and of PyTorch in fp64.

    The inputs are always the same, and no other random number is used.
    """
    size = CHUNK + CHUNK // 2 if long else CHUNK
    blocks = Blocks.sequence(4 * size - 5, size) if causal else Blocks.grid((12, 12), (2, 2))
    random, heads, groups = torch.Generator().manual_seed(0), 2, 1 if grouped else 2

    def numbers(heads, width, dtype):
        return torch.rand(1, blocks.length, heads, width, generator=random).to(device, dtype)

    q, k = numbers(heads, width, dtype), numbers(groups, width, dtype)
    v, do = (numbers(h, value_width, value_dtype) - 0.5 for h in (groups, heads))
    q, k = (q, k) if normalize else (q - 0.5, k - 0.5)
    mixing = torch.rand(blocks.num_blocks, blocks.num_blocks, generator=random).to(device)
    inputs = [q, k, v, mixing, *(numbers(h, den_width, dtype) for h in (heads, groups) if den_width)]
    options = {"blocks": blocks, "causal": causal, "normalize": normalize, "unrounded": unrounded}
    options["key_mask"] = torch.arange(blocks.length, device=device)[None] % 5 != 4 if masked else None

    def outcome(function, inputs):
        inputs = [x.detach().requires_grad_(backward) for x in inputs]
        o = function(*inputs[:4], **dict(zip(("q_den", "k_den"), inputs[4:], strict=False)), **options)
        return [o.detach(), *(torch.autograd.grad(o, inputs, do.to(o.dtype)) if backward else ())]

    return outcome(triton_mhla, inputs), outcome(torch_mhla, [x.double() for x in inputs])
