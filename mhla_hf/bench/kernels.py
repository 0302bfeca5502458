"""The kernels of MHLA's forward and of its backward pass, beside a copy of as many bytes as each pass must move.

A pass must read what it is given once and write its results once; the time of the copy over that of the pass is the share of
the copy's bandwidth that it reaches. What fits a GPU's cache stays there, for both.
"""

import dataclasses
import functools

from ..ops.triton.common import spell
from ..ops.triton.register import TRITON_BACKWARD, TRITON_FORWARD
from .compare import Operator, repeated
from .competitors import copy_of

TIMES = 10  # in a CUDA graph, which takes longer to start than a small kernel to run


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The kernels of an operator, pass by pass."""

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
        """what -> the kernels and the copy, as functions of nothing, to be timed."""
        inputs, direction = self.operator.inputs(device, seed)
        inputs, cut = [x.detach() for x in inputs], spell(self.operator.blocks)
        form = (None, None, None, cut, cut, self.operator.causal, self.operator.normalize, 1.0, direction.dtype)
        o, inv = TRITON_FORWARD(*inputs, *form)
        passes = {
            "forward": functools.partial(TRITON_FORWARD, *inputs, *form),
            "backward": functools.partial(TRITON_BACKWARD, direction, o, inv, *inputs, *form),
        }
        forward, both = self.operator.floors().values()
        work = {}
        for (stage, run), moved in zip(passes.items(), (forward, both - forward), strict=True):
            pair = {"mhla kernels": run, "copy": copy_of(moved, device)}
            what = f"{stage} of {moved / 1e6:.3g} MB, {TIMES} times"
            work[what] = {name: repeated(function, TIMES) for name, function in pair.items()}
        return work
