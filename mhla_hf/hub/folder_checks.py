"""Check a model's folder before it is pushed, on a copy with exactly the files that will be sent."""

import json
import logging
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard
from safetensors import SafetensorError, safe_open

from ..checkpoints import save
from ..checkpoints.bundle import build_bundle, check_bundle
from ..checkpoints.file_io import PathLike, check_writable, read_json, wrap_errors, write_json, write_text
from ..checkpoints.fingerprint import FILES_WITH_ORIGIN, strip_origin
from ..checkpoints.isolated_load import check_isolated_load
from ..checkpoints.load import CODE_KEYS, check_shards
from ..evaluation.records import Results
from .card import check_card, render_folder_card, write_first_card
from .facts import PERSON_FILE, Person, list_unmeasured, read_model

logger = logging.getLogger("mhla_hf")
HUB_TOKEN = re.compile(r"\bhf_(?:[A-Za-z0-9]{30,}|(?:oauth|jwt)_[\w.-]{16,})")
# Absolute paths that reveal something about the author's machine: POSIX paths (~/x or /x/y, but no system folders, URLs,
# templates or site links) and Windows paths (C:\a\b, C:/a/b, or \\host\share).
LOCAL_PATH = re.compile(
    r"(?:(?<=file://)|(?<![\w.~/\\<>)}\]-])(?<!\]\())"
    r"(?:~|/(?!(?:usr|bin|lib|etc|dev|proc|sys)/)[\w.@+-]+)/[^\s\"'`,;)\]}>|\\]+"
    r"|(?<!\w)[A-Za-z]:(?:\\+|/)[^\s\\/:\"'`<>|{}]+[\\/][^\s\"'`,;)\]}>|]+"
    r"|(?<![^\s\"'`=(:,])(?:\\{2,4}[\w.$-]+|//[\w$-]+)[\\/][^\s\"'`,;)\]}>|]+"
)
TEMPLATE_ESCAPES = re.compile(r"\\[nrt]")  # in chat templates, where they could be taken for Windows paths


def stage_folder(
    folder: PathLike, staging: PathLike, *, repo_id: str | None = None, person: Person | None = None,
    draft: bool = False,
) -> tuple[str, ...]:  # fmt: skip
    """Copy a model's files to the new folder `staging` (weights as links), check them there, and return what is left out.

    If there is no card, one is written from `person`. `draft` accepts a converted language model without scores for recall
    and generation. Paths that are left out are relative to `folder`. Raise ValueError if a check fails.
    """
    folder, staging = Path(folder), Path(staging)
    if not folder.is_dir():
        raise ValueError(f"folder: got {str(folder)!r}, expected the folder of a saved model.")
    files = save.list_saved_files(folder)
    for file in files:
        if not file.is_file() or not file.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{file}: got a folder or a link to elsewhere, expected a file in the model's folder.")
    if not any(file.suffix == ".safetensors" for file in files):
        raise ValueError(f"{folder}: got no weights file (.safetensors, without a variant in its name), expected one.")
    check_writable(staging, "folder", sum(file.stat().st_size for file in files if file.suffix != ".safetensors"))
    shared = {*files, *(parent for file in files for parent in file.parents)}
    entries = {entry for parent in {file.parent for file in files} for entry in parent.iterdir()}
    left_out = tuple(sorted(entry.relative_to(folder).as_posix() for entry in entries - shared))
    if left_out:
        logger.warning("push: not part of the model, so not sent from %s: %s", folder, ", ".join(map(ascii, left_out)))
    for file in files:
        copy = staging / file.relative_to(folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".safetensors":
            copy.symlink_to(file.absolute())
        elif file.name in FILES_WITH_ORIGIN:
            copy.write_bytes(strip_origin(file.read_bytes()))
        else:
            shutil.copyfile(file, copy)
    try:
        _check_staged(staging, person, repo_id, draft)
    except ValueError as error:
        raise ValueError(str(error).replace(str(staging), str(folder))) from error
    return left_out


def _check_staged(folder: Path, person: Person | None, repo_id: str | None, draft: bool) -> None:
    """Run all checks on the staged copy, shorten local paths in its records, and write its card."""
    kind, _, config = read_model(folder)
    for source in folder.rglob("*.py"):
        with wrap_errors(f"{source}: got unknown code, expected the source that mhla_hf saves"):
            text = source.read_text(encoding="utf-8")
            current = build_bundle(check_bundle(text)["entry"])
        if current != text:  # the hash in the header proves nothing, since anybody can compute a new one
            got = "source of another version of mhla_hf, or changed source"
            raise ValueError(f"{source}: got {got}, expected this version's; load the model and save it again.")
    for file in (file for file in folder.rglob("*.json") if file.name in save.CONFIG_FILES):
        _check_code_names(file)
    for path, content in save.read_sentence_files(folder).items():
        for key in read_json(folder / path) or {} if isinstance(content, dict) else ():
            if key not in content:
                raise ValueError(
                    f"{folder / path}: got the key {key!r}, expected only {', '.join(content)}; remove it."
                )
    dtype = check_weights(folder)
    readme = folder / save.CARD_FILE
    if person is not None and not readme.exists():
        write_first_card(folder, person)
    is_measured = (folder / PERSON_FILE).is_file()
    _check_readme(readme, repo_id, is_measured)
    for file in (folder / name for name in save.RECORDS if (folder / name).is_file()):
        write_json(file, map_texts(read_json(file), shorten_paths))
    if is_measured:  # from the shortened records, so that whoever downloads them can render the card again
        write_text(readme, render_folder_card(folder, weights=False))
    _check_texts(folder)
    needs_scores = kind == "language" and config["model_type"] != "mhla" and not draft
    if needs_scores and (missing := list_unmeasured(Results.read(folder) if is_measured else [])):
        expected = "scores in the card; evaluate with the recipe recall and write the card again, or set draft"
        raise ValueError(f"{folder}: got no result for {' and '.join(missing)}, expected {expected}.")
    check_isolated_load(folder, kind, dtype if kind == "pipeline" else "auto")


def _check_texts(folder: Path) -> None:
    """Refuse a Hub token, or a path of the author's machine, in a card, record or configuration."""
    names = (*save.RECORDS, *save.CONFIG_FILES, save.SENTENCE_MODULES, *save.SENTENCE_SETTINGS)
    files = [file for file in folder.rglob("*") if file.name in names]
    for file in [*files, folder / save.CARD_FILE]:  # the card last, because it repeats what the other files say
        content = file.read_text(encoding="utf-8")
        texts: list[str] = []
        map_texts(json.loads(content) if file.suffix == ".json" else content, texts.append)
        for text in texts:
            if HUB_TOKEN.search(text):
                raise ValueError(f"{file}: got a Hugging Face token, expected none.")
            if path := LOCAL_PATH.search(TEMPLATE_ESCAPES.sub(" ", text) if "{%" in text else text):
                raise ValueError(f"{file}: got the local path {path[0]!r}, expected a relative path or a Hub id.")


def map_texts(content: Any, function: Callable[[str], Any]) -> Any:
    """Apply a function to every string in JSON content, keys included."""
    if isinstance(content, dict):
        return {function(name): map_texts(value, function) for name, value in content.items()}
    if isinstance(content, list):
        return [map_texts(value, function) for value in content]
    return function(content) if isinstance(content, str) else content


def shorten_paths(text: str) -> str:
    return LOCAL_PATH.sub(lambda path: re.split(r"[\\/]", path[0])[-1], text)


def _check_code_names(file: Path) -> None:
    """Refuse a configuration that names code other than the model's own."""
    content = read_json(file) or {}
    auto_map = content.get("auto_map") if file.name == "config.json" else None
    for auto_class, reference in auto_map.items() if isinstance(auto_map, dict) else ():
        if not (isinstance(reference, str) and (file.parent / f"{reference.rpartition('.')[0]}.py").is_file()):
            raise ValueError(f"{file}: got {reference!r} for {auto_class}, expected a class in a .py file beside it.")
    for key in CODE_KEYS:
        if content.get(key) and content[key] is not auto_map:
            raise ValueError(
                f"{file}: got {key} {content[key]!r:.80}, which names code, expected it only in config.json's auto_map."
            )


def check_weights(folder: Path) -> str:
    """Refuse weights that are incomplete, not finite, or outside the folder; return the dtype of most parameters."""
    counts: Counter[str] = Counter()
    for index in folder.rglob("*.safetensors.index.json"):
        check_shards(index)
    for file in sorted(folder.rglob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as weights:
                for name in weights.keys():  # noqa: SIM118
                    tensor = weights.get_tensor(name)
                    counts[str(tensor.dtype).removeprefix("torch.")] += tensor.numel() * tensor.is_floating_point()
                    if not torch.isfinite(tensor.float() if tensor.element_size() == 1 else tensor).all():
                        raise ValueError(f"{file}: got NaN or infinity in the weight {name!r}, expected none.")
        except SafetensorError as error:
            raise ValueError(f"{file}: got a damaged file, expected a complete safetensors file ({error}).") from None
    return counts.most_common(1)[0][0]


def _check_readme(file: Path, repo_id: str | None, is_measured: bool) -> None:
    """Refuse a card that has no license or, if it was rendered from scores, is outdated or of another Hub id."""
    if not file.exists():
        raise ValueError(f"{file}: got no card, expected one; push writes it if license or base_model is given.")
    with wrap_errors(f"{file}: got metadata that cannot be read, expected YAML front matter"):
        license = ModelCard(file.read_text(encoding="utf-8")).data.get("license")
    if not isinstance(license, str):
        raise ValueError(f"{file}: got the license {license!r}, expected a license of the Hub such as apache-2.0.")
    if is_measured:
        check_card(file.parent)
        name = (read_json(file.parent / PERSON_FILE) or {})["name"]
        if repo_id is not None and "/" in name and name != repo_id:
            raise ValueError(f"{file}: got the card of {name!r}, expected one written with the name {repo_id!r}.")
