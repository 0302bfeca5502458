"""What no file of a shared model may hold: secrets, and places on the computer of the one who shares it.

Unusual: vocabularies are searched for secrets only, because tokens such as "/home" are ordinary words there; and what was
found is never repeated in full.
"""

import os
import re
import tempfile
from pathlib import Path

from huggingface_hub import get_token

PLACES = ("model", "student", "teacher", "name", "data", "source", "path")  # keys in records whose value may be a path
VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json", "spiece.model")
_KEYS = "api_?key|secret_?key|access_?key|access_?token|auth_?token|client_?secret"
_GIVEN = r"""(?i:(?<!\w)(?:\w*_)?(?:%s))["']?\s*[:=]\s*["']?"""  # such as HF_API_KEY=, "apikey": or db_password =
_SIGNS = r"[\w!#$%&*+=?@^~-]"
SECRETS = {
    "a Hugging Face token": r"\b(?:hf|api_org)_[A-Za-z0-9]{30,}",
    "an AWS key": r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|(?i:aws_secret_access_key)\W{1,4}[A-Za-z0-9/+]{40}",
    "a private key": r"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----",
    "a GitHub token": r"\bgh[pousr]_[A-Za-z0-9]{36}|\bgithub_pat_[A-Za-z0-9_]{40,}",
    "a GitLab token": r"\bglpat-[A-Za-z0-9_-]{20}",
    "an API key": r"\bsk-(?:[a-z]+-)*[A-Za-z0-9_-]{32,}|\bAIza[A-Za-z0-9_-]{35}|(?i:wandb_api_key)\W{1,4}[0-9a-f]{40}",
    "a Slack token": r"\bxox[abprs]-[A-Za-z0-9-]{20,}",
    "a token of a package index": r"\bpypi-[A-Za-z0-9_-]{40,}|\bnpm_[A-Za-z0-9]{36}",
    "a web token": r"\beyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}",
    "a key or token": _GIVEN % _KEYS + r"(?=[\w+/=-]*[0-9])[\w+/=-]{16,}",
    "a password": _GIVEN % "passw(?:or)?d" + rf"(?={_SIGNS}*[0-9])(?={_SIGNS}*[A-Za-z]){_SIGNS}{{6,}}",
    "a password in a URL": r"\b[a-z][a-z0-9+]*://[^\s/:@\"']+:[^\s/@\"']+@[\w.-]+",
}
_SECRETS = {what: re.compile(pattern) for what, pattern in SECRETS.items()}
_TAIL = r"[^\s\"'`,;)\]}>]*"
_ROOTS = (
    "home|homes|Users|root|tmp|mnt|media|scratch|private|workspace|work|opt|srv|data|var/folders|var/tmp|Volumes|content|kaggle"
    "|lustre|nfs|fsx|gpfs|beegfs|ceph|cluster|storage|projects?|share|shared|export|net|network|localscratch|dbfs|efs|nas|raid"
)
_BEFORE = r"(?<![\w.~:/\\<-])(?:file://)?"
_PATH = re.compile(
    _BEFORE + rf"/(?:{_ROOTS})/[\w.@+-]" + _TAIL
    + r"|(?<![\w/])~/[\w.@+-]" + _TAIL
    + r"|(?<!\w)[A-Za-z]:\\{1,2}(?:Users|Temp|Documents|Program Files)" + _TAIL
)  # fmt: skip
_ABSOLUTE = re.compile(_BEFORE + r"/[\w.@+-]+/[\w.@+-]" + _TAIL)  # whatever its root
_QUOTED = re.compile(
    r"""(['"])((?:[^'"\n/]*[=\s,(])?)((?:file://)?(?:~|[A-Za-z]:)?[/\\][\w.@+-][^'"\n]*)\1"""
)  # spaces may be in it


def check_leaks(path: str, data: bytes, here: tuple[str, ...] = ()) -> None:
    """Refuse the content of a file that holds a secret or a local path.

    Args:
        path: of the file in the repository, for the message. data: its bytes.
        here: folders of this computer that must not appear; `local_places()` gives the usual ones.

    Raises:
        ValueError: names the file, the line and the kind of secret or the path.
    """
    text = data.decode("utf-8", errors="replace")
    if secret := _find_secret(text):
        what, position = secret
        raise ValueError(f"{path}:{_line(text, position)} holds {what}: take it out")
    if Path(path).name in VOCABULARIES:
        return
    found = next((match for pattern in _patterns(here) if (match := pattern.search(text))), None)
    if found is not None:
        raise ValueError(
            f"{path}:{_line(text, found.start())} names the local path {found[0]!r}: write a relative path or a Hub id"
        )


def check_name(name: str) -> None:
    """Refuse the name of a file or folder that is itself a secret; ValueError, which does not repeat it."""
    if secret := _find_secret(name):
        raise ValueError(f"the name of a file or folder ({name[:4]}...) holds {secret[0]}: rename it")


def _find_secret(text: str) -> tuple[str, int] | None:
    """(what was found, without most of it; where) for the first secret in a text."""
    token = get_token()
    if token and token in text:
        return "your own Hugging Face token", text.index(token)
    for what, pattern in _SECRETS.items():
        if found := pattern.search(text):
            return f"what looks like {what} ({found[0][:6]}...)", found.start()
    return None


def cut_places(text: str, here: tuple[str, ...] = ()) -> str:
    """`text` with the last part in place of every absolute path: "data/x.txt" stays, "/home/anna/x.txt" becomes "x.txt"."""
    text = _QUOTED.sub(lambda found: f"{found[1]}{found[2]}{_last(found[3])}{found[1]}", text)
    for pattern in (*_patterns(here), _ABSOLUTE):
        text = pattern.sub(lambda found: _last(found[0]), text)
    return text


def cut_record(content, here: tuple[str, ...] = (), key: str = ""):
    """A JSON value with `cut_places` in every text; a text that is one path, which may hold spaces, is cut as a whole."""
    if isinstance(content, dict):
        return {name: cut_record(value, here, name) for name, value in content.items()}
    if isinstance(content, list):
        return [cut_record(value, here, key) for value in content]
    if not isinstance(content, str):
        return content
    return _last(content) if key in PLACES and is_absolute(content) else cut_places(content, here)


def is_absolute(text: str) -> bool:
    """Whether a text is a place on some computer: /a/b, ~/a, C:\\a, file:///a."""
    return bool(re.match(r"file://|~?/|[A-Za-z]:[/\\]", text))


def _last(path: str) -> str:
    return re.split(r"[/\\]+", path.rstrip("/\\"))[-1]


def _patterns(here: tuple[str, ...]) -> list[re.Pattern]:
    """What finds a local path: the folders of this computer, and those that computers usually have."""
    places = sorted(here, key=len, reverse=True)
    return [re.compile(rf"(?<![\w./-]){re.escape(place)}(?![\w.-]){_TAIL}") for place in places] + [_PATH]


def local_places(folder) -> tuple[str, ...]:
    """Folders whose names say where `folder` was made: it, the working and the home folder, that of temporary files."""
    near = [Path(folder).absolute(), Path(folder).resolve(), Path.cwd(), Path.home(), Path(tempfile.gettempdir())]
    return tuple(sorted({str(path) for path in near if str(path) != path.anchor and len(str(path)) > len(os.sep) + 2}))


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1
