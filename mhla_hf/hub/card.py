"""Render model cards from records by `card.md.jinja`, and check that no number in them was changed by hand.

The author's part is card.json in a model's folder, and NAME.yaml in a folder of cards, where results/NAME.json has all
measurements, and NAME.md is the card.
"""

import dataclasses
import importlib.util
import logging
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCardData
from jinja2 import Environment, StrictUndefined

from ..checkpoints.file_io import PathLike, check_writable, read_json, read_yaml, wrap_errors, write_json, write_text
from ..checkpoints.save import CARD_FILE, CURVE_FILE
from ..checkpoints.values import read_settings
from ..evaluation.records import Result, Results, format_score, render_table
from ..plots import draw_curve, draw_heads, sort_numbers, tabulate_curve
from . import facts as facts_module
from .facts import TEACHER, Facts, Person, make_facts, read_folder, section_of

logger = logging.getLogger("mhla_hf")
RESULTS = "results"
TEMPLATE = Path(__file__).with_name("card.md.jinja")
TAGS = ["mhla", "linear-attention", "custom_code"]


def write_card(
    folder: PathLike, *, name: str, base_model: str | None = None, compared: Mapping[str, PathLike] | None = None,
    license: str | None = None, **person_fields: Any,
) -> Path:  # fmt: skip
    """Write README.md and card.json into the folder of a saved and evaluated MHLA model.

    Args:
        folder: The model's folder.
        name: Hub id or name of the model.
        base_model: Hub id of the softmax original.
        compared: Label -> folder of another model with a results.json, in the order of the columns. The label "teacher"
            is the softmax original. Times are included if it and this model were timed together (`--recipe speed`).
        license: License of the weights. If no card of the base model states one, it is required, with `license_name` and
            `license_link` where they apply.
        **person_fields: The other fields of `facts.Person`.

    Returns:
        The path of README.md.

    Raises:
        ValueError: An argument is not valid, or a file is missing or damaged; nothing has been written.
    """
    folder = Path(folder)
    check_writable(folder / CARD_FILE, "folder")
    compared = dict(compared or {})
    records = {label: facts_module.read_records(path) for label, path in compared.items()}
    measured = facts_module.measure(folder, records)
    license_details = {key: person_fields.pop(key, None) for key in ("license_name", "license_link")}
    terms = facts_module.find_license(base_model, compared.get(TEACHER), license, **license_details)
    person = read_settings(Person, {"name": name, "base_model": base_model, **terms, **person_fields}, "card: ")
    return _write_measured_card(folder, measured, person)


def _write_measured_card(folder: Path, measured: dict[str, Any], person: Person) -> Path:
    path = _write_with_curve(folder, make_facts(measured, person))
    stored = {"format_version": facts_module.FORMAT_VERSION, **dataclasses.asdict(person)}
    write_json(folder / facts_module.PERSON_FILE, {**stored, "compared": measured["compared"]})
    return path


def render_folder_card(folder: PathLike, weights: bool = True) -> str:
    curve_file = CURVE_FILE if Path(folder, CURVE_FILE).is_file() else None
    return render_card(make_facts(*read_folder(folder, weights)), curve_file)


def _write_with_curve(folder: Path, facts: Facts) -> Path:
    """Write a card and, with matplotlib, the figure that compares choices of softmax heads."""
    measured = facts.config.get("mhla_measured") or {}
    curve_file = CURVE_FILE if "curve" in measured else None
    if curve_file and importlib.util.find_spec("matplotlib") is None:
        logger.warning("card: no %s, which needs matplotlib: pip install 'mhla_hf[eval]'", CURVE_FILE)
        curve_file = None
    text = render_card(facts, curve_file)  # before anything is written
    (folder / CURVE_FILE).unlink(missing_ok=True)
    if curve_file:
        draw_curve(measured, folder / CURVE_FILE)
    return write_text(folder / CARD_FILE, text)


def check_card(folder: PathLike) -> None:
    """Raise ValueError unless README.md is the card that the files in `folder` render to."""
    compare_card(Path(folder, CARD_FILE), render_folder_card(folder))


def compare_card(path: Path, text: str) -> None:
    if not path.is_file() or path.read_bytes() != text.encode():
        raise ValueError(f"{path}: got text other than what its files render to, expected the same; write it again.")


def render_shelf(root: PathLike, check: bool = False) -> list[Path]:
    """Write all cards of a folder anew and return their paths. With `check`, write none; ValueError if one would change."""
    names = {path.stem for pattern in ("*.yaml", "*.md", f"{RESULTS}/*.json") for path in Path(root).glob(pattern)}
    paths = [Path(root, f"{name}.md") for name in sorted(names)]
    for path in paths:
        results = Path(root, RESULTS, f"{path.stem}.json")
        if (measured := read_json(results)) is None:
            raise ValueError(f"{results}: got no such file, expected the measurements of {path.stem!r}.")
        text = render_card(make_facts(measured, read_yaml(path.with_suffix(".yaml"), "card", Person)))
        if check:
            compare_card(path, text)
        else:
            write_text(path, text)
    return paths


def shelve(folder: PathLike, root: PathLike, name: str, over_seeds: PathLike | None = None) -> Path:
    """Write the card and facts of a model to the folder of cards `root`, and return the path of the card.

    `over_seeds` is a JSON file with results over several seeds, which the facts include.
    """
    check_writable(Path(root, RESULTS, name), "root")
    measured, person = read_folder(folder)
    text = render_card(make_facts(measured, person))
    person_yaml = yaml.safe_dump(dataclasses.asdict(person), sort_keys=False, allow_unicode=True, width=120)
    write_text(Path(root, f"{name}.yaml"), person_yaml)
    if over_seeds:
        measured["over_seeds"] = read_json(over_seeds)
    write_json(Path(root, RESULTS, f"{name}.json"), measured)
    return write_text(Path(root, f"{name}.md"), text)


def write_first_card(folder: Path, person: Person) -> Path:
    """Write the card of a saved model that has none, with its scores if it was evaluated."""
    if Results.read(folder):
        return _write_measured_card(folder, facts_module.measure(folder, {}), person)
    return _write_with_curve(folder, Facts(*facts_module.read_model(folder), person))


def render_card(facts: Facts, curve_file: str | None = None) -> str:
    person = facts.person
    fields: dict[str, Any] = {key: getattr(person, key) or None for key in facts_module.METADATA_FIELDS}
    if scores := _metadata_scores(facts):
        fields |= {"model_name": person.name.split("/")[-1], "eval_results": scores}
    metadata = ModelCardData(
        base_model_relation=person.base_model and "finetune",
        library_name="diffusers" if "_class_name" in facts.config else "transformers",
        pipeline_tag=facts.task,
        tags=TAGS,
        **fields,
    )
    columns = dict(sorted(facts.models.items(), key=lambda item: item[0] != TEACHER))  # the teacher first
    sections = {
        section: {label: [r for r in records if section_of(r) == section] for label, records in columns.items()}
        for section in facts_module.SECTIONS
    }
    template = Environment(undefined=StrictUndefined).from_string(TEMPLATE.read_text(encoding="utf-8"))
    with wrap_errors("card: got records without values that a card shows, expected records as mhla_hf writes them"):
        text = template.render(
            card_data=metadata.to_yaml(),
            facts=facts,
            config=defaultdict(lambda: None, facts.config, mhla=defaultdict(lambda: None, facts.config["mhla"])),
            scores={name: render_table(x, "markdown", short=True) for name, x in sections.items() if any(x.values())},
            columns={label: {record.identity: record for record in records} for label, records in columns.items()},
            section_of=section_of,
            score=format_score,
            absent=facts_module.list_unmeasured(facts.records),
            measured=_group_by_origin(columns),
            draw_heads=draw_heads,
            tabulate_curve=tabulate_curve,
            sort_numbers=sort_numbers,
            curve_file=curve_file,
        )
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _metadata_scores(facts: Facts) -> list[EvalResult]:
    """Return finite scores on whole tasks as metadata of the Hub."""
    return [
        EvalResult(
            task_type=facts.task or "other",
            dataset_type=record.task,
            dataset_name=record.task,
            dataset_config=record.task,  # the Hub groups by type and configuration, not by name
            metric_type=record.metric,
            metric_value=round_digits(record.value),
            metric_args={"samples": record.samples, "stderr": round_digits(record.stderr)},
        )
        for record in facts.records
        if record.limit is None and record.value is not None and section_of(record) in facts_module.SCORE_SECTIONS
    ]


def round_digits(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def _group_by_origin(columns: dict[str, list[Result]]) -> dict[tuple[Any, ...], dict[tuple[Any, ...], list[str]]]:
    """Group all scores: {(dtype, hardware, seed, versions): {(tasks, commit, days, command): labels of models}}."""
    runs: dict[tuple[Any, ...], list[Result]] = {}
    scores = [(label, record) for label, records in columns.items() for record in records if section_of(record)]
    for label, record in scores:
        origin = (record.dtype, record.hardware, record.seed, tuple(sorted(record.versions.items())))
        command = re.sub(r"^(mhla-hf evaluate) \S+", r"\1 FOLDER", record.command).replace(record.task, "TASK")
        runs.setdefault((origin, label, record.commit, command), []).append(record)
    groups: dict[tuple[Any, ...], dict[tuple[Any, ...], list[str]]] = {}
    for (origin, label, commit, command), records in runs.items():
        dates = [record.date[:10] for record in records]
        days = dates[0] if min(dates) == max(dates) else f"{min(dates)} to {max(dates)}"
        tasks = tuple(dict.fromkeys(record.task for record in records))
        groups.setdefault(origin, {}).setdefault((tasks, commit, days, command), []).append(label)
    return groups
