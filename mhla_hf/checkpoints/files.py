"""Files and folders written aside and renamed: a reader, or a stop in the middle, never meets half of one."""

import contextlib
import json
import os
import re
import shutil
import tempfile
from pathlib import Path

import yaml

from .values import read_settings

SHARD_SIZE = "5GB"  # of one file of weights, as save_pretrained takes it: what may be shared


@contextlib.contextmanager
def file_aside(path):
    """A path to write to; it becomes `path` by one rename when the block ends well, else it is removed."""
    path = Path(path)
    aside = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        yield aside
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


@contextlib.contextmanager
def folder_aside(target, replace: bool = False, place=None):
    """A new, empty folder that becomes `target` by one rename when the block ends well; else it is removed.

    replace: whether a folder with content at `target` gives way; OSError if it may not. place: the folder, on the same file
    system, that it is made in; None: beside `target`.
    """
    target = Path(target)
    place = Path(place or target.parent)
    place.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f"{target.name}.tmp-", dir=place))
    old = aside.with_name(f"{aside.name}.old")
    try:
        yield aside
        aside.chmod(0o755)
        if replace and target.exists():
            os.replace(target, old)
        elif target.exists():
            target.rmdir()
        os.replace(aside, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        if old.exists() and not target.exists():
            os.replace(old, target)
        shutil.rmtree(old, ignore_errors=True)


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
