"""Image classifiers from scratch: the paper's sizes, any grid, the yardsticks, the published stages."""

import copy

import pytest
import torch
import torch.nn.functional as F
from ops_cases import distance
from small_towers import images, small_classifier
from transformers import AutoImageProcessor, AutoModel, AutoModelForImageClassification

from mhla_hf import MHLAForImageClassification, MHLAVisionConfig
from mhla_hf.models.vision_layers import MHLAVisionMixer, grid_rotation
from mhla_hf.nn.grid import rotate_pairs

PAPER_MILLIONS = {"deit-t": 5.7, "deit-s": 22, "vlt-t": 16, "vlt-s": 27}  # table 2


@pytest.mark.parametrize("name", PAPER_MILLIONS)
def test_parameter_counts_of_table_2(name):
    with torch.device("meta"):
        model = MHLAForImageClassification(MHLAVisionConfig.preset(name))
    assert model.num_parameters() / 1e6 == pytest.approx(PAPER_MILLIONS[name], rel=0.02)


def test_padding_of_the_paper():
    config = MHLAVisionConfig.preset("deit-t")
    assert [config.padded_sides(size, size)[0] for size in (224, 256, 384, 512)] == [256, 256, 384, 512]


@pytest.mark.parametrize("name", ["digits", "stages"])
def test_any_grid_equals_the_reference(name):
    model = small_classifier(name, **({"pad_to_blocks": False} if name == "digits" else {}))
    reference = copy.deepcopy(model)
    for module in reference.modules():
        if hasattr(module, "mhla"):
            module.mhla.settings.impl = "reference"
    for height, width in ((32, 32), (26, 34), (2, 50)):
        pixels = images(2, height, width, model.config.num_channels)
        assert distance(model(pixels).logits, reference(pixels).logits) < 1e-5


def test_padding_is_zeros_around_the_image():
    model = small_classifier()
    padded = F.pad(images(1, 27, 32, 1), (0, 0, 2, 3))
    assert torch.equal(model(images(1, 27, 32, 1)).logits, model(padded).logits)


def test_linear_stage_is_the_published_formula():
    """elu + 1, 2-D RoPE in the numerator alone, local position convolution, product with a projection of the input."""
    torch.manual_seed(0)
    config = MHLAVisionConfig.preset("vlt-t", attention="linear")
    stage = {"hidden_size": 64, "num_heads": 2, "layout": [7, 7]}
    layer = MHLAVisionMixer(config, stage, "linear")
    torch.nn.init.normal_(layer.mhla.cpe.conv.weight)
    x = torch.randn(2, 30, 64)
    q, k, v = (p(x).view(2, 30, 2, 32) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    q, k = F.elu(q) + 1, F.elu(k) + 1
    rotation = grid_rotation((5, 6), 32, x.device)
    weights = torch.einsum("bthd,bshd->bhts", rotate_pairs(q, *rotation), rotate_pairs(k, *rotation))
    o = torch.einsum("bhts,bshd->bthd", weights, v) / torch.einsum("bthd,bshd->bth", q, k)[..., None]
    conv, image = layer.mhla.cpe.conv, v.flatten(2).mT.unflatten(2, (5, 6))
    local = F.conv2d(image, conv.weight, conv.bias, padding=2, groups=64)
    expected = layer.o_proj((o.flatten(2) + local.flatten(2).mT) * layer.product(x))
    assert distance(layer(x, (5, 6), rotation), expected) < 1e-5


@pytest.mark.parametrize("name", ["digits", "stages"])
def test_standard_outputs_and_gradients(name):
    model = small_classifier(name).train()
    pixels, labels = images(channels=model.config.num_channels), torch.tensor([1, 4])
    torch.manual_seed(0)
    plain = model(pixels, labels=labels, output_hidden_states=True)
    assert plain.loss.item() == pytest.approx(F.cross_entropy(plain.logits, labels).item())
    assert len(plain.hidden_states) == model.config.num_hidden_layers + 1
    plain.loss.backward()
    missing = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not missing
    kept = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    model.activation_checkpointing_enable()
    torch.manual_seed(0)
    model(pixels, labels=labels).loss.backward()
    for n, p in model.named_parameters():
        torch.testing.assert_close(p.grad, kept[n], rtol=1e-4, atol=1e-6)


def test_compiles_as_one_graph():
    model, pixels = small_classifier(num_hidden_layers=1), images(2, channels=1)
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert torch.equal(compiled(pixels).logits, model(pixels).logits)


def test_auto_classes_and_image_processor(tmp_path):
    model = small_classifier(num_channels=3).to(torch.bfloat16)
    model.model.stages[0].blocks[0].attn.mhla.mixing.float()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path, dtype="auto")
    assert type(loaded) is MHLAForImageClassification
    assert {p.dtype for n, p in loaded.named_parameters() if "mixing" in n} == {torch.float32}
    processor = AutoImageProcessor.from_pretrained(tmp_path)
    pixels = processor(torch.randint(0, 255, (3, 40, 70), dtype=torch.uint8), return_tensors="pt")["pixel_values"]
    assert pixels.shape == (1, 3, 32, 32)
    torch.testing.assert_close(loaded(pixels).logits, model(pixels).logits, rtol=2e-2, atol=2e-2)
    assert AutoModel.from_pretrained(tmp_path)(pixels).pooler_output.shape == (1, 24)
    (tmp_path / "preprocessor_config.json").write_text("{}")
    model.save_pretrained(tmp_path)
    assert (tmp_path / "preprocessor_config.json").read_text() == "{}"
