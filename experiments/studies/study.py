"""Comparisons of image classifiers, each defined by a YAML file: the paper's ablations, and `make demo-images`.

A study is a table whose rows are models that differ only in what the file says, and whose columns are seeds. Each cell
is a training run in its own folder, so that an interrupted study can be resumed. All rows of a seed are trained before
the next seed, so that an interrupted study is a smaller study and not part of a table.
"""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
ANALYZED_IMAGES = 8
ANALYSIS = "analysis.json"
MEASURES = ("accuracy", "rank", "effective_rank", "entropy")


@checked
class Study:
    """The content of a study's YAML file.

    Attributes:
        name: Name of the file.
        rows: For each label, what differs from the other rows: arguments as in `model`, `mhla`, and `positions`.
        epochs: Number of epochs.
        seeds: Number of seeds.
        about: One sentence on the study.
        paper: The paper's result, with its table.
        model: Arguments of `MHLAVisionConfig.preset("digits", ...)` for all rows.
        mhla: Its argument `mhla`, for all rows.
        positions: Standard deviation of the learned positions at the start; None: that of the weights.
        stage: Fields of `ImageStage` for all rows.
        claims: [higher row, lower row] or [higher row, lower row, measure] each; see `MEASURES`.
    """

    name: str
    rows: dict[str, Any] = checked_field(bool, "at least one")
    epochs: int = at_least(1)
    seeds: int = at_least(1)
    about: str = ""
    paper: str = ""
    model: dict[str, Any] = dataclasses.field(default_factory=dict)
    mhla: dict[str, Any] = dataclasses.field(default_factory=dict)
    positions: float | None = None
    stage: dict[str, Any] = dataclasses.field(default_factory=dict)
    claims: list[list[str]] = dataclasses.field(default_factory=list)

    def validate_table(self) -> None:
        """Raise ValueError if a claim names no row or measure, or if the stage is invalid."""
        for claim in self.claims:
            for name, expected in zip(claim, (self.rows, self.rows, MEASURES), strict=False):
                if name not in expected:
                    raise ValueError(f"claims: got {name!r}, expected one of {', '.join(expected)}.")
        ImageStage(**{"name": "train", "loss": "labels", "steps": 1, "lr": 1e-3, **self.stage})

    def config(self, row: str, **data: Any) -> MHLAVisionConfig:
        """Return the configuration of a row.

        Args:
            row: Label of the row.
            **data: Fields that depend on the images, such as `num_labels` and `num_channels`.
        """
        changes = dict(self.rows[row])
        settings = {**self.mhla, **changes.pop("mhla", {})}
        changes.pop("positions", None)
        return MHLAVisionConfig.preset("digits", **{**self.model, **changes, **data, "mhla": settings})

    def build(self, row: str, **data: Any) -> MHLAForImageClassification:
        """Return the untrained model of a row, with weights from torch's global generator; see `config`."""
        model = MHLAForImageClassification(self.config(row, **data))
        deviation = self.rows[row].get("positions", self.positions)
        if deviation is not None:
            positions: Any = model.model.positions
            torch.nn.init.trunc_normal_(positions.weight, std=deviation)
        return model


def read_study(name: str | Path, *, epochs: int | None = None, seeds: int | None = None) -> Study:
    """Read a study.

    Args:
        name: Name of a study, or a YAML file.
        epochs, seeds: Instead of the study's.

    Raises:
        ValueError: There is no such study, or it is invalid.
    """
    path = find_yaml(name, RECIPES, "study")
    content = read_yaml(path, "study")
    if isinstance(content, dict):
        content["name"] = path.stem
        if epochs is not None:
            content["epochs"] = epochs
        if seeds is not None:
            content["seeds"] = seeds
    return read_settings(Study, content, f"study {str(path)!r}: ")


def folder_of(out: str | Path, row: str, seed: int) -> Path:
    """Return the folder of a cell."""
    return Path(out) / re.sub(r"[^\w.]+", "-", row).strip("-") / f"seed-{seed}"


def open_data(data: Any, size: int) -> tuple[Any, Any, str]:
    """Open labeled images.

    Args:
        data: What `open_images` takes; None: scikit-learn's digits.
        size: Side of the digits in pixels.

    Returns:
        Training images, test images, and the name of the data.

    Raises:
        ValueError: There is no test split, or it has classes that the training split lacks.
    """
    if data is None:
        digits, test_digits = load_digits(size)
        return open_images(digits), open_images(test_digits), DIGITS
    train, test = open_images(data), open_images(data, split="test")
    if train.describe() == test.describe():
        raise ValueError(
            f"data: got {str(data)!r}, which has no test split, expected the folder that contains train and test, or a "
            "dataset with both splits."
        )
    if train.class_names and test.class_names:
        test = test.renumber_as(train.class_names, train.name)
    num_labels = train.classes()["num_labels"]
    for images in (train, test):
        images.check_labels(num_labels)
    return train, test, Path(str(data)).name


def train_cells(
    study: Study,
    out: str | Path,
    *,
    data: Any = None,
    progress: bool = True,
    command: str | None = None,
    say: Callable[[str], None] = print,
) -> int:
    """Train and analyze the cells that `out` lacks; see `run_study`.

    Returns:
        Number of cells that were trained.

    Raises:
        ValueError: `out` is the folder of another study.
    """
    out = Path(out)
    identity = {key: getattr(study, key) for key in ("model", "mhla", "positions", "stage", "epochs", "rows")}
    identity["data"] = str(data or DIGITS)
    can_resume(out, "study.json", identity, "out")
    data_of_size: dict[int, tuple[Any, Any, str]] = {}
    data_of_row = {}
    for row in study.rows:
        size = max(study.config(row).image_sides())
        if size not in data_of_size:
            data_of_size[size] = open_data(data, size)
        data_of_row[row] = data_of_size[size]
        study.config(row, **_data_fields(data_of_row[row][0], data))  # raises an error before anything is trained
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "study.json", identity)
    num_trained = 0
    for seed in range(study.seeds):
        for row in study.rows:
            train, test, _ = data_of_row[row]
            folder = folder_of(out, row, seed)
            if not (folder / RECORD).exists():
                say(f"{row}, seed {seed}")
                _train(study, row, seed, train, test, folder, data, progress, command)
                num_trained += 1
            if not (folder / ANALYSIS).exists():
                _analyze(folder, test)
    return num_trained


def _train(
    study: Study,
    row: str,
    seed: int,
    train: Any,
    test: Any,
    folder: Path,
    data: Any,
    progress: bool,
    command: str | None,
) -> None:
    """Train one cell."""
    torch.manual_seed(seed)
    model = study.build(row, **_data_fields(train, data))
    batch_size = study.stage.get("batch_size", 64)
    steps_per_epoch = -(-len(train) // batch_size)
    stage = {"batch_size": batch_size, "lr": 1e-3, **study.stage}
    with no_progress_bars():
        distill(
            model,
            data=train,
            test=test,
            out=folder,
            stages=[{"name": "train", "loss": "labels", **stage, "steps": steps_per_epoch * study.epochs}],
            seed=seed,
            log_every=steps_per_epoch,
            save_every=max(steps_per_epoch, 50),
            progress=progress,
            command=command,
        )


def _data_fields(images: Any, data: Any) -> dict[str, Any]:
    """Return the fields of the configuration that depend on the images; none for the digits, which the preset is
    for."""
    if data is None:
        return {}
    return {**images.classes(), "num_channels": 3, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}


def _analyze(folder: Path, test: Any) -> None:
    """Write the rank and entropy of each layer on the first test images, and the mixing, next to the model."""
    with no_progress_bars():
        model = MHLAForImageClassification.from_pretrained(folder)
    images = [test.image(index, model.config.num_channels) for index in range(min(ANALYZED_IMAGES, len(test)))]
    pixels = preprocess(ViTImageProcessorPil.from_dict(model.config.preprocessing()), images)
    analysis = measure_calls(record_model(model, {"pixel_values": pixels}))
    write_json(folder / ANALYSIS, {**analysis, "mixing": describe_mixing(model)})
