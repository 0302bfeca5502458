"""What no file of a shared model may hold: secrets, and places on the computer of the one who shares it.

The forms of keys that services hand out are detect-secrets' own; beside them stand what it leaves out, and words that no
person makes up. What was found is never repeated, and nothing is looked up on the network; vocabularies, in which any word
may stand, are searched for the most telling forms only.
"""

import json
import re
from functools import cache
from pathlib import Path, PureWindowsPath

from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class
from huggingface_hub import get_token

from ..checkpoints.save import VOCABULARIES

PLACES = ("model", "student", "teacher", "name", "data", "source", "path")  # keys in records whose value may be a path
NOISY = ("HexHighEntropyString", "Base64HighEntropyString", "IPPublicDetector")  # commits, names of models, versions
_VALUE = r"(?=[\w+/=%-]*\d[\w+/=%-]*\d)[\w+/=%-]{16,}"
# What detect-secrets does not know: Hugging Face's tokens, more private keys, what follows a label or stands on a command
# line, passwords without a user in a URL, hexadecimal digits behind a prefix.
_SECRET = re.compile(
    r"\b(?:hf|api_org)_[A-Za-z0-9]{30,}|\b(?:github_pat_|xox[a-z]-|[rs]k_test_|eyJ)[\w.-]{20,}"
    r"|\b(?:HRKU-|NRAK-|GOCSPX-|figd_|glsa_|sk-(?:proj|ant|or)-|AIza|npm_|r8_|tskey-\w+-)[\w-]{16,}|\dQ~[\w~.-]{30,}"
    r"|-----BEGIN [A-Z0-9 ]*PRIVATE KEY|PuTTY-User-Key-File|AGE-SECRET-KEY-"
    rf"|(?i:key|token|auth|cookie|sig)[\"']?\s*[:=]\s*[\"']?{_VALUE}|(?i:\b(?:bearer|basic|login))\s+{_VALUE}"
    r"|(?i:\blogin\s+\S+\s+password\s+\S)|\s-(?:u\s*[\w.-]+:|p\s+)(?=\S*\d)\S{6}|://:[^\s/@]+@"
    r"|(?<=[g-zG-Z_.-])(?<!sha256-)[0-9a-f]{32,}"
)
# Below any root but the system's, which is the same everywhere; no URL, tag, template or link of the site.
_PATH = re.compile(
    r"(?:(?<![\w.~/\\<>)}\]-])(?<!\]\()(?:file://)?/(?!(?:usr|bin|sbin|lib|etc|dev(?!/shm)|proc|sys)/)[\w.@+-]+/[\w.@+-]"
    r"|(?<![\w/])~(?:[a-z][\w-]*)?/[\w.@+-]|(?<!\w)[A-Za-z]:[\\/]{1,2}[\w .@+-]+[\\/]"
    r"|(?<![\w\\])\\\\[\w.-]{2,}\\[\w.$-]{2,})[^\s\"'`,;)\]}>]*"
)
# The same in quotes, where spaces may be in it
_QUOTED = re.compile(r"""(['"])((?:[^'"\n/]*[=\s,(])?)((?:file://)?(?:~|[A-Za-z]:)?[/\\][\w.@+-][^'"\n]*)\1""")


@cache
def _detectors() -> tuple:
    """detect-secrets' expressions, none of which asks a service whether a key is valid."""
    known = get_mapping_from_secret_type_to_class().values()
    return tuple(plugin() for plugin in known if plugin.__name__ not in NOISY)


def check_leaks(path: str, data: bytes) -> None:
    """ValueError for the content of a text file, in the repository at `path`, that holds a secret or a local path.

    It names the file, the line or key, and the kind of secret or the path; of JSON, the texts in it are looked at.
    """
    text = data.decode("utf-8", errors="replace")
    if Path(path).name in VOCABULARIES:
        if _is_own(text) or _SECRET.search(text):
            raise ValueError(f"{path} holds what looks like a key, token or password: take it out")
        return
    if path.endswith(".json"):
        # names are texts too, and a name may stand twice
        content = json.loads(text, object_pairs_hook=lambda pairs: [[name, {name: value}] for name, value in pairs])
        lines = [(key, line, key.rpartition(".")[2]) for key, value in strings(content) for line in value.splitlines()]
    else:
        lines = [(number, line, "") for number, line in enumerate(text.split("\n"), 1)]
    for where, line, label in lines:
        if what := _find_secret(line, label):
            raise ValueError(f"{path}:{where} holds {what}: take it out")
        if found := _PATH.search(line):
            raise ValueError(f"{path}:{where} names the local path {found[0]!r}: write a relative path or a Hub id")


def _find_secret(line: str, label: str = "") -> str | None:
    """What the first secret in a line is; `label`: the key that it has in a JSON file."""
    if _is_own(line):
        return "your own Hugging Face token"
    text = f'{label} = "{line}"' if label else line
    for plugin in _detectors():
        found = plugin.analyze_line(filename="x.py", line=text, line_number=1)
        # as in a settings file, without quotes: there a word with letters and digits, else it is prose
        bare = plugin.analyze_line(filename="x.yaml", line=text, line_number=1) or ()
        if found or any(re.match(r"(?=\S*\d)(?=\S*[A-Za-z])\S{6}", secret.secret_value) for secret in bare):
            return f"what looks like a secret ({plugin.secret_type})"
    if _SECRET.search(text) or any(map(_is_random, re.findall(r"[A-Za-z0-9]{20,}", line))):
        return "what looks like a key, token or password"
    return None


def _is_own(text: str) -> bool:
    return bool(token := get_token()) and token in text


def _is_random(word: str) -> bool:
    """Whether small letters, capitals and digits change too often for a name; digests are hexadecimal and not meant."""
    runs = re.findall(r"[a-z]+|[A-Z]+|\d+", word)
    return len(runs) > 0.45 * len(word) and len(re.findall(r"\d", word)) > 1 and not re.fullmatch(r"[0-9a-f]+", word)


def strings(content, key: str = ""):
    """(dotted key, text) of every text in a JSON value."""
    if isinstance(content, str):
        yield key, content
    elif isinstance(content, dict):
        for name, value in content.items():
            yield from strings(value, f"{key}.{name}" if key else str(name))
    elif isinstance(content, list):
        for value in content:
            yield from strings(value, key)


def cut_record(content, key: str = ""):
    """A JSON value with the last part in place of every absolute path: "data/x.txt" stays, "/home/anna/x" becomes "x"."""
    if isinstance(content, dict):
        return {name: cut_record(value, name) for name, value in content.items()}
    if isinstance(content, list):
        return [cut_record(value, key) for value in content]
    if not isinstance(content, str):
        return content
    if key in PLACES and re.match(r"file://|~?/|[A-Za-z]:[/\\]", content):
        return _last(content)  # one path as a whole, in which spaces may be
    content = _QUOTED.sub(lambda found: f"{found[1]}{found[2]}{_last(found[3])}{found[1]}", content)
    return _PATH.sub(lambda found: _last(found[0]), content)


def _last(path: str) -> str:
    return PureWindowsPath(path).name
