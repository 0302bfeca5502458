"""README's Python blocks run as they stand, on small stand-ins that lie where its Hub ids point, in the real dtypes."""

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
from transformers import AutoModelForCausalLM

import mhla_hf
from mhla_hf.evaluation.runner import read_score_recipe
from mhla_hf.training import start

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
LLAMA = {"num_key_value_heads": 1, "num_hidden_layers": 5, "max_position_embeddings": 256}
RECIPE = "conversion/recipes/language_llama_lite.yaml"


def run(*marks):
    """The blocks that hold these texts, one after the other, as one program after the first line; returns its names."""
    names = {"mhla_hf": mhla_hf}
    for mark in marks:
        exec(compile(next(block for block in BLOCKS if mark in block), "README.md", "exec"), names)
    return names


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_convert_distil_share(here, monkeypatch):
    """The recipe that it names but for its length; for the tasks, which have to be fetched, recall stands in."""
    save_llama(here / "meta-llama" / "Llama-3.2-1B", dtype=torch.bfloat16, **LLAMA)
    (here / "train.txt").write_text(TRAINING)
    recipe = yaml.safe_load((ROOT / RECIPE).read_text(encoding="utf-8"))
    for stage in recipe["stages"]:
        stage |= {"steps": 3, "warmup": 1, "seq_len": 64}
    (here / RECIPE).parent.mkdir(parents=True)
    (here / RECIPE).write_text(yaml.safe_dump(recipe))
    monkeypatch.setattr(start, "ROWS", 1)
    evaluate = mhla_hf.evaluate

    def judge(folders, recipe):
        read_score_recipe(recipe)
        small = {"lengths": [128], "depths": [0, 100], "items": 2}
        return evaluate(folders, ["needle_recall_*"], recipe="recall", settings=small, progress=False)

    monkeypatch.setattr(mhla_hf, "evaluate", judge)
    names = run("mhla_hf.distill(", 'from_pretrained("llama-mhla"')
    record = json.loads(Path("llama-mhla/train.json").read_text())
    assert record["steps"] == 6 and record["mixed_precision"] == "bf16"
    for name, value in load_file("llama-mhla/model.safetensors").items():
        assert value.dtype == (torch.float32 if ".mixing." in name else torch.bfloat16), name
    assert {value.dtype for value in names["teacher"].parameters()} == {torch.bfloat16}
    assert names["model"].dtype == torch.bfloat16
    torch.testing.assert_close(names["model"].state_dict(), names["student"].state_dict(), rtol=0, atol=0)
    before = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.2-1B").state_dict()
    chosen = names["model"].config.mhla
    assert len(chosen["layers"]) == 1 and names["model"].config.mhla_measured["choice"]["layers"] == chosen["layers"]
    name = f"model.layers.{chosen['layers'][0]}.self_attn.q_proj.weight"
    assert not torch.equal(names["model"].state_dict()[name], before[name])


def test_images_and_video(here, monkeypatch):
    pipe = PIPELINES["wan"]()
    pipe.to(torch.bfloat16).save_pretrained("Wan-AI/Wan2.1-T2V-1.3B-Diffusers")
    monkeypatch.setattr(mhla_hf, "push", lambda pipe, name, base_model: pipe.save_pretrained(name))
    assert type(run("WanPipeline")["pipe"].transformer).__name__ == "MHLAWanTransformer3DModel"


def test_image_classifiers(here):
    softmax_tower("ViTForImageClassification").save_pretrained("facebook/deit-small-patch16-224")
    softmax_tower("SiglipVisionModel").save_pretrained("google/siglip-base-patch16-224")
    run("google/siglip")
