"""Labeled images to train and to judge on: tensors at hand, a folder with one folder per class, or a data set.

Which images a step gets and how each is cropped, moved, erased and mixed follows from (seed, stage, number of the sample)
alone, so a run that was stopped goes on with the same pixels on any number of processes. Files are opened by a few threads,
one batch ahead. Neither torchvision nor timm is needed.
"""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import torch
import torch.nn.functional as F
from PIL import Image

from .data import hub_id, load_split, place_of
from .tasks import Reader

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff")
SPLITS = {"train": ("train", "training"), "test": ("test", "val", "validation")}
THREADS = 4
ASPECT = 4 / 3


class Preparation:
    """How pixels become a model's input: resizing, the crop out of the middle, channels, mean and deviation per channel.

    values: of an image processor, as a dict ("size", "crop_size", "image_mean", ...). channels: of the model.
    size: height and width of what the model gets. resized: those of the whole image before the crop, or its shortest edge.
    """

    def __init__(self, values: dict, channels: int):
        size, crop = values.get("size") or {}, values.get("crop_size")
        self.resized = size.get("shortest_edge") or (size.get("height"), size.get("width"))
        self.size, self.cropped = self.resized, bool(values.get("do_center_crop"))
        if self.cropped:
            self.size = (crop.get("height"), crop.get("width")) if isinstance(crop, dict) else (None, None)
        if isinstance(self.size, int) or not all(self.size) or not (isinstance(self.resized, int) or all(self.resized)):
            raise ValueError(
                f"processor: its size {size!r} and crop_size {crop!r} give images of many shapes; expected height, width "
                "or a crop of both"
            )
        self.resample = Image.Resampling(values.get("resample") or Image.Resampling.BICUBIC)
        self.channels, normal = channels, values.get("do_normalize", True)
        mean = (values.get("image_mean") or [0.5] * channels) if normal else [0.0] * channels
        std = (values.get("image_std") or [0.5] * channels) if normal else [1.0] * channels
        self.mean, self.std = (torch.tensor(numbers).view(-1, 1, 1) for numbers in (mean, std))
        if not len(mean) == len(std) == channels:
            raise ValueError(f"processor: has {len(mean)} channels, and the model {channels}; expected one number")

    def whole(self, pictures, index: int, size=None) -> torch.Tensor:
        """One image as the processor makes it, before `finish`: resized, then the crop out of its middle.

        size: height and width instead of the processor's; what is resized grows or shrinks with it.
        """
        size = self.size if size is None else tuple(size)
        if not self.cropped:
            return pictures.pixels(index, size, self.channels, resample=self.resample)
        shares = [new / own for new, own in zip(size, self.size, strict=True)]
        if isinstance(self.resized, int):
            resized = round(self.resized * max(shares))
        else:
            resized = [round(side * share) for side, share in zip(self.resized, shares, strict=True)]
        return middle_of(pictures.pixels(index, resized, self.channels, resample=self.resample), size)

    def finish(self, pixels: torch.Tensor) -> torch.Tensor:
        """Values in 0 to 1 `[..., C, H, W]` as the model wants them."""
        return (pixels - self.mean) / self.std


class Pictures:
    """Images with labels.

    items: uint8 `[N, C, H, W]`, or a sequence of paths or PIL images. labels: int64 `[N]`. names: of the classes, or None.
    """

    def __init__(self, items, labels, name, names=None, identity=None):
        self.items, self.labels, self.name, self.names = items, torch.as_tensor(labels).long(), name, names
        self.identity = identity
        if not len(self.labels) or len(self.labels) != len(items):
            raise ValueError(
                f"data: {name!r} holds {len(items)} images and {len(self.labels)} labels; expected as many"
            )

    def __len__(self):
        return len(self.labels)

    def describe(self):
        if self.identity is None:
            digest = hashlib.sha256(self.items.numpy().tobytes())
            digest.update(self.labels.numpy().tobytes())
            self.identity = digest.hexdigest()[:32]
        return {"kind": "images", "images": len(self), "sha256": self.identity}

    def classes(self) -> dict:
        """What the configuration of a model from scratch says of these classes."""
        names = self.names or [str(label) for label in range(int(self.labels.max()) + 1)]
        numbers = {name: label for label, name in enumerate(names)}
        return {"num_labels": len(names), "id2label": dict(enumerate(names)), "label2id": numbers}

    def numbered_as(self, names, what: str):
        """The same pictures with each class numbered by its place in `names`, which `what` has; ValueError: it lacks one."""
        if odd := [name for name in self.names if name not in names]:
            raise ValueError(
                f"test: {self.name!r} has the class {odd[0]!r}; expected some of the {len(names)} that {what!r} trains"
            )
        return self.renumbered([list(names).index(name) for name in self.names], names)

    def renumbered(self, order, names=None):
        """The same pictures, class i called `order[i]`; names: of the classes by their new numbers."""
        self.check_labels(len(order))
        return Pictures(self.items, torch.tensor(order)[self.labels], self.name, names, self.describe()["sha256"])

    def check_labels(self, classes: int, argument="data"):
        """ValueError for a label that is none of 0 to `classes` - 1; test splits on the Hub say -1 for a hidden one."""
        low, high = int(self.labels.min()), int(self.labels.max())
        if low < 0 or high >= classes:
            raise ValueError(f"{argument}: {self.name!r} has labels {low} to {high}; expected 0 to {classes - 1}")

    def pixels(self, index: int, size, channels: int, box=None, resample=Image.Resampling.BICUBIC) -> torch.Tensor:
        """One image as fp32 `[channels, *size]` in 0 to 1.

        size: height and width, or the length of the shortest edge. box: (left, top, right, bottom) in shares of it, or all.
        """
        item = self.items[index]
        if isinstance(item, torch.Tensor):
            item = Image.fromarray(item.permute(1, 2, 0).squeeze(-1).numpy())
        with Image.open(item) if isinstance(item, (str, Path)) else item as picture:
            picture = picture.convert("L" if channels == 1 else "RGB")
            if box is not None:
                box = tuple(a * b for a, b in zip(box, picture.size * 2, strict=True))
            height, width = sides_of(size, picture.height, picture.width)
            array = numpy.asarray(picture.resize((width, height), resample, box=box))
        return torch.from_numpy(array.copy()).float().div(255).view(height, width, channels).permute(2, 0, 1)


def sides_of(size, height: int, width: int) -> tuple[int, int]:
    """Height and width that an image becomes: `size` itself, or its own in proportion with the shortest edge of `size`."""
    if not isinstance(size, int):
        return tuple(size)
    long = int(size * max(height, width) / min(height, width))
    return (long, size) if width <= height else (size, long)


def middle_of(image: torch.Tensor, size) -> torch.Tensor:
    """The middle `[C, *size]` of an image `[C, H, W]`, with zeros around it where it is smaller."""
    pads = []
    for side, wanted in ((image.shape[2], size[1]), (image.shape[1], size[0])):
        first = -((side - wanted) // 2)  # below zero: cut off
        pads += [first, wanted - side - first]
    return F.pad(image, pads)


def open_pictures(data, split="train") -> Pictures:
    """Open what a user calls labeled images.

    Args:
        data: a pair of tensors (images uint8 `[N, C, H, W]`, labels `[N]`); a folder with one folder of images per class,
            perhaps below a folder named after the split ("train"; "test", "val" or "validation"); the id of a data set on
            the Hub ("id" or "id:configuration"), or a map-style `datasets.Dataset`, with columns of images and class labels.
        split: "train" or "test".

    Raises:
        ValueError, TypeError: one sentence that says what is wrong with `data`. ImportError: `datasets` is missing.
    """
    if isinstance(data, (tuple, list)) and len(data) == 2 and all(isinstance(x, torch.Tensor) for x in data):
        images, labels = data
        if images.ndim != 4 or images.dtype != torch.uint8 or labels.ndim != 1:
            raise ValueError(
                f"data: got tensors {tuple(images.shape)} of {images.dtype} and {tuple(labels.shape)}; "
                "expected images uint8 [N, C, H, W] and labels [N]"
            )
        return Pictures(images, labels, "images at hand")
    if isinstance(data, Pictures):
        return data
    if isinstance(data, (str, Path)):
        if (path := place_of(data)).is_dir():
            return _open_folder(path, split)
        return _open_table(load_split(str(data), *hub_id(str(data)), split=split), str(data))
    if hasattr(data, "features") and hasattr(data, "__len__"):
        return _open_table(data, "a dataset")
    raise TypeError(f"data: got {type(data).__name__}; expected a folder, a dataset or a pair of tensors")


def _open_folder(folder, split):
    place = next((folder / name for name in SPLITS[split] if (folder / name).is_dir()), None)
    if place is None:
        other = "test" if split == "train" else "train"
        if half := [name for name in SPLITS[other] if any((folder / name).glob("*/"))]:
            raise ValueError(
                f"data: {str(folder)!r} has a folder {half[0]!r} and none to {split} on; expected {split}/CLASS in it"
            )
        place = folder
    classes = sorted(path for path in place.iterdir() if path.is_dir())
    files = [
        (path, label)
        for label, kind in enumerate(classes)
        for path in sorted(kind.rglob("*"))
        if path.suffix.lower() in ENDINGS
    ]
    if not files:
        raise ValueError(f"data: {str(folder)!r} holds no folders of images; expected one folder per class")
    sizes = "\n".join(f"{path.relative_to(place)} {path.stat().st_size}" for path, _ in files)
    identity = hashlib.sha256(sizes.encode()).hexdigest()[:32]
    paths, labels = zip(*files, strict=True)
    return Pictures(paths, labels, folder.name, [path.name for path in classes], identity)


def _open_table(table, name):
    kinds = {column: type(kind).__name__ for column, kind in table.features.items()}
    images = [column for column, kind in kinds.items() if kind == "Image"]
    labels = [column for column, kind in kinds.items() if kind == "ClassLabel"]
    labels += [column for column in ("label", "labels") if column in kinds]
    if not images or not labels:
        raise ValueError(f"data: {name!r} has the columns {list(kinds)}; expected one of images and one of labels")
    names = getattr(table.features[labels[0]], "names", None)
    return Pictures(table[images[0]], list(table[labels[0]]), name, names, table._fingerprint)


class PictureReader(Reader):
    """The batches of one stage: each epoch every image once, in a new order, augmented as the stage says.

    stage: an `ImageStage`. key: (seed, number of the stage). classes: how many the model knows.
    """

    def __init__(self, pictures: Pictures, stage, key, preparation: Preparation, classes: int, state=None):
        super().__init__(key, state)
        self.pictures, self.stage, self.preparation, self.classes = pictures, stage, preparation, classes
        self.size = preparation.size if stage.size is None else (stage.size, stage.size)
        files = not isinstance(pictures.items, torch.Tensor)
        self.pool, self.ahead = ThreadPoolExecutor(THREADS) if files else None, {}

    def take(self, count: int, rows: slice):
        """Rows of the next batch of `count`: pixels fp32 `[rows, C, H, W]` and what is right, fp32 `[rows, classes]`."""
        own = list(range(count))[rows]
        mixed = bool(self.stage.mixup or self.stage.cutmix)
        partners = [number ^ 1 if (number ^ 1) < count else number for number in own] if mixed else []
        needed = sorted({*own, *partners})
        samples = dict(zip(needed, self._samples([self.next + number for number in needed], count), strict=True))
        batch = [torch.stack(parts) for parts in zip(*map(samples.get, own), strict=True)]
        if mixed:
            batch = self._mix(*batch, *(torch.stack(parts) for parts in zip(*map(samples.get, partners), strict=True)))
        self.next += count
        return tuple(batch)

    def _samples(self, numbers, count):
        if self.pool is None:
            return [self._sample(number) for number in numbers]
        due = {number: self.ahead.pop(number, None) or self.pool.submit(self._sample, number) for number in numbers}
        for number in numbers:
            self.ahead[number + count] = self.pool.submit(self._sample, number + count)
        return [due[number].result() for number in numbers]

    def _sample(self, number):
        """The sample of this number: pixels and shares of the classes."""
        stage, index = self.stage, self.shuffled(number, len(self.pictures))
        random = numpy.random.default_rng((*self.key, number, 1))
        if stage.crop < 1:
            box, own = random_box(random, stage.crop), self.preparation
            image = self.pictures.pixels(index, self.size, own.channels, box, own.resample)
        else:
            image = self.preparation.whole(self.pictures, index, self.size)
        if stage.flip and random.random() < stage.flip:
            image = image.flip(-1)
        if stage.shift:
            image = image.roll(tuple(random.integers(-stage.shift, stage.shift + 1, 2).tolist()), (1, 2))
        image = self.preparation.finish(image)
        if stage.erase and random.random() < stage.erase:
            sides = self.size[::-1] * 2
            box = random_box(random, 0.02, 1 / 3)
            left, top, right, bottom = (round(part * side) for part, side in zip(box, sides, strict=True))
            erased = image[:, top:bottom, left:right]
            erased.copy_(torch.from_numpy(random.standard_normal(erased.shape)))
        target = torch.full((self.classes,), stage.smoothing / self.classes)
        target[self.pictures.labels[index]] += 1 - stage.smoothing
        return image, target

    def _mix(self, pixels, targets, other, other_targets):
        """Mixup or cutmix of each image with its neighbour in the batch, in one proportion for all."""
        random = numpy.random.default_rng((*self.key, self.next, 2))
        cut = random.random() < 0.5 if self.stage.mixup and self.stage.cutmix else bool(self.stage.cutmix)
        alpha = self.stage.cutmix if cut else self.stage.mixup
        share = random.beta(alpha, alpha)
        if cut:
            height, width = self.size
            side = (1 - share) ** 0.5
            middle, across = random.random() * height, random.random() * width
            rows = slice(max(0, round(middle - side * height / 2)), min(height, round(middle + side * height / 2)))
            columns = slice(max(0, round(across - side * width / 2)), min(width, round(across + side * width / 2)))
            pixels = pixels.clone()
            pixels[:, :, rows, columns] = other[:, :, rows, columns]
            share = 1 - max(0, rows.stop - rows.start) * max(0, columns.stop - columns.start) / (height * width)
        else:
            pixels = share * pixels + (1 - share) * other
        return pixels, share * targets + (1 - share) * other_targets

    def close(self):
        if self.pool is not None:
            self.pool.shutdown(wait=False, cancel_futures=True)


def random_box(random, least: float, most: float = 1.0):
    """(left, top, right, bottom) in shares of an image: an area of `least` to `most` of it, of aspect 3/4 to 4/3."""
    area = random.uniform(least, most)
    aspect = numpy.exp(random.uniform(-numpy.log(ASPECT), numpy.log(ASPECT)))
    width, height = min(1.0, (area * aspect) ** 0.5), min(1.0, (area / aspect) ** 0.5)
    left, top = random.uniform(0, 1 - width), random.uniform(0, 1 - height)
    return left, top, left + width, top + height


def label_order(config, names, argument="data"):
    """The model's index of each class in `names`: by name where the model knows them, else by place."""
    known = {str(label): int(index) for index, label in config.id2label.items()}
    odd = [name for name in names if name not in known]
    if not odd:
        return [known[name] for name in names]
    if len(odd) < len(names):
        raise ValueError(f"{argument}: the model has no label {odd[0]!r}, though it has others of these classes")
    if len(names) != len(known):
        raise ValueError(
            f"{argument}: {len(names)} classes for a model with {len(known)} labels; expected equally many"
        )
    return list(range(len(names)))


@torch.no_grad()
def share_right(model, pictures: Pictures, preparation: Preparation, *, size=None, batch_size=128) -> float:
    """Top-1 accuracy of an image classifier, in eval mode, on all of `pictures`; the model keeps its mode."""
    mode = model.training
    model.eval()
    right = 0
    try:
        for first in range(0, len(pictures), batch_size):
            numbers = range(first, min(first + batch_size, len(pictures)))
            batch = torch.stack([preparation.whole(pictures, number, size) for number in numbers])
            said = model(pixel_values=preparation.finish(batch).to(model.device)).logits.argmax(-1).cpu()
            right += int((said == pictures.labels[numbers.start : numbers.stop]).sum())
    finally:
        model.train(mode)
    return right / len(pictures)
