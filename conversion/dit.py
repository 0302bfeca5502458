"""Train a DiT with MHLA, from scratch or from a pretrained one: load, convert, train, evaluate, write the card.

    torchrun --nproc_per_node 8 conversion/dit.py --data LATENTS --out out/dit-s                       from scratch
    torchrun --nproc_per_node 8 conversion/dit.py --recipe dit_finetune --data LATENTS --out out/xl
    python conversion/dit.py --recipe dit_distill --out out/dit                 without any data

From scratch, only the VAE and the noise schedule come from the base. LATENTS has `latents` and `class_labels`; without it,
the softmax original samples images of random classes. The steps are in `journey.py`.
"""

from typing import Any

from journey import run

from mhla_hf.cli.main import script


def main(arguments: list[str] | None = None) -> Any:
    """Run the script, and return the trained pipeline."""
    return run(__doc__, "dit_paper", arguments)


if __name__ == "__main__":
    script(main)
