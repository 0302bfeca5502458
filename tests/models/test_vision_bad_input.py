"""Image models: what is wrong is refused in one sentence that names it, and nothing has been changed by then."""

import pytest
import torch
from small_models import refused
from small_towers import converted_tower, images, small_classifier, softmax_tower
from transformers import CLIPConfig, CLIPForImageClassification, CLIPModel

import mhla_hf
from mhla_hf import MHLAVisionConfig

STAGE = {"hidden_size": 16, "depth": 1, "num_heads": 2}
CONFIGS = [
    ({"hidden_size": 30, "positions": "rope"}, "num_attention_heads: got 3, expected a divisor"),
    ({"stem": "conv"}, "patch_size: got 2, expected 4"),
    ({"stages": [{"hidden_size": 16}]}, "stages: got {'hidden_size': 16}, expected the keys"),
    ({"stages": [STAGE | {"layout": [4, 0]}]}, "with blocks per row and column"),
    ({"mhla": {"layout": None}}, "layout: got None, expected blocks per row and column"),
]


@pytest.mark.parametrize(("values", "words"), CONFIGS)
def test_config(values, words):
    with pytest.raises(Exception) as error:
        MHLAVisionConfig.preset("digits", **values)
    assert words in str(error.value), error.value


CALLS = [
    (lambda: small_classifier(pad_to_blocks=False)(images(1, 33, 32, 1)), "33 x 32 pixels, expected multiples"),
    (lambda: small_classifier()(images(2)[0]), "pixel_values: got shape (3, 32, 32), expected [B, 1, height, width]"),
    (lambda: small_classifier()(images(1, 48, 32, 1), interpolate_pos_encoding=False), "interpolate_pos_encoding=True"),
    (lambda: converted_tower("CLIPVisionModel")(images(2)[0]), "pixel_values: got 3 axes"),
    (lambda: converted_tower("ViTModel")(images(), attention_mask=torch.zeros(2, 65)), "attention_mask: got a tensor"),
    (lambda: converted_tower("ViTModel").layers[0](torch.zeros(1, 65, 32)), "mhla_grid: got None"),
]


@pytest.mark.parametrize(("call", "words"), CALLS)
def test_calls(call, words):
    with refused(words):
        call()


def small_clip(whole=CLIPModel):
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return whole(CLIPConfig(text_config={**small, "vocab_size": 20}, vision_config={**small, "image_size": 32})).eval()


@pytest.mark.parametrize("whole", [CLIPModel, CLIPForImageClassification])
def test_a_tower_inside_a_larger_model_is_saved_by_itself(whole, tmp_path):
    model, fresh = small_clip(whole), small_clip(whole)
    mhla_hf.convert(model.vision_model).save_pretrained(tmp_path / "tower")
    fresh.vision_model = mhla_hf.MHLACLIPVisionModel.from_pretrained(tmp_path / "tower")
    assert torch.equal(*(own.vision_model(images()).pooler_output for own in (model, fresh)))


CONVERT = [
    (small_clip, {}, "'clip'"),
    (lambda: converted_tower("ViTModel"), {}, "MHLA model already"),
    (lambda: softmax_tower("ViTModel"), {"layout": [4]}, "layout: got [4]"),
    (lambda: softmax_tower("ViTModel"), {"normalize": "official"}, "normalize"),
    (lambda: softmax_tower("ViTModel").layers[0], {}, "ViTLayer"),
]


@pytest.mark.parametrize(("make", "arguments", "word"), CONVERT)
def test_convert(make, arguments, word):
    model = make()
    before = type(model), set(model.state_dict())
    with refused(word, kind=(TypeError, ValueError)):
        mhla_hf.convert(model, **arguments)
    assert before == (type(model), set(model.state_dict()))
