"""`mhla-hf`: parses and calls, nothing else.

A sub-command imports what it needs when it runs, so that `--help` is instant. Bad input ends with exit code 2 and one
sentence on stderr, Ctrl-C with 130 and how to go on. `--debug` shows where an error came from.
"""

import argparse
import importlib
import json
import logging
import os
import shlex
import sys

from . import __version__

USER_ERRORS = (ValueError, TypeError, ImportError, OSError, RuntimeError, MemoryError, ArithmeticError)
STOPPED = "stopped; what was finished is kept, and the same command goes on from there"
CONVERT = """\
example:
  mhla-hf convert HuggingFaceTB/SmolLM2-135M out/smollm-mhla --layers 2/3 --set block_size=32
  mhla-hf convert Wan-AI/Wan2.1-T2V-1.3B-Diffusers out/wan-mhla --set gate=true
A converted model has to be distilled before it is good again: mhla-hf distill.
"""
TEACH = """\
example:
  mhla-hf teach meta-llama/Llama-3.2-1B --text train.txt --out taught
then a recipe whose stages have `loss: stored`, and `mhla-hf distill llama-mhla --recipe RECIPE --text taught --out OUT`
"""
DISTILL = """\
example:
  mhla-hf distill out/smollm-mhla --teacher HuggingFaceTB/SmolLM2-135M --text notes.txt \\
      --recipe conversion/recipes/language_cpu.yaml --out out/smollm-distilled
  mhla-hf distill HuggingFaceTB/SmolLM2-135M --text notes.txt --recipe ... --out ...    converts it first
Stopped at any moment, the same command goes on where it was.
"""
EVALUATE = """\
example:
  mhla-hf evaluate out/mhla out/teacher --tasks arc_easy,wikitext --batch-size 16
  mhla-hf evaluate out/mhla out/teacher --recipe table_6_language          the paper's table, in its layout
  mhla-hf evaluate out/mhla out/teacher --recipe recall --set lengths=512,1024 --plot recall.png
  mhla-hf evaluate out/dit --trust-remote-code --recipe table_9_class_to_image --set reference=imagenet256.npz
Recipes: table_2_imagenet, table_4_text_to_image, table_5_vbench, table_6_language, table_8_longbench,
table_9_class_to_image, recall, ruler, speed, or a YAML file. On several processes: torchrun -m mhla_hf.cli evaluate ...
Scores are kept in results.json in each model's folder; what this machine measured is read, not run again.
"""
PUSH = """\
example:
  mhla-hf push out/mhla user/llama-mhla --private --tag v1
  mhla-hf push out/mhla user/llama-mhla --draft   without scores for recall and generation
Log in first: hf auth login. Stopped or broken off, the same command goes on: what has arrived is not sent again.
"""
ANALYZE = """\
example:
  mhla-hf analyze out/teacher out/mhla --out out/analysis         rank and entropy per layer, maps, mixing
  mhla-hf analyze out/vit --data photos --samples 16 --out out/analysis
"""
CARD = """\
example:
  mhla-hf card out/mhla --name me/mhla --compare teacher=out/teacher --compare "plain linear=out/linear"
  mhla-hf card out/mhla --check                 rendered again from the files beside it, the same
  mhla-hf card out/mhla --shelve model_cards/demo              its facts and its card into this repository
  mhla-hf card model_cards                      render every card anew; --check: say which differs
"""
AUDIT = """\
example:
  mhla-hf audit out/mhla --teacher out/teacher --json out/audit.json
  mhla-hf audit out/mhla --text notes.txt --tokens 1024          a large model on a CPU: shorter texts
Exit code 0: nothing was found, 1: something was, 2: there was nothing to audit.
"""
BENCH = """\
example:
  mhla-hf bench                                 MHLA against softmax and plain linear attention, on this machine
What whole models take to decode: mhla-hf evaluate MHLA SOFTMAX --recipe speed
"""
PLAN = """\
example:
  mhla-hf plan meta-llama/Llama-3.2-1B --context 32768                 reads config.json, times one layer here
  mhla-hf plan DIR --context 8192 --layers all --no-timing --tflops 300 --json
Where nothing of the model can convert, this says why, with exit code 1.
"""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that says what is wrong in one sentence, without the usage before it."""

    def error(self, message):
        self.exit(2, f"{self.prog}: {' '.join(message.split())}; see {self.prog} --help\n")


def build_parser():
    """The parser of the whole command; the options of a sub-command have the names of the function's that it calls."""
    parser = Parser(
        prog="mhla-hf",
        description="Multi-Head Linear Attention for Hugging Face models: convert, distill, evaluate.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"mhla_hf {__version__}")
    commands = parser.add_subparsers(dest="name", required=True, metavar="COMMAND", parser_class=Parser)
    for name, (run, options, about, epilog) in COMMANDS.items():
        sub = commands.add_parser(
            name, help=about, description=about, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )  # fmt: skip
        sub.set_defaults(run=run)
        sub.add_argument("--quiet", action="store_false", dest="progress", help="no progress bars and notes")
        sub.add_argument("--debug", action="store_true", help="show where an error came from")
        options(sub.add_argument)
    return parser


def convert_options(add):
    add("model", metavar="DIR_OR_ID", help="folder or Hub id of a language model, an image classifier or a pipeline")
    add("out", metavar="OUT", help="folder to make")
    add("--layers", help='"all", "2/3" or indices such as 1,2,4 (default: 2/3; of image models: all)')
    add("--set", action="append", default=[], metavar="NAME=VALUE", dest="settings", help="a setting of MHLASettings")
    add("--calibrate", metavar="TEXT", help="text by which a language model's new layers start from the teacher")
    add("--keep", choices=["auto"], help="measure on that text which layers (of --layers) keep softmax")
    add("--budget", metavar="N", help="of --keep: a number of layers, or bytes of cache such as 64MiB")
    add("--dtype", default="auto", help="auto (default), float32, bfloat16 or float16")
    add("--seed", type=seed_number, default=0, help="of the new parameters' start (default: 0)")
    add("--revision", help="branch, tag or commit on the Hub")
    add("--overwrite", action="store_true", help="OUT may hold an MHLA model, which this replaces")


def run_convert(model, out, layers, settings, calibrate, keep, budget, dtype, seed, revision, overwrite, **_):
    if (keep and not budget) or (budget and not (keep and calibrate)):
        raise ValueError("keep: expected all of --calibrate TEXT --keep auto --budget N, or the first alone")
    settings, layers = parse_settings(settings), parse_layers("all" if keep and layers is None else layers)

    import torch

    from .checkpoints.load import is_classifier_name, is_pipeline, load_classifier, load_language_model, load_pipeline
    from .checkpoints.save import check_new_folder, save_model
    from .convert import convert
    from .training.start import start_from_text

    check_new_folder(out, overwrite)
    source = {"dtype": dtype, "device": "cpu", "revision": revision}
    if is_pipeline(model, revision):
        if calibrate:
            raise ValueError(f"calibrate: came with {model!r}, a pipeline; expected a language model")
        pipe = load_pipeline(model, **source)
        torch.manual_seed(seed)
        transformer = convert(pipe, layers=layers, **settings).transformer
        save_model(pipe, out, overwrite=overwrite)
        chosen = transformer.config.mhla["layers"]
        print(f"{out}: {type(transformer).__name__}, layers {chosen} are MHLA; scripts that distill it: conversion/")
        return
    image = is_classifier_name(model, revision)
    converted, tools = (load_classifier if image else load_language_model)(model, **source)
    torch.manual_seed(seed)
    config = convert(converted, layers=layers, **settings).config
    if calibrate:
        start_from_text(converted, tools, calibrate, budget, seed)
    save_model(converted, out, tools, overwrite)
    further = "conversion/image_classifier.py" if image else f"mhla-hf distill {out} --teacher ..."
    print(f"{out}: layers {config.mhla['layers']} of {config.num_hidden_layers} are MHLA; now distill it: {further}")


def plan_options(add):
    add("model", metavar="DIR_OR_ID", help="folder or Hub id of a language model; only its config.json is read")
    add("--context", required=True, type=int, help="tokens of the sequences that it is for")
    add("--layers", help='"all", "2/3" or indices such as 1,2,4 (default: 2/3)')
    add("--set", action="append", default=[], metavar="NAME=VALUE", dest="settings", help="a setting of MHLASettings")
    add("--recipe", metavar="YAML", help="of the distillation (default: conversion/recipes/language_llama_lite.yaml)")
    add("--device", help="to time a layer on, as torch names it (default: cuda if there is one, else cpu)")
    add("--no-timing", action="store_false", dest="timing", help="time nothing")
    add("--tflops", type=float, help="what the training machine does in a second, for hours")
    add("--revision", help="branch, tag or commit on the Hub")
    add("--json", action="store_true", dest="as_json", help="print the same as JSON")


def run_plan(layers, settings, as_json, **options):
    layers, settings = parse_layers(layers), parse_settings(settings)

    from .convert.transformers_models import NotConvertible
    from .planning import plan, render_plan

    try:
        record = plan(layers=layers, **options, **settings)
    except NotConvertible as error:
        print(f"mhla-hf plan: {error}", file=sys.stderr)
        raise SystemExit(1) from error
    print(json.dumps(record, indent=2) if as_json else render_plan(record))


def teach_options(add):
    add("teacher", metavar="TEACHER", help="folder or Hub id of a softmax language model")
    add("--text", required=True, help="file or folder of text")
    add("--out", required=True, help="folder to make, the `--text` of a distillation with the loss stored")
    add("--seq-len", type=int, default=512, help="tokens in a sequence (default: 512)")
    add("--top-k", type=int, default=256, help="likeliest tokens kept of each distribution (default: 256)")
    add("--batch-size", type=int, default=8, help="sequences at once (default: 8)")
    add("--dtype", default="auto", help="auto (default), float32, bfloat16 or float16")
    add("--device", help="as torch names it (default: cuda if there is one, else cpu)")


def run_teach(teacher, text, out, dtype, device, progress, seq_len, top_k, batch_size, **_):
    from .checkpoints.load import choose_device, load_language_model
    from .training.teach import teach

    model, tokenizer = load_language_model(teacher, dtype=dtype, device=choose_device(device))
    sizes = {"seq_len": seq_len, "top_k": top_k, "batch_size": batch_size}
    record = teach(model, text, tokenizer, out, progress=progress, **sizes)
    print(f"{out}: {record['rows']} sequences of {record['seq_len']} tokens, {record['top_k']} likeliest tokens each")


def distill_options(add):
    add("student", metavar="STUDENT", help="an MHLA model, or a softmax model, which is converted first")
    add("--teacher", help="folder or Hub id of the softmax original (default: STUDENT, if it is one)")
    add("--recipe", required=True, metavar="YAML", help="stages, learning rates, settings")
    add("--text", dest="data", help="file, folder or dataset to train on (default: the recipe's)")
    add("--out", required=True, help="folder to make")
    add("--seed", type=seed_number, default=0, help="decides every random choice (default: 0)")
    add("--tracker", help="tensorboard, or another that accelerate knows")


def run_distill(student, teacher, recipe, seed, **options):
    import torch

    from .checkpoints.load import is_classifier_name, load_language_model
    from .convert import convert
    from .training.loop import distill
    from .training.recipe import read_recipe

    stages = read_recipe(recipe)
    if is_classifier_name(student):
        raise ValueError(
            f"student {student!r} is an image classifier; expected a causal language model (for classifiers there is "
            "conversion/image_classifier.py)"
        )
    model, tokenizer = load_language_model(student, device="cpu")
    if not hasattr(model.config, "mhla"):
        torch.manual_seed(seed)
        convert(model, **stages.settings)
        teacher = teacher or student
    dtype = "bfloat16" if stages.run.get("mixed_precision") == "bf16" else "float32"
    original = teacher and load_language_model(teacher, dtype=dtype, device="cpu")[0]
    distill(model, original, tokenizer=tokenizer, recipe=recipe, seed=seed, **options)


def evaluate_options(add):
    add("models", nargs="+", metavar="DIR", help="folders or Hub ids, shown side by side")
    add("--tasks", help="lm-eval names, groups or patterns, separated by commas; or some of the recipe's")
    add("--recipe", help="name or YAML file of a score recipe: which tasks, how many shots, which protocol")
    add("--set", action="append", default=[], metavar="NAME=VALUE", dest="settings", help="a setting of the recipe")
    add("--include-path", action="append", metavar="FOLDER", help="folder with further tasks")
    add("--num-fewshot", type=int, help="examples in the prompt (default: the task's)")
    add("--limit", type=parse_value, help="documents per task, or a share below 1: for trying out")
    add("--batch-size", default=8, type=parse_value, help='documents at once, or "auto" (default: 8)')
    add("--seed", type=seed_number, help="of everything random (default: lm-eval's own)")
    add("--dtype", default="auto", help="auto (default), float32, bfloat16 or float16")
    add("--device", help="as torch names it (default: cuda if there is one, else cpu)")
    add("--max-length", type=int, help="tokens seen at once (default: the model's)")
    add("--revision", help="branch, tag or commit on the Hub")
    add("--trust-remote-code", action="store_true", help="run source from the model's folder")
    add("--output", help="a .json file, or a folder for several models (default: in the model's folder)")
    add("--force", action="store_true", help="run again what is known")
    add("--trust-scores", action="store_true", help="read results that this machine did not measure")
    add("--markdown", action="store_true", help="print the table as Markdown")
    add("--plot", metavar="PNG", help="draw the scores")


def run_evaluate(settings, markdown, plot, command, **options):
    from .evaluation.runner import evaluate

    compared = evaluate(settings=parse_settings(settings), **options)
    if int(os.environ.get("RANK", "0")):
        return  # of several processes the first one has the scores
    style = "markdown" if markdown else "text"
    print("\n\n".join(table for table in (compared.table(style), compared.paper_table(style)) if table))
    if plot:
        compared.plot(plot)


def push_options(add):
    add("what", metavar="DIR", help="folder of a saved MHLA model, or of a pipeline with one")
    add("repo_id", metavar="USER/NAME", help="Hub id; made when it is not there")
    add("--private", action="store_true", help="make a private repository")
    add("--create-pr", action="store_true", help="open a pull request instead of committing")
    add("--tag", action="append", default=[], dest="tags", help="name that the commit gets; may be given again")
    add("--revision", help="branch to commit to (default: main)")
    add("--message", help="first line of the commit")
    add("--draft", action="store_true", help="a converted language model may come without recall scores")
    add("--license", help="for the card of a model that has none, such as apache-2.0")
    add("--base-model", help="Hub id of the softmax original, for such a card")


def run_push(command, **options):
    from .share.push import push

    pushed = push(**options)
    print(f"{pushed.url}\n{'revision' if pushed.new else 'nothing had changed; revision'} {pushed.revision}")


def analyze_options(add):
    add("models", nargs="+", metavar="DIR", help="language models or image classifiers: folders or Hub ids")
    add("--out", help="folder for JSON and figures")
    add("--data", help="text or images to look at (default: the Python language reference, the digits)")
    add("--samples", type=int, default=8, help="sequences or images (default: 8)")
    add("--length", type=int, default=256, help="tokens in a sequence (default: 256)")
    add("--device", help="as torch names it (default: cuda if there is one, else cpu)")
    add("--trust-remote-code", action="store_true", help="run source from the model's folder")


def run_analyze(**options):
    from .analysis import analyze, render_analysis

    print(render_analysis(analyze(**options)))


def card_options(add):
    add("folder", metavar="DIR", help="an evaluated model's folder, or a folder of cards such as model_cards")
    add("--check", action="store_true", help="write nothing; rendering it again must give the same")
    add("--name", dest="hub_id", metavar="NAME", help="Hub id that the model will have")
    add("--compare", action="append", default=[], metavar="LABEL=DIR", help='such as "teacher=out/teacher"')
    add("--base-model", metavar="ID", help="Hub id of the softmax original")
    add("--license", help="license of the weights, when the original's card states none")
    add("--about", default="", help="a sentence below the title")
    add("--limit", action="append", default=[], metavar="SENTENCE", dest="limits", help="a known failure")
    add("--shelve", metavar="CARDS/NAME", help="put its facts and its card into a folder of cards")
    add("--over-seeds", metavar="JSON", help="with --shelve: results over several seeds, kept with the facts")


def run_card(folder, check, hub_id, compare, shelve, over_seeds, progress, command, **options):
    from .share import card

    if os.path.isdir(os.path.join(folder, card.RESULTS)):
        for path in card.render_shelf(folder, check):
            print(f"{path}: {'says what its files say' if check else 'rendered'}")
    elif check:
        card.check_card(folder)
        print(f"{folder}: its card says what the files beside it say")
    elif shelve:
        print(card.shelve(folder, *os.path.split(shelve), over_seeds))
    elif hub_id is None:
        raise ValueError("name is None; expected the Hub id that the model will have, such as me/model")
    else:
        compared = dict(pair.partition("=")[::2] for pair in compare)
        if odd := [label for label, place in compared.items() if not (label and place)]:
            raise ValueError(f"compare is {odd[0]!r}; expected LABEL=DIR, such as teacher=out/teacher")
        print(card.write_card(folder, name=hub_id, compared=compared, **options))


def audit_options(add):
    add("folder", metavar="FOLDER", help="a saved causal language model, MHLA or any other, with its tokenizer")
    add("--teacher", metavar="BASE", help="folder or Hub id of the model that it was made from")
    add("--text", metavar="FILE", help="text to run it on (default: the Python language reference)")
    add("--tokens", type=int, help="at once at most (default: 4 times the trained length, at most 8192)")
    add("--json", metavar="OUT", dest="out", help="JSON file to write")
    add("--device", help="as torch names it (default: cuda if there is one, else cpu)")
    add("--trust-remote-code", action="store_true", help="run source from the folder that this mhla_hf did not make")


def run_audit(**options):
    from .share.audit import audit, render_audit

    record = audit(**options)
    print(render_audit(record))
    if record["findings"]:
        raise SystemExit(1)


def bench_options(add):
    add("--device", default="cpu", help="as torch names it (default: cpu)")
    add("--threads", type=int, default=1, help="CPU threads (default: 1)")
    add("--seed", type=seed_number, default=0, help="of the inputs (default: 0)")
    add("--out", help="JSON file to write")


def run_bench(**options):
    from . import bench

    record = bench.run_bench(**options)
    print(bench.render_bench(record))
    if any(reason.startswith("is wrong") for row in record["rows"] for reason in row["failed"].values()):
        raise SystemExit(1)


COMMANDS = {
    "convert": (run_convert, convert_options, "Turn a softmax model into an MHLA model.", CONVERT),
    "plan": (run_plan, plan_options, "Say from a configuration what a conversion would be.", PLAN),
    "teach": (run_teach, teach_options, "Write a teacher's likeliest next tokens, to distill without it.", TEACH),
    "distill": (run_distill, distill_options, "Train an MHLA model from its softmax original.", DISTILL),
    "evaluate": (run_evaluate, evaluate_options, "Score language, image and video models side by side.", EVALUATE),
    "card": (run_card, card_options, "Write a model's card from its scores, or check one.", CARD),
    "push": (run_push, push_options, "Share a model on the Hub: checked whole, then one commit.", PUSH),
    "analyze": (run_analyze, analyze_options, "Look at attention: rank, entropy, maps, learned mixing.", ANALYZE),
    "audit": (run_audit, audit_options, "Look for what is wrong with a language model or its card.", AUDIT),
    "bench": (run_bench, bench_options, "Time the operator, after checking that it is right.", BENCH),
}


def seed_number(text):
    """A seed that every generator takes. ValueError for others."""
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"got {text}, expected a whole number from 0 to {2**32 - 1}")
    return int(text)


def parse_layers(text):
    """ "all", "2/3", a list of indices, or None. ValueError for anything else."""
    if text in (None, "all", "2/3"):
        return text
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f'layers is {text!r}; expected "all", "2/3" or indices such as 1,2,4')
    return [int(part) for part in parts]


def script(main, name=None):
    """Call `main` as the scripts of a clone do: bad input ends with one sentence, Ctrl-C with how to go on."""
    try:
        main()
    except USER_ERRORS as error:
        sys.exit(f"{name or os.path.basename(sys.argv[0])}: {error}")
    except KeyboardInterrupt as error:
        print(error, file=sys.stderr)
        sys.exit(130)


def parse_settings(pairs):
    """`NAME=VALUE` texts as a dict; numbers, true, false and lists with commas are read as such. ValueError without =."""
    settings = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise ValueError(f"set is {pair!r}; expected NAME=VALUE, such as block_size=32")
        parts = [parse_value(part.strip()) for part in value.split(",")]
        settings[name.strip()] = parts[0] if len(parts) == 1 else [part for part in parts if part != ""]
    return settings


def parse_value(text):
    """A number, true, false or none where the text says one; else the text."""
    words = {"true": True, "false": False, "none": None}
    for read in (int, float, lambda word: words[word.lower()]):
        try:
            return read(text)
        except (ValueError, KeyError):
            continue
    return text


def main(argv=None):
    """Run the command; returns the exit code: 0, 1 where a bench or an audit found something, 2 for bad input (one sentence
    on stderr), 130 after Ctrl-C."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        given = vars(build_parser().parse_args(argv))
        run, name, debug = given.pop("run"), given.pop("name"), given.pop("debug")
        logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
        logging.getLogger("mhla_hf").setLevel(logging.INFO if given["progress"] else logging.WARNING)
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        importlib.import_module(__package__)._start()
        run(command=shlex.join(["mhla-hf", *argv]), **given)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0
    except KeyboardInterrupt as stop:
        print(f"mhla-hf: {str(stop) or STOPPED}", file=sys.stderr)
        return 130
    except USER_ERRORS as error:
        if debug:
            raise
        print(f"mhla-hf {name}: {describe(error)}", file=sys.stderr)
        return 2
    return 0


def describe(error):
    """One line that says what went wrong."""
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.strerror and error.filename:
        text = f"{error.filename}: {error.strerror}"
    return text or type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
