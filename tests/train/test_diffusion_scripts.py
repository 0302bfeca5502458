"""conversion/wan.py, sana.py and dit.py as a user runs them, on tiny pipelines; their recipes."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import save_file
from tiny_pipelines import PIPELINES, generate

from mhla_hf.models.dit_transformer import dit_preset
from mhla_hf.nn.settings import MHLASettings
from mhla_hf.training.recipe import read_recipe

ROOT = Path(__file__).parents[2]
RECIPES = [path for path in sorted((ROOT / "conversion" / "recipes").glob("*.yaml")) if "diffusion" in path.read_text()]
MATCH = "{name: match, loss: prediction, steps: 2, lr: 1e-3, batch_size: 2, sampling_steps: 2, SIZE}"
TRANSFER = (
    "{name: transfer, loss: transfer, trainable: mhla, steps: 2, lr: 1e-3, batch_size: 2, sampling_steps: 2, SIZE}"
)
TRAIN = "{name: train, loss: denoising, steps: 2, lr: 1e-3, batch_size: 2}"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_our_recipes_are_sound(path):
    recipe = read_recipe(path)
    assert recipe.about
    assert recipe.base
    settings = dict(recipe.settings)
    if "preset" in settings:
        dit_preset(settings["preset"])
        settings = settings["mhla"]
    assert MHLASettings(**settings).layout
    assert all(stage.loss != "transfer" for stage in recipe.stages[1:])
    assert all(stage.batch_size % (8 * stage.grad_accum) == 0 or stage.grad_accum == 1 for stage in recipe.stages)


def test_recipes_hold_the_papers_settings():
    recipes = {path.stem: read_recipe(path).stages[0] for path in RECIPES}
    assert len(recipes) >= 6
    wan, sana, dit = (recipes[f"{name}_paper"] for name in ("wan", "sana", "dit"))
    assert (wan.size, wan.lr, wan.eps, wan.max_grad_norm, wan.shift) == ([81, 480, 800], 2e-5, 1e-10, 0.1, 3.0)
    assert (wan.timesteps, wan.batch_size, wan.loss, wan.drop_condition) == ("logit-normal", 32, "denoising", 0.1)
    assert (sana.steps, sana.batch_size) == (40_000, 256)
    for stage in (dit, recipes["dit_finetune"]):
        assert (stage.steps, stage.lr, stage.batch_size, stage.schedule) == (400_000, 1e-4, 256, "constant")


def script(name):
    """A script of conversion/ as a module."""
    spec = importlib.util.spec_from_file_location(f"script_{name}", ROOT / "conversion" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("family", "stages", "size"),
    [("wan", (TRANSFER, MATCH), "size: [9, 64, 80]"), ("sana", (MATCH,), "size: [32, 32]"), ("dit", (TRAIN,), "")],
)
def test_from_a_pipeline_to_a_card(family, stages, size, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "conversion")
    PIPELINES[family]().save_pretrained(tmp_path / "base")
    recipe, data = tmp_path / "short.yaml", tmp_path / "prompts.txt"
    layout = "[1, 2, 2]" if family == "wan" else "[2, 2]"
    settings = f"{{layers: [1], layout: {layout}}}"
    data.write_text("a cat\n\na dog walks\n")
    if family == "dit":
        settings = "{preset: DiT-S/8, input_size: 16, out_channels: 4, num_layers: 1, mhla: {layout: [2, 2], cpe: 3}}"
        (data := tmp_path / "latents").mkdir()
        save_file(latents(), data / "0.safetensors")
    lines = ", ".join(stages).replace("SIZE", size)
    recipe.write_text(f"task: diffusion\nsettings: {settings}\nstages: [{lines}]\n")
    out = tmp_path / "mine"
    arguments = ["--recipe", recipe, "--model", tmp_path / "base", "--data", data, "--out", out, "--license", "mit"]
    script(family).main(list(map(str, arguments)))
    pipe = DiffusionPipeline.from_pretrained(out, trust_remote_code=True, dtype=torch.float32)
    assert type(pipe.transformer).__name__.startswith("MHLA")
    assert generate(pipe).isfinite().all()
    assert "MHLA" in (out / "README.md").read_text()
    record = json.loads((out / "train.json").read_text())
    assert str(tmp_path) not in json.dumps({key: value for key, value in record.items() if key != "command"})
    script(family).main(list(map(str, arguments)))
    assert "finished already: nothing to do" in capsys.readouterr().err


@pytest.fixture
def short(tmp_path):
    """Arguments of dit.py for two steps on a tiny pipeline in a folder; the recipe names another one as its base."""
    PIPELINES["dit"]().save_pretrained(tmp_path / "base")
    (tmp_path / "latents").mkdir()
    save_file(latents(), tmp_path / "latents" / "0.safetensors")
    settings = "{preset: DiT-S/8, input_size: 16, out_channels: 4, num_layers: 1, mhla: {layout: [2, 2], cpe: 3}}"
    recipe = f"task: diffusion\nbase: facebook/DiT-XL-2-256\nsettings: {settings}\nstages: [{TRAIN}]\n"
    (tmp_path / "short.yaml").write_text(recipe)
    places = {"recipe": "short.yaml", "model": "base", "data": "latents", "out": "mine"}
    return [part for key, place in places.items() for part in (f"--{key}", str(tmp_path / place))]


def test_the_card_names_the_model_that_was_given(short, tmp_path, monkeypatch):
    """Not the recipe's base, and the license of the folder's own card."""
    monkeypatch.syspath_prepend(ROOT / "conversion")
    (tmp_path / "base" / "README.md").write_text(
        "---\nlicense: other\nlicense_name: ours\nlicense_link: https://example.org/ours\n---\n# Base\n"
    )
    script("dit").main(short)
    card = (tmp_path / "mine" / "README.md").read_text()
    assert "facebook" not in card and "license_name: ours\nlicense_link: https://example.org/ours" in card


def test_a_license_that_is_missing_is_missed_before_training(short, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "conversion")
    with pytest.raises(ValueError, match="license is missing"):
        script("dit").main(short)
    assert not list(tmp_path.glob("mine*"))


def latents():
    return {"latents": torch.randn(4, 4, 16, 16), "class_labels": torch.arange(4)}


def test_bad_input_is_one_sentence(tmp_path):
    PIPELINES["wan"]().save_pretrained(tmp_path / "base")
    command = [sys.executable, str(ROOT / "conversion" / "wan.py"), "--model", str(tmp_path / "base")]
    command += ["--data", str(tmp_path / "none.txt"), "--out", str(tmp_path / "out"), "--license", "mit"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"wan.py: data: there is no file '{tmp_path / 'none.txt'}'"
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
