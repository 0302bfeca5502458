"""Noise processes, trajectories and losses of diffusion against their definitions."""

import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from tools.tiny_pipelines import CALLS, PIPELINES

import mhla_hf
from mhla_hf.conversion.model_family import family_of
from mhla_hf.training.datasets.latents import make_generator
from mhla_hf.training.denoising import NoiseProcess, sample_latents
from mhla_hf.training.recipe import DiffusionStage
from mhla_hf.training.tasks.diffusion import DiffusionObjective

UNIPC = UniPCMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=5.0)


@pytest.mark.parametrize("prediction", ["epsilon", "sample", "v_prediction"])
def test_ddpm_is_the_schedulers(prediction):
    scheduler, time = DDPMScheduler(prediction_type=prediction), torch.tensor([371])
    clean, noise = torch.randn(2, 1, 4, 8, 8)
    noisy, target = NoiseProcess(scheduler).mix(clean, noise, 371.0)
    torch.testing.assert_close(noisy, scheduler.add_noise(clean, noise, time))
    wanted = {"epsilon": noise, "sample": clean, "v_prediction": scheduler.get_velocity(clean, noise, time)}
    torch.testing.assert_close(target, wanted[prediction])


@pytest.mark.parametrize(("scheduler", "shift"), [(FlowMatchEulerDiscreteScheduler(shift=3.0), 3.0), (UNIPC, 5.0)])
def test_flow_is_the_schedulers(scheduler, shift):
    process = NoiseProcess(scheduler)
    assert (process.is_flow, process.shift) == (True, shift)
    scheduler.set_timesteps(7)
    clean, noise = torch.randn(2, 1, 4, 8, 8)
    for time, sigma in zip(scheduler.timesteps, scheduler.sigmas, strict=False):
        noisy, target = process.mix(clean, noise, 1000 * sigma.item())
        torch.testing.assert_close(noisy, (1 - sigma) * clean + sigma * noise)
        torch.testing.assert_close(target, noise - clean)
        assert time == pytest.approx(1000 * sigma.item(), abs=1)


def test_times_are_logit_normal_and_shifted():
    process = NoiseProcess(FlowMatchEulerDiscreteScheduler(shift=3.0))
    draws = torch.tensor([process.draw_time(make_generator(0, i), "logit-normal", None) for i in range(2000)])
    logits = (draws / 1000 / (3 - 2 * draws / 1000)).logit()
    assert (logits.mean(), logits.std()) == (pytest.approx(0.0, abs=0.07), pytest.approx(1.0, abs=0.07))
    draws = [NoiseProcess(DDIMScheduler()).draw_time(make_generator(0, i), "uniform", None) for i in range(2000)]
    assert all(draw == int(draw) for draw in draws)
    assert (min(draws), max(draws)) == (pytest.approx(0, abs=5), pytest.approx(999, abs=5))


@pytest.mark.parametrize("family", ["wan", "wan by UniPC", "sana", "sana-video", "pixart", "dit"])
def test_trajectory_is_what_the_pipeline_samples(family, monkeypatch):
    family, _, other = family.partition(" by ")
    pipe = PIPELINES[family]()
    if other:
        pipe.scheduler = UNIPC
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
        names, half = family_of(pipe.transformer).conditions, len(given) // 2
        wished, nothing = (dict(zip(names, part, strict=True)) for part in (given[:half], given[half:]))
    points = []
    options = {"steps": 4, "guidance": 3.0, "on_step": lambda *point: points.append(point)}
    got = sample_latents(pipe.transformer, pipe.scheduler, start.float(), wished, nothing, **options)
    torch.testing.assert_close(got, wanted.float(), rtol=1e-4, atol=1e-4)
    assert len(points) == 4
    assert torch.equal(points[0][0], start)


def test_prediction_loss_by_hand():
    torch.manual_seed(1)
    teacher = PIPELINES["dit"]().transformer
    student = mhla_hf.convert(PIPELINES["dit"](), layers=[1], layout=(2, 2)).transformer
    batch = {"noisy": torch.randn(6, 4, 16, 16), "times": torch.full((6,), 300.0), "class_labels": torch.arange(6) % 2}
    batch["target"] = torch.randn(6, 4, 16, 16)
    stage = DiffusionStage("m", "prediction", 1, 1e-3, data_weight=0.25)
    loss, logs = DiffusionObjective(student, teacher, stage, lambda: (tuple(batch), {}))(*batch.values(), 1 / 6)
    arguments = {"timestep": batch["times"], "class_labels": batch["class_labels"]}
    said, wanted = (model(batch["noisy"], **arguments).sample[:, :4] for model in (student, teacher))
    match, own = (said - wanted).square().mean(), (said - batch["target"]).square().mean()
    torch.testing.assert_close(loss, match + 0.25 * own)
    torch.testing.assert_close((logs["match"], logs["denoise"]), (match.detach(), own.detach()))
