"""Describe a saved MHLA model, or what a conversion would make of a softmax language model, for `mhla-hf info`.

No weights are loaded: parameters are counted from safetensors headers or, like cache sizes, on the meta device.
"""

import copy
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
from .conversion import convert
from .conversion.model_family import softmax_config
from .conversion.sizes import mhla_bytes, softmax_bytes
from .conversion.transformers_models import family_to_convert, reason_to_keep_softmax
from .evaluation.records import Results, format_score
from .hub.facts import PERSON_FILE, read_model, section_of
from .models.derived_classes import attention_sizes
from .models.families import ENCODERS, VISION
from .models.language.causal_attention import find_causal_attentions
from .training.run_folder import RECORD

MIB = 2**20
KEEP = 1 / 6  # share of KV heads that keep softmax when the conversion of a softmax model is described
MAX_SCORES = 5  # largest number of scores that are printed
# Kind of model that `mhla-hf evaluate` supports -> recipe that `mhla-hf info` suggests, or a placeholder for one.
EVALUATION_RECIPES = {"language": "recall", "image": "RECIPE", "pipeline": "RECIPE"}
SHOWN_SETTINGS = (
    "mixing_form", "windowed", "window", "salient", "block_size", "num_blocks", "layout", "feature_map", "normalize",
    "gate", "cpe",
)  # fmt: skip


def describe_model(model: PathLike, context: int = 1024, revision: str | None = None) -> dict[str, Any]:
    """Describe a saved MHLA model or pipeline, or a softmax language model and its conversion, as a dict for JSON.

    For converted or convertible language models, "kept_layers" maps reasons to the layers that keep softmax, "kv_heads"
    counts all KV heads and those that keep softmax, and "cache" has the bytes of one sequence of at most `context` tokens
    with MHLA and with softmax alone. Raise ValueError for other softmax models and for MHLA models on the Hub.
    """
    folder = Path(model)
    stored = read_json(folder / "config.json") or {}
    loaded = load_config(model, revision=revision) if "model_type" in stored or not folder.is_dir() else None
    if loaded is not None and (getattr(loaded, "mhla", None) is None or not stored):
        start = f"model: got {str(model)!r}"
        if getattr(loaded, "mhla", None) is not None:
            raise ValueError(f"{start}, an MHLA model on the Hub, expected a local folder: download the model first.")
        if (family := family_to_convert(loaded.model_type)) in (*ENCODERS, *VISION):
            kind = "a vision tower" if family in VISION else "a text encoder"
            raise ValueError(f"{start}, {kind}, expected a causal language model or an MHLA model.")
        return {
            "model": str(model),
            "class": (loaded.architectures or [loaded.model_type])[0],
            "kind": "softmax",
            "layers": loaded.num_hidden_layers,
            **compare_with_softmax(loaded, None, context),
            "positions": getattr(loaded, "max_position_embeddings", None),
        }
    kind, class_name, config = read_model(folder)
    settings = config["mhla"]
    parameters, size = count_weights(folder)
    train = read_json(folder / RECORD) or {}
    person = read_json(folder / PERSON_FILE) or {}
    base = person.get("base_model") or train.get("teacher")
    if base is None and (folder / CARD_FILE).is_file():
        base = ModelCard.load(folder / CARD_FILE, ignore_metadata_errors=True).data.get("base_model")
    is_decoder = kind == "language" and hasattr(loaded, "base_model_type")
    compared = compare_with_softmax(softmax_config(loaded), loaded, context) if is_decoder else {}
    return {
        "model": str(model),
        "class": class_name,
        "kind": kind,
        "base": base,
        "mhla_layers": settings["layers"],
        "layers": config.get("num_hidden_layers") or config.get("num_layers"),
        **compared,
        "form": describe_form(settings),
        "parameters": parameters,
        "bytes": size,
        "dtype": config.get("dtype"),
        "positions": config.get("max_position_embeddings"),
        "trained": {key: train[key] for key in ("steps", "tokens", "seconds") if key in train} or None,
        "scores": [dataclasses.asdict(record) for record in Results.read(folder) if section_of(record)],
    }


def compare_with_softmax(config: Any, converted: Any, context: int) -> dict[str, Any]:
    """Compare layers, KV heads, and cache of a softmax language model and a converted one, given their configurations.

    If `converted` is None, describe what `mhla-hf convert --keep 1/6` would make.
    """
    with torch.device("meta"):
        original, student = (
            AutoModelForCausalLM.from_config(copy.deepcopy(x)).eval() for x in (config, converted or config)
        )
    attentions = find_causal_attentions(original)
    reasons = {index: reason_to_keep_softmax(attention, config) for index, attention in attentions.items()}
    settings = (student if converted else convert(student, layers="all")).config.mhla
    layers = settings["layers"]
    kept_layers: dict[str, list[int]] = {}
    for index in sorted({*range(config.num_hidden_layers)} - {*layers}):
        reason = reasons.get(index, "it has no softmax attention") or "by the choice of layers or heads"
        kept_layers.setdefault(reason, []).append(index)
    heads = {index: attention_sizes(attention, config)["num_kv_heads"] for index, attention in attentions.items()}
    num_convertible = sum(heads[index] for index in layers)
    num_kept = sum(map(len, (settings["softmax_heads"] or {}).values())) if converted else round(KEEP * num_convertible)
    kv_heads = {"softmax": sum(heads.values()) - num_convertible + num_kept, "all": sum(heads.values())}
    record: dict[str, Any] = {"mhla_layers": layers, "kept_layers": kept_layers, "kv_heads": kv_heads, "cache": None}
    if settings["windowed"]:
        tokens = int(min(context, getattr(config, "max_position_embeddings", None) or math.inf))
        softmax = softmax_bytes(original, tokens)
        unconverted = sum(softmax) - sum(softmax[index] for index in layers)
        share = None if converted else num_kept / num_convertible
        mhla = unconverted + sum(mhla_bytes(student, tokens, share).values())
        record["cache"] = {"tokens": tokens, "softmax": sum(softmax), "mhla": mhla}
        if not converted:
            record["cache"]["mhla_alone"] = unconverted + sum(mhla_bytes(student, tokens, 0).values())
    if not converted:
        record |= {"parameters": original.num_parameters(), "dtype": str(original.dtype).removeprefix("torch.")}
    return record


def describe_form(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return those `SHOWN_SETTINGS` that apply to the model and are not None, False or 0."""
    unused = ["block_size", "num_blocks"] if settings.get("layout") else []
    if settings["windowed"]:  # sequences have no `mixing_form` then, and with `salient` no feature map
        unused += ["num_blocks"] + (["mixing_form"] if not settings.get("layout") else [])
        unused += ["feature_map", "normalize"] if settings.get("salient") else []
    else:
        unused += ["window"]
    names = (name for name in SHOWN_SETTINGS if name not in unused)
    return {name: settings[name] for name in names if settings.get(name) not in (None, False, 0)}


def count_weights(folder: Path) -> tuple[int, int]:
    """Count the parameters and bytes of all safetensors files below a folder. Raise ValueError if a file is damaged."""
    parameters = size = 0
    for file in sorted(folder.rglob("*.safetensors")):
        size += file.stat().st_size
        message = f"{file}: got a damaged file, expected a complete safetensors file"
        with wrap_errors(message), safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118
                parameters += math.prod(weights.get_slice(name).get_shape())
    return parameters, size


def render_info(record: Mapping[str, Any]) -> str:
    """Render the result of `describe_model` as about ten lines of text."""
    is_softmax, cache, heads = record["kind"] == "softmax", record.get("cache"), record.get("kv_heads")
    mhla_layers = record["mhla_layers"]
    attention = f"{len(mhla_layers)} of {record['layers']} layers {'can become' if is_softmax else 'are'} MHLA"
    if others := sorted({*range(record["layers"])} - {*mhla_layers}):
        few, listed = ("all but ", others) if len(others) < len(mhla_layers) else ("", mhla_layers)
        attention += f" ({few}{', '.join(map(str, listed))})"
    if heads:
        attention += f", {heads['softmax']} of {heads['all']} KV heads keep softmax"
    start = f"{record['model']}: {record['class']}" + (f", from {record['base']}" if record.get("base") else "")
    lines = [start, f"attention:  {attention}{' with --keep 1/6' if is_softmax else ''}"]
    for reason, layers in record.get("kept_layers", {}).items():
        lines.append(f"softmax:    layers {', '.join(map(str, layers))}: {reason}")
    if not is_softmax:
        lines.append("form:       " + ", ".join(f"{name} {value}" for name, value in record["form"].items()))
    size = f", {record['bytes'] / MIB:,.1f} MiB" if "bytes" in record else ""
    dtype = f", {record['dtype']}" if record["dtype"] else ""
    lines.append(f"weights:    {record['parameters']:,} parameters{size}{dtype}")
    if record["positions"]:
        lines.append(f"positions:  {record['positions']:,}")
    if cache:
        mhla, softmax = (f"{cache[name] / MIB:,.2f} MiB" for name in ("mhla", "softmax"))
        alone = f", {cache['mhla_alone'] / MIB:,.2f} MiB without softmax heads" if is_softmax else ""
        at = f"{cache['tokens']:,} tokens"
        lines.append(f"cache:      {mhla} a sequence at {at}, {softmax} with softmax alone{alone}")
    if is_softmax:
        return "\n".join([*lines, f"convert:    mhla-hf convert {record['model']} OUT --text FILE --keep 1/6"])
    if record["trained"]:
        lines.append("trained:    " + ", ".join(f"{value:,.0f} {name}" for name, value in record["trained"].items()))
    for score in record["scores"][:MAX_SCORES]:
        limit = "" if score["limit"] is None else f", limit {score['limit']}"
        value = format_score(score["value"], score["stderr"])
        lines.append(f"score:      {score['task']} {score['metric']} {value} ({score['samples']} samples{limit})")
    num_omitted = len(record["scores"]) - MAX_SCORES
    if not record["scores"]:
        recipe = EVALUATION_RECIPES.get(record["kind"])
        advice = f"; mhla-hf evaluate {record['model']} --recipe {recipe}" if recipe else ""
        lines.append(f"score:      none{advice}")
    elif num_omitted > 0:
        lines.append(f"            and {num_omitted} more in results.json")
    return "\n".join(lines)
