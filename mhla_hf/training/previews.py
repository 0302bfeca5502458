"""Pictures and clips that the student makes during training, in the run's folder and in trackers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
from PIL.Image import Image

MILLISECONDS_PER_FRAME = 100


def save_preview(frames: Sequence[Image], folder: Path, name: str) -> Path:
    """Save an image as .png, or the frames of a video as animated .gif, in `folder`. Return the file."""
    folder.mkdir(exist_ok=True)
    file = folder / f"{name}.{'png' if len(frames) == 1 else 'gif'}"
    if len(frames) == 1:
        frames[0].save(file)
    else:
        frames[0].save(file, save_all=True, append_images=frames[1:], duration=MILLISECONDS_PER_FRAME, loop=0)
    return file


def track_preview(frames: Sequence[Image], trackers: Sequence[Any], step: int) -> None:
    """Log the frames as images to all trackers of Accelerate that take images."""
    images = numpy.stack([numpy.asarray(frame.convert("RGB")) for frame in frames])  # [F, H, W, 3]
    for tracker in trackers:
        if hasattr(tracker, "log_images"):
            options = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}
            tracker.log_images({"preview": images}, step=step, **options)
