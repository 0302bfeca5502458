"""Estimate the memory and the disk that recipes need for the models that they start from: python -m experiments.recipe_costs

Nothing is downloaded: the sizes of the bases are below. Peaks are those of `estimate_diffusion_costs`,
`estimate_transformers_costs`, and `estimate_costs`, which `tests/training/test_diffusion_costs.py`,
`test_transformers_costs.py`, and `test_costs.py` compare with steps that run.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, LlamaConfig, SiglipVisionConfig, ViTConfig

from mhla_hf.checkpoints.file_io import read_json, write_json
from mhla_hf.checkpoints.provenance import describe_run
from mhla_hf.cli import script
from mhla_hf.training.diffusion_costs import estimate_diffusion_costs
from mhla_hf.training.recipe import Recipe, read_recipe, recipe_names
from mhla_hf.training.transformers_costs import estimate_transformers_costs

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
MODELS = {  # base -> configuration, where it differs from transformers' defaults
    "HuggingFaceTB/SmolLM2-1.7B": LlamaConfig(
        vocab_size=49152,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=24,
        num_attention_heads=32,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
    "HuggingFaceTB/SmolLM2-135M": LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
    "sentence-transformers/all-MiniLM-L6-v2": BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
    ),
    "facebook/deit-small-patch16-224": ViTConfig(
        hidden_size=384,
        num_attention_heads=6,
        intermediate_size=1536,
        num_labels=1000,
        architectures=["ViTForImageClassification"],
    ),
    "google/siglip-base-patch16-224": SiglipVisionConfig(),
}
EXAMPLES = {  # recipe that names no base -> one of the above
    "encoder": "sentence-transformers/all-MiniLM-L6-v2",
    "language_cpu": "HuggingFaceTB/SmolLM2-135M",
}
CARDS = (8, 16, 24, 40, 80)  # memory of GPUs, in GB
SPARE = 2.0  # GB that CUDA, its allocator, and the text encoder's last batch may take


def estimate(recipe: Recipe, base: str | None) -> dict[str, Any]:
    """Return the costs of a recipe for a base, None for a recipe from scratch."""
    if recipe.task == "diffusion":
        return estimate_diffusion_costs(*PIPELINES[str(base)], recipe)
    return estimate_transformers_costs(MODELS.get(str(base)), recipe)


def make_row(name: str) -> dict[str, Any]:
    """Return the row of a recipe, with a list of its stages."""
    recipe = read_recipe(name)
    base = recipe.base or EXAMPLES.get(name)
    costs = estimate(recipe, base)
    stages = []
    for stage, estimated in zip(recipe.stages, costs["stages"], strict=True):
        states = sum(size for purpose, size in estimated["memory"].items() if purpose not in ("activations", "logits"))
        sizes = {"states": states, "peak": sum(estimated["memory"].values()), "disk": estimated["disk"]}
        stages.append({"name": stage.name, "steps": stage.steps, "samples": stage.batch_size, **sizes})
    return {"recipe": name, "base": base, "processes": recipe.processes, "stages": stages}


def render_costs(record: Mapping[str, Any]) -> str:
    """Render the rows as a table: one line per recipe."""
    lines = ["| recipe | devices | peak, GB (before activations) | samples | hours | disk, GB |", "|---" * 6 + "|"]
    for row in record["rows"]:
        stages = row["stages"]
        peak = max(stage["peak"] for stage in stages) / 1e9
        states = max(stage["states"] for stage in stages) / 1e9
        card = next((f"{card} GB" for card in CARDS if peak + SPARE <= card), "more than 80 GB")
        samples = sum(stage["steps"] * stage["samples"] for stage in stages)
        seconds = " + ".join(f"{stage['steps']:,} {letter}" for stage, letter in zip(stages, "ab", strict=False))
        hours = f"({seconds}) / 3,600" if len(stages) > 1 else f"{seconds} / 3,600"
        disk = max(stage["disk"] for stage in stages) / 1e9
        cells = [
            f"`{row['recipe']}`",
            f"{row['processes']} of {card}",
            f"{peak:.1f} ({states:.1f})",
            f"{samples:,}",
            hours,
            f"{disk:.{disk < 10:d}f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
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
        kept = [rows[name] for name in recipe_names() if name in rows]
        record = {**describe_run(command, torch.device("cpu")), "rows": kept}
        write_json(options.out, record)
    print(render_costs(record))
    return record


if __name__ == "__main__":
    script(main)
