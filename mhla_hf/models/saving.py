"""Saving a model with its source, so that it loads where mhla_hf is not installed.

A model does not know how its one-file source is made: the installed package hands over who makes it; inside such a file
there is nobody, and the file copies itself.
"""

import functools
import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from ..ops.namespace import NAMESPACE

SOURCE_FILE = "modeling_mhla.py"
_SOURCE_MAKER = []


def set_source_maker(maker) -> None:
    """Install `maker(entry)`, which gives the name and the text of the single source file of an entry module.

    Each is made once in a process: what it runs, whatever becomes of the files on disk.
    """
    _SOURCE_MAKER[:] = [functools.cache(maker)]


def source_name(entry: str) -> str:
    """The name of the file that defines a model of diffusers, which takes it for the name of a module."""
    return _SOURCE_MAKER[0](entry)[0] if NAMESPACE == "package" else Path(__file__).name


def write_source(entry: str, folder: str | os.PathLike, name: str = SOURCE_FILE) -> None:
    """Write the one file that defines a model into `folder` (made if missing), under `name`."""
    own = Path(__file__).read_text(encoding="utf-8") if NAMESPACE != "package" else _SOURCE_MAKER[0](entry)[1]
    target = Path(folder, name)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_suffix(f".tmp-{os.getpid()}")
    aside.write_text(own, encoding="utf-8", newline="\n")
    os.replace(aside, target)


def check_whole_files(folder: str | os.PathLike) -> None:
    """One sentence if a safetensors file in or below `folder` is cut short or no such file."""
    for file in sorted(Path(folder).rglob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except SafetensorError as error:
            raise ValueError(f"{file} is no whole safetensors file: {error}.") from None


def check_loaded_weights(model: torch.nn.Module) -> None:
    """One sentence if a loaded model's MHLA weights cannot be right (negative or non-finite mixing, non-finite others)."""
    for name, module in model.named_modules():
        for parameter in module.initial_values() if hasattr(module, "initial_values") else ():
            value = module.get_parameter(parameter)
            plain = isinstance(value, torch.nn.Parameter) and type(value.data) is torch.Tensor  # not quantized
            if plain and value.is_floating_point() and not value.is_meta and not torch.isfinite(value).all():
                what = "expected finite ones; the checkpoint is damaged"
                raise ValueError(f"{name}.{parameter}: got NaN or infinite values, {what}.")
        if hasattr(module, "check_values"):
            module.check_values(name)
