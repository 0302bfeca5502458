"""The facts that a model card states, as typed values: measurements, and the part that the author writes."""

import contextlib
import dataclasses
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard
from huggingface_hub.utils import validate_repo_id

from ..checkpoints.file_io import PIPELINE_INDEX, PathLike, read_json
from ..checkpoints.fingerprint import fingerprint_folder
from ..checkpoints.save import CARD_FILE
from ..checkpoints.values import checked, read_settings
from ..evaluation.records import SPEED, SPEED_METRICS, Result, Results
from ..models.families import ENCODERS, Family, auto_class_of
from ..models.transformers_api import config_class_of, family_of_class
from ..nn.settings import MHLASettings

PERSON_FILE = "card.json"
FORMAT_VERSION = 1
MODEL_LABEL = "MHLA"  # label of the model itself among the models that its card compares
TEACHER = "teacher"
# Fields of `Person` that go into the Hub's metadata.
METADATA_FIELDS = ("base_model", "license", "license_name", "license_link", "datasets", "language")
SCORE_SECTIONS = ("Quality", "Recall", "Generation")
SECTIONS = (*SCORE_SECTIONS, "Recall by depth")
# Names of tasks that require the recall of a single fact, and of tasks in which the model generates text.
RECALL_TASKS = re.compile(
    r"(?!.*_generation).*_(recall|niah|needle|ruler|passage_retrieval|fda|swde|squad_completion)\d*_"
)
GENERATION_TASKS = re.compile(
    r"_(generation|gsm8k|ifeval|humaneval|mbpp|triviaqa|nq_open|coqa|drop|qasper|longbench|gov_report|samsum|qmsum"
    r"|multi_news|truthfulqa_gen|wmt)\d*_"
)
KINDS = {  # kind of model -> (class that loads it, the Hub's name of its task, or None if its family states that)
    "language": ("AutoModelForCausalLM", "text-generation"),
    "sequences": ("AutoModelForSequenceClassification", "text-classification"),
    "tokens": ("AutoModelForTokenClassification", "token-classification"),
    "answers": ("AutoModelForQuestionAnswering", "question-answering"),
    "masked": ("AutoModelForMaskedLM", "fill-mask"),
    "choices": ("AutoModelForMultipleChoice", "multiple-choice"),
    "image": ("AutoModelForImageClassification", "image-classification"),
    "tower": ("AutoModel", "image-feature-extraction"),
    "body": ("AutoModel", "feature-extraction"),  # a language model or text encoder without head
    "model": ("AutoModel", None),  # a transformer of diffusers
    "pipeline": ("DiffusionPipeline", None),
}


@checked
class Person:
    """The part of a card that the author writes."""

    name: str  # Hub id or plain name of the model
    base_model: str | None  # Hub id of the softmax original, if it is published
    license: str  # this and the next two are in the terms of the Hub's metadata
    license_name: str | None = None
    license_link: str | None = None
    datasets: list[str] = dataclasses.field(default_factory=list)  # Hub ids of the training data
    language: list[str] = dataclasses.field(default_factory=list)  # codes such as "en"
    about: str = ""  # text below the title
    limits: list[str] = dataclasses.field(default_factory=list)  # sentences for the section on limits

    def validate_ids(self) -> None:
        validate_repo_id(self.name)
        validate_repo_id(self.base_model or self.name)
        if self.base_model is not None and Path(self.base_model).exists():
            raise ValueError(f"base_model: got the local path {self.base_model!r}, expected a Hub id or None.")


@dataclasses.dataclass(frozen=True)
class Facts:
    """Everything that a card shows."""

    kind: str  # one of `KINDS`
    class_name: str
    config: dict[str, Any]  # of the model, or of the pipeline's component with MHLA
    person: Person
    models: dict[str, list[Result]] = dataclasses.field(default_factory=dict)  # by label
    train: dict[str, Any] | None = None  # the training record
    speed: dict[str, Any] | None = None  # see `collect_speed`

    @property
    def records(self) -> list[Result]:
        return self.models.get(MODEL_LABEL, [])

    @property
    def family(self) -> Family | None:
        """The `Family` of the base model; None for a model from scratch."""
        return family_of_class(_class_name(self.config))

    @property
    def is_encoder(self) -> bool:
        return self.family in ENCODERS

    @property
    def task(self) -> str | None:
        return KINDS[self.kind][1] or (self.family.task if self.family else None)

    @property
    def loader(self) -> str:
        return KINDS[self.kind][0]

    @property
    def kept(self) -> list[int]:
        """The indices of the layers without MHLA."""
        return [i for i in range(_count_layers(self.config) or 0) if i not in self.config["mhla"]["layers"]]


def read_model(folder: PathLike) -> tuple[str, str, dict[str, Any]]:
    """Return kind, class name, and configuration (layers as indices) of a saved MHLA model or pipeline; else ValueError."""
    index = read_json(Path(folder, PIPELINE_INDEX))
    files = [Path(folder, "config.json")] if index is None else sorted(Path(folder).glob("*/config.json"))
    configs = (read_json(file) or {} for file in files)
    config: dict[str, Any] = next((config for config in configs if isinstance(config.get("mhla"), dict)), {})
    base_type = str(config.get("model_type")).removeprefix("mhla_")
    # GPT-2 and others store the standard attributes under other names.
    attribute_map = getattr(config_class_of(base_type), "attribute_map", {})
    config = {**{name: config[stored] for name, stored in attribute_map.items() if stored in config}, **config}
    count = _count_layers(config)
    if not config or not count:
        raise ValueError(f'{folder}: got no config.json with "mhla" settings, expected a saved MHLA model.')
    config["mhla"]["layers"] = MHLASettings.from_dict(config["mhla"]).resolve_layers(count)
    if index is not None or "_class_name" in config:
        return "pipeline" if index else "model", _class_name(index or config), config
    if not config.get("auto_map"):
        expected = "one that names the MHLA class; save the model with mhla_hf installed"
        raise ValueError(f"{folder}: got a config.json without auto_map, expected {expected}.")
    auto_class = auto_class_of(_class_name(config))
    kind = next(kind for kind, (loader, _) in KINDS.items() if loader == auto_class)
    is_body = kind == "tower" and {"AutoModelForCausalLM", "AutoModelForMaskedLM"} & set(config["auto_map"])
    return "body" if is_body else kind, _class_name(config), config


def _class_name(config: dict[str, Any]) -> str:
    return config.get("_class_name") or (config.get("architectures") or [""])[0]


def _count_layers(config: dict[str, Any]) -> int | None:
    merged = {**(config.get("vision_config") or {}), **config}
    return merged.get("num_hidden_layers") or merged.get("num_layers")


def measure(folder: PathLike, compared: Mapping[str, Any], weights: bool = True) -> dict[str, Any]:
    """Return the content of results/NAME.json for a saved and evaluated model; for `weights` see `read_records`.

    `compared` maps the labels of other models to their records.
    """
    kind, class_name, config = read_model(folder)
    about = {"format_version": FORMAT_VERSION, "kind": kind, "class_name": class_name, "config": config}
    results, train = read_records(folder, weights), read_json(Path(folder, "train.json"))
    return {**about, "results": results, "compared": compared, "train": train}


def read_folder(folder: PathLike, weights: bool = True) -> tuple[dict[str, Any], Person]:
    """Return the result of `measure` for a folder, and the author's part from its card.json."""
    path = Path(folder, PERSON_FILE)
    content = read_json(path) or {}
    version = content.pop("format_version", None)
    if version != FORMAT_VERSION:
        raise ValueError(f"{path}: got format_version {version}, expected {FORMAT_VERSION}; write the card again.")
    measured = measure(folder, content.pop("compared", {}), weights)
    return measured, read_settings(Person, content, f"{path}: ")


def make_facts(measured: dict[str, Any], person: Person) -> Facts:
    if MODEL_LABEL in measured["compared"]:
        raise ValueError(f"compared: got the label {MODEL_LABEL!r}, which is the model itself, expected another.")
    records = {MODEL_LABEL: measured["results"], **measured["compared"]}
    models = {label: [read_settings(Result, x, "result: ") for x in stored] for label, stored in records.items()}
    speed = collect_speed({"softmax": models.get(TEACHER, ()), "mhla": models[MODEL_LABEL]})
    return Facts(measured["kind"], measured["class_name"], measured["config"], person, models, measured["train"], speed)


def collect_speed(columns: Mapping[str, Iterable[Result]]) -> dict[str, Any] | None:
    """Return the times and cache sizes of "softmax" and "mhla", or None if they were not timed together (`judge_speed`).

    "tables" is {metric: {length: {attention: value}}}; the other items are fields of one of the records.
    """
    timed = {attention: [r for r in records if r.task == SPEED] for attention, records in columns.items()}
    hashes = {record.task_hash for record in timed["mhla"]}
    together = next((record for record in timed["softmax"] if record.task_hash in hashes), None)
    if together is None:
        return None
    tables: dict[str, Any] = {metric: {} for metric in SPEED_METRICS}
    for attention, records in timed.items():
        for record in (record for record in records if record.task_hash == together.task_hash):
            metric, _, length = record.metric.rpartition("_")
            tables[metric].setdefault(int(length), {})[attention] = record.value
    return {"tables": tables, **{key: getattr(together, key) for key in ("hardware", "versions", "seed", "command")}}


def read_records(folder: PathLike, weights: bool = True) -> list[dict[str, Any]]:
    """Return the score records in a folder; ValueError if it has none or, with `weights`, one measured on other weights."""
    records = Results.read(folder)
    if not records:
        expected = "one; evaluate the model, for example with the recipe 'recall'"
        raise ValueError(f"{folder}: got no results.json with scores, expected {expected}.")
    of_files = [record for record in records if weights and record.fingerprint.startswith("files:")]
    fingerprint = fingerprint_folder(folder) if of_files else None
    if outdated := [record.task for record in of_files if record.fingerprint != fingerprint]:
        got = f"a score of other weights on {outdated[0]}"
        raise ValueError(f"{folder}: got {got}, expected scores of the weights in the folder; evaluate again.")
    return [dataclasses.asdict(record) for record in records]


def section_of(record: Result) -> str:
    """Return the section of the card to which a score belongs; "" for speed, which has none."""
    if record.task == SPEED:
        return ""
    if "_back_" in record.metric:
        return "Recall by depth"
    name = re.sub(r"[^a-z0-9]+", "_", f"_{record.task.lower()}_")
    return "Recall" if RECALL_TASKS.match(name) else "Generation" if GENERATION_TASKS.search(name) else "Quality"


def list_unmeasured(records: Iterable[Result]) -> list[str]:
    """Return which of "recall" and "generation" have no score on a whole task."""
    measured = {section_of(record).lower() for record in records if record.value is not None and record.limit is None}
    return [name for name in ("recall", "generation") if name not in measured]


def find_license(
    base_model: str | None, teacher: PathLike | None, license: str | None = None, license_name: str | None = None,
    license_link: str | None = None,
) -> dict[str, str | None]:  # fmt: skip
    """Return the license, its name, and its link, as the teacher's README.md or else the base model's card states them.

    If no card states a license, return the arguments. Raise ValueError if `license` differs from the card's, or none exists.
    """
    terms = {"license": license, "license_name": license_name, "license_link": license_link}
    own_card = Path(teacher, CARD_FILE) if teacher and Path(teacher, CARD_FILE).is_file() else None
    for card in [card for card in (own_card, base_model) if card]:
        with contextlib.suppress(OSError, ValueError, yaml.YAMLError):  # no card, or one that cannot be read
            stated = ModelCard.load(card, ignore_metadata_errors=True).data.to_dict()
            if "license" in stated:
                terms = {key: stated.get(key) for key in terms}
                break
    if license not in (None, terms["license"]):
        raise ValueError(f"license: got {license!r}, expected {terms['license']!r} as stated by {card}.")
    if terms["license"] is None:
        start = f"license: got none, and no card of {base_model or teacher or 'a base'} states one"
        raise ValueError(f"{start}, expected a license of the Hub, such as apache-2.0.")
    return terms
