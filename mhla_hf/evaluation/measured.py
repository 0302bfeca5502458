"""Which scores this machine measured: a results file comes along with a downloaded model, and anybody can edit it.

A digest of each record that is made here is noted in Hugging Face's cache, `$HF_HOME/assets/mhla_hf/scores`, one a line.
"""

import dataclasses
import logging
from pathlib import Path

from huggingface_hub import constants

from .results import Results
from .samples import hash_of

logger = logging.getLogger("mhla_hf")


def _notes():
    return Path(constants.HF_ASSETS_CACHE) / "mhla_hf" / "scores"


def _digest(record):
    return hash_of(dataclasses.asdict(record))


def note_measured(records):
    """Note that `records` were measured here; a cache that cannot be written to is warned of."""
    try:
        _notes().parent.mkdir(parents=True, exist_ok=True)
        with _notes().open("a", encoding="utf-8") as notes:
            notes.write("".join(f"{_digest(record)}\n" for record in records))
    except OSError as error:
        logger.warning("%s cannot be written (%s): these scores will be run again", _notes(), error.strerror)


def measured_here(records):
    """`Results` with those of `records` that this machine measured, as they were measured."""
    try:
        noted = set(_notes().read_text(encoding="utf-8").split())
    except OSError:
        noted = set()
    return Results(record for record in records if _digest(record) in noted)
