"""What a model's folder has to be before it is shared: everything is looked at here, and nothing is sent.

Unusual: the only code that may be in a shared folder is the source file that mhla_hf made, proven by its hash; and the
last check loads the model in a process where mhla_hf cannot be imported, without network, as its users will.
"""

import dataclasses
import json
import logging
import os
import pickletools
import re
import tempfile
from collections import Counter
from pathlib import Path

import torch
import yaml
from huggingface_hub import ModelCard
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError, safe_open

from ..checksums import NOTED, ORIGIN, SUMS_FILE, without_origin
from ..files import SHARD_SIZE
from ..scores.loading import check_shards
from .bundle import check_bundle
from .card import CARD_FILE, check_card, render_card
from .card_facts import AUTO_KINDS, PERSON_FILE, not_measured, read_facts, read_json, read_person, read_records
from .clean_process import check_visit
from .leaks import check_leaks, check_name, cut_places, cut_record, is_absolute, local_places
from .licences import LICENCES

logger = logging.getLogger("mhla_hf")
LARGEST = 5 * 10**9  # bytes of one file: SHARD_SIZE as a number
LEFT_OUT = ("__pycache__", "runs")  # caches and TensorBoard's event files
TRAINING_STATE = re.compile(
    r"checkpoint-\d+"
)  # as transformers' Trainer calls them, whose own push leaves them out too
TEXTS = (".json", ".jsonl", ".txt", ".md", ".py", ".yaml", ".yml", ".jinja", ".csv", ".svg")
_JPEG, _SENTENCEPIECE = rb"\xff\xd8\xff", rb"\n|[^\0\x80-\xff]+\Z"  # the second: its first field, or a list of words
# suffix -> how such a file begins (16 bytes)
BINARIES = {
    ".model": _SENTENCEPIECE,
    ".spm": _SENTENCEPIECE,
    ".png": rb"\x89PNG\r\n\x1a\n",
    ".jpg": _JPEG,
    ".jpeg": _JPEG,
    ".gif": rb"GIF8",
    ".webp": rb"RIFF....WEBP",
    ".mp4": rb"....ftyp",
    ".webm": rb"\x1a\x45\xdf\xa3",
}
BUILDS = {
    "GLOBAL",
    "STACK_GLOBAL",
    "INST",
    "REDUCE",
    "PUT",
    "BINPUT",
    "MEMOIZE",
}  # what any pickle of more than a word does
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".npy", ".npz", ".h5", ".msgpack", ".onnx")
RECORDS = ("train.json", "results.json", "speed.json", PERSON_FILE)  # what mhla_hf wrote, where a folder may be named
WITHOUT_SUFFIX = ("LICENSE", "LICENCE", "NOTICE", "COPYING")
SOURCE = re.compile(r"modeling_mhla\w*\.py")
REFERENCE = re.compile(r"(modeling_mhla\w*)\.\w+")
LEADS_OUT = re.compile(r"^(\S*[/\\])?\.\.([/\\]\S*)?$|^(file:\S*|~?/[\w.-]+/\S*|[A-Za-z]:\\\S*)$")
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
RESAVE = f"save it again with model.save_pretrained(folder, max_shard_size={SHARD_SIZE!r})"


@dataclasses.dataclass(frozen=True)
class CheckedFolder:
    """A folder that may be shared.

    folder: where it is. kind: see `clean_process.KINDS`. files: path in the repository -> path here. rewritten: path in the
    repository -> bytes that are sent in place of the file here: the card, and configurations and records without the places
    on this computer. stamps: path -> (size, time of change) when it was checked.
    """

    folder: Path
    kind: str
    files: dict
    rewritten: dict
    stamps: dict

    @property
    def card(self) -> str:
        """The text of README.md."""
        return self.rewritten[CARD_FILE].decode()

    def check_unchanged(self) -> None:
        """ValueError when a file is not the one that was checked."""
        for path, file in self.files.items():
            if not file.is_file() or stamp(file) != self.stamps[path]:
                raise ValueError(f"{file} changed while it was pushed: nothing was committed; push again")


def stamp(file: Path) -> tuple[int, int]:
    """(size in bytes, time of change in nanoseconds)."""
    status = file.stat()
    return status.st_size, status.st_mtime_ns


def check_folder(folder, *, repo_id: str | None = None, card: str | None = None, draft: bool = False) -> CheckedFolder:
    """Look at everything in a saved model's folder that can be wrong with it.

    Args:
        folder: a saved MHLA model, or a pipeline with one. repo_id: the Hub id it will have.
        card: the text of README.md where the folder has none.
        draft: whether a converted language model may come without scores for recall and generation.

    Raises:
        ValueError: the first thing that is wrong, in one sentence with the file's name.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"folder must be a saved model's directory, got {str(folder)!r}")
    files = list_files(folder)
    stamps = {path: stamp(file) for path, file in files.items()}
    kind = find_kind(folder)
    check_sources(files, kind)
    for path, file in files.items():
        if path.endswith(".json"):
            _check_references(path, read_json_file(file), files)
    dtype = check_weights(files)
    here = local_places(folder)
    rewritten = _without_origin(files) | _without_places(files, here)
    for path, file in files.items():
        if not path.endswith(".safetensors"):
            check_leaks(path, rewritten[path] if path in rewritten else file.read_bytes(), here)
    card = _check_card_of(folder, files, card, repo_id)
    if PERSON_FILE in files and set(RECORDS) & set(rewritten):
        card = _card_of_records(files, rewritten)
        rewritten[CARD_FILE] = card.encode()
    rewritten.setdefault(CARD_FILE, card.encode())
    check_leaks(CARD_FILE, rewritten[CARD_FILE], here)
    _check_measured(folder, kind, draft)
    check_visit(folder, kind, dtype if kind == "pipeline" else "auto")
    return CheckedFolder(folder, kind, files, rewritten, stamps)


def list_files(folder) -> dict[str, Path]:
    """path in the repository -> file: all that is shared of `folder`.

    Hidden files, caches, TensorBoard's event files, the Trainer's checkpoint-<step> and an old SHA256SUMS are left out.

    Raises:
        ValueError: a name with a secret in it, a link out of the folder, a pickled or unknown kind of file, no weights.
    """
    folder, found = Path(folder), {}
    for place, folders, names in os.walk(folder):
        if states := sorted(name for name in folders if TRAINING_STATE.fullmatch(name)):
            logger.info("push: %s in %s stays here: states of a training run are not shared", ", ".join(states), place)
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in (*LEFT_OUT, *states))
        for name in [*folders, *names]:
            entry = Path(place, name)
            check_name(name)
            if entry.is_symlink() and not entry.resolve().is_relative_to(folder.resolve()):
                raise ValueError(f"{entry} is a link out of the folder: put the file itself there")
            if entry.is_symlink() and entry.is_dir():
                raise ValueError(f"{entry} is a link to a folder: put the files themselves there")
        for name in sorted(names):
            if not name.startswith(".") and name != SUMS_FILE:
                file = Path(place, name)
                _check_kind_of_file(file)
                found[file.relative_to(folder).as_posix()] = file
    if not any(path.endswith(".safetensors") for path in found):
        raise ValueError(f"{folder} holds no .safetensors file: expected a saved model")
    return found


def _check_kind_of_file(file: Path) -> None:
    suffix = file.suffix.lower()
    if suffix in PICKLED:
        raise ValueError(f"{file}: weights are shared as safetensors only, nothing that may be pickled; take it out")
    if suffix != ".safetensors" and suffix not in (*TEXTS, *BINARIES) and file.name not in WITHOUT_SUFFIX:
        raise ValueError(f"{file} is not a kind of file that a model needs ({suffix or 'no suffix'}): take it out")
    with file.open("rb") as stream:
        start = stream.read(16)
    if suffix in BINARIES and not re.match(BINARIES[suffix], start, flags=re.DOTALL):
        raise ValueError(f"{file} does not begin as a {suffix} file does: nothing pickled or packed is shared")
    text = suffix not in (".safetensors", *BINARIES)
    if text and (start[:2] == b"PK" or b"\0" in start[:4] or start[:1] == b"\x80"):
        raise ValueError(f"{file} is no text although it is called so: nothing pickled or packed is shared")
    if suffix != ".safetensors" and _is_pickle(file):
        raise ValueError(f"{file} is a pickle although it is called otherwise: nothing pickled is shared")
    size = file.stat().st_size
    if size > LARGEST:
        raise ValueError(f"{file} has {size / 1e9:.1f} GB, expected files of up to 5 GB: {RESAVE}")


def _is_pickle(file: Path) -> bool:
    """Whether reading the file as a pickle comes to an end and builds something; the oldest protocol is plain text."""
    try:
        with file.open("rb") as stream:
            found = {opcode.name for opcode, _, _ in pickletools.genops(stream)}
    except ValueError:  # nearly always at the first byte
        return False
    return bool(found & BUILDS)


def _without_origin(files: dict[str, Path]) -> dict[str, bytes]:
    """The configurations in which diffusers noted the folder a model was loaded from, without that note."""
    rewritten = {}
    for path, file in files.items():
        if Path(path).name in NOTED:
            content = read_json_file(file)
            origin = content.get(ORIGIN) if _is_note(ORIGIN, content) else None
            if isinstance(origin, str) and (LEADS_OUT.search(origin) or is_absolute(origin) or Path(origin).exists()):
                rewritten[path] = without_origin(file.read_bytes())
    return rewritten


def _without_places(files: dict[str, Path], here: tuple[str, ...]) -> dict[str, bytes]:
    """The records of mhla_hf, and the card that it made of them, with the last part of each absolute path only."""
    rewritten = {}
    for path in set(RECORDS) & set(files):
        content = read_json_file(files[path])
        if (cut := cut_record(content, here)) != content:
            logger.info("push: %s names folders of this computer; only the last part of each is sent", path)
            rewritten[path] = (json.dumps(cut, indent=1, ensure_ascii=False) + "\n").encode()
    if {CARD_FILE, PERSON_FILE} <= set(files):
        text = files[CARD_FILE].read_text(encoding="utf-8")
        if (cut := cut_places(text, here)) != text:
            rewritten[CARD_FILE] = cut.encode()
    return rewritten


def _card_of_records(files: dict[str, Path], rewritten: dict[str, bytes]) -> str:
    """The card as the records say it that are sent, so that it can be proven from what was sent."""
    with tempfile.TemporaryDirectory(prefix="mhla_hf-card-") as place:
        for path in files:
            if path in RECORDS or path.endswith(NOTED):
                Path(place, path).parent.mkdir(parents=True, exist_ok=True)
                Path(place, path).write_bytes(rewritten[path] if path in rewritten else files[path].read_bytes())
        return render_card(read_facts(place, read_person(place), weights=False))


def read_json_file(file: Path):
    """The content of a JSON file; ValueError when it is none."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from None


def find_kind(folder: Path) -> str:
    """One of `clean_process.KINDS`; ValueError when the folder holds none of them."""
    if (folder / "model_index.json").is_file():
        return "pipeline"
    config = read_json(folder, "config.json")
    if config is None:
        raise ValueError(f"{folder} holds neither config.json nor model_index.json: expected a saved model")
    names = config.get("auto_map")
    if isinstance(names, dict) and "_class_name" in config:
        return "model"
    for auto, kind in AUTO_KINDS.items():
        if isinstance(names, dict) and auto in names:
            return kind
    raise ValueError(f"{folder / 'config.json'} names no MHLA class in auto_map: save the model with mhla_hf installed")


def check_sources(files: dict[str, Path], kind: str) -> None:
    """Every .py file is one that mhla_hf made and nobody changed, and there is one where the kind needs it."""
    sources = [path for path in files if path.endswith(".py")]
    for path in sources:
        if not SOURCE.fullmatch(Path(path).name):
            raise ValueError(
                f"{files[path]} is not made by mhla_hf: the only code in a shared model is modeling_mhla*.py"
            )
        try:
            check_bundle(files[path].read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{files[path]}: {error}") from error
    wanted = "beside a component's weights" if kind == "pipeline" else "beside config.json"
    if not any(("/" in path) is (kind == "pipeline") for path in sources):
        raise ValueError(f"there is no modeling_mhla*.py {wanted}: save the model with mhla_hf installed")


def _check_references(path: str, content, files: dict[str, Path]) -> None:
    """Names in a JSON file that point to code, files or libraries lead to something in the folder."""
    inside = path.rpartition("/")[0]
    beside = f"{inside}/" if inside else ""
    if Path(path).name == "model_index.json":
        _check_components(path, content, files)
    for key, value in _strings(content):
        if re.search(r"(^|\.)auto_map\.", key):
            found = REFERENCE.fullmatch(value)
            if not found or not any(Path(file).name == f"{found[1]}.py" for file in files if file.startswith(beside)):
                raise ValueError(f"{path}: {key} is {value!r}, expected a class of a modeling_mhla*.py in this folder")
        configures = Path(path).name.endswith(NOTED) and not _is_note(key, content)
        if configures and (LEADS_OUT.search(value) or (key == ORIGIN and is_absolute(value))):
            raise ValueError(f"{path}: {key} is {value!r}, which leads out of the folder")


def _is_note(key: str, content) -> bool:
    """Whether a value is diffusers' note of where a model was loaded from, which no loader reads and `push` takes out."""
    return key == ORIGIN and isinstance(content, dict) and "_class_name" in content


def _check_components(path: str, content, files: dict[str, Path]) -> None:
    """model_index.json: every component comes from diffusers, transformers, or a source file beside its weights."""
    for name, value in content.items() if isinstance(content, dict) else ():
        if name == "_class_name" and not isinstance(value, str):
            raise ValueError(f"{path}: _class_name is {value!r}, expected the name of a pipeline of diffusers")
        library = value[0] if not name.startswith("_") and isinstance(value, list) and len(value) == 2 else None
        known = library in (None, "diffusers", "transformers") or f"{name}/{library}.py" in files
        if not known:
            raise ValueError(f"{path}: {name} comes from {library!r}, expected a modeling_mhla*.py in {name}/")


def _strings(content, key: str = ""):
    """(dotted key, text) of every text in a JSON value."""
    if isinstance(content, str):
        yield key, content
    elif isinstance(content, dict):
        for name, value in content.items():
            yield from _strings(value, f"{key}.{name}" if key else str(name))
    elif isinstance(content, list):
        for value in content:
            yield from _strings(value, key)


def check_weights(files: dict[str, Path]) -> str:
    """Every safetensors file is whole and finite, and shards and index agree. Returns the usual dtype, e.g. "float32"."""
    sizes, stored = Counter(), {}
    for path, file in files.items():
        if path.endswith(".safetensors"):
            stored[path] = _check_tensors(file, sizes)
    for path in files:
        if not path.endswith(".safetensors.index.json"):
            continue
        stem, beside = path.removesuffix(".safetensors.index.json"), path[: path.rfind("/") + 1]
        if f"{stem}.safetensors" in files:
            raise ValueError(f"{files[path]} and {stem}.safetensors are both there: delete the one that is not meant")
        for name, shard in check_shards(files[path]).items():
            if name not in stored.get(beside + shard, ()):
                raise ValueError(f"{files[path]}: the weight {name!r} is not in {shard}")
    for path in stored:
        part = re.fullmatch(r"(.*)-\d+-of-\d+\.safetensors", path)
        if part and f"{part[1]}.safetensors.index.json" not in files:
            raise ValueError(f"{files[path]} is a part of a sharded model without its index: save the model again")
    return DTYPES.get(max(sizes, key=sizes.get, default="F32"), "float32")


def _check_tensors(file: Path, sizes: Counter) -> set[str]:
    """The names in one file, all of whose numbers are finite; `sizes` counts elements by dtype."""
    try:
        with safe_open(file, framework="pt") as weights:
            for key, value in (weights.metadata() or {}).items():
                check_leaks(file.name, f"{key} {value}".encode())
            names = set(weights.keys())
            for name in names:
                tensor = weights.get_tensor(name)
                if tensor.is_floating_point():
                    sizes[weights.get_slice(name).get_dtype()] += tensor.numel()
                    wide = tensor.float() if tensor.element_size() == 1 else tensor
                    if not torch.isfinite(wide).all():
                        raise ValueError(f"{file}: the weight {name!r} holds NaN or infinity, expected finite numbers")
    except SafetensorError as error:
        raise ValueError(f"{file} is no whole safetensors file: {error}") from None
    return names


def _check_card_of(folder: Path, files: dict[str, Path], card: str | None, repo_id: str | None) -> str:
    """The text of README.md, valid, and where mhla_hf wrote it, true."""
    if CARD_FILE in files:
        card = files[CARD_FILE].read_text(encoding="utf-8")
    if card is None:
        raise ValueError(
            f"{folder / CARD_FILE} does not exist: write it with mhla_hf.hub.card.write_card, or give license"
        )
    check_front_matter(card, folder / CARD_FILE, files)
    if PERSON_FILE in files:
        try:
            check_card(folder)
        except ValueError as error:
            raise ValueError(f"{error}; write the card again (mhla-hf card {folder})") from error
        name = read_person(folder)["name"]
        if repo_id is not None and "/" in name and name != repo_id:
            raise ValueError(
                f"{folder / CARD_FILE} is the card of {name!r}, not of {repo_id!r}: write it with that name"
            )
    return card


def check_front_matter(text: str, where, files=()) -> None:
    """The metadata of a card is what the Hub accepts: a known licence, ids that are ids, lists that are lists."""
    front = re.match(r"---[ \t]*\r?\n(.*?)\r?\n---", text, flags=re.DOTALL)
    try:
        ModelCard(text)
        data = (yaml.safe_load(front[1]) if front else None) or {}
    except (ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError) as error:
        raise ValueError(f"{where} has front matter that cannot be read: {' '.join(str(error).split())}") from None
    licence = data.get("license")
    if licence not in LICENCES if isinstance(licence, str) else True:
        raise ValueError(f"{where}: license is {licence!r}, expected an identifier of the Hub such as apache-2.0")
    if licence == "other" and not data.get("license_name"):
        raise ValueError(f"{where}: license 'other' needs license_name")
    if licence == "other" and not data.get("license_link") and not {"LICENSE", "LICENCE"} & set(files):
        raise ValueError(f"{where}: license 'other' needs license_link, or the text in a file LICENSE")
    for key in ("tags", "datasets", "language", "base_model"):
        value = data.get(key)
        entries = value if isinstance(value, list) else [value] * (value is not None and key != "tags")
        if (value is not None and not entries) or not all(isinstance(entry, str) for entry in entries):
            raise ValueError(f"{where}: {key} is {value!r}, expected a list of texts")
        for entry in entries if key in ("datasets", "base_model") else ():
            try:
                validate_repo_id(entry)
            except HFValidationError:
                raise ValueError(f"{where}: {key} is {entry!r}, expected a Hub id such as user/name") from None
    for key in ("library_name", "pipeline_tag"):
        if not isinstance(data.get(key, "-"), str):
            raise ValueError(f"{where}: {key} is {data[key]!r}, expected a text")


def _check_measured(folder: Path, kind: str, draft: bool) -> None:
    """A converted language model says how well it recalls and how well it writes, unless it is a draft."""
    if draft or kind != "language" or read_json(folder, "config.json").get("model_type") == "mhla":
        return
    records = read_records(folder, "folder") if (folder / PERSON_FILE).is_file() else []
    if absent := not_measured(records):
        raise ValueError(
            f"{folder}: the card of a converted language model has no result for {' and '.join(absent)}: evaluate it and"
            " write the card again, or push it as a draft"
        )
