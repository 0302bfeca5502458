"""`vllm serve` with a converted model: completions, chat, streams, stop strings, and bad requests over HTTP."""

import os
import sys
import urllib.error
from pathlib import Path

import pytest
import torch
from tools.launched import ask, serving
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
    command = [Path(sys.executable).parent / "vllm", "serve", folder, "--dtype", "float32", "--max-model-len", "256"]
    command += ["--kv-cache-memory-bytes", str(64 << 20), "--host", "127.0.0.1", "--port"]
    # Dynamo traces the model and runs it without Inductor, which would compile for minutes.
    variables = {"VLLM_CPU_CI_ENV": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    with serving(lambda port: [*command, str(port)], env={**os.environ, **variables}) as address:
        yield address, str(folder), tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)


def test_stream_and_stop_string(served):
    address, model, expected = served
    asked = {"model": model, "prompt": PROMPT, **LIMITS}
    events = ask(f"{address}/completions", **asked, stream=True)
    assert "".join(event["choices"][0]["text"] for event in events) == expected
    stop = expected[len(expected) // 2 :][:3]
    answer = ask(f"{address}/completions", **asked, stop=[stop])
    assert answer["choices"][0]["text"] == expected[: expected.index(stop)]


def test_chat_and_a_bad_request_leave_the_server_running(served):
    address, model, expected = served
    messages = [{"role": "user", "content": "What is a class?"}]
    answer = ask(f"{address}/chat/completions", model=model, messages=messages, **LIMITS)
    assert answer["usage"]["completion_tokens"] == 40 and answer["choices"][0]["message"]["content"]
    with pytest.raises(urllib.error.HTTPError) as error:
        ask(f"{address}/completions", model=model, prompt=PROMPT, max_tokens=100_000)
    assert error.value.code == 400
    answer = ask(f"{address}/completions", model=model, prompt=PROMPT, **LIMITS)
    assert answer["choices"][0]["text"] == expected
