"""What a model card may say, typed: what config.json, results.json, train.json and speed.json hold, and what a person gives.

A model's folder and the shelf `model_cards` keep the same facts: `read_folder` gives them in the form of the shelf's
results/<name>.json, `make_facts` checks that form and adds the person's part.
"""

import contextlib
import dataclasses
import re
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard
from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from huggingface_hub.utils import validate_repo_id

from ..checkpoints.fingerprint import fingerprint_folder
from ..checkpoints.save import CARD_FILE, INDEX, read_json
from ..evaluation.records import Result, Results
from ..evaluation.speed import speed_of_records
from ..models.families import family_of_class
from ..nn.settings import MHLASettings

PERSON_FILE = "card.json"
FORMAT_VERSION = 1
OWN = "MHLA"
TEACHER = "teacher"
DEPTH = "_back_"  # in a metric's name: a part of a score, by the distance to the fact
# Parts of the names of tasks that ask for one fact from far back, and of tasks where the model writes.
RECALL = re.compile(r"_(recall|niah|needle|ruler|passage_retrieval|fda|swde|squad_completion)\d*_")
GENERATION = re.compile(
    r"_(generation|gsm8k|ifeval|humaneval|mbpp|triviaqa|nq_open|coqa|drop|qasper|longbench|gov_report|samsum|qmsum"
    r"|multi_news|truthfulqa_gen|wmt)\d*_"
)
KINDS = {  # Auto class in auto_map -> kind of model, and what the Hub calls the thing that it does
    "AutoModelForCausalLM": ("language", "text-generation"),
    "AutoModelForImageClassification": ("image", "image-classification"),
    "AutoModel": ("tower", "image-feature-extraction"),
}
Number = int | float


@strict
@dataclasses.dataclass
class Person:
    """What only a person knows.

    name: title, and what the loading snippet says: a Hub id or a plain name. base_model: Hub id of the softmax original,
    None when it is not published or there is none. license, license_name, license_link: as the Hub writes them.
    datasets, language: Hub ids, language codes. about: for the top. limits: sentences for the section of that name.
    """

    name: str
    base_model: str | None
    license: str
    license_name: str | None = None
    license_link: str | None = None
    datasets: list[str] = dataclasses.field(default_factory=list)
    language: list[str] = dataclasses.field(default_factory=list)
    about: str = ""
    limits: list[str] = dataclasses.field(default_factory=list)

    def validate_ids(self):
        validate_repo_id(self.name)
        validate_repo_id(self.base_model or self.name)
        if self.base_model is not None and Path(self.base_model).exists():
            raise ValueError(f"base_model {self.base_model!r} is a local path: a card names a Hub id, or nothing")


@strict
@dataclasses.dataclass
class Stage:
    """One stage of a training run; `tokens`, `images` or `samples` says how much was seen."""

    steps: int
    batch_size: int
    lr: Number
    seconds: Number
    first_loss: Number
    last_loss: Number
    name: str | None = None
    loss: str | None = None
    trainable: str | None = None
    seq_len: int | None = None
    lr_mhla: Number | None = None
    tokens: int | None = None
    images: int | None = None
    samples: int | None = None


@strict
@dataclasses.dataclass
class Train:
    """What train.json says that a card shows."""

    stages: list[Stage]
    seed: Number | str
    seconds: Number
    hardware: str
    versions: dict
    tokens: int | None = None
    images: int | None = None
    samples: int | None = None
    processes: int = 1
    mixed_precision: str | None = None
    teacher: Any = None
    data: dict | None = None
    command: str | None = None

    @property
    def unit(self) -> str:
        """What it counts: "tokens", "images" or "samples"."""
        return next((unit for unit in ("tokens", "images") if getattr(self, unit) is not None), "samples")


@strict
@dataclasses.dataclass
class Row:
    """Time, and memory where it was measured, of both kinds of attention at one length."""

    what: str
    length: int
    softmax_ms: Number
    mhla_ms: Number
    softmax_mib: Number | None = None
    mhla_mib: Number | None = None


@strict
@dataclasses.dataclass
class Speed:
    """What speed.json says."""

    hardware: str
    versions: dict
    seed: int | str
    command: str
    rows: list[Row]


@dataclasses.dataclass(frozen=True)
class Facts:
    """All that a card shows.

    kind: "language", "image" (classifier), "tower" (image encoder), "model" (a transformer of diffusers) or "pipeline".
    class_name: of the model or pipeline. config: of config.json; of a pipeline, that of its component with MHLA.
    person: see there. records: own scores; none: nothing was measured. compared: label -> scores of another model; "teacher"
    is the softmax original.
    """

    kind: str
    class_name: str
    config: dict
    person: Person
    records: list[Result] = dataclasses.field(default_factory=list)
    compared: dict[str, list[Result]] = dataclasses.field(default_factory=dict)
    train: Train | None = None
    speed: Speed | None = None

    @property
    def family(self):
        """The `Family` of the base; None of a model that is MHLA from scratch."""
        return family_of_class(self.config.get("_class_name") or (self.config.get("architectures") or [""])[0])

    @property
    def task(self) -> str | None:
        """What the Hub calls the thing that the model does."""
        return dict(KINDS.values()).get(self.kind) or (self.family and self.family.task)

    @property
    def kept(self) -> list[int]:
        """The layers without MHLA."""
        return [i for i in range(_count_layers(self.config)) if i not in self.config["mhla"]["layers"]]


def read_as(cls, content, where):
    """`content`, of a JSON or YAML file, as the dataclass `cls`; what a card does not show is left out, but of a `Person`.

    ValueError, that begins with `where`, for a key that is missing or of another type.
    """
    names = {field.name for field in dataclasses.fields(cls)}
    try:
        values = {key: value for key, value in content.items() if key in names or cls is Person}
        for key, part in (("stages", Stage), ("rows", Row)):
            if key in values:
                values[key] = [read_as(part, entry, key) for entry in values[key]]
        return cls(**values)
    except (StrictDataclassError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{where}: {error.__cause__ or error}") from None


def read_model(folder) -> tuple[str, str, dict]:
    """(kind, class name, configuration with resolved MHLA layers) of a saved model or pipeline; see `Facts`."""
    index = read_json(Path(folder, INDEX))
    files = [Path(folder, "config.json")] if index is None else sorted(Path(folder).glob("*/config.json"))
    config = next((config for file in files if isinstance((config := read_json(file) or {}).get("mhla"), dict)), {})
    if not config or not _count_layers(config):
        raise ValueError(f'{folder} holds no config.json with "mhla" settings: expected a saved MHLA model')
    config["mhla"]["layers"] = MHLASettings.from_dict(config["mhla"]).resolve_layers(_count_layers(config))
    name = (index or config).get("_class_name") or (config.get("architectures") or [""])[0]
    autos = [auto for auto in KINDS if auto in (config.get("auto_map") or {})]
    if "_class_name" not in config and not autos:
        raise ValueError(
            f"{folder}: config.json names no MHLA class in auto_map: save the model with mhla_hf installed"
        )
    return "pipeline" if index else "model" if "_class_name" in config else KINDS[autos[0]][0], name, config


def _count_layers(config: dict) -> int | None:
    both = {**(config.get("vision_config") or {}), **config}
    return both.get("num_hidden_layers") or both.get("num_layers")


def read_folder(folder, compared: dict, weights: bool = True) -> dict:
    """What was measured of the model in `folder`, as the shelf keeps it. compared: label -> records as dicts.

    weights: False for a folder that holds records and no model.
    """
    kind, class_name, config = read_model(folder)
    results = [dataclasses.asdict(record) for record in read_records(folder, weights)]
    measured = {"format_version": FORMAT_VERSION, "kind": kind, "class_name": class_name, "config": config}
    measured |= {"results": results, "compared": compared}
    return measured | {name: read_json(Path(folder, f"{name}.json")) for name in ("train", "speed")}


def make_facts(measured: dict, person: Person, where) -> Facts:
    """Typed and checked. ValueError: a record lacks something, or a score does not say how it was measured."""
    if OWN in measured["compared"]:
        raise ValueError(f"compared: the label {OWN!r} is the model's own, expected another")
    models = {OWN: measured["results"], **measured["compared"]}
    models = {label: [Result.from_dict(record) for record in records] for label, records in models.items()}
    for label, record in ((label, record) for label, records in models.items() for record in records):
        if not (record.hardware and record.versions and record.command) or record.seed in (None, ""):
            raise ValueError(f"{where}: {label} score of {record.task} does not say how it was measured")
    own, train, speed = models.pop(OWN), measured["train"], measured["speed"]
    speed = speed or speed_of_records({"softmax": models.get(TEACHER, ()), "mhla": own})
    train = train and read_as(Train, train, f"{where}: train")
    speed = speed and read_as(Speed, speed, f"{where}: speed")
    return Facts(measured["kind"], measured["class_name"], measured["config"], person, own, models, train, speed)


def read_records(folder, weights: bool = True) -> list[Result]:
    """The scores in a model's folder; refused when there are none or (`weights`) when they belong to other weights."""
    records = Results.read(folder)
    if not records:
        raise ValueError(f"{folder} holds no results.json with scores: evaluate the model first")
    local = [record for record in records if weights and record.fingerprint.startswith("files:")]
    now = fingerprint_folder(folder) if local else None
    if others := [record.task for record in local if record.fingerprint != now]:
        raise ValueError(f"{folder}: {others[0]} was scored with other weights than it holds now: evaluate again")
    return records


def read_person(folder) -> tuple[Person, dict]:
    """What `write_card` kept in card.json: the person's part, and label -> records of the models compared with."""
    path = Path(folder, PERSON_FILE)
    content = read_json(path) or {}
    if content.pop("format_version", None) != FORMAT_VERSION:
        raise ValueError(f"{path} is not there with format_version {FORMAT_VERSION}: write the card with write_card")
    compared = content.pop("compared", {})
    return read_as(Person, content, path), compared


def recalls(record: Result) -> bool:
    """Whether a score says how well the model finds one fact far back; `needle_generation_512` is one of writing."""
    return bool(RECALL.search(_name(record))) and "_generation" not in _name(record)


def generates(record: Result) -> bool:
    """Whether a score says how well the model writes; no score of recall does."""
    return bool(GENERATION.search(_name(record))) and not recalls(record)


def _name(record: Result) -> str:
    """The task's name between underscores; "" for a part of a score, by depth."""
    return "" if DEPTH in record.metric else re.sub(r"[^a-z0-9]+", "_", f"_{record.task.lower()}_")


def not_measured(records) -> list[str]:
    """Which of "recall" and "generation" no score on a whole task tells."""
    whole = [record for record in records if record.value is not None and record.limit is None]
    return [name for name, tells in (("recall", recalls), ("generation", generates)) if not any(map(tells, whole))]


def find_license(base_model, teacher, license=None, license_name=None, license_link=None) -> dict:
    """license, license_name and license_link: what the base's own card states, else what is given; never a guess.

    base_model: Hub id or None. teacher: folder of the base, or None. ValueError: none, or another than the base's.
    """
    terms = {"license": license, "license_name": license_name, "license_link": license_link}
    cards = [Path(teacher, CARD_FILE)] if teacher and Path(teacher, CARD_FILE).is_file() else []
    for place in (*cards, *([base_model] if base_model else [])):
        with contextlib.suppress(OSError, ValueError, yaml.YAMLError):  # there is none, or none that can be read
            stated = ModelCard.load(place, ignore_metadata_errors=True).data.to_dict()
            if "license" in stated:
                terms = {key: stated.get(key) for key in terms}
                break
    if license not in (None, terms["license"]):
        raise ValueError(f"license {license!r} is not what {place} states: {terms['license']!r}")
    if terms["license"] is None:
        raise ValueError(
            f"license is missing: no card of {base_model or teacher or 'a base'} states one, so give license"
        )
    return terms
