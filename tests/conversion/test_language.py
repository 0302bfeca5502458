"""conversion/language.py as a user runs it: a converted model, and one from scratch, both from the command line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).parents[2]
SHORT = "{name: NAME, loss: LOSS, steps: 3, lr: 1e-3, seq_len: 32, batch_size: 2, trainable: WHAT}"
CONVERT = ["transfer transfer mhla", "distill logits all"]
SCRATCH = ["pretrain lm all"]


def stages(lines):
    made = []
    for line in lines:
        name, loss, what = line.split()
        made.append(SHORT.replace("NAME", name).replace("LOSS", loss).replace("WHAT", what))
    return "stages: [" + ", ".join(made) + "]\n"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A softmax model in bfloat16 with a tokenizer, and a text, on disk."""
    folder = tmp_path_factory.mktemp("base")
    words = [f"w{i}" for i in range(60)]
    model = Tokenizer(models.WordLevel({"<end>": 0} | {word: i for i, word in enumerate(words, 1)}, unk_token="<end>"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<end>").save_pretrained(folder / "model")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=128)
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder / "model")
    (folder / "text.txt").write_text(" ".join(words[i * i % 60] for i in range(2000)))
    return folder


def run(*arguments):
    command = [sys.executable, str(ROOT / "conversion" / "language.py"), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


def test_convert_distill_save(base, tmp_path):
    recipe = tmp_path / "short.yaml"
    recipe.write_text("settings: {layers: all, block_size: 16}\n" + stages(CONVERT))
    arguments = ["--recipe", recipe, "--model", base / "model", "--text", base / "text.txt", "--out", tmp_path / "out"]
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (type(model).__name__, model.dtype) == ("MHLALlamaForCausalLM", torch.bfloat16)
    assert (tmp_path / "out" / "tokenizer.json").exists()
    again = run(*arguments)
    assert "finished already: nothing to do" in again.stderr


def test_from_scratch_and_what_is_said_of_a_bad_text(base, tmp_path):
    recipe = tmp_path / "short.yaml"
    settings = f"settings: {{preset: tiny, vocab_size: 64}}\ntokenizer: {base / 'model'}\n"
    recipe.write_text(settings + stages(SCRATCH))
    bad = run("--recipe", recipe, "--text", tmp_path / "none.txt", "--out", tmp_path / "out")
    assert bad.returncode == 1
    assert bad.stderr.splitlines()[-1] == f"language.py: data: there is no file or folder '{tmp_path / 'none.txt'}'"
    assert "Traceback" not in bad.stderr
    done = run("--recipe", recipe, "--text", base / "text.txt", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "out")).__name__ == "MHLAForCausalLM"
