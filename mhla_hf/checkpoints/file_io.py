"""Read and write files: atomic files and folders, JSON and YAML, and errors that name the file or argument at fault."""

import contextlib
import glob
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock

from .values import read_settings

PathLike = str | os.PathLike[str]

SHARD_SIZE = "5GB"  # largest weights file, as `save_pretrained(max_shard_size=...)` takes it
LOCK_FILE = ".mhla_hf.lock"  # marks, in each temporary folder, that this package made it
REPLACED = "old"  # name, inside a temporary folder, of the folder that is being replaced
TORCH_SAVE_ERROR = re.compile("inline_container|unexpected pos|iostream error")
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
PIPELINE_INDEX = "model_index.json"
TOKENIZER_FILES = (
    "tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json",
    "tokenizer.model", "spiece.model", "spm.model", "sentencepiece.bpe.model", "tiktoken.model"
)  # fmt: skip


@contextlib.contextmanager
def wrap_errors(message: str) -> Iterator[None]:
    """Turn any exception into `ValueError("<message> (<reason>).")`: libraries raise many types for damaged files."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{message} ({summarize_error(error).removesuffix('.')}).") from error


@contextlib.contextmanager
def renamed_errors(argument: str, name: str) -> Iterator[None]:
    """Replace `argument` by `name` in errors whose message begins with "<argument>:"."""
    try:
        yield
    except (ImportError, TypeError, ValueError) as error:
        if not str(error).startswith(f"{argument}:"):
            raise
        raise type(error)(name + str(error).removeprefix(argument)) from error


def summarize_error(error: BaseException) -> str:
    """Return an error's first complete line, or its class name if it has no text; for torch.save, name a full disk."""
    if TORCH_SAVE_ERROR.search(str(error)):
        return "the disk is full, or a file exceeds its limit"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    ends = (number for number, line in enumerate(lines, 1) if not line.endswith((":", ",", " or")))
    return " ".join(lines[: next(ends, len(lines))])


def resolve_model_name(name: PathLike, pipeline: bool = False) -> Path | str:
    """Return a local model or pipeline as a `Path`, and a Hub id as a `str`. Raise ValueError if `name` is neither."""
    name = str(name)
    path = Path(name)
    kind = "pipeline" if pipeline else "model"
    if path.is_dir():
        index, weights = (PIPELINE_INDEX, "*/*.safetensors") if pipeline else ("config.json", "*.safetensors")
        if not (path / index).is_file() or not any(path.glob(weights)):
            missing = ".safetensors file" if (path / index).is_file() else index
            raise ValueError(f"model: got {name!r}, which has no {missing}, expected the folder of a saved {kind}.")
        return path
    if os.path.lexists(path) or not HUB_ID.fullmatch(name) or name.startswith("."):
        expected = f"the folder of a saved {kind} or a Hub id"
        raise ValueError(f"model: got {name!r}, which is not a folder, expected {expected}.")
    return name


def check_writable(path: PathLike, argument: str, num_bytes: int = 0) -> None:
    """Raise ValueError unless a file or folder of `num_bytes` can be made, or replaced by renaming, at `path`."""
    ancestor = Path(path).expanduser().parent
    while not os.path.lexists(ancestor):
        ancestor = ancestor.parent
    start = f"{argument}: got {str(path)!r}"
    if not ancestor.is_dir() or not os.access(ancestor, os.W_OK | os.X_OK):
        raise ValueError(f"{start}, which cannot be made in {str(ancestor)!r}, expected a writable folder there.")
    if (free := shutil.disk_usage(ancestor).free) < num_bytes:
        expected = f"at least {num_bytes / 2**20:,.1f} MiB"
        raise ValueError(f"{start}, with {free / 2**20:,.1f} MiB of free space, expected {expected}.")


@contextlib.contextmanager
def atomic_file(path: PathLike) -> Iterator[Path]:
    """Yield a temporary path to write to, renamed to `path` at the end; after an error, `path` is unchanged."""
    path = Path(path)
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        if str(error.filename) == str(temporary):
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def temporary_folder(parent: PathLike, prefix: str) -> Iterator[Path]:
    """Yield a new folder in `parent`, named `prefix` plus random letters and removed at the end.

    It contains `LOCK_FILE`, locked while the process lives. Folders of the same prefix from killed processes are removed.
    """
    remove_abandoned(parent, prefix)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        with FileLock(folder / LOCK_FILE):
            yield folder
    finally:
        _remove_temporary(folder)


def remove_abandoned(parent: PathLike, prefix: str) -> None:
    """Remove temporary folders of this prefix that killed processes left in `parent`: their `LOCK_FILE` is not locked."""
    for lock_file in Path(parent).glob(f"{glob.escape(prefix)}*/{LOCK_FILE}"):
        if not lock_file.parent.is_symlink():
            with contextlib.suppress(OSError):  # includes filelock.Timeout
                with FileLock(lock_file, blocking=False):
                    pass
                _remove_temporary(lock_file.parent)


def _remove_temporary(folder: Path) -> None:
    """Remove a temporary folder, after moving back what an interrupted `atomic_folder` was replacing."""
    target = folder.parent / folder.name.rpartition(".tmp-")[0]
    if (folder / REPLACED).exists() and not target.exists():
        os.replace(folder / REPLACED, target)
    for entry in folder.glob("*"):  # folders first: if this is killed, `remove_abandoned` finds the rest by `LOCK_FILE`
        shutil.rmtree(entry, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def atomic_folder(target: PathLike, replace: bool = False, parent: PathLike | None = None) -> Iterator[Path]:
    """Yield an empty temporary folder, renamed to `target` at the end; after an error, `target` is unchanged.

    Without `replace`, an existing `target` must be empty. `parent`, where the temporary folder is made, must be on the same
    file system (default: beside `target`).
    """
    target = Path(target)
    parent = Path(parent or target.parent)
    parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(parent, f"{target.name}.tmp-") as temporary:
        new = temporary / "new"
        new.mkdir()
        yield new
        if replace and target.exists():
            os.replace(target, temporary / REPLACED)
        elif target.exists():
            target.rmdir()
        os.replace(new, target)


class _Loader(yaml.SafeLoader):
    """Reads `1e-3` as a number, as in YAML 1.2."""


EXPONENT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT, list("+-0123456789"))


def find_yaml(name: PathLike, folder: PathLike, argument: str) -> Path:
    """Return the path `folder`/`name`.yaml if it exists, else `name` as a path. Raise ValueError if that is no file."""
    names = sorted(path.stem for path in Path(folder).glob("*.yaml"))
    path = Path(folder, f"{name}.yaml") if str(name) in names else Path(name)
    if not path.is_file():
        expected = f"a YAML file or one of {', '.join(names)}"
        raise ValueError(f"{argument}: got {str(name)!r}, which is not a file, expected {expected}.")
    return path


def read_yaml(path: PathLike, label: str, cls: type | None = None) -> Any:
    """Read a YAML file, as an instance of `cls` (decorated with `checked`) if given. Errors begin with `label`."""
    try:
        content = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{label}: got {str(path)!r}, expected YAML ({' '.join(str(error).split())}).") from None
    return content if cls is None else read_settings(cls, content, f"{label} {str(path)!r}: ")


def read_json(path: PathLike) -> dict[str, Any] | None:
    """Return the object in a JSON file, or None if there is no such file. Raise ValueError if it holds anything else."""
    path = Path(path)
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: got a file that is no JSON ({error}).") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: got {type(content).__name__}, expected a JSON object.")
    return content


def can_resume(folder: PathLike, record: str, identity: dict[str, Any], argument: str) -> bool:
    """Return True if the JSON file `folder`/`record` equals `identity`, False without any files; else raise ValueError."""
    folder, start = Path(folder), f"{argument}: got {str(folder)!r}"
    present = json.loads(json.dumps(identity))
    if (stored := read_json(folder / record)) is not None:
        if changed := [key for key in sorted({*stored, *present}) if stored.get(key) != present.get(key)]:
            expected = "the same; choose another folder, or delete this one"
            raise ValueError(f"{start}, which was started with another {changed[0]}, expected {expected}.")
        return True
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{start}, which holds other files and no {record}, expected a new or empty folder.")
    return False


def write_text(path: PathLike, text: str) -> Path:
    """Write `text` to `path` atomically, as UTF-8 with unchanged line endings, and return the path."""
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")
    return Path(path)


def write_json(path: PathLike, content: Any) -> Path:
    """Write `content` to `path` atomically as JSON, and return the path. Raise ValueError for NaN or infinity."""
    return write_text(path, json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
