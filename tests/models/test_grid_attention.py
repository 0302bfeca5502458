"""Converted vision towers: every family, class and register tokens, any grid, and what is around the attention unchanged."""

import copy
import pickle

import pytest
import torch
import transformers
from tools.model_checks import by_definition, checkpointing_changes_nothing, one_graph
from tools.ops_cases import distance
from tools.small_towers import TOWERS, converted_tower, images, output_of, softmax_tower
from transformers import AutoModel, AutoModelForImageClassification

import mhla_hf
from mhla_hf.models.vision.grid_attention import find_grid_attentions, prefix_tokens

PREFIXES = {"ViT": 1, "DeiT": 2, "Dinov2": 1, "Dinov2WithRegisters": 5, "DINOv3ViT": 4, "CLIPVision": 1}
PREFIXES |= {"SiglipVision": 0}


def resizing(name):
    """What a family's forward needs for another size than the one it was made for."""
    return {} if "ino" in name.lower() else {"interpolate_pos_encoding": True}


@pytest.mark.parametrize("name", TOWERS)
def test_only_mhla_is_new(name):
    soft = softmax_tower(name)
    before = soft.state_dict()
    model = mhla_hf.convert(softmax_tower(name))
    assert type(model).__name__ == f"MHLA{name}" and isinstance(model, type(soft))
    after = model.state_dict()
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert all(".mhla." in key for key in after.keys() - before.keys())
    assert model.config.mhla["layers"] == [0, 1] and model.config.mhla["layout"] == [4, 4]
    prefix = PREFIXES[type(soft.config).__name__.removesuffix("Config")]
    assert prefix_tokens(model.config) == prefix
    sizes = {tuple(attn.mhla.mixing.weight.shape) for attn in find_grid_attentions(model).values()}
    assert sizes == {(16 + (prefix > 0),) * 2}


@pytest.mark.parametrize("name", TOWERS)
def test_any_grid_equals_the_reference(name):
    model = converted_tower(name, gate=True, cpe=3)
    reference = by_definition(model)
    for height, width in ((32, 32), (52, 68), (4, 60)):
        pixels = images(2, height, width)
        output = output_of(model, pixels, **resizing(name))
        assert distance(output, output_of(reference, pixels, **resizing(name))) < 1e-5


@pytest.mark.parametrize("name", TOWERS)
def test_saved_loaded_copied_pickled(name, tmp_path):
    model = converted_tower(name, per_head=True)
    expected = output_of(model, images())
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="these are no weights of a softmax model"):
        getattr(transformers, name).from_pretrained(tmp_path)
    auto = AutoModelForImageClassification if "ForImageClassification" in name else AutoModel
    if name not in ("DeiTForImageClassificationWithTeacher", "CLIPVisionModelWithProjection"):
        loaded, info = auto.from_pretrained(tmp_path, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        assert type(loaded) is type(model) and torch.equal(output_of(loaded, images()), expected)
    loaded = getattr(mhla_hf, f"MHLA{name}").from_pretrained(tmp_path)
    assert torch.equal(output_of(loaded, images()), expected)
    assert torch.equal(output_of(copy.deepcopy(model), images()), expected)
    assert torch.equal(output_of(pickle.loads(pickle.dumps(model)), images()), expected)


def test_training_and_gradient_checkpointing(name="ViTForImageClassification"):
    """Of two grids, whose gradients are asked for together."""
    labels, sizes = torch.tensor([1, 3]), (images(2, 40, 24, seed=1), images())

    def loss(model):
        return sum(model(pixels, labels=labels, **resizing(name)).loss for pixels in sizes)

    model = converted_tower(name).train()
    grads = checkpointing_changes_nothing(model, loss)
    assert {name for name, _ in model.named_parameters() if ".mhla." in name} <= grads.keys()


def test_compiles_as_one_graph(name="DINOv3ViTModel"):
    one_graph(converted_tower(name, layers=[0]), output_of, images(), bound=0)
