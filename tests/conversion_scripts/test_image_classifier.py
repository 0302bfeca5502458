"""conversion/image_classifier.py as a user runs it."""

import json

import pytest
from tools.small_towers import save_photos, small_clip, softmax_tower
from transformers import AutoImageProcessor, AutoModel, AutoModelForImageClassification
from transformers import ViTImageProcessorPil as Processor

import mhla_hf


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Twelve pictures in three classes, in a folder `train`, and recipes of two steps."""
    place = tmp_path_factory.mktemp("images")
    save_photos(place / "data", {"train/ant": 4, "train/bee": 4, "train/cat": 4})
    stage = "{name: a, loss: LOSS, steps: 2, lr: 1e-3, batch_size: 4, crop: 0.5, flip: 0.5, erase: 1, mixup: 0.8, cutmix: 1}"
    colors = "num_channels: 3, image_mean: null, image_std: null, hidden_size: 24"
    scratch = f"task: images\nsettings: {{preset: digits, {colors}}}\n"
    (place / "scratch.yaml").write_text(f"{scratch}stages: [{stage.replace('LOSS', 'labels')}]\n")
    transfer = "{name: t, loss: transfer, trainable: mhla, steps: 2, lr: 1e-3, batch_size: 4}"
    for name, loss in (("distill", "logits"), ("features", "features")):
        (place / f"{name}.yaml").write_text(f"task: images\nstages: [{transfer}, {stage.replace('LOSS', loss)}]\n")
    return place


def test_from_scratch_on_a_folder(run, folder, tmp_path):
    data, out = folder / "data", tmp_path / "out"
    arguments = ["--recipe", folder / "scratch.yaml", "--data", data, "--out", out, "--test", data / "train"]
    run("image_classifier", *arguments)
    model = AutoModelForImageClassification.from_pretrained(out)
    assert type(model) is mhla_hf.MHLAForImageClassification
    assert model.config.id2label == {0: "ant", 1: "bee", 2: "cat"} and model.classifier.out_features == 3
    history = json.loads((out / "train.json").read_text())["history"]
    settings = {"data": str(data / "train")}
    scores = mhla_hf.evaluate(str(out), recipe="table_2_imagenet", settings=settings, progress=False)
    (score,) = next(iter(scores.values()))
    assert (score.metric, score.samples, score.value) == ("acc", 12, history[-1]["test_accuracy"])


@pytest.mark.parametrize(
    ("make", "recipe", "name"),
    [(softmax_tower, "distill", "ViTForImageClassification"), (lambda _: small_clip(), "features", "CLIPVisionM")],
)
def test_converted_and_distilled_without_labels(run, refused, make, recipe, name, folder, tmp_path):
    """Of a whole CLIP its vision tower is taken, as `AutoModel` finds it afterwards; a tower has no classes to distill."""
    make(name).save_pretrained(tmp_path / "base")
    Processor(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "base")
    arguments = ["--data", folder / "data", "--model", tmp_path / "base", "--out", tmp_path / "out"]
    if recipe == "features":
        assert "such as image_features" in refused("image_classifier", "--recipe", folder / "distill.yaml", *arguments)
    run("image_classifier", "--recipe", folder / f"{recipe}.yaml", *arguments)
    record = json.loads((tmp_path / "out" / "train.json").read_text())
    assert [made["name"] for made in record["stages"]] == ["t", "a"]
    auto = AutoModel if recipe == "features" else AutoModelForImageClassification
    assert type(auto.from_pretrained(tmp_path / "out")).__name__.startswith(f"MHLA{name}")
    assert AutoImageProcessor.from_pretrained(tmp_path / "out").size["height"] == 32


def test_what_is_said_of_bad_arguments(refused):
    bad = ["--data", "./none", "--out", "x"]
    said = refused("image_classifier", "--recipe", "image_deit_tiny_scratch", *bad)
    assert "data: got './none', which does not exist" in said
    assert "expected task: images" in refused("image_classifier", "--recipe", "language_cpu", *bad)
