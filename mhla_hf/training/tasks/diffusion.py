"""The task of diffusion transformers, alone or in a pipeline. Their `Family` must have `conditions`.

Without latents, the teacher samples trajectories for given prompts or random classes, and the student is trained on their
points.
"""

import contextlib
import inspect
import math
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ...checkpoints.fingerprint import hash_json
from ...conversion.model_family import family_of
from ...data import Reader
from ...models.families import DIFFUSION, Family
from ..adapters import import_peft
from ..datasets.latents import (
    ClassConditions,
    LatentReader,
    Latents,
    TextConditions,
    TrajectoryReader,
    open_latents,
    read_prompts,
)
from ..denoising import Conditions, NoiseProcess, predict
from ..recipe import DiffusionStage
from ..trainable import find_mhla_attentions
from .base import LossAndLogs, Objective, Task

AXES = ("frames", "rows", "columns")
LORA_TARGETS = ("to_q", "to_k", "to_v", "to_out.0")
TRAINABLE_BASES = tuple(family.base for family in DIFFUSION if family.conditions)


class DiffusionObjective(Objective):
    """A diffusion transformer with one of the losses that `DiffusionStage` describes.

    Args:
        student: See `Objective`.
        teacher: See `Objective`.
        stage: See `Objective`.
        get_names: Function that returns the names of the tensors of the current batch, in order: "noisy", "times", the
            names of the conditions, and with data "target".
    """

    def __init__(
        self, student: Any, teacher: Any, stage: DiffusionStage, get_names: Callable[[], Sequence[str]]
    ) -> None:
        super().__init__(student, teacher, stage)
        self.get_names = get_names

    def forward(self, *tensors_and_weight: Any) -> LossAndLogs:
        """Return the loss of a micro-batch, and the values to log.

        Args:
            *tensors_and_weight: The tensors in the order of `get_names()`, then 1 / number of samples in the whole batch.
        """
        tensors = tensors_and_weight[:-1]
        sample_weight = tensors_and_weight[-1]
        batch = dict(zip(self.get_names(), tensors, strict=True))
        noisy = batch.pop("noisy")
        times = batch.pop("times")
        target = batch.pop("target", None)
        if self.stage.loss == "transfer":
            loss = self._transfer_loss(noisy, times, batch) * sample_weight
            return loss, {"loss": loss.detach()}
        logs: dict[str, torch.Tensor] = {}
        total: Any = 0.0
        prediction = predict(self.student, noisy, times, batch)
        if self.stage.loss == "prediction":
            with torch.no_grad():
                teacher_prediction = predict(self.teacher, noisy, times, batch)
            total = _sum_of_means(prediction, teacher_prediction) * sample_weight
            logs["match"] = total.detach()
        if target is not None:
            denoising = _sum_of_means(prediction, target) * sample_weight
            total = total + (self.stage.data_weight if self.stage.loss == "prediction" else 1.0) * denoising
            logs["denoise"] = denoising.detach()
        return total, {"loss": total.detach(), **logs}

    def _transfer_loss(self, noisy: torch.Tensor, times: torch.Tensor, conditions: Conditions) -> torch.Tensor:
        """Return the relative L1 error of attention outputs, summed over layers and samples; see `Objective`.

        The student's attention modules are called with the size of the grid that the tokens form.
        """
        grid = self.student.token_grid(noisy)
        state = self.student.mhla_state

        def call_attention(attention: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self.student.is_gradient_checkpointing:
                return checkpoint(state.run, grid, attention, *args, use_reentrant=False, **kwargs)
            return state.run(grid, attention, *args, **kwargs)

        return self.attention_transfer_loss(
            lambda: predict(self.teacher, noisy, times, conditions), call_attention, torch.abs
        )


def _sum_of_means(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean squared error of each sample, summed over samples."""
    return (prediction - target).square().flatten(1).mean(1).sum()


class DiffusionTask(Task[DiffusionStage]):
    """The task of a diffusers transformer, or of a pipeline with one. A pipeline is saved as a whole.

    Args:
        student: A transformer or a pipeline.
        teacher: A transformer or a pipeline, or None. Student or teacher must be a pipeline, because its scheduler is used.
    """

    name = "diffusion"
    unit = "samples"
    expected_model = f"a {', '.join(TRAINABLE_BASES)} or a pipeline with one"
    trains_without_data = True

    def __init__(self, student: Any, teacher: Any) -> None:
        super().__init__(student, teacher)
        self.student, self.teacher = (getattr(model, "transformer", model) for model in (student, teacher))
        self.pipeline: Any = next((model for model in (teacher, student) if hasattr(model, "scheduler")), None)
        self.names: tuple[str, ...] = ()  # names of the tensors in the current batch

    def check(self, stages: Sequence[DiffusionStage]) -> None:
        """Check student, teacher and stages; see `Task.check`.

        Also check that families and channels match, that the student or the teacher is a pipeline, and that this pipeline
        has one transformer. Set `condition_names` and `process`, which the other methods use.
        """
        family = self._check_model("student", self.student)
        models = [self.student] if self.teacher is None else [self.student, self.teacher]
        if self.teacher is not None:
            self._check_model("teacher", self.teacher)
        if self.pipeline is None:
            raise ValueError("teacher: got no pipeline as student or teacher, expected one of them, for its scheduler.")
        if self.pipeline.components.get("transformer_2") is not None:
            raise ValueError("student: got a pipeline with two transformers for different times, expected one.")
        config = self.student.config
        if (config.out_channels or math.inf) < config.in_channels:  # the input image takes additional channels
            raise ValueError("student: got an image-to-video model, expected one that generates from text alone.")
        descriptions = [f"{_trainable_family(model).base} of {model.config.in_channels} channels" for model in models]
        if descriptions[0] != descriptions[-1]:
            raise ValueError(f"teacher: got a {descriptions[-1]}, expected a {descriptions[0]} as the student is.")
        self.condition_names = family.conditions
        self.process = NoiseProcess(self.pipeline.scheduler)
        super().check(stages)
        if any(stage.trainable == "lora" for stage in stages):
            import_peft()

    def _check_model(self, argument: str, model: Any) -> Family:
        """Return the family of a model. Raise TypeError if it cannot be trained."""
        family = _trainable_family(model)
        if family is None:
            raise TypeError(f"{argument}: got {type(model).__name__}, expected {self.expected_model}.")
        return family

    def open(self, data: Any, stages: Sequence[DiffusionStage]) -> Any:
        """Open latents (see `open_latents`) or prompts (see `read_prompts`); None means random classes.

        See `Task.open` for the arguments, the result and the errors.
        """
        prompts = read_prompts(data)
        takes_text = "encoder_hidden_states" in self.condition_names
        latents = open_latents(data) if data is not None and prompts is None else None
        self._check_data(stages, prompts, latents, takes_text)
        for stage in stages:
            self._check_shape(self._latent_shape(stage) if latents is None else latents.shape, stage, latents)
        conditions: Any
        if takes_text:
            conditions = TextConditions(self._encode, prompts or ())
        else:
            conditions = ClassConditions(self.student.config.num_embeds_ada_norm)
        scheduler_config = self.pipeline.scheduler.config.items()
        description = {"kind": "trajectories"} if latents is None else latents.describe()
        if prompts is not None:
            description["prompts"] = hash_json(prompts)
        description["scheduler"] = hash_json({key: value for key, value in scheduler_config if not key.startswith("_")})
        return types.SimpleNamespace(
            latents=latents,
            conditions=conditions,
            name="the teacher's trajectories" if latents is None else latents.name,
            describe=lambda: description,
        )

    def reader(
        self, source: Any, stage: DiffusionStage, number: int, seed: int, state: dict[str, Any] | None
    ) -> Reader:
        """Return a reader of noisy latents or, if there are no latents, of points on the teacher's trajectories."""
        key = (seed, number)
        if source.latents is not None:
            return LatentReader(source.latents, source.conditions, self.process, stage, key, state)
        teacher = (self.teacher, self.pipeline.scheduler)
        shape = self._latent_shape(stage)
        return TrajectoryReader(teacher, shape, source.conditions, stage, key, state, self.show_bars)

    def take(
        self, reader: Any, stage: DiffusionStage, rows: slice
    ) -> tuple[tuple[torch.Tensor, ...], tuple[float, ...]]:
        """Return the arguments of `DiffusionObjective.forward`, and store the names of the tensors for it."""
        batch = reader.take_rows(stage.batch_size, rows)
        self.names = tuple(batch)
        return tuple(batch.values()), (1 / stage.batch_size,)

    def objective(self, stage: DiffusionStage) -> Objective:
        """Return the module that computes the loss of `stage`."""
        return DiffusionObjective(self.student, self.teacher, stage, lambda: self.names)

    @contextlib.contextmanager
    def prepare(self, stage: DiffusionStage) -> Iterator[None]:
        """Context manager that adds LoRA to the student if `stage` trains it, and merges it at the end.

        It also puts the student in eval mode, because in training mode DiT would randomly drop labels that the teacher
        sees. The mode is not restored.
        """
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
        """Turn gradient checkpointing of the student on or off."""
        if enabled:
            self.student.enable_gradient_checkpointing()
        else:
            self.student.disable_gradient_checkpointing()

    def _check_data(
        self, stages: Sequence[DiffusionStage], prompts: list[str] | None, latents: Latents | None, takes_text: bool
    ) -> None:
        """Raise ValueError if the data do not suit the model, a loss needs latents instead, or texts cannot be encoded."""
        columns = () if latents is None else latents.columns
        condition_columns = ("prompt_embeds", "prompt") if takes_text else ("class_labels", "label")
        if latents is not None and not set(condition_columns) & set(columns):
            raise ValueError(
                f"data: got {latents.name!r} without {condition_columns[0]!r}, "
                "expected the column, which conditions the model."
            )
        if latents is None and takes_text and prompts is None:
            raise ValueError("data: got None with a model of texts, expected latents or a list of prompts.")
        if latents is None and not takes_text and prompts is not None:
            raise ValueError("data: got prompts with a model of classes, expected latents or None.")
        data_losses = [stage.name for stage in stages if stage.loss == "denoising" or stage.data_weight]
        if latents is None and data_losses:
            raise ValueError(f"data: got no latents, expected some for the loss on data in stage {data_losses[0]!r}.")
        encodes = "prompt_embeds" not in columns or any(stage.drop_condition for stage in stages)
        if takes_text and encodes and self.pipeline.components.get("text_encoder") is None:
            raise ValueError(
                "teacher: got a pipeline without text encoder, expected "
                "one, or latents with prompt_embeds and drop_condition 0."
            )

    def _latent_shape(self, stage: DiffusionStage) -> tuple[int, ...]:
        """Return the shape of a sample's latents: (channels, rows, columns), for video (channels, frames, rows, columns).

        It is computed from the stage's size in pixels or, without one, the model's `sample_size`. Raise ValueError if the
        size does not have as many axes as the model.
        """
        config = self.student.config
        pipeline = self.pipeline
        num_axes = len(_patch_size(self.student))
        if stage.size is None and num_axes == 2 and isinstance(config.get("sample_size"), int):
            return config.in_channels, config.sample_size, config.sample_size
        if stage.size is None or len(stage.size) != num_axes:
            raise ValueError(
                f"size: got {stage.size} in stage {stage.name!r}, expected "
                f"[{', '.join(AXES[-num_axes:])}] in pixels for this model."
            )
        scale = getattr(pipeline, "vae_scale_factor_spatial", None) or getattr(pipeline, "vae_scale_factor", None)
        if scale is None:  # DiT's pipeline has no such attribute
            scale = 2 ** (len(pipeline.vae.config.block_out_channels) - 1)
        rows, columns = stage.size[-2:]
        latent_frames = [(frames - 1) // pipeline.vae_scale_factor_temporal + 1 for frames in stage.size[:-2]]
        return (config.in_channels, *latent_frames, rows // scale, columns // scale)

    def _check_shape(self, shape: tuple[int, ...], stage: DiffusionStage, latents: Latents | None) -> None:
        """Raise ValueError if the shape of the latents does not fit the model or the stage."""
        config = self.student.config
        patch_size = _patch_size(self.student)
        sample_size = config.get("sample_size")
        fixed_size = _trainable_family(self.student).fixed_size
        expected = None
        if len(shape) != len(patch_size) + 1 or shape[0] != config.in_channels:
            axes = ", ".join(AXES[-len(patch_size) :])
            expected = f"[{config.in_channels}, {axes}], of the model's own VAE"
        elif any(side % patch for side, patch in zip(shape[1:], patch_size, strict=True)):
            expected = f"sides that the patches {list(patch_size)} divide"
        elif fixed_size and shape[1:] != (sample_size, sample_size):
            expected = f"sides of {sample_size}, the model's sample_size"
        elif latents is not None and stage.size is not None and shape != self._latent_shape(stage):
            expected = f"{list(self._latent_shape(stage))}, by the stage's size"
        if expected:
            raise ValueError(f"data: got latents {list(shape)} for stage {stage.name!r}, expected {expected}.")

    @torch.no_grad()
    def _encode(self, texts: list[str]) -> tuple[Conditions, Conditions]:
        """Encode B texts with the pipeline. Its text encoder is on the student's device only for that.

        Returns:
            The conditions of the texts, [B, ...] each, and those of the empty prompt, [1, ...] each.
        """
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
        half = len(encoded) // 2
        conditions = dict(zip(self.condition_names, encoded[:half], strict=True))
        empty = dict(zip(self.condition_names, encoded[half:], strict=True))
        return conditions, {key: value[:1] for key, value in empty.items()}


def _trainable_family(model: Any) -> Any:
    """Return the model's family if it can be trained, that is, if it has `conditions`; else None."""
    family = family_of(model)
    return family if family is not None and family.conditions else None


def _patch_size(model: Any) -> tuple[int, ...]:
    """Return the patch size of a diffusion transformer along each axis."""
    patch_size = model.config.patch_size
    return (patch_size, patch_size) if isinstance(patch_size, int) else tuple(patch_size)
