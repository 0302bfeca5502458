"""Sana with MHLA in place of its plain linear attention: load, convert, train, judge, card.

    torchrun --nproc_per_node 8 conversion/sana.py --data LATENTS --out out/sana
    python conversion/sana.py --data LATENTS --out out/sana --judge table_4_text_to_image --set prompts=P.txt

The converted model starts as the stock one, to rounding: uniform mixing is plain linear attention. So there is nothing to
transfer, and training goes on from where Sana's ended. Latents stand beside a `prompt`; the steps are in `journey.py`.
"""

from journey import run

from mhla_hf.cli import script


def main(arguments=None):
    """Run the script; returns the trained pipeline."""
    return run(__doc__, "sana_paper", arguments)


if __name__ == "__main__":
    script(main)
