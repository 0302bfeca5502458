"""A converted pipeline becomes a repository by diffusers' own push_to_hub, and loads by its id."""

import json

import pytest
import torch
from diffusers import DiffusionPipeline
from huggingface_hub import hf_api
from tiny_pipelines import dit_pipeline, generate, wan_pipeline

import mhla_hf
from mhla_hf.share import folder_checks


@pytest.fixture(autouse=True)
def functions_of_the_client(hub, monkeypatch):
    """diffusers calls the client's module-level functions, whose Hub was chosen when they were imported."""
    monkeypatch.setattr(hf_api.api, "endpoint", hub.endpoint)


def test_pushed_by_diffusers_and_loaded_by_id(hub, tmp_path):
    pipe = mhla_hf.convert(wan_pipeline(), gate=True)
    pipe.push_to_hub("tester/wan", token=None)
    files = hub.repos["tester/wan"].files()
    source = next(name for name in files if name.startswith("transformer/modeling_mhla_converted_"))
    index = json.loads(files["model_index.json"])
    assert index["transformer"] == [source.split("/")[1].removesuffix(".py"), "MHLAWanTransformer3DModel"]
    options = {"cache_dir": tmp_path / "cache"}
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        DiffusionPipeline.from_pretrained("tester/wan", **options)
    there = DiffusionPipeline.from_pretrained("tester/wan", trust_remote_code=True, **options)
    assert (generate(there) - generate(pipe)).abs().max() <= 1e-5
    there.push_to_hub("tester/again")
    again = hub.repos["tester/again"].files()
    assert again[source] == files[source]
    assert (
        again["transformer/diffusion_pytorch_model.safetensors"]
        == files["transformer/diffusion_pytorch_model.safetensors"]
    )


def test_the_card_of_a_pushed_pipeline_says_how_to_load_it_and_how_not(hub, monkeypatch):
    """By mhla_hf.push; diffusers' own push_to_hub writes a card of its own in its place."""
    monkeypatch.setattr(folder_checks, "check_visit", lambda *given: None)
    mhla_hf.push(mhla_hf.convert(wan_pipeline()), "tester/wan", license="apache-2.0", progress=False)
    card = hub.repos["tester/wan"].files()["README.md"].decode()
    for words in (
        "`WanPipeline` with [MHLA",
        'DiffusionPipeline.from_pretrained("tester/wan", trust_remote_code=True)',
        "a transformer class of diffusers itself would find its weights here",
        "license: apache-2.0",
    ):
        assert words in card, card


def test_a_transformer_alone_is_pushed_with_its_source(hub, tmp_path):
    model = mhla_hf.convert(dit_pipeline()).transformer
    model.push_to_hub("tester/dit")
    files = hub.repos["tester/dit"].files()
    assert any(name.startswith("modeling_mhla_dit_") for name in files)
    config = json.loads(files["config.json"])
    assert config["auto_map"]["AutoModel"].endswith(".MHLADiTTransformer2DModel")
    there = mhla_hf.MHLADiTTransformer2DModel.from_pretrained("tester/dit", cache_dir=tmp_path / "cache")
    assert all(torch.equal(value, there.state_dict()[name]) for name, value in model.state_dict().items())
