"""convert() with samples: what the MHLA layers of diffusion and vision models learn from their softmax originals."""

import json

import diffusers
import pytest
import torch
from diffusers.models.transformers.transformer_flux2 import Flux2KVAttnProcessor
from tools.small_models import refused, softmax_model
from tools.small_towers import softmax_tower
from tools.tiny_grid_pipelines import kontext_pipeline
from tools.tiny_joint import PACKED
from tools.tiny_pipelines import PIPELINES, TRANSFORMERS, inputs, tiny_transformer

import mhla_hf
from mhla_hf.conversion.grid_fit import (
    Call,
    GridSoftmaxCore,
    damage_of_heads,
    grid_layers,
    output_error,
    run_call,
    softmax_layers,
)
from mhla_hf.conversion.teacher import replaced_cores
from mhla_hf.hub.card import write_first_card
from mhla_hf.hub.facts import Person
from mhla_hf.training.denoising import call

SOFTMAX = [name for name in TRANSFORMERS if not name.startswith("sana")]
LEARNS = ("dit", "wan", "sd3")


def sampler(model, name):
    """A function that runs a transformer on random inputs, which stand for those of a trajectory."""

    def sample(generator):
        arguments = inputs(name, seed=int(torch.randint(2**31, (), generator=generator)))
        model(**{key: x.to(model.dtype) if x.is_floating_point() else x for key, x in arguments.items()})

    return sample


def learned(name, keep=0, effort=0.06, **options):
    model = tiny_transformer(name)
    return mhla_hf.convert(model, samples=sampler(model, name), keep=keep, effort=effort, progress=False, **options)


@pytest.mark.parametrize("name", SOFTMAX)
def test_softmax_instead_of_all_layers_is_the_original(name):
    model, arguments = tiny_transformer(name), inputs(name, batch=2)
    expected = run_call(model, Call((), arguments))
    mhla_hf.convert(model, layers="all")
    with softmax_layers(grid_layers(model)):
        bound = 1e-2 if name.startswith("kandinsky") else 1e-4  # which rotates in bf16
        torch.testing.assert_close(run_call(model, Call((), arguments)), expected, rtol=bound, atol=bound)
    assert (run_call(model, Call((), arguments)) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("name", LEARNS)
def test_every_layer_comes_closer_and_the_base_stays(name):
    base, model = tiny_transformer(name).state_dict(), learned(name)
    report = model.config.mhla_measured
    assert all(layer["fitted"] < layer["converted"] for layer in report["layers"].values()), report
    assert report["output"]["fitted"] < report["output"]["converted"] and report["softmax_heads"] == {}
    state = model.state_dict()
    assert {key for key in state if ".mhla." not in key} == set(base)
    assert all(torch.equal(state[key], value) for key, value in base.items())


def test_all_modules_of_a_core_learn_in_half_precision():
    model = tiny_transformer("sd3").bfloat16()
    options = {"effort": 0.02, "progress": False, "cpe": 3, "gate": True, "layers": [1]}
    mhla_hf.convert(model, samples=sampler(model, "sd3"), **options)
    core = grid_layers(model)[1].mhla
    assert core.cpe.conv.weight.dtype == core.gate.weight.dtype == torch.bfloat16
    assert core.mixing.weight.dtype == torch.float32
    assert all(x.float().abs().max() > 0 for x in (core.cpe.conv.weight, core.gate.weight))


def test_the_same_seed_gives_the_same_model():
    first, second, other = (learned("dit", seed=seed, effort=0.01).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(value, second[key]) for key, value in first.items())
    assert any(not torch.equal(value, other[key]) for key, value in first.items())


def test_heads_that_matter_keep_softmax_and_the_record_is_saved(tmp_path):
    model = learned("sd3", keep=1 / 2)
    report = model.config.mhla_measured
    chosen = {(index, head) for index, heads in report["softmax_heads"].items() for head in heads}
    damage = {(i, head): x for i, layer in report["layers"].items() for head, x in enumerate(layer["damage"])}
    assert chosen == {*sorted(damage, key=lambda place: -damage[place])[:3]} and len(damage) == 6
    assert report["output"]["kept"] < report["output"]["fitted"]
    whole = [int(index) for index, heads in report["softmax_heads"].items() if len(heads) == 2]
    assert (
        model.config.mhla["layers"] == [index for index in range(3) if index not in whole] == list(grid_layers(model))
    )
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["mhla_measured"] == report
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert loaded.config.mhla_measured == report
    arguments = Call((), inputs("sd3"))
    torch.testing.assert_close(run_call(loaded, arguments), run_call(model, arguments))
    card = write_first_card(tmp_path, Person("me/toy", None, "mit")).read_text()
    assert f"| with softmax heads | {report['output']['kept']:.4f} |" in card
    assert all(f"{index} ({', '.join(map(str, heads))})" in card for index, heads in report["softmax_heads"].items())


def test_salient_blocks_beside_softmax_heads():
    """Where heads keep softmax, blocks are chosen, too, unless the caller says otherwise."""
    settings = learned("wan", keep=1, effort=0.02).config.mhla
    assert (settings["windowed"], settings["salient_blocks"], settings["rope"]) == (True, 2, "before")
    assert not learned("wan", keep=1, effort=0.02, salient_blocks=0).config.mhla["windowed"]
    assert not learned("wan", keep=0, effort=0.02).config.mhla["windowed"]

    settings = learned("wan", keep=1, effort=0.02, output_norm=True).config.mhla
    assert settings["output_norm"] and not settings["windowed"] and settings["softmax_heads"]


@pytest.mark.parametrize("how", ["checkpointing", "skipping a layer", "inference mode"])
def test_heads_are_measured_however_the_model_runs(how):
    with torch.inference_mode(how == "inference mode"):
        model = tiny_transformer("sd3")
    if how == "checkpointing":
        model.enable_gradient_checkpointing()
    options = {"skip_layers": [1]} if how == "skipping a layer" else {}

    @torch.inference_mode(how == "inference mode")
    def sample(generator):
        model(**inputs("sd3", seed=int(torch.randint(2**31, (), generator=generator))), **options)

    report = mhla_hf.convert(model, samples=sample, keep=1, effort=0.02, progress=False).config.mhla_measured
    damage = [value for layer in report["layers"].values() for value in layer["damage"]]
    assert len(damage) == 6 and sum(value > 0 for value in damage) == (4 if options else 6)
    assert all(x.requires_grad for x in model.parameters())


@pytest.mark.parametrize("name", LEARNS)
def test_the_damage_of_a_head_is_the_error_that_it_alone_makes(name):
    """To first order: MHLA is mixed into softmax with a small weight; the estimate is a mean over random directions."""
    model = learned(name)
    layers, arguments = grid_layers(model), [Call((), inputs(name, seed=seed, batch=2)) for seed in range(16)]
    damage = damage_of_heads(model, arguments, seed=0)
    with softmax_layers(layers):
        expected = [run_call(model, call) for call in arguments]
    index, small = max(damage, key=lambda index: max(damage[index])), 1e-2
    head = max(range(len(damage[index])), key=lambda head: damage[index][head])

    class Mixed(GridSoftmaxCore):
        def forward(self, q, k, v, *args, **options):
            softmax, mhla = super().forward(q, k, v, *args, **options), self.core(q, k, v, *args, **options)
            o, other = (x[0] if isinstance(x, tuple) else x for x in (softmax, mhla))
            o[:, :, head] += small * (other - o)[:, :, head]
            return (o, softmax[1]) if isinstance(softmax, tuple) else o

    with softmax_layers(layers), replaced_cores({index: layers[index]}, lambda core: Mixed(core.core)):
        error = output_error(model, arguments, expected) / small**2
    assert 0.5 < damage[index][head] / error < 2


def test_pipelines_sample_prompts(monkeypatch):
    seen, pipe = [], PIPELINES["wan"]()
    record = lambda self, prompt, **options: seen.append({"prompt": prompt, **options})  # noqa: E731
    monkeypatch.setattr(type(pipe), "__call__", record)
    with pytest.raises(ValueError, match="a run without WanTransformer3DModel"):
        mhla_hf.convert(pipe, samples=["a cat", "a dog"], progress=False)
    assert [options["prompt"] for options in seen] == ["a cat", "a dog"] * 4 and seen[0]["output_type"] == "latent"
    assert type(pipe.transformer) is diffusers.WanTransformer3DModel


def with_image_cache(transformer):
    """As the pipeline of Flux 2 Klein KV changes its transformer."""
    transformer.transformer_blocks[0].attn.set_processor(Flux2KVAttnProcessor())
    return transformer


@torch.no_grad()
@pytest.mark.parametrize("family", PACKED)
def test_only_the_new_image_counts(family):
    """Pipelines drop what the transformer says of the images to edit."""
    model, arguments = tiny_transformer(family), inputs(family, [(4, 5), (3, 2), (2, 2)])
    new = run_call(model, Call((), arguments))
    assert torch.equal(new, model(**arguments).sample[:, :20]) and torch.equal(new, call(model, arguments))
    if family == "qwen-image":
        model.register_to_config(use_layer3d_rope=True)
        assert run_call(model, Call((), arguments)).shape[1] == 26


def tower(samples, device="cpu"):
    return mhla_hf.convert(softmax_tower("ViTModel").to(device), samples=samples)


EDIT = "got prompts with FluxKontextPipeline, expected a function that samples with a torch.Generator"
CACHE = "model: got Flux2KVAttnProcessor in layer 0, expected a processor without a cache of reference images"
REFUSED = {
    "a language model": (lambda: mhla_hf.convert(softmax_model(), samples=["a"]), "samples: got some for Llama"),
    "linear attention": (lambda: learned("sana"), "samples: got some for SanaTransformer2DModel, whose attention"),
    "prompts without a pipeline": (lambda: mhla_hf.convert(tiny_transformer("dit"), samples=["a"]),
        "samples: got list with DiTTransformer2DModel"),
    "too few images": (lambda: tower(torch.ones(3, 3, 32, 32)), "a tensor of shape [3, 3, 32, 32] with ViTModel"),
    "labels of other classes": (lambda: mhla_hf.convert(PIPELINES["dit"](), samples=[1, 2000]),
        "samples: got [1, 2000] with DiTPipeline, expected labels from 0 to 999"),
    "prompts for an edit": (lambda: mhla_hf.convert(kontext_pipeline(), samples=["a cat"]), EDIT),
    "a cache of images": (lambda: mhla_hf.convert(with_image_cache(tiny_transformer("flux2"))), CACHE),
    "all heads": (lambda: learned("dit", keep=4), "keep: got 4, expected 0 to 3 of the 4 heads"),
    "no weights": (lambda: tower(torch.ones(16, 3, 32, 32), "meta"), "model: got ViTModel on the meta device, expected")
}  # fmt: skip


@pytest.mark.parametrize(("convert", "words"), REFUSED.values(), ids=REFUSED)
def test_refused(convert, words):
    with refused(words, kind=(TypeError, ValueError)):
        convert()
