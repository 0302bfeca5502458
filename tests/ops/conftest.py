"""Shared by the kernels' tests."""

from dataclasses import replace
from functools import lru_cache

import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter


@pytest.fixture
def poisoned():
    """New memory is filled with NaN, so an element that no kernel writes shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@lru_cache(maxsize=256)
def languages_of(function):
    """The modules of triton's language that a kernel, or a function it calls, sees."""
    return [x for x in function.__globals__.values() if x is tl or x is tl.core]


@pytest.fixture(scope="session", autouse=True)
def patched_once():
    """The interpreter patches triton's language for a launch, and again in each call of a function that a kernel calls, a
    third of its time. Where a language is patched already that changes nothing, and is left out. So is the table of numpy's
    dtypes that it makes anew whenever it looks one up. Integers are not watched for overflow: most tensors are too small."""
    patch, dtype_of = interpreter._patch_lang, interpreter._get_np_dtype
    look_up = lru_cache(dtype_of)

    def patch_once(function):
        unpatched = any(tl.core.is_builtin(language.arange) for language in languages_of(function))
        return patch(function) if unpatched else interpreter._LangPatchScope()

    def dtype_once(kind):
        kind = kind.element_ty if isinstance(kind, tl.block_type) else kind
        return dtype_of(kind) if isinstance(kind, tl.pointer_type) else look_up(kind)

    interpreter._patch_lang, interpreter._get_np_dtype = patch_once, dtype_once
    builder = interpreter.interpreter_builder
    options, builder.options = builder.options, replace(builder.options, sanitize_overflow=False)
    yield
    builder.options = options
    interpreter._patch_lang, interpreter._get_np_dtype = patch, dtype_of


@pytest.fixture
def overflow_watched():
    """The interpreter looks for overflows of integers, for which it takes a fourth of its time."""
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=True)
    yield
    builder.options = replace(builder.options, sanitize_overflow=False)
