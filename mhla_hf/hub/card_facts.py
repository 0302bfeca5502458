"""What a model card may say: facts read from the files in the model's folder, checked before a word is written.

Unusual: a card can be proven. Everything it shows comes from config.json, results.json, train.json, speed.json and
card.json; the last holds what only a person knows (licence, base, limits) and the scores of the models it is compared
with, so that the folder alone is enough to render the card again and compare.
"""

import dataclasses
import json
import math
import re
from pathlib import Path

import yaml
from huggingface_hub import ModelCard
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from ..checkpoints.fingerprint import fingerprint_folder
from ..evaluation.records import Result, Results
from ..evaluation.speed import speed_of_records
from ..nn.settings import MHLASettings
from .licences import LICENCES

PERSON_FILE = "card.json"
PERSON_FORMAT = 1
OWN = "MHLA"
TEACHER = "teacher"
DEPTH = "_back_"  # in a metric's name: a part of a score, by the distance to the fact
# Parts of the names of tasks that ask for one fact from far back, and of tasks where the model writes.
RECALL = ("recall", "niah", "needle", "ruler", "passage_retrieval", "fda", "swde", "squad_completion")
GENERATION = (
    "generation", "gsm8k", "ifeval", "humaneval", "mbpp", "triviaqa", "nq_open", "coqa", "drop", "qasper", "longbench",
    "gov_report", "samsum", "qmsum", "multi_news", "truthfulqa_gen", "wmt",
)  # fmt: skip
AUTO_KINDS = {"AutoModelForCausalLM": "language", "AutoModelForImageClassification": "image", "AutoModel": "tower"}
UNITS = ("tokens", "images", "samples")
STAGE_NUMBERS = ("steps", "batch_size", "lr", "seconds", "first_loss", "last_loss")


@dataclasses.dataclass(frozen=True)
class CardFacts:
    """All that a card shows.

    name: title, and what the loading snippet says: a Hub id or a plain name. kind: "language", "image" (classifier),
        "tower" (image encoder), "model" (a transformer of diffusers) or "pipeline". class_name: of the model or pipeline.
    config: of config.json; of a pipeline, that of its component with MHLA.
    records: own scores. compared: label -> scores of another model; "teacher" is the softmax original.
    train, speed: of train.json and speed.json, None without such a file.
    base_model: Hub id of the softmax original, None when it is not published or there is none.
    license, license_name, license_link: as the Hub writes them. datasets, language: Hub ids, language codes.
    about: a sentence or more for the top. limits: sentences for the section of that name.
    """

    name: str
    kind: str
    class_name: str
    config: dict
    records: list[Result]
    compared: dict[str, list[Result]]
    train: dict | None
    speed: dict | None
    base_model: str | None
    license: str
    license_name: str | None
    license_link: str | None
    datasets: list[str]
    language: list[str]
    about: str
    limits: list[str]

    @property
    def train_unit(self) -> str:
        """What the training record counts: "tokens", "images" or "samples"."""
        return unit_of(self.train)


MEASURED_KEYS = ("kind", "class_name", "config", "records", "train", "speed")
PERSON_KEYS = tuple(field.name for field in dataclasses.fields(CardFacts) if field.name not in MEASURED_KEYS)


def read_facts(folder, person: dict, weights: bool = True) -> CardFacts:
    """Check `person` (card.json, `compared` as `Result` lists) and add the folder's files; `weights`: see `read_records`."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"folder must be a model's directory, got {str(folder)!r}")
    kind, class_name, config = read_model(folder)
    check_person(person)
    records = read_records(folder, "folder", weights)
    check_told(folder, records, person["compared"])
    speed = read_json(folder, "speed.json") or speed_of_records(
        {"softmax": person["compared"].get(TEACHER, ()), "mhla": records}
    )
    return CardFacts(
        kind=kind,
        class_name=class_name,
        config=config,
        records=records,
        train=check_measured(folder / "train.json", "train", read_json(folder, "train.json")),
        speed=check_measured(folder / "speed.json", "speed", speed),
        **person,
    )


def read_model(folder: Path) -> tuple[str, str, dict]:
    """(kind, class name, configuration with resolved MHLA layers) of a saved model or pipeline; see `CardFacts`."""
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


def unit_of(train: dict) -> str | None:
    """What a training record counts; None where it counts nothing known."""
    return next((unit for unit in UNITS if isinstance(train.get(unit), int)), None)


def read_json(folder: Path, name: str) -> dict | None:
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
    local = [record for record in records if record.fingerprint.startswith("files:")]
    if local and weights:
        now = fingerprint_folder(folder)
        for record in local:
            if record.fingerprint != now:
                raise ValueError(
                    f"{folder}: {record.task} was scored with other weights than it holds now: evaluate again"
                )
    return records


def generates(record: Result) -> bool:
    """Whether a score says how well the model writes; no score of recall does."""
    return DEPTH not in record.metric and (_named(record, ("generation",)) or _named(record, GENERATION, but=RECALL))


def recalls(record: Result) -> bool:
    """Whether a score says how well the model finds one fact far back; `needle_generation_512` is one of writing."""
    return DEPTH not in record.metric and _named(record, RECALL, but=("generation",))


def _named(record: Result, words: tuple, but: tuple = ()) -> bool:
    """Whether a task's name has one of `words` as a part of its own (with digits behind it or not), and none of `but`."""
    name = "_".join(["", *re.split(r"[^a-z0-9]+", record.task.lower()), ""])
    has = [any(re.search(rf"_{word}[0-9]*_", name) for word in among) for among in (words, but)]
    return has == [True, False]


def not_measured(records) -> list[str]:
    """Which of "recall" and "generation" no score on a whole task tells."""
    whole = [record for record in records if record.value is not None and record.limit is None]
    return [name for name, tells in (("recall", recalls), ("generation", generates)) if not any(map(tells, whole))]


def read_person(folder) -> dict:
    """What `write_card` kept in card.json, with `compared` as lists of `Result`."""
    path = Path(folder) / PERSON_FILE
    content = read_json(Path(folder), PERSON_FILE)
    if content is None:
        raise ValueError(f"{path} does not exist: write the card with write_card first")
    if content.pop("format_version", None) != PERSON_FORMAT:
        raise ValueError(f"{path} must have format_version {PERSON_FORMAT}: write the card again")
    if set(content) != set(PERSON_KEYS):
        odd = sorted(set(content) ^ set(PERSON_KEYS))
        raise ValueError(f"{path}: {odd[0]!r} is unknown or missing, expected exactly {', '.join(PERSON_KEYS)}")
    content["compared"] = {
        label: [Result.from_dict(record) for record in records] for label, records in content["compared"].items()
    }
    return content


def person_json(person: dict) -> str:
    """The text of card.json for `person`."""
    compared = {label: [dataclasses.asdict(r) for r in records] for label, records in person["compared"].items()}
    content = {"format_version": PERSON_FORMAT, **person, "compared": compared}
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def find_licence(base_model, teacher, given: dict) -> dict:
    """license, license_name and license_link: what the base states, else what is given; never a guess.

    base_model: Hub id or None. teacher: folder of the base, or None. given: the same three keys, from the caller.
    """
    stated, where = _stated_licence(base_model, teacher)
    if given["license"] is None and stated is None:
        asked = f"{where} states no licence" if where else "no base states a licence"
        raise ValueError(f"license is missing: {asked}, so give license=... yourself")
    if given["license"] is not None and stated is not None and given["license"] != stated["license"]:
        raise ValueError(f"license {given['license']!r} is not what {where} states: {stated['license']!r}")
    found = stated or given
    if found["license"] == "unknown":
        raise ValueError("license 'unknown' is no licence: ask the authors of the base, then give license=...")
    if found["license"] not in LICENCES if isinstance(found["license"], str) else True:
        raise ValueError(f"license is {found['license']!r}, expected an identifier of the Hub such as apache-2.0")
    if found["license"] == "other" and not found["license_name"]:
        raise ValueError("license 'other' needs license_name (and license_link, where the text can be read)")
    return found


def _stated_licence(base_model, teacher) -> tuple[dict | None, str]:
    """The licence in the base's own card, and where that card is; (None, "") without any base."""
    places = []
    if teacher is not None:
        places.append((Path(teacher) / "README.md", str(Path(teacher) / "README.md")))
    if base_model is not None:
        places.append((base_model, f"the card of {base_model}"))
    tried = ""
    for place, where in places:
        if isinstance(place, Path) and not place.is_file():
            tried = f"{where} (no such file)"
            continue
        try:
            data = ModelCard.load(place, ignore_metadata_errors=True).data
        except OSError as error:
            tried = f"{where} (not readable: {type(error).__name__})"
            continue
        except (ValueError, yaml.YAMLError) as error:
            raise ValueError(f"{where} has front matter that cannot be read: {' '.join(str(error).split())}") from None
        if data.get("license") is not None:
            return {key: data.get(key) for key in ("license", "license_name", "license_link")}, where
        tried = where
    return None, tried


def check_person(person: dict) -> None:
    """ValueError for what a person said that no card can say."""
    for key in ("name", "base_model"):
        if key == "base_model" and person[key] is None:
            continue
        try:
            validate_repo_id(person[key])
        except (HFValidationError, TypeError):
            raise ValueError(f"{key} must be a Hub id such as user/model, got {person[key]!r}") from None
    if person["base_model"] is not None and Path(person["base_model"]).exists():
        raise ValueError(f"base_model {person['base_model']!r} is a local path: a card names a Hub id, or nothing")
    for label, records in person["compared"].items():
        if label == OWN or not re.fullmatch(r"[\w ,.+-]+", label):
            raise ValueError(f"compared: label must be plain words other than {OWN!r}, got {label!r}")
        if not records:
            raise ValueError(f"compared: {label!r} has no scores")
    for key in ("datasets", "language", "limits"):
        if not isinstance(person[key], list) or not all(isinstance(text, str) and text for text in person[key]):
            raise ValueError(f"{key} must be a list of texts, got {person[key]!r}")
    if not isinstance(person["about"], str):
        raise ValueError(f"about must be a text, got {person['about']!r}")


def check_measured(where, what: str, content: dict | None) -> dict | None:
    """train.json or speed.json (`what` is "train" or "speed") with the keys that a card shows looked at."""
    if content is not None:
        {"train": _check_train, "speed": _check_speed}[what](where, content)
    return content


def check_told(where, records, compared: dict) -> None:
    """ValueError for a score that does not say on what, with which versions and seed, and by which command."""
    for label, scores in {"its own": records, **compared}.items():
        for score in scores:
            if not (score.hardware and score.versions and score.command and _seed(score.seed)):
                raise ValueError(f"{where}: {label} score of {score.task} does not say how it was measured")


def _check_train(where, train: dict) -> None:
    missing = [key for key in ("stages", "seconds", "hardware", "versions") if train.get(key) is None]
    missing += [] if _seed(train.get("seed")) else ["seed"]
    missing += [] if unit_of(train) else ["tokens"]
    if missing:
        raise ValueError(f"{where} has no {missing[0]!r}: expected the record of a finished training run")
    if not isinstance(train["stages"], list) or not isinstance(train["versions"], dict):
        raise ValueError(f"{where}: stages must be a list and versions an object, got {train['stages']!r:.80}")
    for stage in train["stages"]:
        for key in (*STAGE_NUMBERS, unit_of(train)):
            if not isinstance(stage, dict) or not _number(stage.get(key)):
                raise ValueError(f"{where}: every stage needs {key} as a number, got {stage!r:.80}")


def _check_speed(where, speed: dict) -> None:
    if not isinstance(speed.get("hardware"), str) or not isinstance(speed.get("versions"), dict):
        raise ValueError(f'{where} must say "hardware" (a text) and "versions" (an object)')
    if not (_seed(speed.get("seed")) and isinstance(speed.get("command"), str) and speed["command"]):
        raise ValueError(f'{where} must say "seed" (a number) and "command" (the shell line): measure the speed again')
    if not isinstance(speed.get("rows"), list) or not speed["rows"]:
        raise ValueError(f'{where} must have measurements in "rows", got {speed.get("rows")!r}')
    for row in speed["rows"]:
        if not isinstance(row, dict) or not isinstance(row.get("what"), str) or not _count(row.get("length")):
            raise ValueError(f'{where}: every row needs "what" (a text) and "length" (tokens), got {row!r}')
        for key in ("softmax_ms", "mhla_ms"):
            if not _number(row.get(key)) or row[key] <= 0:
                at = f"{row['what']!r} at {row['length']}"
                raise ValueError(f"{where}: {key} of {at} must be milliseconds above 0, got {row.get(key)!r}")
        for key in ("softmax_mib", "mhla_mib"):
            if key in row and (not _number(row[key]) or row[key] <= 0):
                raise ValueError(f"{where}: {key} of {row['what']!r} must be MiB above 0, got {row[key]!r}")


def _seed(value) -> bool:
    """Whether it is a seed: a whole number, or the harness's list of them as text."""
    return (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, str) and bool(value.strip()))


def _count(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
