"""Recipes and stages: what they mean and what they refuse."""

import pytest
import torch
from tools.small_models import refused

import mhla_hf
from mhla_hf.models.diffusion.dit_transformer import dit_preset
from mhla_hf.models.language.configuration import MHLAConfig
from mhla_hf.nn.settings import MHLASettings
from mhla_hf.training.recipe import DiffusionStage, EncoderStage, Stage, make_stages, read_recipe, recipe_names

GOOD = {"name": "a", "loss": "lm", "steps": 10, "lr": 1e-3}


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_schedule(schedule):
    stage = Stage("a", "lm", 110, 1.0, warmup=10, schedule=schedule, lr_end=0.1)
    factors = [stage.lr_factor(step) for step in (0, 4, 9, 10, 60, 110)]
    assert factors == pytest.approx([0.1, 0.5, 1.0, 1.0, 0.55, 0.1])
    assert Stage("a", "lm", 110, 1.0, schedule="constant").lr_factor(109) == 1.0


BAD = [
    (Stage, {"batch_size": 10**12}, "batch_size: got 1000000000000, expected a whole number from 1 to 1000000"),
    (Stage, {"loss": "transfer"}, "trainable: got 'all' with loss 'transfer', expected 'mhla' or 'attention'"),
    (Stage, {"loss": "logits", "top_k": 8, "temperature": 2}, "temperature: got 2 with top_k 8, expected 1"),
    (DiffusionStage, {"size": [0, 4]}, r"size: got \[0, 4\], expected \[rows, columns\] or"),
    (Stage, {"ema": 1}, "ema: got 1, expected a number of at least 0 and below 1"),
    (Stage, {"steps": True}, "steps: got True, expected int"),
    (EncoderStage, {"loss": "lm"}, r"stage 'a': loss: got 'lm', expected one of \['transfer', 'embeddings'\]"),
    (Stage, [], "stages: got .., expected a list of Stage or of mappings, at least one"),
    (Stage, ["lm"], "stage 1: got 'lm', expected a mapping"),
    (Stage, [{"name": "a", "loss": "lm", "steps": 1}], "lr: got nothing, expected a value"),
    (Stage, [GOOD, GOOD], "stages: got the names 'a', 'a', expected different, nonempty ones"),
]


@pytest.mark.parametrize("kind, change, words", BAD)
def test_bad_stage(kind, change, words):
    if isinstance(change, dict):
        change = [GOOD | {"loss": "lm" if kind is Stage else "prediction"} | change]
    with refused(match=words):
        make_stages(change, kind)


def test_a_recipe_of_a_file(tmp_path):
    file = tmp_path / "recipe.yaml"
    stages = "stages:\n- {name: a, loss: lm, steps: 10, lr: 1e-3, weight_decay: 1E-2}\n"
    file.write_text(f"{stages}run: {{save_every: 5}}\n")
    recipe = read_recipe(file)
    assert recipe.stages == (Stage("a", "lm", 10, 0.001, weight_decay=0.01),) and recipe.run == {"save_every": 5}
    file.write_text(f"{stages}run: {{precision: 16}}")
    with pytest.raises(ValueError, match="run: precision: got an unknown name"):
        read_recipe(file)


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
