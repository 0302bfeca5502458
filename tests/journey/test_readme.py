"""README's Python blocks run as they stand, one after the other, against a Hub in memory with small models."""

import json
import re
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from tools import loopback_hub
from tools.small_scores import save_llama
from tools.small_towers import softmax_tower
from tools.tiny_pipelines import PIPELINES
from transformers import AutoModelForCausalLM, pipeline

from experiments.demo.text import read_text
from mhla_hf.plots import draw_heads

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
BASE = "HuggingFaceTB/SmolLM2-135M"
LLAMA = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 1, "max_position_embeddings": 4096}
SMOLLM2 = {
    "num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
}  # fmt: skip
CARD = "---\nlicense: apache-2.0\n---\n"


def publish(hub, name, folder):
    (folder / "README.md").write_text(CARD)
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    hub.put(name, files)


@pytest.fixture
def here(hub, tmp_path, monkeypatch):
    """A clone's folder with train.txt; on the Hub are small models by README's names, and the user is "me"."""
    monkeypatch.setattr(loopback_hub, "USER", "me")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model_cards").symlink_to(ROOT / "model_cards")
    (tmp_path / "train.txt").write_text(read_text()[0][:150_000])
    publish(hub, BASE, save_llama(tmp_path / "models/base", dtype=torch.bfloat16, **LLAMA))
    small = {**SMOLLM2, "intermediate_size": 8, "dtype": torch.bfloat16}
    publish(hub, f"{BASE}-Instruct", save_llama(tmp_path / "models/instruct", **small))
    PIPELINES["wan"]().to(torch.bfloat16).save_pretrained("Wan-AI/Wan2.1-T2V-1.3B-Diffusers")  # diffusers asks the Hub
    softmax_tower("ViTForImageClassification").save_pretrained("models/deit")
    publish(hub, "facebook/deit-small-patch16-224", tmp_path / "models/deit")
    return tmp_path


def run(blocks):
    names = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    return names


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # read by PEFT
def test_every_block_runs(hub, here):
    names = run(BLOCKS)
    assert len(names["student"].config.mhla["layers"]) == 2 and Path("smollm2-mhla/modeling_mhla.py").is_file()
    record = json.loads(Path("my-mhla/train.json").read_text())
    assert record["steps"] == 55 and record["mixed_precision"] == "bf16"
    for name, value in load_file("my-mhla/model.safetensors").items():
        assert value.dtype == (torch.float32 if ".mixing." in name else torch.bfloat16), name
    assert {value.dtype for value in names["teacher"].parameters()} == {torch.bfloat16}
    model = AutoModelForCausalLM.from_pretrained("my-mhla", trust_remote_code=True)
    torch.testing.assert_close(model.state_dict(), names["student"].state_dict(), rtol=0, atol=0)
    pushed = hub.repos["me/my-mhla"].files()
    assert pushed["model.safetensors"] == Path("my-mhla/model.safetensors").read_bytes()
    card = ModelCard(pushed["README.md"].decode())
    assert (card.data.license, card.data.base_model) == ("apache-2.0", BASE) and "codes_recall_1024" in card.text
    measured = names["model"].config.mhla_measured  # of the adapter, whose card is for it
    assert sum(map(len, measured["softmax_heads"].values())) == 15 and names["model"].config.mhla["salient"] == 128
    card = (ROOT / "model_cards/checkpoints/smollm2-135m-instruct-mhla/README.md").read_text(encoding="utf-8")
    assert draw_heads(measured) in card
    assert type(names["pipe"].transformer).__name__ == "MHLAWanTransformer3DModel"


def test_a_prompt_longer_than_the_window(here, capsys):
    """The folder alone, with its tokenizer, writes what the first block printed."""
    names = run([BLOCKS[0].replace("Gravity is", "Gravity is " * 60)])
    printed, longest = capsys.readouterr().out, names["model"].config.mhla["block_size"]
    assert names["inputs"]["input_ids"].shape[1] > longest
    write = pipeline("text-generation", "smollm2-mhla", dtype="auto")
    written = write("Gravity is " * 60, max_new_tokens=40, do_sample=False)[0]["generated_text"]
    assert printed.endswith(f"\n{written}\n")  # after the report of the conversion
