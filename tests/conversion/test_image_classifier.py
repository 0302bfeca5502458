"""conversion/image_classifier.py as a user runs it, and the recipes of image models."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from small_towers import softmax_tower
from transformers import (
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    SiglipConfig,
    SiglipImageProcessorPil,
    SiglipModel,
    ViTImageProcessorPil,
)

import mhla_hf
from mhla_hf.training.recipe import read_recipe

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "conversion" / "recipes").glob("image*.yaml"))


def script(name):
    """A script of conversion/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "conversion" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(*arguments):
    return script("image_classifier").main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Twelve pictures in three classes, in a folder `train`, and a recipe of two steps."""
    place = tmp_path_factory.mktemp("images")
    for number in range(12):
        name = ("ant", "bee", "cat")[number % 3]
        (place / "data" / "train" / name).mkdir(parents=True, exist_ok=True)
        picture = Image.new("RGB", (40 + number, 30), ((number % 3) * 100, number * 20, 50))
        picture.save(place / "data" / "train" / name / f"{number}.png")
    stage = "{name: a, loss: LOSS, steps: 2, lr: 1e-3, batch_size: 4, crop: 0.5, flip: 0.5, erase: 1, mixup: 0.8, cutmix: 1}"
    colors = "num_channels: 3, image_mean: null, image_std: null, hidden_size: 24"
    scratch = f"task: images\nsettings: {{preset: digits, {colors}}}\n"
    (place / "scratch.yaml").write_text(f"{scratch}stages: [{stage.replace('LOSS', 'labels')}]\n")
    transfer = "{name: t, loss: transfer, trainable: mhla, steps: 2, lr: 1e-3, batch_size: 4}"
    (place / "distill.yaml").write_text(f"task: images\nstages: [{transfer}, {stage.replace('LOSS', 'logits')}]\n")
    features = stage.replace("LOSS", "features").replace("mixup: 0.8, cutmix: 1", "ema: 0.5")
    (place / "features.yaml").write_text(f"task: images\nstages: [{transfer}, {features}]\n")
    return place


def test_from_scratch_on_a_folder(folder, tmp_path):
    arguments = ["--recipe", folder / "scratch.yaml", "--images", folder / "data", "--out", tmp_path / "out"]
    train(*arguments, "--test", folder / "data" / "train")
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    assert type(model) is mhla_hf.MHLAForImageClassification
    assert model.config.id2label == {0: "ant", 1: "bee", 2: "cat"} and model.classifier.out_features == 3
    processor = AutoImageProcessor.from_pretrained(tmp_path / "out")
    assert processor(Image.new("RGB", (50, 60)), return_tensors="pt")["pixel_values"].shape == (1, 3, 32, 32)
    record = json.loads((tmp_path / "out" / "train.json").read_text())
    assert 0 <= record["history"][-1]["test_accuracy"] <= 1
    scores = mhla_hf.evaluate(
        str(tmp_path / "out"),
        recipe="table_2_imagenet",
        settings={"data": str(folder / "data" / "train")},
        progress=False,
    )
    (score,) = next(iter(scores.values()))
    assert score.metric == "acc" and score.samples == 12


def test_converted_and_distilled_without_labels(folder, tmp_path):
    softmax_tower("ViTForImageClassification").save_pretrained(tmp_path / "base")
    ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "base")
    arguments = ["--recipe", folder / "distill.yaml", "--images", folder / "data", "--model", tmp_path / "base"]
    train(*arguments, "--out", tmp_path / "out")
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    assert type(model).__name__ == "MHLAViTForImageClassification" and model.config.mhla["layers"] == [0, 1]
    assert AutoImageProcessor.from_pretrained(tmp_path / "out").size["height"] == 32


def siglip():
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {**small, "image_size": 32, "patch_size": 4}
    return SiglipModel(SiglipConfig(text_config={**small, "vocab_size": 20}, vision_config=vision))


@pytest.mark.parametrize("make", [siglip, lambda: softmax_tower("CLIPVisionModel")])
def test_a_tower_learns_its_features(make, folder, tmp_path):
    """Of a whole SigLIP its vision tower is taken, as `AutoModel` finds it afterwards."""
    make().save_pretrained(tmp_path / "base")
    SiglipImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "base")
    arguments = ["--images", folder / "data", "--model", tmp_path / "base", "--out", tmp_path / "out"]
    with pytest.raises(ValueError, match=r"image_features\.yaml"):
        train("--recipe", folder / "distill.yaml", *arguments)
    train("--recipe", folder / "features.yaml", *arguments)
    record = json.loads((tmp_path / "out" / "train.json").read_text())
    assert [made["name"] for made in record["stages"]] == ["t", "a"]
    tower = AutoModel.from_pretrained(tmp_path / "out")
    assert type(tower).__name__ in ("MHLASiglipVisionModel", "MHLACLIPVisionModel")


BAD = [
    (["--out", "x"], "digits.yaml", "--images is needed"),
    (["--images", "data"], "digits.yaml", "--out is needed"),
    (["--images", "data", "--out", "x"], "language_cpu.yaml", "expected task: images"),
    (["--images", "./none", "--out", "x"], "image_deit_tiny_scratch.yaml", "folder './none'"),
    (["--images", "./none", "--out", "x"], "none.yaml", "none.yaml"),
]


@pytest.mark.parametrize(("arguments", "recipe", "word"), BAD)
def test_what_is_said_of_bad_arguments(arguments, recipe, word, tmp_path, capsys):
    (tmp_path / "digits.yaml").write_text(
        "task: images\nsettings: {preset: digits}\nstages: [{name: a, loss: labels, steps: 1, lr: 1}]"
    )
    place = tmp_path if recipe in ("digits.yaml", "none.yaml") else ROOT / "conversion" / "recipes"
    with pytest.raises((ValueError, SystemExit)) as error:
        train("--recipe", place / recipe, *arguments)
    assert word in (str(error.value) if error.type is ValueError else capsys.readouterr().err)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_our_recipes_are_sound(path):
    recipe = read_recipe(path)
    assert recipe.task == "images" and len(recipe.about) > 50
    if "preset" in recipe.settings:
        settings = dict(recipe.settings)
        with torch.device("meta"):
            model = mhla_hf.MHLAForImageClassification(
                mhla_hf.MHLAVisionConfig.preset(settings.pop("preset"), **settings)
            )
        assert model.config.num_labels == 1000
        (stage,) = recipe.stages
        assert stage.batch_size == 1024 and stage.lr == 1e-3 and stage.ema
        assert stage.steps == round(300 * 1_281_167 / 1024) and stage.mixup and stage.cutmix and stage.erase
    else:
        wanted = "features" if path.stem == "image_features" else "logits"
        assert recipe.base and [stage.loss for stage in recipe.stages] == ["transfer", wanted]


def test_there_are_recipes():
    assert len(RECIPES) == 4
