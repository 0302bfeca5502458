"""Judging image pipelines: FID, sFID, IS, precision, recall, CLIP score, GenEval, by a protocol of the recipe.

Any diffusers pipeline that takes class labels or prompts is sampled into a folder, resumably and on several processes;
scores are computed from the files. Unusual: a score counts as known only for the same weights, protocol, reference, number
of images and seed, and a distance in other features than Inception's is never called FID.
"""

import dataclasses
import logging
import math
import shlex
import time
import zipfile
from pathlib import Path

import numpy
import torch
from PIL import Image

from ..checkpoints.checksums import hash_file
from ..checkpoints.load import LOADING_ERRORS, choose_device, first_line, load_pipeline, without_questions
from ..checkpoints.machine import describe_hardware, describe_versions, now, source_commit
from .features import PICTURES, extract_features, find_extractor, read_image
from .geneval import judge_geneval
from .identity import hash_files, hash_thing
from .image_metrics import Moments, clip_scores, frechet_distance, inception_score, precision_recall, share_error
from .processes import joined_processes
from .results import Result, Results
from .samples import Sample, draw_labels, hash_of, make_samples, plan_hash, read_prompts, seed_of_sample
from .subjects import find_subjects, shown_path

logger = logging.getLogger("mhla_hf")
FEATURE_METRICS = ("FID", "sFID", "IS", "precision", "recall")
METRICS = (*FEATURE_METRICS, "CLIP score", "GenEval")
NEEDS = {"FID": "features", "sFID": "spatial", "IS": "logits", "precision": "features", "recall": "features"}
VERSION = "1"


@dataclasses.dataclass(frozen=True)
class ImageProtocol:
    """How images are made and scored; the settings of a recipe of kind "image".

    name: of the task in tables. images: how many. classes: labels are drawn from so many classes; prompts: or the
    conditions are the lines of this file, in order and again from the start. sampling: further arguments of the pipeline.
    reference: ADM's .npz (arr_0; mu, sigma, mu_s, sigma_s) or a folder of images of one size. extractor: "inception",
    "module:function", or an `Extractor`; weights: a local file of Inception's. clip: folder or id of a CLIP model.
    neighbours, splits: of precision and recall, of IS. samples: folder to make; each model has its own in it.
    geneval_*: the interpreter, script and detector folder of GenEval, its prompts (evaluation_metadata.jsonl), and
    images per prompt.
    """

    name: str = "images"
    images: int = 50_000
    classes: int | None = None
    prompts: str | None = None
    sampling: dict = dataclasses.field(default_factory=dict)
    reference: str | None = None
    extractor: object = "inception"
    weights: str | None = None
    clip: str = "openai/clip-vit-large-patch14"
    neighbours: int = 3
    splits: int = 10
    samples: str = "out/samples"
    geneval_python: str | None = None
    geneval_script: str | None = None
    geneval_detector: str | None = None
    geneval_prompts: str | None = None
    geneval_images: int = 4

    def __post_init__(self):
        for name in ("images", "neighbours", "splits", "geneval_images"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"settings: {name} is {value!r}; expected a whole number of at least 1")
        if self.classes is not None and self.prompts is not None:
            raise ValueError(f"settings: classes is {self.classes} and prompts {self.prompts!r}; expected one of them")
        if not isinstance(self.sampling, dict):
            raise ValueError(f"settings: sampling is {self.sampling!r}; expected the pipeline's arguments by name")


def read_protocol(cls, settings):
    """Settings of a recipe as a protocol of class `cls`; ValueError names what it does not have."""
    known = [field.name for field in dataclasses.fields(cls)]
    if unknown := sorted(set(settings) - set(known)):
        raise ValueError(f"settings: unknown {unknown[0]!r}; this recipe has {', '.join(known)}")
    return cls(**settings)


def judge_image_pipelines(models, asked):
    """name -> `Results` of what was asked for. models: as `evaluate` takes them. asked: an `Asked`."""
    protocol = read_protocol(ImageProtocol, asked.recipe.settings)
    _check(protocol, asked)
    subjects = find_subjects(models, output=asked.output, dtype=asked.dtype, revision=asked.revision, pipeline=True)
    compared = {}
    with joined_processes() as processes:
        extractor = None
        if set(asked.recipe.tasks) & set(FEATURE_METRICS):
            device = choose_device(processes.device(asked.device))
            extractor = find_extractor(protocol.extractor, protocol.weights, device)
            _try_extractor(extractor, protocol, asked.recipe.tasks)
        content = _content(protocol, extractor, asked.progress and processes.first)
        for subject in subjects:
            compared[subject.name] = _Judge(subject, asked, protocol, processes, extractor, content).run()
    return compared


def _check(protocol, asked):
    """All that can be known before anything is loaded."""
    wanted = set(asked.recipe.tasks)
    if unknown := sorted(wanted - set(METRICS)):
        raise ValueError(f"task {unknown[0]!r} is no image score; expected {', '.join(METRICS)}")
    if wanted & {"FID", "sFID", "precision", "recall"}:
        path = Path(protocol.reference) if protocol.reference else None
        if path is None or not (path.is_dir() or (path.suffix == ".npz" and path.is_file())):
            raise ValueError(
                f"settings: reference is {protocol.reference!r}; expected a folder of images or ADM's .npz file"
            )
    if "CLIP score" in wanted and protocol.prompts is None:
        raise ValueError("settings: prompts is None; expected a file of prompts for the CLIP score")
    if "GenEval" in wanted:
        for name in ("geneval_python", "geneval_script", "geneval_prompts"):
            path = getattr(protocol, name)
            if path is None or not Path(path).is_file():
                raise ValueError(f"settings: {name} is {path!r}; expected a file of a GenEval installation")


def _try_extractor(extractor, protocol, wanted):
    """ValueError when a user's extractor does not give what a score needs: tried on one image of the reference.

    Without one, as for IS alone or with ADM's moments, it is known only when there are samples.
    """
    image = None if extractor.genuine or protocol.reference is None else _first_image(Path(protocol.reference))
    if image is not None:
        _check_given(extractor, extractor(image[None]), wanted)


def _first_image(path):
    """uint8 `[3, H, W]`, the first of a reference, without reading the others; None where there is none."""
    if path.is_dir():
        files = _images(path)
        return read_image(files[0]) if files else None
    if not zipfile.is_zipfile(path):
        raise ValueError(f"reference: {str(path)!r} is no .npz file that can be read")
    with zipfile.ZipFile(path) as archive:
        if "arr_0.npy" not in archive.namelist():
            return None
        with archive.open("arr_0.npy") as stream:
            version = numpy.lib.format.read_magic(stream)
            read = {(1, 0): numpy.lib.format.read_array_header_1_0}.get(version, numpy.lib.format.read_array_header_2_0)
            shape, by_columns, dtype = read(stream)
            if by_columns or dtype != numpy.uint8 or len(shape) != 4 or not shape[0]:
                return None
            pixels = stream.read(math.prod(shape[1:]))
    return read_image(numpy.frombuffer(bytearray(pixels), dtype).reshape(shape[1:]))


def _check_given(extractor, found, wanted):
    """ValueError when what an extractor gave is not enough for the scores `wanted`."""
    for name in wanted:
        if name in NEEDS and NEEDS[name] not in found:
            raise ValueError(f"extractor {extractor.name!r} gives no {NEEDS[name]}, which {name} needs")


class PipelineJudge:
    """What judges of pipelines share: which scores are missing, the pipeline, and the records."""

    def __init__(self, subject, asked, protocol, processes):
        self.subject, self.asked, self.protocol, self.processes = subject, asked, protocol, processes
        self.seed = asked.seed or 0
        given = getattr(subject.source, "device", None) if subject.loaded else None
        self.device = choose_device(given or processes.device(asked.device))
        self.kept = processes.same(subject.known(asked) if processes.first else None)
        self._pipeline = None

    @property
    def pipeline(self):
        """Loaded when it is first needed; an object that was given stays where it is."""
        if self._pipeline is None:
            asked = self.asked
            self._pipeline = self.subject.source
            if not self.subject.loaded:
                self._pipeline = load_pipeline(
                    self.subject.source,
                    dtype=self.subject.dtype,
                    device=self.device,
                    **self.subject.where(asked),
                )
        return self._pipeline

    @property
    def folder(self):
        """Where this model's samples lie."""
        return Path(self.protocol.samples) / self.subject.name.replace("/", "--")

    def known(self, task, metric, task_hash):
        """Whether the score is there for the same weights, protocol, number, seed and precision."""
        return known_score(self.kept, self.subject, self.asked, task, metric, task_hash)

    def identity(self):
        """What decides samples besides their plan and the pipeline's arguments."""
        return {"fingerprint": self.subject.fingerprint, "dtype": self.subject.dtype}

    def keep(self, task, scores, task_hash, started, beside=False):
        """Put scores into the model's file. scores: metric -> (value, standard error, higher is better, samples)."""
        how = {"writes": self.processes.first, "beside": beside}
        self.kept = keep_scores(
            self.kept, self.subject, self.asked, task, scores, task_hash, started, self.device, **how
        )


def known_score(kept, subject, asked, task, metric, task_hash):
    """Whether `kept` has the score for the same weights, protocol, number, seed and precision."""
    return not asked.force and any(
        (record.task, record.metric, record.task_hash) == (task, metric, task_hash)
        and (record.limit, record.seed, record.dtype) == (asked.limit, asked.seed or 0, subject.dtype)
        and record.fingerprint == subject.fingerprint
        for record in kept
    )


def keep_scores(kept, subject, asked, task, scores, task_hash, started, device, writes=True, beside=False):
    """`kept` with new scores, written to the model's file where it has one.

    scores: metric -> (value, standard error, higher is better, samples). started: by time.perf_counter. beside: scores of
    other numbers of samples stay.
    """
    facts = {
        "task": task,
        "shots": 0,
        "limit": asked.limit,
        "task_version": VERSION,
        "task_hash": task_hash,
        "model": subject.shown,
        "revision": subject.commit,
        "fingerprint": subject.fingerprint,
        "versions": describe_versions(),
        "commit": source_commit(),
        "dtype": subject.dtype,
        "hardware": describe_hardware(device),
        "seed": asked.seed or 0,
        "command": asked.command or command_of(subject.shown, asked),
        "date": now(),
        "seconds": round(time.perf_counter() - started, 3),
    }
    records = [
        Result(metric=metric, value=value, stderr=error, higher_is_better=better, samples=samples, **facts)
        for metric, (value, error, better, samples) in scores.items()
    ]
    if writes:
        subject.store(records, beside)
    return kept.merge(records, beside)


def command_of(model, asked):
    """The shell line that gives the scores of a recipe again."""
    tasks = ["--tasks", ",".join(asked.recipe.tasks)]
    return shlex.join(["mhla-hf", "evaluate", model, *asked.recipe.words(shown_path), *tasks, *asked.words()])


def _content(protocol, extractor, progress):
    """What of a protocol decides the scores besides model, number and seed: a dict, with hashes in place of files."""
    content = dataclasses.asdict(dataclasses.replace(protocol, extractor=None))
    for name in ("samples", "images", *(key for key in content if key.startswith("geneval"))):
        content.pop(name)
    content["extractor"] = extractor and [extractor.name, extractor.genuine, hash_thing(extractor.function)]
    for name in ("reference", "prompts", "weights", "clip"):
        path = Path(content[name] or "")
        if content[name] and path.is_file():
            content[name] = hash_file(path)
        elif content[name] and path.is_dir():
            files = _images(path) if name == "reference" else [file for file in path.rglob("*") if file.is_file()]
            content[name] = hash_files(files, path, f"{name}: reading", progress)
    return content


class _Judge(PipelineJudge):
    """One model, one protocol. extractor: None where no score needs one. content: as `_content` gives it."""

    def __init__(self, subject, asked, protocol, processes, extractor, content):
        super().__init__(subject, asked, protocol, processes)
        self.extractor = extractor
        self.count = min(protocol.images, asked.limit or protocol.images)
        self.hash = hash_of([VERSION, self.count, content])

    def run(self):
        """The scores asked for; what is known is not run again."""
        wanted, protocol, extractor = list(self.asked.recipe.tasks), self.protocol, self.extractor
        labels = {
            name: extractor.label(name) if name in FEATURE_METRICS else name for name in wanted if name != "GenEval"
        }
        missing = [name for name, label in labels.items() if not self.known(protocol.name, label, self.hash)]
        if missing:
            self._score(missing)
        if "GenEval" in wanted:
            judge_geneval(self)
        names = {(protocol.name, label) for label in labels.values()}
        shown = [
            r for r in self.kept if ((r.task, r.metric) in names and r.samples == self.count) or r.task == "geneval"
        ]
        return Results(r for r in shown if r.limit == self.asked.limit and ("GenEval" in wanted or r.task != "geneval"))

    def plan(self):
        """One `Sample` per image."""
        protocol, count = self.protocol, self.count
        conditions = [None] * count
        if protocol.classes is not None:
            conditions = draw_labels(protocol.classes, count, self.seed)
        elif protocol.prompts is not None:
            prompts = read_prompts(protocol.prompts)
            conditions = [prompts[index % len(prompts)] for index in range(count)]
        return [Sample(f"{i:06d}.png", c, seed_of_sample(self.seed, i)) for i, c in enumerate(conditions)]

    def make(self, folder, plan, what):
        """Sample `plan` into `folder`."""
        make_samples(
            self.pipeline,
            folder,
            plan,
            identity={**self.identity(), "plan": plan_hash(plan)},
            sampling={"output_type": "pil", **self.protocol.sampling},
            batch_size=self.asked.batch_size,
            processes=self.processes,
            progress=self.asked.progress,
            save=lambda image, path: image.save(path, format="PNG"),
            what=what,
        )

    def _score(self, missing):
        started, plan = time.perf_counter(), self.plan()
        folder = self.folder / f"{self.protocol.name}-{self.count}"
        if self.processes.first:
            logger.info("%s: %d images in %s", self.subject.name, len(plan), folder)
        self.make(folder, plan, f"{self.subject.name}: images")
        paths = [folder / sample.name for sample in plan]
        scores = {}
        if set(missing) & set(FEATURE_METRICS):
            scores |= self._feature_scores(missing, paths, folder / f"features-{self.hash}")
        if "CLIP score" in missing and self.processes.first:
            scores["CLIP score"] = self._clip(plan, paths)
        if self.processes.first:
            self.keep(self.protocol.name, scores, self.hash, started, beside=True)

    def _feature_scores(self, missing, paths, cache):
        """Of the images at `paths`. cache: for features, in the folder of the images, so that they go with them."""
        extractor, protocol = self.extractor, self.protocol
        how = {
            "batch_size": self.asked.batch_size, "processes": self.processes, "progress": self.asked.progress,
        }  # fmt: skip
        sample = extract_features(paths, extractor, cache / "samples", what=f"{self.subject.name}: features", **how)
        reference = {}
        if set(missing) - {"IS", "CLIP score"}:
            reference = _reference(protocol.reference, extractor, cache / "reference", how, missing)
        if not self.processes.first:
            return {}
        _check_given(extractor, sample, missing)
        scores, count = {}, len(paths)
        for name, part in (("FID", "features"), ("sFID", "spatial")):
            if name in missing:
                distance = frechet_distance(Moments.of(sample[part]), reference[f"{part} moments"])
                scores[extractor.label(name)] = (distance, None, False, count)
        if "IS" in missing:
            mean, error = inception_score(sample["logits"], protocol.splits, self.seed)
            scores[extractor.label("IS")] = (mean, error, True, count)
        if {"precision", "recall"} & set(missing):
            found = precision_recall(sample["features"], reference["features"], protocol.neighbours)
            sizes = (count, len(reference["features"]))
            for name, value, size in zip(("precision", "recall"), found, sizes, strict=True):
                if name in missing:
                    scores[extractor.label(name)] = (value, share_error(value, size), True, count)
        return scores

    def _clip(self, plan, paths):
        from transformers import CLIPModel, CLIPProcessor

        try:
            with without_questions():
                model = CLIPModel.from_pretrained(self.protocol.clip).to(self.device).eval()
                processor = CLIPProcessor.from_pretrained(self.protocol.clip)
        except LOADING_ERRORS as error:
            raise ValueError(f"clip: {self.protocol.clip!r} cannot be loaded: {first_line(error)}") from error
        found, size = [], self.asked.batch_size
        for start in range(0, len(plan), size):
            images = [Image.open(path).convert("RGB") for path in paths[start : start + size]]
            prompts = [sample.condition for sample in plan[start : start + size]]
            found.append(clip_scores(images, prompts, model, processor))
        found = torch.cat(found)
        error = (found.std() / len(found) ** 0.5).item() if len(found) > 1 else None
        return (found.mean().item(), error, True, len(found))


def _images(folder):
    """Image files of a folder and the folders in it, sorted."""
    return sorted(path for path in Path(folder).rglob("*") if path.suffix in PICTURES)


def _reference(path, extractor, cache, how, missing):
    """What the scores need of the reference: "features" `[R, D]`, and moments of "features" and "spatial".

    The moments that an .npz holds were made by Inception and count only for it; else they come from its images.
    """
    path = Path(path)
    if path.is_dir():
        found = extract_features(_images(path), extractor, cache, what="reference", **how) if _images(path) else None
        if found is None and how["processes"].first:
            raise ValueError(f"reference: {str(path)!r} holds no images; expected {', '.join(PICTURES)}")
        given = {}
    else:
        with numpy.load(path, allow_pickle=False) as file:
            given = {name: file[name] for name in file.files if name in ("mu", "sigma", "mu_s", "sigma_s")}
            given = given if extractor.genuine else {}
            need = {"precision", "recall"} & set(missing) or not given
            if need and "arr_0" not in file.files:
                raise ValueError(f"reference: {str(path)!r} has no images (arr_0), which {extractor.name!r} needs")
            found = extract_features(file["arr_0"], extractor, cache, what="reference", **how) if need else {}
    reference = dict(found or {})
    for part, mean, covariance in (("features", "mu", "sigma"), ("spatial", "mu_s", "sigma_s")):
        if mean in given and covariance in given:
            reference[f"{part} moments"] = Moments(torch.from_numpy(given[mean]), torch.from_numpy(given[covariance]))
        elif part in reference:
            reference[f"{part} moments"] = Moments.of(reference[part])
    return reference
