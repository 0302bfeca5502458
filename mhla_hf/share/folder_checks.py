"""What a model's folder has to be before it is shared: laid out aside and looked at, and nothing is sent.

Only files that `checkpoints/save.py` lists go out, each of its own format; everything else stays where it is and is named.
The checks look at a copy of exactly what goes out, and the last one loads it in a process where mhla_hf cannot be imported,
without network, as its users will.
"""

import json
import logging
import re
import shutil
from collections import Counter
from pathlib import Path

import torch
import yaml
from huggingface_hub import ModelCard
from safetensors import SafetensorError, safe_open

from ..checkpoints.bundle import build_bundle, check_bundle
from ..checkpoints.checksums import NOTED, SUMS_FILE, without_origin
from ..checkpoints.clean_process import check_visit
from ..checkpoints.files import read_json, write_json, write_text
from ..checkpoints.fingerprint import PIPELINE
from ..checkpoints.load import check_shards
from ..checkpoints.save import CARD_FILE, RECORDS, VOCABULARIES, saved_files
from .card import check_card, folder_card
from .facts import PERSON_FILE, not_measured, read_model, read_person, read_records
from .leaks import check_leaks, cut_record, strings

logger = logging.getLogger("mhla_hf")
# How a tokenizer begins: with sentencepiece's first field, or as tiktoken's first line.
TOKENS = re.compile(rb"\n|[A-Za-z0-9+/]+=* \d+\r?\n")
REFERENCE = re.compile(r"(modeling_mhla\w*)\.\w+")
ELSEWHERE = re.compile(r"\S+--\S+\.\S+")  # code of another repository, as transformers writes it
FOREIGN = {"custom_pipelines", "custom_pipeline", "custom_generate"}  # where loaders look for such code
LEADS_OUT = re.compile(r"^(\S*[/\\])?\.\.([/\\]\S*)?$|^(file:|~?/\w|[A-Za-z]:[/\\])")


def stage_folder(folder, place, *, repo_id=None, card=None, draft=False) -> tuple[str, ...]:
    """Lay out in `place` what is shared of `folder`, look at everything that can be wrong with it, and name what stays.

    Configurations and records lose the places on this computer that they name; the weights are links.
    folder: a saved MHLA model, or a pipeline with one. place: a folder to make. repo_id: the Hub id it will have. card: the
    text of README.md where the folder has none. draft: a converted language model may come without scores for recall and
    generation. ValueError: the first thing that is wrong, in one sentence with the file's name.
    """
    folder, place = Path(folder), Path(place)
    if not folder.is_dir():
        raise ValueError(f"folder must be a saved model's directory, got {str(folder)!r}")
    paths = list_files(folder)
    left = list_left(folder, paths)
    if left:
        logger.warning("push: no part of the model, so these stay in %s: %s", folder, ", ".join(map(ascii, left)))
    for path in paths:
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        if path.endswith(".safetensors"):
            (place / path).symlink_to((folder / path).absolute())
        elif Path(path).name in NOTED:
            (place / path).write_bytes(without_origin((folder / path).read_bytes()))
        else:
            shutil.copyfile(folder / path, place / path)
    try:
        _check(place, paths, card, repo_id, draft)
    except RecursionError:
        raise ValueError(f"{folder} holds a JSON file that is nested too deep") from None
    except ValueError as error:
        raise ValueError(str(error).replace(str(place), str(folder))) from error
    return left


def list_files(folder: Path) -> list[str]:
    """Paths below `folder` of all that is shared of it. ValueError: one that is no file in the folder; no weights."""
    files = [file for file in saved_files(folder) if file.name != SUMS_FILE]
    for file in files:
        if not file.is_file() or not file.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{file} is no regular file in the folder: put the file itself there")
    if not any(file.suffix == ".safetensors" for file in files):
        raise ValueError(f"{folder} holds no .safetensors file under its usual name: save the model without a variant")
    return sorted(file.relative_to(folder).as_posix() for file in files)


def list_left(folder: Path, paths: list[str]) -> tuple[str, ...]:
    """What is not shared, a folder of which nothing is by its own name."""
    shared = {above for path in (*paths, SUMS_FILE) for above in (folder / path, *(folder / path).parents)}
    entries = (
        entry for place in shared if place.is_dir() and place.is_relative_to(folder) for entry in place.iterdir()
    )
    return tuple(sorted(entry.relative_to(folder).as_posix() for entry in entries if entry not in shared))


def _check(place: Path, paths: list[str], card: str | None, repo_id: str | None, draft: bool) -> None:
    """Everything about a folder that holds exactly what goes out; its records and its card are written anew."""
    kind, _, config = read_model(place)
    texts = [path for path in paths if not path.endswith(".safetensors")]
    for path in texts:
        _check_format(place, path)
    dtype = check_weights(place)
    _check_card(place, card, repo_id)
    for name in set(RECORDS) & set(paths):
        write_json(place / name, cut_record(read_json(place / name)))
    if PERSON_FILE in paths:  # of the records as they are sent, so that whoever gets them can check the card
        write_text(place / CARD_FILE, folder_card(place, weights=False))
    for path in {*texts, CARD_FILE}:
        if not path.endswith(".py"):  # that is this package's
            check_leaks(path, (place / path).read_bytes())
    judged = kind == "language" and config["model_type"] != "mhla" and not draft
    if judged and (absent := not_measured(read_records(place) if PERSON_FILE in paths else [])):
        lacks = f"the card of a converted language model has no result for {' and '.join(absent)}"
        raise ValueError(f"{place}: {lacks}: evaluate it and write the card again, or push it as a draft")
    check_visit(place, kind, dtype if kind == "pipeline" else "auto")


def _check_format(place: Path, path: str) -> None:
    """A file is what its name says, and the only code is what mhla_hf made; weights are looked at elsewhere."""
    file, data = place / path, (place / path).read_bytes()
    if file.suffix == ".model":
        if not TOKENS.match(data):
            raise ValueError(f"{file} does not begin as a .model file does")
        return
    try:
        text = data.decode()
        content = json.loads(text) if file.suffix == ".json" else None
        if content is not None and file.name not in (*VOCABULARIES, *RECORDS):
            _check_references(place, path, content)
        made = build_bundle(check_bundle(text)["entry"]) if file.suffix == ".py" else text
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    if made != text:  # its hash says only that it is whole: anybody can hash a text anew
        raise ValueError(f"{file} is not the source that this mhla_hf makes: load the model with it and save it again")


def _check_references(place: Path, path: str, content) -> None:
    """Names in a JSON file that point to code, files or libraries lead to something in the folder."""
    file = place / path
    for name, value in content.items() if path == PIPELINE else ():
        library = value[0] if not name.startswith("_") and isinstance(value, list) and len(value) == 2 else None
        if library not in (None, "diffusers", "transformers") and not (place / name / f"{library}.py").is_file():
            raise ValueError(f"{name} comes from {library!r}, expected a modeling_mhla*.py in {name}/")
        if name == "_class_name" and not isinstance(value, str):
            raise ValueError(f"_class_name is {value!r}, expected the name of a pipeline of diffusers")
    for key, value in strings(content):
        if "auto_map" in key.split("."):
            found = REFERENCE.fullmatch(value)
            if not found or not file.with_name(f"{found[1]}.py").is_file():
                raise ValueError(f"{key} is {value!r}, expected a class of a modeling_mhla*.py in this folder")
        elif FOREIGN & set(key.split(".")) or ELSEWHERE.fullmatch(value.strip()):
            raise ValueError(f"{key} is {value!r}, which is code of another repository")
        elif file.name in NOTED and LEADS_OUT.search(value):
            raise ValueError(f"{key} is {value!r}, which leads out of the folder")


def check_weights(place: Path) -> str:
    """Every safetensors file is whole and finite, no index leads out. Returns the usual dtype, e.g. "float32"."""
    sizes = Counter()
    for index in place.rglob("*.safetensors.index.json"):
        check_shards(index)
        if index.with_suffix("").with_suffix("").exists():
            raise ValueError(f"{index} and the one file that it stands for are both there: delete one of them")
    for file in sorted(place.rglob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as weights:
                for key, value in (weights.metadata() or {}).items():
                    check_leaks(file.name, f"{key} {value}".encode())
                for name in weights.keys():  # noqa: SIM118
                    tensor = weights.get_tensor(name)
                    sizes[str(tensor.dtype).removeprefix("torch.")] += tensor.numel() * tensor.is_floating_point()
                    if not torch.isfinite(tensor.float() if tensor.element_size() == 1 else tensor).all():
                        raise ValueError(f"{file}: the weight {name!r} holds NaN or infinity, expected finite numbers")
        except SafetensorError as error:
            raise ValueError(f"{file} is no whole safetensors file: {error}") from None
    return sizes.most_common(1)[0][0]


def _check_card(place: Path, card: str | None, repo_id: str | None) -> None:
    """README.md is valid, and where mhla_hf wrote it, true; `card` is written where there is none."""
    file = place / CARD_FILE
    if card is not None and not file.exists():
        write_text(file, card)
    if not file.exists():
        raise ValueError(f"{file} does not exist: write it with mhla_hf.share.card.write_card, or give license")
    try:
        license = ModelCard(file.read_text(encoding="utf-8")).data.get("license")
    except (TypeError, yaml.YAMLError) as error:
        raise ValueError(f"{file} has front matter that cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(license, str):
        raise ValueError(f"{file}: license is {license!r}, expected a license of the Hub such as apache-2.0")
    if (place / PERSON_FILE).exists():
        check_card(place)
        name = read_person(place)[0].name
        if repo_id is not None and "/" in name and name != repo_id:
            raise ValueError(f"{file} is the card of {name!r}, not of {repo_id!r}: write it with that name")
