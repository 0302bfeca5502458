"""DiT with MHLA, from scratch or from a pretrained one: load, convert, train, judge, card.

    torchrun --nproc_per_node 8 conversion/dit.py --data LATENTS --out out/dit-s                       from scratch
    torchrun --nproc_per_node 8 conversion/dit.py --recipe dit_finetune --data LATENTS --out out/xl
    python conversion/dit.py --recipe dit_distill --out out/dit                 without any data

From scratch the base gives VAE and noise schedule only. Latents stand beside `class_labels`; without them the softmax
original samples its own classes. The steps are in `journey.py`; a small real one is `experiments/digits_dit.py`.
"""

from journey import run

from mhla_hf.cli import script


def main(arguments=None):
    """Run the script; returns the trained pipeline."""
    return run(__doc__, "dit_paper", arguments)


if __name__ == "__main__":
    script(main)
