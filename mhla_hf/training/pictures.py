"""Labelled images to train and to judge on: tensors at hand, a folder with one folder per class, or a data set.

Unusual: which images a step gets and how each is cropped, moved, erased and mixed follows from (seed, stage, number of the
sample) alone, so a run that was stopped goes on with the same pixels on any number of processes. Files are opened by a few
threads, one batch ahead. Neither torchvision nor timm is needed.
"""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import torch
import torch.nn.functional as F
from PIL import Image

from .data import hub_id, load_split, place_of

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff")
SPLITS = {"train": ("train", "training"), "test": ("test", "val", "validation")}
MODES = {Image.Resampling.BILINEAR: "bilinear", Image.Resampling.BICUBIC: "bicubic"}
THREADS = 4
ASPECT = 4 / 3


class Preparation:
    """How pixels become a model's input: resizing, the crop out of the middle, channels, mean and deviation per channel.

    values: of an image processor, as a dict ("size", "crop_size", "image_mean", ...). channels: of the model.
    size: height and width of what the model gets. resized: those of the whole image before the crop, or its shortest edge.
    """

    def __init__(self, values: dict, channels: int):
        size = values.get("size") or {}
        self.resized = size.get("shortest_edge") or (size.get("height"), size.get("width"))
        if not (isinstance(self.resized, int) or all(self.resized)):
            raise ValueError(f"processor: its size is {size!r}, expected height and width or shortest_edge")
        self.size, self.cropped = self.resized, bool(values.get("do_center_crop"))
        if self.cropped:
            crop = values.get("crop_size")
            if not isinstance(crop, dict) or not (crop.get("height") and crop.get("width")):
                raise ValueError(f"processor: its crop_size is {crop!r}, expected height and width, as it crops")
            self.size = crop["height"], crop["width"]
        elif isinstance(self.resized, int):
            raise ValueError(
                f"processor: its size {size!r} gives images of many shapes, expected height and width, or a crop"
            )
        self.resample = Image.Resampling(values.get("resample") or Image.Resampling.BICUBIC)
        self.channels = channels
        normal = values.get("do_normalize", True)
        shape = (-1, 1, 1)
        self.mean = torch.tensor((values.get("image_mean") or [0.5] * channels) if normal else [0.0] * channels)
        self.std = torch.tensor((values.get("image_std") or [0.5] * channels) if normal else [1.0] * channels)
        self.mean, self.std = self.mean.view(shape), self.std.view(shape)
        if len(self.mean) != channels or len(self.std) != channels:
            raise ValueError(f"processor: has {len(self.mean)} channels, and the model {channels}; expected one number")

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
                f"data: {name!r} holds {len(items)} images and {len(self.labels)} labels, expected as many"
            )

    def __len__(self):
        return len(self.labels)

    def describe(self):
        """What identifies the data: kind, number of images, hash of all of them."""
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
        odd = next((name for name in self.names if name not in names), None)
        if odd is not None:
            raise ValueError(
                f"test: {self.name!r} has the class {odd!r}, expected some of the {len(names)} that {what!r} trains"
            )
        return self.renumbered([list(names).index(name) for name in self.names], names)

    def renumbered(self, order, names=None):
        """The same pictures, class i called `order[i]`; names: of the classes by their new numbers. ValueError: no class."""
        low, high = int(self.labels.min()), int(self.labels.max())
        if low < 0 or high >= len(order):
            raise ValueError(f"data: {self.name!r} has labels {low} to {high}, expected 0 to {len(order) - 1}")
        return Pictures(self.items, torch.tensor(order)[self.labels], self.name, names, self.describe()["sha256"])

    def pixels(self, index: int, size, channels: int, box=None, resample=Image.Resampling.BICUBIC) -> torch.Tensor:
        """One image as fp32 `[channels, *size]` in 0 to 1.

        size: height and width, or the length of the shortest edge. box: (left, top, right, bottom) in shares of it, or all.
        """
        item = self.items[index]
        if isinstance(item, torch.Tensor):
            image = item.float() / 255
            if box is not None:
                height, width = image.shape[1:]
                left, top, right, bottom = (round(a * b) for a, b in zip(box, (width, height) * 2, strict=True))
                image = image[:, top : max(bottom, top + 1), left : max(right, left + 1)]
            size = sides_of(size, *image.shape[1:])
            if image.shape[1:] != size:
                mode = MODES.get(resample, "bicubic")
                image = F.interpolate(image[None], size, mode=mode, antialias=True, align_corners=False)[0]
            return image.clamp(0, 1).expand(channels, -1, -1)
        with Image.open(item) if isinstance(item, (str, Path)) else item as picture:
            picture = picture.convert("L" if channels == 1 else "RGB")
            if box is not None:
                box = tuple(a * b for a, b in zip(box, picture.size * 2, strict=True))
            size = sides_of(size, picture.height, picture.width)
            array = numpy.asarray(picture.resize((size[1], size[0]), resample, box=box))
        image = torch.from_numpy(array.copy()).float() / 255
        return image[None] if image.ndim == 2 else image.permute(2, 0, 1)


def sides_of(size, height: int, width: int) -> tuple[int, int]:
    """Height and width that an image becomes: `size` itself, or its own in proportion with the shortest edge of `size`."""
    if not isinstance(size, int):
        return tuple(size)
    long = int(size * max(height, width) / min(height, width))
    return (long, size) if width <= height else (size, long)


def middle_of(image: torch.Tensor, size) -> torch.Tensor:
    """The middle `[C, *size]` of an image `[C, H, W]`, with zeros around it where it is smaller."""
    (height, width), (rows, columns) = image.shape[1:], size
    if height < rows or width < columns:
        more, wider = max(rows - height, 0), max(columns - width, 0)
        image = F.pad(image, (-(-wider // 2), wider // 2, -(-more // 2), more // 2))
        height, width = image.shape[1:]
    top, left = (height - rows) // 2, (width - columns) // 2
    return image[:, top : top + rows, left : left + columns]


def open_pictures(data, split="train") -> Pictures:
    """Open what a user calls labelled images.

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
                f"data: got tensors {tuple(images.shape)} of {images.dtype} and {tuple(labels.shape)}, "
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
        for name in SPLITS[other]:
            if (folder / name).is_dir() and any(path.is_dir() for path in (folder / name).iterdir()):
                raise ValueError(
                    f"data: {str(folder)!r} has a folder {name!r} and none to {split} on, expected {split}/CLASS in it"
                )
        place = folder
    classes = sorted(path for path in place.iterdir() if path.is_dir())
    found = [
        (path, label)
        for label, kind in enumerate(classes)
        for path in sorted(kind.rglob("*"))
        if path.suffix.lower() in ENDINGS
    ]
    if not found:
        raise ValueError(f"data: {str(folder)!r} holds no folders of images, expected one folder per class")
    told = [f"{path.relative_to(place)} {path.stat().st_size}" for path, _ in found]
    identity = hashlib.sha256("\n".join(told).encode()).hexdigest()[:32]
    names = [path.name for path in classes]
    return Pictures([path for path, _ in found], [label for _, label in found], folder.name, names, identity)


def _open_table(table, name):
    kinds = {column: type(kind).__name__ for column, kind in table.features.items()}
    images = next((column for column, kind in kinds.items() if kind == "Image"), None)
    labels = next((column for column, kind in kinds.items() if kind == "ClassLabel"), None)
    labels = labels or next((column for column in ("label", "labels") if column in kinds), None)
    if images is None or labels is None:
        raise ValueError(f"data: {name!r} has the columns {list(kinds)}, expected one of images and one of labels")
    names = getattr(table.features[labels], "names", None)
    return Pictures(table[images], list(table[labels]), name, names, table._fingerprint)


class PictureReader:
    """The batches of one stage: each epoch every image once, in a new order, augmented as the stage says.

    stage: an `ImageStage`. key: (seed, number of the stage). classes: how many the model knows.
    """

    def __init__(self, pictures: Pictures, stage, key, preparation: Preparation, classes: int, state=None):
        self.pictures, self.stage, self.key = pictures, stage, key
        self.preparation, self.classes = preparation, classes
        self.size = preparation.size if stage.size is None else (stage.size, stage.size)
        self.next = state["next"] if state else 0
        self.orders = {}
        files = not isinstance(pictures.items, torch.Tensor)
        self.pool, self.ahead = ThreadPoolExecutor(THREADS) if files else None, {}

    def take(self, count: int, rows: slice):
        """Rows of the next batch of `count`: pixels fp32 `[rows, C, H, W]` and what is right, fp32 `[rows, classes]`."""
        mixed = bool(self.stage.mixup or self.stage.cutmix)
        own = list(range(count))[rows]
        partners = [number ^ 1 if (number ^ 1) < count else number for number in own]
        needed = sorted({*own, *(partners if mixed else ())})
        found = dict(zip(needed, self._samples([self.next + number for number in needed], count), strict=True))
        pixels = torch.stack([found[number][0] for number in own])
        targets = torch.stack([found[number][1] for number in own])
        if mixed:
            other = [found[number] for number in partners]
            pixels, targets = self._mix(
                pixels,
                targets,
                torch.stack([image for image, _ in other]),
                torch.stack([target for _, target in other]),
            )
        self.next += count
        return pixels, targets

    def _samples(self, numbers, count):
        if self.pool is None:
            return [self._sample(number) for number in numbers]
        due = {number: self.ahead.pop(number, None) or self.pool.submit(self._sample, number) for number in numbers}
        for number in numbers:
            self.ahead[number + count] = self.pool.submit(self._sample, number + count)
        return [due[number].result() for number in numbers]

    def _index(self, number):
        epoch, place = divmod(number, len(self.pictures))
        if epoch not in self.orders:
            self.orders = {e: order for e, order in self.orders.items() if e >= epoch - 1}
            self.orders[epoch] = numpy.random.default_rng((*self.key, epoch)).permutation(len(self.pictures))
        return int(self.orders[epoch][place])

    def _sample(self, number):
        """The sample of this number: pixels and shares of the classes."""
        stage, index = self.stage, self._index(number)
        random = numpy.random.default_rng((*self.key, number, 1))
        box = random_box(random, stage.crop) if stage.crop < 1 else None
        if box is None:
            image = self.preparation.whole(self.pictures, index, self.size)
        else:
            image = self.pictures.pixels(index, self.size, self.preparation.channels, box, self.preparation.resample)
        if stage.flip and random.random() < stage.flip:
            image = image.flip(-1)
        if stage.shift:
            image = image.roll(tuple(random.integers(-stage.shift, stage.shift + 1, 2).tolist()), (1, 2))
        image = self.preparation.finish(image)
        if stage.erase and random.random() < stage.erase:
            height, width = self.size
            left, top, right, bottom = (
                round(a * b) for a, b in zip(random_box(random, 0.02, 1 / 3), (width, height) * 2, strict=True)
            )
            rows, columns = slice(top, bottom), slice(left, right)
            noise = random.standard_normal(image[:, rows, columns].shape)
            image[:, rows, columns] = torch.from_numpy(noise).float()
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

    def state(self):
        """What `state=` needs to go on here."""
        return {"next": self.next}

    def handover(self):
        """What the next stage's reader starts from: nothing, its order is its own."""

    def close(self):
        """Let the threads go."""
        if self.pool is not None:
            self.pool.shutdown(wait=False, cancel_futures=True)


def random_box(random, least: float, most: float = 1.0):
    """(left, top, right, bottom) in shares of an image: an area of `least` to `most` of it, of aspect 3/4 to 4/3."""
    area = random.uniform(least, most)
    aspect = numpy.exp(random.uniform(-numpy.log(ASPECT), numpy.log(ASPECT)))
    width, height = min(1.0, (area * aspect) ** 0.5), min(1.0, (area / aspect) ** 0.5)
    left, top = random.uniform(0, 1 - width), random.uniform(0, 1 - height)
    return left, top, left + width, top + height


def label_order(config, names):
    """The model's index of each class in `names`: by name where the model knows them, else by place."""
    known = {str(label): int(index) for index, label in config.id2label.items()}
    if all(name in known for name in names):
        return [known[name] for name in names]
    if any(name in known for name in names):
        odd = next(name for name in names if name not in known)
        raise ValueError(f"data: the model has no label {odd!r}, though it has others of these classes")
    if len(names) != len(known):
        raise ValueError(f"data: {len(names)} classes for a model with {len(known)} labels; expected equally many")
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
