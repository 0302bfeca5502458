"""Compares the kernels with fp64 before impl="auto" trusts them on a GPU.

The tests run the kernels in Triton's interpreter and compile them for GPUs that are not present. A GPU, driver, or version
of Triton that nobody has tried may still miscompile them. So the first call of each kind is preceded by a small call of the
same kind, which is compared with PyTorch in fp64 and takes about a second once Triton has the kernels in its cache. If the
results differ or the call fails, PyTorch computes all calls of this kind, and the log says why.
"""

from collections.abc import Callable
from typing import Any

import torch

from ..blocks import Blocks
from ..checks import is_capturing
from ..torch_operator import torch_mhla
from .register import triton_mhla
from .tuning import CHUNK

MAX_RELATIVE_ERROR = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 5e-2}
FAULTS_FOUND: dict[tuple, str | None] = {}

Results = tuple[list[torch.Tensor], list[torch.Tensor]]  # of the kernels, and of PyTorch in fp64


def kernel_kind(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_den: torch.Tensor | None,
    *,
    normalize: bool | str,
    causal: bool,
    blocks: Blocks,
    masked: bool,
    unrounded: bool,
    backward: bool,
) -> tuple:
    """Return the kind of a call of `mhla`: its device, dtypes, sizes, and options, as the arguments of `small_call`.

    The kernels are verified once per kind. Grids, left padding, and packing only move tokens, so they do not affect it.

    Args:
        q, k, v, q_den, normalize, causal, blocks, unrounded: As in `mhla`.
        masked: Whether there is a key_mask.
        backward: Whether gradients are needed.
    """
    # `not a <= b` and `concrete` turn symbolic sizes of torch.compile into plain Python values.
    long_blocks = causal and blocks.block_size is not None and not blocks.block_size <= CHUNK
    grouped = not q.shape[2] <= k.shape[2]
    den_width = 0 if q_den is None else q_den.shape[3]
    widths = (concrete(q.shape[3]), concrete(v.shape[3]), concrete(den_width))
    options = (normalize, causal, long_blocks, grouped, masked, unrounded, backward)
    return q.device, q.dtype, v.dtype, *widths, *options


def concrete(size: int | torch.SymInt) -> int:
    """Convert a size that may be symbolic to an int, on which torch.compile then specializes."""
    return len([None] * size)


@torch.compiler.assume_constant_result
def kernel_fault(*kind: Any) -> str | None:
    """Return why the kernels cannot be trusted for a kind of call of `mhla`, or None if they can.

    Args:
        *kind: From `kernel_kind`. torch.compile calls this function while tracing, and would not accept a tuple as a
            constant.
    """
    return known_fault(small_call, kind)


def known_fault(call: Callable[..., Results], kind: tuple) -> str | None:
    """Return why the kernels cannot be trusted for calls of a kind, or None if they can.

    They are checked at the first call for a kind, and the result is kept in `FAULTS_FOUND`. During CUDA graph capture they
    cannot be checked, and count as not trusted.

    Args:
        call: Function that runs a small call of a kind, such as `small_call`.
        kind: Its arguments, which begin with the device and the dtypes of queries and values.

    Raises:
        torch.OutOfMemoryError: If there is no memory for the small call.
    """
    key = call.__name__, *kind
    if key not in FAULTS_FOUND:
        device = kind[0]
        if is_capturing(device):
            return "a CUDA graph is being captured, and no such call came before it to check the Triton kernels"
        FAULTS_FOUND[key] = find_fault(call, *kind)
    return FAULTS_FOUND[key]


def find_fault(
    call: Callable[..., Results], device: torch.device, dtype: torch.dtype, value_dtype: torch.dtype, *kind: Any
) -> str | None:
    """Run the kernels and compare them with PyTorch in fp64. See `known_fault` for arguments, result, and errors.

    Any exception other than `torch.OutOfMemoryError` becomes part of the result.
    """
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
            results, exact = call(device, dtype, value_dtype, *kind)
    except torch.OutOfMemoryError:  # says nothing about the kernels
        raise
    except Exception as error:
        return f"the Triton kernels failed on {device} with {type(error).__name__}: {str(error).strip()[:200]}"
    errors = [
        float(((x.double() - y).norm() / y.norm()).nan_to_num(float("inf")))
        for x, y in zip(results, exact, strict=True)
    ]
    coarser_dtype = min((dtype, value_dtype), key=lambda x: x.itemsize)
    if max(errors) <= MAX_RELATIVE_ERROR[coarser_dtype]:
        return None
    name = ("o", "dq", "dk", "dv", "dmixing", "dq_den", "dk_den")[errors.index(max(errors))]
    kind_text = str((dtype, value_dtype, *kind))
    return f"the Triton kernels gave {name} with a relative error of {max(errors):.1e} on {device}, for {kind_text}"


def random_tensors(device: torch.device) -> Callable[..., torch.Tensor]:
    """Return a function like `torch.rand(*shape, dtype=dtype)` on a device, with a random generator seeded with 0."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.rand(shape, generator=generator).to(device, dtype)

    return random


def small_call(
    device: torch.device,
    dtype: torch.dtype,
    value_dtype: torch.dtype,
    width: int,
    value_width: int,
    den_width: int,
    normalize: bool | str,
    causal: bool,
    long_blocks: bool,
    grouped: bool,
    masked: bool,
    unrounded: bool,
    backward: bool,
) -> Results:
    """Run the kernels, and PyTorch in fp64, on a small input of a given kind (see `kernel_kind`).

    The inputs are always the same, and the global random state does not change.

    Returns:
        The results of the kernels and of PyTorch: each has the output and, if `backward`, the gradients of the inputs.
    """
    size = CHUNK + CHUNK // 2 if long_blocks else CHUNK
    blocks = Blocks.sequence(4 * size - 5, size) if causal else Blocks.grid((12, 12), (2, 2))
    generator = torch.Generator().manual_seed(0)
    num_heads, num_kv_heads = 2, 1 if grouped else 2

    def random(num_heads: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.rand(1, blocks.length, num_heads, width, generator=generator).to(device, dtype)

    q, k = random(num_heads, width, dtype), random(num_kv_heads, width, dtype)
    v, do = (random(n, value_width, value_dtype) - 0.5 for n in (num_kv_heads, num_heads))
    if not normalize:
        q, k = q - 0.5, k - 0.5
    mixing = torch.rand(blocks.num_blocks, blocks.num_blocks, generator=generator).to(device)
    inputs = {"q": q, "k": k, "v": v, "mixing": mixing}
    if den_width:
        inputs["q_den"] = random(num_heads, den_width, dtype)
        inputs["k_den"] = random(num_kv_heads, den_width, dtype)
    options = {"blocks": blocks, "causal": causal, "normalize": normalize, "unrounded": unrounded}
    if masked:
        options["key_mask"] = torch.arange(blocks.length, device=device)[None] % 5 != 4

    def run(function: Callable[..., torch.Tensor], dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        leaves = {name: x.detach().to(dtype or x.dtype).requires_grad_(backward) for name, x in inputs.items()}
        o = function(**leaves, **options)
        grads = torch.autograd.grad(o, list(leaves.values()), do.to(o.dtype)) if backward else ()
        return [o.detach(), *grads]

    return run(triton_mhla), run(torch_mhla, torch.float64)
