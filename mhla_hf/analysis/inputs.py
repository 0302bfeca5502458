"""What a model gets to see when its attention is looked at, text or images; and the model itself from its folder."""

from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from PIL import Image

from ..checkpoints.load import kind_of_class, load_classifier, load_config, load_language_model, optional
from ..data import load_split, open_text

DEFAULT_TEXT = 40_000
DIGITS, HELD_OUT_DIGITS = "scikit-learn digits", 497


def load_any(name, device, trust_remote_code=False):
    """(model, tokenizer or image processor) of a language model or an image classifier."""
    named = (load_config(name, trust_remote_code=trust_remote_code).architectures or ["model of unknown class"])[0]
    load = {"language": load_language_model, "images": load_classifier}.get(kind_of_class(named))
    if load is None:
        wanted = "a causal language model, an image classifier, or a loaded model with its inputs"
        raise ValueError(f"model {str(name)!r} is a {named}; expected {wanted}")
    return load(name, dtype="float32", device=device, trust_remote_code=trust_remote_code)


def make_batch(model, tools, data, samples: int, length: int):
    """(keyword arguments of a model's forward, what they are in words); tools: its tokenizer or image processor."""
    if kind_of_class(type(model).__name__) == "language":
        ids, what = read_text(model, tools, data, samples, length)
        batch = {"input_ids": ids.to(model.device), "use_cache": False}
        return batch, f"{samples} sequences of {length} tokens of {what}"
    pictures, name = read_images(model, data, samples)
    if len(pictures) < samples:
        raise ValueError(f"samples: got {samples}, expected at most the {len(pictures)} images of {name!r}")
    mode = "L" if getattr(model.config, "num_channels", 3) == 1 else "RGB"
    pixels = tools(images=[picture.convert(mode) for picture in pictures], return_tensors="pt")["pixel_values"]
    return {"pixel_values": pixels.to(model.device)}, f"{samples} images of {name}"


def default_text() -> str:
    """The end of the Python language reference, a text that every Python has."""
    return "\n\n".join(topics.values())[-DEFAULT_TEXT:]


def read_text(model, tokenizer, data, samples: int, length: int):
    """Token ids int64 `[samples, length]` of a text (None: the end of the Python language reference), and its name."""
    if length > (limit := getattr(model.config, "max_position_embeddings", length)):
        raise ValueError(f"length: got {length}, expected at most the {limit} positions of {type(model).__name__}")
    name = "pydoc_data.topics" if data is None else Path(data).name
    if data is None:
        data = tokenizer(default_text(), return_tensors="pt", add_special_tokens=False, verbose=False)["input_ids"][0]
    return open_text(data, tokenizer).reader(length, seed=0, stage=0).take(samples)[0], name


def read_images(model, data, samples: int):
    """PIL images of a folder or of a dataset with a column of images (None: the held-out digits), and their name."""
    if data is None:
        size = model.config.image_size
        _, (images, _) = load_digits(min(size) if isinstance(size, (list, tuple)) else size)
        return [Image.fromarray(image[0].numpy()) for image in images[:samples]], DIGITS
    source = ("imagefolder", None, str(data)) if Path(data).is_dir() else ()
    rows = load_split(str(data), *source, streaming=True)
    column = next((key for key, kind in (rows.features or {}).items() if type(kind).__name__ == "Image"), None)
    if column is None:
        raise ValueError(f"data: {str(data)!r} has no column of images, expected one")
    return [row[column] for row in rows.take(samples)], Path(data).name


def load_digits(size: int = 32):
    """scikit-learn's 1,797 digits, 8 x 8 scans, enlarged bilinearly once, so that all see the same pixels.

    Returns (train, test): each images uint8 `[N, 1, size, size]` and labels int64 `[N]`; N is 1,300 and 497.
    """
    with optional("data: the digits", "scikit-learn", "eval"):
        from sklearn import datasets
    found = datasets.load_digits()
    images = torch.from_numpy(found.images).float()[:, None]
    images = F.interpolate(images, size=(size, size), mode="bilinear", align_corners=False)
    images = (images * (255 / 16)).round().clamp(0, 255).to(torch.uint8)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[:-HELD_OUT_DIGITS], order[-HELD_OUT_DIGITS:]
    labels = torch.from_numpy(found.target).long()
    return (images[train], labels[train]), (images[test], labels[test])
