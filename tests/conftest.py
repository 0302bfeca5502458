"""Every test: one thread, no network, its own Hugging Face home."""

import os
import sys
import tempfile
from types import SimpleNamespace

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("HF_HOME", tempfile.mkdtemp(prefix="mhla_hf_home_"))
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # on a GPU, for tests that ask for deterministic algorithms
os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is decorated; 0 runs the kernels' tests on a GPU

import pytest
import torch
from elsewhere import run_elsewhere
from huggingface_hub import constants, file_download
from huggingface_hub.utils import _http
from loopback_hub import TOKEN, LoopbackHub

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_accelerator_of_another_test():
    if "accelerate.state" in sys.modules:
        sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def clean_python(tmp_path):
    """run(code, blocked=...) -> stdout of `code` in a new process whose folder and caches are empty."""

    def run(code, blocked=("mhla_hf", "triton", "diffusers")):
        (tmp_path / "clean").mkdir(exist_ok=True)
        done = run_elsewhere(code, tmp_path / "clean", blocked)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    return run


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub of this test's own, which the client in this process uses, without pauses between its attempts."""
    with LoopbackHub() as served:
        url = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, served.endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)
        monkeypatch.setattr(constants, "ENDPOINT", served.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        for module in (_http, file_download):
            monkeypatch.setattr(module, "time", SimpleNamespace(sleep=lambda seconds: None))
        yield served
