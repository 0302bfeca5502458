"""Save models atomically, and list the files of a saved model: only these are overwritten, and pushed to the Hub."""

import functools
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .file_io import (
    PIPELINE_INDEX,
    SHARD_SIZE,
    TOKENIZER_FILES,
    PathLike,
    atomic_folder,
    check_writable,
    read_json,
    remove_abandoned,
    wrap_errors,
    write_json,
)

logger = logging.getLogger("mhla_hf")
CARD_FILE, CURVE_FILE = "README.md", "curve.png"
RECORDS = ("results.json", "train.json", "card.json")  # written by evaluate, distill and card
LICENSE_FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "NOTICE.txt", "NOTICE.md")
CONFIG_FILES = (
    "config.json", "generation_config.json", "scheduler_config.json", "tokenizer_config.json", "special_tokens_map.json",
    "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json", "chat_template.json",
    "chat_template.jinja"
)  # fmt: skip
WEIGHTS_AND_SOURCE = re.compile(
    r"(diffusion_pytorch_)?model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?|modeling_mhla\w*\.py"
)

# What sentence-transformers adds to an encoder: a list of modules, a folder for each module that has settings or weights,
# and settings of the whole model. Other modules are refused and other keys dropped, because they may name code.
SENTENCE_MODULES = "modules.json"
SENTENCE_MODULE_TYPE = re.compile(r"sentence_transformers(\.\w+)*\.(Transformer|Pooling|Normalize|Dense|LayerNorm)")
SENTENCE_MODULE_FOLDER = re.compile(r"\d+_\w+")
SENTENCE_SETTINGS = {
    "config_sentence_transformers.json": (
        "__version__", "prompts", "default_prompt_name", "similarity_fn_name", "model_type"
    ),
    "sentence_bert_config.json": (
        "max_seq_length", "do_lower_case", "transformer_task", "modality_config", "module_output_name"
    )
}  # fmt: skip


def read_sentence_files(name: PathLike, revision: str | None = None) -> dict[str, Any]:
    """Return an encoder's sentence-transformers files, path -> JSON or `Path` of weights; ValueError for unknown modules."""
    from transformers.utils import cached_file

    find = functools.partial(cached_file, str(name), revision=revision, _raise_exceptions_for_missing_entries=False)
    if (index := find(SENTENCE_MODULES)) is None:
        return {}
    with wrap_errors(f"model: got {str(name)!r}, expected a {SENTENCE_MODULES} that can be read"):
        modules = json.loads(Path(index).read_text(encoding="utf-8"))
        modules = [{key: module[key] for key in ("idx", "name", "path", "type")} for module in modules]
        types_and_paths = [(str(module["type"]), str(module["path"])) for module in modules]
    files: dict[str, Any] = {SENTENCE_MODULES: modules}
    for type_name, path in types_and_paths:
        start = f"model: got {str(name)!r}, whose {SENTENCE_MODULES} names {type_name!r} in {path!r}"
        match = SENTENCE_MODULE_TYPE.fullmatch(type_name)
        if match is None:
            known_types = "Transformer, Pooling, Normalize, Dense or LayerNorm"
            raise ValueError(f"{start}, expected a {known_types} of sentence-transformers.")
        if path == "" and match[2] == "Transformer":
            continue
        if not SENTENCE_MODULE_FOLDER.fullmatch(path):
            raise ValueError(f"{start}, expected a folder such as 1_Pooling.")
        if (config_file := find(f"{path}/config.json")) is not None:
            config = read_json(config_file) or {}
            activation = config.get("activation_function", "torch.nn.")
            if not str(activation).startswith("torch.nn."):
                raise ValueError(f"{start} with the activation {activation!r}, expected one of torch.nn.")
            files[f"{path}/config.json"] = config
        if (weights := find(f"{path}/model.safetensors")) is not None:
            files[f"{path}/model.safetensors"] = Path(weights)
        elif match[2] in ("Dense", "LayerNorm"):
            raise ValueError(f"{start} without model.safetensors, expected that file.")
    for file, keys in SENTENCE_SETTINGS.items():
        if (settings_file := find(file)) is not None:
            files[file] = {key: value for key, value in (read_json(settings_file) or {}).items() if key in keys}
    return files


def read_sentence_files_or_warn(model: str, revision: str | None = None) -> dict[str, Any]:
    try:
        return read_sentence_files(model, revision)
    except (ValueError, OSError) as error:
        logger.warning("the modules of sentence-transformers are not kept: %s", error)
        return {}


def is_model_file(name: str) -> bool:
    """Return whether this is the name of a file of a saved model, other than its card and licenses."""
    tables = (PIPELINE_INDEX, SENTENCE_MODULES, *SENTENCE_SETTINGS, *RECORDS, *CONFIG_FILES, *TOKENIZER_FILES)
    return name in tables or WEIGHTS_AND_SOURCE.fullmatch(name) is not None


def list_saved_files(folder: PathLike) -> list[Path]:
    """List the files in `folder` whose names mhla_hf and its libraries give to files of a saved model or pipeline."""
    folder = Path(folder)
    names = read_json(folder / PIPELINE_INDEX) or {}
    components = [folder / name for name in names if name.isidentifier() and (folder / name).is_dir()]
    candidates = [folder / name for name in (CARD_FILE, CURVE_FILE, PIPELINE_INDEX, *RECORDS, *LICENSE_FILES)]
    modules_file = folder / SENTENCE_MODULES
    if modules_file.is_file():
        with wrap_errors(f"{modules_file}: got an unknown format, expected a list of modules"):
            paths = [str(module["path"]) for module in json.loads(modules_file.read_text(encoding="utf-8"))]
        module_folders = [folder / path for path in paths if SENTENCE_MODULE_FOLDER.fullmatch(path)]
        candidates += [module / name for module in module_folders for name in ("config.json", "model.safetensors")]
        candidates += [folder / name for name in (SENTENCE_MODULES, *SENTENCE_SETTINGS)]
    for model_folder in (folder, *components):
        candidates += [model_folder / name for name in (*CONFIG_FILES, *TOKENIZER_FILES)]
        candidates += [file for file in model_folder.iterdir() if WEIGHTS_AND_SOURCE.fullmatch(file.name)]
        candidates += model_folder.glob("additional_chat_templates/*.jinja")
    return sorted(file for file in candidates if os.path.lexists(file))


def check_new_folder(folder: PathLike, overwrite: bool = False, num_bytes: int = 0) -> Path:
    """Return `folder` as an absolute path; raise ValueError unless a model of `num_bytes` can be saved there.

    A folder that a killed process was replacing is moved back first. With `overwrite`, the folder may hold a model saved by
    this package, and nothing else.
    """
    path = Path(folder).expanduser().resolve()
    remove_abandoned(path.parent, f"{path.name}.tmp-")
    start = f"out: got {str(folder)!r}"
    if path.exists() and not path.is_dir():
        raise ValueError(f"{start}, which is a file, expected a new folder.")
    if any(protected.resolve().is_relative_to(path) for protected in (Path.cwd(), Path.home())):
        raise ValueError(f"{start}, which contains the working or the home folder, expected another folder.")
    if path.exists() and any(path.iterdir()):
        if not overwrite:
            raise ValueError(f"{start}, which is not empty, expected a new folder, or --overwrite.")
        if not holds_saved_model(path):
            raise ValueError(f"{start}, which is not empty and holds no MHLA model, expected a new folder.")
        existing = {file for file in path.rglob("*") if file.is_symlink() or not file.is_dir()}
        model_files = {file for file in list_saved_files(path) if not file.is_symlink()}
        if foreign := min(existing - model_files, default=None):
            expected = "nothing but the files of a model; move it first"
            raise ValueError(f"{start}, which holds {str(foreign)!r}, expected {expected}.")
    check_writable(path, "out", num_bytes)
    return path


def count_bytes(model: Any) -> int:
    """Return the size of the parameters of a model, or of all models of a pipeline, in bytes."""
    components = getattr(model, "components", {"": model}).values()
    modules = [component for component in components if hasattr(component, "named_parameters")]
    return sum(parameter.nbytes for module in modules for parameter in module.parameters())


def holds_saved_model(folder: Path) -> bool:
    """Return whether `folder` contains a model that this package saved, or a pipeline with one."""
    is_pipeline = (folder / PIPELINE_INDEX).is_file()
    sources = folder.glob("*/modeling_mhla*.py" if is_pipeline else "modeling_mhla*.py")
    return any((source.parent / "config.json").is_file() for source in sources)


def save_model(
    model: Any, folder: PathLike, processor: Any = None, overwrite: bool = False, files: Mapping[str, Any] | None = None
) -> Path:
    """Save a model or pipeline, its `processor`, and `files` (`write_files`); an old model stays until all is written."""
    from .load import no_progress_bars

    path = check_new_folder(folder, overwrite, count_bytes(model))
    with (
        wrap_errors(f"out: got {str(folder)!r}, expected a folder that can be written"),
        atomic_folder(path, replace=overwrite) as temporary,
        no_progress_bars(),
    ):
        model.save_pretrained(temporary, max_shard_size=SHARD_SIZE)
        if processor is not None:
            processor.save_pretrained(temporary)
        write_files(temporary, files or {})
    return path


def write_files(folder: PathLike, files: Mapping[str, Any]) -> None:
    """Write `files` into a model's folder: relative path -> JSON content, or the `Path` of a file to copy."""
    for path, content in dict(files).items():
        target = Path(folder, path)
        target.parent.mkdir(exist_ok=True)
        if isinstance(content, Path):
            shutil.copyfile(content, target)
        else:
            write_json(target, content)
