"""Count the parameters of image models and the multiply-adds of a forward pass, beside the paper's table 2.

As usual in papers on image classification, a multiplication and an addition together are one FLOP. The paper counts
projections and convolutions only, at 224 pixels. The models actually run at 256 pixels, to which the input is padded,
and also multiply matrices inside the attention. The table has all of these counts.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mhla_hf.checkpoints.file_io import write_json
from mhla_hf.cli import script
from mhla_hf.models.vision import MHLAForImageClassification
from mhla_hf.models.vision_configuration import MHLAVisionConfig

# of table 2, which has no base model: millions of parameters, billions of FLOPs
PAPER_COSTS = {"deit-t": (5.7, 1.1), "deit-s": (22.0, 4.2), "vlt-t": (16.0, 2.4), "vlt-s": (27.0, 4.6)}


def count_flops(model: Any, height: int, width: int) -> tuple[int, int]:
    """Count the multiply-adds of one image through an image model of transformers, on the model's device.

    Sums, norms, and activations are not counted.

    Args:
        model: The model; its mode and its gradients' flags are restored.
        height, width: Size of the image in pixels.

    Returns:
        All multiply-adds, and those of projections and convolutions. The difference is those between q, k, and v.
    """
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    training, device = model.training, next(model.parameters()).device
    model.eval().requires_grad_(False)  # the counter misses parameters that require gradients
    try:
        pixels = torch.zeros(1, model.config.num_channels, height, width, device=device)
        with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            model(pixels)
    finally:
        model.train(training)
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
    counts = counter.get_flop_counts()["Global"]
    attention = sum(count for operator, count in counts.items() if "bmm" in str(operator))
    total = counter.get_total_flops()
    return total // 2, (total - attention) // 2


def classifier_costs(
    presets: Sequence[str] = ("deit-t", "deit-s", "deit-b", "vlt-t", "vlt-s"), size: int = 224
) -> list[dict[str, Any]]:
    """Count parameters and multiply-adds of image classifiers.

    Args:
        presets: Presets of `MHLAVisionConfig`.
        size: Side of the image in pixels.

    Returns:
        One dict for each preset and kind of attention, with "preset", "attention", "parameters", "flops" (all
        multiply-adds), "outside" (those of projections and convolutions), "padded_size", "padded_flops", and for MHLA
        "paper_parameters" and "paper_flops".
    """
    rows = []
    for name in presets:
        for attention in ("mhla", "linear", "softmax"):
            config = MHLAVisionConfig.preset(name, attention=attention, pad_to_blocks=False)
            model = MHLAForImageClassification(config)
            row: dict[str, Any] = {"preset": name, "attention": attention}
            row["flops"], row["outside"] = count_flops(model, size, size)
            padded_size, _ = MHLAVisionConfig.preset(name).padded_sides(size, size)
            row["padded_size"] = padded_size
            with torch.device("meta"):
                sized_config = MHLAVisionConfig.preset(name, attention=attention, image_size=size)
                row["parameters"] = MHLAForImageClassification(sized_config).num_parameters()
            if padded_size == size:
                row["padded_flops"] = row["flops"]
            else:
                row["padded_flops"], _ = count_flops(model, padded_size, padded_size)
            if attention == "mhla" and name in PAPER_COSTS:
                millions, billions = PAPER_COSTS[name]
                row["paper_parameters"] = int(millions * 1e6)
                row["paper_flops"] = int(billions * 1e9)
            rows.append(row)
    return rows


def costs_table(rows: Sequence[dict[str, Any]]) -> str:
    """Render the rows of `classifier_costs` in Markdown."""
    lines = [
        "| model | attention | parameters | the paper's | G multiply-adds at 224 | outside the attention "
        "| padded to 256 | the paper's |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        paper_parameters = f"{row['paper_parameters'] / 1e6:g} M" if "paper_parameters" in row else ""
        paper_flops = f"{row['paper_flops'] / 1e9:.1f}" if "paper_flops" in row else ""
        padded = f"{row['padded_flops'] / 1e9:.2f}" if row["padded_size"] == 256 else "not padded"
        lines.append(
            f"| {row['preset']} | {row['attention']} | {row['parameters'] / 1e6:.2f} M | {paper_parameters} "
            f"| {row['flops'] / 1e9:.2f} | {row['outside'] / 1e9:.2f} | {padded} | {paper_flops} |"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Run the script, and return the rows."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser("python -m experiments.costs", description=__doc__)
    parser.add_argument("--out", help="JSON file to write")
    args = parser.parse_args(arguments)
    rows = classifier_costs()
    print(costs_table(rows))
    if args.out is not None:
        command = shlex.join(["python", "-m", "experiments.costs", *arguments])
        write_json(args.out, {"command": command, "rows": rows})
    return rows


if __name__ == "__main__":
    script(main, "costs")
