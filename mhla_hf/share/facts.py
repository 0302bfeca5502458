"""What a model card may say, typed: what a model's files hold, and what a person gives.

A model's folder and the shelf `model_cards` keep the same facts: `measure` gives them in the form of the shelf's
results/<name>.json, `make_facts` adds the person's part.
"""

import contextlib
import dataclasses
import re
from pathlib import Path

import yaml
from huggingface_hub import ModelCard
from huggingface_hub.utils import validate_repo_id

from ..checkpoints.files import read_json
from ..checkpoints.fingerprint import PIPELINE, fingerprint_folder
from ..checkpoints.save import CARD_FILE
from ..checkpoints.values import checked, read_settings
from ..evaluation.records import SPEED, Result, Results, speed_of_records
from ..models.families import ENCODERS, auto_class_of, family_of_class
from ..models.transformers_api import config_class_of
from ..nn.settings import MHLASettings

PERSON_FILE = "card.json"
FORMAT_VERSION = 1
OWN = "MHLA"
FRONT = ("base_model", "license", "license_name", "license_link", "datasets", "language")  # of a person's, for the Hub
TEACHER = "teacher"
SCORES = ("Quality", "Recall", "Generation")
PARTS = (*SCORES, "Recall by depth")
# Parts of the names of tasks that ask for one fact from far back, and of tasks where the model writes.
RECALL = re.compile(r"(?!.*_generation).*_(recall|niah|needle|ruler|passage_retrieval|fda|swde|squad_completion)\d*_")
GENERATION = re.compile(
    r"_(generation|gsm8k|ifeval|humaneval|mbpp|triviaqa|nq_open|coqa|drop|qasper|longbench|gov_report|samsum|qmsum"
    r"|multi_news|truthfulqa_gen|wmt)\d*_"
)
KINDS = {  # Auto class -> kind of model, and what the Hub calls the thing that it does
    "AutoModelForCausalLM": ("language", "text-generation"),
    "AutoModelForSequenceClassification": ("sequences", "text-classification"),
    "AutoModelForTokenClassification": ("tokens", "token-classification"),
    "AutoModelForQuestionAnswering": ("answers", "question-answering"),
    "AutoModelForMaskedLM": ("masked", "fill-mask"),
    "AutoModelForMultipleChoice": ("choices", "multiple-choice"),
    "AutoModelForImageClassification": ("image", "image-classification"),
    "AutoModel": ("tower", "image-feature-extraction"),
}
BODY = ("body", "feature-extraction")  # of a language model or an encoder of text, AutoModel too


@checked
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


@dataclasses.dataclass(frozen=True)
class Facts:
    """All that a card shows.

    kind: "language", "sequences", "tokens", "answers" or "choices" (classifiers of language), "masked" (it fills in tokens),
    "body" (of a language model, or an encoder of text), "image" (classifier), "tower" (image encoder), "model" (a
    transformer of diffusers) or "pipeline".
    config: of a pipeline, that of its component with MHLA. models: label -> scores; "MHLA" the model's own (none: nothing
    was measured), "teacher" the softmax original's.
    """

    kind: str
    class_name: str
    config: dict
    person: Person
    models: dict[str, list[Result]] = dataclasses.field(default_factory=dict)
    train: dict | None = None
    speed: dict | None = None

    @property
    def records(self) -> list[Result]:
        """The model's own scores."""
        return self.models.get(OWN, [])

    @property
    def family(self):
        """The `Family` of the base; None of a model that is MHLA from scratch."""
        return family_of_class(_class_name(self.config))

    @property
    def is_encoder(self) -> bool:
        """Whether the base is an encoder of text."""
        return self.family in ENCODERS

    @property
    def task(self) -> str | None:
        """What the Hub calls the thing that the model does."""
        return dict((*KINDS.values(), BODY)).get(self.kind) or (self.family and self.family.task)

    @property
    def loader(self) -> str:
        """The class of transformers or diffusers that loads the model."""
        named = {kind: auto for auto, (kind, _) in KINDS.items()} | {"pipeline": "DiffusionPipeline"}
        return named.get(self.kind, "AutoModel")

    @property
    def kept(self) -> list[int]:
        """The layers without MHLA."""
        return [i for i in range(_count_layers(self.config)) if i not in self.config["mhla"]["layers"]]

    def timed(self, unit: str) -> dict[str, list[dict]]:
        """What was timed -> the rows of `speed` that measure it in `unit`, "ms" or "mib", by length."""
        rows = self.speed["rows"] if self.speed else []
        rows = sorted((row for row in rows if row.get(f"mhla_{unit}") is not None), key=lambda row: row["length"])
        return {row["what"]: [other for other in rows if other["what"] == row["what"]] for row in rows}


def read_model(folder) -> tuple[str, str, dict]:
    """(kind, class name, configuration with resolved MHLA layers) of a saved model or pipeline; see `Facts`."""
    index = read_json(Path(folder, PIPELINE))
    files = [Path(folder, "config.json")] if index is None else sorted(Path(folder).glob("*/config.json"))
    config = next((config for file in files if isinstance((config := read_json(file) or {}).get("mhla"), dict)), {})
    base = str(config.get("model_type")).removeprefix("mhla_")
    names = getattr(config_class_of(base), "attribute_map", {})
    config = {name: config[own] for name, own in names.items() if own in config} | config  # GPT-2 has other names
    if not config or not _count_layers(config):
        raise ValueError(f'{folder} holds no config.json with "mhla" settings: expected a saved MHLA model')
    config["mhla"]["layers"] = MHLASettings.from_dict(config["mhla"]).resolve_layers(_count_layers(config))
    if index is not None or "_class_name" in config:
        return "pipeline" if index else "model", _class_name(index or config), config
    if not config.get("auto_map"):
        raise ValueError(
            f"{folder}: config.json names no MHLA class in auto_map: save the model with mhla_hf installed"
        )
    kind, _ = KINDS[auto_class_of(_class_name(config))]
    is_body = kind == "tower" and {"AutoModelForCausalLM", "AutoModelForMaskedLM"} & set(config["auto_map"])
    return BODY[0] if is_body else kind, _class_name(config), config


def _class_name(config: dict) -> str:
    return config.get("_class_name") or (config.get("architectures") or [""])[0]


def _count_layers(config: dict) -> int | None:
    both = {**(config.get("vision_config") or {}), **config}
    return both.get("num_hidden_layers") or both.get("num_layers")


def measure(folder, compared: dict, weights: bool = True) -> dict:
    """What was measured of the model in `folder`, as the shelf keeps it. compared: label -> records as dicts.

    weights: False for a folder that holds records and no model.
    """
    kind, class_name, config = read_model(folder)
    measured = {"format_version": FORMAT_VERSION, "kind": kind, "class_name": class_name, "config": config}
    measured |= {"results": read_records(folder, weights), "compared": compared}
    return measured | {"train": read_json(Path(folder, "train.json"))}


def read_folder(folder, weights: bool = True) -> tuple[dict, Person]:
    """(what was measured, the person's part) of a folder with the card.json of `write_card`; weights: as in `measure`."""
    path = Path(folder, PERSON_FILE)
    content = read_json(path) or {}
    if content.pop("format_version", None) != FORMAT_VERSION:
        raise ValueError(
            f"{path} is missing or not of format_version {FORMAT_VERSION}: run mhla-hf card {folder} --name NAME"
        )
    measured = measure(folder, content.pop("compared", {}), weights)
    return measured, read_settings(Person, content, f"{path}: ")


def make_facts(measured: dict, person: Person) -> Facts:
    """Typed. ValueError: a score lacks something, or another model has the own label."""
    if OWN in measured["compared"]:
        raise ValueError(f"compared: the label {OWN!r} is the model's own, expected another")
    models = {OWN: measured["results"], **measured["compared"]}
    models = {label: [Result.from_dict(record) for record in records] for label, records in models.items()}
    speed = measured.get("speed") or speed_of_records({"softmax": models.get(TEACHER, ()), "mhla": models[OWN]})
    return Facts(measured["kind"], measured["class_name"], measured["config"], person, models, measured["train"], speed)


def read_records(folder, weights: bool = True) -> list[dict]:
    """The scores in a model's folder; refused when there are none or (`weights`) when they belong to other weights."""
    records = Results.read(folder)
    if not records:
        raise ValueError(
            f"{folder} holds no results.json with scores: run mhla-hf evaluate {folder} --recipe recall first"
        )
    local = [record for record in records if weights and record.fingerprint.startswith("files:")]
    now = fingerprint_folder(folder) if local else None
    if others := [record.task for record in local if record.fingerprint != now]:
        raise ValueError(f"{folder}: {others[0]} was scored with other weights than it holds now: evaluate again")
    return [dataclasses.asdict(record) for record in records]


def part_of(record: Result) -> str:
    """The table of scores that a record belongs to, one of `PARTS`; "" for a time."""
    if record.task == SPEED or "_back_" in record.metric:
        return "" if record.task == SPEED else "Recall by depth"
    name = re.sub(r"[^a-z0-9]+", "_", f"_{record.task.lower()}_")
    return "Recall" if RECALL.match(name) else "Generation" if GENERATION.search(name) else "Quality"


def not_measured(records) -> list[str]:
    """Which of "recall" and "generation" no score on a whole task tells."""
    told = {part_of(record).lower() for record in records if record.value is not None and record.limit is None}
    return [name for name in ("recall", "generation") if name not in told]


def find_license(base_model, teacher, license=None, license_name=None, license_link=None) -> dict:
    """What the card of the base (a Hub id) or of its folder `teacher` states, else what is given; never a guess."""
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
            f"license is missing: no card of {base_model or teacher or 'a base'} states one; give --license"
        )
    return terms
