"""Wan becomes a video model with MHLA: load, convert, distill from itself, judge, card.

    python conversion/wan.py --data prompts.txt --out out/wan
    torchrun --nproc_per_node 8 conversion/wan.py --recipe wan_paper --data LATENTS --out out/wan
    python conversion/wan.py --data prompts.txt --out out/wan --judge table_5_vbench --set python=PYTHON_WITH_VBENCH

No video is needed: prompts alone mean that the softmax original samples, and that the student learns to say what it says
on its way. Latents are for the paper's own training. The steps are in `journey.py`.
"""

from journey import run

from mhla_hf.cli import script


def main(arguments=None):
    """Run the script; returns the trained pipeline."""
    return run(__doc__, "wan_hybrid", arguments)


if __name__ == "__main__":
    script(main)
