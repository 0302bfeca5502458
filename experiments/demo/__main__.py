"""Convert, distill, judge and share a small model, with figures.

    python -m experiments.demo                    into out/, in 3.5 minutes of CPU time, one thread
    python -m experiments.demo --full --seeds 3   trains the softmax model first; MHLA in all layers as well; three seeds
    python -m experiments.demo --model HuggingFaceTB/SmolLM2-135M --data notes.txt    into out-SmolLM2-135M-notes/

Stopped at any moment, the same command goes on where it was.
"""

import argparse
import shlex
import sys

from mhla_hf.cli import script

from .journey import run_demo


def main(arguments=None):
    """Run the demo; returns what results.json holds."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        "python -m experiments.demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", help="folder to make or to go on in (default: out, with --model M out-M, and so on)")
    parser.add_argument("--model", help="folder or Hub id of a softmax model (default: our small Llama)")
    parser.add_argument("--full", action="store_true", help="train the softmax model first, three students, for longer")
    parser.add_argument("--data", dest="text", help="file, folder or dataset (default: the Python language reference)")
    lookups = parser.add_mutually_exclusive_group()
    lookups.add_argument(
        "--plain",
        action="store_true",
        default=None,
        help="no lookups between the lines of the text (default with --data)",
    )
    lookups.add_argument(
        "--lookups", action="store_false", dest="plain", default=None, help="lookups between the lines of --data too"
    )
    parser.add_argument("--seeds", type=int, default=1, help="with --full: so many seeds of everything (default: 1)")
    parser.add_argument("--license", help="license of --model, when its card states none")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    given = vars(parser.parse_args(arguments))
    command = shlex.join(["python", "-m", "experiments.demo", *arguments])
    return run_demo(progress=not given.pop("quiet"), command=command, **given)


if __name__ == "__main__":
    script(main, "demo")
