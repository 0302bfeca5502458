"""Features of images: the Inception network of FID by torch-fidelity, or any extractor of the user's; kept in chunks.

Unusual: a name is earned. Only Inception with the published weights (recognised by their sha256) makes a Fréchet distance
"FID"; with any other extractor it is called "Fréchet distance (<extractor's name>)".
"""

import dataclasses
import importlib
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from ..checkpoints.checksums import hash_file
from ..checkpoints.files import file_aside
from ..checkpoints.load import first_line

CHUNK = 1000
PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".JPEG")
INCEPTION = "Inception"
INCEPTION_SHA256 = (
    "6726825d"  # of torch-fidelity's weights, the TensorFlow network of 2015; the digits its file name has
)
FOREIGN = {
    "FID": "Fréchet distance",
    "sFID": "spatial Fréchet distance",
    "IS": "classifier score",
    "precision": "precision",
    "recall": "recall",
}


@dataclasses.dataclass(frozen=True)
class Extractor:
    """What turns images into features.

    name: plain words, as they stand in tables. function: images uint8 `[B, 3, H, W]` -> features `[B, D]`, or a dict with
    "features" and perhaps "logits" `[B, C]` (for IS) and "spatial" `[B, S]` (for sFID). genuine: it is FID's own network.
    """

    name: str
    function: Callable
    genuine: bool = False

    def __post_init__(self):
        if not self.name or not set(self.name) <= {*map(chr, range(32, 127))} - set("|()/"):
            raise ValueError(f"extractor: name is {self.name!r}; expected plain words without | ( ) /")

    def label(self, metric):
        """The metric's name in tables: FID only with FID's own network."""
        return metric if self.genuine else f"{FOREIGN[metric]} ({self.name})"

    def __call__(self, images):
        found = self.function(images)
        found = found if isinstance(found, dict) else {"features": found}
        return {name: values.detach().float().cpu().contiguous() for name, values in found.items()}


def find_extractor(given, weights=None, device="cpu"):
    """An `Extractor`: the object itself, "inception", or what the function of "module:function" returns."""
    if isinstance(given, Extractor):
        return given
    if given == "inception":
        return inception(weights, device)
    module, colon, name = str(given).partition(":")
    if not colon:
        raise ValueError(f"extractor is {given!r}; expected 'inception', 'module:function' or an Extractor")
    try:
        made = getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError) as error:
        raise ValueError(f"extractor {given!r} is not there: {first_line(error)}") from error
    if not isinstance(made, Extractor) or made.genuine:
        raise ValueError(
            f"extractor {given!r} returned {type(made).__name__}; expected an Extractor that is not FID's own"
        )
    return made


def inception(weights=None, device="cpu"):
    """FID's Inception by torch-fidelity: features `[B, 2048]`, logits without bias `[B, 1008]`, spatial `[B, 2023]`.

    weights: a local file; None: torch-fidelity fetches it once. The spatial features are the first 7 channels of the 1x1
    branch of the block that TensorFlow calls mixed_6, 17 x 17, as in ADM's evaluator and in its order, channels last, which
    the moments of its reference files have. Images may have any size.
    """
    try:
        from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
    except (ImportError, RuntimeError) as error:
        raise ImportError(
            "FID needs torch-fidelity and a torchvision that fits torch, of which one is missing "
            f"({first_line(error)}): pip install 'mhla_hf[images]'"
        ) from error
    genuine = weights is None or (Path(weights).is_file() and hash_file(weights).startswith(INCEPTION_SHA256))
    if not genuine:
        _check_weights(weights)
    try:
        network = FeatureExtractorInceptionV3(
            "inception-v3-compat", ["2048", "logits_unbiased"], feature_extractor_weights_path=weights
        )
    except (OSError, RuntimeError) as error:
        raise ValueError(
            f"weights: Inception's cannot be had ({first_line(error)}); give their file as weights"
        ) from error
    network = network.to(device).eval()
    kept = {}
    network.Mixed_6d.branch1x1.register_forward_hook(lambda module, given, output: kept.update(spatial=output))

    def extract(images):
        with torch.inference_mode():
            features, logits = network(images.to(device))
        return {
            "features": features,
            "logits": logits,
            "spatial": kept["spatial"][:, :7].permute(0, 2, 3, 1).flatten(1),
        }

    return Extractor(INCEPTION if genuine else f"{INCEPTION}, other weights", extract, genuine)


def _check_weights(weights):
    """ValueError for a file that holds more than tensors or cannot be read: torch-fidelity unpickles whatever it is."""
    try:
        if Path(weights).is_file():
            torch.load(weights, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(f"weights: {str(weights)!r} is no file of tensors alone: {first_line(error)}") from error


def read_image(image):
    """uint8 `[3, H, W]` of an image file, or of an array `[H, W, 3]`."""
    if isinstance(image, numpy.ndarray):
        return torch.from_numpy(numpy.ascontiguousarray(image)).permute(2, 0, 1)
    try:
        with Image.open(image) as opened:
            return torch.from_numpy(numpy.array(opened.convert("RGB"))).permute(2, 0, 1)
    except OSError as error:
        raise ValueError(f"{image} is no image that can be read: {first_line(error)}") from None


def extract_features(images, extractor, cache, *, batch_size, processes, progress, what):
    """Features of images, kept in `cache` in chunks of 1,000: a stop loses less than one chunk.

    images: paths, or a uint8 array `[N, H, W, 3]`. Returns a dict name -> `[N, ...]`, in their order, on the first process;
    None on the others.
    """
    count = len(images)
    cache = Path(cache)
    cache.mkdir(parents=True, exist_ok=True)
    starts = list(range(0, count, CHUNK))
    chunks = {start: cache / f"{start:08d}-{min(start + CHUNK, count):08d}.safetensors" for start in starts}
    mine = [start for start in processes.share(starts) if not chunks[start].is_file()]
    total = sum(min(CHUNK, count - start) for start in mine)
    with tqdm(total=total, desc=what, disable=not (progress and processes.first)) as bar:
        for start in mine:
            parts = []
            for index in range(start, min(start + CHUNK, count), batch_size):
                batch = [read_image(images[i]) for i in range(index, min(index + batch_size, start + CHUNK, count))]
                if len({image.shape for image in batch}) > 1:
                    raise ValueError(f"{what}: images of different sizes; expected all of one size")
                parts.append(extractor(torch.stack(batch)))
                bar.update(len(batch))
            with file_aside(chunks[start]) as aside:
                save_file({name: torch.cat([part[name] for part in parts]) for name in parts[0]}, aside)
    processes.wait()
    if not processes.first:
        return None
    loaded = [load_file(path) for path in chunks.values()]
    return {name: torch.cat([part[name] for part in loaded]) for name in loaded[0]}
