"""Records of scores, the results file of a model (results.json), and tables and plots that compare models."""

import dataclasses
import math
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..checkpoints.file_io import read_json, wrap_errors, write_json
from ..checkpoints.values import Number, checked, checked_field, read_settings
from ..plots import draw_scores, render_rows

FILE_NAME = "results.json"
FORMAT_VERSION = 1
ARROWS = {True: " ↑", False: " ↓", None: ""}
SPEED = "speed"  # the task whose scores are times and cache sizes, by length: "forward_ms_512"
SPEED_METRICS = ("forward_ms", "decode_ms", "cache_mib")


def finite(value: Any) -> float | None:
    """Return `value` as a float if it is a finite number, else None, for example for lm-eval's "N/A"."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if number else None


FINITE = checked_field(lambda value: finite(value) is not None, "a finite number or None").metadata


@checked
class Result:
    """One score of one model, with its provenance."""

    task: str
    metric: str  # as the harness gives it, with its filter unless that is "none": "exact_match,strict"
    value: Number | None = dataclasses.field(metadata=FINITE)  # None if it was not finite
    stderr: Number | None = dataclasses.field(metadata=FINITE)
    higher_is_better: bool | None
    shots: int  # examples in the prompt
    samples: int  # documents, images or videos
    limit: Number | None  # None for the whole task
    task_version: str
    task_hash: str  # of the task's definition and data; if it changes, the score counts as missing
    model: str
    revision: str | None  # commit on the Hub
    fingerprint: str  # of the weights
    versions: dict  # of libraries
    commit: str  # of this package, or its version
    dtype: str  # of the parameters
    hardware: str
    seed: int | str  # or the harness's seeds as text
    command: str  # that repeats the measurement
    date: str  # UTC, ISO 8601
    seconds: Number | None = None
    window: int | None = None  # context length in tokens, for lm-eval tasks

    @property
    def identity(self) -> tuple[Any, ...]:
        """The fields that tell the scores of one model apart."""
        return (self.task, self.metric, self.shots, self.limit, self.samples)


class Results(list[Result]):
    """The scores of one model: a list of `Result` that is stored in one JSON file."""

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "Results":
        """Read a results file, or results.json in a folder; a missing file is empty, a damaged one raises ValueError."""
        path = results_path(path)
        with wrap_errors(f"{path}: got a damaged file, expected a results file"):
            if (content := read_json(path)) is None:
                return cls()
            if (version := content["format_version"]) == FORMAT_VERSION:
                return cls(read_settings(Result, fields, "result: ") for fields in content["results"])
        raise ValueError(f"{path}: got format_version {version!r}, expected {FORMAT_VERSION}.")

    def merge(self, new: Sequence[Result], keep_other_sample_counts: bool = False) -> "Results":
        """Add records in place, and sort. New records replace old ones of the same task, metric, shots, and limit.

        With `keep_other_sample_counts`, old records with other numbers of samples stay, such as 50,000 images beside 1,000.
        """
        fields = 5 if keep_other_sample_counts else 4
        replaced = {record.identity[:fields] for record in new}
        kept = [record for record in self if record.identity[:fields] not in replaced]
        self[:] = sorted([*kept, *new], key=lambda record: tuple(map(str, record.identity)))
        return self

    def where(self, **fields: Any) -> "Results":
        """Return the records whose fields have these values."""
        return Results(record for record in self if fields.items() <= vars(record).items())

    def find(self, task: str, metric: str, limit: float | None = None) -> Result | None:
        """Return the record of a metric at `limit` (None: the whole task) with the most samples; None if there is none."""
        return max(self.where(task=task, metric=metric, limit=limit), key=lambda record: record.samples, default=None)

    def write(self, path: str | Path) -> Path:
        content = {"format_version": FORMAT_VERSION, "results": [dataclasses.asdict(record) for record in self]}
        return write_json(results_path(path), content)


def results_path(path: str | os.PathLike[str]) -> Path:
    """Return `path` if it is a .json file, else the path of results.json in the folder `path`."""
    path = Path(path)
    return path if path.suffix == ".json" and not path.is_dir() else path / FILE_NAME


def format_score(value: float | None, stderr: float | None = None, places: int = 4) -> str:
    """Format a score: "1.9051 ± 0.0123", or "1.9051" without stderr; None gives "not finite"."""
    if value is None:
        return "not finite"
    return f"{value:.{places}f}" if stderr is None else f"{value:.{places}f} ± {stderr:.{places}f}"


def render_table(models: Mapping[str, Sequence[Result]], style: str = "text", short: bool = False) -> str:
    """Render scores as "text" or "markdown", one column per model.

    `short` means three decimals instead of four, no standard errors of 0, and no column of shots if all are 0.
    """
    by_model = {name: {record.identity: record for record in records} for name, records in models.items()}
    by_identity = {identity: record for records in reversed(by_model.values()) for identity, record in records.items()}
    rows = [["task", "metric", "shots", "samples", *models]]
    places = 3 if short else 4
    for identity in sorted(by_identity, key=natural_sort_key):
        record = by_identity[identity]
        samples = f"{record.samples}" if record.limit is None else f"{record.samples} (limit)"
        row = [record.task, record.metric + ARROWS[record.higher_is_better], str(record.shots), samples]
        for score in (records.get(identity) for records in by_model.values()):
            stderr: Any = score and (score.stderr or (None if short else score.stderr))
            row.append("" if score is None else format_score(score.value, stderr, places))
        rows.append(row)
    if short and not any(record.shots for record in by_identity.values()):
        rows = [row[:2] + row[3:] for row in rows]
    return render_rows(rows[0], rows[1:], style)


def natural_sort_key(identity: tuple[Any, ...]) -> list[tuple[float, str]]:
    """Return a key that compares numbers by value, so that acc_back_64 precedes acc_back_128."""
    parts = re.split(r"(\d+)", " ".join(map(str, identity)))
    return [(int(part), "") if part.isdecimal() else (math.inf, part) for part in parts]


def compute_paper_values(records: Sequence[Result], columns: Mapping[str, Any]) -> dict[str, tuple[float, Any]]:
    """Return {label: (value, standard error or None)} for the columns of a recipe that the scores of one model can fill.

    A column is {"task", "metric", "percent", "higher_is_better"}, or {"mean_of": labels}, the mean of other columns.
    """
    scores: Any = {(r.task, r.metric): (r.value, r.stderr) for r in reversed(records) if r.value is not None}
    values_by_label: dict[str, Any] = {}
    for label, column in columns.items():
        if (score := scores.get((column.get("task"), column.get("metric")))) is not None:
            scale = 100 if column.get("percent") else 1
            values_by_label[label] = tuple(number and scale * number for number in score)
    for label, column in columns.items():
        averaged = column.get("mean_of")
        if averaged and all(name in values_by_label for name in averaged):
            values, errors = zip(*(values_by_label[name] for name in averaged), strict=True)
            error = None if None in errors else math.hypot(*errors) / len(averaged)
            values_by_label[label] = (math.fsum(values) / len(averaged), error)
    return values_by_label


class Comparison(dict[str, Results]):
    """The scores of several models: a dict from name to `Results`, in the order in which the models were passed."""

    columns: dict[str, dict] = {}  # of the recipe; see `compute_paper_values`

    def table(self, style: str = "text") -> str:
        """Render the scores with their standard errors as a table in the style "text" or "markdown"."""
        return render_table(self, style)

    __str__ = table

    def paper_table(self, style: str = "text") -> str:
        """Render the recipe's columns in the paper's layout, one row per model; "" if no column has a value."""
        rows = []
        for name, records in self.items():
            values = compute_paper_values(records, self.columns)
            cells = (format_score(*values[label], places=2) if label in values else "" for label in self.columns)
            rows.append([name, *cells])
        header = ["model", *map(self._title, self.columns)]
        return render_rows(header, rows, style, left=1) if any(any(row[1:]) for row in rows) else ""

    def plot(self, path: str | Path) -> Path:
        """Plot the scores to a PNG file, and return its path; raise ValueError if there is no score.

        There is a panel with a point per model for each column of the recipe or, if no column has a value, for each score.
        Recall by depth and speed by length are drawn as curves.
        """
        columns = {name: compute_paper_values(records, self.columns) for name, records in self.items()}
        points: Any = defaultdict(dict)  # title -> model -> value, standard error
        curves: Any = defaultdict(lambda: defaultdict(list))  # title -> model -> [(position, value, standard error)]
        for name, records in self.items():
            for label, score in columns[name].items():
                points[self._title(label)][name] = score
            for record in (record for record in records if record.value is not None):
                metric, separator, position = record.metric.rpartition("_" if record.task == SPEED else "_back_")
                if separator and position.isdecimal():
                    title = f"{record.task}\n{metric}, by {'length ↓' if record.task == SPEED else 'depth'}"
                    curves[title][name].append((int(position), record.value, record.stderr or 0.0))
                elif not any(columns.values()):
                    shots = f", {record.shots} shots" if record.shots else ""
                    title = f"{record.task}\n{record.metric}{shots}{ARROWS[record.higher_is_better]}"
                    points[title][name] = (record.value, record.stderr)
        if not points and not curves:
            raise ValueError("plot: got no score, expected at least one.")
        draw_scores(path, list(self), points, curves)
        return Path(path)

    def _title(self, label: str) -> str:
        return label + ARROWS[self.columns[label].get("higher_is_better", True)]
