"""SHA256SUMS: a pushed model says what its files are, in the format of `sha256sum --check`.

The Hub client compares sizes, not contents, and a folder can be changed by anybody.
"""

import hashlib
import json
import re
from pathlib import Path

SUMS_FILE = "SHA256SUMS"
ORIGIN = "_name_or_path"  # where diffusers notes the folder or Hub id that a configuration was read from
NOTED = ("config.json", "model_index.json")  # where it does
_LINE = re.compile(r"([0-9a-f]{64})  ([^\\\n]+)")


def hash_of(content, digits: int = 16) -> str:
    """First hex digits of the sha256 of something that JSON can say."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:digits]


def render_sums(digests: dict[str, str]) -> str:
    """The text of SHA256SUMS. digests: path below the folder -> sha256, 64 hex digits."""
    return "".join(f"{digest}  {path}\n" for path, digest in sorted(digests.items()))


def read_sums(text: str, where) -> dict[str, str]:
    """What `render_sums` was given; ValueError, naming `where`, for anything else."""
    found = {}
    for line in re.findall(r"[^\n]+", text):  # a name may hold what Python also calls the end of a line
        match = _LINE.fullmatch(line)
        if match is None or match[2].startswith("/") or ".." in match[2].split("/"):
            raise ValueError(f"{where}: expected lines of a sha256 and a path below the folder, got {line[:80]!r}")
        found[match[2]] = match[1]
    return found


def without_origin(data: bytes) -> bytes:
    """A configuration's bytes without diffusers' note of where it was loaded from, if there is one.

    A push takes it out and a fingerprint leaves it out, so a pushed model still is the one that was evaluated.
    """
    try:
        content = json.loads(data)
    except ValueError:
        return data
    if not isinstance(content, dict) or "_class_name" not in content or ORIGIN not in content:
        return data
    del content[ORIGIN]
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


def hash_file(path, digest=None) -> str:
    """sha256 of a file's bytes, 64 hex digits; digest: one that goes on by them."""
    digest = digest or hashlib.sha256()
    with Path(path).open("rb") as stream:
        while chunk := stream.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def check_sums(folder) -> None:
    """ValueError for a file with other bytes than the folder's SHA256SUMS says; not all of them need be there."""
    place = Path(folder, SUMS_FILE)
    for path, digest in read_sums(place.read_text(encoding="utf-8"), place).items() if place.is_file() else ():
        file = Path(folder, path)
        if file.is_file() and hash_file(file) != digest:
            raise ValueError(f"{file} was changed after the model was pushed: it is not what {SUMS_FILE} names")
