"""Repeat one of the paper's comparisons on a small machine.

    python -m experiments.studies images         softmax, plain linear attention, and MHLA on digits
    python -m experiments.studies start          mixing from uniform or locality, learned or frozen (table 7a)
    python -m experiments.studies blocks --data photos --out out/blocks      on photos/train/CLASS and photos/test/CLASS
    python -m experiments.studies rank           the rank that attention can have (table 1)
    python -m experiments.studies scaling        time against the number of tokens and of blocks (table 14)

If a study was interrupted, the same command resumes it.
"""

import argparse
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mhla_hf.cli import script

from .rank import render_random_rank, study_random_rank
from .report import render_study, run_study
from .scaling import render_scaling, study_scaling


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run a study, print its table, and return the content of its JSON file."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        "python -m experiments.studies", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", help="images, start, blocks, cpe, resolution, rank, scaling, or a YAML file")
    parser.add_argument("--data", help="folder of train/CLASS and test/CLASS, or a dataset (default: digits)")
    parser.add_argument("--out", help="folder to create, or of a study to resume (default: out/STUDY)")
    parser.add_argument("--seeds", type=int, help="number of seeds (default: the study's)")
    parser.add_argument("--epochs", type=int, help="number of epochs (default: the study's)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    args = parser.parse_args(arguments)
    if args.threads < 1:
        raise ValueError(f"threads: got {args.threads}, expected at least 1.")
    training_options = {name: getattr(args, name) for name in ("data", "seeds", "epochs")}
    options = {
        "threads": args.threads,
        "progress": not args.quiet,
        "command": shlex.join(["python", "-m", "experiments.studies", *arguments]),
    }
    out = args.out or Path("out") / Path(args.study).stem
    render: Callable[[Mapping[str, Any]], str]
    studies_without_training: dict[str, tuple[Callable[..., dict[str, Any]], Callable[[Mapping[str, Any]], str]]] = {
        "rank": (study_random_rank, render_random_rank),
        "scaling": (study_scaling, render_scaling),
    }
    if args.study in studies_without_training:
        if any(training_options.values()):
            raise ValueError(
                f"study: got {args.study}, which trains nothing, expected no --data, --seeds, or --epochs."
            )
        run, render = studies_without_training[args.study]
        results = run(out, **options)
    else:
        render = render_study
        results = run_study(args.study, out, **training_options, **options)
    print(f"\n{render(results)}\n\nThe results, as JSON and pictures, are in {out}.")
    return results


if __name__ == "__main__":
    script(main, "studies")
