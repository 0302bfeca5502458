"""`distill`: one training loop, built on Accelerate, for every kind of model.

A run that is killed at any moment resumes bit for bit: data are a function of (seed, stage, step), and a saved state has
all the rest. The loop waits for the device only when it logs or saves.
"""

import functools
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..checkpoints.file_io import read_json
from ..checkpoints.load import require_extra
from ..checkpoints.values import read_settings
from .recipe import STAGE_TYPES, CommonStage, Options, Recipe, Stage, make_stages, read_recipe
from .run import Run
from .run_folder import RECORD, RUN_OUTPUTS, RunFolder
from .sharding import make_accelerator
from .tasks import find_task
from .tasks.base import Task

__all__ = ["Stage", "distill"]
Student = TypeVar("Student")


def distill(
    student: Student, teacher: object = None, *, out: str | Path, data: object = None,
    stages: Sequence[object] | None = None, recipe: str | Path | Recipe | None = None, seed: int = 0,
    mixed_precision: str | None = None, save_dtype: str | torch.dtype | None = None,
    gradient_checkpointing: bool | None = None, save_every: int | None = None, log_every: int | None = None,
    preview_every: int | None = None, tracker: str | None = None, progress: bool = True, command: str | None = None,
    **options: object,
) -> Student:  # fmt: skip
    """Train a model, by distillation from a teacher or on data alone, and save it to `out`.

    Called again with the same arguments, it resumes an interrupted run, or loads the result of a finished one. After an
    error in training, the student keeps the weights of the last step. With several processes, all must call it.

    Args:
        student: A causal language model, text encoder or image model of transformers, or a transformer or pipeline of
            diffusers, which is trained in place, in float32.
        teacher: The softmax original, with the same layer names and vocabulary, in any dtype; never changed. Required by
            losses that compare with it. For diffusion, student or teacher must be a pipeline, for its scheduler.
        out: Folder to create. Until the run is finished, its state is in `<out>.state`.
        data: Text (see `mhla_hf.data.open_text`), labeled images (see `open_images`) or latents (see `open_samples`); None:
            the recipe's. A diffusion model without latents is trained on trajectories that the teacher samples, for prompts
            (a list, or a .txt file with one per line) or, given None, for random classes.
        stages: List of stages, or of dicts with their fields.
        recipe: Name of a recipe, path of a YAML file, or `Recipe`, in place of `stages`.
        seed: Determines the order of the data and every other random choice.
        mixed_precision: "no" (default) or "bf16" (float32 weights and bfloat16 arithmetic).
        save_dtype: Dtype of the saved weights, "float32", "bfloat16" or "float16" (or torch's); None: the student's.
            Mixing matrices are always float32.
        gradient_checkpointing: Whether to recompute the student's layers in the backward pass (default False).
        save_every: Optimizer steps between states (default 100). A state is also saved at the end of a stage and on Ctrl-C.
        log_every: Optimizer steps between entries of the history (default 10).
        preview_every: Optimizer steps between images or videos that a diffusion model samples for the first row of the data
            (default 0: none), saved in `out/previews` and shown by trackers.
        tracker: "tensorboard" (written to `runs/`) or another one that Accelerate knows; None or "": none.
        progress: Whether to show progress on stderr.
        command: Shell command that repeats the run, for the record.
        **options: Options for the kind of model. Language models and encoders: `tokenizer` (saved with the model) and
            `text_field` (column of the text). Encoders: `files` to save (see `checkpoints.save.read_sentence_files`). Image
            models: `processor` (saved with the model) and `test` (images on which the accuracy is logged).

    Returns:
        The trained `student`, in the dtype in which it was saved; with FSDP2, only the main process has its weights.
        `out/train.json` records stages, tokens, seconds, losses, versions, hardware and seed.

    Raises:
        ValueError, TypeError, ImportError: An argument is not valid; found before anything is written, where possible.
            ValueError also if the loss is not finite, or data or a saved state cannot be read.
        OSError: A file cannot be written.
        KeyboardInterrupt: On Ctrl-C, once a state is saved: after the current step or, with several processes, when the
            loop logs.
    """
    run_arguments = {
        "mixed_precision": mixed_precision, "save_dtype": save_dtype and str(save_dtype).removeprefix("torch."),
        "gradient_checkpointing": gradient_checkpointing, "save_every": save_every, "log_every": log_every,
        "preview_every": preview_every, "tracker": tracker,
    }  # fmt: skip
    task = find_task(student, teacher, options)
    checked_stages, data, run_options = _resolve(task, stages, recipe, data, seed, run_arguments)
    parts = task.parts()
    for part in parts:
        part.check(checked_stages)
    folder = RunFolder(out)
    if not (folder.out / RECORD).is_file():
        folder.check_free()
    arguments: Any = {"stages": checked_stages, "data": data, "options": run_options, "seed": seed}
    train: Any = functools.partial(_train, **arguments, progress=progress, command=command)
    return train(task, folder) if len(parts) == 1 else _train_in_turn(parts, folder, train)


def _train_in_turn(parts: Sequence[Task], folder: RunFolder, train: Callable[[Task, RunFolder], Any]) -> Any:
    """Train a pipeline's two transformers in turn, with only one of them on the device. The last run saves the pipeline."""
    first, last = parts
    first_folder = RunFolder(folder.out.with_name(f"{folder.out.name}.high_noise"))
    if not (folder.out / RECORD).is_file():
        train(first, first_folder)
        last.earlier_record = read_json(first_folder.out / RECORD)
        for model in (first.student, first.teacher):
            if model is not None:
                model.to("cpu")
    trained = train(last, folder)
    if os.environ.get("RANK", "0") == "0":
        for name in RUN_OUTPUTS:
            if (first_folder.out / name).exists():
                shutil.move(first_folder.out / name, folder.out / name / "high_noise")
        shutil.rmtree(first_folder.out, ignore_errors=True)
    return trained


def _resolve(
    task: Task, stages: Any, recipe: Any, data: Any, seed: Any, run_arguments: Mapping[str, Any]
) -> tuple[tuple[CommonStage, ...], Any, Options]:
    """Return the checked stages, data and options. Arguments override the recipe, which overrides the defaults."""
    if (stages is None) == (recipe is None):
        got = "neither stages nor a recipe" if recipe is None else "stages and a recipe"
        raise ValueError(f"stages: got {got}, expected one of the two.")
    run: dict[str, Any] = {}
    if recipe is not None:
        recipe = read_recipe(recipe)
        if recipe.task != task.name:
            raise ValueError(f"recipe: got one for {recipe.task}, expected one for {task.name}, as the student needs.")
        stages, run = recipe.stages, recipe.run
        data = recipe.data if data is None else data
    checked_stages = make_stages(stages, STAGE_TYPES[task.name])
    if data is None and not task.trains_without_data:
        raise ValueError("data: got None, and none in the recipe, expected a file, a folder or a dataset.")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 32:
        raise ValueError(f"seed: got {seed!r}, expected a whole number from 0 to 4294967295.")
    passed_arguments = {key: value for key, value in run_arguments.items() if value is not None}
    return checked_stages, data, read_settings(Options, run | passed_arguments, "")


def _train(
    task: Task, folder: RunFolder, stages: Sequence[CommonStage], data: Any, options: Options, seed: int, progress: bool,
    command: str | None,
) -> Any:  # fmt: skip
    """Create an `Accelerator`, open the data, and train; then reset Accelerate's global state, if it was made here."""
    with require_extra("distill", "accelerate", "train"):
        import accelerate
    trackers = [str(tracker.value) for tracker in accelerate.tracking.get_available_trackers()]
    if options.tracker and options.tracker not in trackers:
        raise ValueError(f"tracker: got {options.tracker!r}, expected one of {trackers}, which are installed.")
    is_first_accelerator = not accelerate.state.PartialState._shared_state
    ddp = accelerate.DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
    accelerator = make_accelerator(
        mixed_precision=options.mixed_precision, log_with=options.tracker or None, project_dir=str(folder.state),
        kwargs_handlers=[ddp],
    )  # fmt: skip
    try:
        processes, precision = accelerator.num_processes, accelerator.mixed_precision
        if precision not in ("no", "bf16"):
            raise ValueError(f"mixed_precision: got {precision!r} from the launcher, expected 'no' or 'bf16'.")
        for stage in stages:
            if stage.batch_size % (processes * stage.grad_accum):
                expected = f"a multiple of {processes * stage.grad_accum} (processes times grad_accum)"
                raise ValueError(f"batch_size: got {stage.batch_size} in stage {stage.name!r}, expected {expected}.")
        if options.preview_every and accelerator.is_fsdp2:
            raise ValueError(f"preview_every: got {options.preview_every}, expected 0 with FSDP.")
        source = task.open(data, stages)
        return Run(accelerator, task, source, stages, options, seed, folder, progress, command).execute()
    finally:
        accelerator.free_memory()
        if is_first_accelerator:
            accelerate.state.AcceleratorState._reset_state(reset_partial_state=processes == 1)
