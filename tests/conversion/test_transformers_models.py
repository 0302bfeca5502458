"""convert() keeps what it does not replace, and refuses what it cannot do before it touches anything."""

import pytest
import torch
import transformers
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from tools.small_encoders import softmax_encoder
from tools.small_models import FAMILIES, converted_model, refused, scratch_model, softmax_model, tokens
from tools.small_towers import small_clip, softmax_tower
from tools.small_types import small_model_of
from transformers import LlamaModel

import mhla_hf

SLIDING = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}


def gemma2():
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 32, "vocab_size": 64, "head_dim": 16}
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**sizes))


def with_attribute(name, value):
    model = softmax_model()
    for layer in model.model.layers:
        setattr(layer.self_attn, name, value)
    return model


CAPPED = "its attention scores have a soft cap (attn_logit_softcapping)"
CONVERT = [  # a model, settings, and what is said of them
    (lambda: torch.nn.Linear(2, 2), {}, "model: got Linear"),
    (lambda: type("Own", (LlamaModel,), {})(softmax_model().config), {}, "model: got Own, expected LlamaForCausalLM"),
    (scratch_model, {}, "MHLA model already"),
    (softmax_model, {"layers": [3]}, "layers: got layer 3, expected 0 to 2: the model has 3 layers"),
    (softmax_model, {"blocksize": 3}, "settings: got unknown setting 'blocksize', expected 'block_size'"),
    (lambda: softmax_model(num_hidden_layers=1), {"layers": "2/3"}, 'layers: got "2/3" for 1 layer'),
    (lambda: softmax_model("mistral", sliding_window=16), {"layers": [1]}, "become MHLA: it sees only the last 16"),
    (lambda: softmax_model("qwen2", **SLIDING), {"layers": [0, 2]}, "layers: got layer 2, which cannot become MHLA because"),
    (lambda: softmax_model(is_causal=False), {"layers": [1]}, "is_causal"),
    (softmax_model, {"settings": {}}, "settings: got dict, expected MHLASettings"),
    (softmax_model, {"layers": []}, 'layers: got [], expected "all", "2/3" or a list'),
    (lambda: small_model_of("qwen3_next"), {"layers": [0]}, "layer 0", "it has no softmax attention"),
    *((gemma2, {"layers": layers}, CAPPED) for layers in ("all", [0], [1])),  # a sliding and a whole layer
    (lambda: with_attribute("sinks", torch.zeros(4)), {}, "attention sinks"),
    (lambda: with_attribute("is_kv_shared_layer", True), {}, "shares keys and values"),
    (small_clip, {}, "'clip'"),
    (lambda: softmax_tower("ViTModel"), {"layout": [4]}, "layout: got [4]"),
    (lambda: softmax_tower("ViTModel"), {"normalize": "official"}, "normalize"),
    (lambda: softmax_encoder("bert", is_decoder=True), {}, "'bert'", "it sees only earlier tokens (is_decoder=True)"),
    (lambda: softmax_encoder("modernbert"), {"layers": [1]}, "layer 1", "it sees only its neighbors (sliding_window)"),
    (lambda: transformers.BertLMHeadModel(softmax_encoder("bert").config), {}, "BertLMHeadModel", "BertForMaskedLM"),
    (lambda: softmax_encoder("bert"), {"mixing_form": "softmax", "layout": [4]}, "layout", "expected None for an encoder"),
    (lambda: softmax_encoder("bert"), {"softmax_heads": {0: [1]}}, "softmax_heads", "expected None for an encoder"),
    (lambda: softmax_encoder("bert"), {"rope": "after"}, "rope", 'expected "before"'),
]  # fmt: skip


@pytest.mark.parametrize("case", CONVERT, ids=lambda case: case[2])
def test_convert(case):
    make, arguments, *words = case
    model = make()
    before = type(model), set(model.state_dict())
    with refused(*words, kind=(TypeError, ValueError)):
        mhla_hf.convert(model, **arguments)
    assert before == (type(model), set(model.state_dict()))


def test_offloaded_layers_are_refused_and_hooked_ones_work():
    model, plain = softmax_model(), converted_model(gate=True)
    for layer in model.model.layers:
        add_hook_to_module(layer.self_attn, AlignDevicesHook(execution_device="cpu"))
    mhla_hf.convert(model, layers="all", block_size=8, num_blocks=4, gate=True, mixing_form="softmax")
    model.load_state_dict(plain.state_dict())
    ids = tokens(1, 12)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 9, "do_sample": False}
    assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))
    body, mask = add_hook_to_module(softmax_model().model, AlignDevicesHook("cpu")), torch.ones_like(ids)
    mask[0, :5] = 0
    mhla_hf.convert(body, layers="all", block_size=8, num_blocks=4)
    torch.testing.assert_close(body(ids, attention_mask=mask)[0][:, 5:], body(ids[:, 5:])[0], rtol=1e-5, atol=1e-5)
    away = softmax_model()
    add_hook_to_module(away.model.layers[1].self_attn, AlignDevicesHook(execution_device="cpu", offload=True))
    away.model.layers[1].self_attn.to("meta")
    with refused("offloaded weights in layer 1"):
        mhla_hf.convert(away, layers="all")


@pytest.mark.parametrize("family", list(FAMILIES))
def test_conversion_keeps_the_other_model_of_a_configuration(family):
    base = softmax_model(family)
    other = type(base)(base.config).eval()  # shares the configuration object
    other.load_state_dict(base.state_dict())
    ids = tokens(1, 20)
    expected = other(ids).logits
    model = mhla_hf.convert(base, layers=[1], block_size=4, window=2, salient=3)
    assert model is base
    assert torch.equal(other(ids).logits, expected)
    assert not torch.equal(model(ids).logits, expected)
