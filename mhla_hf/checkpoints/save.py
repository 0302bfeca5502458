"""Models into a folder, whole or not at all: what was there goes only when the new one is complete.

What belongs to a saved model is listed here, once: only such files give way to a new model, and only they are shared.
"""

import functools
import json
import os
import re
import shutil
from pathlib import Path

from .files import PIPELINE, SHARD_SIZE, VOCABULARIES, folder_aside, one_sentence, read_json, write_json

CARD_FILE = "README.md"
RECORDS = ("results.json", "train.json", "card.json")  # what mhla_hf writes about a model
LICENSE_TEXTS = ("LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "NOTICE.txt", "NOTICE.md")
CONFIGURATIONS = (
    "config.json", "generation_config.json", "scheduler_config.json", "tokenizer_config.json", "special_tokens_map.json",
    "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json", "chat_template.json",
    "chat_template.jinja",
)  # fmt: skip
WEIGHTS_AND_SOURCE = re.compile(
    r"(diffusion_pytorch_)?model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?|modeling_mhla\w*\.py"
)

# What sentence-transformers adds to an encoder: its list of modules, the folders of those with settings or weights, and
# settings of the whole, of which only these keys are kept. Other modules and keys may name code.
MODULES = "modules.json"
MODULE_TYPE = re.compile(r"sentence_transformers(\.\w+)*\.(Transformer|Pooling|Normalize|Dense|LayerNorm)")
MODULE_FOLDER = re.compile(r"\d+_\w+")
SENTENCE_SETTINGS = {
    "config_sentence_transformers.json": (
        "__version__", "prompts", "default_prompt_name", "similarity_fn_name", "model_type",
    ),
    "sentence_bert_config.json": (
        "max_seq_length", "do_lower_case", "transformer_task", "modality_config", "module_output_name",
    ),
}  # fmt: skip


def read_sentence_files(name, revision=None) -> dict:
    """What sentence-transformers adds to an encoder, by path: JSON content, or the `Path` of a module's weights.

    name: folder or Hub id. {}: it has no modules.json. ValueError, one sentence: a module is not among those that are known.
    """
    from transformers.utils import cached_file

    find = functools.partial(cached_file, str(name), revision=revision, _raise_exceptions_for_missing_entries=False)
    if (listed := find(MODULES)) is None:
        return {}
    with one_sentence(f"model {str(name)!r}: {MODULES} cannot be read"):
        modules = json.loads(Path(listed).read_text(encoding="utf-8"))
        modules = [{key: one[key] for key in ("idx", "name", "path", "type")} for one in modules]
        known = [(one["type"], MODULE_TYPE.fullmatch(one["type"]), str(one["path"])) for one in modules]
    found = {MODULES: modules}
    for kind, match, path in known:
        where = f"model {str(name)!r}: {MODULES} names {kind!r} in {path!r}, expected a"
        if match is None:
            raise ValueError(f"{where} Transformer, Pooling, Normalize, Dense or LayerNorm of sentence-transformers")
        if path == "" and match[2] == "Transformer":
            continue
        if not MODULE_FOLDER.fullmatch(path):
            raise ValueError(f"{where} folder such as 1_Pooling")
        if (place := find(f"{path}/config.json")) is not None:
            found[f"{path}/config.json"] = content = read_json(place)
            if not str(content.get("activation_function", "torch.nn.")).startswith("torch.nn."):
                raise ValueError(f"{where}n activation function of torch.nn, not {content['activation_function']!r}")
        if (place := find(f"{path}/model.safetensors")) is not None:
            found[f"{path}/model.safetensors"] = Path(place)
        elif match[2] in ("Dense", "LayerNorm"):
            raise ValueError(f"{where} model.safetensors there")
    for file, keys in SENTENCE_SETTINGS.items():
        if (place := find(file)) is not None:
            found[file] = {key: value for key, value in read_json(place).items() if key in keys}
    return found


def saved_files(folder) -> list[Path]:
    """Entries of `folder` with the names that mhla_hf, transformers and diffusers give to the files of a model.

    Of a pipeline, those of its components too, in the folders that model_index.json names. ValueError: that is not JSON.
    """
    folder = Path(folder)
    names = read_json(folder / PIPELINE) or {}
    components = [folder / name for name in names if name.isidentifier() and (folder / name).is_dir()]
    found = [folder / name for name in (CARD_FILE, PIPELINE, *RECORDS, *LICENSE_TEXTS)]
    if (folder / MODULES).is_file():
        with one_sentence(f"{folder / MODULES} cannot be read"):
            paths = [str(one["path"]) for one in json.loads((folder / MODULES).read_text(encoding="utf-8"))]
        parts = [folder / path for path in paths if MODULE_FOLDER.fullmatch(path)]
        found += [part / name for part in parts for name in ("config.json", "model.safetensors")]
        found += [folder / name for name in (MODULES, *SENTENCE_SETTINGS)]
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


def save_model(model, folder, tool=None, overwrite=False, files=()):
    """Save a model or pipeline, and its tokenizer or image processor, aside and rename; what was in `folder` goes then.

    files: what else goes there, as `read_sentence_files` gives it.
    ValueError, one sentence: see `check_new_folder`, or it cannot be written (the disk is full).
    """
    from .load import without_bars

    path = check_new_folder(folder, overwrite)
    failed = one_sentence(f"output {str(folder)!r} cannot be written")
    with failed, folder_aside(path, replace=overwrite) as aside, without_bars():
        model.save_pretrained(aside, max_shard_size=SHARD_SIZE)
        if tool is not None:
            tool.save_pretrained(aside)
        write_files(aside, files)
    return path


def write_files(folder, files) -> None:
    """Put files into a model's folder: by path, JSON content, or the `Path` of a file to copy."""
    for path, content in dict(files).items():
        target = Path(folder, path)
        target.parent.mkdir(exist_ok=True)
        if isinstance(content, Path):
            shutil.copyfile(content, target)
        else:
            write_json(target, content)
