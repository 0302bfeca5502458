"""Load models, tokenizers and pipelines from a folder or the Hub, and refuse damaged ones.

Missing weights, of which transformers only warns, are an error. Errors of libraries become a `ValueError` of one line.
"""

import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import hf_hub_download
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer, dynamic_module_utils
from transformers.image_processing_base import ImageProcessingMixin
from transformers.initialization import no_init_weights
from transformers.utils import cached_file
from transformers.utils import logging as transformers_logging

from ..models.derived_classes import base_classes
from ..models.families import ENCODERS, VISION, Family, auto_class_of, family_of_type
from ..models.saving import check_whole_files
from ..models.transformers_api import config_class_of
from ..nn.settings import is_whole
from .file_io import (
    HUB_ID,
    PIPELINE_INDEX,
    TOKENIZER_FILES,
    PathLike,
    read_json,
    resolve_model_name,
    summarize_error,
    wrap_errors,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MAX_LAYERS = 10_000  # with more, transformers would spend minutes building the model
CODE_KEYS = ("auto_map", "custom_pipelines", "custom_generate")  # configuration keys that name code to run
Loaded = tuple[Any, Any]  # model in eval mode, tokenizer or image processor


def register_classes(config: Any, classes: Sequence[type]) -> None:
    """Register a configuration class, if its model type is new, and for each Auto class the first of `classes` that fits."""
    if config_class_of(config.model_type) is None:
        AutoConfig.register(config.model_type, config)
        for cls in reversed(classes):
            getattr(transformers, auto_class_of(cls.__name__)).register(config, cls, exist_ok=True)


def register_family(family: Family) -> None:
    """Register all MHLA classes of a transformers family; if PEFT is imported, they get the base's default LoRA targets."""
    module = importlib.import_module(f"..{family.kind.entry}", __package__)
    classes = [getattr(module, f"MHLA{name}") for name in base_classes(family)]
    register_classes(classes[0].config_class, classes)
    lora: Any = sys.modules.get("peft.tuners.lora")
    if lora is not None and family.base in (targets := lora.LoraModel.target_module_mapping):
        targets.setdefault(f"mhla_{family.base}", targets[family.base])


def register_model_type(source: PathLike, **hub_options: Any) -> None:
    """Check the config.json of a folder or Hub id (ValueError if not valid); register the family of a converted model."""
    read_json(Path(source, "config.json"))  # raises ValueError if this file exists and holds no object
    config, _ = transformers.PreTrainedConfig.get_config_dict(str(source), **hub_options)
    for name, kind, expected in (("model_type", str, "a name"), ("architectures", list, "a list of names")):
        if not isinstance(config.get(name), (kind, type(None))):
            raise ValueError(f"{name} in config.json: got {config[name]!r}, expected {expected}.")
    for name in ("num_hidden_layers", "n_layer"):
        if is_whole(config.get(name), MAX_LAYERS + 1):
            raise ValueError(f"{name} in config.json: got {config[name]}, expected at most {MAX_LAYERS}.")
    family = family_of_type((config.get("model_type") or "").removeprefix("mhla_"))
    if config.get("mhla") is not None and family is not None:
        register_family(family)


@contextlib.contextmanager
def require_extra(feature: str, library: str, extra: str) -> Iterator[None]:
    """Turn an ImportError into one that names the extra of mhla_hf to install."""
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{feature} needs {library}, which is missing: pip install 'mhla_hf[{extra}]'") from error


def is_pipeline(name: PathLike, revision: str | None = None) -> bool:
    """Return whether a folder or Hub id is a diffusers pipeline; False if the request to the Hub fails."""
    if os.path.lexists(name) or not HUB_ID.fullmatch(str(name)):
        return (Path(name) / PIPELINE_INDEX).is_file()
    try:
        hf_hub_download(str(name), PIPELINE_INDEX, revision=revision)
    except Exception:  # loading the model will report the reason
        return False
    return True


def load_config(name: PathLike, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """Load the configuration of a folder or Hub id, and register the model type if it is a converted one."""
    if not isinstance(name, (str, os.PathLike)):
        raise TypeError(f"model: got {type(name).__name__}, expected a folder or a Hub id.")
    with wrap_errors(f"model: got {str(name)!r}, expected a configuration that can be loaded"):
        register_model_type(name, revision=revision)
        return AutoConfig.from_pretrained(str(name), revision=revision, trust_remote_code=trust_remote_code)


def load_tokenizer(name: PathLike, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer of a folder or Hub id, without its references to code unless `trust_remote_code`."""
    with wrap_errors(f"model: got {str(name)!r}, expected a tokenizer that can be loaded"):
        return _read_processor(AutoTokenizer, name, revision=revision, trust_remote_code=trust_remote_code)


def _read_processor(auto_class: Any, name: PathLike, *, trust_remote_code: bool, **hub_options: Any) -> Any:
    """Load a tokenizer or image processor, without its references to code unless `trust_remote_code`."""
    try:
        processor = auto_class.from_pretrained(str(name), trust_remote_code=trust_remote_code, **hub_options)
    except (ValueError, OSError) as error:
        if auto_class is not AutoTokenizer or has_tokenizer(name):
            raise
        raise ValueError(f"it has no tokenizer; save one there: tokenizer.save_pretrained({str(name)!r})") from error
    if not trust_remote_code:
        strip_code_references(processor)
    return processor


def has_tokenizer(name: PathLike) -> bool:
    """Return whether a folder holds tokenizer files; True if there is no such folder, without asking the Hub."""
    folder = Path(name)
    return not folder.is_dir() or any((folder / file).exists() for file in ("tokenizer_config.json", *TOKENIZER_FILES))


def strip_code_references(component: Any) -> list[str]:
    """Remove references to code from a tokenizer, image processor, or configuration, in place; return their names."""
    if isinstance(component, transformers.PreTrainedTokenizerBase):
        return ["auto_map"] if component.init_kwargs.pop("auto_map", None) else []
    if not isinstance(component, (transformers.PreTrainedConfig, transformers.GenerationConfig, ImageProcessingMixin)):
        return []
    return [name for name in CODE_KEYS if vars(component).pop(name, None) is not None]


def load_language_model(name: PathLike, **options: Any) -> Loaded:
    return _load(name, transformers.AutoModelForCausalLM, AutoTokenizer, **options)


def load_classifier(name: PathLike, **options: Any) -> Loaded:
    return _load(name, transformers.AutoModelForImageClassification, transformers.AutoImageProcessor, **options)


def load_encoder(name: PathLike, **options: Any) -> Loaded:
    """Load a text encoder, with the head that config.json names, and its tokenizer; for the options see `_load`."""
    hub_options = {key: options[key] for key in ("revision", "trust_remote_code") if key in options}
    architectures = load_config(name, **hub_options).architectures or ["Model"]
    return _load(name, getattr(transformers, auto_class_of(architectures[0])), AutoTokenizer, **options)


def _load(
    name: PathLike, auto_model: Any, auto_processor: Any, *, dtype: str = "auto",
    device: torch.device | str | None = None, revision: str | None = None, trust_remote_code: bool = False,
    weights: bool = True, tokenizer: PathLike | None = None
) -> Loaded:  # fmt: skip
    """Load a model and its processor with Auto classes; models of this package do not need `trust_remote_code`.

    Without `weights`, parameters stay uninitialized on the CPU, for a process that receives its shards from another one.
    `tokenizer` is a folder or Hub id (default: the model's own).
    """
    source = resolve_model_name(name)
    if dtype != "auto" and dtype not in DTYPES:
        raise ValueError(f"dtype: got {dtype!r}, expected one of auto, {', '.join(DTYPES)}.")
    where = "" if isinstance(source, Path) else " on the Hub, since there is no such folder"
    with wrap_errors(f"model: got {str(name)!r}, expected a model that can be loaded{where}"):
        with verified_files(source, revision) as hub_options:
            register_model_type(source, **hub_options)
            options = {"trust_remote_code": trust_remote_code, **hub_options}
            processor = load_tokenizer(tokenizer) if tokenizer else _read_processor(auto_processor, source, **options)
            if not weights:
                return _empty_model(auto_model, str(source), DTYPES.get(dtype), options).eval(), processor
            load_options = {"dtype": DTYPES.get(dtype, "auto"), "output_loading_info": True, "use_safetensors": True}
            model, loading_info = auto_model.from_pretrained(str(source), **options, **load_options)
        model = model.to(choose_device(device)).eval()
    check_no_missing_weights(name, loading_info["missing_keys"])
    return model, processor


def _empty_model(auto_model: Any, source: str, dtype: torch.dtype | None, options: dict[str, Any]) -> Any:
    """Build a model on the CPU with initialized buffers and uninitialized parameters."""
    config = AutoConfig.from_pretrained(source, **options)
    with no_init_weights():
        trust = options["trust_remote_code"]
        model = auto_model.from_config(config, dtype=dtype or config.dtype, trust_remote_code=trust)
    model.tie_weights()
    return model


def find_model_kind(name: PathLike, revision: str | None = None) -> str | None:
    """Return "language", "images", or "encoders" (text); None for others or failed loading. ValueError for vision towers."""
    try:
        config = load_config(name, revision=revision)
    except Exception:  # loading the model will report the reason
        return None
    class_name = (config.architectures or [""])[0]
    family = family_of_type(getattr(config, "base_model_type", config.model_type))
    if class_name.endswith("ForImageClassification"):
        return "images"
    if family in VISION:
        expected = "a language model, text encoder, image classifier or pipeline; mhla_hf.convert takes vision towers"
        raise ValueError(f"model: got {str(name)!r}, a {class_name or config.model_type}, expected {expected}.")
    if family in ENCODERS:
        return "encoders"
    return "language" if class_name.endswith(("ForCausalLM", "LMHeadModel")) else None


@contextlib.contextmanager
def verified_files(
    source: Path | str, revision: str | None = None, index: str = "config.json"
) -> Iterator[dict[str, Any]]:
    """Check the files in a folder, and yield keyword arguments for `from_pretrained`, which pin the commit of a Hub id.

    Within the block, transformers refuses untrusted code instead of asking at the terminal and, for a folder, shows no
    progress bars.
    """
    if not isinstance(source, Path):
        # Every such model has this file, and the path of its cached copy contains the commit.
        commit = Path(cached_file(source, index, revision=revision)).parent.name
        with no_code_prompts():
            yield {"revision": commit}
        return
    for shard_index in source.rglob("*.safetensors.index.json"):
        check_shards(shard_index)
    check_whole_files(source)
    with no_progress_bars(), no_code_prompts():
        yield {}


def check_no_missing_weights(name: PathLike, missing: Sequence[str]) -> None:
    if missing := sorted(missing):
        start = f"model: got {str(name)!r}, which lacks {len(missing)} of its weights"
        raise ValueError(f"{start}, such as {missing[0]!r}, expected all.")


def check_shards(index: PathLike) -> None:
    """Raise ValueError if a sharded model's index names anything but files beside it: transformers would follow any path."""
    shards = (read_json(index) or {}).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise ValueError(f"{index}: got no weight_map, expected the index of a sharded model.")
    for shard in shards.values():
        if not isinstance(shard, str) or Path(shard).name != shard or not Path(index).with_name(shard).is_file():
            raise ValueError(f"{index}: got the shard {shard!r}, expected a file beside the index.")


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """Turn off the progress bars of transformers."""
    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            transformers_logging.enable_progress_bar()


@contextlib.contextmanager
def no_code_prompts() -> Iterator[None]:
    """Make transformers refuse untrusted code instead of asking at the terminal."""
    timeout = dynamic_module_utils.TIME_OUT_REMOTE_CODE
    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
    try:
        yield
    finally:
        dynamic_module_utils.TIME_OUT_REMOTE_CODE = timeout


def choose_device(device: torch.device | str | None = None) -> torch.device:
    """Return `device` as a `torch.device`; for None, CUDA if available, else the CPU. Raise ValueError if unavailable."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with wrap_errors(f"device: got {str(device)!r}, expected one that is available here"):
        return torch.empty(0, device=device).device


def read_stored_dtype(folder: PathLike) -> str:
    """Return the name of the dtype that `dtype="auto"` selects for a folder: from config.json, or else the first weight."""
    config = read_json(Path(folder, "config.json")) or {}
    if not (dtype := config.get("dtype") or config.get("torch_dtype")):
        file = sorted(Path(folder).glob("*.safetensors"))[0]
        message = f"{file}: got unreadable data, expected a safetensors file"
        with wrap_errors(message), safe_open(file, framework="pt") as weights:
            dtype = weights.get_tensor(next(iter(weights.keys()))).dtype
    return str(dtype).removeprefix("torch.")


def load_pipeline(
    source: PathLike, *, dtype: str, device: torch.device | str | None, revision: str | None = None,
    trust_remote_code: bool = False
) -> Any:  # fmt: skip
    """Load a diffusers pipeline; for the options see `_load`. With `dtype="auto"`, diffusers chooses the dtype."""
    with require_extra(f"model: {str(source)!r}, a pipeline,", "diffusers", "diffusers"):
        from diffusers import DiffusionPipeline

    resolved = resolve_model_name(source, pipeline=True)
    options = {"dtype": DTYPES.get(dtype), "trust_remote_code": trust_remote_code, "use_safetensors": True}
    try:
        with verified_files(resolved, revision, PIPELINE_INDEX) as hub_options:
            missing = missing_transformers_weights(resolved, hub_options)
            if not missing:
                pipeline: Any = DiffusionPipeline.from_pretrained(str(resolved), **options, **hub_options)
        if not missing:  # diffusers leaves weights that are in no file on the meta device
            modules = [(name, x) for name, x in pipeline.components.items() if isinstance(x, torch.nn.Module)]
            missing = [f"{name}.{key}" for name, x in modules for key, value in x.named_parameters() if value.is_meta]
        if not missing:
            pipeline = pipeline.to(choose_device(device))
    except Exception as error:
        start = f"model: got {str(source)!r}"
        if "trust_remote_code" in str(error) and not trust_remote_code:
            start += ", which holds the source of its MHLA model"
            raise ValueError(f"{start}, expected trust_remote_code=True.") from error
        reason = summarize_error(error).removesuffix(".")
        raise ValueError(f"{start}, expected a pipeline that can be loaded ({reason}).") from error
    check_no_missing_weights(source, missing)
    if not trust_remote_code:
        for component in pipeline.components.values():
            strip_code_references(component)
            strip_code_references(getattr(component, "config", None))
    return pipeline


def missing_transformers_weights(source: Path | str, hub_options: dict[str, Any]) -> list[str]:
    """List the missing weights of a pipeline's transformers models, as in "text_encoder.shared.weight"."""
    is_local = isinstance(source, Path)
    index = Path(source, PIPELINE_INDEX) if is_local else hf_hub_download(str(source), PIPELINE_INDEX, **hub_options)
    meta = {"device_map": "meta"} if importlib.util.find_spec("accelerate") else {}
    missing = []
    for component, library_and_class in (read_json(index) or {}).items():
        if not isinstance(library_and_class, list) or library_and_class[0] != "transformers":
            continue
        cls: Any = getattr(transformers, str(library_and_class[1]), None)
        if issubclass(cls if isinstance(cls, type) else object, transformers.PreTrainedModel):
            options = {"subfolder": component, "use_safetensors": True, "output_loading_info": True}
            _, loading_info = cls.from_pretrained(str(source), **options, **meta, **hub_options)
            missing += [f"{component}.{name}" for name in loading_info["missing_keys"]]
    return missing
