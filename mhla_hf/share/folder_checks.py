"""What a model's folder has to be before it is shared: laid out aside and looked at, and nothing is sent.

Only files that `checkpoints/save.py` lists go out; everything else stays where it is and is named. The checks look at a copy
of exactly what goes out, and the last one loads it, without network, in a process where mhla_hf cannot be imported.
"""

import json
import logging
import re
import shutil
from collections import Counter
from pathlib import Path

import torch
from huggingface_hub import ModelCard
from safetensors import SafetensorError, safe_open

from ..checkpoints.bundle import build_bundle, check_bundle
from ..checkpoints.clean_process import check_visit
from ..checkpoints.files import read_json, write_json, write_text
from ..checkpoints.fingerprint import NOTED, without_origin
from ..checkpoints.load import check_shards, one_sentence
from ..checkpoints.save import (
    CARD_FILE,
    CONFIGURATIONS,
    MODULES,
    RECORDS,
    SENTENCE_SETTINGS,
    read_sentence_files,
    saved_files,
)
from ..evaluation.records import Results
from .card import check_card, folder_card
from .facts import PERSON_FILE, not_measured, read_model

logger = logging.getLogger("mhla_hf")
TOKEN = re.compile(r"\bhf_(?:[A-Za-z0-9]{30,}|(?:oauth|jwt)_[\w.-]{16,})")
# An absolute path, but the system's, which are the same everywhere; no URL, template or link of the site. Then those of
# Windows: C:\a\b or C:/a/b, and \\host\share.
PLACE = re.compile(
    r"(?:(?<=file://)|(?<![\w.~/\\<>)}\]-])(?<!\]\())"
    r"(?:~|/(?!(?:usr|bin|lib|etc|dev|proc|sys)/)[\w.@+-]+)/[^\s\"'`,;)\]}>|\\]+"
    r"|(?<!\w)[A-Za-z]:(?:\\+|/)[^\s\\/:\"'`<>|{}]+[\\/][^\s\"'`,;)\]}>|]+"
    r"|(?<![^\s\"'`=(:,])(?:\\{2,4}[\w.$-]+|//[\w$-]+)[\\/][^\s\"'`,;)\]}>|]+"
)
ESCAPES = re.compile(r"\\[nrt]")  # in templates


def stage_folder(folder, place, *, repo_id=None, card=None, draft=False) -> tuple[str, ...]:
    """Lay out in `place` what is shared of `folder`, look at everything that can be wrong with it, and name what stays.

    folder: a saved MHLA model, or a pipeline with one. place: a folder to make. repo_id: the Hub id it will have. card: the
    text of README.md where the folder has none. draft: a converted language model may come without scores for recall and
    generation. ValueError: the first thing that is wrong, in one sentence with the file's name.
    """
    folder, place = Path(folder), Path(place)
    if not folder.is_dir():
        raise ValueError(f"folder must be a saved model's directory, got {str(folder)!r}")
    files = saved_files(folder)
    for file in files:
        if not file.is_file() or not file.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{file} is no regular file in the folder: put the file itself there")
    if not any(file.suffix == ".safetensors" for file in files):
        raise ValueError(f"{folder} holds no .safetensors file under its usual name: save the model without a variant")
    shared = {*files, *(above for file in files for above in file.parents)}
    entries = {entry for above in {file.parent for file in files} for entry in above.iterdir()}
    left = tuple(sorted(entry.relative_to(folder).as_posix() for entry in entries - shared))
    if left:
        logger.warning("push: no part of the model, so these stay in %s: %s", folder, ", ".join(map(ascii, left)))
    for file in files:
        copy = place / file.relative_to(folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".safetensors":
            copy.symlink_to(file.absolute())
        elif file.name in NOTED:
            copy.write_bytes(without_origin(file.read_bytes()))
        else:
            shutil.copyfile(file, copy)
    try:
        _check(place, card, repo_id, draft)
    except ValueError as error:
        raise ValueError(str(error).replace(str(place), str(folder))) from error
    return left


def _check(place: Path, card: str | None, repo_id: str | None, draft: bool) -> None:
    """Everything about a folder that holds exactly what goes out; its records and its card are written anew."""
    kind, _, config = read_model(place)
    for source in place.rglob("*.py"):
        with one_sentence(f"{source} is not the source of a model"):
            made = build_bundle(check_bundle(text := source.read_text(encoding="utf-8"))["entry"])
        if made != text:  # its hash says only that it is whole: anybody can hash a text anew
            raise ValueError(
                f"{source} is not the source that this mhla_hf makes: load the model with it and save again"
            )
    for file in (file for file in place.rglob("*.json") if file.name in CONFIGURATIONS):
        _check_code_names(file)
    for path, content in read_sentence_files(place).items():
        if isinstance(content, dict) and (odd := [key for key in read_json(place / path) if key not in content]):
            raise ValueError(
                f"{place / path} holds {odd[0]!r}, which is no part of a model that is shared: take it out"
            )
    dtype = check_weights(place)
    measured, readme = (place / PERSON_FILE).is_file(), place / CARD_FILE
    if card is not None and not readme.exists():
        write_text(readme, card)
    _check_card(readme, repo_id, measured)
    for file in (place / name for name in RECORDS if (place / name).is_file()):
        write_json(file, change_texts(read_json(file), shorten_paths))
    if measured:  # of the records as they are sent, so that whoever gets them can check the card
        write_text(readme, folder_card(place, weights=False))
    texts_in = (CARD_FILE, *RECORDS, *CONFIGURATIONS, MODULES, *SENTENCE_SETTINGS)
    for file in (file for file in place.rglob("*") if file.name in texts_in):
        texts = [file.read_text(encoding="utf-8")]
        if file.suffix == ".json":
            change_texts(json.loads(texts[0]), texts.append)
            del texts[0]
        for text in texts:
            if TOKEN.search(text):
                raise ValueError(f"{file} holds a token of Hugging Face: take it out")
            if found := PLACE.search(ESCAPES.sub(" ", text) if "{%" in text else text):
                raise ValueError(f"{file} names the local path {found[0]!r}: write a relative path or a Hub id")
    judged = kind == "language" and config["model_type"] != "mhla" and not draft
    if judged and (absent := not_measured(Results.read(place) if measured else [])):
        lacks = f"the card of a converted language model has no result for {' and '.join(absent)}"
        raise ValueError(
            f"{place}: {lacks}: run mhla-hf evaluate {place} --recipe recall and write the card again, or give --draft"
        )
    check_visit(place, kind, dtype if kind == "pipeline" else "auto")


def change_texts(content, change):
    """What JSON holds, with `change` of each text in the place of the text, keys included."""
    if isinstance(content, dict):
        return {change(name): change_texts(value, change) for name, value in content.items()}
    if isinstance(content, list):
        return [change_texts(value, change) for value in content]
    return change(content) if isinstance(content, str) else content


def shorten_paths(text: str) -> str:
    """The text with the last part of each absolute path in its place."""
    return PLACE.sub(lambda found: re.split(r"[\\/]", found[0])[-1], text)


def _check_code_names(file: Path) -> None:
    """No configuration names code but the source beside it."""
    content = read_json(file)
    own = content.get("auto_map") if file.name == "config.json" else None
    for auto, code in own.items() if isinstance(own, dict) else ():
        if not (isinstance(code, str) and (file.parent / f"{code.rpartition('.')[0]}.py").is_file()):
            raise ValueError(
                f"{file} names {code!r} for {auto}, expected a class of the model's own source: take it out"
            )
    for name in ("auto_map", "custom_pipelines", "custom_generate"):
        if content.get(name) and content[name] is not own:
            raise ValueError(
                f"{file} names code that is not the model's own, {name} {content[name]!r:.80}: take it out"
            )


def check_weights(place: Path) -> str:
    """Every safetensors file is whole and finite, no index leads out. Returns the usual dtype, e.g. "float32"."""
    sizes = Counter()
    for index in place.rglob("*.safetensors.index.json"):
        check_shards(index)
    for file in sorted(place.rglob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as weights:
                for name in weights.keys():  # noqa: SIM118
                    tensor = weights.get_tensor(name)
                    sizes[str(tensor.dtype).removeprefix("torch.")] += tensor.numel() * tensor.is_floating_point()
                    if not torch.isfinite(tensor.float() if tensor.element_size() == 1 else tensor).all():
                        raise ValueError(f"{file}: the weight {name!r} holds NaN or infinity, expected finite numbers")
        except SafetensorError as error:
            raise ValueError(f"{file} is no whole safetensors file: {error}") from None
    return sizes.most_common(1)[0][0]


def _check_card(file: Path, repo_id: str | None, measured: bool) -> None:
    """README.md is valid, and where mhla_hf wrote it (`measured`), true."""
    if not file.exists():
        raise ValueError(
            f"{file} does not exist: write it with mhla-hf card {file.parent} --name NAME, or give license (--license)"
        )
    with one_sentence(f"{file} has front matter that cannot be read"):
        license = ModelCard(file.read_text(encoding="utf-8")).data.get("license")
    if not isinstance(license, str):
        raise ValueError(f"{file}: license is {license!r}, expected a license of the Hub such as apache-2.0")
    if measured:
        check_card(file.parent)
        name = read_json(file.parent / PERSON_FILE)["name"]
        if repo_id is not None and "/" in name and name != repo_id:
            raise ValueError(f"{file} is the card of {name!r}, not of {repo_id!r}: write it with that name")
