"""Every recipe that is shipped can be read, names what it starts from, and holds settings that make a model."""

import pytest
import torch

import mhla_hf
from mhla_hf.models.diffusion.dit_transformer import dit_preset
from mhla_hf.models.language.configuration import MHLAConfig
from mhla_hf.nn.settings import MHLASettings
from mhla_hf.training.recipe import read_recipe, recipe_names


@pytest.mark.parametrize("name", recipe_names())
def test_our_recipes_are_sound(name):
    recipe = read_recipe(name)
    assert len(recipe.about) > 50 and all(stage.loss != "transfer" for stage in recipe.stages[1:])
    settings = dict(recipe.settings)
    preset = settings.pop("preset", None)
    if recipe.task == "language" and preset:
        assert recipe.tokenizer and MHLAConfig.preset(preset, **settings)
    elif recipe.task == "images" and preset:
        with torch.device("meta"):
            model = mhla_hf.MHLAForImageClassification(mhla_hf.MHLAVisionConfig.preset(preset, **settings))
        assert model.config.num_labels == 1000
    elif preset:
        assert recipe.base and dit_preset(preset) and MHLASettings(**settings["mhla"]).layout
    else:
        assert (recipe.base or name in ("language_cpu", "encoder")) and MHLASettings(**settings)
        assert recipe.task != "diffusion" or settings["layout"]


def test_recipes_hold_the_papers_settings():
    first = {name: read_recipe(name).stages[0] for name in recipe_names()}
    wan, sana = first["wan_paper"], first["sana_paper"]
    assert (wan.size, wan.lr, wan.eps, wan.max_grad_norm, wan.shift) == ([81, 480, 800], 2e-5, 1e-10, 0.1, 3.0)
    assert (wan.timesteps, wan.batch_size, wan.loss, wan.drop_condition) == ("logit-normal", 32, "denoising", 0.1)
    assert (sana.steps, sana.batch_size) == (40_000, 256)
    for stage in (first["dit_paper"], first["dit_finetune"]):
        assert (stage.steps, stage.lr, stage.batch_size, stage.schedule) == (400_000, 1e-4, 256, "constant")
    for stage in (first["image_deit_tiny_scratch"], first["image_vlt_tiny_scratch"]):
        assert (stage.batch_size, stage.lr, stage.steps) == (1024, 1e-3, round(300 * 1_281_167 / 1024))
        assert stage.ema and stage.mixup and stage.cutmix and stage.erase
