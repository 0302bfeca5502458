"""Each kernel alone: every launch of MHLA's forward and backward pass, beside a copy of as many bytes as it must move.

A kernel must read what it is given once and write its results once; the time of the copy over that of the kernel is the
share of the copy's bandwidth that it reaches. Unusual: launches are recorded in a training step and then started alone, on
the same memory, over and over; those that add to what is there let it grow, which takes no longer. What fits a GPU's cache
stays there, for both.
"""

import contextlib
import dataclasses
import functools
import math

import torch

from ..ops.triton_common import launches_through, spell, start
from ..ops.triton_operator import triton_backward, triton_forward
from .compare import Operator, repeated
from .competitors import copy_of

TIMES = 10  # in a CUDA graph, which takes longer to start than a small kernel to run


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The kernels of an operator, one by one, in the order in which they start."""

    operator: Operator
    graph = True

    @property
    def name(self):
        """The operator's."""
        return self.operator.name

    def check(self, device, seed):
        """`Operator.check`; ValueError where no kernel runs."""
        if "triton" not in self.operator.forms(device):
            raise ValueError(f"device is {str(device)!r}; expected a GPU that MHLA's kernels run on.")
        return self.operator.check(device, seed)

    def work(self, device, seed):
        """what -> the kernel and the copy, as functions of nothing, to be timed."""
        inputs, direction = self.operator.inputs(device, seed)
        with recorded_launches() as forward:
            o = self.operator.attend(*inputs, "triton")
        with recorded_launches() as backward:
            torch.autograd.grad(o, inputs, direction)
        work = {}
        for stage, launches in (("forward", forward), ("backward", backward)):
            for place, launch in enumerate(launches, 1):
                moved = bytes_of(launch)
                pair = {"mhla kernel": launch, "copy": copy_of(moved, device)}
                what = f"{stage} {place}, {kernel_of(launch)} of {moved / 1e6:.3g} MB, {TIMES} times"
                work[what] = {name: repeated(run, TIMES) for name, run in pair.items()}
        return work

    def traffic(self):
        """Bytes that the kernels of a forward pass and those of a training step move, by `bytes_of`; none is started."""
        shape, heads = self.operator, self.operator.heads
        size, dtype = (shape.batch, shape.blocks.length, heads), getattr(torch, shape.dtype)
        q, k, v = (torch.zeros(*size, width, dtype=dtype) for width in (shape.widths[0], *shape.widths))
        mixing = torch.zeros(shape.blocks.num_blocks, shape.blocks.num_blocks)
        cuts, normalize = [spell(shape.blocks)] * 2, "shared" if shape.normalize else "no"
        rest = (*[None] * 5, *cuts, shape.causal, normalize, 1.0, None)
        with recorded_launches(started=False) as launches:
            o, inv = triton_forward(q, k, v, mixing, *rest)
            forward = len(launches)
            triton_backward(torch.zeros_like(o), o, inv, q, k, v, mixing, *rest)
        moved = [bytes_of(launch) for launch in launches]
        return sum(moved[:forward]), sum(moved)


@contextlib.contextmanager
def recorded_launches(started=True):
    """Inside, launches go into the list this gives, as functions of nothing that start them again; or for the first time."""
    found = []

    def record(*arguments, **settings):
        found.append(functools.partial(start, *arguments, **settings))
        if started:
            found[-1]()

    with launches_through(record):
        yield found


def kernel_of(launch):
    """The name of the kernel that it starts."""
    return launch.args[0].fn.__name__.removesuffix("_kernel")


def bytes_of(launch):
    """Of all tensors among a launch's arguments, each once; of an expanded one what lies in memory."""
    flat = [x for group in launch.args for x in (group if isinstance(group, tuple) else (group,))]
    held = {}
    for x in flat:
        if isinstance(x, torch.Tensor):
            elements = math.prod(size for size, stride in zip(x.shape, x.stride(), strict=True) if stride)
            held[x.data_ptr(), x.shape] = elements * x.element_size()
    return sum(held.values())
