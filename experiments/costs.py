"""What an image model costs: parameters and multiply-adds of one forward pass, beside the paper's table 2.

Papers on image classification call one multiplication with its addition one FLOP; so does this file. The paper's
figures are those of the 224 pixels that go in, and of projections and convolutions alone; what runs are the 256 pixels that
they are padded to, and the products inside the attention as well. All are given.
"""

import argparse
import shlex
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mhla_hf.checkpoints.file_io import write_json
from mhla_hf.cli import script
from mhla_hf.models.vision import MHLAForImageClassification
from mhla_hf.models.vision_configuration import MHLAVisionConfig

# table 2: parameters in millions, FLOPs in billions; it has no base model
PAPER_COSTS = {"deit-t": (5.7, 1.1), "deit-s": (22.0, 4.2), "vlt-t": (16.0, 2.4), "vlt-s": (27.0, 4.6)}


def count_flops(model, height: int, width: int) -> tuple[int, int]:
    """Multiply-adds of one image of `height` x `width` pixels through an image model of transformers, on its device.

    Returns (all, those of projections and convolutions): the difference is what happens between q, k and v. Sums, norms and
    activations do not count.
    """
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    training, device = model.training, next(model.parameters()).device
    model.eval().requires_grad_(False)  # the counter cannot see parameters that want gradients
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


def classifier_costs(presets=("deit-t", "deit-s", "deit-b", "vlt-t", "vlt-s"), size: int = 224) -> list[dict]:
    """A row per preset and kind of attention: parameters and multiply-adds at `size` and at the size it is padded to.

    Keys: preset, attention, parameters, flops, outside (of the attention's own products), padded_size, padded_flops, and
    paper_parameters and paper_flops of MHLA.
    """
    rows = []
    for name in presets:
        for attention in ("mhla", "linear", "softmax"):
            config = MHLAVisionConfig.preset(name, attention=attention, pad_to_blocks=False)
            model = MHLAForImageClassification(config)
            row = {"preset": name, "attention": attention}
            row["flops"], row["outside"] = count_flops(model, size, size)
            padded = MHLAVisionConfig.preset(name)
            row["padded_size"] = padded.padded_sides(size, size)[0]
            with torch.device("meta"):
                row["parameters"] = MHLAForImageClassification(
                    MHLAVisionConfig.preset(name, attention=attention, image_size=size)
                ).num_parameters()
            row["padded_flops"] = (
                row["flops"] if row["padded_size"] == size else count_flops(model, *[row["padded_size"]] * 2)[0]
            )
            if attention == "mhla" and name in PAPER_COSTS:
                millions, billions = PAPER_COSTS[name]
                row |= {"paper_parameters": int(millions * 1e6), "paper_flops": int(billions * 1e9)}
            rows.append(row)
    return rows


def costs_table(rows) -> str:
    """The rows of `classifier_costs` in Markdown."""
    lines = [
        "| model | attention | parameters | the paper's | G multiply-adds at 224 | outside the attention "
        "| padded to 256 | the paper's |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        paper = (row.get("paper_parameters"), row.get("paper_flops"))
        millions = f"{paper[0] / 1e6:g} M" if paper[0] else ""
        billions = f"{paper[1] / 1e9:.1f}" if paper[1] else ""
        padded = f"{row['padded_flops'] / 1e9:.2f}" if row["padded_size"] == 256 else "not padded"
        lines.append(
            f"| {row['preset']} | {row['attention']} | {row['parameters'] / 1e6:.2f} M | {millions} "
            f"| {row['flops'] / 1e9:.2f} | {row['outside'] / 1e9:.2f} | {padded} | {billions} |"
        )
    return "\n".join(lines)


def main(arguments=None):
    """Count and print; returns the rows."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser("python -m experiments.costs", description=__doc__)
    parser.add_argument("--out", help="JSON file to write")
    given = parser.parse_args(arguments)
    rows = classifier_costs()
    print(costs_table(rows))
    if given.out is not None:
        command = shlex.join(["python", "-m", "experiments.costs", *arguments])
        write_json(given.out, {"command": command, "rows": rows})
    return rows


if __name__ == "__main__":
    script(main, "costs")
