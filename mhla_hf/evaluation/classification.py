"""Judging image classifiers: top-1 accuracy on labeled images, as in table 2 of the paper.

The model's own image processor prepares the images, in color or, for a model of one channel, in gray. Folders of classes are
matched to the model's labels by name, and only where no name matches by their order, which is how ImageNet's are numbered.
"""

import dataclasses
import hashlib
import time
from pathlib import Path

import torch
from huggingface_hub.dataclasses import strict
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
from ..training.pictures import label_order
from .image_scores import PICTURES, hash_files, share_error, version_of
from .recipes import read_settings
from .records import Results, hash_of
from .subjects import VERSION, find_subjects, keep_scores, known_score

READING = "data: reading"


@strict
@dataclasses.dataclass
class ClassificationProtocol:
    """The settings of a recipe of kind "classification".

    name: of the task in tables. data: a folder with one folder of images per class, or the id of a data set with the
    columns "image" and "label". split: of a data set. processor: folder or id of an image processor, or one as an object,
    of transformers or with a text `version` that changes when what it does changes; None: the model's own.
    """

    name: str = "images"
    data: str | Path | None = None
    split: str = "validation"
    processor: object = None


def judge_classifiers(models, asked):
    """name -> `Results` of what was asked for. models: as `evaluate` takes them. asked: an `Asked`."""
    protocol = read_settings(ClassificationProtocol, asked.recipe.settings)
    if list(asked.recipe.tasks) != ["acc"]:
        raise ValueError(f"tasks: got {list(asked.recipe.tasks)}; expected ['acc'] for classifiers")
    if not protocol.data:
        raise ValueError("settings: data is None; expected a folder with one folder of images per class, or a data set")
    subjects = find_subjects(models, output=asked.output, dtype=asked.dtype, revision=asked.revision)
    processor = _hash_processor(protocol.processor)
    images, labels, names, data = read_examples(protocol, asked.limit, asked.progress)
    task, task_hash = protocol.name, hash_of([VERSION, data, labels, names, processor])
    compared = {}
    for subject in subjects:
        kept = subject.known(asked)
        if not known_score(kept, subject, asked, task, "acc", task_hash):
            started = time.perf_counter()
            model, processor = _load(subject, asked, protocol.processor)
            share = _count_right(model, processor, images, labels, names, asked, subject.name) / len(labels)
            scores = {"acc": (share, share_error(share, len(labels)), True, len(labels))}
            kept = keep_scores(kept, subject, asked, task, scores, task_hash, started, model.device)
        compared[subject.name] = Results(r for r in kept if r.task == task and r.limit == asked.limit)
    return compared


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


def _hash_processor(given):
    """Of an image processor; None for the model's own, which the fingerprint of the model covers."""
    if isinstance(given, (str, Path)) and Path(given).is_dir():
        return hash_files([file for file in Path(given).iterdir() if file.is_file()], given)
    if given is None or isinstance(given, str):
        return given
    if hasattr(given, "to_json_string"):
        return [type(given).__name__, given.to_json_string()]
    return version_of(given, "settings: processor")


def _count_right(model, processor, images, labels, names, asked, what):
    """How many images the model names right. what: a word for the bar."""
    order = label_order(model.config, names)
    mode = "L" if getattr(model.config, "num_channels", 3) == 1 else "RGB"
    right, size = 0, asked.batch_size
    with tqdm(total=len(labels), desc=what, disable=not asked.progress) as bar:
        for start in range(0, len(labels), size):
            batch = [_opened(image, mode) for image in images[start : start + size]]
            pixels = processor(images=batch, return_tensors="pt")["pixel_values"].to(model.device, model.dtype)
            with torch.inference_mode():
                said = model(pixel_values=pixels).logits.argmax(-1).tolist()
            right += sum(order[label] == one for label, one in zip(labels[start : start + size], said, strict=True))
            bar.update(len(batch))
    return right


def _load(subject, asked, processor):
    """(model, image processor); ValueError when one of them cannot be loaded."""
    source, where = subject.source, subject.where(asked)
    if processor is None and subject.loaded:
        raise ValueError(f"settings: processor is None; a loaded model such as {subject.name!r} needs one")
    try:
        if isinstance(processor, (str, Path)):
            processor = AutoImageProcessor.from_pretrained(processor, trust_remote_code=where["trust_remote_code"])
        if subject.loaded:
            return source.eval(), processor
        with checked_files(check_model_name(source), where["revision"]) as files:
            where |= files
            processor = processor or AutoImageProcessor.from_pretrained(str(source), **where)
            options = {"dtype": DTYPES.get(subject.dtype, "auto"), "use_safetensors": True, **where}
            model, info = AutoModelForImageClassification.from_pretrained(
                str(source), output_loading_info=True, **options
            )
        model = model.to(choose_device(asked.device)).eval()
    except LOADING_ERRORS as error:
        raise ValueError(f"model {subject.name!r} cannot be loaded: {first_line(error)}") from error
    check_whole(subject.name, info)
    return model, processor


def _opened(image, mode):
    return Image.open(image).convert(mode) if isinstance(image, (str, Path)) else image.convert(mode)
