"""Saves a model with its source, so that it loads where mhla_hf is not installed, and checks weights when loading.

The installed package registers the function that makes the source; a model that was loaded from a source file saves a copy
of that file.
"""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..ops.namespace import NAMESPACE

SOURCE_FILE = "modeling_mhla.py"
_SOURCE_MAKER: list[Callable[[str], tuple[str, str]]] = []


def set_source_maker(maker: Callable[[str], tuple[str, str]]) -> None:
    """Register the function that returns a source file's name and text for an entry, "module" or "module:function"."""
    _SOURCE_MAKER[:] = [functools.cache(maker)]


def source_name(entry: str) -> str:
    """Return the name of the source file of a diffusers model; without ".py", it is the name of the model's module."""
    return _SOURCE_MAKER[0](entry)[0] if NAMESPACE == "package" else Path(__file__).name


def write_source(entry: str, folder: str | os.PathLike[str], name: str = SOURCE_FILE) -> None:
    """Write the source file of an entry to a folder; an existing file is replaced atomically."""
    source = Path(__file__).read_text(encoding="utf-8") if NAMESPACE != "package" else _SOURCE_MAKER[0](entry)[1]
    target = Path(folder, name)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_suffix(f".tmp-{os.getpid()}")
    temporary.write_text(source, encoding="utf-8", newline="\n")
    os.replace(temporary, target)


def check_whole_files(folder: str | os.PathLike[str]) -> None:
    for file in sorted(Path(folder).rglob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except SafetensorError as error:
            raise ValueError(f"{file}: got a damaged file, expected a complete safetensors file ({error}).") from None


def check_loaded_weights(model: Any) -> None:
    """Raise ValueError if an MHLA weight is not finite (quantized and meta weights are skipped), or fails `check_values`."""
    for name, module in model.named_modules():
        for parameter in module.initial_values() if hasattr(module, "initial_values") else ():
            value = module.get_parameter(parameter)
            # Quantized values have a type of their own.
            is_plain = isinstance(value, torch.nn.Parameter) and type(value.data) is Tensor
            if is_plain and value.is_floating_point() and not value.is_meta and not torch.isfinite(value).all():
                raise ValueError(f"{name}.{parameter}: got NaN or infinity, expected finite values in a checkpoint.")
        if hasattr(module, "check_values"):
            module.check_values(name)
