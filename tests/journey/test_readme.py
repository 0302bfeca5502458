"""README's Python blocks run as they stand, on small stand-ins that lie where its Hub ids point, in the real dtypes."""

import importlib
import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from small_scores import TRAINING, save_llama
from small_towers import softmax_tower
from tiny_pipelines import PIPELINES
from transformers import AutoModelForCausalLM, pipeline

import mhla_hf
from mhla_hf.evaluation.runner import read_score_recipe
from mhla_hf.plots import draw_heads
from mhla_hf.training import recipe as recipe_module

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
LLAMA = {"num_key_value_heads": 1, "num_hidden_layers": 5, "max_position_embeddings": 512}
MARKS = ("smollm2-mhla", "mhla_hf.distill(", "load_adapter", "WanPipeline")
BASE, RECIPE = "HuggingFaceTB/SmolLM2-135M", "language_llama_lite"


def run(*marks, prompt="Gravity is"):
    """The blocks that hold these texts, one after the other, as one program after the first line; returns its names."""
    names = {"mhla_hf": mhla_hf}
    assert all(any(mark in block for mark in MARKS) for block in BLOCKS) and {*marks} <= {*MARKS}, "each block is run"
    for mark in marks:
        block = next(block for block in BLOCKS if mark in block).replace("Gravity is", prompt)
        exec(compile(block, "README.md", "exec"), names)
    return names


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.txt").write_text(TRAINING)
    for name, value in (("FIT_ROWS", 4), ("GATE_STEPS", 2)):
        monkeypatch.setattr(importlib.import_module("mhla_hf.conversion.language"), name, value)
    return tmp_path


def test_convert_distill_share(here, monkeypatch):
    """The recipe that it names but for its length; for the tasks, which have to be fetched, recall stands in."""
    save_llama(here / BASE, dtype=torch.bfloat16, **LLAMA)
    (here / "train.txt").write_text(TRAINING)
    recipe = yaml.safe_load((recipe_module.RECIPE_FOLDER / f"{RECIPE}.yaml").read_text(encoding="utf-8"))
    for stage in recipe["stages"]:
        stage |= {"steps": 3, "warmup": 1, "seq_len": 64}
    (here / f"{RECIPE}.yaml").write_text(yaml.safe_dump(recipe))
    monkeypatch.setattr(recipe_module, "RECIPE_FOLDER", here)
    evaluate = mhla_hf.evaluate

    def judge(folders, recipe):
        read_score_recipe(recipe)
        small = {"lengths": [128], "depths": [0, 100], "items": 2}
        return evaluate(folders, ["codes_recall_*"], recipe="recall", settings=small, progress=False)

    monkeypatch.setattr(mhla_hf, "evaluate", judge)
    pushed = []
    monkeypatch.setattr(mhla_hf, "push", lambda *names, **options: pushed.append((names, options)))
    names = run("smollm2-mhla", "mhla_hf.distill(")
    assert len(names["model"].config.mhla["layers"]) == 4 and Path("smollm2-mhla/modeling_mhla.py").is_file()
    assert pushed == [(("my-mhla", "me/my-mhla"), {"base_model": BASE})]
    record = json.loads(Path("my-mhla/train.json").read_text())
    assert record["steps"] == 6 and record["mixed_precision"] == "bf16"
    for name, value in load_file("my-mhla/model.safetensors").items():
        assert value.dtype == (torch.float32 if ".mixing." in name else torch.bfloat16), name
    assert {value.dtype for value in names["teacher"].parameters()} == {torch.bfloat16}
    model = AutoModelForCausalLM.from_pretrained("my-mhla", trust_remote_code=True)
    assert model.dtype == torch.bfloat16
    torch.testing.assert_close(model.state_dict(), names["student"].state_dict(), rtol=0, atol=0)
    before = AutoModelForCausalLM.from_pretrained(BASE).state_dict()
    chosen = model.config.mhla
    assert len(chosen["layers"]) == 5 and model.config.mhla_measured["softmax_heads"] == {}
    name = f"model.layers.{chosen['layers'][0]}.self_attn.q_proj.weight"
    assert not torch.equal(model.state_dict()[name], before[name])


def test_a_prompt_longer_than_the_window(here, capsys):
    """The folder alone, with its tokenizer, writes what the block printed."""
    save_llama(here / BASE, dtype=torch.bfloat16, **LLAMA)
    names = run("smollm2-mhla", prompt="Gravity is " * 60)
    printed, longest = capsys.readouterr().out, 2 * names["model"].config.mhla["block_size"]
    assert names["inputs"]["input_ids"].shape[1] > longest
    write = pipeline("text-generation", "smollm2-mhla", dtype="auto")
    assert write("Gravity is " * 60, max_new_tokens=40, do_sample=False)[0]["generated_text"] + "\n" == printed


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # read by PEFT
def test_an_adapter_is_here(here):
    """It fits a Llama of SmolLM2's sizes, and its card is for the same one."""
    (here / "model_cards").symlink_to(ROOT / "model_cards")
    sizes = {"num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3}
    save_llama(here / f"{BASE}-Instruct", dtype=torch.bfloat16, **sizes, head_dim=64, intermediate_size=8)
    model = run("load_adapter")["model"]
    gates = [x for name, x in model.state_dict().items() if ".mixing." in name]
    heads = model.config.mhla_measured["softmax_heads"]
    assert gates and all(bool(x.isfinite().all()) for x in gates) and sum(map(len, heads.values())) == 15
    card = (ROOT / "model_cards/checkpoints/smollm2-135m-instruct-mhla/README.md").read_text(encoding="utf-8")
    assert draw_heads(model.config.mhla_measured) in card


def test_pipelines_and_classifiers(here):
    PIPELINES["wan"]().to(torch.bfloat16).save_pretrained("Wan-AI/Wan2.1-T2V-1.3B-Diffusers")
    softmax_tower("ViTForImageClassification").save_pretrained("facebook/deit-small-patch16-224")
    assert type(run("WanPipeline")["pipe"].transformer).__name__ == "MHLAWanTransformer3DModel"
