"""Pictures and clips that the student makes during training, in the run's folder and in trackers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
from PIL.Image import Image

MILLISECONDS_PER_FRAME = 100


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
