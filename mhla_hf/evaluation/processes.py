"""Sampling on several processes: who I am, how many we are, waiting for the others.

Unusual: without a launcher nothing of torch.distributed is touched. With one (`torchrun -m mhla_hf.cli evaluate ...`),
each process does every n-th batch, and the first one computes, writes and returns the scores; the others return none.
"""

import contextlib
import dataclasses
import os

import torch


@dataclasses.dataclass(frozen=True)
class Processes:
    """rank: of this process, 0 the first. count: of all. state: accelerate's, None for one process."""

    rank: int = 0
    count: int = 1
    state: object = None

    @property
    def first(self):
        """Whether this process computes and writes the scores."""
        return self.rank == 0

    def share(self, items):
        """Every `count`-th of `items`, so that the shares of all processes are all of them."""
        return items[self.rank :: self.count]

    def same(self, thing):
        """The first process's `thing`, in all of them."""
        if self.state is None:
            return thing
        from accelerate.utils import broadcast_object_list

        return broadcast_object_list([thing])[0]

    def wait(self):
        """Until all processes are here."""
        if self.state is not None:
            self.state.wait_for_everyone()

    def device(self, asked):
        """The device of this process: the user's, else its own GPU, else the CPU."""
        if asked is not None or not torch.cuda.is_available():
            return asked
        return f"cuda:{int(os.environ.get('LOCAL_RANK', 0))}"


@contextlib.contextmanager
def joined_processes():
    """`Processes` as the launcher's environment says; ImportError with the line that installs accelerate."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Processes()
        return
    try:
        from accelerate import PartialState
    except ImportError as error:
        raise ImportError(
            "several processes need accelerate, which is missing: pip install 'mhla_hf[train]'"
        ) from error
    state = PartialState(cpu=not torch.cuda.is_available())
    yield Processes(state.process_index, state.num_processes, state)
    state.wait_for_everyone()
