"""Images for training and evaluation, labeled if need be: from tensors, a folder with one folder per class, or a dataset.

Their order and augmentation are functions of (seed, stage, number of the sample). The model's own image processor computes
the pixels in a few threads, one batch ahead.
"""

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import torch
from PIL import Image
from tqdm import tqdm

from ...checkpoints.load import wrap_errors
from ...data import Reader, check_data_path, load_split
from ..recipe import ImageStage

IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff")
SPLIT_FOLDERS = {"train": ("train", "training"), "test": ("test", "val", "validation")}
NUM_THREADS = 4
MAX_ASPECT = 4 / 3  # largest aspect ratio of random boxes; the smallest is its inverse
ERASED_AREA = (0.02, 1 / 3)  # smallest and largest fraction of an image that `erase` replaces

Sample = tuple[torch.Tensor, torch.Tensor]  # pixels fp32 [C, H, W], class probabilities fp32 [classes]


@dataclasses.dataclass(eq=False)
class LabeledImages:
    """N images, uint8 [N, C, H, W], paths or PIL images, with labels [N]. `identity` is a hash of the data."""

    items: Any
    labels: Any
    name: str
    class_names: Sequence[str] | None = None
    identity: str = ""

    def __post_init__(self) -> None:
        self.labels = torch.as_tensor(self.labels).long()
        if not len(self.labels) or len(self.labels) != len(self.items):
            got = f"{self.name!r} with {len(self.items)} images and {len(self.labels)} labels"
            raise ValueError(f"data: got {got}, expected at least one image and one label per image.")

    def __len__(self) -> int:
        return len(self.labels)

    def describe(self) -> dict[str, Any]:
        return {"kind": "images", "images": len(self), "sha256": self.identity}

    def classes(self) -> dict[str, Any]:
        """Return the configuration fields "num_labels", "id2label" and "label2id" for a model from scratch."""
        names = self.class_names or [str(label) for label in range(int(self.labels.max()) + 1)]
        label2id = {name: label for label, name in enumerate(names)}
        return {"num_labels": len(names), "id2label": dict(enumerate(names)), "label2id": label2id}

    def renumber_for(self, config: Any, argument: str = "data", order: Sequence[str] = ()) -> "LabeledImages":
        """Return these images with a model's class numbers: by class name or, if the model knows none of them, by position.

        For test images, `order` is the class names of the training data, which must include those of the test images.
        """
        images, names = self, self.class_names or ()
        order = order or names
        model_numbers = {str(label): int(number) for number, label in config.id2label.items()}
        if set(order).isdisjoint(model_numbers):
            if order and len(order) != len(model_numbers):
                got = f"{len(order)} classes for a model with {len(model_numbers)} labels"
                raise ValueError(f"{argument}: got {got}, expected {len(model_numbers)} classes.")
            model_numbers = {name: number for number, name in enumerate(order)}
        if unknown := [name for name in names if name not in order or name not in model_numbers]:
            expected = "only classes of the model and of the training data"
            raise ValueError(f"{argument}: got {self.name!r} with the class {unknown[0]!r}, expected {expected}.")
        if names:
            self.check_labels(len(names), argument)
            numbers = torch.tensor([model_numbers[name] for name in names])
            images = dataclasses.replace(self, labels=numbers[self.labels], class_names=None)
        images.check_labels(config.num_labels, argument)
        return images

    def check_labels(self, num_classes: int, argument: str = "data") -> None:
        """Raise ValueError unless all labels are from 0 to `num_classes` - 1; a Hub test split may hide them as -1."""
        lowest, highest = int(self.labels.min()), int(self.labels.max())
        if lowest < 0 or highest >= num_classes:
            got = f"{self.name!r} with labels {lowest} to {highest}"
            raise ValueError(f"{argument}: got {got}, expected 0 to {num_classes - 1}.")

    def image(self, index: int, channels: int) -> Image.Image:
        item = self.items[index]
        if isinstance(item, torch.Tensor):
            item = Image.fromarray(item.permute(1, 2, 0).squeeze(-1).numpy())
        start = f"data: got the image {str(item)!r}, expected one that can be read"
        with wrap_errors(start), Image.open(item) if isinstance(item, (str, Path)) else item as image:
            return image.convert("L" if channels == 1 else "RGB")


def preprocess(processor: Any, images: Sequence[Image.Image], **changes: Any) -> torch.Tensor:
    """Return what an image processor of transformers makes of N images, fp32 [N, C, H, W]."""
    return processor(images=images, return_tensors="pt", **changes)["pixel_values"].float()


def find_output_size(processor: Any, channels: int) -> tuple[int, int]:
    """Return height and width of an image processor's output; raise ValueError if they depend on the input."""
    blanks = [Image.new("L" if channels == 1 else "RGB", sides) for sides in ((64, 48), (48, 64))]
    expected = f"one that makes images of one height and width and {channels} channels"
    with wrap_errors(f"processor: got {type(processor).__name__}, expected {expected}"):
        height, width = preprocess(processor, blanks).shape[2:]
    return height, width


def open_images(data: Any, split: str = "train", labeled: bool = True) -> LabeledImages:
    """Open images from a folder, a dataset or tensors: N images with C channels, H rows and W columns.

    Args:
        data: One of
            - a pair of tensors, images uint8 [N, C, H, W] and labels [N];
            - a folder with one folder of images per class, optionally inside a folder named after the split;
            - the id of a dataset on the Hub, "id" or "id:configuration", or a `datasets.Dataset`, with columns of images
              and class labels;
            - `LabeledImages`, which are returned unchanged.
        split: "train" or "test". The folder of "test" may also be called "val" or "validation".
        labeled: Whether labels are needed. If not, all are 0, images may be anywhere in the folder, and a dataset needs no
            column of labels.

    Raises:
        ValueError, TypeError, ImportError: The data cannot be opened.
    """
    if isinstance(data, LabeledImages):
        return data
    if isinstance(data, (tuple, list)) and len(data) == 2 and all(isinstance(x, torch.Tensor) for x in data):
        images, labels = data
        if images.ndim != 4 or images.dtype != torch.uint8 or labels.ndim != 1:
            got = f"tensors {tuple(images.shape)} of {images.dtype} and {tuple(labels.shape)}"
            raise ValueError(f"data: got {got}, expected images uint8 [N, C, H, W] and labels [N].")
        identity = hashlib.sha256(images.numpy().tobytes() + labels.long().numpy().tobytes()).hexdigest()[:32]
        return LabeledImages(images, labels, "a pair of tensors", identity=identity)
    name = "a dataset"
    if isinstance(data, (str, Path)):
        path, name = check_data_path(data), str(data)
        if path.is_dir():
            return _open_folder(path, split, labeled)
        data = load_split(name, split=split)
    elif not hasattr(data, "features") or not hasattr(data, "__len__"):
        raise TypeError(f"data: got {type(data).__name__}, expected a folder, one split of a dataset, or two tensors.")
    types = {column: type(feature).__name__ for column, feature in data.features.items()}
    image_columns = [column for column, kind in types.items() if kind == "Image"]
    label_columns = [column for column, kind in types.items() if kind == "ClassLabel" or column in ("label", "labels")]
    if not image_columns or (labeled and not label_columns):
        expected = "a column of images and one of labels" if labeled else "a column of images"
        raise ValueError(f"data: got {name!r} with the columns {list(types)}, expected {expected}.")
    images = data[image_columns[0]]
    labels = list(data[label_columns[0]]) if labeled else [0] * len(images)
    class_names = getattr(data.features[label_columns[0]], "names", None) if labeled else None
    return LabeledImages(images, labels, name, class_names, data._fingerprint)


def _open_folder(folder: Path, split: str, labeled: bool) -> LabeledImages:
    """Open a folder with one folder of images per class. `identity` hashes the paths and sizes in bytes."""
    split_folders = (folder / name for name in SPLIT_FOLDERS[split])
    root = next((path for path in split_folders if path.is_dir()), folder)
    other_split = SPLIT_FOLDERS["test" if split == "train" else "train"]
    if root is folder and (others := [name for name in other_split if any((folder / name).glob("*/"))]):
        got = f"{str(folder)!r} with {others[0]!r} and nothing to {split} on"
        raise ValueError(f"data: got {got}, expected {split}/CLASS in it.")
    class_folders = sorted(path for path in root.iterdir() if path.is_dir())
    # `rglob` follows no links below the folder that it starts from, but that folder may be a link.
    paths = [(path, label) for label, place in enumerate(class_folders) for path in sorted(place.rglob("*"))]
    if not labeled:
        paths = [(path, 0) for path in (*(path for path, _ in paths), *sorted(root.iterdir()))]
    files = [(path, label) for path, label in paths if path.suffix.lower() in IMAGE_ENDINGS]
    if not files:
        expected = "a folder of images for each class" if labeled else "images"
        raise ValueError(f"data: got {str(folder)!r}, which holds no images, expected {expected}.")
    listing = "\n".join(f"{path.relative_to(root)} {path.stat().st_size}" for path, _ in files)
    identity = hashlib.sha256(listing.encode()).hexdigest()[:32]
    items, labels = zip(*files, strict=True)
    class_names = [path.name for path in class_folders] if labeled else None
    return LabeledImages(items, labels, folder.name, class_names, identity)


class ImageReader(Reader):
    """Reads and augments the batches of an `ImageStage`, in threads that run until `close` is called."""

    def __init__(
        self, images: LabeledImages, stage: ImageStage, key: tuple[int, int], processor: Any, channels: int,
        num_classes: int, state: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(key, state)
        self.images, self.stage, self.processor = images, stage, processor
        self.channels, self.num_classes = channels, num_classes
        self.size = find_output_size(processor, channels)
        self.pool = ThreadPoolExecutor(NUM_THREADS)
        self.next_samples: Iterator[Sample] | None = None  # samples of the next batch, which the pool is computing

    def take(self, count: int, rows: slice = slice(None)) -> tuple[torch.Tensor, torch.Tensor]:
        """Return pixels, fp32 [R, C, H, W], and class probabilities, fp32 [R, classes], of the R rows."""
        row_numbers = list(range(count))[rows]
        is_mixed = bool(self.stage.mixup or self.stage.cutmix)
        partners = [row ^ 1 if (row ^ 1) < count else row for row in row_numbers] if is_mixed else []
        needed = sorted({*row_numbers, *partners})
        current_samples = self.next_samples or self.pool.map(self._make_sample, [self.next + row for row in needed])
        self.next_samples = self.pool.map(self._make_sample, [self.next + count + row for row in needed])
        samples = dict(zip(needed, current_samples, strict=True))
        pixels, targets = map(torch.stack, zip(*(samples[row] for row in row_numbers), strict=True))
        if is_mixed:
            others = map(torch.stack, zip(*(samples[row] for row in partners), strict=True))
            pixels, targets = self._mix(pixels, targets, *others)
        self.next += count
        return pixels, targets

    def _make_sample(self, number: int) -> Sample:
        stage = self.stage
        index = self.shuffled(number, len(self.images))
        random = numpy.random.default_rng((*self.key, number, 1))
        image = self.images.image(index, self.channels)
        changes: dict[str, Any] = {}
        if stage.crop < 1:
            box = draw_random_box(random, image.size, stage.crop)
            image = image.resize(self.size[::-1], self.processor.resample, box=box)
            changes = {"do_resize": False, "do_center_crop": False}
        pixels = preprocess(self.processor, [image], **changes)[0]
        if stage.flip and random.random() < stage.flip:
            pixels = pixels.flip(-1)
        if stage.shift:
            pixels = pixels.roll(tuple(random.integers(-stage.shift, stage.shift + 1, 2).tolist()), (1, 2))
        if stage.erase and random.random() < stage.erase:
            left, top, right, bottom = map(round, draw_random_box(random, self.size[::-1], *ERASED_AREA))
            erased = pixels[:, top:bottom, left:right]
            erased.copy_(torch.from_numpy(random.standard_normal(erased.shape)))
        target = torch.full((self.num_classes,), stage.smoothing / self.num_classes)
        target[self.images.labels[index]] += 1 - stage.smoothing
        return pixels, target

    def _mix(
        self, pixels: torch.Tensor, targets: torch.Tensor, other_pixels: torch.Tensor, other_targets: torch.Tensor
    ) -> Sample:
        """Apply mixup or CutMix to each image and its neighbor in the batch, in one proportion for the whole batch."""
        random = numpy.random.default_rng((*self.key, self.next, 2))
        height, width = self.size
        use_cutmix = bool(self.stage.cutmix) and (not self.stage.mixup or random.random() < 0.5)
        alpha = self.stage.cutmix if use_cutmix else self.stage.mixup
        share = random.beta(alpha, alpha)  # the image's share in the mixture; the neighbor has the rest
        if use_cutmix:
            half_row, half_column = ((1 - share) ** 0.5 * side / 2 for side in self.size)
            row, column = random.random() * height, random.random() * width
            top, bottom = max(0, round(row - half_row)), min(height, round(row + half_row))
            left, right = max(0, round(column - half_column)), min(width, round(column + half_column))
            pixels[:, :, top:bottom, left:right] = other_pixels[:, :, top:bottom, left:right]
            share = 1 - max(0, bottom - top) * max(0, right - left) / (height * width)
        else:
            pixels = share * pixels + (1 - share) * other_pixels
        return pixels, share * targets + (1 - share) * other_targets

    def close(self) -> None:
        self.pool.shutdown(wait=True, cancel_futures=True)


def draw_random_box(
    random: numpy.random.Generator, size: tuple[int, int], min_area: float, max_area: float = 1.0
) -> tuple[float, float, float, float]:
    """Return left, top, right, bottom of a random box in an image of `size` (width, height); areas are fractions of it."""
    area = random.uniform(min_area, max_area)
    aspect = numpy.exp(random.uniform(-numpy.log(MAX_ASPECT), numpy.log(MAX_ASPECT)))
    width, height = min(1.0, (area * aspect) ** 0.5), min(1.0, (area / aspect) ** 0.5)
    left, top = random.uniform(0, 1 - width), random.uniform(0, 1 - height)
    return left * size[0], top * size[1], (left + width) * size[0], (top + height) * size[1]


@torch.no_grad()
def top1_accuracy(
    model: Any, images: LabeledImages, processor: Any, batch_size: int = 128, bar: str | None = None
) -> float:
    """Return the top-1 accuracy of an image classifier in eval mode, from 0 to 1. `bar` is the label of a progress bar."""
    was_training = model.training
    num_correct = 0
    model.eval()
    for indices in tqdm(torch.arange(len(images)).split(batch_size), bar, unit="batch", disable=bar is None):
        batch = [images.image(index, getattr(model.config, "num_channels", 3)) for index in indices.tolist()]
        pixels = preprocess(processor, batch).to(model.device, model.dtype)
        predicted = model(pixel_values=pixels).logits.argmax(-1).cpu()
        num_correct += int((predicted == images.labels[indices]).sum())
    model.train(was_training)
    return num_correct / len(images)
