"""What a model card may say, typed: what config.json, results.json, train.json and speed.json hold, and what a person gives.

A model's folder and the shelf `model_cards` keep the same facts: `read_folder` gives them in the form of the shelf's
results/<name>.json, `make_facts` checks that form and adds the person's part.
"""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard
from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import HFValidationError, StrictDataclassError
from huggingface_hub.utils import validate_repo_id

from ..checkpoints.fingerprint import fingerprint_folder
from ..evaluation.records import Result, Results
from ..evaluation.speed import speed_of_records
from ..nn.settings import MHLASettings

PERSON_FILE = "card.json"
FORMAT_VERSION = 1
OWN = "MHLA"
TEACHER = "teacher"
DEPTH = "_back_"  # in a metric's name: a part of a score, by the distance to the fact
# Parts of the names of tasks that ask for one fact from far back, and of tasks where the model writes.
WRITES = re.compile(r"_generation\d*_")
RECALL = re.compile(r"_(recall|niah|needle|ruler|passage_retrieval|fda|swde|squad_completion)\d*_")
GENERATION = re.compile(
    r"_(gsm8k|ifeval|humaneval|mbpp|triviaqa|nq_open|coqa|drop|qasper|longbench|gov_report|samsum|qmsum|multi_news"
    r"|truthfulqa_gen|wmt)\d*_"
)
AUTO_KINDS = {"AutoModelForCausalLM": "language", "AutoModelForImageClassification": "image", "AutoModel": "tower"}
TASKS = {"language": "text-generation", "image": "image-classification", "tower": "image-feature-extraction"}
PIPELINES = (  # in the name of a diffusion model's class -> the Hub's name for what it does
    (r"Video|Wan", "text-to-video"),
    (r"Sana|PixArt", "text-to-image"),
    (r"DiT", "unconditional-image-generation"),
)
UNITS = ("tokens", "images", "samples")
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
    license_name: str | None
    license_link: str | None
    datasets: list[str]
    language: list[str]
    about: str
    limits: list[str]

    def validate_ids(self):
        for key in ("name", "base_model"):
            value = getattr(self, key)
            try:
                if value is not None:
                    validate_repo_id(value)
            except HFValidationError:
                raise ValueError(f"{key} must be a Hub id such as user/model, got {value!r}") from None
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

    def validate_unit(self):
        if self.unit is None or any(getattr(stage, self.unit) is None for stage in self.stages):
            raise ValueError(
                f"the run and each of its stages must say how many {', '.join(UNITS[:-1])} or samples it saw"
            )

    @property
    def unit(self) -> str | None:
        """What it counts: "tokens", "images" or "samples"."""
        return next((unit for unit in UNITS if getattr(self, unit) is not None), None)


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

    def validate_positive(self):
        for key in ("softmax_ms", "mhla_ms", "softmax_mib", "mhla_mib"):
            if getattr(self, key) is not None and not getattr(self, key) > 0:
                raise ValueError(f"{key} of {self.what!r} at {self.length} must be above 0, got {getattr(self, key)!r}")


@strict
@dataclasses.dataclass
class Speed:
    """What speed.json says."""

    hardware: str
    versions: dict
    seed: int | str
    command: str
    rows: list[Row]

    def validate_rows(self):
        if not self.rows or not self.command:
            raise ValueError("rows and command must not be empty")


@dataclasses.dataclass(frozen=True)
class Facts:
    """All that a card shows.

    kind: "language", "image" (classifier), "tower" (image encoder), "model" (a transformer of diffusers) or "pipeline".
    class_name: of the model or pipeline. config: of config.json; of a pipeline, that of its component with MHLA.
    records: own scores. compared: label -> scores of another model; "teacher" is the softmax original.
    """

    kind: str
    class_name: str
    config: dict
    records: list[Result]
    compared: dict[str, list[Result]]
    train: Train | None
    speed: Speed | None
    person: Person


def read_as(cls, content, where):
    """`content`, of a JSON or YAML file, as the dataclass `cls`; what a card does not show is left out, but of a `Person`.

    ValueError, that begins with `where`, for a key that is missing or of another type.
    """
    if not isinstance(content, dict):
        raise ValueError(f"{where}: got {content!r:.80}, expected an object")
    names = {field.name for field in dataclasses.fields(cls)}
    values = {key: value for key, value in content.items() if key in names or cls is Person}
    for key, part in (("stages", Stage), ("rows", Row)):
        if isinstance(values.get(key), list):
            values[key] = [read_as(part, entry, f"{where}, {key}[{i}]") for i, entry in enumerate(values[key])]
    try:
        return cls(**values)
    except StrictDataclassError as error:
        raise ValueError(f"{where}: {error.__cause__ or error}") from None
    except TypeError as error:
        raise ValueError(f"{where}: {str(error).partition('() ')[2] or error}") from None


def read_folder(folder, compared: dict, weights: bool = True) -> dict:
    """What was measured of the model in `folder`, as the shelf keeps it. compared: label -> records as dicts.

    weights: False for a folder that holds records and no model.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"folder must be a model's directory, got {str(folder)!r}")
    kind, class_name, config = read_model(folder)
    return {
        "format_version": FORMAT_VERSION,
        "kind": kind,
        "class_name": class_name,
        "config": config,
        "results": [dataclasses.asdict(record) for record in read_records(folder, "folder", weights)],
        "compared": compared,
        "train": read_json(folder, "train.json"),
        "speed": read_json(folder, "speed.json"),
    }


def make_facts(measured: dict, person: Person, where) -> Facts:
    """Typed and checked. ValueError: a record lacks something, or a score does not say how it was measured."""
    if measured.get("format_version") != FORMAT_VERSION:
        raise ValueError(f"{where} must have format_version {FORMAT_VERSION}, got {measured.get('format_version')!r}")
    own = [Result.from_dict(record) for record in measured["results"]]
    compared = {label: [Result.from_dict(r) for r in records] for label, records in measured["compared"].items()}
    for label, records in {"its own": own, **compared}.items():
        if label == OWN or not re.fullmatch(r"[\w ,.+-]+", label):
            raise ValueError(f"compared: label must be plain words other than {OWN!r}, got {label!r}")
        for record in records:
            if not (record.hardware and record.versions and record.command) or record.seed in (None, ""):
                raise ValueError(f"{where}: {label} score of {record.task} does not say how it was measured")
    speed = measured["speed"] or speed_of_records({"softmax": compared.get(TEACHER, ()), "mhla": own})
    return Facts(
        kind=measured["kind"],
        class_name=measured["class_name"],
        config=measured["config"],
        records=own,
        compared=compared,
        train=None if measured["train"] is None else read_as(Train, measured["train"], f"{where}: train"),
        speed=None if speed is None else read_as(Speed, speed, f"{where}: speed"),
        person=person,
    )


def read_model(folder: Path) -> tuple[str, str, dict]:
    """(kind, class name, configuration with resolved MHLA layers) of a saved model or pipeline; see `Facts`."""
    index = read_json(folder, "model_index.json")
    parts = [folder] if index is None else sorted(path.parent for path in folder.glob("*/config.json"))
    configs = [(part, read_json(part, "config.json")) for part in parts]
    if configs[:1] == [(folder, None)] or not configs:
        raise ValueError(f"{folder} holds no config.json: expected a saved MHLA model")
    where, config = next((found for found in configs if isinstance(found[1].get("mhla"), dict)), configs[0])
    if not isinstance(config.get("mhla"), dict) or count_layers(config) is None:
        raise ValueError(f'{where / "config.json"} has no "mhla" settings: expected the configuration of an MHLA model')
    config["mhla"]["layers"] = MHLASettings.from_dict(config["mhla"]).resolve_layers(count_layers(config))
    name = (index or config).get("_class_name") or (config.get("architectures") or [""])[0]
    if index is not None:
        return "pipeline", name, config
    if "_class_name" in config:
        return "model", name, config
    known = config.get("auto_map") or {}
    return next((kind for auto, kind in AUTO_KINDS.items() if auto in known), "language"), name, config


def count_layers(config: dict) -> int | None:
    """Layers of a model by its configuration; None where it does not say."""
    inner = config.get("vision_config")
    for place in (config, inner if isinstance(inner, dict) else {}):
        for key in ("num_hidden_layers", "num_layers"):
            if isinstance(place.get(key), int):
                return place[key]
    return None


def hub_task(kind: str, class_name: str) -> str | None:
    """The Hub's name for what a model does, by its kind and class; None for a diffusion model that is not known."""
    return TASKS.get(kind) or next((task for pattern, task in PIPELINES if re.search(pattern, class_name)), None)


def read_json(folder, name: str) -> dict | None:
    """The object in `folder`/`name`; None without such a file."""
    path = Path(folder, name)
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, expected an object")
    return content


def read_records(folder, what: str, weights: bool = True) -> list[Result]:
    """The scores in a model's folder; refused when there are none or (`weights`) when they belong to other weights."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{what} must be a model's directory, got {str(folder)!r}")
    records = Results.read(folder).records
    if not records:
        raise ValueError(f"{folder} holds no results.json with scores: evaluate the model first")
    local = [record for record in records if record.fingerprint.startswith("files:")] if weights else []
    now = fingerprint_folder(folder) if local else None
    for record in local:
        if record.fingerprint != now:
            raise ValueError(f"{folder}: {record.task} was scored with other weights than it holds now: evaluate again")
    return records


def read_person(folder) -> tuple[Person, dict]:
    """What `write_card` kept in card.json: the person's part, and label -> records of the models compared with."""
    path = Path(folder, PERSON_FILE)
    content = read_json(folder, PERSON_FILE)
    if content is None:
        raise ValueError(f"{path} does not exist: write the card with write_card first")
    if content.pop("format_version", None) != FORMAT_VERSION:
        raise ValueError(f"{path} must have format_version {FORMAT_VERSION}: write the card again")
    compared = content.pop("compared", {})
    return read_as(Person, content, path), compared


def generates(record: Result) -> bool:
    """Whether a score says how well the model writes; no score of recall does."""
    name = _name(record)
    return bool(WRITES.search(name) or (GENERATION.search(name) and not RECALL.search(name)))


def recalls(record: Result) -> bool:
    """Whether a score says how well the model finds one fact far back; `needle_generation_512` is one of writing."""
    return bool(RECALL.search(_name(record)) and not WRITES.search(_name(record)))


def _name(record: Result) -> str:
    """The task's name between underscores; "" for a part of a score, by depth."""
    parts = ["", *re.split(r"[^a-z0-9]+", record.task.lower()), ""]
    return "" if DEPTH in record.metric else "_".join(parts)


def not_measured(records) -> list[str]:
    """Which of "recall" and "generation" no score on a whole task tells."""
    whole = [record for record in records if record.value is not None and record.limit is None]
    return [name for name, tells in (("recall", recalls), ("generation", generates)) if not any(map(tells, whole))]


def find_licence(base_model, teacher, given: dict) -> dict:
    """license, license_name and license_link: what the base states, else what is given; never a guess.

    base_model: Hub id or None. teacher: folder of the base, or None. given: the same three keys, from the caller.
    """
    stated, where = _stated_license(base_model, teacher)
    if given["license"] is None and stated is None:
        asked = f"{where} states no license" if where else "no base states a license"
        raise ValueError(f"license is missing: {asked}, so give license=... yourself")
    if given["license"] is not None and stated is not None and given["license"] != stated["license"]:
        raise ValueError(f"license {given['license']!r} is not what {where} states: {stated['license']!r}")
    found = stated or given
    if found["license"] == "unknown":
        raise ValueError("license 'unknown' is no license: ask the authors of the base, then give license=...")
    if found["license"] == "other" and not found["license_name"]:
        raise ValueError("license 'other' needs license_name (and license_link, where the text can be read)")
    return found


def _stated_license(base_model, teacher) -> tuple[dict | None, str]:
    """The license in the base's own card, and where that card is; (None, "") without any base."""
    tried = ""
    for place in ([] if teacher is None else [Path(teacher, "README.md")]) + (
        [] if base_model is None else [base_model]
    ):
        tried = str(place) if isinstance(place, Path) else f"the card of {place}"
        try:
            if isinstance(place, Path) and not place.is_file():
                raise FileNotFoundError
            data = ModelCard.load(place, ignore_metadata_errors=True).data
        except OSError as error:
            tried += f" (not readable: {type(error).__name__})"
            continue
        except (ValueError, yaml.YAMLError) as error:
            raise ValueError(f"{tried} has front matter that cannot be read: {' '.join(str(error).split())}") from None
        if data.get("license") is not None:
            return {key: data.get(key) for key in ("license", "license_name", "license_link")}, tried
    return None, tried
