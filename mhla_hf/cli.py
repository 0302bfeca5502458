"""`mhla-hf`: parses and calls, nothing else.

A sub-command imports what it needs when it runs, so that `--help` is instant. Bad input ends with exit code 2 and one
sentence on stderr, Ctrl-C with 130 and how to go on. `--debug` shows where an error came from.
"""

import argparse
import importlib
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
  mhla-hf convert facebook/deit-small-patch16-224 out/deit-mhla --set layout=4,4
A converted model has to be distilled before it is good again: mhla-hf distill.
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
  mhla-hf evaluate out/mhla --tasks heldout_recall --include-path out/tasks
  mhla-hf evaluate out/mhla out/teacher --recipe table_6_language          the paper's table, in its layout
  mhla-hf evaluate out/mhla out/teacher --recipe recall --set lengths=512,1024 --plot recall.png
  mhla-hf evaluate out/dit --trust-remote-code --recipe table_9_class_to_image --set reference=imagenet256.npz
  mhla-hf evaluate out/wan --trust-remote-code --recipe table_5_vbench --set python=/opt/vbench/bin/python
Recipes: table_2_imagenet, table_4_text_to_image, table_5_vbench, table_6_language, table_8_longbench,
table_9_class_to_image, recall, ruler, speed, or a YAML file. For images and videos on several processes: torchrun
-m mhla_hf.cli evaluate ...
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
BENCH = """\
example:
  mhla-hf bench --quick                         MHLA against softmax and plain linear attention, on this machine
  mhla-hf bench --suite decode --device cuda    one more token after 8k to 1M
"""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that says what is wrong in one sentence, without the usage before it."""

    def error(self, message):
        self.exit(2, f"{self.prog}: {' '.join(message.split())}; see {self.prog} --help\n")


def build_parser():
    """The parser of the whole command."""
    parser = Parser(
        prog="mhla-hf",
        description="Multi-Head Linear Attention for Hugging Face models: convert, distill, evaluate.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"mhla_hf {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)

    def add(name, run, about, epilog):
        sub = commands.add_parser(
            name, help=about, description=about, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )  # fmt: skip
        sub.set_defaults(run=run)
        sub.add_argument("--quiet", action="store_true", help="no progress bars and notes")
        sub.add_argument("--debug", action="store_true", help="show where an error came from")
        return sub

    _convert_options(add("convert", run_convert, "Turn a softmax model into an MHLA model.", CONVERT))
    _distill_options(add("distill", run_distill, "Train an MHLA model from its softmax original.", DISTILL))
    _evaluate_options(add("evaluate", run_evaluate, "Score language, image and video models side by side.", EVALUATE))
    _card_options(add("card", run_card, "Write a model's card from its scores, or check one.", CARD))
    _push_options(add("push", run_push, "Share a model on the Hub: checked whole, then one commit.", PUSH))
    _analyze_options(add("analyze", run_analyze, "Look at attention: rank, entropy, maps, learned mixing.", ANALYZE))
    _bench_options(add("bench", run_bench, "Time the operator, after checking that it is right.", BENCH))
    return parser


def _convert_options(sub):
    sub.add_argument(
        "model", metavar="DIR_OR_ID", help="folder or Hub id of a language model, an image classifier or a pipeline"
    )
    sub.add_argument("out", metavar="OUT", help="folder to make")
    sub.add_argument("--layers", help='"all", "2/3" or indices such as 1,2,4 (default: 2/3; of image models: all)')
    sub.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of MHLASettings")
    sub.add_argument(
        "--calibrate", metavar="TEXT", help="text by which a language model's new layers start from the teacher"
    )
    sub.add_argument("--keep", choices=["auto"], help="measure on that text which layers (of --layers) keep softmax")
    sub.add_argument("--budget", metavar="N", help="of --keep: a number of layers, or bytes of cache such as 64MiB")
    sub.add_argument("--dtype", default="auto", help="auto (default), float32, bfloat16 or float16")
    sub.add_argument("--seed", type=seed_number, default=0, help="of the new parameters' start (default: 0)")
    sub.add_argument("--revision", help="branch, tag or commit on the Hub")
    sub.add_argument("--overwrite", action="store_true", help="OUT may hold an MHLA model, which this replaces")


def _distill_options(sub):
    sub.add_argument("student", metavar="STUDENT", help="an MHLA model, or a softmax model, which is converted first")
    sub.add_argument("--teacher", help="folder or Hub id of the softmax original (default: STUDENT, if it is one)")
    sub.add_argument("--recipe", required=True, metavar="YAML", help="stages, learning rates, settings")
    sub.add_argument("--text", help="file, folder or dataset to train on (default: the recipe's)")
    sub.add_argument("--out", required=True, help="folder to make")
    sub.add_argument("--seed", type=seed_number, default=0, help="decides every random choice (default: 0)")
    sub.add_argument("--tracker", help="tensorboard, or another that accelerate knows")


def _evaluate_options(sub):
    sub.add_argument("models", nargs="+", metavar="DIR", help="folders or Hub ids, shown side by side")
    sub.add_argument("--tasks", help="lm-eval names, groups or patterns, separated by commas; or some of the recipe's")
    sub.add_argument(
        "--recipe", help="name or YAML file of a score recipe: which tasks, how many shots, which protocol"
    )
    sub.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the recipe")
    sub.add_argument("--include-path", action="append", metavar="FOLDER", help="folder with further tasks")
    sub.add_argument("--num-fewshot", type=int, help="examples in the prompt (default: the task's)")
    sub.add_argument("--limit", type=float, help="documents per task, or a share below 1: for trying out")
    sub.add_argument("--batch-size", default="8", help='documents at once, or "auto" (default: 8)')
    sub.add_argument("--seed", type=seed_number, help="of everything random (default: lm-eval's own)")
    sub.add_argument("--dtype", default="auto", help="auto (default), float32, bfloat16 or float16")
    sub.add_argument("--device", help="as torch names it (default: cuda if there is one, else cpu)")
    sub.add_argument("--max-length", type=int, help="tokens seen at once (default: the model's)")
    sub.add_argument("--revision", help="branch, tag or commit on the Hub")
    sub.add_argument("--trust-remote-code", action="store_true", help="run source from the model's folder")
    sub.add_argument("--output", help="a .json file, or a folder for several models (default: in the model's folder)")
    sub.add_argument("--force", action="store_true", help="run again what is known")
    sub.add_argument("--trust-scores", action="store_true", help="read results that this machine did not measure")
    sub.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    sub.add_argument("--plot", metavar="PNG", help="draw the scores")


def _push_options(sub):
    sub.add_argument("folder", metavar="DIR", help="folder of a saved MHLA model, or of a pipeline with one")
    sub.add_argument("repo_id", metavar="USER/NAME", help="Hub id; made when it is not there")
    sub.add_argument("--private", action="store_true", help="make a private repository")
    sub.add_argument("--create-pr", action="store_true", help="open a pull request instead of committing")
    sub.add_argument("--tag", action="append", default=[], help="name that the commit gets; may be given again")
    sub.add_argument("--revision", help="branch to commit to (default: main)")
    sub.add_argument("--message", help="first line of the commit")
    sub.add_argument("--draft", action="store_true", help="a converted language model may come without recall scores")
    sub.add_argument("--license", help="for the card of a model that has none, such as apache-2.0")
    sub.add_argument("--base-model", help="Hub id of the softmax original, for such a card")


def _analyze_options(sub):
    sub.add_argument(
        "models", nargs="+", metavar="DIR", help="language models or image classifiers: folders or Hub ids"
    )
    sub.add_argument("--out", help="folder for JSON and figures")
    sub.add_argument("--data", help="text or images to look at (default: the Python language reference, the digits)")
    sub.add_argument("--samples", type=int, help="sequences or images (default: 8)")
    sub.add_argument("--length", type=int, help="tokens in a sequence (default: 256)")
    sub.add_argument("--tolerance", type=float, help="of the rank, over the largest singular value (default: fp32's)")
    sub.add_argument("--device", help="as torch names it (default: cuda if there is one, else cpu)")
    sub.add_argument("--trust-remote-code", action="store_true", help="run source from the model's folder")


def _card_options(sub):
    sub.add_argument(
        "folder", metavar="DIR", help="an evaluated model's folder, or a folder of cards such as model_cards"
    )
    sub.add_argument("--check", action="store_true", help="write nothing; rendering it again must give the same")
    sub.add_argument("--name", help="Hub id that the model will have")
    sub.add_argument(
        "--compare", action="append", default=[], metavar="LABEL=DIR", help='such as "teacher=out/teacher"'
    )
    sub.add_argument("--base-model", metavar="ID", help="Hub id of the softmax original")
    sub.add_argument("--license", help="license of the weights, when the original's card states none")
    sub.add_argument("--about", default="", help="a sentence below the title")
    sub.add_argument("--limit", action="append", default=[], metavar="SENTENCE", help="a known failure")
    sub.add_argument("--shelve", metavar="CARDS/NAME", help="put its facts and its card into a folder of cards")
    sub.add_argument(
        "--over-seeds", metavar="JSON", help="with --shelve: results over several seeds, kept with the facts"
    )


def _bench_options(sub):
    sub.add_argument("--quick", action="store_const", const="quick", dest="suite", help="the short suite (default)")
    sub.add_argument("--suite", help="quick or decode")
    sub.add_argument("--device", default="cpu", help="as torch names it (default: cpu)")
    sub.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    sub.add_argument("--seed", type=seed_number, default=0, help="of the inputs (default: 0)")
    sub.add_argument("--out", help="JSON file to write")


def run_convert(given, command):
    """mhla-hf convert"""
    settings = parse_settings(given.set)
    layers = parse_layers("all" if given.keep and given.layers is None else given.layers)
    if (given.keep and not given.budget) or (given.budget and not (given.keep and given.calibrate)):
        raise ValueError("keep: expected all of --calibrate TEXT --keep auto --budget N, or the first alone")

    import torch

    from .checkpoints.load import is_classifier_name, is_pipeline, load_classifier, load_language_model, load_pipeline
    from .checkpoints.save import check_new_folder, save_language_model, save_pipeline
    from .convert import convert
    from .training.start import start_from_text

    check_new_folder(given.out, given.overwrite)
    if is_pipeline(given.model, given.revision):
        if given.calibrate:
            raise ValueError(f"calibrate: came with {given.model!r}, a pipeline; expected a language model")
        pipe = load_pipeline(given.model, dtype=given.dtype, device="cpu", revision=given.revision)
        torch.manual_seed(given.seed)
        model = convert(pipe, layers=layers, **settings).transformer
        save_pipeline(pipe, given.out, given.overwrite)
        chosen = model.config.mhla["layers"]
        print(f"{given.out}: {type(model).__name__}, layers {chosen} are MHLA; scripts that distill it: conversion/")
        return
    if is_classifier_name(given.model, given.revision):
        model, tools = load_classifier(given.model, dtype=given.dtype, device="cpu", revision=given.revision)
        further = "conversion/image_classifier.py"
    else:
        model, tools = load_language_model(given.model, dtype=given.dtype, device="cpu", revision=given.revision)
        further = f"mhla-hf distill {given.out} --teacher ..."
    torch.manual_seed(given.seed)
    convert(model, layers=layers, **settings)
    if given.calibrate:
        start_from_text(model, tools, given.calibrate, given.budget, given.seed)
    save_language_model(model, tools, given.out, given.overwrite)
    layers, total = model.config.mhla["layers"], model.config.num_hidden_layers
    print(f"{given.out}: layers {layers} of {total} are MHLA; now distill it: {further}")


def run_distill(given, command):
    """mhla-hf distill"""
    import torch

    from .checkpoints.load import is_classifier_name, load_language_model
    from .convert import convert
    from .training.loop import distill
    from .training.recipe import read_recipe

    recipe = read_recipe(given.recipe)
    if is_classifier_name(given.student):
        raise ValueError(
            f"student {given.student!r} is an image classifier; expected a causal language model (for classifiers there is "
            "conversion/image_classifier.py)"
        )
    student, tokenizer = load_language_model(given.student, device="cpu")
    softmax = not hasattr(student.config, "mhla")
    if softmax:
        torch.manual_seed(given.seed)
        convert(student, **recipe.settings)
    name = given.teacher or (given.student if softmax else None)
    half = recipe.run.get("mixed_precision") == "bf16"
    teacher = name and load_language_model(name, dtype="bfloat16" if half else "float32", device="cpu")[0]
    distill(
        student,
        teacher,
        out=given.out,
        data=given.text,
        tokenizer=tokenizer,
        recipe=given.recipe,
        seed=given.seed,
        tracker=given.tracker,
        progress=not given.quiet,
        command=command,
    )


def run_evaluate(given, command):
    """mhla-hf evaluate"""
    from .evaluation.figures import check_plot
    from .evaluation.runner import evaluate

    if given.plot:
        check_plot(given.plot)
    limit = given.limit
    compared = evaluate(
        given.models,
        given.tasks,
        recipe=given.recipe,
        settings=parse_settings(given.set),
        output=given.output,
        include_path=given.include_path,
        num_fewshot=given.num_fewshot,
        limit=int(limit) if limit is not None and limit.is_integer() else limit,
        batch_size=int(given.batch_size) if given.batch_size.isdecimal() else given.batch_size,
        seed=given.seed,
        dtype=given.dtype,
        device=given.device,
        max_length=given.max_length,
        revision=given.revision,
        trust_remote_code=given.trust_remote_code,
        force=given.force,
        trust_scores=given.trust_scores,
        progress=not given.quiet,
    )
    if int(os.environ.get("RANK", "0")):
        return  # of several processes the first one has the scores
    style = "markdown" if given.markdown else "text"
    print("\n\n".join(table for table in (compared.table(style), compared.paper_table(style)) if table))
    if given.plot:
        compared.plot(given.plot)


def run_push(given, command):
    """mhla-hf push"""
    from .share.push import push

    pushed = push(
        given.folder,
        given.repo_id,
        private=given.private,
        create_pr=given.create_pr,
        tags=given.tag,
        revision=given.revision,
        message=given.message,
        draft=given.draft,
        license=given.license,
        base_model=given.base_model,
        progress=not given.quiet,
    )
    print(f"{pushed.url}\n{'revision' if pushed.new else 'nothing had changed; revision'} {pushed.revision}")


def run_analyze(given, command):
    """mhla-hf analyze"""
    from .analysis import analyze, render_analysis

    settings = {name: getattr(given, name) for name in ("data", "samples", "length", "tolerance", "device")}
    settings = {name: value for name, value in settings.items() if value is not None}
    record = analyze(
        given.models,
        out=given.out,
        trust_remote_code=given.trust_remote_code,
        progress=not given.quiet,
        command=command,
        **settings,
    )
    print(render_analysis(record))


def run_card(given, command):
    """mhla-hf card"""
    from pathlib import Path

    from .checkpoints.files import write_text
    from .share.card import RESULTS, check_card, compare_card, render_card, shelf_facts, shelf_names, shelve, write_card
    from .share.facts import read_json

    folder = Path(given.folder)
    if (folder / RESULTS).is_dir():
        for name in shelf_names(folder):
            card, text = folder / f"{name}.md", render_card(shelf_facts(folder, name))
            compare_card(card, text) if given.check else write_text(card, text)
            print(f"{card}: {'says what its files say' if given.check else 'rendered'}")
        return
    if given.check:
        check_card(folder)
        print(f"{folder / 'README.md'}: says what its files say")
    elif given.shelve:
        place = Path(given.shelve)
        further = {"over_seeds": read_json(*os.path.split(given.over_seeds))} if given.over_seeds else {}
        print(shelve(folder, place.parent, place.name, **further))
    elif given.name is None:
        raise ValueError("name is None; expected the Hub id that the model will have, such as me/model")
    else:
        pairs = [pair.partition("=") for pair in given.compare]
        if odd := [label for label, equals, place in pairs if not (label and equals and place)]:
            raise ValueError(f"compare is {odd[0]!r}; expected LABEL=DIR, such as teacher=out/teacher")
        print(
            write_card(
                folder,
                name=given.name,
                base_model=given.base_model,
                compared={label: place for label, _, place in pairs},
                license=given.license,
                about=given.about,
                limits=given.limit,
            )
        )


def run_bench(given, command):
    """mhla-hf bench"""
    from .bench import render_bench, run_bench

    record = run_bench(
        given.suite or "quick",
        device=given.device,
        threads=given.threads,
        seed=given.seed,
        out=given.out,
        progress=not given.quiet,
        command=command,
    )
    print(render_bench(record))
    if any(reason.startswith("is wrong") for row in record["rows"] for reason in row["failed"].values()):
        raise SystemExit(1)


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
        parts = [_parse_value(part.strip()) for part in value.split(",")]
        settings[name.strip()] = parts[0] if len(parts) == 1 else [part for part in parts if part != ""]
    return settings


def _parse_value(text):
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def main(argv=None):
    """Run the command; returns the exit code: 0, 2 for bad input (one sentence on stderr), 130 after Ctrl-C."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        given = build_parser().parse_args(argv)
        logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
        logging.getLogger("mhla_hf").setLevel(logging.WARNING if given.quiet else logging.INFO)
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        importlib.import_module(__package__)._start()
        given.run(given, shlex.join(["mhla-hf", *argv]))
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0
    except KeyboardInterrupt as stop:
        print(f"mhla-hf: {str(stop) or STOPPED}", file=sys.stderr)
        return 130
    except USER_ERRORS as error:
        if given.debug:
            raise
        print(f"mhla-hf {given.command}: {describe(error)}", file=sys.stderr)
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
