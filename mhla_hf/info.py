"""What `mhla-hf info` says of a saved MHLA model, from its files alone: no weight is loaded."""

import dataclasses
from pathlib import Path

from huggingface_hub import ModelCard
from safetensors import safe_open

from .checkpoints.files import read_json
from .checkpoints.load import load_config, wrap_errors
from .checkpoints.save import CARD_FILE
from .evaluation.records import Results, format_score
from .planning import MIB, cache_of_saved
from .share.facts import PERSON_FILE, read_model, section_of
from .training.run_folder import RECORD

TOKENS = 1024  # at which the cache is told
SHOWN = 5  # scores
EVALUATED = {"language": "recall", "image": "RECIPE", "pipeline": "RECIPE"}  # kinds that mhla-hf evaluate takes
FORM = (
    "mixing_form",
    "num_decays",
    "local",
    "block_size",
    "num_blocks",
    "layout",
    "feature_map",
    "normalize",
    "gate",
    "cpe",
)


def describe_model(folder) -> dict:
    """What a saved MHLA model or pipeline is: plain values for JSON, which `render_info` makes readable.

    "cache": bytes of one sequence at 1,024 tokens, of converted decoders whose state does not grow. "base": of the card or
    of the training record. ValueError, one sentence: there is no such model.
    """
    folder = Path(folder)
    kind, class_name, config = read_model(folder)
    settings, count = config["mhla"], config.get("num_hidden_layers") or config.get("num_layers")
    parameters, size = count_weights(folder)
    train, person = read_json(folder / RECORD) or {}, read_json(folder / PERSON_FILE) or {}
    base = person.get("base_model") or train.get("teacher")
    if base is None and (folder / CARD_FILE).is_file():
        base = ModelCard.load(folder / CARD_FILE, ignore_metadata_errors=True).data.get("base_model")
    scores = [dataclasses.asdict(record) for record in Results.read(folder) if section_of(record)]
    return {
        "folder": str(folder),
        "class": class_name,
        "kind": kind,
        "base": base,
        "mhla_layers": settings["layers"],
        "layers": count,
        "form": describe_form(settings),
        "parameters": parameters,
        "bytes": size,
        "dtype": config.get("dtype"),
        "positions": config.get("max_position_embeddings"),
        "cache": cache_of_saved(load_config(folder), TOKENS) if kind == "language" else None,
        "trained": {key: train[key] for key in ("steps", "tokens", "seconds") if key in train} or None,
        "scores": scores,
    }


def describe_form(settings) -> dict:
    """The settings of the attention that say something: neither off nor of another form."""
    unused = {"block_size", "num_blocks"} if settings.get("layout") else set()
    unused |= set() if settings["mixing_form"] == "decay" else {"num_decays"}
    return {name: settings[name] for name in FORM if name not in unused and settings.get(name) not in (None, False, 0)}


def count_weights(folder) -> tuple[int, int]:
    """(parameters, bytes) of all safetensors files, from their headers."""
    parameters, size = 0, 0
    for file in sorted(folder.rglob("*.safetensors")):
        size += file.stat().st_size
        with wrap_errors(f"{file} is no whole safetensors file"), safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118
                count = 1
                for side in weights.get_slice(name).get_shape():
                    count *= side
                parameters += count
    return parameters, size


def render_info(record) -> str:
    """The record as some ten lines."""
    form = ", ".join(f"{name} {value}" for name, value in record["form"].items())
    lines = [
        f"{record['folder']}: {record['class']}" + (f", from {record['base']}" if record["base"] else ""),
        f"layers:     {len(record['mhla_layers'])} of {record['layers']} are MHLA: "
        + ", ".join(map(str, record["mhla_layers"])),
        f"form:       {form}",
        f"weights:    {record['parameters']:,} parameters, {record['bytes'] / MIB:,.1f} MiB"
        + (f", {record['dtype']}" if record["dtype"] else ""),
    ]
    if record["positions"]:
        lines.append(f"positions:  {record['positions']:,}")
    if record["cache"]:
        own, softmax = (record["cache"][name] / MIB for name in ("mhla", "softmax"))
        lines.append(f"cache:      {own:.2f} MiB a sequence at {TOKENS:,} tokens, {softmax:.2f} MiB with softmax alone")
    if record["trained"]:
        lines.append("trained:    " + ", ".join(f"{value:,.0f} {name}" for name, value in record["trained"].items()))
    for score in record["scores"][:SHOWN]:
        limit = "" if score["limit"] is None else f", limit {score['limit']}"
        value = format_score(score["value"], score["stderr"])
        lines.append(f"score:      {score['task']} {score['metric']} {value} ({score['samples']} samples{limit})")
    more = len(record["scores"]) - SHOWN
    if not record["scores"]:
        recipe = EVALUATED.get(record["kind"])
        advice = recipe and f"; mhla-hf evaluate {record['folder']} --recipe {recipe}"
        lines.append(f"score:      none{advice or ''}")
    elif more > 0:
        lines.append(f"            and {more} more in results.json")
    return "\n".join(lines)
