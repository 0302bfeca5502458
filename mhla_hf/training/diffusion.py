"""The task of diffusion transformers: every family whose record has `conditions`, alone or in a pipeline.

Without latents the teacher samples its own trajectories, for given prompts or classes, and the student learns on them.
"""

import contextlib
import inspect
import math
import types

import torch

from ..checkpoints.fingerprint import hash_json
from ..convert.families import family_of
from ..models.families import DIFFUSION
from .adapters import import_peft
from .denoising import DiffusionStep, NoiseProcess
from .latents import Classes, LatentReader, Texts, TrajectoryReader, open_latents, read_prompts
from .tasks import Task
from .trainable import mhla_attentions

SIDES = ("frames", "rows", "columns")
PROJECTIONS = ("to_q", "to_k", "to_v", "to_out.0")
TRAINED = tuple(family.base for family in DIFFUSION if family.conditions)


class DiffusionTask(Task):
    """A transformer of diffusers, or a pipeline of one, which is then saved whole.

    Student and teacher may each be a pipeline or a transformer; one of them has to be a pipeline, for its scheduler.
    """

    name = "diffusion"
    unit = "samples"
    wanted = f"a {', '.join(TRAINED)} or a pipeline with one"
    without_data = True

    def __init__(self, student, teacher):
        super().__init__(student, teacher)
        self.student, self.teacher = (getattr(model, "transformer", model) for model in (student, teacher))
        self.pipeline = next((model for model in (teacher, student) if hasattr(model, "scheduler")), None)

    def check(self, stages):
        """As every task; and families, pipelines and widths that do not fit."""
        kinds = set()
        for name, model in (("student", self.student), ("teacher", self.teacher)):
            if model is not None or name == "student":
                family = family_of(model)
                if family is None or not family.conditions:
                    raise TypeError(f"{name}: got {type(model).__name__}; expected {self.wanted}")
                kinds.add(f"{family.base} of {model.config.in_channels} channels")
        if self.pipeline is None:
            raise ValueError("teacher: neither student nor teacher is a pipeline; expected one, for its scheduler")
        if self.pipeline.components.get("transformer_2") is not None:
            raise ValueError("student: the pipeline has two transformers, each for its own times; expected one")
        if (self.student.config.out_channels or math.inf) < self.student.config.in_channels:  # the image is channels
            raise ValueError("student: is an image-to-video model; expected one from text alone")
        if len(kinds) > 1:
            raise ValueError(f"teacher: student and teacher are a {' and a '.join(sorted(kinds))}; expected one kind")
        self.conditions, self.process = family_of(self.student).conditions, NoiseProcess(self.pipeline.scheduler)
        super().check(stages)
        if any(stage.trainable == "lora" for stage in stages):
            import_peft()

    def open(self, data, stages):
        """Latents, prompts, or None; see `open_latents` and `read_prompts`."""
        prompts, text = read_prompts(data), "encoder_hidden_states" in self.conditions
        latents = open_latents(data) if data is not None and prompts is None else None
        self._check_data(stages, prompts, latents, text)
        for stage in stages:
            self._check_shape(latents.shape if latents else self._shape(stage), stage, latents)
        conditions = Texts(self._encode, prompts or ()) if text else Classes(self.student.config.num_embeds_ada_norm)
        config = {key: value for key, value in self.pipeline.scheduler.config.items() if not key.startswith("_")}
        known = {"kind": "trajectories"} if latents is None else latents.describe()
        known |= {} if prompts is None else {"prompts": hash_json(prompts)}
        known |= {"scheduler": hash_json(config)}
        name = latents.name if latents else "the teacher's trajectories"
        return types.SimpleNamespace(latents=latents, conditions=conditions, name=name, describe=lambda: known)

    def reader(self, source, stage, number, seed, state):
        key = (seed, number)
        if source.latents is not None:
            return LatentReader(source.latents, source.conditions, self.process, stage, key, state)
        teacher, shape = (self.teacher, self.pipeline.scheduler), self._shape(stage)
        return TrajectoryReader(teacher, shape, source.conditions, stage, key, state, self.progress)

    def take(self, reader, stage, rows):
        batch = reader.take(stage.batch_size, rows)
        self.names = tuple(batch)
        return tuple(batch.values()), (1 / stage.batch_size,)

    def objective(self, stage):
        """The losses "transfer", "prediction" and "denoising"."""
        return DiffusionStep(self.student, self.teacher, stage, lambda: self.names)

    @contextlib.contextmanager
    def prepared(self, stage):
        """In eval mode, because DiT would drop labels that the teacher sees; with adapters if the stage trains some."""
        self.student.eval()
        if stage.trainable != "lora":
            yield
            return
        peft = import_peft()
        names = [f"{attention}.{name}" for attention in mhla_attentions(self.student) for name in PROJECTIONS]
        config = peft.LoraConfig(r=stage.lora_rank, lora_alpha=stage.lora_rank, target_modules=names)
        peft.inject_adapter_in_model(config, self.student)
        try:
            yield
        finally:
            for name, module in list(self.student.named_modules()):
                if isinstance(module, peft.tuners.lora.LoraLayer):
                    module.merge(safe_merge=self.whole)
                    self.student.set_submodule(name, module.get_base_layer())

    def checkpoint_gradients(self, on):
        (self.student.enable_gradient_checkpointing if on else self.student.disable_gradient_checkpointing)()

    def _check_data(self, stages, prompts, latents, text):
        """One sentence if what conditions the model, or what a loss needs, is missing."""
        known = () if latents is None else latents.columns
        wanted = ("prompt_embeds", "prompt") if text else ("class_labels", "label")
        on_data = [stage.name for stage in stages if stage.loss == "denoising" or stage.data_weight]
        encodes = "prompt_embeds" not in known or any(stage.drop_condition for stage in stages)
        if latents is not None and not set(wanted) & set(known):
            raise ValueError(f"data: {latents.name!r} has no {wanted[0]!r}, which the model needs")
        if latents is None and text != (prompts is not None):
            means = "texts, expected latents or prompts, a list" if text else "classes, expected latents or None"
            raise ValueError(f"data: got {'None' if text else 'prompts'}, and the model knows {means}")
        if latents is None and on_data:
            raise ValueError(f"data: stage {on_data[0]!r} has a loss on data, and there are no latents; give some")
        if text and encodes and self.pipeline.components.get("text_encoder") is None:
            also = "or latents with prompt_embeds and drop_condition 0"
            raise ValueError(f"teacher: the pipeline has no text encoder; expected one, {also}")

    def _shape(self, stage):
        """Channels and sides of the latents of one sample, from the stage's size in pixels or the model's own."""
        config, axes, pipe = self.student.config, len(_patch(self.student)), self.pipeline
        if stage.size is None and axes == 2 and isinstance(config.get("sample_size"), int):
            return config.in_channels, config.sample_size, config.sample_size
        if stage.size is None or len(stage.size) != axes:
            sides = ", ".join(SIDES[-axes:])
            raise ValueError(f"stage {stage.name!r}: size is {stage.size}; expected [{sides}] in pixels for this model")
        step = getattr(pipe, "vae_scale_factor_spatial", None) or getattr(pipe, "vae_scale_factor", None)
        if step is None:  # DiT's pipeline says none
            step = 2 ** (len(pipe.vae.config.block_out_channels) - 1)
        *frames, rows, columns = stage.size
        frames = [(count - 1) // pipe.vae_scale_factor_temporal + 1 for count in frames]
        return (config.in_channels, *frames, rows // step, columns // step)

    def _check_shape(self, shape, stage, latents):
        """One sentence for latents that are another VAE's, or of a size that the model or the stage does not have."""
        config, patch = self.student.config, _patch(self.student)
        wrong, own = None, config.get("sample_size")
        if len(shape) != len(patch) + 1 or shape[0] != config.in_channels:
            wrong = f"[{config.in_channels}, {', '.join(SIDES[-len(patch) :])}], of the model's own VAE"
        elif any(side % step for side, step in zip(shape[1:], patch, strict=True)):
            wrong = f"sides that the patches {list(patch)} divide"
        elif family_of(self.student).fixed_size and shape[1:] != (own, own):
            wrong = f"sides of {own}, the model's sample_size"
        elif latents and stage.size is not None and shape != self._shape(stage):
            wrong = f"{list(self._shape(stage))}, by the stage's size"
        if wrong:
            raise ValueError(f"data: the latents for stage {stage.name!r} are {list(shape)}; expected {wrong}")

    @torch.no_grad()
    def _encode(self, texts):
        """Texts as the pipeline encodes them: ({condition: `[B, ...]`}, that of the empty prompt, `[1, ...]`)."""
        pipe = self.pipeline
        pipe.text_encoder.to(self.student.device)
        arguments = {"prompt": texts, "do_classifier_free_guidance": True, "device": self.student.device}
        known, usual = (inspect.signature(call).parameters for call in (pipe.encode_prompt, type(pipe).__call__))
        for key in ("max_sequence_length", "complex_human_instruction"):
            if key in known and key in usual:
                arguments[key] = usual[key].default
        encoded = pipe.encode_prompt(**arguments)
        half = len(encoded) // 2
        wished, empty = (dict(zip(self.conditions, part, strict=True)) for part in (encoded[:half], encoded[half:]))
        return wished, {key: value[:1] for key, value in empty.items()}


def _patch(model):
    """The patch size per axis."""
    patch = model.config.patch_size
    return (patch, patch) if isinstance(patch, int) else tuple(patch)
