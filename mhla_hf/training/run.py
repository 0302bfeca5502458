"""One training run: its stages, optimizer steps, saved states, history and record."""

import contextlib
import dataclasses
import logging
import math
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from ..checkpoints.file_io import check_writable, read_json, write_json
from ..checkpoints.load import require_extra, summarize_error
from ..checkpoints.provenance import describe_run, public_name
from ..checkpoints.save import count_bytes
from . import trainable
from .pipeline_calls import save_preview
from .recipe import CommonStage, Options, read_recipe
from .run_folder import RECORD, RunFolder, identify, merge_records, unreadable_state
from .sharding import attach_wrapping_hints, gather_weights, load_average, save_average, sharded
from .tasks.base import Task

logger = logging.getLogger("mhla_hf")
FIRST_STEPS = 3  # number of steps after which the time left is estimated
LONG = 4 * 3600  # seconds; a longer run on a CPU reports the name of the recipe for CPUs
Sums = dict[str, torch.Tensor]  # logged quantities by name: scalars on the device, summed since the last log entry


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[threading.Event]:
    """Defer Ctrl-C: the first sets the event and raises KeyboardInterrupt when the block ends; the second raises at once."""
    requested = threading.Event()

    def handle(_number: int, _frame: Any) -> None:
        if requested.is_set():
            raise KeyboardInterrupt
        requested.set()

    in_main_thread = threading.current_thread() is threading.main_thread()
    previous_handler = signal.signal(signal.SIGINT, handle) if in_main_thread else None
    try:
        yield requested
    finally:
        if previous_handler is not None:  # a truth test would miss SIG_DFL, which is 0
            signal.signal(signal.SIGINT, previous_handler)
    if requested.is_set():
        raise KeyboardInterrupt("stopped; the run had just finished and is saved")


@dataclasses.dataclass
class Run:
    """One training run of `distill`.

    `progress` is saved with every state. "since" counts the steps since the last log entry, and "sums" has their `Sums`.
    """

    accelerator: Any
    task: Task
    source: Any
    stages: Sequence[CommonStage]
    options: Options
    seed: int
    folder: RunFolder
    reports: bool
    command: str | None
    average: Any = None  # `EMAModel` of the weights, in a stage with ema

    def __post_init__(self) -> None:
        task = self.task
        self.student, self.teacher = task.student, task.teacher
        self.is_main = self.accelerator.is_main_process
        self.reports = self.reports and self.is_main
        self.show_bars = self.reports and (sys.stderr.isatty() or "ipykernel" in sys.modules)
        task.has_weights = self.is_main or not self.accelerator.is_fsdp2
        self.total_steps = sum(stage.steps for stage in self.stages)
        self.preview = task.previewer(self.source) if self.options.preview_every else None
        counts = dict.fromkeys(("stage", "step", "total", task.unit, "resumed", "since"), 0)
        self.progress: dict[str, Any] = {**counts, "seconds": 0.0, "reader": None, "sums": {}, "history": []}

    def execute(self) -> Any:
        """Train the student in place, from a state if any, and save it, or load a finished run. All processes call this."""
        from accelerate.utils import broadcast_object_list

        dtypes = trainable.get_dtypes(self.student)
        save_dtype = self.options.save_dtype
        saved_dtypes = trainable.get_saved_dtypes(self.student, getattr(torch, save_dtype) if save_dtype else None)
        # Processes other than the main one may lack the weights.
        (identity,) = broadcast_object_list([self._describe_identity() if self.is_main else None])
        latest = self.folder.find(identity, self.student)
        self.accelerator.wait_for_everyone()
        out = self.folder.out
        if latest == "finished":
            if self.is_main:
                self.folder.clear()
            trainable.set_dtypes(self.student, saved_dtypes)
            self.task.load(out)
            self._report(f"{out} is finished already: nothing to do")
            return self.task.returned
        if self.is_main:
            state_size = 0 if latest else 4 * self.student.num_parameters()  # bytes of fp32 weights; a state has more
            check_writable(out, "out", state_size + count_bytes(self.task.returned))
            self.folder.begin()
        self.accelerator.wait_for_everyone()
        requires_grad = {parameter: parameter.requires_grad for parameter in self.student.parameters()}
        was_training = self.student.training
        try:
            with deferred_interrupt() as self.interrupt:
                halves = [name for name, dtype in dtypes.items() if dtype in trainable.HALF_DTYPES]
                trainable.set_dtypes(self.student, dict.fromkeys(halves, torch.float32), self.task.has_weights)
                self._train(latest, requires_grad)
                trainable.set_dtypes(self.student, saved_dtypes)
                self.accelerator.wait_for_everyone()
                if self.is_main:
                    with self.folder.result() as temporary:
                        self.task.save(temporary)
                        write_json(temporary / RECORD, self._make_record())
                    self._report(f"{out} is finished: {self.total_steps} steps in {self.progress['seconds']:.0f} s")
                self.accelerator.wait_for_everyone()
                dtypes = saved_dtypes
        finally:
            trainable.set_dtypes(self.student, dtypes)
            for parameter, flag in requires_grad.items():
                parameter.requires_grad_(flag)
            self.student.train(was_training)
            self.folder.lock.release()
        return self.task.returned

    def _train(self, latest: Path | None, requires_grad: Mapping[nn.Parameter, bool]) -> None:
        import accelerate

        if latest is not None:
            damage = self.folder.find_damage(latest) if self.is_main else ""
            if damage := accelerate.utils.broadcast_object_list([damage])[0]:
                raise unreadable_state(latest, damage)
            self.progress = read_json(latest / "progress.json") or {}
            self.progress["resumed"] += 1
            self._report(f"resuming from step {self.progress['total']} of {self.total_steps} ({latest})")
        accelerate.utils.set_seed(self.seed, device_specific=True)
        if self.options.tracker:
            purge = {"tensorboard": {"purge_step": self.progress["total"] + 1}}
            self.accelerator.init_trackers("runs", init_kwargs=purge)
        self.student.train()
        if self.options.gradient_checkpointing:
            self.task.set_gradient_checkpointing(True)
        try:
            for number in range(self.progress["stage"], len(self.stages)):
                stage = self.stages[number]
                with self.task.prepare(stage):
                    trainable.set_trainable(self.student, stage, requires_grad)
                    with sharded(self.accelerator, self.task, stage.needs_teacher):
                        self._train_stage(number, latest)
                latest = None
        finally:
            for tracker in self.accelerator.trackers:  # end_training would also destroy the process group
                tracker.finish()
            if self.options.gradient_checkpointing:
                self.task.set_gradient_checkpointing(False)

    def _train_stage(self, number: int, latest: Path | None) -> None:
        """Train a stage, from its beginning or the saved state `latest`. After Ctrl-C, save a state and raise."""
        stage, accelerator, progress = self.stages[number], self.accelerator, self.progress
        accelerator.free_memory()
        groups = trainable.make_parameter_groups(self.task.student, stage)
        optimizer = torch.optim.AdamW(groups, betas=(stage.beta1, stage.beta2), eps=stage.eps, fused=True)
        objective = self.task.objective(stage)
        if accelerator.is_fsdp2:
            attach_wrapping_hints(accelerator, objective, objective.student, objective.student)
        objective, optimizer = accelerator.prepare(objective, optimizer)
        trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.average = None
        if stage.ema:
            with require_extra("ema", "diffusers", "diffusers"):
                from diffusers.training_utils import EMAModel
            self.average = EMAModel(trained, decay=stage.ema)
        if latest is None:
            progress.update(stage=number, step=0, sums={}, since=0)
        else:
            self._restore(latest)
        reader = self.task.reader(self.source, stage, number, self.seed, progress["reader"])
        sums = {key: torch.tensor(value, device=accelerator.device) for key, value in progress["sums"].items()}
        mixings: Any = [module for name, module in self.task.student.named_modules() if name.endswith(".mhla.mixing")]
        direct_mixings = [x.weight for x in mixings if getattr(x, "form", None) == "direct" and x.weight.requires_grad]
        label = self.label = f"{stage.name} ({number + 1}/{len(self.stages)})"
        bar = tqdm(total=stage.steps, initial=progress["step"], desc=label, unit="step", disable=not self.show_bars)
        counts = {"step": 1, "total": 1, "since": 1, self.task.unit: self.task.units_per_step(stage)}
        last_time = time.monotonic()
        try:
            while progress["step"] < stage.steps:
                grad_norm = self._step(objective, optimizer, trained, reader, stage, sums)
                for mixing in direct_mixings:
                    mixing.data.clamp_(min=0.0)
                if self.average:
                    self.average.step(trained)
                now = time.monotonic()
                progress["seconds"] += now - last_time
                last_time = now
                for key, count in counts.items():
                    progress[key] += count
                if progress["total"] == FIRST_STEPS:
                    self._report_time_left()
                bar.update()
                stop = self.interrupt.is_set() and accelerator.num_processes == 1
                is_last = progress["step"] == stage.steps
                if is_last or progress["step"] % self.options.log_every == 0:
                    stop = self._log(stage, sums, grad_norm, optimizer.param_groups[0]["lr"], bar)
                    sums.clear()
                if is_last or stop or progress["step"] % self.options.save_every == 0:
                    self._save_state(reader, sums, grad_norm, stage)
                if self.preview and progress["total"] % self.options.preview_every == 0 and self.is_main:
                    with torch.random.fork_rng(), accelerator.autocast():
                        frames = self.preview(stage, self.seed)
                    save_preview(frames, self.folder.state / "previews", progress["total"], accelerator.trackers)
                if stop and progress["total"] < self.total_steps:
                    step = f"step {progress['total']} of {self.total_steps}, saved in {self.folder.state}"
                    raise KeyboardInterrupt(f"stopped after {step}; the same command resumes the run")
            progress["reader"] = reader.handover()
            if self.average:
                self.average.copy_to(trained)
            if accelerator.is_fsdp2:
                gather_weights(accelerator, objective, self.student)
        finally:
            bar.close()
            reader.close()

    def _restore(self, latest: Path) -> None:
        try:
            self.accelerator.load_state(str(latest))
            if self.average:
                load_average(self.average, latest)
        except Exception as error:  # a damaged file can raise anything
            raise unreadable_state(latest, summarize_error(error)) from error

    def _step(
        self, objective: Any, optimizer: Any, trained: Sequence[nn.Parameter], reader: Any, stage: CommonStage, sums: Sums,
    ) -> torch.Tensor | None:  # fmt: skip
        """Run an optimizer step, add its logged quantities to `sums`, and return the gradient's norm, if it is clipped."""
        accelerator = self.accelerator
        for group in optimizer.param_groups:
            group["lr"] = group["top_lr"] * stage.lr_factor(self.progress["step"])
        processes, rank = accelerator.num_processes, accelerator.process_index
        count = stage.batch_size // processes
        tensors, weights = self.task.take(reader, stage, slice(rank * count, (rank + 1) * count))
        weights = tuple(processes * weight for weight in weights)  # gradients are averaged over processes
        micro_batches = list(zip(*(tensor.chunk(stage.grad_accum) for tensor in tensors), strict=True))
        for micro_batch in micro_batches:
            # Without synchronization, FSDP would keep the gradients of earlier micro-batches unsharded.
            synchronize = micro_batch is micro_batches[-1] or accelerator.is_fsdp2
            with contextlib.nullcontext() if synchronize else accelerator.no_sync(objective):
                with accelerator.autocast():
                    loss, logs = objective(*(tensor.to(accelerator.device) for tensor in micro_batch), *weights)
                accelerator.backward(loss)
            for key, value in logs.items():
                sums[key] = sums[key] + value if key in sums else value
        grad_norm = None
        if stage.max_grad_norm:
            # Accelerate recognizes an FSDP model by the list of all of its parameters.
            parameters = list(objective.parameters()) if accelerator.is_fsdp2 else trained
            grad_norm = accelerator.clip_grad_norm_(parameters, stage.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        return grad_norm

    def _report_time_left(self) -> None:
        seconds = self.task.seconds_of(self.stages, self.progress)
        left = tqdm.format_interval(seconds - self.progress["seconds"])
        hint = ""
        if self.accelerator.device.type == "cpu" and seconds > LONG and (name := self.task.cpu_recipe):
            cpu_seconds = self.task.seconds_of(read_recipe(name).stages, self.progress)
            hint = f"; {name} is the recipe for a CPU: about {tqdm.format_interval(cpu_seconds)}"
        self._report(f"about {left} left for all {self.total_steps:,} steps{hint}")

    def _log(self, stage: CommonStage, sums: Sums, grad_norm: torch.Tensor | None, lr: float, bar: Any) -> bool:
        """Log the means of `sums` and the task's scores; return whether any process got Ctrl-C. All processes call this."""
        progress, unit = self.progress, self.task.unit
        interrupted = torch.tensor(float(self.interrupt.is_set()), device=self.accelerator.device)
        means = self.accelerator.reduce(torch.stack([*sums.values(), interrupted]), reduction="mean").tolist()
        num_interrupted = means.pop()
        entry = {"stage": stage.name, "step": progress["step"], "total": progress["total"], unit: progress[unit]}
        entry |= {key: mean / progress["since"] for key, mean in zip(sums, means, strict=True)}
        entry |= {"lr": lr, "seconds": round(progress["seconds"], 3)}
        if grad_norm is not None:
            entry["grad_norm"] = float(grad_norm)
        self._check_finite(stage, entry["loss"], grad_norm)
        sharded_models = self.accelerator._models if self.accelerator.is_fsdp2 else []
        for model in sharded_models:
            model.unshard()
        if self.is_main or sharded_models:
            entry.update(self.task.evaluate())
        for model in sharded_models:
            model.reshard()
        progress["history"].append(entry)
        progress["since"] = 0
        tracked = (key for key in (*sums, "lr", "grad_norm") if key in entry)
        self.accelerator.log({f"{stage.name}/{key}": entry[key] for key in tracked}, step=progress["total"])
        units_per_second = progress[unit] / max(progress["seconds"], 1e-9)
        left = tqdm.format_interval(self.task.seconds_of(self.stages, progress) - progress["seconds"])
        postfix = {"loss": f"{entry['loss']:.4g}", f"{unit}/s": f"{units_per_second:,.0f}", "left in all": left}
        bar.set_postfix(postfix, refresh=False)
        if not self.show_bars:
            values = ", ".join(f"{name} {value}" for name, value in postfix.items())
            self._report(f"{self.label}: step {progress['step']} of {stage.steps}, {values}")
        return num_interrupted > 0

    def _check_finite(self, stage: CommonStage, loss: float, grad_norm: torch.Tensor | None) -> None:
        norm = 0.0 if grad_norm is None else float(grad_norm)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            got = f"{stage.lr}, with which the loss is {loss} and the gradient norm {norm}"
            place = f"at step {self.progress['step']} of stage {stage.name!r}"
            raise ValueError(f"lr: got {got} {place}, expected a smaller learning rate.")

    def _save_state(self, reader: Any, sums: Sums, grad_norm: torch.Tensor | None, stage: CommonStage) -> None:
        """Save a state, or raise ValueError if loss or gradient are not finite. All processes call this."""
        from accelerate.utils import broadcast_object_list

        progress, accelerator = self.progress, self.accelerator
        progress["reader"] = reader.state()
        progress["sums"] = {key: accelerator.reduce(value, reduction="mean").item() for key, value in sums.items()}
        self._check_finite(stage, progress["sums"].get("loss", 0.0), grad_norm)
        with self.folder.new_state(progress["total"]) if self.is_main else contextlib.nullcontext() as main_folder:
            (state,) = broadcast_object_list([main_folder])
            accelerator.save_state(str(state), safe_serialization=False)
            accelerator.wait_for_everyone()
            if self.average:
                save_average(self.average, state)
            if self.is_main:
                write_json(state / "progress.json", progress)
        accelerator.wait_for_everyone()

    def _make_record(self) -> dict[str, Any]:
        progress, unit = self.progress, self.task.unit
        stages, earlier_seconds = [], 0.0
        for stage in self.stages:
            entries = [entry for entry in progress["history"] if entry["stage"] == stage.name]
            fields = {**dataclasses.asdict(stage), unit: stage.steps * self.task.units_per_step(stage)}
            fields["seconds"] = round(entries[-1]["seconds"] - earlier_seconds, 3)
            stages.append({**fields, "first_loss": entries[0]["loss"], "last_loss": entries[-1]["loss"]})
            earlier_seconds = entries[-1]["seconds"]
        record = {
            "format_version": 1,
            **{key: self.folder.identity[key] for key in ("seed", "mixed_precision")},
            "processes": self.accelerator.num_processes,
            "task": self.task.name,
            "student": type(self.student).__name__,
            "parameters": self.student.num_parameters(),
            "teacher": self.teacher and public_name(getattr(self.teacher.config, "_name_or_path", None)),
            "stages": stages,
            "steps": progress["total"],
            **{key: progress[key] for key in (unit, "resumed", "history")},
            "seconds": round(progress["seconds"], 3),
            "data": {**self.source.describe(), "name": public_name(self.source.name)},
            "gradient_checkpointing": self.options.gradient_checkpointing,
            **describe_run(self.command, self.accelerator.device),
            "fingerprint": self.folder.identity,
        }
        earlier = self.task.earlier_record
        return merge_records(earlier, record, unit) if earlier is not None else record

    def _describe_identity(self) -> dict[str, Any]:
        """Return all that determines the trained weights, as JSON. A run resumes only states of the same identity."""
        needs_teacher = any(stage.needs_teacher for stage in self.stages)
        return {
            "seed": self.seed,
            "mixed_precision": self.accelerator.mixed_precision,
            "save_dtype": self.options.save_dtype,
            "sharded": self.accelerator.is_fsdp2 or None,
            "stages": [dataclasses.asdict(stage) for stage in self.stages],
            "data": self.source.describe(),
            "student": identify(self.student, is_student=True),
            "teacher": identify(self.teacher) if needs_teacher else None,
        }

    def _report(self, text: str) -> None:
        """In the main process, log a message if INFO is enabled, else print it to stderr if progress is shown."""
        if self.is_main and logger.isEnabledFor(logging.INFO):
            logger.info(text)
        elif self.reports:
            tqdm.write(text, file=sys.stderr)
