"""Calls recorded from pipelines: they are the trajectory, every family that converts is trained with them, and latents of
models that are conditioned by images train on the same inputs."""

import copy
import functools

import pytest
import torch
from PIL import Image
from tools.tiny_grid_pipelines import BARE_PIPELINES, EDIT, GRID_PIPELINES, kontext_pipeline
from tools.tiny_pipelines import CALLS, PIPELINES, PROMPT, TRANSFORMERS, inputs, tiny_transformer
from tools.tiny_wan_pipelines import IMAGES, SIZE, WAN_DATA, WAN_PIPELINES, picture

import mhla_hf
from mhla_hf.conversion.model_family import family_of
from mhla_hf.training import pipeline_calls
from mhla_hf.training.denoising import NoiseProcess, call, make_arguments
from mhla_hf.training.pipeline_calls import (
    TrajectoryReader,
    collate_calls,
    open_samples,
    recorded,
    sample_calls,
    sample_rows,
)
from mhla_hf.training.recipe import DiffusionStage

COMMON = {"batch_size": 2, "sampling_steps": 2, "guidance": 3.0, "size": SIZE}


def stages(steps=1, **changes):
    common = {**COMMON, **changes}
    return [
        DiffusionStage("transfer", "transfer", steps, 1e-2, trainable="mhla", **common),
        DiffusionStage("match", "prediction", steps, 1e-3, **common),
    ]


def converted(pipe):
    torch.manual_seed(1)
    layout = (1, 2, 2) if family_of(pipe.transformer).kind.axes == 3 else (2, 2)
    return mhla_hf.convert(pipe, layers=[1], layout=layout)


def distill(out, name, data=None, pipelines=WAN_PIPELINES, **options):
    student, teacher = converted(pipelines[name]()), pipelines[name]()
    options = {"stages": stages(), "progress": False, "log_every": 1} | options
    return mhla_hf.distill(student, teacher, out=out, data=data or WAN_DATA[name], **options)


@pytest.mark.parametrize("family", TRANSFORMERS)
def test_calls_of_one_or_two_rows_make_a_batch(family):
    transformer = tiny_transformer(family)
    with torch.no_grad(), recorded(transformer) as calls:
        for seed, batch in enumerate((1, 2)):
            transformer(**inputs(family, seed=seed, batch=batch))
        arguments, constants = collate_calls(calls)
        expected = torch.cat([call(transformer, inputs(family, seed=seed, batch=seed + 1)) for seed in range(2)])
        got = call(transformer, arguments, constants)
    assert len(got) == 3
    assert (got - expected).norm() <= 1e-5 * expected.norm()


WAN = ["i2v", "flf2v", "vace", "v2v", "ti2v"]
EVERY = {**GRID_PIPELINES, **BARE_PIPELINES, "kontext": kontext_pipeline, **{name: WAN_PIPELINES[name] for name in WAN}}


@pytest.mark.parametrize("name", EVERY)
def test_every_family_from_its_pipeline(lab, tmp_path, name):
    if name in WAN:  # what the pipeline takes beside the text conditions the training
        row = WAN_DATA[name][0]
    elif name == "kontext":
        row = EDIT
    else:
        row = {"prompt": PROMPT, **CALLS[type(EVERY[name]()).__name__]}
        row.pop("output_type", None)
    if name == "ltx2":  # some of its calls leave the attention of these blocks out
        row["spatio_temporal_guidance_blocks"] = [0]
    distill(tmp_path / "a", name, data=[row], pipelines=EVERY, stages=stages(size=SIZE if name in WAN else None))
    assert lab.record(tmp_path / "a")["data"]["kind"] == "trajectories"
    assert all(entry["loss"] > 0 for entry in lab.history(tmp_path / "a"))


def latents_of(name):
    """Latents with the conditions that the pipeline makes of the first two rows."""
    pipe = WAN_PIPELINES[name]()
    stage = DiffusionStage("m", "prediction", 1, 1.0, **{**COMMON, "sampling_steps": 1, "guidance": 1.0})
    calls = [sample_calls(pipe, "transformer", pipe.transformer, stage, row, 0)[0] for row in WAN_DATA[name]]
    batch, _ = collate_calls(calls)
    columns = {"latents": batch["hidden_states"][:, :16], "prompt_embeds": batch["encoder_hidden_states"]}
    if name == "vace":
        return {**columns, "control": batch["control_hidden_states"]}, calls
    images = batch["encoder_hidden_states_image"]
    images = images if name == "i2v" else images.unflatten(0, (2, 2))
    return {**columns, "condition": batch["hidden_states"][:, 16:], "image_embeds": images}, calls


@pytest.mark.parametrize("name", ["i2v", "flf2v", "vace"])
def test_latents_with_conditions(lab, tmp_path, name):
    data, calls = latents_of(name)
    transformer = WAN_PIPELINES[name]().transformer
    batch, constants = collate_calls(calls)
    names = {"prompt_embeds": "encoder_hidden_states", "image_embeds": "encoder_hidden_states_image"}
    names |= {"control": "control_hidden_states", "condition": "condition"}
    conditions = {names[key]: value for key, value in data.items() if key != "latents"}
    arguments = make_arguments(transformer, data["latents"], batch["timestep"], conditions)
    with torch.no_grad():
        assert torch.equal(call(transformer, arguments), call(transformer, batch, constants))
    distill(tmp_path / "a", name, data=data)
    assert [entry["loss"] > 0 for entry in lab.history(tmp_path / "a")] == [True, True]
    first = next(key for key in ("control", "condition") if key in data)
    with pytest.raises(
        ValueError, match=f"without {first}, expected a column of this name, which conditions the model"
    ):
        distill(tmp_path / "b", name, data={key: value for key, value in data.items() if key != first})


EXPERTS = ("transformer", "transformer_2")


def test_experts_have_their_own_times():
    pipe = WAN_PIPELINES["a14b"]()
    stage = DiffusionStage("m", "prediction", 1, 1.0, **{**COMMON, "sampling_steps": 4})
    times = {}
    for name in EXPERTS:
        calls = sample_calls(pipe, name, getattr(pipe, name), stage, {"prompt": PROMPT}, 0)
        times[name] = [round(float(arguments["timestep"])) for arguments in calls]
    assert times == {"transformer": [1000, 1000, 858, 858], "transformer_2": [602, 602, 9, 9]}
    random = torch.Generator().manual_seed(0)
    process = NoiseProcess(pipe.scheduler, (800.0, float("inf")))
    assert min(process.draw_time(random, "logit-normal", 1.0) for _ in range(50)) >= 800
    stage = DiffusionStage("m", "prediction", 1, 1.0, **{**COMMON, "sampling_steps": 1})
    with pytest.raises(ValueError, match=r"sampling_steps: got 1 .* none of these steps runs 'transformer_2'"):
        sample_calls(pipe, "transformer_2", pipe.transformer_2, stage, {"prompt": PROMPT}, 0)


NOISE = torch.randn(2, 16, 3, 8, 10, generator=torch.Generator().manual_seed(0))
LATENTS = {"latents": NOISE, "prompt_embeds": torch.zeros(2, 512, 32)}


@pytest.mark.parametrize(
    ("name", "data"), [("i2v", None), ("a14b", None), ("a14b", LATENTS)], ids=["i2v", "a14b", "latents"]
)
def test_killed_run_ends_as_the_whole_one(lab, tmp_path, name, data):
    """In the middle of a trajectory, and on latents; with LoRA and a moving average. Experts are trained in turn."""

    def work(out="out"):
        first, second = stages(2, sampling_steps=4, batch_size=1, ema=0.9)
        second.trainable, second.lora_rank = "lora", 2
        return distill(tmp_path / out, name, data=data, save_every=1, stages=[first, second])

    trained, before = work("whole"), converted(WAN_PIPELINES[name]())
    lab.kill(work, lambda: lab.newest(tmp_path / "out") >= 3)
    assert not (tmp_path / "out").exists()
    work()
    again, record = work(), lab.record(tmp_path / "out")  # the second finds the first, finished
    for part in EXPERTS[: 2 if name == "a14b" else 1]:
        assert lab.weights(tmp_path / "out" / part) == lab.weights(tmp_path / "whole" / part)
        original, wanted, loaded = (getattr(pipe, part).state_dict() for pipe in (before, trained, again))
        torch.testing.assert_close(loaded, wanted, rtol=0, atol=0)
        assert not torch.equal(original["blocks.1.attn1.to_q.weight"], wanted["blocks.1.attn1.to_q.weight"])
    assert lab.history(tmp_path / "out") == lab.history(tmp_path / "whole")
    noises = ["high noise: ", "low noise: "] if name == "a14b" else [""]
    assert [stage["name"] for stage in record["stages"]] == [x + y for x in noises for y in ("transfer", "match")]
    assert (record["steps"], record["samples"], record["resumed"]) == (4 * len(noises), 4 * len(noises), 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]


@pytest.mark.parametrize("name", ["i2v", "a14b", "latents", "dit"])
def test_previews_change_nothing(lab, tmp_path, name):
    data = WAN_DATA.get(name)
    is_image = name == "dit"
    if name == "latents":
        data, name = LATENTS, "wan"
    make = {**WAN_PIPELINES, **PIPELINES}[name]
    for every in (0, 1):
        run = stages(batch_size=1, sampling_steps=4, size=None if is_image else SIZE)[:1]
        options = {"stages": run, "preview_every": every, "tracker": "tensorboard" if every else ""}
        out = tmp_path / str(every)
        mhla_hf.distill(converted(make()), make(), data=data, out=out, progress=False, log_every=1, **options)
    assert lab.weights(tmp_path / "0") == lab.weights(tmp_path / "1")
    files = sorted(path.relative_to(out / "previews").as_posix() for path in (out / "previews").rglob("*.*"))
    ending = "png" if is_image else "gif"
    assert files == [f"{run}step-000000001.{ending}" for run in (["high_noise/"] if name == "a14b" else []) + [""]]
    with Image.open(out / "previews" / files[0]) as image:
        assert getattr(image, "n_frames", 1) == (1 if is_image else SIZE[0])
    events = b"".join(path.read_bytes() for path in (out / "runs").rglob("events*"))
    assert b"preview" in events and not (tmp_path / "0" / "previews").exists()


@torch.no_grad()
@pytest.mark.parametrize("name", ["wan", "a14b"])
def test_previews_of_an_fp32_student_in_a_pipeline_of_bf16(name):
    pipe = {**WAN_PIPELINES, **PIPELINES}[name]().to(torch.bfloat16)
    stage = DiffusionStage("m", "prediction", 1, 1.0, **COMMON)
    assert pipeline_calls.sample_images(pipe, "transformer", pipe.transformer.float(), stage, {"prompt": PROMPT}, 0)


def test_a_folder_of_images(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(2):
        picture(number).save(folder / f"{number}.png")
    rows = ['{"file_name": "0.png", "prompt": "a cat walks"}', '{"file_name": "1.png", "prompt": "a dog"}']
    (folder / "metadata.jsonl").write_text("\n".join(rows))
    source = open_samples(folder)
    assert [source.rows[number]["prompt"] for number in range(2)] == [row["prompt"] for row in IMAGES]
    assert source.rows[1]["image"].tobytes() == picture(1).tobytes()
    source.check(WAN_PIPELINES["i2v"]())
    assert open_samples(copy.deepcopy(IMAGES)).identity == open_samples(IMAGES).identity
    one, other = (open_samples([{"prompt_embeds": torch.full((1, 2), x, dtype=torch.bfloat16)}]) for x in (1, 2))
    assert one.identity != other.identity


REFUSED = [
    ("i2v", ["a cat"], "data: got prompts without 'image', expected all arguments WanImageToVideoPipeline"),
    ("aura-flow", ["a cat"], r"size: got \[9, 64, 80\] in stage 'transfer', expected \[rows, columns\] in pixels"),
    ("i2v", [{"image": 1, "text": "a"}], "with 'text', expected only arguments of WanImageToVideoPipeline"),
    ("ti2v", {"latents": torch.zeros(1, 16, 3, 8, 10), "prompt_embeds": torch.zeros(1, 4, 32)},
        "got latents with a text-and-image-to-video model"),
    ("ltx", {"latents": torch.zeros(1, 8)}, "got latents with MHLALTXVideoTransformer3DModel, expected arguments"),
]  # fmt: skip


@pytest.mark.parametrize("name, data, words", REFUSED)
def test_refused(tmp_path, name, data, words):
    with pytest.raises(ValueError, match=words):
        distill(tmp_path / "a", name, data=data, pipelines={**WAN_PIPELINES, **GRID_PIPELINES})
    assert not list(tmp_path.iterdir())


def test_experts_and_previews_that_do_not_fit_are_refused_before_the_first(lab, tmp_path):
    pipe, latents = converted(WAN_PIPELINES["a14b"]()), latents_of("i2v")[0]
    options = {"out": tmp_path / "a", "data": ["a cat"], "stages": stages(), "progress": False}
    without = converted(WAN_PIPELINES["a14b"]())
    without.register_to_config(boundary_ratio=None)
    for words, call_it in (
        ("teacher: got one transformer, expected a pipeline with two",
            lambda: mhla_hf.distill(pipe, PIPELINES["wan"](), **options)),
        ("boundary_ratio: got None in a pipeline with two", lambda: mhla_hf.distill(without, without, **options)),
        ("without 'image', expected all arguments WanImageToVideoPipeline requires",
            lambda: distill(tmp_path / "a", "i2v", data=latents, preview_every=1)),
        ("preview_every: got a number with a model that makes no images, expected 0",
            lambda: lab.train(tmp_path / "a", preview_every=1)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            call_it()
    assert not list(tmp_path.iterdir())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds other files, expected a new or empty folder"):
        distill(tmp_path / "out", "a14b")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_rows_of_a_batch_have_calls_of_one_kind():
    kinds = [{"height": 1}, {"height": 2}, {"height": 1, "mask": torch.ones(1)}]
    calls = [{"timestep": torch.tensor([time]), **kind} for time in range(4) for kind in kinds]
    sample = functools.partial(sample_rows, lambda _row, seed: [*calls], open_samples(["a", "b"]))
    reader = TrajectoryReader(sample, 1, (0, 0), None)
    seen, orders = [], set()
    for _ in range(12):
        batch = reader.take(2, slice(0, 2))
        seen.append((int(batch["timestep"][0]), reader.constants["height"], "mask" in batch))
        orders.add(tuple(batch["timestep"].tolist()))
    assert len(set(seen)) == 12 and any(one != other for one, other in orders)
    assert reader.state() == {"next": 1, "position": 0}
    calls = [{"hidden_states": torch.zeros(1, side), "num_frames": 1} for side in (2, 3)]
    with pytest.raises(ValueError, match="differ in 'hidden_states' of the transformer, expected the same"):
        collate_calls(calls)
