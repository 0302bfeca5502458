"""FID, IS, precision and recall against independent computations, on random features and by torch-fidelity's own Inception.

Inception has random weights. torch-fidelity needs torchvision for other networks only, so a stand-in takes its place;
`make test` puts torch-fidelity into a folder of its own.
"""

import importlib
import math
import sys
from pathlib import Path
from unittest import mock

import numpy
import pytest
import scipy.linalg
import torch
from tools.small_models import refused

from mhla_hf.checkpoints.fingerprint import hash_file
from mhla_hf.evaluation import image_scores
from mhla_hf.evaluation.image_scores import Moments, frechet_distance, inception_score, load_inception, precision_recall


def features(count, width, seed, shift=0.0):
    random = numpy.random.default_rng(seed)
    return shift + random.normal(size=(count, width)) @ random.normal(size=(width, width)) / width**0.5


def test_frechet_distance_is_the_formula():
    one, two = features(500, 32, 1), features(400, 32, 10, 0.3)
    first, second = numpy.cov(one.T), numpy.cov(two.T)
    root = scipy.linalg.sqrtm(first @ second).real
    wanted = ((one.mean(0) - two.mean(0)) ** 2).sum() + numpy.trace(first + second - 2 * root)
    found = frechet_distance(Moments.of(torch.from_numpy(one)), Moments.of(torch.from_numpy(two)))
    assert found == pytest.approx(wanted, rel=1e-6)


def test_inception_score_is_the_formula():
    logits = 3 * features(400, 12, 4)
    order = torch.randperm(400, generator=torch.Generator().manual_seed(5)).numpy()
    parts = []
    for part in numpy.split(logits[order], 10):
        shares = numpy.exp(part) / numpy.exp(part).sum(1, keepdims=True)
        kl = (shares * (numpy.log(shares) - numpy.log(shares.mean(0)))).sum(1).mean()
        parts.append(math.exp(kl))
    mean, error = inception_score(torch.from_numpy(logits), splits=10, seed=5)
    assert mean == pytest.approx(numpy.mean(parts), rel=1e-6)
    assert error == pytest.approx(numpy.std(parts, ddof=1) / 10**0.5, rel=1e-6)


def test_precision_and_recall_are_torch_fidelitys(fidelity):
    from torch_fidelity.metric_prc import prc_features_to_metric

    sample, reference = torch.from_numpy(features(60, 4, 6)), torch.from_numpy(features(50, 4, 7, 0.8))
    found = precision_recall(sample, reference, neighbors=3, chunk=7)
    how = {"prc_neighborhood": 3, "prc_batch_size": 9, "save_cpu_ram": True, "verbose": False}
    theirs = prc_features_to_metric(sample, reference, **how)
    assert found == pytest.approx((theirs["precision"], theirs["recall"]), rel=1e-6)
    assert 0 < found[0] < 1 and 0 < found[1] < 1 and found[0] != found[1]


BAD = [
    (lambda: image_scores.Extractor("judge", features, ""), "version: got '', expected a text that identifies"),
    (lambda: image_scores.find_extractor("digits"), "expected 'inception', 'module:function'"),
    (lambda: Moments.of(torch.zeros(1, 3)), "expected [N, D] with N of at least 2"),
    (lambda: inception_score(torch.zeros(15, 3), splits=10), "images: got 15 for 10 splits"),
    (lambda: precision_recall(torch.zeros(3, 2), torch.zeros(9, 2)), "3 samples, 9 references"),
]


@pytest.mark.parametrize("call, says", BAD)
def test_bad_input_is_one_sentence(call, says):
    with refused(says):
        call()


@pytest.fixture(scope="module")
def fidelity():
    """torch_fidelity, imported beside the stand-in, which is gone before a test runs: others look for torchvision too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(sys.prefix) / "torch-fidelity")
        for name in ("", ".datasets", ".transforms", ".transforms.functional"):
            patch.setitem(sys.modules, f"torchvision{name}", mock.MagicMock(__spec__=None))
        return importlib.import_module("torch_fidelity")


@pytest.fixture(scope="module")
def weights(fidelity, tmp_path_factory):
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3 as Network

    file = tmp_path_factory.mktemp("inception") / "weights.pth"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Network, "load_state_dict", lambda self, state: None)
        torch.save({}, file)
        torch.manual_seed(0)
        network = Network("random", ["2048"], feature_extractor_weights_path=str(file))
        for module in network.modules():
            if isinstance(module, torch.nn.Conv2d):
                torch.nn.init.kaiming_normal_(module.weight)
        torch.nn.init.normal_(network.fc.weight, std=1.0)
        torch.save(network.state_dict(), file)
    return file


def test_every_part_is_torch_fidelitys_and_spatial_features_have_adms_order(weights, monkeypatch):
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3 as Network

    images = torch.randint(256, (2, 3, 40, 50), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    extractor = load_inception(str(weights))
    found = extractor(images)
    assert extractor.label("FID") == "Fréchet distance (Inception, other weights)"
    monkeypatch.setattr(image_scores, "INCEPTION_SHA256", hash_file(weights))  # as if published
    assert load_inception(str(weights)).label("FID") == "FID"
    network = Network("its own", ["2048", "logits_unbiased"], feature_extractor_weights_path=str(weights))
    kept = []
    network.Mixed_6d.branch1x1.register_forward_hook(lambda module, given, output: kept.append(output.numpy()))
    wanted, logits = network(images)
    assert torch.equal(found["features"], wanted) and torch.equal(found["logits"], logits)
    assert found["features"].shape == (2, 2048) and found["logits"].shape == (2, 1008)
    # ADM's evaluator takes TensorFlow's [N, 17, 17, C], cuts the channels to 7, and flattens: its mu_s counts in that order
    spatial = kept[0].transpose(0, 2, 3, 1)[..., :7].reshape(2, -1)
    assert spatial.shape == (2, 2023) and spatial.std() > 0
    numpy.testing.assert_array_equal(found["spatial"].numpy(), spatial)


def test_weights_that_would_run_code_are_refused(fidelity, tmp_path):
    class Hostile:
        def __reduce__(self):
            return open, (str(tmp_path / "it-ran"), "w")

    torch.save({"fc.weight": Hostile()}, tmp_path / "weights.pth")
    for name in ("weights.pth", "absent.pth"):
        with pytest.raises(ValueError, match=r"weights: got .*, expected a file of Inception's weights"):
            load_inception(str(tmp_path / name))
    assert not (tmp_path / "it-ran").exists()
