"""`mhla-hf`: parses and calls, nothing else.

A sub-command imports what it needs when it runs, so that `--help` is instant. Results go to stdout, everything else to
stderr. Bad input ends with exit code 2 and one sentence on stderr, Ctrl-C with 130 and how to go on. `--debug` shows where
an error came from.
"""

import argparse
import importlib
import logging
import os
import re
import shlex
import sys

from . import __version__
from .commands import judge, share, train

USER_ERRORS = (ValueError, TypeError, ImportError, OSError, RuntimeError, MemoryError, ArithmeticError)
STOPPED = "interrupted; finished work is kept, and the same command resumes from there"
FLAG = re.compile(r"^--\w[\w-]*")  # --max_steps is --max-steps, as in other libraries
SECONDS = "10"  # between two states of a bar where there is no terminal
ABOUT = """\
Multi-Head Linear Attention for Hugging Face models: convert, distill, evaluate.
Tab completion: pip install 'mhla_hf[completion]', then eval "$(register-python-argcomplete mhla-hf)" in your shell.
"""
COMMANDS = {
    "plan": (train.run_plan, train.plan_options, "Estimate what a conversion saves and costs.", train.PLAN),
    "convert": (train.run_convert, train.convert_options, "Turn a softmax model into an MHLA model.", train.CONVERT),
    "recipes": (train.run_recipes, train.recipes_options, "List the training recipes.", train.RECIPES),
    "teach": (train.run_teach, train.teach_options, "Store a teacher's predictions, to distill without it.", train.TEACH),
    "distill": (
        train.run_distill, train.distill_options, "Train an MHLA model from its softmax original.", train.DISTILL,
    ),
    "info": (share.run_info, share.info_options, "Describe a saved MHLA model in ten lines.", share.INFO),
    "tasks": (judge.run_tasks, judge.tasks_options, "Make evaluation tasks from your own text.", judge.TASKS),
    "evaluate": (
        judge.run_evaluate, judge.evaluate_options, "Score language, image and video models side by side.", judge.EVALUATE,
    ),
    "card": (share.run_card, share.card_options, "Write a model card from scores, or check one.", share.CARD),
    "push": (share.run_push, share.push_options, "Check a model and upload it to the Hub in one commit.", share.PUSH),
    "analyze": (
        judge.run_analyze, judge.analyze_options, "Show the rank, entropy, maps, and mixing of attention.", judge.ANALYZE,
    ),
    "audit": (
        judge.run_audit, judge.audit_options, "Check a language model and its card for problems.", judge.AUDIT,
    ),
    "bench": (judge.run_bench, judge.bench_options, "Check the operator, then time it.", judge.BENCH),
}  # fmt: skip


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that says what is wrong in one sentence, without the usage before it."""

    def error(self, message):
        self.exit(2, f"{self.prog}: {' '.join(message.split())}; see {self.prog} --help\n")


def build_parser():
    """The parser of the whole command; the options of a sub-command have the names of the function's that it calls."""
    layout = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = Parser(prog="mhla-hf", description=ABOUT, **layout)
    parser.add_argument("--version", action="version", version=f"mhla_hf {__version__}")
    commands = parser.add_subparsers(dest="name", required=True, metavar="COMMAND", parser_class=Parser)
    for name, (run, options, about, epilog) in COMMANDS.items():
        sub = commands.add_parser(name, help=about, description=about, epilog=epilog, **layout)
        sub.set_defaults(run=run)
        sub.add_argument("--quiet", action="store_false", dest="progress", help="print results and errors only")
        sub.add_argument("--debug", action="store_true", help="show where an error came from")
        options(sub.add_argument)
        named = [(action.dest, action.option_strings[-1]) for action in sub._actions if action.option_strings]
        flags = dict(named) | {flag.lstrip("-").replace("-", "_"): flag for _, flag in named}
        sub.set_defaults(flags=flags)
    return parser


def main(argv=None):
    """Run the command; returns the exit code: 0, 1 where a bench or an audit found something, 2 for bad input (one sentence
    on stderr), 130 after Ctrl-C."""
    logger = logging.getLogger("mhla_hf")
    level = logger.level
    try:
        code = execute(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever read the results has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    finally:
        logger.setLevel(level)


def execute(argv):
    """Parse and run; returns the exit code, as `main`."""
    parser = build_parser()
    if "_ARGCOMPLETE" in os.environ:
        importlib.import_module("argcomplete").autocomplete(parser)
    try:
        given = vars(parser.parse_args([FLAG.sub(lambda flag: flag[0].replace("_", "-"), word) for word in argv]))
        run, name, debug, flags = (given.pop(key) for key in ("run", "name", "debug", "flags"))
        prepare(given["progress"])
        given["progress"] = given["progress"] and sys.stderr.isatty()
        run(command=shlex.join(["mhla-hf", *argv]), **given)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0
    except KeyboardInterrupt as stop:
        print(f"mhla-hf: {str(stop) or STOPPED}", file=sys.stderr)
        return 130
    except USER_ERRORS as error:
        if debug or isinstance(error, BrokenPipeError):
            raise
        print(f"mhla-hf {name}: {describe(error, flags)}", file=sys.stderr)
        return 2
    return 0


def prepare(notes):
    """Streams and libraries as a command needs them. notes: whether what goes on is told on stderr."""
    any_character()
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("mhla_hf").setLevel(logging.INFO if notes else logging.WARNING)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_MININTERVAL", SECONDS)  # of other libraries' bars
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # of transformers' too


def any_character():
    """What a terminal cannot show becomes a question mark there, and no error."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def describe(error, flags=()):
    """One line that says what went wrong; an argument that it begins with is named by its flag."""
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.strerror and error.filename:
        text = f"{error.filename}: {error.strerror}"
    name = re.match(r"(\w+)(?=:| is | ')", text)
    if name and name[1] in flags:
        text = flags[name[1]] + text[name.end() :]
    return text or type(error).__name__


def script(main, name=None):
    """Call `main` as the scripts of a clone do: bad input is one sentence and exit code 2, Ctrl-C says how to go on."""
    any_character()
    try:
        main()
    except USER_ERRORS as error:
        print(f"{name or os.path.basename(sys.argv[0])}: {describe(error)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt as error:
        print(str(error) or "stopped", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    sys.exit(main())
