"""Judging image pipelines: FID, sFID, IS, precision, recall, CLIP score, GenEval, by a protocol of the recipe.

Any diffusers pipeline that takes class labels or prompts is sampled into a folder, resumably and on several processes;
scores are computed from the files. A score counts as known only for the same weights, protocol, reference, number of
images and seed.
"""

import dataclasses
import json
import logging
import math
import subprocess
import time
import zipfile
from pathlib import Path

import numpy
import torch
from huggingface_hub.dataclasses import strict
from PIL import Image

from ..checkpoints.checksums import hash_file
from ..checkpoints.files import write_text
from ..checkpoints.load import LOADING_ERRORS, choose_device, first_line, without_questions
from .image_scores import (
    PICTURES,
    Moments,
    clip_scores,
    extract_features,
    find_extractor,
    frechet_distance,
    hash_files,
    inception_score,
    precision_recall,
    read_image,
    share_error,
)
from .recipes import at_least, read_settings
from .records import Results, hash_of
from .sampling import (
    PipelineJudge,
    Sample,
    claim_folder,
    draw_labels,
    joined_processes,
    make_samples,
    plan_hash,
    read_json_lines,
    read_prompts,
    seed_of_sample,
)
from .subjects import VERSION, find_subjects

logger = logging.getLogger("mhla_hf")
NEEDS = {"FID": "features", "sFID": "spatial", "IS": "logits", "precision": "features", "recall": "features"}
METRICS = (*NEEDS, "CLIP score", "GenEval")
GENEVAL = "geneval"


@strict
@dataclasses.dataclass
class ImageProtocol:
    """How images are made and scored; the settings of a recipe of kind "image".

    name: of the task in tables. images: how many. classes: labels are drawn from so many classes; prompts: or the
    conditions are the lines of this file, in order and again from the start. sampling: further arguments of the pipeline.
    reference: ADM's .npz (arr_0; mu, sigma, mu_s, sigma_s) or a folder of images of one size. extractor: "inception",
    "module:function", or an `Extractor`; weights: a local file of Inception's. clip: folder or id of a CLIP model.
    neighbors, splits: of precision and recall, of IS. samples: folder to make; each model has its own in it.
    geneval_*: the interpreter, script and detector folder of GenEval, its prompts (evaluation_metadata.jsonl), and
    images per prompt.
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
    geneval_python: str | Path | None = None
    geneval_script: str | Path | None = None
    geneval_detector: str | Path | None = None
    geneval_prompts: str | Path | None = None
    geneval_images: int = at_least(1, 4)

    def validate_conditions(self):
        """Of one kind."""
        if self.classes is not None and self.prompts is not None:
            raise ValueError(f"classes is {self.classes} and prompts {self.prompts!r}; expected one of them")


def judge_image_pipelines(models, asked):
    """name -> `Results` of what was asked for. models: as `evaluate` takes them. asked: an `Asked`."""
    protocol = read_settings(ImageProtocol, asked.recipe.settings)
    _check(protocol, asked)
    subjects = find_subjects(models, output=asked.output, dtype=asked.dtype, revision=asked.revision, pipeline=True)
    with joined_processes() as processes:
        extractor = None
        if set(asked.recipe.tasks) & set(NEEDS):
            device = choose_device(processes.device(asked.device))
            extractor = find_extractor(protocol.extractor, protocol.weights, device)
            image = None if extractor.genuine or protocol.reference is None else _first_image(protocol.reference)
            if image is not None:  # else it is known only when there are samples
                _check_given(extractor, extractor(image[None]), asked.recipe.tasks)
        content = _content(protocol, extractor, asked.progress and processes.first)
        shared = (asked, protocol, processes, extractor, content)
        return {subject.name: _Judge(subject, *shared).run() for subject in subjects}


def _check(protocol, asked):
    """All that can be known before anything is loaded."""
    wanted = set(asked.recipe.tasks)
    if unknown := sorted(wanted - set(METRICS)):
        raise ValueError(f"task {unknown[0]!r} is no image score; expected {', '.join(METRICS)}")
    if wanted & set(NEEDS) - {"IS"}:
        path = Path(protocol.reference or "")
        if not protocol.reference or not (path.is_dir() or (path.suffix == ".npz" and path.is_file())):
            given = protocol.reference
            raise ValueError(f"settings: reference is {given!r}; expected a folder of images or ADM's .npz file")
    if "CLIP score" in wanted and protocol.prompts is None:
        raise ValueError("settings: prompts is None; expected a file of prompts for the CLIP score")
    for name in ("geneval_python", "geneval_script", "geneval_prompts") if "GenEval" in wanted else ():
        path = getattr(protocol, name)
        if path is None or not Path(path).is_file():
            raise ValueError(f"settings: {name} is {path!r}; expected a file of a GenEval installation")


def _first_image(path):
    """uint8 `[3, H, W]`, the first of a reference; None where there is none."""
    if Path(path).is_dir():
        return next((read_image(file) for file in _images(path)), None)
    with _open_npz(path) as file:
        return read_image(file["arr_0"][0]) if "arr_0" in file.files else None


def _open_npz(path):
    try:
        return numpy.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"reference: {str(path)!r} is no .npz file that can be read: {first_line(error)}") from None


def _check_given(extractor, found, wanted):
    """ValueError when what an extractor gave is not enough for the scores `wanted`."""
    for name in wanted:
        if name in NEEDS and NEEDS[name] not in found:
            raise ValueError(f"extractor {extractor.name!r} gives no {NEEDS[name]}, which {name} needs")


def _content(protocol, extractor, progress):
    """What of a protocol decides the scores besides model, number and seed: a dict, with hashes in place of files."""
    content = {key: value for key, value in vars(protocol).items() if not key.startswith("geneval")}
    del content["samples"], content["images"]
    content["extractor"] = extractor and [extractor.name, extractor.genuine, extractor.version]
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
        wanted, task = list(self.asked.recipe.tasks), self.protocol.name
        labels = {name: self.extractor.label(name) if name in NEEDS else name for name in wanted if name != "GenEval"}
        missing = [name for name, label in labels.items() if not self.known(task, label, self.hash)]
        if missing:
            self._score(missing)
        if "GenEval" in wanted:
            self._geneval()
        return Results(
            r
            for r in self.kept
            if r.limit == self.asked.limit
            and (
                (r.task == task and r.metric in labels.values() and r.samples == self.count)
                or (r.task == GENEVAL and "GenEval" in wanted)
            )
        )

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
            identity={**self.identity, "plan": plan_hash(plan)},
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
        paths, scores = [folder / sample.name for sample in plan], {}
        if set(missing) & set(NEEDS):
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
        if set(missing) & set(NEEDS) - {"IS"}:
            reference = _reference(Path(protocol.reference), extractor, cache / "reference", how, missing)
        if not self.processes.first:
            return {}
        _check_given(extractor, sample, missing)
        scores, count = {}, len(paths)
        for name in set(missing) & {"FID", "sFID"}:
            distance = frechet_distance(Moments.of(sample[NEEDS[name]]), reference[f"{NEEDS[name]} moments"])
            scores[extractor.label(name)] = (distance, None, False, count)
        if "IS" in missing:
            mean, error = inception_score(sample["logits"], protocol.splits, self.seed)
            scores[extractor.label("IS")] = (mean, error, True, count)
        if {"precision", "recall"} & set(missing):
            found = precision_recall(sample["features"], reference["features"], protocol.neighbors)
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

    def _geneval(self):
        """GenEval (arXiv 2310.11513): images laid out as its own script wants them, judged by it in its interpreter."""
        protocol, started = self.protocol, time.perf_counter()
        rows = read_json_lines(protocol.geneval_prompts, "prompt")[: self.asked.limit]
        task_hash = hash_of([GENEVAL, rows, protocol.geneval_images, protocol.sampling])
        if self.known(GENEVAL, "overall", task_hash):
            return
        plan = geneval_plan(rows, protocol.geneval_images, self.seed)
        folder = self.folder / f"{GENEVAL}-{len(rows)}"
        if self.processes.first:
            sampling = {"output_type": "pil", **protocol.sampling}
            claim_folder(folder, {**self.identity, "sampling": sampling, "plan": plan_hash(plan)})
            for number, row in enumerate(rows):
                (folder / f"{number:05d}" / "samples").mkdir(parents=True, exist_ok=True)
                write_text(folder / f"{number:05d}" / "metadata.jsonl", json.dumps(row))
        self.processes.wait()
        self.make(folder, plan, f"{self.subject.name}: GenEval")
        if self.processes.first:
            self.keep(GENEVAL, geneval_scores(_run_geneval(protocol, folder), len(plan)), task_hash, started)


def _images(folder):
    """Image files of a folder and the folders in it, sorted."""
    return sorted(path for path in Path(folder).rglob("*") if path.suffix in PICTURES)


def _reference(path, extractor, cache, how, missing):
    """What the scores need of the reference: "features" `[R, D]`, and moments of "features" and "spatial".

    The moments that an .npz holds were made by Inception and count only for it; else they come from its images.
    """
    given, images = {}, None
    if path.is_dir():
        images = _images(path)
        if not images:
            raise ValueError(f"reference: {str(path)!r} holds no images; expected {', '.join(PICTURES)}")
    else:
        with _open_npz(path) as file:
            if extractor.genuine:
                given = {name: file[name] for name in file.files if name in ("mu", "sigma", "mu_s", "sigma_s")}
            if {"precision", "recall"} & set(missing) or not given:
                if "arr_0" not in file.files:
                    raise ValueError(f"reference: {str(path)!r} has no images (arr_0), which {extractor.name!r} needs")
                images = file["arr_0"]
    found = {} if images is None else extract_features(images, extractor, cache, what="reference", **how)
    reference = dict(found or {})
    for part, mean, covariance in (("features", "mu", "sigma"), ("spatial", "mu_s", "sigma_s")):
        if mean in given and covariance in given:
            reference[f"{part} moments"] = Moments(torch.from_numpy(given[mean]), torch.from_numpy(given[covariance]))
        elif part in reference:
            reference[f"{part} moments"] = Moments.of(reference[part])
    return reference


def geneval_plan(rows, images, seed):
    """`Sample`s in GenEval's layout, `00012/samples/0003.png`, for the rows of its evaluation_metadata.jsonl."""
    return [
        Sample(f"{row:05d}/samples/{index:04d}.png", rows[row]["prompt"], seed_of_sample(seed, row * images + index))
        for row in range(len(rows))
        for index in range(images)
    ]


def geneval_scores(found, expected):
    """metric -> (value, standard error, higher is better, images) of the script's results, a list of dicts.

    expected: number of images; ValueError when the results are of another. "overall" is the mean over tags, as in GenEval's
    own summary.
    """
    if len(found) != expected:
        raise ValueError(f"GenEval judged {len(found)} images of {expected}: run it again when all are there")
    tags = {}
    for row in found:
        if not isinstance(row.get("correct"), bool):
            raise ValueError(f"GenEval: a result is {row!r:.80}; expected 'tag' and 'correct'")
        tags.setdefault(row["tag"], []).append(row["correct"])
    scores = {}
    for tag, right in tags.items():
        share = sum(right) / len(right)
        scores[tag] = (share, share_error(share, len(right)), True, len(right))
    overall = sum(score[0] for score in scores.values()) / len(scores)
    error = math.hypot(*(score[1] for score in scores.values())) / len(scores)
    return {"overall": (overall, error, True, expected), **scores}


def _run_geneval(protocol, folder):
    """The script's results for the images in `folder`."""
    out = folder.with_name(f"{folder.name}-results.jsonl")
    command = [protocol.geneval_python, protocol.geneval_script, folder, "--outfile", out]
    command += ["--model-path", protocol.geneval_detector] if protocol.geneval_detector else []
    command = list(map(str, command))
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode or not out.is_file():
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ValueError(f"GenEval's script failed ({last}): {' '.join(command)}")
    return read_json_lines(out, "tag")
