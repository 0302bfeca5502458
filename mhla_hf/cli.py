"""`mhla-hf`: parses and calls, nothing else.

A sub-command imports what it needs when it runs, so that `--help` is instant. Bad input ends with exit code 2 and one
sentence on stderr, Ctrl-C with 130 and how to go on. Unusual: `--debug` shows where an error came from.
"""

import argparse
import logging
import os
import shlex
import sys

from . import __version__

USER_ERRORS = (ValueError, TypeError, ImportError, OSError)
STOPPED = "stopped; what was finished is kept, and the same command goes on from there"
DEMO = """\
example:
  mhla-hf demo                                  the whole journey into out/, on two CPU cores
  mhla-hf demo --model HuggingFaceTB/SmolLM2-135M --text notes.txt --out out/mine
Stopped at any moment, the same command goes on where it was.
"""
CONVERT = """\
example:
  mhla-hf convert HuggingFaceTB/SmolLM2-135M out/smollm-mhla --layers 2/3 --set block_size=32
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
Scores are kept in results.json in each model's folder; what is known is not run again.
"""
BENCH = """\
example:
  mhla-hf bench --quick                         MHLA against softmax and plain linear attention, on this machine
  mhla-hf bench --suite full --out out/bench
"""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that says what is wrong in one sentence, without the usage before it."""

    def error(self, message):
        self.exit(2, f"{self.prog}: {' '.join(message.split())}; see {self.prog} --help\n")


def build_parser():
    """The parser of the whole command."""
    parser = Parser(
        prog="mhla-hf",
        description="Multi-Head Linear Attention for Hugging Face models: convert, distil, evaluate.",
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

    _demo_options(add("demo", run_demo, "Train, convert, distil, judge and share a small model, with figures.", DEMO))
    _convert_options(add("convert", run_convert, "Turn a softmax language model into an MHLA model.", CONVERT))
    _distill_options(add("distill", run_distill, "Train an MHLA model from its softmax original.", DISTILL))
    _evaluate_options(add("evaluate", run_evaluate, "Score language models on lm-eval tasks.", EVALUATE))
    _bench_options(add("bench", run_bench, "Time the operator, after checking that it is right.", BENCH))
    return parser


def _demo_options(sub):
    sub.add_argument("--out", default="out", help="folder to make or to go on in (default: out)")
    sub.add_argument("--model", help="folder or Hub id of a softmax model (default: train a small Llama)")
    sub.add_argument("--text", help="file, folder or dataset to train on (default: the Python language reference)")
    sub.add_argument("--seeds", type=int, default=1, help="repeat everything with so many seeds (default: 1)")
    sub.add_argument("--license", help="licence of --model, when its card states none")
    sub.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")


def _convert_options(sub):
    sub.add_argument("model", metavar="DIR_OR_ID", help="folder or Hub id of a causal language model")
    sub.add_argument("out", metavar="OUT", help="folder to make")
    sub.add_argument("--layers", help='"all", "2/3" (default) or indices such as 1,2,4')
    sub.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of MHLASettings")
    sub.add_argument("--dtype", default="auto", help="auto (default), float32, bfloat16 or float16")
    sub.add_argument("--seed", type=int, default=0, help="of the new parameters' start (default: 0)")
    sub.add_argument("--revision", help="branch, tag or commit on the Hub")
    sub.add_argument("--overwrite", action="store_true", help="OUT may hold something that this replaces")


def _distill_options(sub):
    sub.add_argument("student", metavar="STUDENT", help="an MHLA model, or a softmax model, which is converted first")
    sub.add_argument("--teacher", help="folder or Hub id of the softmax original (default: STUDENT, if it is one)")
    sub.add_argument("--recipe", required=True, metavar="YAML", help="stages, learning rates, settings")
    sub.add_argument("--text", help="file, folder or dataset to train on (default: the recipe's)")
    sub.add_argument("--out", required=True, help="folder to make")
    sub.add_argument("--seed", type=int, default=0, help="decides every random choice (default: 0)")
    sub.add_argument("--tracker", help="tensorboard, or another that accelerate knows")


def _evaluate_options(sub):
    sub.add_argument("models", nargs="+", metavar="DIR", help="folders or Hub ids, shown side by side")
    sub.add_argument("--tasks", required=True, help="names, groups or patterns, separated by commas")
    sub.add_argument("--include-path", action="append", metavar="FOLDER", help="folder with further tasks")
    sub.add_argument("--num-fewshot", type=int, help="examples in the prompt (default: the task's)")
    sub.add_argument("--limit", type=float, help="documents per task, or a share below 1: for trying out")
    sub.add_argument("--batch-size", default="8", help='documents at once, or "auto" (default: 8)')
    sub.add_argument("--seed", type=int, help="of everything random (default: lm-eval's own)")
    sub.add_argument("--dtype", default="auto", help="auto (default), float32, bfloat16 or float16")
    sub.add_argument("--device", help="as torch names it (default: cuda if there is one, else cpu)")
    sub.add_argument("--max-length", type=int, help="tokens seen at once (default: the model's)")
    sub.add_argument("--revision", help="branch, tag or commit on the Hub")
    sub.add_argument("--trust-remote-code", action="store_true", help="run source from the model's folder")
    sub.add_argument("--output", help="a .json file, or a folder for several models (default: in the model's folder)")
    sub.add_argument("--force", action="store_true", help="run again what is known")
    sub.add_argument("--markdown", action="store_true", help="print the table as Markdown")


def _bench_options(sub):
    sub.add_argument("--quick", action="store_const", const="quick", dest="suite", help="the short suite (default)")
    sub.add_argument("--suite", help="quick, full or wide")
    sub.add_argument("--device", default="cpu", help="as torch names it (default: cpu)")
    sub.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    sub.add_argument("--seed", type=int, default=0, help="of the inputs (default: 0)")
    sub.add_argument("--out", help="folder for bench.json and bench.png")


def run_demo(given, command):
    """mhla-hf demo"""
    from .demo.journey import run_demo

    run_demo(
        given.out,
        given.model,
        given.text,
        given.seeds,
        license=given.license,
        threads=given.threads,
        progress=not given.quiet,
        command=command,
    )


def run_convert(given, command):
    """mhla-hf convert"""
    settings = parse_settings(given.set)
    layers = parse_layers(given.layers)

    import torch

    from .patch import convert
    from .scores.loading import check_new_folder, load_language_model, save_language_model

    check_new_folder(given.out, given.overwrite)
    model, tokenizer = load_language_model(given.model, dtype=given.dtype, device="cpu", revision=given.revision)
    torch.manual_seed(given.seed)
    convert(model, layers=layers, **settings)
    save_language_model(model, tokenizer, given.out, given.overwrite)
    layers, total = model.config.mhla["layers"], model.config.num_hidden_layers
    print(f"{given.out}: layers {layers} of {total} are MHLA; now distil it: mhla-hf distill {given.out} --teacher ...")


def run_distill(given, command):
    """mhla-hf distill"""
    import torch

    from .patch import convert
    from .scores.loading import load_language_model
    from .training.loop import distill
    from .training.recipe import read_recipe

    recipe = read_recipe(given.recipe)
    student, tokenizer = load_language_model(given.student, dtype="float32", device="cpu")
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
    from .scores.language import evaluate

    limit = given.limit
    compared = evaluate(
        given.models,
        given.tasks,
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
        progress=not given.quiet,
    )
    print(compared.table("markdown" if given.markdown else "text"))


def run_bench(given, command):
    """mhla-hf bench"""
    from .bench import run_bench

    run_bench(
        given.suite or "quick",
        device=given.device,
        threads=given.threads,
        seed=given.seed,
        out=given.out,
        progress=not given.quiet,
        command=command,
    )


def parse_layers(text):
    """ "all", "2/3", a list of indices, or None. ValueError for anything else."""
    if text in (None, "all", "2/3"):
        return text
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f'layers is {text!r}; expected "all", "2/3" or indices such as 1,2,4')
    return [int(part) for part in parts]


def parse_settings(pairs):
    """`NAME=VALUE` texts as a dict; numbers, true and false are read as such. ValueError when a text has no =."""
    settings = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise ValueError(f"set is {pair!r}; expected NAME=VALUE, such as block_size=32")
        value = value.strip()
        words = {"true": True, "false": False}
        settings[name.strip()] = int(value) if value.isdecimal() else words.get(value.lower(), value)
    return settings


def main(argv=None):
    """Run the command; returns the exit code: 0, 2 for bad input (one sentence on stderr), 130 after Ctrl-C."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        given = build_parser().parse_args(argv)
        logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
        logging.getLogger("mhla_hf").setLevel(logging.WARNING if given.quiet else logging.INFO)
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
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
