"""Labeled images to train and to judge on: tensors at hand, a folder with one folder per class, or a data set.

Which images a step gets and how each is cropped, moved, erased and mixed follows from (seed, stage, number of the sample)
alone. Pixels are made by the model's own image processor, a batch ahead, by a few threads.
"""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import torch
from PIL import Image
from tqdm import tqdm

from ..checkpoints.load import wrap_errors
from ..data import Reader, check_data_path, load_split

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff")
SPLITS = {"train": ("train", "training"), "test": ("test", "val", "validation")}
THREADS = 4
ASPECT = 4 / 3


class Pictures:
    """Images with labels.

    items: uint8 `[N, C, H, W]`, or a sequence of paths or PIL images. labels: int64 `[N]`. names: of the classes, or None.
    """

    def __init__(self, items, labels, name, names=None, identity=None):
        self.items, self.labels, self.name, self.names = items, torch.as_tensor(labels).long(), name, names
        self.identity = identity
        if not len(self.labels) or len(self.labels) != len(items):
            found = f"{len(items)} images and {len(self.labels)} labels"
            raise ValueError(f"data: {name!r} holds {found}; expected as many")

    def __len__(self):
        return len(self.labels)

    def describe(self):
        if self.identity is None:
            whole = self.items.numpy().tobytes() + self.labels.numpy().tobytes()
            self.identity = hashlib.sha256(whole).hexdigest()[:32]
        return {"kind": "images", "images": len(self), "sha256": self.identity}

    def classes(self) -> dict:
        """What the configuration of a model from scratch says of these classes."""
        names = self.names or [str(label) for label in range(int(self.labels.max()) + 1)]
        numbers = {name: label for label, name in enumerate(names)}
        return {"num_labels": len(names), "id2label": dict(enumerate(names)), "label2id": numbers}

    def numbered_as(self, names, what: str):
        """The same pictures with each class numbered by its place in `names`, which `what` has; ValueError: it lacks one."""
        if odd := [name for name in self.names if name not in names]:
            known = f"{len(names)} that {what!r} trains"
            raise ValueError(f"test: {self.name!r} has the class {odd[0]!r}; expected some of the {known}")
        return self._renumbered([list(names).index(name) for name in self.names], names)

    def numbered_for(self, config, argument="data"):
        """The same pictures, numbered as the model of this configuration does: by name where it knows the names, else by
        place; ValueError: it cannot."""
        found, names = self, self.names or ()
        known = {str(label): int(index) for index, label in config.id2label.items()}
        odd = [name for name in names if name not in known]
        if odd and len(odd) < len(names):
            raise ValueError(f"{argument}: the model has no label {odd[0]!r}, though it has others of these classes")
        if odd and len(names) != len(known):
            raise ValueError(f"{argument}: {len(names)} classes for a model with {len(known)} labels; expected as many")
        if names:
            found = self._renumbered(range(len(names)) if odd else [known[name] for name in names])
        found.check_labels(config.num_labels, argument)
        return found

    def _renumbered(self, order, names=None):
        self.check_labels(len(order))
        return Pictures(self.items, torch.tensor(order)[self.labels], self.name, names, self.describe()["sha256"])

    def check_labels(self, classes: int, argument="data"):
        """ValueError for a label that is none of 0 to `classes` - 1; test splits on the Hub say -1 for a hidden one."""
        low, high = int(self.labels.min()), int(self.labels.max())
        if low < 0 or high >= classes:
            raise ValueError(f"{argument}: {self.name!r} has labels {low} to {high}; expected 0 to {classes - 1}")

    def image(self, index: int, channels: int) -> Image.Image:
        """One image of PIL, in color or, for a model of one channel, in gray."""
        item = self.items[index]
        if isinstance(item, torch.Tensor):
            item = Image.fromarray(item.permute(1, 2, 0).squeeze(-1).numpy())
        about = f"data: the image {str(item)!r} cannot be read"
        with wrap_errors(about), Image.open(item) if isinstance(item, (str, Path)) else item as picture:
            return picture.convert("L" if channels == 1 else "RGB")


def prepare(processor, images, **changes) -> torch.Tensor:
    """Images of PIL as a model wants them, fp32 `[N, C, H, W]`; changes: of what its image processor does."""
    return processor(images=images, return_tensors="pt", **changes)["pixel_values"].float()


def sides_of(processor, channels: int) -> tuple[int, int]:
    """Height and width of what the processor makes; ValueError where they depend on the image, or other channels."""
    blanks = [Image.new("L" if channels == 1 else "RGB", sides) for sides in ((64, 48), (48, 64))]
    with wrap_errors(f"processor: does not give images of one height and width and {channels} channels"):
        return tuple(prepare(processor, blanks).shape[2:])


def open_pictures(data, split="train") -> Pictures:
    """Open what a user calls labeled images; ValueError, TypeError, ImportError: one sentence.

    data: a pair of tensors (images uint8 `[N, C, H, W]`, labels `[N]`); a folder with one folder of images per class,
    perhaps below a folder named after the split; the id of a data set on the Hub ("id" or "id:configuration"), or a
    `datasets.Dataset`, with columns of images and class labels. split: "train", or "test", also called "val".
    """
    if isinstance(data, Pictures):
        return data
    if isinstance(data, (tuple, list)) and len(data) == 2 and all(isinstance(x, torch.Tensor) for x in data):
        images, labels = data
        if images.ndim != 4 or images.dtype != torch.uint8 or labels.ndim != 1:
            found = f"{tuple(images.shape)} of {images.dtype} and {tuple(labels.shape)}"
            raise ValueError(f"data: got tensors {found}; expected images uint8 [N, C, H, W] and labels [N]")
        return Pictures(images, labels, "images at hand")
    if isinstance(data, (str, Path)):
        if (path := check_data_path(data)).is_dir():
            return _open_folder(path, split)
        return _open_table(load_split(str(data), split=split), str(data))
    if hasattr(data, "features") and hasattr(data, "__len__"):
        return _open_table(data, "a dataset")
    raise TypeError(f"data: got {type(data).__name__}; expected a folder, a dataset or a pair of tensors")


def _open_folder(folder, split):
    other = SPLITS["test" if split == "train" else "train"]
    place = next((folder / name for name in SPLITS[split] if (folder / name).is_dir()), folder)
    if place is folder and (half := [name for name in other if any((folder / name).glob("*/"))]):
        raise ValueError(f"data: {str(folder)!r} has {half[0]!r} and none to {split} on; expected {split}/CLASS in it")
    classes = sorted(path for path in place.iterdir() if path.is_dir())
    found = [(path, label) for label, kind in enumerate(classes) for path in sorted(kind.rglob("*"))]
    files = [(path, label) for path, label in found if path.suffix.lower() in ENDINGS]
    if not files:
        raise ValueError(f"data: {str(folder)!r} holds no folders of images; expected one folder per class")
    sizes = "\n".join(f"{path.relative_to(place)} {path.stat().st_size}" for path, _ in files)
    identity = hashlib.sha256(sizes.encode()).hexdigest()[:32]
    paths, labels = zip(*files, strict=True)
    return Pictures(paths, labels, folder.name, [path.name for path in classes], identity)


def _open_table(table, name):
    kinds = {column: type(kind).__name__ for column, kind in table.features.items()}
    images = [column for column, kind in kinds.items() if kind == "Image"]
    labels = [column for column, kind in kinds.items() if kind == "ClassLabel" or column in ("label", "labels")]
    if not images or not labels:
        raise ValueError(f"data: {name!r} has the columns {list(kinds)}; expected one of images and one of labels")
    names = getattr(table.features[labels[0]], "names", None)
    return Pictures(table[images[0]], list(table[labels[0]]), name, names, table._fingerprint)


class PictureReader(Reader):
    """The batches of an `ImageStage`: each epoch every image once, in a new order, augmented as the stage says."""

    def __init__(self, pictures: Pictures, stage, key, processor, channels: int, classes: int, state=None):
        super().__init__(key, state)
        self.pictures, self.stage, self.processor, self.channels = pictures, stage, processor, channels
        self.classes, self.sides = classes, sides_of(processor, channels)
        self.pool, self.coming = ThreadPoolExecutor(THREADS), None

    def take(self, count: int, rows: slice):
        """The `rows` of the next `count`: pixels fp32 `[rows, C, H, W]` and shares of the classes `[rows, classes]`."""
        own = list(range(count))[rows]
        mixed = bool(self.stage.mixup or self.stage.cutmix)
        partners = [number ^ 1 if (number ^ 1) < count else number for number in own] if mixed else []
        needed = sorted({*own, *partners})
        coming = self.coming or self.pool.map(self._sample, [self.next + number for number in needed])
        self.coming = self.pool.map(self._sample, [self.next + count + number for number in needed])
        samples = dict(zip(needed, coming, strict=True))
        batch = [torch.stack(parts) for parts in zip(*map(samples.get, own), strict=True)]
        if mixed:
            batch = self._mix(*batch, *(torch.stack(parts) for parts in zip(*map(samples.get, partners), strict=True)))
        self.next += count
        return tuple(batch)

    def _sample(self, number):
        stage, index, changes = self.stage, self.shuffled(number, len(self.pictures)), {}
        random, image = numpy.random.default_rng((*self.key, number, 1)), self.pictures.image(index, self.channels)
        if stage.crop < 1:
            box = [share * side for share, side in zip(random_box(random, stage.crop), image.size * 2, strict=True)]
            image = image.resize(self.sides[::-1], self.processor.resample, box=box)
            changes = {"do_resize": False, "do_center_crop": False}
        image = prepare(self.processor, [image], **changes)[0]
        if stage.flip and random.random() < stage.flip:
            image = image.flip(-1)
        if stage.shift:
            image = image.roll(tuple(random.integers(-stage.shift, stage.shift + 1, 2).tolist()), (1, 2))
        if stage.erase and random.random() < stage.erase:
            sides = zip(random_box(random, 0.02, 1 / 3), self.sides[::-1] * 2, strict=True)
            left, top, right, bottom = (round(part * side) for part, side in sides)
            erased = image[:, top:bottom, left:right]
            erased.copy_(torch.from_numpy(random.standard_normal(erased.shape)))
        target = torch.full((self.classes,), stage.smoothing / self.classes)
        target[self.pictures.labels[index]] += 1 - stage.smoothing
        return image, target

    def _mix(self, pixels, targets, other, other_targets):
        """Mixup or cutmix of each image with its neighbor in the batch, in one proportion for all."""
        random, (height, width) = numpy.random.default_rng((*self.key, self.next, 2)), self.sides
        cut = random.random() < 0.5 if self.stage.mixup and self.stage.cutmix else bool(self.stage.cutmix)
        alpha = self.stage.cutmix if cut else self.stage.mixup
        share = random.beta(alpha, alpha)
        if cut:
            side = (1 - share) ** 0.5
            middle, across = random.random() * height, random.random() * width
            rows = slice(max(0, round(middle - side * height / 2)), min(height, round(middle + side * height / 2)))
            columns = slice(max(0, round(across - side * width / 2)), min(width, round(across + side * width / 2)))
            pixels[:, :, rows, columns] = other[:, :, rows, columns]
            share = 1 - max(0, rows.stop - rows.start) * max(0, columns.stop - columns.start) / (height * width)
        else:
            pixels = share * pixels + (1 - share) * other
        return pixels, share * targets + (1 - share) * other_targets

    def close(self):
        self.pool.shutdown(wait=True, cancel_futures=True)


def random_box(random, least: float, most: float = 1.0):
    """(left, top, right, bottom) in shares of an image: an area of `least` to `most` of it, of aspect 3/4 to 4/3."""
    area = random.uniform(least, most)
    aspect = numpy.exp(random.uniform(-numpy.log(ASPECT), numpy.log(ASPECT)))
    width, height = min(1.0, (area * aspect) ** 0.5), min(1.0, (area / aspect) ** 0.5)
    left, top = random.uniform(0, 1 - width), random.uniform(0, 1 - height)
    return left, top, left + width, top + height


@torch.no_grad()
def share_right(model, pictures: Pictures, processor, batch_size=128, bar=None) -> float:
    """Top-1 accuracy of an image classifier, in eval mode, on all of `pictures`; the model keeps its mode.

    bar: a word for a progress bar on stderr; None: no bar.
    """
    mode, right = model.training, 0
    model.eval()
    for numbers in tqdm(torch.arange(len(pictures)).split(batch_size), bar, unit="batch", disable=bar is None):
        images = [pictures.image(number, getattr(model.config, "num_channels", 3)) for number in numbers.tolist()]
        said = model(pixel_values=prepare(processor, images).to(model.device, model.dtype)).logits.argmax(-1).cpu()
        right += int((said == pictures.labels[numbers]).sum())
    model.train(mode)
    return right / len(pictures)
