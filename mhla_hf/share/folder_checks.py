"""What a model's folder has to be before it is shared: everything is looked at here, and nothing is sent.

Only files on a list go out: what mhla_hf, transformers and diffusers write for a model, by exact name, each of its own
format. Everything else stays where it is and is named. The checks look at a copy of exactly what goes out, and the last one
loads it in a process where mhla_hf cannot be imported, without network, as its users will.
"""

import dataclasses
import json
import logging
import re
import tempfile
from collections import Counter
from pathlib import Path

import torch
import yaml
from huggingface_hub import ModelCard
from safetensors import SafetensorError, safe_open

from ..checkpoints.bundle import build_bundle, check_bundle
from ..checkpoints.checksums import NOTED, ORIGIN, SUMS_FILE, without_origin
from ..checkpoints.clean_process import check_visit
from ..checkpoints.files import SHARD_SIZE
from ..checkpoints.load import check_shards
from .card import CARD_FILE, check_card, folder_card
from .facts import AUTO_KINDS, PERSON_FILE, not_measured, read_json, read_person, read_records
from .leaks import VOCABULARIES, check_leaks, cut_record, is_absolute, local_places, strings

logger = logging.getLogger("mhla_hf")
LARGEST = 5 * 10**9  # bytes of one file: SHARD_SIZE as a number
RECORDS = ("train.json", "results.json", "speed.json", PERSON_FILE)  # what mhla_hf wrote, where a folder may be named
INDEX = "model_index.json"
LICENSE_TEXTS = ("LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "NOTICE.txt", "NOTICE.md")
TOP = (CARD_FILE, INDEX, *RECORDS, *LICENSE_TEXTS)  # beside a model or pipeline, not in a pipeline's components
NAMES = re.compile(r"modeling_mhla\w*\.py|(diffusion_pytorch_)?model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
CONFIGURATIONS = (
    "config.json", "generation_config.json", "scheduler_config.json", "tokenizer_config.json", "special_tokens_map.json",
    "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json", "chat_template.json",
    "chat_template.jinja",
)  # fmt: skip
FIGURE = re.compile(r"\w[\w.-]*(?:/\w[\w.-]*)*\.(?:png|jpg|jpeg|gif|webp|mp4|webm)\b", re.ASCII)  # as a card names it
# How a file begins: pictures and films; sentencepiece's first field, or tiktoken's first line.
PICTURE = re.compile(rb"\x89PNG\r\n\x1a\n|\xff\xd8\xff|GIF8|RIFF....WEBP|....ftyp|\x1a\x45\xdf\xa3", re.DOTALL)
TOKENS = re.compile(rb"\n|[A-Za-z0-9+/]+=* \d+\r?\n")
REFERENCE = re.compile(r"(modeling_mhla\w*)\.\w+")
ELSEWHERE = re.compile(r"\S+--\S+\.\S+")  # code of another repository, as transformers writes it
FOREIGN = {"custom_pipelines", "custom_pipeline", "custom_generate"}  # where loaders look for such code
LEADS_OUT = re.compile(r"^(\S*[/\\])?\.\.([/\\]\S*)?$|^(file:\S*|~?/[\w.-]+/\S*|[A-Za-z]:\\\S*)$")
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
RESAVE = f"save it again with model.save_pretrained(folder, max_shard_size={SHARD_SIZE!r})"


@dataclasses.dataclass(frozen=True)
class CheckedFolder:
    """A folder that may be shared.

    folder: where it is. kind: see `clean_process.KINDS`. files: path in the repository -> path here. rewritten: path in the
    repository -> bytes that are sent in place of the file here: the card, and configurations and records without the places
    on this computer. stamps: path -> (size, time of change) when it was checked. left: files and folders that stay here.
    """

    folder: Path
    kind: str
    files: dict
    rewritten: dict
    stamps: dict
    left: tuple

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
    left = tuple(_list_left(folder, files))
    if left:
        logger.warning("push: no part of the model, so these stay in %s: %s", folder, ", ".join(map(ascii, left)))
    stamps = {path: stamp(file) for path, file in files.items()}
    with tempfile.TemporaryDirectory(prefix="mhla_hf-push-") as place:
        copy = Path(place, "model")
        for path, file in files.items():
            (copy / path).parent.mkdir(parents=True, exist_ok=True)
            (copy / path).symlink_to(file.absolute())
        try:
            kind, rewritten = _check_copy(copy, sorted(files), card, repo_id, draft, local_places(folder))
        except RecursionError:
            raise ValueError(f"{folder} holds a JSON file that is nested too deep") from None
        except ValueError as error:
            without = " (looked at without what stays here)" if left else ""
            raise ValueError(str(error).replace(str(copy), str(folder)) + without) from error
    return CheckedFolder(folder, kind, files, rewritten, stamps, left)


def _check_copy(folder: Path, paths, card, repo_id, draft, here) -> tuple[str, dict[str, bytes]]:
    """(kind, what is rewritten) of a folder that holds exactly what goes out; what is rewritten is put into it."""
    files = {path: folder / path for path in paths}
    kind = find_kind(folder)
    for path, file in files.items():
        _check_format(path, file, files)
    dtype = check_weights(files)
    rewritten = _without_origin(files) | _without_places(files, here)
    for path, file in files.items():
        if file.suffix not in (".safetensors", ".py") and path != CARD_FILE and not FIGURE.fullmatch(path):
            check_leaks(path, rewritten[path] if path in rewritten else file.read_bytes(), here)
    card = _check_card_of(folder, files, card, repo_id)
    _put(folder, rewritten)
    if PERSON_FILE in files:  # of the records as they are sent, so that whoever gets them can check the card
        card = folder_card(folder, weights=False)
    rewritten[CARD_FILE] = card.encode()
    _put(folder, rewritten)
    check_leaks(CARD_FILE, rewritten[CARD_FILE], here)
    _check_measured(folder, kind, draft)
    check_visit(folder, kind, dtype if kind == "pipeline" else "auto")
    return kind, rewritten


def _put(folder: Path, contents: dict[str, bytes]) -> None:
    """Write files in place of what is there, which may be a link that must not be followed."""
    for path, data in contents.items():
        (folder / path).unlink(missing_ok=True)
        (folder / path).write_bytes(data)


def list_files(folder) -> dict[str, Path]:
    """path in the repository -> file: all that is shared of `folder`.

    Raises:
        ValueError: a name on the list that is no file in the folder, a file that is too large, no weights.
    """
    folder = Path(folder)
    index = read_json(folder, INDEX) or {}
    parts = [folder / name for name in index if re.fullmatch(r"[A-Za-z]\w*", name)]
    wanted = [file for file in folder.iterdir() if file.name in TOP]
    for file in (file for part in (folder, *parts) if part.is_dir() for file in part.iterdir()):
        if file.name in (*CONFIGURATIONS, *VOCABULARIES) or NAMES.fullmatch(file.name):
            wanted.append(file)
    wanted += folder.glob("additional_chat_templates/*.jinja")  # where a tokenizer has several
    if (folder / CARD_FILE).is_file():
        named = FIGURE.findall((folder / CARD_FILE).read_text(encoding="utf-8", errors="replace"))
        wanted += [folder / name for name in set(named) if (folder / name).exists()]
    for file in wanted:
        if not file.is_file():
            raise ValueError(f"{file} is no regular file, and no link to one: put the file itself there")
        if not file.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{file} is a link out of the folder: put the file itself there")
        if (size := file.stat().st_size) > LARGEST:
            raise ValueError(f"{file} has {size / 1e9:.1f} GB, expected files of up to 5 GB: {RESAVE}")
    if not any(file.name.endswith(".safetensors") for file in wanted):
        raise ValueError(
            f"{folder} holds no .safetensors file under its usual name: expected a model saved without a variant"
        )
    return {file.relative_to(folder).as_posix(): file for file in sorted(wanted)}


def _list_left(folder: Path, files: dict[str, Path], below: str = ""):
    """What is not shared, a folder of which nothing is by its own name; an old SHA256SUMS is replaced."""
    for entry in sorted((folder / below).iterdir()):
        path = f"{below}{entry.name}"
        if any(shared.startswith(f"{path}/") for shared in files):
            yield from _list_left(folder, files, f"{path}/")
        elif path not in (*files, SUMS_FILE):
            yield path


def _check_format(path: str, file: Path, files: dict[str, Path]) -> None:
    """A file is what its name says, and the only code is what mhla_hf made; weights are looked at elsewhere."""
    suffix = file.suffix
    if suffix == ".json":
        _check_references(path, read_json_file(file), files)
    elif suffix == ".py":
        text = read_text(file)
        try:
            made = build_bundle(check_bundle(text)["entry"])
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error
        if made != text:  # its hash says only that it is whole: anybody can hash a text anew
            raise ValueError(
                f"{file} is not the source that this mhla_hf makes: load the model with it and save it again"
            )
    elif suffix == ".model" or FIGURE.fullmatch(path):
        with file.open("rb") as stream:
            if not (TOKENS if suffix == ".model" else PICTURE).match(stream.read(4096)):
                raise ValueError(f"{file} does not begin as a {suffix} file does")
    elif suffix != ".safetensors" and "\0" in read_text(file):
        raise ValueError(f"{file} is no text: it holds a NUL byte")


def read_text(file: Path) -> str:
    """The content of a text file; ValueError when it is none."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is no text: {error}") from None


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
    """The records of mhla_hf with the last part of each absolute path only."""
    rewritten = {}
    for path in set(RECORDS) & set(files):
        content = read_json_file(files[path])
        if (cut := cut_record(content, here)) != content:
            logger.info("push: %s names folders of this computer; only the last part of each is sent", path)
            rewritten[path] = (json.dumps(cut, indent=1, ensure_ascii=False) + "\n").encode()
    return rewritten


def read_json_file(file: Path):
    """The content of a JSON file; ValueError when it is none."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from None


def find_kind(folder: Path) -> str:
    """One of `clean_process.KINDS`; ValueError when the folder holds none of them."""
    if (folder / INDEX).is_file():
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


def _check_references(path: str, content, files: dict[str, Path]) -> None:
    """Names in a JSON file that point to code, files or libraries lead to something in the folder."""
    name, beside = Path(path).name, path[: path.rfind("/") + 1]
    if name == INDEX:
        _check_components(path, content, files)
    if name in (*VOCABULARIES, *RECORDS):
        return
    for key, value in strings(content):
        if "auto_map" in key.split("."):
            found = REFERENCE.fullmatch(value)
            if not found or f"{beside}{found[1]}.py" not in files:
                raise ValueError(f"{path}: {key} is {value!r}, expected a class of a modeling_mhla*.py in this folder")
        elif FOREIGN & set(key.split(".")) or ELSEWHERE.fullmatch(value.strip()):
            raise ValueError(f"{path}: {key} is {value!r}, which is code of another repository")
        configures = name in NOTED and not _is_note(key, content)
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


def check_weights(files: dict[str, Path]) -> str:
    """Every safetensors file is whole and finite, no index leads out. Returns the usual dtype, e.g. "float32"."""
    sizes = Counter()
    for path, file in files.items():
        if path.endswith(".safetensors"):
            _check_tensors(file, sizes)
        elif path.endswith(".safetensors.index.json"):
            check_shards(file)
            if path.removesuffix(".index.json") in files:
                raise ValueError(f"{file} and the one file that it stands for are both there: delete one of them")
    return DTYPES.get(max(sizes, key=sizes.get, default="F32"), "float32")


def _check_tensors(file: Path, sizes: Counter) -> None:
    """All numbers in a file are finite; `sizes` counts elements by dtype."""
    try:
        with safe_open(file, framework="pt") as weights:
            for key, value in (weights.metadata() or {}).items():
                check_leaks(file.name, f"{key} {value}".encode())
            for name in weights.keys():  # noqa: SIM118
                tensor = weights.get_tensor(name)
                if tensor.is_floating_point():
                    sizes[weights.get_slice(name).get_dtype()] += tensor.numel()
                    wide = tensor.float() if tensor.element_size() == 1 else tensor
                    if not torch.isfinite(wide).all():
                        raise ValueError(f"{file}: the weight {name!r} holds NaN or infinity, expected finite numbers")
    except SafetensorError as error:
        raise ValueError(f"{file} is no whole safetensors file: {error}") from None


def _check_card_of(folder: Path, files: dict[str, Path], card: str | None, repo_id: str | None) -> str:
    """The text of README.md, valid, and where mhla_hf wrote it, true."""
    if CARD_FILE in files:
        card = read_text(files[CARD_FILE])
    if card is None:
        raise ValueError(
            f"{folder / CARD_FILE} does not exist: write it with mhla_hf.share.card.write_card, or give license"
        )
    try:
        license = ModelCard(card).data.to_dict().get("license")
    except (ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError) as error:
        said = " ".join(str(error).split())
        raise ValueError(f"{folder / CARD_FILE} has front matter that cannot be read: {said}") from None
    if not isinstance(license, str):
        raise ValueError(
            f"{folder / CARD_FILE}: license is {license!r}, expected a license of the Hub such as apache-2.0"
        )
    if PERSON_FILE in files:
        try:
            check_card(folder)
        except ValueError as error:
            raise ValueError(f"{error}; write the card again (mhla-hf card {folder})") from error
        name = read_person(folder)[0].name
        if repo_id is not None and "/" in name and name != repo_id:
            raise ValueError(
                f"{folder / CARD_FILE} is the card of {name!r}, not of {repo_id!r}: write it with that name"
            )
    return card


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
