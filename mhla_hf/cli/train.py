"""The commands `mhla-hf distill` and `recipes`."""

import json
import logging
import os
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ..checkpoints.file_io import check_writable
from ..checkpoints.save import read_sentence_files_or_warn
from ..training.recipe import describe_recipes, read_recipe
from . import values

logger = logging.getLogger("mhla_hf")
MIXED_PRECISION = {"float32": "no", "bfloat16": "bf16"}  # --dtype -> Accelerate's mixed_precision
DISTILL = """\
example:
  mhla-hf distill out/smollm-mhla --teacher HuggingFaceTB/SmolLM2-135M --data notes.txt \\
      --recipe language_cpu --out out/smollm-distilled
  mhla-hf distill HuggingFaceTB/SmolLM2-135M --data notes.txt --recipe language_cpu --out out/new    converts first
  mhla-hf distill out/minilm-mhla --teacher sentence-transformers/all-MiniLM-L6-v2 --data notes.txt \\
      --recipe encoder --out out/minilm-distilled
  mhla-hf distill HuggingFaceTB/SmolLM2-135M --data notes.txt --recipe language_llama_lite --out out/new \\
      --batch-size 16 --max-steps 20 --report-to tensorboard \\
      --set distill.lr=5e-5 --set distill.seq_len=2048 --set run.save_every=50 --set settings.block_size=64
  mhla-hf distill Wan-AI/Wan2.1-T2V-1.3B-Diffusers --recipe wan_hybrid --data prompts.txt --out out/wan
If it is interrupted, the same command resumes. `mhla-hf recipes` lists the recipes and their stages.
On several processes (docs/scale.md):
  accelerate launch --config_file conversion/accelerate/fsdp2_8gpu.yaml -m mhla_hf.cli.main distill \\
      meta-llama/Llama-3.1-8B --recipe language_llama_full --data DATA --out out/mine
"""
RECIPES = """\
example:
  mhla-hf recipes                    all recipes
  mhla-hf recipes --json             with what they are about
docs/recipes.md has the memory that each takes.
"""


def distill_options(add: values.AddArgument) -> None:
    add("student", metavar="STUDENT", help="an MHLA model or pipeline, or a softmax one to convert first")
    add("--teacher", help="folder or Hub id of the softmax original (default: STUDENT, if it is one)")
    add("--recipe", required=True, help="one of `mhla-hf recipes`, or a YAML file")
    add("--set", action="append", default=[], metavar="STAGE.KEY=VALUE", dest="settings",
        help="override the recipe: STAGE.KEY ('*.KEY' for every stage), settings.KEY, run.KEY")  # fmt: skip
    add("--data", help="file, folder, or dataset to train on (default: the recipe's)")
    add("--out", required=True, help="output folder")
    add("--batch-size", type=values.parse_count, metavar="N", help="sequences per optimizer step, in every stage")
    add("--learning-rate", type=float, metavar="LR", help="peak learning rate of every stage (one: --set STAGE.lr=LR)")
    add("--max-steps", type=values.parse_count, metavar="N", help="most steps of any stage")
    add("--dtype", choices=MIXED_PRECISION, help="dtype of the arithmetic and the teacher (default: the recipe's)")
    add("--save-dtype", choices=values.DTYPE["choices"][1:], help="dtype of the saved weights (default: STUDENT's)")
    add("--device", help="as torch names it (default: what Accelerate finds)")
    add("--trust-remote-code", action="store_true", help="run source from the folder of a converted pipeline")
    add("--report-to", dest="tracker", metavar="NAME", help="tensorboard, any other tracker of Accelerate, or none")
    add("--seed", type=values.parse_seed, default=0, help="random seed (default: 0)")


def run_distill(
    student: str, teacher: str | None, recipe: str, settings: list[str], batch_size: int | None,
    learning_rate: float | None, max_steps: int | None, dtype: str | None, device: str | None, tracker: str | None,
    seed: int, out: str, trust_remote_code: bool, **options: Any,
) -> None:  # fmt: skip
    from_flags = {
        "*.batch_size": batch_size,
        "*.lr": learning_rate,
        "run.mixed_precision": dtype and MIXED_PRECISION[dtype],
        "run.tracker": "" if tracker == "none" else tracker,
    }
    overrides = {key: value for key, value in from_flags.items() if value is not None}
    overrides.update(values.parse_settings(settings))
    loaded_recipe: Any = read_recipe(recipe, overrides)
    for stage in loaded_recipe.stages:
        stage.steps = min(stage.steps, max_steps or stage.steps)
    for name in dict.fromkeys((student, teacher or student)):
        values.check_model(name)
    values.check_data(options["data"])
    check_writable(out, "out")
    values.load_libraries()

    from ..checkpoints import load
    from ..training.loop import distill
    from ..training.run_folder import RunFolder
    from ..training.sharding import launched_with

    if device:
        on_cpu = load.choose_device(device).type == "cpu"
        os.environ.update({"ACCELERATE_USE_CPU": "true"} if on_cpu else {"ACCELERATE_TORCH_DEVICE": device})
    is_main_process = os.environ.get("RANK", "0") == "0"
    from_settings = [key for key in overrides if key.startswith("settings.")]
    dtype = "bfloat16" if loaded_recipe.run.get("mixed_precision") == "bf16" else "float32"
    next_step = ""
    if load.is_pipeline(student):
        models = load_pipelines(student, teacher, loaded_recipe, dtype, from_settings, seed, trust_remote_code)
    else:
        kind = load.find_model_kind(student)
        if kind == "images":
            expected = "a causal language model or a text encoder (for classifiers see conversion/image_classifier.py)"
            raise ValueError(f"student: got {student!r}, an image classifier, expected {expected}.")
        load_model: Any = load.load_encoder if kind == "encoders" else load.load_language_model
        load_options: dict[str, Any] = {"device": "cpu"}
        if kind == "encoders":
            options["files"] = read_sentence_files_or_warn(student)
        else:  # with FSDP, the main process sends the others their shards of the weights
            load_options["weights"] = is_main_process or not launched_with("FSDP")
        tokenizer_source = teacher if teacher and not load.has_tokenizer(student) else None
        if tokenizer_source:
            logger.info("distill: %r has no tokenizer; using that of %r", student, teacher)
        model, options["tokenizer"] = load_model(student, **load_options, tokenizer=tokenizer_source)
        if convert_student(student, model, model.config, loaded_recipe, from_settings, seed):
            teacher = teacher or student
        models = model, teacher and load_model(teacher, dtype=dtype, **load_options)[0]
        if kind != "encoders":
            words = ["mhla-hf", "evaluate", out, *([teacher] if teacher else []), "--recipe", "recall"]
            next_step = f"; next, evaluate it: {shlex.join(words)}"
    with values.resumable(RunFolder(out).newest_state):
        distill(*models, recipe=loaded_recipe, seed=seed, out=out, **options)
    if is_main_process:
        print(f"{out}: trained{next_step}")


def convert_student(student: str, model: Any, config: Any, recipe: Any, from_settings: list[str], seed: int) -> bool:
    """Convert a softmax model in place by the recipe's settings; return False for an MHLA model, which takes no settings."""
    import torch

    from ..conversion import convert

    if not hasattr(config, "mhla"):
        torch.manual_seed(seed)
        convert(model, **recipe.settings)
        return True
    if from_settings:
        got = f"{from_settings[0]!r} with {student!r}, which is converted already"
        raise ValueError(f"set: got {got}, expected a softmax model.")
    return False


def load_pipelines(
    student: str, teacher: str | None, recipe: Any, dtype: str, settings: list[str], seed: int, trust_remote_code: bool
) -> tuple[Any, Any]:
    """Load a student, convert it if it is softmax, and load a teacher if needed; all but the transformers are shared."""
    from ..checkpoints.load import load_pipeline

    model = load_pipeline(student, dtype="auto", device="cpu", trust_remote_code=trust_remote_code)
    if convert_student(student, model, model.transformer.config, recipe, settings, seed):
        teacher = teacher or student
    if teacher is None or not any(stage.needs_teacher for stage in recipe.stages):
        return model, None
    original = load_pipeline(teacher, dtype=dtype, device="cpu")
    shared = {name: part for name, part in original.components.items() if not name.startswith("transformer")}
    model.register_modules(**shared)
    return model, original


def recipes_options(add: values.AddArgument) -> None:
    add("--json", **values.JSON)


def run_recipes(as_json: bool, **_: Any) -> None:
    values.load_libraries()

    recipes = describe_recipes()
    print(json.dumps(recipes, indent=2) if as_json else render_recipes(recipes))


def render_recipes(recipes: Sequence[Mapping[str, Any]]) -> str:
    from ..plots import render_rows

    rows = []
    for recipe in recipes:
        stages = recipe["stages"]
        steps = " + ".join(f"{stage['name']} {stage['steps']:,}" for stage in stages)
        tokens = sum(stage["steps"] * stage["batch_size"] * stage.get("seq_len", 0) for stage in stages)
        millions = f"{tokens / 1e6:,.0f}" if tokens else ""
        rows.append([recipe["name"], recipe["task"], recipe["base"] or "", steps, millions])
    return render_rows(["recipe", "task", "base", "stages and their steps", "tokens, M"], rows, left=4)
