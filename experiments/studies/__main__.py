"""Repeat one of the paper's comparisons on a small machine.

    python -m experiments.studies images         softmax, plain linear attention and MHLA learn digits, three seeds
    python -m experiments.studies start          uniform or locality start, learned or frozen (table 7a), on digits
    python -m experiments.studies blocks --data photos --out out/blocks      on photos/train/CLASS and photos/test/CLASS
    python -m experiments.studies rank           the rank that attention can have (table 1)
    python -m experiments.studies scaling        time against the number of tokens and of blocks (table 14)

Stopped at any moment, the same command goes on where it was.
"""

import argparse
import shlex
import sys
from pathlib import Path

from mhla_hf.cli import script

from .rank import render_random_rank, study_random_rank
from .report import render_study, run_study
from .scaling import render_scaling, study_scaling


def main(arguments=None):
    """Run a study and print its table; returns what its JSON file holds."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        "python -m experiments.studies", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "study", help="images, start, blocks, cpe, resolution, rank, scaling, or a YAML file of one's own"
    )
    parser.add_argument("--data", help="folder of train/CLASS and test/CLASS, or a dataset (default: digits)")
    parser.add_argument("--out", help="folder to make or to go on in (default: out/STUDY)")
    parser.add_argument("--seeds", type=int, help="how many (default: the study's)")
    parser.add_argument("--epochs", type=int, help="how many (default: the study's)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    given = parser.parse_args(arguments)
    if given.threads < 1:
        raise ValueError(f"threads: got {given.threads}, expected a whole number of at least 1")
    own = {name: getattr(given, name) for name in ("data", "seeds", "epochs")}
    common = {
        "threads": given.threads,
        "progress": not given.quiet,
        "command": shlex.join(["python", "-m", "experiments.studies", *arguments]),
    }
    out = given.out or Path("out") / Path(given.study).stem
    measured = {"rank": (study_random_rank, render_random_rank), "scaling": (study_scaling, render_scaling)}
    if given.study in measured:
        if any(own.values()):
            raise ValueError(f"study: {given.study} trains nothing, expected no --data, --seeds or --epochs with it")
        run, render = measured[given.study]
        results = run(out, **common)
    else:
        render, results = render_study, run_study(given.study, out, **own, **common)
    print(f"\n{render(results)}\n\nin {out}: the numbers as JSON, and pictures")
    return results


if __name__ == "__main__":
    script(main, "studies")
