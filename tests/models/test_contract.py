"""What transformers asks of a model: losses, gradients, dtypes, copies, configurations, packed rows, and refusals."""

import copy
import math
import pickle

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tools.model_checks import checkpointing_changes_nothing
from tools.small_models import CACHE, FAMILIES, MODELS, converted_model, refused, scratch_model, softmax_model, tokens
from transformers import AutoConfig, AutoModelForCausalLM, DataCollatorWithFlattening, DynamicCache

import mhla_hf
from mhla_hf.nn.settings import FOREIGN_ENTRIES

# All tokens are salient, because rounding to half precision would change which are.
SALIENT = {"windowed": True, "salient": 64, "softmax_heads": {1: [0]}}
MODELS = {**MODELS, "llama-salient": lambda: converted_model(**SALIENT)}


@pytest.fixture(params=list(MODELS))
def model(request):
    return MODELS[request.param]()


def test_340m_is_340m():
    with torch.device("meta"):
        model = mhla_hf.MHLAForCausalLM(mhla_hf.MHLAConfig.preset("340M"))
    config = model.config
    assert (config.head_dim, config.value_dim) == (128, 256)
    assert 0.98 < model.num_parameters() / 340e6 < 1.02
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.model.layers[3].self_attn.mhla.mixing.weight.shape == (32, 32)


def test_autocast(model):
    ids = tokens(2, 40)
    exact = model(ids, labels=ids).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(ids, labels=ids).loss
    assert abs(loss - exact) <= 1e-2 * exact
    loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_loss_and_gradients_reach_every_parameter_with_checkpointing_too(model):
    ids = tokens(2, 40)
    out = model.train()(ids, labels=ids, output_hidden_states=True)
    by_hand = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
    torch.testing.assert_close(out.loss, by_hand)
    assert len(out.hidden_states) == model.config.num_hidden_layers + 1
    grads = checkpointing_changes_nothing(model, lambda model: model(ids, labels=ids).loss, (1e-5, 1e-7))
    for name, _ in model.named_parameters():
        if not ("experts" in name or "k_proj.bias" in name):
            assert grads[name].abs().max() > 0, name
        assert grads[name].isfinite().all(), name


def test_frozen_mixing_stays_frozen_through_save_and_load(tmp_path):
    model = converted_model(mixing_start="uniform", learn_mixing=False)
    model.save_pretrained(tmp_path)
    for one in (model, AutoModelForCausalLM.from_pretrained(tmp_path)):
        assert not any(p.requires_grad for n, p in one.named_parameters() if n.endswith("mixing.weight"))


def test_copies_and_half_precision_which_keeps_the_mixing_in_fp32(model, tmp_path, dtype=torch.bfloat16):
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    for name, parameter in loaded.named_parameters():
        assert parameter.dtype == (torch.float32 if ".mixing." in name else dtype), name
    ids = tokens(1, 33)
    a, b = model(ids).logits, loaded(ids).logits
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(ids).logits, a)
    assert b.dtype == dtype
    assert (a - b.float()).norm() / a.norm() < 0.1
    # After .to(), the mixing is rounded, but used in fp32 all the same.
    loaded.to(dtype)(ids, labels=ids).loss.backward()


def test_missing_new_weights_get_their_start(tmp_path):
    """A softmax checkpoint under an MHLA configuration: base weights loaded, the new ones at their start."""
    settings = {"layers": "all", "block_size": 8, "num_blocks": 4, "gate": True, "output_norm": True}
    model = mhla_hf.convert(softmax_model(), windowed=False, **settings)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({k: v for k, v in weights.items() if ".mhla." not in k}, tmp_path / "model.safetensors", {"format": "pt"})
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert info["missing_keys"] == {k for k in weights if ".mhla." in k}
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


@pytest.mark.parametrize("family", ["scratch", *FAMILIES])
def test_softmax_classes_refuse_the_folder(family, tmp_path):
    """They would load all but `mhla.*` with a warning; tokenizers, which read the configuration too, are not stopped."""
    model = scratch_model() if family == "scratch" else converted_model(family, layers=[1])
    model.save_pretrained(tmp_path)
    if family == "mixtral":  # whose expert weights transformers renames and merges by model type
        assert any(".block_sparse_moe.experts.0.w1.weight" in key for key in load_file(tmp_path / "model.safetensors"))
    name = FAMILIES.get(family, FAMILIES["llama"])[0]
    for stock in (f"{name}ForCausalLM", f"{name}Model"):
        with pytest.raises(ValueError, match="these are no weights of a softmax model"):
            getattr(transformers, stock).from_pretrained(tmp_path)
    assert transformers.PreTrainedConfig.from_pretrained(tmp_path).model_type == ""
    for loaded in (AutoConfig.from_pretrained(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path).config):
        assert not any(hasattr(loaded, name) for name in FOREIGN_ENTRIES)


CLOSE = {"rtol": 1e-5, "atol": 1e-5}
PACKED = [
    lambda: converted_model(layers="2/3"),
    scratch_model,
    lambda: converted_model(block_size=4, windowed=True, window=1, salient=2, softmax_heads={0: [1]}),
]
ROWS = [tokens(1, n, seed=n) for n in (5, 20, 9)]
COLLATORS = {
    "position_ids": {},
    "seq_idx": {"return_seq_idx": True, "return_position_ids": False},
    "cu_seq_lens_q": {"return_flash_attn_kwargs": True, "return_position_ids": False},
}


def packed(given: str) -> dict:
    return DataCollatorWithFlattening(**COLLATORS[given])([{"input_ids": row[0].tolist()} for row in ROWS])


def separate(model) -> torch.Tensor:
    return torch.cat([model(row, use_cache=False).logits for row in ROWS], 1)


@torch.no_grad()
@pytest.mark.parametrize("make", PACKED, ids=["hybrid", "scratch", "salient"])
@pytest.mark.parametrize("given", list(COLLATORS))
def test_packed_equals_separate(make, given):
    """Also where the model would make a cache by itself, and where the body gets its arguments by place."""
    model, batch = make(), packed(given)
    expected = separate(model)
    torch.testing.assert_close(model(**batch).logits, expected, **CLOSE)
    if given == "position_ids":
        hidden = model.model(batch["input_ids"], None, batch["position_ids"]).last_hidden_state
        torch.testing.assert_close(model.lm_head(hidden), expected, **CLOSE)


@pytest.mark.parametrize("given", ["position_ids", "cu_seq_lens_q"])
def test_compiled_packed_equals_separate(given):
    """As one graph where the borders are given; where they are read from the numbers, the graph is cut there."""
    torch.compiler.reset()
    model, batch = converted_model(layers=[1], num_layers=2), packed(given)
    out = torch.compile(model, backend="eager", fullgraph=given == "cu_seq_lens_q")(**batch)
    torch.testing.assert_close(out.logits, separate(model), **CLOSE)
    out.loss.backward()
    compiled = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model(**batch).loss.backward()
    for got, parameter in zip(compiled, model.parameters(), strict=True):
        torch.testing.assert_close(got, parameter.grad, **CLOSE)


def test_packed_rows_have_neither_padding_nor_cache():
    model, batch = converted_model(), packed("cu_seq_lens_q")
    given = {"attention_mask": torch.ones(1, 34), CACHE: DynamicCache(), "use_cache": True}
    for name, value in given.items():
        with refused(name, "packed"):
            model(**batch, **{name: value})


@pytest.mark.parametrize("windowed", [True, False])
def test_settings_of_a_causal_model(windowed):
    for name, value in {"cpe": 3, "normalize": "official", "block_size": 10**9}.items():
        config = converted_model(windowed=windowed).config
        config.mhla |= {name: value}
        with refused(f"{name}: got"):
            AutoModelForCausalLM.from_config(config)


def test_key_heads_that_do_not_divide_the_heads():
    config = converted_model().config
    config.num_key_value_heads = 3
    with refused("num_key_value_heads: got 3, expected a divisor of the 4 attention heads."):
        AutoModelForCausalLM.from_config(config)
    with refused("layers", kind=Exception):
        mhla_hf.MHLAConfig.preset("tiny", mhla={"layers": [0]})


DAMAGED = [
    ("mixing.weight", -0.5, {"mixing_form": "direct"}, "negative"),
    ("q_map.weight", math.nan, {"windowed": False}, "q_map.weight"),
]


@pytest.mark.parametrize(("which", "value", "settings", "word"), DAMAGED)
def test_damaged_weights(tmp_path, which, value, settings, word):
    model = mhla_hf.convert(softmax_model(), layers=[1], block_size=8, num_blocks=4, **settings)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    weights[f"model.layers.1.self_attn.mhla.{which}"].view(-1)[0] = value
    save_file(weights, file, {"format": "pt"})
    with refused(f"model.layers.1.self_attn.mhla.{which.split('.')[0]}", word):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    file.write_bytes(file.read_bytes()[:-100])
    with refused("model.safetensors: got a damaged file, expected a complete safetensors file"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


CALLS = [
    ({"attention_mask": torch.ones(3, 9)}, "attention_mask"),
    ({"attention_mask": torch.ones(2, 9, 9)}, "attention_mask"),
    ({"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5]] * 2)}, "position_ids"),
    ({"softcap": 50.0}, "softcap"),
    ({"cache": object()}, "cache"),
    ({"is_causal": False}, "is_causal"),
]


@pytest.mark.parametrize(("arguments", "word"), CALLS)
@pytest.mark.parametrize("make", [converted_model, scratch_model])
def test_calls(make, arguments, word):
    with refused(word):
        make()(tokens(2, 9), **arguments)


@torch.no_grad()
@pytest.mark.parametrize("settings", [{}, {"windowed": True, "salient": 3}])
def test_a_refused_crop_has_cut_no_layer_of_a_hybrid(settings):
    model, ids = converted_model(layers="2/3", **settings), tokens(1, 30)
    cache = model(ids, use_cache=True)[CACHE]
    for count in (-9, 4, -31):
        with refused(f"tokens_to_remove: got {count}"):
            cache.crop(count)
        assert [layer.get_seq_length() for layer in cache.layers] == [30] * 3
    cache = copy.deepcopy(pickle.loads(pickle.dumps(cache)))
    cache.crop(-5)
    again = model(ids[:, 25:], **{CACHE: cache}).logits
    torch.testing.assert_close(again, model(ids).logits[:, 25:], **CLOSE)


def test_continuous_batching_is_refused():
    with refused("paged caches", "vLLM"):
        converted_model(layers="2/3").generate_batch([[1, 2, 3], [4, 5]])
