"""Score image pipelines (FID, sFID, IS, precision, recall, CLIP score) and image classifiers (top-1 accuracy).

Folders of classes are matched to a classifier's labels by name, or by their order, as in ImageNet, if no name matches.
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
from ..data import load_split
from ..training.datasets.images import IMAGE_ENDINGS, open_images, top1_accuracy
from ..training.datasets.latents import read_prompt_lines
from . import image_scores
from .image_scores import Moments
from .records import Results
from .subjects import VERSION, PipelineJudge, Sample, Subject, find_subjects, joined_processes, seed_of_sample

FEATURES_BY_METRIC = {
    "FID": "features",
    "sFID": "spatial",
    "IS": "logits",
    "precision": "features",
    "recall": "features",
}
CHUNK = 1000  # images per file in the cache of features
METRICS = (*FEATURES_BY_METRIC, "CLIP score")
REFERENCE_METRICS = set(FEATURES_BY_METRIC) - {"IS"}  # metrics that compare with a reference
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
            raise ValueError(f"prompts: got {self.prompts!r} and {self.classes} classes, expected one of the two.")


def judge_image_pipelines(models: object, args: Any) -> dict[str, Results]:
    """Score image pipelines, reusing known scores. All processes must call this; samples stay in the folder `samples`."""
    protocol = read_settings(ImageProtocol, args.recipe.settings)
    metrics = set(args.recipe.tasks)
    if unknown := sorted(metrics - set(METRICS)):
        raise ValueError(f"tasks: got {unknown[0]!r}, expected some of {', '.join(METRICS)}.")
    path = Path(protocol.reference or "")
    if metrics & REFERENCE_METRICS and not ((path.suffix == ".npz" and path.is_file()) or path.is_dir()):
        expected = "a folder of images or ADM's .npz file"
        raise ValueError(f"settings: reference: got {protocol.reference!r}, expected {expected}.")
    if "CLIP score" in metrics and protocol.prompts is None:
        raise ValueError("settings: prompts: got None, expected a file of prompts for the CLIP score.")
    subjects = find_subjects(models, args, pipeline=True)
    with joined_processes() as state:
        progress = args.progress and state.is_main_process
        content = {name: getattr(protocol, name) for name in ("name", "classes", "sampling", "neighbors", "splits")}
        for name in ("reference", "prompts", "clip"):
            content[name] = image_scores.hash_source(getattr(protocol, name), progress)
        extractor = None
        if metrics & set(FEATURES_BY_METRIC):
            device = choose_device(args.device or state.device)
            extractor = image_scores.find_extractor(protocol.extractor, protocol.weights, device)
            content["extractor"] = [extractor.name, extractor.genuine, extractor.version]
        return {subject.name: _Judge(subject, protocol, state, extractor, content).run() for subject in subjects}


class _Judge(PipelineJudge):
    """Scores one pipeline. `content`, model, number of images, and seed determine the scores."""

    def __init__(self, subject: Subject, protocol: Any, state: Any, extractor: Any, content: Mapping[str, Any]) -> None:
        super().__init__(subject, protocol, state)
        self.extractor, self.content = extractor, content
        self.count = min(protocol.images, self.args.limit or protocol.images)
        self.hash = hash_json([VERSION, self.count, content])

    def run(self) -> Results:
        """Return all requested scores, after measuring those that are not known."""
        task = self.protocol.name
        labels = {name: self.label(name) for name in self.args.recipe.tasks}
        key = {"task": task, "task_hash": self.hash}
        if missing := {name for name, label in labels.items() if not self.subject.knows(metric=label, **key)}:
            self._score(missing)
        requested = {(task, label, self.count, self.args.limit) for label in labels.values()}
        return Results(r for r in self.subject.kept if (r.task, r.metric, r.samples, r.limit) in requested)

    def label(self, name: str) -> str:
        return self.extractor.label(name) if name in FEATURES_BY_METRIC else name

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
        for metric, name in FEATURES_BY_METRIC.items():
            if metric in self.args.recipe.tasks and name not in features:
                expected = f"one with {name} features for {metric}"
                raise ValueError(f"extractor: got {self.extractor.name!r}, expected {expected}.")
        return features

    def _reference(self, missing: set[str]) -> tuple[Any, dict[str, Moments]]:
        """Return features [N, D] of the reference, or None if not needed, and its moments by kind ("features", "spatial").

        Moments in an .npz file are Inception's. For another extractor, they are computed from the file's images.
        """
        path = Path(self.protocol.reference)
        moments = {}
        if path.is_dir():
            images: Any = sorted(file for file in path.rglob("*") if file.suffix.lower() in IMAGE_ENDINGS)
        else:
            message = f"reference: got {str(path)!r}, expected an .npz file"
            with wrap_errors(message), numpy.load(path, allow_pickle=False) as file:
                stored = {name: arrays for name, arrays in MOMENTS.items() if set(arrays) <= set(file.files)}
                for name, arrays in stored.items() if self.extractor.genuine else ():
                    moments[name] = Moments(*(torch.from_numpy(file[array]) for array in arrays))
                needed_moments = {FEATURES_BY_METRIC[name] for name in missing & {"FID", "sFID"}}
                if needed_moments <= set(moments) and not missing & {"precision", "recall"}:
                    return None, moments
                images = file["arr_0"] if "arr_0" in file.files else ()
        if not len(images):
            raise ValueError(f"reference: got {str(path)!r} without images, expected some for {self.extractor.name!r}.")
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

    def _score(self, missing: set[str]) -> None:
        """Generate the images, then compute and store the `missing` metrics."""
        started = time.perf_counter()
        plan, name, count = self._plan(), self.subject.name, self.count
        folder = self.folder / f"{self.protocol.name}-{count}"
        # Before images are generated, so that an invalid reference is reported early.
        reference: Any = self._reference(missing) if missing & REFERENCE_METRICS else (None, {})
        reference_features, reference_moments = reference
        sampling = {"output_type": "pil", **self.protocol.sampling}
        options = {"batch_size": self.args.batch_size, "label": f"{name}: images"}
        identity = {"plan": hash_json(plan)}
        self.make(folder, plan, identity, sampling, lambda image, path: image.save(path, "PNG"), **options)
        paths = [folder / sample.name for sample in plan]
        features: Any = None
        if missing & set(FEATURES_BY_METRIC):
            features = self._features(paths, folder / f"features-{self.hash}", f"{name}: features")
        if not self.state.is_main_process:
            return
        scores: dict[str, tuple[Any, ...]] = {}  # metric -> value, standard error, higher is better, number of images
        for metric in missing & {"FID", "sFID"}:
            kind = FEATURES_BY_METRIC[metric]
            distance = image_scores.frechet_distance(Moments.of(features[kind]), reference_moments[kind])
            scores[metric] = distance, None, False, count
        if "IS" in missing:
            score, error = image_scores.inception_score(features["logits"], self.protocol.splits, self.seed)
            scores["IS"] = score, error, True, count
        if missing & {"precision", "recall"}:
            neighbors = self.protocol.neighbors
            precision, recall = image_scores.precision_recall(features["features"], reference_features, neighbors)
            scores["precision"] = precision, image_scores.fraction_error(precision, count), True, count
            scores["recall"] = recall, image_scores.fraction_error(recall, len(reference_features)), True, count
        if "CLIP score" in missing:
            prompts = [sample.condition for sample in plan]
            values = image_scores.clip_scores(paths, prompts, self.protocol.clip, self.device, self.args.batch_size)
            error = (values.std() / count**0.5).item() if count > 1 else None
            scores["CLIP score"] = values.mean().item(), error, True, count
        labeled = {self.label(metric): scores[metric] for metric in scores if metric in missing}
        options = {"keep_other_sample_counts": True}
        self.subject.store_scores(self.protocol.name, labeled, self.hash, started, self.device, **options)


@checked
class ClassificationProtocol:
    """Settings of a recipe of kind "classification"."""

    name: str = "images"  # of the task in tables
    data: str | Path | None = None  # folder with a folder of images per class, or Hub id of a dataset
    split: str = "validation"  # of a dataset
    processor: object = None  # an image processor, or a folder or Hub id of one; None means the model's own


def judge_classifiers(models: object, args: Any) -> dict[str, Results]:
    """Compute the top-1 accuracy of image classifiers, reusing known scores."""
    protocol = read_settings(ClassificationProtocol, args.recipe.settings)
    if list(args.recipe.tasks) != ["acc"]:
        raise ValueError(f"tasks: got {list(args.recipe.tasks)}, expected ['acc'] for classifiers.")
    if not protocol.data:
        raise ValueError("settings: data: got none, expected a folder with a folder of images per class, or a dataset.")
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
    data = image_scores.hash_files(images.items, folder, args.progress) if folder.is_dir() else images.identity
    # The fingerprint of a model covers its own processor.
    processor_settings = processor and processor.to_json_string()
    task, count = protocol.name, len(images)
    task_hash = hash_json([VERSION, data, images.labels.tolist(), names, processor_settings])
    for subject in subjects:
        if subject.knows(task=task, metric="acc", task_hash=task_hash):
            continue
        started = time.perf_counter()
        model, own_processor = subject.load(load_classifier)
        if (used_processor := processor or own_processor) is None:
            raise ValueError(f"settings: processor: got None, expected one for the loaded model {subject.name!r}.")
        bar = subject.name if args.progress else None
        accuracy = top1_accuracy(model, images.renumber_for(model.config), used_processor, args.batch_size, bar)
        scores = {"acc": (accuracy, image_scores.fraction_error(accuracy, count), True, count)}
        subject.store_scores(task, scores, task_hash, started, model.device)
    return {x.name: Results(r for r in x.kept if (r.task, r.limit) == (task, args.limit)) for x in subjects}
