"""FID, IS, precision and recall against independent computations on random features; a CLIP score against its formula.

Run: pytest tests/evaluation/test_image_scores.py
"""

import math
import re

import numpy
import pytest
import scipy.linalg
import torch
from PIL import Image
from torchmetrics.image.fid import FrechetInceptionDistance
from transformers import CLIPConfig, CLIPModel

from mhla_hf.evaluation.image_scores import (
    Extractor,
    Moments,
    clip_scores,
    find_extractor,
    frechet_distance,
    hash_files,
    inception_score,
    precision_recall,
    share_error,
)


def features(count, width, seed, shift=0.0):
    random = numpy.random.default_rng(seed)
    return shift + random.normal(size=(count, width)) @ random.normal(size=(width, width)) / width**0.5


class Same(torch.nn.Module):
    """Features instead of images, for torchmetrics."""

    def __init__(self, num_features):
        super().__init__()
        self.num_features = num_features

    def forward(self, features):
        return features


@pytest.mark.parametrize(("width", "seed"), [(8, 0), (32, 1), (64, 2)])
def test_frechet_distance_is_the_formula(width, seed):
    one, two = features(500, width, seed), features(400, width, seed + 9, 0.3)
    first, second = numpy.cov(one.T), numpy.cov(two.T)
    root = scipy.linalg.sqrtm(first @ second).real
    wanted = ((one.mean(0) - two.mean(0)) ** 2).sum() + numpy.trace(first + second - 2 * root)
    found = frechet_distance(Moments.of(torch.from_numpy(one)), Moments.of(torch.from_numpy(two)))
    assert found == pytest.approx(wanted, rel=1e-6)
    metric = FrechetInceptionDistance(feature=Same(width), input_img_size=(3, 8, 8))
    metric.update(torch.from_numpy(one), real=False)
    metric.update(torch.from_numpy(two), real=True)
    assert found == pytest.approx(metric.compute().item(), rel=1e-6)
    same = Moments.of(torch.from_numpy(one))
    assert frechet_distance(same, same) == pytest.approx(0, abs=1e-6)


def test_inception_score_is_the_formula():
    logits = 3 * features(400, 12, 4)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        order = torch.randperm(400).numpy()
    parts = []
    for part in numpy.split(logits[order], 10):
        shares = numpy.exp(part) / numpy.exp(part).sum(1, keepdims=True)
        kl = (shares * (numpy.log(shares) - numpy.log(shares.mean(0)))).sum(1).mean()
        parts.append(math.exp(kl))
    before = torch.random.get_rng_state()
    mean, error = inception_score(torch.from_numpy(logits), splits=10, seed=5)
    assert torch.equal(before, torch.random.get_rng_state())
    assert mean == pytest.approx(numpy.mean(parts), rel=1e-6)
    assert error == pytest.approx(numpy.std(parts, ddof=1) / 10**0.5, rel=1e-6)


@pytest.mark.parametrize("chunk", [7, 1000])
def test_precision_and_recall_are_the_definition(chunk):
    sample, reference = features(60, 4, 6), features(50, 4, 7, 0.8)
    found = precision_recall(torch.from_numpy(sample), torch.from_numpy(reference), neighbors=3, chunk=chunk)

    def share(points, centres):
        inside = 0
        for point in points:
            for centre in centres:
                others = sorted(numpy.linalg.norm(centres - centre, axis=1))
                if numpy.linalg.norm(point - centre) <= others[3]:
                    inside += 1
                    break
        return inside / len(points)

    assert found == pytest.approx((share(sample, reference), share(reference, sample)), rel=1e-6)
    assert 0 < found[0] < 1 and 0 < found[1] < 1 and found[0] != found[1]


def test_a_clip_score_is_the_cosine_of_the_projected_embeddings():
    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = CLIPConfig(
        text_config={**small, "vocab_size": 50, "max_position_embeddings": 8},
        vision_config={**small, "image_size": 8, "patch_size": 4},
        projection_dim=6,
    )
    model = CLIPModel(config).eval()
    ids, pixels = torch.randint(1, 40, (3, 8)), torch.randn(3, 3, 8, 8)

    def processor(text, images, **options):
        assert text == ["a", "b", "c"] and options["truncation"] and len(images) == 3
        return {"input_ids": ids, "pixel_values": pixels}

    found = clip_scores([Image.new("RGB", (8, 8))] * 3, ["a", "b", "c"], model, processor)
    with torch.no_grad():
        texts = model.text_projection(model.text_model(ids).pooler_output)
        pictures = model.visual_projection(model.vision_model(pixels).pooler_output)
    wanted = 100 * torch.nn.functional.cosine_similarity(texts, pictures).clamp(min=0)
    assert found.tolist() == pytest.approx(wanted.tolist(), rel=1e-5) and found.dtype == torch.float64


def test_a_name_is_earned():
    def flat(images):
        return images.flatten(1)

    with pytest.raises(ValueError, match="extractor 'judge': version is None; expected a text that changes when"):
        Extractor("judge", flat)
    flat.version = "2"
    judge = Extractor("digits judge", flat)
    assert judge.version == "2" and Extractor("judge", flat, "3").version == "3"
    assert judge.label("FID") == "Fréchet distance (digits judge)"
    assert judge.label("IS") == "classifier score (digits judge)"
    assert Extractor("Inception", flat).label("FID") == "Fréchet distance (Inception)"
    assert Extractor("Inception", flat, genuine=True).label("FID") == "FID"
    with pytest.raises(ValueError, match=re.escape("name is 'a|b'")):
        Extractor("a|b", flat)
    with pytest.raises(ValueError, match="expected 'inception', 'module:function'"):
        find_extractor("digits")
    with pytest.raises(ValueError, match="extractor 'math:nothing' is not there"):
        find_extractor("math:nothing")


def test_names_below_the_folder_and_bytes_of_files_decide_their_hash(tmp_path):
    def made(name, content):
        (tmp_path / "a").mkdir(exist_ok=True)
        (tmp_path / "a" / name).write_text(content)
        found = hash_files(list((tmp_path / "a").iterdir()), tmp_path)
        (tmp_path / "a" / name).unlink()
        return found

    assert made("x", "1") == made("x", "1") and len({made("x", "1"), made("x", "2"), made("y", "1")}) == 3


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: Moments.of(torch.zeros(1, 3)), "expected [N, D] with N of at least 2"),
        (lambda: inception_score(torch.zeros(15, 3), splits=10), "15 are too few for 10 splits"),
        (lambda: precision_recall(torch.zeros(3, 2), torch.zeros(9, 2)), "3 samples, 9 references"),
        (
            lambda: frechet_distance(Moments.of(torch.rand(5, 2)), Moments.of(torch.rand(5, 3))),
            "reference has 3 features, the samples 2",
        ),
    ],
)
def test_bad_input_is_one_sentence(call, says):
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_the_error_of_a_share():
    assert share_error(0.5, 100) == pytest.approx(0.05) and share_error(1.0, 10) == 0
