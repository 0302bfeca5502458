"""Saving a model with its source, so that it loads where mhla_hf is not installed.

A model does not know how its one-file source is made: the installed package hands it a writer; inside such a file there
is none, and the file copies itself.
"""

import os
import shutil
from pathlib import Path

import torch

from ..ops.namespace import NAMESPACE

SOURCE_FILE = "modeling_mhla.py"
_SOURCE_WRITER = []


def set_source_writer(writer) -> None:
    """Install `writer(entry, folder)`, which writes the single source file of an entry module into a folder."""
    _SOURCE_WRITER[:] = [writer]


def write_source(entry: str, folder: str | os.PathLike) -> Path:
    """Write the one file that defines a model into `folder` (made if missing) and return its path."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / SOURCE_FILE
    if NAMESPACE == "package":
        if not _SOURCE_WRITER:
            raise RuntimeError("save_pretrained: no source writer is set; expected `import mhla_hf` to have set one.")
        _SOURCE_WRITER[0](entry, folder)
    elif not (target.exists() and target.samefile(__file__)):
        aside = target.with_suffix(f".tmp-{os.getpid()}")
        shutil.copyfile(__file__, aside)
        os.replace(aside, target)
    return target


def check_loaded_weights(model: torch.nn.Module) -> None:
    """One sentence if a loaded model's MHLA weights cannot be right (negative or non-finite mixing, non-finite maps)."""
    for name, module in model.named_modules():
        if hasattr(module, "check_values"):
            module.check_values(name)
        elif hasattr(module, "initial_values"):
            for parameter, value in module.named_parameters(recurse=False):
                if not value.is_meta and not torch.isfinite(value).all():
                    raise ValueError(
                        f"{name}.{parameter}: got NaN or infinite values, expected finite ones; the checkpoint is damaged."
                    )
