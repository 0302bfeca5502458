"""The image task: what is read, how it is augmented, that every loss learns, and that a stopped run goes on bit for bit."""

import copy
import json

import datasets
import numpy
import pytest
import torch
from PIL import Image
from small_towers import small_classifier, softmax_tower
from transformers import ViTImageProcessor

import mhla_hf
from mhla_hf import MHLAForImageClassification, MHLAVisionConfig
from mhla_hf.training.pictures import PictureReader, Preparation, open_pictures, random_box, share_right
from mhla_hf.training.recipe import ImageStage

SIDE = 16
GRAY = {"size": {"height": SIDE, "width": SIDE}, "image_mean": [0.5], "image_std": [0.5]}


def squares(count=64, channels=1, seed=0):
    """Images with a bright square in one of four corners, which is the class."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 4
    images = torch.randint(0, 60, (count, channels, SIDE, SIDE), generator=random, dtype=torch.uint8)
    for image, label in zip(images, labels.tolist(), strict=True):
        image[:, 8 * (label // 2) :, 8 * (label % 2) :][:, :8, :8] += 150
    return images, labels


def classifier(**changes):
    torch.manual_seed(0)
    sizes = {"image_size": SIDE, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_labels": 4}
    return MHLAForImageClassification(
        MHLAVisionConfig.preset("digits", **{**sizes, "initializer_range": 0.2, **changes})
    )


def stage(**changes):
    return ImageStage(**{"name": "train", "loss": "labels", "steps": 8, "lr": 3e-3, "batch_size": 16, **changes})


def reader(data=None, state=None, **changes):
    pictures = open_pictures(squares() if data is None else data)
    return PictureReader(pictures, stage(**changes), (0, 0), Preparation(GRAY, 1), 4, state)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The squares as files, one folder per class, below "train" and "test"."""
    root = tmp_path_factory.mktemp("squares")
    for split, seed in (("train", 0), ("test", 1)):
        images, labels = squares(16, seed=seed)
        for number, (image, label) in enumerate(zip(images, labels.tolist(), strict=True)):
            place = root / split / "abcd"[label]
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image[0].numpy()).save(place / f"{number:02}.png")
    return root


def test_tensors_a_folder_and_a_dataset_are_the_same_images(folder):
    images, labels = squares(16)
    files = open_pictures(folder)
    order = [int(path.stem) for path in files.items]
    assert files.names == ["a", "b", "c", "d"] and torch.equal(files.labels, labels[order])
    table = datasets.Dataset.from_dict(
        {"image": [Image.fromarray(images[n][0].numpy()) for n in order], "label": [labels[n].item() for n in order]},
        features=datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list("abcd"))}),
    )
    rows, tensors = open_pictures(table), open_pictures((images[order], labels[order]))
    for index in range(16):
        wanted = tensors.pixels(index, (SIDE, SIDE), 1)
        torch.testing.assert_close(files.pixels(index, (SIDE, SIDE), 1), wanted)
        torch.testing.assert_close(rows.pixels(index, (SIDE, SIDE), 1), wanted)
    assert files.pixels(0, (12, 20), 3).shape == tensors.pixels(0, (12, 20), 3).shape == (3, 12, 20)
    box = (0.5, 0.0, 1.0, 0.5)
    torch.testing.assert_close(
        files.pixels(5, (8, 8), 1, box), tensors.pixels(5, (SIDE, SIDE), 1)[:, :8, 8:], rtol=0, atol=1e-6
    )
    assert len(open_pictures(folder, split="test")) == 16
    assert len({json.dumps(open_pictures(folder, split=s).describe()) for s in ("train", "test")}) == 2


def test_an_epoch_takes_every_image_once_and_the_next_in_another_order():
    images, labels = squares()
    images[:, 0, 0, 0] = torch.arange(64, dtype=torch.uint8)  # its number
    own = reader((images, labels))
    seen = [
        [round(((pixels[0, 0, 0] * 0.5 + 0.5) * 255).item()) for pixels in own.take(16, slice(0, 16))[0]]
        for _ in range(8)
    ]
    first, second = ([number for batch in half for number in batch] for half in (seen[:4], seen[4:]))
    assert sorted(first) == sorted(second) == list(range(64)) and first != second


def test_a_data_set_by_its_id(monkeypatch):
    """What `datasets` would give for "owner/name:configuration", both splits."""
    images, labels = squares(4)
    rows = {"image": [Image.fromarray(image[0].numpy()) for image in images], "label": labels.tolist()}
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list("abcd"))})
    asked = []

    def load(*arguments, **options):
        asked.append((arguments, options))
        return datasets.Dataset.from_dict(rows, features=features)

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert len(open_pictures("owner/name:small")) == 4 and len(open_pictures("owner/name", split="test")) == 4
    assert asked == [(("owner/name", "small"), {"split": "train"}), (("owner/name", None), {"split": "test"})]


AUGMENTED = {"crop": 0.3, "flip": 0.5, "shift": 2, "erase": 0.5, "mixup": 0.8, "cutmix": 1.0, "smoothing": 0.1}


@pytest.mark.parametrize("files", [False, True])
def test_a_batch_does_not_depend_on_who_takes_it_nor_on_stops(folder, files):
    data = folder if files else None
    one = reader(data, **AUGMENTED)
    batches = [one.take(6, slice(0, 6)) for _ in range(4)]
    parts = [reader(data, **AUGMENTED) for _ in range(2)]
    for pixels, targets in batches:
        split = [part.take(6, rows) for part, rows in zip(parts, (slice(0, 3), slice(3, 6)), strict=True)]
        assert torch.equal(torch.cat([x for x, _ in split]), pixels)
        assert torch.equal(torch.cat([y for _, y in split]), targets)
    half = reader(data, **AUGMENTED)
    half.take(6, slice(0, 6))
    later = reader(data, json.loads(json.dumps(half.state())), **AUGMENTED)
    assert torch.equal(later.take(6, slice(0, 6))[0], batches[1][0])
    for own in (one, half, later, *parts):
        own.close()


def test_augmentations_do_what_they_say():
    plain, labels = reader().take(16, slice(0, 16))
    assert labels.sum(1).eq(1).all() and labels.max() == 1
    for name in ("crop", "flip", "shift", "erase"):
        changed, same = reader(**{name: 1 if name in ("flip", "erase") else 0.3 if name == "crop" else 2}).take(
            16, slice(0, 16)
        )
        assert torch.equal(same, labels) and not torch.equal(changed, plain), name
    flipped, _ = reader(flip=1.0).take(16, slice(0, 16))
    assert torch.equal(flipped.flip(-1), plain)
    _, smooth = reader(smoothing=0.2).take(16, slice(0, 16))
    assert smooth.min() == pytest.approx(0.05) and smooth.max() == pytest.approx(0.85)
    for name in ("mixup", "cutmix"):
        pixels, mixed = reader(**{name: 1.0}).take(16, slice(0, 16))
        torch.testing.assert_close(mixed.sum(1), torch.ones(16))
        share = mixed[0].max().item() if labels[0].argmax() != labels[1].argmax() else None
        if name == "mixup" and share is not None:
            wanted = [share * plain[0] + (1 - share) * plain[1], (1 - share) * plain[0] + share * plain[1]]
            assert any(torch.allclose(pixels[0], other, atol=1e-5) for other in wanted)
        if name == "cutmix":
            assert ((pixels[0] == plain[0]) | (pixels[0] == plain[1])).all()
    random = numpy.random.default_rng(0)
    for left, top, right, bottom in (random_box(random, 0.1) for _ in range(200)):
        assert 0 <= left < right <= 1 + 1e-9 and 0 <= top < bottom <= 1 + 1e-9
        assert 0.05 < (right - left) * (bottom - top) <= 1 + 1e-9


def train(out, model=None, teacher=None, **changes):
    values = {"data": squares(), "stages": [stage()], "progress": False, "log_every": 4} | changes
    return mhla_hf.distill(model or classifier(), teacher, out=out, **values)


def history(out):
    entries = json.loads((out / "train.json").read_text())["history"]
    return [{key: value for key, value in entry.items() if key != "seconds"} for entry in entries]


def test_labels_are_learned_and_judged_on_the_way(tmp_path):
    stages, judged = [stage(steps=45, lr=5e-3, ema=0.9)], open_pictures(squares(40, seed=5))
    model = train(tmp_path / "out", stages=stages, test=judged, log_every=15)
    entries = history(tmp_path / "out")
    assert [entry["images"] for entry in entries] == [240, 480, 720]
    assert all(0 <= entry["test_accuracy"] <= 1 and "accuracy" in entry for entry in entries)
    assert entries[-1]["test_accuracy"] > 0.9 and entries[-1]["loss"] < entries[0]["loss"]
    prepared = Preparation(model.config.preprocessing(), 1)
    assert (
        share_right(MHLAForImageClassification.from_pretrained(tmp_path / "out"), judged, prepared, batch_size=7) > 0.9
    )


def test_a_stopped_run_goes_on_bit_for_bit(tmp_path, monkeypatch):
    options = {
        "stages": [stage(steps=9, ema=0.5, **AUGMENTED)], "save_every": 5, "test": squares(8, seed=5),
    }  # fmt: skip
    train(tmp_path / "whole", classifier(drop_path_rate=0.3), **options)
    take, calls = PictureReader.take, []

    def stopping(self, *arguments):
        calls.append(1)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return take(self, *arguments)

    monkeypatch.setattr(PictureReader, "take", stopping)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "part", classifier(drop_path_rate=0.3), **options)
    train(tmp_path / "part", classifier(drop_path_rate=0.3), **options)
    assert len(calls) == 8 + 4
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "part")]
    assert weights[0] == weights[1] and history(tmp_path / "whole") == history(tmp_path / "part")


PROCESSOR = {"size": {"height": 32, "width": 32}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}


@pytest.mark.parametrize(
    "tower, losses",
    [("ViTForImageClassification", ("transfer", "logits")), ("Dinov2WithRegistersForImageClassification", ("transfer",)),
     ("SiglipVisionModel", ("features",))],
)  # fmt: skip
def test_a_converted_tower_learns_its_original_without_labels(tmp_path, tower, losses):
    teacher = softmax_tower(tower)
    student = mhla_hf.convert(copy.deepcopy(teacher), layers="all", layout=[2, 2])
    names = [name for name, _ in student.named_parameters() if ".mhla." in name]
    stages = [
        stage(name=loss, loss=loss, steps=8, lr=5e-3, batch_size=8, trainable="mhla" if loss == "transfer" else "all")
        for loss in losses
    ]
    processor = ViTImageProcessor(**PROCESSOR)
    train(tmp_path / "out", student, teacher, stages=stages, data=squares(channels=3), processor=processor)
    record = json.loads((tmp_path / "out" / "train.json").read_text())
    assert record["task"] == "images" and names
    for made in record["stages"]:
        assert made["last_loss"] < made["first_loss"], made["name"]
    assert (tmp_path / "out" / "preprocessor_config.json").is_file()


def bad_data():
    images, labels = squares(8)
    return {
        "float images": ((images.float(), labels), "float32"),
        "lengths": ((images, labels[:5]), "8 images and 5 labels"),
        "no images": ((images[:0], labels[:0]), "0 images"),
        "labels beyond": ((images, labels + 1), "labels 1 to 4; expected 0 to 3"),
        "a number": (7, "data: got int"),
        "no folder": ("./nowhere", "there is no file or folder './nowhere'"),
        "no data set": ("nobody/nothing", "'nobody/nothing' is neither a file or folder here nor a dataset"),
    }


@pytest.mark.parametrize("name", bad_data())
def test_bad_data_is_one_sentence(tmp_path, name):
    data, said = bad_data()[name]
    with pytest.raises((ValueError, TypeError), match=said):
        train(tmp_path / "out", data=data)
    assert not list(tmp_path.iterdir())


def test_what_does_not_fit_is_one_sentence(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no folders of images"):
        open_pictures(tmp_path / "empty")
    table = datasets.Dataset.from_dict({"text": ["a"]})
    with pytest.raises(ValueError, match="expected one of images and one of labels"):
        open_pictures(table)
    with pytest.raises(ValueError, match="processor: None was given for ViTForImageClassification"):
        train(tmp_path / "out", softmax_tower("ViTForImageClassification"))
    with pytest.raises(ValueError, match="student: CLIPVisionModel gives no classes"):
        train(tmp_path / "out", softmax_tower("CLIPVisionModel"), processor=ViTImageProcessor(**PROCESSOR))
    with pytest.raises(ValueError, match="teacher: its num_labels is 3, and the student's is 4"):
        train(tmp_path / "out", teacher=classifier(num_labels=3), stages=[stage(loss="logits")])
    with pytest.raises(TypeError, match="unknown argument 'tokenizer'"):
        train(tmp_path / "out", tokenizer=None)
    with pytest.raises(ValueError, match="processor: has 3 channels, and the model 1"):
        train(tmp_path / "out", processor=ViTImageProcessor(**PROCESSOR))
    assert not (tmp_path / "out").exists()


def test_a_classifier_from_scratch_learns_from_one_with_softmax(tmp_path):
    teacher = small_classifier(attention="softmax")
    student = small_classifier()
    shared = {name: value for name, value in teacher.state_dict().items() if ".softmax." not in name}
    assert not student.load_state_dict(shared, strict=False).unexpected_keys
    data = torch.randint(0, 256, (8, 1, 32, 32), dtype=torch.uint8), torch.arange(8) % 5
    stage = ImageStage("transfer", "transfer", 12, 3e-3, trainable="attention", batch_size=8)
    trained = mhla_hf.distill(
        student, teacher, out=tmp_path / "out", data=data, stages=[stage], log_every=1, progress=False
    )
    losses = [entry["loss"] for entry in json.loads((tmp_path / "out" / "train.json").read_text())["history"]]
    assert trained is student and losses[-1] < 0.9 * losses[0]
