"""Records of scores, the file that keeps those of a model, and tables and plots that compare models.

Everything printed about quality (tables, cards, README) is read from `results.json` in the model's folder. Each record
holds what it takes to judge and to repeat the measurement. A results file comes along with a downloaded model, and anybody
can edit it. A digest of each record made on this machine is therefore noted in Hugging Face's cache,
`$HF_HOME/assets/mhla_hf/scores`.
"""

import dataclasses
import itertools
import json
import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from ..checkpoints.file_io import write_json
from ..checkpoints.fingerprint import hash_json
from ..checkpoints.values import Number, checked, checked_field, read_settings
from ..plots import PALETTE, drawing
from ..speed import DECODE

FILE_NAME = "results.json"
FORMAT_VERSION = 1
ARROWS = {True: " ↑", False: " ↓", None: ""}
SPEED = "speed"  # the task whose scores are times
# (what, unit) in the rows of `measure_speed` -> metric
SPEED_METRICS = {("forward", "ms"): "forward_ms", (DECODE, "ms"): "decode_ms", (DECODE, "mib"): "cache_mib"}

logger = logging.getLogger("mhla_hf")


def finite(value: Any) -> float | None:
    """Return `value` as a float if it is a finite number, else None (harnesses also write "N/A", NaN and infinity)."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if number else None


FINITE = checked_field(lambda value: finite(value) is not None, "a finite number or None").metadata


@checked
class Result:
    """One score of one model, with its provenance.

    Args:
        task: Name of the task, as the harness gives it.
        metric: Name of the metric, as the harness gives it. A filter other than "none" is appended
            ("exact_match,strict").
        value: The score; None if it was not finite.
        stderr: Its standard error; None if the metric has none.
        higher_is_better: None if the harness does not say.
        shots: Number of examples in the prompt.
        samples: Number of documents, images or videos scored.
        limit: The limit of the run, as the user gave it; None for the whole task.
        task_version: Version of the task.
        task_hash: Hash of the task's definition and data. If it changes, the score counts as missing.
        model: The model's name, as the user gave it.
        revision: Commit on the Hub; None for a local folder.
        fingerprint: Fingerprint of the weights.
        versions: Mapping from library to version.
        commit: Git commit of this package, or its version if it was installed without git.
        dtype: Dtype of the parameters.
        hardware: One line.
        seed: The seed, or the harness's list of seeds as text.
        command: Shell command that repeats the measurement.
        date: ISO 8601, UTC.
        seconds: Duration of the task's run.
        window: Number of tokens that the model saw at once; None if it is no language model.
    """

    task: str
    metric: str
    value: Number | None = dataclasses.field(metadata=FINITE)
    stderr: Number | None = dataclasses.field(metadata=FINITE)
    higher_is_better: bool | None
    shots: int
    samples: int
    limit: Number | None
    task_version: str
    task_hash: str
    model: str
    revision: str | None
    fingerprint: str
    versions: dict
    commit: str
    dtype: str
    hardware: str
    seed: int | str
    command: str
    date: str
    seconds: Number | None = None
    window: int | None = None

    @property
    def identity(self) -> tuple[Any, ...]:
        """Return (task, metric, shots, limit, samples), equal for two measurements of the same thing."""
        return (self.task, self.metric, self.shots, self.limit, self.samples)

    @classmethod
    def from_dict(cls, values: Any) -> "Result":
        """Build a record from its JSON form; raise ValueError if a field is unknown, missing, or of another type."""
        return read_settings(cls, values, "result: ")


class Results(list[Result]):
    """The scores of one model: a list of `Result` that is read from and written to one JSON file.

    `write` writes a temporary file and renames it, so that no reader sees half a file.
    """

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "Results":
        """Read a results file.

        Args:
            path: The file, or a folder that contains results.json.

        Returns:
            The records; empty if the file does not exist.

        Raises:
            ValueError: The file is not a results file, or has another format version.
        """
        path = results_path(path)
        if not path.exists():
            return cls()
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["format_version"] == FORMAT_VERSION:
                return cls(map(Result.from_dict, content["results"]))
        except (ValueError, RecursionError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not a results file: {type(error).__name__}: {error}") from None
        raise ValueError(f"{path}: got format_version {content['format_version']!r}, expected {FORMAT_VERSION}.")

    def merge(self, new: Sequence[Result], beside: bool = False) -> "Results":
        """Add records, each in place of an older one of the same task, metric, shots and limit.

        Args:
            new: The records to add.
            beside: Whether to keep older records with another number of samples: a score on 1,000 images does not replace
                one on 50,000.

        Returns:
            `self`.
        """
        fields = 5 if beside else 4
        replaced = {record.identity[:fields] for record in new}
        kept = [record for record in self if record.identity[:fields] not in replaced]
        merged = {record.identity: record for record in [*kept, *new]}
        self[:] = sorted(merged.values(), key=lambda record: tuple(map(str, record.identity)))
        return self

    def of(self, fingerprint: str) -> "Results":
        """Return the records of the weights with this fingerprint, as a new `Results`."""
        return Results(record for record in self if record.fingerprint == fingerprint)

    def find(self, task: str, metric: str, limit: float | None = None) -> Result | None:
        """Return the record of a metric at a limit, the one with the most samples if there are several; None if none."""
        matches = [r for r in self if (r.task, r.metric, r.limit) == (task, metric, limit)]
        return max(matches, key=lambda record: record.samples, default=None)

    def write(self, path: str | Path) -> Path:
        """Write all records to `path`, a file or an existing folder, and return the path of the file."""
        content = {"format_version": FORMAT_VERSION, "results": [dataclasses.asdict(record) for record in self]}
        return write_json(results_path(path), content)


def results_path(path: str | os.PathLike[str]) -> Path:
    """Return results.json in `path` if that is a folder or has no .json ending, else `path` itself."""
    path = Path(path)
    return path if path.suffix == ".json" and not path.is_dir() else path / FILE_NAME


def _digest(record: Result) -> str:
    """Return a digest of all fields of a record."""
    return hash_json(dataclasses.asdict(record))


def _notes() -> Path:
    """Return the file in Hugging Face's cache that lists the digests of the records measured here."""
    return Path(constants.HF_ASSETS_CACHE) / "mhla_hf" / "scores"


def note_measured(records: Sequence[Result]) -> None:
    """Note that this machine measured `records`; warn if the cache cannot be written."""
    try:
        _notes().parent.mkdir(parents=True, exist_ok=True)
        with _notes().open("a", encoding="utf-8") as notes:
            notes.writelines(f"{_digest(record)}\n" for record in records)
    except OSError as error:
        logger.warning("%s cannot be written (%s): these scores will be run again", _notes(), error.strerror)


def measured_here(records: Sequence[Result]) -> Results:
    """Return those of `records` that this machine measured."""
    noted = set(_notes().read_text(encoding="utf-8").split()) if _notes().is_file() else set()
    return Results(record for record in records if _digest(record) in noted)


def format_score(value: float | None, stderr: float | None = None, places: int = 4) -> str:
    """Format a score as `1.9051 ± 0.0123`, without ± if it has no standard error, or "not finite" for None."""
    if value is None:
        return "not finite"
    return f"{value:.{places}f}" if stderr is None else f"{value:.{places}f} ± {stderr:.{places}f}"


def render_table(models: Mapping[str, Sequence[Result]], style: str = "text", short: bool = False) -> str:
    """Render a table that compares models: task, metric (with ↑ or ↓), shots, samples, and one column of scores per model.

    Args:
        models: Mapping from name to `Results` or list of `Result`, in the order of the columns.
        style: "text" or "markdown".
        short: Whether to give three decimals, leave out standard errors of 0, and leave out the column of shots if all
            are 0.
    """
    by_model = {name: {record.identity: record for record in records} for name, records in models.items()}
    by_identity = {identity: record for records in reversed(by_model.values()) for identity, record in records.items()}
    rows = [["task", "metric", "shots", "samples", *models]]
    places = 3 if short else 4
    for identity in sorted(by_identity, key=_natural):
        first = by_identity[identity]
        samples = f"{first.samples}" if first.limit is None else f"{first.samples} (limit)"
        row = [first.task, first.metric + ARROWS[first.higher_is_better], str(first.shots), samples]
        for score in (records.get(identity) for records in by_model.values()):
            stderr: Any = score and (score.stderr or (None if short else score.stderr))
            row.append("" if score is None else format_score(score.value, stderr, places))
        rows.append(row)
    if short and not any(record.shots for record in by_identity.values()):
        rows = [row[:2] + row[3:] for row in rows]
    return render_rows(rows[0], rows[1:], style)


def _natural(identity: tuple[Any, ...]) -> list[tuple[float, str]]:
    """Return a sort key that puts acc_back_64 before acc_back_128."""
    parts = re.split(r"(\d+)", " ".join(map(str, identity)))
    return [(int(part), "") if part.isdecimal() else (math.inf, part) for part in parts]


def render_rows(header: Sequence[str], rows: Sequence[Sequence[str]], style: str = "text", left: int = 2) -> str:
    """Render a table of strings in the style "text" or "markdown", with the first `left` columns aligned left."""
    if style not in ("text", "markdown"):
        raise ValueError(f'style: got {style!r}, expected "text" or "markdown".')
    if style == "markdown":
        escaped = [[cell.replace("|", "\\|") for cell in row] for row in [header, *rows]]
        ruler = ["---"] * left + ["---:"] * (len(header) - left)
        return "\n".join("| " + " | ".join(row) + " |" for row in [escaped[0], ruler, *escaped[1:]])
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    align: list[Any] = [str.ljust] * left + [str.rjust] * (len(header) - left)
    table = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "  ".join(justify(*cell) for justify, *cell in zip(align, row, widths, strict=True)).rstrip() for row in table
    )


def paper_values(
    records: Sequence[Result], columns: Mapping[str, Mapping[str, Any]]
) -> dict[str, tuple[float, float | None]]:
    """Compute the values of a recipe's columns for one model.

    Args:
        records: The records of the model.
        columns: Mapping from label to {"task", "metric", "percent", "higher_is_better"} or to {"mean_of": labels}. A
            mean is given only if all its parts exist; its standard error takes them as independent.

    Returns:
        Mapping from label to (value, standard error or None), without columns that have no score.
    """
    scores: dict[Any, Any] = {
        (r.task, r.metric): (r.value, r.stderr) for r in reversed(list(records)) if r.value is not None
    }
    values_by_label: dict[str, Any] = {}
    for label, column in columns.items():
        if (score := scores.get((column.get("task"), column.get("metric")))) is not None:
            scale = 100 if column.get("percent") else 1
            values_by_label[label] = tuple(number and scale * number for number in score)
    for label, column in columns.items():
        parts = column.get("mean_of", [])
        if parts and all(part in values_by_label for part in parts):
            values, errors = zip(*(values_by_label[part] for part in parts), strict=True)
            error = None if None in errors else math.hypot(*errors) / len(parts)
            values_by_label[label] = (math.fsum(values) / len(parts), error)
    return values_by_label


class Comparison(dict[str, Results]):
    """The scores of several models: a dict from name to `Results`, in the order in which the models were given.

    `columns` are those of the recipe, see `paper_values`.
    """

    columns: dict[str, dict] = {}

    def table(self, style: str = "text") -> str:
        """Render the scores with their standard errors, in the style "text" (for a terminal) or "markdown"."""
        return render_table(self, style)

    __str__ = table

    def paper_table(self, style: str = "text") -> str:
        """Render the recipe's columns in the paper's layout, one row per model; "" if no column has a value."""
        by_model = {name: paper_values(records, self.columns) for name, records in self.items()}
        if not any(by_model.values()):
            return ""
        rows = [
            [name, *(format_score(*values[label], places=2) if label in values else "" for label in self.columns)]
            for name, values in by_model.items()
        ]
        return render_rows(["model", *(_arrowed(label, self.columns) for label in self.columns)], rows, style, left=1)

    def plot(self, path: str | Path) -> Path:
        """Plot the scores to a PNG file.

        Models are points with their standard errors, in one panel per column of the recipe, or per score if no column has a
        value. Recall by depth and speed by length are curves.

        Args:
            path: The file to write.

        Returns:
            `path`.

        Raises:
            ValueError: There is no score to plot.
        """
        points: dict[str, Any] = {}
        all_points: dict[str, Any] = {}
        curves: dict[str, Any] = {}
        for name, records in self.items():
            for label, score in paper_values(records, self.columns).items():
                points.setdefault(_arrowed(label, self.columns), {})[name] = score
            for record in (record for record in records if record.value is not None):
                metric, separator, position = record.metric.rpartition("_" if record.task == SPEED else "_back_")
                if separator and position.isdecimal():
                    title = f"{record.task}\n{metric}, by {'length ↓' if record.task == SPEED else 'depth'}"
                    line = curves.setdefault(title, {}).setdefault(name, [])
                    line.append((int(position), record.value, record.stderr or 0.0))
                else:
                    shots = f", {record.shots} shots" if record.shots else ""
                    title = f"{record.task}\n{record.metric}{shots}{ARROWS[record.higher_is_better]}"
                    all_points.setdefault(title, {})[name] = (record.value, record.stderr)
        points = points or all_points
        if not points and not curves:
            raise ValueError("plot: got no score, expected at least one.")
        colors = dict(zip(self, itertools.cycle(PALETTE), strict=False))
        panels: list[Any] = [(_draw_points, *panel) for panel in points.items()]
        panels += [(_draw_curves, *panel) for panel in curves.items()]
        num_columns = min(4, len(panels))
        num_rows = math.ceil(len(panels) / 4)
        size = (3.4 * num_columns + 0.8, max(1.1 + 0.34 * len(colors), 2.2 if curves else 0) * num_rows + 0.5)
        with drawing(path, num_rows, num_columns, figsize=size) as (_, grid):
            for cell in grid.flat[len(panels) :]:
                cell.set_visible(False)
            for cell, (draw, title, values) in zip(grid.flat, panels, strict=False):
                draw(cell, title, values, colors)
                cell.set_title(title, fontsize=9.5)
        return Path(path)


def _arrowed(label: str, columns: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the label of a column with an arrow that points to better values."""
    return label + ARROWS[columns[label].get("higher_is_better", True)]


def speed_of_records(columns: Mapping[str, Sequence[Result]]) -> dict[str, Any] | None:
    """Return the times of the softmax and the MHLA model, for a model card.

    Args:
        columns: Mapping from "softmax" and "mhla" to the records of that model.

    Returns:
        "rows", as `measure_speed` returns them, and "hardware", "versions", "seed" and "command". None if the two models
        were not timed together.
    """
    tables: dict[str, Any] = {}  # by task_hash, which is equal for models that were timed together
    for kind, record in ((kind, record) for kind, records in columns.items() for record in records):
        if record.task == SPEED:
            metric, _, length = record.metric.rpartition("_")
            what, unit = next(key for key, name in SPEED_METRICS.items() if name == metric)
            rows, kinds = tables.setdefault(record.task_hash, ({}, {}))
            row = rows.setdefault((what, int(length)), {"what": what, "length": int(length)})
            row[f"{kind}_{unit}"] = record.value
            kinds[kind] = record
    for rows, kinds in tables.values():
        if set(kinds) == {"softmax", "mhla"}:
            provenance = {key: getattr(kinds["mhla"], key) for key in ("hardware", "versions", "seed", "command")}
            return {
                "rows": [rows[key] for key in sorted(rows, key=lambda key: (key[0] == DECODE, key[1]))],
                **provenance,
            }
    return None


def _draw_points(
    axes: Any, title: str, values: Mapping[str, tuple[float, float | None]], colors: Mapping[str, str]
) -> None:
    """Draw one point with its standard error per model."""
    label = {"xytext": (0, 6), "textcoords": "offset points", "ha": "center", "fontsize": 8}
    for name, (value, error) in values.items():
        row = list(colors).index(name)
        axes.errorbar(value, row, xerr=error, fmt="o", color=colors[name], markersize=6, capsize=3, linewidth=1.6)
        axes.annotate(f"{value:.4g}", (value, row), **label)
    axes.set_yticks(range(len(colors)), list(colors))
    axes.set_ylim(len(colors) - 0.4, -0.8)
    axes.grid(True, axis="x")
    axes.margins(x=0.2)


def _draw_curves(
    axes: Any, title: str, lines: Mapping[str, Sequence[tuple[int, float, float]]], colors: Mapping[str, str]
) -> None:
    """Draw one curve of (position, value, standard error) per model."""
    for name, points in lines.items():
        positions, values, errors = zip(*sorted(points), strict=True)
        style = {"marker": "o", "markersize": 4, "capsize": 2, "color": colors[name], "label": name}
        axes.errorbar(positions, values, yerr=errors, **style)
    axes.set(xlabel="tokens" if title.startswith(SPEED) else "tokens from the fact to the question", ylim=(0, None))
    axes.grid(True)
    axes.legend(fontsize=8)
