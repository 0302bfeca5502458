"""conversion/language.py as a user runs it: a converted model, and one from scratch."""

import re

import pytest
import torch
from tools.small_scores import TRAINING, save_llama
from transformers import AutoModelForCausalLM

STAGE = "{{name: {0}, loss: {0}, steps: 3, lr: 1e-3, seq_len: 32, batch_size: 2, trainable: {1}}}"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A softmax model in bfloat16 with a tokenizer, and a text, on disk."""
    folder = tmp_path_factory.mktemp("base")
    save_llama(folder / "model", dtype=torch.bfloat16)
    (folder / "text.txt").write_text(TRAINING)
    return folder


def test_convert_distill_save(run, base, tmp_path, capsys):
    recipe, stages = tmp_path / "short.yaml", [STAGE.format("transfer", "mhla"), STAGE.format("logits", "all")]
    recipe.write_text(f"settings: {{layers: all, block_size: 16}}\nstages: [{', '.join(stages)}]\n")
    arguments = ["--recipe", recipe, "--model", base / "model", "--data", base / "text.txt", "--out", tmp_path / "x"]
    for _ in range(2):
        run("language", *arguments)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "x")
    assert (type(model).__name__, model.dtype) == ("MHLALlamaForCausalLM", torch.bfloat16)
    assert (tmp_path / "x" / "tokenizer.json").exists()
    assert "finished already: nothing to do" in capsys.readouterr().err


def test_from_scratch_and_what_is_said_of_a_bad_text(run, refused, base, tmp_path):
    recipe, settings = tmp_path / "short.yaml", "settings: {preset: tiny, vocab_size: 400}"
    recipe.write_text(f"{settings}\ntokenizer: {base / 'model'}\nstages: [{STAGE.format('lm', 'all')}]\n")
    said = refused("language", "--recipe", recipe, "--data", tmp_path / "none.txt", "--out", tmp_path / "out")
    expected = r"expected a file, a folder, a dataset, or a list of texts\.\n"
    assert re.fullmatch(rf"language\.py: data: got '.*none.txt', which does not exist, {expected}", said)
    run("language", "--recipe", recipe, "--data", base / "text.txt", "--out", tmp_path / "out")
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "out")).__name__ == "MHLAForCausalLM"
