"""Score image pipelines (FID, sFID, IS, precision, recall, CLIP score) and image classifiers (top-1 accuracy).

Class folders are matched to a classifier's labels by name or, if no name matches, by their sorted order, as in ImageNet.
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import load_file, save_file
from tqdm import tqdm
from transformers import AutoImageProcessor

from ..checkpoints.file_io import atomic_file
from ..checkpoints.fingerprint import hash_json
from ..checkpoints.load import choose_device, load_classifier, wrap_errors
from ..checkpoints.values import at_least, checked, read_settings
from ..data import hash_files, hash_source, load_split
from ..training.datasets.images import IMAGE_ENDINGS, open_images, top1_accuracy
from ..training.datasets.latents import read_prompt_lines
from . import image_scores
from .image_scores import Moments
from .records import Results
from .subjects import VERSION, PipelineJudge, Sample, Subject, find_subjects, joined_processes, seed_of_sample

# Metric -> the features from which it is computed.
FEATURES = {"FID": "features", "sFID": "spatial", "IS": "logits", "precision": "features", "recall": "features"}
METRICS = (*FEATURES, "CLIP score")
DISTANCES = {"FID", "sFID"}  # metrics for which lower is better
REFERENCE_METRICS = {*DISTANCES, "precision", "recall"}  # metrics that compare with a reference
CHUNK = 1000  # images per file in the cache of features
MOMENTS = {"features": ("mu", "sigma"), "spatial": ("mu_s", "sigma_s")}  # names in ADM's .npz files


@checked
class ImageProtocol:
    """Settings of a recipe of kind "image": how images are generated and scored."""

    name: str = "images"  # of the task in tables
    images: int = at_least(1, 50_000)  # number of images
    classes: int | None = None  # number of classes, of which labels are drawn at random; not together with `prompts`
    prompts: str | Path | None = None  # file with one prompt per line, used in order, and again from the first
    sampling: dict = dataclasses.field(default_factory=dict)  # further arguments of the pipeline
    reference: str | Path | None = None  # ADM's .npz file, or a folder of images of one size
    extractor: object = "inception"  # or "module:function", or an `Extractor`
    weights: str | Path | None = None  # local file of Inception's weights
    clip: str | Path = "openai/clip-vit-large-patch14"  # folder or Hub id
    neighbors: int = at_least(1, 3)  # number of nearest neighbors for precision and recall
    splits: int = at_least(1, 10)  # number of splits for IS
    samples: str | Path = "out/samples"  # folder for the generated images, with a subfolder per model

    def validate_conditions(self) -> None:
        if self.classes is not None and self.prompts is not None:
            raise ValueError(f"prompts: got {self.prompts!r} with classes={self.classes}, expected one, not both.")


def judge_image_pipelines(models: object, args: Any) -> dict[str, Results]:
    """Score image pipelines, reusing known scores. All processes must call this; samples stay in the folder `samples`."""
    protocol = read_settings(ImageProtocol, args.recipe.settings)
    metrics = set(args.recipe.tasks)
    if unknown := sorted(metrics - set(METRICS)):
        raise ValueError(f"tasks: got {unknown[0]!r}, expected some of {', '.join(METRICS)}.")
    if metrics & REFERENCE_METRICS and not (protocol.reference and Path(protocol.reference).exists()):
        raise ValueError(f"settings: reference: got {protocol.reference!r}, expected an existing ADM .npz or folder.")
    if "CLIP score" in metrics and protocol.prompts is None:
        raise ValueError("settings: prompts: got None, expected a file of prompts for the CLIP score.")
    subjects = find_subjects(models, args, pipeline=True)
    with joined_processes() as state:
        progress = args.progress and state.is_main_process
        content = {name: getattr(protocol, name) for name in ("name", "classes", "sampling", "neighbors", "splits")}
        for name in ("reference", "prompts", "clip"):
            content[name] = hash_source(getattr(protocol, name), progress)
        extractor = None
        if metrics & set(FEATURES):
            device = choose_device(args.device or state.device)
            extractor = image_scores.find_extractor(protocol.extractor, protocol.weights, device)
            content["extractor"] = [extractor.name, extractor.genuine, extractor.version]
        return {subject.name: _Judge(subject, protocol, state, extractor, content).run() for subject in subjects}


class _Judge(PipelineJudge):
    """Scores one pipeline. `content`, model, number of images, and seed determine the scores."""

    noun, output_type = "images", "pil"

    def __init__(self, subject: Subject, protocol: Any, state: Any, extractor: Any, content: Mapping[str, Any]) -> None:
        self.count = min(protocol.images, subject.args.limit or protocol.images)
        super().__init__(subject, protocol, state, protocol.name, [self.count, content])
        self.extractor, self.content = extractor, content
        self.labels |= {metric: extractor.label(metric) for metric in self.labels if metric in FEATURES}

    def save(self, output: Any, path: Path) -> None:
        output.save(path, "PNG")

    def _features(self, images: Sequence[Any], cache: Path, label: str) -> dict[str, torch.Tensor] | None:
        """Return {name: features [N, ...]} of N images (paths or an array); None outside the main process.

        Each process stores its features in chunks, so that an interruption costs it one chunk at most.
        """
        chunks = {cache / f"{i // CHUNK:05d}.safetensors": images[i : i + CHUNK] for i in range(0, len(images), CHUNK)}
        mine = list(chunks.items())[self.state.process_index :: self.state.num_processes]
        missing = [(file, chunk) for file, chunk in mine if not file.is_file()]
        with tqdm(total=CHUNK * len(missing), desc=label, disable=not self.progress) as bar:
            for file, chunk in missing:
                batches = []
                for start in range(0, len(chunk), self.args.batch_size):
                    batch = [image_scores.read_image(image) for image in chunk[start : start + self.args.batch_size]]
                    if len({image.shape for image in batch}) > 1:
                        raise ValueError(f"{label}: got images of different sizes, expected one size.")
                    batches.append(self.extractor(torch.stack(batch)))
                    bar.update(len(batch))
                with atomic_file(file) as temporary:
                    save_file({name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}, temporary)
        self.state.wait_for_everyone()
        if not self.state.is_main_process:
            return None
        stored = [load_file(file) for file in chunks]
        features = {name: torch.cat([part[name] for part in stored]) for name in stored[0]}
        for metric, name in FEATURES.items():
            if metric in self.args.recipe.tasks and name not in features:
                expected = f"one that returns {name!r} for {metric}"
                raise ValueError(f"extractor: got {self.extractor.name!r}, expected {expected}.")
        return features

    def _reference(self, missing: set[str]) -> tuple[Any, dict[str, Moments]]:
        """Return features [N, D] of the reference, or None if not needed, and its moments by kind ("features", "spatial").

        Moments in an .npz file are Inception's. For another extractor, they are computed from the file's images.
        """
        path = Path(self.protocol.reference)
        moments: dict[str, Moments] = {}
        if path.is_dir():
            images: Any = sorted(file for file in path.rglob("*") if file.suffix.lower() in IMAGE_ENDINGS)
        else:
            message = f"reference: got {str(path)!r}, expected an .npz file"
            with wrap_errors(message), numpy.load(path, allow_pickle=False) as file:
                for name, arrays in MOMENTS.items():
                    if self.extractor.genuine and set(arrays) <= set(file.files):
                        moments[name] = Moments(*(torch.from_numpy(file[array]).double() for array in arrays))
                if not missing & {"precision", "recall"} and {FEATURES[x] for x in missing & DISTANCES} <= set(moments):
                    return None, moments
                images = file["arr_0"] if "arr_0" in file.files else ()
        if not len(images):
            raise ValueError(f"reference: got no images in {str(path)!r}, expected some for {self.extractor.name!r}.")
        cache = Path(self.protocol.samples) / f"reference-{hash_json(self.content)}"
        features = self._features(images, cache, "reference") or {}
        computed_moments = {name: Moments.of(features[name]) for name in MOMENTS if name in features}
        return features.get("features"), {**computed_moments, **moments}

    def _plan(self) -> list[Sample]:
        """Return one `Sample` per image. Class labels are drawn independently and uniformly, as by ADM and DiT."""
        protocol, count = self.protocol, self.count
        conditions: list[Any] = [None] * count
        if protocol.classes is not None:
            random = torch.Generator().manual_seed(self.seed)
            conditions = torch.randint(protocol.classes, (count,), generator=random).tolist()
        elif protocol.prompts is not None:
            with wrap_errors(f"prompts: got {str(protocol.prompts)!r}, expected a text file"):
                prompts = read_prompt_lines(Path(protocol.prompts))
            if not prompts:
                raise ValueError(f"prompts: got {str(protocol.prompts)!r}, an empty file, expected a prompt per line.")
            conditions = [prompts[index % len(prompts)] for index in range(count)]
        return [Sample(f"{i:06d}.png", c, seed_of_sample(self.seed, i)) for i, c in enumerate(conditions)]

    def measure(self, metrics: Sequence[str]) -> None:
        started, missing = time.perf_counter(), set(metrics)
        plan, count = self._plan(), self.count
        folder = self.folder / f"{self.task}-{count}"
        # Before images are generated, so that an invalid reference is reported early.
        reference: Any = self._reference(missing) if missing & REFERENCE_METRICS else (None, {})
        reference_features, reference_moments = reference
        self.make(folder, plan, {"plan": hash_json(plan)}, self.args.batch_size)
        paths = [folder / sample.name for sample in plan]
        features: Any = None
        if missing & set(FEATURES):
            features = self._features(paths, folder / f"features-{self.hash}", f"{self.subject.name}: features")
        if not self.state.is_main_process:
            return
        scores: dict[str, tuple[float, float | None]] = {}  # metric -> value, standard error
        for metric in missing & DISTANCES:
            kind = FEATURES[metric]
            distance = image_scores.frechet_distance(Moments.of(features[kind]), reference_moments[kind])
            scores[metric] = distance, None
        if "IS" in missing:
            scores["IS"] = image_scores.inception_score(features["logits"], self.protocol.splits, self.seed)
        if missing & {"precision", "recall"}:
            neighbors = self.protocol.neighbors
            precision, recall = image_scores.precision_recall(features["features"], reference_features, neighbors)
            scores["precision"] = precision, image_scores.fraction_error(precision, count)
            scores["recall"] = recall, image_scores.fraction_error(recall, len(reference_features))
        if "CLIP score" in missing:
            prompts = [sample.condition for sample in plan]
            values = image_scores.clip_scores(paths, prompts, self.protocol.clip, self.device, self.args.batch_size)
            scores["CLIP score"] = values.mean().item(), (values.std() / count**0.5).item() if count > 1 else None
        labeled = {self.labels[metric]: (*scores[metric], metric not in DISTANCES, count) for metric in metrics}
        self.subject.store_scores(self.task, labeled, self.hash, started, self.device)


@checked
class ClassificationProtocol:
    """Settings of a recipe of kind "classification"."""

    data: str | Path  # folder with a folder of images per class, or Hub id of a dataset
    name: str = "images"  # of the task in tables
    split: str = "validation"  # of a dataset
    processor: object = None  # an image processor, or a folder or Hub id of one; None means the model's own


def judge_classifiers(models: object, args: Any) -> dict[str, Results]:
    """Compute the top-1 accuracy of image classifiers, reusing known scores."""
    protocol = read_settings(ClassificationProtocol, args.recipe.settings)
    if list(args.recipe.tasks) != ["acc"]:
        raise ValueError(f"tasks: got {list(args.recipe.tasks)}, expected ['acc'] for classifiers.")
    subjects = find_subjects(models, args)
    processor: Any = protocol.processor
    if isinstance(processor, (str, Path)):
        with wrap_errors(f"settings: processor: got {str(processor)!r}, expected an image processor"):
            processor = AutoImageProcessor.from_pretrained(processor, trust_remote_code=args.trust_remote_code)
    folder = Path(protocol.data)
    images = open_images(folder if folder.is_dir() else load_split(str(folder), split=protocol.split), "test")
    names = list(images.classes()["id2label"].values())
    if args.limit and args.limit < len(images):
        chosen = [index * len(images) // args.limit for index in range(args.limit)]  # spread over the classes
        items = [images.items[number] for number in chosen]
        images = dataclasses.replace(images, items=items, labels=images.labels[chosen], class_names=names)
    data = hash_files(images.items, folder, args.progress) if folder.is_dir() else images.identity
    task, count = protocol.name, len(images)
    # The fingerprint of a model covers its own processor.
    task_hash = hash_json([VERSION, data, images.labels.tolist(), names, processor and processor.to_json_string()])
    for subject in subjects:
        if subject.knows(task=task, metric="acc", task_hash=task_hash):
            continue
        started = time.perf_counter()
        model, own_processor = subject.load(load_classifier)
        if (used_processor := processor or own_processor) is None:
            raise ValueError(f"settings: processor: got None, expected an image processor for {subject.name!r}.")
        bar = subject.name if args.progress else None
        accuracy = top1_accuracy(model, images.renumber_for(model.config), used_processor, args.batch_size, bar)
        scores = {"acc": (accuracy, image_scores.fraction_error(accuracy, count), True, count)}
        subject.store_scores(task, scores, task_hash, started, model.device)
    return {subject.name: subject.kept.where(task=task, limit=args.limit) for subject in subjects}
