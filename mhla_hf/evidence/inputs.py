"""What a model gets to see when its attention is looked at: text, images, and the model itself from its folder."""

import inspect
from pathlib import Path
from pydoc_data.topics import topics

import torch
from PIL import Image
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageClassification

from ..checkpoints.load import (
    DTYPES,
    LOADING_ERRORS,
    check_model_name,
    check_whole,
    checked_files,
    first_line,
    load_language_model,
    load_pipeline,
)
from ..models.families import VISION, family_of_type
from ..training.data import hub_id, load_split, open_text
from .digits import DIGITS, load_digits

DEFAULT_TEXT = 40_000
PROMPT = "a photograph of a lighthouse by the sea"

ENDINGS = {"ForCausalLM": "language", "LMHeadModel": "language", "ForImageClassification": "images"}


def kind_of(class_name: str) -> str | None:
    """ "language", "images", or None, from the name of a model's class."""
    return next((kind for ending, kind in ENDINGS.items() if class_name.endswith(ending)), None)


def is_pipeline_folder(name) -> bool:
    """Whether a pipeline of diffusers lies at `name`."""
    return (Path(name) / "model_index.json").is_file()


def pipeline_call(pipe, data, samples: int):
    """Arguments of two steps of a pipeline, and what they are: its first classes, or `data` as the prompt."""
    call = {"num_inference_steps": 2, "generator": torch.Generator().manual_seed(0), "output_type": "np"}
    if "class_labels" in inspect.signature(pipe.__call__).parameters:
        labels = list(range(samples))
        return call | {"class_labels": labels}, f"two steps of {type(pipe).__name__} for {samples} classes"
    prompt = PROMPT if data is None else str(data)
    return call | {"prompt": prompt}, f"two steps of {type(pipe).__name__} for {prompt!r}"


def load_any(name, trust_remote_code=False):
    """(model, tokenizer or image processor) of a language model or an image classifier, or (pipeline, None)."""
    pipeline = is_pipeline_folder(name)
    source = check_model_name(name, pipeline=pipeline)
    if pipeline:
        return load_pipeline(name, dtype="float32", device="cpu", trust_remote_code=trust_remote_code), None
    try:
        config = AutoConfig.from_pretrained(str(source), trust_remote_code=trust_remote_code)
    except LOADING_ERRORS as error:
        raise ValueError(f"model {str(name)!r} cannot be loaded: {first_line(error)}") from error
    kind = kind_of((config.architectures or [""])[0])
    if kind == "language":
        return load_language_model(name, dtype="float32", device="cpu", trust_remote_code=trust_remote_code)
    if kind is None:
        found = (config.architectures or ["model of unknown class"])[0]
        raise ValueError(
            f"model {str(name)!r} is a {found}; expected a causal language model, an image classifier, or a loaded model "
            "with its inputs"
        )
    return load_classifier(name, dtype="float32", trust_remote_code=trust_remote_code)


def load_classifier(name, *, dtype="auto", revision=None, trust_remote_code=False):
    """(model in eval mode, image processor) of an image classifier, on the CPU; as `load_language_model` for the rest."""
    source = check_model_name(name)
    if dtype != "auto" and dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; expected auto, {', '.join(DTYPES)}")
    try:
        with checked_files(source, revision) as files:
            options = {"trust_remote_code": trust_remote_code, **files}
            processor = AutoImageProcessor.from_pretrained(str(source), **options)
            options |= {"dtype": DTYPES.get(dtype, "auto"), "output_loading_info": True, "use_safetensors": True}
            model, info = AutoModelForImageClassification.from_pretrained(str(source), **options)
    except LOADING_ERRORS as error:
        raise ValueError(f"model {str(name)!r} cannot be loaded: {first_line(error)}") from error
    check_whole(name, info)
    return model.eval(), processor


def is_classifier_name(name, revision=None) -> bool:
    """Whether a folder or Hub id is an image classifier; False for what cannot be read. ValueError: it is a bare tower."""
    try:
        config = AutoConfig.from_pretrained(str(name), revision=revision, trust_remote_code=False)
    except LOADING_ERRORS:  # whatever it is, loading a model of that name will say so
        return False
    named = (config.architectures or [""])[0]
    if kind_of(named) != "images" and family_of_type(config.model_type) in VISION:
        raise ValueError(
            f"model {str(name)!r} is a {named or config.model_type}; expected a causal language model, an image classifier "
            "or a pipeline; vision towers are converted in Python, by mhla_hf.convert"
        )
    return kind_of(named) == "images"


def text_batch(model, tokenizer, data, samples: int, length: int):
    """Token ids int64 `[samples, length]` of a text (None: the end of the Python language reference), and what they are."""
    if tokenizer is None:
        raise ValueError("models: a language model came without its tokenizer, expected its folder or `inputs`")
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit and length > limit:
        raise ValueError(f"length: got {length}, expected at most the {limit} positions of {type(model).__name__}")
    name = "pydoc_data.topics" if data is None else Path(data).name
    if data is None:
        text = "\n\n".join(topics.values())[-DEFAULT_TEXT:]
        data = tokenizer(text, return_tensors="pt", add_special_tokens=False, verbose=False)["input_ids"][0]
    reader = open_text(data, tokenizer).reader(length, seed=0, stage=0)
    try:
        ids, _ = reader.take(samples)
    finally:
        reader.close()
    return ids, f"{samples} sequences of {length} tokens of {name}"


def image_batch(model, processor, data, samples: int):
    """Pixel values `[samples, channels, H, W]` as the model's processor makes them, and what they are in words.

    data: a folder of images or the id of a dataset with a column of images; None: the test images of the digits.
    """
    if processor is None:
        raise ValueError("models: an image classifier came without its processor, expected its folder or `inputs`")
    if data is None:
        _, (images, _) = load_digits(_side(model.config.image_size))
        pictures, name = [Image.fromarray(image[0].numpy()) for image in images[:samples]], DIGITS
    else:
        pictures, name = _pictures(data, samples), Path(data).name
    if len(pictures) < samples:
        raise ValueError(f"samples: got {samples}, expected at most the {len(pictures)} images of {name!r}")
    mode = "L" if getattr(model.config, "num_channels", 3) == 1 else "RGB"
    pixels = processor(images=[picture.convert(mode) for picture in pictures], return_tensors="pt")["pixel_values"]
    return pixels, f"{samples} images of {name}"


def _side(size):
    return min(size) if isinstance(size, (list, tuple)) else size


def _pictures(data, samples):
    if Path(data).is_dir():
        rows = load_split(str(data), "imagefolder", data_dir=str(data), streaming=True)
    else:
        rows = load_split(str(data), *hub_id(str(data)), streaming=True)
    columns = [name for name, kind in (rows.features or {}).items() if type(kind).__name__ == "Image"]
    if not columns:
        raise ValueError(f"data: {str(data)!r} has no column of images, expected one")
    return [row[columns[0]] for row in rows.take(samples)]
