"""A clean process (no mhla_hf, triton, diffusers, network; its own Hugging Face home) and a Hub of the tests' own."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from huggingface_hub import constants, file_download
from huggingface_hub.utils import _http
from loopback_hub import TOKEN, LoopbackHub
from loopback_schema import refusals

from mhla_hf.hub import card, card_shelf

BLOCKED = ("mhla_hf", "triton", "diffusers")


@pytest.fixture
def clean_python(tmp_path):
    """run(code, blocked=BLOCKED) -> stdout of `code` in a new process whose folder, path and caches are empty."""
    site = tmp_path / "clean_site"
    home = tmp_path / "clean_home"
    work = tmp_path / "clean_work"
    for folder in (site, home, work):
        folder.mkdir()

    def run(code, blocked=BLOCKED):
        lines = [f"sys.modules[{name!r}] = None" for name in blocked]
        (site / "sitecustomize.py").write_text("\n".join(["import sys", *lines, ""]))
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(site),
            "HF_HOME": str(home),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=work, env=environment)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    return run


@pytest.fixture(autouse=True)
def every_card_is_valid(monkeypatch):
    """Whatever card a test makes, the server's schema takes it."""

    def check_for_the_server(text, facts, check=card.check_front):
        check(text, facts)
        assert refusals(text) == []

    for module in (card, card_shelf):
        monkeypatch.setattr(module, "check_front", check_for_the_server)


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
