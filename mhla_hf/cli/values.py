"""Parse and check the arguments of commands before the slow imports, and define options of several commands."""

import argparse
import contextlib
import errno
import importlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from ..checkpoints.file_io import HUB_ID, PIPELINE_INDEX, resolve_model_name

DATA_ENDINGS = (".txt", ".text", ".md", ".rst", ".json", ".jsonl", ".csv", ".parquet", ".arrow")
KEEP = re.compile(r"auto|\d+/0*[1-9]\d*|(\d+\.?\d*|\.\d+)(%|[KMG]iB)?")
# Options that several commands share, as keyword arguments of `add_argument`.
DTYPE: dict[str, Any] = {"choices": ("auto", "float32", "bfloat16", "float16"), "default": "auto", "metavar": "DTYPE"}
DTYPE["help"] = "auto (default), float32, bfloat16 or float16"
JSON: dict[str, Any] = {"action": "store_true", "dest": "as_json", "help": "print the full record as JSON"}

AddArgument = Callable[..., Any]  # `ArgumentParser.add_argument` of a sub-command


def parse_seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"got {text}, expected a whole number from 0 to {2**32 - 1}")
    return int(text)


def parse_count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected a whole number of at least 1")
    return int(text)


def parse_layers(text: str | None) -> str | list[int] | None:
    if text in (None, "all", "2/3"):
        return text
    items = [item.strip() for item in (text or "").split(",")]
    if not all(item.isdecimal() for item in items):
        raise ValueError(f'layers: got {text!r}, expected "all", "2/3" or indices such as 1,2,4.')
    return [int(item) for item in items]


def parse_keep(text: str) -> Any:
    """Parse how many KV heads keep softmax: a number or a fraction such as "1/6"; "17%", "64MiB" and "auto" stay text."""
    if not KEEP.fullmatch(text):
        raise ValueError(f"keep: got {text!r}, expected a number, a share (1/6 or 17%), a size (64MiB), or auto.")
    numerator, slash, denominator = text.partition("/")
    return int(numerator) / int(denominator) if slash else parse_value(text)


def parse_settings(pairs: Iterable[str]) -> dict[str, Any]:
    """Parse strings NAME=VALUE into a dict; values with commas become lists."""
    settings = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise ValueError(f"set: got {pair!r}, expected NAME=VALUE, such as block_size=32.")
        items = [parse_value(item.strip()) for item in value.split(",")]
        settings[name.strip()] = items[0] if len(items) == 1 else [item for item in items if item != ""]
    return settings


def parse_value(text: str) -> Any:
    """Parse a number, true, false or none; return other text. (YAML would read "no", a mixed_precision, as false.)"""
    constants = {"true": True, "false": False, "none": None}
    if text.lower() in constants:
        return constants[text.lower()]
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return number(text)
    return text


def load_libraries() -> None:
    """Import torch and transformers, and register the model types. This takes seconds, so arguments are checked first."""
    importlib.import_module("mhla_hf._register").register()


@contextlib.contextmanager
def resumable(find_saved: Callable[[], Path | None]) -> Iterator[None]:
    """On Ctrl-C, name the file or folder from which the same command resumes, if there is one."""
    try:
        yield
    except KeyboardInterrupt as stop:
        if str(stop) or (saved := find_saved()) is None:
            raise
        raise KeyboardInterrupt(f"interrupted; the same command resumes from {saved}") from stop


def check_model(name: str, revision: str | None = None, weights: bool = True) -> None:
    """Raise ValueError unless `name` is a local model or one on the Hub. Without `weights`, any folder passes."""
    if os.path.isdir(name) and not weights:
        return
    if isinstance(resolve_model_name(name, pipeline=(Path(name) / PIPELINE_INDEX).is_file()), Path):
        return
    from huggingface_hub import hf_hub_download

    for file in ("config.json", PIPELINE_INDEX):
        try:
            hf_hub_download(name, file, revision=revision)
            return
        except Exception as error:  # the Hub's client raises many types of errors
            lines = [line for line in map(str.strip, str(error).splitlines()) if line and "Client Error" not in line]
            reason = (lines[0] if lines else type(error).__name__).removesuffix(".")
    raise ValueError(f"model: got {name!r}, which is not a folder, expected a model on the Hub ({reason}).")


def check_folder(folder: str, content: str) -> None:
    if not os.path.isdir(folder):
        raise ValueError(f"folder: got {folder!r}, which is not a folder, expected the folder of {content}.")


def check_data(data: str | None) -> None:
    """Raise FileNotFoundError for a missing file, unless the name may be a Hub id."""
    if data is None or os.path.exists(os.path.expanduser(data)):
        return
    is_id = HUB_ID.fullmatch(data.partition(":")[0]) and not data.startswith(".")
    if not is_id or Path(data).suffix in DATA_ENDINGS:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), data)
