"""A converted model behind `transformers serve`, as docs/serving.md says it, says what `generate` says."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from tools.launched import ask, serving
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


@pytest.mark.parametrize("way", COMMANDS)
def test_chat_over_http_is_what_generate_says(folder, tmp_path, way):
    place, wanted = folder
    shutil.copytree(place, tmp_path / "llama-mhla")
    tools = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    env = {**os.environ, "PATH": tools, "HF_HOME": str(tmp_path / "hf")}
    env |= {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = COMMANDS[way].rstrip()
    asked = {"model": re.search(r" serve (\S+)", command)[1], **ASKED}
    at = lambda port: ["bash", "-ec", command.replace("--port 8000", f"--port {port}")]  # noqa: E731
    with serving(at, cwd=tmp_path, env=env) as address:
        assert ask(f"{address}/chat/completions", **asked)["choices"][0]["message"]["content"] == wanted
        chunks = ask(f"{address}/chat/completions", **asked, stream=True)
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == wanted
    assert len(chunks) > 10
