"""Predictions of a diffusion transformer, and the noise process and sampling of the pipeline's scheduler."""

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..conversion.model_family import keep_new_images

PIXELS_PER_LATENT = 8  # of PixArt's VAE

Conditions = dict[str, torch.Tensor]  # keyword arguments of a transformer, [B, ...] each


def make_arguments(
    transformer: Any, noisy: torch.Tensor, times: torch.Tensor, conditions: Conditions
) -> dict[str, Any]:
    """Return the arguments of a diffusion transformer for latents [B, C, (F,) h, w] at `times` [B] (0 to 1,000)."""
    arguments: dict[str, Any] = dict(conditions)
    if (condition := arguments.pop("condition", None)) is not None:  # further channels of image-to-video models
        noisy = torch.cat([noisy, condition], dim=1)
    images = arguments.get("encoder_hidden_states_image")
    if images is not None and images.ndim == 4:  # Wan reads the embeddings [B, 2, L, D] of two images as 2 B rows
        arguments["encoder_hidden_states_image"] = images.flatten(0, 1)
    if scale := transformer.config.get("timestep_scale"):
        times = times * scale
    if getattr(transformer, "use_additional_conditions", False):  # PixArt reads the size of the image in pixels
        height, width = (side * PIXELS_PER_LATENT for side in noisy.shape[-2:])
        ones = torch.ones(len(noisy), 1, device=noisy.device, dtype=transformer.dtype)
        arguments["added_cond_kwargs"] = {
            "resolution": ones * ones.new_tensor([height, width]),
            "aspect_ratio": ones * height / width,
        }
    return {"hidden_states": noisy, "timestep": times, **arguments}


def call(transformer: Any, arguments: Mapping[str, Any], constants: Mapping[str, Any] | None = None) -> torch.Tensor:
    """Return the output in fp32, without tokens of images to edit. Casts all floats but `timestep` to the model's dtype."""
    casts = {
        key: value.to(transformer.dtype)
        for key, value in arguments.items()
        if key != "timestep" and torch.is_tensor(value) and value.is_floating_point()
    }
    arguments = {**arguments, **casts, **(constants or {})}
    output = transformer(**arguments, return_dict=False)
    output = output if isinstance(output, torch.Tensor) else output[0]  # Kandinsky 5 returns no tuple
    return keep_new_images(transformer, output, (), arguments).float()


def predict(transformer: Any, noisy: torch.Tensor, times: torch.Tensor, conditions: Conditions) -> torch.Tensor:
    """Return the prediction, fp32 in the shape of `noisy`, without the variance that DiT and PixArt also predict."""
    return call(transformer, make_arguments(transformer, noisy, times, conditions))[:, : noisy.shape[1]]


class NoiseProcess:
    """The noise process of a scheduler, flow matching or DDPM. Drawn times satisfy `times[0] <= time < times[1]`."""

    def __init__(self, scheduler: Any, times: tuple[float, float] = (0.0, math.inf)) -> None:
        config = scheduler.config
        self.times = times
        self.num_times: int = config.num_train_timesteps
        self.shift = 1.0
        self.prediction: str = config.get("prediction_type", "epsilon")
        if hasattr(scheduler, "scale_noise") or config.get("use_flow_sigmas"):
            self.prediction = "flow_prediction"
        if self.is_flow:
            self.shift = config.get("flow_shift") or config.get("shift") or 1.0
        elif hasattr(scheduler, "alphas_cumprod"):
            self.alphas_cumprod = scheduler.alphas_cumprod.double().cpu()
        else:
            raise ValueError(f"scheduler: got {type(scheduler).__name__}, expected flow matching or alphas_cumprod.")

    @property
    def is_flow(self) -> bool:
        return self.prediction == "flow_prediction"

    def draw_time(self, generator: torch.Generator, distribution: str, shift: float | None) -> float:
        """Draw a time on the scheduler's scale. In flow matching, `shift` (None: the scheduler's) moves it toward noise."""
        shift = self.shift if shift is None else shift
        is_normal = distribution == "logit-normal"
        draw = torch.randn if is_normal else torch.rand
        while True:
            number = draw((), generator=generator, dtype=torch.float64)
            fraction = (number.sigmoid() if is_normal else number).item()
            if self.is_flow:
                time = self.num_times * shift * fraction / (1 + (shift - 1) * fraction)
            else:
                time = float(min(int(fraction * self.num_times), self.num_times - 1))
            if self.times[0] <= time < self.times[1]:
                return time

    def mix(self, clean: torch.Tensor, noise: torch.Tensor, time: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return noisy latents at `time` and the target of the transformer's prediction, both in the shape of `clean`."""
        if self.is_flow:
            sigma = time / self.num_times
            return (1 - sigma) * clean + sigma * noise, noise - clean
        alpha = self.alphas_cumprod[int(time)].item()
        signal_scale, noise_scale = math.sqrt(alpha), math.sqrt(1 - alpha)
        velocity = signal_scale * noise - noise_scale * clean
        target = {"epsilon": noise, "sample": clean, "v_prediction": velocity}[self.prediction]
        return signal_scale * clean + noise_scale * noise, target


@torch.no_grad()
def sample_latents(
    transformer: Any, scheduler: Any, noise: torch.Tensor, conditions: Conditions, unconditional: Conditions | None, *,
    steps: int, guidance: float, generators: Sequence[torch.Generator] | None = None,
    on_step: Callable[[torch.Tensor, float], None] | None = None,
) -> torch.Tensor:  # fmt: skip
    """Sample clean latents from `noise`, both [B, C, (F,) h, w], as a pipeline does. `guidance` 1 means no guidance.

    `on_step(model_input, time)` is called before each step.
    """
    scheduler = copy.deepcopy(scheduler)
    scheduler.set_timesteps(steps, device=noise.device)
    step_options = {"generator": generators} if "generator" in inspect.signature(scheduler.step).parameters else {}
    latents = noise * getattr(scheduler, "init_noise_sigma", 1.0)
    for time in scheduler.timesteps:
        model_input = latents
        if hasattr(scheduler, "scale_model_input"):
            model_input = scheduler.scale_model_input(latents, time)
        if on_step is not None:
            on_step(model_input, float(time))
        times = torch.full((len(noise),), float(time), device=noise.device)
        prediction = predict(transformer, model_input, times, conditions)
        if guidance != 1:
            assert unconditional is not None
            baseline = predict(transformer, model_input, times, unconditional)
            prediction = baseline + guidance * (prediction - baseline)
        latents = scheduler.step(prediction, time, latents, return_dict=False, **step_options)[0]
    return latents
