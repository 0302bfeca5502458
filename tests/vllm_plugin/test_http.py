"""`vllm serve` with a converted model: completions, chat, streams, stop strings, and bad requests over HTTP."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch
from tools.small_scores import small_llama, small_tokenizer
from tools.vllm_engine import HEAD_DIM, LOCAL

import mhla_hf

pytest.importorskip("vllm.v1", reason="vllm is not installed: make test-vllm")
pytestmark = pytest.mark.slow

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
PROMPT = "The class of a module is"
LIMITS = {"temperature": 0, "max_tokens": 40}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server of a saved conversion: its address, and what `generate` continues PROMPT with."""
    folder = tmp_path_factory.mktemp("served") / "llama-mhla"
    tokenizer = small_tokenizer()
    tokenizer.chat_template = TEMPLATE
    model = small_llama(max_position_embeddings=512, tie_word_embeddings=False, head_dim=HEAD_DIM)
    model = mhla_hf.convert(model, layers="all", block_size=8, softmax_heads={0: [0]}, **LOCAL).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    ids = torch.tensor([tokenizer(PROMPT).input_ids])
    made = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=40)
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    command = [Path(sys.executable).parent / "vllm", "serve", folder, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--max-model-len", "256", "--kv-cache-memory-bytes", str(64 << 20)]
    # Dynamo traces the model and runs it without Inductor, which would compile for minutes.
    variables = {"VLLM_CPU_CI_ENV": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    server = subprocess.Popen(command, env={**os.environ, **variables}, start_new_session=True)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(480):  # at most eight minutes
            assert server.poll() is None
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{address}/health", timeout=5)
                break
            time.sleep(1)
        yield address, str(folder), tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)


def ask(address, path, **body):
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{address}/v1/{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return answer.read().decode()


def test_stream_and_stop_string(served):
    address, model, expected = served
    stream = ask(address, "completions", model=model, prompt=PROMPT, stream=True, **LIMITS)
    events = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: {")]
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == expected
    stop = expected[len(expected) // 2 :][:3]
    answer = json.loads(ask(address, "completions", model=model, prompt=PROMPT, stop=[stop], **LIMITS))
    assert answer["choices"][0]["text"] == expected[: expected.index(stop)]


def test_chat_and_a_bad_request_leave_the_server_running(served):
    address, model, expected = served
    messages = [{"role": "user", "content": "What is a class?"}]
    answer = json.loads(ask(address, "chat/completions", model=model, messages=messages, **LIMITS))
    assert answer["usage"]["completion_tokens"] == 40 and answer["choices"][0]["message"]["content"]
    with pytest.raises(urllib.error.HTTPError) as error:
        ask(address, "completions", model=model, prompt=PROMPT, max_tokens=100_000)
    assert error.value.code == 400
    answer = json.loads(ask(address, "completions", model=model, prompt=PROMPT, **LIMITS))
    assert answer["choices"][0]["text"] == expected
