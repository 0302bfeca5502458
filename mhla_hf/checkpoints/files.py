"""Files and folders written aside and renamed: a reader, or a stop in the middle, never meets half of one."""

import contextlib
import glob
import json
import os
import re
import shutil
import tempfile
from pathlib import Path

import yaml
from filelock import FileLock

from .values import read_settings

SHARD_SIZE = "5GB"  # of one file of weights, as save_pretrained takes it: what may be shared
MARKER = ".mhla_hf.lock"  # in every temporary folder that this package makes
OLD = "old"
LOADING_ERRORS = Exception  # the files of a model are somebody's, and anything may stand in them
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
PIPELINE = "model_index.json"
VOCABULARIES = (
    "tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json",
    "tokenizer.model", "spiece.model", "spm.model", "sentencepiece.bpe.model", "tiktoken.model",
)  # fmt: skip


@contextlib.contextmanager
def one_sentence(about):
    """Whatever goes wrong meanwhile becomes a ValueError of one line that begins with `about`."""
    try:
        yield
    except LOADING_ERRORS as error:
        raise ValueError(f"{about}: {first_line(error)}") from error


def first_line(error):
    """The first line of an error's text, and those that it goes on in; its class where it has none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    ends = (number for number, line in enumerate(lines, 1) if not line.endswith((":", ",", " or")))
    return " ".join(lines[: next(ends, len(lines))])


def check_model_name(name, pipeline=False):
    """A `Path` for a local model or `pipeline`, or the same str for a Hub id. ValueError: neither, or no model in it."""
    name, path, what = str(name), Path(name), "pipeline" if pipeline else "model"
    if path.is_dir():
        index, weights = (PIPELINE, "*/*.safetensors") if pipeline else ("config.json", "*.safetensors")
        if not (path / index).is_file() or not any(path.glob(weights)):
            lacks = ".safetensors file" if (path / index).is_file() else index
            raise ValueError(f"model {name!r} has no {lacks}; expected the folder of a saved {what}")
        return path
    if os.path.lexists(path) or not HUB_ID.fullmatch(name) or name.startswith("."):
        raise ValueError(f"model {name!r} is no folder here; expected the folder of a saved {what} or a Hub id")
    return name


@contextlib.contextmanager
def file_aside(path):
    """A path to write to; it becomes `path` by one rename when the block ends well, else it is removed.

    An OSError of the path to write to names `path`.
    """
    path = Path(path)
    aside = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        yield aside
        os.replace(aside, path)
    except OSError as error:
        if str(error.filename) == str(aside):
            error.filename = str(path)
        raise
    finally:
        aside.unlink(missing_ok=True)


@contextlib.contextmanager
def temporary_folder(parent, prefix):
    """A new, empty folder in `parent`, named `prefix` and some letters, that is removed when the block ends.

    It holds `MARKER`, locked for as long as the process lives. Those that killed processes left there are removed first.
    """
    clear_abandoned(parent, prefix)
    made = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        with FileLock(made / MARKER):
            yield made
    finally:
        _remove_temporary(made)


def clear_abandoned(parent, prefix) -> None:
    """Remove the folders of `temporary_folder` in `parent` whose names start with `prefix` and whose process has ended.

    Anything without `MARKER`, or with one that is locked, stays, as does what cannot be removed.
    """
    for marker in Path(parent).glob(f"{glob.escape(prefix)}*/{MARKER}"):
        if not marker.parent.is_symlink():
            with contextlib.suppress(OSError):  # filelock.Timeout is one
                with FileLock(marker, blocking=False):
                    pass
                _remove_temporary(marker.parent)


def _remove_temporary(folder) -> None:
    """Remove a temporary folder; what `folder_aside` moved out of the way goes back if nothing took its place."""
    target = folder.parent / folder.name.rpartition(".tmp-")[0]
    if (folder / OLD).exists() and not target.exists():
        os.replace(folder / OLD, target)
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def folder_aside(target, replace: bool = False, place=None):
    """A new, empty folder that becomes `target` by one rename when the block ends well; else it is removed.

    replace: whether a folder with content at `target` gives way; OSError if it may not. place: the folder, on the same file
    system, that it is made in; None: beside `target`.
    """
    target = Path(target)
    parent = Path(place or target.parent)
    parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(parent, f"{target.name}.tmp-") as made:
        aside = made / "new"
        aside.mkdir()
        yield aside
        if replace and target.exists():
            os.replace(target, made / OLD)
        elif target.exists():
            target.rmdir()
        os.replace(aside, target)


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-3 is a number, as in YAML 1.2 and everywhere else."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+$"), list("+-0123456789")
)


def named_yaml(name, folder, what) -> Path:
    """The YAML file `name`, or the one in `folder` that is called so. ValueError, beginning with `what`: there is none."""
    names = sorted(path.stem for path in Path(folder).glob("*.yaml"))
    path = Path(folder, f"{name}.yaml") if str(name) in names else Path(name)
    if not path.is_file():
        raise ValueError(f"{what}: {str(name)!r} is not a file; expected a YAML file, or a name: {', '.join(names)}")
    return path


def read_yaml(path, what, cls=None):
    """What the YAML file `path` holds, as the strict dataclass `cls` if one is given; ValueError begins with `what`."""
    try:
        content = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{what}: {str(path)!r} is not YAML ({' '.join(str(error).split())})") from None
    return content if cls is None else read_settings(cls, content, f"{what} {str(path)!r}: ")


def read_json(path) -> dict | None:
    """The object in a JSON file; None without such a file. ValueError in one sentence when it holds anything else."""
    path = Path(path)
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, expected an object")
    return content


def is_claimed(folder, record, identity, what) -> bool:
    """Whether `folder` is the place of `identity` (a dict that JSON can say), by its file `record`; False: it is free.

    ValueError, beginning with `what`: it is the place of something else.
    """
    folder, wanted = Path(folder), json.loads(json.dumps(identity))
    if (known := read_json(folder / record)) is not None:
        if other := [key for key in sorted({*known, *wanted}) if known.get(key) != wanted.get(key)]:
            advice = "give another folder, or delete this one"
            raise ValueError(f"{what}: {str(folder)!r} was begun with another {other[0]}; {advice}")
        return True
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{what}: {str(folder)!r} holds other files and no {record}; expected a new or empty folder")
    return False


def write_text(path, text: str) -> Path:
    """Put `text` (UTF-8, line ends as they are) at `path`; an old file there is replaced whole. Returns the path."""
    with file_aside(path) as aside:
        aside.write_text(text, encoding="utf-8", newline="\n")
    return Path(path)


def write_json(path, content) -> Path:
    """Put `content` at `path` as JSON; ValueError for NaN, which is no JSON. Returns the path."""
    return write_text(path, json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
