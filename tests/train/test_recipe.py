"""Recipes and stages: what they mean and what they refuse."""

from pathlib import Path

import pytest

from mhla_hf.models.configuration import MHLAConfig
from mhla_hf.nn.settings import MHLASettings
from mhla_hf.training.recipe import Stage, make_stages, read_recipe

RECIPES = sorted((Path(__file__).parents[2] / "conversion" / "recipes").glob("language*.yaml"))
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
        ({"name": ""}, "name is ''; expected a non-empty text"),
        ({"loss": "mse"}, "loss is 'mse'; expected 'transfer', 'logits' or 'lm'"),
        ({"steps": 0}, "steps is 0; expected a whole number of at least 1"),
        ({"steps": 2.5}, "steps is 2.5; expected a whole number"),
        ({"steps": True}, "steps is True; expected a whole number"),
        ({"lr": 0}, "lr is 0; expected a number above 0"),
        ({"lr": "fast"}, "lr is 'fast'; expected a number"),
        ({"lr": float("nan")}, "lr is nan; expected a number"),
        ({"lr_mhla": -1}, "lr_mhla is -1; expected a number above 0"),
        ({"seq_len": 1}, "seq_len is 1; expected a whole number of at least 2"),
        ({"trainable": "heads"}, "trainable is 'heads'; expected 'mhla', 'attention' or 'all'"),
        ({"schedule": "wsd"}, "schedule is 'wsd'; expected 'cosine', 'linear' or 'constant'"),
        ({"lr_end": 2}, "lr_end is 2; expected a number from 0 to 1"),
        ({"beta2": 1}, "beta2 is 1; expected a number from 0 to 1"),
        ({"temperature": 0}, "temperature is 0; expected a number above 0"),
        ({"ce_weight": -0.1}, "ce_weight is -0.1; expected a number of at least 0"),
        ({"batch_size": 6, "grad_accum": 4}, "batch_size 6 cannot be cut into grad_accum 4 equal parts"),
        ({"loss": "transfer"}, "expected 'mhla' or 'attention'"),
        ({"learning_rate": 1}, "unknown key 'learning_rate'; expected one of name, loss, steps, lr"),
    ],
)
def test_bad_stage(change, words):
    with pytest.raises(ValueError, match=words) as caught:
        make_stages([GOOD | change])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("stages", "kind", "words"),
    [
        ([], ValueError, "the list is empty"),
        ("lm", TypeError, "got str; expected a list"),
        (["lm"], TypeError, "number 1 is a str"),
        ([GOOD, GOOD], ValueError, "'a' names 2 stages"),
        ([{"name": "a", "loss": "lm", "steps": 1}], ValueError, "stage 'a': lr is missing"),
    ],
)
def test_bad_stages(stages, kind, words):
    with pytest.raises(kind, match=words):
        make_stages(stages)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "is not a file; expected a YAML file"),
        ("stages: [", "is not YAML"),
        ("", "has no stages"),
        ("- a", "has no stages"),
        ("stages: [{name: a, loss: lm, steps: 1, lr: 1}]\nstage: 2", "unknown key 'stage'"),
        ("stages: [{name: a, loss: lm, steps: 1, lr: 1}]\nrun: {precision: 16}", "run: unknown key 'precision'"),
        ("stages: [{name: a, loss: lm, steps: 1, lr: 1}]\nrun: {save_every: often}", "save_every is 'often'"),
        ("stages: [{name: a, loss: lm, steps: 1, lr: 1}]\nsettings: all", "settings is 'all'; expected a mapping"),
        ("stages: [{name: a, loss: lm, steps: 1, lr: 1}]\ndata: 7", "data is 7; expected a text"),
    ],
)
def test_bad_recipe(tmp_path, text, words):
    file = tmp_path / "recipe.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=words) as caught:
        read_recipe(file)
    assert "\n" not in str(caught.value)
