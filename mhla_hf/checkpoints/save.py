"""Models into a folder, whole or not at all: what was there goes only when the new one is complete.

What belongs to a saved model is listed here, once: only such files give way to a new model, and only they are shared.
"""

import os
import re
from pathlib import Path

from .files import SHARD_SIZE, folder_aside, read_json
from .fingerprint import PIPELINE
from .load import one_sentence, without_bars

CARD_FILE = "README.md"
RECORDS = ("results.json", "train.json", "card.json")  # what mhla_hf writes about a model
LICENSE_TEXTS = ("LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "NOTICE.txt", "NOTICE.md")
VOCABULARIES = (
    "tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json",
    "tokenizer.model", "spiece.model", "spm.model", "sentencepiece.bpe.model", "tiktoken.model",
)  # fmt: skip
CONFIGURATIONS = (
    "config.json", "generation_config.json", "scheduler_config.json", "tokenizer_config.json", "special_tokens_map.json",
    "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json", "chat_template.json",
    "chat_template.jinja",
)  # fmt: skip
WEIGHTS_AND_SOURCE = re.compile(
    r"(diffusion_pytorch_)?model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?|modeling_mhla\w*\.py"
)


def saved_files(folder) -> list[Path]:
    """Entries of `folder` with the names that mhla_hf, transformers and diffusers give to the files of a model.

    Of a pipeline, those of its components too, in the folders that model_index.json names. ValueError: that is not JSON.
    """
    folder = Path(folder)
    names = read_json(folder / PIPELINE) or {}
    components = [folder / name for name in names if name.isidentifier() and (folder / name).is_dir()]
    found = [folder / name for name in (CARD_FILE, PIPELINE, *RECORDS, *LICENSE_TEXTS)]
    for part in (folder, *components):
        found += [part / name for name in (*CONFIGURATIONS, *VOCABULARIES)]
        found += [file for file in part.iterdir() if WEIGHTS_AND_SOURCE.fullmatch(file.name)]
        found += part.glob("additional_chat_templates/*.jinja")
    return sorted(file for file in found if os.path.lexists(file))


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
        where = f"output {str(folder)!r} is not empty"
        if not overwrite:
            raise ValueError(f"{where}; give another folder, or overwrite (--overwrite)")
        if not holds_saved_model(path):
            raise ValueError(f"{where} and holds no MHLA model; only such a model is overwritten")
        kept = {file for file in path.rglob("*") if file.is_symlink() or not file.is_dir()}
        if foreign := min(kept - {file for file in saved_files(path) if not file.is_symlink()}, default=None):
            raise ValueError(f"{where} and holds {str(foreign)!r}, which is no part of a model; move it first")
    above = path.parent
    while not above.exists():
        above = above.parent
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise ValueError(f"output {str(folder)!r} cannot be made: {str(above)!r} is not a folder one can write to")
    return path


def holds_saved_model(folder):
    """Whether a model that this package saved lies in `folder`, or a pipeline with one."""
    pipeline = (folder / PIPELINE).is_file()
    sources = folder.glob("*/modeling_mhla*.py" if pipeline else "modeling_mhla*.py")
    return any((source.parent / "config.json").is_file() for source in sources)


def save_model(model, folder, tool=None, overwrite=False):
    """Save a model or pipeline, and its tokenizer or image processor, aside and rename; what was in `folder` goes then.

    ValueError, one sentence: see `check_new_folder`, or it cannot be written (the disk is full).
    """
    path = check_new_folder(folder, overwrite)
    failed = one_sentence(f"output {str(folder)!r} cannot be written")
    with failed, folder_aside(path, replace=overwrite) as aside, without_bars():
        model.save_pretrained(aside, max_shard_size=SHARD_SIZE)
        if tool is not None:
            tool.save_pretrained(aside)
    return path
