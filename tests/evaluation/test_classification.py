"""Image classifiers: the share of labeled images named right, scored once for its pictures and its processor.

Run: pytest tests/evaluation/test_classification.py
"""

import datasets
import numpy
import pytest
import torch
from PIL import Image
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessorPil

import mhla_hf
from mhla_hf.evaluation import images


class Square:
    """An image processor of one line."""

    version = "square"

    def __call__(self, images, return_tensors):
        arrays = [torch.from_numpy(numpy.array(image)).permute(2, 0, 1) / 255 for image in images]
        return {"pixel_values": torch.stack(arrays)}


class Negative(Square):
    """The same, upside down."""

    version = "negative"

    def __call__(self, images, return_tensors):
        return {"pixel_values": 1 - super().__call__(images, return_tensors)["pixel_values"]}


def save_pictures(folder, seed=1):
    """Four pictures of each of three classes."""
    random = numpy.random.default_rng(seed)
    for name in ("ant", "bee", "cat"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(4):
            image = Image.fromarray(random.integers(0, 255, (8, 8, 3), dtype=numpy.uint8))
            image.save(folder / name / f"{number}.png")


def small_vit(channels=3):
    torch.manual_seed(0)
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    small |= {"image_size": 8, "patch_size": 4, "num_channels": channels, "initializer_range": 3.0}
    return ViTForImageClassification(ViTConfig(**small, id2label={0: "cat", 1: "ant", 2: "bee"})).eval()


@pytest.mark.parametrize("channels", [1, 3])
def test_a_classifier_of_one_channel_sees_gray_pictures(tmp_path, channels):
    small_vit(channels).save_pretrained(tmp_path / "vit")
    normal = {"image_mean": [0.5] * channels, "image_std": [0.5] * channels}
    ViTImageProcessorPil(size={"height": 8, "width": 8}, **normal).save_pretrained(tmp_path / "vit")
    save_pictures(tmp_path / "data")
    options = {"recipe": "table_2_imagenet", "settings": {"data": str(tmp_path / "data")}, "progress": False}
    (record,) = mhla_hf.evaluate(tmp_path / "vit", **options)["vit"]
    assert 0 <= record.value <= 1 and record.samples == 12


def test_top_1_is_known_for_its_pictures_and_its_processor(tmp_path, monkeypatch):
    runs, true = [], images._count_right
    monkeypatch.setattr(images, "_count_right", lambda *given: runs.append(1) or true(*given))
    model, found = {"vit": small_vit()}, []

    def accuracy(processor=Square, data=tmp_path / "data"):
        settings = {"data": str(data), "processor": processor()}
        options = {"recipe": "table_2_imagenet", "output": tmp_path / "vit.json", "progress": False}
        (record,) = mhla_hf.evaluate(model, settings=settings, **options)["vit"]
        found.append(record.value)
        return len(runs)

    save_pictures(tmp_path / "data")
    assert accuracy() == accuracy() == 1
    file = tmp_path / "vit.json"
    kept = file.read_text()
    file.write_text(kept.replace(f'"value": {found[0]}', '"value": 0.12'))
    assert file.read_text() != kept and accuracy() == 2 and found.pop() == found[0]  # nobody's word is taken for it
    runs.pop()
    assert accuracy(Negative) == accuracy(Negative) == 2
    save_pictures(tmp_path / "data", seed=2)
    assert accuracy() == accuracy() == 3
    names = ["ant", "bee", "cat"]
    features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=names))

    def table():
        files = sorted((tmp_path / "data").rglob("*.png"))
        images = [{"bytes": file.read_bytes(), "path": None} for file in files]
        labels = [names.index(file.parent.name) for file in files]
        return datasets.Dataset.from_dict({"image": images, "label": labels}, features=features)

    monkeypatch.setattr(datasets, "load_dataset", lambda name, configuration, split: table())
    assert accuracy(data="some/data") == accuracy(data="some/data") == 4 and found[-1] == found[-3]
    save_pictures(tmp_path / "data", seed=3)
    assert accuracy(data="some/data") == 5


def test_top_1_is_the_share_of_images_named_right(tmp_path):
    save_pictures(tmp_path / "data")
    model = small_vit()
    labels = model.config.id2label
    settings = {"data": str(tmp_path / "data"), "processor": Square()}
    options = {"recipe": "table_2_imagenet", "settings": settings, "progress": False, "batch_size": 5}
    compared = mhla_hf.evaluate({"vit": model}, output=tmp_path / "vit.json", **options)
    (record,) = compared["vit"]
    right = 0
    for file in sorted((tmp_path / "data").rglob("*.png")):
        with torch.no_grad():
            said = model(**Square()([Image.open(file)], "pt")).logits.argmax().item()
        right += labels[said] == file.parent.name
    assert record.value == right / 12 and record.samples == 12 and 0 < record.value < 1
    assert record.stderr == pytest.approx((record.value * (1 - record.value) / 12) ** 0.5)
    assert f"| vit | {100 * record.value:.2f} ±" in compared.paper_table("markdown")
    assert len(mhla_hf.evaluate({"vit": model}, limit=3, **options)["vit"]) == 1
    (tmp_path / "data" / "dog").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "data" / "dog" / "0.png")
    with pytest.raises(ValueError, match="the model has no label 'dog'"):
        mhla_hf.evaluate({"vit": model}, **options)
