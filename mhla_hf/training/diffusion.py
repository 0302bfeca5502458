"""The task of diffusion transformers: DiT, PixArt, Sana, Sana Video and Wan, alone or in their pipelines.

Unusual: data may be missing. Then the teacher samples its own trajectories, for given prompts or classes, and the student
learns to say on them what the teacher says. A stage with trainable "lora" merges its adapters when it ends, however it ends.
"""

import contextlib
import hashlib
import inspect
import math

import torch

from ..checkpoints.files import SHARD_SIZE
from ..convert.families import family_of
from .denoising import DiffusionStep, NoiseProcess
from .latents import Classes, LatentReader, Texts, TrajectoryReader, open_latents, read_prompts
from .tasks import Task, bytes_of
from .trainable import mhla_attentions

PROJECTIONS = ("to_q", "to_k", "to_v", "to_out.0")


class DiffusionTask(Task):
    """A transformer of diffusers, or a pipeline of one, which is then saved whole.

    Student and teacher may each be a pipeline or a transformer; one of them has to be a pipeline, for its scheduler.
    """

    name = "diffusion"
    unit = "samples"
    wanted = "a transformer of DiT, PixArt, Sana, Sana Video or Wan, or a pipeline with one"
    without_data = True

    def __init__(self, student, teacher):
        super().__init__(student, teacher)
        self.pipeline = next(
            (model for model in (teacher, student) if _is_pipeline(model)), None
        )  # samples and encodes
        self.student = student.components.get("transformer") if _is_pipeline(student) else student
        self.teacher = teacher.components.get("transformer") if _is_pipeline(teacher) else teacher

    def check(self, stages):
        """As every task; and families, pipelines and widths that do not fit."""
        for name, model in (("student", self.given), ("teacher", self.teacher)):
            inner = self.student if name == "student" else model
            if name == "teacher" and model is None:
                continue
            family = family_of(inner)
            if family is None or not family.conditions:
                raise TypeError(f"{name}: got {type(model).__name__}; expected {self.wanted}")
        if self.pipeline is None:
            raise ValueError("teacher: neither student nor teacher is a pipeline; expected one, for its scheduler")
        if self.pipeline.components.get("transformer_2") is not None:
            raise ValueError(
                "student: the pipeline has two transformers, each for its own times; expected a pipeline with one"
            )
        if not self._is_text_to_video(self.student):
            raise ValueError("student: is an image-to-video model; expected one from text alone")
        self.process = NoiseProcess(self.pipeline.scheduler)
        super().check(stages)
        if any(stage.trainable == "lora" for stage in stages):
            _import_peft()
        if self.teacher is None or not any(stage.needs_teacher for stage in stages):
            return
        kinds = [family_of(model).base for model in (self.student, self.teacher)]
        if kinds[0] != kinds[1]:
            raise ValueError(f"teacher: is a {kinds[1]}, and the student a {kinds[0]}; expected one family")
        channels = [model.config.in_channels for model in (self.student, self.teacher)]
        if channels[0] != channels[1]:
            raise ValueError(f"teacher: takes {channels[1]} channels, and the student {channels[0]}; expected one VAE")

    def open(self, data, stages):
        """Latents, prompts, or None; see `open_latents` and `read_prompts`."""
        family, prompts = family_of(self.student), read_prompts(data)
        text = "encoder_hidden_states" in family.conditions
        latents = open_latents(data) if data is not None and prompts is None else None
        self._check_texts(stages, prompts, latents, text)
        if text:
            conditions = Texts(self._encode, prompts or ())
        else:
            conditions = Classes(self.student.config.num_embeds_ada_norm)
        shapes = [latents.shape if latents else self._shape(stage) for stage in stages]
        for stage, shape in zip(stages, shapes, strict=True):
            if latents is None and (stage.loss == "denoising" or stage.data_weight):
                raise ValueError(f"data: stage {stage.name!r} has a loss on data, and there are no latents; give some")
            self._check_shape(shape, stage, latents)
        if latents is None and self.teacher is None:
            raise ValueError("teacher: None was given, and without latents its trajectories are the data")
        return _Data(latents, prompts, conditions, self.pipeline.scheduler)

    def reader(self, source, stage, number, seed, state):
        """Noised latents, or points of the teacher's trajectories."""
        key = (seed, number)
        if source.latents is not None:
            return LatentReader(source.latents, source.conditions, self.process, stage, key, state)
        teacher = self.teacher, self.pipeline.scheduler
        return TrajectoryReader(teacher, self._shape(stage), source.conditions, stage, key, state, self.progress)

    def take(self, reader, stage, rows):
        """Noisy latents, times, conditions and perhaps targets; the share of a sample in the batch."""
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
        peft = _import_peft()
        names = [f"{attention}.{name}" for attention in mhla_attentions(self.student) for name in PROJECTIONS]
        config = peft.LoraConfig(r=stage.lora_rank, lora_alpha=stage.lora_rank, target_modules=names)
        peft.inject_adapter_in_model(config, self.student)
        try:
            yield
        finally:
            for name, module in list(self.student.named_modules()):
                if isinstance(module, peft.tuners.lora.LoraLayer):
                    module.merge(safe_merge=True)
                    self.student.set_submodule(name, module.get_base_layer())

    def checkpoint_gradients(self, on):
        """diffusers' own."""
        if on:
            self.student.enable_gradient_checkpointing()
        else:
            self.student.disable_gradient_checkpointing()

    def save(self, folder):
        """The pipeline, or the transformer."""
        self.given.save_pretrained(folder, max_shard_size=SHARD_SIZE)

    def bytes_saved(self):
        """Of a pipeline, everything."""
        parts = self.given.components.values() if _is_pipeline(self.given) else [self.given]
        return sum(bytes_of(part) for part in parts if isinstance(part, torch.nn.Module))

    def load(self, folder):
        """From the pipeline's folder, or the transformer's."""
        inner = "transformer" if _is_pipeline(self.given) else None
        trained = type(self.student).from_pretrained(folder, subfolder=inner, dtype=self.student.dtype)
        self.student.load_state_dict(trained.state_dict())

    def _is_text_to_video(self, model):
        own, said = model.config.in_channels, model.config.out_channels
        return said is None or said >= own  # an image comes as further channels; DiT and PixArt say a variance too

    def _check_texts(self, stages, prompts, latents, text):
        if prompts is not None and not text:
            raise ValueError("data: got prompts, and the model knows classes; expected latents, or None")
        known = () if latents is None else latents.columns
        wanted = ("prompt_embeds", "prompt") if text else ("class_labels", "label")
        if latents is not None and not set(wanted) & set(known):
            raise ValueError(
                f"data: {latents.name!r} has no {wanted[0]!r}, which the model needs; it has {', '.join(known) or 'none'}"
            )
        if text and latents is None and prompts is None:
            raise ValueError("data: None was given; expected prompts, a list of texts or a .txt file with one a line")
        dropped = any(stage.drop_condition for stage in stages)
        encodes = self.pipeline.components.get("text_encoder") is not None
        if text and not encodes and (latents is None or "prompt_embeds" not in known or dropped):
            raise ValueError(
                "teacher: the pipeline has no text encoder; expected one, or latents with prompt_embeds and drop_condition 0"
            )

    def _shape(self, stage):
        """Channels and sides of the latents of one sample, from the stage's size in pixels or the model's own."""
        config = self.student.config
        if stage.size is None:
            side = config.get("sample_size")
            if not isinstance(side, int) or len(_patch(self.student)) == 3:
                raise ValueError(f"stage {stage.name!r}: size is None; expected [frames, rows, columns] in pixels")
            return config.in_channels, side, side
        pipe, vae = self.pipeline, self.pipeline.components.get("vae")
        step = getattr(pipe, "vae_scale_factor_spatial", None) or getattr(pipe, "vae_scale_factor", None)
        if step is None:
            step = 2 ** (len(vae.config.block_out_channels) - 1) if vae is not None else 1
        *frames, rows, columns = stage.size
        if len(stage.size) != len(_patch(self.student)):
            raise ValueError(
                f"stage {stage.name!r}: size is {stage.size}; expected {len(_patch(self.student))} numbers for this model"
            )
        frames = [(count - 1) // pipe.vae_scale_factor_temporal + 1 for count in frames]
        return (config.in_channels, *frames, rows // step, columns // step)

    def _check_shape(self, shape, stage, latents):
        """One sentence for latents that are another VAE's, or of a size that the model or the stage does not have."""
        config, patch = self.student.config, _patch(self.student)
        where = f"latents of {latents.name!r}" if latents else f"size of stage {stage.name!r}"
        if len(shape) != len(patch) + 1 or shape[0] != config.in_channels:
            sides = ", ".join(("frames", "rows", "columns")[-len(patch) :])
            raise ValueError(
                f"data: the {where} are {list(shape)}; expected [{config.in_channels}, {sides}], of the model's own VAE"
            )
        if any(side % step for side, step in zip(shape[1:], patch, strict=True)):
            raise ValueError(f"data: the {where} are {list(shape)}, which the patches {list(patch)} do not divide")
        own = config.get("sample_size")
        if family_of(self.student).fixed_size and shape[1:] != (own, own):
            raise ValueError(f"data: the {where} are {list(shape)}; expected sides of {own}, the model's sample_size")
        if latents and stage.size is not None and shape != self._shape(stage):
            raise ValueError(
                f"data: the {where} are {list(shape)}, and stage {stage.name!r} has size {stage.size}, latents of "
                f"{list(self._shape(stage))}"
            )

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
        names, half = family_of(self.student).conditions, len(encoded) // 2
        wished, empty = (dict(zip(names, part, strict=True)) for part in (encoded[:half], encoded[half:]))
        return wished, {key: value[:1] for key, value in empty.items()}


class _Data:
    """What a run of diffusion trains on: latents, or None for the teacher's trajectories."""

    def __init__(self, latents, prompts, conditions, scheduler):
        self.latents, self.prompts, self.conditions = latents, prompts, conditions
        self.scheduler = {key: value for key, value in scheduler.config.items() if not key.startswith("_")}
        self.name = latents.name if latents else "the teacher's trajectories"

    def describe(self):
        """What identifies the data, and the noise process."""
        known = {"kind": "trajectories"} if self.latents is None else self.latents.describe()
        if self.prompts is not None:
            known["prompts"] = hashlib.sha256("\n".join(self.prompts).encode()).hexdigest()[:16]
        return known | {"scheduler": {key: _jsonable(value) for key, value in self.scheduler.items()}}


def _patch(model):
    """The patch size per axis."""
    patch = model.config.patch_size
    return (patch, patch) if isinstance(patch, int) else tuple(patch)


def _jsonable(value):
    """Plain values as they are, others (infinity, arrays) as text."""
    plain = value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value))
    return value if plain else str(value)


def _is_pipeline(model):
    return hasattr(model, "components") and hasattr(model, "scheduler")


def _import_peft():
    try:
        import peft
    except ImportError as error:
        raise ImportError("trainable 'lora' needs peft, which is missing: pip install 'mhla_hf[peft]'") from error
    return peft
