"""What a saved model is in the hands of somebody who never installed mhla_hf: loaded by `visitor.py`, elsewhere.

The process has an empty Hugging Face home, no network and no token: what needs more than its folder does not load.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from .files import temporary_folder
from .load import missing_in_transformers

WITHHELD = ("PYTHONSAFEPATH", "HF_MODULES_CACHE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
ERROR = re.compile(r"[\w.]+(Error|Exception|Exit|Interrupt)\b")


def visit(folder, kind, *, given=None, prompt=None, new_tokens=0, dtype="auto") -> dict:
    """Load `folder` in a process where mhla_hf and triton cannot be imported, and say what it was like there.

    Args:
        folder: a saved model. kind: as `share/facts.py` names it.
        given: a safetensors file with `ids` [B, T] and the `logits` [B, T, vocabulary] they must give.
        prompt, new_tokens: text that a language model continues greedily. dtype: as torch names it, or "auto".

    Returns class, missing, unexpected (weights), imported (of what must be absent), and for language models finite, and as
    asked for logits_equal, largest_difference, continuation. ValueError, with the reason: the model does not load there.
    """
    source = Path(__file__).with_name("visitor.py").read_text(encoding="utf-8")
    asked = {"folder": os.path.abspath(folder), "kind": kind, "given": given and os.path.abspath(given)}
    asked |= {"prompt": prompt, "new_tokens": new_tokens, "dtype": dtype, "threads": torch.get_num_threads()}
    kept = {key: value for key, value in os.environ.items() if key not in WITHHELD}
    with temporary_folder(tempfile.gettempdir(), "mhla_hf-visit-") as place:
        done = subprocess.run(
            [sys.executable, "-c", source, json.dumps(asked)],
            cwd=place,
            env={**kept, "HF_HOME": str(place), "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
        )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        errors = [line for line in lines if ERROR.match(line)]
        raise ValueError(f"{folder}: the model does not load in a process without mhla_hf ({(errors or lines)[-1]})")
    return json.loads(done.stdout.splitlines()[-1])


def check_visit(folder, kind, dtype="auto") -> str:
    """The class under which `folder` loads there; ValueError when it does not load whole, as itself and finite."""
    if kind == "pipeline" and (missing := missing_in_transformers(Path(folder), {})):
        raise ValueError(f"{folder}: the model lacks the weight {missing[0]!r}")
    seen = visit(folder, kind, dtype=dtype)
    where = f"{folder}: in a process without mhla_hf"
    for wrong, odd in (("missing", "lacks"), ("unexpected", "has no place for")):
        if seen[wrong]:
            raise ValueError(f"{where} the model {odd} the weight {seen[wrong][0]!r}")
    if seen["imported"]:
        raise ValueError(f"{where} the model imports {seen['imported'][0]}, which a user may not have")
    if not seen["class"].startswith(("transformers_modules.", "diffusers_modules.")):
        raise ValueError(f"{where} the model is {seen['class']}, not the class in its own source file")
    if not seen.get("finite", True):
        raise ValueError(f"{where} the model's output is not finite")
    return seen["class"]
