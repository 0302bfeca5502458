"""The record of a score, the file that keeps a model's scores, and tables and pictures of several models side by side.

Everything printed about quality (tables, cards, README) is read from `results.json` in the model's folder. Every number
in it carries what is needed to judge and to repeat it. A results file comes along with a downloaded model and anybody can
edit it, so a digest of each record made here is noted in Hugging Face's cache, `$HF_HOME/assets/mhla_hf/scores`.
"""

import dataclasses
import itertools
import json
import logging
import math
import re
from pathlib import Path

from huggingface_hub import constants

from ..checkpoints.file_io import write_json
from ..checkpoints.fingerprint import hash_json
from ..checkpoints.values import Number, checked, checked_field, read_settings
from ..plots import PALETTE, drawing
from ..speed import DECODE

FILE_NAME = "results.json"
FORMAT_VERSION = 1
ARROWS = {True: " ↑", False: " ↓", None: ""}
SPEED = "speed"  # the task of times; (what, unit) of `measure_speed` -> its metrics
SPEED_METRICS = {("forward", "ms"): "forward_ms", (DECODE, "ms"): "decode_ms", (DECODE, "mib"): "cache_mib"}

logger = logging.getLogger("mhla_hf")


def finite(value):
    """A float when `value` is a finite number, else None (harnesses write "N/A", NaN or infinity)."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if number else None


@checked
class Result:
    """One number about one model.

    task, metric: names as the harness gives them; a filter other than "none" joins the metric ("exact_match,strict").
    value None: it was not finite. stderr None: none is defined. higher_is_better None: the harness does not say.
    shots: examples in the prompt. samples: documents scored. limit: None for the whole task, else what was asked for.
    task_version, task_hash: of the task's definition and data; when they change, the score counts as missing.
    model: the name the user gave. revision: Hub commit, None for a local folder. fingerprint: of the weights.
    versions: library -> version. commit: git commit of this package, or its version when it is installed without git.
    dtype: of the parameters. hardware: one line. seed: int, or the harness's list of seeds as text. command: a shell line
    that gives the number again. date: ISO 8601, UTC. seconds: of the task's run. window: tokens the model saw at once.
    """

    task: str
    metric: str
    value: Number | None = checked_field(lambda value: finite(value) is not None, "a finite number or None")
    stderr: Number | None = checked_field(lambda value: finite(value) is not None, "a finite number or None")
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
    def identity(self):
        """(task, metric, shots, limit, samples): two records with the same identity are two measurements of one thing."""
        return (self.task, self.metric, self.shots, self.limit, self.samples)

    @classmethod
    def from_dict(cls, values):
        """A record from its JSON form; ValueError names what is unknown, missing or of another type."""
        return read_settings(cls, values, "result: ")


class Results(list[Result]):
    """The scores of one model: a list of `Result` that is read from and written to one JSON file.

    `write` goes aside and renames, so a reader never sees half a file.
    """

    @classmethod
    def read(cls, path):
        """Read `path` (a file, or a folder that holds results.json); empty where there is none. ValueError: no such file."""
        path = results_path(path)
        if not path.exists():
            return cls()
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["format_version"] == FORMAT_VERSION:
                return cls(map(Result.from_dict, content["results"]))
        except (ValueError, RecursionError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not a results file: {type(error).__name__}: {error}") from None
        raise ValueError(f"{path} has format_version {content['format_version']!r}; expected {FORMAT_VERSION}")

    def merge(self, new, beside=False):
        """Put `new` records in, each in place of those of the same task, metric, shots and limit. Returns self.

        beside: those with another number of samples stay: a score of 1,000 images is no new measurement of 50,000.
        """
        fields = 5 if beside else 4
        replaced = {record.identity[:fields] for record in new}
        kept = [record for record in self if record.identity[:fields] not in replaced]
        kept = {record.identity: record for record in [*kept, *new]}
        self[:] = sorted(kept.values(), key=lambda record: tuple(map(str, record.identity)))
        return self

    def of(self, fingerprint):
        """A new `Results` with only the records that belong to the weights with this fingerprint."""
        return Results(record for record in self if record.fingerprint == fingerprint)

    def find(self, task, metric, limit=None):
        """The record of (task, metric) on the whole task or on `limit`, of several that with the most samples; or None."""
        found = [r for r in self if (r.task, r.metric, r.limit) == (task, metric, limit)]
        return max(found, key=lambda record: record.samples, default=None)

    def write(self, path):
        """Write all records to `path` (a file, or an existing folder), aside and renamed. Returns the file's path."""
        content = {"format_version": FORMAT_VERSION, "results": [dataclasses.asdict(record) for record in self]}
        return write_json(results_path(path), content)


def results_path(path):
    """results.json in `path` when that is a folder (or has no .json ending), else `path` itself."""
    path = Path(path)
    return path if path.suffix == ".json" and not path.is_dir() else path / FILE_NAME


def _digest(record):
    return hash_json(dataclasses.asdict(record))


def _notes():
    return Path(constants.HF_ASSETS_CACHE) / "mhla_hf" / "scores"


def note_measured(records):
    """Note that `records` were measured here; a cache that cannot be written to is warned of."""
    try:
        _notes().parent.mkdir(parents=True, exist_ok=True)
        with _notes().open("a", encoding="utf-8") as notes:
            notes.writelines(f"{_digest(record)}\n" for record in records)
    except OSError as error:
        logger.warning("%s cannot be written (%s): these scores will be run again", _notes(), error.strerror)


def measured_here(records):
    """`Results` with those of `records` that this machine measured."""
    noted = set(_notes().read_text(encoding="utf-8").split()) if _notes().is_file() else set()
    return Results(record for record in records if _digest(record) in noted)


def format_score(value, stderr=None, places=4):
    """`1.9051 ± 0.0123`; without ± where there is no standard error; `not finite` for None."""
    if value is None:
        return "not finite"
    return f"{value:.{places}f}" if stderr is None else f"{value:.{places}f} ± {stderr:.{places}f}"


def render_table(models, style="text", short=False):
    """The models side by side: task, metric (with ↑ or ↓), shots, samples, then a score with its error per model.

    models: dict name -> Results (or list of Result), in the order of the columns. style: as `render_rows` takes it.
    short: three decimals, no errors of 0, and no column of shots where there were none.
    """
    found = {name: {record.identity: record for record in records} for name, records in models.items()}
    every = {identity: record for records in reversed(found.values()) for identity, record in records.items()}
    rows, places = [["task", "metric", "shots", "samples", *models]], 3 if short else 4
    for identity in sorted(every, key=_natural):
        first = every[identity]
        samples = f"{first.samples}" if first.limit is None else f"{first.samples} (limit)"
        row = [first.task, first.metric + ARROWS[first.higher_is_better], str(first.shots), samples]
        for score in (records.get(identity) for records in found.values()):
            stderr = score and (score.stderr or (None if short else score.stderr))
            row.append("" if score is None else format_score(score.value, stderr, places))
        rows.append(row)
    if short and not any(record.shots for record in every.values()):
        rows = [row[:2] + row[3:] for row in rows]
    return render_rows(rows[0], rows[1:], style)


def _natural(identity):
    """A sort key by which acc_back_64 comes before acc_back_128."""
    parts = re.split(r"(\d+)", " ".join(map(str, identity)))
    return [(int(part), "") if part.isdecimal() else (math.inf, part) for part in parts]


def render_rows(header, rows, style="text", left=2):
    """A table of texts, the first `left` columns aligned left. style: "text" or "markdown"."""
    if style not in ("text", "markdown"):
        raise ValueError(f'style is {style!r}; expected "text" or "markdown"')
    if style == "markdown":
        safe = [[cell.replace("|", "\\|") for cell in row] for row in [header, *rows]]
        ruler = ["---"] * left + ["---:"] * (len(header) - left)
        return "\n".join("| " + " | ".join(row) + " |" for row in [safe[0], ruler, *safe[1:]])
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    align = [str.ljust] * left + [str.rjust] * (len(header) - left)
    table = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "  ".join(put(*cell) for put, *cell in zip(align, row, widths, strict=True)).rstrip() for row in table
    )


def paper_values(records, columns):
    """label -> (value, standard error) of one model for the columns of a recipe, without those that have no score.

    columns: label -> {"task", "metric", "percent", "higher_is_better"} or {"mean_of": labels}. A mean is given only when
    all its parts are there; its standard error takes them as independent.
    """
    scores = {(r.task, r.metric): (r.value, r.stderr) for r in reversed(list(records)) if r.value is not None}
    found = {}
    for label, column in columns.items():
        if (score := scores.get((column.get("task"), column.get("metric")))) is not None:
            scale = 100 if column.get("percent") else 1
            found[label] = tuple(number and scale * number for number in score)
    for label, column in columns.items():
        parts = column.get("mean_of", [])
        if parts and all(part in found for part in parts):
            values, errors = zip(*(found[part] for part in parts), strict=True)
            error = None if None in errors else math.hypot(*errors) / len(parts)
            found[label] = (math.fsum(values) / len(parts), error)
    return found


class Comparison(dict[str, Results]):
    """name -> `Results` of what was asked for, in the order of the models. columns: of the recipe, see `paper_values`."""

    columns = {}

    def table(self, style="text"):
        """The scores with their standard errors. style: "text" for a terminal or "markdown"."""
        return render_table(self, style)

    __str__ = table

    def paper_table(self, style="text"):
        """The recipe's columns in the paper's layout, one row per model; "" where there is none to fill."""
        found = {name: paper_values(records, self.columns) for name, records in self.items()}
        if not any(found.values()):
            return ""
        rows = [
            [name, *(format_score(*values[label], places=2) if label in values else "" for label in self.columns)]
            for name, values in found.items()
        ]
        return render_rows(["model", *(_arrowed(label, self.columns) for label in self.columns)], rows, style, left=1)

    def plot(self, path):
        """Draw the scores into a PNG, and return its path; ValueError: there is nothing to draw.

        Models are points with their standard errors in one panel per column of the recipe, or per score where no column has
        any; recall by depth and speed by length are curves.
        """
        points, every, curves = {}, {}, {}
        for name, records in self.items():
            for label, score in paper_values(records, self.columns).items():
                points.setdefault(_arrowed(label, self.columns), {})[name] = score
            for record in (record for record in records if record.value is not None):
                score, mark, place = record.metric.rpartition("_" if record.task == SPEED else "_back_")
                if mark and place.isdecimal():
                    title = f"{record.task}\n{score}, by {'length ↓' if record.task == SPEED else 'depth'}"
                    line = curves.setdefault(title, {}).setdefault(name, [])
                    line.append((int(place), record.value, record.stderr or 0.0))
                else:
                    shots = f", {record.shots} shots" if record.shots else ""
                    title = f"{record.task}\n{record.metric}{shots}{ARROWS[record.higher_is_better]}"
                    every.setdefault(title, {})[name] = (record.value, record.stderr)
        points = points or every
        if not points and not curves:
            raise ValueError("plot: no score is there to draw; expected at least one")
        colors = dict(zip(self, itertools.cycle(PALETTE), strict=False))
        panels = [(_draw_points, *panel) for panel in points.items()]
        panels += [(_draw_curves, *panel) for panel in curves.items()]
        across, down = min(4, len(panels)), math.ceil(len(panels) / 4)
        size = (3.4 * across + 0.8, max(1.1 + 0.34 * len(colors), 2.2 if curves else 0) * down + 0.5)
        with drawing(path, down, across, figsize=size) as (_, grid):
            for cell in grid.flat[len(panels) :]:
                cell.set_visible(False)
            for cell, (draw, title, values) in zip(grid.flat, panels, strict=False):
                draw(cell, title, values, colors)
                cell.set_title(title, fontsize=9.5)
        return Path(path)


def _arrowed(label, columns):
    return label + ARROWS[columns[label].get("higher_is_better", True)]


def speed_of_records(columns):
    """What a card shows of the records of "softmax" and "mhla" timed together; None where they were not.

    columns: these two names -> list of `Result`. "rows" are as `measure_speed` gives them.
    """
    tables = {}
    for kind, record in ((kind, record) for kind, records in columns.items() for record in records):
        if record.task == SPEED:
            metric, _, length = record.metric.rpartition("_")
            what, unit = next(key for key, name in SPEED_METRICS.items() if name == metric)
            rows, kinds = tables.setdefault(record.task_hash, ({}, {}))
            row = rows.setdefault((what, int(length)), {"what": what, "length": int(length)})
            row[f"{kind}_{unit}"], kinds[kind] = record.value, record
    for rows, kinds in tables.values():
        if set(kinds) == {"softmax", "mhla"}:
            said = {key: getattr(kinds["mhla"], key) for key in ("hardware", "versions", "seed", "command")}
            return {"rows": [rows[key] for key in sorted(rows, key=lambda key: (key[0] == DECODE, key[1]))], **said}
    return None


def _draw_points(axes, title, values, colors):
    label = {"xytext": (0, 6), "textcoords": "offset points", "ha": "center", "fontsize": 8}
    for name, (value, error) in values.items():
        place = list(colors).index(name)
        axes.errorbar(value, place, xerr=error, fmt="o", color=colors[name], markersize=6, capsize=3, linewidth=1.6)
        axes.annotate(f"{value:.4g}", (value, place), **label)
    axes.set_yticks(range(len(colors)), list(colors))
    axes.set_ylim(len(colors) - 0.4, -0.8)
    axes.grid(True, axis="x")
    axes.margins(x=0.2)


def _draw_curves(axes, title, lines, colors):
    for name, points in lines.items():
        places, values, errors = zip(*sorted(points), strict=True)
        look = {"marker": "o", "markersize": 4, "capsize": 2, "color": colors[name], "label": name}
        axes.errorbar(places, values, yerr=errors, **look)
    axes.set(xlabel="tokens" if title.startswith(SPEED) else "tokens from the fact to the question", ylim=(0, None))
    axes.grid(True)
    axes.legend(fontsize=8)
