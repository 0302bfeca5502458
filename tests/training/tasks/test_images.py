"""The image task: how it is augmented, the same whoever takes a batch and after any stop, and that every loss learns."""

import json

import pytest
import torch
from PIL import Image
from tools.small_towers import softmax_tower
from transformers import ViTImageProcessorPil

import mhla_hf
from mhla_hf import MHLAForImageClassification, MHLAVisionConfig
from mhla_hf.training.datasets.images import ImageReader, open_images, top1_accuracy
from mhla_hf.training.recipe import ImageStage

SIDE = 16
HALF = {"image_mean": [0.5], "image_std": [0.5], "do_convert_rgb": None}
GRAY = ViTImageProcessorPil(size={"height": SIDE, "width": SIDE}, **HALF)
COLOR = ViTImageProcessorPil(size={"height": 32, "width": 32})
AUGMENTED = {"crop": 0.3, "flip": 0.5, "shift": 2, "erase": 0.5, "mixup": 0.8, "cutmix": 1.0, "smoothing": 0.1}


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
    config = MHLAVisionConfig.preset("digits", **{**sizes, "initializer_range": 0.2, **changes})
    return MHLAForImageClassification(config)


def stage(**changes):
    return ImageStage(**{"name": "train", "loss": "labels", "steps": 8, "lr": 3e-3, "batch_size": 16, **changes})


def reader(data=None, state=None, **changes):
    pictures = open_images(squares() if data is None else data)
    return ImageReader(pictures, stage(**changes), (0, 0), GRAY, 1, 4, state)


def first(**changes):
    return reader(**changes).take(16, slice(0, 16))


def train(out, model=None, teacher=None, **changes):
    values = {"data": squares(), "stages": [stage()], "progress": False, "log_every": 4} | changes
    return mhla_hf.distill(model or classifier(), teacher, out=out, **values)


def test_a_batch_does_not_depend_on_who_takes_it_nor_on_stops(tmp_path):
    for number, (image, label) in enumerate(zip(*squares(16), strict=True)):
        (tmp_path / "train" / "abcd"[label]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[0].numpy()).save(tmp_path / "train" / "abcd"[label] / f"{number:02}.png")
    one, *parts, half = (reader(tmp_path, **AUGMENTED) for _ in range(4))
    batches = [one.take(6, slice(0, 6)) for _ in range(4)]
    for whole in batches:
        split = [part.take(6, rows) for part, rows in zip(parts, (slice(0, 3), slice(3, 6)), strict=True)]
        torch.testing.assert_close([torch.cat(each) for each in zip(*split, strict=True)], list(whole), rtol=0, atol=0)
    half.take(6, slice(0, 6))
    later = reader(tmp_path, json.loads(json.dumps(half.state())), **AUGMENTED)
    assert torch.equal(later.take(6, slice(0, 6))[0], batches[1][0])
    for own in (one, half, later, *parts):
        own.close()


def test_augmentations_do_what_they_say():
    plain, labels = first()
    assert labels.sum(1).eq(1).all() and labels.max() == 1
    for name, value in {"crop": 0.3, "flip": 1.0, "shift": 2, "erase": 1.0}.items():
        changed, same = first(**{name: value})
        assert torch.equal(same, labels) and not torch.equal(changed, plain), name
    assert torch.equal(first(flip=1.0)[0].flip(-1), plain)
    smooth = first(smoothing=0.2)[1]
    assert smooth.min() == pytest.approx(0.05) and smooth.max() == pytest.approx(0.85)
    pixels, mixed = first(mixup=1.0)
    pair = next(n for n in range(0, 16, 2) if labels[n].argmax() != labels[n + 1].argmax())
    share = mixed[pair, labels[pair].argmax()]
    torch.testing.assert_close(pixels[pair], share * plain[pair] + (1 - share) * plain[pair + 1], rtol=0, atol=1e-5)
    pixels, mixed = first(cutmix=1.0)
    from_other = (pixels[pair] != plain[pair]).float().mean()
    assert ((pixels[pair] == plain[pair]) | (pixels[pair] == plain[pair + 1])).all()
    assert from_other == pytest.approx(1 - mixed[pair, labels[pair].argmax()].item(), abs=0.02)


def test_labels_are_learned_and_judged_on_the_way(lab, tmp_path):
    stages, judged = [stage(steps=45, lr=5e-3, ema=0.9)], open_images(squares(40, seed=5))
    train(tmp_path / "out", stages=stages, test=judged, log_every=15)
    entries = lab.history(tmp_path / "out")
    assert [entry["images"] for entry in entries] == [240, 480, 720]
    assert all(0 <= entry["test_accuracy"] <= 1 and "accuracy" in entry for entry in entries)
    assert entries[-1]["test_accuracy"] > 0.9 and entries[-1]["loss"] < entries[0]["loss"]
    loaded = MHLAForImageClassification.from_pretrained(tmp_path / "out")
    assert top1_accuracy(loaded, judged, GRAY, batch_size=7) > 0.9


def test_a_classifier_from_scratch_learns_from_one_with_softmax_without_labels(lab, tmp_path):
    teacher, student = classifier(attention="softmax"), classifier()
    shared = {name: value for name, value in teacher.state_dict().items() if ".softmax." not in name}
    assert not student.load_state_dict(shared, strict=False).unexpected_keys
    losses = {"transfer": "attention", "features": "all", "logits": "all"}
    stages = [stage(name=loss, loss=loss, steps=12, lr=1e-3, trainable=trained) for loss, trained in losses.items()]
    assert train(tmp_path / "out", student, teacher, stages=stages, processor=GRAY, log_every=1) is student
    record = lab.record(tmp_path / "out")
    assert record["task"] == "images" and (tmp_path / "out" / "preprocessor_config.json").is_file()
    assert all(made["last_loss"] < 0.9 * made["first_loss"] for made in record["stages"])


BAD = {
    "float images": ({"data": (squares(8)[0].float(), squares(8)[1])}, "float32"),
    "labels beyond": ({"data": (squares(8)[0], squares(8)[1] + 1)}, "labels 1 to 4, expected 0 to 3"),
    "no processor": ({"model": "ViTForImageClassification"}, "processor: got None for ViTForImage"),
    "no classes": ({"model": "CLIPVisionModel", "processor": COLOR}, "got CLIPVisionModel, expected an image classifier"),
    "other classes": ({"teacher": classifier(num_labels=3), "stages": [stage(loss="logits")]},
        "teacher: got num_labels 3, expected 4"),
    "channels": ({"processor": COLOR},
        "processor: got .*, expected one that makes images of one height and width and 1 channels"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_one_sentence(tmp_path, name):
    values, said = BAD[name]
    model = softmax_tower(values["model"]) if "model" in values else None
    with pytest.raises((ValueError, TypeError), match=said):
        train(tmp_path / "out", **{**values, "model": model})
    assert not list(tmp_path.iterdir())
