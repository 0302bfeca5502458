"""What cannot work with pipelines is refused in one sentence: the argument, what came, what was expected."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_pipelines import inputs, tiny_transformer

import mhla_hf
from mhla_hf import MHLAWanTransformer3DModel


def converted(family="wan", **settings):
    return mhla_hf.convert(tiny_transformer(family), **settings)


RUNNING = {
    "latents of another VAE": (
        lambda: converted()(**{**inputs("wan"), "hidden_states": torch.zeros(1, 48, 3, 8, 10)}),
        "hidden_states: got latents [1, 48, 3, 8, 10]",
    ),
    "not square": (
        lambda: converted("dit")(**inputs("dit", (8, 32))),
        "hidden_states: got a grid of (4, 16), expected a square",
    ),
    "a block alone": (
        lambda: converted().blocks[1].attn1(torch.zeros(1, 60, 24), None, None, None),
        "grid: got none, expected a call of the whole transformer",
    ),
    "cross-attention": (
        lambda: converted().blocks[1].attn1(torch.zeros(1, 60, 24), torch.zeros(1, 5, 24), None, None),
        "encoder_hidden_states: got a tensor, expected None",
    ),
    "a causal mask": (
        lambda: mhla_hf.convert(tiny_transformer("skyreels", num_frame_per_block=3))(**inputs("skyreels")),
        "attention_mask: got a tensor, expected None",
    ),
    "official on unequal blocks": (
        lambda: converted("sana", normalize="official", layout=[3, 3])(**inputs("sana")),
        "normalize is 'official'; expected equal blocks",
    ),
}


@pytest.mark.parametrize(("make", "words"), RUNNING.values(), ids=RUNNING)
def test_running(make, words):
    with pytest.raises((ValueError, TypeError)) as error:
        make()
    assert words in str(error.value) and str(error.value).count(". ") == 0, error.value


def change_config(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["mhla"] |= changes
    path.write_text(json.dumps(config))


def fill_with_nan(folder):
    path = folder / "diffusion_pytorch_model.safetensors"
    state = load_file(path)
    state[MIXING].fill_(float("nan"))
    save_file(state, path)


MIXING = "blocks.1.attn1.processor.mhla.mixing.weight"
DAMAGE = {
    "weights of more layers": (lambda folder: change_config(folder, layers=[1]), "has 'blocks.2.attn1.processor.mhla."),
    "NaN in the mixing": (fill_with_nan, "got NaN or infinite values"),
    "negative mixing": (lambda folder: change_config(folder, mixing_form="direct"), "got negative mixing weights"),
    "another layout": (lambda folder: change_config(folder, layout=[3, 2, 2]), "mhla.mixing.weight expected shape"),
    "a stock checkpoint": (lambda folder: tiny_transformer("wan").save_pretrained(folder), f"'{MIXING}' (4 missing)"),
}


@pytest.mark.parametrize(("change", "words"), DAMAGE.values(), ids=DAMAGE)
def test_damaged_checkpoints(change, words, tmp_path):
    converted(cpe=3).save_pretrained(tmp_path)
    change(tmp_path)
    with pytest.raises(ValueError) as error:
        MHLAWanTransformer3DModel.from_pretrained(tmp_path)
    assert words in str(error.value), error.value
