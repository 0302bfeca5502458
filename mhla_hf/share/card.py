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
from ..evaluation.records import Result, Results, format_score, render_rows, render_table
from ..evaluation.speed import TASK as SPEED
from .facts import (
    DEPTH,
    FORMAT_VERSION,
    OWN,
    PERSON_FILE,
    TASKS,
    TEACHER,
    Facts,
    Person,
    Row,
    count_layers,
    find_licence,
    generates,
    hub_task,
    make_facts,
    not_measured,
    read_as,
    read_folder,
    read_json,
    read_person,
    read_records,
    recalls,
)

CARD_FILE = "README.md"
RESULTS = "results"
TEMPLATE = Path(__file__).with_name("card.md.jinja")
TAGS = ["mhla", "linear-attention", "custom_code"]
LOADERS = {
    "language": "AutoModelForCausalLM",
    "image": "AutoModelForImageClassification",
    "tower": "AutoModel",
    "model": "AutoModel",
    "pipeline": "DiffusionPipeline",
}
WHAT = {
    "text-generation": "A language model",
    "image-classification": "An image classifier",
    "image-feature-extraction": "An image encoder",
    "text-to-video": "A video model",
    "text-to-image": "A text-to-image model",
    "unconditional-image-generation": "A class-to-image model",
}
ABSENT = {"recall": "Recall of single facts from far back", "generation": "Generation"}
MEASURES = {"ms": ("time", "ms", "faster"), "mib": ("memory", "MiB", "smaller")}  # what, unit, better


def write_card(
    folder,
    *,
    name,
    base_model=None,
    compared=None,
    license=None,
    license_name=None,
    license_link=None,
    datasets=(),
    language=(),
    about="",
    limits=(),
) -> Path:
    """Write README.md and card.json into a saved and evaluated MHLA model's folder.

    Args:
        folder: holds config.json and results.json; train.json and speed.json are used when there, the latter's numbers also
            from results.json when the teacher and this model were timed together (`--recipe speed`).
        name: Hub id the model will have ("user/model"), or a plain name.
        base_model: Hub id of the softmax original; None when it is not published or the model was trained from scratch.
        compared: label -> folder of another model with a results.json, in the order of the columns. The label "teacher"
            is the softmax original; "hybrid" and "plain linear" are the usual others.
        license, license_name, license_link: taken from the base's card (README.md in the teacher's folder, else the
            Hub's); given here only when that states none. Never guessed.
        datasets, language: Hub ids of training sets, ISO language codes.
        about: a sentence or more below the title. limits: sentences to add to the limits.

    Returns:
        Path of README.md.

    Raises:
        ValueError: one sentence that names what is missing or wrong; nothing has been written then.
    """
    folder, compared = Path(folder), dict(compared or {})
    found = {label: read_records(place, f"compared[{label!r}]") for label, place in compared.items()}
    told = {label: [dataclasses.asdict(record) for record in records] for label, records in found.items()}
    measured = read_folder(folder, told)
    given = {"license": license, "license_name": license_name, "license_link": license_link}
    given = find_licence(base_model, compared.get(TEACHER), given)
    lists = {"datasets": list(datasets), "language": list(language), "limits": list(limits)}
    person = read_as(Person, {"name": name, "base_model": base_model, "about": about, **given, **lists}, "card")
    text = render_card(make_facts(measured, person, folder))
    kept = {"format_version": FORMAT_VERSION, **dataclasses.asdict(person), "compared": told}
    write_json(folder / PERSON_FILE, kept)
    return write_text(folder / CARD_FILE, text)


def folder_card(folder, weights: bool = True) -> str:
    """README.md as the files in `folder` give it; `weights`: see `read_folder`."""
    person, compared = read_person(folder)
    return render_card(make_facts(read_folder(folder, compared, weights), person, Path(folder)))


def check_card(folder, weights: bool = True) -> None:
    """ValueError: README.md is not what the folder's files say. `weights`: see `read_folder`."""
    compare_card(Path(folder, CARD_FILE), folder_card(folder, weights))


def compare_card(path: Path, wanted: str) -> None:
    """ValueError, with the first line that differs, for a card that is not `wanted`, byte by byte."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist: write the card first")
    if path.read_bytes() != wanted.encode():
        lines = path.read_bytes().decode(errors="replace").split("\n")
        pairs = enumerate(itertools.zip_longest(lines, wanted.split("\n")), 1)
        number, want = next((number, want) for number, (got, want) in pairs if got != want)
        raise ValueError(f"{path}:{number} is not what the files say: {want!r}")  # what is there may be a secret


def shelf_names(root) -> list[str]:
    """Names of the cards on the shelf, sorted. ValueError for an empty one."""
    places = (Path(root, pattern) for pattern in ("*.yaml", "*.md", f"{RESULTS}/*.json"))
    names = sorted({path.stem for place in places for path in place.parent.glob(place.name)})
    if not names:
        raise ValueError(f"{root} holds no {RESULTS}/*.json: put a model there with mhla-hf card FOLDER --shelve")
    return names


def shelf_facts(root, name: str) -> Facts:
    """What the card of `name` may say."""
    measured = read_json(Path(root, RESULTS), f"{name}.json")
    if measured is None:
        raise ValueError(f"{Path(root, RESULTS, name)}.json does not exist: a card says what was measured")
    path = Path(root, f"{name}.yaml")
    return make_facts(measured, read_as(Person, read_yaml(path, "card"), path), Path(root, RESULTS, f"{name}.json"))


def shelve(folder, root, name: str, **further) -> Path:
    """Put the card of a model's folder on the shelf; `further`: more that was measured, such as over_seeds."""
    person, compared = read_person(folder)
    measured = read_folder(folder, compared)
    text = render_card(make_facts(measured, person, Path(folder)))
    Path(root, RESULTS).mkdir(parents=True, exist_ok=True)
    written = yaml.safe_dump(dataclasses.asdict(person), sort_keys=False, allow_unicode=True, width=120)
    write_text(Path(root, f"{name}.yaml"), written)
    write_json(Path(root, RESULTS, f"{name}.json"), {**measured, **further})
    return write_text(Path(root, f"{name}.md"), text)


def plain_card(
    repo_id: str, kind: str, class_name: str, *, license, license_name=None, license_link=None, base_model=None
) -> str:
    """README.md for a model of which nothing was measured: what it is, how to load it, and no number.

    Args:
        repo_id: the Hub id it will have. kind: see `Facts`. class_name: of the model or pipeline.
        license, license_name, license_link: as the Hub writes them; must be what the card of `base_model` states, when
            that can be read.
        base_model: Hub id of the softmax original, or None.
    """
    given = {"license": license, "license_name": license_name, "license_link": license_link}
    front = _front(kind, class_name, base_model, **find_licence(base_model, None, given))
    return _render(front, kind, repo_id, facts=None, class_name=class_name, base_model=base_model)


def render_card(facts: Facts) -> str:
    """README.md for `facts`: YAML front matter, then the sections in the order in which a reader asks."""
    person, converted = facts.person, facts.config["mhla"]["layers"]
    kept = [i for i in range(count_layers(facts.config)) if i not in converted]
    own = "linear attention" if "Sana" in facts.class_name else "softmax"  # of the layers that were not converted
    taught = TEACHER in facts.compared or (facts.train is not None and facts.train.teacher is not None)
    base = f"an unpublished {own} model" if taught else ""
    if person.base_model is not None:
        base = f"[{person.base_model}](https://huggingface.co/{person.base_model})"
    shown = person.license_name if person.license == "other" else person.license
    front = _front(
        facts.kind,
        facts.class_name,
        person.base_model,
        license=person.license,
        license_name=person.license_name,
        license_link=person.license_link,
        datasets=person.datasets or None,
        language=person.language or None,
        **_index(facts),
    )
    layers = [["MHLA layers", ", ".join(map(str, converted))], [f"{own} layers", ", ".join(map(str, kept)) or "none"]]
    data = ((facts.train and facts.train.data) or {}).get("name")
    return _render(
        front,
        facts.kind,
        person.name,
        facts=facts,
        what=WHAT.get(hub_task(facts.kind, facts.class_name), "A diffusion model"),
        own=own,
        converted=converted,
        kept=kept,
        base=base,
        in_short=markdown(["", ""], [*layers, *_in_short(facts)]),
        scores=_scores(facts),
        changes=_changes(facts),
        speed=_speed(facts),
        limits=_limits(facts),
        settings=markdown(["setting", "value"], _settings(facts.config)),
        stages=_stages(facts),
        # the last part of a path: where the data lay on the author's machine is nobody's business
        data=Path(data).name if data and Path(data).is_absolute() else data,
        measured=_measured(facts),
        versions=_versions,
        license_shown=f"[{shown}]({person.license_link})" if person.license_link else shown,
    )


def _front(kind: str, class_name: str, base_model, **further) -> ModelCardData:
    return ModelCardData(
        base_model=base_model,
        base_model_relation=None if base_model is None else "finetune",
        library_name="transformers" if kind in TASKS else "diffusers",
        pipeline_tag=hub_task(kind, class_name),
        tags=TAGS,
        **further,
    )


def _render(front: ModelCardData, kind: str, name: str, **context) -> str:
    context |= {"kind": kind, "name": name, "library": front.library_name, "loader": LOADERS[kind]}
    text = str(ModelCard.from_template(front, template_str=TEMPLATE.read_text(encoding="utf-8"), **context))
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _index(facts: Facts) -> dict:
    """Scores on whole tasks, for the front matter; without depths and what is not finite."""
    scores = [
        EvalResult(
            task_type=hub_task(facts.kind, facts.class_name) or "other",
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
    return {"model_name": facts.person.name.split("/")[-1], "eval_results": scores} if scores else {}


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, all columns aligned left."""
    return render_rows(header, rows, "markdown", left=len(header))


def _versions(versions: dict) -> str:
    return ", ".join(f"{library} {version}" for library, version in sorted(versions.items()))


def _in_short(facts: Facts) -> list[list[str]]:
    """What the training cost, from where on it pays."""
    spent, train = "not recorded", facts.train
    if train is not None:
        spent = f"{getattr(train, train.unit):,} {train.unit} in {train.seconds / 3600:.2g} hours on {train.hardware}"
    paid = [[f"{what}, {MEASURES[unit][0]}", crossover(rows, unit)] for what, unit, rows in _timed(facts)]
    return [["training", spent], *paid]


def is_score(record: Result) -> bool:
    """Whether a record is a quality of its own: neither a part of one by depth, nor a time."""
    return DEPTH not in record.metric and record.task != SPEED


PARTS = {
    "Quality": lambda record: is_score(record) and not (generates(record) or recalls(record)),
    "Recall": recalls,
    "Generation": generates,
}


def _columns(facts: Facts) -> dict[str, Results]:
    """The models of the tables: the teacher, this one, then the others as they were given."""
    found = {label: facts.compared[label] for label in facts.compared if label == TEACHER}
    return {label: Results(records) for label, records in {**found, OWN: facts.records, **facts.compared}.items()}


def _scores(facts: Facts) -> dict[str, str]:
    """Title -> table of the models side by side: quality, recall, generation, recall by the distance to the fact."""
    models, tables = _columns(facts), {}
    for title, belongs in PARTS.items():
        chosen = {label: Results(filter(belongs, records)) for label, records in models.items()}
        if any(len(records) for records in chosen.values()):
            tables[title] = render_table(chosen, style="markdown")
    deep: dict[tuple, dict[str, Result]] = {}
    for label, records in models.items():
        for record in records:
            metric, mark, back = record.metric.partition(DEPTH)
            if mark and back.isdecimal():
                deep.setdefault((record.task, metric, int(back), str(record.limit)), {})[label] = record
    rows = []
    for (task, metric, back, _), cells in sorted(deep.items()):
        samples = next(iter(cells.values())).samples
        scores = [format_score(cells[label].value, cells[label].stderr) if label in cells else "" for label in models]
        rows.append([task, metric, str(back), str(samples), *scores])
    if rows:
        tables["Recall by depth"] = markdown(["task", "metric", "tokens back", "samples", *models], rows)
    return tables


def _changes(facts: Facts) -> str | None:
    """The table of changes against the teacher, "" without a pair of scores; None without a teacher."""
    models = _columns(facts)
    if TEACHER not in models:
        return None
    others, rows = [label for label in models if label != TEACHER], []
    for record in filter(is_score, models[TEACHER]):
        cells = [_change(record, _same(models[label], record)) for label in others]
        if any(cells):
            rows.append([record.task, record.metric, *cells])
    return markdown(["task", "metric", *others], rows) if rows else ""


def _same(records, wanted: Result) -> Result | None:
    return next((record for record in records if record.identity == wanted.identity), None)


def _change(before: Result, after: Result | None) -> str:
    """Relative change in percent, with its error where both have one; "" without two values or when the first is zero."""
    if after is None or not before.value or after.value is None:
        return ""
    text = f"{100 * (after.value - before.value) / abs(before.value):+.2f} %"
    if before.stderr is None or after.stderr is None:
        return text
    error = math.hypot(after.stderr, before.stderr * after.value / before.value) / abs(before.value)
    return f"{text} ± {100 * error:.2f} %"


def _lost(before: Result, after: Result | None) -> bool:
    """Whether the change is for the worse and larger than two standard errors (of both, independent; unknown: zero)."""
    if after is None or before.value is None or after.value is None or before.higher_is_better is None:
        return False
    worse = before.value - after.value if before.higher_is_better else after.value - before.value
    return worse > 2 * math.hypot(before.stderr or 0.0, after.stderr or 0.0)


def _timed(facts: Facts) -> list[tuple[str, str, list[Row]]]:
    """(what was measured, "ms" or "mib", its rows by length)."""
    rows = sorted(facts.speed.rows, key=lambda row: row.length) if facts.speed else []
    names, found = dict.fromkeys(row.what for row in facts.speed.rows) if facts.speed else (), []
    for unit in MEASURES:
        for what in names:
            of_it = [row for row in rows if row.what == what and getattr(row, f"mhla_{unit}") is not None]
            found += [(what, unit, of_it)] if of_it else []
    return found


def _speed(facts: Facts) -> dict[str, str]:
    """Title -> table of time and of memory."""
    tables = {}
    for unit, (title, shown, _) in MEASURES.items():
        table = []
        for what, row in ((what, row) for what, of, rows in _timed(facts) if of == unit for row in rows):
            softmax, mhla = getattr(row, f"softmax_{unit}"), getattr(row, f"mhla_{unit}")
            table.append([what, str(row.length), f"{softmax:.3g}", f"{mhla:.3g}", f"{softmax / mhla:.2f}"])
        if table:
            head = ["what", "length", f"softmax, {shown}", f"MHLA, {shown}", "softmax / MHLA"]
            tables[title.capitalize()] = markdown(head, table)
    return tables


def crossover(rows: list[Row], unit: str = "ms") -> str:
    """From which measured length on MHLA needs less, in words; `rows` are sorted by length."""
    better = MEASURES[unit][2]
    worse = [row.length for row in rows if getattr(row, f"mhla_{unit}") >= getattr(row, f"softmax_{unit}")]
    from_there = [row.length for row in rows if row.length > max(worse, default=0)]
    if len(worse) == len(rows):
        return f"softmax attention is {better} at every length measured, up to {worse[-1]}."
    if not worse:
        return f"MHLA is {better} at every length measured, from {from_there[0]} on."
    text = f"softmax attention is {better} at {', '.join(map(str, worse))}"
    return f"{text}; MHLA from {from_there[0]} on." if from_there else f"{text}, the longest length measured."


def _limits(facts: Facts) -> list[str]:
    """Known failures: what was lost, what is known of this attention, what was not measured."""
    lines, teacher = [], facts.compared.get(TEACHER)
    if teacher is not None:
        lost = [
            f"{record.metric} of {record.task} ({format_score(record.value)} → {format_score(after.value)})"
            for record in teacher
            if record.task != SPEED and _lost(record, after := _same(facts.records, record))
        ]
        worse = (
            "Worse than the teacher, by more than two standard errors where these are known: " + "; ".join(lost) + "."
        )
        none = "No score above is worse than the teacher's by more than two standard errors; smaller losses may exist."
        lines.append(worse if lost else none)
    elif facts.person.base_model is not None:
        lines.append("The teacher was not scored on these tasks, so what the conversion lost is not known.")
    if facts.train is None:
        lines.append("How the model was trained is not recorded here.")
    else:
        if lengths := [stage.seq_len for stage in facts.train.stages if stage.seq_len]:
            lines.append(
                f"Trained on sequences of {max(lengths)} tokens; of longer ones only what the tables show is known."
            )
        seed = facts.train.seed
        lines.append(f"One training run (seed {seed}): how much another seed would change is not part of the errors.")
    if facts.kind == "language":
        lines += [
            "The past is kept as one summary per block: exact recall of a far-back detail is the known weakness.",
            "Decoding keeps every block's summary: the cache grows with the text, as softmax's does, and in the MHLA layers"
            f" it holds at least {cache_ratio(facts.config):.2f} times the bytes of softmax's keys and values.",
        ]
        lines += [f"{ABSENT[name]} was not measured." for name in not_measured(facts.records)]
    if any(record.limit is not None for record in facts.records):
        lines.append("Scores marked (limit) come from a part of their task and are not comparable with published ones.")
    lines += ["Speed was not measured."] if facts.speed is None else []
    return [*lines, "No safety, bias or fairness evaluation was made.", *facts.person.limits]


def cache_ratio(config: dict) -> float:
    """Bytes of a block's summary in a language model's cache (fp32), over those of its tokens' keys and values."""
    mhla = config["mhla"]
    key = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    value = config.get("value_dim") or key
    features = 2 * key if mhla["feature_map"] == "hedgehog" else key
    each = 2 if config.get("dtype") in ("bfloat16", "float16") else 4
    return 4 * features * (value + (mhla["normalize"] is True)) / (each * mhla["block_size"] * (key + value))


def _settings(config: dict) -> list[list[str]]:
    """Every choice about the attention."""
    heads, head = config.get("num_attention_heads"), config.get("attention_head_dim")
    width = config.get("hidden_size") or (head and head * heads)
    left_out = ("layers", "format_version", "impl")
    rows = [
        ["model type", config.get("model_type") or config.get("_class_name")],
        ["hidden size, heads", f"{width}, {heads}"],
    ]
    rows += [[key.replace("_", " "), value] for key, value in config["mhla"].items() if key not in left_out]
    return [[key, str(value)] for key, value in rows]


def _stages(facts: Facts) -> str:
    """How it was trained; of a stage that was logged only once, the loss is its mean over all steps."""
    if facts.train is None:
        return ""
    rows = [
        [
            *map(str, (stage.name, stage.loss, stage.trainable, stage.steps, stage.batch_size, stage.seq_len or "")),
            str(getattr(stage, facts.train.unit)),
            f"{stage.lr:g}" + (f" ({stage.lr_mhla:g})" if stage.lr_mhla else ""),
            f"{stage.seconds:.0f}",
            f"{stage.first_loss:.4g} → {stage.last_loss:.4g}"
            if stage.first_loss != stage.last_loss
            else f"{stage.last_loss:.4g} on average",
        ]
        for stage in facts.train.stages
    ]
    head = ["stage", "loss", "trained", "steps", "batch", "length", facts.train.unit, "rate (MHLA's)", "seconds"]
    return markdown([*head, "loss from → to"], rows)


def _measured(facts: Facts) -> str:
    """How the scores came about: one entry for all scores that share the circumstances."""
    groups: dict[str, dict[tuple, dict[str, None]]] = {}
    for label, records in _columns(facts).items():
        for record in records:
            around = f"{record.dtype} on {record.hardware}; seed {record.seed}; {_versions(record.versions)}"
            made = (label, record.commit, record.date, record.command)
            groups.setdefault(around, {}).setdefault(made, {})[record.task] = None
    lines = []
    for around, entries in groups.items():
        lines.append(f"- {around}:")
        for (label, commit, date, command), tasks in entries.items():
            lines.append(f"  - {label}, {', '.join(tasks)}: mhla_hf commit {commit}; {date}; `{command}`")
    return "\n".join(lines)
