"""What a diffusers user does with a converted transformer: compile, LoRA, fuse, cast, quantize, offload, copy, cache."""

import copy
import itertools
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import accelerate
import diffusers
import pytest
import torch
import torch.nn.functional as F
from diffusers.hooks import apply_group_offloading
from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend
from diffusers.models.attention_processor import AttnProcessor2_0
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from tools.ops_cases import distance
from tools.small_models import shaken
from tools.tiny_grid_pipelines import GRID_PIPELINES
from tools.tiny_grids import SIZES
from tools.tiny_joint import JOINT_SIZES, READS_VALUES
from tools.tiny_pipelines import PIPELINES, generate, inputs, tiny_transformer

import mhla_hf
from mhla_hf.conversion.grid_fit import grid_layers
from mhla_hf.models.diffusion.inputs import find_self_attentions
from mhla_hf.models.diffusion.processor import holds_mhla, warn_of_backend


def converted(family="wan", num_layers=None, **settings):
    names = {"kandinsky5": "num_visual_blocks", "kandinsky6": "num_visual_blocks", "aura-flow": "num_mmdit_layers"}
    sizes = {} if num_layers is None else {names.get(family, "num_layers"): num_layers}
    return shaken(mhla_hf.convert(tiny_transformer(family, **sizes), **{"gate": True, **settings}))


@torch.no_grad()
def run(model, family="wan", size=None):
    return model(**inputs(family, size)).sample


SLOW = pytest.mark.slow
PEFT_GRIDS = ("ltx2.3", "cosmos", "kandinsky5", *(family for family in JOINT_SIZES if family != "sd3"))
GRIDS = [pytest.param(family, marks=SLOW) for family in [*SIZES, *JOINT_SIZES]]
# The forward of these reads the values of a mask, or positions of tokens, so only the blocks make graphs.
BLOCKS_ONLY = ("wan", *READS_VALUES)


SALIENT = {"windowed": True, "window": 1, "sinks": 0, "salient_blocks": 1, "softmax_heads": {0: [1]}}
SALIENT |= {"rope": "before", "normalize": True, "output_norm": False}


@pytest.mark.parametrize("settings", [{}, SALIENT], ids=["", "salient"])
@pytest.mark.parametrize("family", ["wan", "dit", *GRIDS])
def test_one_graph(family, settings):
    """Of every block of Wan for two grids, and of the other models as a whole where that is possible."""
    whole, sizes = family not in BLOCKS_ONLY, [None] if family != "wan" else [(3, 8, 10), (1, 6, 10)]
    model, eager = (converted(family, layers="all", num_layers=1, **settings) for _ in range(2))
    torch._dynamo.reset()
    if whole:
        compiled = torch.compile(model, fullgraph=True, backend="eager")
    else:
        model.compile_repeated_blocks(fullgraph=True, backend="eager")
        compiled = model
    for size in sizes:
        assert distance(run(compiled, family, size), run(eager, family, size)) <= 1e-6
    assert model.mhla_state.grid is None


ADAPTERS = r".*\.(attn|attn1|self_attention)\.(to_q|to_v|to_query|processor\.mhla\.gate)"


@pytest.mark.parametrize("family", ["wan", "sana", "ltx", *(pytest.param(one, marks=SLOW) for one in PEFT_GRIDS)])
def test_lora_is_trained_fused_and_saved_with_the_model(family, tmp_path):
    """Of the gate too, and with mixing and norm trained whole."""
    model = converted(family)
    base = run(model, family)
    model.add_adapter(LoraConfig(r=2, lora_alpha=2, target_modules=ADAPTERS))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad or ".mhla.mixing." in name or ".mhla.norm." in name)
    optimizer = torch.optim.Adam([value for value in model.parameters() if value.requires_grad], lr=0.02)
    for _ in range(2):
        model(**inputs(family)).sample.square().mean().backward()
        optimizer.step()
    adapted = run(model, family)
    assert distance(adapted, base) > 1e-3
    with pytest.raises(ValueError, match=r"model: got one with the weight .*base_layer.*, expected plain weights"):
        model.save_pretrained(tmp_path)
    assert not any(tmp_path.iterdir())
    model.fuse_lora()
    model.unload_lora()
    assert distance(run(model, family), adapted) <= 1e-5  # the gate's silu is outside of what LoRA wraps
    model.save_pretrained(tmp_path)
    assert torch.equal(run(type(model).from_pretrained(tmp_path), family), run(model, family))


FUSED = {"wan": "before", "pixart": "after", "hunyuan-dit": "after", "ltx": "before", "flux": "after", "sd3": "before"}


@pytest.mark.parametrize(("family", "when"), [("wan", "after"), *FUSED.items()])
def test_projections_fused_and_separate_again(family, when, tmp_path):
    """Before the conversion or after it: MHLA stays, and separate projections are read when they are there again."""
    plain, model = mhla_hf.convert(tiny_transformer(family)), tiny_transformer(family)
    for step in (model.fuse_qkv_projections, lambda: mhla_hf.convert(model))[:: 1 if when == "before" else -1]:
        step()
    assert any(".to_qkv." in name for name, _ in model.named_parameters())
    assert distance(run(model, family), run(plain, family)) <= 1e-6
    model.fuse_qkv_projections()
    model.unfuse_qkv_projections()
    assert list(grid_layers(model)) == model.config.mhla["layers"]
    model.save_pretrained(tmp_path)
    for one in (model, type(model).from_pretrained(tmp_path)):
        assert distance(run(one, family), run(plain, family)) <= 1e-6
    with torch.no_grad():
        find_self_attentions(model)[1].to_v.weight.mul_(2.0)
    assert distance(run(model, family), run(plain, family)) > 1e-3


@pytest.mark.parametrize("family", ["wan", "sana-video", "pixart", "ltx", "hunyuan-dit", "kandinsky5", "flux", "sd3.5"])
def test_no_method_of_diffusers_takes_an_mhla_processor_away(family, caplog):
    model, softmax = converted(family, layers=[1]), AttnProcessor2_0()
    before = run(model, family)
    name = next(name for name, found in model.attn_processors.items() if holds_mhla(found))
    model.set_attn_processor(dict(model.attn_processors))
    assert "keep" not in caplog.text
    model.set_attn_processor({**model.attn_processors, name: softmax})
    assert torch.equal(run(model, family), before) and "1 MHLA layers keep their processors" in caplog.text
    model.set_attn_processor(softmax)
    assert [found for found in model.attn_processors.values() if found is not softmax] == [model.attn_processors[name]]
    assert list(grid_layers(model)) == [1]
    processors = model.attn_processors
    with pytest.raises(ValueError, match="number of processors 1 does not match"):
        model.set_attn_processor({name: softmax})
    with pytest.raises(KeyError):
        model.set_attn_processor({f"no.{name}": softmax for name in processors})
    assert all(found is processors[name] for name, found in model.attn_processors.items())


@torch.no_grad()
def test_a_backend_without_masks_leaves_those_of_unequal_blocks_to_pytorch(caplog):
    warn_of_backend.cache_clear()
    model = converted(layers="all", layout=[2, 3, 5], **SALIENT)
    expected = run(model)
    with attention_backend("native"):
        for attention in find_self_attentions(model):
            attention.processor._attention_backend = AttentionBackendName._NATIVE_FLASH
        assert distance(run(model), expected) <= 1e-6
    messages = [record.getMessage() for record in caplog.records]
    assert messages.count("mhla_hf: attention backend '_native_flash' takes no mask; this softmax uses PyTorch.") == 1


QUICK_BACKENDS = ("flux2", "chroma", "sd3")
SAGE_WARNING = "mhla_hf: attention backend 'sage' rounds queries to 8 bits; this softmax uses PyTorch."


@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=() if one in QUICK_BACKENDS else SLOW) for one in JOINT_SIZES]
)
def test_the_softmax_beside_a_text_goes_through_the_attention_backend(family, caplog):
    warn_of_backend.cache_clear()
    model, softmax, inside, flash = converted(family, layers="all"), F.scaled_dot_product_attention, [], []
    for attention in find_self_attentions(model):  # some models have a softmax elsewhere, too
        attention.register_forward_pre_hook(lambda *args: inside.append(True))
        attention.register_forward_hook(lambda *args: inside.clear())

    def spy(*args, **options):
        flash.extend(torch.backends.cuda.flash_sdp_enabled() for _ in inside)
        return softmax(*args, **options)

    expected = run(model, family)
    with attention_backend("native"):  # which restores the backend of the process at its end
        model.set_attention_backend("native")
        assert torch.equal(run(model, family), expected)
        model.set_attention_backend("_native_math")
        with mock.patch.object(F, "scaled_dot_product_attention", spy):
            assert distance(run(model, family), expected) <= 1e-5
        assert flash and not any(flash)
        model.set_attention_backend("flex")
        assert distance(run(model, family), expected) <= 1e-5
        model.set_attention_backend("native")
        for attention in find_self_attentions(model):  # as SageAttention, which cannot run here, would write it
            attention.processor._attention_backend = AttentionBackendName.SAGE
        assert torch.equal(run(model, family), expected)
        assert [record.getMessage() for record in caplog.records].count(SAGE_WARNING) == 1
        model.reset_attention_backend()
        with attention_backend("_native_math"), mock.patch.object(F, "scaled_dot_product_attention", spy):
            flash.clear()
            run(model, family)
        assert flash and not any(flash)


@pytest.mark.parametrize("family", ["sana", "dit"])
def test_a_processor_put_in_by_hand_is_noticed(family, tmp_path):
    model = converted(family)
    model.transformer_blocks[1].attn1.set_processor(AttnProcessor2_0())
    for use in (lambda: run(model, family), lambda: model.save_pretrained(tmp_path)):
        with pytest.raises(ValueError, match="model: got AttnProcessor2_0 in layer 1, expected its MHLA processor"):
            use()
    assert not any(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:.Quanto(Config|Quantizer). is deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["torchao.quantization", "optimum.quanto"])
def test_int8_weights_quantize_the_gate_and_not_the_mixing(name, tmp_path):
    model, library, is_torchao = converted(), pytest.importorskip(name), name.startswith("torchao")
    config = diffusers.QuantoConfig(weights_dtype="int8")
    if is_torchao:
        config = diffusers.TorchAoConfig(library.Int8WeightOnlyConfig(version=2))
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, quantization_config=config, torch_dtype=torch.float32)
    core = find_self_attentions(loaded)[1].processor.mhla
    gate = core.gate.weight.data if is_torchao else core.gate.weight
    assert type(gate) not in (torch.Tensor, torch.nn.Parameter) and type(core.mixing.weight.data) is torch.Tensor
    assert 0 < distance(run(loaded), run(model)) < 0.05


OFFLOADED = [family for family in [*SIZES, *JOINT_SIZES] if family != "hunyuan-dit"]
OTHERS = [("leaf_level", "sana"), ("sequential", "pixart"), ("model", "wan")]
OTHERS += [("block_level", family) for family in ("wan", "ltx", "flux")]


@pytest.mark.parametrize(("kind", "family"), [*OTHERS, *itertools.product(["leaf_level"], OFFLOADED)])
def test_offloading_gives_the_same_numbers(kind, family):
    model = converted(family, cpe=3)
    before = run(model, family)
    cpu = torch.device("cpu")
    if kind == "sequential":
        accelerate.cpu_offload(model, execution_device=cpu)
        assert all(value.is_meta for value in model.parameters())
    elif kind == "model":  # a hook of accelerate keeps the forward that it wraps; conversion changes that one too
        state, model = model.state_dict(), tiny_transformer(family)
        accelerate.cpu_offload_with_hook(model, execution_device=cpu)
        mhla_hf.convert(model, gate=True, cpe=3).load_state_dict(state)
    else:
        options = {"num_blocks_per_group": 1} if kind == "block_level" else {}
        apply_group_offloading(model, onload_device=cpu, offload_device=cpu, offload_type=kind, **options)
    assert torch.equal(run(model, family), before)


@pytest.mark.parametrize("family", ["wan", "sana-video", "dit", *OFFLOADED])
def test_copies_have_a_grid_of_their_own(family):
    model = converted(family)
    model.enable_gradient_checkpointing()
    copied = copy.deepcopy(model)
    assert copied.mhla_state is not model.mhla_state
    model(**inputs(family)).sample.sum().backward()
    copied(**inputs(family)).sample.sum().backward()
    for one, other in zip(model.parameters(), copied.parameters(), strict=True):
        assert one.grad is None or torch.equal(one.grad, other.grad)
    fresh = converted(family)
    assert torch.equal(run(pickle.loads(pickle.dumps(fresh)), family), run(fresh, family))


def test_threads_share_a_model_with_grids_of_their_own():
    """As many tokens in both sizes: another thread's grid would not raise, the picture would only be wrong."""
    model = converted(layers="all", layout=[1, 4, 2])
    sizes = [(1, 8, 16), (1, 16, 8)]
    alone = {size: run(model, size=size) for size in sizes}
    meet = threading.Barrier(2)

    def request(size):
        meet.wait()
        return [distance(run(model, size=size), alone[size]) for _ in range(15)]

    with ThreadPoolExecutor(2) as pool:
        wrong = [*itertools.chain(*pool.map(request, sizes))]
    assert max(wrong) <= 1e-6 and model.mhla_state.grid is None


def test_stock_lora_files_load_and_fuse(tmp_path):
    stock = tiny_transformer("wan")
    targets = ["to_q", "to_k", "to_v", "to_out.0"]
    stock.add_adapter(LoraConfig(r=2, lora_alpha=2, target_modules=targets, init_lora_weights=False))
    expected = generate(diffusers.WanPipeline(**{**PIPELINES["wan"]().components, "transformer": stock}))
    diffusers.WanPipeline.save_lora_weights(tmp_path, transformer_lora_layers=get_peft_model_state_dict(stock))
    pipe = mhla_hf.convert(PIPELINES["wan"](), gate=True)
    before = generate(pipe)
    pipe.load_lora_weights(tmp_path)
    with_lora = generate(pipe)
    assert distance(with_lora, before) > 1e-3
    pipe.fuse_lora()
    pipe.unload_lora_weights()
    assert distance(generate(pipe), with_lora) <= 1e-5
    with mhla_hf.use_mhla_in_steps(pipe, end=0):
        assert distance(generate(pipe), expected) <= 1e-5


def test_layerwise_casting_leaves_the_mixing_alone():
    model = converted()
    before = run(model)
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    kinds = {name.split(".mhla.")[1]: value.dtype for name, value in model.named_parameters() if ".mhla." in name}
    assert kinds["mixing.weight"] == torch.float32 and kinds["gate.weight"] == torch.float8_e4m3fn
    assert 0 < distance(run(model), before) < 0.15


CACHES = {
    "pab": lambda pipe: diffusers.PyramidAttentionBroadcastConfig(spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(0, 1000), spatial_attention_block_identifiers=("blocks",),
        current_timestep_callback=lambda: pipe.current_timestep),
    "first-block": lambda pipe: diffusers.FirstBlockCacheConfig(threshold=10.0),
    "taylorseer": lambda pipe: diffusers.TaylorSeerCacheConfig(cache_interval=3, disable_cache_before_step=1,
        cache_identifiers=[r".*blocks\.\d+\.attn1?"]),
    "mag": lambda pipe: diffusers.MagCacheConfig(num_inference_steps=4, retention_ratio=0.2, threshold=10.0,
        mag_ratios=[1.0] * 4),
}  # fmt: skip


@pytest.mark.parametrize(("name", "family"), [*itertools.product(CACHES, ["wan", "ltx", "flux"])])
def test_caches_skip_mhla_layers_and_leave_nothing(name, family):
    pipe = mhla_hf.convert({**PIPELINES, **GRID_PIPELINES}[family](), layers="all")
    calls = []
    for attention in find_self_attentions(pipe.transformer):
        attention.processor.mhla.register_forward_hook(lambda *args: calls.append(1))
    plain = generate(pipe, num_inference_steps=4)
    full, calls[:] = len(calls), []
    pipe.transformer.enable_cache(CACHES[name](pipe))
    cached = generate(pipe, num_inference_steps=4)
    assert len(calls) < full and torch.isfinite(cached).all()
    calls.clear()
    with mhla_hf.use_mhla_in_steps(pipe, end=0):
        assert torch.isfinite(generate(pipe, num_inference_steps=4)).all() and not calls
    pipe.transformer.disable_cache()
    assert torch.equal(generate(pipe, num_inference_steps=4), plain)
