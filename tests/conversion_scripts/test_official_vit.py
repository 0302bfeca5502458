"""The authors' image classifier: strict on keys, and equal to its formula written out here from their names."""

import official_checkpoints as official
import pytest
import torch
import torch.nn.functional as F
from tools.ops_cases import distance
from tools.small_models import refused
from transformers import AutoModelForImageClassification

WIDTH, HEADS, SIDE, BLOCKS, PATCH = 128, 2, 16, 4, 4


def checkpoint(*, pool_first=True, bias=False):
    """Random weights under the authors' names, small, of which a few mixing weights are negative."""
    random = torch.Generator().manual_seed(0)

    def values(*shape, scale=0.1):
        return scale * torch.randn(*shape, generator=random)

    state = {"pos_embed": values(1, SIDE**2, WIDTH), "patch_embed.proj.weight": values(WIDTH, 3, PATCH, PATCH)}
    state["patch_embed.proj.bias"] = values(WIDTH)
    for i in range(2):
        for name in ("norm1", "attn.norm", "norm2", "attn.q_norm", "attn.k_norm"):
            state[f"blocks.{i}.{name}.weight"] = 1 + values(WIDTH)
            if "_norm" not in name:
                state[f"blocks.{i}.{name}.bias"] = values(WIDTH)
        state[f"blocks.{i}.attn.to_qkv.weight"] = values(3 * WIDTH, WIDTH)
        if bias:
            state[f"blocks.{i}.attn.to_qkv.bias"] = values(3 * WIDTH)
        state[f"blocks.{i}.attn.lepe.weight"] = values(WIDTH, 1, 5, 5)
        mixing = 1 / 16 + values(BLOCKS**2, BLOCKS**2, scale=0.03)
        state[f"blocks.{i}.attn.piece_attn.conv.weight"] = mixing[:, :, None, None]
        sizes = {"attn.to_out.0": (WIDTH, WIDTH), "mlp.fc1": (4 * WIDTH, WIDTH), "mlp.fc2": (WIDTH, 4 * WIDTH)}
        state[f"blocks.{i}.attn.lepe.bias"] = values(WIDTH)
        for name, shape in sizes.items():
            state[f"blocks.{i}.{name}.weight"], state[f"blocks.{i}.{name}.bias"] = values(*shape), values(shape[0])
    norm = "fc_norm" if pool_first else "norm"
    state |= {f"{norm}.weight": 1 + values(WIDTH), f"{norm}.bias": values(WIDTH)}
    return state | {"head.weight": values(7, WIDTH), "head.bias": values(7)}


def formula(state, pixels, *, pool_first=True):
    """The authors' forward pass, token by token: fp64, no block ever made."""
    state = {key: value.double() for key, value in state.items()}

    def norm(x, name, eps):
        return F.layer_norm(x, (WIDTH,), state[f"{name}.weight"], state[f"{name}.bias"], eps)

    x = F.conv2d(pixels.double(), state["patch_embed.proj.weight"], state["patch_embed.proj.bias"], stride=PATCH)
    x = x.flatten(2).mT + state["pos_embed"]
    place = torch.arange(SIDE) // (SIDE // BLOCKS)
    block = (place[:, None] * BLOCKS + place[None, :]).flatten()
    inside = torch.arange(SIDE) % (SIDE // BLOCKS)
    slot = (inside[:, None] * (SIDE // BLOCKS) + inside[None, :]).flatten()
    for i in range(2):
        name = f"blocks.{i}.attn"
        y = norm(norm(x, f"blocks.{i}.norm1", 1e-6), f"{name}.norm", 1e-5)
        y = F.linear(y, state[f"{name}.to_qkv.weight"], state.get(f"{name}.to_qkv.bias"))
        q, k, v = y.chunk(3, -1)
        image, lepe = v.mT.unflatten(2, (SIDE, SIDE)), (state[f"{name}.lepe.weight"], state[f"{name}.lepe.bias"])
        local = F.conv2d(image, *lepe, padding=2, groups=WIDTH)
        q, k = (
            z * (z.square().mean(-1, keepdim=True) + 2**-23).rsqrt() * state[f"{name}.{w}_norm.weight"]
            for z, w in ((q, "q"), (k, "k"))
        )
        q, k, v = ((z.unflatten(2, (HEADS, -1))) for z in (q.relu() + 1e-6, k.relu() + 1e-6, v))
        mixing = state[f"{name}.piece_attn.conv.weight"][:, :, 0, 0]
        products = torch.einsum("bthd,bshd->bhts", q, k)
        top = torch.einsum("bhts,bshd->bthd", products * mixing[block][:, block], v)
        # a token's denominator: over blocks c, the mixing times <the query at its own slot of block c, the keys of c>
        own = products * (block[:, None] == block[None, :])
        sums = torch.zeros(*own.shape[:2], BLOCKS**2, SIDE**2 // BLOCKS**2, dtype=own.dtype)
        sums[:, :, block, slot] = own.sum(-1)
        bottom = torch.einsum("ic,bhcw->bhiw", mixing, sums)[:, :, block, slot] + 1e-6
        o = (top / bottom.mT[..., None]).flatten(2) + local.flatten(2).mT
        x = x + F.linear(o, state[f"{name}.to_out.0.weight"], state[f"{name}.to_out.0.bias"])
        y = norm(x, f"blocks.{i}.norm2", 1e-6)
        y = F.gelu(F.linear(y, state[f"blocks.{i}.mlp.fc1.weight"], state[f"blocks.{i}.mlp.fc1.bias"]))
        x = x + F.linear(y, state[f"blocks.{i}.mlp.fc2.weight"], state[f"blocks.{i}.mlp.fc2.bias"])
    x = norm(x.mean(1), "fc_norm", 1e-6) if pool_first else norm(x, "norm", 1e-6).mean(1)
    return F.linear(x, state["head.weight"], state["head.bias"])


@pytest.mark.parametrize(("pool_first", "bias"), [(True, False), (False, True)])
def test_equal_to_the_formula(pool_first, bias):
    state = checkpoint(pool_first=pool_first, bias=bias)
    model = official.load_vit(state)
    assert model.config.mhla["normalize"] == "official" and model.config.mhla["layout"] == [4, 4]
    assert model.config.qkv_bias is bias and model.config.mhla["cpe"] == 5
    pixels = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    expected = formula(state, pixels, pool_first=pool_first)
    assert distance(model(pixels).logits, expected) < 1e-5
    paper = official.load_vit(state)
    for part in paper.modules():
        if hasattr(part, "mhla"):
            part.mhla.settings.normalize = True
    assert distance(paper(pixels).logits, expected) > 1e-3  # the paper's denominator differs


def test_from_a_file_to_a_folder(tmp_path):
    state = checkpoint()
    sizes = official.vit_config(state | {"patch_embed.proj.weight": torch.zeros(WIDTH, 3, 16, 16)})
    assert sizes.image_size == 224 and sizes.padded_sides(224, 224) == (256, 256) and sizes.num_labels == 7
    saved = {f"module._orig_mod.{key}": value for key, value in state.items()}
    torch.save({"epoch": 3, "state_dict_ema": saved}, tmp_path / "x.pth")
    model = official.main([str(tmp_path / "x.pth"), "--out", str(tmp_path / "out")])
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path / "out").state_dict()
    expected = official.load_vit(state).state_dict()
    for found in (loaded, model.state_dict()):
        assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in found)


BROKEN = [
    (lambda s: s.pop("blocks.1.mlp.fc2.bias"), "got no weight 'model.stages.0.blocks.1.mlp.fc2.bias'"),
    (lambda s: s.update({"blocks.1.mlp.fc1.weight": torch.zeros(3, 3)}), "(3, 3)"),
    (lambda s: s.update({"pos_embed": torch.zeros(1, 255, WIDTH)}), "255 positions"),
    (lambda s: s.pop("blocks.0.attn.piece_attn.conv.weight"), "authors' image classifier"),
]


@pytest.mark.parametrize(("damage", "word"), BROKEN)
def test_every_key_is_accounted_for(tmp_path, damage, word):
    state = checkpoint()
    damage(state)
    torch.save(state, tmp_path / "x.pth")
    with refused(word):
        official.main([str(tmp_path / "x.pth"), "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
