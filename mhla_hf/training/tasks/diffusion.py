"""The task of diffusion transformers, alone or in a pipeline.

The data are stored latents, for families with `DiffusionFamily.conditions`; arguments of the teacher's pipeline, such as
prompts, for which it samples trajectories; or None, for random classes. Two transformers are trained one after the other.
"""

import contextlib
import functools
import inspect
import math
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ...checkpoints.fingerprint import hash_json
from ...conversion.model_family import TRANSFORMERS, family_of, is_of_diffusers, transformer_family
from ...data import Reader
from ..adapters import import_peft
from ..datasets.latents import ClassConditions, LatentReader, Latents, TextConditions, sample_points
from ..denoising import Conditions, NoiseProcess, call, make_arguments
from ..pipeline_calls import PipelineArguments, TrajectoryReader, open_samples, sample_calls, sample_images, sample_rows
from ..recipe import DiffusionStage
from ..trainable import find_mhla_attentions
from .base import LossAndLogs, Objective, Task, TensorsAndWeights, load_weights

AXES = ("frames", "rows", "columns")
LORA_TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "to_query", "to_key", "to_value", "out_layer")


class DiffusionObjective(Objective):
    """Losses of a diffusion transformer. `get_batch()` returns the batch's tensor names and constant arguments."""

    def __init__(self, student: Any, teacher: Any, stage: Any, get_batch: Callable[[], tuple[Any, Any]]) -> None:
        super().__init__(student, teacher, stage)
        self.get_batch = get_batch

    def forward(self, *tensors_and_weight: Any) -> LossAndLogs:
        """Return the loss of a micro-batch and the values to log; the last argument is the weight of a sample."""
        names, constants = self.get_batch()
        *tensors, sample_weight = tensors_and_weight
        batch: dict[str, Any] = dict(zip(names, tensors, strict=True))
        target = batch.pop("target", None)
        num_channels = None
        if "noisy" in batch:
            noisy = batch.pop("noisy")
            num_channels = noisy.shape[1]  # without the variance that DiT and PixArt also predict
            batch = make_arguments(self.student, noisy, batch.pop("times"), batch)
        if self.stage.loss == "transfer":
            grid, state = self.student.token_grid(**batch, **constants), self.student.mhla_state

            def call_attention(attention: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
                if self.student.is_gradient_checkpointing:
                    return checkpoint(state.run, grid, attention, *args, use_reentrant=False, **kwargs)
                return state.run(grid, attention, *args, **kwargs)

            run_teacher = lambda: call(self.teacher, batch, constants)  # noqa: E731
            loss = self.attention_transfer_loss(run_teacher, call_attention, torch.abs) * sample_weight
            return loss, {"loss": loss.detach()}
        logs: dict[str, torch.Tensor] = {}
        total: Any = 0.0
        prediction = call(self.student, batch, constants)[:, :num_channels]
        if self.stage.loss == "prediction":
            with torch.no_grad():
                teacher_prediction = call(self.teacher, batch, constants)[:, :num_channels]
            total = _sum_of_means(prediction, teacher_prediction) * sample_weight
            logs["match"] = total.detach()
        if target is not None:
            denoising = _sum_of_means(prediction, target) * sample_weight
            total = total + (self.stage.data_weight if self.stage.loss == "prediction" else 1.0) * denoising
            logs["denoise"] = denoising.detach()
        return total, {"loss": total.detach(), **logs}


def _sum_of_means(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (prediction - target).square().flatten(1).mean(1).sum()


class DiffusionTask(Task[DiffusionStage]):
    """The task of a transformer, `component` of a pipeline. If `reads_calls`, batches are recorded teacher calls."""

    name = "diffusion"
    unit = "samples"
    expected_model = "a transformer of diffusers that `convert` takes, or a pipeline with one"
    trains_without_data = True

    def __init__(self, student: Any, teacher: Any, component: str = TRANSFORMERS[0]) -> None:
        super().__init__(student, teacher)
        self.models = (student, teacher)
        self.component = component
        self.student, self.teacher = (getattr(model, component, model) for model in (student, teacher))
        self.pipeline: Any = next((model for model in (teacher, student) if hasattr(model, "scheduler")), None)
        self.student_pipeline = student if hasattr(student, "scheduler") else self.pipeline
        self.has_two_transformers = getattr(self.pipeline, TRANSFORMERS[1], None) is not None
        self.reads_calls = False
        self.batch: tuple[tuple[str, ...], dict[str, Any]] = ((), {})  # see `DiffusionObjective`

    def parts(self) -> tuple[Task, ...]:
        """Return two tasks for Wan 2.2: one for high noise, which saves its transformer alone, and one for low noise."""
        if all(getattr(model, TRANSFORMERS[1], None) is None for model in self.models):
            return (self,)
        for argument, model in zip(("student", "teacher"), self.models, strict=True):
            if model is not None and getattr(model, TRANSFORMERS[1], None) is None:
                raise ValueError(f"{argument}: got one transformer, expected a pipeline with two, for both models.")
        if self.pipeline.config.get("boundary_ratio") is None:
            raise ValueError("boundary_ratio: got None in a pipeline with two transformers, expected a number, 0 to 1.")
        first, last = (type(self)(*self.models, component) for component in TRANSFORMERS)
        first.returned = first.student
        return first, last

    def load(self, folder: Path) -> None:
        """Load the weights that `save` wrote: of a transformer or, in a pipeline, of all up to `self.component`."""
        if self.returned is self.student:
            return super().load(folder)
        for component in TRANSFORMERS[: TRANSFORMERS.index(self.component) + 1]:
            load_weights(getattr(self.returned, component), folder, component)

    def check(self, stages: Sequence[DiffusionStage]) -> None:
        """Also check that families and channels match, and set what the data must have, such as `condition_names`."""
        models = [self.student] if self.teacher is None else [self.student, self.teacher]
        for argument, model in zip(("student", "teacher"), models, strict=False):
            if not is_of_diffusers(model) or family_of(model) is None:
                raise TypeError(f"{argument}: got {type(model).__name__}, expected {self.expected_model}.")
        if self.pipeline is None:
            raise ValueError("teacher: got no pipeline as student or teacher, expected one, for its scheduler.")
        # The softmax class of a converted model; families such as Flux have several.
        bases = [next(x for x in type(model).__mro__ if transformer_family(x) is not None) for model in models]
        channels = [model.config.get("in_channels") for model in models]
        descriptions = [f"{x.__name__} of {count} channels" for x, count in zip(bases, channels, strict=True)]
        if descriptions[0] != descriptions[-1]:
            raise ValueError(f"teacher: got a {descriptions[-1]}, expected a {descriptions[0]} as the student is.")
        family: Any = family_of(self.student)
        self.condition_names, self.fixed_size = family.conditions, family.fixed_size
        self.takes_text = "encoder_hidden_states" in family.conditions
        self.reads_calls = not family.conditions or bool(self._image_columns()) or self.has_two_transformers
        super().check(stages)
        if any(stage.trainable == "lora" for stage in stages):
            import_peft()

    def _image_columns(self) -> list[str]:
        config = self.student.config
        needs = {"condition": _latent_channels(self.student) < (config.get("in_channels") or 0)}
        needs |= {"image_embeds": config.get("image_dim"), "control": config.get("vace_in_channels")}
        return [column for column, is_needed in needs.items() if is_needed]

    def open(self, data: Any, stages: Sequence[DiffusionStage]) -> Any:
        """Open latents or arguments of the pipeline (see `open_samples`); None means random classes."""
        samples = None if data is None else open_samples(data)
        latents = samples if isinstance(samples, Latents) else None
        arguments = samples if isinstance(samples, PipelineArguments) else None
        self._check_data(stages, arguments, latents)
        prompts: list[str] = []
        if arguments is not None:
            # Wan 2.2 5B, which takes a time for each token (`expand_timesteps`), can also start from an image.
            has_token_times = bool(self.pipeline.config.get("expand_timesteps"))
            self.reads_calls = self.reads_calls or has_token_times or list(arguments.rows[0]) != ["prompt"]
            if self.reads_calls:
                arguments.check(self.pipeline, stages)
            else:
                prompts = [row["prompt"] for row in arguments.rows]
        if not self.reads_calls or latents is not None:
            for stage in stages:
                self._check_shape(self._latent_shape(stage) if latents is None else latents.shape, stage, latents)
        classes = ClassConditions(self.student.config.get("num_embeds_ada_norm"))
        conditions = TextConditions(self._encode, prompts) if self.takes_text else classes
        scheduler_config = self.pipeline.scheduler.config.items()
        description = {"kind": "trajectories"} if samples is None else samples.describe()
        description["scheduler"] = hash_json({key: value for key, value in scheduler_config if not key.startswith("_")})
        opened = types.SimpleNamespace(latents=latents, arguments=arguments, conditions=conditions)
        opened.name = "the teacher's trajectories" if latents is None else latents.name
        opened.describe = lambda: description
        return opened

    def reader(
        self, source: Any, stage: DiffusionStage, number: int, seed: int, state: dict[str, Any] | None
    ) -> Reader:
        key, scheduler = (seed, number), self.pipeline.scheduler
        if source.latents is not None:
            times = (0.0, math.inf)  # at which the transformer is used
            if self.has_two_transformers:
                boundary = self.pipeline.config.boundary_ratio * scheduler.config.num_train_timesteps
                times = (boundary, math.inf) if self.component == TRANSFORMERS[0] else (0.0, boundary)
            process = NoiseProcess(scheduler, times)
            return LatentReader(source.latents, source.conditions, process, stage, key, state)
        sample: Any
        if self.reads_calls:
            sample_row = functools.partial(sample_calls, self.pipeline, self.component, self.teacher, stage)
            sample = functools.partial(sample_rows, sample_row, source.arguments)
        else:
            fixed = self.teacher, scheduler, self._latent_shape(stage), source.conditions, stage
            sample = functools.partial(sample_points, *fixed)
        return TrajectoryReader(sample, stage.grad_accum, key, state)

    def previewer(self, source: Any) -> Callable[[DiffusionStage, int], list[Any]]:
        """Return a function that samples for the first row of the data, whose arguments must fit the pipeline."""
        arguments: dict[str, Any] = {"class_labels": [0]}
        if source.arguments is not None:
            arguments = dict(source.arguments.rows[0])
        elif source.latents is not None:  # the class or prompt of the first sample
            condition = source.latents.sample(0)[1]
            names = {"prompt_embeds": "encoder_hidden_states", "prompt_attention_mask": "encoder_attention_mask"}
            arguments = {name: condition[key][None] for name, key in names.items() if key in condition}
            if "class_labels" in condition:
                arguments = {"class_labels": [int(condition["class_labels"])]}
            elif "prompt" in condition:
                arguments = {"prompt": condition["prompt"]}
        PipelineArguments([arguments], source.name, None).check(self.student_pipeline)
        pipeline, component = self.student_pipeline, self.component
        return lambda stage, seed: sample_images(pipeline, component, self.student, stage, arguments, seed)

    def take(self, reader: Any, stage: DiffusionStage, rows: slice) -> TensorsAndWeights:
        batch = reader.take(stage.batch_size, rows)
        self.batch = (tuple(batch), getattr(reader, "constants", {}))
        return tuple(batch.values()), (1 / stage.batch_size,)

    def objective(self, stage: DiffusionStage) -> Objective:
        return DiffusionObjective(self.student, self.teacher, stage, lambda: self.batch)

    @contextlib.contextmanager
    def prepare(self, stage: DiffusionStage) -> Iterator[None]:
        """Set eval mode, because DiT drops labels in training mode. Add a stage's LoRA, and merge it at the end."""
        self.student.eval()
        if stage.trainable != "lora":
            yield
            return
        peft = import_peft()
        attentions = find_mhla_attentions(self.student)
        targets = [f"{attention}.{name}" for attention in attentions for name in LORA_TARGETS]
        config = peft.LoraConfig(r=stage.lora_rank, lora_alpha=stage.lora_rank, target_modules=targets)
        peft.inject_adapter_in_model(config, self.student)
        try:
            yield
        finally:
            for name, module in list(self.student.named_modules()):
                if isinstance(module, peft.tuners.lora.LoraLayer):
                    module.merge(safe_merge=self.has_weights)
                    self.student.set_submodule(name, module.get_base_layer())

    def set_gradient_checkpointing(self, enabled: bool) -> None:
        getattr(self.student, f"{'enable' if enabled else 'disable'}_gradient_checkpointing")()

    def _check_data(
        self, stages: Sequence[DiffusionStage], arguments: PipelineArguments | None, latents: Latents | None
    ) -> None:
        """Raise ValueError if the data do not fit the model or its losses, or if texts cannot be encoded."""
        columns = () if latents is None else latents.columns
        if latents is not None:
            if not self.condition_names:
                got = f"latents with {type(self.student).__name__}"
                raise ValueError(f"data: got {got}, expected arguments of its pipeline, such as prompts.")
            parameters = inspect.signature(type(self.pipeline).__call__).parameters
            if self.pipeline.config.get("expand_timesteps") and "image" in parameters:
                raise ValueError("data: got latents with a text-and-image-to-video model, expected prompts and images.")
            text_columns = ("prompt_embeds", "prompt") if self.takes_text else ("class_labels", "label")
            missing = [column for column in self._image_columns() if column not in columns]
            missing = missing if set(text_columns) & set(columns) else [" or ".join(text_columns)]
            if missing:
                got = f"{latents.name!r} without {missing[0]}"
                raise ValueError(f"data: got {got}, expected a column of this name, which conditions the model.")
        if arguments is None and latents is None and (self.takes_text or self.reads_calls):
            raise ValueError(f"data: got None with {type(self.student).__name__}, expected arguments of its pipeline.")
        if arguments is not None and "class_labels" in self.condition_names:
            raise ValueError("data: got prompts with a class-conditional model, expected latents or None.")
        data_losses = [stage.name for stage in stages if stage.loss == "denoising" or stage.data_weight]
        if latents is None and data_losses:
            reason = f'stage {data_losses[0]!r} has loss "denoising" or a data_weight'
            raise ValueError(f"data: got no latents, expected some, because {reason}.")
        encodes = "prompt_embeds" not in columns or any(stage.drop_condition for stage in stages)
        if arguments is not None:
            encodes = "prompt" in arguments.rows[0]
        if self.takes_text and encodes and self.pipeline.components.get("text_encoder") is None:
            expected = "a text encoder, or latents with prompt_embeds and drop_condition 0"
            raise ValueError(f"teacher: got a pipeline without text encoder, expected {expected}.")

    def _latent_shape(self, stage: DiffusionStage) -> tuple[int, ...]:
        """Return the shape [C, (F,) h, w] of latents at the stage's size or, if it is None, the model's sample size."""
        config, pipeline = self.student.config, self.pipeline
        channels = _latent_channels(self.student)
        num_axes = len(_patch_size(self.student))
        if stage.size is None and num_axes == 2 and isinstance(config.get("sample_size"), int):
            return channels, config.sample_size, config.sample_size
        if stage.size is None or len(stage.size) != num_axes:
            expected = f"[{', '.join(AXES[-num_axes:])}] in pixels for this model"
            raise ValueError(f"size: got {stage.size} in stage {stage.name!r}, expected {expected}.")
        scale = getattr(pipeline, "vae_scale_factor_spatial", None) or getattr(pipeline, "vae_scale_factor", None)
        if scale is None:  # DiT's pipeline has no such attribute
            scale = 2 ** (len(pipeline.vae.config.block_out_channels) - 1)
        rows, columns = stage.size[-2:]
        latent_frames = [(frames - 1) // pipeline.vae_scale_factor_temporal + 1 for frames in stage.size[:-2]]
        return (channels, *latent_frames, rows // scale, columns // scale)

    def _check_shape(self, shape: tuple[int, ...], stage: DiffusionStage, latents: Latents | None) -> None:
        patch_size, channels = _patch_size(self.student), _latent_channels(self.student)
        sample_size = self.student.config.get("sample_size")
        expected = None
        if len(shape) != len(patch_size) + 1 or shape[0] != channels:
            axes = ", ".join(AXES[-len(patch_size) :])
            expected = f"[{channels}, {axes}], of the model's own VAE"
        elif any(side % patch for side, patch in zip(shape[1:], patch_size, strict=True)):
            expected = f"sides divisible by the patch size {list(patch_size)}"
        elif self.fixed_size and shape[1:] != (sample_size, sample_size):
            expected = f"sides of {sample_size}, the model's sample_size"
        elif latents is not None and stage.size is not None and shape != self._latent_shape(stage):
            expected = f"{list(self._latent_shape(stage))}, by the stage's size"
        if expected:
            raise ValueError(f"data: got latents {list(shape)} for stage {stage.name!r}, expected {expected}.")

    @torch.no_grad()
    def _encode(self, texts: list[str]) -> tuple[Conditions, Conditions]:
        pipeline = self.pipeline
        encoder_device = pipeline.text_encoder.device
        pipeline.text_encoder.to(self.student.device)
        arguments = {"prompt": texts, "do_classifier_free_guidance": True, "device": self.student.device}
        accepted = inspect.signature(pipeline.encode_prompt).parameters
        defaults = inspect.signature(type(pipeline).__call__).parameters
        for key in ("max_sequence_length", "complex_human_instruction"):
            if key in accepted and key in defaults:
                arguments[key] = defaults[key].default
        encoded = pipeline.encode_prompt(**arguments)
        pipeline.text_encoder.to(encoder_device)
        conditions = dict(zip(self.condition_names, encoded[: len(encoded) // 2], strict=True))
        empty = dict(zip(self.condition_names, encoded[len(encoded) // 2 :], strict=True))
        return conditions, {key: value[:1] for key, value in empty.items()}


def _latent_channels(model: Any) -> int:
    """Return the number of channels of noisy latents, without those that image-to-video models add; 0 if unknown."""
    in_channels = model.config.get("in_channels") or 0
    return min(in_channels, model.config.get("out_channels") or in_channels)


def _patch_size(model: Any) -> tuple[int, ...]:
    patch_size = model.config.patch_size
    return (patch_size, patch_size) if isinstance(patch_size, int) else tuple(patch_size)
