"""Turn Wan into a video model with MHLA: load, convert, distill from the original, evaluate, write the card.

    python conversion/wan.py --data prompts.txt --out out/wan
    torchrun --nproc_per_node 4 conversion/wan.py --recipe wan_paper --data LATENTS --out out/wan
    python conversion/wan.py --data prompts.txt --out out/wan --judge table_5_vbench --set python=PYTHON_WITH_VBENCH

No videos are needed: for prompts, the softmax original samples trajectories, and the student learns to predict what the
original predicts on them. LATENTS is for training as in the paper. The steps are in `journey.py`.
"""

from typing import Any

from journey import run

from mhla_hf.cli.main import script


def main(arguments: list[str] | None = None) -> Any:
    """Run the script, and return the trained pipeline."""
    return run(__doc__, "wan_hybrid", arguments)


if __name__ == "__main__":
    script(main)
