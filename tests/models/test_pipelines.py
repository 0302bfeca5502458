"""Diffusers pipelines with MHLA: conversion, the formula of a converted block, grids of any size, saving and loading."""

import copy
import inspect
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from diffusers import AutoModel, DiffusionPipeline, DiTTransformer2DModel, WanPipeline
from elsewhere import run_elsewhere
from safetensors.torch import load_file
from small_models import shaken
from tiny_pipelines import PIPELINES, TRANSFORMERS, at_fresh_addresses, generate, inputs, tiny_transformer

import mhla_hf

VISITOR = """
import pickle
source, target, tests = %r, %r, %r
sys.path.append(tests)
import torch
torch.set_num_threads(1)
from diffusers import DiffusionPipeline
from safetensors.torch import save_file
from tiny_pipelines import at_fresh_addresses, generate
pictures, classes = {}, {}
for family in sorted(os.listdir(source)):
    pipe = DiffusionPipeline.from_pretrained(f"{source}/{family}", trust_remote_code=True)
    classes[family] = sys.modules[type(pipe.transformer).__module__].__name__
    pictures[family] = generate(at_fresh_addresses(pipe)).contiguous()
    assert type(pickle.loads(pickle.dumps(pipe.transformer))) is type(pipe.transformer)
    pipe.save_pretrained(f"{target}/{family}")
save_file(pictures, f"{target}.safetensors")
print(json.dumps([classes, [name for name in ("mhla_hf", "triton") if sys.modules[name]]]))
"""


def converted(family, **settings):
    return shaken(mhla_hf.convert(tiny_transformer(family), **settings))


def close(a, b, bound):
    assert (a - b).norm() <= bound * b.norm(), float((a - b).norm() / b.norm())


@pytest.mark.parametrize(
    ("family", "layout"),
    [("sana", layout) for layout in ([1, 1], [4, 4], [2, 8])]
    + [("sana-video", layout) for layout in ([1, 1, 1], [3, 2, 2], [3, 4, 4])],
)
def test_uniform_mixing_is_sana_as_it_was(family, layout):
    pipe = PIPELINES[family]()
    stock = generate(pipe)
    assert mhla_hf.convert(pipe, layout=layout) is pipe
    assert (generate(pipe) - stock).abs().max() <= 1e-5


@pytest.mark.parametrize("family", TRANSFORMERS)
def test_base_weights_are_carried_over_exactly_and_the_object_stays(family):
    model = tiny_transformer(family)
    stock = {name: value.clone() for name, value in model.state_dict().items()}
    result = mhla_hf.convert(model, gate=True, cpe=3)
    assert result is model and type(model).__name__ == f"MHLA{TRANSFORMERS[family][0].__name__}"
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in stock.items())
    added = set(state) - set(stock)
    assert added and all(".attn1.processor.mhla." in name for name in added)
    wan = family.startswith(("wan", "skyreels"))
    assert model.config.mhla["layers"] == ([1, 2] if wan else [0, 1])
    assert {name.split(".mhla.")[1] for name in added} == {
        "mixing.weight", "gate.weight", "gate.bias", "cpe.conv.weight", "cpe.conv.bias", *(["norm.weight"] if wan else [])
    }  # fmt: skip
    with torch.no_grad():
        output = model(**inputs(family)).sample
    assert torch.isfinite(output).all() and model.mhla_state.grid is None


def wan_rotation(grid, width):
    """Wan's rotary angles, written out: `[tokens, width / 2]`, first frames, then rows, then columns."""
    sides = 2 * (width // 6)
    parts = (width - 2 * sides, sides, sides)
    places = torch.cartesian_prod(*(torch.arange(size, dtype=torch.float64) for size in grid))
    angles = [
        places[:, axis, None] * 10000.0 ** (-torch.arange(0, part, 2, dtype=torch.float64) / part)
        for axis, part in enumerate(parts)
    ]
    return torch.cat(angles, 1)


def wan_attention_by_hand(attn, x, grid, counts):
    """The paper's layer on one grid, token by token, in fp64: relu, rotation, mixed blocks, RMSNorm per head, gate."""
    core = attn.processor.mhla
    linear = lambda layer, x: x @ layer.weight.double().T + layer.bias.double()  # noqa: E731

    def rms(x, weight, eps):
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()

    x = x.double()
    q = rms(linear(attn.to_q, x), attn.norm_q.weight, attn.norm_q.eps)
    k = rms(linear(attn.to_k, x), attn.norm_k.weight, attn.norm_k.eps)
    q, k, v = (t.unflatten(2, (attn.heads, -1)) for t in (q.relu() + 1e-6, k.relu() + 1e-6, linear(attn.to_v, x)))
    turn = torch.polar(torch.ones(()).double(), wan_rotation(grid, q.shape[-1]))[:, None]
    q, k = (
        torch.view_as_real(torch.view_as_complex(t.unflatten(3, (-1, 2)).contiguous()) * turn).flatten(3)
        for t in (q, k)
    )
    f, h, w = (torch.arange(side) // (side // count) for side, count in zip(grid, counts, strict=True))
    block = ((f[:, None, None] * counts[1] + h[:, None]) * counts[2] + w).flatten()
    mixing = core.mixing.weight.double().softmax(-1)[block][:, block]
    o = torch.einsum("bthk,bshk,ts,bshv->bthv", q, k, mixing, v) * q.shape[-1] ** -0.5
    o = rms(o, core.norm.weight, core.norm.eps).flatten(2)
    if core.settings.gate:
        gate = linear(core.gate, x)
        o = o * gate * gate.sigmoid()
    return linear(attn.to_out[0], o)


@pytest.mark.parametrize("gate", [False, True])
def test_converted_wan_block_is_the_papers_formula(gate):
    grid, counts = (3, 10, 20), (3, 5, 10)
    model = converted("wan", gate=gate)
    seen = {}
    model.blocks[1].attn1.register_forward_hook(lambda module, args, output: seen.update(x=args[0], o=output))
    with torch.no_grad():
        model(**inputs("wan", (3, 20, 40), batch=2))
        expected = wan_attention_by_hand(model.blocks[1].attn1, seen["x"], grid, counts)
    assert 0.1 < expected.std() < 10
    assert (seen["o"] - expected).abs().max() <= 1e-4 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_two_resolutions_in_one_training_step(checkpointing):
    """As many tokens in both: a grid left behind would not raise, it would only be wrong."""
    sizes = [(1, 8, 16), (1, 16, 8), (3, 8, 10)]
    alone = []
    for size in sizes:
        model = converted("wan", layout=[1, 4, 2])
        model(**inputs("wan", size)).sample.square().mean().backward()
        alone.append({name: value.grad for name, value in model.named_parameters()})
    model = converted("wan", layout=[1, 4, 2]).train()
    if checkpointing:
        model.enable_gradient_checkpointing()
    losses = [model(**inputs("wan", size)).sample.square().mean() for size in sizes]
    assert model.mhla_state.grid is None
    sum(losses).backward()
    assert model.mhla_state.grid is None
    for name, value in model.named_parameters():
        expected = [one[name] for one in alone]
        if expected[0] is not None:
            torch.testing.assert_close(value.grad, sum(expected), rtol=1e-5, atol=1e-6)


def test_grid_is_restored_when_a_block_fails():
    model = converted("sana")
    handle = model.transformer_blocks[1].register_forward_pre_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(**inputs("sana"))
    assert model.mhla_state.grid is None
    handle.remove()
    other = copy.deepcopy(model)
    assert other.mhla_state is not model.mhla_state
    assert other.mhla_state is other.transformer_blocks[0].attn1.processor.state
    with torch.no_grad():
        assert torch.equal(other(**inputs("sana")).sample, model(**inputs("sana")).sample)


def save_all(folder):
    """Every family's converted pipeline, saved; what each generates in memory."""
    pictures = {}
    for family in PIPELINES:
        pipe = mhla_hf.convert(PIPELINES[family](), gate=True)
        shaken(pipe.transformer)
        pictures[family] = generate(pipe)
        pipe.save_pretrained(folder / family)
    return pictures


def visit_pipelines(folder, source, target):
    """Load, run and re-save all pipelines of `source` in a clean offline process; (pictures, module names, forbidden)."""
    done = run_elsewhere(VISITOR % (source, target, str(Path(__file__).parent.parent)), folder, ("mhla_hf", "triton"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "not expected" not in done.stderr
    classes, forbidden = json.loads(done.stdout.splitlines()[-1])
    return load_file(folder / f"{target}.safetensors"), classes, forbidden


def test_saved_pipelines_are_the_same_elsewhere_and_after_saving_there(tmp_path):
    in_memory = save_all(tmp_path / "saved")
    first = visit_pipelines(tmp_path, "saved", "again")
    second = visit_pipelines(tmp_path, "again", "third")
    for pictures, classes, forbidden in (first, second):
        assert forbidden == [] and set(pictures) == set(PIPELINES)
        for family, picture in pictures.items():
            here = DiffusionPipeline.from_pretrained(tmp_path / "saved" / family, trust_remote_code=True)
            assert torch.equal(generate(at_fresh_addresses(here)), picture), family
            assert torch.equal(in_memory[family], picture), family
            assert classes[family].startswith("diffusers_modules.local.modeling_mhla_")
    for family in PIPELINES:
        saved, again = (tmp_path / name / family for name in ("saved", "again"))
        for file in [*(saved / "transformer").iterdir(), saved / "model_index.json"]:
            before, after = file.read_bytes(), (again / file.relative_to(saved)).read_bytes()
            if file.suffix == ".json":  # diffusers notes where a model came from
                before, after = ({**json.loads(text), "_name_or_path": ""} for text in (before, after))
            assert before == after, file
        source = next((saved / "transformer").glob("*.py"))
        assert json.loads((saved / "model_index.json").read_text())["transformer"][0] == source.stem


def test_both_transformers_of_wan_22(tmp_path):
    parts = PIPELINES["wan"]().components
    low = tiny_transformer("wan", num_layers=2)
    pipe = mhla_hf.convert(WanPipeline(**{**parts, "transformer_2": low, "boundary_ratio": 0.9}), layers="all")
    assert pipe.transformer_2 is low and low.config.mhla["layers"] == [0, 1]
    pipe.save_pretrained(tmp_path)
    again = DiffusionPipeline.from_pretrained(tmp_path, trust_remote_code=True)
    assert (generate(again) - generate(pipe)).abs().max() <= 1e-5
    assert {type(one).__name__ for one in (again.transformer, again.transformer_2)} == {"MHLAWanTransformer3DModel"}


def test_a_transformer_converted_alone_stays_mhla_in_every_pipeline_that_holds_it(tmp_path):
    """The pipelines are not given to convert, and each notes the class of its transformers for model_index.json."""
    pipe = PIPELINES["wan"]()
    shared, last = WanPipeline(**pipe.components), tiny_transformer("wan", num_layers=2)
    both = WanPipeline(**{**PIPELINES["wan"]().components, "transformer_2": last, "boundary_ratio": 0.9})
    for transformer in (pipe.transformer, both.transformer_2):
        shaken(mhla_hf.convert(transformer, layers="all"))
    for name, one in {"both": both, "pipe": pipe, "shared": shared}.items():
        one.save_pretrained(tmp_path / name)
        again = DiffusionPipeline.from_pretrained(tmp_path / name, trust_remote_code=True)
        assert torch.equal(generate(at_fresh_addresses(again)), generate(one)), name
    index = json.loads((tmp_path / "both" / "model_index.json").read_text())
    assert index["transformer"] == ["diffusers", "WanTransformer3DModel"]
    assert index["transformer_2"][1] == "MHLAWanTransformer3DModel"


def test_a_pipeline_saves_its_transformer_as_it_was_told(tmp_path):
    pipe = mhla_hf.convert(PIPELINES["wan"](), layers="all")
    pipe.save_pretrained(tmp_path, variant="fp16", max_shard_size="20KB")
    names = {path.name for path in (tmp_path / "transformer").glob("*model*") if path.suffix != ".py"}
    assert "diffusion_pytorch_model.safetensors.index.fp16.json" in names and len(names) > 2
    assert all(".fp16" in name for name in names)
    again = DiffusionPipeline.from_pretrained(tmp_path, variant="fp16", trust_remote_code=True)
    state = again.transformer.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in pipe.transformer.state_dict().items())
    pipe.save_pretrained(tmp_path / "torch", safe_serialization=False)
    assert [path.name for path in (tmp_path / "torch" / "transformer").glob("*.bin")] == ["diffusion_pytorch_model.bin"]


def test_other_ways_to_load(tmp_path):
    pipe = mhla_hf.convert(PIPELINES["wan"]())
    pipe.save_pretrained(tmp_path / "mhla")
    PIPELINES["wan"]().save_pretrained(tmp_path / "stock")
    given = inputs("wan")
    own = mhla_hf.MHLAWanTransformer3DModel.from_pretrained(tmp_path / "mhla" / "transformer")
    auto = AutoModel.from_pretrained(str(tmp_path / "mhla" / "transformer"), trust_remote_code=True)
    into = WanPipeline.from_pretrained(tmp_path / "stock", transformer=own)
    again = WanPipeline.from_pretrained(tmp_path / "mhla", transformer=own, trust_remote_code=True)
    assert into.transformer is own and again.transformer is own
    with torch.no_grad():
        assert torch.equal(own(**given).sample, auto(**given).sample)
    for load in (DiffusionPipeline.from_pretrained, WanPipeline.from_pretrained):
        with pytest.raises(ValueError, match="trust_remote_code=True"):
            load(tmp_path / "mhla")


@pytest.mark.parametrize("family", ["wan", "pixart"])
def test_a_second_load_leaves_the_first_as_it_was(family, tmp_path):
    """diffusers runs the file of a checkpoint anew for each load, in the same module: every class is another one then."""
    shaken(mhla_hf.convert(tiny_transformer(family))).save_pretrained(tmp_path / "saved")
    first, second = (AutoModel.from_pretrained(str(tmp_path / "saved"), trust_remote_code=True) for _ in range(2))
    assert type(first) is not type(second)
    first.enable_gradient_checkpointing()
    copied = copy.deepcopy(first)
    for model in (first, copied):
        model.fuse_qkv_projections()
        model.unfuse_qkv_projections()
    with torch.no_grad():
        expected = second(**inputs(family)).sample
        for model in (first, copied):
            close(model(**inputs(family)).sample, expected, 1e-6)
    copied(**inputs(family)).sample.sum().backward()
    first.save_pretrained(tmp_path / "again")
    state = first.state_dict()
    again = type(second).from_pretrained(tmp_path / "again").state_dict()
    assert all(torch.equal(value, state[name]) for name, value in again.items())


def test_half_precision_keeps_the_mixing_exact(tmp_path):
    model = converted("wan", gate=True)
    model.save_pretrained(tmp_path)
    half = mhla_hf.MHLAWanTransformer3DModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    state = half.state_dict()
    mixing = {name for name in state if name.endswith("mixing.weight")}
    assert mixing and all(torch.equal(state[name], model.state_dict()[name]) for name in mixing)
    assert state["blocks.1.attn1.processor.mhla.gate.weight"].dtype == half.dtype == torch.bfloat16
    given = {k: v.bfloat16() if v.is_floating_point() else v for k, v in inputs("wan").items()}
    with torch.no_grad():
        close(half(**given).sample.float(), model(**inputs("wan")).sample, 3e-2)


def test_frozen_mixing_stays_frozen(tmp_path):
    mhla_hf.convert(tiny_transformer("dit"), mixing_start="uniform", learn_mixing=False).save_pretrained(tmp_path)
    model = mhla_hf.MHLADiTTransformer2DModel.from_pretrained(tmp_path)
    assert not any(p.requires_grad for name, p in model.named_parameters() if "mixing" in name)


@pytest.mark.parametrize("preset", ["DiT-S/2", "DiT-B/4", "DiT-L/8", "DiT-XL/2"])
def test_dit_presets_from_scratch(preset):
    paper = {"DiT-S/2": 33, "DiT-B/4": 131, "DiT-L/8": 459, "DiT-XL/2": 675}
    with torch.device("meta"):
        model = mhla_hf.MHLADiTTransformer2DModel.from_preset(preset, mhla={"cpe": 3})
    added = sum(p.numel() for name, p in model.named_parameters() if ".mhla." in name)
    assert (model.num_parameters() - added) / 1e6 == pytest.approx(paper[preset], rel=0.02)  # table 1 of the DiT paper
    assert added < 0.01 * model.num_parameters()
    assert model.config.mhla["cpe"] == 3


def test_embeddings_of_time_and_class_are_shared_from_scratch(tmp_path):
    """One for all blocks, in training, in a copy and after loading; the file is one that diffusers' own class could read."""
    sizes = {"num_layers": 3, "num_attention_heads": 2, "attention_head_dim": 8, "num_classes": 5, "input_size": 8}
    model = mhla_hf.MHLADiTTransformer2DModel.from_preset("DiT-S/2", **sizes)
    torch.nn.init.normal_(model.proj_out_2.weight)
    inputs = {"timestep": torch.tensor([3, 70]), "class_labels": torch.tensor([1, 2])}
    x = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    before = model.eval()(x, **inputs).sample
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before.square().sum().backward()
    optimizer.step()
    after = model(x, **inputs).sample
    model.save_pretrained(tmp_path)
    loaded = mhla_hf.MHLADiTTransformer2DModel.from_pretrained(tmp_path)
    strict = mhla_hf.MHLADiTTransformer2DModel.from_config(model.config)
    strict.load_state_dict(model.state_dict())
    known = set(inspect.signature(DiTTransformer2DModel).parameters)
    stock = DiTTransformer2DModel(**{key: value for key, value in model.config.items() if key in known})
    names = {name for name in model.state_dict() if ".mhla." not in name}
    assert names == set(stock.state_dict()) and not torch.equal(before, after)
    for again in (loaded, strict, copy.deepcopy(model)):
        first, *others = [block.norm1.emb for block in again.transformer_blocks]
        assert all(other is first for other in others) and again.num_parameters() == model.num_parameters()
        assert torch.equal(again.eval()(x, **inputs).sample, after)
    pointers = [value.data_ptr() for value in model.state_dict().values()]
    assert len(set(pointers)) == len(pointers), "files may not share memory"


def test_dit_starts_as_the_identity_with_output_zero():
    mhla = {"cpe": 3, "gate": True}
    model = mhla_hf.MHLADiTTransformer2DModel.from_preset("DiT-S/8", num_classes=10, num_layers=2, mhla=mhla)
    model.eval()
    seen = []
    for block in model.transformer_blocks:
        block.register_forward_hook(lambda module, args, output: seen.append((args[0], output)))
    with torch.no_grad():
        output = model(torch.randn(1, 4, 32, 32), timestep=torch.tensor([3]), class_labels=torch.tensor([1])).sample
    assert output.abs().max() == 0 and all(torch.equal(x, y) for x, y in seen)
    core = model.transformer_blocks[0].attn1.processor.mhla
    assert F.silu(core.gate.bias).allclose(torch.ones(384)) and core.mixing((4, 4)).argmax(-1).equal(torch.arange(16))
