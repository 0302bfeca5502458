"""Settings of all tests: one thread, no network, and a temporary Hugging Face home."""

import gc
import os
import sys
import tempfile
from dataclasses import replace
from functools import lru_cache
from types import SimpleNamespace

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("HF_HOME", tempfile.mkdtemp(prefix="mhla_hf_home_"))
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")  # on AMD, sums would depend on the address of a tensor
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # on a GPU, for tests that ask for deterministic algorithms
os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is decorated; 0 runs the kernels' tests on a GPU

import pytest
import torch
from huggingface_hub import constants, file_download
from huggingface_hub.utils import _http
from tools.loopback_hub import TOKEN, LoopbackHub

try:
    import triton.language as tl
    from triton.runtime import interpreter
except ImportError:  # it has no release for macOS
    tl = None
collect_ignore = ["ops/triton"] if tl is None else []


def pytest_collection_modifyitems(items):
    for item in items:
        if tl is None and "triton" in item.nodeid:
            item.add_marker(pytest.mark.skip(reason="Triton is not installed"))


torch.set_num_threads(1)
gc.set_threshold(100_000, 20, 20)  # compilers make many objects, and little garbage


@pytest.fixture(scope="session", autouse=True)
def _unfrozen_at_exit():
    yield
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def _frozen_libraries():
    """Hide a million objects of libraries from the garbage collector, which accelerate calls in every training run."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _alone():
    """Each test has the same seed, and no accelerator of the one before."""
    torch.manual_seed(0)
    yield
    if "accelerate.state" in sys.modules:
        sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)


@lru_cache(maxsize=256)
def languages_of(function):
    """Return the modules of Triton's language among the globals of a kernel or of a function that it calls."""
    return [x for x in function.__globals__.values() if x is tl or x is tl.core]


@pytest.fixture(scope="session", autouse=True)
def patched_once():
    """Make Triton's interpreter faster: a patched language is not patched again, which takes a third of its time, dtypes of
    numpy are cached, and integers, which are too small in most tests, are not checked for overflow.
    """
    if tl is None:
        return
    patch, dtype_of = interpreter._patch_lang, interpreter._get_np_dtype
    cached_dtype = lru_cache(dtype_of)

    def patch_once(function):
        unpatched = any(tl.core.is_builtin(language.arange) for language in languages_of(function))
        return patch(function) if unpatched else interpreter._LangPatchScope()

    def dtype_once(kind):
        kind = kind.element_ty if isinstance(kind, tl.block_type) else kind
        return dtype_of(kind) if isinstance(kind, tl.pointer_type) else cached_dtype(kind)

    interpreter._patch_lang, interpreter._get_np_dtype = patch_once, dtype_once
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """An empty Hub that huggingface_hub uses in this process, without pauses between retries."""
    with LoopbackHub() as hub:
        url = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub.endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        for module in (_http, file_download):
            monkeypatch.setattr(module, "time", SimpleNamespace(sleep=lambda seconds: None))
        yield hub
