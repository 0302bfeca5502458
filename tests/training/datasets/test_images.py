"""Images as the model's processor and the model's labels want them: sources, numbering of classes, folders in halves."""

import copy

import datasets
import numpy
import pytest
import torch
from PIL import Image
from tools.small_towers import save_photos, softmax_tower
from transformers import CLIPImageProcessorPil, ViTImageProcessorPil

import mhla_hf
from mhla_hf.training.datasets.images import ImageReader, LabeledImages, find_output_size, open_images
from mhla_hf.training.recipe import ImageStage
from mhla_hf.training.tasks.images import ImageTask

BOTH = ViTImageProcessorPil(size={"height": 32, "width": 32})
PROCESSORS = [BOTH, CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 32, "width": 40})]


def stage(**changes):
    return ImageStage(**{"name": "train", "loss": "labels", "steps": 2, "lr": 1e-3, "batch_size": 4, **changes})


def test_tensors_a_folder_and_a_dataset_are_the_same_images(tmp_path, monkeypatch):
    images, labels = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8), torch.tensor([0, 0, 1, 2])
    rows = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in images]
    for number, (row, label) in enumerate(zip(rows, labels, strict=True)):
        (tmp_path / "data" / "abc"[label]).mkdir(parents=True, exist_ok=True)
        row.save(tmp_path / "data" / "abc"[label] / f"{number}.png")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list("abc"))})
    table, asked = datasets.Dataset.from_dict({"image": rows, "label": labels.tolist()}, features=features), []
    monkeypatch.setattr(datasets, "load_dataset", lambda *place, **more: asked.append((*place, more["split"])) or table)
    opened = [open_images(data) for data in ((images, labels), tmp_path / "data", table, "owner/name:small")]
    open_images("owner/name", split="test")
    assert asked == [("owner/name", "small", "train"), ("owner/name", None, "test")]
    for pictures in opened:
        assert pictures.labels.tolist() == labels.tolist() and pictures.class_names in (None, ["a", "b", "c"])
        for number in range(4):
            assert numpy.array_equal(pictures.image(number, 3), rows[number])
            assert pictures.image(number, 1).mode == "L"


def test_without_labels_images_may_be_anywhere(tmp_path):
    labeled = open_images(save_photos(tmp_path / "data", {"a": 3, "b": 2}))
    opened = open_images(tmp_path / "data", labeled=False)
    assert opened.items == labeled.items and opened.class_names is None and not opened.labels.any()
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "a").symlink_to(tmp_path / "data" / "a")
    opened.image(0, 3).save(tmp_path / "linked" / "one.png")
    names = [path.name for path in open_images(tmp_path / "linked", labeled=False).items]
    assert names == [*(path.name for path in labeled.items[:3]), "one.png"]
    table = datasets.Dataset.from_dict({"image": [opened.image(0, 3)]}, datasets.Features({"image": datasets.Image()}))
    assert len(open_images(table, labeled=False)) == 1
    with pytest.raises(ValueError, match="expected a column of images and one of labels"):
        open_images(table)


@pytest.mark.parametrize("processor", PROCESSORS, ids=lambda processor: type(processor).__name__)
def test_whole_images_are_what_the_processor_makes_of_them(processor, tmp_path):
    pictures = open_images(save_photos(tmp_path, {"a": 3, "b": 2}))
    wanted = processor(images=[Image.open(path) for path in pictures.items], return_tensors="pt")["pixel_values"]
    assert find_output_size(processor, 3) == wanted.shape[2:]
    for changes in ({}, {"crop": 0.3}):
        reader = ImageReader(pictures, stage(**changes), (0, 0), processor, 3, 2)
        order = [reader.shuffled(number, 5) for number in range(5)]
        pixels, _ = reader.take(5, slice(0, 5))
        assert pixels.shape == wanted.shape and torch.equal(pixels, wanted[order]) is not bool(changes)
        reader.close()


def test_what_is_refused_of_files_and_processors(tmp_path):
    with pytest.raises(ValueError, match=r"processor: got CLIP.*, expected one that makes images of one height and"):
        find_output_size(CLIPImageProcessorPil(size={"shortest_edge": 32}, do_center_crop=False), 3)
    with pytest.raises(ValueError, match="which holds no images, expected a folder of images"):
        open_images(tmp_path)
    data = save_photos(tmp_path / "pets", {"test/a": 1, "test/b": 1})
    with pytest.raises(ValueError, match="pets' with 'test' and nothing to train on, expected train/CLASS"):
        open_images(data)
    assert open_images(data, split="test").class_names == ["a", "b"]
    (data / "test" / "a" / "0.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"the image '.*0\.png', expected one that can be read"):
        open_images(data, split="test").image(0, 3)


def always_the_first(names):
    """A classifier that says class 0, whatever it sees."""
    model = softmax_tower("ViTForImageClassification", num_labels=len(names))
    model.config.id2label = dict(enumerate(names))
    model.config.label2id = {name: number for number, name in enumerate(names)}
    model.classifier.weight.data.zero_()
    model.classifier.bias.data = torch.arange(len(names), 0, -1.0)
    return model


def opened(model, data, teacher=None, test=None, **changes):
    """The task with its data open, and the pictures."""
    task = ImageTask(model, teacher, processor=BOTH, test=test)
    task.check([stage(**changes)])
    return task, task.open(data, [stage(**changes)])


def test_folders_are_numbered_as_the_model_numbers_its_labels(tmp_path):
    data = save_photos(tmp_path / "photos", {"cat": 1, "dog": 8})
    model = always_the_first(["dog", "cat"])
    task, pictures = opened(model, data, test=data)
    assert pictures.labels.tolist() == [1] + [0] * 8
    assert task.evaluate()["test_accuracy"] == pytest.approx(8 / 9)
    with pytest.raises(ValueError, match="data: got 'other' with the class 'emu', expected only classes of the model"):
        opened(model, save_photos(tmp_path / "other", {"cat": 1, "emu": 1}))
    with pytest.raises(ValueError, match="3 classes for a model with 2 labels"):
        opened(model, save_photos(tmp_path / "third", {"x": 1, "y": 1, "z": 1}))
    blank = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    hidden = LabeledImages(blank, [-1, 1], "hidden", ["cat", "dog"])  # as on the Hub
    with pytest.raises(ValueError, match="'hidden' with labels -1 to 1, expected 0 to 1"):
        opened(model, hidden)


def test_classes_do_not_matter_where_no_label_is_read(tmp_path):
    model = always_the_first(["dog", "cat"])
    teacher, data = copy.deepcopy(model), save_photos(tmp_path / "any", {"x": 1, "y": 1, "z": 1})
    mhla_hf.convert(model)
    task, _ = opened(model, data, teacher, save_photos(tmp_path / "test", {"cat": 1, "dog": 3}), loss="logits")
    assert task.test_images.labels.tolist() == [1, 0, 0, 0]
    with pytest.raises(ValueError, match="3 classes for a model with 2 labels"):
        opened(model, data, teacher, loss="logits", ce_weight=0.1)


def test_test_classes_have_the_numbers_of_the_training_classes(tmp_path):
    data = save_photos(tmp_path / "photos", {"train/a": 2, "train/b": 1, "train/c": 1, "test/b": 2, "test/c": 1})
    model = softmax_tower("ViTForImageClassification", num_labels=3)
    task, pictures = opened(model, data, test=data)
    assert pictures.labels.tolist() == [0, 0, 1, 2] and task.test_images.labels.tolist() == [1, 1, 2]
    other = save_photos(tmp_path / "other", {"test/b": 1, "test/d": 1})
    with pytest.raises(
        ValueError, match="test: got 'other' with the class 'd', expected only classes of the model and"
    ):
        opened(model, data, test=other)
