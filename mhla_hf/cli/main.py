"""The command line `mhla-hf`. Results go to stdout, all else to stderr.

Sub-commands import their libraries when they run, so that `--help` is instant.
"""

import argparse
import importlib
import logging
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from .. import __version__
from .compare import COMPARE, compare_options, run_compare
from .convert import CONVERT, MERGE, convert_options, merge_options, run_convert, run_merge
from .evaluate import EVALUATE, evaluate_options, run_evaluate
from .hub import CARD, INFO, PUSH, card_options, info_options, push_options, run_card, run_info, run_push
from .train import DISTILL, RECIPES, distill_options, recipes_options, run_distill, run_recipes

USER_ERRORS = (ValueError, TypeError, ImportError, OSError, RuntimeError, MemoryError, ArithmeticError)
FLAG = re.compile(r"^--\w[\w-]*")  # --max_steps is accepted as --max-steps, as in other libraries
SECONDS_BETWEEN_UPDATES = "10"  # of progress bars if stderr is not a terminal
DESCRIPTION = """\
Multi-Head Linear Attention for Hugging Face models: convert, distill, evaluate.
Tab completion: pip install 'mhla_hf[completion]', then eval "$(register-python-argcomplete mhla-hf)" in your shell.
"""
# Name -> (function that runs the command, function that adds its options, help, epilog).
COMMANDS: dict[str, tuple[Callable[..., None], Callable[..., None], str, str]] = {
    "convert": (run_convert, convert_options, "Turn a softmax model into an MHLA model.", CONVERT),
    "merge": (run_merge, merge_options, "Merge an adapter into its original, with the tokenizer.", MERGE),
    "recipes": (run_recipes, recipes_options, "List the training recipes.", RECIPES),
    "distill": (run_distill, distill_options, "Train an MHLA model from its softmax original.", DISTILL),
    "info": (run_info, info_options, "Describe an MHLA model, or what a conversion would give.", INFO),
    "evaluate": (run_evaluate, evaluate_options, "Score language, image and video models side by side.", EVALUATE),
    "compare": (run_compare, compare_options, "Open a page where a model and its conversion answer.", COMPARE),
    "card": (run_card, card_options, "Write a model card from scores, or check one.", CARD),
    "push": (run_push, push_options, "Check a model and upload it to the Hub in one commit.", PUSH),
}


class Parser(argparse.ArgumentParser):
    """Reports errors in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {' '.join(message.split())}; see {self.prog} --help\n")


def build_parser() -> Parser:
    """Build the parser. The default `flags` of each command maps argument names to command-line flags, for errors."""
    layout: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = Parser(prog="mhla-hf", description=DESCRIPTION, **layout)
    parser.add_argument("--version", action="version", version=f"mhla_hf {__version__}")
    commands = parser.add_subparsers(dest="name", required=True, metavar="COMMAND", parser_class=Parser)
    for name, (run, add_options, description, epilog) in COMMANDS.items():
        sub = commands.add_parser(name, help=description, description=description, epilog=epilog, **layout)
        sub.set_defaults(run=run)
        sub.add_argument("--quiet", action="store_false", dest="progress", help="print results and errors only")
        sub.add_argument("--debug", action="store_true", help="show where an error came from")
        add_options(sub.add_argument)
        flags = {action.dest: action.option_strings[-1] for action in sub._actions if action.option_strings}
        flags.update({flag.lstrip("-").replace("-", "_"): flag for flag in list(flags.values())})
        sub.set_defaults(flags=flags)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run a command line: `argv`, or by default this process's arguments.

    Returns:
        The exit code: 0; 1 if stdout was closed; 2 for invalid input; 130 after Ctrl-C. With `--debug`, errors are raised.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser()
    if "_ARGCOMPLETE" in os.environ:
        importlib.import_module("argcomplete").autocomplete(parser)
    logger = logging.getLogger("mhla_hf")
    level = logger.level
    try:
        words = [FLAG.sub(lambda flag: flag[0].replace("_", "-"), word) for word in argv]
        try:
            arguments = vars(parser.parse_args(words))
        except SystemExit as stop:  # after --help, --version, or an error that is printed
            sys.stdout.flush()
            return stop.code if isinstance(stop.code, int) else 0
        run, name, debug, flags = (arguments.pop(key) for key in ("run", "name", "debug", "flags"))
        set_up_output(arguments["progress"])
        arguments["progress"] = arguments["progress"] and sys.stderr.isatty()
        run(command=shlex.join(["mhla-hf", *argv]), **arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # stdout was closed, e.g. by `head`; without this, Python would report it again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt as stop:
        print(f"mhla-hf: {str(stop) or 'interrupted'}", file=sys.stderr)
        return 130
    except USER_ERRORS as error:
        if debug:
            raise
        print(f"mhla-hf {name}: {describe_error(error, flags)}", file=sys.stderr)
        return 2
    finally:
        logger.setLevel(level)
    return 0


def set_up_output(verbose: bool) -> None:
    replace_unprintable()
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("mhla_hf").setLevel(logging.INFO if verbose else logging.WARNING)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_MININTERVAL", SECONDS_BETWEEN_UPDATES)
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # transformers obeys it too


def replace_unprintable() -> None:
    """Make stdout and stderr print question marks for characters that their encoding lacks."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def describe_error(error: BaseException, flags: Mapping[str, str] | None = None) -> str:
    """Describe an error in one line. If the message begins with an argument in `flags`, name its flag instead."""
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.strerror and error.filename:
        text = f"{error.filename}: {error.strerror}"
    argument = re.match(r"(\w+)(?=:| is | ')", text)
    if argument and flags and argument[1] in flags:
        text = flags[argument[1]] + text[argument.end() :]
    return text or type(error).__name__


def script(main: Callable[[], Any], name: str | None = None) -> None:
    """Run the `main` of a script; on an error or Ctrl-C, print one line to stderr and exit with 2 or 130."""
    replace_unprintable()
    try:
        main()
    except USER_ERRORS as error:
        print(f"{name or os.path.basename(sys.argv[0])}: {describe_error(error)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt as error:
        print(str(error) or "stopped", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    sys.exit(main())
