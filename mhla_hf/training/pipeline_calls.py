"""Sample with diffusers pipelines during training: previews of the student, and trajectories of the teacher.

While the teacher's pipeline samples, the arguments of its transformer are recorded, and the student is trained on them. So
any argument of a pipeline can be training data (images, videos, masks), whatever the pipeline makes of it.
"""

import contextlib
import dataclasses
import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from PIL.Image import Image
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.data import ConcatDataset, StackDataset

from ..checkpoints.fingerprint import hash_json
from ..checkpoints.load import wrap_errors
from ..conversion.grid_fit import move
from ..conversion.model_family import TRANSFORMERS
from ..data import Reader, check_data_path, identify_files, load_split
from .datasets.latents import Batch, Key, Latents, make_generator, read_prompts
from .recipe import DiffusionStage
from .trainable import HALF_DTYPES

Call = dict[str, Any]  # arguments of a transformer for one sample
SHARED_ARGUMENTS = ("padding_mask",)  # of transformers: one tensor [1, ...] for all samples
FRAME_ARGUMENTS = ("num_frames", "frames", "video_length")  # what pipelines call the number of frames
MILLISECONDS_PER_FRAME = 100


@dataclasses.dataclass
class PipelineArguments:
    """A dataset of arguments of a pipeline, such as prompts and images. `identity`, a JSON value, changes with the data."""

    rows: Any
    name: str
    identity: Any

    def check(self, pipeline: Any, stages: Sequence[DiffusionStage] = ()) -> None:
        """Raise ValueError if the pipeline does not take an argument or a stage's size, or requires a further argument."""
        parameters = inspect.signature(type(pipeline).__call__).parameters
        columns, caller = list(self.rows[0]), type(pipeline).__name__
        if unknown := [name for name in columns if name not in parameters]:
            raise ValueError(f"data: got {self.name} with {unknown[0]!r}, expected only arguments of {caller}.")
        named = [value for value in parameters.values() if value.kind is not value.VAR_KEYWORD][1:]
        required = [value.name for value in named if value.default is value.empty]
        if missing := [name for name in required if name not in columns]:
            raise ValueError(f"data: got {self.name} without {missing[0]!r}, expected all arguments {caller} requires.")
        for stage in stages:
            if len(stage.size or ()) == 3 and {*FRAME_ARGUMENTS, "video"}.isdisjoint(parameters):
                got = f"{stage.size} in stage {stage.name!r}"
                raise ValueError(f"size: got {got}, expected [rows, columns] in pixels for {caller}.")

    def describe(self) -> dict[str, Any]:
        return {"kind": "trajectories", "samples": len(self.rows), "source": self.identity}


def open_samples(data: Any) -> Latents | PipelineArguments:
    """Open latents, or arguments with which the teacher's pipeline samples.

    Args:
        data: One of
            - prompts in a list, or in a .txt file, one per line;
            - a list of dicts of the pipeline's arguments;
            - a folder of images with a `metadata.jsonl` or `.csv`, where "file_name" becomes the argument `image`, and
              "last_image_file_name" `last_image`;
            - a folder of safetensors files, each with `latents` [N, C, (F,) h, w], scaled as the model's input, and
              `class_labels` [N], or `prompt_embeds` [N, L, D] and optionally `prompt_attention_mask` [N, L]. Image-to-video
              models also need `condition` [N, channels, F, h, w], the further channels of their input, and with an image
              encoder `image_embeds` [N, L, D]; VACE needs `control` [N, channels, F, h, w];
            - a dict of such tensors;
            - a `datasets.Dataset`, or the id of one on the Hub, "id" or "id:configuration" (split "train"), whose columns
              are such tensors, `latents` and texts `prompt`, or the pipeline's arguments.

            N samples have L tokens each, with embeddings of width D. Latents have C channels, F frames, h rows, w columns.

    Raises:
        ValueError, TypeError, ImportError: The data cannot be opened.
    """
    if isinstance(data, dict):
        columns: dict[str, Any] = {key: value.detach() for key, value in data.items()}
        return Latents(StackDataset(**columns), "a dict of tensors", _identify(columns))
    if isinstance(data, (list, tuple)) and data and all(isinstance(row, Mapping) for row in data):
        return PipelineArguments(list(data), "a list of arguments", hash_json([_identify(row) for row in data]))
    if (prompts := read_prompts(data)) is not None:
        return PipelineArguments([{"prompt": prompt} for prompt in prompts], "prompts", hash_json(prompts))
    if isinstance(data, (str, Path)):
        path, name = check_data_path(data), str(data)
        files = sorted(file for file in path.rglob("*") if file.is_file())
        if latent_files := [file for file in files if file.suffix == ".safetensors"]:
            return Latents(ConcatDataset(list(map(_load_columns, latent_files))), name, identify_files(latent_files))
        if path.exists() and not files:
            raise ValueError(f"data: got {name!r}, which holds no files, expected latents (.safetensors) or images.")
        identity: Any = identify_files(files) or name
        rows = load_split(name, "imagefolder", data_dir=str(path), drop_labels=True) if files else load_split(name)
    elif hasattr(data, "column_names") and hasattr(data, "__getitem__"):
        rows, name, identity = data, "a dataset", getattr(data, "_fingerprint", None)
    else:
        raise TypeError(f"data: got {type(data).__name__}, expected a folder, a dataset, prompts, or tensors.")
    if "latents" in rows.column_names:
        return Latents(rows, name, identity)
    return PipelineArguments(rows, repr(name), identity)


def _load_columns(file: Path) -> StackDataset:
    with wrap_errors(f"data: got {str(file)!r}, expected latents that can be read"):
        tensors: Any = load_file(file)
        return StackDataset(**tensors)


def _identify(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _identify(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_identify(item) for item in value]
    if isinstance(value, Image):
        return [value.mode, list(value.size), hashlib.sha256(value.tobytes()).hexdigest()[:32]]
    if isinstance(value, torch.Tensor):
        numbers = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()  # numpy has no bfloat16
        return [str(value.dtype), list(value.shape), hashlib.sha256(numbers.tobytes()).hexdigest()[:32]]
    return value


class TrajectoryReader(Reader):
    """Reads, for each batch, the next call of one teacher trajectory per row; after the last calls, samples new ones.

    `sample(reader, numbers)` returns a trajectory, a list of calls, for each number. `constants` are the last batch's.
    """

    def __init__(
        self, sample: Callable[..., list[list[Call]]], micro_batches: int, key: Key, state: dict[str, Any] | None
    ) -> None:  # fmt: skip
        super().__init__(key, state)
        self.sample, self.micro_batches = sample, micro_batches
        self.position: int = state["position"] if state else 0  # in a trajectory; `next` counts batches of trajectories
        self.trajectories: list[list[Call]] = []

    def state(self) -> dict[str, Any]:
        return {"next": self.next, "position": self.position}

    def take(self, count: int, rows: slice = slice(None)) -> Batch:
        if not self.trajectories:
            numbers = [self.next * count + row for row in range(*rows.indices(count))]
            for part in numpy.array_split(numbers, self.micro_batches):  # all may be too many to sample at once
                self.trajectories += self.sample(self, part.tolist())
        tensors, self.constants = collate_calls([trajectory[self.position] for trajectory in self.trajectories])
        self.position += 1
        if self.position == len(self.trajectories[0]):
            self.next += 1
            self.position = 0
            self.trajectories = []
        return tensors


def sample_rows(
    sample_row: Callable[[Mapping[str, Any], int], list[Call]], source: PipelineArguments, reader: Reader,
    numbers: Sequence[int],
) -> list[list[Call]]:  # fmt: skip
    """Return the calls that `sample_row(row, seed)` records for rows of the data, for a `TrajectoryReader`.

    Each row's calls are in random order, but the calls at one position of all rows have the same form (see `_same_form`),
    so that they can be collated.
    """
    trajectories = []
    for number in numbers:
        row = source.rows[reader.shuffled(number, len(source.rows))]
        calls = sample_row(row, make_generator(*reader.key, number).initial_seed())
        kinds = [next(index for index, other in enumerate(calls) if _same_form(call, other)) for call in calls]
        order = numpy.random.default_rng((*reader.key, number))
        shuffled = {kind: iter(order.permutation(numpy.flatnonzero(numpy.equal(kinds, kind)))) for kind in kinds}
        batch_order = numpy.random.default_rng((*reader.key, reader.next)).permutation(kinds)
        trajectories.append([calls[next(shuffled[kind])] for kind in batch_order])
    return trajectories


def collate_calls(calls: Sequence[Call]) -> tuple[Batch, Call]:
    """Return the tensors [R, ...] of R calls, and their other arguments, the constants. Refuse calls of different forms."""
    tensors: Batch = {}
    constants: Call = {}
    for name, value in calls[0].items():
        values: list[Any] = [call.get(name) for call in calls]
        if not all(_same_form(value, other) for other in values):
            expected = "the same in all rows of a batch: batch_size 1, or data of one size and prompts of one length"
            raise ValueError(f"data: got samples that differ in {name!r} of the transformer, expected {expected}.")
        if isinstance(value, torch.Tensor):
            tensors[name] = torch.cat(values)
        elif isinstance(value, dict) and all(isinstance(item, torch.Tensor) for item in value.values()):
            constants[name] = {key: torch.cat([row[key] for row in values]) for key in value}
        else:
            constants[name] = tree_map(lambda leaf: leaf.value if isinstance(leaf, Constant) else leaf, value)
    return tensors, constants


@dataclasses.dataclass(eq=False)
class Constant:
    """A tensor that has no axis for samples, such as rotary embeddings."""

    value: torch.Tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and torch.equal(self.value, other.value)


def _same_form(one: Any, other: Any) -> bool:
    """Return whether two calls, or two values of an argument, have tensors of the same shapes and are equal otherwise."""
    (ones, structure), (others, other_structure) = tree_flatten(one), tree_flatten(other)
    return structure == other_structure and all(
        a.shape == b.shape if torch.is_tensor(a) and torch.is_tensor(b) else a == b
        for a, b in zip(ones, others, strict=True)
    )


def _has_rows(value: Any, count: int) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) == count


@contextlib.contextmanager
def recorded(transformer: torch.nn.Module) -> Iterator[list[Call]]:
    """Yield a list, to which each call of `transformer` is appended, split into samples."""
    parameters = inspect.signature(transformer.forward).parameters
    calls: list[Call] = []
    # id of a tensor -> (tensor, copy). The tensor is kept, so that no other gets its id.
    copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def record(_module: Any, args: Any, kwargs: Any) -> None:
        arguments = {**dict(zip(parameters, args, strict=False)), **kwargs}
        arguments.pop("return_dict", None)
        count = len(arguments["hidden_states"])
        rows: list[Call] = [{} for _ in range(count)]
        for name, value in sorted(arguments.items()):  # calls may name them in different orders
            if name == "timestep" and value.numel() == 1:
                value = value.reshape(1).expand(count)
            # Embeddings need not have `count` rows: Wan's have one row for each image, also if a sample has two.
            is_text = name.startswith("encoder_hidden_states") and isinstance(value, torch.Tensor)
            if (is_text or _has_rows(value, count)) and name not in SHARED_ARGUMENTS:
                if is_text and id(value) not in copies:
                    copies[id(value)] = (value, value.to("cpu", copy=True))
                parts = (copies[id(value)][1] if is_text else value.to("cpu", copy=True)).chunk(count)
            elif isinstance(value, list) and len(value) == count and all(isinstance(item, list) for item in value):
                parts = tuple([item] for item in value)  # the sizes of the images of each row
            elif isinstance(value, dict) and value and all(_has_rows(item, count) for item in value.values()):
                parts = tuple({key: item[row : row + 1].cpu() for key, item in value.items()} for row in range(count))
            else:
                parts = (tree_map(lambda leaf: Constant(leaf) if torch.is_tensor(leaf) else leaf, value),) * count
            for row, part in zip(rows, parts, strict=True):
                row[name] = part
        calls.extend(rows)

    with transformer.register_forward_pre_hook(record, with_kwargs=True):
        yield calls


def sample_calls(
    pipeline: Any, component: str, transformer: Any, stage: DiffusionStage, arguments: Mapping[str, Any], seed: int
) -> list[Call]:
    """Sample with `transformer` as the pipeline's `component`, and return its calls, one per step and sample, on the CPU."""
    options = make_options(pipeline, transformer.device, arguments, stage, seed)
    with recorded(transformer) as calls, prepared(pipeline, component, transformer, component == TRANSFORMERS[0]):
        pipeline(**options, output_type="latent")
    if not calls:
        got = f"{stage.sampling_steps} in stage {stage.name!r}"
        raise ValueError(f"sampling_steps: got {got}, expected more: none of these steps runs {component!r}.")
    return calls


@torch.no_grad()
def sample_images(
    pipeline: Any, component: str, transformer: Any, stage: DiffusionStage, arguments: Mapping[str, Any], seed: int
) -> list[Image]:
    """Sample as `sample_calls` does, and return the image, or the frames of the video."""
    options = make_options(pipeline, transformer.device, arguments, stage, seed)
    dtypes = {module.dtype for module in pipeline.components.values() if isinstance(module, torch.nn.Module)}
    half = next((dtype for dtype in HALF_DTYPES if dtype in dtypes), None)
    # A student is trained in fp32, and the other models of its pipeline may be in half precision.
    is_mixed = half is not None and transformer.dtype == torch.float32
    with prepared(pipeline, component, transformer), torch.autocast(transformer.device.type, half, is_mixed):
        result = pipeline(**options, output_type="pil")
    return list(result.frames[0] if hasattr(result, "frames") else result.images[:1])


def save_preview(frames: Sequence[Image], folder: Path, step: int, trackers: Sequence[Any]) -> None:
    """Save an image as .png, or the frames of a video as animated .gif; log them to trackers that take images."""
    folder.mkdir(exist_ok=True)
    file = folder / f"step-{step:09d}.{'gif' if len(frames) > 1 else 'png'}"
    frames[0].save(file, save_all=True, append_images=frames[1:], duration=MILLISECONDS_PER_FRAME, loop=0)
    images = numpy.stack([numpy.asarray(frame.convert("RGB")) for frame in frames])  # [F, H, W, 3]
    for tracker in trackers:
        if hasattr(tracker, "log_images"):
            options = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}
            tracker.log_images({"preview": images}, step=step, **options)


def make_options(
    pipeline: Any, device: torch.device, arguments: Mapping[str, Any], stage: DiffusionStage, seed: int
) -> dict[str, Any]:
    """Return the arguments of a pipeline: the stage's, overridden by a row of the data, and a generator from `seed`."""
    parameters = inspect.signature(type(pipeline).__call__).parameters
    options: dict[str, Any] = {"num_inference_steps": stage.sampling_steps, "guidance_scale": stage.guidance}
    options["use_resolution_binning"] = False  # which would sample at another size
    if stage.size:
        # A pipeline that edits a video takes the number of frames from it; `num_frames` is then dropped below.
        frames = next((name for name in FRAME_ARGUMENTS if name in parameters), FRAME_ARGUMENTS[0])
        options |= dict(zip((frames, "height", "width")[-len(stage.size) :], stage.size, strict=True))
        height, width = stage.size[-2:]
        arguments = dict(arguments)
        for name in ("video", "mask"):  # VACE takes the size from the videos themselves
            video = arguments.get(name)
            if isinstance(video, list) and all(isinstance(image, Image) for image in video):
                arguments[name] = [image.resize((width, height)) for image in video]
    options = {**{name: value for name, value in options.items() if name in parameters}, **arguments}
    return {**move(options, device), "generator": torch.Generator(device).manual_seed(seed)}


class LastCall(Exception):
    """Raised to stop a pipeline that will not call the recorded transformer again."""


@contextlib.contextmanager
def swapped(pipeline: Any, component: str, device: torch.device, stops: bool) -> Iterator[None]:
    """If a pipeline has two transformers (Wan 2.2), keep only the running one on the device, and `component` at the end.

    A sharded transformer always stays there. With `stops`, the first call of the second transformer ends the sampling.
    """
    first, second = (pipeline.components.get(name) for name in TRANSFORMERS)
    if second is None:
        yield
        return

    def use(module: Any, _args: Any = None) -> None:
        other = first if module is second else second
        if device.type != "cpu" and not any(isinstance(parameter, DTensor) for parameter in other.parameters()):
            other.to("cpu")
        module.to(device)

    def use_or_stop(module: Any, _args: Any) -> None:
        if stops:
            raise LastCall
        use(module)

    with first.register_forward_pre_hook(use), second.register_forward_pre_hook(use_or_stop):
        with contextlib.suppress(LastCall):
            yield
        use(first if component == TRANSFORMERS[0] else second)


@contextlib.contextmanager
def prepared(pipeline: Any, component: str, transformer: Any, stops: bool = False) -> Iterator[None]:
    """Let a pipeline sample with `transformer` as `component`, on the transformer's device; then restore the pipeline."""
    device = transformer.device
    # Setting the attribute would record the class of this sharded or trained module in the pipeline's configuration.
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
        with swapped(pipeline, component, device, stops):
            yield
    finally:
        for module, original_device in devices.items():
            module.to(original_device)
        components[component] = original
        components["_progress_bar_config"] = bar or {}
