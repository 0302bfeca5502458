"""Models of images, converted and from scratch: sizes and stages of the paper, any grid, saving, and what is refused."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
import transformers
from tools.model_checks import by_definition, checkpointing_changes_nothing, one_graph
from tools.ops_cases import distance
from tools.small_towers import TOWERS, converted_tower, images, output_of, small_classifier, small_clip, softmax_tower
from transformers import AutoModel, AutoModelForImageClassification

import mhla_hf
from mhla_hf import MHLAForImageClassification, MHLAVisionConfig
from mhla_hf.models.vision.vision_model import MHLAVisionMixer, grid_rotation
from mhla_hf.nn.grid import rotate_pairs

PAPER_MILLIONS = {"deit-t": 5.7, "deit-s": 22, "vlt-t": 16, "vlt-s": 27}  # table 2


@pytest.mark.parametrize("name", PAPER_MILLIONS)
def test_parameter_counts_and_padding_of_the_paper(name):
    with torch.device("meta"):
        model = MHLAForImageClassification(MHLAVisionConfig.preset(name))
    assert model.num_parameters() / 1e6 == pytest.approx(PAPER_MILLIONS[name], rel=0.02)
    padded = [model.config.padded_sides(size, size)[0] for size in (224, 256, 384, 512)]
    assert padded == [256, 256, 384, 512] or name != "deit-t"


def resizing(name):
    """What a family's forward needs for another size than the one it was made for."""
    return {} if "ino" in name.lower() or name not in TOWERS else {"interpolate_pos_encoding": True}


@pytest.mark.parametrize("name", ["digits", "stages", *TOWERS])
def test_any_grid_equals_the_reference(name):
    if name in TOWERS:
        model, sizes = converted_tower(name, gate=True, cpe=3), ((32, 32), (52, 68), (4, 60))
    else:
        model = small_classifier(name, **({"pad_to_blocks": False} if name == "digits" else {}))
        sizes = ((32, 32), (26, 34), (2, 50))
    reference = by_definition(model)
    for height, width in sizes:
        pixels = images(2, height, width, model.config.num_channels)
        output = output_of(model, pixels, **resizing(name))
        assert distance(output, output_of(reference, pixels, **resizing(name))) < 1e-5


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


@pytest.mark.parametrize("name", TOWERS)
def test_a_converted_tower(name, tmp_path):
    """Only MHLA is new, with blocks of the grid and of what stands before it; saved, loaded, copied, and pickled."""
    soft, model = softmax_tower(name), converted_tower(name, per_head=True)
    before, after = soft.state_dict(), model.state_dict()
    assert type(model).__name__ == f"MHLA{name}" and isinstance(model, type(soft))
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert all(".mhla." in key for key in after.keys() - before.keys())
    assert model.config.mhla["layers"] == [0, 1] and model.config.mhla["layout"] == [4, 4]

    expected = output_of(model, images())
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="these are no weights of a softmax model"):
        type(soft).from_pretrained(tmp_path)
    auto = AutoModelForImageClassification if "ForImageClassification" in name else AutoModel
    if name not in ("DeiTForImageClassificationWithTeacher", "CLIPVisionModelWithProjection"):
        loaded, info = auto.from_pretrained(tmp_path, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        assert type(loaded) is type(model) and torch.equal(output_of(loaded, images()), expected)
    loaded = getattr(mhla_hf, f"MHLA{name}").from_pretrained(tmp_path)
    for one in (loaded, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(output_of(one, images()), expected)


@pytest.mark.parametrize("name", ["digits", "stages", "ViTForImageClassification"])
def test_standard_outputs_and_gradients_of_two_grids_together(name):
    model = converted_tower(name) if name in TOWERS else small_classifier(name)
    labels, channels = torch.tensor([1, 4]), model.config.num_channels
    sizes = (images(2, 40, 24, channels, seed=1), images(channels=channels))
    plain = model(sizes[1], labels=labels, output_hidden_states=True)
    assert plain.loss.item() == pytest.approx(F.cross_entropy(plain.logits, labels).item())
    assert len(plain.hidden_states) == model.config.num_hidden_layers + 1

    def loss(model):
        return sum(model(pixels, labels=labels, **resizing(name)).loss for pixels in sizes)

    grads = checkpointing_changes_nothing(model.train(), loss)
    learned = {key for key, p in model.named_parameters() if p.requires_grad}
    assert {key for key in learned if name not in TOWERS or ".mhla." in key} <= grads.keys()


def test_compiles_as_one_graph():
    for model in (small_classifier(num_hidden_layers=1), converted_tower("DINOv3ViTModel", layers=[0])):
        one_graph(model, output_of, images(channels=model.config.num_channels), bound=0)


def test_auto_classes_and_a_processor_that_is_there(tmp_path):
    model = small_classifier(num_channels=3).to(torch.bfloat16)
    model.model.stages[0].blocks[0].attn.mhla.mixing.float()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path, dtype="auto")
    assert type(loaded) is MHLAForImageClassification
    assert {p.dtype for n, p in loaded.named_parameters() if "mixing" in n} == {torch.float32}
    torch.testing.assert_close(loaded(images()).logits, model(images()).logits, rtol=2e-2, atol=2e-2)
    assert AutoModel.from_pretrained(tmp_path)(images()).pooler_output.shape == (2, 24)
    (tmp_path / "preprocessor_config.json").write_text("{}")
    model.save_pretrained(tmp_path)
    assert (tmp_path / "preprocessor_config.json").read_text() == "{}"


STAGE = {"hidden_size": 16, "depth": 1, "num_heads": 2}


def preset(**values):
    return MHLAVisionConfig.preset("digits", **values)


CALLS = [
    (lambda: preset(hidden_size=30, positions="rope"), "num_attention_heads: got 3, expected a divisor"),
    (lambda: preset(stem="conv"), "patch_size: got 2, expected 4"),
    (lambda: preset(stages=[{"hidden_size": 16}]), "stages: got {'hidden_size': 16}, expected the keys"),
    (lambda: preset(stages=[STAGE | {"layout": [4, 0]}]), "blocks along height and width"),
    (lambda: preset(mhla={"layout": None}), "layout: got None, expected 2 counts of blocks"),
    (lambda: small_classifier(pad_to_blocks=False)(images(1, 33, 32, 1)), "33 x 32 pixels, expected multiples"),
    (lambda: small_classifier()(images(2)[0]), "pixel_values: got shape (3, 32, 32), expected [B, 1, height, width]"),
    (lambda: small_classifier()(images(1, 48, 32, 1), interpolate_pos_encoding=False), "interpolate_pos_encoding=True"),
    (lambda: converted_tower("CLIPVisionModel")(images(2)[0]), "pixel_values: got 3 axes"),
    (lambda: converted_tower("ViTModel")(images(), attention_mask=torch.zeros(2, 65)), "attention_mask: got a tensor"),
    (lambda: converted_tower("ViTModel").layers[0](torch.zeros(1, 65, 32)), "mhla_grid: got None"),
]


@pytest.mark.parametrize(("call", "words"), CALLS)
def test_calls(call, words):
    with pytest.raises(Exception) as error:
        call()
    assert words in str(error.value), error.value


@pytest.mark.parametrize("whole", [transformers.CLIPModel, transformers.CLIPForImageClassification])
def test_a_tower_inside_a_larger_model_is_saved_by_itself(whole, tmp_path):
    model, fresh = small_clip(whole), small_clip(whole)
    mhla_hf.convert(model.vision_model).save_pretrained(tmp_path / "tower")
    fresh.vision_model = mhla_hf.MHLACLIPVisionModel.from_pretrained(tmp_path / "tower")
    assert torch.equal(*(own.vision_model(images()).pooler_output for own in (model, fresh)))
