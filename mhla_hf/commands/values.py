"""Values from the command line (ValueError or argparse's own error, one sentence, for bad ones), and what commands share."""

import argparse
import json


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


def device_option(add):
    add("--device", help="as torch names it (default: cuda if there is one, else cpu)")


def json_option(add):
    add("--json", action="store_true", dest="as_json", help="print the full record as JSON")


def show(record, as_json, render):
    """Print a record, as JSON or as the text that `render` makes of it."""
    print(json.dumps(record, indent=2) if as_json else render(record))
