"""What a model gets to see when its attention is looked at: text, images, a prompt; and the model itself from its folder."""

import inspect
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from PIL import Image

from ..checkpoints.load import (
    is_pipeline,
    kind_of_class,
    load_classifier,
    load_config,
    load_language_model,
    load_pipeline,
)
from ..training.data import hub_id, load_split, open_text

DEFAULT_TEXT = 40_000
PROMPT = "a photograph of a lighthouse by the sea"
DIGITS, HELD_OUT_DIGITS = "scikit-learn digits", 497


def load_any(name, trust_remote_code=False):
    """(model, tokenizer or image processor) of a language model or an image classifier, or (pipeline, None)."""
    options = {"dtype": "float32", "device": "cpu", "trust_remote_code": trust_remote_code}
    if is_pipeline(name):
        return load_pipeline(name, **options), None
    named = (load_config(name, trust_remote_code=trust_remote_code).architectures or ["model of unknown class"])[0]
    load = {"language": load_language_model, "images": load_classifier}.get(kind_of_class(named))
    if load is None:
        raise ValueError(
            f"model {str(name)!r} is a {named}; expected a causal language model, an image classifier, or a loaded model "
            "with its inputs"
        )
    return load(name, **options)


def prompt_batch(pipe, data, samples: int):
    """Arguments of two steps of a pipeline, and what they are: its first classes, or `data` as the prompt."""
    call = {"num_inference_steps": 2, "generator": torch.Generator().manual_seed(0), "output_type": "np"}
    if "class_labels" in inspect.signature(pipe.__call__).parameters:
        labels = list(range(samples))
        return call | {"class_labels": labels}, f"two steps of {type(pipe).__name__} for {samples} classes"
    prompt = PROMPT if data is None else str(data)
    return call | {"prompt": prompt}, f"two steps of {type(pipe).__name__} for {prompt!r}"


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

    data: a folder of images or the id of a dataset with a column of images; None: the held-out digits.
    """
    if processor is None:
        raise ValueError("models: an image classifier came without its processor, expected its folder or `inputs`")
    if data is None:
        size = model.config.image_size
        _, (images, _) = load_digits(min(size) if isinstance(size, (list, tuple)) else size)
        pictures, name = [Image.fromarray(image[0].numpy()) for image in images[:samples]], DIGITS
    else:
        pictures, name = _pictures(data, samples), Path(data).name
    if len(pictures) < samples:
        raise ValueError(f"samples: got {samples}, expected at most the {len(pictures)} images of {name!r}")
    mode = "L" if getattr(model.config, "num_channels", 3) == 1 else "RGB"
    pixels = processor(images=[picture.convert(mode) for picture in pictures], return_tensors="pt")["pixel_values"]
    return pixels, f"{samples} images of {name}"


def _pictures(data, samples):
    if Path(data).is_dir():
        rows = load_split(str(data), "imagefolder", data_dir=str(data), streaming=True)
    else:
        rows = load_split(str(data), *hub_id(str(data)), streaming=True)
    columns = [name for name, kind in (rows.features or {}).items() if type(kind).__name__ == "Image"]
    if not columns:
        raise ValueError(f"data: {str(data)!r} has no column of images, expected one")
    return [row[columns[0]] for row in rows.take(samples)]


def load_digits(size: int = 32, seed: int = 0):
    """scikit-learn's 1,797 digits, 8 x 8 scans enlarged bilinearly once, so that whoever trains, scores or looks sees the
    same pixels.

    Returns (train, test): each images uint8 `[N, 1, size, size]` and labels int64 `[N]`; N is 1,300 and 497. seed: of the
    split. ImportError: scikit-learn is missing.
    """
    try:
        from sklearn import datasets
    except ImportError as error:
        raise ImportError("the digits come with scikit-learn, which is missing: pip install 'mhla_hf[eval]'") from error
    found = datasets.load_digits()
    images = torch.from_numpy(found.images).float()[:, None]
    images = F.interpolate(images, size=(size, size), mode="bilinear", align_corners=False)
    images = (images * (255 / 16)).round().clamp(0, 255).to(torch.uint8)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    images, labels = images[order], torch.from_numpy(found.target).long()[order]
    return (images[:-HELD_OUT_DIGITS], labels[:-HELD_OUT_DIGITS]), (
        images[-HELD_OUT_DIGITS:],
        labels[-HELD_OUT_DIGITS:],
    )
