"""The model card: what was kept and lost against the softmax original, how it was made, how fast it is, how to load it.

No number is typed by hand: `card.md.jinja` shows what `Facts` hold, `write_card` keeps the person's part in card.json, and a
card is true when rendering it again gives the same bytes (`check_card`). On a shelf such as `model_cards`, NAME.yaml is the
person's part, results/NAME.json everything that was measured, NAME.md the card.
"""

import dataclasses
import re
from pathlib import Path

import yaml
from huggingface_hub import EvalResult, ModelCardData
from jinja2 import Environment, StrictUndefined

from ..checkpoints.files import read_json, read_yaml, write_json, write_text
from ..checkpoints.load import one_sentence
from ..checkpoints.save import CARD_FILE
from ..checkpoints.values import read_settings
from ..evaluation.records import Result, format_score, render_table
from ..plots import draw_heads
from . import facts as known
from .facts import TEACHER, Facts, Person, make_facts, part_of, read_folder

RESULTS = "results"
TEMPLATE = Path(__file__).with_name("card.md.jinja")
TAGS = ["mhla", "linear-attention", "custom_code"]


class _Optional(dict):
    """A configuration, of which not every model has every entry."""

    def __missing__(self, key):
        return None


def write_card(folder, *, name, base_model=None, compared=None, license=None, **person) -> Path:
    """Write README.md and card.json into a saved and evaluated MHLA model's folder; returns the path of README.md.

    Args:
        folder: holds config.json and results.json; train.json is used when there, and so are times, when the teacher and
            this model were timed together (`--recipe speed`).
        compared: label -> folder of another model with a results.json, in the order of the columns. The label "teacher"
            is the softmax original; "hybrid" and "plain linear" are the usual others.
        license: taken from the base's card (README.md in the teacher's folder, else the Hub's); given here, as are
            license_name and license_link, only when that states none. Never guessed.
        name, base_model, **person: the fields of `facts.Person`.

    Raises:
        ValueError: one sentence that names what is missing or wrong; nothing has been written then.
    """
    folder, compared = Path(folder), dict(compared or {})
    records = {label: known.read_records(place) for label, place in compared.items()}
    measured = known.measure(folder, records)
    terms = {key: person.pop(key, None) for key in ("license_name", "license_link")}
    terms = known.find_license(base_model, compared.get(TEACHER), license, **terms)
    person = read_settings(Person, {"name": name, "base_model": base_model, **terms, **person}, "card: ")
    text = render_card(make_facts(measured, person))
    kept = {"format_version": known.FORMAT_VERSION, **dataclasses.asdict(person), "compared": records}
    write_json(folder / known.PERSON_FILE, kept)
    return write_text(folder / CARD_FILE, text)


def folder_card(folder, weights: bool = True) -> str:
    """README.md as the files in `folder` give it; `weights`: see `measure`."""
    return render_card(make_facts(*read_folder(folder, weights)))


def check_card(folder) -> None:
    """ValueError: README.md is not, byte by byte, what the folder's files say."""
    compare_card(Path(folder, CARD_FILE), folder_card(folder))


def compare_card(path: Path, text: str) -> None:
    """ValueError for a card that is not `text`, byte by byte."""
    if not path.is_file() or path.read_bytes() != text.encode():
        raise ValueError(f"{path} is not what the files beside it say: write the card again")


def shelf_facts(root, name: str) -> Facts:
    """What the card of `name` on the shelf may say."""
    path = Path(root, RESULTS, f"{name}.json")
    if (measured := read_json(path)) is None:
        raise ValueError(f"{path} does not exist: a card says what was measured")
    return make_facts(measured, read_yaml(Path(root, f"{name}.yaml"), "card", Person))


def render_shelf(root, check: bool = False) -> list[Path]:
    """Render every card on the shelf anew, or `check` that this would change none; returns their paths."""
    names = {path.stem for pattern in ("*.yaml", "*.md", f"{RESULTS}/*.json") for path in Path(root).glob(pattern)}
    paths = [Path(root, f"{name}.md") for name in sorted(names)]
    for path in paths:
        text = render_card(shelf_facts(root, path.stem))
        compare_card(path, text) if check else write_text(path, text)
    return paths


def shelve(folder, root, name: str, over_seeds=None) -> Path:
    """Put the card of a model's folder on the shelf `root`; over_seeds: a JSON file with results over several seeds."""
    measured, person = read_folder(folder)
    text = render_card(make_facts(measured, person))
    Path(root, RESULTS).mkdir(parents=True, exist_ok=True)
    written = yaml.safe_dump(dataclasses.asdict(person), sort_keys=False, allow_unicode=True, width=120)
    write_text(Path(root, f"{name}.yaml"), written)
    measured |= {"over_seeds": read_json(over_seeds)} if over_seeds else {}
    write_json(Path(root, RESULTS, f"{name}.json"), measured)
    return write_text(Path(root, f"{name}.md"), text)


def plain_card(folder, name: str, base_model, terms: dict) -> str:
    """README.md for a saved model that was not scored, with what its conversion measured. terms: see `find_license`."""
    return render_card(Facts(*known.read_model(folder), Person(name, base_model, **terms)))


def render_card(facts: Facts) -> str:
    """README.md for `facts`: YAML front matter, then the sections in the order in which a reader asks."""
    person, scores = facts.person, _index(facts)
    front = ModelCardData(
        base_model_relation=person.base_model and "finetune",
        library_name="diffusers" if "_class_name" in facts.config else "transformers",
        pipeline_tag=facts.task,
        tags=TAGS,
        **{key: getattr(person, key) or None for key in known.FRONT},
        **({"model_name": person.name.split("/")[-1], "eval_results": scores} if scores else {}),
    )
    teacher = {TEACHER: facts.models[TEACHER]} if TEACHER in facts.models else {}
    columns = {**teacher, **facts.models}
    parts = {
        part: {name: [r for r in found if part_of(r) == part] for name, found in columns.items()}
        for part in known.PARTS
    }
    template = Environment(undefined=StrictUndefined).from_string(TEMPLATE.read_text(encoding="utf-8"))
    with one_sentence("the files beside the card lack what it shows"):
        text = template.render(
            card_data=front.to_yaml(),
            facts=facts,
            config=_Optional(facts.config, mhla=_Optional(facts.config["mhla"])),
            scores={
                part: render_table(found, "markdown", short=True)
                for part, found in parts.items()
                if any(found.values())
            },
            columns={label: {record.identity: record for record in found} for label, found in columns.items()},
            part_of=part_of,
            score=format_score,
            absent=known.not_measured(facts.records),
            measured=_measured(columns),
            draw_heads=draw_heads,
        )
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _index(facts: Facts) -> list[EvalResult]:
    """Scores on whole tasks, for the front matter; without depths and what is not finite."""
    return [
        EvalResult(
            task_type=facts.task or "other",
            dataset_type=record.task,
            dataset_name=record.task,
            dataset_config=record.task,  # the Hub groups by type and configuration, not by name
            metric_type=record.metric,
            metric_value=rounded(record.value),
            metric_args={"samples": record.samples, "stderr": rounded(record.stderr)},
        )
        for record in facts.records
        if record.limit is None and record.value is not None and part_of(record) in known.SCORES
    ]


def rounded(value: float | None) -> float | None:
    """To six digits, far below any error."""
    return None if value is None else float(f"{value:.6g}")


def _measured(columns: dict[str, list[Result]]) -> dict[tuple, dict[tuple, list[str]]]:
    """How all but times came about: (dtype, hardware, seed, versions) -> (tasks, commit, days, command) -> models."""
    found: dict[tuple, dict[tuple, list[Result]]] = {}
    scores = [(label, record) for label, records in columns.items() for record in records if part_of(record)]
    for label, record in scores:
        around = (record.dtype, record.hardware, record.seed, tuple(sorted(record.versions.items())))
        command = re.sub(r"^(mhla-hf evaluate) \S+", r"\1 FOLDER", record.command).replace(record.task, "TASK")
        found.setdefault(around, {}).setdefault((label, record.commit, command), []).append(record)
    groups: dict[tuple, dict[tuple, list[str]]] = {}
    for around, entries in found.items():
        for (label, commit, command), records in entries.items():
            first, last = (pick(record.date[:10] for record in records) for pick in (min, max))
            days = first if first == last else f"{first} to {last}"
            tasks = tuple(dict.fromkeys(record.task for record in records))
            groups.setdefault(around, {}).setdefault((tasks, commit, days, command), []).append(label)
    return groups
