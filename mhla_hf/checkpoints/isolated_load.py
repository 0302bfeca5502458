"""Load a saved model in a process without mhla_hf and Triton, with an empty Hugging Face cache, no network and no token."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from ..models.families import auto_class_of
from .file_io import PathLike, read_json, temporary_folder
from .load import missing_transformers_weights

WITHHELD_VARIABLES = ("PYTHONSAFEPATH", "HF_MODULES_CACHE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
ERROR_LINE = re.compile(r"[\w.]+(Error|Exception|Exit|Interrupt)\b")


def load_isolated(
    folder: PathLike, kind: str, *, inputs: PathLike | None = None, dtype: str = "auto"
) -> dict[str, Any]:
    """Load a saved model without mhla_hf; return its "class", "missing" and "unexpected" weights, and what it "imported".

    `kind` is one of `hub.facts.KINDS`. A language model also runs; the report says whether its logits are "finite", and
    equal ("logits_equal") to `logits` in `inputs`, a safetensors file with `ids` [B, T]. Raise ValueError if loading fails.
    """
    source = Path(__file__).with_name("isolated_script.py").read_text(encoding="utf-8")
    class_names = (read_json(Path(folder, "config.json")) or {}).get("architectures") or [""]
    request = {
        "folder": os.path.abspath(folder),
        "kind": kind,
        "auto_class": auto_class_of(class_names[0]),
        "inputs": inputs and os.path.abspath(inputs),
        "dtype": dtype,
        "threads": torch.get_num_threads(),
    }
    environment = {key: value for key, value in os.environ.items() if key not in WITHHELD_VARIABLES}
    with temporary_folder(tempfile.gettempdir(), "mhla_hf-visit-") as home:
        process = subprocess.run(
            [sys.executable, "-c", source, json.dumps(request)],
            cwd=home,
            env={**environment, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
        )
    if process.returncode:
        lines = process.stderr.strip().splitlines() or ["no message"]
        reason = ([line for line in lines if ERROR_LINE.match(line)] or lines)[-1]
        start = f"{folder}: got a model that does not load without mhla_hf"
        raise ValueError(f"{start}, expected one that does ({reason}).")
    return json.loads(process.stdout.splitlines()[-1])


def check_isolated_load(folder: PathLike, kind: str, dtype: str = "auto") -> str:
    """Return a model's class; raise ValueError unless its own source loads all weights and gives finite logits, if any."""
    if kind == "pipeline" and (missing := missing_transformers_weights(Path(folder), {})):
        raise ValueError(f"{folder}: got a model that lacks the weight {missing[0]!r}, expected all weights.")
    report = load_isolated(folder, kind, dtype=dtype)
    start = f"{folder}: got, in a process without mhla_hf, a model that"
    if report["missing"]:
        raise ValueError(f"{start} lacks the weight {report['missing'][0]!r}, expected all weights.")
    if report["unexpected"]:
        raise ValueError(f"{start} does not load the weight {report['unexpected'][0]!r}, expected it to load all.")
    if report["imported"]:
        raise ValueError(f"{start} imports {report['imported'][0]}, expected only what its library requires.")
    if not report["class"].startswith(("transformers_modules.", "diffusers_modules.")):
        raise ValueError(f"{start} is of {report['class']}, expected the class in its own source file.")
    if not report.get("finite", True):
        raise ValueError(f"{start} returns NaN or infinity, expected finite logits.")
    return report["class"]
