"""What no file of a shared model may hold: secrets, and places on the computer of the one who shares it.

Unusual: vocabularies are searched for secrets only, because tokens such as "/home" are ordinary words there; and what was
found is never repeated in full.
"""

import os
import re
import tempfile
from pathlib import Path

from huggingface_hub import get_token

VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json", "spiece.model")
SECRETS = {
    "a Hugging Face token": r"\bhf_[A-Za-z0-9]{30,}",
    "an AWS key": r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|(?i:aws_secret_access_key)\W{1,4}[A-Za-z0-9/+]{40}",
    "a private key": r"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----",
    "a GitHub token": r"\bgh[pousr]_[A-Za-z0-9]{36}|\bgithub_pat_[A-Za-z0-9_]{40,}",
    "a GitLab token": r"\bglpat-[A-Za-z0-9_-]{20}",
    "an API key": r"\bsk-(?:[a-z]+-)*[A-Za-z0-9_-]{32,}|\bAIza[A-Za-z0-9_-]{35}|(?i:wandb_api_key)\W{1,4}[0-9a-f]{40}",
    "a Slack token": r"\bxox[abprs]-[A-Za-z0-9-]{20,}",
    "a password in a URL": r"\b[a-z][a-z0-9+]*://[^\s/:@\"']+:[^\s/@\"']+@[\w.-]+",
}
_SECRETS = {what: re.compile(pattern) for what, pattern in SECRETS.items()}
_TAIL = r"[^\s\"'`,;)\]}>]*"
_PATH = re.compile(
    r"(?<![\w.~:/\\-])(?:file://)?/"
    r"(?:home|Users|root|tmp|mnt|media|scratch|private|workspace|work|opt|srv|data|var/folders|var/tmp)/[\w.@+-]" + _TAIL
    + r"|(?<![\w/])~/[\w.@+-]" + _TAIL
    + r"|(?<!\w)[A-Za-z]:\\{1,2}(?:Users|Temp|Documents|Program Files)" + _TAIL
)  # fmt: skip


def check_leaks(path: str, data: bytes, here: tuple[str, ...] = ()) -> None:
    """Refuse the content of a file that holds a secret or a local path.

    Args:
        path: of the file in the repository, for the message. data: its bytes.
        here: folders of this computer that must not appear; `local_places()` gives the usual ones.

    Raises:
        ValueError: names the file, the line and the kind of secret or the path.
    """
    text = data.decode("utf-8", errors="replace")
    token = get_token()
    if token and token in text:
        raise ValueError(f"{path}:{_line(text, text.index(token))} holds your own Hugging Face token: take it out")
    for what, pattern in _SECRETS.items():
        if found := pattern.search(text):
            start = f"{found[0][:6]}..."
            raise ValueError(f"{path}:{_line(text, found.start())} holds what looks like {what} ({start}): take it out")
    if Path(path).name in VOCABULARIES:
        return
    found = next((match for pattern in _patterns(here) if (match := pattern.search(text))), None)
    if found is not None:
        raise ValueError(
            f"{path}:{_line(text, found.start())} names the local path {found[0]!r}: write a relative path or a Hub id"
        )


def cut_places(text: str, here: tuple[str, ...] = ()) -> str:
    """`text` with the last part in place of every local path: "data/x.txt" stays, "/home/anna/x.txt" becomes "x.txt"."""
    for pattern in _patterns(here):
        text = pattern.sub(lambda found: re.split(r"[/\\]+", found[0].rstrip("/\\"))[-1], text)
    return text


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
