"""Judging image classifiers: top-1 accuracy on labeled images, as in table 2 of the paper.

The model's own image processor prepares the images, in color or, for a model of one channel, in gray. Folders of classes are
matched to the model's labels by name, and only where no name matches by their order, which is how ImageNet's are numbered.
"""

import dataclasses
import time
from pathlib import Path

import torch
from huggingface_hub.dataclasses import strict
from PIL import Image
from tqdm import tqdm
from transformers import AutoImageProcessor

from ..checkpoints.load import LOADING_ERRORS, first_line, load_classifier
from ..checkpoints.values import read_settings
from ..training.pictures import label_order, open_pictures
from .image_scores import hash_files, share_error
from .records import Results, hash_of
from .subjects import VERSION, find_subjects


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
    subjects = find_subjects(models, asked)
    pictures, numbers, data = read_examples(protocol, asked.limit, asked.progress)
    about = [pictures.labels[numbers].tolist(), _class_names(pictures), _hash_processor(protocol.processor)]
    task, task_hash = protocol.name, hash_of([VERSION, data, *about])
    compared = {}
    for subject in subjects:
        if not subject.knows(task, "acc", task_hash):
            started = time.perf_counter()
            model, processor = _load(subject, asked, protocol.processor)
            count = len(numbers)
            share = _count_right(model, processor, pictures, numbers, asked, subject.name) / count
            scores = {"acc": (share, share_error(share, count), True, count)}
            subject.keep(task, scores, task_hash, started, model.device)
        compared[subject.name] = Results(r for r in subject.kept if r.task == task and r.limit == asked.limit)
    return compared


def read_examples(protocol, limit=None, progress=False):
    """(`Pictures`, the numbers of those to judge, hash of the bytes of a folder's images or of a data set by itself)."""
    if not protocol.data:
        raise ValueError("settings: data is None; expected a folder with one folder of images per class, or a data set")
    folder, table = Path(protocol.data), None
    if not folder.is_dir():
        import datasets

        try:
            table = datasets.load_dataset(str(protocol.data), split=protocol.split)
        except LOADING_ERRORS as error:
            raise ValueError(f"data: {protocol.data!r} cannot be read: {first_line(error)}") from error
    pictures = open_pictures(folder if table is None else table, "test")
    count = min(limit or len(pictures), len(pictures))
    chosen = [index * len(pictures) // count for index in range(count)]  # spread over the classes
    if table is not None:
        return pictures, chosen, pictures.identity
    return (
        pictures,
        chosen,
        hash_files([pictures.items[number] for number in chosen], folder, "data: reading", progress),
    )


def _class_names(pictures):
    return list(pictures.classes()["id2label"].values())


def _hash_processor(given):
    """Of an image processor; None for the model's own, which the fingerprint of the model covers."""
    if isinstance(given, (str, Path)):
        return hash_files(Path(given).iterdir(), given) if Path(given).is_dir() else str(given)
    if given is None or hasattr(given, "to_json_string"):
        return given and given.to_json_string()
    if not isinstance(getattr(given, "version", None), str):
        raise ValueError("settings: processor has no version; expected a text that changes when what it computes does")
    return given.version


def _count_right(model, processor, pictures, numbers, asked, what):
    """How many of the pictures the model names right. what: a word for the bar."""
    order = label_order(model.config, _class_names(pictures))
    mode = "L" if getattr(model.config, "num_channels", 3) == 1 else "RGB"
    right, size = 0, asked.batch_size
    with tqdm(total=len(numbers), desc=what, disable=not asked.progress) as bar:
        for start in range(0, len(numbers), size):
            batch = numbers[start : start + size]
            images = [pictures.items[number] for number in batch]
            images = [Image.open(image) if isinstance(image, (str, Path)) else image for image in images]
            inputs = processor(images=[image.convert(mode) for image in images], return_tensors="pt")
            pixels = inputs["pixel_values"].to(model.device, model.dtype)
            with torch.inference_mode():
                said = model(pixel_values=pixels).logits.argmax(-1).tolist()
            labels = pictures.labels[batch].tolist()
            right += sum(order[label] == one for label, one in zip(labels, said, strict=True))
            bar.update(len(batch))
    return right


def _load(subject, asked, processor):
    """(model, image processor); ValueError when one of them cannot be loaded."""
    model, own = subject.source, None
    if not subject.loaded:
        model, own = load_classifier(model, dtype=asked.dtype, device=asked.device, **subject.where)
    elif processor is None:
        raise ValueError(f"settings: processor is None; a loaded model such as {subject.name!r} needs one")
    if isinstance(processor, (str, Path)):
        try:
            processor = AutoImageProcessor.from_pretrained(processor, trust_remote_code=asked.trust_remote_code)
        except LOADING_ERRORS as error:
            raise ValueError(f"settings: processor {str(processor)!r} cannot be loaded: {first_line(error)}") from error
    return model.eval(), processor or own
