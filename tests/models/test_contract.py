"""What transformers asks of a model: losses, gradients, dtypes, empty construction, copies, configurations."""

import copy
import pickle

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tools.model_checks import checkpointing_changes_nothing
from tools.small_models import FAMILIES, MODELS, converted_model, scratch_model, softmax_model, tokens
from transformers import AutoConfig, AutoModelForCausalLM

import mhla_hf
from mhla_hf.nn.settings import FOREIGN_ENTRIES

# All tokens are salient, because rounding to half precision would change which are.
SALIENT = {"mixing_form": "decay", "windowed": True, "salient": 64, "softmax_heads": {1: [0]}}
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
    for name, parameter in model.named_parameters():
        grad = grads[name]
        single = name.endswith("mixing.weight") and parameter.shape[-1] == 1  # of one decay, whose weight is 1
        if not (single or "experts" in name or "k_proj.bias" in name):
            assert grad.abs().max() > 0, name
        assert grad.isfinite().all(), name


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
    model = mhla_hf.convert(softmax_model(), layers="all", block_size=8, num_blocks=4, gate=True, output_norm=True)
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


@torch.no_grad()
@pytest.mark.parametrize("exported", [False, True])
def test_compiled_or_exported_model_equals_eager(exported):
    """In one graph, also with a mask, for which MHLA layers branch on no value."""
    model, ids = converted_model(layers=[1], num_layers=2), tokens(2, 20)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    torch.compiler.reset()
    if exported:
        run = torch.export.export(model, (ids,), {"attention_mask": mask, "use_cache": False}).module()
    else:
        run = torch.compile(model, backend="eager", fullgraph=True)
    got = run(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
    torch.testing.assert_close(got, model(ids, attention_mask=mask).logits[mask.bool()], rtol=1e-5, atol=1e-5)
