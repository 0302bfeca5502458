"""Estimate the memory and the disk that recipes need for the models that they start from: python -m experiments.recipe_costs

Nothing is downloaded: the sizes of the bases are below. Peaks are those of `estimate_diffusion_costs` and `estimate_costs`,
which `tests/training/test_diffusion_costs.py` and `test_costs.py` compare with steps that run.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from mhla_hf.checkpoints.file_io import read_json, write_json
from mhla_hf.checkpoints.provenance import describe_run
from mhla_hf.cli import script
from mhla_hf.conversion import convert
from mhla_hf.models.configuration import MHLAConfig
from mhla_hf.models.language import MHLAForCausalLM
from mhla_hf.planning import model_without_weights
from mhla_hf.training.costs import count_active_parameters, estimate_costs
from mhla_hf.training.diffusion_costs import estimate_diffusion_costs
from mhla_hf.training.recipe import Recipe, read_recipe, recipe_names

WAN_VAE = {"_class_name": "AutoencoderKLWan"}
WAN_1B = {
    "_class_name": "WanTransformer3DModel",
    "num_layers": 30,
    "num_attention_heads": 12,
    "attention_head_dim": 128,
    "ffn_dim": 8960,
}
WAN_14B = {**WAN_1B, "num_layers": 40, "num_attention_heads": 40, "ffn_dim": 13824}
DIT_XL = {"_class_name": "DiTTransformer2DModel", "num_layers": 28, "out_channels": 8}
SANA_600M = {
    "_class_name": "SanaTransformer2DModel",
    "num_layers": 28,
    "num_attention_heads": 36,
    "attention_head_dim": 32,
    "num_cross_attention_heads": 16,
    "cross_attention_head_dim": 72,
    "cross_attention_dim": 1152,
    "sample_size": 16,
}
PIPELINES = {  # base -> configurations of its transformer and VAE, where they differ from diffusers' defaults
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": (WAN_1B, WAN_VAE),
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": (WAN_14B, WAN_VAE),
    "facebook/DiT-XL-2-256": (DIT_XL, {"_class_name": "AutoencoderKL"}),
    "Efficient-Large-Model/Sana_600M_512px_diffusers": (SANA_600M, {"_class_name": "AutoencoderDC"}),
}
SMOLLM2 = {  # HuggingFaceTB/SmolLM2-1.7B
    "vocab_size": 49152,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
CARDS = (24, 40, 80)  # memory of GPUs, in GB
SPARE = 2.0  # GB that CUDA, its allocator, and the text encoder's last batch may take


def estimate(recipe: Recipe) -> dict[str, Any] | None:
    """Return the costs of a recipe for its base; None for recipes without one, and for those of other models."""
    settings = dict(recipe.settings)
    if recipe.base in PIPELINES and "preset" not in settings:
        return estimate_diffusion_costs(*PIPELINES[recipe.base], recipe)
    if recipe.task != "language" or (recipe.base is None and "preset" not in settings):
        return None
    if "preset" in settings:
        with torch.device("meta"):
            student = MHLAForCausalLM(MHLAConfig.preset(settings.pop("preset"), **settings))
        return estimate_costs(student, recipe, student.num_parameters(), count_active_parameters(student), None)
    student = model_without_weights(LlamaConfig(**SMOLLM2))
    sizes = student.num_parameters(), count_active_parameters(student)
    return estimate_costs(convert(student, **settings), recipe, *sizes, None)


def make_row(name: str) -> dict[str, Any] | None:
    """Return the row of a recipe, with a list of its stages; None if its costs cannot be estimated."""
    recipe = read_recipe(name)
    costs = estimate(recipe)
    if costs is None:
        return None
    stages = []
    for stage, estimated in zip(recipe.stages, costs["stages"], strict=True):
        states = sum(size for purpose, size in estimated["memory"].items() if purpose not in ("activations", "logits"))
        sizes = {"states": states, "peak": sum(estimated["memory"].values()), "disk": estimated.get("disk")}
        stages.append({"name": stage.name, "steps": stage.steps, "samples": stage.batch_size, **sizes})
    return {"recipe": name, "base": recipe.base, "processes": recipe.processes, "stages": stages}


def render_costs(record: Mapping[str, Any]) -> str:
    """Render the rows as a table: one line per recipe."""
    lines = ["| recipe | GPUs | peak, GB (before activations) | samples | hours | disk, GB |", "|---" * 6 + "|"]
    for row in record["rows"]:
        stages = row["stages"]
        peak = max(stage["peak"] for stage in stages) / 1e9
        states = max(stage["states"] for stage in stages) / 1e9
        card = next((f"{card} GB" for card in CARDS if peak + SPARE <= card), "more than 80 GB")
        samples = sum(stage["steps"] * stage["samples"] for stage in stages)
        seconds = " + ".join(f"{stage['steps']:,} {letter}" for stage, letter in zip(stages, "ab", strict=False))
        hours = f"({seconds}) / 3,600" if len(stages) > 1 else f"{seconds} / 3,600"
        disk = max(stage["disk"] or 0 for stage in stages) / 1e9
        cells = [
            f"`{row['recipe']}`",
            f"{row['processes']} of {card}",
            f"{peak:.1f} ({states:.1f})",
            f"{samples:,}",
            hours,
        ]
        lines.append(f"| {' | '.join(cells)} | {f'{disk:.0f}' if disk else ''} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Estimate, write the record, and return it."""
    parser = argparse.ArgumentParser("python -m experiments.recipe_costs", description=__doc__)
    parser.add_argument("--out", default="docs/recipes/costs.json", help="JSON file to write")
    parser.add_argument(
        "--recipes", nargs="+", default=recipe_names(), help="names (default: all); other rows are kept"
    )
    options = parser.parse_args(arguments)
    record: dict[str, Any] = read_json(Path(options.out)) or {}
    command = "python -m experiments.recipe_costs"
    for name in options.recipes:
        rows = {row["recipe"]: row for row in record.get("rows", ())} | {name: make_row(name)}
        kept = [rows[name] for name in recipe_names() if rows.get(name)]
        record = {**describe_run(command, torch.device("cpu")), "rows": kept}
        write_json(options.out, record)
    print(render_costs(record))
    return record


if __name__ == "__main__":
    script(main)
