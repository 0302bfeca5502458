"""Transformers of diffusers of every family, and their pipelines: what they compute, saving and loading, refusals."""

import copy
import json
from functools import partial

import diffusers
import pytest
import torch
from tools.elsewhere import check_elsewhere
from tools.model_checks import checkpointing_changes_nothing
from tools.ops_cases import core_by_hand, distance
from tools.small_models import refused, shaken
from tools.tiny_grid_pipelines import GRID_PIPELINES, bare
from tools.tiny_grids import SIZES
from tools.tiny_joint import JOINT_SIZES, PACKED, VIDEOS, joint_size
from tools.tiny_pipelines import PIPELINES, TRANSFORMERS, at_fresh_addresses, generate, inputs, tiny_transformer

import mhla_hf
from mhla_hf.conversion.grid_fit import GridSoftmaxCore, grid_layers
from mhla_hf.models.diffusion.inputs import find_self_attentions
from mhla_hf.ops.blocks import Blocks

ALL = {**SIZES, **JOINT_SIZES}
SALIENT = {"windowed": True, "window": 1, "sinks": 0, "salient_blocks": 1, "rope": "before"}
SALIENT |= {"normalize": True, "output_norm": False}


def converted(family="wan", **settings):
    return shaken(mhla_hf.convert(tiny_transformer(family), **settings))


@torch.no_grad()
@pytest.mark.parametrize("frames", [3, 1])
@pytest.mark.parametrize("family", SIZES)
def test_the_paper_s_form_is_its_definition(family, frames):
    """T x T, features rotated, blocks of unequal sizes; a single frame has one block along time.

    What goes into the cores and comes of it: test_softmax_instead_of_all_layers_is_the_original.
    """
    axes = 2 if family in ("latte", "hunyuan-dit") else 3
    size, layout = ((frames, 5, 7), (min(2, frames), 2, 3)) if axes == 3 else ((5, 7), (2, 3))
    model = converted(family, layout=[2, 2, 3][-axes:], rope="after", normalize=False, output_norm=True)
    block, checked = Blocks.grid(size, layout).index(), []

    def check(core, heads, options, o):
        q, k, v = heads
        q, k = q.relu() + 1e-6, k.relu() + 1e-6
        if options["rotate"] is not None:
            q, k = options["rotate"](q, k)
        weight = torch.einsum("bthk,bshk->bhts", q, k).double() * core.mixing(layout)[block][:, block]
        assert options["grid"] == size
        assert distance(o, core_by_hand(core, weight, v, None, q.shape[-1] ** -0.5)) <= 1e-5
        checked.append(core)

    for holder in grid_layers(model).values():
        holder.mhla.register_forward_hook(check, with_kwargs=True)
    latents = (10, 14) if family == "hunyuan-dit" else (frames, 10, 14)
    model(**inputs(family, (frames, 5, 7) if family.startswith("ltx") else latents, batch=2))
    assert len(checked) == len(model.config.mhla["layers"])


@torch.no_grad()
@pytest.mark.parametrize("family", TRANSFORMERS)
def test_a_converted_transformer_of_this_family(family, tmp_path):
    """It is the same object with the weights of the base; a batch is its samples; and bf16 from a folder is near."""
    model, stock = tiny_transformer(family), tiny_transformer(family)
    assert mhla_hf.convert(model, gate=True, cpe=3) is model and type(model).__name__ == f"MHLA{type(stock).__name__}"
    state, before, defaults = model.state_dict(), stock.state_dict(), model.family.kind.defaults
    assert all(torch.equal(state[name], value) for name, value in before.items())
    assert all(".processor.mhla." in name for name in state.keys() - before.keys())
    layers = [i for i in range(len(find_self_attentions(model))) if i % 3 or defaults["layers"] == "all"]
    assert model.config.mhla["layers"] == list(grid_layers(model)) == layers
    for name in ("attn_processors", "set_attn_processor", "fuse_qkv_projections", "unfuse_qkv_projections"):
        assert hasattr(model, name) == hasattr(stock, name), name

    shaken(model)
    arguments = inputs(family, batch=2)
    both = model(**arguments).sample
    assert model.mhla_state.grid is None and distance(both, stock(**arguments).sample) > 1e-3
    for row in range(2):
        by_row = [name for name, x in arguments.items() if isinstance(x, torch.Tensor | list) and len(x) == 2]
        alone = {**arguments, **{name: arguments[name][row : row + 1] for name in by_row}}
        assert distance(model(**alone).sample, both[row : row + 1]) <= 1e-5

    model.save_pretrained(tmp_path)
    half = type(model).from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    for name, value in half.named_parameters():
        if ".mhla." in name:
            assert value.dtype == (torch.float32 if ".mixing." in name else torch.bfloat16), name
    tensors = {name: x for name, x in arguments.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
    output = half(**{**arguments, **{name: x.bfloat16() for name, x in tensors.items()}}).sample
    assert output.dtype == torch.bfloat16 and distance(output.float(), both) <= 0.1


@torch.no_grad()
@pytest.mark.parametrize("family", [family for family in TRANSFORMERS if not family.startswith("sana")])
def test_heads_that_keep_softmax(family, tmp_path):
    """In every core, they are the base's softmax, and the other heads are as without them; the same after loading."""
    whole, model = (converted(family, layers="all", gate=True, cpe=3) for _ in range(2))
    heads = {index: [0] for index in grid_layers(model)}
    model = mhla_hf.convert(tiny_transformer(family), layers="all", gate=True, cpe=3, softmax_heads=heads)
    wholes, checked = grid_layers(whole), []

    def check(index, core, args, options, outputs):
        softmax, mhla = (run(*args, **options) for run in (GridSoftmaxCore(wholes[index].mhla), wholes[index].mhla))
        for parts in zip(*(x if isinstance(x, tuple) else (x,) for x in (outputs, softmax, mhla)), strict=True):
            o, softmax_o, mhla_o = (part.float() for part in parts)
            assert (
                distance(o[:, :, :1], softmax_o[:, :, :1]) <= 1e-5 and distance(o[:, :, 1:], mhla_o[:, :, 1:]) <= 1e-5
            )
        checked.append(index)

    for index, holder in grid_layers(model).items():
        assert [tuple(x.shape) for x in holder.mhla.parameters()] == [
            tuple(x.shape) for x in wholes[index].mhla.with_softmax_heads([0]).parameters()
        ]
        holder.mhla = wholes[index].mhla.with_softmax_heads([0])
        holder.mhla.register_forward_hook(partial(check, index), with_kwargs=True)
    arguments = inputs(family, batch=2)
    expected = model(**arguments).sample
    assert checked == [*heads]
    model.save_pretrained(tmp_path)
    assert distance(type(model).from_pretrained(tmp_path)(**arguments).sample, expected) <= 1e-6


@pytest.mark.parametrize("family", [family for family in ALL if ALL[family][0]._supports_gradient_checkpointing])
def test_checkpointing_changes_no_gradient(family):
    model = converted(family, layers="all", gate=True, cpe=3).train()
    arguments = inputs(family, batch=2)
    if family == "chroma":  # diffusers drops it from single blocks that are checkpointed
        del arguments["attention_mask"]
    grads = checkpointing_changes_nothing(model, lambda model: model(**arguments).sample.square().mean(), (1e-5, 1e-7))
    assert all(grads[name].abs().max() > 0 for name, _ in model.named_parameters() if ".mhla." in name)


EDITED = [(5, 7), (4, 3), (2, 6)]  # an image and two of which it is an edit, as in Flux Kontext and Qwen-Image-Edit
STOCK = [(family, joint_size(family, 3, 5, 7)) for family in JOINT_SIZES] + [(family, EDITED) for family in PACKED]


@torch.no_grad()
@pytest.mark.parametrize(
    ("window", "layout", "salient"), [(1, [1, 1, 1], 0), (2, [2, 2, 2], 0), (3, [2, 2, 3], 0), (1, [2, 2, 3], 11)]
)
@pytest.mark.parametrize(("family", "size"), STOCK)
def test_all_blocks_near_or_salient_is_stock(family, size, window, layout, salient):
    """A batch of two texts, one of them padded if the family has masks, on an odd grid."""
    model, stock = tiny_transformer(family), tiny_transformer(family)
    layout = layout if family in VIDEOS else layout[1:]
    mhla_hf.convert(model, layers="all", window=window, layout=layout, salient_blocks=salient)
    arguments = inputs(family, size, batch=2)
    assert distance(model(**arguments).sample, stock(**arguments).sample) <= 1e-5


SOFTMAX_GRIDS = [family for family in TRANSFORMERS if family not in JOINT_SIZES and not family.startswith("sana")]


@torch.no_grad()
@pytest.mark.parametrize(("window", "salient"), [(1, 11), (2, 11), (3, 0)])
@pytest.mark.parametrize("family", SOFTMAX_GRIDS)
def test_all_blocks_near_or_salient_is_stock_without_text(family, window, salient):
    model, stock = tiny_transformer(family), tiny_transformer(family)
    axes = 2 if family in ("latte", "hunyuan-dit", "dit", "pixart") else 3
    settings = {"windowed": True, "window": window, "salient_blocks": salient, "layout": [2, 3, 2][:axes]}
    mhla_hf.convert(model, layers="all", **settings)
    arguments = inputs(family, batch=2)
    bound = 1e-2 if family.startswith("kandinsky") else 1e-5  # which rotates in bf16
    assert distance(model(**arguments).sample, stock(**arguments).sample) <= bound


@pytest.mark.parametrize(
    ("family", "encoder"), [("flux", "image_encoder_pretrained_model_name_or_path"), ("sd3", "image_encoder_folder")]
)
def test_an_ip_adapter_is_an_error_when_it_is_loaded(family, encoder):
    """One layer is MHLA: the softmax layers would take it, and sampling would fail."""
    pipe = bare({"flux": diffusers.FluxPipeline, "sd3": diffusers.StableDiffusion3Pipeline}[family], family)
    mhla_hf.convert(pipe, layers=[1])
    processors = pipe.transformer.attn_processors
    weights = {"image_proj": {"w": torch.zeros(1)}, "ip_adapter": {"w": torch.zeros(1)}}
    with refused("model: got MHLA", "no IP-Adapter"):
        pipe.load_ip_adapter(weights, weight_name=None, **{encoder: None})
    assert all(found is processors[name] for name, found in pipe.transformer.attn_processors.items())


@pytest.mark.parametrize(("family", "layout"), [("sana", [2, 8]), ("sana-video", [3, 4, 4])])
def test_uniform_mixing_is_sana_as_it_was(family, layout):
    pipe = PIPELINES[family]()
    stock = generate(pipe)
    assert mhla_hf.convert(pipe, layout=layout) is pipe
    assert (generate(pipe) - stock).abs().max() <= 1e-5


def test_two_resolutions_in_one_training_step_with_checkpointing():
    """As many tokens in both: a grid left behind would not raise, it would only be wrong."""
    sizes, model = [(1, 8, 16), (1, 16, 8), (3, 8, 10)], converted("wan", layout=[1, 4, 2])

    def gradients(*sizes):
        losses = [model(**inputs("wan", size)).sample.square().mean() for size in sizes]
        assert model.mhla_state.grid is None
        return torch.autograd.grad(sum(losses), [*model.parameters()], allow_unused=True, materialize_grads=True)

    alone = zip(*(gradients(size) for size in sizes), strict=True)
    model.train().enable_gradient_checkpointing()
    for together, each in zip(gradients(*sizes), alone, strict=True):
        torch.testing.assert_close(together, sum(each), rtol=1e-5, atol=1e-6)


def test_grid_is_restored_when_a_block_fails():
    model = converted("sana")
    model.transformer_blocks[1].register_forward_pre_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(**inputs("sana"))
    assert model.mhla_state.grid is None


@pytest.mark.parametrize(
    ("pipelines", "alone"),
    [(PIPELINES, []), pytest.param(GRID_PIPELINES, [*SIZES, *JOINT_SIZES], marks=pytest.mark.slow)],
    ids=["", "grids"],
)
def test_saved_models_are_the_same_elsewhere_and_after_saving_there(pipelines, alone, tmp_path):
    """Transformers also without a pipeline, which Cosmos has only with its guardrail installed."""
    expected = {}
    for family in pipelines:
        kept = {} if family.startswith("sana") else {**SALIENT, "softmax_heads": {1: [0]}}
        pipe = mhla_hf.convert(pipelines[family](), gate=True, **kept)
        shaken(pipe.transformer)
        expected[f"saved/{family}-DiffusionPipeline"] = generate(pipe)
        pipe.save_pretrained(tmp_path / "saved" / family)
    for family in alone:
        model = converted(family, gate=True)
        model.save_pretrained(tmp_path / "saved" / f"alone-{family}")
        with torch.no_grad():
            expected[f"saved/alone-{family}-diffusers.AutoModel"] = model(**inputs(family, batch=2)).sample
    assert "not expected" not in check_elsewhere(tmp_path, {}, expected, absent=("mhla_hf", "triton"))
    for family in pipelines:
        saved, again = (tmp_path / name / family for name in ("saved", "again/saved"))
        for file in [*(saved / "transformer").iterdir(), saved / "model_index.json"]:
            before, after = file.read_bytes(), (again / file.relative_to(saved)).read_bytes()
            if file.suffix == ".json":  # diffusers notes where a model came from
                before, after = ({**json.loads(text), "_name_or_path": ""} for text in (before, after))
            assert before == after, file
        source = next((saved / "transformer").glob("*.py"))
        assert json.loads((saved / "model_index.json").read_text())["transformer"][0] == source.stem


def test_pipelines_that_are_given_the_transformer_save_it_as_mhla(tmp_path, caplog):
    """Each pipeline notes the classes of its transformers for model_index.json, as docs/diffusion.md says."""
    pipe = PIPELINES["wan"]()
    shared, last = diffusers.WanPipeline(**pipe.components), tiny_transformer("wan", num_layers=2)
    both = diffusers.WanPipeline(**{**PIPELINES["wan"]().components, "transformer_2": last, "boundary_ratio": 0.9})
    mhla_hf.convert(pipe, layers="all")
    assert not caplog.records
    shared.transformer = pipe.transformer
    both.transformer_2 = mhla_hf.convert(last, layers="all")
    assert "`pipe.transformer = model`" in caplog.text
    for transformer in (pipe.transformer, last):
        shaken(transformer)
    for name, one in {"both": both, "pipe": pipe, "shared": shared}.items():
        one.save_pretrained(tmp_path / name)
        again = diffusers.DiffusionPipeline.from_pretrained(tmp_path / name, trust_remote_code=True)
        assert torch.equal(generate(at_fresh_addresses(again)), generate(one)), name
    index = json.loads((tmp_path / "both" / "model_index.json").read_text())
    assert index["transformer"] == ["diffusers", "WanTransformer3DModel"]
    assert index["transformer_2"][1] == "MHLAWanTransformer3DModel"


def test_other_ways_to_load(tmp_path):
    """A saved pipeline takes a transformer of the package, and another pipeline the transformer of the first."""
    mhla_hf.convert(PIPELINES["wan"]()).save_pretrained(tmp_path)
    own = mhla_hf.MHLAWanTransformer3DModel.from_pretrained(tmp_path / "transformer")
    pipe = diffusers.WanPipeline.from_pretrained(tmp_path, transformer=own, trust_remote_code=True)
    other = diffusers.WanVideoToVideoPipeline.from_pipe(pipe, transformer=pipe.transformer)
    assert pipe.transformer is other.transformer is own
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        diffusers.DiffusionPipeline.from_pretrained(tmp_path)


@pytest.mark.parametrize("family", ["wan", "pixart"])
def test_a_second_load_leaves_the_first_as_it_was(family, tmp_path):
    """diffusers runs the file of a checkpoint anew for each load, in the same module: every class is another one then."""
    shaken(mhla_hf.convert(tiny_transformer(family))).save_pretrained(tmp_path / "saved")
    folder, load = str(tmp_path / "saved"), diffusers.AutoModel.from_pretrained
    first, second = (load(folder, trust_remote_code=True) for _ in range(2))
    assert type(first) is not type(second)
    first.enable_gradient_checkpointing()
    copied = copy.deepcopy(first)
    for model in (first, copied):
        model.fuse_qkv_projections()
        model.unfuse_qkv_projections()
    with torch.no_grad():
        expected = second(**inputs(family)).sample
        for model in (first, copied):
            torch.testing.assert_close(model(**inputs(family)).sample, expected, rtol=1e-5, atol=1e-6)
    copied(**inputs(family)).sample.sum().backward()
    first.save_pretrained(tmp_path / "again")
    state = first.state_dict()
    again = type(second).from_pretrained(tmp_path / "again").state_dict()
    assert all(torch.equal(value, state[name]) for name, value in again.items())


COORDS = torch.rand(1, 3, 60, generator=torch.Generator().manual_seed(0))
SPARSE = {"to_fractal": True, "P": 0.5, "sta_mask": torch.ones(1, 1, 4, 4, dtype=torch.bool)}
RUNNING = {
    "latents of another VAE": (lambda: converted()(**{**inputs("wan"), "hidden_states": torch.zeros(1, 48, 3, 8, 10)}),
        "hidden_states: got latents [1, 48, 3, 8, 10]"),
    "not square": (lambda: converted("dit")(**inputs("dit", (8, 32))), "hidden_states: got a grid of (4, 16), expected a s"),
    "a block alone": (lambda: converted().blocks[1].attn1(torch.zeros(1, 60, 24), None, None, None),
        "grid: got a call outside of the transformer's forward"),
    "cross-attention": (lambda: converted().blocks[1].attn1(torch.zeros(1, 60, 24), torch.zeros(1, 5, 24), None, None),
        "encoder_hidden_states: got a tensor, expected None"),
    "tokens without a grid": (lambda: converted("ltx")(**{**inputs("ltx"), "num_frames": None, "video_coords": COORDS}),
        "num_frames: got None, expected the latents' size along this axis"),
    "tokens beyond the grid": (lambda: converted("ltx2")(**{**inputs("ltx2"), "num_frames": 2, "video_coords": COORDS}),
        "grid: got (2, 4, 5) for 60 tokens"),
    "channels first": (lambda: converted("kandinsky5")(**{**inputs("kandinsky5"), "hidden_states": torch.zeros(4, 3, 8, 8)}),
        "hidden_states: got latents [4, 3, 8, 8], expected [batch, frames, height, width, channels]"),
    "sparse": (lambda: converted("kandinsky5", layers="all")(**inputs("kandinsky5", (1, 32, 32)), sparse_params=SPARSE),
        "sparse_params: got a dictionary, expected None: set attention_type to"),
    "context parallelism of LTX": (lambda: converted("ltx").enable_parallelism(config=None),
        "model: got MHLALTXVideoTransformer3DModel, expected a model of Wan for context parallelism"),
    "columns first": (lambda: converted("flux")(**{**inputs("flux"), "img_ids": inputs("flux")["img_ids"][:, [0, 2, 1]]}),
        "img_ids: got 20 positions in another order, expected the rows and columns of each image"),
    "shapes of other images": (
        lambda: converted("qwen-image")(**{**inputs("qwen-image"), "img_shapes": [[(1, 2, 5)] * 3]}),
        "img_shapes: got [[(1, 2, 5), (1, 2, 5), (1, 2, 5)]], expected shapes of 20 tokens in total"),
    "image prompts": (lambda: converted("flux")(**inputs("flux"), joint_attention_kwargs={"ip_hidden_states": []}),
        "ip_hidden_states: got image prompts, expected None"),
    "a head too many": (lambda: converted(softmax_heads={1: [2]}), "softmax_heads: got head 2 in layer 1, expected 0 to 1"),
    "no head left": (lambda: converted(layers=[1], softmax_heads={1: [0, 1]}), "softmax_heads: got all heads of all MHLA"),
    "Sana has no softmax": (lambda: converted("sana", softmax_heads={0: [0]}),
        "softmax_heads: got {'0': [0]}, expected None for MHLASanaTransformer2DModel"),
    "rotated features": (lambda: converted("flux", rope="after"), "rope: got 'after', expected one of ['before', 'near']"),
    "a causal mask": (lambda: mhla_hf.convert(tiny_transformer("skyreels", num_frame_per_block=3))(**inputs("skyreels")),
        "attention_mask: got a tensor, expected None"),
    "official on unequal blocks": (lambda: converted("sana", normalize="official", layout=[3, 3])(**inputs("sana")),
        "normalize: got 'official', expected blocks of equal size"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "words"), RUNNING.values(), ids=RUNNING)
def test_running(make, words):
    with refused(words, kind=(ValueError, TypeError)):
        make()


def change_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "mhla": {**config["mhla"], **changes}}))


MIXING = "blocks.1.attn1.processor.mhla.mixing.weight"
DAMAGE = {
    "weights of more layers": (lambda folder: change_config(folder, layers=[1]), "weight 'blocks.2.attn1.processor."),
    "negative mixing": (lambda folder: change_config(folder, mixing_form="direct"), "got negative mixing weights"),
    "a head that is not there": (
        lambda folder: change_config(folder, softmax_heads={"1": [7]}),
        "got [7], expected some",
    ),
    "heads of a softmax layer": (
        lambda folder: change_config(folder, softmax_heads={"0": [1]}),
        "softmax_heads: got layer 0",
    ),
    "a stock checkpoint": (lambda folder: tiny_transformer("wan").save_pretrained(folder), f"'{MIXING}' (4 missing)"),
}


@pytest.mark.parametrize(("change", "words"), DAMAGE.values(), ids=DAMAGE)
def test_damaged_checkpoints(change, words, tmp_path):
    converted(cpe=3).save_pretrained(tmp_path)
    change(tmp_path)
    with refused(words):
        mhla_hf.MHLAWanTransformer3DModel.from_pretrained(tmp_path)
