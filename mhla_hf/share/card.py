"""The model card: what was kept and lost against the softmax original, how it was made, how fast it is, how to load it.

No number is typed by hand: `card.md.jinja` shows what `Facts` hold, `write_card` keeps the person's part in card.json, and a
card is true when rendering it again gives the same bytes (`check_card`). The repository's own cards lie in `model_cards`:

    model_cards/<recipe>.yaml            what only a person knows
    model_cards/results/<recipe>.json    everything that was measured: own scores, those compared with, training, speed
    model_cards/<recipe>.md              the card
"""

import dataclasses
import itertools
import math
import re
from pathlib import Path

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ..checkpoints.files import read_yaml, write_json, write_text
from ..checkpoints.save import CARD_FILE, read_json
from ..evaluation.records import Result, Results, format_score, render_rows, render_table
from ..evaluation.speed import TASK as SPEED
from . import facts as known
from .facts import DEPTH, OWN, TEACHER, Facts, Person, Row, generates, read_person, recalls

RESULTS = "results"
TEMPLATE = Path(__file__).with_name("card.md.jinja")
TAGS = ["mhla", "linear-attention", "custom_code"]
MEASURES = {"ms": "faster", "mib": "smaller"}  # unit -> better


def write_card(folder, *, name, base_model=None, compared=None, license=None, **person) -> Path:
    """Write README.md and card.json into a saved and evaluated MHLA model's folder; returns the path of README.md.

    Args:
        folder: holds config.json and results.json; train.json and speed.json are used when there, the latter's numbers also
            from results.json when the teacher and this model were timed together (`--recipe speed`).
        name: Hub id the model will have ("user/model"), or a plain name.
        base_model: Hub id of the softmax original; None when it is not published or the model was trained from scratch.
        compared: label -> folder of another model with a results.json, in the order of the columns. The label "teacher"
            is the softmax original; "hybrid" and "plain linear" are the usual others.
        license: taken from the base's card (README.md in the teacher's folder, else the Hub's); given here, as are
            license_name and license_link, only when that states none. Never guessed.
        **person: other fields of `facts.Person`: datasets, language, about, limits.

    Raises:
        ValueError: one sentence that names what is missing or wrong; nothing has been written then.
    """
    folder, compared = Path(folder), dict(compared or {})
    records = {label: [dataclasses.asdict(r) for r in known.read_records(place)] for label, place in compared.items()}
    measured = known.read_folder(folder, records)
    terms = {key: person.pop(key, None) for key in ("license_name", "license_link")}
    terms = known.find_license(base_model, compared.get(TEACHER), license, **terms)
    person = known.read_as(Person, {"name": name, "base_model": base_model, **terms, **person}, "card")
    text = render_card(known.make_facts(measured, person, folder))
    kept = {"format_version": known.FORMAT_VERSION, **dataclasses.asdict(person), "compared": records}
    write_json(folder / known.PERSON_FILE, kept)
    return write_text(folder / CARD_FILE, text)


def folder_card(folder, weights: bool = True) -> str:
    """README.md as the files in `folder` give it; `weights`: see `read_folder`."""
    person, compared = read_person(folder)
    return render_card(known.make_facts(known.read_folder(folder, compared, weights), person, Path(folder)))


def check_card(folder) -> None:
    """ValueError: README.md is not, byte by byte, what the folder's files say."""
    compare_card(Path(folder, CARD_FILE), folder_card(folder))


def compare_card(path: Path, text: str) -> None:
    """ValueError for a card that is not `text`, byte by byte."""
    if not path.is_file() or path.read_bytes() != text.encode():
        raise ValueError(f"{path} is not what the files beside it say: write the card again")


def shelf_facts(root, name: str) -> Facts:
    """What the card of `name` on the shelf may say."""
    path, person = Path(root, RESULTS, f"{name}.json"), Path(root, f"{name}.yaml")
    measured = read_json(path)
    if measured is None:
        raise ValueError(f"{path} does not exist: a card says what was measured")
    return known.make_facts(measured, known.read_as(Person, read_yaml(person, "card"), person), path)


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
    person, compared = read_person(folder)
    measured = known.read_folder(folder, compared)
    text = render_card(known.make_facts(measured, person, folder))
    Path(root, RESULTS).mkdir(parents=True, exist_ok=True)
    written = yaml.safe_dump(dataclasses.asdict(person), sort_keys=False, allow_unicode=True, width=120)
    write_text(Path(root, f"{name}.yaml"), written)
    measured |= {"over_seeds": read_json(over_seeds)} if over_seeds else {}
    write_json(Path(root, RESULTS, f"{name}.json"), measured)
    return write_text(Path(root, f"{name}.md"), text)


def plain_card(folder, name: str, base_model, terms: dict) -> str:
    """README.md for a saved model of which nothing was measured: what it is, how to load it, and no number.

    folder: of the model. name: the Hub id it will have. base_model: Hub id of the softmax original, or None. terms: as
    `find_license` gives them.
    """
    return render_card(Facts(*known.read_model(folder), Person(name, base_model, **terms)))


def render_card(facts: Facts) -> str:
    """README.md for `facts`: YAML front matter, then the sections in the order in which a reader asks."""
    person, data = facts.person, ((facts.train and facts.train.data) or {}).get("name")
    scores = _index(facts)
    front = ModelCardData(
        base_model=person.base_model,
        base_model_relation=None if person.base_model is None else "finetune",
        library_name="diffusers" if "_class_name" in facts.config else "transformers",
        pipeline_tag=facts.task,
        tags=TAGS,
        license=person.license,
        license_name=person.license_name,
        license_link=person.license_link,
        datasets=person.datasets or None,
        language=person.language or None,
        **({"model_name": person.name.split("/")[-1], "eval_results": scores} if scores else {}),
    )
    text = ModelCard.from_template(
        front,
        template_str=TEMPLATE.read_text(encoding="utf-8"),
        facts=facts,
        own="linear attention" if facts.family and facts.family.linear else "softmax",  # of the layers that were kept
        taught=TEACHER in facts.compared or (facts.train is not None and facts.train.teacher is not None),
        scores=_scores(facts),
        changes=_changes(facts),
        timed=_timed(facts),
        crossover=crossover,
        lost=_lost(facts),
        cache_ratio=cache_ratio,
        absent=known.not_measured(facts.records),
        # the last part of a path: where the data lay on the author's machine is nobody's business
        data=Path(data).name if data and Path(data).is_absolute() else data,
        measured=_measured(facts),
        versions=_versions,
    )
    return re.sub(r"\n{3,}", "\n\n", str(text)).strip() + "\n"


def _index(facts: Facts) -> list[EvalResult]:
    """Scores on whole tasks, for the front matter; without depths and what is not finite."""
    return [
        EvalResult(
            task_type=facts.task or "other",
            dataset_type=record.task,
            dataset_name=record.task,
            dataset_config=record.task,  # the Hub groups by type and configuration, not by name
            metric_type=record.metric,
            metric_value=record.value,
            metric_args={"shots": record.shots, "samples": record.samples, "stderr": record.stderr},
        )
        for record in facts.records
        if record.limit is None and record.value is not None and is_score(record)
    ]


def _versions(versions: dict) -> str:
    return ", ".join(f"{library} {version}" for library, version in sorted(versions.items()))


def is_score(record: Result) -> bool:
    """Whether a record is a quality of its own: neither a part of one by depth, nor a time."""
    return DEPTH not in record.metric and record.task != SPEED


PARTS = {
    "Quality": lambda record: is_score(record) and not (generates(record) or recalls(record)),
    "Recall": recalls,
    "Generation": generates,
}


def _columns(facts: Facts) -> dict[str, list[Result]]:
    """The models of the tables: the teacher, this one, then the others as they were given."""
    teacher = {label: facts.compared[label] for label in facts.compared if label == TEACHER}
    return {**teacher, OWN: facts.records, **facts.compared}


def _scores(facts: Facts) -> dict[str, str]:
    """Title -> table of the models side by side: quality, recall, generation, recall by the distance to the fact."""
    models, tables = _columns(facts), {}
    for title, belongs in PARTS.items():
        chosen = {label: Results(filter(belongs, records)) for label, records in models.items()}
        if any(len(records) for records in chosen.values()):
            tables[title] = render_table(chosen, style="markdown")
    deep: dict[tuple, dict[str, Result]] = {}
    for label, record in ((label, record) for label, records in models.items() for record in records):
        metric, _, back = record.metric.partition(DEPTH)
        if back.isdecimal():
            deep.setdefault((record.task, metric, int(back), str(record.limit)), {})[label] = record
    if deep:
        header = ["task", "metric", "tokens back", "samples", *models]
        rows = []
        for (task, metric, back, _), cells in sorted(deep.items()):
            scores = [format_score(cells[name].value, cells[name].stderr) if name in cells else "" for name in models]
            rows.append([task, metric, str(back), str(next(iter(cells.values())).samples), *scores])
        tables["Recall by depth"] = render_rows(header, rows, "markdown", left=len(header))
    return tables


def _changes(facts: Facts) -> str | None:
    """The table of changes against the teacher, "" without a pair of scores; None without a teacher."""
    models = {label: {record.identity: record for record in records} for label, records in _columns(facts).items()}
    teacher, rows = models.pop(TEACHER, None), []
    for before in filter(is_score, (teacher or {}).values()):
        cells = [_change(before, records.get(before.identity)) for records in models.values()]
        rows += [[before.task, before.metric, *cells]] if any(cells) else []
    header = ["task", "metric", *models]
    return None if teacher is None else render_rows(header, rows, "markdown", left=len(header)) if rows else ""


def _change(before: Result, after: Result | None) -> str:
    """Relative change in percent, with its error where both have one; "" without two values or when the first is zero."""
    if after is None or not before.value or after.value is None:
        return ""
    text = f"{100 * (after.value - before.value) / abs(before.value):+.2f} %"
    if before.stderr is None or after.stderr is None:
        return text
    error = math.hypot(after.stderr, before.stderr * after.value / before.value) / abs(before.value)
    return f"{text} ± {100 * error:.2f} %"


def _lost(facts: Facts) -> list[str]:
    """The scores that are worse than the teacher's by more than two standard errors (of both, independent; unknown: 0)."""
    lost, own = [], {record.identity: record for record in facts.records if record.task != SPEED}
    for before in facts.compared.get(TEACHER, ()):
        after = own.get(before.identity)
        if after is not None and None not in (before.value, after.value, before.higher_is_better):
            worse = (before.value - after.value) * (1 if before.higher_is_better else -1)
            if worse > 2 * math.hypot(before.stderr or 0.0, after.stderr or 0.0):
                scores = f"{format_score(before.value)} → {format_score(after.value)}"
                lost.append(f"{before.metric} of {before.task} ({scores})")
    return lost


def _timed(facts: Facts) -> list[tuple[str, str, list[Row]]]:
    """(what was measured, "ms" or "mib", its rows by length)."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for unit, row in itertools.product(MEASURES, facts.speed.rows if facts.speed else ()):
        if getattr(row, f"mhla_{unit}") is not None:
            groups.setdefault((row.what, unit), []).append(row)
    return [(*what, sorted(rows, key=lambda row: row.length)) for what, rows in groups.items()]


def crossover(rows: list[Row], unit: str = "ms") -> str:
    """From which measured length on MHLA needs less, in words; `rows` are sorted by length."""
    better, lengths = MEASURES[unit], [row.length for row in rows]
    worse = [row.length for row in rows if getattr(row, f"mhla_{unit}") >= getattr(row, f"softmax_{unit}")]
    after = [length for length in lengths if length > max(worse, default=0)]
    if not worse:
        return f"MHLA is {better} at every length measured, from {after[0]} on."
    if worse == lengths:
        return f"softmax attention is {better} at every length measured, up to {worse[-1]}."
    rest = f"; MHLA from {after[0]} on." if after else ", the longest length measured."
    return f"softmax attention is {better} at {', '.join(map(str, worse))}{rest}"


def cache_ratio(config: dict) -> float:
    """Bytes of a block's summary in a language model's cache (fp32), over those of its tokens' keys and values."""
    mhla = config["mhla"]
    key = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    value = config.get("value_dim") or key
    features = 2 * key if mhla["feature_map"] == "hedgehog" else key
    each = 2 if config.get("dtype") in ("bfloat16", "float16") else 4
    return 4 * features * (value + (mhla["normalize"] is True)) / (each * mhla["block_size"] * (key + value))


def _measured(facts: Facts) -> dict[str, dict[tuple, dict[str, None]]]:
    """How the scores came about: circumstances -> (model, commit, date, command) -> tasks."""
    groups: dict[str, dict[tuple, dict[str, None]]] = {}
    for label, record in ((label, record) for label, records in _columns(facts).items() for record in records):
        around = f"{record.dtype} on {record.hardware}; seed {record.seed}; {_versions(record.versions)}"
        made = (label, record.commit, record.date, record.command)
        groups.setdefault(around, {}).setdefault(made, {})[record.task] = None
    return groups
