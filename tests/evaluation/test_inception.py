"""FID's own network, torch-fidelity's Inception, with random weights: scores equal torch-fidelity's own, and ADM's order.

The published weights cannot be fetched where tests run offline. torchvision's build must fit torch's, which the pinned CPU
build cannot promise; torch-fidelity needs it for other networks only, so that here a stand-in takes its place. `make test`
puts torch-fidelity into a folder of its own, as torchmetrics imports it wherever it is installed.

Run: pytest tests/evaluation/test_inception.py
"""

import importlib.machinery
import sys
import types
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image
from tiny_pipelines import dit_pipeline

import mhla_hf
from mhla_hf.evaluation import image_scores
from mhla_hf.evaluation.image_scores import inception

IMAGES = 8  # of 299 x 299 inside, on a CPU


def stand_in():
    """The modules and names of torchvision that torch-fidelity imports; none of them does anything."""
    names = ("torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.transforms.functional")
    modules = {name: types.ModuleType(name) for name in names}
    for name, module in modules.items():
        module.__spec__, module.__path__ = importlib.machinery.ModuleSpec(name, None), []
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(modules[parent], last, module)
    for name in ("CIFAR10", "CIFAR100", "STL10"):
        setattr(modules["torchvision.datasets"], name, type(name, (), {}))
    return modules


@pytest.fixture(scope="module")
def fidelity():
    """torch_fidelity, imported beside the stand-in, which is gone before a test runs: others look for torchvision too."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(sys.prefix) / "torch-fidelity")
        for name, module in stand_in().items():
            patch.setitem(sys.modules, name, module)
        import torch_fidelity

    yield torch_fidelity
    for name in set(sys.modules) - before:
        if name.split(".")[0] == "torch_fidelity":
            del sys.modules[name]


@pytest.fixture(scope="module")
def weights(fidelity, tmp_path_factory):
    """A file of random weights, so that features of different images differ."""
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
        torch.nn.init.normal_(network.fc.weight, std=2.0)
        torch.save(network.state_dict(), file)
    return file


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two folders of pictures."""
    random, made = numpy.random.default_rng(0), []
    for name, low in (("samples", 0), ("reference", 60)):
        made.append(tmp_path_factory.mktemp(name))
        for index in range(IMAGES):
            coarse = Image.fromarray(random.integers(low, 255, (4, 4, 3), dtype=numpy.uint8))
            coarse.resize((32, 32), Image.Resampling.BILINEAR).save(made[-1] / f"{index:02d}.png")
    return made


def pictures(folder):
    """uint8 `[N, 3, H, W]`, read without the package."""
    arrays = [numpy.array(Image.open(path)) for path in sorted(folder.glob("*.png"))]
    return torch.from_numpy(numpy.stack(arrays)).permute(0, 3, 1, 2)


class Pictures(torch.utils.data.Dataset):
    """What torch-fidelity scores."""

    def __init__(self, images):
        self.images = images

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index]


def test_every_part_is_torch_fidelitys_and_spatial_features_have_adms_order(weights):
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3 as Network

    images = torch.randint(256, (2, 3, 40, 50), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    extractor = inception(str(weights))
    found = extractor(images)
    assert extractor.label("FID") == "Fréchet distance (Inception, other weights)"
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


def test_the_scores_of_a_pipeline_are_torch_fidelitys(fidelity, weights, folders, tmp_path, monkeypatch):
    """`evaluate` samples, reads and scores; torch-fidelity scores the same files by itself."""
    monkeypatch.setattr(image_scores, "INCEPTION_SHA256", image_scores.hash_file(weights))  # as if published
    reference = folders[1]
    settings = {
        "reference": str(reference), "samples": str(tmp_path / "samples"), "weights": str(weights), "images": IMAGES,
        "splits": 1, "sampling.num_inference_steps": 2,
    }  # fmt: skip
    options = {"recipe": "table_9_class_to_image", "batch_size": 4, "progress": False}
    found = mhla_hf.evaluate({"dit": dit_pipeline()}, settings=settings, **options)["dit"]
    assert {record.metric: record.stderr is None for record in found} == {
        "FID": True, "sFID": True, "IS": True, "precision": False, "recall": False,
    }  # fmt: skip
    found = {record.metric: record.value for record in found}
    samples = pictures(tmp_path / "samples" / "dit" / f"imagenet_256-{IMAGES}")
    theirs = fidelity.calculate_metrics(
        input1=Pictures(samples), input2=Pictures(pictures(reference)),
        cuda=False, fid=True, isc=True, prc=True, isc_splits=1,
        feature_extractor="inception-v3-compat", feature_layer_prc="2048", verbose=False, cache=False, save_cpu_ram=True,
        feature_extractor_weights_path=str(weights),
    )  # fmt: skip
    assert found["FID"] == pytest.approx(theirs["frechet_inception_distance"], rel=1e-4)
    assert found["IS"] == pytest.approx(theirs["inception_score_mean"], rel=1e-6)
    assert (found["precision"], found["recall"]) == pytest.approx((theirs["precision"], theirs["recall"]), abs=1e-6)
    assert found["FID"] > 1 and found["IS"] > 1.01, "no difference was scored"


def test_weights_in_torchs_first_format_are_read(weights, tmp_path):
    """As a file of 2020 may be: no zip archive."""
    old = tmp_path / "old.pth"
    torch.save(torch.load(weights, weights_only=True), old, _use_new_zipfile_serialization=False)
    image = torch.randint(256, (1, 3, 20, 20), dtype=torch.uint8)
    assert torch.equal(inception(str(old))(image)["features"], inception(str(weights))(image)["features"])


def test_weights_that_would_run_code_are_refused(fidelity, tmp_path):
    class Hostile:
        def __reduce__(self):
            return open, (str(tmp_path / "it-ran"), "w")

    torch.save({"fc.weight": Hostile()}, tmp_path / "weights.pth")
    with pytest.raises(ValueError, match=r"weights: .* is no file of tensors alone"):
        inception(str(tmp_path / "weights.pth"))
    assert not (tmp_path / "it-ran").exists()
    with pytest.raises(ValueError, match=r"weights: Inception's cannot be had .*; give their file as weights"):
        inception(str(tmp_path / "absent.pth"))
