"""`mhla-hf convert`, `plan`, `teach`, `distill` and `recipes`."""

import logging
import os
import shlex
import sys
from pathlib import Path

from ..checkpoints.files import named_yaml
from ..checkpoints.save import check_new_folder, read_sentence_files
from ..training.recipe import RECIPE_FOLDER, read_recipe
from .values import (
    check_data,
    check_model,
    count,
    device_option,
    dtype_option,
    json_option,
    parse_keep,
    parse_layers,
    parse_settings,
    seed_number,
    show,
    start,
)

logger = logging.getLogger("mhla_hf")
CONVERT = """\
example:
  mhla-hf convert HuggingFaceTB/SmolLM2-135M out/smollm-mhla --text none --layers 2/3 --set window=2
  mhla-hf convert HuggingFaceTB/SmolLM2-135M out/smollm-mhla --text notes.txt --keep 1/6
  mhla-hf convert Wan-AI/Wan2.1-T2V-1.3B-Diffusers out/wan-mhla --set gate=true
Without text, and for models other than language models, distillation recovers the quality: mhla-hf distill.
"""
PLAN = """\
example:
  mhla-hf plan meta-llama/Llama-3.2-1B --context 32768                 reads config.json, times one layer here
  mhla-hf plan DIR --context 8192 --layers all --no-timing --tflops 300 --json
If nothing in the model can be converted, it says why and exits with code 1.
"""
TEACH = """\
example:
  mhla-hf teach meta-llama/Llama-3.2-1B --data train.txt --out taught
Then use a recipe whose stages have `loss: stored`: mhla-hf distill llama-mhla --recipe RECIPE --data taught --out OUT
"""
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
If it is interrupted, the same command resumes. `mhla-hf recipes` lists the recipes and their stages.
On several processes (docs/scale.md):
  accelerate launch --config_file conversion/accelerate/fsdp2_8gpu.yaml -m mhla_hf.cli distill \\
      meta-llama/Llama-3.1-8B --recipe language_llama_full --data DATA --out out/mine
"""
RECIPES = """\
example:
  mhla-hf recipes                                                       all recipes
  mhla-hf recipes --model meta-llama/Llama-3.2-1B --tflops 300           with memory and hours, for this model
Memory is that of one process: weights, gradients, moments, the teacher, activations, and logits.
"""
# kinds of model other than language models: what loads one, and the recipe to distill it with
KINDS = {"images": ("load_classifier", None), "encoders": ("load_encoder", "encoder")}


def convert_options(add):
    what = "a language model, text encoder, image classifier, or pipeline"
    add("model", metavar="DIR_OR_ID", help=f"folder or Hub id of {what}")
    add("out", metavar="OUT", help="output folder")
    add("--text", help='text that a language model learns from: file, folder or dataset; "none": nothing is learned '
        "(default: self, what the model itself writes)")  # fmt: skip
    add("--keep", default="1/6", help="KV heads that keep softmax: a share, a number, or a cache size such as 64MiB "
        "(default: %(default)s)")  # fmt: skip
    add("--context", type=count, help="tokens at which --keep counts bytes (default: the model's positions)")
    add(
        "--layers",
        help='"all", "2/3" or indices such as 1,2,4 (default: all; with --text none of a language model: 2/3)',
    )
    add("--set", action="append", default=[], metavar="NAME=VALUE", dest="settings", help="a setting of MHLASettings")
    add(
        "--effort",
        type=float,
        default=1.0,
        help="of learning: 0.5 takes half of the time and is less exact (default: 1)",
    )
    dtype_option(add)
    add("--seed", type=seed_number, default=0, help="random seed (default: 0)")
    add("--revision", help="branch, tag or commit on the Hub")
    add("--overwrite", action="store_true", help="replace the MHLA model in OUT")


def run_convert(
    model, out, text, keep, context, layers, settings, effort, dtype, seed, revision, overwrite, progress, **_
):  # fmt: skip
    settings, layers, keep = parse_settings(settings), parse_layers(layers), parse_keep(keep)
    check_new_folder(out, overwrite)
    if text not in (None, "self", "none"):
        check_data(text)
    check_model(model, revision)
    start()

    import torch

    from ..checkpoints import load
    from ..checkpoints.save import save_model
    from ..convert import convert

    source = {"dtype": dtype, "device": "cpu", "revision": revision}
    if load.is_pipeline(model, revision):
        if text not in (None, "none"):
            raise ValueError(f"text: came with {model!r}, a pipeline; expected a language model")
        pipe = load.load_pipeline(model, **source)
        torch.manual_seed(seed)
        transformer = convert(pipe, layers=layers, **settings).transformer
        save_model(pipe, out, overwrite=overwrite)
        chosen = transformer.config.mhla["layers"]
        print(f"{out}: {type(transformer).__name__}, layers {chosen} are MHLA; now distill it: see conversion/")
        return
    kind = load.kind_of_model(model, revision)
    if text not in (None, "none") and kind in KINDS:
        raise ValueError(f"text: came with {model!r}, which is no causal language model; expected one")
    read, recipe = KINDS.get(kind, ("load_language_model", "language_llama_lite"))
    further = "distill it with conversion/image_classifier.py"
    if recipe:
        line = ["mhla-hf", "distill", out, "--teacher", model, "--out", f"{out}-distilled", "--recipe", recipe]
        further = f"distill it: {shlex.join(line)} --data TEXT"
    converted, tools = getattr(load, read)(model, **source)
    torch.manual_seed(seed)
    learning, checkpoint = {}, Path(f"{out}.part")
    if kind not in KINDS and text != "none":
        learning = {
            "tokenizer": tools,
            "text": text or "self",
            "keep": keep,
            "context": context,
            "effort": effort,
            "seed": seed,
        }
        learning |= {"checkpoint": checkpoint, "progress": progress}
    config = convert(converted, layers=layers, **learning, **settings).config
    files = sentence_files(model, revision) if kind == "encoders" else {}
    save_model(converted, out, tools, overwrite, files)
    checkpoint.unlink(missing_ok=True)
    if learning:
        print(render_conversion(out, config.mhla_measured))
    else:
        print(f"{out}: layers {config.mhla['layers']} of {config.num_hidden_layers} are MHLA; now {further}")


def render_conversion(out, measured):
    """What a conversion with text measured, as a page of text."""
    from ..evaluation.records import render_rows
    from ..plots import draw_heads

    names = {"original": "original", "converted": "converted", "fitted": "fitted", "kept": "with softmax heads"}
    rows = [[names[key], *scores_of(measured[key])] for key in names if key in measured]
    caches = [
        f"cache at {int(tokens):,} tokens: {told['converted'] / 2**20:,.1f} MiB of {told['softmax'] / 2**20:,.1f}"
        for tokens, told in measured["cache_bytes"].items()
    ]
    table = render_rows(["held-out text", "KL", "perplexity", "recall"], rows)
    heads = ["KV heads that keep softmax (#):", draw_heads(measured)] if "gates" in measured else []
    return "\n".join([f"{out}: {measured['seconds']} s", table, *caches, *heads])


def scores_of(scores):
    """Cells of a table: KL, perplexity and recall."""
    kl = f"{scores['kl']:.4f}" if "kl" in scores else "0"
    return [kl, f"{scores['perplexity']:.2f}", f"{scores['recall']:.3f}"]


def sentence_files(model, revision=None):
    """What sentence-transformers adds to an encoder; nothing, with a warning, where that may be code or is not here."""
    try:
        return read_sentence_files(model, revision)
    except (ValueError, OSError) as error:
        logger.warning("the modules of sentence-transformers are not kept: %s", error)
        return {}


def plan_options(add):
    add("model", metavar="DIR_OR_ID", help="folder or Hub id of a language model; reads only config.json")
    add("--context", required=True, type=int, help="context length you need, in tokens")
    add("--layers", help='"all", "2/3" or indices such as 1,2,4 (default: 2/3)')
    add("--set", action="append", default=[], metavar="NAME=VALUE", dest="settings", help="a setting of MHLASettings")
    add("--recipe", default="language_llama_lite", help="training recipe: a name or a YAML file (default: %(default)s)")
    add("--device", help="device to time a layer on, as torch names it (default: cuda if there is one, else cpu)")
    add("--no-timing", action="store_false", dest="timing", help="skip timing")
    add("--tflops", type=float, help="TFLOP/s of the training machine, to estimate hours")
    add("--revision", help="branch, tag or commit on the Hub")
    json_option(add)


def run_plan(model, recipe, layers, settings, as_json, **options):
    layers, settings = parse_layers(layers), parse_settings(settings)
    named_yaml(recipe, RECIPE_FOLDER, "recipe")
    check_model(model, options["revision"], weights=False)
    start()

    from ..convert.transformers_models import NotConvertible
    from ..planning import plan, render_plan

    try:
        record = plan(model, recipe=recipe, layers=layers, **options, **settings)
    except NotConvertible as error:
        print(f"mhla-hf plan: {error}", file=sys.stderr)
        raise SystemExit(1) from error
    show(record, as_json, render_plan)


def teach_options(add):
    add("teacher", metavar="TEACHER", help="folder or Hub id of a softmax language model")
    add("--data", required=True, dest="text", help="text file, or folder of them")
    add("--out", required=True, help="output folder, for the --data of `mhla-hf distill`")
    add("--seq-len", type=count, default=512, help="tokens per sequence (default: 512)")
    add("--top-k", type=count, default=256, help="most likely tokens to keep per position (default: 256)")
    add("--batch-size", type=count, default=8, help="batch size (default: 8)")
    dtype_option(add)
    device_option(add)


def run_teach(teacher, text, out, dtype, device, progress, seq_len, top_k, batch_size, **_):
    check_model(teacher)
    check_data(text)
    start()

    from ..checkpoints.load import choose_device, load_language_model
    from ..training.teach import teach

    model, tokenizer = load_language_model(teacher, dtype=dtype, device=choose_device(device))
    sizes = {"seq_len": seq_len, "top_k": top_k, "batch_size": batch_size}
    record = teach(model, text, tokenizer, out, progress=progress, **sizes)
    print(f"{out}: {record['rows']} sequences of {record['seq_len']} tokens, {record['top_k']} most likely tokens each")


def distill_options(add):
    add("student", metavar="STUDENT", help="an MHLA model, or a softmax model to convert first")
    add("--teacher", help="folder or Hub id of the softmax original (default: STUDENT, if it is one)")
    add("--recipe", required=True, help="one of `mhla-hf recipes`, or a YAML file")
    add("--set", action="append", default=[], metavar="STAGE.KEY=VALUE", dest="settings",
        help="override the recipe: STAGE.KEY ('*.KEY' for every stage), settings.KEY, run.KEY")  # fmt: skip
    add("--data", help="file, folder, or dataset to train on (default: the recipe's)")
    add("--out", required=True, help="output folder")
    add("--batch-size", type=count, metavar="N", help="sequences per optimizer step, in every stage")
    add(
        "--learning-rate",
        type=float,
        metavar="LR",
        help="peak learning rate of every stage (of one: --set STAGE.lr=LR)",
    )
    add("--max-steps", type=count, metavar="N", help="most steps of any stage")
    add(
        "--dtype",
        choices=["float32", "bfloat16"],
        help="dtype of the arithmetic and the teacher (default: the recipe's)",
    )
    add(
        "--save-dtype",
        choices=["float32", "bfloat16", "float16"],
        help="dtype of the saved weights (default: STUDENT's)",
    )
    add("--device", help="as torch names it (default: what Accelerate finds)")
    add("--report-to", dest="tracker", metavar="NAME", help="tensorboard, any other tracker of Accelerate, or none")
    add("--seed", type=seed_number, default=0, help="random seed (default: 0)")


def run_distill(
    student,
    teacher,
    recipe,
    settings,
    batch_size,
    learning_rate,
    max_steps,
    dtype,
    device,
    tracker,
    seed,
    out,
    **options,
):
    wanted = {"*.batch_size": batch_size, "*.lr": learning_rate}
    wanted["run.mixed_precision"] = dtype and {"float32": "no", "bfloat16": "bf16"}[dtype]
    wanted["run.tracker"] = "" if tracker == "none" else tracker
    wanted = {place: value for place, value in wanted.items() if value is not None} | parse_settings(settings)
    recipe = read_recipe(recipe, wanted)
    for stage in recipe.stages:
        stage.steps = min(stage.steps, max_steps or stage.steps)
    for name in dict.fromkeys((student, teacher or student)):
        check_model(name)
    check_data(options["data"])
    start()

    import torch

    from ..checkpoints.load import choose_device, has_tokenizer, kind_of_model, load_encoder, load_language_model
    from ..convert import convert
    from ..training.loop import distill
    from ..training.sharding import launched_with

    if (kind := kind_of_model(student)) == "images":
        what = "expected a causal language model or a text encoder (for these see conversion/image_classifier.py)"
        raise ValueError(f"student {student!r} is an image classifier; {what}")
    if device:
        on_cpu = choose_device(device).type == "cpu"
        os.environ.update({"ACCELERATE_USE_CPU": "true"} if on_cpu else {"ACCELERATE_TORCH_DEVICE": device})
    here = {"device": "cpu", "weights": not launched_with("FSDP") or os.environ.get("RANK", "0") == "0"}
    others = teacher if teacher and not has_tokenizer(student) else None
    if others:
        logger.info("distill: %r has no tokenizer; that of %r is taken", student, teacher)
    if kind == "encoders":
        load, here, options["files"] = load_encoder, {"device": "cpu"}, sentence_files(student)
    else:
        load = load_language_model
    model, tokenizer = load(student, **here, tokenizer=others)
    if not hasattr(model.config, "mhla"):
        torch.manual_seed(seed)
        convert(model, **recipe.settings)
        teacher = teacher or student
    elif odd := [place for place in wanted if place.startswith("settings.")]:
        raise ValueError(f"set: got {odd[0]!r}, and {student!r} is converted already; expected a softmax model with it")
    dtype = "bfloat16" if recipe.run.get("mixed_precision") == "bf16" else "float32"
    original = teacher and load(teacher, dtype=dtype, **here)[0]
    distill(model, original, tokenizer=tokenizer, recipe=recipe, seed=seed, out=out, **options)
    if not int(os.environ.get("RANK", "0")):  # of several processes the first one says it
        line = shlex.join(["mhla-hf", "evaluate", out, *([teacher] if teacher else []), "--recipe", "recall"])
        print(f"{out}: trained" + (f"; now evaluate it: {line}" if kind != "encoders" else ""))


def recipes_options(add):
    add(
        "--model",
        metavar="DIR_OR_ID",
        help="softmax language model to estimate memory and hours for (from config.json)",
    )
    add("--tflops", type=float, help="with --model: TFLOP/s of the training machine, to estimate hours")
    json_option(add)


def run_recipes(model, tflops, as_json, **_):
    if model is not None:
        check_model(model, weights=False)
    start()

    from ..planning import list_recipes, render_recipes

    record = list_recipes(model, tflops)
    show(record, as_json, render_recipes)
