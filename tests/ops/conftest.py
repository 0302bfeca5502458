"""Shared by the kernels' tests."""

from dataclasses import replace

import pytest
import torch
from triton.runtime import interpreter


@pytest.fixture
def poisoned():
    """New memory is filled with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def overflow_watched():
    """The interpreter looks for overflows of integers, for which it takes a fourth of its time."""
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=True)
    yield
    builder.options = replace(builder.options, sanitize_overflow=False)
