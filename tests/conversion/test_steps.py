"""A conversion that fails or is stopped leaves the model as it was, and one that succeeds leaves its modes."""

import json
from unittest.mock import Mock

import pytest
import torch
from tools.model_checks import check_unchanged, snapshot
from tools.small_encoders import softmax_encoder
from tools.small_models import refused, softmax_model, tokens
from tools.tiny_pipelines import PIPELINES, inputs, tiny_transformer
from transformers import LlamaForCausalLM

import mhla_hf
from mhla_hf.conversion import calibration, head_choice
from mhla_hf.conversion.fit import OutputFit
from mhla_hf.conversion.grid_fit import grid_layers
from mhla_hf.conversion.language import TeacherScores
from mhla_hf.conversion.teacher import mhla_layers

SMALL = {"block_size": 8, "window": 2, "effort": 0.1, "progress": False}
TEXT = tokens(1, 4000)[0]


def language_model():
    return softmax_model(num_key_value_heads=4, max_position_embeddings=96)


@pytest.mark.parametrize(
    ("stopped", "name", "errors"),
    [(head_choice, "score_heads", [KeyboardInterrupt]), (TeacherScores, "compare", [{"kl": 1.0}, MemoryError])],
)
def test_a_language_model_after_a_failure(monkeypatch, stopped, name, errors):
    """Before heads are chosen, and after some got softmax back."""
    model = language_model()
    model.set_attn_implementation("eager")
    model.generation_config.custom_generate = "code"
    model.model.register_forward_pre_hook(lambda *_: None)
    expected, before = model(TEXT[None, :60]).logits, snapshot(model)
    with monkeypatch.context() as patch, pytest.raises(errors[-1]):
        patch.setattr(stopped, name, Mock(side_effect=errors))
        mhla_hf.convert(model, text=TEXT, keep=5, **SMALL)
    check_unchanged(model, before)
    assert torch.equal(model(TEXT[None, :60]).logits, expected)
    assert model.config._attn_implementation == "eager" and model.generation_config.custom_generate == "code"
    mhla_hf.convert(model, text=TEXT, keep=5, **SMALL)
    assert model.config._attn_implementation == "eager" and not hasattr(model.generation_config, "custom_generate")


def test_an_encoder_after_a_failure(monkeypatch):
    model = softmax_encoder("bert").train()
    model.encoder.layer[1].eval()
    before = snapshot(model)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(OutputFit, "step", Mock(side_effect=KeyboardInterrupt))
        mhla_hf.convert(model, text=TEXT % 60, **SMALL)
    check_unchanged(model, before)
    mhla_hf.convert(model, text=TEXT % 60, **SMALL)
    assert [layer.mhla.q_map.training for layer in mhla_layers(model).values()] == [True, False, True]


def test_a_pipeline_after_a_failure(monkeypatch):
    monkeypatch.setattr(calibration, "SAMPLING_STEPS", 2)
    pipe = PIPELINES["dit"]()
    pipe.set_progress_bar_config(disable=True)
    pipe.transformer.train().transformer_blocks[0].eval()
    index, before = dict(pipe.config), snapshot(pipe.transformer)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="stop"):
        patch.setattr(calibration, "keep_softmax_heads", Mock(side_effect=RuntimeError("stop")))
        mhla_hf.convert(pipe, samples=[3, 7], effort=0.02, keep=1, progress=False)
    assert dict(pipe.config) == index
    check_unchanged(pipe.transformer, before)
    pipe.transformer(**inputs("dit"))
    mhla_hf.convert(pipe, samples=[3, 7], effort=0.02, keep=0, progress=False)
    assert [holder.mhla.training for holder in grid_layers(pipe.transformer).values()] == [False, True]
    assert pipe.config["transformer"][1] == type(pipe.transformer).__name__ == "MHLADiTTransformer2DModel"


def test_a_layer_whose_output_is_zero():
    model, encoder, transformer = language_model(), softmax_encoder("bert"), tiny_transformer("dit")
    values = model.model.layers[1].self_attn.v_proj, encoder.encoder.layer[1].attention.self.value
    with torch.no_grad():
        for projection in (*values, transformer.transformer_blocks[0].attn1.to_v):
            for parameter in projection.parameters():
                parameter.zero_()
    mhla_hf.convert(model, text=TEXT, keep=1, **SMALL)
    assert model.config.mhla_measured["head_scores"]["1"] == [0.0] * 4
    mhla_hf.convert(encoder, text=TEXT % 60, **SMALL)
    for one in (model, encoder):
        json.dumps(one.config.mhla_measured, allow_nan=False)
        assert all(x.isfinite().all() for x in one.state_dict().values())
    mhla_hf.convert(transformer, samples=lambda _: transformer(**inputs("dit")), effort=0.02, keep=0, progress=False)
    assert transformer.config.mhla_measured["layers"]["0"] == {"converted": 0, "fitted": 0}


def test_scores_that_are_not_finite_are_refused():
    model, transformer = language_model(), tiny_transformer("dit")
    model.model.norm.weight.data[0] = transformer.proj_out_2.weight.data[0] = float("nan")
    with refused("model: got outputs that are not finite"):
        mhla_hf.convert(model, text=TEXT, **SMALL)
    assert type(model) is LlamaForCausalLM
    with refused("model: got outputs that are not finite"):
        mhla_hf.convert(transformer, samples=lambda _: transformer(**inputs("dit")), effort=0.02, progress=False)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_it_learns_where_gradients_are_off(mode):
    text = TEXT % 60
    for make, options in ((language_model, {"keep": 1}), (lambda: softmax_encoder("bert"), {})):
        expected = mhla_hf.convert(make(), text=text, **SMALL, **options)
        with mode():
            model = mhla_hf.convert(make(), text=text, **SMALL, **options)
        assert model.config.mhla == expected.config.mhla
        assert all(torch.equal(x, expected.state_dict()[name]) for name, x in model.state_dict().items())
        model(text[None, :60])[0].sum().backward()
