"""Shared by the kernels' tests."""

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
    third of its time. Where a language is patched already that changes nothing, and is left out."""
    patch = interpreter._patch_lang

    def patch_once(function):
        unpatched = any(tl.core.is_builtin(language.arange) for language in languages_of(function))
        return patch(function) if unpatched else interpreter._LangPatchScope()

    interpreter._patch_lang = patch_once
    yield
    interpreter._patch_lang = patch
