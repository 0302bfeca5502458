"""FID, sFID, IS, precision and recall from features, CLIP score from images and prompts: numbers in, numbers out.

The Inception score is torchmetrics', fed with features instead of images. Unusual: the rest is here. torchmetrics' FID takes
no moments, which is what ADM's reference files hold; it has no precision and recall (the k-nearest-neighbour manifolds of
arXiv 1904.06991); and its CLIP score, in 1.9, does not run with transformers 5.
"""

import dataclasses
import math
import warnings

import torch

from ..checkpoints.load import first_line


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


class _Given(torch.nn.Module):
    """What torchmetrics takes for a feature extractor: hands on the features that it is given."""

    def __init__(self, width):
        super().__init__()
        self.num_features = width

    def forward(self, features):
        return features


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
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.filterwarnings("ignore", message="Metric `InceptionScore` will save all")
        warnings.filterwarnings("ignore", message="std\\(\\): degrees of freedom")
        torch.manual_seed(seed)
        metric = _inception_score()(feature=_Given(logits.shape[1]), splits=splits, sync_on_compute=False)
        metric.update(logits.double())
        mean, spread = metric.compute()
    return mean.item(), spread.item() / math.sqrt(splits) if splits > 1 else None


def precision_recall(sample, reference, neighbours=3, chunk=2048):
    """(precision, recall) of features `[N, D]` and `[R, D]`.

    precision: share of samples that lie within the distance of some reference to its `neighbours`-th nearest reference;
    recall: the same with the roles exchanged (arXiv 1904.06991).
    """
    least = neighbours + 1
    if min(len(sample), len(reference)) < least:
        raise ValueError(
            f"features: {len(sample)} samples, {len(reference)} references; expected {least} or more of each"
        )
    sample, reference = sample.double(), reference.double()
    return tuple(
        _covered(points, others, _radii(others, neighbours, chunk), chunk)
        for points, others in ((sample, reference), (reference, sample))
    )


def _radii(points, neighbours, chunk):
    """Distance of each point to its `neighbours`-th nearest other one."""
    nearest = [torch.cdist(part, points).kthvalue(neighbours + 1, dim=1).values for part in points.split(chunk)]
    return torch.cat(nearest)


def _covered(points, centres, radii, chunk):
    """Share of `points` within `radii` of some of the `centres`."""
    inside = [(torch.cdist(part, centres) <= radii).any(1) for part in points.split(chunk)]
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


def _inception_score():
    try:
        from torchmetrics.image.inception import InceptionScore
    except (ImportError, RuntimeError) as error:  # RuntimeError: a torchvision that was made for another torch
        raise ImportError(
            f"IS needs torchmetrics, which cannot be imported ({first_line(error)}): pip install 'mhla_hf[images]'"
        ) from error
    return InceptionScore
