"""distill(): one Accelerate loop for everything that is trained here.

Transfer, distillation and training from scratch differ in a loss and in which parameters move, so a stage is data
(`recipe.Stage`); language, images and diffusion differ in data and losses, so they are tasks (`tasks.Task`); and the
loop exists once. Unusual: a run continues bit for bit after a kill at any moment, because the
data's order is a function of (seed, stage, step), the learning rate one of the step, and everything else (weights,
moments, random generators, sums not yet logged, the place in a stream) is in a state that is written aside and renamed.
The loop never waits for the device except when it logs or saves.
"""

import dataclasses
import hashlib
import json
import logging
import math
import os
import signal
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from tqdm import tqdm

from ..checkpoints.files import write_json
from ..checkpoints.machine import describe_hardware, describe_versions, now, source_commit
from .identity import as_begun, identify_student, identify_teacher, let_go
from .recipe import STAGE_TYPES, Stage, make_stages, read_recipe
from .run_folder import RECORD, RunFolder
from .tasks import find_task
from .trainable import (
    HALVES,
    choose_trainable,
    direct_mixings,
    dtypes_of,
    dtypes_to_save,
    dtypes_to_train,
    parameter_groups,
    set_dtypes,
)

logger = logging.getLogger("mhla_hf")

KEPT_STATES = 2
AVERAGE = "average.pt"
DEFAULTS = {
    "mixed_precision": None,
    "save_dtype": None,
    "gradient_checkpointing": False,
    "save_every": 100,
    "log_every": 10,
    "tracker": "",
}
SAVE_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*HALVES, torch.float32)}

__all__ = ["Stage", "distill"]


def distill(
    student,
    teacher=None,
    *,
    out,
    data=None,
    stages=None,
    recipe=None,
    seed=0,
    mixed_precision=None,
    save_dtype=None,
    gradient_checkpointing=None,
    save_every=None,
    log_every=None,
    tracker=None,
    progress=True,
    command=None,
    **options,
):
    """Train `student` through the stages, from `teacher` or from data alone, and save it to `out`.

    A run that was stopped goes on when the same call is made again; a finished one is loaded, and nothing else happens.

    Args:
        student: a causal language model or an image model of transformers, or a transformer of diffusers or a pipeline of
            one, which is then saved whole; trained in place, in float32, and given back and saved in the dtype it came in.
        teacher: the softmax original, with the same layer names and vocabulary, in its own dtype; never changed. Needed by
            the losses that compare with one. Of a diffusion student and teacher one is a pipeline, for its scheduler.
        out: folder to make; while the run goes on its state is in `<out>.state`.
        data: what to train on, for text see `mhla_hf.training.data.open_text`, for labelled images
            `mhla_hf.training.pictures.open_pictures`, for latents `mhla_hf.training.latents.open_latents`; None: the
            recipe's. Without latents a diffusion teacher samples trajectories, for prompts (a list, or a .txt file with
            one a line) or, given None, for its classes.
        stages: list of stages or dicts; or recipe: path of a YAML file that holds them. One of the two.
        seed: whole number from 0 to 2**32 - 1; decides the order of the data and every random choice of the run.
        mixed_precision: "no" (default) or "bf16" (float32 weights, bfloat16 arithmetic).
        save_dtype: "float32", "bfloat16" or "float16" (or torch's) of the saved weights but mixing; None: as they came in.
        gradient_checkpointing: recompute the student's layers in the backward pass. Default False.
        save_every: optimizer steps between two states (100); one is also saved at the end of every stage and on Ctrl-C.
        log_every: optimizer steps between two entries of the history (10).
        tracker: "tensorboard" (into `runs/`) or another that accelerate knows; None or "": none.
        progress: show bars and messages on stderr. command: the shell line that repeats the run, for the record.
        options: the task's own: for language models `tokenizer` (saved with the model) and `text_field`; for image models
            `processor` (saved with the model) and `test` (images whose accuracy enters the history).

    Returns:
        The student. `out/train.json` holds stages, tokens, seconds, losses, versions, hardware and seed.

    Raises:
        ValueError, TypeError, ImportError: one sentence, before anything is written. OSError: writing failed.
        KeyboardInterrupt: on Ctrl-C, after the running step, with the state saved; its text says how to go on.
        After any error the student is as the last step left it.
    """
    given = {
        "mixed_precision": mixed_precision,
        "save_dtype": save_dtype,
        "gradient_checkpointing": gradient_checkpointing,
        "save_every": save_every,
        "log_every": log_every,
        "tracker": tracker,
    }
    task = find_task(student, teacher, options)
    stages, data, options = _resolve(task, stages, recipe, data, seed, given)
    task.check(stages)
    accelerate = _import_accelerate()
    fresh = not accelerate.state.PartialState._shared_state
    accelerator = _make_accelerator(accelerate, options, out)  # its settings are global until they are reset below
    try:
        for stage in stages:
            if stage.batch_size % (accelerator.num_processes * stage.grad_accum):
                raise ValueError(
                    f"stage {stage.name!r}: batch_size {stage.batch_size} cannot be shared by "
                    f"{accelerator.num_processes} processes in {stage.grad_accum} equal parts each"
                )
        source = task.open(data, stages)
        run = _Run(accelerator, task, source, stages, options, seed, out, progress, command)
        return run.execute()
    finally:
        accelerator.free_memory()
        if fresh:
            accelerate.state.AcceleratorState._reset_state(reset_partial_state=accelerator.num_processes == 1)


class _Run:
    """One call of `distill`, from its folder to its record."""

    def __init__(self, accelerator, task, source, stages, options, seed, out, progress, command):
        self.accelerator, self.task, self.student, self.teacher = accelerator, task, task.student, task.teacher
        self.source, self.stages, self.options, self.seed = source, stages, options, seed
        self.progress, self.command = progress and accelerator.is_main_process, command
        self.main, task.progress = accelerator.is_main_process, self.progress
        self.folder = RunFolder(out, self._identify(), main=self.main)
        self.known = self.folder.fingerprint["student"]
        self.folder.fingerprint["student"] = as_begun(self.student, self.folder.out, self.known)
        self.at = {"stage": 0, "step": 0, "total": 0, task.unit: 0, "seconds": 0.0, "resumed": 0, "reader": None}
        self.at |= {"sums": {}, "since": 0, "history": [], "stage_seconds": [0.0] * len(stages)}
        self.interrupt = _Interrupt()

    def execute(self):
        """Everything, in order: refuse or recognise the folder, train, save, give back."""
        dtypes = dtypes_of(self.student)
        saved = dtypes_to_save(self.student, SAVE_DTYPES.get(self.options["save_dtype"]))
        if self.folder.finished():
            self.accelerator.wait_for_everyone()
            self.folder.clear()
            set_dtypes(self.student, saved)
            self.task.load(self.folder.out)
            let_go(self.student, self.folder.out, self.folder.fingerprint["student"])
            self._say(f"{self.folder.out} is finished already: nothing to do")
            return self.task.given
        latest = self.folder.latest()
        if latest is None:
            self.folder.fingerprint["student"] = self.known
        self.task.try_data(self.source, self.stages, self.seed)
        if self.main and latest is None:
            self.folder.check_room(self._bytes_needed())
        self.accelerator.wait_for_everyone()
        if self.main:
            self.folder.begin()
            for state in self.folder.damaged:
                logger.warning("out: the state %s was damaged (a file was missing or changed) and is removed", state)
        self.accelerator.wait_for_everyone()
        kept = [(parameter, parameter.requires_grad) for parameter in self.student.parameters()]
        was_training = self.student.training
        try:
            with self.interrupt:
                set_dtypes(self.student, dtypes_to_train(self.student))
                self._train(latest)
                set_dtypes(self.student, saved)
                self._finish()
                dtypes = saved
        finally:
            set_dtypes(self.student, dtypes)
            for parameter, flag in kept:
                parameter.requires_grad_(flag)
            self.student.train(was_training)
            self.folder.release()
            let_go(self.student, self.folder.out, self.folder.fingerprint["student"])
        return self.task.given

    def _train(self, latest):
        import accelerate

        if latest is not None:
            self.at = json.loads((latest / "progress.json").read_text(encoding="utf-8"))
            self.at["resumed"] += 1
            self._say(f"going on from step {self.at['total']} of {self._total()} ({latest})")
        accelerate.utils.set_seed(self.seed, device_specific=True)
        self._start_tracker()
        flags = {parameter: parameter.requires_grad for parameter in self.student.parameters()}
        self.student.train()
        if self.options["gradient_checkpointing"]:
            self.task.checkpoint_gradients(True)
        try:
            for number in range(self.at["stage"], len(self.stages)):
                with self.task.prepared(self.stages[number]):
                    choose_trainable(self.student, self.stages[number], flags)
                    self._stage(number, latest)
                latest = None
        finally:
            for tracker in self.accelerator.trackers:
                tracker.finish()
            if self.options["gradient_checkpointing"]:
                self.task.checkpoint_gradients(False)

    def _stage(self, number, latest):
        """One stage, from its start or from the state in `latest`, to its end, which is saved."""
        stage = self.stages[number]
        accelerator, at = self.accelerator, self.at
        accelerator.free_memory()
        if self.teacher is not None and stage.needs_teacher:
            self.teacher.to(accelerator.device).eval()
        optimizer = torch.optim.AdamW(
            parameter_groups(self.student, stage), betas=(stage.beta1, stage.beta2), eps=stage.eps, fused=True
        )
        step, optimizer = accelerator.prepare(self.task.objective(stage), optimizer)
        if latest is not None:
            accelerator.load_state(str(latest))
            self._check_generators()
        else:
            at.update(stage=number, step=0, sums={}, since=0)
        reader = self.task.reader(self.source, stage, number, self.seed, at["reader"])
        sums = {key: torch.tensor(value, device=accelerator.device) for key, value in at["sums"].items()}
        trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.average = self._start_average(trained, stage, latest)
        clamped = direct_mixings(self.student)
        label = f"{stage.name} ({number + 1}/{len(self.stages)})"
        bar = tqdm(total=stage.steps, initial=at["step"], desc=label, unit="step", disable=not self.progress)
        clock, norm = time.monotonic(), None
        try:
            while at["step"] < stage.steps:
                for group in optimizer.param_groups:
                    group["lr"] = group["top_lr"] * stage.lr_factor(at["step"])
                for part, last in self._parts(reader, stage):
                    with nullcontext() if last else accelerator.no_sync(step):
                        loss, logs = step(*part)
                        accelerator.backward(loss)
                    for key, value in logs.items():
                        sums[key] = sums[key] + value if key in sums else value
                if stage.max_grad_norm:
                    norm = accelerator.clip_grad_norm_(trained, stage.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
                for mixing in clamped:
                    mixing.data.clamp_(min=0.0)
                if self.average:
                    self.average.step(trained)
                at.update(step=at["step"] + 1, total=at["total"] + 1, since=at["since"] + 1)
                at[self.task.unit] += self.task.count(stage)
                bar.update()
                stop = self.interrupt.asked and accelerator.num_processes == 1
                done = at["step"] == stage.steps
                if logged := done or at["step"] % self.options["log_every"] == 0:
                    clock = self._count_time(clock, number)
                    stop = self._log(stage, sums, norm, group["lr"], bar)
                    sums = {}
                if done or stop or at["step"] % self.options["save_every"] == 0:
                    if not logged:
                        clock = self._count_time(clock, number)
                    self._save(reader, sums, norm, stage)
                if stop and not (done and number + 1 == len(self.stages)):
                    raise KeyboardInterrupt(
                        f"stopped after step {at['total']} of {self._total()}, which is saved in {self.folder.state}; "
                        "the same command goes on from there"
                    )
            at["reader"] = reader.handover()
            if self.average:
                self.average.copy_to(trained)
        finally:
            bar.close()
            reader.close()

    def _start_average(self, trained, stage, latest):
        """The moving average of the stage's weights, from its start or from the state in `latest`; None without one."""
        if not stage.ema:
            return None
        from diffusers.training_utils import EMAModel

        average = EMAModel(trained, decay=stage.ema)
        if latest is not None:
            average.load_state_dict(torch.load(latest / AVERAGE, weights_only=True))
            average.to(self.accelerator.device)
        return average

    def _parts(self, reader, stage):
        """The batch of one step as this process sees it: (the objective's arguments, is it the last part)."""
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        own = stage.batch_size // world
        rows = own // stage.grad_accum
        tensors, shares = self.task.take(reader, stage, slice(rank * own, (rank + 1) * own))
        device = self.accelerator.device
        for first in range(0, own, rows):
            part = [tensor[first : first + rows].to(device) for tensor in tensors]
            yield (*part, *(world * share for share in shares)), first + rows == own

    def _count_time(self, clock, number):
        moment = time.monotonic()
        self.at["seconds"] += moment - clock
        self.at["stage_seconds"][number] += moment - clock
        return moment

    def _log(self, stage, sums, norm, lr, bar):
        """An entry of the history; returns whether any process was asked to stop. The only place that waits."""
        at = self.at
        values = torch.stack(
            [*sums.values(), torch.tensor(float(self.interrupt.asked), device=self.accelerator.device)]
        )
        *means, asked = self.accelerator.reduce(values, reduction="mean").tolist()
        entry = {"stage": stage.name, "step": at["step"], "total": at["total"]}
        entry |= {self.task.unit: at[self.task.unit]}
        entry |= {key: value / at["since"] for key, value in zip(sums, means, strict=True)}
        entry |= {"lr": lr, "seconds": round(at["seconds"], 3)}
        if norm is not None:
            entry["grad_norm"] = float(norm)
        self._refuse_not_finite(stage, entry["loss"], entry.get("grad_norm", 0.0))
        if self.main:
            entry |= self.task.judge()
        at["history"].append(entry)
        at["since"] = 0
        self.accelerator.log(
            {f"{stage.name}/{key}": entry[key] for key in (*sums, "lr", "grad_norm") if key in entry},
            step=at["total"],
        )
        speed = at[self.task.unit] / max(at["seconds"], 1e-9)
        bar.set_postfix({"loss": f"{entry['loss']:.4g}", f"{self.task.unit}/s": f"{speed:,.0f}"}, refresh=False)
        return asked > 0

    def _refuse_not_finite(self, stage, loss, norm):
        if math.isfinite(loss) and math.isfinite(norm):
            return
        last = self.folder.newest() if self.main else None
        rest = f"the last good state is {last}" if last else "no state had been saved"
        raise ValueError(
            f"lr: with {stage.lr} stage {stage.name!r} left the finite numbers before step {self.at['step']} "
            f"(loss {loss}, gradient norm {norm}), so a smaller lr is needed; {rest}"
        )

    def _save(self, reader, sums, norm, stage):
        """Write the whole state aside and rename it; keep the last two."""
        import accelerate

        at, target = self.at, self.folder.state_path(self.at["total"])
        at["reader"] = reader.state()
        at["sums"] = {key: value.item() for key, value in sums.items()}
        self._refuse_not_finite(stage, at["sums"].get("loss", 0.0), 0.0 if norm is None else float(norm))
        with self.folder.writing(target, "a state") if self.main else nullcontext() as aside:
            aside = accelerate.utils.broadcast_object_list([str(aside)])[0]
            self.accelerator.save_state(aside, safe_serialization=False)
            self.accelerator.wait_for_everyone()
            if self.main:
                if self.average:
                    torch.save(self.average.state_dict(), os.path.join(aside, AVERAGE))
                write_json(os.path.join(aside, "progress.json"), {**at, "generator": _generator_hash()})
                self.folder.seal(Path(aside))
                os.replace(aside, target)
                self.folder.prune(KEPT_STATES)
        self.accelerator.wait_for_everyone()

    def _check_generators(self):
        """accelerate skips random generators that it cannot read, and says so to nobody."""
        if self.main and self.at.pop("generator") != _generator_hash():
            raise ValueError(f"out: the random state in {str(self.folder.state)!r} cannot be read with these versions")

    def _finish(self):
        """The finished model, what belongs to it and the record, aside and renamed; then the state goes."""
        self.accelerator.wait_for_everyone()
        if not self.main:
            self.accelerator.wait_for_everyone()
            return
        with self.folder.writing(self.folder.out, "the model") as aside:
            self.task.save(aside)
            runs = self.folder.state / "runs"
            if runs.exists():
                os.replace(runs, aside / "runs")
            write_json(aside / RECORD, self._record())
            self.folder.finish(aside)
        self._say(f"{self.folder.out} is finished: {self.at['total']} steps in {self.at['seconds']:.0f} s")
        self.accelerator.wait_for_everyone()

    def _record(self):
        at, stages = self.at, []
        for stage, seconds in zip(self.stages, at["stage_seconds"], strict=True):
            entries = [entry for entry in at["history"] if entry["stage"] == stage.name]
            stages.append(
                dataclasses.asdict(stage)
                | {self.task.unit: stage.steps * self.task.count(stage), "seconds": round(seconds, 3)}
                | {"steps_per_second": stage.steps / max(seconds, 1e-9)}
                | {"first_loss": entries[0]["loss"], "last_loss": entries[-1]["loss"]}
            )
        return {
            "format_version": 1,
            "task": self.task.name,
            "student": type(self.student).__name__,
            "parameters": self.student.num_parameters(),
            "teacher": self.teacher and _public_name(getattr(self.teacher.config, "_name_or_path", None)),
            "seed": self.seed,
            "stages": stages,
            "steps": at["total"],
            self.task.unit: at[self.task.unit],
            "seconds": round(at["seconds"], 3),
            "steps_per_second": at["total"] / max(at["seconds"], 1e-9),
            "resumed": at["resumed"],
            "data": self.source.describe() | {"name": _public_name(self.source.name)},
            **{key: self.options[key] for key in ("mixed_precision", "gradient_checkpointing")},
            "processes": self.accelerator.num_processes,
            "hardware": describe_hardware(self.accelerator.device),
            "versions": describe_versions(),
            "commit": source_commit(),
            "command": self.command,
            "date": now(),
            "fingerprint": self.folder.fingerprint,
            "history": at["history"],
        }

    def _identify(self):
        """What makes this run this run: whatever would change the trained weights, in the order of refusal."""
        used = any(stage.needs_teacher for stage in self.stages)
        return {
            "seed": self.seed,
            "mixed_precision": self.options["mixed_precision"],
            "save_dtype": self.options["save_dtype"],
            "processes": self.accelerator.num_processes,
            "stages": [dataclasses.asdict(stage) for stage in self.stages],
            "data": self.source.describe(),
            "student": identify_student(self.student),
            "teacher": identify_teacher(self.teacher) if used else None,
        }

    def _bytes_needed(self):
        weights = sum(value.numel() for value in self.student.state_dict().values())
        return 3 * 4 * weights * (KEPT_STATES + 1) + self.task.bytes_saved()

    def _start_tracker(self):
        if not self.options["tracker"]:
            return
        self.accelerator.init_trackers("runs", init_kwargs={"tensorboard": {"purge_step": self.at["total"] + 1}})

    def _total(self):
        return sum(stage.steps for stage in self.stages)

    def _say(self, text):
        logger.info(text)
        if self.progress:
            tqdm.write(text, file=sys.stderr)


class _Interrupt:
    """The first Ctrl-C is a wish, heard after the running step; the second stops at once."""

    def __init__(self):
        self.asked = False
        self.installed = False

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            self.before = signal.signal(signal.SIGINT, self._ask)
            self.installed = True

    def __exit__(self, kind, _value, _trace):
        if self.installed:
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
    run = {}
    if recipe is not None:
        recipe = read_recipe(recipe)
        if recipe.task != task.name:
            raise ValueError(f"recipe: it is for {recipe.task}, and the student is a model for {task.name}")
        stages, run = recipe.stages, recipe.run
        data = recipe.data if data is None else data
    stages = make_stages(stages, STAGE_TYPES[task.name])
    if data is None and not task.without_data:
        raise ValueError("data: None was given and no recipe names any; expected a file, a folder or a dataset")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 32:
        raise ValueError(f"seed: got {seed!r}; expected a whole number from 0 to 4294967295")
    options = DEFAULTS | run | {key: value for key, value in given.items() if value is not None}
    for key in ("save_every", "log_every"):
        if isinstance(options[key], bool) or not isinstance(options[key], int) or options[key] < 1:
            raise ValueError(f"{key}: got {options[key]!r}; expected a whole number of at least 1")
    if options["save_dtype"] is not None:
        options["save_dtype"] = str(options["save_dtype"]).removeprefix("torch.")
        if options["save_dtype"] not in SAVE_DTYPES:
            raise ValueError(f"save_dtype: got {options['save_dtype']!r}; expected one of {', '.join(SAVE_DTYPES)}")
    return stages, data, options


def _import_accelerate():
    try:
        import accelerate
    except ImportError as error:
        raise ImportError("distill needs accelerate, which is missing: pip install 'mhla_hf[train]'") from error
    return accelerate


def _make_accelerator(accelerate, options, out):
    tracker, precision = options["tracker"], options["mixed_precision"]
    if precision not in (None, "no", "bf16"):
        raise ValueError(f"mixed_precision: got {precision!r}; expected 'no' or 'bf16'")
    if tracker:
        known = [kind.value for kind in accelerate.utils.LoggerType if kind.value != "all"]
        if tracker not in known:
            raise ValueError(f"tracker: got {tracker!r}; expected one of {', '.join(known)}")
        if tracker not in [str(kind.value) for kind in accelerate.tracking.get_available_trackers()]:
            what = "'mhla_hf[train]'" if tracker == "tensorboard" else tracker
            raise ImportError(f"tracker: {tracker} is missing: pip install {what}")
    accelerator = accelerate.Accelerator(
        mixed_precision=precision,
        log_with=tracker or None,
        project_dir=f"{os.path.abspath(os.path.expanduser(out))}.state",
        kwargs_handlers=[
            accelerate.DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
        ],
    )
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise ValueError(f"mixed_precision: the launcher set {accelerator.mixed_precision!r}; expected 'no' or 'bf16'")
    options["mixed_precision"] = accelerator.mixed_precision
    return accelerator


def _public_name(name):
    """A Hub id as it is; of a path on this machine its last part, since records are published."""
    return os.path.basename(os.path.abspath(name)) if name and os.path.exists(name) else name


def _generator_hash():
    return hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()[:16]
