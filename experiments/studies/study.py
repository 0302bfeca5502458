"""Comparisons of image classifiers: the paper's ablations, and `make demo-images`, from one YAML file each.

A study is a table: rows are models that differ in what the file says and in nothing else, columns are seeds. Unusual: every
cell is a run of the one training loop in a folder of its own, so that a study stopped anywhere goes on, and rows are trained
side by side, seed after seed, so that half a study is a smaller study and not half a table.
"""

import dataclasses
import hashlib
import json
import re
from pathlib import Path

import torch
import yaml

from mhla_hf.analysis.inputs import DIGITS, load_digits
from mhla_hf.analysis.measures import describe_mixing, measure_calls, record_model
from mhla_hf.files import write_json
from mhla_hf.models.vision import MHLAForImageClassification
from mhla_hf.models.vision_configuration import MHLAVisionConfig
from mhla_hf.scores.loading import without_bars
from mhla_hf.training.loop import distill
from mhla_hf.training.pictures import Preparation, open_pictures
from mhla_hf.training.recipe import ImageStage
from mhla_hf.training.run_folder import RECORD

RECIPES = Path(__file__).parent / "recipes"
LOOKED_AT = 8
ANALYSIS = "analysis.json"
MEASURES = ("accuracy", "rank", "effective_rank", "entropy")
KEYS = ("about", "paper", "model", "mhla", "positions", "stage", "epochs", "seeds", "rows", "claims")


@dataclasses.dataclass(frozen=True)
class Study:
    """What a recipe of a study says.

    about: one sentence. paper: what the paper found, with its table. model, mhla: of every row, arguments of
    `MHLAVisionConfig.preset("digits", ...)`. positions: deviation of the learned positions at the start; None: that of the
    weights. stage: of every row, fields of `ImageStage`. epochs, seeds: how many. rows: label -> what differs (arguments as
    in `model`, and `mhla`, `positions`). claims: (higher row, lower row) or (higher row, lower row,
    measure) to be judged; the measure is "accuracy", "rank", "effective_rank" or "entropy".
    """

    name: str
    rows: dict
    epochs: int
    seeds: int
    about: str = ""
    paper: str = ""
    model: dict = dataclasses.field(default_factory=dict)
    mhla: dict = dataclasses.field(default_factory=dict)
    positions: float | None = None
    stage: dict = dataclasses.field(default_factory=dict)
    claims: tuple = ()

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


def study_names() -> list[str]:
    """The studies that come with the package."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def read_study(name, *, epochs=None, seeds=None) -> Study:
    """A study of the package by its name, or from a YAML file. ValueError, one sentence, for whatever is wrong with it."""
    path = RECIPES / f"{name}.yaml" if str(name) in study_names() else Path(name)
    if not path.is_file():
        raise ValueError(f"study: got {str(name)!r}, expected one of {', '.join(study_names())}, or a YAML file")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"study: {str(path)!r} is not YAML ({' '.join(str(error).split())})") from None
    if not isinstance(content, dict):
        raise ValueError(f"study: {str(path)!r} is no mapping, expected the keys {', '.join(KEYS)}")
    if unknown := sorted(set(content) - set(KEYS)):
        raise ValueError(f"study {str(path)!r}: unknown key {unknown[0]!r}; expected some of {', '.join(KEYS)}")
    content |= {key: value for key, value in (("epochs", epochs), ("seeds", seeds)) if value is not None}
    for key in ("epochs", "seeds"):
        value = content.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{key}: got {value!r}, expected a whole number of at least 1")
    if not isinstance(content.get("rows"), dict) or not content["rows"]:
        raise ValueError(f"study {str(path)!r}: rows is {content.get('rows')!r}, expected a mapping of at least one")
    for claim in content.get("claims", ()):
        for row in claim[:2]:
            if row not in content["rows"]:
                raise ValueError(f"study {str(path)!r}: claims name {row!r}, expected one of {list(content['rows'])}")
        if claim[2:] and claim[2] not in MEASURES:
            raise ValueError(f"study {str(path)!r}: claims name {claim[2]!r}, expected one of {', '.join(MEASURES)}")
    stage = content.get("stage") or {}
    ImageStage(**{"name": "train", "loss": "labels", "steps": 1, "lr": 1e-3, **_numbers(stage)})
    content["stage"] = _numbers(stage)
    return Study(name=path.stem, **content)


def _numbers(mapping):
    """The mapping with texts such as 1.5e-3, which YAML 1.1 does not know as numbers, as floats."""
    form = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")
    return {
        key: float(value) if isinstance(value, str) and form.fullmatch(value) else value
        for key, value in mapping.items()
    }


def folder_of(out, row: str, seed: int) -> Path:
    """Where the model of one cell lies."""
    return Path(out) / re.sub(r"[^\w.]+", "-", row).strip("-") / f"seed-{seed}"


def open_data(data, size: int):
    """(train, test, name) of labelled images: the digits at `size` pixels, or what `open_pictures` takes.

    ValueError: there is no test split, or it has classes that are not trained.
    """
    if data is None:
        train, test = load_digits(size)
        return open_pictures(train), open_pictures(test), DIGITS
    train, test = open_pictures(data), open_pictures(data, split="test")
    if train.describe() == test.describe():
        raise ValueError(
            f"data: {str(data)!r} has no split to test on, expected the folder above train and test, or both splits "
            "(mhla_hf.evaluate takes a folder of classes)"
        )
    if train.names and test.names:
        test = test.numbered_as(train.names, train.name)
    classes = train.classes()["num_labels"]
    for own in (train, test):
        low, high = int(own.labels.min()), int(own.labels.max())
        if low < 0 or high >= classes:
            raise ValueError(f"data: {own.name!r} has labels {low} to {high}, expected 0 to {classes - 1}, as trained")
    return train, test, Path(str(data)).name


def train_cells(study: Study, out, *, data=None, progress=True, command=None, say=print):
    """Train and look at every cell of the table that is not there yet. ValueError: `out` is another study's.

    Returns:
        How many cells were trained.
    """
    out = Path(out)
    identity = {key: getattr(study, key) for key in ("model", "mhla", "positions", "stage", "epochs", "rows")}
    identity["data"] = str(data or DIGITS)
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]
    known = out / "study.json"
    if known.is_file():
        before = json.loads(known.read_text(encoding="utf-8"))
        if before.get("sha256") != digest:
            raise ValueError(
                f"out: {str(out)!r} holds another study, or this one with other settings; give another folder"
            )
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"out: {str(out)!r} is there and is not a study's, expected a new or an empty folder")
    opened = {}
    for row in study.rows:
        size = max(study.config(row).image_sides())
        opened[row] = opened.get(size) or open_data(data, size)
        opened[size] = opened[row]
        study.config(row, **_shape(opened[row][0], data))
    out.mkdir(parents=True, exist_ok=True)
    write_json(known, identity | {"sha256": digest})
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
    with without_bars():
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
    with without_bars():
        model = MHLAForImageClassification.from_pretrained(folder)
    prepared = Preparation(model.config.preprocessing(), model.config.num_channels)
    count = min(LOOKED_AT, len(test))
    pixels = torch.stack([prepared.whole(test, index) for index in range(count)])
    found = measure_calls(record_model(model, [{"pixel_values": prepared.finish(pixels)}]))
    write_json(folder / ANALYSIS, found | {"mixing": describe_mixing(model)})
