"""Pictures as the model's processor and the model's labels want them: cropping, numbering of classes, folders in halves."""

import copy

import numpy
import pytest
import torch
from PIL import Image
from small_towers import softmax_tower
from transformers import BitImageProcessorPil, CLIPImageProcessorPil, DeiTImageProcessorPil, ViTImageProcessorPil

import mhla_hf
from mhla_hf.training.images import ImageTask
from mhla_hf.training.pictures import PictureReader, Pictures, Preparation, open_pictures
from mhla_hf.training.recipe import ImageStage

PROCESSORS = {
    "both sides, no crop": ViTImageProcessorPil(size={"height": 32, "width": 32}),
    "both sides, then a crop": DeiTImageProcessorPil(
        size={"height": 36, "width": 36}, crop_size={"height": 32, "width": 32}
    ),
    "the shortest edge, then a crop": BitImageProcessorPil(
        size={"shortest_edge": 36}, crop_size={"height": 32, "width": 32}
    ),
    "a crop wider than the image": CLIPImageProcessorPil(
        size={"shortest_edge": 28}, crop_size={"height": 32, "width": 40}
    ),
    "not normalised": CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=32, do_normalize=False),
}


def stage(**changes):
    return ImageStage(**{"name": "train", "loss": "labels", "steps": 2, "lr": 1e-3, "batch_size": 4, **changes})


def photos(root, classes, split=None, side=(48, 40)):
    """Noise in one folder per class; classes: name -> how many."""
    random = numpy.random.default_rng(0)
    for name, count in classes.items():
        place = root / split / name if split else root / name
        place.mkdir(parents=True)
        for number in range(count):
            pixels = random.integers(0, 256, (side[1] + 3 * number, side[0], 3), dtype=numpy.uint8)
            Image.fromarray(pixels).save(place / f"{number}.png")
    return root


@pytest.mark.parametrize("name", PROCESSORS)
def test_whole_images_are_what_the_processor_makes_of_them(name, tmp_path):
    processor = PROCESSORS[name]
    pictures = open_pictures(photos(tmp_path, {"a": 3, "b": 2}))
    preparation = Preparation(processor.to_dict(), 3)
    images = [Image.open(path) for path in pictures.items]
    wanted = processor(images=images, return_tensors="pt")["pixel_values"]
    assert preparation.size == tuple(wanted.shape[2:])
    got = torch.stack([preparation.finish(preparation.whole(pictures, number)) for number in range(5)])
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)
    reader = PictureReader(pictures, stage(), (0, 0), preparation, 2)
    order = [reader.shuffled(number, 5) for number in range(5)]
    torch.testing.assert_close(reader.take(5, slice(0, 5))[0], wanted[order], rtol=0, atol=1e-5)
    reader.close()
    cut = PictureReader(pictures, stage(crop=0.3), (0, 0), preparation, 2)
    assert cut.take(5, slice(0, 5))[0].shape == wanted.shape
    cut.close()


def test_tensors_are_cropped_as_files_are(tmp_path):
    pictures = open_pictures(photos(tmp_path, {"a": 1}))
    pixels = torch.from_numpy(numpy.asarray(Image.open(pictures.items[0])).copy()).permute(2, 0, 1)[None]
    tensors = open_pictures((pixels, torch.zeros(1, dtype=torch.long)))
    preparation = Preparation(PROCESSORS["the shortest edge, then a crop"].to_dict(), 3)
    assert torch.equal(preparation.whole(tensors, 0), preparation.whole(pictures, 0))
    larger = preparation.whole(tensors, 0, (48, 48))
    assert larger.shape == (3, 48, 48) and preparation.whole(tensors, 0, (16, 16)).shape == (3, 16, 16)


@pytest.mark.parametrize(
    "values, said",
    [({"size": {"shortest_edge": 32}}, "give images of many shapes"),
     ({"size": {"height": 32, "width": 32}, "do_center_crop": True}, "crop_size None give images of many shapes"),
     ({"size": {"longest_edge": 32}}, "give images of many shapes; expected height, width or")],
)  # fmt: skip
def test_a_processor_that_gives_no_one_size_is_refused(values, said):
    with pytest.raises(ValueError, match=said):
        Preparation(values, 3)


def test_a_model_learns_and_is_judged_at_its_processors_crop(tmp_path):
    data = photos(tmp_path / "data", {"a": 4, "b": 4, "c": 2, "d": 2, "e": 2})
    student = softmax_tower("DeiTForImageClassification")
    mhla_hf.distill(
        mhla_hf.convert(student), data=data, test=data, out=tmp_path / "out", stages=[stage()], progress=False,
        processor=PROCESSORS["both sides, then a crop"],
    )  # fmt: skip
    assert (tmp_path / "out" / "train.json").is_file()


def always_the_first(names):
    """A classifier that says class 0, whatever it sees."""
    model = softmax_tower("ViTForImageClassification", num_labels=len(names))
    model.config.id2label = dict(enumerate(names))
    model.config.label2id = {name: number for number, name in enumerate(names)}
    with torch.no_grad():
        model.classifier.weight.zero_()
        model.classifier.bias.copy_(torch.arange(len(names), 0, -1))
    return model


def opened(model, data, teacher=None, test=None, **changes):
    """The task with its data open, and the pictures."""
    task = ImageTask(model, teacher, processor=PROCESSORS["both sides, no crop"], test=test)
    task.check([stage(**changes)])
    return task, task.open(data, [stage(**changes)])


def test_folders_are_numbered_as_the_model_numbers_its_labels(tmp_path):
    data = photos(tmp_path / "photos", {"cat": 1, "dog": 8})
    model = always_the_first(["dog", "cat"])
    task, pictures = opened(model, data, test=data)
    assert pictures.labels.tolist() == [1] + [0] * 8
    assert task.judge()["test_accuracy"] == pytest.approx(8 / 9)
    processor = PROCESSORS["both sides, no crop"]
    scores = mhla_hf.evaluate(
        {"dogs": model}, recipe="table_2_imagenet", settings={"data": str(data), "processor": processor}, progress=False
    )
    (score,) = scores["dogs"]
    assert score.value == pytest.approx(8 / 9)
    with pytest.raises(ValueError, match="no label 'emu', though it has others"):
        opened(model, photos(tmp_path / "other", {"cat": 1, "emu": 1}))
    with pytest.raises(ValueError, match="3 classes for a model with 2 labels"):
        opened(model, photos(tmp_path / "third", {"x": 1, "y": 1, "z": 1}))


def test_classes_do_not_matter_where_no_label_is_read(tmp_path):
    """A teacher's answers need pictures alone; a test set is still numbered by the model's own labels."""
    model = always_the_first(["dog", "cat"])
    teacher = copy.deepcopy(model)
    data = photos(tmp_path / "any", {"x": 1, "y": 1, "z": 1})
    test = photos(tmp_path / "test", {"cat": 1, "dog": 3})
    mhla_hf.convert(model)
    task, pictures = opened(model, data, teacher, test, loss="logits")
    reader = task.reader(pictures, stage(loss="logits"), 0, 0, None)
    assert reader.take(3, slice(0, 3))[1].shape == (3, 2)
    reader.close()
    assert task.pictures_of_test.labels.tolist() == [1, 0, 0, 0]
    with pytest.raises(ValueError, match="3 classes for a model with 2 labels"):
        opened(model, data, teacher, loss="logits", ce_weight=0.1)


def test_test_classes_have_the_numbers_of_the_training_classes(tmp_path):
    data = photos(tmp_path / "photos", {"a": 2, "b": 1, "c": 1}, "train")
    photos(data, {"b": 2, "c": 1}, "test")
    model = softmax_tower("ViTForImageClassification", num_labels=3)
    task, pictures = opened(model, data, test=data)
    assert pictures.labels.tolist() == [0, 0, 1, 2] and task.pictures_of_test.labels.tolist() == [1, 1, 2]
    other = photos(tmp_path / "other", {"b": 1, "d": 1}, "test")
    with pytest.raises(
        ValueError, match="test: 'other' has the class 'd'; expected some of the 3 that 'photos' trains"
    ):
        opened(model, data, test=other)


def test_rows_without_a_label_are_no_class():
    """Test splits on the Hub say -1 where they keep the answer."""
    images = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    with pytest.raises(ValueError, match="'hidden' has labels -1 to 1; expected 0 to 1"):
        opened(always_the_first(["dog", "cat"]), Pictures(images, [-1, 1], "hidden", ["cat", "dog"]))


def test_half_a_folder_is_refused(tmp_path):
    data = photos(tmp_path / "pets", {"a": 1, "b": 1}, "test")
    with pytest.raises(ValueError, match="pets' has a folder 'test' and none to train on; expected train/CLASS"):
        open_pictures(data)
    assert open_pictures(data, split="test").names == ["a", "b"]
    other = photos(tmp_path / "others", {"a": 1, "b": 1}, "train")
    with pytest.raises(ValueError, match="others' has a folder 'train' and none to test on; expected test/CLASS"):
        open_pictures(other, split="test")
