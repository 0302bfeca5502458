"""Values from the command line (ValueError or argparse's own error, one sentence, for bad ones), and what commands share."""

import argparse
import errno
import importlib
import json
import os
from pathlib import Path

from ..checkpoints.files import HUB_ID, PIPELINE_INDEX, resolve_model_name

DATA_ENDINGS = (".txt", ".text", ".md", ".rst", ".json", ".jsonl", ".csv", ".parquet", ".arrow")
DTYPES = ("auto", "float32", "bfloat16", "float16")


def seed_number(text):
    """A seed that every generator takes."""
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"got {text}, expected a whole number from 0 to {2**32 - 1}")
    return int(text)


def count(text):
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected a whole number of at least 1")
    return int(text)


def parse_layers(text):
    """ "all", "2/3", a list of indices, or None. ValueError for anything else."""
    if text in (None, "all", "2/3"):
        return text
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f'layers is {text!r}; expected "all", "2/3" or indices such as 1,2,4')
    return [int(part) for part in parts]


def parse_keep(text):
    """ "1/6" or "0.25" as a share, "15" as a number of heads; any other text as it is."""
    above, slash, below = text.partition("/")
    if slash and above.isdecimal() and below.isdecimal() and int(below):
        return int(above) / int(below)
    return parse_value(text)


def parse_settings(pairs):
    """`NAME=VALUE` texts as a dict; numbers, true, false and lists with commas are read as such. ValueError without =."""
    settings = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise ValueError(f"set is {pair!r}; expected NAME=VALUE, such as block_size=32")
        parts = [parse_value(part.strip()) for part in value.split(",")]
        settings[name.strip()] = parts[0] if len(parts) == 1 else [part for part in parts if part != ""]
    return settings


def parse_value(text):
    """A number, true, false or none where the text says one; else the text."""
    words = {"true": True, "false": False, "none": None}
    for read in (int, float, lambda word: words[word.lower()]):
        try:
            return read(text)
        except (ValueError, KeyError):
            continue
    return text


def parse_pairs(name, pairs):
    """`LABEL=DIR` texts as a dict; `name` is the flag's."""
    found = dict(pair.partition("=")[::2] for pair in pairs)
    if odd := [label for label, place in found.items() if not (label and place)]:
        raise ValueError(f"{name} is {odd[0]!r}; expected LABEL=DIR, such as teacher=out/teacher")
    return found


def start():
    """Import what every command works with and register the model types: seconds, before which arguments are checked."""
    importlib.import_module("mhla_hf")._start()


def check_model(name, revision=None, weights=True):
    """ValueError, one sentence: `name` is neither the folder of a saved model or pipeline nor what the Hub or its cache has.

    weights: False: a folder may hold its configuration alone.
    """
    if os.path.isdir(name) and not weights:
        return
    if isinstance(resolve_model_name(name, pipeline=(Path(name) / PIPELINE_INDEX).is_file()), Path):
        return
    from huggingface_hub import hf_hub_download

    for file in ("config.json", PIPELINE_INDEX):
        try:
            hf_hub_download(name, file, revision=revision)
            return
        except Exception as error:  # of whatever kind, by which the Hub says no
            lines = [line for line in map(str.strip, str(error).splitlines()) if line and "Client Error" not in line]
            said = lines[0] if lines else type(error).__name__
    raise ValueError(f"model {name!r} cannot be loaded: it is no folder here, and the Hub does not give it ({said})")


def check_folder(folder, wanted):
    """ValueError, one sentence: there is no such folder. wanted: what is expected to be in it."""
    if not os.path.isdir(folder):
        raise ValueError(f"folder {folder!r} is not here; expected the folder of {wanted}")


def check_file(path):
    """FileNotFoundError: a file or folder that was given is not there."""
    if path is not None and not os.path.exists(os.path.expanduser(path)):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def check_data(data):
    """FileNotFoundError: text to train on is not there, and its name is a file's, not that of a dataset on the Hub."""
    if data is None:
        return
    is_id = HUB_ID.fullmatch(data.partition(":")[0]) and not data.startswith(".")
    if not is_id or Path(data).suffix in DATA_ENDINGS:
        check_file(data)


def dtype_option(add):
    add("--dtype", default="auto", choices=DTYPES, metavar="DTYPE", help="auto (default), float32, bfloat16 or float16")


def device_option(add):
    add("--device", help="as torch names it (default: cuda if there is one, else cpu)")


def json_option(add):
    add("--json", action="store_true", dest="as_json", help="print the full record as JSON")


def show(record, as_json, render):
    """Print a record, as JSON or as the text that `render` makes of it."""
    print(json.dumps(record, indent=2) if as_json else render(record))
