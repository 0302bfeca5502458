"""Judging image pipelines (FID, sFID, IS, precision, recall, CLIP score) and image classifiers (top-1 accuracy).

Any diffusers pipeline that takes class labels or prompts is sampled into a folder, resumably and on several processes;
scores are computed from the files. A score counts as known only for the same weights, protocol, reference, number of
images and seed. A classifier's images are prepared by its own image processor; folders of classes are matched to its labels
by name, and only where no name matches by their order, as ImageNet's are.
"""

import dataclasses
import time
from pathlib import Path

import numpy
import torch
from transformers import AutoImageProcessor

from ..checkpoints.fingerprint import hash_json
from ..checkpoints.load import choose_device, load_classifier, wrap_errors
from ..checkpoints.values import at_least, checked, read_settings
from ..data import load_split
from ..training.datasets.images import LabeledImages, open_images, top1_accuracy
from ..training.datasets.latents import prompt_lines
from .image_scores import (
    PICTURES,
    Moments,
    clip_scores,
    extract_features,
    find_extractor,
    frechet_distance,
    hash_files,
    hash_place,
    inception_score,
    precision_recall,
    share_error,
)
from .records import Results
from .subjects import VERSION, PipelineJudge, Sample, find_subjects, joined_processes, seed_of_sample

NEEDS = {"FID": "features", "sFID": "spatial", "IS": "logits", "precision": "features", "recall": "features"}
METRICS = (*NEEDS, "CLIP score")
COMPARED = set(NEEDS) - {"IS"}  # with a reference
MOMENTS = {"features": ("mu", "sigma"), "spatial": ("mu_s", "sigma_s")}  # what ADM's .npz files call them


@checked
class ImageProtocol:
    """How images are made and scored; the settings of a recipe of kind "image".

    name: of the task in tables. images: how many. classes: labels are drawn from so many classes; prompts: or the
    conditions are the lines of this file, in order and again from the start. sampling: further arguments of the pipeline.
    reference: ADM's .npz (arr_0; mu, sigma, mu_s, sigma_s) or a folder of images of one size. extractor: "inception",
    "module:function", or an `Extractor`; weights: a local file of Inception's. clip: folder or id of a CLIP model.
    neighbors, splits: of precision and recall, of IS. samples: folder to make; each model has its own in it.
    """

    name: str = "images"
    images: int = at_least(1, 50_000)
    classes: int | None = None
    prompts: str | Path | None = None
    sampling: dict = dataclasses.field(default_factory=dict)
    reference: str | Path | None = None
    extractor: object = "inception"
    weights: str | Path | None = None
    clip: str | Path = "openai/clip-vit-large-patch14"
    neighbors: int = at_least(1, 3)
    splits: int = at_least(1, 10)
    samples: str | Path = "out/samples"

    def validate_conditions(self):
        """Of one kind."""
        if self.classes is not None and self.prompts is not None:
            raise ValueError(f"classes is {self.classes} and prompts {self.prompts!r}; expected one of them")

    def check(self, wanted):
        """ValueError where a score of `wanted` lacks a file or folder that it needs."""
        if unknown := sorted(wanted - set(METRICS)):
            raise ValueError(f"task {unknown[0]!r} is no image score; expected {', '.join(METRICS)}")
        path = Path(self.reference or "")
        if wanted & COMPARED and not ((path.suffix == ".npz" and path.is_file()) or path.is_dir()):
            expected = "a folder of images or ADM's .npz file"
            raise ValueError(f"settings: reference is {self.reference!r}; expected {expected}")
        if "CLIP score" in wanted and self.prompts is None:
            raise ValueError("settings: prompts is None; expected a file of prompts for the CLIP score")


def judge_image_pipelines(models, asked):
    """name -> `Results` of what was asked for. models: as `evaluate` takes them. asked: an `Asked`."""
    protocol, wanted = read_settings(ImageProtocol, asked.recipe.settings), set(asked.recipe.tasks)
    protocol.check(wanted)
    subjects = find_subjects(models, asked, pipeline=True)
    with joined_processes() as state:
        progress = asked.progress and state.is_main_process
        # what decides the scores besides model, number and seed, with hashes in place of files
        content = {name: getattr(protocol, name) for name in ("name", "classes", "sampling", "neighbors", "splits")}
        content |= {name: hash_place(getattr(protocol, name), progress) for name in ("reference", "prompts", "clip")}
        extractor = None
        if wanted & set(NEEDS):
            device = choose_device(asked.device or state.device)
            extractor = find_extractor(protocol.extractor, protocol.weights, device)
            content["extractor"] = [extractor.name, extractor.genuine, extractor.version]
        return {one.name: _Judge(one, asked, protocol, state, extractor, content).run() for one in subjects}


class _Judge(PipelineJudge):
    """One model, one protocol. extractor: None where no score needs features. content: what decides the scores."""

    def __init__(self, subject, asked, protocol, state, extractor, content):
        super().__init__(subject, asked, protocol, state)
        self.extractor, self.content = extractor, content
        self.count = min(protocol.images, asked.limit or protocol.images)
        self.hash = hash_json([VERSION, self.count, content])

    def run(self):
        """The scores asked for; what is known is not run again."""
        task, labels = self.protocol.name, {name: self.label(name) for name in self.asked.recipe.tasks}
        if missing := {name for name, label in labels.items() if not self.subject.knows(task, label, self.hash)}:
            self._score(missing)
        shown = {(task, label, self.count, self.asked.limit) for label in labels.values()}
        return Results(r for r in self.subject.kept if (r.task, r.metric, r.samples, r.limit) in shown)

    def label(self, name):
        """A score's name in tables, which says whose features it is of."""
        return self.extractor.label(name) if name in NEEDS else name

    def _features(self, images, cache, what):
        """name -> features of all images, kept in the folder `cache`; None on other processes than the first."""
        how = {"batch_size": self.asked.batch_size, "state": self.state, "progress": self.progress, "what": what}
        found = extract_features(images, self.extractor, cache, **how)
        for name, part in NEEDS.items():
            if name in self.asked.recipe.tasks and found is not None and part not in found:
                raise ValueError(f"extractor {self.extractor.name!r} gives no {part}, which {name} needs")
        return found

    def _reference(self, missing):
        """(features `[R, D]`, part -> `Moments`) of the reference, as far as the scores `missing` need them.

        The moments that an .npz holds were made by Inception and count only for it; else they come from its images.
        """
        path, moments = Path(self.protocol.reference), {}
        if path.is_dir():
            images = sorted(file for file in path.rglob("*") if file.suffix in PICTURES)
        else:
            about = f"reference: {str(path)!r} is no .npz file that can be read"
            with wrap_errors(about), numpy.load(path, allow_pickle=False) as file:
                stored = {part: names for part, names in MOMENTS.items() if set(names) <= set(file.files)}
                for part, names in stored.items() if self.extractor.genuine else ():
                    moments[part] = Moments(*(torch.from_numpy(file[name]) for name in names))
                distances = {NEEDS[name] for name in missing & {"FID", "sFID"}}
                if distances <= set(moments) and not missing & {"precision", "recall"}:
                    return None, moments
                images = file["arr_0"] if "arr_0" in file.files else ()
        if not len(images):
            raise ValueError(f"reference: {str(path)!r} holds no images, which {self.extractor.name!r} needs")
        cache = Path(self.protocol.samples) / f"reference-{hash_json(self.content)}"
        found = self._features(images, cache, "reference") or {}
        return found.get("features"), {part: Moments.of(found[part]) for part in MOMENTS if part in found} | moments

    def _plan(self):
        """One `Sample` per image; labels are drawn independently and uniformly, as in ADM's and DiT's protocols."""
        protocol, count = self.protocol, self.count
        conditions = [None] * count
        if protocol.classes is not None:
            random = torch.Generator().manual_seed(self.seed)
            conditions = torch.randint(protocol.classes, (count,), generator=random).tolist()
        elif protocol.prompts is not None:
            with wrap_errors(f"prompts: {str(protocol.prompts)!r} cannot be read"):
                prompts = prompt_lines(Path(protocol.prompts))
            if not prompts:
                raise ValueError(f"prompts: {str(protocol.prompts)!r} is empty; expected one prompt per line")
            conditions = [prompts[index % len(prompts)] for index in range(count)]
        return [Sample(f"{i:06d}.png", c, seed_of_sample(self.seed, i)) for i, c in enumerate(conditions)]

    def _score(self, missing):
        started, plan, name = time.perf_counter(), self._plan(), self.subject.name
        folder = self.folder / f"{self.protocol.name}-{self.count}"
        # before the images, so that what is wrong with the reference is said early
        reference = self._reference(missing) if missing & COMPARED else None
        identity = {"plan": hash_json([dataclasses.astuple(sample) for sample in plan])}
        sampling = {"output_type": "pil", **self.protocol.sampling}
        how = {"batch_size": self.asked.batch_size, "what": f"{name}: images"}
        self.make(folder, plan, identity, sampling, lambda image, path: image.save(path, "PNG"), **how)
        paths, found = [folder / sample.name for sample in plan], None
        if missing & set(NEEDS):
            found = self._features(paths, folder / f"features-{self.hash}", f"{name}: features")
        if self.state.is_main_process:
            scores = self._feature_scores(missing, found, reference)
            if "CLIP score" in missing:
                prompts = [sample.condition for sample in plan]
                values = clip_scores(paths, prompts, self.protocol.clip, self.device, self.asked.batch_size)
                error = (values.std() / len(values) ** 0.5).item() if len(values) > 1 else None
                scores["CLIP score"] = values.mean().item(), error, True, len(values)
            self.subject.keep(self.protocol.name, scores, self.hash, started, self.device, beside=True)

    def _feature_scores(self, missing, found, reference):
        """name in tables -> (value, standard error, higher is better, samples). found: features of the images by name."""
        scores, count = {}, self.count
        for name in missing & {"FID", "sFID"}:
            part = NEEDS[name]
            scores[name] = frechet_distance(Moments.of(found[part]), reference[1][part]), None, False, count
        if "IS" in missing:
            scores["IS"] = *inception_score(found["logits"], self.protocol.splits, self.seed), True, count
        if missing & {"precision", "recall"}:
            pair = precision_recall(found["features"], reference[0], self.protocol.neighbors)
            for name, value, size in zip(("precision", "recall"), pair, (count, len(reference[0])), strict=True):
                scores[name] = value, share_error(value, size), True, count
        return {self.label(name): scores[name] for name in scores if name in missing}


@checked
class ClassificationProtocol:
    """The settings of a recipe of kind "classification".

    name: of the task in tables. data: a folder with one folder of images per class, or the id of a data set with the
    columns "image" and "label". split: of a data set. processor: folder or id of an image processor, or one of
    transformers as an object; None: the model's own.
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
    subjects, processor = find_subjects(models, asked), protocol.processor
    if isinstance(processor, (str, Path)):
        with wrap_errors(f"settings: processor {str(processor)!r} cannot be loaded"):
            processor = AutoImageProcessor.from_pretrained(processor, trust_remote_code=asked.trust_remote_code)
    pictures, names, data = _read_examples(protocol, asked)
    known = processor and processor.to_json_string()  # that of a model is part of its fingerprint
    task, task_hash = protocol.name, hash_json([VERSION, data, pictures.labels.tolist(), names, known])
    compared = {}
    for subject in subjects:
        if not subject.knows(task, "acc", task_hash):
            started, count, model, own = time.perf_counter(), len(pictures), subject.source, None
            if not subject.loaded:
                model, own = load_classifier(model, dtype=asked.dtype, device=asked.device, **subject.where)
            elif processor is None:
                raise ValueError(f"settings: processor is None; a loaded model such as {subject.name!r} needs one")
            numbered = pictures.renumber_for(model.config)
            bar = subject.name if asked.progress else None
            share = top1_accuracy(model, numbered, processor or own, asked.batch_size, bar)
            scores = {"acc": (share, share_error(share, count), True, count)}
            subject.keep(task, scores, task_hash, started, model.device)
        compared[subject.name] = Results(r for r in subject.kept if r.task == task and r.limit == asked.limit)
    return compared


def _read_examples(protocol, asked):
    """(`LabeledImages` to judge, names of classes, hash of the bytes of a folder's images or of a data set by itself)."""
    if not protocol.data:
        raise ValueError("settings: data is None; expected a folder with one folder of images per class, or a data set")
    folder = Path(protocol.data)
    pictures = open_images(folder if folder.is_dir() else load_split(str(folder), split=protocol.split), "test")
    names, size = list(pictures.classes()["id2label"].values()), len(pictures)
    if asked.limit and asked.limit < size:
        chosen = [index * size // asked.limit for index in range(asked.limit)]  # spread over the classes
        items = [pictures.items[number] for number in chosen]
        pictures = LabeledImages(items, pictures.labels[chosen], pictures.name, names, pictures.identity)
    data = hash_files(pictures.items, folder, asked.progress) if folder.is_dir() else pictures.identity
    return pictures, names, data
