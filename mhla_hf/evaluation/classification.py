"""Judging image classifiers: top-1 accuracy on labelled images, as in table 2 of the paper.

The model's own image processor prepares the images, in colour or, for a model of one channel, in grey. Unusual: folders
of classes are matched to the model's labels by name, and only where no name matches by their order, which is how
ImageNet's folders are numbered.
"""

import dataclasses
import hashlib
import logging
import time
from pathlib import Path

import torch
from PIL import Image
from tqdm import tqdm
from transformers import AutoImageProcessor, AutoModelForImageClassification

from ..checkpoints.checksums import hash_file
from ..checkpoints.load import (
    DTYPES,
    LOADING_ERRORS,
    check_model_name,
    check_whole,
    checked_files,
    choose_device,
    first_line,
)
from .features import PICTURES
from .identity import hash_files, hash_thing
from .image import VERSION, PipelineJudge, read_protocol
from .image_metrics import share_error
from .processes import Processes
from .results import Results
from .samples import hash_of
from .subjects import find_subjects

logger = logging.getLogger("mhla_hf")
READING = "data: reading"


@dataclasses.dataclass(frozen=True)
class ClassificationProtocol:
    """The settings of a recipe of kind "classification".

    name: of the task in tables. data: a folder with one folder of images per class, or the id of a data set with the
    columns "image" and "label". split: of a data set. processor: folder or id of an image processor; None: the model's own.
    """

    name: str = "images"
    data: str | None = None
    split: str = "validation"
    processor: object = None


def judge_classifiers(models, asked):
    """name -> `Results` of what was asked for. models: as `evaluate` takes them. asked: an `Asked`."""
    protocol = read_protocol(ClassificationProtocol, asked.recipe.settings)
    if list(asked.recipe.tasks) != ["acc"]:
        raise ValueError(f"tasks: got {list(asked.recipe.tasks)}; expected ['acc'] for classifiers")
    if not protocol.data:
        raise ValueError("settings: data is None; expected a folder with one folder of images per class, or a data set")
    subjects = find_subjects(models, output=asked.output, dtype=asked.dtype, revision=asked.revision)
    examples = read_examples(protocol, asked.limit, asked.progress)
    return {subject.name: _Judge(subject, asked, protocol, Processes()).run(examples) for subject in subjects}


def read_examples(protocol, limit=None, progress=False):
    """(images, labels, class names, hash): images are paths or PIL images, labels indices into the names.

    hash: of the images' bytes, 16 hex digits. progress: a bar while they are read for it.
    """
    folder = Path(protocol.data)
    if not folder.is_dir():
        return _read_data_set(protocol, limit, progress)
    names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    found = [
        (path, label)
        for label, name in enumerate(names)
        for path in sorted((folder / name).iterdir())
        if path.suffix in PICTURES
    ]
    if not found:
        raise ValueError(
            f"data: {str(folder)!r} holds no folders of images; expected one per class, such as in photos/test (the folder "
            "above train and test is what training and ablate take)"
        )
    if limit:  # spread over the classes
        found = [found[index * len(found) // limit] for index in range(min(limit, len(found)))]
    images = [path for path, _ in found]
    return images, [label for _, label in found], names, hash_files(images, folder, READING, progress)


def _read_data_set(protocol, limit, progress):
    """The same of a data set; its images are opened when they are asked for."""
    import datasets

    try:
        data = datasets.load_dataset(str(protocol.data), split=protocol.split)
        data = data.select(range(min(limit or len(data), len(data))))
        images, labels, names = data["image"], list(data["label"]), list(data.features["label"].names)
        stored = data.cast_column("image", datasets.Image(decode=False))["image"]
        shown = tqdm(stored, desc=READING, disable=not progress)
        bytes_hash = hash_of([_hash_stored(**image) for image in shown])
    except (OSError, ValueError, KeyError, AttributeError, RuntimeError) as error:
        raise ValueError(f"data: {protocol.data!r} cannot be read: {first_line(error)}") from error
    return images, labels, names, bytes_hash


def _hash_stored(bytes, path):
    """sha256 of an image as a data set stores it: its bytes, or the path of its file."""
    return hash_file(path) if bytes is None else hashlib.sha256(bytes).hexdigest()


class _Judge(PipelineJudge):
    """One classifier."""

    def run(self, examples):
        """The accuracy, from the records or computed."""
        images, labels, names, data = examples
        task, task_hash = self.protocol.name, hash_of([VERSION, data, labels, names, self._processor_hash()])
        if not self.known(task, "acc", task_hash):
            started = time.perf_counter()
            right = self._right(images, labels, names)
            share = right / len(labels)
            scores = {"acc": (share, share_error(share, len(labels)), True, len(labels))}
            self.keep(task, scores, task_hash, started)
        return Results(r for r in self.kept if r.task == task and r.limit == self.asked.limit)

    def _processor_hash(self):
        """Of the image processor; None for the model's own, which the fingerprint of the model covers."""
        given = self.protocol.processor
        if isinstance(given, (str, Path)) and Path(given).is_dir():
            return hash_files([file for file in Path(given).iterdir() if file.is_file()], given)
        return given if given is None or isinstance(given, str) else hash_thing(given)

    def _right(self, images, labels, names):
        """How many images the model names right."""
        model, processor = self._load()
        order = label_order(model.config, names)
        mode = "L" if getattr(model.config, "num_channels", 3) == 1 else "RGB"
        right, size = 0, self.asked.batch_size
        with tqdm(total=len(labels), desc=self.subject.name, disable=not self.asked.progress) as bar:
            for start in range(0, len(labels), size):
                batch = [_opened(image, mode) for image in images[start : start + size]]
                pixels = processor(images=batch, return_tensors="pt")["pixel_values"].to(model.device, model.dtype)
                with torch.inference_mode():
                    found = model(pixel_values=pixels).logits.argmax(-1).tolist()
                right += sum(
                    order[label] == said for label, said in zip(labels[start : start + size], found, strict=True)
                )
                bar.update(len(batch))
        return right

    def _load(self):
        source, processor, where = self.subject.source, self.protocol.processor, self.subject.where(self.asked)
        if processor is None and self.subject.loaded:
            raise ValueError(f"settings: processor is None; a loaded model such as {self.subject.name!r} needs one")
        try:
            if isinstance(processor, (str, Path)):
                trust = where["trust_remote_code"]
                processor = AutoImageProcessor.from_pretrained(processor, trust_remote_code=trust)
            if self.subject.loaded:
                return source.eval(), processor
            with checked_files(check_model_name(source), where["revision"]) as files:
                where |= files
                processor = processor or AutoImageProcessor.from_pretrained(str(source), **where)
                options = {"dtype": DTYPES.get(self.subject.dtype, "auto"), "use_safetensors": True, **where}
                model, info = AutoModelForImageClassification.from_pretrained(
                    str(source), output_loading_info=True, **options
                )
            model = model.to(choose_device(self.asked.device)).eval()
        except LOADING_ERRORS as error:
            raise ValueError(f"model {self.subject.name!r} cannot be loaded: {first_line(error)}") from error
        check_whole(self.subject.name, info)
        return model, processor


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


def _opened(image, mode):
    return Image.open(image).convert(mode) if isinstance(image, (str, Path)) else image.convert(mode)
