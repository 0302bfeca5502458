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

from ..ops.triton_common import launches_through, start
from .compare import Operator, copy_of, repeated

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
                function, _, _, *arguments = launch.args
                moved, kernel = bytes_of(arguments), function.fn.__name__.removesuffix("_kernel")
                pair = {"mhla kernel": launch, "copy": copy_of(moved, device)}
                what = f"{stage} {place}, {kernel} of {moved / 1e6:.3g} MB, {TIMES} times"
                work[what] = {name: repeated(run, TIMES) for name, run in pair.items()}
        return work


@contextlib.contextmanager
def recorded_launches():
    """Inside, launches also go into the list this gives, as functions of nothing that start them again."""
    found = []

    def record(*arguments, **settings):
        found.append(functools.partial(start, *arguments, **settings))
        found[-1]()

    with launches_through(record):
        yield found


def bytes_of(arguments):
    """Of all tensors among a kernel's arguments, each once; of an expanded one what lies in memory."""
    flat = [x for group in arguments for x in (group if isinstance(group, tuple) else (group,))]
    held = {}
    for x in flat:
        if isinstance(x, torch.Tensor):
            elements = math.prod(size for size, stride in zip(x.shape, x.stride(), strict=True) if stride)
            held[x.data_ptr(), x.shape] = elements * x.element_size()
    return sum(held.values())
