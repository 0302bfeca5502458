"""Calls of diffusers pipelines during training: they sample the teacher's trajectories and the student's previews."""

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from PIL.Image import Image
from torch.distributed.tensor import DTensor

from ..conversion.grid_fit import move
from ..conversion.model_family import TRANSFORMERS
from .datasets.calls import FRAME_ARGUMENTS, Call, recorded
from .recipe import DiffusionStage
from .trainable import HALF_DTYPES

MILLISECONDS_PER_FRAME = 100


def sample_calls(
    pipeline: Any, component: str, transformer: Any, stage: DiffusionStage, arguments: Mapping[str, Any], seed: int
) -> list[Call]:
    """Sample with a pipeline, with `transformer` as its component; return its calls, one for each sample, on the CPU."""
    device = next(transformer.parameters()).device
    options = make_options(pipeline, device, arguments, stage, seed)
    with (
        prepared(pipeline, component, transformer),
        recorded(transformer) as calls,
        swapped(pipeline, component, device, stops=component == TRANSFORMERS[0]),
    ):
        pipeline(**options, output_type="latent")
    if not calls:
        got = f"{stage.sampling_steps} in stage {stage.name!r}"
        raise ValueError(f"sampling_steps: got {got}, expected enough for a step with {component!r}.")
    return calls


@torch.no_grad()
def sample_images(
    pipeline: Any, component: str, transformer: Any, stage: DiffusionStage, arguments: Mapping[str, Any], seed: int
) -> list[Image]:
    """Sample as `sample_calls` does, and return the image, or the frames of the video."""
    device = next(transformer.parameters()).device
    options = make_options(pipeline, device, arguments, stage, seed)
    dtypes = {module.dtype for module in pipeline.components.values() if isinstance(module, torch.nn.Module)}
    half = next((dtype for dtype in HALF_DTYPES if dtype in dtypes), None)
    # A student is trained in fp32, and the other models of its pipeline may be in half precision.
    is_mixed = half is not None and transformer.dtype == torch.float32
    autocast = torch.autocast(device.type, dtype=half) if is_mixed else contextlib.nullcontext()
    with prepared(pipeline, component, transformer), swapped(pipeline, component, device), autocast:
        result = pipeline(**options, output_type="pil")
    return list(result.frames[0] if hasattr(result, "frames") else result.images[:1])


def save_preview(frames: Sequence[Image], folder: Path, step: int, trackers: Sequence[Any]) -> None:
    """Save an image as .png, or the frames of a video as animated .gif; log them to trackers that take images."""
    folder.mkdir(exist_ok=True)
    file = folder / f"step-{step:09d}"
    if len(frames) == 1:
        frames[0].save(file.with_suffix(".png"))
    else:
        gif = file.with_suffix(".gif")
        frames[0].save(gif, save_all=True, append_images=frames[1:], duration=MILLISECONDS_PER_FRAME, loop=0)
    images = numpy.stack([numpy.asarray(frame.convert("RGB")) for frame in frames])  # [F, H, W, 3]
    for tracker in trackers:
        if hasattr(tracker, "log_images"):
            options = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}
            tracker.log_images({"preview": images}, step=step, **options)


def make_options(
    pipeline: Any, device: torch.device, arguments: Mapping[str, Any], stage: DiffusionStage, seed: int
) -> dict[str, Any]:
    """Return the arguments of a pipeline for a row of the data, which overrides what the stage says."""
    parameters = inspect.signature(type(pipeline).__call__).parameters
    options: dict[str, Any] = {"num_inference_steps": stage.sampling_steps, "guidance_scale": stage.guidance}
    options["use_resolution_binning"] = False  # which would sample at another size
    if stage.size:
        # A pipeline that changes a video takes the number of frames from it.
        frames = next((name for name in FRAME_ARGUMENTS if name in parameters), FRAME_ARGUMENTS[0])
        options |= dict(zip((frames, "height", "width")[-len(stage.size) :], stage.size, strict=True))
        height, width = stage.size[-2:]
        arguments = dict(arguments)
        for name in ("video", "mask"):  # VACE takes the size of its videos from themselves
            video = arguments.get(name)
            if isinstance(video, list) and all(isinstance(image, Image) for image in video):
                arguments[name] = [image.resize((width, height)) for image in video]
    options = {**{name: value for name, value in options.items() if name in parameters}, **arguments}
    return {**move(options, device), "generator": torch.Generator(device).manual_seed(seed)}


class LastCall(Exception):
    """Stops a pipeline that no longer calls the recorded transformer."""


@contextlib.contextmanager
def swapped(pipeline: Any, component: str, device: torch.device, stops: bool = False) -> Iterator[None]:
    """Keep only the transformer in use on the device, if the pipeline has two (Wan 2.2), and none of them is sharded.

    `component` is in use before and after. With `stops`, the pipeline ends where it would call the second one.
    """
    first, second = (pipeline.components.get(name) for name in TRANSFORMERS)
    if second is None:
        yield
        return

    def use(module: Any) -> None:
        other = first if module is second else second
        if device.type != "cpu" and not any(isinstance(parameter, DTensor) for parameter in other.parameters()):
            other.to("cpu")
        module.to(device)

    def swap(module: Any, _args: Any) -> None:
        if module is second and stops:
            raise LastCall
        use(module)

    with contextlib.ExitStack() as stack:
        for module in (first, second):
            stack.enter_context(module.register_forward_pre_hook(swap))
        with contextlib.suppress(LastCall):
            yield
        use(first if component == TRANSFORMERS[0] else second)


@contextlib.contextmanager
def prepared(pipeline: Any, component: str, transformer: Any) -> Iterator[None]:
    """Make a pipeline ready to sample with `transformer`, on its device; at the end, its components are as before."""
    device = next(transformer.parameters()).device
    # The module may be sharded or trained, so it does not become the component that the pipeline saves.
    components = vars(pipeline)
    original, bar = components[component], components.get("_progress_bar_config")
    components[component] = transformer
    pipeline.set_progress_bar_config(disable=True)
    devices = {
        module: next(module.parameters()).device
        for name, module in pipeline.components.items()
        if isinstance(module, torch.nn.Module) and name not in TRANSFORMERS
    }
    try:
        for module in devices:
            module.to(device)
        yield
    finally:
        for module, original_device in devices.items():
            module.to(original_device)
        components[component] = original
        components["_progress_bar_config"] = bar or {}
