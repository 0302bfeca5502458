"""What transformers asks of a model: losses, gradients, dtypes, empty construction, copies, configurations."""

import copy
import json
import pickle

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from small_models import FAMILIES, MODELS, SIZES, converted_model, scratch_model, softmax_model, tokens
from transformers import AutoConfig, AutoModelForCausalLM

import mhla_hf
from mhla_hf.nn.mixing import Mixing, extend_causal


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


def test_autocast_gives_the_operator_one_dtype(model, monkeypatch):
    """Rotated queries and keys come in fp32 there, which the kernels would take for products of fp32."""
    given = []

    def noting(operator):
        def noted(q, k, v, *rest, **options):
            given.append({x.dtype for x in (q, k, v, options.get("q_den"), options.get("k_den")) if x is not None})
            return operator(q, k, v, *rest, **options)

        return noted

    for module, name in ((mhla_hf.nn.core, "mhla"), (mhla_hf.nn.local, "local_extend")):
        monkeypatch.setattr(module, name, noting(getattr(module, name)))
    ids = tokens(2, 40)
    exact = model(ids, labels=ids).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(ids, labels=ids).loss
    half = len(given) // 2
    assert half and given == [{torch.float32}] * half + [{torch.bfloat16}] * half
    assert abs(loss - exact) <= 1e-2 * exact
    loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_loss_and_gradients_reach_every_parameter(model):
    model.train()
    ids = tokens(2, 40)
    out = model(ids, labels=ids, output_hidden_states=True)
    out.loss.backward()
    by_hand = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
    torch.testing.assert_close(out.loss, by_hand)
    assert len(out.hidden_states) == model.config.num_hidden_layers + 1
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        if "experts" not in name and "k_proj.bias" not in name:
            assert parameter.grad.abs().max() > 0, name


def test_num_items_in_batch(model):
    ids = tokens(2, 20)
    mean = model(ids, labels=ids).loss
    torch.testing.assert_close(model(ids, labels=ids, num_items_in_batch=76).loss, mean / 2)


def test_gradient_checkpointing_changes_nothing(model):
    ids = tokens(2, 24)
    grads = []
    for checkpointing in (False, True):
        model.zero_grad()
        model.train()
        if checkpointing:
            model.activation_checkpointing_enable()
        model(ids, labels=ids).loss.backward()
        grads.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    for name in grads[0]:
        torch.testing.assert_close(grads[0][name], grads[1][name], rtol=1e-5, atol=1e-7)


def test_frozen_mixing_stays_frozen_through_save_and_load(tmp_path):
    model = converted_model(mixing_start="uniform", learn_mixing=False)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for m in (model, loaded):
        assert not any(p.requires_grad for n, p in m.named_parameters() if n.endswith("mixing.weight"))


def test_uniform_mixing_is_plain_linear_attention():
    """The blocks do not matter under uniform mixing: any block size gives the same outputs."""
    small = mhla_hf.convert(softmax_model(), layers="all", mixing_start="uniform", block_size=4, num_blocks=3)
    large = mhla_hf.convert(softmax_model(), layers="all", mixing_start="uniform", block_size=64)
    ids = tokens(2, 60)
    torch.testing.assert_close(small(ids).logits, large(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_the_mixing_in_fp32(model, dtype, tmp_path):
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    for name, parameter in loaded.named_parameters():
        assert parameter.dtype == (torch.float32 if ".mixing." in name else dtype), name
    ids = tokens(1, 33)
    a, b = model(ids).logits, loaded(ids).logits
    assert b.dtype == dtype
    assert (a - b.float()).norm() / a.norm() < 0.1
    # After .to(), the mixing is rounded, but used in fp32 all the same.
    loaded.to(dtype)(ids, labels=ids).loss.backward()


def test_missing_new_weights_get_their_start(tmp_path):
    """A softmax checkpoint under an MHLA configuration: base weights loaded, the new ones at their start."""
    model = mhla_hf.convert(softmax_model(), layers="all", block_size=8, num_blocks=4, gate=True, output_norm=True)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({k: v for k, v in weights.items() if ".mhla." not in k}, tmp_path / "model.safetensors", {"format": "pt"})
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert info["missing_keys"] == {k for k in weights if ".mhla." in k}
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


def test_from_config_equals_its_own_start():
    config = mhla_hf.MHLAConfig.preset("tiny")
    model = AutoModelForCausalLM.from_config(config)
    core = model.model.layers[0].self_attn.mhla
    torch.testing.assert_close(core.mixing.core().sum(-1), torch.ones(32))
    assert core.gate.weight.abs().max() == 0
    torch.testing.assert_close(torch.nn.functional.silu(core.gate.bias), torch.ones_like(core.gate.bias))


def test_copies(model):
    ids = tokens(1, 20)
    expected = model(ids).logits
    assert torch.equal(copy.deepcopy(model)(ids).logits, expected)
    assert torch.equal(pickle.loads(pickle.dumps(model))(ids).logits, expected)
    config = pickle.loads(pickle.dumps(model.config))
    assert config.to_dict() == model.config.to_dict() and type(config) is type(model.config)


def test_configuration_round_trip(model, tmp_path):
    model.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is type(model.config)
    assert loaded.mhla == model.config.mhla
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["architectures"] == [type(model).__name__]
    assert written["mhla"]["format_version"] == 2 and isinstance(written["mhla"]["layers"], list)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_softmax_classes_refuse_the_folder(family, tmp_path):
    """They would load all but `mhla.*` with a warning; tokenizers, which read the configuration too, are not stopped."""
    converted_model(family, layers=[1]).save_pretrained(tmp_path)
    name = FAMILIES[family][1].__name__
    for stock in (name, name.replace("CausalLM", "SequenceClassification"), name.replace("ForCausalLM", "Model")):
        with pytest.raises(ValueError, match="these are no weights of a softmax model"):
            getattr(transformers, stock).from_pretrained(tmp_path)
    assert transformers.PreTrainedConfig.from_pretrained(tmp_path).mhla["layers"] == [1]
    for loaded in (AutoConfig.from_pretrained(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path).config):
        assert not hasattr(loaded, "transformers_weights")


def test_softmax_classes_refuse_the_folder_of_a_model_from_scratch(tmp_path):
    """With as wide heads as a Llama's, all but `mhla.*` would fit."""
    config = mhla_hf.MHLAConfig.preset("tiny", vocab_size=64, num_hidden_layers=1, expand_k=1.0, expand_v=1.0)
    mhla_hf.MHLAForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="these are no weights of a softmax model"):
        transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert not hasattr(AutoModelForCausalLM.from_pretrained(tmp_path).config, "transformers_weights")


@pytest.mark.parametrize("family", list(FAMILIES))
def test_conversion_keeps_every_base_weight_and_the_other_model(family):
    base = softmax_model(family)
    other = type(base)(base.config).eval()  # shares the configuration object
    other.load_state_dict(base.state_dict())
    before = {k: v.clone() for k, v in base.state_dict().items()}
    ids = tokens(1, 20)
    expected = other(ids).logits
    model = mhla_hf.convert(base, layers=[1])
    assert model is base
    after = model.state_dict()
    assert set(after) - set(before) == {k for k in after if ".layers.1.self_attn.mhla." in k}
    assert all(torch.equal(after[k], v) for k, v in before.items())
    assert torch.equal(other(ids).logits, expected)
    assert not torch.equal(model(ids).logits, expected)


def test_mixtral_checkpoints_in_hub_naming_load(tmp_path):
    """transformers renames and merges expert weights by model type; the converted type must inherit that."""
    model = converted_model("mixtral", layers="2/3")
    model.save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors")
    assert any(".block_sparse_moe.experts.0.w1.weight" in n for n in names)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ids = tokens(1, 20)
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_body_alone_understands_padding():
    model = converted_model(layers="2/3")
    row = tokens(1, 9)
    ids = torch.cat([torch.zeros(1, 5, dtype=torch.long), row], 1)
    mask = torch.cat([torch.zeros(1, 5, dtype=torch.long), torch.ones_like(row)], 1)
    alone = model.model(row).last_hidden_state
    torch.testing.assert_close(model.model(ids, mask).last_hidden_state[:, 5:], alone, rtol=1e-5, atol=1e-5)
    embedded = model.model(inputs_embeds=model.get_input_embeddings()(ids), attention_mask=mask).last_hidden_state
    torch.testing.assert_close(embedded[:, 5:], alone, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("layers", ["all", [1]])
def test_compiled_and_exported_model_equals_eager(layers):
    """In one graph, also with a mask, for which models without softmax layers branch on no value."""
    model, ids = converted_model(layers=layers), tokens(2, 20)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    exported = torch.export.export(model, (ids,), {"attention_mask": mask, "use_cache": False}).module()
    expected = model(ids, attention_mask=mask).logits[mask.bool()]
    for run in (compiled, exported):
        got = run(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(compiled(ids, use_cache=False).logits, model(ids).logits, rtol=1e-5, atol=1e-5)


def test_mixing_beyond_its_rows():
    mixing = Mixing(6)
    core, longer = mixing(6), mixing(20)
    assert torch.equal(longer[:6, :6], core) and torch.equal(mixing(11), mixing(20)[:11, :11])
    assert torch.equal(longer, longer.tril()) and (longer.diagonal() > 0).all()
    # Row 6 repeats the last learned row by distance; further blocks decay.
    torch.testing.assert_close(longer[6, 1:7], core[5])
    assert (longer[19, :14].diff() >= 0).all()
    uniform = Mixing(4, start="uniform")(9)
    assert torch.equal(uniform[8], uniform[8, :1].expand(9))
    per_head = Mixing(4, 3)
    assert per_head(9).shape == (3, 9, 9)
    assert extend_causal(torch.ones(1, 1), 5).sum() == 15


def test_scratch_and_converted_sizes_are_small():
    assert scratch_model().num_parameters() < 50_000 and SIZES["hidden_size"] == 32
