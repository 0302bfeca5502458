"""Language models from a folder or the Hub, so that a damaged one is noticed; and into a folder, whole or not at all.

transformers fills weights that a checkpoint lacks with random ones and only warns; a score or a conversion of such a model
would be about nothing. Unusual: whatever goes wrong while loading becomes one sentence that names the model.
"""

import contextlib
import json
import os
import re
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from ..files import folder_aside

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LOADING_ERRORS = (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError, ImportError, SafetensorError)
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def check_model_name(name):
    """A `Path` for a local model, or the same str for a Hub id. ValueError: neither, or a folder without a model."""
    name = str(name)
    path = Path(name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"model {name!r} has no config.json; expected the folder of a saved model")
        if not any(path.glob("*.safetensors")):
            raise ValueError(f"model {name!r} has no .safetensors file; expected the folder of a saved model")
        return path
    if path.exists():
        raise ValueError(f"model {name!r} is a file; expected the folder of a saved model")
    if not HUB_ID.fullmatch(name) or name.startswith("."):
        raise ValueError(f"model {name!r} is no folder here; expected the folder of a saved model or a Hub id")
    return name


def load_language_model(name, *, dtype="auto", device=None, revision=None, trust_remote_code=False):
    """(model in eval mode, tokenizer) of a causal language model.

    name: folder or Hub id. dtype: "auto" (the checkpoint's), "float32", "bfloat16" or "float16". device: as torch names
    it; None: CUDA when there is one, else CPU. trust_remote_code: needed only for source that this package does not know.
    ValueError, in one sentence: nothing there, files damaged, weights missing, no tokenizer, an unknown architecture.
    """
    source = check_model_name(name)
    if dtype != "auto" and dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; expected auto, {', '.join(DTYPES)}")
    options = {"revision": revision, "trust_remote_code": trust_remote_code}
    wanted = DTYPES.get(dtype, "auto")
    local = isinstance(source, Path)
    try:
        with without_bars() if local else contextlib.nullcontext():
            tokenizer = AutoTokenizer.from_pretrained(str(source), **options)
            loaded = AutoModelForCausalLM.from_pretrained(
                str(source), dtype=wanted, output_loading_info=True, **options
            )
            model = loaded[0].to(choose_device(device)).eval()
    except LOADING_ERRORS as error:
        where = "" if local else " (no folder here has that name, so the Hub was asked)"
        raise ValueError(f"model {str(name)!r} cannot be loaded{where}: {first_line(error)}") from error
    if missing := sorted(loaded[1]["missing_keys"]):
        raise ValueError(f"model {str(name)!r} lacks {len(missing)} of its weights, such as {missing[0]!r}")
    return model, tokenizer


@contextlib.contextmanager
def without_bars():
    """transformers shows no progress bars meanwhile; for files that are here, they end before they are seen."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def check_new_folder(folder, overwrite=False):
    """`folder` as a Path when a model can be saved there. ValueError: something is there, or nothing can be written."""
    path = Path(folder).expanduser()
    if path.exists() and not path.is_dir():
        raise ValueError(f"output {str(folder)!r} is a file; expected a folder to make")
    if path.exists() and any(path.iterdir()) and not overwrite:
        raise ValueError(f"output {str(folder)!r} is not empty; give another folder, or say that it may be overwritten")
    above = path.resolve().parent
    while not above.exists():
        above = above.parent
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise ValueError(f"output {str(folder)!r} cannot be made: {str(above)!r} is not a folder one can write to")
    return path


def save_language_model(model, tokenizer, folder, overwrite=False):
    """Save both aside and rename; what was in `folder` goes only then. Errors as `check_new_folder`; OSError: disk full."""
    path = check_new_folder(folder, overwrite).resolve()
    with folder_aside(path, replace=True) as aside, without_bars():
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
    return path


def choose_device(device=None):
    """A torch device: `device`, or CUDA when there is one, else CPU. ValueError when torch does not have it."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
        return torch.device(device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {device!r} is not available here: {first_line(error)}") from error


def stored_dtype(folder):
    """The dtype that "auto" gives for a local model, e.g. "float32": the configuration's, else the first weight's."""
    folder = Path(folder)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'} is not JSON: {first_line(error)}") from error
    named = config.get("dtype") or config.get("torch_dtype")
    if named:
        return str(named).removeprefix("torch.")
    file = sorted(folder.glob("*.safetensors"))[0]
    try:
        with safe_open(file, framework="pt") as weights:
            return str(weights.get_tensor(next(iter(weights.keys()))).dtype).removeprefix("torch.")
    except SafetensorError as error:
        raise ValueError(f"{file} cannot be read: {first_line(error)}") from error


def first_line(error):
    """The first line of an error's text, or its class where it has none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
