"""What a diffusion transformer does: its call, the noise process of its scheduler, the teacher's own trajectories, losses.

The noise process is read from the pipeline's scheduler, so that what is trained is what is sampled.
"""

import copy
import inspect
import math

import torch
from torch.utils.checkpoint import checkpoint

from .tasks import Objective

PIXELS_PER_LATENT = 8  # of PixArt's VAE, for its size conditions


def predict(transformer, noisy, times, condition):
    """What the transformer says of `noisy`: its velocity, noise or clean sample, as it was trained to.

    noisy: `[B, C, (F,) h, w]`. times: `[B]`, on the scheduler's scale (0 to 1,000). condition: dict, of the family's
    `conditions`. Returns float32, the shape of `noisy`; a learned variance (DiT, PixArt) is left out.
    """
    dtype = transformer.dtype
    arguments = {key: value.to(dtype) if value.is_floating_point() else value for key, value in condition.items()}
    if scale := transformer.config.get("timestep_scale"):
        times = times * scale
    if getattr(transformer, "use_additional_conditions", False):  # PixArt's own, of the image's size
        height, width = (side * PIXELS_PER_LATENT for side in noisy.shape[-2:])
        rows = torch.ones(len(noisy), 1, device=noisy.device, dtype=dtype)
        sizes = {"resolution": rows * rows.new_tensor([height, width]), "aspect_ratio": rows * height / width}
        arguments["added_cond_kwargs"] = sizes
    output = transformer(noisy.to(dtype), timestep=times, return_dict=False, **arguments)[0]
    return output[:, : noisy.shape[1]].float()


class NoiseProcess:
    """How clean latents become noisy ones, and what the transformer is asked for: read from a scheduler of diffusers.

    Flow: x_t = (1 - s) x_0 + s noise, velocity = noise - x_0, time = 1,000 s. DDPM: x_t = sqrt(a_t) x_0 + sqrt(1 - a_t)
    noise, asked for noise, sample or velocity as the scheduler's `prediction_type` says.
    """

    def __init__(self, scheduler):
        config = scheduler.config
        self.length, self.shift = config.num_train_timesteps, 1.0
        self.prediction = config.get("prediction_type", "epsilon")
        if hasattr(scheduler, "scale_noise") or config.get("use_flow_sigmas"):  # flow matching's own, or told to be one
            self.prediction = "flow_prediction"
        if self.flow:
            self.shift = config.get("flow_shift") or config.get("shift") or 1.0
        elif hasattr(scheduler, "alphas_cumprod"):
            self.kept = scheduler.alphas_cumprod.double().cpu()
        else:
            raise ValueError(f"scheduler: {type(scheduler).__name__} has neither betas nor a flow; expected one")

    @property
    def flow(self):
        """Whether this is a flow; otherwise it is DDPM."""
        return self.prediction == "flow_prediction"

    def draw_time(self, generator, distribution, shift):
        """One time on the scheduler's scale, by `distribution` ("logit-normal" or "uniform"), then shifted (flow only)."""
        draw, shape = (torch.randn, torch.sigmoid) if distribution == "logit-normal" else (torch.rand, torch.clone)
        share = shape(draw((), generator=generator, dtype=torch.float64)).item()
        if not self.flow:
            return float(min(int(share * self.length), self.length - 1))
        shift = self.shift if shift is None else shift
        return self.length * shift * share / (1 + (shift - 1) * share)

    def mix(self, clean, noise, time):
        """(noisy, what the transformer should say) for `clean` and `noise` of one shape and one `time`."""
        if self.flow:
            share = time / self.length
            return (1 - share) * clean + share * noise, noise - clean
        kept = self.kept[int(time)].item()
        signal, rest = math.sqrt(kept), math.sqrt(1 - kept)
        velocity = signal * noise - rest * clean
        target = {"epsilon": noise, "sample": clean, "v_prediction": velocity}[self.prediction]
        return signal * clean + rest * noise, target


@torch.no_grad()
def trajectory(transformer, scheduler, noise, condition, nothing, *, steps, guidance, generators=None, each=None):
    """Sample as the pipeline does: the latents after `steps` steps of `scheduler`, which is left as it is, float32.

    noise: float32 `[B, C, (F,) h, w]`. condition, nothing: with and without what is wished for, dicts of `[B, ...]`.
    guidance: scale of classifier-free guidance; 1: none. generators: one per row, for schedulers that add noise.
    each: called with (model input, time) before every step.
    """
    scheduler = copy.deepcopy(scheduler)
    scheduler.set_timesteps(steps, device=noise.device)
    noisy = "generator" in inspect.signature(scheduler.step).parameters
    extra = {"generator": generators} if noisy else {}
    latents = noise * getattr(scheduler, "init_noise_sigma", 1.0)
    for time in scheduler.timesteps:
        seen = scheduler.scale_model_input(latents, time) if hasattr(scheduler, "scale_model_input") else latents
        if each is not None:
            each(seen, float(time))
        times = torch.full((len(noise),), float(time), device=noise.device)
        said = predict(transformer, seen, times, condition)
        if guidance != 1:
            without = predict(transformer, seen, times, nothing)
            said = without + guidance * (said - without)
        latents = scheduler.step(said, time, latents, return_dict=False, **extra)[0]
    return latents


class DiffusionStep(Objective):
    """A diffusion transformer with the loss "transfer", "prediction" or "denoising".

    names: gives what the tensors of a batch are, in order: "noisy", "times", the conditions, perhaps "target".
    """

    def __init__(self, student, teacher, stage, names):
        super().__init__(student, teacher, stage)
        self.names = names

    def forward(self, *values):
        """One part of a batch: the tensors that `names` names, then 1 / number of samples in the whole batch."""
        *tensors, row_share = values
        batch = dict(zip(self.names(), tensors, strict=True))
        noisy, times, target = batch.pop("noisy"), batch.pop("times"), batch.pop("target", None)
        if self.stage.loss == "transfer":
            loss = self._transfer(noisy, times, batch) * row_share
            return loss, {"loss": loss.detach()}
        loss, logs, said = 0.0, {}, predict(self.student, noisy, times, batch)
        if self.stage.loss == "prediction":
            with torch.no_grad():
                wanted = predict(self.teacher, noisy, times, batch)
            loss = (said - wanted).square().flatten(1).mean(1).sum() * row_share
            logs["match"] = loss.detach()
        if target is not None:
            own = (said - target).square().flatten(1).mean(1).sum() * row_share
            loss = loss + (self.stage.data_weight if self.stage.loss == "prediction" else 1.0) * own
            logs["denoise"] = own.detach()
        return loss, {"loss": loss.detach(), **logs}

    def _transfer(self, noisy, times, condition):
        grid, state = self.student.token_grid(noisy), self.student.mhla_state

        def attend(attention, *args, **kwargs):
            if self.student.is_gradient_checkpointing:
                return checkpoint(state.run, grid, attention, *args, use_reentrant=False, **kwargs)
            return state.run(grid, attention, *args, **kwargs)

        return self.transfer(lambda: predict(self.teacher, noisy, times, condition), attend, torch.abs)
