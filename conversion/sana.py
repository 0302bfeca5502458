"""Give Sana MHLA in place of its plain linear attention: load, convert, train, evaluate, write the card.

    torchrun --nproc_per_node 8 conversion/sana.py --data LATENTS --out out/sana
    python conversion/sana.py --data LATENTS --out out/sana --judge table_4_text_to_image --set prompts=P.txt

Uniform mixing is plain linear attention, so the converted model starts with Sana's own outputs, up to rounding. Therefore it
is not distilled; training continues where Sana's ended. LATENTS has `latents` and `prompt`. The steps are in `journey.py`.
"""

from typing import Any

from journey import run

from mhla_hf.cli.main import script


def main(arguments: list[str] | None = None) -> Any:
    """Run the script, and return the trained pipeline."""
    return run(__doc__, "sana_paper", arguments)


if __name__ == "__main__":
    script(main)
