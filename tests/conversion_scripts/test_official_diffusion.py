"""The authors' Wan and DiT checkpoints in diffusers, against their formulas written out here and diffusers' own renaming."""

import math
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from diffusers import DiffusionPipeline
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
from official_checkpoints import main
from official_diffusion import is_official_dit, is_official_wan, load_official_dit, load_official_wan
from safetensors.torch import save_file
from tools.ops_cases import distance
from tools.small_models import refused
from tools.tiny_pipelines import PIPELINES, generate, inputs

from mhla_hf import MHLADiTTransformer2DModel, MHLAWanTransformer3DModel

WIDTH, HEADS, LAYERS, FFN = 24, 2, 3, 32


def noise(*shape, scale=None):
    return torch.randn(*shape) * (scale or 1.0 / math.sqrt(max(math.prod(shape[1:]), 1)))


def linear(state, name, out, into):
    state[f"{name}.weight"], state[f"{name}.bias"] = noise(out, into), 0.1 * torch.randn(out)


def norm(state, name, width):
    state[f"{name}.weight"], state[f"{name}.bias"] = 1 + 0.1 * torch.randn(width), 0.1 * torch.randn(width)


def wan_state(layers=(0, 1, 2), blocks=30, gate=False, lepe=False):
    """A checkpoint of the authors' Wan with random numbers; `layers` are MHLA, the others softmax."""
    torch.manual_seed(0)
    state = {"patch_embedding.weight": noise(WIDTH, 16, 1, 2, 2)}
    state["patch_embedding.bias"] = torch.zeros(WIDTH)
    ends = {"text_embedding.0": (WIDTH, 32), "text_embedding.2": (WIDTH, WIDTH), "time_embedding.0": (WIDTH, 64)}
    ends |= {"time_embedding.2": (WIDTH, WIDTH), "time_projection.1": (6 * WIDTH, WIDTH), "head.head": (64, WIDTH)}
    for name, sizes in ends.items():
        linear(state, name, *sizes)
    for block in (f"blocks.{i}" for i in range(LAYERS)):
        for attn in ("self_attn", "cross_attn"):
            for name in "qkvo":
                linear(state, f"{block}.{attn}.{name}", WIDTH, WIDTH)
            for name in ("norm_q", "norm_k"):
                state[f"{block}.{attn}.{name}.weight"] = 1 + 0.1 * torch.randn(WIDTH)
        if int(block[-1]) in layers:
            state[f"{block}.self_attn.g_norm.weight"] = 1 + 0.1 * torch.randn(WIDTH // HEADS)
            state[f"{block}.self_attn.block_attn.conv.weight"] = noise(blocks, blocks, 1, 1, scale=0.3)
            if gate:
                linear(state, f"{block}.self_attn.g", WIDTH, WIDTH)
            if lepe:
                state[f"{block}.self_attn.lepe.weight"] = noise(WIDTH, 1, 3, 3, 3)
                state[f"{block}.self_attn.lepe.bias"] = 0.1 * torch.randn(WIDTH)
        linear(state, f"{block}.ffn.0", FFN, WIDTH)
        linear(state, f"{block}.ffn.2", WIDTH, FFN)
        norm(state, f"{block}.norm3", WIDTH)
        state[f"{block}.modulation"] = noise(1, 6, WIDTH)
    return state | {"head.modulation": noise(1, 2, WIDTH)}


def official_wan_attention(state, x, grid, layout, norm_output=False):
    """The released layer on one grid, token by token, fp64: no scale, eps 1e-6; with `norm_output` divided by what the
    features before the rotation give, those of the query at the same place in every block."""
    prefix = "blocks.1.self_attn."
    weight = {key.removeprefix(prefix): value.double() for key, value in state.items() if key.startswith(prefix)}

    def project(name, x):
        return x @ weight[f"{name}.weight"].T + weight[f"{name}.bias"]

    def rms(x, weight):
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight

    x = x.double()
    v = project("v", x)
    q, k = (rms(project(n, x), weight[f"norm_{n}.weight"]).relu() + 1e-6 for n in "qk")
    heads = [t.unflatten(2, (HEADS, -1)) for t in (q, k, v)]
    places = torch.cartesian_prod(*(torch.arange(size, dtype=torch.float64) for size in grid))
    angles = [  # heads are 12 wide: 4 of them turn with each axis
        places[:, axis, None] / 10000.0 ** (torch.arange(0, 4, 2, dtype=torch.float64) / 4) for axis in range(3)
    ]
    turn = torch.exp(1j * torch.cat(angles, 1))[:, None]
    pairs = (torch.view_as_complex(t.unflatten(3, (-1, 2)).contiguous()) for t in heads[:2])
    turned = [torch.view_as_real(pair * turn).flatten(3) for pair in pairs]
    f, h, w = (places[:, axis].long() // (grid[axis] // layout[axis]) for axis in range(3))
    block = (f * layout[1] + h) * layout[2] + w
    mixing = weight["block_attn.conv.weight"].flatten(1)[block][:, block]
    o = torch.einsum("bthk,bshk,ts,bshv->bthv", *turned, mixing, heads[2])
    if norm_output:
        tokens = block.argsort(stable=True).view(math.prod(layout), -1)
        q, k = (t[:, tokens] for t in heads[:2])
        z = torch.einsum("ij,bjnhk,bjhk->binh", weight["block_attn.conv.weight"].flatten(1), q, k.sum(2)) + 1e-6
        o = o / z.flatten(1, 2)[:, tokens.flatten().argsort(), :, None]
    o = rms(o, weight["g_norm.weight"]).flatten(2)
    if "g.weight" in weight:
        o = o * F.silu(project("g", x))
    if "lepe.weight" in weight:
        image = v.mT.unflatten(2, grid)
        o = o + F.conv3d(image, weight["lepe.weight"], weight["lepe.bias"], padding=1, groups=WIDTH).flatten(2).mT
    return project("o", o)


def both(state, norm_output=False):
    """The model, output of its second layer's attention, and by the formula, with `norm_output` and without."""
    model, seen = load_official_wan(state, layout=(3, 2, 5), norm_output=norm_output), {}
    model.blocks[1].attn1.register_forward_hook(lambda module, args, output: seen.update(x=args[0], o=output))
    with torch.no_grad():
        model(**inputs("wan", (3, 8, 20)))
    formulas = (official_wan_attention(state, seen["x"], (3, 4, 10), (3, 2, 5), on) for on in (True, False))
    return model, seen["o"], *formulas


@pytest.mark.parametrize(("layers", "gated"), [((0, 1, 2), False), ((1, 2), True)])
def test_wan_is_the_released_layer(layers, gated):
    state = wan_state(layers, gate=gated, lepe=gated)
    assert is_official_wan(state) and not is_official_dit(state)
    model, got, _, expected = both(state)
    assert isinstance(model, MHLAWanTransformer3DModel) and model.config.mhla["layers"] == list(layers)
    assert distance(got, expected) <= 1e-5


def test_wan_with_norm_output_is_divided_before_its_norm():
    """The default of their code, which their yamls turn off. Only the eps of the norm lets it show, in small values."""
    state = {key: value.abs() if ".block_attn." in key else value for key, value in wan_state().items()}
    state |= {key: 0.1 * value for key, value in state.items() if ".self_attn.v." in key}
    _, got, expected, without = both(state, norm_output=True)
    assert distance(got, expected) <= 1e-5 and distance(got, without) > 1e-3


def test_every_other_wan_weight_lies_where_diffusers_puts_it():
    state = wan_state((1, 2))
    model = load_official_wan(state, layout=[3, 2, 5])
    known = {key: value for key, value in state.items() if "block_attn" not in key and "g_norm" not in key}
    theirs = convert_wan_transformer_to_diffusers(known)
    own = model.state_dict()
    assert {key for key in own if ".mhla." not in key} == set(theirs)
    assert all(torch.equal(own[key], value) for key, value in theirs.items())


def dit_state(blocks=4, softmax=()):
    """A checkpoint of the authors' DiT with random numbers: 8 x 8 tokens, layers in `softmax` are softmax."""
    torch.manual_seed(0)
    side, patch, width = 8, 2, WIDTH
    sizes = {"sample_size": side * patch, "patch_size": patch, "num_attention_heads": 1, "attention_head_dim": width}
    model = MHLADiTTransformer2DModel(num_layers=1, mhla={"layout": [1, 1]}, **sizes)
    state = {"pos_embed": model.pos_embed.pos_embed, "x_embedder.proj.weight": noise(width, 4, patch, patch)}
    state["x_embedder.proj.bias"] = 0.1 * torch.randn(width)
    linear(state, "t_embedder.mlp.0", width, 256)
    linear(state, "t_embedder.mlp.2", width, width)
    state["y_embedder.embedding_table.weight"] = torch.randn(11, width)
    for i in range(LAYERS):
        block = f"blocks.{i}"
        if i in softmax:
            linear(state, f"{block}.attn.qkv", 3 * width, width)
            linear(state, f"{block}.attn.proj", width, width)
        else:
            norm(state, f"{block}.attn.norm", width)
            linear(state, f"{block}.attn.to_qkv", 3 * width, width)
            linear(state, f"{block}.attn.to_out.0", width, width)
            state[f"{block}.attn.lepe.weight"], state[f"{block}.attn.lepe.bias"] = noise(width, 1, 3, 3), noise(width)
            state[f"{block}.attn.piece_attn.conv.weight"] = torch.rand(blocks, blocks, 1, 1)
        linear(state, f"{block}.mlp.fc1", 4 * width, width)
        linear(state, f"{block}.mlp.fc2", width, 4 * width)
        linear(state, f"{block}.adaLN_modulation.1", 6 * width, width)
    linear(state, "final_layer.linear", patch * patch * 8, width)
    linear(state, "final_layer.adaLN_modulation.1", 2 * width, width)
    return state


def official_dit(state, latents, timestep, labels, side, blocks):
    """The released model in fp64, written from its description: tokens block by block, a query's denominator mixed from the
    products of the queries at its place in every block."""
    s = {key: value.double() for key, value in state.items()}

    def project(name, x):
        return x @ s[f"{name}.weight"].T + s[f"{name}.bias"]

    def normed(x, eps=1e-6):
        return (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + eps).sqrt()

    tokens = F.conv2d(latents.double(), s["x_embedder.proj.weight"], s["x_embedder.proj.bias"], stride=2).flatten(2).mT
    x = tokens + s["pos_embed"]
    per, length = math.isqrt(blocks), side // math.isqrt(blocks)
    order = torch.arange(side * side).view(per, length, per, length).transpose(1, 2).reshape(-1)
    x = x[:, order]
    frequency = torch.exp(-math.log(10000) * torch.arange(128, dtype=torch.float64) / 128)
    angle = timestep.double()[:, None] * frequency
    c = project("t_embedder.mlp.2", F.silu(project("t_embedder.mlp.0", torch.cat([angle.cos(), angle.sin()], 1))))
    c = F.silu(c + s["y_embedder.embedding_table.weight"][labels])[:, None]

    def mhla(name, x):
        x = normed(x, 1e-5) * s[f"{name}.norm.weight"] + s[f"{name}.norm.bias"]
        q, k, v = project(f"{name}.to_qkv", x).chunk(3, -1)
        image = v[:, order.argsort()].mT.unflatten(2, (side, side))
        lepe = F.conv2d(image, s[f"{name}.lepe.weight"], s[f"{name}.lepe.bias"], padding=1, groups=WIDTH).flatten(2)
        q, k = q.relu() + 1e-6, k.relu() + 1e-6
        q, k, v = (t.unflatten(1, (blocks, -1)).unflatten(3, (HEADS, -1)) for t in (q, k, v))
        m = s[f"{name}.piece_attn.conv.weight"].flatten(1)
        kv = torch.einsum("ij,bjnhk,bjnhv->bihkv", m, k, v)
        z = torch.einsum("ij,bjnhk,bjmhk->binh", m, q, k)
        o = torch.einsum("binhk,bihkv->binhv", q, kv) / (z + 1e-6)[..., None]
        return project(f"{name}.to_out.0", o.flatten(3).flatten(1, 2) + lepe.mT[:, order])

    def softmax(name, x):
        q, k, v = (t.unflatten(2, (HEADS, -1)).transpose(1, 2) for t in project(f"{name}.qkv", x).chunk(3, -1))
        weight = (q @ k.mT * (WIDTH // HEADS) ** -0.5).softmax(-1)
        return project(f"{name}.proj", (weight @ v).transpose(1, 2).flatten(2))

    for i in range(LAYERS):
        block = f"blocks.{i}"
        shift1, scale1, gate1, shift2, scale2, gate2 = project(f"{block}.adaLN_modulation.1", c).chunk(6, -1)
        attend = mhla if f"{block}.attn.norm.weight" in s else softmax
        x = x + gate1 * attend(f"{block}.attn", normed(x) * (1 + scale1) + shift1)
        hidden = F.gelu(project(f"{block}.mlp.fc1", normed(x) * (1 + scale2) + shift2), approximate="tanh")
        x = x + gate2 * project(f"{block}.mlp.fc2", hidden)
    shift, scale = project("final_layer.adaLN_modulation.1", c).chunk(2, -1)
    x = project("final_layer.linear", normed(x) * (1 + scale) + shift)[:, order.argsort()]
    return x.view(-1, side, side, 2, 2, 8).permute(0, 5, 1, 3, 2, 4).reshape(-1, 8, 2 * side, 2 * side)


@pytest.mark.parametrize(("blocks", "softmax"), [(4, ()), (16, (0,))])
def test_dit_is_the_released_model(blocks, softmax):
    state = dit_state(blocks, softmax=softmax)
    assert is_official_dit(state) and not is_official_wan(state)
    model = load_official_dit(state, num_heads=HEADS)
    latents, timestep, labels = torch.randn(2, 4, 16, 16), torch.tensor([3, 777]), torch.tensor([1, 10])
    with torch.no_grad():
        got = model(latents, timestep=timestep, class_labels=labels).sample
    expected = official_dit(state, latents, timestep, labels, 8, blocks)
    assert expected.std() > 0.1 and distance(got, expected) <= 1e-5


def test_negative_weights_stay_as_they_are():
    state = dit_state()
    state["blocks.1.attn.piece_attn.conv.weight"][0, 1] = -0.5
    model = load_official_dit(state, num_heads=HEADS)
    assert model.config.mhla["mixing_form"] == "free"
    assert model.transformer_blocks[1].attn1.processor.mhla.mixing.weight[0, 1] == -0.5
    assert load_official_dit(dit_state(), num_heads=HEADS).config.mhla["mixing_form"] == "direct"


wan = partial(load_official_wan, layout=(3, 2, 5))
dit = partial(load_official_dit, num_heads=HEADS)
ONE = torch.ones(1)
BAD = [
    (wan, {"put": {"blocks.1.self_attn.tau": ONE, "x.weight": ONE}}, "2 unknown keys, 'blocks.1.self_attn.tau', 'x."),
    (wan, {"drop": ["blocks.2.ffn.2.bias"]}, "got no weights for 'blocks.2.ffn.net.2.bias'"),
    (wan, {"layout": None}, "layout: got none for 30 blocks"),
    (wan, {"layout": (3, 5, 10)}, "layout: got (3, 5, 10), expected three counts whose product is the checkpoint's 30"),
    (dit, {"put": {"pos_embed": torch.zeros(1, 64, 24)}}, "pos_embed: got other numbers"),
]


@pytest.mark.parametrize(("load", "change", "words"), BAD, ids=[words[:40] for _, _, words in BAD])
def test_bad_checkpoints_are_one_sentence(load, change, words):
    """With keys put in, keys dropped and options of the loader."""
    options = dict(change)
    state = {**(wan_state() if load is wan else dit_state()), **options.pop("put", {})}
    for key in options.pop("drop", ()):
        del state[key]
    with refused(words):
        load(state, **options)


def test_the_script_puts_a_checkpoint_into_a_pipeline(tmp_path, capsys):
    state = {f"module.{key}": value for key, value in wan_state((1, 2)).items()}
    torch.save({"state_dict": state}, tmp_path / "wan.pth")
    PIPELINES["wan"]().save_pretrained(tmp_path / "base")
    arguments = [str(tmp_path / "wan.pth"), "--layout", "3", "2", "5", "--base", str(tmp_path / "base")]
    pipe = main([*arguments, "--norm-output", "--out", str(tmp_path / "out")])
    assert pipe.transformer.config.mhla["normalize"] == "official"
    assert "MHLAWanTransformer3DModel" in capsys.readouterr().out
    again = DiffusionPipeline.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert (generate(pipe) - generate(again)).abs().max() <= 1e-5
    with pytest.raises(ValueError, match="which exists"):
        main([*arguments, "--out", str(tmp_path / "out")])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "out", "wan.pth"]


def test_the_script_refuses_what_does_not_fit(tmp_path):
    save_file({key: value.contiguous() for key, value in dit_state().items()}, tmp_path / "dit.safetensors")
    checkpoint, out = str(tmp_path / "dit.safetensors"), str(tmp_path / "out")
    for options, words in (
        (["--layout", "1", "2", "2"], "layout: got .*, expected none for the authors' DiT"),
        (["--norm-output"], "norm_output: got True, expected none for the authors' DiT"),
        ([], "num_heads: got none for width 24"),
    ):
        with pytest.raises(ValueError, match=words):
            main([checkpoint, *options, "--out", out])
    assert not Path(out).exists()
    model = main([checkpoint, "--num-heads", "2", "--out", out])
    again = MHLADiTTransformer2DModel.from_pretrained(out)
    assert distance(*(one.eval()(**inputs("dit")).sample for one in (model, again))) <= 1e-6
    assert again.config.timestep_freq_shift == 0 and again.config.input_norm
