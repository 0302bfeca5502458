"""Image models: what is wrong is refused in one sentence that names it, and nothing has been changed by then."""

import pytest
import torch
from small_models import one_sentence
from small_towers import converted_tower, images, small_classifier, softmax_tower
from transformers import CLIPConfig, CLIPForImageClassification, CLIPModel, ResNetConfig, ResNetForImageClassification

import mhla_hf
from mhla_hf import MHLAVisionConfig

STAGE = {"hidden_size": 16, "depth": 1, "num_heads": 2}
CONFIGS = [
    ({"attention": "full"}, "attention", "'full'"),
    ({"patch_size": 0}, "patch_size", "at least 1"),
    ({"num_attention_heads": 5}, "num_attention_heads", "divisor"),
    ({"hidden_size": 30, "num_attention_heads": 3, "positions": "rope"}, "num_attention_heads", "multiple of 4"),
    ({"mlp_conv": 2}, "mlp_conv", "odd"),
    ({"stem": "conv"}, "patch_size", "4"),
    ({"drop_path_rate": 1.0}, "drop_path_rate", "below 1"),
    ({"image_size": 1}, "image_size", "at least 2"),
    ({"image_size": 33, "pad_to_blocks": False}, "image_size", "patch size"),
    ({"stages": [{"hidden_size": 16}]}, "stages", "number 0"),
    ({"stages": [STAGE | {"depth": 0}]}, "stages[0].depth", "at least 1"),
    ({"stages": [STAGE | {"layout": [4]}]}, "layout", "stage 0"),
    ({"stages": [STAGE | {"layout": [4, 0]}]}, "layout", "at least 1"),
    ({"mhla": {"layout": None}}, "layout", "[4, 4]"),
]


@pytest.mark.parametrize(("values", "name", "word"), CONFIGS)
def test_config(values, name, word):
    with pytest.raises(Exception) as error:
        MHLAVisionConfig.preset("digits", **values)
    text = str(error.value).strip().splitlines()[-1]
    assert name in text and word in text and text.rstrip().endswith("."), text


PIXELS = [
    (None, {}, "pixel_values: got None"),
    (images(2)[0, :1], {}, "[batch, 1, height, width]"),
    (images(2), {}, "shape (2, 3, 32, 32)"),
    (torch.zeros(1, 1, 0, 8), {}, "0 x 8 pixels"),
    (images(1, 40, 40, 1), {"interpolate_pos_encoding": False}, "interpolate_pos_encoding=True"),
]


@pytest.mark.parametrize(("pixels", "arguments", "word"), PIXELS)
def test_pixels_of_a_classifier(pixels, arguments, word):
    with pytest.raises(ValueError) as error:
        small_classifier()(pixels, **arguments)
    one_sentence(error, word)


def test_pixels_that_are_no_whole_patches():
    with pytest.raises(ValueError) as error:
        small_classifier(pad_to_blocks=False)(images(1, 33, 32, 1))
    one_sentence(error, "33 x 32 pixels", "patch size 2")


TOWER_PIXELS = [
    (None, {}, "pixel_values: got None"),
    (images(2)[0], {}, "3 axes"),
    (torch.zeros(1, 3, 3, 32), {}, "at least a patch"),
]


@pytest.mark.parametrize(("pixels", "arguments", "word"), TOWER_PIXELS)
def test_pixels_of_a_tower(pixels, arguments, word):
    with pytest.raises(ValueError) as error:
        converted_tower("CLIPVisionModel")(pixels, **arguments)
    one_sentence(error, word)


def test_masks_and_layers_alone():
    model = converted_tower("ViTModel")
    with pytest.raises(ValueError) as error:
        model(images(), attention_mask=torch.ones(2, 65).tril())
    one_sentence(error, "attention_mask")
    with pytest.raises(ValueError) as error:
        model.layers[0](torch.zeros(1, 65, 32))
    one_sentence(error, "mhla_grid", "whole model")


def small_resnet():
    return ResNetForImageClassification(ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1]))


def small_clip():
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return CLIPModel(CLIPConfig(text_config={**small, "vocab_size": 20}, vision_config={**small, "image_size": 32}))


@pytest.mark.parametrize("whole", [CLIPModel, CLIPForImageClassification])
def test_a_tower_inside_a_larger_model_is_saved_by_itself(whole, tmp_path):
    model = whole(small_clip().config)
    mhla_hf.convert(model.vision_model)
    model.vision_model.save_pretrained(tmp_path / "tower")
    fresh = whole(small_clip().config)
    kept = {name: value for name, value in model.state_dict().items() if ".mhla." not in name}
    fresh.load_state_dict(kept)
    fresh.vision_model = mhla_hf.MHLACLIPVisionModel.from_pretrained(tmp_path / "tower")
    said = [own.eval().vision_model(images()).pooler_output for own in (model, fresh)]
    assert torch.equal(*said)


CONVERT = [
    (small_resnet, {}, "'resnet'"),
    (small_clip, {}, "'clip'"),
    (lambda: converted_tower("ViTModel"), {}, "MHLA model already"),
    (lambda: softmax_tower("ViTModel"), {"layout": None}, "layout: got None"),
    (lambda: softmax_tower("ViTModel"), {"layout": [4]}, "layout: got [4]"),
    (lambda: softmax_tower("ViTModel"), {"block_size": 32}, "block_size: got 32"),
    (lambda: softmax_tower("ViTModel"), {"rope": "after"}, "rope"),
    (lambda: softmax_tower("ViTModel"), {"normalize": "official"}, "normalize"),
    (lambda: softmax_tower("ViTModel").layers[0], {}, "ViTLayer"),
]


@pytest.mark.parametrize(("make", "arguments", "word"), CONVERT)
def test_convert(make, arguments, word):
    model = make()
    before = type(model), set(model.state_dict())
    with pytest.raises((TypeError, ValueError)) as error:
        mhla_hf.convert(model, **arguments)
    one_sentence(error, word)
    assert before == (type(model), set(model.state_dict()))
