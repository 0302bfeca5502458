"""Models from a folder or the Hub, so that a damaged one is noticed; and into a folder, whole or not at all.

transformers fills weights that a checkpoint lacks with random ones and only warns; a score or a conversion of such a model
would be about nothing. Unusual: whatever goes wrong while loading becomes one sentence that names the model.
"""

import contextlib
import json
import os
import re
from pathlib import Path

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoTokenizer,
)
from transformers.utils import cached_file
from transformers.utils import logging as transformers_logging

from ..checksums import SUMS_FILE, check_sums
from ..files import SHARD_SIZE, folder_aside
from ..models.configuration import CONVERTIBLE_VISION_TYPES
from ..models.saving import check_whole_files

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LOADING_ERRORS = (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError, ImportError, SafetensorError)
CLASS_ENDINGS = {"ForCausalLM": "language", "LMHeadModel": "language", "ForImageClassification": "images"}
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def check_model_name(name, pipeline=False):
    """A `Path` for a local model, or the same str for a Hub id. ValueError: neither, or a folder without a model.

    pipeline: a diffusers pipeline is expected, with model_index.json and the weights in folders below.
    """
    name = str(name)
    path = Path(name)
    what = "pipeline" if pipeline else "model"
    if path.is_dir():
        index = "model_index.json" if pipeline else "config.json"
        if not (path / index).is_file():
            raise ValueError(f"model {name!r} has no {index}; expected the folder of a saved {what}")
        if not any(path.glob("*/*.safetensors" if pipeline else "*.safetensors")):
            raise ValueError(f"model {name!r} has no .safetensors file; expected the folder of a saved {what}")
        return path
    if path.exists():
        raise ValueError(f"model {name!r} is a file; expected the folder of a saved {what}")
    if not HUB_ID.fullmatch(name) or name.startswith("."):
        raise ValueError(f"model {name!r} is no folder here; expected the folder of a saved {what} or a Hub id")
    return name


def is_pipeline(name, revision=None):
    """Whether a folder or Hub id is a diffusers pipeline: it has a model_index.json. False for what cannot be asked."""
    if Path(name).is_dir():
        return (Path(name) / "model_index.json").is_file()
    if not HUB_ID.fullmatch(str(name)):
        return False
    try:
        hf_hub_download(str(name), "model_index.json", revision=revision)
    except LOADING_ERRORS:  # whatever it is, loading a model of that name will say so
        return False
    return True


def load_config(name, *, revision=None, trust_remote_code=False):
    """The configuration of a folder or Hub id; ValueError in one sentence."""
    try:
        return AutoConfig.from_pretrained(str(name), revision=revision, trust_remote_code=trust_remote_code)
    except LOADING_ERRORS as error:
        raise ValueError(f"model {str(name)!r}: its configuration cannot be loaded: {first_line(error)}") from error


def load_tokenizer(name, *, revision=None, trust_remote_code=False):
    """The tokenizer of a folder or Hub id; ValueError in one sentence."""
    try:
        return AutoTokenizer.from_pretrained(str(name), revision=revision, trust_remote_code=trust_remote_code)
    except LOADING_ERRORS as error:
        raise ValueError(f"model {str(name)!r}: its tokenizer cannot be loaded: {first_line(error)}") from error


def load_language_model(name, *, dtype="auto", device=None, revision=None, trust_remote_code=False):
    """(model in eval mode, tokenizer) of a causal language model.

    name: folder or Hub id. dtype: "auto" (the checkpoint's), "float32", "bfloat16" or "float16". device: as torch names
    it; None: CUDA when there is one, else CPU. trust_remote_code: needed only for source that this package does not know.
    ValueError, in one sentence: nothing there, files damaged or other than SHA256SUMS says, weights missing or pickled, no
    tokenizer, an unknown architecture.
    """
    return _load(name, AutoModelForCausalLM, AutoTokenizer, dtype, device, revision, trust_remote_code)


def load_classifier(name, *, dtype="auto", device=None, revision=None, trust_remote_code=False):
    """(model in eval mode, image processor) of an image classifier; as `load_language_model` for the rest."""
    return _load(name, AutoModelForImageClassification, AutoImageProcessor, dtype, device, revision, trust_remote_code)


def _load(name, auto_model, auto_tools, dtype, device, revision, trust_remote_code):
    source = check_model_name(name)
    if dtype != "auto" and dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; expected auto, {', '.join(DTYPES)}")
    try:
        with checked_files(source, revision) as files:
            options = {"trust_remote_code": trust_remote_code, **files}
            tools = auto_tools.from_pretrained(str(source), **options)
            options |= {"dtype": DTYPES.get(dtype, "auto"), "output_loading_info": True, "use_safetensors": True}
            loaded = auto_model.from_pretrained(str(source), **options)
        model = loaded[0].to(choose_device(device)).eval()
    except LOADING_ERRORS as error:
        where = "" if isinstance(source, Path) else " (no folder here has that name, so the Hub was asked)"
        raise ValueError(f"model {str(name)!r} cannot be loaded{where}: {first_line(error)}") from error
    check_whole(name, loaded[1])
    return model, tools


def kind_of_class(name: str) -> str | None:
    """ "language", "images", or None, from the name of a model's class."""
    return next((kind for ending, kind in CLASS_ENDINGS.items() if name.endswith(ending)), None)


def is_classifier_name(name, revision=None) -> bool:
    """Whether a folder or Hub id is an image classifier; False for what cannot be read. ValueError: it is a bare tower."""
    try:
        config = AutoConfig.from_pretrained(str(name), revision=revision)
    except LOADING_ERRORS:  # whatever it is, loading a model of that name will say so
        return False
    named = (config.architectures or [""])[0]
    if kind_of_class(named) != "images" and config.model_type in CONVERTIBLE_VISION_TYPES:
        raise ValueError(
            f"model {str(name)!r} is a {named or config.model_type}; expected a causal language model, an image classifier "
            "or a pipeline; vision towers are converted in Python, by mhla_hf.convert"
        )
    return kind_of_class(named) == "images"


@contextlib.contextmanager
def checked_files(source, revision=None, index="config.json"):
    """While the files of a model are loaded: gives the options of `from_pretrained` that take them all from one commit.

    source: as `check_model_name` gives it. revision: of a Hub model. index: a file that every such model has. ValueError,
    OSError: files are other than SHA256SUMS says (a folder's are compared before, a download's afterwards), or shards lie
    outside the folder.
    """
    if not isinstance(source, Path):
        commit = find_commit(source, revision, index)
        yield {"revision": commit}
        check_download(source, commit)
        return
    check_sums(source)
    for shards in source.rglob("*.safetensors.index.json"):
        check_shards(shards)
    check_whole_files(source)
    with without_bars():
        yield {}


def check_whole(name, info):
    """ValueError when weights were missing. info: what `from_pretrained` gives with output_loading_info."""
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"model {str(name)!r} lacks {len(missing)} of its weights, such as {missing[0]!r}")


def check_shards(index):
    """The weight_map of a sharded model's index; ValueError when it names a file that is not beside it.

    transformers would follow such a name out of a folder; from the Hub it refuses to.
    """
    index = Path(index)
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{index} is not JSON: {error}") from None
    shards = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(shards, dict) or not shards:
        raise ValueError(f"{index} has no weight_map: expected the index of a sharded model")
    for shard in shards.values():
        if not isinstance(shard, str) or Path(shard).name != shard or not (index.parent / shard).is_file():
            raise ValueError(f"{index} names the file {shard!r}, which is not beside it")
    return shards


def find_commit(name, revision=None, index="config.json"):
    """The commit that a revision (None: main) of the Hub model `name` is at. OSError or ValueError when it is not there."""
    found = cached_file(name, index, revision=revision)
    if found is None:
        raise ValueError(f"the repository has no {index}")
    return Path(found).parent.name


def check_download(name, commit):
    """ValueError when files of the Hub model `name` in the cache are not what its SHA256SUMS says, where it has one."""
    try:
        sums = hf_hub_download(name, SUMS_FILE, revision=commit)
    except EntryNotFoundError:  # the model was not pushed by mhla_hf
        return
    check_sums(Path(sums).parent)


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
        model.save_pretrained(aside, max_shard_size=SHARD_SIZE)
        tokenizer.save_pretrained(aside)
    return path


def save_pipeline(pipeline, folder, overwrite=False):
    """Save a diffusers pipeline in the same way."""
    path = check_new_folder(folder, overwrite).resolve()
    with folder_aside(path, replace=True) as aside, without_bars():
        pipeline.save_pretrained(aside, max_shard_size=SHARD_SIZE)
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
