"""What cannot work with pipelines is refused in one sentence: the argument, what came, what was expected."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_pipelines import inputs, tiny_transformer

import mhla_hf
from mhla_hf import MHLAWanTransformer3DModel

CPU = torch.device("cpu")


def wan(**overrides):
    return tiny_transformer("wan", **overrides)


def converted(family="wan", **settings):
    return mhla_hf.convert(tiny_transformer(family), **settings)


def other_latents(model, *shape, **more):
    return lambda: model(**{**inputs("wan"), **more, "hidden_states": torch.zeros(shape)})


RUNNING = {
    "latents of another VAE": (
        other_latents(converted(), 1, 48, 3, 8, 10),
        "hidden_states: got latents [1, 48, 3, 8, 10]",
    ),
    "not square": (
        lambda: converted("dit")(**inputs("dit", (8, 32))),
        "hidden_states: got latents of 8 by 32, expected a square",
    ),
    "a block alone": (
        lambda: converted().blocks[1].attn1(torch.zeros(1, 60, 24), None, None, None),
        "grid: got none, expected a call of the whole transformer",
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


@pytest.mark.parametrize("case", RUNNING)
def test_running(case):
    make, words = RUNNING[case]
    with pytest.raises((ValueError, TypeError)) as error:
        make()
    assert words in str(error.value) and str(error.value).count(". ") == 0, error.value


def change_config(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["mhla"] |= changes
    path.write_text(json.dumps(config))


def change_weights(folder, change):
    path = folder / "diffusion_pytorch_model.safetensors"
    state = load_file(path)
    change(state)
    save_file(state, path)


MIXING = "blocks.1.attn1.processor.mhla.mixing.weight"
DAMAGE = {
    "weights of fewer layers": (lambda folder: change_weights(folder, lambda s: s.pop(MIXING)), f"has no '{MIXING}'"),
    "weights of more layers": (lambda folder: change_config(folder, layers=[1]), "has 'blocks.2.attn1.processor.mhla."),
    "NaN in the mixing": (
        lambda folder: change_weights(folder, lambda s: s[MIXING].fill_(float("nan"))),
        "got NaN or infinite values",
    ),
    "negative mixing": (
        lambda folder: change_config(folder, mixing_form="direct"),
        "got negative mixing weights, expected nonnegative ones",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_checkpoints(case, tmp_path):
    change, words = DAMAGE[case]
    model = converted(cpe=3)
    model.save_pretrained(tmp_path)
    change(tmp_path)
    with pytest.raises(ValueError) as error:
        MHLAWanTransformer3DModel.from_pretrained(tmp_path)
    assert words in str(error.value) and str(error.value).count(". ") == 0, error.value


WEIGHTS = "diffusion_pytorch_model.safetensors"
HALF_A_FOLDER = {
    "no weights": (WEIGHTS, None, WEIGHTS.partition(".")[0]),
    "half a file": (WEIGHTS, 9000, WEIGHTS),
    "half a config": ("config.json", 30, "is not a valid JSON file"),
    "a mixing of another layout": ("config.json", "layout", r"mhla\.mixing\.weight expected shape"),
}


@pytest.mark.parametrize("case", HALF_A_FOLDER)
def test_half_a_folder(case, tmp_path):
    """diffusers says which file, or which weight."""
    name, size, words = HALF_A_FOLDER[case]
    converted().save_pretrained(tmp_path)
    if size == "layout":
        change_config(tmp_path, layout=[3, 2, 2])
    elif size is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:size])
    with pytest.raises((OSError, ValueError), match=words):
        MHLAWanTransformer3DModel.from_pretrained(tmp_path)


def test_a_stock_checkpoint_is_not_an_mhla_model(tmp_path):
    wan().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has no 'blocks\.1\.attn1\.processor\.mhla\.mixing\.weight' \(4 missing\)"):
        MHLAWanTransformer3DModel.from_pretrained(tmp_path)


def test_a_file_where_the_folder_should_be(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="save_directory: got the file"):
        converted().save_pretrained(tmp_path / "file")
