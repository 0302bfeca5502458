"""distill(): one Accelerate loop for everything that is trained here.

A run continues bit for bit after a kill at any moment: the data's order is a function of (seed, stage, step), the learning
rate one of the step, and everything else (weights, moments, random generators, sums not yet logged, the place in a stream)
is in a state that is written aside and renamed. The loop waits for the device only when it logs or saves.
"""

import dataclasses
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TypeVar

import torch
from tqdm import tqdm

from ..checkpoints.file_io import read_json, write_json
from ..checkpoints.load import require_extra, summarize_error
from ..checkpoints.provenance import describe_run
from ..checkpoints.values import read_settings
from .recipe import STAGE_TYPES, Options, Stage, make_stages, read_recipe
from .run_folder import RECORD, RunFolder, identify, unreadable
from .sharding import expose, gather, judge_sharded, load_average, make_accelerator, save_average, sharded
from .tasks import find_task
from .trainable import HALVES, choose_trainable, direct_mixings, dtypes_of, dtypes_to_save, parameter_groups, set_dtypes

logger = logging.getLogger("mhla_hf")
__all__ = ["Stage", "distill"]
Student = TypeVar("Student")


def distill(
    student: Student, teacher: object = None, *, out: str | Path, data: object = None,
    stages: Sequence[object] | None = None, recipe: str | Path | None = None, seed: int = 0,
    mixed_precision: str | None = None, save_dtype: str | torch.dtype | None = None,
    gradient_checkpointing: bool | None = None, save_every: int | None = None, log_every: int | None = None,
    tracker: str | None = None, progress: bool = True, command: str | None = None, **options: object,
) -> Student:  # fmt: skip
    """Train `student` through the stages, from `teacher` or from data alone, and save it to `out`.

    A run that was stopped goes on when the same call is made again; a finished one is loaded, and nothing else happens.

    Args:
        student: a causal language model, a text encoder or an image model of transformers, or a transformer of diffusers or
            a pipeline of one, which is then saved whole; trained in place, in float32, and given back and saved in the
            dtype it came in.
        teacher: the softmax original, with the same layer names and vocabulary, in its own dtype; never changed. Needed by
            the losses that compare with one. Of a diffusion student and teacher one is a pipeline, for its scheduler.
        out: folder to make; while the run goes on its state is in `<out>.state`.
        data: text as `training.data.open_text` takes it, labeled images (`training.pictures.open_pictures`), latents
            (`training.latents.open_latents`); None: the recipe's. Without latents a diffusion teacher samples trajectories,
            for prompts (a list, or a .txt file with one a line) or, given None, for its classes.
        stages: list of stages or dicts; or recipe: a name, a YAML file or a `Recipe`. One of the two.
        seed: whole number from 0 to 2**32 - 1; decides the order of the data and every random choice of the run.
        mixed_precision: "no" (default) or "bf16" (float32 weights, bfloat16 arithmetic).
        save_dtype: "float32", "bfloat16" or "float16" (or torch's) of the saved weights but mixing; None: as they came in.
        gradient_checkpointing: recompute the student's layers in the backward pass. Default False.
        save_every: optimizer steps between two states (100); one is also saved at the end of every stage and on Ctrl-C.
        log_every: optimizer steps between two entries of the history (10).
        tracker: "tensorboard" (into `runs/`) or another that accelerate knows; None or "": none.
        progress: show bars and messages on stderr; where it is no terminal, a line at each `log_every` instead of bars.
        command: the shell line that repeats the run, for the record.
        options: the task's own: for language models and encoders `tokenizer` (saved with the model) and `text_field`; for
            encoders `files` (saved with it, as `checkpoints.save.read_sentence_files` gives them); for image models
            `processor` (saved with the model) and `test` (images whose accuracy enters the history).

    Returns:
        The student; of a run that `accelerate launch` shards by FSDP2 it has the trained weights in the first process only.
        `out/train.json` holds stages, tokens, seconds, losses, versions, hardware and seed.

    Raises:
        ValueError, TypeError, ImportError: one sentence, before anything is written. OSError: writing failed.
        KeyboardInterrupt: on Ctrl-C, after the running step, with the state saved; its text says how to go on.
        After any error the student is as the last step left it.
    """
    given = {
        "mixed_precision": mixed_precision, "gradient_checkpointing": gradient_checkpointing, "save_every": save_every,
        "save_dtype": save_dtype and str(save_dtype).removeprefix("torch."), "log_every": log_every, "tracker": tracker,
    }  # fmt: skip
    task = find_task(student, teacher, options)
    stages, data, options = _resolve(task, stages, recipe, data, seed, given)
    task.check(stages)
    return _train(task, stages, data, options, seed, RunFolder(out), progress, command)


def _train(task, stages, data, options, seed, folder, progress, command):
    """The run, with an Accelerator whose settings, which are global, end with it."""
    with require_extra("distill", "accelerate", "train"):
        import accelerate
    known = [str(kind.value) for kind in accelerate.tracking.get_available_trackers()]
    if options.tracker and options.tracker not in known:
        raise ValueError(f"tracker: got {options.tracker!r}; expected one that is installed, such as {known}")
    fresh = not accelerate.state.PartialState._shared_state
    together = accelerate.DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
    places = {"log_with": options.tracker or None, "project_dir": str(folder.state), "kwargs_handlers": [together]}
    accelerator = make_accelerator(mixed_precision=options.mixed_precision, **places)
    world, precision = accelerator.num_processes, accelerator.mixed_precision
    try:
        if precision not in ("no", "bf16"):
            raise ValueError(f"mixed_precision: the launcher set {precision!r}; expected 'no' or 'bf16'")
        for stage in stages:
            if stage.batch_size % (world * stage.grad_accum):
                shares = f"{world} processes in grad_accum {stage.grad_accum} equal parts each"
                raise ValueError(f"stage {stage.name!r}: batch_size {stage.batch_size} cannot be shared by {shares}")
        source = task.open(data, stages)
        return _Run(accelerator, task, source, stages, options, seed, folder, progress, command).execute()
    finally:
        accelerator.free_memory()
        if fresh:
            accelerate.state.AcceleratorState._reset_state(reset_partial_state=world == 1)


class _Run:
    """One call of `distill`, from its folder to its record."""

    def __init__(self, accelerator, task, source, stages, options, seed, folder, progress, command):
        self.accelerator, self.task, self.student, self.teacher = accelerator, task, task.student, task.teacher
        self.source, self.stages, self.options, self.seed, self.folder = source, stages, options, seed, folder
        self.main, self.command, self.interrupt = accelerator.is_main_process, command, _Interrupt()
        self.progress, redraws = progress and self.main, sys.stderr.isatty() or "ipykernel" in sys.modules
        self.bars = task.progress = self.progress and redraws
        task.whole = self.main or not accelerator.is_fsdp2
        self.total = sum(stage.steps for stage in stages)
        self.at = {"stage": 0, "step": 0, "total": 0, task.unit: 0, "seconds": 0.0, "resumed": 0, "reader": None}
        self.at |= {"sums": {}, "since": 0, "history": []}

    def execute(self):
        """Everything, in order: refuse or recognize the folder, train, save, give back."""
        from accelerate.utils import broadcast_object_list

        dtypes, wanted = dtypes_of(self.student), self.options.save_dtype
        saved = dtypes_to_save(self.student, getattr(torch, wanted) if wanted else None)
        identity = broadcast_object_list([self._identity() if self.main else None])[0]  # others may lack the weights
        latest = self.folder.find(identity, self.student)
        self.accelerator.wait_for_everyone()
        if self.main:
            self.folder.clear() if latest == "finished" else self.folder.begin()
        self.accelerator.wait_for_everyone()
        if latest == "finished":
            set_dtypes(self.student, saved)
            self.task.load(self.folder.out)
            self._say(f"{self.folder.out} is finished already: nothing to do")
            return self.task.given
        flags = {parameter: parameter.requires_grad for parameter in self.student.parameters()}
        was_training = self.student.training
        try:
            with self.interrupt:
                full = {name: torch.float32 for name, dtype in dtypes.items() if dtype in HALVES}
                set_dtypes(self.student, full, self.task.whole)
                self._train(latest, flags)
                set_dtypes(self.student, saved)
                self._finish()
                dtypes = saved
        finally:
            set_dtypes(self.student, dtypes)
            for parameter, flag in flags.items():
                parameter.requires_grad_(flag)
            self.student.train(was_training)
            self.folder.lock.release()
        return self.task.given

    def _train(self, latest, flags):
        import accelerate

        if latest is not None:
            damage = self.folder.damage_of(latest) if self.main else ""
            if damage := accelerate.utils.broadcast_object_list([damage])[0]:
                raise unreadable(latest, damage)
            self.at = read_json(latest / "progress.json")
            self.at["resumed"] += 1
            self._say(f"going on from step {self.at['total']} of {self.total} ({latest})")
        accelerate.utils.set_seed(self.seed, device_specific=True)
        if self.options.tracker:
            init = {"tensorboard": {"purge_step": self.at["total"] + 1}}
            self.accelerator.init_trackers("runs", init_kwargs=init)
        self.student.train()
        if self.options.gradient_checkpointing:
            self.task.checkpoint_gradients(True)
        try:
            for number in range(self.at["stage"], len(self.stages)):
                with self.task.prepared(self.stages[number]):
                    choose_trainable(self.student, self.stages[number], flags)
                    with sharded(self.accelerator, self.task, self.stages[number].needs_teacher):
                        self._stage(number, latest)
                latest = None
        finally:
            for tracker in self.accelerator.trackers:  # end_training would end the process group too
                tracker.finish()
            if self.options.gradient_checkpointing:
                self.task.checkpoint_gradients(False)

    def _stage(self, number, latest):
        """One stage, from its start or from the state in `latest`, to its end, which is saved."""
        stage, accelerator, at = self.stages[number], self.accelerator, self.at
        accelerator.free_memory()
        groups, betas = parameter_groups(self.task.student, stage), (stage.beta1, stage.beta2)
        optimizer = torch.optim.AdamW(groups, betas=betas, eps=stage.eps, fused=True)
        objective = self.task.objective(stage)
        if accelerator.is_fsdp2:
            expose(accelerator, objective, objective.student, objective.student)
        step, optimizer = accelerator.prepare(objective, optimizer)
        trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.average = None
        if stage.ema:
            from diffusers.training_utils import EMAModel

            self.average = EMAModel(trained, decay=stage.ema)
        if latest is not None:
            try:
                self._restore(latest)
            except Exception as error:  # of a damaged file, anything
                raise unreadable(latest, summarize_error(error)) from error
        else:
            at.update(stage=number, step=0, sums={}, since=0)
        reader = self.task.reader(self.source, stage, number, self.seed, at["reader"])
        sums = {key: torch.tensor(value, device=accelerator.device) for key, value in at["sums"].items()}
        clamped = direct_mixings(self.task.student)
        label = f"{stage.name} ({number + 1}/{len(self.stages)})"
        bar = tqdm(total=stage.steps, initial=at["step"], desc=label, unit="step", disable=not self.bars)
        clock, norm = time.monotonic(), None
        try:
            while at["step"] < stage.steps:
                norm = self._step(step, optimizer, trained, reader, stage, sums)
                for mixing in clamped:
                    mixing.data.clamp_(min=0.0)
                if self.average:
                    self.average.step(trained)
                at.update(step=at["step"] + 1, total=at["total"] + 1, since=at["since"] + 1)
                at[self.task.unit] += self.task.count(stage)
                moment = time.monotonic()
                at["seconds"], clock = at["seconds"] + moment - clock, moment
                bar.update()
                stop = self.interrupt.asked and accelerator.num_processes == 1
                done = at["step"] == stage.steps
                if done or at["step"] % self.options.log_every == 0:
                    stop = self._log(stage, sums, norm, optimizer.param_groups[-1]["lr"], bar)
                    sums.clear()
                if done or stop or at["step"] % self.options.save_every == 0:
                    self._save(reader, sums, norm, stage)
                if stop and at["total"] < self.total:
                    step = f"step {at['total']} of {self.total}, which is saved in {self.folder.state}"
                    raise KeyboardInterrupt(f"stopped after {step}; the same command goes on from there")
            at["reader"] = reader.handover()
            if self.average:
                self.average.copy_to(trained)
            if accelerator.is_fsdp2:
                gather(accelerator, step, self.student)
        finally:
            bar.close()
            reader.close()

    def _restore(self, latest):
        """Weights, moments and the average as in the state `latest`; of as many processes, random generators too."""
        from accelerate.utils import load

        self.accelerator.load_state(str(latest))
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        if self.at.get("processes", world) == world:
            random = load(latest / f"random_states_{rank}.pkl")  # load_state would skip a bad one
            if not torch.equal(random["torch_manual_seed"], torch.get_rng_state()):
                raise ValueError("its random states do not fit these versions")
        if self.average:
            load_average(self.accelerator, self.average, latest)

    def _step(self, step, optimizer, trained, reader, stage, sums):
        """One optimizer step; adds what is logged to `sums` and gives the norm of the gradient, if it is clipped."""
        accelerator, norm = self.accelerator, None
        for group in optimizer.param_groups:
            group["lr"] = group["top_lr"] * stage.lr_factor(self.at["step"])
        world, rank = accelerator.num_processes, accelerator.process_index
        own, last = stage.batch_size // world, stage.grad_accum - 1
        tensors, shares = self.task.take(reader, stage, slice(rank * own, (rank + 1) * own))
        shares = [world * share for share in shares]
        for number, part in enumerate(zip(*(tensor.chunk(stage.grad_accum) for tensor in tensors), strict=True)):
            whole = number == last or accelerator.is_fsdp2  # whose gradients would stay unsharded
            with nullcontext() if whole else accelerator.no_sync(step):
                with accelerator.autocast():
                    loss, logs = step(*(tensor.to(accelerator.device) for tensor in part), *shares)
                accelerator.backward(loss)
            for key, value in logs.items():
                sums[key] = sums[key] + value if key in sums else value
        if stage.max_grad_norm:
            clipped = list(step.parameters()) if accelerator.is_fsdp2 else trained  # Accelerate compares the lists
            norm = accelerator.clip_grad_norm_(clipped, stage.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        return norm

    def _log(self, stage, sums, norm, lr, bar):
        """An entry of the history; returns whether any process was asked to stop. The only place that waits."""
        at, device = self.at, self.accelerator.device
        asked = torch.tensor(float(self.interrupt.asked), device=device)
        *means, asked = self.accelerator.reduce(torch.stack([*sums.values(), asked]), reduction="mean").tolist()
        entry = {"stage": stage.name} | {key: at[key] for key in ("step", "total", self.task.unit)}
        entry |= {key: value / at["since"] for key, value in zip(sums, means, strict=True)}
        entry |= {"lr": lr, "seconds": round(at["seconds"], 3)} | ({} if norm is None else {"grad_norm": float(norm)})
        self._refuse_not_finite(stage, entry["loss"], norm)
        if self.accelerator.is_fsdp2:
            entry |= judge_sharded(self.accelerator, self.task)
        elif self.main:
            entry |= self.task.judge()
        at["history"].append(entry)
        at["since"] = 0
        shown = (key for key in (*sums, "lr", "grad_norm") if key in entry)
        self.accelerator.log({f"{stage.name}/{key}": entry[key] for key in shown}, step=at["total"])
        speed = at[self.task.unit] / max(at["seconds"], 1e-9)
        told = {"loss": f"{entry['loss']:.4g}", f"{self.task.unit}/s": f"{speed:,.0f}"}
        bar.set_postfix(told, refresh=False)
        if not self.bars:
            told = ", ".join(f"{name} {value}" for name, value in told.items())
            self._say(
                f"{stage.name} ({at['stage'] + 1}/{len(self.stages)}): step {at['step']} of {stage.steps}, {told}"
            )
        return asked > 0

    def _refuse_not_finite(self, stage, loss, norm):
        norm = float(norm or 0.0)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            found = f"stage {stage.name!r} left the finite numbers before step {self.at['step']}"
            raise ValueError(f"lr: with {stage.lr} {found} (loss {loss}, gradient norm {norm}); expected a smaller lr")

    def _save(self, reader, sums, norm, stage):
        """Write the whole state."""
        from accelerate.utils import broadcast_object_list

        at = self.at
        at["reader"] = reader.state()
        at["processes"] = self.accelerator.num_processes
        at["sums"] = {key: self.accelerator.reduce(value, reduction="mean").item() for key, value in sums.items()}
        self._refuse_not_finite(stage, at["sums"].get("loss", 0.0), norm)
        with self.folder.new_state(at["total"]) if self.main else nullcontext() as own:
            (aside,) = broadcast_object_list([own])
            self.accelerator.save_state(str(aside), safe_serialization=False)
            self.accelerator.wait_for_everyone()
            if self.average:
                save_average(self.accelerator, self.average, aside)
            if self.main:
                write_json(aside / "progress.json", at)
        self.accelerator.wait_for_everyone()

    def _finish(self):
        """The finished model, what belongs to it and the record."""
        self.accelerator.wait_for_everyone()
        if self.main:
            with self.folder.result() as aside:
                self.task.save(aside)
                write_json(aside / RECORD, self._record())
            self._say(f"{self.folder.out} is finished: {self.at['total']} steps in {self.at['seconds']:.0f} s")
        self.accelerator.wait_for_everyone()

    def _record(self):
        at, stages, begun, unit = self.at, [], 0.0, self.task.unit
        for stage in self.stages:
            first, *_, last = [entry for entry in at["history"] if entry["stage"] == stage.name] * 2
            seconds, begun = last["seconds"] - begun, last["seconds"]
            known = {unit: stage.steps * self.task.count(stage), "seconds": round(seconds, 3)}
            known |= {"first_loss": first["loss"], "last_loss": last["loss"]}
            stages.append(dataclasses.asdict(stage) | known)
        return {
            "format_version": 1,
            **{key: self.folder.identity[key] for key in ("seed", "mixed_precision")},
            "processes": self.accelerator.num_processes,
            "task": self.task.name,
            "student": type(self.student).__name__,
            "parameters": self.student.num_parameters(),
            "teacher": self.teacher and _public_name(getattr(self.teacher.config, "_name_or_path", None)),
            "stages": stages,
            "steps": at["total"],
            **{key: at[key] for key in (unit, "resumed", "history")},
            "seconds": round(at["seconds"], 3),
            "data": self.source.describe() | {"name": _public_name(self.source.name)},
            "gradient_checkpointing": self.options.gradient_checkpointing,
            **describe_run(self.command, self.accelerator.device),
            "fingerprint": self.folder.identity,
        }

    def _identity(self):
        """What makes this run this run: whatever would change the trained weights, in the order of refusal."""
        used = any(stage.needs_teacher for stage in self.stages)
        frozen = [name for name, value in self.student.named_parameters() if not value.requires_grad]
        return {
            "seed": self.seed,
            "mixed_precision": self.accelerator.mixed_precision,
            "save_dtype": self.options.save_dtype,
            "sharded": self.accelerator.is_fsdp2 or None,
            "stages": [dataclasses.asdict(stage) for stage in self.stages],
            "data": self.source.describe(),
            "student": identify(self.student, frozen),
            "teacher": identify(self.teacher) if used else None,
        }

    def _say(self, text):
        """Once: to the log where it is heard, else to stderr."""
        if self.main and logger.isEnabledFor(logging.INFO):
            logger.info(text)
        elif self.progress:
            tqdm.write(text, file=sys.stderr)


class _Interrupt:
    """The first Ctrl-C is a wish, heard after the running step; the second stops at once."""

    asked = False

    def __enter__(self):
        main = threading.current_thread() is threading.main_thread()
        self.before = signal.signal(signal.SIGINT, self._ask) if main else None

    def __exit__(self, kind, _value, _trace):
        if self.before is not None:  # SIG_DFL is 0
            signal.signal(signal.SIGINT, self.before)
        if self.asked and kind is None:
            raise KeyboardInterrupt("stopped; the run had just been finished and is saved")

    def _ask(self, _number, _frame):
        if self.asked:
            raise KeyboardInterrupt("stopped at once; the same command goes on from the last saved state")
        self.asked = True


def _resolve(task, stages, recipe, data, seed, given):
    """Stages, data and options from arguments, recipe and defaults, in that order of force; all checked."""
    if (stages is None) == (recipe is None):
        raise ValueError("stages: expected either stages or recipe, one of the two")
    if recipe is not None:
        recipe = read_recipe(recipe)
        if recipe.task != task.name:
            raise ValueError(f"recipe: it is for {recipe.task}, and the student is a model for {task.name}")
        stages, data = recipe.stages, recipe.data if data is None else data
    stages = make_stages(stages, STAGE_TYPES[task.name])
    if data is None and not task.without_data:
        raise ValueError("data: None was given and no recipe names any; expected a file, a folder or a dataset")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 32:
        raise ValueError(f"seed: got {seed!r}; expected a whole number from 0 to 4294967295")
    run = recipe.run if recipe else {}
    given = {key: value for key, value in given.items() if value is not None}
    return stages, data, read_settings(Options, run | given, "")


def _public_name(name):
    """A Hub id as it is; of a path on this machine its last part, since records are published."""
    return os.path.basename(os.path.abspath(name)) if name and os.path.exists(name) else name
