"""Which kernels a call starts."""

import contextlib

from mhla_hf.ops.triton_common import launches_through, start


@contextlib.contextmanager
def recorded_launches():
    """The arguments of every launch inside."""
    found = []

    def record(*arguments, **settings):
        found.append(arguments)
        start(*arguments, **settings)

    with launches_through(record):
        yield found


def kernel_of(launch):
    """The name of the kernel."""
    return launch[0].fn.__name__.removesuffix("_kernel")
