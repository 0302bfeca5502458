"""Diffusion in the one loop: what is read, what moves, that stops and processes change nothing, and what is refused."""

import copy

import datasets
import pytest
import torch
from diffusers import DiffusionPipeline, WanPipeline
from safetensors.torch import save_file
from tools.small_models import refused
from tools.tiny_pipelines import PIPELINES, generate, tiny_transformer

import mhla_hf
from mhla_hf.training.pipeline_calls import open_samples
from mhla_hf.training.recipe import DiffusionStage

SIZES = {"wan": [9, 64, 80], "sana-video": [9, 64, 96], "sana": [32, 32], "dit": None, "pixart": None}
COMMON = {"batch_size": 2, "sampling_steps": 3}
TRANSFER = DiffusionStage("transfer", "transfer", 2, 1e-2, trainable="mhla", **COMMON)
MATCH = DiffusionStage("match", "prediction", 2, 1e-3, **COMMON)


def converted(family, layers=(1,), **settings):
    torch.manual_seed(1)
    layout = (1, 2, 2) if len(SIZES[family] or ()) == 3 else (2, 2)
    return mhla_hf.convert(PIPELINES[family](), layers=list(layers), layout=layout, **settings)


def latents(count=6, seed=0):
    """For DiT: latents of two classes that look different."""
    labels = torch.arange(count) % 2
    noise = torch.randn(count, 4, 16, 16, generator=torch.Generator().manual_seed(seed))
    return {"latents": 0.3 * noise + labels[:, None, None, None], "class_labels": labels}


def distill(out, stages=(TRANSFER, MATCH), data=None, student=None, teacher=None, **options):
    student = student or converted("dit")
    options = {"progress": False, "save_every": 2, "log_every": 1} | options
    return mhla_hf.distill(student, teacher or PIPELINES["dit"](), out=out, data=data, stages=list(stages), **options)


@pytest.mark.parametrize("family", list(PIPELINES))
def test_without_data_from_pipeline_to_pipeline(lab, family, tmp_path):
    teacher, student = PIPELINES[family](), converted(family)
    before = copy.deepcopy(student.transformer.state_dict())
    common = {"batch_size": 2, "grad_accum": 2, "sampling_steps": 2, "size": SIZES[family]}
    lora = DiffusionStage("lora", "prediction", 2, 1e-3, trainable="lora", lora_rank=2, **common)
    stages = [DiffusionStage("transfer", "transfer", 2, 1e-2, trainable="mhla", **common), lora]
    data = None if family == "dit" else ["a cat", "a dog walks"]
    options = {"out": tmp_path / "a", "data": data, "stages": stages, "progress": False}
    assert mhla_hf.distill(student, teacher, **options) is student
    after = student.transformer.state_dict()
    moved = {name for name, value in after.items() if not torch.equal(value, before[name])}
    block = next(name for name in after if ".mhla." in name).split(".attn1")[0]
    projections = {f"{block}.attn1.{name}.weight" for name in ("to_q", "to_k", "to_v", "to_out.0")}
    assert list(after) == list(before) and projections < moved
    assert all(name in projections or ".mhla." in name for name in moved)
    assert {value.requires_grad for value in student.transformer.parameters()} == {True}

    again = mhla_hf.distill(converted(family), teacher, **options)
    torch.testing.assert_close(again.transformer.state_dict(), after, rtol=0, atol=0)
    assert (tmp_path / "a" / "model_index.json").is_file() and generate(again).isfinite().all()
    record = lab.record(tmp_path / "a")
    assert (record["task"], record["samples"], record["data"]["kind"]) == ("diffusion", 8, "trajectories")


def test_folder_dataset_and_tensors_are_one_data(lab, tmp_path):
    table = latents()
    (tmp_path / "latents").mkdir()
    for number, part in enumerate((slice(0, 4), slice(4, 6))):
        part = {key: value[part].contiguous() for key, value in table.items()}
        save_file(part, tmp_path / "latents" / f"{number}.safetensors")
    dataset = datasets.Dataset.from_dict({key: value.tolist() for key, value in table.items()})
    sources = {"folder": tmp_path / "latents", "dataset": dataset.with_format("torch"), "tensors": table}
    stage = DiffusionStage("m", "prediction", 2, 1e-3, batch_size=4, data_weight=0.5)
    for name, data in sources.items():
        distill(tmp_path / name, [stage], data)
        assert lab.weights(tmp_path / name) == lab.weights(tmp_path / "folder")
        assert open_samples(data).columns == ("class_labels",)
    assert {"match", "denoise"} <= set(lab.history(tmp_path / "folder")[-1])


def test_texts_beside_latents(lab, tmp_path):
    pipe, prompts = PIPELINES["wan"](), ["a cat", "a dog", "a cat walks"]
    clean = torch.randn(3, 16, 3, 8, 10, generator=torch.Generator().manual_seed(0))
    embeds = pipe.encode_prompt(prompts, max_sequence_length=512)[0]
    stage = DiffusionStage("m", "denoising", 2, 1e-3, batch_size=3, grad_accum=3, size=SIZES["wan"], drop_condition=0.5)
    texts = datasets.Dataset.from_dict({"latents": clean.tolist(), "prompt": prompts}).with_format("torch")
    for name, data in (("texts", texts), ("embeds", {"latents": clean, "prompt_embeds": embeds})):
        options = {"out": tmp_path / name, "data": data, "stages": [stage], "progress": False, "log_every": 1}
        mhla_hf.distill(converted("wan"), **options)
    texts, embeds = (lab.history(tmp_path / name) for name in ("texts", "embeds"))
    assert [entry["loss"] for entry in texts] == pytest.approx([entry["loss"] for entry in embeds], rel=1e-4)


def test_a_bare_transformer_and_a_pipeline_whose_transformer_was_converted_alone(tmp_path):
    student = converted("dit").transformer
    assert distill(tmp_path / "a", [TRANSFER], student=student, gradient_checkpointing=True) is student
    again = type(student).from_pretrained(tmp_path / "a")
    torch.testing.assert_close(again.state_dict(), student.state_dict(), rtol=0, atol=0)
    assert not student.is_gradient_checkpointing
    pipe = PIPELINES["dit"]()
    mhla_hf.convert(pipe.transformer, layout=(2, 2))
    distill(tmp_path / "b", [TRANSFER], student=pipe)
    there = DiffusionPipeline.from_pretrained(tmp_path / "b", trust_remote_code=True)
    assert (generate(there) - generate(pipe)).abs().max() <= 1e-5


def wan_latents(*shape):
    return {"latents": torch.zeros(2, *shape), "prompt_embeds": torch.zeros(2, 4, 32)}


def silent_wan():
    pipe = PIPELINES["wan"]()
    return WanPipeline(None, None, pipe.vae, pipe.scheduler, pipe.transformer)


def stage(loss="prediction", size=(9, 64, 80), **values):
    return {"stages": [DiffusionStage("v", loss, 1, 1e-3, size=size, **values)]}


OWN = stage("denoising")
BAD = {
    "another VAE": ({**OWN, "data": wan_latents(8, 3, 8, 10)}, r"got latents \[8, 3, 8, 10\] .*, expected \[16, frames"),
    "odd sides": ({**OWN, "data": wan_latents(16, 3, 7, 10)}, r"expected sides divisible by the patch size \[1, 2, 2\]"),
    "no text encoder": ({"student": silent_wan, "teacher": silent_wan}, "got a pipeline without text encoder"),
    "no prompts": ({"data": None}, "data: got None with MHLAWanTransformer3DModel, expected arguments of its pipeline."),
    "no latents": ({"data": {"pixels": torch.zeros(2, 3)}}, "with the columns pixels, expected 'latents'"),
    "weight on data": (stage(data_weight=0.5), "data: got no latents, expected some, because stage 'v' has"),
    "no pipeline": ({"student": lambda: converted("wan").transformer, "teacher": lambda: tiny_transformer("wan")},
        "teacher: got no pipeline as student or teacher, expected one"),
    "another family": ({"teacher": PIPELINES["sana"]},
        "teacher: got a Sana.* of 4 channels, expected a Wan.* of 16 channels"),
    "converted teacher": ({**stage("transfer", trainable="mhla"), "teacher": lambda: converted("wan")},
        "teacher: got an MHLA layer for .*, expected the softmax original"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_refused_and_nothing_written(tmp_path, case):
    changes, words = BAD[case]
    values = {"student": lambda: converted("wan"), "teacher": PIPELINES["wan"], "data": ["a cat"], **stage(), **changes}
    student, teacher = (make and make() for make in (values.pop("student"), values.pop("teacher")))
    with refused(match=words, kind=(ValueError, TypeError)):
        mhla_hf.distill(student, teacher, out=tmp_path / "out", progress=False, **values)
    assert not list(tmp_path.iterdir())
