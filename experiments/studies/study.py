"""Comparisons of image classifiers, from one YAML file each: the paper's ablations, and `make demo-images`.

A study is a table: rows are models that differ in what the file says and in nothing else, columns are seeds. Every cell is a
run of the one training loop in a folder of its own, so that a study stopped anywhere goes on, and rows are trained side by
side, seed after seed, so that half a study is a smaller study and not half a table.
"""

import dataclasses
import re
from pathlib import Path

import torch
from transformers import ViTImageProcessorPil

from mhla_hf.analysis.inputs import DIGITS, load_digits
from mhla_hf.analysis.measures import describe_mixing, measure_calls, record_model
from mhla_hf.checkpoints.file_io import can_resume, find_yaml, read_yaml, write_json
from mhla_hf.checkpoints.load import no_progress_bars
from mhla_hf.checkpoints.values import at_least, checked, checked_field, read_settings
from mhla_hf.models.vision import MHLAForImageClassification
from mhla_hf.models.vision_configuration import MHLAVisionConfig
from mhla_hf.training.datasets.images import open_images, preprocess
from mhla_hf.training.loop import distill
from mhla_hf.training.recipe import ImageStage
from mhla_hf.training.run_folder import RECORD

RECIPES = Path(__file__).parent / "recipes"
LOOKED_AT = 8
ANALYSIS = "analysis.json"
MEASURES = ("accuracy", "rank", "effective_rank", "entropy")


@checked
class Study:
    """What a recipe of a study says.

    about: one sentence. paper: what the paper found, with its table. model, mhla: of every row, arguments of
    `MHLAVisionConfig.preset("digits", ...)`. positions: deviation of the learned positions at the start; None: that of the
    weights. stage: of every row, fields of `ImageStage`. epochs, seeds: how many. rows: label -> what differs (arguments as
    in `model`, and `mhla`, `positions`). claims: (higher row, lower row) or (higher row, lower row, measure) to be judged;
    the measure is "accuracy", "rank", "effective_rank" or "entropy".
    """

    name: str
    rows: dict = checked_field(bool, "at least one")
    epochs: int = at_least(1)
    seeds: int = at_least(1)
    about: str = ""
    paper: str = ""
    model: dict = dataclasses.field(default_factory=dict)
    mhla: dict = dataclasses.field(default_factory=dict)
    positions: float | None = None
    stage: dict = dataclasses.field(default_factory=dict)
    claims: list = dataclasses.field(default_factory=list)

    def validate_table(self):
        """Claims about rows and measures, a stage that can be trained."""
        for claim in self.claims:
            for named, known in zip(claim, (self.rows, self.rows, MEASURES), strict=False):
                if named not in known:
                    raise ValueError(f"claims name {named!r}, expected one of {', '.join(known)}")
        ImageStage(**{"name": "train", "loss": "labels", "steps": 1, "lr": 1e-3, **self.stage})

    def config(self, row: str, **data) -> MHLAVisionConfig:
        """The configuration of one row; data: what the images decide (`num_labels`, `num_channels`)."""
        own = dict(self.rows[row])
        settings = {**self.mhla, **own.pop("mhla", {})}
        own.pop("positions", None)
        return MHLAVisionConfig.preset("digits", **{**self.model, **own, **data, "mhla": settings})

    def build(self, row: str, **data) -> MHLAForImageClassification:
        """The untrained model of one row; its random start is torch's."""
        model = MHLAForImageClassification(self.config(row, **data))
        deviation = self.rows[row].get("positions", self.positions)
        if deviation is not None:
            torch.nn.init.trunc_normal_(model.model.positions.weight, std=deviation)
        return model


def read_study(name, *, epochs=None, seeds=None) -> Study:
    """One of our studies by its name, or one from a YAML file. ValueError, one sentence, for whatever is wrong with it."""
    path = find_yaml(name, RECIPES, "study")
    changes = {key: value for key, value in (("epochs", epochs), ("seeds", seeds)) if value is not None}
    content = read_yaml(path, "study")
    if isinstance(content, dict):
        content |= {**changes, "name": path.stem}
    return read_settings(Study, content, f"study {str(path)!r}: ")


def folder_of(out, row: str, seed: int) -> Path:
    """Where the model of one cell lies."""
    return Path(out) / re.sub(r"[^\w.]+", "-", row).strip("-") / f"seed-{seed}"


def open_data(data, size: int):
    """(train, test, name) of labeled images: the digits at `size` pixels, or what `open_images` takes.

    ValueError: there is no test split, or it has classes that are not trained.
    """
    if data is None:
        train, test = load_digits(size)
        return open_images(train), open_images(test), DIGITS
    train, test = open_images(data), open_images(data, split="test")
    if train.describe() == test.describe():
        raise ValueError(
            f"data: {str(data)!r} has no split to test on, expected the folder above train and test, or both splits "
            "(mhla_hf.evaluate takes a folder of classes)"
        )
    if train.class_names and test.class_names:
        test = test.renumber_as(train.class_names, train.name)
    classes = train.classes()["num_labels"]
    for own in (train, test):
        own.check_labels(classes)
    return train, test, Path(str(data)).name


def train_cells(study: Study, out, *, data=None, progress=True, command=None, say=print):
    """Train and look at every cell of the table that is not there yet. ValueError: `out` is another study's.

    Returns:
        How many cells were trained.
    """
    out = Path(out)
    identity = {key: getattr(study, key) for key in ("model", "mhla", "positions", "stage", "epochs", "rows")}
    identity["data"] = str(data or DIGITS)
    can_resume(out, "study.json", identity, "out")
    opened = {}
    for row in study.rows:
        size = max(study.config(row).image_sides())
        opened[row] = opened.get(size) or open_data(data, size)
        opened[size] = opened[row]
        study.config(row, **_shape(opened[row][0], data))
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "study.json", identity)
    trained = 0
    for seed in range(study.seeds):
        for row in study.rows:
            train, test, _ = opened[row]
            folder = folder_of(out, row, seed)
            if not (folder / RECORD).exists():
                say(f"{row}, seed {seed}")
                _train(study, row, seed, train, test, folder, data, progress, command)
                trained += 1
            if not (folder / ANALYSIS).exists():
                _look(folder, test)
    return trained


def _train(study, row, seed, train, test, folder, data, progress, command):
    torch.manual_seed(seed)
    model = study.build(row, **_shape(train, data))
    batch = study.stage.get("batch_size", 64)
    per_epoch = -(-len(train) // batch)
    stage = {"batch_size": batch, "lr": 1e-3, **study.stage}
    with no_progress_bars():
        distill(
            model,
            data=train,
            test=test,
            out=folder,
            stages=[{"name": "train", "loss": "labels", **stage, "steps": per_epoch * study.epochs}],
            seed=seed,
            log_every=per_epoch,
            save_every=max(per_epoch, 50),
            progress=progress,
            command=command,
        )


def _shape(pictures, data):
    """What the images decide about a model."""
    if data is None:
        return {}
    channels = 3
    standard = {"image_mean": [0.5] * channels, "image_std": [0.5] * channels}
    return {**pictures.classes(), "num_channels": channels, **standard}


def _look(folder, test):
    """Rank and entropy per layer on the first test images, and the mixing, beside the model."""
    with no_progress_bars():
        model = MHLAForImageClassification.from_pretrained(folder)
    images = [test.image(index, model.config.num_channels) for index in range(min(LOOKED_AT, len(test)))]
    pixels = preprocess(ViTImageProcessorPil.from_dict(model.config.preprocessing()), images)
    found = measure_calls(record_model(model, {"pixel_values": pixels}))
    write_json(folder / ANALYSIS, found | {"mixing": describe_mixing(model)})
