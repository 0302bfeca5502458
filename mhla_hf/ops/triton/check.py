"""Compares one small call of a kernel with PyTorch in fp64 before impl="auto" trusts the kernel on a GPU.

An untested GPU, driver, or version of Triton may miscompile it. The call takes about a second once the kernel is in Triton's
cache. `make gpu` compares all kinds of calls.
"""

import torch
from torch import Tensor

from ..blocks import Blocks
from ..checks import is_capturing
from ..inputs import MHLAInputs, MHLAOptions
from ..torch_operator import torch_mhla
from .register import triton_mhla
from .tuning import CHUNK

MAX_RELATIVE_ERROR = 3e-2  # for inputs in bf16; the interpreter gives at most 7e-3
KERNEL_FAULTS: dict[torch.device, str | None] = {}


@torch.compiler.assume_constant_result
def kernel_fault(device: torch.device) -> str | None:
    """Return why the kernels cannot be trusted on a device, or None if they can; the answer is cached.

    A `torch.OutOfMemoryError` is passed on instead of returned, because it says nothing about the kernels.
    """
    if device in KERNEL_FAULTS:
        return KERNEL_FAULTS[device]
    if is_capturing(device):
        return "a CUDA graph is being captured before any call of mhla has checked the Triton kernels"
    fault = None
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
            results, exact = small_call(device)
        pairs = zip(results, exact, strict=True)
        errors = [float(((x.double() - y).norm() / y.norm()).nan_to_num(float("inf"))) for x, y in pairs]
        if max(errors) > MAX_RELATIVE_ERROR:
            name = ("o", "dq", "dk", "dv", "dmixing")[errors.index(max(errors))]
            fault = f"the Triton kernels gave {name} with a relative error of {max(errors):.1e} on {device}"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        fault = f"the Triton kernels failed on {device} with {type(error).__name__}: {str(error).strip()[:200]}"
    KERNEL_FAULTS[device] = fault
    return fault


def small_call(device: torch.device) -> list[list[Tensor]]:
    """Return the output and gradients of the kernels in bf16, and of PyTorch in fp64, for one small call.

    It is causal and normalized, with grouped heads and long blocks. The global random state is left alone.
    """
    size = CHUNK + CHUNK // 2
    blocks = Blocks.sequence(3 * size - 5, size)
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.rand(1, blocks.length, heads, 64, generator=generator) for heads in (2, 1, 1, 2))
    inputs = [x.to(device, torch.bfloat16) for x in (q, k, v - 0.5)]
    inputs.append(torch.rand(3, 3, generator=generator).to(device))  # the mixing matrix, which stays fp32
    options = MHLAOptions(blocks, blocks, causal=True, normalize=True, scale=0.125, unrounded=False)
    results = []
    for function, leaves in ((triton_mhla, inputs), (torch_mhla, [x.double() for x in inputs])):
        leaves = [x.detach().requires_grad_() for x in leaves]
        q, k, v, mixing = leaves
        o = function(MHLAInputs(q, k, v, mixing, options))
        results.append([o.detach(), *torch.autograd.grad(o, leaves, (do - 0.5).to(device, o.dtype))])
    return results
