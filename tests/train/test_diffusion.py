"""Diffusion in the one loop: noise processes, trajectories and losses against their definitions, and whole runs."""

import copy
import json
import multiprocessing

import datasets
import pytest
import torch
from accelerate import debug_launcher
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
    WanPipeline,
)
from safetensors.torch import load_file, save_file
from tiny_pipelines import CALLS, PIPELINES, generate, tiny_transformer

import mhla_hf
from mhla_hf.convert.families import family_of
from mhla_hf.training.denoising import DiffusionStep, NoiseProcess, predict, trajectory
from mhla_hf.training.latents import open_latents, own_generator
from mhla_hf.training.recipe import DiffusionStage

FORK = multiprocessing.get_context("fork")
SIZES = {"wan": [9, 64, 80], "sana-video": [9, 64, 96], "sana": [32, 32], "dit": None, "pixart": None}
COMMON = {"batch_size": 2, "sampling_steps": 3}
TRANSFER = DiffusionStage("transfer", "transfer", 4, 1e-2, trainable="mhla", **COMMON)
MATCH = DiffusionStage("match", "prediction", 4, 1e-3, **COMMON)


def converted(family, layers=(1,), **settings):
    """The family's tiny pipeline, converted."""
    torch.manual_seed(1)
    layout = (1, 2, 2) if len(SIZES[family] or ()) == 3 else (2, 2)
    return mhla_hf.convert(PIPELINES[family](), layers=list(layers), layout=layout, **settings)


def latents(count=6, seed=0):
    """For DiT: latents of two classes that look different."""
    labels = torch.arange(count) % 2
    noise = torch.randn(count, 4, 16, 16, generator=torch.Generator().manual_seed(seed))
    return {"latents": 0.3 * noise + labels[:, None, None, None], "class_labels": labels}


def distil(out, stages=(TRANSFER, MATCH), data=None, student=None, teacher=None, **options):
    """DiT from DiT."""
    student = student or converted("dit")
    options = {"progress": False, "save_every": 2, "log_every": 1} | options
    return mhla_hf.distill(student, teacher or PIPELINES["dit"](), out=out, data=data, stages=list(stages), **options)


def weights(out):
    return (out / "transformer" / "diffusion_pytorch_model.safetensors").read_bytes()


def history(out):
    entries = json.loads((out / "train.json").read_text())["history"]
    return [{key: value for key, value in entry.items() if key != "seconds"} for entry in entries]


@pytest.mark.parametrize("prediction", ["epsilon", "sample", "v_prediction"])
def test_ddpm_is_the_schedulers(prediction):
    scheduler = DDPMScheduler(prediction_type=prediction)
    clean, noise, time = torch.randn(1, 4, 8, 8), torch.randn(1, 4, 8, 8), 371
    noisy, target = NoiseProcess(scheduler).mix(clean, noise, float(time))
    torch.testing.assert_close(noisy, scheduler.add_noise(clean, noise, torch.tensor([time])))
    wanted = {
        "epsilon": noise,
        "sample": clean,
        "v_prediction": scheduler.get_velocity(clean, noise, torch.tensor([time])),
    }
    torch.testing.assert_close(target, wanted[prediction])


@pytest.mark.parametrize(
    ("scheduler", "shift"),
    [
        (FlowMatchEulerDiscreteScheduler(shift=3.0), 3.0),
        (UniPCMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=5.0), 5.0),
    ],
)
def test_flow_is_the_schedulers(scheduler, shift):
    process = NoiseProcess(scheduler)
    assert (process.flow, process.shift) == (True, shift)
    scheduler.set_timesteps(7)
    clean, noise = torch.randn(1, 4, 8, 8), torch.randn(1, 4, 8, 8)
    for time, sigma in zip(scheduler.timesteps, scheduler.sigmas, strict=False):
        noisy, target = process.mix(clean, noise, 1000 * sigma.item())
        torch.testing.assert_close(noisy, (1 - sigma) * clean + sigma * noise)
        torch.testing.assert_close(target, noise - clean)
        assert time == pytest.approx(1000 * sigma.item(), abs=1)


def test_times_are_logit_normal_and_shifted():
    """The median of a logit-normal is one half, which a shift of 3 moves to three quarters; DDPM's are whole numbers."""
    process = NoiseProcess(FlowMatchEulerDiscreteScheduler(shift=3.0))
    draws = torch.tensor([process.draw_time(own_generator(0, i), "logit-normal", None) for i in range(2000)])
    assert draws.median() == pytest.approx(750, abs=15)
    shares = (draws / 1000) / (3 - 2 * draws / 1000)
    assert shares.logit().mean() == pytest.approx(0.0, abs=0.07)
    assert shares.logit().std() == pytest.approx(1.0, abs=0.07)
    draws = [process.draw_time(own_generator(0, i), "uniform", 1.0) for i in range(2000)]
    assert sum(draws) / 2000 == pytest.approx(500, abs=25)
    draws = [NoiseProcess(DDIMScheduler()).draw_time(own_generator(0, i), "uniform", None) for i in range(2000)]
    assert all(draw == int(draw) for draw in draws)
    assert (min(draws), max(draws)) == (pytest.approx(0, abs=5), pytest.approx(999, abs=5))


@pytest.mark.parametrize("family", ["wan", "wan by UniPC", "sana", "sana-video", "pixart", "dit"])
def test_trajectory_is_what_the_pipeline_samples(family, monkeypatch):
    family, _, other = family.partition(" by ")
    pipe = PIPELINES[family]()
    if other:
        pipe.scheduler = UniPCMultistepScheduler(
            use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=3.0
        )
    call = {**CALLS[type(pipe).__name__], "num_inference_steps": 4, "guidance_scale": 3.0}
    call["generator"] = torch.Generator().manual_seed(3)
    seen = {}
    step = type(pipe.scheduler).step

    def keep(self, said, time, sample, *arguments, **options):
        seen.setdefault("start", sample)
        result = step(self, said, time, sample, *arguments, **options)
        seen["end"] = result[0] if isinstance(result, tuple) else result.prev_sample
        return result

    monkeypatch.setattr(type(pipe.scheduler), "step", keep)
    pipe.set_progress_bar_config(disable=True)
    if family == "dit":
        pipe(class_labels=[3], **call)
        start, wanted = seen["start"][:1], seen["end"][:1]
        wished, nothing = ({"class_labels": torch.tensor([label])} for label in (3, 1000))
    else:
        pipe(prompt="a cat walks", output_type="latent", **call)
        start, wanted = seen["start"], seen["end"]
        sizes = {key: call[key] for key in ("max_sequence_length", "complex_human_instruction") if key in call}
        given = pipe.encode_prompt(prompt=["a cat walks"], do_classifier_free_guidance=True, **sizes)
        names = family_of(pipe.transformer).conditions
        wished, nothing = (
            dict(zip(names, part, strict=True))
            for part in (given[: len(given) // 2], given[len(given) // 2 :])
        )  # fmt: skip
    points = []
    options = {"steps": 4, "guidance": 3.0, "each": lambda *point: points.append(point)}
    got = trajectory(pipe.transformer, pipe.scheduler, start.float(), wished, nothing, **options)
    torch.testing.assert_close(got, wanted.float(), rtol=1e-4, atol=1e-4)
    assert len(points) == 4
    assert torch.equal(points[0][0], start)


def test_transfer_loss_by_hand():
    """The first layer's inputs are the teacher's own, so its loss is what two plain forward passes show."""
    teacher, student = PIPELINES["dit"]().transformer, converted("dit", layers=[0]).transformer
    batch = {"noisy": latents()["latents"], "times": torch.full((6,), 300.0), "class_labels": latents()["class_labels"]}
    step = DiffusionStep(student, teacher, TRANSFER, lambda: tuple(batch))
    loss, logs = step(*batch.values(), 1 / 6)
    seen = {}
    for name, model in (("student", student), ("teacher", teacher)):
        handle = model.transformer_blocks[0].attn1.register_forward_hook(
            lambda _module, _args, output, name=name: seen.update({name: output})
        )
        with torch.no_grad():
            predict(model, batch["noisy"], batch["times"], {"class_labels": batch["class_labels"]})
        handle.remove()
    ratio = (seen["student"] - seen["teacher"]).abs().sum((1, 2)) / seen["teacher"].abs().sum((1, 2))
    torch.testing.assert_close(loss.detach(), ratio.mean(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logs["loss"], loss.detach())
    loss.backward()
    assert all(value.grad is not None for value in student.transformer_blocks[0].attn1.processor.mhla.parameters())
    assert not teacher.transformer_blocks[0].attn1._forward_hooks
    assert all(value.grad is None for value in teacher.parameters())


def test_prediction_loss_by_hand():
    teacher, student = PIPELINES["dit"]().transformer, converted("dit").transformer
    stage = DiffusionStage("m", "prediction", 1, 1e-3, data_weight=0.25)
    batch = {"noisy": latents()["latents"], "times": torch.full((6,), 300.0), "class_labels": latents()["class_labels"]}
    batch["target"] = torch.randn(6, 4, 16, 16)
    loss, logs = DiffusionStep(student, teacher, stage, lambda: tuple(batch))(*batch.values(), 1 / 6)
    arguments = {"timestep": batch["times"], "class_labels": batch["class_labels"]}
    said, wanted = (model(batch["noisy"], **arguments).sample[:, :4] for model in (student, teacher))
    match, own = (said - wanted).square().mean(), (said - batch["target"]).square().mean()
    torch.testing.assert_close(loss, match + 0.25 * own)
    torch.testing.assert_close((logs["match"], logs["denoise"]), (match.detach(), own.detach()))


@pytest.mark.parametrize("family", list(PIPELINES))
def test_without_data_from_pipeline_to_pipeline(family, tmp_path):
    """Transfer, LoRA, everything: what moves, that it is one pipeline on disk, and that a second call finds it."""
    teacher, student = PIPELINES[family](), converted(family)
    before = copy.deepcopy(student.transformer.state_dict())
    common = {"batch_size": 2, "sampling_steps": 2, "size": SIZES[family]}
    stages = [
        DiffusionStage("transfer", "transfer", 2, 1e-2, trainable="mhla", **common),
        DiffusionStage("lora", "prediction", 2, 1e-3, trainable="lora", lora_rank=2, **common),
    ]
    data = None if family == "dit" else ["a cat", "a dog walks"]
    out = mhla_hf.distill(student, teacher, out=tmp_path / "a", data=data, stages=stages, progress=False)
    assert out is student
    after = student.transformer.state_dict()
    assert list(after) == list(before)
    moved = {name for name, value in after.items() if not torch.equal(value, before[name])}
    block = next(name for name in after if ".mhla." in name).split(".attn1")[0]
    projections = {f"{block}.attn1.{name}.weight" for name in ("to_q", "to_k", "to_v", "to_out.0")}
    assert projections <= moved
    assert all(name in projections or ".mhla." in name for name in moved)
    assert any(".mhla." in name for name in moved)
    assert {value.requires_grad for value in student.transformer.parameters()} == {True}

    assert (tmp_path / "a" / "model_index.json").is_file()
    again = converted(family)
    mhla_hf.distill(again, teacher, out=tmp_path / "a", data=data, stages=stages, progress=False)
    torch.testing.assert_close(again.transformer.state_dict(), after, rtol=0, atol=0)
    assert generate(again).isfinite().all()
    record = json.loads((tmp_path / "a" / "train.json").read_text())
    assert (record["task"], record["samples"]) == ("diffusion", 8)
    assert record["data"]["kind"] == "trajectories"


def test_folder_dataset_and_tensors_are_one_data(tmp_path):
    table = latents()
    (tmp_path / "latents").mkdir()
    for number, part in enumerate((slice(0, 4), slice(4, 6))):
        part = {key: value[part].contiguous() for key, value in table.items()}
        save_file(part, tmp_path / "latents" / f"{number}.safetensors")
    dataset = datasets.Dataset.from_dict({key: value.tolist() for key, value in table.items()})
    sources = {"folder": tmp_path / "latents", "dataset": dataset.with_format("torch"), "tensors": table}
    stage = DiffusionStage("m", "prediction", 4, 1e-3, batch_size=4, data_weight=0.5)
    for name, data in sources.items():
        distil(tmp_path / name, [TRANSFER, stage], data)
    assert weights(tmp_path / "folder") == weights(tmp_path / "dataset") == weights(tmp_path / "tensors")
    assert {"match", "denoise"} <= set(history(tmp_path / "folder")[-1])
    columns = [open_latents(data).columns for data in sources.values()]
    assert columns == [("class_labels",)] * 3


def test_texts_beside_latents(tmp_path):
    """Prompts as texts and prompts as the pipeline encodes them train the same."""
    pipe, prompts = PIPELINES["wan"](), ["a cat", "a dog", "a cat walks"]
    clean = torch.randn(3, 16, 3, 8, 10, generator=torch.Generator().manual_seed(0))
    embeds = pipe.encode_prompt(prompts, max_sequence_length=512)[0]
    stage = DiffusionStage("m", "denoising", 2, 1e-3, batch_size=3, grad_accum=3, size=SIZES["wan"], drop_condition=0.5)
    texts = datasets.Dataset.from_dict({"latents": clean.tolist(), "prompt": prompts}).with_format("torch")
    for name, data in (("texts", texts), ("embeds", {"latents": clean, "prompt_embeds": embeds})):
        options = {"out": tmp_path / name, "data": data, "stages": [stage], "progress": False, "log_every": 1}
        mhla_hf.distill(converted("wan"), **options)
    texts, embeds = (history(tmp_path / name) for name in ("texts", "embeds"))
    assert [entry["loss"] for entry in texts] == pytest.approx([entry["loss"] for entry in embeds], rel=1e-4)


def test_bare_transformer_with_the_teachers_pipeline(tmp_path):
    student = converted("dit").transformer
    assert distil(tmp_path / "a", [MATCH], student=student) is student
    again = type(student).from_pretrained(tmp_path / "a")
    torch.testing.assert_close(again.state_dict(), student.state_dict(), rtol=0, atol=0)


def test_a_pipeline_whose_transformer_was_converted_alone_is_saved_as_mhla(tmp_path):
    student = PIPELINES["dit"]()
    mhla_hf.convert(student.transformer, layout=(2, 2))
    distil(tmp_path / "a", [TRANSFER], student=student)
    there = DiffusionPipeline.from_pretrained(tmp_path / "a", trust_remote_code=True)
    assert (generate(there) - generate(student)).abs().max() <= 1e-5


def lora_run(out, data=None):
    stages = [
        DiffusionStage("transfer", "transfer", 4, 1e-2, trainable="mhla", **COMMON),
        DiffusionStage("lora", "prediction", 12, 1e-3, trainable="lora", ema=0.9, **COMMON),
    ]
    return distil(out, stages, data)


@pytest.mark.parametrize("data", [None, latents()], ids=["trajectories", "latents"])
def test_killed_run_ends_as_the_whole_one(tmp_path, data):
    """kill -9 in a LoRA stage with a moving average, in the middle of a window of trajectories."""
    lora_run(tmp_path / "whole", data)
    process = FORK.Process(target=lora_run, args=(tmp_path / "out", data))
    process.start()
    state = tmp_path / "out.state"
    while process.is_alive() and not (state / "step-000000008").exists():
        process.join(0.002)
    process.kill()
    process.join()
    assert not (tmp_path / "out").exists()
    lora_run(tmp_path / "out", data)
    assert json.loads((tmp_path / "out" / "train.json").read_text())["resumed"] == 1
    assert weights(tmp_path / "out") == weights(tmp_path / "whole")
    assert history(tmp_path / "out") == history(tmp_path / "whole")


def accumulated(out, parts):
    common = {"batch_size": 4, "grad_accum": parts, "sampling_steps": 2}
    stages = [
        DiffusionStage("transfer", "transfer", 3, 1e-2, trainable="mhla", **common),
        DiffusionStage("match", "prediction", 3, 1e-3, **common),
    ]
    distil(out, stages)


def test_parts_and_processes_change_nothing(tmp_path):
    accumulated(tmp_path / "one", 1)
    accumulated(tmp_path / "parts", 4)
    debug_launcher(accumulated, (tmp_path / "two", 2), num_processes=2)
    one, *others = (history(tmp_path / name) for name in ("one", "parts", "two"))
    for other in others:
        assert [entry["loss"] for entry in one] == pytest.approx([entry["loss"] for entry in other], rel=1e-5)
    file = "transformer/diffusion_pytorch_model.safetensors"
    for name in ("parts", "two"):
        torch.testing.assert_close(
            load_file(tmp_path / "one" / file), load_file(tmp_path / name / file), rtol=1e-3, atol=1e-5
        )


def test_gradient_checkpointing_and_bf16(tmp_path):
    plain = distil(tmp_path / "plain").transformer
    saved = distil(tmp_path / "saved", gradient_checkpointing=True).transformer
    half = distil(tmp_path / "half", mixed_precision="bf16").transformer
    torch.testing.assert_close(plain.state_dict(), saved.state_dict(), rtol=1e-4, atol=1e-6)
    assert not saved.is_gradient_checkpointing
    assert {value.dtype for value in half.parameters()} == {torch.float32}
    torch.testing.assert_close(plain.state_dict(), half.state_dict(), rtol=0.1, atol=0.05)


def test_teacher_in_bf16_and_never_touched(tmp_path):
    teacher = PIPELINES["dit"]().to(torch.bfloat16)
    before = copy.deepcopy(teacher.transformer.state_dict())
    distil(tmp_path / "out", teacher=teacher)
    torch.testing.assert_close(teacher.transformer.state_dict(), before, rtol=0, atol=0)


def test_distillation_learns(tmp_path):
    """Judged on the teacher's prediction under noise that was not trained on."""
    teacher, student, data = PIPELINES["dit"](), converted("dit", layers=[0, 1]), latents(8)
    noise = torch.randn(8, 4, 16, 16, generator=torch.Generator().manual_seed(9))
    noisy, _ = NoiseProcess(teacher.scheduler).mix(data["latents"], noise, 500.0)

    @torch.no_grad()
    def error():
        arguments = noisy, torch.full((8,), 500.0), {"class_labels": data["class_labels"]}
        said, wanted = (predict(pipe.transformer.eval(), *arguments) for pipe in (student, teacher))
        return (said - wanted).square().mean().item()

    before, common = error(), {"batch_size": 8, "drop_condition": 0.0}
    transfer = DiffusionStage("t", "transfer", 40, 1e-2, trainable="mhla", **common)
    distil(tmp_path / "a", [transfer], data, student, teacher)
    between = error()
    match = DiffusionStage("m", "prediction", 60, 1e-3, lr_mhla=1e-2, **common)
    distil(tmp_path / "b", [match], data, student, teacher)
    assert between < 0.95 * before
    assert error() < 0.5 * between


def wan_latents(*shape):
    return {"latents": torch.zeros(2, *shape), "prompt_embeds": torch.zeros(2, 4, 32)}


def two_transformers():
    pipe = converted("wan")
    pipe.transformer_2 = pipe.transformer
    pipe.register_modules(transformer_2=pipe.transformer)
    return pipe


def silent_wan():
    pipe = PIPELINES["wan"]()
    return WanPipeline(None, None, pipe.vae, pipe.scheduler, pipe.transformer)


VIDEO = DiffusionStage("v", "prediction", 1, 1e-3, size=[9, 64, 80])
OWN = DiffusionStage("d", "denoising", 1, 1e-3, size=[9, 64, 80])
BAD = {
    "another VAE": ({"stages": [OWN], "data": wan_latents(8, 3, 8, 10)}, r"are \[8, 3, 8, 10\]; expected \[16, frames"),
    "images for video": (
        {"stages": [OWN], "data": wan_latents(16, 8, 10)},
        r"are \[16, 8, 10\]; expected \[16, frames",
    ),
    "odd sides": ({"stages": [OWN], "data": wan_latents(16, 3, 7, 10)}, r"which the patches \[1, 2, 2\] do not divide"),
    "another size": (
        {"stages": [OWN], "data": wan_latents(16, 3, 8, 8)},
        r"are \[16, 3, 8, 8\], and stage 'd' has size \[9, 64, 80\], latents of \[16, 3, 8, 10\]",
    ),
    "size of an image": ({"stages": [DiffusionStage("v", "prediction", 1, 1e-3, size=[64, 80])]}, "expected 3 numbers"),
    "no size": (
        {"stages": [DiffusionStage("v", "prediction", 1, 1e-3)]},
        "size is None; expected .frames, rows, columns",
    ),
    "no prompts": ({"data": None}, "data: None was given; expected prompts"),
    "empty prompts": ({"data": []}, "expected prompts, at least one"),
    "no file of prompts": ({"data": "none.txt"}, "there is no file 'none.txt'"),
    "no folder": ({"data": "./none"}, "there is no file or folder './none'"),
    "no latents": ({"data": {"pixels": torch.zeros(2, 3)}}, "has no 'latents'; it has pixels"),
    "no texts": ({"data": {"latents": torch.zeros(2, 16, 3, 8, 10)}}, "has no 'prompt_embeds', which the model needs"),
    "uneven": (
        {"data": {"latents": torch.zeros(2, 1), "prompt_embeds": torch.zeros(3, 1)}},
        "expected as many rows each",
    ),
    "loss on data": ({"stages": [OWN]}, "stage 'd' has a loss on data, and there are no latents"),
    "weight on data": (
        {"stages": [DiffusionStage("v", "prediction", 1, 1e-3, size=[9, 64, 80], data_weight=0.5)]},
        "stage 'v' has a loss on data",
    ),
    "no teacher": ({"teacher": None}, "teacher: None was given, and stage 'v'"),
    "no pipeline": (
        {"student": lambda: converted("wan").transformer, "teacher": lambda: tiny_transformer("wan")},
        "neither student nor teacher is a pipeline",
    ),
    "another family": ({"teacher": PIPELINES["sana"]}, "teacher: is a SanaTransformer2DModel, and the student a Wan"),
    "converted teacher": (
        {"stages": [DiffusionStage("t", "transfer", 1, 1e-3, trainable="mhla")], "teacher": lambda: converted("wan")},
        "is an MHLA layer itself",
    ),
    "unconverted": (
        {"student": PIPELINES["wan"], "stages": [DiffusionStage("t", "transfer", 1, 1e-3, trainable="mhla")]},
        "has no MHLA layer",
    ),
    "image to video": ({"student": lambda: tiny_transformer("wan-i2v")}, "student: is an image-to-video model"),
    "two transformers": ({"teacher": two_transformers}, "the pipeline has two transformers, each for its own times"),
    "no text encoder": ({"student": silent_wan, "teacher": silent_wan, "stages": [VIDEO]}, "has no text encoder"),
    "unknown option": ({"tokenizer": 1}, "unknown argument 'tokenizer'"),
    "language recipe": (
        {"stages": None, "recipe": "language"},
        "it is for language, and the student is a model for diff",
    ),
    "language stage": (
        {"stages": [{"name": "a", "loss": "lm", "steps": 1, "lr": 1}]},
        "loss is 'lm'; expected 'transfer'",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_refused_and_nothing_written(tmp_path, monkeypatch, case):
    changes, words = BAD[case]
    monkeypatch.chdir(tmp_path)
    values = {"student": lambda: converted("wan"), "teacher": PIPELINES["wan"], "data": ["a cat"], "stages": [VIDEO]}
    values |= changes
    if values.get("recipe"):
        (tmp_path / "r.yaml").write_text("stages: [{name: a, loss: lm, steps: 1, lr: 1}]\n")
        values["recipe"] = "r.yaml"
    student, teacher = (make and make() for make in (values.pop("student"), values.pop("teacher")))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises((ValueError, TypeError), match=words) as caught:
        mhla_hf.distill(student, teacher, out=tmp_path / "out", progress=False, **values)
    assert "\n" not in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"size": 480}, r"size is 480; expected \[rows, columns\]"),
        ({"size": [0, 4]}, r"size is \[0, 4\]; expected"),
        ({"shift": 0}, "shift is 0; expected a number above 0"),
        ({"timesteps": "cosine"}, "timesteps is 'cosine'; expected None, 'logit-normal' or 'uniform'"),
        ({"drop_condition": 2}, "drop_condition is 2; expected a number from 0 to 1"),
        ({"ema": 1}, "ema is 1; expected a number from 0 to 1"),
        ({"lora_rank": 0}, "lora_rank is 0; expected a whole number of at least 1"),
        ({"loss": "transfer", "trainable": "lora"}, "expected 'mhla' or 'attention'"),
    ],
)
def test_bad_stage(change, words):
    with pytest.raises(ValueError, match=words):
        DiffusionStage(**({"name": "a", "loss": "prediction", "steps": 1, "lr": 1e-3} | change))
