"""Models and pipelines from a folder or the Hub, so that a damaged one is noticed.

transformers fills weights that a checkpoint lacks with random ones and only warns. Whatever goes wrong while loading becomes
one sentence that names the model.
"""

import contextlib
import importlib.util
import os
import sys
from pathlib import Path

import torch
import transformers
from huggingface_hub import hf_hub_download
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoTokenizer,
    dynamic_module_utils,
)
from transformers.image_processing_base import ImageProcessingMixin
from transformers.utils import cached_file
from transformers.utils import logging as transformers_logging

from ..models.families import ENCODERS, VISION, Family, auto_class_of, family_of_type
from ..models.overlay import base_classes
from ..models.saving import check_whole_files
from ..models.transformers_api import config_class_of
from ..nn.settings import is_whole
from .files import (
    HUB_ID,
    LOADING_ERRORS,
    PIPELINE,
    VOCABULARIES,
    check_model_name,
    first_line,
    one_sentence,
    read_json,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MOST_LAYERS = 10_000  # of a language model: to make a hundred times as many takes minutes
HARMLESS = ("tokenizer_class", "quantization_config")  # no class of configurations knows them


def register_classes(config: type, classes) -> None:
    """Register a model type with transformers' Auto classes; one that is registered already stays as it is."""
    if config_class_of(config.model_type) is None:
        AutoConfig.register(config.model_type, config)
        for cls in reversed(classes):  # of several for one Auto class, the first
            getattr(transformers, auto_class_of(cls.__name__)).register(config, cls, exist_ok=True)


def register_family(family: Family) -> None:
    """Register what a family of bases of transformers becomes: its configuration, body and heads.

    And with PEFT, where it is imported already, the base's default LoRA targets.
    """
    module = importlib.import_module(f"..{family.entry}", __package__)
    classes = [getattr(module, f"MHLA{name}") for name in base_classes(family)]
    register_classes(classes[0].config_class, classes)
    lora = sys.modules.get("peft.tuners.lora")
    if lora is not None and family.base in (targets := lora.LoraModel.target_module_mapping):
        targets.setdefault(f"mhla_{family.base}", targets[family.base])


def register_type_of(source, **files) -> None:
    """Register the family of a converted model in a folder or on the Hub, if it is of one; files: as `from_pretrained`."""
    read_json(Path(source, "config.json"))  # which is to hold an object
    config, _ = transformers.PreTrainedConfig.get_config_dict(str(source), **files)
    for name, kind, what in (("model_type", str, "a name"), ("architectures", list, "a list of names")):
        if not isinstance(config.get(name), (kind, type(None))):
            raise ValueError(f"{name} in config.json: got {config[name]!r}, expected {what}")
    for name in ("num_hidden_layers", "n_layer"):
        if is_whole(config.get(name), MOST_LAYERS + 1):
            raise ValueError(f"{name} in config.json: got {config[name]}, expected at most {MOST_LAYERS}")
    family = family_of_type((config.get("model_type") or "").removeprefix("mhla_"))
    if config.get("mhla") is not None and family is not None:
        register_family(family)


@contextlib.contextmanager
def optional(what, library, extra):
    """Where an optional library that is imported meanwhile is missing, an ImportError with the line that installs it."""
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{what} needs {library}, which is missing: pip install 'mhla_hf[{extra}]'") from error


def is_pipeline(name, revision=None):
    """Whether a folder or Hub id is a diffusers pipeline: it has a model_index.json. False for what cannot be asked."""
    if os.path.lexists(name) or not HUB_ID.fullmatch(str(name)):
        return (Path(name) / PIPELINE).is_file()
    try:
        hf_hub_download(str(name), PIPELINE, revision=revision)
    except LOADING_ERRORS:  # whatever it is, loading a model of that name will say so
        return False
    return True


def load_config(name, *, revision=None, trust_remote_code=False):
    """The configuration of a folder or Hub id; ValueError, TypeError in one sentence."""
    if not isinstance(name, (str, os.PathLike)):
        raise TypeError(f"model: got {type(name).__name__}, expected a folder or a Hub id")
    with one_sentence(f"model {str(name)!r}: its configuration cannot be loaded"):
        register_type_of(name, revision=revision)
        return AutoConfig.from_pretrained(str(name), revision=revision, trust_remote_code=trust_remote_code)


def load_tokenizer(name, *, revision=None, trust_remote_code=False):
    """The tokenizer of a folder or Hub id; ValueError in one sentence."""
    with one_sentence(f"model {str(name)!r}: its tokenizer cannot be loaded"):
        return _read_tokenizer(name, revision=revision, trust_remote_code=trust_remote_code)


def _read_tokenizer(name, *, trust_remote_code, **files):
    """Without code that is not trusted, and without the name of such code, which the tokenizer would write when saved."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(name), trust_remote_code=trust_remote_code, **files)
    except (ValueError, OSError) as error:
        if has_tokenizer(name):
            raise
        raise ValueError(f"it has no tokenizer; save one there: tokenizer.save_pretrained({str(name)!r})") from error
    if not trust_remote_code:
        forget_code(tokenizer)
    return tokenizer


def _tokenizer_reader(name):
    """What reads a model's own tokenizer, or that of the folder or Hub id `name`."""
    return _read_tokenizer if name is None else lambda *given, **options: load_tokenizer(name)


def has_tokenizer(name) -> bool:
    """Whether a folder holds a file of a tokenizer; True for a Hub id, which is not asked."""
    folder = Path(name)
    return not folder.is_dir() or any((folder / file).exists() for file in ("tokenizer_config.json", *VOCABULARIES))


def _read_processor(name, *, trust_remote_code, **files):
    """As `_read_tokenizer`, of an image processor."""
    processor = AutoImageProcessor.from_pretrained(str(name), trust_remote_code=trust_remote_code, **files)
    if not trust_remote_code:
        forget_code(processor)
    return processor


def forget_code(part) -> list[str]:
    """Take out of a tokenizer, image processor or configuration what could name somebody's code when it is saved.

    Of the last two that is everything that their class does not know, but numbers. Returns the names.
    """
    if isinstance(part, transformers.PreTrainedTokenizerBase):
        return ["auto_map"] if part.init_kwargs.pop("auto_map", None) else []
    if not isinstance(part, (transformers.PreTrainedConfig, transformers.GenerationConfig, ImageProcessingMixin)):
        return []
    known = {*vars(type(part)()), *HARMLESS}
    odd = [name for name, value in vars(part).items() if name not in known and not isinstance(value, (int, float))]
    odd = [name for name in odd if not name.startswith("_") and not hasattr(type(part), name)]
    for name in odd:
        delattr(part, name)
    return odd


def load_language_model(
    name, *, dtype="auto", device=None, revision=None, trust_remote_code=False, weights=True, tokenizer=None
):
    """(model in eval mode, tokenizer) of a causal language model.

    name: folder or Hub id. dtype: "auto" (the checkpoint's), "float32", "bfloat16" or "float16". device: as torch names
    it; None: CUDA when there is one, else CPU. trust_remote_code: needed only for source that this package does not know.
    weights: False: none are read, for a process that another one will give its shares of them.
    tokenizer: folder or Hub id of the tokenizer; None: the model's own.
    ValueError, in one sentence, for whatever is wrong: weights missing, pickled, damaged, ...
    """
    read = _tokenizer_reader(tokenizer)
    return _load(name, AutoModelForCausalLM, read, dtype, device, revision, trust_remote_code, weights)


def load_classifier(name, *, dtype="auto", device=None, revision=None, trust_remote_code=False):
    """(model in eval mode, image processor) of an image classifier; as `load_language_model` for the rest."""
    return _load(name, AutoModelForImageClassification, _read_processor, dtype, device, revision, trust_remote_code)


def load_encoder(name, *, dtype="auto", device=None, revision=None, trust_remote_code=False, tokenizer=None):
    """(model in eval mode, tokenizer) of an encoder of text with the head that config.json names; the rest as above."""
    named = load_config(name, revision=revision, trust_remote_code=trust_remote_code).architectures or ["Model"]
    auto_model = getattr(transformers, auto_class_of(named[0]))
    return _load(name, auto_model, _tokenizer_reader(tokenizer), dtype, device, revision, trust_remote_code)


def _load(name, auto_model, read_tools, dtype, device, revision, trust_remote_code, weights=True):
    source = check_model_name(name)
    if dtype != "auto" and dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; expected auto, {', '.join(DTYPES)}")
    where = "" if isinstance(source, Path) else " (no folder here has that name, so the Hub was asked)"
    with one_sentence(f"model {str(name)!r} cannot be loaded{where}"):
        with checked_files(source, revision) as files:
            register_type_of(source, **files)
            options = {"trust_remote_code": trust_remote_code, **files}
            tools = read_tools(str(source), **options)
            if not weights:
                return _empty_model(auto_model, str(source), DTYPES.get(dtype), options).eval(), tools
            options |= {"dtype": DTYPES.get(dtype, "auto"), "output_loading_info": True, "use_safetensors": True}
            loaded = auto_model.from_pretrained(str(source), **options)
        model = loaded[0].to(choose_device(device)).eval()
    check_whole(name, loaded[1])
    return model, tools


def _empty_model(auto_model, source, dtype, options):
    """A model on the CPU whose parameters are memory that was never touched, and costs nothing; its buffers are right."""
    from accelerate import init_empty_weights

    config = AutoConfig.from_pretrained(source, **options)
    with init_empty_weights(include_buffers=False):
        model = auto_model.from_config(
            config, dtype=dtype or config.dtype, trust_remote_code=options["trust_remote_code"]
        )
    for module in model.modules():
        for name, value in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, torch.nn.Parameter(torch.empty_like(value, device="cpu")))
    model.tie_weights()
    return model


def kind_of_class(name: str) -> str | None:
    """ "language", "images", or None, from the name of a model's class."""
    if name.endswith("ForImageClassification"):
        return "images"
    return "language" if name.endswith(("ForCausalLM", "LMHeadModel")) else None


def kind_of_model(name, revision=None) -> str | None:
    """As `kind_of_class`, of a folder or Hub id, or "encoders" (of text); None for what cannot be read. ValueError: it is a
    vision tower."""
    try:
        config = load_config(name, revision=revision)
    except LOADING_ERRORS:  # whatever it is, loading a model of that name will say so
        return None
    named = (config.architectures or [""])[0]
    family = family_of_type(getattr(config, "base_model_type", config.model_type))
    if kind_of_class(named) != "images" and family in VISION:
        wanted = "a language model, an encoder of text, an image classifier or a pipeline; mhla_hf.convert takes towers"
        raise ValueError(f"model {str(name)!r} is a {named or config.model_type}; expected {wanted}")
    return "encoders" if family in ENCODERS else kind_of_class(named)


@contextlib.contextmanager
def checked_files(source, revision=None, index="config.json"):
    """While a model is loaded: gives the options of `from_pretrained` that take all its files from one commit.

    source: as `check_model_name` gives it. index: a file that every such model has. ValueError, OSError: a folder's
    files are cut off, or its shards lie outside.
    """
    if not isinstance(source, Path):
        commit = Path(cached_file(source, index, revision=revision)).parent.name
        with without_questions():
            yield {"revision": commit}
        return
    for shards in source.rglob("*.safetensors.index.json"):
        check_shards(shards)
    check_whole_files(source)
    with without_bars(), without_questions():
        yield {}


def check_whole(name, info):
    """ValueError when weights were missing. info: what `from_pretrained` gives with output_loading_info."""
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"model {str(name)!r} lacks {len(missing)} of its weights, such as {missing[0]!r}")


def check_shards(index):
    """The weight_map of a sharded model's index; ValueError for a file not beside it: transformers would follow its name."""
    shards = (read_json(index) or {}).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise ValueError(f"{index} has no weight_map: expected the index of a sharded model")
    for shard in shards.values():
        if not isinstance(shard, str) or Path(shard).name != shard or not Path(index).with_name(shard).is_file():
            raise ValueError(f"{index} names the file {shard!r}, which is not beside it")
    return shards


@contextlib.contextmanager
def without_bars():
    """transformers shows no progress bars meanwhile."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


@contextlib.contextmanager
def without_questions():
    """transformers refuses custom code that nobody trusted meanwhile, where it would ask at the terminal."""
    patience = dynamic_module_utils.TIME_OUT_REMOTE_CODE
    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
    try:
        yield
    finally:
        dynamic_module_utils.TIME_OUT_REMOTE_CODE = patience


def choose_device(device=None):
    """A torch device: `device`, or CUDA when there is one, else CPU. ValueError when torch does not have it."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with one_sentence(f"device {device!r} is not available here"):
        return torch.empty(0, device=device).device


def stored_dtype(folder):
    """The dtype that "auto" gives for a local model, e.g. "float32": the configuration's, else the first weight's."""
    config = read_json(Path(folder, "config.json")) or {}
    if not (named := config.get("dtype") or config.get("torch_dtype")):
        file = sorted(Path(folder).glob("*.safetensors"))[0]
        with one_sentence(f"{file} cannot be read"), safe_open(file, framework="pt") as weights:
            named = weights.get_tensor(next(iter(weights.keys()))).dtype
    return str(named).removeprefix("torch.")


def load_pipeline(source, *, dtype, device, revision=None, trust_remote_code=False):
    """A diffusers pipeline on `device`, from a folder or Hub id; ValueError as of `load_language_model`."""
    from diffusers import DiffusionPipeline

    place = check_model_name(source, pipeline=True)
    options = {"dtype": DTYPES.get(dtype), "trust_remote_code": trust_remote_code, "use_safetensors": True}
    try:
        with checked_files(place, revision, PIPELINE) as files:
            missing = missing_in_transformers(place, files)
            pipeline = None if missing else DiffusionPipeline.from_pretrained(str(place), **options, **files)
        if not (missing := missing or _missing_weights(pipeline)):
            pipeline = pipeline.to(choose_device(device))
    except LOADING_ERRORS as error:
        what = f"cannot be loaded: {first_line(error)}"
        if "trust_remote_code" in str(error) and not trust_remote_code:
            what = "holds the source of its MHLA model; give trust_remote_code to run it"
        raise ValueError(f"model {str(source)!r} {what}") from error
    check_whole(source, {"missing_keys": missing})
    for part in () if trust_remote_code else pipeline.components.values():
        forget_code(part)
        forget_code(getattr(part, "config", None))
    return pipeline


def missing_in_transformers(place, files):
    """Names of the weights that a pipeline's models of transformers lack; with accelerate no weight is read.

    place, files: see `checked_files`.
    """
    index = place / PIPELINE if isinstance(place, Path) else hf_hub_download(place, PIPELINE, **files)
    nowhere = {"device_map": "meta"} if importlib.util.find_spec("accelerate") else {}
    missing = []
    for part, named in read_json(index).items():
        ours = isinstance(named, list) and named[0] == "transformers"
        kind = getattr(transformers, str(named[1]), None) if ours else None
        if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel):
            how = {"subfolder": part, "use_safetensors": True, "output_loading_info": True, **nowhere, **files}
            _, info = kind.from_pretrained(str(place), **how)
            missing += [f"{part}.{name}" for name in info["missing_keys"]]
    return missing


def _missing_weights(pipeline):
    """Names of the weights of its own models that diffusers found in no file: it leaves them without data."""
    parts = {name: part for name, part in pipeline.components.items() if isinstance(part, torch.nn.Module)}
    return [f"{part}.{name}" for part in parts for name, value in parts[part].named_parameters() if value.is_meta]
