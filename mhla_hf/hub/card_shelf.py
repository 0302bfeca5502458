"""The repository's own model cards: what a person knows, what was measured, and the card rendered from both.

    model_cards/<recipe>.yaml            name, licence, base, limits: what only a person knows
    model_cards/results/<recipe>.json    everything that was measured: own scores, those compared with, training, speed
    model_cards/<recipe>.md              the card; `mhla-hf card` renders every one, `mhla-hf card --check` proves every one

Unusual: a model's folder and this shelf hold the same `CardFacts`, so both have one renderer; a recipe that was never run
has no results file, and so no card. README and docs take their numbers from the results files too.
"""

import dataclasses
import json
from pathlib import Path

import yaml

from ..checkpoints.files import write_json, write_text
from ..evaluation.records import Result
from .card import check_front, compare_cards, render_card
from .card_facts import PERSON_KEYS, CardFacts, check_measured, check_person, check_told, read_facts, read_person

RESULTS = "results"
FORMAT_VERSION = 1
KNOWN_BY_PERSON = tuple(key for key in PERSON_KEYS if key != "compared")


def shelved(root) -> list[str]:
    """Names of the recipes that have results, sorted. ValueError for a person's file or a card that has none."""
    root = Path(root)
    names = sorted(path.stem for path in (root / RESULTS).glob("*.json"))
    for path in sorted([*root.glob("*.yaml"), *root.glob("*.md")]):
        if path.stem not in names:
            raise ValueError(f"{path} has no {root / RESULTS / path.stem}.json: a card says what was measured")
    if not names:
        raise ValueError(f"{root} holds no {RESULTS}/*.json: put a model there with mhla-hf card FOLDER --shelve")
    return names


def shelve(folder, root, name: str, **further) -> Path:
    """Put the card of a model's folder on the shelf: <name>.yaml, results/<name>.json and <name>.md.

    folder: as `write_card` left it. further: more that was measured, such as over_seeds, kept in the results file.
    ValueError: the folder is not what its card says; nothing is written then.
    """
    root = Path(root)
    facts = read_facts(folder, read_person(folder))
    text = render_card(facts)
    check_front(text, facts)
    measured = {
        "format_version": FORMAT_VERSION,
        "kind": facts.kind,
        "class_name": facts.class_name,
        "config": facts.config,
        "results": [dataclasses.asdict(record) for record in facts.records],
        "compared": {label: [dataclasses.asdict(r) for r in records] for label, records in facts.compared.items()},
        "train": facts.train,
        "speed": facts.speed,
        **further,
    }
    (root / RESULTS).mkdir(parents=True, exist_ok=True)
    person = {key: getattr(facts, key) for key in KNOWN_BY_PERSON}
    write_text(root / f"{name}.yaml", yaml.safe_dump(person, sort_keys=False, allow_unicode=True, width=120))
    write_json(root / RESULTS / f"{name}.json", measured)
    return render(root, name)


def shelved_facts(root, name: str) -> CardFacts:
    """What the card of `name` may say. ValueError: a file is missing, damaged, or has a record that lacks something."""
    root = Path(root)
    person_path, path = root / f"{name}.yaml", root / RESULTS / f"{name}.json"
    try:
        person = yaml.safe_load(person_path.read_text(encoding="utf-8"))
        measured = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{name}: {' '.join(str(error).split())}") from None
    if not isinstance(person, dict) or set(person) != set(KNOWN_BY_PERSON):
        raise ValueError(f"{person_path} must have exactly {', '.join(KNOWN_BY_PERSON)}")
    if not isinstance(measured, dict) or measured.get("format_version") != FORMAT_VERSION:
        raise ValueError(f"{path} must have format_version {FORMAT_VERSION}: put the model there again")
    compared = {label: [Result.from_dict(r) for r in records] for label, records in measured["compared"].items()}
    person = {**person, "compared": compared}
    check_person(person)
    facts = CardFacts(
        kind=measured["kind"],
        class_name=measured["class_name"],
        config=measured["config"],
        records=[Result.from_dict(record) for record in measured["results"]],
        train=check_measured(path, "train", measured["train"]),
        speed=check_measured(path, "speed", measured["speed"]),
        **person,
    )
    check_told(path, facts.records, facts.compared)
    return facts


def render(root, name: str) -> Path:
    """Write the card of one recipe anew. Returns its path."""
    facts = shelved_facts(root, name)
    text = render_card(facts)
    check_front(text, facts)
    return write_text(Path(root) / f"{name}.md", text)


def check(root, name: str) -> None:
    """Prove one card: ValueError names the first number that is not the results file's."""
    path = Path(root) / f"{name}.md"
    if not path.is_file():
        raise ValueError(f"{path} does not exist: render it with mhla-hf card")
    facts, text = shelved_facts(root, name), path.read_text(encoding="utf-8")
    compare_cards(path, text, render_card(facts))
    check_front(text, facts)
