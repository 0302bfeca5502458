"""A model in half precision is trained in float32 and given back and saved as it came; the teacher stays as it is."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file
from small_towers import softmax_tower
from tiny_pipelines import PIPELINES, generate
from transformers import AutoModelForCausalLM, ViTImageProcessor

import mhla_hf
from mhla_hf.training import objectives
from mhla_hf.training.recipe import DiffusionStage, ImageStage, make_recipe

HALF, FULL = torch.bfloat16, torch.float32


@pytest.fixture
def base(lab, tmp_path):
    """A softmax model in bfloat16, as transformers loads one."""
    lab.teacher().to(HALF).save_pretrained(tmp_path / "base")
    return AutoModelForCausalLM.from_pretrained(tmp_path / "base")


def converted(base, dtype=None):
    return mhla_hf.convert(copy.deepcopy(base), layers="all", block_size=16, num_blocks=4).to(dtype)


def run(lab, out, student, teacher, **options):
    return lab.distill(out, teacher, student, stages=lab.stages(6), **options)


def as_base(state):
    """The mixing is float32 in every MHLA model, the rest is the base's."""
    assert any(".mixing." in name for name in state)
    return {name: FULL if ".mixing." in name else HALF for name in state}


def dtypes(state):
    return {name: value.dtype for name, value in state.items()}


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_trained_in_float32_and_saved_as_it_came(lab, base, tmp_path, precision):
    """What comes out is what a float32 run gives, rounded once, at the end."""
    before, kept = copy.deepcopy(base.state_dict()), {"mixed_precision": precision}
    full = run(lab, tmp_path / "full", converted(base, FULL), base, **kept)
    half = run(lab, tmp_path / "half", converted(base), base, **kept)
    saved = load_file(tmp_path / "half" / "model.safetensors")
    assert dtypes(saved) == as_base(saved)
    wanted = {name: value.to(saved[name].dtype) for name, value in full.state_dict().items() if name in saved}
    torch.testing.assert_close(saved, wanted, rtol=0, atol=0)
    assert any(not torch.equal(value.to(FULL), full.state_dict()[name]) for name, value in saved.items())
    torch.testing.assert_close(base.state_dict(), before, rtol=0, atol=0)
    loaded, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "half"), lab.tokens()[:96].view(2, 48)
    assert loaded.dtype == half.dtype == HALF
    torch.testing.assert_close(loaded.state_dict(), half.state_dict(), rtol=0, atol=0)
    assert torch.equal(loaded(ids).logits, half.eval()(ids).logits)


def test_saved_as_told(lab, base, tmp_path):
    full = run(lab, tmp_path / "full", converted(base, FULL), base)
    told = run(lab, tmp_path / "told", converted(base), base, save_dtype=FULL)
    torch.testing.assert_close(told.state_dict(), full.state_dict(), rtol=0, atol=0)
    assert lab.weights(tmp_path / "told") == lab.weights(tmp_path / "full")
    again = run(lab, tmp_path / "told", converted(base), base, save_dtype="float32")  # finished: loaded
    torch.testing.assert_close(again.state_dict(), full.state_dict(), rtol=0, atol=0)
    small = run(lab, tmp_path / "small", converted(base, FULL), base, save_dtype="bfloat16").state_dict()
    assert dtypes(small) == as_base(small)
    torch.testing.assert_close(load_file(tmp_path / "small" / "model.safetensors")["model.norm.weight"],
                               full.state_dict()["model.norm.weight"].to(HALF), rtol=0, atol=0)  # fmt: skip
    again = run(lab, tmp_path / "small", converted(base, FULL), base, save_dtype="bfloat16")
    torch.testing.assert_close(again.state_dict(), small, rtol=0, atol=0)


def test_a_stopped_run_goes_on_bit_for_bit(lab, base, tmp_path, monkeypatch):
    """With the same object, half trained, and with a fresh one; between the calls the student is as it came."""
    run(lab, tmp_path / "whole", converted(base), base)
    real, calls = objectives.DistillStep.forward, []

    def forward(self, *arguments):
        calls.append(1)
        if len(calls) in (6, 11):
            raise MemoryError
        return real(self, *arguments)

    monkeypatch.setattr(objectives.DistillStep, "forward", forward)
    student = converted(base)
    for _ in range(2):
        with pytest.raises(MemoryError):
            run(lab, tmp_path / "out", student, base, save_every=2)
        assert dtypes(student.state_dict()) == dtypes(converted(base).state_dict())
    assert not torch.equal(student.model.embed_tokens.weight, base.model.embed_tokens.weight)
    run(lab, tmp_path / "out", converted(base), base, save_every=2)
    assert lab.weights(tmp_path / "out") == lab.weights(tmp_path / "whole")
    assert json.loads((tmp_path / "out" / "train.json").read_text())["resumed"] == 2


@pytest.mark.parametrize(("tower", "loss"), [("ViTForImageClassification", "logits"), ("CLIPVisionModel", "features")])
def test_images(tmp_path, tower, loss):
    teacher = softmax_tower(tower).to(HALF)
    student = mhla_hf.convert(copy.deepcopy(teacher), layers="all", layout=[2, 2])
    stages = [
        ImageStage("transfer", "transfer", 4, 5e-3, trainable="mhla", batch_size=4),
        ImageStage("distil", loss, 4, 5e-3, batch_size=4),
    ]
    processor = ViTImageProcessor(size={"height": 32, "width": 32}, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    data = torch.randint(0, 256, (16, 3, 32, 32), dtype=torch.uint8), torch.arange(16) % 3
    options = {"data": data, "stages": stages, "processor": processor, "progress": False}
    mhla_hf.distill(student, teacher, out=tmp_path / "out", **options)
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert dtypes(saved) == as_base(saved)
    loaded = type(student).from_pretrained(tmp_path / "out")
    torch.testing.assert_close(loaded.state_dict(), student.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("family", ["wan", "dit", "sana"])
def test_pipelines(tmp_path, family):
    """Loaded as diffusers loads them in bfloat16: what its class keeps in float32 stays so."""
    PIPELINES[family]().save_pretrained(tmp_path / "base")
    kind = type(PIPELINES[family]())
    teacher, student = (kind.from_pretrained(tmp_path / "base", dtype=HALF) for _ in range(2))
    mhla_hf.convert(student, layers=[1], layout=(1, 2, 2) if family == "wan" else (2, 2))
    before = dtypes(student.transformer.state_dict())
    common = {"batch_size": 2, "sampling_steps": 2, "size": {"wan": [9, 64, 80], "sana": [32, 32]}.get(family)}
    stages = [
        DiffusionStage("transfer", "transfer", 2, 1e-2, trainable="mhla", **common),
        DiffusionStage("lora", "prediction", 2, 1e-3, trainable="lora", lora_rank=2, ema=0.5, **common),
    ]
    data = None if family == "dit" else ["a cat"]
    mhla_hf.distill(student, teacher, out=tmp_path / "out", data=data, stages=stages, progress=False)
    assert dtypes(student.transformer.state_dict()) == before and HALF in before.values()
    loaded = kind.from_pretrained(tmp_path / "out", dtype=HALF, trust_remote_code=True)
    torch.testing.assert_close(loaded.transformer.state_dict(), student.transformer.state_dict(), rtol=0, atol=0)
    assert torch.equal(generate(loaded), generate(student))


def test_a_recipe_may_say_it():
    stage = {"name": "a", "loss": "lm", "steps": 1, "lr": 1e-3}
    assert make_recipe({"stages": [stage], "run": {"save_dtype": "float32"}}).run == {"save_dtype": "float32"}
