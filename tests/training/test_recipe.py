"""Recipes and stages: what they mean and what they refuse."""

from pathlib import Path

import pytest

from mhla_hf.models.configuration import MHLAConfig
from mhla_hf.nn.settings import MHLASettings
from mhla_hf.training.recipe import DiffusionStage, ImageStage, Stage, make_stages, read_recipe

RECIPES = sorted((Path(__file__).parents[2] / "conversion" / "recipes").glob("language*.yaml"))
VIDEO = {"name": "a", "loss": "prediction", "steps": 1, "lr": 1e-3}
IMAGES = {"name": "a", "loss": "labels", "steps": 1, "lr": 1e-3}
GOOD = {"name": "a", "loss": "lm", "steps": 10, "lr": 1e-3}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_our_recipes_are_sound(path):
    recipe = read_recipe(path)
    assert recipe.about
    if "preset" in recipe.settings:
        assert recipe.tokenizer
        MHLAConfig.preset(**{("name" if key == "preset" else key): value for key, value in recipe.settings.items()})
    else:
        MHLASettings(**recipe.settings)
    assert all(stage.loss != "transfer" for stage in recipe.stages[1:])


def test_there_are_recipes():
    assert len(RECIPES) >= 4


@pytest.mark.parametrize(("schedule", "at_half", "at_end"), [("cosine", 0.55, 0.1), ("linear", 0.55, 0.1)])
def test_schedule(schedule, at_half, at_end):
    stage = Stage("a", "lm", 110, 1.0, warmup=10, schedule=schedule, lr_end=0.1)
    assert [stage.lr_factor(step) for step in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])
    assert stage.lr_factor(10) == pytest.approx(1.0)
    assert stage.lr_factor(60) == pytest.approx(at_half)
    assert stage.lr_factor(110) == pytest.approx(at_end)
    assert Stage("a", "lm", 110, 1.0, schedule="constant").lr_factor(109) == 1.0


def test_yaml_numbers_without_a_point(tmp_path):
    file = tmp_path / "r.yaml"
    file.write_text("stages:\n- {name: a, loss: lm, steps: 10, lr: 1e-3, weight_decay: 1E-2}\nrun: {save_every: 5}\n")
    recipe = read_recipe(file)
    assert recipe.stages == (Stage("a", "lm", 10, 0.001, weight_decay=0.01),)
    assert recipe.run == {"save_every": 5}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": ""}, "their names are ''; expected different ones"),
        ({"loss": "mse"}, "loss is 'mse'; expected one of .'transfer', 'logits', 'stored', 'lm'."),
        ({"steps": 0}, "steps is 0; expected a whole number of at least 1"),
        ({"steps": 2.5}, "steps is 2.5; expected int"),
        ({"steps": True}, "steps is True; expected int"),
        ({"lr": 0}, "lr is 0; expected a number above 0"),
        ({"lr": "fast"}, "lr is 'fast'; expected int . float"),
        ({"lr": float("nan")}, "lr is nan; expected a number"),
        ({"lr_mhla": -1}, "lr_mhla is -1; expected a number above 0"),
        ({"seq_len": 1}, "seq_len is 1; expected a whole number of at least 2"),
        ({"trainable": "heads"}, "trainable is 'heads'; expected one of .'mhla', 'attention', 'all'."),
        ({"schedule": "wsd"}, "schedule is 'wsd'; expected one of .'cosine', 'linear', 'constant'."),
        ({"lr_end": 2}, "lr_end is 2; expected a number from 0 to 1"),
        ({"beta2": 1}, "beta2 is 1; expected a number of at least 0 and below 1"),
        ({"temperature": 0}, "temperature is 0; expected a number above 0"),
        ({"ce_weight": -0.1}, "ce_weight is -0.1; expected a number of at least 0"),
        ({"batch_size": 6, "grad_accum": 4}, "batch_size 6 cannot be cut into grad_accum 4 equal parts"),
        ({"loss": "transfer"}, "expected 'mhla' or 'attention'"),
        ({"learning_rate": 1}, "unknown 'learning_rate'; expected name, loss, steps, lr"),
    ],
)
def test_bad_stage(change, words):
    with pytest.raises(ValueError, match=words) as caught:
        make_stages([GOOD | change])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ([], "stages: got ..; expected a list of Stage or of mappings, at least one"),
        ("lm", "stages: got 'lm'; expected a list"),
        (["lm"], "stage 1: got 'lm'; expected a mapping"),
        ([GOOD, GOOD], "their names are 'a', 'a'; expected different ones"),
        ([{"name": "a", "loss": "lm", "steps": 1}], "stage 'a': lr is missing"),
    ],
)
def test_bad_stages(stages, words):
    with pytest.raises(ValueError, match=words):
        make_stages(stages)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "is not a file; expected a YAML file"),
        ("stages: [", "is not YAML"),
        ("", "got None; expected a mapping"),
        ("- a", "got .'a'.; expected a mapping"),
        ("about: x", "stages is missing"),
        ("stages: [{name: a, loss: lm, steps: 1, lr: 1}]\nstage: 2", "unknown 'stage'"),
        ("stages: [{name: a, loss: lm, steps: 1, lr: 1}]\nrun: {precision: 16}", "run: unknown 'precision'"),
        ("stages: [{name: a, loss: lm, steps: 1, lr: 1}]\nrun: {save_every: often}", "save_every is 'often'"),
        ("stages: [{name: a, loss: lm, steps: 1, lr: 1}]\nsettings: all", "settings is 'all'; expected dict"),
        ("stages: [{name: a, loss: lm, steps: 1, lr: 1}]\ndata: 7", "data is 7; expected str . None"),
    ],
)
def test_bad_recipe(tmp_path, text, words):
    file = tmp_path / "recipe.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=words) as caught:
        read_recipe(file)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        (DiffusionStage, {"size": 480}, r"size is 480; expected list . tuple . None"),
        (DiffusionStage, {"size": [0, 4]}, r"size is \[0, 4\]; expected \[rows, columns\] or"),
        (DiffusionStage, {"shift": 0}, "shift is 0; expected a number above 0"),
        (DiffusionStage, {"timesteps": "cosine"}, "timesteps is 'cosine'; expected one of .'logit-normal', 'uniform'"),
        (DiffusionStage, {"drop_condition": 2}, "drop_condition is 2; expected a number from 0 to 1"),
        (DiffusionStage, {"lora_rank": 0}, "lora_rank is 0; expected a whole number of at least 1"),
        (DiffusionStage, {"loss": "transfer", "trainable": "lora"}, "expected 'mhla' or 'attention'"),
        (DiffusionStage, {"loss": "lm"}, "loss is 'lm'; expected one of .'transfer'"),
        (ImageStage, {"size": 0}, "size is 0"),
        (ImageStage, {"crop": 1.5}, "crop is 1.5"),
        (ImageStage, {"mixup": -1}, "mixup is -1"),
        (ImageStage, {"shift": 1.5}, "shift is 1.5"),
    ],
)
def test_bad_stage_of_other_tasks(kind, change, words):
    """Made from a mapping, or by a person."""
    values = (VIDEO if kind is DiffusionStage else IMAGES) | change
    for make in (lambda: make_stages([values], kind), lambda: kind(**values)):
        with pytest.raises(ValueError, match=words) as caught:
            make()
        assert "\n" not in str(caught.value)
