"""Features of images and the numbers made of them: FID, sFID, IS, precision, recall, CLIP score.

Inception is torch-fidelity's, the Inception score torchmetrics'. What is here they lack: torchmetrics' FID takes no moments,
which is what ADM's reference files hold, it has no precision and recall (arXiv 1904.06991), its CLIP score does not run with
transformers 5, and torch-fidelity's scores need a torchvision. A name is earned: only Inception with the published weights
makes a Fréchet distance "FID"; another extractor gives a "Fréchet distance (<its name>)".
"""

import dataclasses
import importlib
import math
import pickle
import warnings
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
from .records import hash_of

CHUNK = 1000
PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".JPEG")
INCEPTION = "Inception"
INCEPTION_SHA256 = "6726825d"  # of torch-fidelity's weights, the network of 2015: the digits that its file name has
FOREIGN = {"FID": "Fréchet distance", "sFID": "spatial Fréchet distance", "IS": "classifier score"}


@dataclasses.dataclass(frozen=True)
class Extractor:
    """What turns images into features.

    name: plain words, as they stand in tables. function: images uint8 `[B, 3, H, W]` -> features `[B, D]`, or a dict with
    "features" and perhaps "logits" `[B, C]` (for IS) and "spatial" `[B, S]` (for sFID). version: a text to change whenever
    the function or its weights change, as scores are known by it; None: the function's attribute `version`. genuine: it is
    FID's own network.
    """

    name: str
    function: Callable
    version: str | None = None
    genuine: bool = False

    def __post_init__(self):
        if not self.name or not set(self.name) <= {*map(chr, range(32, 127))} - set("|()/"):
            raise ValueError(f"extractor: name is {self.name!r}; expected plain words without | ( ) /")
        object.__setattr__(self, "version", version_of(self.version or self.function, f"extractor {self.name!r}"))

    def label(self, metric):
        """The metric's name in tables: FID only with FID's own network."""
        return metric if self.genuine else f"{FOREIGN.get(metric, metric)} ({self.name})"

    def __call__(self, images):
        found = self.function(images)
        found = found if isinstance(found, dict) else {"features": found}
        return {name: values.detach().float().cpu().contiguous() for name, values in found.items()}


def version_of(thing, what):
    """`thing` itself where it is a text, else its attribute `version`; ValueError when that is none."""
    version = thing if isinstance(thing, str) else getattr(thing, "version", None)
    if not isinstance(version, str) or not version:
        raise ValueError(f"{what}: version is {version!r}; expected a text that changes when what it computes does")
    return version


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

    name = INCEPTION if genuine else f"{INCEPTION}, other weights"
    return Extractor(name, extract, INCEPTION_SHA256 if genuine else hash_file(weights), genuine)


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


def hash_files(files, folder, what="files", progress=False):
    """Of the paths of `files` below `folder` and their bytes; 16 hex digits. progress: a bar called `what` on stderr."""
    shown = tqdm(sorted(files), desc=what, disable=not progress)
    return hash_of([[file.relative_to(folder).as_posix(), hash_file(file)] for file in shown])


@dataclasses.dataclass(frozen=True)
class Moments:
    """mean `[D]` and covariance `[D, D]` (over n - 1), float64."""

    mean: torch.Tensor
    covariance: torch.Tensor

    @classmethod
    def of(cls, features):
        """Of features `[N, D]`; ValueError for fewer than two."""
        if features.ndim != 2 or features.shape[0] < 2:
            raise ValueError(f"features: got shape {tuple(features.shape)}; expected [N, D] with N of at least 2")
        features = features.double()
        return cls(features.mean(0), torch.cov(features.T).reshape(features.shape[1], features.shape[1]))


def frechet_distance(sample, reference):
    """Fréchet distance of two `Moments`: |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)), a float."""
    if sample.mean.shape != reference.mean.shape:
        raise ValueError(
            f"reference has {len(reference.mean)} features, the samples {len(sample.mean)}; expected equal"
        )
    first, second = sample.covariance.double(), reference.covariance.double()
    values, vectors = torch.linalg.eigh(first)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    # C1 C2 and C1^(1/2) C2 C1^(1/2) have the same eigenvalues, and the second is symmetric
    overlap = torch.linalg.eigvalsh(root @ second @ root).clamp(min=0).sqrt().sum()
    distance = (sample.mean - reference.mean).double().square().sum() + first.trace() + second.trace() - 2 * overlap
    return max(0.0, distance.item())


def inception_score(logits, splits=10, seed=0):
    """(mean, standard error) over `splits` parts of exp of the mean KL between p(y|x) and p(y). logits `[N, C]`.

    The error of a single part is None.
    """
    if len(logits) < 2 * splits:
        raise ValueError(f"images: {len(logits)} are too few for {splits} splits; expected at least {2 * splits}")
    try:
        from torchmetrics.image.inception import InceptionScore
    except (ImportError, RuntimeError) as error:  # RuntimeError: a torchvision that was made for another torch
        raise ImportError(
            f"IS needs torchmetrics, which cannot be imported ({first_line(error)}): pip install 'mhla_hf[images]'"
        ) from error
    given = torch.nn.Identity()  # torchmetrics' feature extractor: it gets features in place of images
    given.num_features = logits.shape[1]
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore", UserWarning)
        torch.manual_seed(seed)
        metric = InceptionScore(feature=given, splits=splits, sync_on_compute=False)
        metric.update(logits.double())
        mean, spread = metric.compute()
    return mean.item(), spread.item() / math.sqrt(splits) if splits > 1 else None


def precision_recall(sample, reference, neighbors=3, chunk=2048):
    """(precision, recall) of features `[N, D]` and `[R, D]`.

    precision: share of samples that lie within the distance of some reference to its `neighbors`-th nearest reference;
    recall: the same with the roles exchanged (arXiv 1904.06991).
    """
    least = neighbors + 1
    if min(len(sample), len(reference)) < least:
        raise ValueError(
            f"features: {len(sample)} samples, {len(reference)} references; expected {least} or more of each"
        )
    sample, reference = sample.double(), reference.double()
    pairs = ((sample, reference), (reference, sample))
    return tuple(_covered(points, others, neighbors, chunk) for points, others in pairs)


def _covered(points, centers, neighbors, chunk):
    """Share of `points` within the distance of some of the `centers` to its `neighbors`-th nearest other one."""
    radii = [torch.cdist(part, centers).kthvalue(neighbors + 1, dim=1).values for part in centers.split(chunk)]
    radii = torch.cat(radii)
    inside = [(torch.cdist(part, centers) <= radii).any(1) for part in points.split(chunk)]
    return torch.cat(inside).double().mean().item()


def clip_scores(images, prompts, model, processor):
    """100 max(cos, 0) between each image and its prompt, a float64 tensor `[N]`.

    images: PIL images. prompts: texts; what is longer than the model's window is cut. model: transformers' CLIPModel.
    """
    inputs = processor(text=list(prompts), images=list(images), return_tensors="pt", padding=True, truncation=True)
    with torch.inference_mode():
        found = model(**{key: value.to(model.device) for key, value in inputs.items()})
    pictures, texts = found.image_embeds.double(), found.text_embeds.double()
    cosine = torch.nn.functional.cosine_similarity(pictures, texts, dim=-1)
    return 100 * cosine.clamp(min=0).cpu()


def share_error(share, count):
    """Standard error of a share of `count` independent cases."""
    return math.sqrt(share * (1 - share) / count)
