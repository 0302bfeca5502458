"""DiT and DiG from scratch (tables 1 and 3): sizes, the block's formula, starting, saving."""

import copy
import inspect

import pytest
import torch
import torch.nn.functional as F
from diffusers import AutoModel, DiTTransformer2DModel

from mhla_hf import MHLADiTTransformer2DModel

INPUTS = {"timestep": torch.tensor([3, 700]), "class_labels": torch.tensor([1, 2])}


def small(**arguments):
    """DiG-S/8 of two narrow blocks, with noise on everything."""
    torch.manual_seed(0)
    sizes = {"num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 8, "in_channels": 2, "patch_size": 2}
    model = MHLADiTTransformer2DModel.from_preset("DiG-S/2", num_classes=5, input_size=12, **{**sizes, **arguments})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model.eval()


def latents(side=12):
    return torch.randn(2, 2, side, side, generator=torch.Generator().manual_seed(1))


def test_block_is_the_formula():
    model = small(mhla={"layout": [3, 2]})
    block = model.transformer_blocks[0]
    x = torch.randn(2, 36, 32)
    emb = block.norm1.linear(F.silu(block.norm1.emb(INPUTS["timestep"], INPUTS["class_labels"], hidden_dtype=x.dtype)))
    shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = (part[:, None] for part in emb.chunk(6, 1))
    y = F.layer_norm(x, (32,), eps=1e-6) * (1 + scale) + shift
    attn, core = block.attn1, block.attn1.processor.mhla
    q, k, v = ((y @ w.weight.T).unflatten(2, (4, -1)) for w in (attn.to_q, attn.to_k, attn.to_v))
    assert q.shape[-1] == 4 and v.shape[-1] == 8
    place = (torch.arange(6)[:, None] // 2 * 2 + torch.arange(6)[None, :] // 3).flatten()
    weights = torch.einsum("bthd,bshd->bhts", q.relu() + 1e-6, k.relu() + 1e-6)
    o = torch.einsum("bhts,bshd->bthd", weights * core.mixing.weight.softmax(-1)[place][:, place] / 4**0.5, v)
    o = o * (o.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * core.norm.weight
    x1 = x + gate * ((o.flatten(2) * F.silu(core.gate(y))) @ attn.to_out[0].weight.T)
    y = F.layer_norm(x1, (32,), eps=1e-6) * (1 + scale_mlp) + shift_mlp
    value, act = (y @ block.ff.net[0].proj.weight.T).chunk(2, -1)
    x2 = x1 + gate_mlp * ((value * F.silu(act)) @ block.ff.net[2].weight.T)
    conv = block.local.conv
    expected = F.conv2d(x2.mT.unflatten(2, (6, 6)), conv.weight, conv.bias, padding=1, groups=32).flatten(2).mT
    found = model.mhla_state.run((6, 6), block, x, timestep=INPUTS["timestep"], class_labels=INPUTS["class_labels"])
    assert ((found - expected).norm() / expected.norm()).item() < 1e-5


def test_saved_loaded_copied_fused_checkpointed(tmp_path):
    """With one embedding of time and class for all blocks, in a copy and after loading, too."""
    model = small()
    expected = model(latents(), **INPUTS).sample
    model.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(str(tmp_path), trust_remote_code=True)
    for one in (loaded, copy.deepcopy(model)):
        assert one.config.dig_block and torch.equal(one(latents(), **INPUTS).sample, expected)
        assert len({block.norm1.emb for block in one.transformer_blocks}) == 1
    for block in loaded.transformer_blocks:
        block.attn1.fuse_projections()
        block.norm1.emb.class_embedder.dropout_prob = 0.0
    loaded.train().enable_gradient_checkpointing()
    torch.testing.assert_close(loaded(latents(), **INPUTS).sample, expected, rtol=1e-5, atol=1e-6)
    loaded(latents(), **INPUTS).sample.sum().backward()
    expected.sum().backward()
    for block, other in zip(model.transformer_blocks, loaded.transformer_blocks, strict=True):
        torch.testing.assert_close(block.local.conv.weight.grad, other.local.conv.weight.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("preset", ["DiT-S/8", "DiG-S/8"])
def test_starts_as_the_identity_with_output_zero(preset):
    model = MHLADiTTransformer2DModel.from_preset(preset, num_classes=5, num_layers=2, mhla={"cpe": 3}).eval()
    seen = []
    for block in model.transformer_blocks:
        block.register_forward_hook(lambda module, args, output: seen.append(torch.equal(args[0], output)))
    output = model(torch.randn(2, 4, 32, 32), **INPUTS).sample
    assert output.abs().max() == 0 and seen == [True, True]


@pytest.mark.parametrize("preset, millions", [("DiT-S/2", 33), ("DiT-B/4", 131), ("DiT-L/8", 459), ("DiT-XL/2", 675)])
def test_dit_presets_from_scratch(preset, millions):
    with torch.device("meta"):
        model = MHLADiTTransformer2DModel.from_preset(preset, mhla={"cpe": 3})
    added = sum(p.numel() for name, p in model.named_parameters() if ".mhla." in name)
    assert (model.num_parameters() - added) / 1e6 == pytest.approx(millions, rel=0.02)  # table 1 of the DiT paper
    assert added < 0.01 * model.num_parameters()


def test_the_file_of_shared_embeddings_is_one_that_the_class_of_diffusers_could_read():
    sizes = {"num_layers": 3, "num_attention_heads": 2, "attention_head_dim": 8, "num_classes": 5, "input_size": 8}
    model = MHLADiTTransformer2DModel.from_preset("DiT-S/2", **sizes)
    known = set(inspect.signature(DiTTransformer2DModel).parameters)
    stock = DiTTransformer2DModel(**{key: value for key, value in model.config.items() if key in known})
    state = model.state_dict()
    assert {name for name in state if ".mhla." not in name} == set(stock.state_dict())
    assert len({value.data_ptr() for value in state.values()}) == len(state), "files may not share memory"
