"""Models into a folder, whole or not at all: what was there goes only when the new one is complete."""

import os
from pathlib import Path

from .files import SHARD_SIZE, folder_aside
from .load import without_bars


def check_new_folder(folder, overwrite=False):
    """`folder`, resolved, when a model can be saved there. ValueError: something is there, or nothing can be written.

    overwrite: a model that this package saved may give way; nothing else ever does.
    """
    path = Path(folder).expanduser().resolve()
    if path.exists() and not path.is_dir():
        raise ValueError(f"output {str(folder)!r} is a file; expected a folder to make")
    if any(place.resolve().is_relative_to(path) for place in (Path.cwd(), Path.home())):
        raise ValueError(f"output {str(folder)!r} is where one works or lives; expected a folder below, or elsewhere")
    if path.exists() and any(path.iterdir()):
        if not overwrite:
            raise ValueError(
                f"output {str(folder)!r} is not empty; give another folder, or say that it may be overwritten"
            )
        if not holds_saved_model(path):
            raise ValueError(
                f"output {str(folder)!r} is not empty and holds no MHLA model; only such a model is overwritten"
            )
    above = path.parent
    while not above.exists():
        above = above.parent
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise ValueError(f"output {str(folder)!r} cannot be made: {str(above)!r} is not a folder one can write to")
    return path


def holds_saved_model(folder):
    """Whether a model that this package saved lies in `folder`, or a pipeline with one."""
    model = (folder / "config.json").is_file() and any(folder.glob("modeling_mhla*.py"))
    return model or ((folder / "model_index.json").is_file() and any(folder.glob("*/modeling_mhla*.py")))


def save_language_model(model, tokenizer, folder, overwrite=False):
    """Save both aside and rename; what was in `folder` goes only then. Errors as `check_new_folder`; OSError: disk full."""
    path = check_new_folder(folder, overwrite)
    with folder_aside(path, replace=overwrite) as aside, without_bars():
        model.save_pretrained(aside, max_shard_size=SHARD_SIZE)
        tokenizer.save_pretrained(aside)
    return path


def save_pipeline(pipeline, folder, overwrite=False):
    """Save a diffusers pipeline in the same way."""
    path = check_new_folder(folder, overwrite)
    with folder_aside(path, replace=overwrite) as aside, without_bars():
        pipeline.save_pretrained(aside, max_shard_size=SHARD_SIZE)
    return path
