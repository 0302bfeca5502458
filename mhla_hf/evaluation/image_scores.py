"""Compute features of images, and metrics from them: FID, sFID, IS, precision, recall, CLIP score.

Inception is torch-fidelity's. The metrics are computed here because torch-fidelity's need torchvision, and torchmetrics has
no precision and recall (arXiv 1904.06991), no FID from moments, which ADM's reference files contain, and no CLIP score that
runs with transformers 5. Only with Inception's published weights is a Fréchet distance called "FID".
"""

import importlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from PIL import Image
from transformers import CLIPModel, CLIPProcessor

from ..checkpoints.fingerprint import hash_file
from ..checkpoints.load import no_code_prompts, summarize_error, wrap_errors
from ..checkpoints.values import checked, checked_field

INCEPTION = "Inception"
INCEPTION_SHA256 = "6726825d"  # first digits, as in the name of torch-fidelity's file; the network of 2015
# Metric -> its name unless the features are from Inception with FID's published weights.
OTHER_NAMES = {"FID": "Fréchet distance", "sFID": "spatial Fréchet distance", "IS": "classifier score"}


@checked
class Extractor:
    """A function that computes features of images.

    Args:
        name: Name in tables.
        function: Maps B images of one size, uint8 [B, 3, height, width], to features [B, D], or to a dict with "features"
            and optionally "logits", [B, C] for C classes (for IS), and "spatial", [B, S] (for sFID).
        version: Identifies the function and its weights; scores of other versions are not reused.
        genuine: Whether the function is Inception with FID's published weights.
    """

    name: str
    function: Callable
    version: str = checked_field(bool, "a text that identifies the function and its weights")
    genuine: bool = False

    def label(self, metric: str) -> str:
        """Return a metric's name in tables: if not `genuine`, a generic one with the name of the extractor."""
        return metric if self.genuine else f"{OTHER_NAMES.get(metric, metric)} ({self.name})"

    def __call__(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = self.function(images)
        outputs = outputs if isinstance(outputs, dict) else {"features": outputs}
        return {name: values.detach().float().cpu().contiguous() for name, values in outputs.items()}


def find_extractor(
    extractor: object, weights: str | Path | None = None, device: torch.device | str = "cpu"
) -> Extractor:
    """Return an `Extractor`: the object itself, Inception, or what a user's "module:function" returns."""
    if isinstance(extractor, Extractor):
        return extractor
    if extractor == "inception":
        return load_inception(weights, device)
    module, _, name = str(extractor).partition(":")
    with wrap_errors(f"extractor: got {extractor!r}, expected 'inception', 'module:function' or an Extractor"):
        return getattr(importlib.import_module(module), name)()


def load_inception(weights: str | Path | None = None, device: torch.device | str = "cpu") -> Extractor:
    """Return FID's Inception from torch-fidelity, which downloads the weights once if none are given."""
    try:
        from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
    except (ImportError, RuntimeError) as error:  # RuntimeError: torchvision was built for another torch
        needed = f"torch-fidelity and a torchvision that fits torch, of which one is missing ({summarize_error(error)})"
        raise ImportError(f"FID needs {needed}: pip install 'mhla_hf[images]'") from error
    with wrap_errors(f"weights: got {weights!r}, expected a file of Inception's weights"):
        version = INCEPTION_SHA256 if weights is None else hash_file(weights)
        if not (genuine := version.startswith(INCEPTION_SHA256)):
            # torch-fidelity unpickles the file without restrictions, so it must be a file of plain tensors.
            torch.load(str(weights), map_location="cpu", weights_only=True)
        outputs = ["2048", "logits_unbiased"]
        network = FeatureExtractorInceptionV3("inception", outputs, feature_extractor_weights_path=weights)
    network = network.to(device).eval()
    hooked: dict[str, torch.Tensor] = {}
    network.Mixed_6d.branch1x1.register_forward_hook(lambda module, inputs, output: hooked.update(spatial=output))

    def extract(images: torch.Tensor) -> dict[str, torch.Tensor]:
        with torch.inference_mode():
            features, logits = network(images.to(device))
        # As ADM's evaluator: the first 7 channels of the 1x1 branch of TensorFlow's block mixed_6, channels last.
        spatial = hooked["spatial"][:, :7].permute(0, 2, 3, 1).flatten(1)
        return {"features": features, "logits": logits, "spatial": spatial}

    return Extractor(INCEPTION if genuine else f"{INCEPTION}, other weights", extract, version, genuine)


def read_image(image: Any) -> torch.Tensor:
    """Return an image file, or an array uint8 [height, width, 3], as a tensor uint8 [3, height, width]."""
    if not isinstance(image, numpy.ndarray):
        with wrap_errors(f"images: got {str(image)!r}, expected an image file"), Image.open(image) as opened:
            image = numpy.array(opened.convert("RGB"))
    return torch.from_numpy(image).permute(2, 0, 1)


class Moments(NamedTuple):
    """The mean [D] and covariance [D, D] of N features of width D, in fp64; the covariance is divided by N - 1."""

    mean: torch.Tensor
    covariance: torch.Tensor

    @classmethod
    def of(cls, features: torch.Tensor) -> "Moments":
        if features.ndim != 2 or features.shape[0] < 2:
            raise ValueError(f"features: got shape {tuple(features.shape)}, expected [N, D] with N of at least 2.")
        features = features.double()
        return cls(features.mean(0), torch.cov(features.T).reshape(features.shape[1], features.shape[1]))


def frechet_distance(sample: Moments, reference: Moments) -> float:
    """Return |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)), the Fréchet distance for means m and covariances C."""
    values, vectors = torch.linalg.eigh(sample.covariance)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    # C1 C2 and C1^(1/2) C2 C1^(1/2) have the same eigenvalues, and the second is symmetric.
    overlap = torch.linalg.eigvalsh(root @ reference.covariance @ root).clamp(min=0).sqrt().sum()
    distance = (sample.mean - reference.mean).square().sum() + sample.covariance.trace() + reference.covariance.trace()
    return max(0.0, (distance - 2 * overlap).item())


def inception_score(logits: torch.Tensor, splits: int = 10, seed: int = 0) -> tuple[float, float | None]:
    """Return (mean, standard error) over splits of exp(mean KL divergence of p(y|x) from p(y)); one split has no error.

    p(y|x) are the probabilities of an image's classes, whose logits are [N, C], and p(y) is their mean over a split.
    """
    if len(logits) < 2 * splits:
        raise ValueError(f"images: got {len(logits)} for {splits} splits, expected at least {2 * splits}.")
    order = torch.randperm(len(logits), generator=torch.Generator().manual_seed(seed))
    log_probs = [logits[indices].double().log_softmax(-1) for indices in order.chunk(splits)]
    divergences = [(x.exp() * (x - x.exp().mean(0).log())).sum(1).mean() for x in log_probs]
    scores = torch.stack(divergences).exp()
    return scores.mean().item(), scores.std().item() / math.sqrt(splits) if splits > 1 else None


def precision_recall(
    sample: torch.Tensor, reference: torch.Tensor, neighbors: int = 3, chunk: int = 2048
) -> tuple[float, float]:
    """Return precision and recall (arXiv 1904.06991) of `sample` features [N, D] against those of a `reference` [R, D].

    A reference point covers all points up to the distance of its `neighbors`-th nearest other reference point. Precision is
    the fraction of samples that are covered; for recall, samples and references change places. Distances are computed for
    `chunk` points at once.
    """
    if min(len(sample), len(reference)) <= neighbors:
        got = f"{len(sample)} samples, {len(reference)} references"
        raise ValueError(f"features: got {got}, expected at least {neighbors + 1} of each.")

    def covered(points: torch.Tensor, centers: torch.Tensor) -> float:
        radii = torch.cat([torch.cdist(rows, centers).kthvalue(neighbors + 1).values for rows in centers.split(chunk)])
        is_covered = [(torch.cdist(rows, centers) <= radii).any(1) for rows in points.split(chunk)]
        return torch.cat(is_covered).double().mean().item()

    sample, reference = sample.double(), reference.double()
    return covered(sample, reference), covered(reference, sample)


def clip_scores(
    paths: Sequence[Path], prompts: Sequence[str], clip: str | Path, device: torch.device | str, batch_size: int
) -> torch.Tensor:
    """Return 100 max(cosine, 0) of the embeddings of N images and their prompts, fp64 [N]. Long prompts are truncated."""
    with wrap_errors(f"clip: got {clip!r}, expected a CLIP model"), no_code_prompts():
        model = CLIPModel.from_pretrained(clip).to(device).eval()
        processor = CLIPProcessor.from_pretrained(clip)
    cosines = []
    for start in range(0, len(paths), batch_size):
        images = [Image.open(path).convert("RGB") for path in paths[start : start + batch_size]]
        inputs = {"text": prompts[start : start + batch_size], "images": images, "padding": True, "truncation": True}
        with torch.inference_mode():
            outputs = model(**processor(**inputs, return_tensors="pt").to(device))
        pair = outputs.image_embeds.double(), outputs.text_embeds.double()
        cosines.append(torch.nn.functional.cosine_similarity(*pair, dim=-1).cpu())
    return 100 * torch.cat(cosines).clamp(min=0)


def fraction_error(fraction: float, count: int) -> float:
    """Return the standard error of a fraction of `count` independent cases."""
    return math.sqrt(fraction * (1 - fraction) / count)
