"""Describe a saved MHLA model from its files, without loading weights, for `mhla-hf info`."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from .checkpoints.file_io import PathLike, read_json
from .checkpoints.load import load_config, wrap_errors
from .checkpoints.save import CARD_FILE
from .evaluation.records import Results, format_score
from .hub.facts import PERSON_FILE, read_model, section_of
from .models.derived_classes import attention_sizes
from .planning import MIB, compare_saved_caches
from .training.run_folder import RECORD

CACHE_TOKENS = 1024  # sequence length for which the size of the cache is reported, if the model has as many positions
MAX_SCORES = 5  # number of scores that are printed
# Kinds of model that mhla-hf evaluate supports -> the recipe to suggest.
EVALUATION_RECIPES = {"language": "recall", "image": "RECIPE", "pipeline": "RECIPE"}
SHOWN_SETTINGS = (
    "mixing_form", "num_decays", "local", "block_size", "num_blocks", "layout", "feature_map", "normalize", "gate", "cpe",
)  # fmt: skip


def describe_model(folder: PathLike) -> dict[str, Any]:
    """Describe a saved MHLA model or pipeline.

    Returns:
        A JSON-serializable dict, which `render_info` renders as text. "base" is taken from `card.json`, else from the
        training record, else from the model card. "kv_heads" is what `count_kv_heads` returns for a language model. "cache"
        has the cache sizes in bytes at "tokens" tokens, 1,024 or the model's positions; it is None except for converted
        decoders whose state has a fixed size.

    Raises:
        ValueError: `folder` contains no saved MHLA model, or one of its files is damaged.
    """
    folder = Path(folder)
    kind, class_name, config = read_model(folder)
    settings = config["mhla"]
    parameters, size = count_weights(folder)
    train = read_json(folder / RECORD) or {}
    person = read_json(folder / PERSON_FILE) or {}
    base = person.get("base_model") or train.get("teacher")
    if base is None and (folder / CARD_FILE).is_file():
        base = ModelCard.load(folder / CARD_FILE, ignore_metadata_errors=True).data.get("base_model")
    return {
        "folder": str(folder),
        "class": class_name,
        "kind": kind,
        "base": base,
        "mhla_layers": settings["layers"],
        "layers": config.get("num_hidden_layers") or config.get("num_layers"),
        "kv_heads": count_kv_heads(load_config(folder)) if kind == "language" else None,
        "form": describe_form(settings),
        "parameters": parameters,
        "bytes": size,
        "dtype": config.get("dtype"),
        "positions": config.get("max_position_embeddings"),
        "cache": compare_saved_caches(load_config(folder), CACHE_TOKENS) if kind == "language" else None,
        "trained": {key: train[key] for key in ("steps", "tokens", "seconds") if key in train} or None,
        "scores": [dataclasses.asdict(record) for record in Results.read(folder) if section_of(record)],
    }


def count_kv_heads(config: Any) -> dict[str, int] | None:
    """Count the KV heads in all attention layers of a converted decoder, also in those that stayed softmax.

    Returns:
        A dict with "softmax", the number that keep softmax, and "all". None for a model from scratch.
    """
    if not hasattr(config, "base_model_type"):
        return None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    attentions = model.swap.find_attentions(model)
    counts = {index: attention_sizes(attention, config)["num_kv_heads"] for index, attention in attentions.items()}
    kept_heads = config.mhla["softmax_heads"] or {}
    kept = [len(kept_heads.get(str(i), ())) if i in config.mhla["layers"] else count for i, count in counts.items()]
    return {"softmax": sum(kept), "all": sum(counts.values())}


def describe_form(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dict of those `SHOWN_SETTINGS` that apply to the model's form of mixing and are not None, False, or 0."""
    unused: set[str] = set()
    if settings.get("layout"):
        unused.update(("block_size", "num_blocks"))
    if settings["mixing_form"] != "decay":
        unused.add("num_decays")
    names = (name for name in SHOWN_SETTINGS if name not in unused)
    return {name: settings[name] for name in names if settings.get(name) not in (None, False, 0)}


def count_weights(folder: Path) -> tuple[int, int]:
    """Count the parameters in all safetensors files of a folder and its subfolders, by reading only the files' headers.

    Returns:
        The number of parameters, and the size of the files in bytes.

    Raises:
        ValueError: A file is damaged.
    """
    parameters = 0
    size = 0
    for file in sorted(folder.rglob("*.safetensors")):
        size += file.stat().st_size
        with (
            wrap_errors(f"{file}: got a damaged file, expected a complete safetensors file"),
            safe_open(file, framework="pt") as weights,
        ):
            for name in weights.keys():  # noqa: SIM118
                parameters += math.prod(weights.get_slice(name).get_shape())
    return parameters, size


def render_info(record: Mapping[str, Any]) -> str:
    """Render the result of `describe_model` as about ten lines of text."""
    mhla_layers = record["mhla_layers"]
    attention = f"{len(mhla_layers)} of {record['layers']} layers are MHLA"
    if others := sorted({*range(record["layers"])} - {*mhla_layers}):
        few, listed = ("all but ", others) if len(others) < len(mhla_layers) else ("", mhla_layers)
        attention += f" ({few}{', '.join(map(str, listed))})"
    if record["kv_heads"]:
        attention += f", {record['kv_heads']['softmax']} of {record['kv_heads']['all']} KV heads keep softmax"
    form = ", ".join(f"{name} {value}" for name, value in record["form"].items())
    weights = f"{record['parameters']:,} parameters, {record['bytes'] / MIB:,.1f} MiB"
    lines = [
        f"{record['folder']}: {record['class']}" + (f", from {record['base']}" if record["base"] else ""),
        f"attention:  {attention}",
        f"form:       {form}",
        f"weights:    {weights}" + (f", {record['dtype']}" if record["dtype"] else ""),
    ]
    if record["positions"]:
        lines.append(f"positions:  {record['positions']:,}")
    if record["cache"]:
        tokens = record["cache"]["tokens"]
        mhla, softmax = (record["cache"][name] / MIB for name in ("mhla", "softmax"))
        lines.append(
            f"cache:      {mhla:.2f} MiB a sequence at {tokens:,} tokens, {softmax:.2f} MiB with softmax alone"
        )
    if record["trained"]:
        lines.append("trained:    " + ", ".join(f"{value:,.0f} {name}" for name, value in record["trained"].items()))
    for score in record["scores"][:MAX_SCORES]:
        limit = "" if score["limit"] is None else f", limit {score['limit']}"
        value = format_score(score["value"], score["stderr"])
        lines.append(f"score:      {score['task']} {score['metric']} {value} ({score['samples']} samples{limit})")
    num_omitted = len(record["scores"]) - MAX_SCORES
    if not record["scores"]:
        recipe = EVALUATION_RECIPES.get(record["kind"])
        advice = f"; mhla-hf evaluate {record['folder']} --recipe {recipe}" if recipe else ""
        lines.append(f"score:      none{advice}")
    elif num_omitted > 0:
        lines.append(f"            and {num_omitted} more in results.json")
    return "\n".join(lines)
