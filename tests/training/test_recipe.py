"""Recipes and stages: what they mean and what they refuse."""

import pytest

from mhla_hf.training.recipe import DiffusionStage, ImageStage, Stage, make_stages, read_recipe

GOOD = {"name": "a", "loss": "lm", "steps": 10, "lr": 1e-3}
LINE = "stages: [{name: a, loss: lm, steps: 1, lr: 1}]\n"


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_schedule(schedule):
    stage = Stage("a", "lm", 110, 1.0, warmup=10, schedule=schedule, lr_end=0.1)
    factors = [stage.lr_factor(step) for step in (0, 4, 9, 10, 60, 110)]
    assert factors == pytest.approx([0.1, 0.5, 1.0, 1.0, 0.55, 0.1])
    assert Stage("a", "lm", 110, 1.0, schedule="constant").lr_factor(109) == 1.0


def test_a_recipe(tmp_path):
    file = tmp_path / "r.yaml"
    file.write_text("stages:\n- {name: a, loss: lm, steps: 10, lr: 1e-3, weight_decay: 1E-2}\nrun: {save_every: 5}\n")
    recipe = read_recipe(file)
    assert recipe.stages == (Stage("a", "lm", 10, 0.001, weight_decay=0.01),) and recipe.run == {"save_every": 5}


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        (Stage, {"name": ""}, "stages: got the names '', expected different ones"),
        (Stage, {"batch_size": 10**12}, "batch_size: got 1000000000000, expected a whole number from 1 to 1000000"),
        (Stage, {"loss": "transfer"}, "trainable: got 'all' with loss 'transfer', expected 'mhla' or 'attention'"),
        (
            Stage,
            {"loss": "logits", "top_k": 8, "temperature": 2},
            "temperature: got 2 with a KL divergence over the most likely tokens, expected 1",
        ),
        (DiffusionStage, {"size": [0, 4]}, r"size: got \[0, 4\], expected \[rows, columns\] or"),
        (ImageStage, {"crop": 1.5}, "crop: got 1.5, expected a number from 0 to 1"),
        (Stage, [], "stages: got .., expected a list of Stage or of mappings, at least one"),
        (Stage, [GOOD, GOOD], "stages: got the names 'a', 'a', expected different ones"),
    ],
)
def test_bad_stage(kind, change, words):
    if isinstance(change, dict):
        change = [GOOD | {"loss": {Stage: "lm", DiffusionStage: "prediction", ImageStage: "labels"}[kind]} | change]
    with pytest.raises(ValueError, match=words) as caught:
        make_stages(change, kind)
    assert "\n" not in str(caught.value)


def test_bad_recipe(tmp_path):
    with pytest.raises(ValueError, match="which is not a file, expected a YAML file"):
        read_recipe(tmp_path / "recipe.yaml")
    (tmp_path / "recipe.yaml").write_text(LINE + "run: {precision: 16}")
    with pytest.raises(ValueError, match="run: precision: got an unknown name"):
        read_recipe(tmp_path / "recipe.yaml")


def test_a_recipe_by_name_with_some_values_changed():
    changes = {"*.batch_size": 16, "distill.lr": 5e-5, "settings.block_size": 64, "run.save_every": 7}
    changes["data"] = "notes.txt"
    plain, recipe = read_recipe("language_llama_lite"), read_recipe("language_llama_lite", changes)
    assert [stage.batch_size for stage in recipe.stages] == [16, 16] and recipe.data == "notes.txt"
    assert [stage.lr for stage in recipe.stages] == [plain.stages[0].lr, 5e-5]
    assert recipe.settings == {**plain.settings, "block_size": 64} and recipe.run == {**plain.run, "save_every": 7}
    assert read_recipe(recipe) is recipe


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("distil.lr",
            r"set: got 'distil.lr', expected one of transfer.\*, distill.\*, settings.\*, run"),
        ("distill.rate", "stage 'distill': rate: got an unknown name, expected one of name, loss"),
        ("run.speed", "run: speed: got an unknown name"),
        ("colour", "colour: got an unknown name, expected one of stages, task"),
        ("distill.lr", "stage 'distill': lr: got 'x', expected"),
    ],
)  # fmt: skip
def test_bad_changes(place, words):
    with pytest.raises(ValueError, match=words):
        read_recipe("language_llama_lite", {place: "x"})
