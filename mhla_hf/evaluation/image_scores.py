"""Features of images and the numbers made of them: FID, sFID, IS, precision, recall, CLIP score.

Inception is torch-fidelity's. The rest is a few lines each: torchmetrics' FID takes no moments, which ADM's reference files
hold, it has no precision and recall (arXiv 1904.06991), its CLIP score does not run with transformers 5; torch-fidelity's
scores need a torchvision. Only Inception with the published weights makes a Fréchet distance "FID"; another extractor gives
a "Fréchet distance (<its name>)".
"""

import importlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tqdm import tqdm
from transformers import CLIPModel, CLIPProcessor

from ..checkpoints.file_io import atomic_file
from ..checkpoints.fingerprint import hash_file, hash_json
from ..checkpoints.load import no_code_prompts, summarize_error, wrap_errors
from ..checkpoints.values import checked, checked_field

CHUNK = 1000
PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".JPEG")
INCEPTION = "Inception"
INCEPTION_SHA256 = "6726825d"  # of torch-fidelity's weights, the network of 2015: the digits that its file name has
FOREIGN = {"FID": "Fréchet distance", "sFID": "spatial Fréchet distance", "IS": "classifier score"}


@checked
class Extractor:
    """What turns images into features.

    name: plain words, as they stand in tables. function: images uint8 `[B, 3, H, W]` -> features `[B, D]`, or a dict with
    "features" and perhaps "logits" `[B, C]` (for IS) and "spatial" `[B, S]` (for sFID). version: a text to change whenever
    the function or its weights change, as scores are known by it. genuine: it is FID's own network.
    """

    name: str
    function: Callable
    version: str = checked_field(bool, "a text that changes when what it computes does")
    genuine: bool = False

    def label(self, metric):
        """The metric's name in tables: FID only with FID's own network."""
        return metric if self.genuine else f"{FOREIGN.get(metric, metric)} ({self.name})"

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
    module, _, name = str(given).partition(":")
    with wrap_errors(f"extractor is {given!r}; expected 'inception', 'module:function' or an Extractor"):
        return getattr(importlib.import_module(module), name)()


def inception(weights=None, device="cpu"):
    """FID's Inception by torch-fidelity: features `[B, 2048]`, logits without bias `[B, 1008]`, spatial `[B, 2023]`.

    weights: a local file; None: torch-fidelity fetches it once. The spatial features are those of ADM's evaluator, in its
    order, which the moments of its reference files have. Images may have any size.
    """
    try:
        from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
    except (ImportError, RuntimeError) as error:  # RuntimeError: a torchvision that was made for another torch
        lacks = f"torch-fidelity and a torchvision that fits torch, of which one is missing ({summarize_error(error)})"
        raise ImportError(f"FID needs {lacks}: pip install 'mhla_hf[images]'") from error
    version = INCEPTION_SHA256 if weights is None else hash_file(weights) if Path(weights).is_file() else ""
    genuine = version.startswith(INCEPTION_SHA256)
    with wrap_errors(f"weights is {weights!r}, of which no Inception can be made; expected its file of tensors"):
        if version and not genuine:
            torch.load(weights, map_location="cpu", weights_only=True)  # torch-fidelity unpickles whatever it is
        outputs = ["2048", "logits_unbiased"]
        network = FeatureExtractorInceptionV3("inception", outputs, feature_extractor_weights_path=weights)
    network = network.to(device).eval()
    kept = {}
    network.Mixed_6d.branch1x1.register_forward_hook(lambda module, given, output: kept.update(spatial=output))

    def extract(images):
        with torch.inference_mode():
            features, logits = network(images.to(device))
        # the first 7 channels of the 1x1 branch of the block that TensorFlow calls mixed_6, 17 x 17, channels last
        spatial = kept["spatial"][:, :7].permute(0, 2, 3, 1).flatten(1)
        return {"features": features, "logits": logits, "spatial": spatial}

    return Extractor(INCEPTION if genuine else f"{INCEPTION}, other weights", extract, version, genuine)


def read_image(image):
    """uint8 `[3, H, W]` of an image file, or of an array `[H, W, 3]`."""
    if isinstance(image, numpy.ndarray):
        return torch.from_numpy(numpy.ascontiguousarray(image)).permute(2, 0, 1)
    with wrap_errors(f"{image} is no image that can be read"), Image.open(image) as opened:
        return torch.from_numpy(numpy.array(opened.convert("RGB"))).permute(2, 0, 1)


def extract_features(images, extractor, cache, *, batch_size, state, progress, what):
    """Features of images, kept in `cache` in chunks of 1,000: a stop loses less than one chunk.

    images: paths, or a uint8 array `[N, H, W, 3]`. state: accelerate's, of the processes that share the work. Returns a dict
    name -> `[N, ...]`, in their order, on the main process; None on the others.
    """
    cache.mkdir(parents=True, exist_ok=True)
    starts = range(0, len(images), CHUNK)
    files = [cache / f"{number:05d}.safetensors" for number in range(len(starts))]
    own = slice(state.process_index, None, state.num_processes)
    mine = {file: start for file, start in zip(files[own], starts[own], strict=True) if not file.is_file()}
    with tqdm(total=CHUNK * len(mine), desc=what, disable=not progress) as bar:
        for file, first in mine.items():
            chunk, parts = images[first : first + CHUNK], []
            for start in range(0, len(chunk), batch_size):
                batch = [read_image(image) for image in chunk[start : start + batch_size]]
                if len({image.shape for image in batch}) > 1:
                    raise ValueError(f"{what}: images of different sizes; expected all of one size")
                parts.append(extractor(torch.stack(batch)))
                bar.update(len(batch))
            with atomic_file(file) as aside:
                save_file({name: torch.cat([part[name] for part in parts]) for name in parts[0]}, aside)
    state.wait_for_everyone()
    if not state.is_main_process:
        return None
    loaded = [load_file(file) for file in files]
    return {name: torch.cat([part[name] for part in loaded]) for name in loaded[0]}


def hash_files(files, folder, progress=False):
    """Of the paths of `files` below `folder` and their bytes; 16 hex digits. progress: a bar on stderr."""
    shown = tqdm(sorted(files), desc=f"{folder}: reading", disable=not progress)
    return hash_json([[file.relative_to(folder).as_posix(), hash_file(file)] for file in shown])


def hash_place(place, progress=False):
    """Of the bytes of a file, or of all files in a folder; what is neither is given back, as text."""
    path = Path(place or "")
    if place is None or not path.exists():
        return place and str(place)
    return hash_file(path) if path.is_file() else hash_files(filter(Path.is_file, path.rglob("*")), path, progress)


class Moments(NamedTuple):
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
    first, second = sample.covariance.double(), reference.covariance.double()
    values, vectors = torch.linalg.eigh(first)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    # C1 C2 and C1^(1/2) C2 C1^(1/2) have the same eigenvalues, and the second is symmetric
    overlap = torch.linalg.eigvalsh(root @ second @ root).clamp(min=0).sqrt().sum()
    distance = (sample.mean - reference.mean).double().square().sum() + first.trace() + second.trace() - 2 * overlap
    return max(0.0, distance.item())


def inception_score(logits, splits=10, seed=0):
    """(mean, standard error) over `splits` parts of exp of the mean KL between p(y|x) and p(y); one part has no error."""
    if len(logits) < 2 * splits:
        raise ValueError(f"images: {len(logits)} are too few for {splits} splits; expected at least {2 * splits}")
    order = torch.randperm(len(logits), generator=torch.Generator().manual_seed(seed))
    parts = [logits[numbers].double().log_softmax(-1) for numbers in order.chunk(splits)]
    scores = torch.stack([(part.exp() * (part - part.exp().mean(0).log())).sum(1).mean().exp() for part in parts])
    return scores.mean().item(), scores.std().item() / math.sqrt(splits) if splits > 1 else None


def precision_recall(sample, reference, neighbors=3, chunk=2048):
    """(precision, recall) of features `[N, D]` and `[R, D]`.

    precision: share of samples that lie within the distance of some reference to its `neighbors`-th nearest reference;
    recall: the same with the roles exchanged (arXiv 1904.06991). chunk: rows compared at once.
    """
    if min(len(sample), len(reference)) <= neighbors:
        given = f"{len(sample)} samples, {len(reference)} references"
        raise ValueError(f"features: {given}; expected {neighbors + 1} or more of each")

    def covered(points, centers):
        radii = torch.cat([torch.cdist(part, centers).kthvalue(neighbors + 1).values for part in centers.split(chunk)])
        inside = [(torch.cdist(part, centers) <= radii).any(1) for part in points.split(chunk)]
        return torch.cat(inside).double().mean().item()

    sample, reference = sample.double(), reference.double()
    return covered(sample, reference), covered(reference, sample)


def clip_scores(paths, prompts, clip, device, batch_size):
    """100 max(cos, 0) between each image and its prompt, a float64 tensor `[N]`.

    paths: of the images. prompts: texts; what is longer than the model's window is cut. clip: folder or id of a CLIP model.
    """
    with wrap_errors(f"clip: {clip!r} cannot be loaded"), no_code_prompts():
        model, processor = CLIPModel.from_pretrained(clip).to(device).eval(), CLIPProcessor.from_pretrained(clip)
    cosines = []
    for start in range(0, len(paths), batch_size):
        images = [Image.open(path).convert("RGB") for path in paths[start : start + batch_size]]
        given = {"text": prompts[start : start + batch_size], "images": images, "padding": True, "truncation": True}
        with torch.inference_mode():
            found = model(**processor(**given, return_tensors="pt").to(device))
        pictures, texts = found.image_embeds.double(), found.text_embeds.double()
        cosines.append(torch.nn.functional.cosine_similarity(pictures, texts, dim=-1).cpu())
    return 100 * torch.cat(cosines).clamp(min=0)


def share_error(share, count):
    """Standard error of a share of `count` independent cases."""
    return math.sqrt(share * (1 - share) / count)
