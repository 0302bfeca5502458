"""A converted model behind `transformers serve`, as docs/serving.md says it, says what `generate` says."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from tools.small_scores import small_llama, small_tokenizer
from transformers.utils.import_utils import is_serve_available

import mhla_hf
from experiments.docs import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_serve_available(), reason="transformers[serving] is not installed"),
]
ASKED = {"messages": [{"role": "user", "content": "What is a class?"}], "temperature": 0, "max_tokens": 40}
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
COMMANDS = re.findall(r"```bash\n(.*?)```", (ROOT / "docs/serving.md").read_text(encoding="utf-8"), re.DOTALL)
COMMANDS = {word: text for text in COMMANDS for word in ("import mhla_hf", "sed") if " serve " in text and word in text}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("served") / "llama-mhla"
    tokenizer = small_tokenizer()
    tokenizer.chat_template = TEMPLATE
    model = small_llama(max_position_embeddings=512, tie_word_embeddings=False)
    model = mhla_hf.convert(model, block_size=8).eval()
    halves = [token for token in range(len(tokenizer)) if not tokenizer.decode([token]).isascii()]
    model.generation_config.suppress_tokens = halves  # of a character, which a stream holds back
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    given = tokenizer.apply_chat_template(ASKED["messages"], **options)
    new = model.generate(**given, do_sample=False, max_new_tokens=40)[0, given["input_ids"].shape[1] :]
    return place, tokenizer.decode(new, skip_special_tokens=True)


def ask(port, model, **more):
    body = json.dumps({"model": model, **ASKED, **more}).encode()
    url = f"http://localhost:{port}/v1/chat/completions"
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return answer.read().decode()


def wait_for(server, port, log):
    for _ in range(600):
        assert server.poll() is None, log.read_text()[-3000:]
        try:
            return urllib.request.urlopen(f"http://localhost:{port}/health", timeout=5).read()
        except OSError:
            time.sleep(0.5)
    raise AssertionError(log.read_text()[-3000:])


@pytest.mark.parametrize("way", COMMANDS)
def test_chat_over_http_is_what_generate_says(folder, tmp_path, way):
    place, wanted = folder
    shutil.copytree(place, tmp_path / "llama-mhla")
    with socket.socket() as one:
        one.bind(("localhost", 0))
        port, log = one.getsockname()[1], tmp_path / "log"
    tools = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    env = {**os.environ, "PATH": tools, "HF_HOME": str(tmp_path / "hf")}
    env |= {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = COMMANDS[way].rstrip().replace("--port 8000", f"--port {port}")
    model = re.search(r" serve (\S+)", command)[1]
    with open(log, "w") as out:
        how = {"cwd": tmp_path, "env": env, "stdout": out, "stderr": out, "start_new_session": True}
        server = subprocess.Popen(["bash", "-ec", command], **how)
    try:
        wait_for(server, port, log)
        assert json.loads(ask(port, model))["choices"][0]["message"]["content"] == wanted
        lines = ask(port, model, stream=True).splitlines()
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == wanted
        assert len(chunks) > 10
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)
