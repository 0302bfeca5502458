"""The authors' checkpoints: strict on keys, and equal to their formulas, written out here from their names."""

import math
from functools import partial
from pathlib import Path

import official_checkpoints as official
import pytest
import torch
import torch.nn.functional as F
from diffusers import DiffusionPipeline
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
from official_diffusion import is_official_dit, is_official_wan, load_official_dit, load_official_wan
from safetensors.torch import save_file
from tools.ops_cases import distance
from tools.small_models import refused
from tools.tiny_pipelines import PIPELINES, generate, inputs
from transformers import AutoModelForImageClassification

from mhla_hf import MHLADiTTransformer2DModel, MHLAWanTransformer3DModel

WIDTH, HEADS, LAYERS = 24, 2, 3
WITHOUT_BIAS = ("norm_q", "norm_k", "q_norm", "k_norm", "g_norm", "conv", "embedding_table")


def noise(*shape):
    return torch.randn(*shape) * math.prod(shape[1:]) ** -0.5


def random_state(shapes, without_bias=()):
    """Random numbers for modules whose weights have these shapes. Those of a norm, which has one axis, are around 1."""
    state = {}
    for name, shape in shapes.items():
        state[f"{name}.weight"] = noise(*shape) if shape[1:] else 1 + 0.1 * torch.randn(shape)
        if name.rpartition(".")[2] not in (*WITHOUT_BIAS, *without_bias):
            state[f"{name}.bias"] = 0.1 * torch.randn(shape[0])
    return state


def wan_state(layers=(0, 1, 2), gated=False):
    """A checkpoint of the authors' Wan with random numbers; `layers` are MHLA, the others softmax."""
    torch.manual_seed(0)
    square = (WIDTH, WIDTH)
    shapes = {"text_embedding.0": (WIDTH, 32), "text_embedding.2": square, "patch_embedding": (WIDTH, 16, 1, 2, 2)}
    shapes |= {"time_embedding.0": (WIDTH, 64), "time_embedding.2": square, "head.head": (64, WIDTH)}
    shapes["time_projection.1"] = (6 * WIDTH, WIDTH)
    for i in range(LAYERS):
        block = {f"{attn}_attn.{name}": square for attn in ("self", "cross") for name in "qkvo"}
        block |= {f"{attn}_attn.norm_{name}": (WIDTH,) for attn in ("self", "cross") for name in "qk"}
        block |= {"ffn.0": (32, WIDTH), "ffn.2": (WIDTH, 32), "norm3": (WIDTH,)}
        if i in layers:
            block |= {"self_attn.g_norm": (WIDTH // HEADS,), "self_attn.block_attn.conv": (30, 30, 1, 1)}
        if i in layers and gated:
            block |= {"self_attn.g": square, "self_attn.lepe": (WIDTH, 1, 3, 3, 3)}
        shapes |= {f"blocks.{i}.{name}": shape for name, shape in block.items()}
    state = random_state(shapes) | {f"blocks.{i}.modulation": noise(1, 6, WIDTH) for i in range(LAYERS)}
    return state | {"head.modulation": noise(1, 2, WIDTH)}


def image_shapes(width, blocks, lepe):
    """What the authors' DiT and their image classifier have in a block with MHLA."""
    shapes = {"attn.norm": (width,), "attn.to_qkv": (3 * width, width), "attn.to_out.0": (width, width)}
    shapes |= {"attn.lepe": (width, 1, lepe, lepe), "attn.piece_attn.conv": (blocks, blocks, 1, 1)}
    return shapes | {"mlp.fc1": (4 * width, width), "mlp.fc2": (width, 4 * width)}


def dit_state(blocks=4, softmax=()):
    """A checkpoint of the authors' DiT with random numbers: 8 x 8 tokens, layers in `softmax` are softmax."""
    torch.manual_seed(0)
    sizes = {"sample_size": 16, "patch_size": 2, "num_attention_heads": 1, "attention_head_dim": WIDTH}
    model = MHLADiTTransformer2DModel(num_layers=1, mhla={"layout": [1, 1]}, **sizes)
    shapes = {"x_embedder.proj": (WIDTH, 4, 2, 2), "t_embedder.mlp.0": (WIDTH, 256), "t_embedder.mlp.2": (WIDTH, WIDTH)}
    shapes |= {"final_layer.linear": (32, WIDTH), "final_layer.adaLN_modulation.1": (2 * WIDTH, WIDTH)}
    shapes["y_embedder.embedding_table"] = (11, WIDTH)
    for i in range(LAYERS):
        block = {**image_shapes(WIDTH, blocks, lepe=3), "adaLN_modulation.1": (6 * WIDTH, WIDTH)}
        if i in softmax:
            block = {name: shape for name, shape in block.items() if "attn" not in name}
            block |= {"attn.qkv": (3 * WIDTH, WIDTH), "attn.proj": (WIDTH, WIDTH)}
        shapes |= {f"blocks.{i}.{name}": shape for name, shape in block.items()}
    state = random_state(shapes) | {"pos_embed": model.pos_embed.pos_embed}
    return {name: x.abs() if ".piece_attn." in name else x for name, x in state.items()}


def vit_state(*, pool_first=True, bias=False):
    """A checkpoint of the authors' image classifier with random numbers: 16 x 16 tokens, a few negative in the mixing."""
    torch.manual_seed(0)
    block = {**image_shapes(128, 16, lepe=5), **dict.fromkeys(("norm1", "norm2", "attn.q_norm", "attn.k_norm"), (128,))}
    shapes = {"patch_embed.proj": (128, 3, 4, 4), "head": (7, 128), "fc_norm" if pool_first else "norm": (128,)}
    shapes |= {f"blocks.{i}.{name}": shape for i in range(2) for name, shape in block.items()}
    state = random_state(shapes, () if bias else ("to_qkv",)) | {"pos_embed": noise(1, 256, 128)}
    return {name: x.abs() - 0.01 if ".piece_attn." in name else x for name, x in state.items()}


def linear(state, name, x):
    return F.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))


def layer_norm(x, state=None, name=None, eps=1e-6):
    weight, bias = (state[f"{name}.{kind}"] if state else None for kind in ("weight", "bias"))
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def rms(x, weight, eps=1e-6):
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def rotated(q, k, grid):
    """As by Wan's RoPE: heads are 12 wide, and 4 channels turn with each axis."""
    places = torch.cartesian_prod(*(torch.arange(size, dtype=torch.float64) for size in grid))
    steps = 10000.0 ** (torch.arange(0, 4, 2, dtype=torch.float64) / 4)
    turn = torch.exp(1j * (places[:, :, None] / steps).flatten(1))[:, None]
    pairs = (torch.view_as_complex(t.unflatten(3, (-1, 2)).contiguous()) for t in (q, k))
    return [torch.view_as_real(pair * turn).flatten(3) for pair in pairs]


def official_attention(state, name, x, grid, layout, divided=True):
    """A released layer, token by token, in fp64, without a scale.

    `divided`: by what the features before the rotation give, of the query at the same place in every block.
    """
    weight = {key.removeprefix(name): value.double() for key, value in state.items() if key.startswith(name)}
    x = layer_norm(x, weight, "norm", 1e-5) if "norm.weight" in weight else x
    is_wan = "q.weight" in weight
    parts = [linear(weight, part, x) for part in "qkv"] if is_wan else linear(weight, "to_qkv", x).chunk(3, -1)
    for i, norm in enumerate(("norm_q", "norm_k") if is_wan else ("q_norm", "k_norm")):
        if f"{norm}.weight" in weight:
            parts = [*parts[:i], rms(parts[i], weight[f"{norm}.weight"], 1e-6 if is_wan else 2**-23), *parts[i + 1 :]]
    q, k, v = (t.unflatten(2, (HEADS, -1)) for t in (parts[0].relu() + 1e-6, parts[1].relu() + 1e-6, parts[2]))
    block = torch.arange(math.prod(layout)).view(layout)
    for axis, (size, count) in enumerate(zip(grid, layout, strict=True)):
        block = block.repeat_interleave(size // count, axis)
    block = block.flatten()
    mixing = weight["block_attn.conv.weight" if is_wan else "piece_attn.conv.weight"].flatten(1)
    turned = rotated(q, k, grid) if is_wan else (q, k)
    o = torch.einsum("bthk,bshk,ts,bshv->bthv", *turned, mixing[block][:, block], v)
    if divided:
        tokens = block.argsort(stable=True).view(len(mixing), -1)
        z = torch.einsum("ij,bjnhk,bjhk->binh", mixing, q[:, tokens], k[:, tokens].sum(2)) + 1e-6
        o = o / z.flatten(1, 2)[:, tokens.flatten().argsort(), :, None]
    o = (rms(o, weight["g_norm.weight"]) if is_wan else o).flatten(2)
    if "g.weight" in weight:
        o = o * F.silu(linear(weight, "g", x))
    if "lepe.weight" in weight:
        convolve = F.conv3d if is_wan else F.conv2d
        image, local = parts[2].mT.unflatten(2, grid), (weight["lepe.weight"], weight["lepe.bias"])
        o = o + convolve(image, *local, padding="same", groups=image.shape[1]).flatten(2).mT
    return linear(weight, "o" if is_wan else "to_out.0", o)


def both(state, norm_output=False):
    """The model, output of its second layer's attention, and by the formula, with `norm_output` and without."""
    model, seen = load_official_wan(state, layout=(3, 2, 5), norm_output=norm_output), {}
    model.blocks[1].attn1.register_forward_hook(lambda module, args, output: seen.update(x=args[0], o=output))
    with torch.no_grad():
        model(**inputs("wan", (3, 8, 20)))
    given = state, "blocks.1.self_attn.", seen["x"].double(), (3, 4, 10), (3, 2, 5)
    return model, seen["o"], *(official_attention(*given, divided) for divided in (True, False))


@pytest.mark.parametrize(("layers", "gated"), [((0, 1, 2), False), ((1, 2), True)])
def test_wan_is_the_released_layer(layers, gated):
    state = wan_state(layers, gated)
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
    known = {key: value for key, value in state.items() if "block_attn" not in key and "g_norm" not in key}
    theirs = convert_wan_transformer_to_diffusers(known)
    own = load_official_wan(state, layout=[3, 2, 5]).state_dict()
    assert {key for key in own if ".mhla." not in key} == set(theirs)
    assert all(torch.equal(own[key], value) for key, value in theirs.items())


def official_dit(state, latents, timestep, labels, blocks):
    """The released model in fp64, written from its description."""
    s, per = {key: value.double() for key, value in state.items()}, math.isqrt(blocks)
    x = F.conv2d(latents.double(), s["x_embedder.proj.weight"], s["x_embedder.proj.bias"], stride=2).flatten(2).mT
    x = x + s["pos_embed"]
    angle = timestep.double()[:, None] * torch.exp(-math.log(10000) * torch.arange(128, dtype=torch.float64) / 128)
    c = linear(s, "t_embedder.mlp.2", F.silu(linear(s, "t_embedder.mlp.0", torch.cat([angle.cos(), angle.sin()], 1))))
    c = F.silu(c + s["y_embedder.embedding_table.weight"][labels])[:, None]

    def softmax(name, x):
        q, k, v = (t.unflatten(2, (HEADS, -1)).transpose(1, 2) for t in linear(s, f"{name}qkv", x).chunk(3, -1))
        weight = (q @ k.mT * (WIDTH // HEADS) ** -0.5).softmax(-1)
        return linear(s, f"{name}proj", (weight @ v).transpose(1, 2).flatten(2))

    for block in (f"blocks.{i}" for i in range(LAYERS)):
        shift1, scale1, gate1, shift2, scale2, gate2 = linear(s, f"{block}.adaLN_modulation.1", c).chunk(6, -1)
        y, name = layer_norm(x) * (1 + scale1) + shift1, f"{block}.attn."
        is_mhla = f"{name}norm.weight" in s
        o = official_attention(s, name, y, (8, 8), (per, per)) if is_mhla else softmax(name, y)
        x = x + gate1 * o
        hidden = F.gelu(linear(s, f"{block}.mlp.fc1", layer_norm(x) * (1 + scale2) + shift2), approximate="tanh")
        x = x + gate2 * linear(s, f"{block}.mlp.fc2", hidden)
    shift, scale = linear(s, "final_layer.adaLN_modulation.1", c).chunk(2, -1)
    x = linear(s, "final_layer.linear", layer_norm(x) * (1 + scale) + shift)
    return x.view(-1, 8, 8, 2, 2, 8).permute(0, 5, 1, 3, 2, 4).reshape(-1, 8, 16, 16)


@pytest.mark.parametrize(("blocks", "softmax", "form"), [(4, (), "direct"), (16, (0,), "free")])
def test_dit_is_the_released_model(blocks, softmax, form):
    """Negative weights stay as they are."""
    state = dit_state(blocks, softmax=softmax)
    if form == "free":
        state["blocks.1.attn.piece_attn.conv.weight"][0, 1] = -0.1
    assert is_official_dit(state) and not is_official_wan(state)
    latents, timestep, labels = torch.randn(2, 4, 16, 16), torch.tensor([3, 777]), torch.tensor([1, 10])
    with torch.no_grad():
        model = load_official_dit(state, num_heads=HEADS)
        got = model(latents, timestep=timestep, class_labels=labels).sample
    expected = official_dit(state, latents, timestep, labels, blocks)
    assert expected.std() > 0.1 and distance(got, expected) <= 1e-5
    assert model.config.mhla["mixing_form"] == form


def official_vit(state, pixels, *, pool_first=True):
    s = {key: value.double() for key, value in state.items()}
    x = F.conv2d(pixels.double(), s["patch_embed.proj.weight"], s["patch_embed.proj.bias"], stride=4)
    x = x.flatten(2).mT + s["pos_embed"]
    for block in ("blocks.0", "blocks.1"):
        x = x + official_attention(s, f"{block}.attn.", layer_norm(x, s, f"{block}.norm1"), (16, 16), (4, 4))
        hidden = F.gelu(linear(s, f"{block}.mlp.fc1", layer_norm(x, s, f"{block}.norm2")))
        x = x + linear(s, f"{block}.mlp.fc2", hidden)
    return linear(s, "head", layer_norm(x.mean(1), s, "fc_norm") if pool_first else layer_norm(x, s, "norm").mean(1))


@pytest.mark.parametrize(("pool_first", "bias"), [(True, False), (False, True)])
def test_the_image_classifier_is_the_released_model(pool_first, bias):
    state = vit_state(pool_first=pool_first, bias=bias)
    model = official.load_vit(state)
    assert model.config.mhla["normalize"] == "official" and model.config.mhla["layout"] == [4, 4]
    assert model.config.qkv_bias is bias and model.config.mhla["cpe"] == 5
    pixels = torch.randn(2, 3, 64, 64)
    expected = official_vit(state, pixels, pool_first=pool_first)
    assert distance(model(pixels).logits, expected) < 1e-5


def test_the_image_classifier_from_a_file_to_a_folder(tmp_path):
    state = vit_state()
    sizes = official.vit_config(state | {"patch_embed.proj.weight": torch.zeros(128, 3, 16, 16)})
    assert sizes.image_size == 224 and sizes.padded_sides(224, 224) == (256, 256) and sizes.num_labels == 7
    saved = {f"module._orig_mod.{key}": value for key, value in state.items()}
    torch.save({"epoch": 3, "state_dict_ema": saved}, tmp_path / "x.pth")
    model = official.main([str(tmp_path / "x.pth"), "--out", str(tmp_path / "out")])
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path / "out").state_dict()
    expected = official.load_vit(state).state_dict()
    for found in (loaded, model.state_dict()):
        assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in found)


wan = partial(load_official_wan, layout=(3, 2, 5))
dit = partial(load_official_dit, num_heads=HEADS)
STATES = {wan: wan_state, dit: dit_state, official.load_vit: vit_state}
ONE = torch.ones(1)
BAD = [
    (wan, {"put": {"blocks.1.self_attn.tau": ONE, "x.weight": ONE}}, "2 unknown keys, 'blocks.1.self_attn.tau', 'x."),
    (wan, {"drop": "blocks.2.ffn.2.bias"}, "got no weights for 'blocks.2.ffn.net.2.bias'"),
    (wan, {"layout": None}, "layout: got none for 30 blocks"),
    (wan, {"layout": (3, 5, 10)}, "layout: got (3, 5, 10), expected three counts whose product is the checkpoint's 30"),
    (dit, {"put": {"pos_embed": torch.zeros(1, 64, 24)}}, "pos_embed: got other numbers"),
    (official.load_vit, {"drop": "blocks.1.mlp.fc2.bias"}, "got no weight 'model.stages.0.blocks.1.mlp.fc2.bias'"),
    (official.load_vit, {"put": {"blocks.1.mlp.fc1.weight": torch.zeros(3, 3)}}, "(3, 3)"),
    (official.load_vit, {"put": {"pos_embed": torch.zeros(1, 255, 128)}}, "255 positions"),
]


@pytest.mark.parametrize(("load", "change", "words"), BAD, ids=[words[:40] for _, _, words in BAD])
def test_bad_checkpoints_are_one_sentence(load, change, words):
    options = dict(change)
    state = {**STATES[load](), **options.pop("put", {})}
    state.pop(options.pop("drop", None), None)
    with refused(words):
        load(state, **options)


def test_the_script_puts_a_checkpoint_into_a_pipeline(tmp_path, capsys):
    state = {f"module.{key}": value for key, value in wan_state((1, 2)).items()}
    torch.save({"state_dict": state}, tmp_path / "wan.pth")
    PIPELINES["wan"]().save_pretrained(tmp_path / "base")
    arguments = [str(tmp_path / "wan.pth"), "--layout", "3", "2", "5", "--base", str(tmp_path / "base")]
    pipe = official.main([*arguments, "--norm-output", "--out", str(tmp_path / "out")])
    assert pipe.transformer.config.mhla["normalize"] == "official"
    assert "MHLAWanTransformer3DModel" in capsys.readouterr().out
    again = DiffusionPipeline.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert (generate(pipe) - generate(again)).abs().max() <= 1e-5
    with pytest.raises(ValueError, match="which exists"):
        official.main([*arguments, "--out", str(tmp_path / "out")])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "out", "wan.pth"]


def test_the_script_refuses_what_does_not_fit(tmp_path):
    save_file({key: value.contiguous() for key, value in dit_state().items()}, tmp_path / "dit.safetensors")
    save_file({"x": ONE}, tmp_path / "other.safetensors")
    checkpoint, out = str(tmp_path / "dit.safetensors"), str(tmp_path / "out")
    for options, words in (
        ([checkpoint, "--layout", "1", "2", "2"], "layout: got .*, expected none for the authors' DiT"),
        ([checkpoint, "--norm-output"], "norm_output: got True, expected none for the authors' DiT"),
        ([checkpoint], "num_heads: got none for width 24"),
        ([str(tmp_path / "other.safetensors")], "got keys such as 'x', expected those of the authors' Wan or the"),
    ):
        with refused(match=words):
            official.main([*options, "--out", out])
    assert not Path(out).exists()
    model = official.main([checkpoint, "--num-heads", "2", "--out", out])
    again = MHLADiTTransformer2DModel.from_pretrained(out)
    assert distance(*(one.eval()(**inputs("dit")).sample for one in (model, again))) <= 1e-6
    assert again.config.timestep_freq_shift == 0 and again.config.input_norm
