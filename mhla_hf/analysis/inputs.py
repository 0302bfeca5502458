"""Inputs for the analysis of a model's attention: text or images."""

from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image

from ..checkpoints.file_io import PathLike
from ..checkpoints.load import Loaded, find_class_kind, load_classifier, load_config, load_language_model, require_extra
from ..data import load_split, open_text

DEFAULT_TEXT_LENGTH = 40_000  # characters
DIGITS = "scikit-learn digits"
HELD_OUT_DIGITS = 497


def load_any(name: PathLike, device: torch.device | str | None, trust_remote_code: bool = False) -> Loaded:
    """Load a language model with its tokenizer, or an image classifier with its image processor, in float32.

    Raises:
        ValueError: `name` is another kind of model, or cannot be loaded.
    """
    config = load_config(name, trust_remote_code=trust_remote_code)
    class_name = (config.architectures or ["model of unknown class"])[0]
    kind = find_class_kind(class_name)
    if kind is None:
        expected = "a causal language model, an image classifier, or a loaded model with its inputs"
        raise ValueError(f"model: got {str(name)!r}, a {class_name}, expected {expected}.")
    load = load_language_model if kind == "language" else load_classifier
    return load(name, dtype="float32", device=device, trust_remote_code=trust_remote_code)


def make_batch(model: Any, processor: Any, data: Any, samples: int, length: int) -> tuple[dict[str, Any], str]:
    """Build a batch for a model.

    Args:
        model: A causal language model or an image classifier.
        processor: The model's tokenizer or image processor.
        data: See `analyze`.
        samples: Number of sequences or images.
        length: Tokens in a sequence.

    Returns:
        (keyword arguments of the model's forward, description of the inputs).

    Raises:
        ValueError: The data cannot be opened, or are too few or too long for the model.
    """
    if find_class_kind(type(model).__name__) == "language":
        ids, name = read_text(model, processor, data, samples, length)
        batch = {"input_ids": ids.to(model.device), "use_cache": False}
        return batch, f"{samples} sequences of {length} tokens of {name}"
    images, name = read_images(model, data, samples)
    if len(images) < samples:
        raise ValueError(f"samples: got {samples}, expected at most the {len(images)} images of {name!r}.")
    mode = "L" if getattr(model.config, "num_channels", 3) == 1 else "RGB"
    pixels = processor(images=[image.convert(mode) for image in images], return_tensors="pt")["pixel_values"]
    return {"pixel_values": pixels.to(model.device)}, f"{samples} images of {name}"


def default_text() -> str:
    """Return the end of the Python language reference, a text that is part of every Python installation."""
    return "\n\n".join(topics.values())[-DEFAULT_TEXT_LENGTH:]


def read_text(model: Any, tokenizer: Any, data: Any, samples: int, length: int) -> tuple[torch.Tensor, str]:
    """Return token ids int64 [samples, length] of a text (default: `default_text()`), and the text's name.

    Raise ValueError if `length` exceeds the model's positions, or the text cannot be opened.
    """
    if length > (limit := getattr(model.config, "max_position_embeddings", length)):
        raise ValueError(f"length: got {length}, expected at most the {limit} positions of {type(model).__name__}.")
    name = "pydoc_data.topics" if data is None else Path(data).name
    if data is None:
        data = tokenizer(default_text(), return_tensors="pt", add_special_tokens=False, verbose=False)["input_ids"][0]
    return open_text(data, tokenizer).reader(length, seed=0, stage=0).take(samples)[0], name


def read_images(model: Any, data: Any, samples: int) -> tuple[list[Image.Image], str]:
    """Return at most `samples` images from a folder or a dataset, and the name of the data.

    Without `data`, they are held-out digits of the size that the model reads. Raise ValueError if there is no column of
    images.
    """
    if data is None:
        size = model.config.image_size
        _, (digits, _) = load_digits(min(size) if isinstance(size, (list, tuple)) else size)
        return [Image.fromarray(digit[0].numpy()) for digit in digits[:samples]], DIGITS
    builder = ("imagefolder", None, str(data)) if Path(data).is_dir() else ()
    rows = load_split(str(data), *builder, streaming=True)
    column = next((key for key, feature in (rows.features or {}).items() if type(feature).__name__ == "Image"), None)
    if column is None:
        raise ValueError(f"data: got {str(data)!r}, which has no column of images, expected one.")
    return [row[column] for row in rows.take(samples)], Path(data).name


Split = tuple[torch.Tensor, torch.Tensor]


def load_digits(size: int = 32) -> tuple[Split, Split]:
    """Load scikit-learn's 1,797 digits, 8 x 8 scans, enlarged bilinearly to `size` x `size`.

    Returns:
        (train, test), each (images uint8 [N, 1, size, size], labels int64 [N]), with N = 1,300 and 497.
    """
    with require_extra("data: the digits", "scikit-learn", "eval"):
        from sklearn import datasets
    digits: Any = datasets.load_digits()
    images = torch.from_numpy(digits.images).float()[:, None]
    images = F.interpolate(images, size=(size, size), mode="bilinear", align_corners=False)
    images = (images * (255 / 16)).round().clamp(0, 255).to(torch.uint8)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train = order[:-HELD_OUT_DIGITS]
    test = order[-HELD_OUT_DIGITS:]
    labels = torch.from_numpy(digits.target).long()
    return (images[train], labels[train]), (images[test], labels[test])
